"""TensorFlow's models of the tests of model and tensor parallelism: (model, optimizer, loss).

All devices are in one process: their optimizers say what they were given in `BUILT`.
"""

from pathlib import Path

import numpy as np
import tensorflow as tf
from tensorflow.experimental import dtensor

from shared import parallel
from shared.specs import TASKS
from shared.weights import init_weights
from tests.parallel.splitting import MOMENTUM, RATE, weights
from tf_impl.kit import models, replicas, training
from tf_impl.train_step import gradient_accumulation  # noqa: F401 - the tests take it

keras, layers = tf.keras, tf.keras.layers
BUILT, PASSED = [], []
tensor = tf.constant


def split_cpu():
    """Make four devices of it, before anything runs."""
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 4)


def launch_in(folder: Path):
    """`launch` of the kit in this process."""

    def launch(make, build, dataset, run, settings):
        with parallel.training_folder(dataset) as samples:
            given = parallel.arguments(make, build, samples, run, settings)
            given += ["--threads=1", f"--out={folder}/result.npz"]
            replicas.train(parallel.options(make).parse_args(given))
        return parallel.Result.load(folder / "result.npz")

    return launch


class Recording(keras.optimizers.SGD):
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


def built(model):
    return model, Recording(RATE, momentum=MOMENTUM), training.cross_entropy


def net(norm):
    parts = [keras.Input((12, 12, 3)), layers.Conv2D(8, 3, use_bias=False, name="conv0")]
    parts += [layers.ReLU(name="relu0"), layers.Conv2D(8, 3, use_bias=False, name="conv1")]
    if norm:
        parts += [layers.BatchNormalization(momentum=0.9, epsilon=1e-5, name="bn")]
    parts += [layers.ReLU(name="relu1"), layers.GlobalAveragePooling2D(name="pool")]
    parts += [layers.Dense(16, name="up"), layers.ReLU(name="act"), layers.Dense(10, name="down")]
    model = keras.Sequential(parts)
    models.import_weights(model, weights(norm))
    return model


def cnn():
    return built(net(norm=False))


def norm():
    return built(net(norm=True))


def gpt():
    spec = TASKS["text-gpt"].model
    return built(models.build(spec, init_weights(spec, 0)))


def mixed():
    """Inputs by name, one of them normalised by what was adapted, and losses of the model's own."""
    penalty = keras.regularizers.L2(0.05)
    keras.utils.set_random_seed(0)
    numbers = keras.Input((6,), name="numbers")
    codes = keras.Input((4,), dtype="int64", name="codes")
    norm = layers.Normalization(name="norm")
    norm.adapt(np.random.default_rng(5).normal(3.0, 2.0, (50, 6)).astype(np.float32))
    looked_up = layers.GlobalAveragePooling1D()(layers.Embedding(12, 8, name="codes_")(codes))
    x = layers.Dense(8, kernel_regularizer=penalty, name="numbers_")(norm(numbers))
    x = layers.Dense(16, kernel_regularizer=penalty, name="up")(layers.Add()([x, looked_up]))
    x = layers.Dense(10, bias_regularizer=penalty, name="down")(layers.ReLU(name="act")(x))
    return built(keras.Model({"numbers": numbers, "codes": codes}, x))


def by_path(model):
    return {v.path.removeprefix(f"{model.name}/"): v for v in model.variables}


def plain(batches):
    """(weights, losses) of the mixed model in Keras's own `fit`, whose losses are with its own."""
    model, optimizer, _ = mixed()
    optimizer.build(model.trainable_variables)
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    fits = [model.fit(x, y, batch_size=len(y), verbose=0) for x, y in batches]
    losses = [fit.history["loss"][0] for fit in fits]
    return {v.path.removeprefix(f"{model.name}/"): v.numpy() for v in model.weights}, losses


def own_layout(x):
    return x


def canonical(build, weights):
    """By the names that both frameworks share."""
    model, _, _ = build()
    variables = by_path(model)
    assert variables.keys() == weights.keys()
    for path, value in weights.items():
        variables[path].assign(value)
    return models.export_weights(model)


# What is refused


class Own(keras.Model):
    def call(self, x):
        return x


def trained_by(model_of, optimizer):
    """A build with another optimizer, of the model that this one takes."""

    def build():
        model, _, loss_fn = model_of()
        return model, optimizer(model), loss_fn

    return build


def scaled(model):
    return keras.mixed_precision.LossScaleOptimizer(Recording(RATE, momentum=MOMENTUM))


def biases_left_out(model):
    """Biases left out themselves, of which a stage has copies."""
    optimizer = keras.optimizers.AdamW(0.1)
    optimizer.exclude_from_weight_decay(var_list=[v for v in model.weights if v.name == "bias"])
    return optimizer


def bound():
    """Weights of a layer that may not be negative."""
    parts = [keras.Input((6,)), layers.Dense(8, kernel_constraint="non_neg", name="up")]
    return built(keras.Sequential([*parts, layers.Dense(4, name="down")]))


def undecayed():
    """AdamW whose decay leaves biases out by name; those are ones, and have no gradient."""
    parts = [keras.Input((6,)), layers.Dense(8, bias_initializer="ones", name="up")]
    parts += [layers.Dense(6, bias_initializer="ones", name="down")]
    optimizer = keras.optimizers.AdamW(0.1, weight_decay=0.5)
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    return keras.Sequential(parts), optimizer, lambda output, y: 0.0 * tf.reduce_sum(output)


def skipping():
    """A shortcut around the layer `up`: two tensors would cross a cut before it."""
    images = keras.Input((12, 12, 3))
    wide = layers.Dense(8, name="left")(layers.Flatten(name="flat")(images))
    deep = layers.Dense(8, name="up")(layers.ReLU(name="act")(wide))
    return built(keras.Model(images, layers.Add(name="down")([wide, deep])))


def tied():
    """A layer that is called before a cut at `up`, and behind it."""
    images, twice = keras.Input((12, 12, 3)), layers.Dense(8, name="twice")
    first = twice(layers.Dense(8, name="first")(layers.Flatten(name="flat")(images)))
    return built(keras.Model(images, twice(layers.Dense(8, name="up")(first))))


SIX = "conv0, conv1, pool, up, down"
CLIPPING = trained_by(cnn, lambda model: keras.optimizers.SGD(RATE, global_clipnorm=1.0))
STAGE_REFUSALS = [  # (build, settings, what is said)
    (lambda: built(Own()), {}, "only a functional or Sequential model"),
    (CLIPPING, {}, "global_clipnorm: a stage would clip by the norm of its "),
    (trained_by(cnn, scaled), {}, "a scaled loss: a stage would look for overflow in its "),
    (trained_by(cnn, biases_left_out), {}, "exclude_from_weight_decay: variables of "),
    (skipping, {"cut": "up"}, "cut: up can't be: "),
    (tied, {"cut": "up"}, "cut: up can't be: "),
    (cnn, {"cut": SIX}, "6 stages need as many devices, not 4"),
]
PART_REFUSALS = [
    # A row of an embedding gets a gradient for each time that it is read.
    (
        trained_by(mixed, lambda model: keras.optimizers.Adam(RATE)),
        {},
        "on one device Adam squares the sparse gradient of ",
    ),
    (trained_by(cnn, scaled), {}, "a scaled loss: train in bfloat16"),
    (
        trained_by(undecayed, lambda model: keras.optimizers.Muon(RATE)),
        {},
        "Muon asks for the paths of variables: DTensor's have none",
    ),
    (bound, {}, "up/kernel has a constraint: variables of DTensor have none"),
]


# In one process


class Mark(layers.Layer):
    """Notes in `PASSED` when a micro-batch goes by."""

    def call(self, x, training=False):
        return _passing(x, self.name) if training else x


def _passing(x, name):
    @tf.custom_gradient
    def both(x):
        return _noted(x, name, "forward"), lambda upstream: _noted(upstream, name, "back")

    return both(x)


def _noted(x, name, way):
    def note(value):
        PASSED.append((name, way))
        return value

    # Not stateful: the graph would keep such calls in the order in which it was written.
    value = tf.numpy_function(note, [x], x.dtype, stateful=False)
    return tf.ensure_shape(value, x.shape)


def marked():
    """A net with a mark in each stage."""
    parts = [keras.Input((12, 12, 3)), layers.Conv2D(8, 3, name="conv0"), Mark(name="first")]
    parts += [layers.Conv2D(8, 3, name="conv1"), Mark(name="second")]
    parts += [layers.GlobalAveragePooling2D(name="pool"), layers.Dense(10, name="down")]
    return built(keras.Sequential(parts))
