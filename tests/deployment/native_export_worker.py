"""One framework's share of the native export tests, in a process of its own.

`python native_export_worker.py pt|tf|tf_keras FOLDER` runs every scenario, leaves its files in
FOLDER and prints one line of JSON: scenario -> what was found, or {"error": traceback}.
`test_native_export.py` judges.
"""

from __future__ import annotations

import contextlib
import io
import sys
import warnings
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from shared.provenance import provenance
from shared.specs import TASKS, GPTSpec
from shared.weights import init_weights
from tests import workers
from tests.flipped import flipped
from tests.workers import raised

FRAMEWORK = "pt" if sys.argv[1] == "pt" else "tf"
FOLDER = Path(sys.argv[2])
impl = workers.implementation(FRAMEWORK, "deployment.native_export")
kit = impl.kit
technique = impl.deployment.native_export
GPT = GPTSpec(vocabulary=11, sequence_length=8, width=16, heads=2, layers=1)
CNN = TASKS["digits-cnn"]
# A C++ compiler takes seconds for each layer's kernels.
CNN = replace(CNN, model=replace(CNN.model, convolutions=CNN.model.convolutions[:2]))

random = np.random.default_rng(5)
IMAGES = random.normal(size=(64, 32, 32, 1)).astype(np.float32)
CODES = random.integers(0, 11, (5, 8))
LEFT, RIGHT = (random.normal(size=(64, 5)).astype(np.float32) for _ in range(2))


@dataclass
class LanguageOutput:
    """What no framework knows."""

    logits: object
    loss: object = None


def on_device(array):
    return kit.data.to_device(array, array)[0]


def outputs(predict, x):
    found = predict(x)
    found = tuple(found.values()) if isinstance(found, dict) else found
    return [np.asarray(part).tolist() for part in (found if isinstance(found, tuple) else [found])]


def cnn():
    weights = init_weights(CNN.model, seed=1)
    return kit.models.build(CNN.model, weights), weights


# Scenarios ------------------------------------------------------------------------------------


def in_place():
    """Compiled predictions at two batch sizes, and the model before and after."""
    model, weights = cnn()
    own_predict = kit.training.make_predict(model)
    said = raised(technique.compiled_predict, model)
    if hasattr(model, "eval"):
        model.eval()
    predict, x = technique.compiled_predict(model), on_device(IMAGES)
    after = kit.models.export_weights(model)
    return {
        "own": outputs(own_predict, x),
        "compiled": outputs(predict, x),
        "three": outputs(predict, x[:3]),
        "kept": all(np.array_equal(weights[name], after[name]) for name in weights),
        "in training mode": said,
        "program": own.program(predict, x),
    }


def package():
    """The CNN and a transformer of any length as packages, loaded and held against the model."""
    model, weights = cnn()
    about = provenance(CNN, weights)
    x = on_device(IMAGES)
    path = technique.export_package(model, x[:1], own.path("cnn"), about)
    predict = technique.load_package(path, threads=1)
    after = kit.models.export_weights(model)
    array = np.asarray(x)
    found = {
        "own": outputs(kit.training.make_predict(model), x),
        **{str(size): outputs(predict, array[:size]) for size in (1, 3, 64)},
        "says": [predict.threads, predict.precision, predict.metadata == about],
        "kept": all(np.array_equal(weights[name], after[name]) for name in weights),
        "another layout": outputs(predict, np.asfortranarray(array)),
        "shape": raised(predict, array[:, :, 1:]),
        "dtype": raised(predict, array.astype(np.float64)),
        "number": raised(predict, (array, array)),
        "bfloat16": own.bfloat16(model, x),
        "unknown": raised(technique.export_package, model, x, own.path("no"), precision="int8"),
        "damaged": own.damaged(path),
        "gone": raised(technique.load_package, FOLDER / "nothing", threads=1),
    }
    text = kit.models.build(GPT, init_weights(GPT, seed=1))
    codes = on_device(CODES)
    path = technique.export_package(text, codes, own.path("gpt"), dynamic_sequence=True)
    predict = technique.load_package(path, threads=1)
    found["text"] = {
        "own": outputs(kit.training.make_predict(text), codes)[0],
        "whole": outputs(predict, CODES)[0],
        "shorter": outputs(predict, CODES[:2, :3])[0],
    }
    return found


def foreign():
    """Models that are not ours, of two inputs and two outputs."""
    return own.foreign()


def refusals():
    """What a framework lacks, and what its machine does."""
    model, _ = cnn()
    return own.refusals(model)


class PyTorch:
    def __init__(self):
        import torch

        self.torch = torch

    def path(self, name):
        return FOLDER / f"{name}.pt2"

    def program(self, predict, x):
        """The operators that a prediction calls."""
        torch = self.torch
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            predict(x)
        return sorted({event.key for event in profile.key_averages()})

    def bfloat16(self, model, x):
        path = self.path("half")
        technique.export_package(model, x[:1], path, precision="bfloat16")
        predict = technique.load_package(path, threads=1)
        dtypes = {str(p.dtype) for p in model.parameters()}
        return {"out": outputs(predict, np.asarray(x)), "precision": predict.precision} | {
            "model": sorted(dtypes),
            "bytes": path.stat().st_size,
            "float32 bytes": self.path("cnn").stat().st_size,
        }

    def damaged(self, path):
        whole = path.read_bytes()
        other, found = FOLDER / "damaged.pt2", {}
        for kind, content in {"half": whole[: len(whole) // 2], "text": b"no package"}.items():
            other.write_bytes(content)
            found[kind] = raised(technique.load_package, other, threads=1)
        other.write_bytes(flipped(whole))
        found["flipped"] = raised(technique.load_package, other, threads=1)
        self.torch.save({"a": 1}, other)  # a zip archive, but of something else
        found["other"] = raised(technique.load_package, other, threads=1)
        return found

    def foreign(self):
        torch, nn = self.torch, self.torch.nn

        class Two(nn.Module):
            def __init__(self):
                super().__init__()
                self.head, self.drop = nn.Linear(5, 3), nn.Dropout(0.5)
                self.norm = nn.BatchNorm1d(3)

            def forward(self, a, b):
                return {"y": self.norm(self.head(self.drop(a * b))), "z": a.sum(1)}

        torch.manual_seed(0)
        model = Two()
        model.norm.eval()  # frozen, while the model trains
        a, b = torch.from_numpy(LEFT), torch.from_numpy(RIGHT)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        found = {}
        for kind, path in (("package", FOLDER / "two.pt2"), ("torchscript", FOLDER / "two.pt")):
            export, load = (getattr(technique, f"{verb}_{kind}") for verb in ("export", "load"))
            predict = load(export(model, (a[:1], b[:1]), path, {"a": "b"}), threads=1)
            found[kind] = {n: outputs(predict, (LEFT[:n], RIGHT[:n])) for n in (1, 3, 64)}
            found[f"{kind} metadata"] = predict.metadata
            found[f"{kind} shape"] = raised(predict, (LEFT, RIGHT[:, 1:]))
        found["modes"] = [module.training for module in model.modules()]
        found["kept"] = all(torch.equal(before[n], v) for n, v in model.state_dict().items())
        with torch.no_grad():
            given = model.eval()(a, b)
        found["own"] = [given["y"].tolist(), given["z"].tolist()]
        return {"two inputs": found, "names": self.names()}

    def names(self):
        """Inputs and outputs by name: a dict in, an object of no known class out."""
        torch, nn = self.torch, self.torch.nn

        class Named(nn.Module):
            def forward(self, *, left, right, mask=None):
                return LanguageOutput(logits=left - 2 * right, loss=left.sum(1))

        a, b = torch.from_numpy(LEFT), torch.from_numpy(RIGHT)
        example = {"right": b, "left": a, "mask": None}
        path = technique.export_torchscript(Named(), example, FOLDER / "named.pt")
        predict = technique.load_torchscript(path, threads=1)
        given = predict({"left": LEFT, "right": RIGHT})
        compiled = technique.compiled_predict(Named().eval())(example)
        return {
            "inputs": predict.inputs,
            "apart": float(np.abs(given["logits"] - (LEFT - 2 * RIGHT)).max()),
            "compiled": float(np.abs(compiled.logits.numpy() - (LEFT - 2 * RIGHT)).max()),
            "outputs": {name: list(part.shape) for name, part in given.items()},
            "random": self.random(),
            "loop": self.loop(),
            "left over": (FOLDER / "random").exists(),
        }

    def random(self):
        """A model that gives something else each time."""

        class Random(self.torch.nn.Module):
            def forward(self, x):
                return x + self.torch.rand_like(x)

        Random.torch = self.torch
        x = self.torch.from_numpy(LEFT)
        return raised(technique.export_torchscript, Random(), x, FOLDER / "random")

    def loop(self):
        """A model of one's own loop over time, which a trace takes for one of so many steps."""

        class Loop(self.torch.nn.Module):
            def forward(self, x):
                total = x[:, 0]
                for step in range(1, x.shape[1]):
                    total = (total + x[:, step]).tanh()
                return total

        class Window(self.torch.nn.Module):
            def forward(self, x):
                return (x[:, -8:] if x.shape[1] > 8 else x).mean(1)

        class Branch(self.torch.nn.Module):
            def forward(self, x):
                return 2 * x if x.abs().sum() >= 0 else x

        x, path = self.torch.from_numpy(LEFT), FOLDER / "loop"
        export, said = technique.export_torchscript, io.StringIO()
        with contextlib.redirect_stderr(said), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the trace, that it takes one side
            branch = raised(export, Branch(), x, path)
        return {
            "branch": [branch, said.getvalue()],
            "open": raised(export, Loop(), x, path, dynamic_sequence=True),
            "fixed": raised(export, Loop(), x, path),
            **{
                f"window {kind}": raised(
                    getattr(technique, f"export_{kind}"),
                    Window(),
                    x,
                    self.path("window"),
                    dynamic_sequence=True,
                )
                for kind in ("package", "torchscript")
            },
        }

    def without_tensorrt(self, model):
        """With a GPU but without the package."""
        cuda = self.torch.cuda
        known, cuda.is_available = cuda.is_available, lambda: True
        try:
            return raised(technique.tensorrt_predict, model)
        finally:
            cuda.is_available = known

    def without_compiler(self):
        """A process in which the C++ compiler is a name that leads nowhere."""
        from torch._inductor import config

        model = self.torch.nn.Linear(7, 11)
        with config.patch({"cpp.cxx": ("/nowhere/c++",)}):
            return raised(
                technique.export_package, model, self.torch.ones(2, 7), FOLDER / "refused.pt2"
            )

    def refusals(self, model):
        torch = self.torch

        class Branch(torch.nn.Module):
            def forward(self, x):
                return x if x.sum() > 0 else -x

        (FOLDER / "damaged.pt").write_bytes((FOLDER / "two.pt").read_bytes()[:2000])
        (FOLDER / "flipped.pt").write_bytes(flipped((FOLDER / "two.pt").read_bytes()))
        return {
            "torchscript flipped": raised(
                technique.load_torchscript, FOLDER / "flipped.pt", threads=1
            ),
            "tensorrt": raised(technique.tensorrt_predict, model),
            "torch-tensorrt": own.without_tensorrt(model),
            "compiler": own.without_compiler(),
            "branch": raised(
                technique.export_package, Branch(), torch.ones(3, 3), FOLDER / "branch.pt2"
            ),
            "torchscript": raised(technique.load_torchscript, FOLDER / "damaged.pt", threads=1),
            "torchscript of a package": raised(
                technique.load_torchscript, FOLDER / "cnn.pt2", threads=1
            ),
        }


class TensorFlow:
    def __init__(self):
        import tensorflow as tf

        self.tf = tf

    def path(self, name):
        return FOLDER / name

    def program(self, predict, x):
        """Whether XLA has to compile the function."""
        return bool(predict.get_concrete_function(x).function_def.attr["_XlaMustCompile"].b)

    def bfloat16(self, model, x):
        return raised(technique.export_package, model, x, FOLDER / "half", precision="bfloat16")

    def damaged(self, path):
        import shutil

        found = {}
        for kind, part in {
            "graph": "saved_model.pb",
            "weights": "variables/variables.data-00000-of-00001",
            "metadata": "assets.extra/twinbench.json",
        }.items():
            other = FOLDER / f"damaged-{kind}"
            shutil.copytree(path, other)
            whole = (other / part).read_bytes()
            (other / part).write_bytes(whole[: len(whole) // 2])
            found[kind] = raised(technique.load_package, other, threads=1)
        (FOLDER / "empty").mkdir()
        found["empty"] = raised(technique.load_package, FOLDER / "empty", threads=1)
        return found

    def foreign(self):
        tf = self.tf
        keras, layers = tf.keras, tf.keras.layers

        class Two(keras.Model):
            def __init__(self):
                super().__init__()
                self.head, self.drop = layers.Dense(3), layers.Dropout(0.5)
                self.norm = layers.BatchNormalization()

            def call(self, a, b, training=False):
                y = self.norm(self.head(self.drop(a * b, training=training)), training=training)
                return {"z": tf.reduce_sum(a, 1), "y": y}

        a, b = tf.constant(LEFT), tf.constant(RIGHT)
        subclassed = Two()
        unbuilt = raised(technique.export_package, Two(), (a, b), FOLDER / "unbuilt")
        subclassed(a, b)
        return {
            "two inputs": self._packaged(subclassed, (a, b), subclassed(a, b)),
            "unbuilt": unbuilt,
            "names": self.names(),
            "lookup": self.lookup(),
        }

    def lookup(self):
        """How far words by their vectors are from the model's; a recurrent model with a state."""
        keras, layers = self.tf.keras, self.tf.keras.layers
        words = layers.TextVectorization(vocabulary=["a", "b"], output_sequence_length=3)
        inputs = keras.Input((), dtype="string")
        model, texts = keras.Model(inputs, layers.Embedding(4, 2)(words(inputs))), ["a b", "c", ""]
        given = self.tf.constant(texts)
        path = technique.export_package(model, given, FOLDER / "words")
        apart = technique.load_package(path, threads=1)(np.array(texts)) - np.array(model(given))
        kept = keras.Input(batch_shape=(64, 5, 1))
        model = keras.Model(kept, layers.GRU(2, stateful=True, name="kept")(kept))
        given = self.tf.constant(LEFT[..., None])
        said = raised(technique.export_package, model, given, FOLDER / "kept", dynamic_batch=False)
        return {"apart": float(np.abs(apart).max()), "stateful": said}

    def names(self):
        """Inputs and outputs by name, in an order that is not that of the names."""
        keras = self.tf.keras
        left, right = keras.Input((5,), name="left"), keras.Input((5,), name="right")
        both = keras.layers.Subtract()([left, right])
        logits = keras.layers.Subtract(name="logits")([both, right])
        model = keras.Model({"right": right, "left": left}, {"loss": both, "logits": logits})
        example = {"right": self.tf.constant(RIGHT), "left": self.tf.constant(LEFT)}
        path = technique.export_package(model, example, FOLDER / "named")
        predict = technique.load_package(path, threads=1)
        given = predict({"left": LEFT, "right": RIGHT})
        compiled = technique.compiled_predict(model)(example)
        return {
            "inputs": predict.inputs,
            "apart": float(np.abs(given["logits"] - (LEFT - 2 * RIGHT)).max()),
            "compiled": float(np.abs(compiled["logits"].numpy() - (LEFT - 2 * RIGHT)).max()),
            "outputs": {name: list(part.shape) for name, part in given.items()},
            "random": self.random(),
            "left over": (FOLDER / "random").exists(),
        }

    def random(self):
        """A model that gives something else each time."""
        tf = self.tf

        class Random(tf.keras.Model):
            def call(self, x, training=False):
                return x + tf.random.uniform(tf.shape(x))

        model = Random()
        model(tf.constant(LEFT))
        return raised(technique.export_package, model, tf.constant(LEFT), FOLDER / "random")

    def _packaged(self, model, example, given):
        tf = self.tf
        before = [np.array(value) for value in model.get_weights()]
        some = tf.nest.map_structure(lambda part: part[:1], example)
        path = FOLDER / f"foreign-{type(model).__name__}"
        predict = technique.load_package(
            technique.export_package(model, some, path, {"a": "b"}), threads=1
        )
        after = model.get_weights()
        return {
            "package": {n: outputs(predict, (LEFT[:n], RIGHT[:n])) for n in (1, 3, 64)},
            "package metadata": predict.metadata,
            "package shape": raised(predict, (LEFT, RIGHT[:, 1:])),
            "kept": all(np.array_equal(*pair) for pair in zip(before, after, strict=True)),
            "own": [
                part.numpy().tolist()
                for part in (given.values() if isinstance(given, dict) else [given])
            ],
        }

    def refusals(self, model):
        tf = self.tf

        class Window(tf.keras.Model):
            def __init__(self):
                super().__init__()
                self.inside = tf.keras.layers.Dense(4)

            def call(self, x, training=False):
                known = x.shape[1] is not None and x.shape[1] > 8
                return tf.reduce_mean(self.inside(x[:, -8:] if known else x), 1)

        window, x = Window(), tf.random.normal((2, 6, 4))
        window(x)
        opened = {"dynamic_sequence": True}
        return {
            "window": raised(technique.export_package, window, x, FOLDER / "window", **opened),
            "threads": raised(technique.load_package, FOLDER / "cnn", threads=7),
        }


def main() -> None:
    kit.runtime.configure(threads=1, seed=0)
    workers.report((in_place, package, foreign, refusals))


own = PyTorch() if FRAMEWORK == "pt" else TensorFlow()
if __name__ == "__main__":
    main()
