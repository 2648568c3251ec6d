"""Small Keras models that are not the suite's own, steps, and what plain code makes of them.

A model's function returns (model, x, y, loss_fn); x is what `fit` would get for a batch.
"""

from contextlib import contextmanager
from functools import cache, partial

import numpy as np
import tensorflow as tf

from tests.train_step.tf_steps import KERAS_3, descent, policies, squares, unbuilt  # noqa: F401
from tf_impl import kit
from tf_impl.deployment import reduced_precision
from tf_impl.kit import operators
from tf_impl.kit.optimizers import copy_optimizer  # noqa: F401 - the tests take it
from tf_impl.train_step import (
    compilation,
    finite_guard,
    gradient_accumulation,
    gradient_clipping,
    mixed_precision,
    stacking,
)
from tf_impl.train_step.activation_checkpointing import apply_checkpointing

keras, layers = tf.keras, tf.keras.layers
ROWS = 8


def values(*shape, seed=0):
    return tf.constant(np.random.default_rng(seed).normal(size=(ROWS, *shape)), tf.float32)


def codes(*shape, high=7):
    return tf.constant(np.random.default_rng(1).integers(0, high, (ROWS, *shape)), tf.int64)


def mean_squares(output, y):
    """Half-width outputs stay half-width."""
    return tf.reduce_mean(tf.square(output - tf.cast(y, output.dtype)))


def cross_entropy(logits, y):
    logits = tf.cast(logits, tf.float32)
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits))


# Models ------------------------------------------------------------------------------------------


def regularized():
    """Adapted Normalization, GELU, and L2 on weights and activities."""
    norm, inputs, given = layers.Normalization(), keras.Input((4,)), keras.regularizers.L2(0.1)
    norm.adapt(5.0 + 3.0 * values(4, seed=3))
    x = layers.Dense(6, activation="gelu", kernel_regularizer=given)(norm(inputs))
    outputs = layers.Dense(2, activity_regularizer=given)(x)
    return keras.Model(inputs, outputs), values(4), values(2, seed=1), mean_squares


def sequence():
    """Convolutions over time."""
    inputs = keras.Input((9, 3))
    x = layers.Conv1D(4, 3, activation="relu")(inputs)
    x = layers.SeparableConv1D(4, 3, padding="same")(x)
    outputs = layers.Dense(2)(layers.GlobalAveragePooling1D()(x))
    return keras.Model(inputs, outputs), values(9, 3), values(2, seed=1), mean_squares


def branches():
    """Grouped and depthwise convolutions, a residual sum and a concatenation."""
    inputs = keras.Input((6, 6, 4))
    # Keras compiles grouped convolutions on a CPU; GPUs have their own.
    x = layers.Conv2D(4, 3, padding="same", groups=2, name="block.grouped")(inputs)
    x = layers.Add(name="block.add")([inputs, layers.ReLU(name="block.relu")(x)])
    y = layers.DepthwiseConv2D(3, padding="same")(x)
    x = layers.Concatenate()([x, layers.LayerNormalization()(y)])
    outputs = layers.Dense(2)(layers.GlobalAveragePooling2D()(x))
    return keras.Model(inputs, outputs), values(6, 6, 4), values(2, seed=1), mean_squares


def recurrent():
    """Masked codes, whose gradient is slices, into an LSTM."""
    inputs = keras.Input((6,), dtype="int64")
    x = layers.Embedding(9, 4, mask_zero=True)(inputs)
    outputs = layers.Dense(2)(layers.LSTM(5, name="block")(x))
    return keras.Model(inputs, outputs), codes(6), values(2, seed=1), mean_squares


def masking_inside():
    """A prediction of a model within which a part that is compiled gives a mask."""
    inside = keras.Input((6,), dtype="int64")
    inner = keras.Model(inside, layers.Embedding(9, 4, mask_zero=True)(inside), name="inner")
    inputs = keras.Input((6,), dtype="int64")
    model = keras.Model(inputs, layers.LSTM(3)(inner(inputs)))
    return compilation.compiled_predict(model, blocks="inner")(codes(6))


def list_model_of_a_tuple():
    """Keras's functional [a, b] model with what a tf.data pipeline of tuples gives."""
    a, b = keras.Input((3,)), keras.Input((4,))
    x = layers.Concatenate()([layers.Dense(3, name="block")(a), b])
    model = keras.Model([a, b], layers.Dense(2)(x))
    return model, (values(3), values(4)), values(2, seed=1), mean_squares


class Whole(keras.Model):
    """`call` takes one structure."""

    def __init__(self, **settings):
        super().__init__(**settings)
        regularizer = keras.regularizers.L2(0.1)
        self.left, self.right = layers.Dense(3, kernel_regularizer=regularizer), layers.Dense(3)

    def call(self, inputs, training=None):
        a, b = inputs
        return self.left(a) + self.right(b)


def subclassed():
    model, x = Whole(), (values(3), values(4))
    model(x)
    return model, x, values(3, seed=1), mean_squares


class Everything(keras.Model):
    """What steps treat each in a way of their own, at once.

    Several arguments; random numbers, statistics and losses of its own; slices and masks; logits
    by the table that embeds; a weight that the loss does not reach.
    """

    def __init__(self, drop):
        super().__init__()
        regularizer = keras.regularizers.L2(0.1)
        given = {"kernel_regularizer": regularizer, "activity_regularizer": regularizer}
        self.words = layers.Embedding(7, 4, mask_zero=True)
        self.pool = layers.GlobalAveragePooling1D()
        self.norm, self.hidden = layers.Normalization(), layers.Dense(4, "gelu", **given)
        self.norm.adapt(5.0 + 3.0 * values(4, seed=3))
        self.drop = layers.Dropout(0.3) if drop else layers.Activation("linear")
        self.table, self.unused = layers.Embedding(7, 4), layers.Dense(3)

    def call(self, codes, numbers, scale=None, training=None):
        x = self.pool(self.words(codes), mask=self.words.compute_mask(codes))
        x = x[:, None] + self.table(codes) + self.drop(self.hidden(self.norm(numbers)))[:, None]
        self.unused(x)
        x = x if scale is None else x * scale[:, None]
        table = tf.convert_to_tensor(self.table.embeddings)
        return tf.matmul(x, tf.cast(table, x.dtype), transpose_b=True)


def everything(drop=KERAS_3):
    """Keras 3 keeps the seeds of dropout: masks are the same in another graph."""
    x = {"codes": codes(5), "numbers": values(4), "scale": values(1)}
    model = Everything(drop)
    model(**x)
    return model, x, codes(5), cross_entropy


def everything_but_dropout():
    return everything(drop=False)


def made(name):
    """A model, always with the same weights and seeds, and an optimizer.

    Adam treats an embedding's slices otherwise than their sum and, with decay, a gradient of zero
    otherwise than none; its epsilon is large, so that it does not amplify rounding.
    """
    keras.utils.set_random_seed(0)
    model, *rest = globals()[name]()
    optimizer = keras.optimizers.AdamW(0.05, weight_decay=0.1, epsilon=1e-2)
    optimizer.jit_compile = False
    optimizer.build(model.trainable_variables)
    return model, optimizer, *rest


# Steps -------------------------------------------------------------------------------------------


def plain(model, optimizer, loss_fn):
    """The step of TensorFlow's guides; x is unpacked by hand where it has to be."""
    several = isinstance(model, Everything)

    @tf.function(jit_compile=False)
    def step(x, y):
        with tf.GradientTape() as tape:
            output = model(**x, training=True) if several else model(x, training=True)
            loss = tf.add_n([loss_fn(output, y), *model.losses])
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    return step


def _trained(make, name):
    """Losses of two steps, weights and statistics after them."""
    model, optimizer, x, y, loss_fn = made(name)
    step = make(model, optimizer, loss_fn)
    losses = np.array([float(step(x, y)) for _ in range(2)])
    return [losses, *(np.array(w, np.float64) for w in model.get_weights())]


reference = cache(partial(_trained, plain))


def far(ours, theirs) -> float:
    pairs = zip(ours, theirs, strict=True)
    return max(float(np.linalg.norm(a - b) / (np.linalg.norm(b) or 1.0)) for a, b in pairs)


def with_settings(make, **settings):
    return lambda *given: make(*given, **settings)


def recomputed(model, optimizer, loss_fn, blocks="head"):
    model = apply_checkpointing(model, blocks=blocks)
    optimizer.build(model.trainable_variables)
    return kit.training.make_train_step(model, optimizer, loss_fn)


accumulate, stacked = gradient_accumulation.make_train_step, stacking.make_train_step
clip, clip_each = gradient_clipping.make_train_step, gradient_clipping.make_per_variable_step
xla_model = compilation.compiled_model_train_step
BLOCKS = "block.g*, block.add, block.relu"
KEY = ("everything",)
WHOLE = ("everything_but_dropout",)  # the same in parts and under XLA, which draws other masks
STEPS = {
    "kit": (kit.training.make_train_step, KEY),
    "graph": (compilation.graph_train_step, KEY),
    "float32": (with_settings(mixed_precision.make_train_step, dtype="float32"), KEY),
    "bfloat16": (mixed_precision.make_train_step, ()),
    "eager": (compilation.eager_train_step, KEY),
    "xla": (compilation.compiled_train_step, WHOLE),
    "xla model": (xla_model, ("list_model_of_a_tuple", *WHOLE)),
    "xla blocks": (with_settings(xla_model, blocks=BLOCKS), ("branches",)),
    "parts": (with_settings(accumulate, micro_batches=3), WHOLE),
    "2 parts": (with_settings(accumulate, micro_batches=2), ()),
    "loosely": (with_settings(clip, max_norm=1e9), KEY),
    "clipped": (with_settings(clip, max_norm=0.1), ()),
    "each": (with_settings(clip_each, max_norm=1e9), KEY),
    "clipped each": (with_settings(clip_each, max_norm=0.1), ()),
    "guard": (finite_guard.make_train_step, KEY),
    "stacking": (stacked, KEY),
    "stacking parts": (with_settings(stacked, micro_batches=2), WHOLE),
    "stacking compiled": (with_settings(stacked, micro_batches=2, compiled=True), WHOLE),
}


def compare(name, kind) -> float:
    """How far the step is from plain code."""
    return far(_trained(STEPS[name][0], kind), reference(kind))


def slices_reach_the_optimizer(name) -> bool:
    seen = []

    class Spy(keras.optimizers.SGD):
        def apply_gradients(self, grads_and_vars, **settings):
            pairs = list(grads_and_vars)
            seen.append(any(isinstance(g, tf.IndexedSlices) for g, _ in pairs))
            return super().apply_gradients(pairs, **settings)

    model, _, x, y, loss_fn = made(*WHOLE)
    optimizer = Spy(0.1)
    optimizer.build(model.trainable_variables)
    STEPS[name][0](model, optimizer, loss_fn)(x, y)
    return seen[0]


def compiled_blocks() -> tuple[int, int]:
    """How many programs XLA has of a step whose blocks are compiled, and of how many layers."""
    model, optimizer, x, y, loss_fn = made("branches")
    step = xla_model(model, optimizer, loss_fn, blocks=BLOCKS)
    replaced = sum("call" in vars(layer) for layer in model._flatten_layers())
    return operators.executed_graphs(step, x, y)["compiled"], replaced


def predictions(model):
    return [
        kit.training.make_predict(model),
        compilation.eager_predict(model),
        compilation.graph_predict(model),
        compilation.compiled_predict(model),
        compilation.compiled_predict(model, blocks="block"),
        reduced_precision.make_predict(model, dtype="float32"),
    ]


@contextmanager
def global_policy(name):
    keras.mixed_precision.set_global_policy(name)
    try:
        yield
    finally:
        keras.mixed_precision.set_global_policy("float32")


# In fit: weights after two batches ---------------------------------------------------------------

RATE = {"learning_rate": 0.1, "momentum": 0.9}


def of_step(name, make):
    model, _, x, y, loss_fn = made(name)
    optimizer = keras.optimizers.SGD(**RATE)
    optimizer.build(model.trainable_variables)
    step = make(model, optimizer, loss_fn)
    for _ in range(2):
        step(x, y)
    return model.get_weights()


def of_fit(name, prepare=lambda model: model, batch_size=ROWS, **settings):
    model, _, x, y, loss_fn = made(name)
    model = prepare(model)
    model.compile(keras.optimizers.SGD(**RATE, **settings), lambda y, output: loss_fn(output, y))
    for _ in range(2):
        model.fit(x, y, batch_size=batch_size, shuffle=False, verbose=0)
    return model.get_weights()


def fit_in_policies(name):
    model, _, x, y, loss_fn = made(name)
    precision, cast = mixed_precision.MixedPrecision(model), mixed_precision.to_float32
    model.compile(keras.optimizers.SGD(**RATE), lambda y, output: loss_fn(cast(output), y))
    for _ in range(2):
        with precision.policies():
            model.fit(x, y, batch_size=ROWS, shuffle=False, verbose=0)
    return model.get_weights()


def with_accumulation(model):
    """The model in the class of Keras's `fit` that computes each batch in two parts."""

    class Accumulated(gradient_accumulation.AccumulatedTraining, type(model)):
        micro_batches = 2

    model.__class__ = Accumulated
    return model


# Legacy Keras ------------------------------------------------------------------------------------

LEGACY = {"bfloat16": mixed_precision.make_train_step, "recomputed": recomputed}
NEUTRAL = {"bfloat16": {"dtype": "float32"}, "recomputed": {"blocks": ""}}


def legacy():
    """A model and an optimizer of Keras before 2.11."""
    return made("subclassed")[0], keras.optimizers.legacy.SGD(0.1)
