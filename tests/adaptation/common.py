"""What the scenarios of both techniques share: a small model, two domains, plain gradients."""

from __future__ import annotations

import sys

import numpy as np

from shared.specs import CNNSpec, Recipe, parameter_shapes
from shared.weights import init_weights
from tests import workers

FRAMEWORK = "pt" if sys.argv[1:] == ["pt"] else "tf"
TECHNIQUES = ("adaptation.adversarial", "adaptation.discrepancy")
impl = workers.implementation(FRAMEWORK, *TECHNIQUES)
kit = impl.kit
SPEC = CNNSpec((8, 8, 2), ((4, 1), (6, 2)), num_classes=10)
WIDTH, HIDDEN, STEPS = 6, 5, 10
RECIPE = Recipe("sgd", learning_rate=0.05, epochs=1, accuracy_batch_size=8)
DESCENT = Recipe("sgd", learning_rate=1.0, epochs=1, accuracy_batch_size=8, momentum=0.0)


def batches(count, size=16):
    """((source, target), labels), the same in every process; the target is brighter, and fewer."""
    random = np.random.default_rng(3)
    found = []
    for _ in range(count):
        source = random.normal(size=(size, 8, 8, 2)).astype(np.float32)
        target = random.normal(size=(size - 4, 8, 8, 2)).astype(np.float32) * 2 + 1
        y = random.integers(0, 10, size)
        (x, labels), (other, _) = (kit.data.to_device(part, y) for part in (source, target))
        found.append(((x, other), labels))
    return found


def model():
    """A new model, and its features and head."""
    made = kit.models.build(SPEC, init_weights(SPEC, seed=1))
    return made, kit.models.split_head(made)


def weights(made):
    exported = kit.models.export_weights(made)
    return {name: np.array(exported[name]) for name in parameter_shapes(SPEC)}


def domain_weights(head):
    """Kernels (in, out) and biases of a domain head."""
    if FRAMEWORK == "pt":
        return [p.detach().numpy().T.copy() for p in head.parameters()]
    return [np.array(value) for value in head.get_weights()]


def said(call):
    """What a refusal says."""
    try:
        call()
    except ValueError as error:
        return str(error)
    return None


def pt_forms(make):
    """What a model of (source, target) in PyTorch says of domains that do not go together.

    make: features of three -> the model.
    """
    import torch

    class Sum(torch.nn.Module):
        def forward(self, x, y=None):
            return x if y is None else x + y

    a, b, both = torch.randn(4, 3), torch.randn(5, 3), make(Sum())
    flat = make(torch.nn.Flatten(0, 1))
    return {
        "without a mask": len(both((a, None), (b, None))[2]) == len(b),
        "another form": said(lambda: both((a, a), b[:2])),
        "another name": said(lambda: both({"x": a}, {"x": b, "y": b})),
        "no samples": said(lambda: both(a, b[:0])),
        "rows": said(lambda: flat(*torch.randn(2, 4, 2, 3))),
    }


def tf_forms(make):
    """What a model of (source, target) in Keras says of features without a row a sample."""
    import tensorflow as tf

    flat = tf.keras.Sequential(
        [tf.keras.Input((2, 3)), tf.keras.layers.Lambda(lambda x: tf.reshape(x, (-1, 3)))]
    )
    head = tf.keras.layers.Dense(2)
    head.build((None, 3))
    both, domains = make(flat, head), tf.zeros((2, 4, 2, 3))
    step = tf.function(lambda source, target: both((source, target)))
    return {"rows": said(lambda: step(*domains))}


def gradient(function, *inputs):
    """Value and gradients of a scalar function of arrays (n, ...)."""
    if FRAMEWORK == "pt":
        import torch

        tensors = [torch.tensor(value, requires_grad=True) for value in inputs]
        value = function(*tensors)
        value.backward()
        return value.detach().numpy(), [tensor.grad.numpy() for tensor in tensors]
    import tensorflow as tf

    tensors = [tf.constant(value) for value in inputs]
    with tf.GradientTape() as tape:
        tape.watch(tensors)
        value = function(*tensors)
    return value.numpy(), [g.numpy() for g in tape.gradient(value, tensors)]


def scalar(value):
    """A scalar tensor."""
    if FRAMEWORK == "pt":
        import torch

        return torch.tensor(value)
    import tensorflow as tf

    return tf.constant(value)
