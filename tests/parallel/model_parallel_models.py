"""What the tests of model and tensor parallelism build, anew in each process that trains.

`<side>_<name>()` gives a model, its optimizer and its loss. The optimizers say what they were
given: in PyTorch in a file for each process, in the folder that MARKS names in the environment; in
TensorFlow, where all devices are in one process, in `BUILT`.
"""

import importlib
import json
import os
from collections import OrderedDict
from pathlib import Path
from typing import NamedTuple

import numpy as np
import psutil

from shared.specs import TASKS
from shared.weights import init_weights

RATE, MOMENTUM = 0.05, 0.9
BUILT, PASSED = [], []


def weights(norm: bool) -> dict[str, np.ndarray]:
    """Canonical weights of the small convolutional net."""
    random = np.random.default_rng(1)
    shapes = {"conv0.kernel": (3, 3, 3, 8), "conv1.kernel": (3, 3, 8, 8)}
    shapes |= {"up.kernel": (8, 16), "up.bias": (16,), "down.kernel": (16, 10), "down.bias": (10,)}
    found = {name: random.normal(0, 0.3, shape) for name, shape in shapes.items()}
    if norm:
        found |= {"bn.gamma": np.ones(8), "bn.beta": np.zeros(8)}
        found |= {"bn.mean": np.zeros(8), "bn.variance": np.ones(8)}
    return {name: value.astype(np.float32) for name, value in found.items()}


# PyTorch ------------------------------------------------------------------------------------------


def _pt(model):
    training = importlib.import_module("pt_impl.kit.training")
    return model, _recording_sgd(model.parameters()), training.cross_entropy


def _recording_sgd(parameters):
    import torch

    class Recording(torch.optim.SGD):
        def step(self):
            super().step()
            own = [p for group in self.param_groups for p in group["params"]]
            momenta = [state["momentum_buffer"] for state in self.state.values()]
            parts, momenta = (
                [p.to_local() if hasattr(p, "to_local") else p for p in every]
                for every in (own, momenta)
            )
            links = psutil.Process().net_connections("inet")
            mark = {
                "elements": sum(part.numel() for part in parts),
                "momenta": sum(part.numel() for part in momenta),
                "addresses": sorted({link.laddr.ip for link in links}),
                "threads": torch.get_num_threads(),
            }
            Path(os.environ["MARKS"], f"{os.getpid()}.json").write_text(json.dumps(mark))

    return Recording(parameters, lr=RATE, momentum=MOMENTUM)


def _pt_net(norm):
    from torch import nn

    from pt_impl.kit import models

    layers = OrderedDict(conv0=nn.Conv2d(3, 8, 3, bias=False), relu0=nn.ReLU())
    layers |= {"conv1": nn.Conv2d(8, 8, 3, bias=False)}
    if norm:
        layers |= {"bn": nn.BatchNorm2d(8)}
    layers |= {"relu1": nn.ReLU(), "pool": nn.AdaptiveAvgPool2d(1), "flat": nn.Flatten()}
    layers |= {"up": nn.Linear(8, 16), "act": nn.ReLU(), "down": nn.Linear(16, 10)}
    model = nn.Sequential(layers)
    models.import_weights(model, weights(norm))
    return model


def pt_cnn():
    return _pt(_pt_net(norm=False))


def pt_norm():
    """In evaluation mode, as a model is that was loaded."""
    return _pt(_pt_net(norm=True).eval())


def pt_gpt():
    task = TASKS["text-gpt"]
    models = importlib.import_module("pt_impl.kit.models")
    return _pt(models.build(task.model, init_weights(task.model, 0)))


def pt_mixed():
    """Inputs by name, and an output with logits."""
    import torch
    from torch import nn

    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.codes, self.numbers = nn.Embedding(12, 8), nn.Linear(6, 8)
            self.up, self.act, self.down = nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 10)

        def forward(self, numbers, codes):
            x = self.codes(codes).mean(1) + self.numbers(numbers)
            return Output(self.down(self.act(self.up(x))))

    torch.manual_seed(0)
    return _pt(Mixed())


class Output(NamedTuple):
    """As many libraries wrap what a model gives."""

    logits: object


def pt_random():
    """Weights that are drawn when it is built, and a loss of labels by name."""
    from torch import nn

    layers = OrderedDict(flat=nn.Flatten(), up=nn.Linear(432, 16), down=nn.Linear(16, 10))
    model, optimizer, loss_fn = _pt(nn.Sequential(layers))
    return model, optimizer, lambda output, y: loss_fn(output, y["digit"])


def pt_tied():
    model, _, _ = pt_gpt()
    model.head.weight = model.tokens.weight
    return _pt(model)


def pt_untraceable():
    from torch import nn

    class Branching(nn.Module):
        def forward(self, x):
            return x if x.sum() > 0 else -x

    model = _pt_net(norm=False)
    return _pt(nn.Sequential(OrderedDict(branch=Branching(), conv0=model)))


# TensorFlow ---------------------------------------------------------------------------------------


def _tf(model):
    training = importlib.import_module("tf_impl.kit.training")
    return model, _recording_keras(), training.cross_entropy


def _recording_keras():
    import tensorflow as tf
    from tensorflow.experimental import dtensor

    class Recording(tf.keras.optimizers.SGD):
        def build(self, variables):
            super().build(variables)
            mark = {"elements": [], "devices": [], "momenta": []}
            for variable, slot in zip(variables, self.variables[2:], strict=True):
                momentum = slot.value
                if isinstance(variable, dtensor.DVariable):
                    parts = dtensor.unpack(variable.read_value())
                    momenta = dtensor.unpack(momentum.read_value())
                    mark["devices"].append(sorted(part.device for part in parts))
                    mark["elements"].append([int(tf.size(part)) for part in parts])
                    mark["momenta"].append([int(tf.size(part)) for part in momenta])
                else:
                    mark["devices"].append([variable.value.device, momentum.device])
                    mark["elements"].append(int(tf.size(variable)))
            BUILT.append(mark)

    return Recording(RATE, momentum=MOMENTUM)


def _tf_net(norm):
    import tensorflow as tf

    from tf_impl.kit import models

    layers = tf.keras.layers
    net = [tf.keras.Input((12, 12, 3)), layers.Conv2D(8, 3, use_bias=False, name="conv0")]
    net += [layers.ReLU(name="relu0"), layers.Conv2D(8, 3, use_bias=False, name="conv1")]
    if norm:
        net += [layers.BatchNormalization(momentum=0.9, epsilon=1e-5, name="bn")]
    net += [layers.ReLU(name="relu1"), layers.GlobalAveragePooling2D(name="pool")]
    net += [layers.Dense(16, name="up"), layers.ReLU(name="act"), layers.Dense(10, name="down")]
    model = tf.keras.Sequential(net)
    models.import_weights(model, weights(norm))
    return model


def tf_cnn():
    return _tf(_tf_net(norm=False))


def tf_norm():
    return _tf(_tf_net(norm=True))


def tf_gpt():
    task = TASKS["text-gpt"]
    models = importlib.import_module("tf_impl.kit.models")
    return _tf(models.build(task.model, init_weights(task.model, 0)))


def tf_mixed():
    """Inputs by name, one of them normalised by what was adapted, and losses of the model's own."""
    import tensorflow as tf

    layers, penalty = tf.keras.layers, tf.keras.regularizers.L2(0.05)
    tf.keras.utils.set_random_seed(0)
    numbers = tf.keras.Input((6,), name="numbers")
    codes = tf.keras.Input((4,), dtype="int64", name="codes")
    norm = layers.Normalization(name="norm")
    norm.adapt(np.random.default_rng(5).normal(3.0, 2.0, (50, 6)).astype(np.float32))
    looked_up = layers.GlobalAveragePooling1D()(layers.Embedding(12, 8, name="codes_")(codes))
    x = layers.Dense(8, kernel_regularizer=penalty, name="numbers_")(norm(numbers))
    x = layers.Dense(16, kernel_regularizer=penalty, name="up")(layers.Add()([x, looked_up]))
    x = layers.Dense(10, bias_regularizer=penalty, name="down")(layers.ReLU(name="act")(x))
    return _tf(tf.keras.Model({"numbers": numbers, "codes": codes}, x))


def tf_subclassed():
    import tensorflow as tf

    class Own(tf.keras.Model):
        def call(self, x):
            return x

    return _tf(Own())


def tf_clipping():
    import tensorflow as tf

    model, _, loss_fn = tf_cnn()
    return model, tf.keras.optimizers.SGD(RATE, global_clipnorm=1.0), loss_fn


def tf_scaling():
    import tensorflow as tf

    model, optimizer, loss_fn = tf_cnn()
    return model, tf.keras.mixed_precision.LossScaleOptimizer(optimizer), loss_fn


def tf_bound():
    """Weights of a layer that may not be negative."""
    import tensorflow as tf

    layers = tf.keras.layers
    net = [tf.keras.Input((6,)), layers.Dense(8, kernel_constraint="non_neg", name="up")]
    return _tf(tf.keras.Sequential([*net, layers.Dense(4, name="down")]))


def tf_undecayed():
    """AdamW whose decay leaves biases out by name; those are ones, and have no gradient."""
    import tensorflow as tf

    layers = tf.keras.layers
    net = [tf.keras.Input((6,)), layers.Dense(8, bias_initializer="ones", name="up")]
    net += [layers.Dense(6, bias_initializer="ones", name="down")]
    optimizer = tf.keras.optimizers.AdamW(0.1, weight_decay=0.5)
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    return tf.keras.Sequential(net), optimizer, lambda output, y: 0.0 * tf.reduce_sum(output)


def tf_undecayed_by_variable():
    """Biases left out themselves, of which a stage has copies."""
    import tensorflow as tf

    model, _, loss_fn = tf_cnn()
    optimizer = tf.keras.optimizers.AdamW(0.1)
    optimizer.exclude_from_weight_decay(var_list=[v for v in model.weights if v.name == "bias"])
    return model, optimizer, loss_fn


def tf_adam():
    """A row of an embedding gets a gradient for each time that it is read."""
    import tensorflow as tf

    model, _, loss_fn = tf_mixed()
    return model, tf.keras.optimizers.Adam(RATE), loss_fn


def tf_muon():
    import tensorflow as tf

    model, _, loss_fn = tf_undecayed()
    return model, tf.keras.optimizers.Muon(RATE), loss_fn


def tf_skipping():
    """A shortcut around the layer `up`: two tensors would cross a cut before it."""
    import tensorflow as tf

    layers = tf.keras.layers
    images = tf.keras.Input((12, 12, 3))
    flat = layers.Flatten(name="flat")(images)
    wide = layers.Dense(8, name="left")(flat)
    deep = layers.Dense(8, name="up")(layers.ReLU(name="act")(wide))
    return _tf(tf.keras.Model(images, layers.Add(name="down")([wide, deep])))


def tf_tied():
    """A layer that is called before a cut at `up`, and behind it."""
    import tensorflow as tf

    layers = tf.keras.layers
    images = tf.keras.Input((12, 12, 3))
    twice = layers.Dense(8, name="twice")
    first = twice(layers.Dense(8, name="first")(layers.Flatten(name="flat")(images)))
    return _tf(tf.keras.Model(images, twice(layers.Dense(8, name="up")(first))))


def tf_marked():
    """The net with a mark in each stage, which notes in `PASSED` when a micro-batch goes by."""
    import tensorflow as tf

    class Mark(tf.keras.layers.Layer):
        def call(self, x, training=False):
            return passing(x, self.name) if training else x

    def passing(x, name):
        @tf.custom_gradient
        def both(x):
            return noted(x, name, "forward"), lambda upstream: noted(upstream, name, "back")

        return both(x)

    def noted(x, name, way):
        def note(value):
            PASSED.append([name, way])
            return value

        # Not stateful: the graph would keep such calls in the order in which it was written.
        value = tf.numpy_function(note, [x], x.dtype, stateful=False)
        return tf.ensure_shape(value, x.shape)

    layers = tf.keras.layers
    net = [tf.keras.Input((12, 12, 3)), layers.Conv2D(8, 3, name="conv0"), Mark(name="first")]
    net += [layers.Conv2D(8, 3, name="conv1"), Mark(name="second")]
    net += [layers.GlobalAveragePooling2D(name="pool"), layers.Dense(10, name="down")]
    return _tf(tf.keras.Sequential(net))
