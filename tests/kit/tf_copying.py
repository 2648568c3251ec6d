"""Keras's models for the tests of copies: with all kinds of state."""

import functools

import numpy as np
import tensorflow as tf

from shared.specs import Recipe
from tf_impl.kit import copying, tracing, training, user_model  # noqa: F401 - of tests, too

keras, layers = tf.keras, tf.keras.layers
SGD = Recipe("sgd", learning_rate=0.1, epochs=1, accuracy_batch_size=4)
DRAWN = X = np.random.default_rng(0).normal(5.0, 3.0, (50, 4)).astype(np.float32)


class Scaled(keras.Model):
    def __init__(self, units, function=None):
        super().__init__()
        self.units, self.function = units, function
        self.norm, self.dense = layers.Normalization(), layers.Dense(units)
        self.norm.adapt(DRAWN)

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


def by_itself(build):
    """A model, no example for its copy, and an input of the kit's."""

    @functools.wraps(build)
    def made():
        model = build()
        return model, None, copying._example(model)

    return made


@by_itself
def normalization():
    inputs, norm = keras.Input((4,)), layers.Normalization()
    norm.adapt(DRAWN)
    hidden = layers.Dropout(0.5)(layers.Dense(8, activation="gelu")(norm(inputs)))
    return keras.Model(inputs, layers.BatchNormalization()(hidden))


@by_itself
def vocabulary():
    text = layers.TextVectorization(output_sequence_length=3)
    text.adapt(["one two three", "four five six"])
    inputs = keras.Input((), dtype="string")
    return keras.Model(inputs, layers.Dense(2)(layers.Embedding(20, 3)(text(inputs))))


@by_itself
def buckets():
    bins, inputs = layers.Discretization(num_bins=4), keras.Input((1,))
    bins.adapt(DRAWN[:, :1])
    return keras.Model(inputs, layers.Embedding(5, 2)(bins(inputs)))


@by_itself
def dicts():
    a, b = keras.Input((3,), name="a"), keras.Input((4,), name="b")
    both = layers.Lambda(lambda x: tf.nn.relu(x))(layers.Concatenate()([a, b]))
    return keras.Model({"a": a, "b": b}, {"one": layers.Dense(2)(both), "two": both})


@by_itself
def nested():
    shared = keras.Sequential([keras.Input((4,)), layers.Dense(4), layers.Dropout(0.5)])
    inputs = keras.Input((4,))
    shared.layers[0].trainable = False
    return keras.Model(inputs, shared(shared(inputs)))


@by_itself
def recurrent():
    return keras.Sequential([keras.Input((None, 3)), layers.Bidirectional(layers.LSTM(4))])


@by_itself
def silenced():
    model = keras.Sequential([keras.Input((4,)), layers.Dropout(0.5), layers.Dense(3)])
    model.layers[0].rate = 0.0  # a copy begins with it, and draws nothing
    return model


@by_itself
def late():
    model = keras.Sequential([layers.Dense(3), layers.Dense(2)])
    model(DRAWN)
    return model


def subclassed(kind=Scaled, **settings):
    model = kind(3, **settings)
    model(DRAWN)
    return model, DRAWN, DRAWN


@by_itself
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


@by_itself
def tied():
    """A layer of a model inside that the model calls once more: its weights stay one's."""
    inputs, again = keras.Input((4,)), layers.Dense(4)
    inner = keras.Model(inputs, layers.Dense(4)(again(inputs)))
    outer = keras.Input((4,))
    return keras.Model(outer, again(inner(outer)))


@by_itself
def attending():
    """A layer that holds a dropout that was set to 0: it has a seed, and its twin none."""
    inputs, attention = keras.Input((5, 4)), layers.MultiHeadAttention(2, 3, dropout=0.1)
    model = keras.Model(inputs, layers.Dense(2)(attention(inputs, inputs)))
    attention._dropout = attention._dropout_layer.rate = 0.0
    return model


@by_itself
def sound():
    """Of which too few samples leave nothing, and TensorFlow computes on with what is not."""
    convolutions = [layers.Conv1D(4, 10, 5), layers.Conv1D(4, 8, 4)]
    ends = [layers.GlobalAveragePooling1D(), layers.Dense(3)]
    return keras.Sequential([keras.Input((None, 1)), *convolutions, *ends])


@by_itself
def draws():
    """In evaluation, too, as the encoder of a variational autoencoder does."""

    class Sampling(layers.Layer):
        def __init__(self, **settings):
            super().__init__(**settings)
            self.seeds = keras.random.SeedGenerator(1)

        def call(self, x):
            return x + keras.random.normal(tf.shape(x), seed=self.seeds)

    inputs = keras.Input((4,))
    return keras.Model(inputs, Sampling()(layers.Dense(3)(inputs)))


def moving():
    return subclassed(Moves, function=tf.tanh)[0]


def cloned(model):
    bare = keras.models.clone_model(model)
    bare.set_weights(model.get_weights())
    return bare


def named_inputs():
    """A model whose inputs are named against their order, and batches of right and wrong dtypes."""
    a, b = keras.Input((3,), name="b", dtype="int32"), keras.Input((4,), name="a")
    both = layers.Concatenate()([layers.Rescaling(2.0)(a), b])
    right = {"b": tf.ones((2, 3), "int32"), "a": tf.ones((2, 4))}
    wrong = {name: tf.cast(value, "float32") for name, value in right.items()}
    return keras.Model([a, b], layers.Dense(2)(both)), right, wrong


# What is looked at


def state(model):
    return [np.array(value) for value in model.weights]


def tensors(model):
    return {id(value) for value in model.weights}


def traits(model):
    return sorted(tuple(value.shape) for value in model.trainable_variables)


def outputs(model, x):
    return [np.asarray(value) for value in tf.nest.flatten(model(x))]


# A file's optimizer


class Halved(keras.optimizers.schedules.LearningRateSchedule):
    """A schedule as tutorials have them: without a configuration."""

    def __call__(self, step):
        return 0.5 ** (1.0 + tf.cast(step, tf.float32))


def _of_ones(units, **settings):
    dense = layers.Dense(units, kernel_initializer="ones", bias_initializer="ones", **settings)
    return keras.Sequential([keras.Input((units,)), dense])


def undecayed(way):
    """AdamW, whose decay leaves out the bias."""
    model, optimizer = _of_ones(2), keras.optimizers.AdamW(0.1, weight_decay=0.5)
    named = {"by name": {"var_names": ["bias"]}, "by variable": {"var_list": [model.weights[1]]}}
    optimizer.exclude_from_weight_decay(**named[way])
    return model, training.cross_entropy, optimizer


def scheduled():
    return _of_ones(1, use_bias=False), training.cross_entropy, keras.optimizers.SGD(Halved())


def apply(optimizer, model, gradient):
    """A step against equal gradients."""
    pairs = [(gradient * tf.ones_like(value), value) for value in model.trainable_variables]
    optimizer.apply_gradients(pairs)
