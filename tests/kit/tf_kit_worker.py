"""What the TensorFlow kit does in one Keras flavour, as JSON on the last line.

    python -m tests.kit.tf_kit_worker

Each function below is one check; `tests/kit/test_tf_kit.py` says what it must return.
"""

import json
import time
from dataclasses import replace
from functools import partial

import numpy as np
import tensorflow as tf

from shared.specs import NO_LABEL, TASKS, CNNSpec, GPTSpec, Recipe, parameter_count
from shared.weights import checksum, init_weights
from tests import workers
from tf_impl.compression import combinations as compression
from tf_impl.compression import distillation, feature_distillation
from tf_impl.kit import copying, data, models, runtime, tracing, training, user_model

THREADS = 2
CNN = CNNSpec((16, 16, 1), ((8, 1), (16, 2)), num_classes=10)
GPT = GPTSpec(vocabulary=11, sequence_length=6, width=8, heads=2, layers=1)
SGD = Recipe("sgd", learning_rate=0.1, epochs=1, accuracy_batch_size=4)


def images(n, seed=0):
    random = np.random.default_rng(seed)
    return random.normal(size=(n, 16, 16, 1)).astype(np.float32), random.integers(0, 10, n)


def codes(n, seed=0):
    windows = np.random.default_rng(seed).integers(0, GPT.vocabulary, (n, 7))
    return windows[:, :-1], windows[:, 1:]


def make_step(spec, recipe=SGD, seed=0):
    model = models.build(spec, init_weights(spec, seed))
    optimizer = training.make_optimizer(model, recipe)
    return model, optimizer, training.make_train_step(model, optimizer, training.cross_entropy)


def error_of(call):
    """Type and text of what `call` raises, or None."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def configure():
    return {
        "read_back": runtime.configure(threads=THREADS, seed=0),
        "drawn": [float(tf.random.uniform(())), float(np.random.rand())],
        "again": runtime.configure(threads=THREADS, seed=0),
        "drawn_again": [float(tf.random.uniform(())), float(np.random.rand())],
        "other": error_of(lambda: runtime.configure(threads=THREADS + 1, seed=0)),
    }


def round_trips():
    """The smallest task of each kind of model; in campaigns every task."""
    largest_first = sorted(TASKS, key=lambda name: -parameter_count(TASKS[name].model))
    smallest = {type(TASKS[name].model): name for name in largest_first}
    return tuple(TASKS) if workers.campaign() else tuple(smallest.values())


def round_trip():
    found = {}
    for name in round_trips():
        task = TASKS[name]
        weights = {
            key: np.random.default_rng(1).normal(size=value.shape).astype(np.float32)
            for key, value in init_weights(task.model, 0).items()
        }
        model = models.build(task.model, weights)
        exported = models.export_weights(model)
        kept = {key: value.copy() for key, value in exported.items()}
        models.import_weights(model, init_weights(task.model, 0))
        found[name] = {
            "same": checksum(exported) == checksum(weights),
            "a copy": checksum(exported) == checksum(kept),
            "parameters": sorted(models.named_parameters(model)),
        }
    return found


def refused_weights():
    model = models.build(CNN, init_weights(CNN, 0))
    before = checksum(models.export_weights(model))
    weights = init_weights(CNN, 1)
    missing = {name: value for name, value in weights.items() if name != "conv0.kernel"}
    turned = weights | {"head.kernel": weights["head.kernel"].T}
    return {
        "missing": error_of(lambda: models.import_weights(model, missing)),
        "unknown": error_of(lambda: models.import_weights(model, weights | {"x": np.ones(1)})),
        "shape": error_of(lambda: models.build(CNN, turned)),
        "unchanged": before == checksum(models.export_weights(model)),
    }


def evaluate():
    """Against NumPy, with a last batch that is smaller."""
    found = {}
    for metric, spec, (x, y) in (
        ("accuracy", CNN, images(23)),
        ("bits_per_character", GPT, codes(23)),
    ):
        predict = training.make_predict(models.build(spec, init_weights(spec, 0)))
        inputs, labels = data.to_device(x, y)
        logits = np.array(predict(inputs), np.float64)
        shifted = logits - logits.max(-1, keepdims=True)
        log_p = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
        bits = -np.take_along_axis(log_p, y[..., None], -1).mean() / np.log(2)
        expected = 100 * (logits.argmax(-1) == y).mean() if metric == "accuracy" else bits
        score = training.evaluate(predict, inputs, labels, metric=metric, batch_size=5)
        loss = float(training.cross_entropy(tf.constant(logits, tf.bfloat16), labels))
        exact = float(training.cross_entropy(tf.constant(logits), labels))
        found[metric] = {
            "expected": float(expected),
            "score": score,
            "loss": exact,
            "expected_loss": float(bits * np.log(2)),
            "half": loss,
        }
    asked = np.random.default_rng(0).random(y.shape) < 0.4
    labels = tf.constant(np.where(asked, y, NO_LABEL))
    nats = float(-np.take_along_axis(log_p, y[..., None], -1)[asked].mean())
    settings = {"metric": "bits_per_character", "batch_size": 5}
    found["masked"] = {
        "expected": nats / np.log(2),
        "score": training.evaluate(predict, inputs, labels, **settings),
        "loss": float(training.masked_cross_entropy(tf.constant(logits), labels)),
        "expected_loss": nats,
        "half": float(training.masked_cross_entropy(tf.constant(logits, tf.bfloat16), labels)),
    }
    found["unknown"] = error_of(
        lambda: training.evaluate(predict, inputs, labels, metric="f1", batch_size=5)
    )
    return found


def predict():
    """Prediction changes nothing, sees the newest weights, and steps after it still train."""
    x, y = data.to_device(*images(8))
    losses, unchanged = {}, []
    for interrupted in (False, True):
        model, _, step = make_step(CNN)
        answer = training.make_predict(model)
        losses[interrupted] = []
        answers = []
        for _ in range(3):
            losses[interrupted].append(runtime.to_float(step(x, y)))
            if interrupted:
                before = checksum(models.export_weights(model))
                answers.append(np.array(answer(x)))
                unchanged.append(before == checksum(models.export_weights(model)))
    one = np.array(answer(x[:1]))
    return {
        "unchanged": unchanged,
        "same_losses": losses[False] == losses[True],
        "follows": not np.allclose(answers[0], answers[1]),
        # Evaluation mode: a sample's answer does not depend on its batch.
        "alone": float(np.abs(one - answers[-1][:1]).max()),
    }


def step():
    x, y = data.to_device(*images(8))
    model, optimizer, step = make_step(CNN)
    traced = [runtime.trace_count(step)]
    loss = step(x, y)
    for _ in range(3):
        loss = step(x, y)
    traced.append(runtime.trace_count(step))
    step(x[:5], y[:5])
    traced.append(runtime.trace_count(step))
    state = runtime.state_bytes(model, optimizer)
    eager = runtime.trace_count(lambda x, y: x)
    return {
        "loss": [type(loss).__name__, str(loss.dtype.name), loss.shape.rank],
        "traced": traced,
        "eager": eager,
        "wrapped": runtime.trace_count(lambda x, y: step(x, y)),
        "state": state,
        "parameters": models.parameter_count(model),
    }


def own_losses():
    """Loss and kernel after a step, of a model with regularisers and of the same without them.

    Without them the steps do the same work, but for that of compression, which keeps zeros.
    """
    x, y = data.to_device(*images(8))
    settings = {"student_layer": "hidden", "teacher_layer": "hidden"}

    def features(model, optimizer, loss_fn):
        taught = feature_distillation.attach_regressor(model, model, x, **settings)
        return feature_distillation.make_train_step(
            taught, model, tf.keras.optimizers.SGD(0.1), loss_fn, teacher_layer="hidden", weight=0.0
        )

    steps = {
        "baseline": training.make_train_step,
        "compression": compression.make_sparse_train_step,
        "features": features,
        "stored": partial(distillation.make_stored_train_step, alpha=0.0),
        "teacher": lambda model, *others: distillation.make_train_step(
            model, model, *others, alpha=0.0
        ),
    }
    found = {}
    for name, make in steps.items():
        found[name] = {}
        kinds = {"regularised": 0.25}
        if name in ("baseline", "compression"):
            kinds["plain"] = None
        for kind, strength in kinds.items():
            model = regularised(strength)
            optimizer = tf.keras.optimizers.SGD(0.1)
            optimizer.build(model.trainable_variables)
            step = make(model, optimizer, training.cross_entropy)
            loss = float(step(x, (y, y) if name == "stored" else y))
            found[name][kind] = [loss, model.get_layer("hidden").get_weights()[0].tolist()]
    return found | {"kernel": regularised(None).get_layer("hidden").get_weights()[0].tolist()}


def regularised(strength):
    """A model whose hidden kernel, which has zeros, weighs `strength` times its squares."""
    layers = tf.keras.layers
    tf.keras.utils.set_random_seed(0)
    penalty = tf.keras.regularizers.L2(strength) if strength else None
    inputs = tf.keras.Input((16, 16, 1))
    hidden = layers.Dense(3, kernel_regularizer=penalty, name="hidden")(layers.Flatten()(inputs))
    model = tf.keras.Model(inputs, layers.Dense(10)(hidden))
    kernel, bias = model.get_layer("hidden").get_weights()
    model.get_layer("hidden").set_weights([kernel * (kernel > 0), bias])
    return model


def fit():
    x, y = data.to_device(*images(20))
    _, _, step = make_step(CNN)
    last = training.fit(step, x, y, batch_size=8, epochs=2, seed=3)
    _, _, step = make_step(CNN)
    batches = [b for e in (0, 1) for b in data.epoch_batches(x, y, batch_size=8, seed=3, epoch=e)]
    expected = [runtime.to_float(step(*batch)) for batch in batches][-1]
    short = error_of(lambda: training.fit(step, x, y, batch_size=21, epochs=1, seed=3))
    return {"last": last, "expected": expected, "batches": len(batches), "short": short}


def optimizers():
    model = models.build(CNN)
    found = {
        "unknown": error_of(lambda: training.make_optimizer(model, replace(SGD, optimizer="lion")))
    }
    for name in ("sgd", "adamw", "rmsprop"):
        optimizer = training.make_optimizer(model, replace(SGD, optimizer=name))
        found[name] = sum(int(np.prod(v.shape)) for v in optimizer.variables)
    return found


def undecayed():
    """A kernel and a bias of ones after a step of a file's AdamW that has no gradients."""
    ways = {
        "by name": lambda model: {"var_names": ["bias"]},
        "by variable": lambda model: {"var_list": [model.weights[1]]},
    }
    found = {}
    for name, left_out in ways.items():

        def make(left_out=left_out):
            dense = tf.keras.layers.Dense(2, kernel_initializer="ones", bias_initializer="ones")
            model = tf.keras.Sequential([tf.keras.Input((2,)), dense])
            optimizer = tf.keras.optimizers.AdamW(0.1, weight_decay=0.5)
            optimizer.exclude_from_weight_decay(**left_out(model))
            return model, training.cross_entropy, optimizer

        file = user_model.UserModel(make)
        model = file.build()
        optimizer = file.optimizer(model, SGD)
        optimizer.apply_gradients([(tf.zeros_like(v), v) for v in model.trainable_variables])
        found[name] = [float(np.mean(np.array(v))) for v in model.weights]
    found["of another"] = error_of(partial(file.optimizer, make()[0], SGD))
    return found


class Halved(tf.keras.optimizers.schedules.LearningRateSchedule):
    """A schedule as tutorials have them: without a configuration."""

    def __call__(self, step):
        return 0.5 ** (1.0 + tf.cast(step, tf.float32))


def scheduled():
    """A weight of one after two steps against a gradient of one."""

    def make():
        dense = tf.keras.layers.Dense(1, kernel_initializer="ones", use_bias=False)
        model = tf.keras.Sequential([tf.keras.Input((1,)), dense])
        return model, training.cross_entropy, tf.keras.optimizers.SGD(Halved())

    file = user_model.UserModel(make)
    model = file.build()
    optimizer, rate = file.optimizer(model, SGD), file._last._learning_rate
    for _ in "ab":
        optimizer.apply_gradients([(tf.ones((1, 1)), model.weights[0])])
    return {"weight": float(model.weights[0][0, 0]), "kept": isinstance(rate, Halved)}


def gradients():
    """The embedding's gradient is dense and sums the positions of a code."""
    model = models.build(GPT, init_weights(GPT, 0))
    table = models.named_parameters(model)["tokens.embedding"]
    x = tf.constant([[3, 3, 1, 3, 0, 1]], tf.int64)
    upstream = np.random.default_rng(0).normal(size=(1, 6, GPT.width)).astype(np.float32)
    layer = model.get_layer("tokens")
    with tf.GradientTape() as tape:
        total = tf.reduce_sum(layer(x) * upstream)
    gradient = tape.gradient(total, table)
    expected = np.zeros(tuple(table.shape), np.float32)
    np.add.at(expected, np.array(x)[0], upstream[0])
    return {
        "dense": isinstance(gradient, tf.Tensor),
        "off": float(np.abs(np.array(tf.convert_to_tensor(gradient)) - expected).max()),
    }


def dropout():
    """In evaluation mode the plain model; in training, masks anew for each call."""
    weights = init_weights(GPT, 0)
    plain, model = models.build(GPT, weights), models.build(replace(GPT, dropout=0.5), weights)
    x = tf.constant(codes(4)[0])
    values = [np.array(m(x, training=False)) for m in (plain, model)]
    drawn = [np.array(model(x, training=True)) for _ in range(2)]
    attention = models.SelfAttention(1, 0.5)
    # Equal values, so that a position's output is the sum of the shares that were kept.
    kept = np.array(attention(tf.ones((64, 8, 3 * 4)), training=True))
    return {
        "evaluation": float(np.abs(values[0] - values[1]).max()),
        "training": float(np.abs(drawn[0] - drawn[1]).max()),
        "share_of_first_positions_dropped": float((kept[:, 0] == 0).mean()),
        "config": models.SelfAttention.from_config(attention.get_config()).dropout,
    }


def operator_dtypes():
    found = {}
    for policy in ("float32", "mixed_bfloat16"):
        tf.keras.mixed_precision.set_global_policy(policy)
        for name, spec, batch in (("cnn", CNN, images(4)), ("gpt", GPT, codes(4))):
            model, _, step = make_step(spec)
            found[f"{name} {policy}"] = runtime.operator_dtypes(step, *data.to_device(*batch))
        predict = training.make_predict(model)
        ran = runtime.operator_dtypes(lambda x, y, run=predict: run(x), *data.to_device(*codes(4)))
        found[f"predict {policy}"] = ran
        compiled = tf.function(make_step(CNN)[2].python_function, jit_compile=True)
        found[f"xla {policy}"] = runtime.operator_dtypes(compiled, *data.to_device(*images(4)))
    tf.keras.mixed_precision.set_global_policy("float32")
    # Grappler rewrites the traced graph, which says float32, into bfloat16 operators.
    option = {"auto_mixed_precision_onednn_bfloat16": True}
    tf.config.optimizer.set_experimental_options(option)
    _, _, step = make_step(CNN)
    found["rewritten"] = runtime.operator_dtypes(step, *data.to_device(*images(4)))
    tf.config.optimizer.set_experimental_options(dict.fromkeys(option, False))
    return found


def copy_of_what_draws():
    """Whether a model that draws in evaluation, too, and its copy draw alike, and as before."""
    keras = tf.keras

    class Sampling(keras.layers.Layer):
        """As the encoder of a variational autoencoder has it."""

        def __init__(self, **settings):
            super().__init__(**settings)
            self.seeds = keras.random.SeedGenerator(1)

        def call(self, x):
            return x + keras.random.normal(tf.shape(x), seed=self.seeds)

    inputs = keras.Input((4,))
    model = keras.Model(inputs, Sampling()(keras.layers.Dense(3)(inputs)))
    state = np.array(model.layers[-1].seeds.state)
    copy, x = copying.copy_model(model), tf.ones((2, 4))
    kept = np.array_equal(state, np.array(model.layers[-1].seeds.state))
    return {"seed kept": kept, "same": np.allclose(model(x), copy(x))}


def copies():
    """Copies of models with all kinds of state, against a bare clone_model and set_weights."""
    keras, layers, found = tf.keras, tf.keras.layers, {}
    drawn = np.random.default_rng(0).normal(5.0, 3.0, (50, 4)).astype(np.float32)

    class Scaled(keras.Model):
        def __init__(self, units, function=None):
            super().__init__()
            self.units, self.function = units, function
            self.norm, self.dense = layers.Normalization(), layers.Dense(units)
            self.norm.adapt(drawn)

        def call(self, x, training=None):
            return self.dense(self.norm(x))

        def get_config(self):
            return {"units": self.units}

    class Forgets(Scaled):
        def get_config(self):
            return {"units": self.units + 1}

    class Moves(Scaled):
        """Its copy computes something else: the configuration says nothing of `function`."""

        def call(self, x, training=None):
            x = super().call(x)
            return self.function(x) if self.function else x

    def normalization():
        inputs, norm = keras.Input((4,)), layers.Normalization()
        norm.adapt(drawn)
        hidden = layers.Dropout(0.5)(layers.Dense(8, activation="gelu")(norm(inputs)))
        return keras.Model(inputs, layers.BatchNormalization()(hidden))

    def vocabulary():
        text = layers.TextVectorization(output_sequence_length=3)
        text.adapt(["one two three", "four five six"])
        inputs = keras.Input((), dtype="string")
        return keras.Model(inputs, layers.Dense(2)(layers.Embedding(20, 3)(text(inputs))))

    def buckets():
        bins, inputs = layers.Discretization(num_bins=4), keras.Input((1,))
        bins.adapt(drawn[:, :1])
        return keras.Model(inputs, layers.Embedding(5, 2)(bins(inputs)))

    def dicts():
        a, b = keras.Input((3,), name="a"), keras.Input((4,), name="b")
        both = layers.Lambda(lambda x: tf.nn.relu(x))(layers.Concatenate()([a, b]))
        return keras.Model({"a": a, "b": b}, {"one": layers.Dense(2)(both), "two": both})

    def nested():
        shared = keras.Sequential([keras.Input((4,)), layers.Dense(4), layers.Dropout(0.5)])
        inputs = keras.Input((4,))
        shared.layers[0].trainable = False
        return keras.Model(inputs, shared(shared(inputs)))

    def recurrent():
        return keras.Sequential([keras.Input((None, 3)), layers.Bidirectional(layers.LSTM(4))])

    def silenced():
        model = keras.Sequential([keras.Input((4,)), layers.Dropout(0.5), layers.Dense(3)])
        model.layers[0].rate = 0.0  # a copy begins with it, and draws nothing
        return model

    def late():
        model = keras.Sequential([layers.Dense(3), layers.Dense(2)])
        model(drawn)
        return model

    def subclassed(kind=Scaled, **settings):
        model = kind(3, **settings)
        model(drawn)
        return model

    def task():
        """Functional by its own class, which holds its layers in an order of its own."""

        class Task(keras.Model):
            def __init__(self):
                inputs = keras.Input((4,))
                if hasattr(tf.keras, "StatelessScope"):  # Keras 3, as KerasHub does it
                    self.head, self.hidden = layers.Dense(3), layers.Dense(4)
                    super().__init__(inputs, self.head(self.hidden(inputs)))
                else:
                    super().__init__(inputs, layers.Dense(3)(layers.Dense(4)(inputs)))

        return Task()

    def tied():
        """A layer of a model inside that the model calls once more: its weights stay one's."""
        inputs, again = keras.Input((4,)), layers.Dense(4)
        inner = keras.Model(inputs, layers.Dense(4)(again(inputs)))
        outer = keras.Input((4,))
        return keras.Model(outer, again(inner(outer)))

    def attending():
        """A layer that holds a dropout that was set to 0: it has a seed, and its twin none."""
        inputs, attention = keras.Input((5, 4)), layers.MultiHeadAttention(2, 3, dropout=0.1)
        model = keras.Model(inputs, layers.Dense(2)(attention(inputs, inputs)))
        attention._dropout = attention._dropout_layer.rate = 0.0
        return model

    def sound():
        """Of which too few samples leave nothing, and TensorFlow computes on with what is not."""
        convolutions = [layers.Conv1D(4, 10, 5), layers.Conv1D(4, 8, 4)]
        ends = [layers.GlobalAveragePooling1D(), layers.Dense(3)]
        return keras.Sequential([keras.Input((None, 1)), *convolutions, *ends])

    makes = (normalization, vocabulary, buckets, dicts, nested, recurrent, silenced, late, task)
    makes += (sound,) if hasattr(keras, "StatelessScope") else ()
    for make in (*makes, tied, attending, subclassed):
        model = make()
        x = drawn if make is subclassed else copying._example(model)
        before = [np.array(value) for value in model.weights]
        copy = copying.copy_model(model, x if make is subclassed else None)
        outputs = [
            [np.asarray(value) for value in tf.nest.flatten(either(x))] for either in (model, copy)
        ]
        trainable = [sorted(tuple(v.shape) for v in m.trainable_variables) for m in (model, copy)]
        found[make.__name__] = {
            "same": all(np.allclose(*pair, atol=1e-6) for pair in zip(*outputs, strict=True)),
            "constant": all(np.ptp(value) == 0 for value in outputs[0]),
            "shared": len({id(v) for v in model.weights} & {id(v) for v in copy.weights}),
            "kept": all(map(np.array_equal, before, map(np.array, model.weights))),
            "trainable": trainable[0] == trainable[1],
        }
    if hasattr(keras, "StatelessScope"):
        found["draws"] = copy_of_what_draws()
    a, b = keras.Input((3,), name="b", dtype="int32"), keras.Input((4,), name="a")
    both = keras.Model([a, b], layers.Dense(2)(layers.Concatenate()([layers.Rescaling(2.0)(a), b])))
    given = {"b": tf.ones((2, 3), "int32"), "a": tf.ones((2, 4))}
    wrong = {name: tf.cast(value, "float32") for name, value in given.items()}
    found["by name"] = [
        error_of(lambda x=x: tracing.check_example_inputs(both, x)) for x in (given, wrong)
    ]
    model = normalization()
    bare = keras.models.clone_model(model)
    bare.set_weights(model.get_weights())
    found["bare"] = float(np.abs(model(drawn) - bare(drawn)).max() / np.abs(model(drawn)).max())
    copy = copying.copy_model(model)
    found["masks"] = np.allclose(model(drawn, training=True), copy(drawn, training=True))
    found["refused"] = {
        "unbuilt": error_of(lambda: copying.copy_model(Scaled(3))),
        "no example": error_of(lambda: copying.copy_model(subclassed())),
        "wrong example": error_of(lambda: copying.copy_model(subclassed(), tf.zeros((2, 7)))),
        "forgets": error_of(lambda: copying.copy_model(subclassed(Forgets), drawn)),
        "moves": error_of(
            lambda: copying.copy_model(subclassed(Moves, function=tf.tanh), drawn),
        ),
    }
    return found


def device():
    product = tf.function(tf.linalg.matmul)
    large = tf.random.normal((1500, 1500))
    product(large, large)
    start = time.perf_counter()
    result = product(large, large)
    called = time.perf_counter()
    runtime.synchronize()
    runtime.to_float(result[0, 0])
    waited = time.perf_counter() - called
    runtime.reset_device_peak()
    return {
        "called_s": called - start,
        "waited_s": waited,
        "device": runtime.device(),
        "info": runtime.device_info(),
        "peak": runtime.device_peak(),
        "flops": runtime.matmul_flops(size=256, dtype="float32", seconds=0.1),
        "half_flops": runtime.matmul_flops(size=256, dtype="bfloat16", seconds=0.1),
        "versions": runtime.versions(),
    }


CHECKS = (
    configure,
    refused_weights,
    predict,
    step,
    optimizers,
    undecayed,
    scheduled,
    copies,
    device,
)
# Which know no flavour, or are in the parity of both.
OF_KERAS_3 = (round_trip, evaluate, own_losses, fit, gradients, dropout, operator_dtypes)

if __name__ == "__main__":
    checks = CHECKS + OF_KERAS_3 * hasattr(tf.keras, "StatelessScope")
    print(json.dumps({check.__name__: check() for check in checks}))
