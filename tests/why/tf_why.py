"""TensorFlow's side of test_why.py: a small model, its plain step, and planted causes."""

from __future__ import annotations

import time

import tensorflow as tf

from tf_impl.kit import training

WIDTH, SAMPLES = 64, 32
layers = tf.keras.layers


class Attention(layers.Layer):
    """Self-attention over the rows of a batch, as separate products."""

    def build(self, shape):
        self.qkv = layers.Dense(3 * WIDTH)
        self.qkv.build(shape)

    def call(self, x):
        q, k, v = (part[None] for part in tf.split(self.qkv(x), 3, axis=-1))
        shares = tf.nn.softmax(tf.matmul(q, k, transpose_b=True) / WIDTH**0.5)
        return tf.matmul(shares, v)[0]


class Cast(layers.Layer):
    def call(self, x):
        for _ in range(32):  # few numbers, whose memory is not given back meanwhile
            x = tf.cast(tf.cast(x, tf.float64), tf.float32)
        return x


class Norms(layers.Layer):
    def build(self, shape):
        self.norms = [layers.LayerNormalization(name=f"norm{n}") for n in range(6)]
        for norm in self.norms:
            norm.build(shape)

    def call(self, x):
        for norm in self.norms:
            x = norm(x)
        return x


class GELU(layers.Layer):
    def call(self, x):
        for _ in range(6):
            x = tf.nn.gelu(x)
        return x


def model(middle=None) -> tf.keras.Model:
    tf.keras.utils.set_random_seed(0)
    x = inputs = tf.keras.Input((WIDTH,))
    x = layers.Dense(WIDTH, name="first")(x)
    x = middle(x) if middle else x
    return tf.keras.Model(inputs, layers.Dense(4, name="head")(x))


def batches(samples: int = SAMPLES) -> list:
    x = tf.random.stateless_normal((samples, WIDTH), seed=(0, 0))
    return [(x, tf.zeros(samples, tf.int64))]


def train(built):
    optimizer = tf.keras.optimizers.SGD(1e-3)
    optimizer.build(built.trainable_variables)
    return training.make_train_step(built, optimizer, training.cross_entropy)


def plain():
    built = model()
    return train(built), batches(), built


def of(middle, samples: int = 4096):
    built = model(middle)
    return train(built), batches(samples), built


def around(extra):
    """The plain step with a call before it."""
    step, data, built = plain()

    def planted(x, y):
        extra(x)
        return step(x, y)

    return planted, data, built


def sleeping():
    return around(lambda x: time.sleep(0.02))


def busy_python():
    def burn(x):
        until = time.perf_counter() + 0.02
        while time.perf_counter() < until:
            pass

    return around(burn)


def larger_products():
    return of(tf.keras.Sequential([layers.Dense(1024), layers.Dense(WIDTH)]), 1024)


def casts():
    return of(Cast(), 2048)


def norms():
    return of(Norms(), 16384)


def activations():
    return of(GELU(), 16384)


def optimizer_that_loops():
    built = model(tf.keras.Sequential([layers.Dense(1024) for _ in range(3)]))
    optimizer = tf.keras.optimizers.AdamW()
    optimizer.build(built.trainable_variables)
    step, data, small = plain()
    gradients = [tf.zeros_like(one) for one in built.trainable_variables]

    @tf.function
    def update():
        for _ in range(6):
            optimizer.apply_gradients(zip(gradients, built.trainable_variables, strict=True))

    def planted(x, y):
        update()
        return step(x, y)

    return planted, data, small


def waits_for_input():
    step, data, built = plain()

    class Slow:
        def __iter__(self):
            for batch in data:
                time.sleep(0.02)
                yield batch

    return step, Slow(), built


def layout():
    step, data, built = plain()
    images, kernel = tf.zeros((32, 64, 64, 4)), tf.zeros((1, 1, 4, 4))

    def planted(x, y):
        changed = images
        for _ in range(6):  # not in a graph, where the changes cancel out
            changed = tf.transpose(tf.transpose(changed, (0, 3, 1, 2)), (0, 2, 3, 1))
        tf.nn.conv2d(changed, kernel, 1, "VALID")
        return step(x, y)

    return planted, data, built


def compiles_by_shape():
    """A graph is traced anew for each length."""
    step, _, built = plain()

    def data():
        samples = 4
        while True:
            yield batches(samples)[0]
            samples += 1

    return step, data(), built


def unfused_attention():
    return of(Attention(), 1024)


def python_in_the_graph():
    step, data, built = plain()

    def slow(x):
        until = time.perf_counter() + 0.02
        while time.perf_counter() < until:
            pass
        return x

    @tf.function
    def through(x):
        return tf.py_function(slow, [x], tf.float32)

    def planted(x, y):
        through(x)
        return step(x, y)

    return planted, data, built


def beside(compute):
    """The plain step with operators before it whose results nobody needs."""
    whole = tf.function(compute)
    return around(lambda _x: whole())


def larger_convolutions():
    images, kernel = tf.random.normal((8, 64, 64, 16)), tf.random.normal((3, 3, 16, 32))
    step, data, built = plain()

    @tf.function
    def convolve():
        return tf.nn.conv2d(images, kernel, 1, "SAME")

    def planted(x, y):
        for _ in range(6):
            convolve()
        return step(x, y)

    return planted, data, built


def lookups():
    table = tf.Variable(tf.random.normal((50_000, 64)))
    rows = tf.random.uniform((100_000,), maxval=50_000, dtype=tf.int64)
    return beside(lambda: tf.gather(table, rows))


def sums():
    values = tf.Variable(tf.random.normal((4000, 2000)))
    return beside(lambda: [tf.reduce_sum(values[n:]) for n in (0, 0, 0, 0)])


def products_in_float64():
    values = tf.Variable(tf.random.normal((768, 768), dtype=tf.float64))
    return beside(lambda: tf.matmul(values, values))


def eager():
    """A step that is no graph: Python calls each operator."""
    step, data, built = plain()

    def planted(x, y):
        for _ in range(300):
            tf.add(x, 1.0)
        return step(x, y)

    return planted, data, built
