"""TensorFlow's models and words for the tests of distillation and feature distillation."""

import numpy as np
import tensorflow as tf

from tests.compression.teaching import LEFT, RIGHT, TARGET
from tf_impl import kit  # noqa: F401 - the tests take these
from tf_impl.compression import distillation, pruning, structured_pruning  # noqa: F401

keras, layers = tf.keras, tf.keras.layers

X, Y = tf.constant(LEFT), tf.constant(TARGET)
PAIR = [X, tf.constant(RIGHT)]
MAP = tf.zeros((9, 2, 2), tf.int64)  # labels of `pixels`
LAYERS = "conv1.bn", "stage1.block0.relu"  # of CNN and RESNET: both give 4 x 4 pixels
NEUTRAL = 1e-6  # how near the neutral setting is to the plain step
ACTIVATION = "conv1.relu"
OTHER_PIXELS = "conv0.bn"


def recorder(model):
    """An optimizer that puts the gradient in the variable's place."""

    class Recorder(keras.optimizers.SGD):
        def update_step(self, gradient, variable, learning_rate=None):
            variable.assign(gradient)

    optimizer = Recorder(1.0)
    optimizer.jit_compile = False
    optimizer.build(model.trainable_variables)
    return optimizer


def descent(model, rate=0.1):
    return keras.optimizers.SGD(rate)


def state(optimizer):
    variables = optimizer.variables
    variables = variables() if callable(variables) else variables
    return float(sum(np.abs(np.array(v, dtype=np.float64)).sum() for v in variables))


def numpy(tensor):
    return np.array(tensor)


def channels_last(images):
    """Images in NumPy, in the layout of the data sets."""
    return np.array(images)


# Losses


def soft(technique, ours, theirs, temperature):
    """Value and gradient of the soft loss of NumPy's logits."""
    student = tf.constant(ours)
    with tf.GradientTape() as tape:
        tape.watch(student)
        loss = technique.soft_loss(student, tf.constant(theirs), temperature=temperature)
    return float(loss), np.array(tape.gradient(loss, student))


def cast(values, dtype):
    return tf.cast(values, dtype)


def mistaken(ours, theirs, *, temperature, class_axis):
    """As some tutorials write it."""
    log_p, log_q = (tf.nn.log_softmax(v / temperature) for v in (theirs, ours))
    return keras.losses.KLDivergence()(log_p, log_q)


def half_mistaken(ours, theirs, *, temperature, class_axis):
    """The same with the teacher's probabilities."""
    p, log_q = tf.nn.softmax(theirs / temperature), tf.nn.log_softmax(ours / temperature)
    return keras.losses.KLDivergence()(p, log_q)


def no_loss(output, labels):
    """0, with a gradient of 0."""
    return 0.0 * tf.reduce_sum(output)


# Models


def linear(kernel):
    layer = layers.Dense(kernel.shape[1], use_bias=False)
    model = keras.Sequential([keras.Input((kernel.shape[0],)), layer])
    model.set_weights([kernel])
    return model


def kernel(model):
    return model.get_weights()[0]


def dense(outputs, activation=None):
    keras.utils.set_random_seed(1)
    above = [layers.Activation(activation)] if activation else []
    return keras.Sequential([keras.Input((4,)), layers.Dense(outputs), *above])


def flat():
    """Outputs without an axis of classes."""
    return keras.Sequential([keras.Input((4,)), dense(1), layers.Reshape(())])


def freeze(model):
    model.trainable = False
    return model


def pixels(seed):
    """Logits (n, classes, h, w)."""
    keras.utils.set_random_seed(seed)
    return keras.Sequential([keras.Input((4,)), layers.Dense(12), layers.Reshape((3, 2, 2))])


def two_maps(seed):
    x, model = keras.Input((4,)), pixels(seed)
    return keras.Model(x, {"out": model(x), "aux": model(x)})


def Forked(width, classes="classes"):  # noqa: N802 - the twin's class
    """Two outputs by name behind `hidden`."""
    keras.utils.set_random_seed(0)
    x = keras.Input((4,))
    hidden = layers.Dense(width, name="hidden")(x)
    return keras.Model(x, {classes: layers.Dense(3)(hidden), "size": layers.Dense(1)(hidden)})


class Two(keras.Model):
    """Subclassed, of two arguments and a third that may be None."""

    def __init__(self, width):
        super().__init__()
        self.left, self.right = layers.Dense(width), layers.Dense(width)
        self.norm, self.top = layers.BatchNormalization(name="norm"), layers.Dense(3)

    def call(self, a, b, offset=None, training=False):
        inside = self.norm(self.left(a) + self.right(b), training=training)
        return self.top(tf.tanh(inside))


def subclassed(width):
    keras.utils.set_random_seed(0)
    model = Two(width)
    model(*PAIR)
    return model


def functional(width):
    """A functional model with a list of inputs."""
    keras.utils.set_random_seed(0)
    a, b = keras.Input((4,)), keras.Input((4,))
    both = layers.Add()([layers.Dense(width)(a), layers.Dense(width)(b)])
    inside = layers.BatchNormalization(name="norm")(both)
    return keras.Model([a, b], layers.Dense(3)(layers.Activation("tanh")(inside)))


def two_inputs():
    """(student, teacher, x) with several inputs: each kind."""
    return [two_inputs_in_a_graph(), (subclassed(3), subclassed(6), tuple(PAIR))]


def two_inputs_in_a_graph():
    """One in which layers can be found by name."""
    return functional(3), functional(6), PAIR


def optional_inputs():
    """A model, its inputs, and the same by name with None for one that is left out."""
    return subclassed(6), tuple(PAIR), {"offset": None, "a": PAIR[0], "b": PAIR[1]}


def by_name():
    """(student, teacher, x) whose inputs have names: each kind.

    Fed by tuples, as `tf.data` has them, and by names.
    """

    def two(width, named):
        keras.utils.set_random_seed(width)
        left, right = keras.Input((4,), name="left"), keras.Input((4,), name="right")
        x = layers.Dense(width, name="body")(layers.Add()([left, right]))
        inputs = {"left": left, "right": right} if named else [left, right]
        return keras.Model(inputs, layers.Dense(3)(layers.ReLU()(x)))

    named = {"left": PAIR[0], "right": PAIR[1]}
    return [(two(3, False), two(6, False), tuple(PAIR)), (two(3, True), two(6, True), named)]


def predicted(model, x):
    return model(*x, training=False) if isinstance(model, Two) else model(x, training=False)


# What a teacher keeps


def mix_modes(model):
    """Keras has no mode that is kept; what is kept is whether a layer may be trained."""
    model.get_layer("stage1.block0.conv0").trainable = False


def modes(model):
    return [layer.trainable for layer in model.layers]


def gradients(model):
    """No variable keeps its gradient."""
    return 0


# Features


def regressor(taught):
    weight, bias = taught.get_layer("regressor").get_weights()
    return {"kernel": weight, "bias": bias}


def feature_error(taught, teacher, layer, x):
    """The mean squared error as written out by hand."""
    reader = keras.Model(teacher.inputs, teacher.get_layer(layer).output)
    statistics = [np.array(v) for v in taught.non_trainable_variables]
    _, ours = taught(x, training=True)
    for variable, value in zip(taught.non_trainable_variables, statistics, strict=True):
        variable.assign(value)
    return float(np.square(np.array(ours) - np.array(reader(x, training=False))).mean())


def unbuilt():
    return keras.Sequential([layers.Dense(2, name="norm")])


def twice():
    """A layer "0" that runs twice, and "1"."""
    x, layer = keras.Input((4,)), layers.Dense(4, name="0")
    return keras.Model(x, layer(layers.Activation("tanh", name="1")(layer(x))))


# Keras alone


class Student(distillation.DistilledTraining, keras.Model):
    """A student for `fit`."""


CLASSES = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def fit(student, x=X, y=Y, epochs=1, **settings):
    """The losses of `fit` on one batch an epoch."""
    settings |= {"batch_size": len(x), "epochs": epochs, "shuffle": False, "verbose": 0}
    if not student.compiled:
        student.compile("sgd", CLASSES)
    return student.fit(x, y, **settings).history["loss"]


def regularized(kind=keras.Model):
    """A student with a loss of its own."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input((4,))
    hidden = layers.Dense(6, "tanh", kernel_regularizer=keras.regularizers.L2(0.1))
    return kind(inputs, layers.Dense(3)(hidden(inputs)))


def recurrent(kind=keras.Model):
    """An LSTM named "read", whose dropout draws from a seed."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input((4, 1))
    read = layers.LSTM(2, dropout=0.5, name="read")(inputs)
    return kind(inputs, layers.Dense(3)(read))


def seeds(model):
    return [np.array(v).tolist() for v in model.variables if "seed" in v.path]
