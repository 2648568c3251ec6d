"""One framework's share of the weight-quantization tests, in a process of its own.

`python weight_quantization_worker.py pt|tf` runs every scenario and prints one line of JSON:
scenario -> what was found, or {"error": traceback}. `test_weight_quantization.py` judges.
"""

from __future__ import annotations

import os
import pickle
import sys
import warnings
from dataclasses import replace
from importlib import import_module
from unittest import mock

import numpy as np

from bench.compression import bench_weight_quantization as bench
from bench.harness.plan import Work
from shared.specs import TASKS, GPTSpec
from shared.weights import init_weights
from tests import workers
from tests.compression import quick
from tests.flipped import flipped
from tests.workers import raised

FRAMEWORK = sys.argv[1]
impl = workers.implementation(
    FRAMEWORK, "compression.weight_quantization", "kit.integers", "kit.quantized_files"
)
kit, integers, files_of = impl.kit, impl.kit.integers, impl.kit.quantized_files
technique = impl.compression.weight_quantization
APPLIED = {"float32": None, "int8": technique.apply_int8, "int4": technique.apply_int4}
WRITERS = tuple(APPLIED)
SPEC = GPTSpec(vocabulary=64, sequence_length=8, width=64, heads=4, layers=1)

random = np.random.default_rng(7)
CODES = random.integers(0, 64, (6, 8))
KERNEL = random.normal(size=(64, 48)).astype(np.float32)


def write(bits: str, model, x, path):
    """The file of the model with weights of so many bits."""
    apply = APPLIED[bits]
    return files_of.save_quantized(apply(model, x) if apply else model, x, path)


# Scenarios for both frameworks ----------------------------------------------------------------


def transformer(folder):
    """Each file of a transformer: what it predicts, its bytes, and what it holds."""
    weights = {name: 2 * value for name, value in init_weights(SPEC, seed=1).items()}
    model = kit.models.build(SPEC, weights)
    codes, _ = kit.data.to_device(CODES, CODES)
    before = kit.models.export_weights(model)
    found = {"model": np.array(kit.training.make_predict(model)(codes)).tolist()}
    for bits in WRITERS:
        path = write(bits, model, codes[:1], folder / bits)
        with quick.without_code():  # `kernels` compiles a layer of each width
            predict = files_of.load_quantized(path)
            found[bits] = {
                "logits": np.array(predict(codes)).tolist(),
                "bytes": path.stat().st_size,
                "held": integers.tensor_bytes(path),
                "operators": integers.integer_operators(predict, path, codes),
            }
    after = kit.models.export_weights(model)
    found["kept"] = all(np.array_equal(before[name], after[name]) for name in before)
    return found


FILES = {}  # by writer, of `kernels`


def kernels(folder):
    """The kernel of a dense layer as each file has it: what the layer makes of an identity."""
    model, identity = own.dense(KERNEL), own.tensor(np.eye(64, dtype=np.float32))
    found = {"float32": KERNEL.tolist()}
    for bits in WRITERS[1:]:
        path = write(bits, model, identity, folder / bits)
        predict = files_of.load_quantized(path)
        found[bits] = np.array(predict(identity)).tolist()
        FILES[bits] = path.read_bytes()
    return found


def read(folder):
    """What a call reads of a kernel of 256 KiB in float32, and of two small ones."""
    found = {}
    for size in (256, 48, 64):
        model = own.dense(random.normal(size=(size, size)).astype(np.float32))
        for bits in WRITERS if size == 256 else WRITERS[1:2]:
            x = own.tensor(np.ones((3, size), np.float32))
            path = write(bits, model, x, folder / bits)
            found[f"{bits} {size}"] = [
                integers.integer_bytes_read(path, x[:rows]) for rows in (3, 1)
            ]
    return found


def constructions(folder):
    """Models of other construction: how far files are off the model, and off a copy in memory.

    All of them in campaigns; else the first.
    """
    tracing, comparing = (
        import_module(f"{FRAMEWORK}_impl.kit.{name}") for name in ("tracing", "comparing")
    )
    found = {}
    every = list(own.constructions().items())
    for name, (model, x) in every if workers.campaign() else every[:1]:
        expected = own.call(tracing, model, x)
        for bits in WRITERS:
            path = write(bits, model, x, folder / bits)
            with workers.without_inductor():  # what it computes, not with which kernels
                predicted = files_of.load_quantized(path)(x)
            case = found.setdefault(name, {})
            case[bits] = comparing.apart(predicted, expected)
            if bits == WRITERS[1]:
                held = technique.apply_int8(model, x)
                case["in memory"] = comparing.apart(predicted, own.call(tracing, held, x))
                case["bytes of int8"] = integers.tensor_bytes(path)["int8"]
    return found


def proof(folder):
    """What the benchmark makes of a file as it is, and of one whose weights were folded."""
    random, data = np.random.default_rng(3), folder / "data"
    data.mkdir()
    codes = random.integers(0, 64, (8, 8))
    for name in ("x", "y"):
        np.save(data / f"train_{name}.npy", codes)
    wide = replace(SPEC, width=192, heads=4)
    work = Work(
        task=replace(TASKS["text-gpt"], model=wide),
        variant="int8_weights",
        settings={"apply": "apply_int8"},
        batch_size=8,
        weights=init_weights(wide, seed=1),
        mode="predict",
        data=str(data),
        folder=folder,
    )
    prepared = bench.prepare(impl, work)
    path = folder / "int8_weights"
    prepared.write(path)
    batch = kit.data.to_device(codes, codes)
    with quick.without_code():
        deployed = replace(prepared, predict=prepared.read(path), artifact=path)
    found = {"as it is": bench.took_effect(impl, work, deployed, batch)}
    with mock.patch.object(integers, "integer_bytes_read", return_value={}):
        found["folded"] = bench.took_effect(impl, work, deployed, batch)
    return found


def refusals(folder):
    """What models and inputs raise that cannot be had, and the files that were left."""
    x = own.tensor(np.ones((2, 48), np.float32))
    narrow = own.dense(np.ones((48, 4), np.float32))
    cases = {
        "no layer": ("int8", own.without_layers(), x),
        "empty": ("int8", narrow, x[:0]),
        "shape": ("int8", narrow, x[:, :7]),
    } | own.refused(x)
    found = {
        name: raised(write, bits, model, given, folder / "x")
        for name, (bits, model, given) in cases.items()
    }
    return found | {"files": [path.name for path in folder.iterdir()]}


class Bomb:
    """Makes a folder when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def other_sizes(folder):
    """What a file says of its example's sizes, of more samples and of another length."""
    model, x = own.dense(KERNEL, (None,)), np.ones((2, 3, 64), np.float32)
    path = write("float32", model, own.tensor(x), folder / "file")
    with quick.without_code():
        predict = files_of.load_quantized(path)
        given = x, x[[0, 0, 0]], x[:, [0, 0, 0, 0]]
        return [raised(predict, own.tensor(each)) for each in given]


def files(folder):
    """What damaged and foreign files raise, and whether anything of them ran."""
    whole = FILES["int8"]
    contents = {f"first {p}%": whole[: len(whole) * p // 100] for p in (0, 30, 99)}
    contents |= {"text": b"no model\n" * 99, "bomb": pickle.dumps(Bomb(folder / "burst"))}
    contents |= own.bombs(folder / "burst") | {"flipped": flipped(whole)}
    found = {"missing": raised(files_of.load_quantized, folder / "none")}
    for name, content in contents.items():
        (folder / "damaged").write_bytes(content)
        found[name] = raised(files_of.load_quantized, folder / "damaged")
    return {"said": found, "burst": (folder / "burst").exists()}


class PyTorch:
    def __init__(self):
        import torch

        self.torch = torch

    def tensor(self, array):
        return self.torch.from_numpy(array)

    def dense(self, kernel, axes=()):
        layer = self.torch.nn.Linear(*kernel.shape, bias=False)
        with self.torch.no_grad():
            layer.weight.copy_(self.tensor(kernel.T))
        return self.torch.nn.Sequential(layer)

    def without_layers(self):
        return self.torch.nn.ReLU()

    def call(self, tracing, model, x):
        with self.torch.no_grad():
            return tracing.outputs(model.eval(), x)

    def constructions(self):
        torch, nn = self.torch, self.torch.nn
        torch.manual_seed(0)

        class Tied(nn.Module):
            def __init__(self):
                super().__init__()
                self.table, self.middle = nn.Embedding(64, 32), nn.Linear(32, 32)
                self.head = nn.Linear(32, 64, bias=False)
                self.head.weight = self.table.weight

            def forward(self, b, a):
                y = self.middle(self.table(a)) * b[:, None, None]
                return {"y": self.head(y), "pair": (y, [y.sum(1)])}

        class Token(nn.Module):
            def __init__(self):
                super().__init__()
                self.token = nn.Parameter(0.02 * torch.randn(1, 1, 32))
                layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
                self.encoder, self.head = nn.TransformerEncoder(layer, 2), nn.Linear(32, 16)

            def forward(self, x):  # of `len` torch.export makes a constant, so that Dynamo captures
                x = torch.cat([self.token.expand(len(x), -1, -1), x], 1)
                return self.head(self.encoder(x)[:, 0])

        encoder = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
        codes = torch.randint(0, 20, (6, 5))
        return {
            "attention": (encoder, torch.randn(6, 5, 32)),
            "token": (Token(), torch.randn(6, 5, 32)),
            "tied": (Tied(), {"b": torch.rand(6), "a": codes}),
        }

    def refused(self, x):
        narrow = self.dense(np.ones((48, 4), np.float32))
        double = self.dense(np.ones((48, 4), np.float32)).double()
        return {
            "multiples": ("int4", narrow, x),
            "double": ("int8", double, x.double()),
        }

    def computed(self, folder):
        """Whose weight is quantized: of a layer with a weight norm, and of one without."""
        nn = self.torch.nn
        model = nn.Sequential(
            nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), nn.Linear(4, 2)
        )
        quantized = technique.apply_int8(model, self.torch.ones(2, 4))
        return [type(layer.weight) is not type(self.torch.ones(1)) for layer in quantized]

    def bombs(self, target):
        return {}


class TensorFlow:
    def __init__(self):
        import tensorflow as tf

        self.tf = tf

    def tensor(self, array):
        return self.tf.constant(array)

    def dense(self, kernel, axes=()):
        layer = self.tf.keras.layers.Dense(kernel.shape[1], use_bias=False)
        model = self.tf.keras.Sequential([self.tf.keras.Input((*axes, kernel.shape[0])), layer])
        layer.set_weights([kernel])
        return model

    def without_layers(self):
        inputs = self.tf.keras.Input((48,))
        return self.tf.keras.Model(inputs, self.tf.keras.layers.ReLU()(inputs))

    def call(self, tracing, model, x):
        return tracing.outputs(model, x)

    def constructions(self):
        tf = self.tf
        keras, layers = tf.keras, tf.keras.layers
        keras.utils.set_random_seed(0)
        row, other = keras.Input((32,)), keras.Input((8,))
        norm = layers.Normalization()
        norm.adapt(50 + 9 * np.random.default_rng(0).normal(size=(64, 32)).astype(np.float32))
        x = layers.Concatenate()([layers.Dense(24)(norm(row)), other])
        outputs = {"y": layers.Dense(64)(x), "pair": (x, [layers.Dense(2)(x)])}
        codes = keras.Input((5,), dtype="int32")
        x = layers.Embedding(20, 32)(codes)
        x = layers.Dense(32)(layers.LSTM(32)(x + layers.MultiHeadAttention(4, 8)(x, x)))
        given = tf.constant(np.random.default_rng(1).integers(0, 20, (6, 5)), tf.int32)
        random = tf.random.normal
        return {
            "normalised": (
                keras.Model([row, other], outputs),
                (50 + 9 * random((6, 32)), random((6, 8))),
            ),
            "recurrent": (keras.Model(codes, x), given),
        }

    def refused(self, x):
        keras = self.tf.keras

        class Own(keras.Model):
            def __init__(self, layer):
                super().__init__()
                self.layer = layer

            def call(self, x):
                return self.layer(x)

        model = Own(keras.layers.Dense(4))
        model(x)
        return {"subclassed": ("int8", model, x)}

    def distributed(self, folder):
        """Dense layers in TimeDistributed: alone, within a model, and beside one that is called."""
        keras, layers = self.tf.keras, self.tf.keras.layers
        keras.utils.set_random_seed(0)
        x = self.tf.random.normal((4, 3, 16))
        inside = keras.Sequential([layers.Dense(8, name="inside")])
        found = {}
        for name, wrapped, behind in (
            ("alone", layers.Dense(8, name="wrapped"), layers.ReLU()),
            ("beside", layers.Dense(8, name="wrapped"), layers.Dense(4, name="called")),
            ("model", inside, layers.ReLU()),
        ):
            inputs = keras.Input((3, 16))
            model = keras.Model(inputs, behind(layers.TimeDistributed(wrapped)(inputs)))
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always", UserWarning)
                found[name] = {"raised": raised(technique.apply_int8, model, x)}
                if found[name]["raised"] is None:
                    held = technique.apply_int8(model, x)
                    off = self.tf.norm(held(x) - model(x)) / self.tf.norm(model(x))
                    found[name]["apart"] = float(off)
                    found[name]["integers"] = [
                        layer.name
                        for layer in held._flatten_layers(include_self=False)
                        if getattr(layer, "quantization_mode", None) == "int8"
                    ]
            found[name]["said"] = sorted({str(one.message) for one in said})
        return found

    def bombs(self, target):
        """A program that writes a file when it is called."""
        from tensorflow.core.protobuf import meta_graph_pb2

        tf = self.tf
        with tf.Graph().as_default() as graph:
            x = tf.compat.v1.placeholder(tf.float32, (None, 64), name="x")
            with tf.control_dependencies([tf.io.write_file(str(target), "")]):
                tf.identity(x, name="y")
        meta = meta_graph_pb2.MetaGraphDef(graph_def=graph.as_graph_def())
        meta.signature_def["predict"].inputs["000"].name = "x:0"
        meta.signature_def["predict"].outputs["output"].name = "y:0"
        return {"program": meta.SerializeToString()}


def main() -> None:
    kit.runtime.configure(threads=1, seed=0)
    if FRAMEWORK == "pt" and not workers.campaign():  # a graph is read before code is made of it
        integers.compile_fx_inner = quick.as_it_is
    scenarios = [transformer, kernels, read, constructions, proof, refusals, files, other_sizes]
    scenarios += [own.computed if FRAMEWORK == "pt" else own.distributed]
    workers.report(map(workers.in_a_folder, scenarios))


own = PyTorch() if FRAMEWORK == "pt" else TensorFlow()
if __name__ == "__main__":
    main()
