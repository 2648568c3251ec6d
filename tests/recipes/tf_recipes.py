"""TensorFlow's models and words for the tests of recipes."""

import functools

import numpy as np
import tensorflow as tf

from tf_impl.compression import pruning, semi_structured_pruning
from tf_impl.kit import training as training_
from tf_impl.kit.examples import deep_network  # noqa: F401 - the tests take these
from tf_impl.recipes import (  # noqa: F401
    augmentation,
    checkpoints,
    early_stopping,
    initialization,
    nonfinite,
)
from tf_impl.train_step import gradient_accumulation  # noqa: F401 - a row takes it

WIDTH = 400
keras, layers_ = tf.keras, tf.keras.layers
KERAS_3 = hasattr(keras, "StatelessScope")


def tensor(x):
    return tf.constant(x)


def numpy(value):
    value = tf.convert_to_tensor(value)
    return (tf.cast(value, tf.float32) if value.dtype == tf.bfloat16 else value).numpy()


def output(model, x, training=False):
    """NumPy's output for NumPy's input."""
    keras.utils.set_random_seed(1)
    return numpy(model(tensor(x), training=training))


def gradient_at(function, x):
    """The value of a function of a tensor, and its gradient there."""
    x = tf.Variable(x)
    with tf.GradientTape() as tape:
        value = function(x)
    return float(value), numpy(tape.gradient(value, x))


def name_of(variable):
    return getattr(variable, "path", variable.name)


def gradients(model, function):
    """The value of a function of the model, and its gradient by each variable that trains."""
    variables = model.trainable_variables
    with tf.GradientTape() as tape:
        value = function()
    found = tape.gradient(value, variables)
    named = zip(map(name_of, variables), found, strict=True)
    return float(value), {name: g if g is None else numpy(g) for name, g in named}


def parameters(model):
    return {name_of(v): numpy(v) for v in model.weights if "moving" not in name_of(v)}


def state(model, optimizer=None):
    """All that training changes: also the state of random numbers."""
    found = [*model.variables, tf.random.get_global_generator().state]
    if optimizer is not None:
        optimizer.build(model.trainable_variables)
        variables = optimizer.variables
        found += variables() if callable(variables) else variables
        found.append(optimizer.learning_rate)
    return [numpy(value) for value in found]


def random_state():
    return numpy(tf.random.get_global_generator().state)


def trained_output(model, x):
    """What it gives in training, as a tensor."""
    return model(x, training=True)


def fill(model, value):
    for variable in model.weights:
        variable.assign(tf.cast(tf.fill(variable.shape, value), variable.dtype))


def linear(kernel):
    layer = layers_.Dense(kernel.shape[1], use_bias=False)
    model = keras.Sequential([keras.Input((kernel.shape[0],)), layer])
    model.set_weights([kernel])
    return model


def kernel(model):
    return model.get_weights()[0]


def dense_layers(count=2):
    """Dense layers in a row, each from two to two."""
    return keras.Sequential([keras.Input((2,)), *(layers_.Dense(2) for _ in range(count))])


def layers(model):
    return model.layers


def train_layer(layer, trains):
    layer.trainable = trains


def sgd(model, rate=0.1):
    return keras.optimizers.SGD(rate)


def adamw(model, rate=0.1, decay=0.0):
    return keras.optimizers.AdamW(rate, weight_decay=decay)


def rate_of(optimizer):
    return float(optimizer.learning_rate)


def set_rate(optimizer, rate):
    optimizer.learning_rate = rate


def still(model, optimizer, steps=1):
    """Steps without a gradient."""
    for _ in range(steps):
        optimizer.apply_gradients([(tf.zeros(v.shape), v) for v in model.trainable_variables])


class Language(keras.Model):
    """A tied head, a frozen layer, a token, norms and dropout: a parameter of each kind."""

    def __init__(self, dropout):
        super().__init__()
        self.embedding = layers_.Embedding(50, 16, name="embedding")
        self.frozen = layers_.Dense(16, trainable=False, name="frozen")
        self.dense = layers_.Dense(16, activation="relu", name="dense")
        self.norm = layers_.LayerNormalization(name="norm")
        self.drop = layers_.Dropout(dropout)
        self.batch_norm = layers_.BatchNormalization(name="batch_norm")
        self.token = self.add_weight(name="token", shape=(1, 16), initializer="ones")

    def call(self, codes, training=False):
        x = self.norm(self.dense(self.frozen(self.embedding(codes))))
        x = self.batch_norm(self.drop(x, training=training), training=training)
        return tf.matmul(x + self.token, self.embedding.embeddings, transpose_b=True)


def language(dropout=0.5):
    keras.utils.set_random_seed(7)
    model = Language(dropout if KERAS_3 else 0.0)  # there it draws from what nobody can set back
    model(tf.range(12))
    return model


def with_spectral_norm(outputs):
    """One whose layer writes to its kernel in training, behind BatchNormalization."""
    keras.utils.set_random_seed(0)
    spectral = layers_.SpectralNormalization(layers_.Dense(outputs))
    return keras.Sequential([keras.Input((8,)), layers_.BatchNormalization(), spectral])


@functools.cache
def _mobilenet():
    network = keras.applications.MobileNetV2
    model = network((32, 32, 3), alpha=0.35, weights=None, classes=10)
    return model, model.get_weights()


def foreign():
    """A model of others, which takes a second to build: one for all, with its first weights."""
    model, weights = _mobilenet()
    model.set_weights(weights)
    return model


# Regularization ----------------------------------------------------------------------------------


def total(output, y=None):
    return tf.reduce_sum(output)


def wide():
    """A layer in float64."""
    return keras.Sequential([keras.Input((2,)), layers_.Dense(1, dtype="float64")])


def decay_of(optimizer):
    return float(optimizer.weight_decay)


def kernels_of(model):
    """How many convolutions and dense layers it has."""
    kinds = layers_.Conv2D, layers_.DepthwiseConv2D, layers_.Dense
    return sum(isinstance(layer, kinds) for layer in model.layers)


def computed():
    """Layers whose kernels are computed from others, and which of them decay."""
    inner = [layers_.Embedding(5, 3), layers_.Conv1D(4, 1), layers_.Dense(4)]
    spectral = [layers_.SpectralNormalization(layer) for layer in inner]
    model = keras.Sequential([*spectral, layers_.LayerNormalization()])
    model(np.zeros((1, 2), np.int32))
    return model, [name_of(layer.kernel) for layer in inner[1:]]


def identities():
    """Models whose output is their input, if nothing is dropped."""
    inputs = keras.Input((WIDTH,))
    dense = [layers_.Dense(WIDTH, kernel_initializer="identity") for _ in range(4)]
    tail = layers_.Activation("linear")(layers_.ReLU()(dense[3](dense[2](inputs))))
    return [keras.Sequential([keras.Input((WIDTH,)), *dense[:2]]), keras.Model(inputs, tail)]


def dropped():
    """Attention with dropout, one that is off, one of each other kind."""
    inputs = keras.Input((3, 8))
    x = layers_.MultiHeadAttention(2, 4, dropout=0.1)(inputs, inputs)
    x = layers_.Dropout(0.0)(x)
    for kind in (layers_.SpatialDropout1D, layers_.GaussianDropout, layers_.AlphaDropout):
        x = kind(0.2)(x)
    return keras.Model(inputs, x)


def dropout_rates(model):
    attention = model.layers[1]
    assert attention._dropout == attention._dropout_layer.rate
    return [attention._dropout, *(layer.rate for layer in model.layers[2:])]


def without_dense():
    return keras.Sequential([layers_.ReLU()])


def branched():
    """A head whose output is added to another branch's."""
    inputs = keras.Input((4,))
    return keras.Model(inputs, layers_.Add()([layers_.Dense(4)(inputs), inputs]))


def dense_within_another():
    return keras.Sequential([layers_.Dense(2), layers_.TimeDistributed(layers_.Dense(2))])


def built(model):
    """An optimizer that has its variables already."""
    optimizer = sgd(model)
    optimizer.build(model.trainable_variables)
    return optimizer


def of_dicts():
    """A model whose inputs and output are in dicts, and inputs for it."""
    one, other = keras.Input((4,), name="one"), keras.Input((4,), name="other")
    logits = layers_.Dense(3)(layers_.Dense(5)(layers_.Add()([one, other])))
    x = {"x": tf.ones((2, 4)), "z": tf.ones((2, 4))}
    return keras.Model({"x": one, "z": other}, {"logits": logits}), x


def of_integers():
    parts = layers_.Embedding(10, 4), layers_.Flatten(), layers_.Dense(3)
    return keras.Sequential([keras.Input((7,), dtype="int32"), *parts])


def convolution_and_dense():
    parts = layers_.Conv2D(2, 1), layers_.Flatten(), layers_.Dense(2)
    return keras.Sequential([keras.Input((2, 2, 2)), *parts])


# Initialization ----------------------------------------------------------------------------------


def layers_of_each_kind():
    found = {
        "dense": layers_.Dense(300),
        "convolution": layers_.Conv2D(64, 3),
        "grouped": layers_.Conv2D(64, 3, groups=4),
        "depthwise": layers_.DepthwiseConv2D(5, depth_multiplier=2),
        "transposed": layers_.Conv2DTranspose(48, 4, strides=2),
        "attention": layers_.MultiHeadAttention(4, 16),
        "lstm": layers_.LSTM(32),
        "gru": layers_.GRU(32),
    }
    channels = {"convolution": 16, "grouped": 32, "depthwise": 96, "transposed": 32}
    for name, layer in found.items():
        if name == "attention":
            layer(tf.zeros((1, 2, 64)), tf.zeros((1, 2, 64)))
        elif name in channels:
            layer(tf.zeros((1, 8, 8, channels[name])))
        else:
            layer(tf.zeros((1, 200) if name == "dense" else (1, 2, 48)))
    return found


def holder(layers):
    class Holder(keras.Model):
        def __init__(self):
            super().__init__()
            self.inner = list(layers.values())
            self.built = True

        def call(self, x):
            return x

    return Holder()


def matrices(name, layer):
    """(kernel, matrices of (inputs, outputs)) written out apart from the technique."""
    first = numpy(layer.weights[0])
    if name in ("lstm", "gru"):
        kernels = zip(("input", "recurrent"), (first, numpy(layer.weights[1])), strict=True)
        gates = 4 if name == "lstm" else 3
        return {f"{name} {kind}": np.split(kernel, gates, axis=1) for kind, kernel in kernels}
    if name == "attention":
        kernels = zip(("query", "key", "value", "out"), layer.weights[::2], strict=True)
        return {kind: [numpy(kernel).reshape(64, 64)] for kind, kernel in kernels}
    if name == "depthwise":
        return {name: [first[:, :, channel].reshape(25, 2) for channel in range(96)]}
    if name == "transposed":
        return {name: [first.transpose(0, 1, 3, 2).reshape(-1, 48)]}
    groups = np.split(first, getattr(layer, "groups", 1), axis=-1)
    return {name: [group.reshape(-1, group.shape[-1]) for group in groups]}


def biases(name, layer):
    found = layer.weights[1::2] if name == "attention" else layer.weights[-1:]
    return np.concatenate([numpy(bias).ravel() for bias in found])


def freeze_first_kernel(network):
    """Of a deep network; returns it."""
    layer = next(layer for layer in network.layers if layer.weights)
    layer.kernel.trainable = False
    return layer.kernel


def foreign_models():
    """Keras's own networks: depthwise, separable and ordinary convolutions."""
    inputs = keras.Input((8, 8, 3))
    x = layers_.Reshape((36, 8))(layers_.SeparableConv2D(8, 3)(inputs))
    return [foreign(), keras.Model(inputs, layers_.Bidirectional(layers_.GRU(4))(x))]


def without_parameters():
    return keras.Sequential([layers_.Dense(3)])


def normed():
    return with_spectral_norm(3)


# Gradient health ---------------------------------------------------------------------------------


def write_kernels(network, kernels):
    """Of a deep network; its biases are zero."""
    dense = [layer for layer in network.layers if layer.weights]
    for layer, values in zip(dense, kernels, strict=True):
        layer.set_weights([values, np.zeros(values.shape[1])])


def ending_in(name):
    """Two layers, the last one of this name."""
    parts = layers_.Dense(3, name="first"), layers_.Dense(4, name=name)
    return keras.Sequential([keras.Input((3,)), *parts])


# Averaging ---------------------------------------------------------------------------------------


def dense_of(dtype):
    """A layer in this precision."""
    return keras.Sequential([keras.Input((1,)), layers_.Dense(1, dtype=dtype)])


def kept(average):
    return average.get_weights()


def take(average, kept):
    average.set_weights(kept)


def modes_of_norms(model):
    parts = model._flatten_layers(include_self=False)
    return [each.momentum for each in parts if isinstance(each, layers_.BatchNormalization)]


def mean_of(norm):
    return numpy(norm.moving_mean)


def first_convolution(model, x):
    """What it makes of a batch: NumPy, (pixels, channels)."""
    parts = model._flatten_layers(include_self=False)
    layer = next(each for each in parts if isinstance(each, layers_.Conv2D))
    return numpy(layer(x)).reshape(-1, layer.filters)


def two_norms(x):
    model = keras.Sequential([layers_.BatchNormalization() for _ in range(2)])
    model(x)
    return model


class Siamese(keras.Model):
    """One BatchNormalization of the sum of two inputs, or of one after the other."""

    def __init__(self, shared):
        super().__init__()
        self.norm, self.shared = layers_.BatchNormalization(), shared

    def call(self, left, right, training=False):
        if not self.shared:
            return self.norm(left + right, training=training)
        self.norm(left, training=False)  # which changes no statistics
        return self.norm(left, training=training) - self.norm(right + 5, training=training)


def call(model, pair):
    model(*map(tf.constant, pair))


class Stretch(layers_.Layer):
    rate = 2.0  # not one of dropout

    def call(self, x):
        return x * self.rate


def behind_dropout(x):
    """A model, its norm, and the mean of what that is given without dropout."""
    kinds = layers_.Dropout, layers_.SpatialDropout1D, layers_.GaussianDropout
    norm, dropouts = layers_.BatchNormalization(), (*kinds, layers_.AlphaDropout)
    model = keras.Sequential([*(kind(0.5) for kind in dropouts), Stretch(), norm])
    model(x)
    return model, norm, 2 * numpy(x).mean((0, 1))


def norm_beside(layer, x):
    """BatchNormalization behind a layer."""
    model = keras.Sequential([layer, layers_.BatchNormalization()])
    model(x)
    return model


class Decorated(keras.Model):
    """Its `call` is a graph."""

    def __init__(self):
        super().__init__()
        self.norm = layers_.BatchNormalization()

    @tf.function
    def call(self, x, training=False):
        return self.norm(x, training=training)


# Checkpoints -------------------------------------------------------------------------------------


def with_dropout(seed, width):
    keras.utils.set_random_seed(seed)
    dropout = layers_.Dropout(0.5 if KERAS_3 else 0.0)  # there it draws from what no file holds
    parts = layers_.Dense(width), dropout, layers_.Dense(4)
    return keras.Sequential([keras.Input((8,)), *parts])


def low_precision(seed):
    """A layer in bfloat16."""
    keras.utils.set_random_seed(seed)
    model = keras.Sequential([keras.Input((3,)), layers_.Dense(4, dtype="bfloat16")])
    assert {tf.as_dtype(variable.dtype) for variable in model.variables} == {tf.bfloat16}
    return model


def save_pickle(path):
    """An archive with an object, which would be unpickled."""
    with path.open("wb") as file:
        np.savez(file, head=np.array([object()], dtype=object))


def loss_scaled(model):
    optimizer = keras.mixed_precision.LossScaleOptimizer(sgd(model))
    optimizer.build(model.trainable_variables)
    return optimizer


def normalised(x):
    """A model that is adapted, and one that is not."""
    norms = layers_.Normalization(), layers_.Normalization()
    models = [keras.Sequential([keras.Input((8,)), norm, layers_.Dense(2)]) for norm in norms]
    norms[0].adapt(x)
    return models


def masked(x):
    """A model of which most is pruned, and one of which nothing is yet."""
    dense = with_dropout(1, 16)
    settings = {"final_sparsity": 0.9, "begin_step": 0, "end_step": 1, "frequency": 1}
    (one, update), (other, _) = (pruning.apply_pruning(dense, **settings) for _ in range(2))
    update(1)
    return one, other


def halved(x):
    """Two models of which half is pruned."""
    return [semi_structured_pruning.apply_two_to_four(with_dropout(seed, 16)) for seed in (0, 1)]


# Schedules ---------------------------------------------------------------------------------------


def weight():
    """Of zero, in float64."""
    return tf.Variable([0.0], dtype=tf.float64)


def sgd_of(weights, rate):
    return keras.optimizers.SGD(rate)


def moved(weight, optimizer, schedule):
    """How far a step with a gradient of one moves a weight."""
    before = float(weight[0])
    optimizer.apply_gradients([(tf.ones([1], tf.float64), weight)])
    return before - float(weight[0])


def progress(optimizer, schedule):
    """What goes into a checkpoint."""
    return int(optimizer.iterations.numpy())


def resume_at(optimizer, schedule, state):
    optimizer.iterations.assign(state)


def around(optimizer):
    wrapper = getattr(keras.optimizers, "LossScaleOptimizer", None)  # of Keras 3
    return (wrapper or keras.mixed_precision.LossScaleOptimizer)(optimizer)


# Learning-rate finder ----------------------------------------------------------------------------

DROPOUT = 0.5 if KERAS_3 else 0.0  # whose masks nobody can set back: see the technique's head


def with_batch_norm(kernels, dropout):
    keras.utils.set_random_seed(3)
    first, last = layers_.Dense(16), layers_.Dense(4)
    norm = layers_.BatchNormalization(epsilon=1e-3, momentum=0.9)
    between = norm, layers_.ReLU(), layers_.Dropout(dropout)
    model = keras.Sequential([keras.Input((8,)), first, *between, last])
    for layer, values in zip((first, last), kernels, strict=True):
        layer.kernel.assign(values)
    return model


def step_of_own_loss(model):
    """(layer, optimizer, step) of a loss with a layer of its own, which the optimizer trains."""
    scale, optimizer = keras.Sequential([keras.Input((4,)), layers_.Dense(4)]), sgd(model, 0.01)
    variables = [*model.trainable_variables, *scale.trainable_variables]
    optimizer.build(variables)

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = training_.cross_entropy(scale(model(x, training=True)), y)
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return loss

    return scale, optimizer, step


def scheduled(model):
    return sgd(model, keras.optimizers.schedules.CosineDecay(0.1, 10))


# Loss checks -------------------------------------------------------------------------------------


def cross_entropy(outputs, y):
    return tf.nn.sparse_softmax_cross_entropy_with_logits(y, outputs)


def classifier(outputs, form, kind="softmax"):
    keras.utils.set_random_seed(0)
    function = getattr(tf.nn, kind)
    ends = {
        "logits": [],
        "probabilities": [layers_.Lambda(lambda z: tf.identity(function(z)))],
        "probabilities by Keras": [layers_.Activation(kind)],
    }
    parts = layers_.Flatten(), layers_.Dropout(0.5), layers_.Dense(outputs)
    return keras.Sequential([keras.Input((8, 8, 1)), *parts, *ends[form]])


def loss_over(kind, takes):
    logits = takes == "logits"
    if kind == "sigmoid":
        return keras.losses.BinaryCrossentropy(from_logits=logits, label_smoothing=0.1)
    return keras.losses.SparseCategoricalCrossentropy(from_logits=logits)


def mean(value):
    return tf.reduce_mean(value)


def column(y):
    return tf.cast(y, tf.float32)[:, None]


def in_bfloat16(model):
    return keras.Sequential([model, layers_.Lambda(lambda z: tf.cast(z, tf.bfloat16))])


def squeezing(y):
    """(model, loss, data) of a probability a sample."""
    one, bce = classifier(1, "probabilities", "sigmoid"), keras.losses.binary_crossentropy
    return [(one, lambda p, y: bce(y, tf.squeeze(p)), {"y": (y % 2).astype(np.float32)})]


class Wrapped(keras.Model):
    """Probabilities in a dict, of an image by name."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def call(self, inputs, training=False):
        return {"logits": tf.nn.softmax(self.inner(inputs["image"]))}


def losses_of_outputs():
    return []


def of_two_outputs():
    inputs = keras.Input((8, 8, 1))
    return keras.Model(inputs, [inputs, inputs])


def foreign_classifiers():
    """(model, what is said of it)."""
    return [(foreign(), "a softmax twice")]


def exact_losses():
    """(loss over logits, or whose logits Keras finds in the same graph; classes)."""
    cce, bce = keras.losses.sparse_categorical_crossentropy, keras.losses.binary_crossentropy
    return [
        (lambda z, y: cce(y, z, from_logits=True), 10),
        (lambda z, y: cce(y, tf.nn.softmax(z)), 10),
        (lambda z, y: bce(y, z, from_logits=True), 1),
    ]


def losses_over_probabilities():
    """(loss, classes, margin up to which the gradient is kept, margin from which it is lost)."""
    cce, bce = keras.losses.sparse_categorical_crossentropy, keras.losses.binary_crossentropy
    return [
        (lambda z, y: cce(y, tf.identity(tf.nn.softmax(z))), 10, 15, 17),
        (lambda z, y: bce(y, tf.identity(tf.nn.sigmoid(z))), 1, 10, 17),
    ]


# Where NaN begins --------------------------------------------------------------------------------


def with_norm(*middle):
    """The layer in the middle of a clean one writes to its kernel."""
    keras.utils.set_random_seed(0)
    middle = middle or (layers_.SpectralNormalization(layers_.Dense(8)),)
    first, last = layers_.Dense(8, name="first"), layers_.Dense(4, name="last")
    parts = first, layers_.BatchNormalization(), *middle, layers_.Dropout(0.5), last
    return keras.Sequential([keras.Input((8, 8, 1)), layers_.Flatten(), *parts])


def broken():
    """(model, what is said of it)."""
    in_weight = with_norm()
    values = numpy(in_weight.get_layer("first").kernel)
    values[0, 0] = np.nan
    in_weight.get_layer("first").kernel.assign(values)
    log = layers_.Lambda(lambda x: tf.math.log(x - x), name="log")
    root = layers_.Lambda(lambda x: tf.sqrt(x - x), name="root")
    return [
        (in_weight, "first/kernel"),
        (with_norm(log), "not finite: batch 7: output of layer log: 64 infinite of 64 values"),
        (with_norm(root), "batch_normalization"),
    ]


def broken_foreign():
    model = foreign()
    norm = model.get_layer("block_3_expand_BN")
    norm.gamma.assign(np.full(norm.gamma.shape, np.nan))
    return model, "block_3_expand_BN/gamma"


def has_no_hooks(model):
    return not any("call" in vars(each) for each in model._flatten_layers(include_self=False))


# Data checks -------------------------------------------------------------------------------------


def half(x):
    return tf.cast(x, tf.bfloat16)


class Batches(keras.utils.Sequence):
    """With weights."""

    def __init__(self, *parts):
        super().__init__()
        self.parts = parts

    def __len__(self):
        return 4

    def __getitem__(self, number):
        rows = slice(16 * number, 16 * number + 16)
        return *(part[rows] for part in self.parts), np.ones(16, np.float32)


def datasets(x, y):
    """(dataset, how many batches it has)."""
    pairs = tf.data.Dataset.from_tensor_slices((x, y))
    return [(pairs.batch(16), 4), (Batches(x, y), 4)]
