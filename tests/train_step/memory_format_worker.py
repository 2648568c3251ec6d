"""One framework's share of the memory-format tests, in a process of its own.

`python memory_format_worker.py pt|tf|tf_keras` runs every scenario and prints one line of JSON:
scenario -> what was found, or {"error": traceback}. `test_memory_format.py` judges it.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from importlib import import_module
from types import SimpleNamespace
from unittest import mock

import numpy as np

from shared.specs import TASKS
from shared.weights import init_weights
from tests import workers
from tests.workers import raised

FRAMEWORK = "pt" if sys.argv[1:] == ["pt"] else "tf"
impl = workers.implementation(FRAMEWORK, "kit.operators", "train_step.memory_format")
kit = impl.kit
technique = impl.train_step.memory_format
operators = impl.kit.operators
CNN, RESNET = TASKS["digits-cnn"], TASKS["digits-resnet20"]
# A block of each kind: the others are the same layers.
RESNET = replace(RESNET, model=replace(RESNET.model, blocks_per_stage=1))
KERAS_3 = sys.argv[1:] == ["tf"]
DEFAULT = "channels_first" if FRAMEWORK == "pt" else "channels_last"


def batches(count=5, size=16):
    random = np.random.default_rng(7)
    found = []
    for _ in range(count):
        y = random.integers(0, 10, size)
        x = random.normal(size=(size, 32, 32, 1)) + y[:, None, None, None] / 5
        found.append((x.astype(np.float32), y))
    return kit.data.resident_batches(found)


def prepare(task, memory_format=None):
    """A model with its converting step and prediction; without a format, the baseline's."""
    model = kit.models.build(task.model, init_weights(task.model, seed=1))
    if memory_format:
        model = technique.apply_memory_format(model, memory_format=memory_format)
    optimizer = kit.training.make_optimizer(model, task.recipe)
    step = kit.training.make_train_step(model, optimizer, kit.training.cross_entropy)
    predict = kit.training.make_predict(model)

    def convert(x):
        return technique.convert_batch(x, memory_format=memory_format) if memory_format else x

    return SimpleNamespace(
        model=model,
        optimizer=optimizer,
        step=lambda x, y: step(convert(x), y),
        predict=lambda x: predict(convert(x)),
    )


def run(prepared, stream):
    return [kit.runtime.to_float(prepared.step(*batch)) for batch in stream]


# Scenarios for both frameworks ----------------------------------------------------------------


def losses():
    stream = batches()
    formats = {DEFAULT, "channels_last"}  # in TensorFlow one
    found = {name: run(prepare(CNN, name), stream) for name in formats}
    return found | {"baseline": run(prepare(CNN), stream), "default": found[DEFAULT]}


def formats():
    """What convolutions read and wrote, in training and prediction, by task and format."""
    x, y = batches(1)[0]
    found = {}
    wanted = [(CNN, name) for name in dict.fromkeys((None, DEFAULT, "channels_last"))]
    for task, memory_format in [*wanted, (RESNET, "channels_last")]:
        prepared = prepare(task, memory_format)
        found[f"{task.name} {memory_format}"] = [
            operators.convolution_formats(prepared.model, lambda p=prepared: p.step(x, y)),
            operators.convolution_formats(prepared.model, lambda p=prepared: p.predict(x)),
        ]
    return found


def unknown():
    prepared = prepare(CNN)
    before = kit.models.export_weights(prepared.model)
    x = batches(1)[0][0]
    found = {
        "apply": raised(
            technique.apply_memory_format, prepared.model, memory_format="channels_lost"
        ),
        "convert": raised(technique.convert_batch, x, memory_format="NHWC"),
        "flat": raised(technique.apply_memory_format, own.flat_model()),
    }
    after = kit.models.export_weights(prepared.model)
    found["kept"] = all(np.array_equal(before[name], after[name]) for name in before)
    return found


# Scenarios of one framework -------------------------------------------------------------------


class PyTorch:
    def __init__(self):
        import torch

        self.torch = torch

    def flat_model(self):
        return self.torch.nn.Linear(2, 2)

    def optimizer_from_before(self):
        """An optimizer made before the conversion: its parameters, and the format of its state."""
        model = kit.models.build(CNN.model, init_weights(CNN.model, seed=1))
        before = [id(p) for p in model.parameters()]
        optimizer = kit.training.make_optimizer(model, CNN.recipe)
        returned = technique.apply_memory_format(model)
        step = kit.training.make_train_step(model, optimizer, kit.training.cross_entropy)
        values = [step(technique.convert_batch(x), y).item() for x, y in batches(3)]
        kernel = model.conv1.conv.weight
        state = optimizer.state[kernel]["momentum_buffer"]
        return {
            "same": returned is model and before == [id(p) for p in model.parameters()],
            "state": state.stride() == kernel.stride() != kernel.contiguous().stride(),
            "losses": values,
        }

    def batch(self):
        """Strides of a batch of one channel, and what else a batch may hold."""
        torch = self.torch
        x = torch.arange(2.0 * 6 * 5).reshape(2, 1, 6, 5)
        last = technique.convert_batch(x)
        tree = {"images": (last, [last]), "codes": torch.arange(6).reshape(2, 3)}
        back = technique.convert_batch(tree, memory_format="channels_first")
        return {
            "last": last.stride(),
            "equal": torch.equal(x, last),
            "copied": technique.convert_batch(last) is not last,
            "back": [back["images"][0].stride(), back["images"][1][0].stride()],
            "codes": back["codes"] is tree["codes"],
        }

    def foreign(self):
        """A custom forward of two images, whose branches meet, with a transposed convolution."""
        torch = self.torch
        nn = torch.nn

        class Two(nn.Module):
            def __init__(self):
                super().__init__()
                self.left, self.right = nn.Conv2d(3, 8, 3), nn.Conv2d(3, 8, 3, groups=1)
                self.norm, self.up = nn.BatchNorm2d(16), nn.ConvTranspose2d(16, 4, 2, 2)
                self.head = nn.Linear(4, 5)

            def forward(self, a, b):
                both = torch.cat([self.left(a), self.right(b)], 1).relu()
                return {"logits": self.head(self.up(self.norm(both)).mean((2, 3)))}

        torch.manual_seed(0)
        model = Two()
        x = torch.randn(4, 3, 8, 8), torch.randn(4, 3, 8, 8)
        before = model(*x)["logits"].detach()
        names = list(model.state_dict())
        technique.apply_memory_format(model)
        x = technique.convert_batch(x)
        after = model(*x)["logits"].detach()
        return {
            "difference": float((after - before).abs().max() / before.abs().max()),
            "formats": operators.convolution_formats(model, lambda: model(*x)),
            "names": names == list(model.state_dict()),
            "hooks": sum(len(m._forward_hooks) for m in model.modules()),
        }

    def weights_alone(self):
        """An operator between convolutions that writes channels_first: the evidence shows it."""
        torch = self.torch

        class Reshaping(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.first, self.second = torch.nn.Conv2d(4, 4, 1), torch.nn.Conv2d(4, 4, 1)

            def forward(self, x):
                return self.second(self.first(x).contiguous())

        model = technique.apply_memory_format(Reshaping())
        x = technique.convert_batch(torch.randn(2, 4, 8, 8))
        return operators.convolution_formats(model, lambda: model(x))

    def three_dimensional(self):
        model = self.torch.nn.Sequential(
            self.torch.nn.Conv2d(2, 2, 3), self.torch.nn.Conv3d(2, 2, 3)
        )
        error = raised(technique.apply_memory_format, model)
        return {"said": error, "kept": model[0].weight.is_contiguous()}


class TensorFlow:
    def __init__(self):
        import tensorflow as tf

        self.tf, self.layers = tf, tf.keras.layers

    def flat_model(self):
        return self.tf.keras.Sequential([self.tf.keras.Input((2,)), self.layers.Dense(2)])

    def same_model(self):
        model = kit.models.build(CNN.model)
        return technique.apply_memory_format(model) is model

    def channels_first(self):
        """What the device says of the suite's own models, and whether they compute the same."""
        model = kit.models.build(CNN.model, init_weights(CNN.model, seed=1))
        settings = {"memory_format": "channels_first"}
        found = {
            "gpu": kit.runtime.device() != "CPU:0",
            "said": raised(technique.apply_memory_format, model, **settings),
        }
        if found["said"] is None:
            x, _ = kit.data.to_device(
                np.random.default_rng(0).normal(size=(4, *CNN.model.input_shape)).astype("f4"),
                np.zeros(4, np.int64),
            )
            copy = technique.apply_memory_format(model, **settings)
            ours = kit.training.make_predict(copy)(technique.convert_batch(x, **settings))
            theirs = kit.training.make_predict(model)(x)
            apart = np.linalg.norm(ours - theirs) / np.linalg.norm(theirs)
            found["apart"] = float(apart)
        return found

    def network(self, memory_format):
        """Images and codes in, branches that meet, and every kind of layer that is known."""
        layers, keras = self.layers, self.tf.keras
        axis = -1 if memory_format == "channels_last" else 1
        images = (8, 10, 3) if memory_format == "channels_last" else (3, 8, 10)
        keras.utils.set_random_seed(0)
        given = {"data_format": memory_format}
        a, b = keras.Input(images, name="a"), keras.Input((4,), name="b")
        x = layers.ZeroPadding2D(((1, 0), (0, 2)), name="pad", **given)(a)
        x = layers.Conv2D(4, 3, activation="relu", name="conv", **given)(x)
        y = layers.BatchNormalization(axis=axis, name="norm")(x)
        y = layers.DepthwiseConv2D(3, padding="same", name="depthwise", **given)(y)
        x = layers.Concatenate(axis=axis, name="both")([layers.ReLU()(x), y])
        x = layers.Add()([x, layers.Dropout(0.0)(x)])
        x = layers.MaxPooling2D(2, **given)(x)
        x = layers.Conv2DTranspose(2, 2, strides=2, name="up", **given)(x)
        x = layers.Flatten(name="flat", **given)(x)
        x = layers.Concatenate(name="all")([x, b])
        return keras.Model([a, b], layers.Dense(3, name="head")(x), name="two")

    def run_by_xla(self):
        """Leave out the probe of the device, and compare the copy under XLA."""
        checks = import_module("tf_impl.kit.checks.memory_format")
        checks.try_convolution = lambda memory_format: None
        kit.rebuilding._outputs = self.tf.function(
            lambda model, x: model(x, training=False), jit_compile=True
        )

    def rebuilt(self):
        """Losses, gradients and statistics of one XLA step, which takes any format: both ways.

        XLA runs it all, since TensorFlow's own CPU kernels refuse.
        """
        tf = self.tf
        self.run_by_xla()
        random = np.random.default_rng(0)
        images = tf.constant(random.normal(size=(6, 8, 10, 3)), tf.float32)
        codes = tf.constant(random.normal(size=(6, 4)), tf.float32)
        y = tf.constant(np.arange(6) % 3)
        found = {}
        for start, other in (
            ("channels_last", "channels_first"),
            ("channels_first", "channels_last"),
        ):
            model = self.network(start)
            # The steps compare more; `foreign` shows what its own comparison finds.
            with mock.patch.object(technique, "check_copy"):
                copy = technique.apply_memory_format(model, memory_format=other)
            results = {}
            for name, one in ((start, model), (other, copy)):
                x = technique.convert_batch([images, codes], memory_format=name)
                results[name] = self.step(one, x, y)
            found[start] = {
                "loss": [results[name][0] for name in results],
                "difference": max(
                    float(np.linalg.norm(p - q) / (np.linalg.norm(q) or 1.0))
                    for p, q in zip(results[start][1], results[other][1], strict=True)
                ),
                "arrays": len(results[start][1]),
                "names": [v.name for v in model.weights] == [v.name for v in copy.weights],
                "formats": sorted(
                    {v.data_format for v in copy.layers if hasattr(v, "data_format")}
                ),
                "kept": sorted({v.data_format for v in model.layers if hasattr(v, "data_format")}),
                "own": not {id(v) for v in model.weights} & {id(v) for v in copy.weights},
            }
        return found

    def step(self, model, x, y):
        tf = self.tf

        @tf.function(jit_compile=True)
        def step():
            with tf.GradientTape() as tape:
                loss = kit.training.cross_entropy(model(x, training=True), y)
            return loss, tape.gradient(loss, model.trainable_variables)

        loss, gradients = step()
        state = [np.asarray(tf.convert_to_tensor(v)) for v in model.non_trainable_variables]
        return float(loss), [g.numpy() for g in gradients] + state

    def foreign(self):
        """Copies of models that hold more than images, against the model: relative differences."""
        keras, layers = self.tf.keras, self.layers
        self.run_by_xla()
        random = np.random.default_rng(0)

        def pixels(*some, shape=(8, 8, 2)):
            """`some`, then a convolution."""
            x = inputs = keras.Input(shape)
            for layer in (*some, layers.Conv2D(4, 3), layers.GlobalAveragePooling2D()):
                x = layer(x)
            return keras.Model(inputs, x)

        def adapted():
            """Normalization of images and of codes."""
            drawn = random.normal(5.0, 3.0, (40, 8, 8, 2)).astype("f4")
            images, codes = layers.Normalization(), layers.Normalization()
            images.adapt(drawn)
            codes.adapt(drawn[:, 0, 0])
            a, b = keras.Input((8, 8, 2)), keras.Input((2,))
            x = layers.GlobalAveragePooling2D()(layers.Conv2D(4, 3)(images(a)))
            return keras.Model([a, b], layers.Concatenate()([x, codes(b)]))

        def sequences():
            """Conv1D and Conv3D beside images: they stay as they are."""
            a, b, c = keras.Input((8, 8, 2)), keras.Input((9, 3)), keras.Input((4, 5, 6, 2))
            x = layers.GlobalAveragePooling2D()(layers.Conv2D(4, 3)(a))
            y = layers.Flatten()(layers.AveragePooling1D(2)(layers.Conv1D(4, 3)(b)))
            z = layers.GlobalMaxPooling3D()(layers.Conv3D(3, 2)(c))
            return keras.Model({"a": a, "b": b, "c": c}, [layers.Concatenate()([x, y, z]), y])

        def squeezed():
            """Squeeze and excitation, a grouped convolution, and a layer that is called twice."""
            a = keras.Input((8, 8, 4))
            shared = layers.Conv2D(4, 3, padding="same", groups=2)
            x = layers.GroupNormalization(2)(layers.ReLU()(shared(shared(a))))
            y = layers.Reshape((1, 1, 4))(layers.GlobalAveragePooling2D()(x))
            x = layers.Multiply()([x, layers.Conv2D(4, 1, activation="sigmoid")(y)])
            return keras.Model(a, layers.LayerNormalization()(layers.Rescaling(0.5)(x)))

        def by_operators():
            """Excitation as MobileNetV3 has it; operators are layers of functions in tf_keras."""
            a = keras.Input((8, 8, 2))
            x = layers.Conv2D(4, 3)(a)
            y = layers.Conv2D(4, 1)(layers.GlobalAveragePooling2D(keepdims=True)(x))
            x = layers.Multiply()([x, layers.ReLU(6.0)(y + 3.0) * (1.0 / 6.0)])
            return keras.Model(a, layers.GlobalAveragePooling2D()(layers.Conv2D(3, 3)(x)))

        other = {"memory_format": "channels_first"}
        found = {"adapted": self.apart(adapted()), "sequences": self.apart(sequences())}
        found["squeezed"] = self.apart(squeezed())
        found["rescaled"] = self.apart(pixels(layers.Rescaling(2.0, 0.5)))
        made = pixels()
        lengths = layers.Lambda(lambda x: self.tf.nn.l2_normalize(x, -1))(made.output)
        found["by a lambda"] = self.apart(keras.Model(made.input, lengths))
        if KERAS_3:
            found["by operators"] = self.apart(by_operators())
        else:
            found["by operators"] = raised(technique.apply_memory_format, by_operators(), **other)
        one = keras.Sequential([keras.Input((9, 3)), layers.Conv1D(4, 3)])
        found["no images"] = raised(technique.apply_memory_format, one)
        found["no images, other"] = raised(technique.apply_memory_format, one, **other)
        made = pixels()
        technique.copy_state, kept = (lambda model, copy: None), technique.copy_state
        found["lost"] = raised(technique.apply_memory_format, made, **other)
        technique.copy_state = kept
        return found

    def apart(self, model):
        """The largest difference of a copy in channels_first, relative to the largest output."""
        tf = self.tf
        copy = technique.apply_memory_format(model, memory_format="channels_first")

        def example(tensor):  # as many samples as the technique tries, so that XLA is done
            return tf.random.stateless_normal([2, *tensor.shape[1:]], seed=(1, 2)) + 2.0

        x = tf.nest.map_structure(example, model.input)
        turned = technique.convert_batch(x, memory_format="channels_first")
        if isinstance(x, dict):  # volumes and sequences are the same in both
            turned |= {name: x[name] for name in ("b", "c")}
        pairs = zip(
            tf.nest.flatten(kit.rebuilding._outputs(model, x)),
            tf.nest.flatten(kit.rebuilding._outputs(copy, turned)),
            strict=True,
        )
        found = []
        for ours, theirs in pairs:
            if len(ours.shape) == 4:
                theirs = tf.transpose(theirs, (0, 2, 3, 1))
            found.append(float(np.abs(ours - theirs).max() / np.abs(ours).max()))
        return max(found)

    def sequential(self):
        layers = self.layers
        model = self.tf.keras.Sequential(
            [
                self.tf.keras.Input((6, 8, 2)),
                layers.Conv2D(3, 3),
                layers.BatchNormalization(),
                layers.GlobalAveragePooling2D(),
                layers.Dense(2),
            ]
        )
        self.run_by_xla()
        copy = technique.apply_memory_format(model, memory_format="channels_first")
        return {"input": list(copy.input_shape), "output": list(copy.output_shape)}

    def refusals(self):
        """Models that cannot be rebuilt: refused, and left as they are."""
        keras, layers = self.tf.keras, self.layers
        self.run_by_xla()

        class Own(keras.Model):
            def __init__(self):
                super().__init__()
                self.conv = layers.Conv2D(2, 3)

            def call(self, inputs):
                return self.conv(inputs)

        own_model = Own()
        own_model(self.tf.zeros((1, 8, 8, 2)))
        first = layers.Conv2D(2, 1, data_format="channels_first")
        inside = keras.Sequential([keras.Input((8, 8, 2)), layers.Conv2D(2, 3)])

        def over(*some):
            return keras.Sequential([keras.Input((8, 8, 2)), layers.Conv2D(2, 3), *some])

        models = {
            "subclassed": own_model,
            "norm": over(layers.UnitNormalization(name="strange")),
            "softmax": over(layers.Conv2D(2, 1, activation="softmax", name="strange")),
            "reshape": over(layers.Reshape((72,), name="strange")),
            "dense": over(layers.Dense(3, name="strange")),
            "axis": over(layers.BatchNormalization(axis=2, name="strange")),
            "axes": over(layers.LayerNormalization(axis=(1, 3), name="strange")),
            "rescaling": over(layers.Rescaling([1.0, 2.0], name="strange")),
            "nested": keras.Sequential([keras.Input((8, 8, 2)), inside]),
            "both": over(first),
        }
        return {
            name: raised(technique.apply_memory_format, model, memory_format="channels_first")
            for name, model in models.items()
        }


def main() -> None:
    kit.runtime.configure(threads=1, seed=0)
    scenarios = [losses, formats, unknown]
    names = [name for name in vars(type(own)) if not name.startswith("_")]
    helpers = ("flat_model", "network", "step", "run_by_xla", "apart")
    scenarios += [getattr(own, name) for name in names if name not in helpers]
    workers.report(scenarios)


own = PyTorch() if FRAMEWORK == "pt" else TensorFlow()
if __name__ == "__main__":
    main()
