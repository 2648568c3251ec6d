"""One framework's share of the export tests, in a process of its own.

`python export_worker.py pt|tf|tf_keras FOLDER` runs every scenario, leaves its files in FOLDER and
prints one line of JSON: scenario -> what was found, or {"error": traceback}. `test_export.py`
judges.
"""

from __future__ import annotations

import sys
import zipfile
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from shared import operators, runtimes
from shared.provenance import provenance
from shared.specs import TASKS
from shared.weights import init_weights
from tests import workers
from tests.flipped import flipped
from tests.workers import raised

FRAMEWORK = "pt" if sys.argv[1] == "pt" else "tf"
FOLDER = Path(sys.argv[2])
impl = workers.implementation(FRAMEWORK, "deployment.export")
kit = impl.kit
technique = impl.deployment.export
SIZES = {"digits-cnn": (1, 3, 64), "text-gpt": (1, 3, 64)}
LEGACY = sys.argv[1] == "tf_keras"  # which differs in what a model is, not in what is written
if not LEGACY:
    SIZES["photos-resnet50"] = (1, 3)
MODELS = {task: TASKS[task].model for task in SIZES}
# All kinds of its layers, in fewer and narrower ones.
MODELS["photos-resnet50"] = replace(
    TASKS["photos-resnet50"].model, input_shape=(64, 64, 3), blocks=(1, 2), widths=(16, 32)
)
LENGTHS = {1: 64, 3: 40, 64: 7}  # of text, by batch size

random = np.random.default_rng(5)
LEFT, RIGHT = (random.normal(size=(64, 5)).astype(np.float32) for _ in range(2))
KERNEL = random.normal(size=(5, 3)).astype(np.float32)


@dataclass
class Output:
    """What no framework knows."""

    logits: object
    inside: dict
    nothing: object = None


def inputs(task, size):
    if task == "text-gpt":
        return np.random.default_rng(size).integers(0, 98, (size, LENGTHS[size]))
    shape = (size, *MODELS[task].input_shape)
    return np.random.default_rng(size).normal(size=shape).astype(np.float32)


def on_device(array):
    return kit.data.to_device(array, array)[0]


def output(predict, x):
    return np.asarray(predict(x)).tolist()


def outputs(predict, *arguments):
    """All that a model of several inputs gives, in order."""
    found = predict(arguments)
    found = tuple(found.values()) if isinstance(found, dict) else found
    return [part.tolist() for part in (found if isinstance(found, tuple) else [found])]


def by_name(predict, x, wanted):
    """How far outputs are from the model's, and what they and the inputs are called."""
    found = predict(x)
    parts = found.values() if isinstance(found, dict) else found
    parts = parts if isinstance(found, dict | tuple) else [found]
    distances = [
        np.abs(one - np.asarray(two)).max() for one, two in zip(parts, wanted, strict=True)
    ]
    names = list(found) if isinstance(found, dict) else type(found).__name__
    return {"inputs": predict.inputs, "outputs": names, "apart": float(max(distances))}


def everywhere(model, example, name, **settings):
    """A model's file in every runtime that this framework writes for."""
    suffixes = {"onnx": "onnx", "openvino": "xml"} | (
        {"litert": "tflite"} if FRAMEWORK == "tf" else {}
    )
    for kind, suffix in suffixes.items():
        write, load = getattr(technique, f"export_{kind}"), getattr(runtimes, f"load_{kind}")
        path = write(model, example, FOLDER / f"{name}.{suffix}", **settings)
        yield kind, load(path, threads=1)


def built(task):
    """A model whose residual branches count: they begin with a scale of 0."""
    spec = MODELS[task]
    weights = {
        name: value if value.any() or not name.endswith("gamma") else np.full_like(value, 0.2)
        for name, value in init_weights(spec, seed=1).items()
    }
    return kit.models.build(spec, weights), weights


# Scenarios ------------------------------------------------------------------------------------


def tasks():
    """Every task's model and its ONNX file, at sizes (and lengths) other than the example's."""
    found = {}
    for task, sizes in SIZES.items():
        model, weights = built(task)
        x = on_device(inputs(task, sizes[0]))
        path = technique.export_onnx(
            model,
            x,
            FOLDER / f"{task}.onnx",
            provenance(TASKS[task], weights),
            dynamic_sequence=task == "text-gpt",
        )
        own, file = kit.training.make_predict(model), runtimes.load_onnx(path, threads=1)
        after = kit.models.export_weights(model)
        found[task] = {
            "own": _long_enough(own, task, sizes),
            "file": [np.asarray(file(on_device(inputs(task, n)))).tolist() for n in sizes],
            "operators": operators.onnx_operators(path),
            "optimized": operators.onnx_operators(path, optimized=True),
            "integer layers": operators.onnx_integer_layers(path, np.asarray(x[:1])),
            "metadata": file.metadata,
            "expected metadata": provenance(TASKS[task], weights),
            "threads": file.threads,
            "files": sorted(part.name for part in FOLDER.glob(f"{task}.onnx*")),
            "kept": all(np.array_equal(weights[name], after[name]) for name in weights),
        }
    return found


def _long_enough(own, task, sizes):
    """The model's own outputs; Keras's takes whole windows alone, of which the beginning is used.

    Attention looks to the left, so that what follows a shorter text changes nothing.
    """
    found = []
    for size in sizes:
        x = inputs(task, size)
        length = x.shape[1]
        if task == "text-gpt":
            x = np.pad(x, ((0, 0), (0, 64 - length)))
        found.append(np.asarray(own(on_device(x)))[:, :length].tolist())
    return found


def openvino():
    """The CNN in OpenVINO, in both precisions, and what it says of itself."""
    model, weights = built("digits-cnn")
    x = on_device(inputs("digits-cnn", 64))
    about = provenance(TASKS["digits-cnn"], weights)
    path = technique.export_openvino(model, x[:1], FOLDER / "cnn.xml", about)
    predict = runtimes.load_openvino(path, threads=1)
    found = {
        "own": output(kit.training.make_predict(model), x),
        "float32": output(predict, x),
        "one": output(predict, x[:1]),
        "says": [predict.threads, predict.precision, predict.metadata == about],
        "integer layers": operators.openvino_integer_layers(path, np.asarray(x)),
        "weights": (FOLDER / "cnn.bin").stat().st_size,
        "parameters": sum(value.nbytes for value in weights.values()),
        "reports to its makers": "openvino_telemetry" in sys.modules
        and sys.modules["openvino_telemetry"] is not None,
    }
    try:
        found["bfloat16"] = output(runtimes.load_openvino(path, threads=1, precision="bfloat16"), x)
    except NotImplementedError as error:
        found["no bfloat16"] = str(error)
    return found


def text():
    """The transformer in the other runtimes, at a shorter length."""
    model, _ = built("text-gpt")
    x = on_device(inputs("text-gpt", 3))
    exports = {"openvino": (technique.export_openvino, FOLDER / "gpt.xml")}
    if FRAMEWORK == "tf":
        exports["litert"] = (technique.export_litert, FOLDER / "gpt.tflite")
    example = on_device(inputs("text-gpt", 1))
    found = {"own": _long_enough(kit.training.make_predict(model), "text-gpt", (3,))[0]}
    for name, (export, path) in exports.items():
        export(model, example, path, dynamic_sequence=True)
        found[name] = output(getattr(runtimes, f"load_{name}")(path, threads=1), x)
    return found


def litert():
    """The CNN in LiteRT, with float16 weights; PyTorch has none. What is unknown to runtimes."""
    model, weights = built("digits-cnn")
    x = on_device(inputs("digits-cnn", 64))
    if FRAMEWORK == "pt":
        found = {}
        for runtime in ("onnx", "openvino"):
            export = getattr(technique, f"export_{runtime}")
            given = (model, x, FOLDER / "refused")
            found[f"unknown to {runtime}"] = raised(export, *given, precision="int4")
        return found
    about = provenance(TASKS["digits-cnn"], weights)
    found = {"own": output(kit.training.make_predict(model), x)}
    for precision in ("float32", "float16"):
        path = FOLDER / f"cnn-{precision}.tflite"
        technique.export_litert(model, x[:1], path, about, precision=precision)
        predict = runtimes.load_litert(path, threads=1)
        found[precision] = output(predict, x)
        found[f"{precision} one"] = output(predict, x[:1])
        found[f"{precision} says"] = predict.metadata == about
        found[f"{precision} bytes"] = path.stat().st_size
    for runtime in ("onnx", "openvino", "litert"):
        export = getattr(technique, f"export_{runtime}")
        found[f"unknown to {runtime}"] = raised(export, model, x, path, precision="int4")
    return found


def int8():
    """A ResNet in 8-bit integers, calibrated with what it then predicts."""
    task = "photos-resnet50"
    model, weights = built(task)
    about = provenance(TASKS[task], weights)
    x = on_device(inputs(task, 16))
    found = {"own": output(kit.training.make_predict(model), x), "files": {}}
    kinds = {"onnx": "onnx", "openvino": "xml"}
    if FRAMEWORK == "tf":
        kinds["litert"] = "tflite"
    for runtime, ending in kinds.items():
        export = getattr(technique, f"export_{runtime}")
        path = export(model, x, FOLDER / f"int8-{runtime}.{ending}", about, precision="int8")
        predict = getattr(runtimes, f"load_{runtime}")(path, threads=1)
        weighs = path.with_suffix(".bin") if runtime == "openvino" else path
        found["files"][runtime] = {
            "out": output(predict, x),
            "one": output(predict, x[:1]),
            "says": predict.metadata == about,
            "layers": getattr(operators, f"{runtime}_integer_layers")(path, np.asarray(x[:2])),
            "share": weighs.stat().st_size / sum(value.nbytes for value in weights.values()),
        }
    fixed = {"dynamic_batch": False, "precision": "int8"}
    small, images = built("digits-cnn")[0], on_device(inputs("digits-cnn", 16))
    path = technique.export_onnx(small, images, FOLDER / "int8-fixed.onnx", **fixed)
    found["fixed batch"] = {
        "own": output(kit.training.make_predict(small), images),
        "out": output(runtimes.load_onnx(path, threads=1), images),
    }
    if FRAMEWORK == "tf":
        found["fixed batch litert"] = own.fixed_batch(fixed)
    return found | {"refusals": _int8_refusals(model, x)}


def _int8_refusals(model, x):
    """What calibration cannot be done with."""
    whole = np.asarray(x)
    holed = whole.copy()
    holed.flat[100] = np.nan
    samples = {"none": on_device(whole[:0]), "not finite": on_device(holed)}
    kinds = ["onnx", "openvino"] + ["litert"] * (FRAMEWORK == "tf")
    return {
        f"{runtime} {name}": raised(
            getattr(technique, f"export_{runtime}"),
            model,
            given,
            FOLDER / f"refused-{runtime}-{name}.x",
            precision="int8",
        )
        for runtime in kinds
        for name, given in samples.items()
    } | own.nothing_to_quantize()


def foreign():
    """Models that are not ours, of two inputs and two outputs, in every runtime."""
    return own.foreign()


def names():
    """More outputs than ten, inputs and outputs by name, and what only foreign models have."""
    return own.names()


def refusals():
    """What bad input raises."""
    model, _ = built("digits-cnn")
    x = on_device(inputs("digits-cnn", 3))
    path = technique.export_onnx(model, x, FOLDER / "fixed.onnx", dynamic_batch=False)
    fixed = runtimes.load_onnx(path, threads=1)
    array = np.asarray(x)
    loaded = {"onnx": runtimes.load_onnx(FOLDER / "digits-cnn.onnx", threads=1)}
    loaded["openvino"] = runtimes.load_openvino(FOLDER / "cnn.xml", threads=1)
    if FRAMEWORK == "tf":
        loaded["litert"] = runtimes.load_litert(FOLDER / "cnn-float32.tflite", threads=1)
    found = {
        "other batch": raised(fixed, array[:2]),
        "the batch": output(fixed, array) is not None,
        "precision": raised(
            runtimes.load_openvino, FOLDER / "cnn.xml", threads=1, precision="int8"
        ),
        "tensorrt": raised(runtimes.load_tensorrt, path, threads=1),
    }
    for name, predict in loaded.items():
        found[f"{name} shape"] = raised(predict, array[:, :, 1:])
        found[f"{name} rank"] = raised(predict, array[0])
        found[f"{name} dtype"] = raised(predict, array.astype(np.float64))
        found[f"{name} number"] = raised(predict, (array, array))
        found[f"{name} after"] = np.allclose(predict(array), fixed(array), atol=1e-5)
        # The same values, in another order in memory.
        found[f"{name} layout"] = np.allclose(
            predict(np.asfortranarray(array)), fixed(array), atol=1e-5
        )
        swapped = array.astype(array.dtype.newbyteorder())
        found[f"{name} byte order"] = np.allclose(predict(swapped), fixed(array), atol=1e-5)
    return found | _damaged() | _missing(model, x) | own.unsupported()


def _damaged():
    """Files that are cut, empty, of something else, or not there."""
    files = {"onnx": (runtimes.load_onnx, FOLDER / "digits-cnn.onnx")}
    files["openvino"] = (runtimes.load_openvino, FOLDER / "cnn.xml")
    if FRAMEWORK == "tf":
        files["litert"] = (runtimes.load_litert, FOLDER / "cnn-float32.tflite")
    found = {}
    for name, (load, path) in files.items():
        whole = path.read_bytes()
        other = FOLDER / f"damaged{path.suffix}"
        contents = {"half": whole[: len(whole) // 2], "empty": b"", "text": b"not a model " * 99}
        for kind, content in contents.items():
            other.write_bytes(content)
            found[f"{name} {kind}"] = raised(load, other, threads=1)
            count = getattr(operators, f"{name}_integer_layers")
            found[f"{name} {kind} counted"] = raised(count, other, np.zeros((1, 1), np.float32))
            if name == "onnx":
                found[f"operators {kind}"] = raised(operators.onnx_operators, other)
        found[f"{name} gone"] = raised(load, FOLDER / f"nothing{path.suffix}", threads=1)
    if FRAMEWORK == "tf":
        found |= _damaged_behind_the_model((FOLDER / "cnn-float32.tflite").read_bytes())
    found["onnx unchecked"] = raised(
        _without_check, whole=(FOLDER / "digits-cnn.onnx").read_bytes()
    )
    (FOLDER / "damaged.xml").write_bytes((FOLDER / "cnn.xml").read_bytes())
    found["openvino without weights"] = raised(
        runtimes.load_openvino, FOLDER / "damaged.xml", threads=1
    )
    return found


def _damaged_behind_the_model(whole):
    """LiteRT files whose archive is damaged; one that others made has none, or their own."""
    path, start = FOLDER / "damaged.tflite", whole.index(b"PK\x03\x04")
    name = whole.rindex(b"metadata.json")
    contents = {"tail": whole[:-10], "flipped": flipped(whole)}
    contents["renamed"] = whole[:name] + b"M" + whole[name + 1 :]
    found = {}
    for kind, content in contents.items():
        path.write_bytes(content)
        found[f"litert {kind}"] = raised(runtimes.load_litert, path, threads=1)
    path.write_bytes(whole[:start])
    metadata = [runtimes.load_litert(path, threads=1).metadata]
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("labels.txt", "cat")
    metadata.append(runtimes.load_litert(path, threads=1).metadata)
    return found | {"litert of others": metadata}


def _without_check(whole):
    """Half of an ONNX file, before ONNX Runtime's own parser."""
    path = FOLDER / "unchecked.onnx"
    path.write_bytes(whole[: len(whole) // 2])
    runtimes.load_onnx(path, threads=1, check=False)


def _missing(model, x):
    """A package that is not there, for each function that needs one."""
    calls = {
        "onnxruntime": lambda: runtimes.load_onnx(FOLDER / "fixed.onnx", threads=1),
        "onnx": lambda: technique.export_onnx(model, x, FOLDER / "other.onnx"),
        "openvino": lambda: runtimes.load_openvino(FOLDER / "cnn.xml", threads=1),
        "ai_edge_litert.interpreter": lambda: runtimes.load_litert(
            FOLDER / "cnn.tflite", threads=1
        ),
        {"pt": "onnxscript", "tf": "tf2onnx.convert"}[FRAMEWORK]: lambda: technique.export_onnx(
            model, x, FOLDER / "other.onnx"
        ),
    }
    found = {}
    for module, call in calls.items():
        kept = sys.modules.get(module)
        sys.modules[module] = None
        try:
            found[f"without {module}"] = raised(call)
        finally:
            del sys.modules[module]
            if kept is not None:
                sys.modules[module] = kept
    return found


class PyTorch:
    def __init__(self):
        import torch

        self.torch = torch

    def two(self):
        torch, nn = self.torch, self.torch.nn

        class Two(nn.Module):
            def __init__(self):
                super().__init__()
                self.inside = nn.ModuleDict({"head": nn.Linear(5, 3, bias=False)})
                self.norm = nn.BatchNorm1d(3)
                self.drop = nn.Dropout(0.5)

            def forward(self, a, b):
                y = self.norm(self.inside["head"](self.drop(a * b)))
                return {"y": y, "z": a.sum(1)}

        model = Two()
        with torch.no_grad():
            model.inside["head"].weight.copy_(torch.from_numpy(KERNEL.T))
        return model

    def foreign(self):
        torch, model = self.torch, self.two()
        model.norm.eval()  # frozen, while the model trains
        before = {name: value.clone() for name, value in model.state_dict().items()}
        a, b = torch.from_numpy(LEFT), torch.from_numpy(RIGHT)
        files = {
            "onnx": technique.export_onnx(model, (a[:1], b[:1]), FOLDER / "two.onnx"),
            "openvino": technique.export_openvino(model, (a[:1], b[:1]), FOLDER / "two.xml"),
        }
        modes = [module.training for module in model.modules()]
        found = {
            "kept": all(torch.equal(before[n], value) for n, value in model.state_dict().items()),
            "modes": modes,
        }
        with torch.no_grad():
            given = model.eval()(a, b)
        found["own"] = [given["y"].tolist(), given["z"].tolist()]
        for name, path in files.items():
            predict = getattr(runtimes, f"load_{name}")(path, threads=1)
            found[name] = {n: outputs(predict, LEFT[:n], RIGHT[:n]) for n in (1, 3, 64)}
        return {"two inputs": found}

    def names(self):
        torch, nn = self.torch, self.torch.nn

        class Eleven(nn.Module):
            def forward(self, x):
                return tuple(place * x for place in range(11))

        class Named(nn.Module):
            def __init__(self):
                super().__init__()
                self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

            def forward(self, *, left, right, mask=None):
                found, _ = self.attention(left, right, right)
                return Output(logits=found, inside={"z": left.sum(1), "a": right.sum(1)})

        class Object(nn.Module):
            def forward(self, x):
                return "text"

        class Random(nn.Module):
            def forward(self, x):
                return x + torch.rand_like(x)

        a, found = torch.from_numpy(LEFT), {}
        for kind, predict in everywhere(Eleven(), a[:1], "eleven"):
            found[f"eleven {kind}"] = by_name(predict, LEFT, Eleven()(a))
        left, right = (torch.from_numpy(array[:60]).reshape(15, 5, 4) for array in (LEFT, RIGHT))
        model = Named().eval()
        with torch.no_grad():
            wanted = model(left=left, right=right)
        example = {"right": right[:2], "left": left[:2], "mask": None}
        for kind, predict in everywhere(model, example, "named"):
            x = {"left": left.numpy(), "right": right.numpy()}
            parts = [wanted.logits, wanted.inside["z"], wanted.inside["a"]]
            found[f"named {kind}"] = by_name(predict, x, [part.numpy() for part in parts])
            found[f"misnamed {kind}"] = raised(predict, {"left": x["left"], "wrong": x["right"]})
        for name, model in (("object", Object()), ("random", Random())):
            path = FOLDER / f"refused-{name}.onnx"
            found[name] = raised(technique.export_onnx, model, a, path)
        path = FOLDER / "nowhere" / "model.onnx"
        return found | {"no folder": raised(technique.export_onnx, Eleven(), a, path)}

    def nothing_to_quantize(self):
        path, x = FOLDER / "refused.onnx", self.torch.randn(4, 3)
        given = (self.torch.nn.ReLU(), x, path)
        return {"onnx no layer": raised(technique.export_onnx, *given, precision="int8")}

    def unsupported(self):
        torch, nn = self.torch, self.torch.nn

        class Eigenvalues(nn.Module):
            def forward(self, x):
                return torch.linalg.eigvals(x @ x.transpose(0, 1)).real

        class Branch(nn.Module):
            def forward(self, x):
                return x if x.sum() > 0 else -x

        class Window(nn.Module):
            def forward(self, x):
                return (x[:, 4:] if x.shape[1] > 8 else x).mean(1)

        class Same(nn.Module):
            def forward(self, x):
                return x.sum(1) if x.shape[1] > 6 else x.flip(1).sum(1)

        x = torch.randn(4, 4)
        cnn, _ = built("digits-cnn")
        wrong = torch.randn(2, 3, 32, 32)  # three channels, not one
        opened = {"dynamic_sequence": True}
        found = {
            f"window of {length} {kind}": raised(
                export, Window(), torch.randn(2, length, 4), FOLDER / f"refused.{kind}", **opened
            )
            for length, kind, export in (
                (6, "onnx", technique.export_onnx),
                (12, "xml", technique.export_openvino),
            )
        }
        path = FOLDER / "same.onnx"
        given = Same(), torch.randn(2, 5, 4), path
        found["same on both sides"] = raised(technique.export_onnx, *given, **opened)
        found |= {
            f"misfit {kind}": raised(export, cnn, wrong, FOLDER / f"refused.{kind}")
            for kind, export in (
                ("onnx", technique.export_onnx),
                ("xml", technique.export_openvino),
            )
        }
        return found | {
            f"{name} {kind}": raised(export, model, x, FOLDER / f"refused.{kind}")
            for kind, export in (
                ("onnx", technique.export_onnx),
                ("xml", technique.export_openvino),
            )
            for name, model in (("operator", Eigenvalues()), ("branch", Branch()))
        }


class TensorFlow:
    def __init__(self):
        import tensorflow as tf

        self.tf = tf

    def foreign(self):
        tf = self.tf
        keras, layers = tf.keras, tf.keras.layers

        class Two(keras.Model):
            def __init__(self):
                super().__init__()
                self.head = layers.Dense(3, use_bias=False)
                self.norm = layers.BatchNormalization(epsilon=1e-5)
                self.drop = layers.Dropout(0.5)

            def call(self, a, b, training=False):
                y = self.head(self.drop(a * b, training=training))
                return {"y": self.norm(y, training=training), "z": tf.reduce_sum(a, 1)}

        subclassed = Two()
        a, b = tf.constant(LEFT), tf.constant(RIGHT)
        subclassed(a, b)
        subclassed.head.set_weights([KERNEL])
        return {"two inputs": self._everywhere(subclassed, (a, b), lambda m: m(a, b))}

    def _everywhere(self, model, example, call):
        tf, name = self.tf, type(model).__name__
        before = [np.array(value) for value in model.get_weights()]
        some = tf.nest.map_structure(lambda part: part[:1], example)
        files = {
            "onnx": technique.export_onnx(model, some, FOLDER / f"{name}.onnx"),
            "openvino": technique.export_openvino(model, some, FOLDER / f"{name}.xml"),
            "litert": technique.export_litert(model, some, FOLDER / f"{name}.tflite"),
        }
        given = call(model)
        given = list(given.values()) if isinstance(given, dict) else [given]
        after = model.get_weights()
        found = {
            "own": [np.asarray(part).tolist() for part in given],
            "kept": all(np.array_equal(*pair) for pair in zip(before, after, strict=True)),
        }
        for kind, path in files.items():
            predict = getattr(runtimes, f"load_{kind}")(path, threads=1)
            found[kind] = {n: outputs(predict, LEFT[:n], RIGHT[:n]) for n in (1, 3, 64)}
        return found

    def names(self):
        tf = self.tf
        keras, layers = tf.keras, tf.keras.layers
        keras.utils.set_random_seed(0)
        a, found = tf.constant(LEFT), {}
        given = keras.Input((5,))
        heads = [layers.Dense(2)(given) for _ in range(11)]
        eleven = keras.Model(given, heads)
        for kind, predict in everywhere(eleven, a[:1], "eleven"):
            found[f"eleven {kind}"] = by_name(predict, LEFT, eleven(a))
        left, right = keras.Input((5,), name="left"), keras.Input((5,), name="right")
        standardise = layers.Normalization()
        standardise.adapt(3 * RIGHT + 7)
        both = layers.Multiply()([left, standardise(right)])
        logits = layers.Dense(3, activation="gelu")(both)
        named = keras.Model({"right": right, "left": left}, {"logits": logits, "inside": both})
        example = {"left": a, "right": tf.constant(RIGHT)}
        wanted = named(example)
        for kind, predict in everywhere(named, example, "named"):
            x = {"left": LEFT, "right": RIGHT}
            parts = [wanted[name] for name in predict.outputs]
            found[f"named {kind}"] = by_name(predict, x, parts)
            found[f"misnamed {kind}"] = raised(predict, {"left": LEFT, "wrong": RIGHT})
        return found | self._loops() | self._odd(a) | self._without_onnx(eleven, a)

    def _loops(self):
        """Groups, which Keras 3 gives to XLA, and an LSTM with dropout, which draws seeds."""
        tf, layers = self.tf, self.tf.keras.layers
        x = tf.constant(LEFT[:60].reshape(15, 5, 4))
        groups, recurrent = layers.Conv1D(4, 3, groups=2), layers.LSTM(3, dropout=0.5)
        lstm = self.tf.keras.Sequential([tf.keras.Input((5, 4)), groups, recurrent])
        path, found = FOLDER / "lstm.tflite", {}
        found["open loop"] = raised(technique.export_litert, lstm, x, path)
        fixed = {"dynamic_batch": False, "precision": "int8"}
        found["loop in int8"] = raised(technique.export_litert, lstm, x, path, **fixed)
        for kind, predict in everywhere(lstm, x, "lstm", dynamic_batch=False):
            found[f"lstm {kind}"] = by_name(predict, x.numpy(), [lstm(x)])
        return found

    def _odd(self, x):
        """What is refused before anything is written."""
        tf, found = self.tf, {}

        class Random(tf.keras.Model):
            def call(self, x, training=False):
                return x + tf.random.uniform(tf.shape(x))

        random = Random()
        random(x)
        vectors = tf.keras.layers.TextVectorization(vocabulary=["a", "b"], output_mode="multi_hot")
        text = tf.keras.Sequential([tf.keras.Input((1,), dtype="string"), vectors])
        for name, model, given in (
            ("random", random, x),
            ("text", text, tf.constant([["a"], ["b"]])),
        ):
            found[name] = raised(technique.export_onnx, model, given, FOLDER / f"refused-{name}")
        path = FOLDER / "refused-text"
        found["text int8"] = raised(technique.export_onnx, text, given, path, precision="int8")
        path = FOLDER / "nowhere" / "model.onnx"
        return found | {"no folder": raised(technique.export_litert, random, x, path)}

    def _without_onnx(self, model, x):
        """LiteRT where nothing else is installed."""
        names = "onnx", "onnxruntime", "tf2onnx", "tf2onnx.convert", "openvino"
        kept = {name: sys.modules.get(name) for name in names}
        sys.modules.update(dict.fromkeys(names))
        try:
            said = raised(technique.export_litert, model, x, FOLDER / "alone.tflite")
        finally:
            for name, module in kept.items():
                del sys.modules[name]
                if module is not None:
                    sys.modules[name] = module
        return {"litert alone": said}

    def nothing_to_quantize(self):
        keras = self.tf.keras
        given = keras.Input((3,))
        model = keras.Model(given, keras.layers.ReLU()(given))
        given = (model, self.tf.ones((4, 3)), FOLDER / "refused.onnx")
        return {"onnx no layer": raised(technique.export_onnx, *given, precision="int8")}

    def fixed_batch(self, settings):
        """A model that is traced with its batch's size in a reshape."""
        layers = self.tf.keras.layers
        net = [self.tf.keras.Input((8, 8, 1)), layers.Conv2D(4, 3), layers.Flatten()]
        model, x = self.tf.keras.Sequential(net), self.tf.random.normal((6, 8, 8, 1))
        path = technique.export_litert(model, x, FOLDER / "int8-fixed.tflite", **settings)
        return {"own": output(model, x), "out": output(runtimes.load_litert(path, threads=1), x)}

    def unsupported(self):
        tf = self.tf

        class Eigenvalues(tf.keras.Model):
            def __init__(self):
                super().__init__()
                self.inside = tf.keras.layers.Dense(4)

            def call(self, x, training=False):
                y = self.inside(x)
                return tf.math.real(tf.linalg.eigvals(tf.matmul(y, y, transpose_b=True)))

        class Window(tf.keras.Model):
            def __init__(self):
                super().__init__()
                self.inside = tf.keras.layers.Dense(4)

            def call(self, x, training=False):
                known = x.shape[1] is not None and x.shape[1] > 8
                return tf.reduce_mean(self.inside(x[:, -8:] if known else x), 1)

        cnn, _ = built("digits-cnn")
        window, x = Window(), tf.random.normal((2, 6, 4))
        window(x)
        said = raised(
            technique.export_onnx, window, x, FOLDER / "refused.onnx", dynamic_sequence=True
        )
        wrong = tf.zeros((2, 32, 32, 3))  # three channels, not one
        misfit = {
            f"misfit {kind}": raised(export, cnn, wrong, FOLDER / f"refused.{kind}")
            for kind, export in (
                ("onnx", technique.export_onnx),
                ("xml", technique.export_openvino),
                ("tflite", technique.export_litert),
            )
        }
        model = Eigenvalues()
        unbuilt = raised(technique.export_onnx, model, tf.zeros((4, 4)), FOLDER / "no.onnx")
        model(tf.zeros((4, 4)))
        found = {
            f"operator {kind}": raised(export, model, tf.zeros((4, 4)), FOLDER / f"refused.{kind}")
            for kind, export in (
                ("onnx", technique.export_onnx),
                ("xml", technique.export_openvino),
                ("tflite", technique.export_litert),
            )
        }
        inputs, kept = tf.keras.Input((2,), dtype="int64"), tf.keras.Input(batch_shape=(2, 6, 4))
        lookup = tf.keras.layers.IntegerLookup(vocabulary=[5, 7])(inputs)
        lookup = tf.keras.Model(inputs, tf.keras.layers.Embedding(4, 2)(lookup))
        stateful = tf.keras.Model(kept, tf.keras.layers.GRU(2, stateful=True, name="kept")(kept))
        settings = {"path": FOLDER / "refused.onnx", "dynamic_batch": False}
        codes = tf.constant([[5, 7]], tf.int64)
        found |= {
            "lookup": raised(technique.export_onnx, lookup, codes, **settings),
            "stateful": raised(technique.export_onnx, stateful, x, **settings),
        }
        return found | misfit | {"unbuilt": unbuilt, "window": said}


def main() -> None:
    kit.runtime.configure(threads=1, seed=0)
    others = () if LEGACY else (openvino, text, litert, int8, names, refusals)
    workers.report((tasks, foreign, *others))


own = PyTorch() if FRAMEWORK == "pt" else TensorFlow()
if __name__ == "__main__":
    main()
