"""One framework's share of the tests of 2:4 pruning, in a process of its own.

`python semi_structured_pruning_worker.py pt|tf|tf_keras` runs every scenario and prints one line of
JSON: scenario -> what was found, or {"error": traceback}. `test_semi_structured_pruning.py` judges.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np

from bench.compression import bench_semi_structured_pruning
from bench.harness.plan import Work
from bench.harness.stages import Stages
from shared.specs import TASKS, CNNSpec
from shared.weights import init_weights
from tests import workers
from tests.workers import raised_on_one_line as raised

FRAMEWORK = "pt" if sys.argv[1:] == ["pt"] else "tf"
impl = workers.implementation(FRAMEWORK, "compression.semi_structured_pruning")
kit = impl.kit
technique = impl.compression.semi_structured_pruning
CNN = CNNSpec((8, 8, 3), ((6, 1), (8, 2)), num_classes=10)  # groups of 3, of 4 and 2, of 4 and 4


def start(*, ties=False):
    """Initial weights; with `ties` of few different magnitudes."""
    weights = init_weights(CNN, seed=1)
    for name, value in weights.items():
        if ties and name.endswith("kernel"):
            weights[name] = (np.round(4 * value) / 4).astype(np.float32)
    return weights


def batches(count):
    """The same in every process."""
    random, found = np.random.default_rng(11), []
    for _ in range(count):
        y = random.integers(0, 10, 16)
        x = random.normal(size=(16, *CNN.input_shape)) + y[:, None, None, None] / 3
        found.append((x.astype(np.float32), y))
    return kit.data.resident_batches(found)


def kernels(model):
    weights = kit.models.export_weights(model)
    return {name: v.tolist() for name, v in weights.items() if name.endswith("kernel")}


def predictions(model, x):
    return np.array(kit.training.make_predict(model)(x)).tolist()


# Scenarios for both frameworks ----------------------------------------------------------------


def at_once():
    """Kernels before and after, without any training."""
    found = {}
    for name in ("distinct", "ties"):
        source = kit.models.build(CNN, start(ties=name == "ties"))
        before = kernels(source)
        masked = technique.apply_two_to_four(source)
        after = kernels(technique.finalize_two_to_four(masked))
        found[name] = {"before": before, "after": after, "kept": kernels(source) == before}
    return found


def training():
    """Ten losses of SGD with momentum, and kernels and predictions after them."""
    stream = batches(10)
    x = stream[0][0]
    source = kit.models.build(CNN, start())
    model = technique.apply_two_to_four(source)
    optimizer = kit.training.make_optimizer(model, TASKS["digits-cnn"].recipe)
    step = kit.training.make_train_step(model, optimizer, kit.training.cross_entropy)
    losses = [kit.runtime.to_float(step(*batch)) for batch in stream]
    again = raised(technique.apply_two_to_four, model)
    masked = predictions(model, x)
    final = technique.finalize_two_to_four(model)
    return {
        "losses": losses,
        "masked": masked,
        "final": predictions(final, x),
        "kernels": kernels(final),
        "again": again,
        "twice": raised(technique.finalize_two_to_four, final),
        "dense": raised(technique.finalize_two_to_four, source),
    }


def stages():
    """What the benchmark predicts where no stage but the first, which rows share, takes a step."""
    task, stream = replace(TASKS["digits-cnn"], model=CNN), batches(4)
    x, epochs = stream[0][0], []
    found = {}

    def fit(step, count):
        if not epochs:
            for batch in stream:
                step(*batch)
        epochs.append(count)

    with tempfile.TemporaryDirectory() as folder:
        shared = Stages(impl, task, start(), 0, Path(folder), fit)
        for name, settings in (("dense", {}), ("masked", {"masked": True})):
            work = Work(task, name, settings, batch_size=16, weights=start())
            predict = bench_semi_structured_pruning.prepare(impl, work).train(shared)
            found[name] = np.array(predict(x)).tolist()
    trained = kit.models.build(CNN, start())
    optimizer = kit.training.make_optimizer(trained, task.recipe)
    step = kit.training.make_train_step(trained, optimizer, kit.training.cross_entropy)
    for batch in stream:
        step(*batch)
    masked = predictions(technique.apply_two_to_four(trained), x)
    return {"epochs": epochs, "found": found, "trained": predictions(trained, x), "after": masked}


class PyTorch:
    def __init__(self):
        import torch

        self.torch = torch

    def foreign(self):
        """A custom forward of two inputs; only the linear layer and the plain convolution."""
        torch, nn = self.torch, self.torch.nn

        class Two(nn.Module):
            def __init__(self):
                super().__init__()
                self.conv, self.grouped = nn.Conv2d(4, 8, 1), nn.Conv2d(8, 8, 1, groups=2)
                self.head, self.table = nn.Linear(8, 3), nn.Embedding(5, 8)

            def forward(self, images, codes):
                x = self.grouped(self.conv(images)).mean((2, 3)) + self.table(codes)
                return self.head(x)

        torch.manual_seed(0)
        model = technique.apply_two_to_four(Two())
        model(torch.randn(2, 4, 3, 3), torch.tensor([1, 2])).sum().backward()
        state = technique.finalize_two_to_four(model).state_dict()
        return {name: float((v == 0).float().mean()) for name, v in state.items()}

    def refusals(self):
        nn = self.torch.nn
        tied = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        tied[1].weight = tied[0].weight
        language = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 8))
        language[1].weight = language[0].weight
        models = {"nothing": nn.ReLU(), "tied": tied, "embedding alone": language}
        found = {name: raised(technique.apply_two_to_four, m) for name, m in models.items()}
        return found | {"kept": bool(tied[1].weight.all()) and tied[1].weight is tied[0].weight}

    def tied(self):
        """The share of zeros of an embedding that is a head, too, and of a layer between."""
        nn = self.torch.nn
        model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 4), nn.Linear(4, 8))
        model[2].weight = model[0].weight
        final = technique.finalize_two_to_four(technique.apply_two_to_four(model))
        zeros = [float((module.weight == 0).float().mean()) for module in final]
        return [zeros, final[2].weight is final[0].weight]

    def compressed(self):
        """What the GPU's format makes of a pruned kernel, and what a CPU is refused."""
        from torch.sparse import _semi_structured_conversions as conversions

        torch, nn = self.torch, self.torch.nn
        torch.manual_seed(0)
        dense = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 8))
        masked = technique.apply_two_to_four(dense)
        found = {
            name: raised(technique.compress_two_to_four, model)
            for name, model in (("dense", dense), ("masked", masked))
        }
        final = technique.finalize_two_to_four(masked).half()
        kernel = final[0].weight.detach().clone()
        found["CPU"] = raised(technique.compress_two_to_four, final)
        packed, places = conversions.sparse_semi_structured_from_dense_cutlass(kernel)
        again = conversions.sparse_semi_structured_to_dense_cutlass(packed, places)
        found["packed"] = [list(packed.shape), bool((again == kernel).all())]
        return found | {"kept": bool((final[0].weight == kernel).all())}

    def repeated(self):
        """One layer in two places of a model has one mask: which places have it."""
        nn = self.torch.nn
        layer = nn.Linear(4, 4)
        twice = technique.apply_two_to_four(nn.Sequential(layer, nn.ReLU(), layer))
        return [hasattr(module, "weight_mask") for module in twice]

    def computed(self):
        """Which layers have a mask where norms compute their kernels, but the last one's."""
        nn = self.torch.nn
        norms = nn.utils.spectral_norm, nn.utils.parametrizations.weight_norm
        model = nn.Sequential(*(norm(nn.Linear(4, 4)) for norm in norms), nn.Linear(4, 4))
        masked = technique.apply_two_to_four(model)
        old = nn.Sequential(nn.utils.weight_norm(nn.Linear(4, 4)), nn.Linear(4, 4))
        masks = [hasattr(module, "weight_mask") for module in masked]
        return [masks, raised(technique.apply_two_to_four, old)]


class TensorFlow:
    def __init__(self):
        import tensorflow as tf

        self.tf = tf

    def foreign(self):
        """A functional model of two inputs; only the dense layer and the plain convolution."""
        tf = self.tf
        keras, layers = tf.keras, tf.keras.layers
        keras.utils.set_random_seed(0)
        images, codes = keras.Input((3, 3, 4)), keras.Input((), dtype="int64")
        x = layers.Activation(lambda v: v, name="by_hand")(layers.Conv2D(8, 1, name="conv")(images))
        x = layers.GlobalAveragePooling2D()(layers.Conv2D(8, 1, groups=2, name="grouped")(x))
        x = layers.Add()([x, layers.Embedding(5, 8, name="table")(codes)])
        source = keras.Model([images, codes], layers.Dense(3, name="head")(x))
        model = technique.apply_two_to_four(source)
        if set(source._flatten_layers()) & set(model._flatten_layers()):
            raise AssertionError("the copy shares layers with the source")
        final = technique.finalize_two_to_four(model)
        return {
            f"{layer.name}.{'weight' if v.ndim > 1 else 'bias'}": float((v == 0).mean())
            for layer in final.layers
            for v in layer.get_weights()
        }

    def refusals(self):
        keras, layers = self.tf.keras, self.tf.keras.layers

        class Inside(layers.Layer):
            def __init__(self, **settings):
                super().__init__(**settings)
                self.deep = layers.Dense(4, name="deep")

            def call(self, x):
                return self.deep(x)

        class Own(keras.Model):
            def __init__(self):
                super().__init__()
                self.dense = layers.Dense(2)

            def call(self, x):
                return self.dense(x)

        subclassed = Own()
        subclassed(np.ones((2, 4), np.float32))
        x, shared = keras.Input((4,)), layers.Dense(4, name="shared")
        models = {
            "subclassed": subclassed,
            "twice": keras.Model(x, shared(shared(x))),
            "nested": keras.Model(x, Inside()(x)),
            "unbuilt": keras.Sequential([layers.Dense(2)]),
            "nothing": keras.Sequential([keras.Input((4,)), layers.BatchNormalization()]),
        }
        return {name: raised(technique.apply_two_to_four, m) for name, m in models.items()}


def main() -> None:
    kit.runtime.configure(threads=1, seed=0)
    scenarios = [at_once, training, stages, own.foreign, own.refusals]
    scenarios += [own.repeated, own.compressed, own.tied, own.computed] if FRAMEWORK == "pt" else []
    workers.report(scenarios)


own = PyTorch() if FRAMEWORK == "pt" else TensorFlow()
if __name__ == "__main__":
    main()
