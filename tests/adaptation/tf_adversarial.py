"""TensorFlow's models and words for the tests of adaptation."""

import numpy as np
import tensorflow as tf

from tests.recipes.tf_recipes import checkpoints, nonfinite, numpy, total  # noqa: F401
from tf_impl.kit import models, training
from tf_impl.recipes import gradient_health, learning_rate_finder  # noqa: F401 - the tests take it

keras, layers = tf.keras, tf.keras.layers
tensor = scalar = tf.constant


def cast(x, dtype):
    return tf.cast(x, dtype)


def gradients_at(function, *inputs):
    """Value and gradients of a scalar function of arrays or tensors."""
    tensors = [tf.convert_to_tensor(value) for value in inputs]
    with tf.GradientTape() as tape:
        tape.watch(tensors)
        value = function(*tensors)
    return numpy(value), [numpy(each) for each in tape.gradient(value, tensors)]


def weights(head):
    """Kernels (in, out) and biases."""
    return [np.array(value) for value in head.get_weights()]


def restore(other, model, folder):
    path = tf.train.Checkpoint(model=model).write(str(folder / "model"))
    tf.train.Checkpoint(model=other).read(path)


def count_one_pass(both):
    both.passes.assign(1)


def plain_gradients(model, head, x, y):
    """Both losses together, gradients of each by name, and those of the domain head."""
    features, top = models.split_head(model)
    parameters = models.named_parameters(model)
    cross_entropy = tf.nn.sigmoid_cross_entropy_with_logits
    with tf.GradientTape(persistent=True) as tape:
        out, count = features(tf.concat(x, 0), training=True), len(y)
        label = training.cross_entropy(top(out[:count]), y)
        logits = head(out)
        domain = sum(
            tf.reduce_mean(cross_entropy(tf.fill(part.shape, wanted), part)) / 2
            for part, wanted in ((logits[:count], 0.0), (logits[count:], 1.0))
        )
    found = []
    for loss in (label, domain):
        named = zip(parameters, tape.gradient(loss, list(parameters.values())), strict=True)
        found.append({key: numpy(g) for key, g in named if g is not None})
    of_head = tape.gradient(domain, head.trainable_variables)
    return float(label + domain), *found, [numpy(gradient) for gradient in of_head]


def of_two_inputs(technique):
    """An adversarial model, a pair of domains for it, and the logits of the source."""
    inputs = [keras.Input((3,)), keras.Input((3,))]
    features = keras.Model(inputs, layers.Dense(4)(layers.Add()(inputs)))
    domain = technique.make_domain_head(width=4)
    top = keras.Sequential([keras.Input((4,)), layers.Dense(2)])
    both = technique.AdversarialModel(features, top, domain, steps=1)
    a, b, c, d = tf.unstack(tf.random.stateless_normal((4, 5, 3), (0, 0)))
    return both, [([a, b], [c, d])], numpy(top(features([a, b])))


def call(both, inputs):
    return both(inputs)


def eager_and_graph(technique, both, inputs):
    """A gradient of the domain loss, reversed in full; and in a graph."""
    both.passes.assign(1)

    def gradient():
        with tf.GradientTape() as tape:
            loss = technique.domain_loss(*both(inputs)[1:])
        return tape.gradient(loss, both.features.trainable_variables)[0]

    return numpy(gradient()), numpy(tf.function(gradient)())


def without_rows():
    """Features that mix samples, and a head."""
    mix = layers.Lambda(lambda x: tf.reshape(x, (-1, 3)))
    return keras.Sequential([keras.Input((2, 3)), mix]), keras.Sequential(
        [keras.Input((3,)), layers.Dense(2)]
    )


def run_in_a_graph(both, domains):
    return tf.function(lambda source, target: both((source, target)))(*tf.unstack(domains))
