"""One framework's share of the sparse-inference tests, in a process of its own.

`python sparse_inference_worker.py pt|tf|tf_keras` runs every scenario and prints one line of JSON:
scenario -> what was found, or {"error": traceback}. `test_sparse_inference.py` judges.
"""

from __future__ import annotations

import sys
import tempfile
from importlib import import_module
from pathlib import Path

import numpy as np

from bench.compression.bench_sparse_inference import pruned
from shared.specs import GPTSpec
from shared.weights import init_weights
from tests import workers
from tests.workers import raised_on_one_line as raised

FRAMEWORK = "pt" if sys.argv[1:] == ["pt"] else "tf"
OWN = ("kit.sparse_files",) if FRAMEWORK == "tf" else ()
impl = workers.implementation(FRAMEWORK, "compression.sparse_inference", *OWN)
kit = impl.kit
technique = impl.compression.sparse_inference
sparse_files = kit.sparse_files if FRAMEWORK == "tf" else None
GPT = GPTSpec(vocabulary=11, sequence_length=6, width=16, heads=2, layers=1)

random = np.random.default_rng(3)
CODES = random.integers(0, 11, (4, 6))
LEFT, RIGHT = (random.normal(size=(9, 5)).astype(np.float32) for _ in range(2))
KERNELS = {
    "wide": random.normal(size=(5, 8)).astype(np.float32),
    "head": random.normal(size=(8, 3)).astype(np.float32),
}
BIAS = random.normal(size=8).astype(np.float32)
KERNELS["wide"][random.random((5, 8)) < 0.8] = 0.0  # the head has no zeros
KERNELS["wide"][:, 2] = 0.0  # a row of the CSR matrix without values


def weights(sparsity):
    found = init_weights(GPT, seed=1)
    return {name: pruned(name, 20 * value, sparsity) for name, value in found.items()}


# Scenarios for both frameworks ----------------------------------------------------------------


def transformer():
    """Predictions over sparse and over dense kernels, and the bytes of both."""
    found = {}
    codes, _ = kit.data.to_device(CODES, CODES)
    for sparsity in (0.5, 0.9):
        model = kit.models.build(GPT, weights(sparsity))
        before = kit.models.export_weights(model)
        predict = technique.make_predict(model, min_sparsity=sparsity - 0.02)
        after = kit.models.export_weights(model)
        dense = kit.training.make_predict(model)
        sizes = {
            name.removesuffix(".kernel"): (value.nbytes, int(np.count_nonzero(value)))
            for name, value in before.items()
            if name.endswith(".kernel")
        }
        found[str(sparsity)] = {
            "sparse": np.array(predict(codes)).tolist(),
            "dense": np.array(dense(codes)).tolist(),
            "dense later": np.array(dense(codes[:2])).tolist(),
            "sparse later": np.array(predict(codes[:2])).tolist(),
            "of none": np.array(predict(codes[:0])).shape,
            "layers": predict.layers,
            "sizes": sizes,
            "kept": all(np.array_equal(before[n], after[n]) for n in before),
        }
    return found


def copies():
    """Predictions before and after the model's kernels change."""
    codes, _ = kit.data.to_device(CODES, CODES)
    model = kit.models.build(GPT, weights(0.9))
    predict = technique.make_predict(model)
    before = np.array(predict(codes))
    changed = {n: 2 * v if n.endswith(".kernel") else v for n, v in weights(0.9).items()}
    kit.models.import_weights(model, changed)
    dense = np.array(kit.training.make_predict(model)(codes))
    return [before.tolist(), np.array(predict(codes)).tolist(), dense.tolist()]


def refusals():
    """What bad input raises."""
    model = kit.models.build(GPT, weights(0.0))
    found = {
        str(share): raised(technique.make_predict, model, min_sparsity=share)
        for share in (0.0, 1.1, float("nan"))
    }
    found["no zeros"] = raised(technique.make_predict, model)
    found["half"] = raised(technique.make_predict, own.half())
    return found | {"masked": own.masked()}


def files():
    """What files hold and predict, and what is refused; PyTorch has none."""
    if FRAMEWORK == "pt":
        return {}
    codes, _ = kit.data.to_device(CODES, CODES)
    model, folder = kit.models.build(GPT, weights(0.9)), Path(tempfile.mkdtemp())
    before, found = kit.models.export_weights(model), {}
    dense = np.array(kit.training.make_predict(model)(codes))
    for name, sparse in (("sparse", True), ("dense", False)):
        path = sparse_files.export_file(model, codes[:1], folder / name, sparse=sparse)
        predict = sparse_files.load_file(path)
        found[name] = {
            "all": np.array(predict(codes)).tolist(),
            "two": np.array(predict(codes[:2])).tolist(),
            "tensors": predict.sparse,
            "bytes": path.stat().st_size,
        }
    after = kit.models.export_weights(model)
    found["wanted"] = dense.tolist()
    found["kept"] = all(np.array_equal(before[n], after[n]) for n in before)
    full = kit.models.build(GPT, weights(0.0))
    found["no zeros"] = raised(sparse_files.export_file, full, codes, folder / "full")
    found["written"] = (folder / "full").exists()
    (folder / "cut").write_bytes(path.read_bytes()[:1000])
    for name in ("cut", "missing"):
        found[name] = raised(sparse_files.load_file, folder / name)
    found["two outputs"] = own.two_outputs(folder / "two")
    load, sparse_files.load_file = sparse_files.load_file, lambda path: lambda x: 2 * load(path)(x)
    found["another"] = raised(sparse_files.export_file, model, codes, folder / "another")
    sparse_files.load_file = load
    found["left"] = [path.name for path in folder.glob("another*")]
    return found


def foreign():
    """Models that are not ours, of two inputs: sparse, dense, and which layers are sparse."""
    return own.foreign()


class PyTorch:
    def __init__(self):
        import torch

        self.torch = torch

    def half(self):
        torch = self.torch
        model = torch.nn.Linear(4, 4, dtype=torch.bfloat16)
        torch.nn.init.zeros_(model.weight)
        return model

    def foreign(self):
        torch, nn = self.torch, self.torch.nn

        class Two(nn.Module):
            def __init__(self):
                super().__init__()
                self.inside = nn.ModuleDict({"wide": nn.Linear(5, 8)})
                self.drop = nn.Dropout(0.5)
                self.head = nn.Linear(8, 3, bias=False)

            def forward(self, a, b):
                x = torch.relu(self.inside["wide"](torch.stack([a, b], 1)))
                return {"y": self.head(self.drop(x))}

        model = Two()
        with torch.no_grad():
            model.inside["wide"].weight.copy_(torch.from_numpy(KERNELS["wide"].T))
            model.inside["wide"].bias.copy_(torch.from_numpy(BIAS))
            model.head.weight.copy_(torch.from_numpy(KERNELS["head"].T))
        inputs = torch.from_numpy(LEFT), torch.from_numpy(RIGHT)
        predict = technique.make_predict(model)
        sparse = predict(inputs)["y"]
        with torch.no_grad():
            dense = model.eval()(*inputs)["y"]
        alone = technique.make_predict(model.inside["wide"])
        with torch.no_grad():
            both = alone(inputs[0]), model.inside["wide"](inputs[0])
        encoders = self.encoders()
        return {
            "two inputs": [sparse.tolist(), dense.tolist(), list(predict.layers)],
            "a layer alone": [value.tolist() for value in both] + [list(alone.layers)],
            "encoders": encoders,
            "two names": self.two_names(),
            "asked": self.asked(),
            "hooked": self.hooked(),
            "no copy": self.no_copy(),
        }

    def no_copy(self):
        """What a model raises whose weight is computed, after a pass with gradients."""
        nn = self.torch.nn
        model = nn.Sequential(nn.utils.weight_norm(nn.Linear(4, 4)), nn.Linear(4, 4))
        nn.init.zeros_(model[1].weight)
        model(self.torch.ones(2, 4))
        return raised(technique.make_predict, model)

    def masked(self):
        from torch.nn.utils import prune

        torch = self.torch
        model = torch.nn.Sequential(torch.nn.Linear(5, 8))
        prune.l1_unstructured(model[0], "weight", 0.9)
        found = [raised(technique.make_predict, model)]
        with torch.no_grad():
            model(torch.ones(2, 5))  # from here on the masked weight is a tensor like others
        return [*found, raised(technique.make_predict, model)]

    def two_names(self):
        """The types of what runs where one layer stands at three places, one of them deeper."""
        torch, nn = self.torch, self.torch.nn
        layer, ran = nn.Linear(8, 8), []
        nn.init.zeros_(layer.weight)
        predict = technique.make_predict(nn.Sequential(layer, layer, nn.Sequential(layer)))
        hook = nn.modules.module.register_module_forward_pre_hook(
            lambda module, inputs: ran.append(type(module).__name__)
        )
        predict(torch.ones(2, 8))
        hook.remove()
        return [ran, list(predict.layers)]

    def asked(self):
        """Sparse and dense outputs of a model that asks its layer for width, dtype and device."""
        torch, nn = self.torch, self.torch.nn

        class Asking(nn.Module):
            def __init__(self):
                super().__init__()
                self.wide = nn.Linear(5, 8)

            def forward(self, x):
                x = x.to(self.wide.weight.device, self.wide.weight.dtype)
                return self.wide(x) / self.wide.in_features + self.wide.out_features

        model = Asking()
        with torch.no_grad():
            model.wide.weight.copy_(torch.from_numpy(KERNELS["wide"].T))
            x = torch.from_numpy(LEFT)
            return [technique.make_predict(model)(x.double()).tolist(), model(x).tolist()]

    def hooked(self):
        """Sparse and dense outputs of a layer with hooks, and of one with `weight_norm`."""
        torch, nn = self.torch, self.torch.nn
        model = nn.Sequential(nn.Linear(5, 8), nn.utils.weight_norm(nn.Linear(8, 8)))
        model[0].register_forward_hook(lambda layer, inputs, output: 10 * output)
        model[0].register_forward_pre_hook(
            lambda layer, args, named: ((2 * args[0],), named), with_kwargs=True
        )
        with torch.no_grad():
            model[0].weight.copy_(torch.from_numpy(KERNELS["wide"].T))
            model[1].weight_v[:, :7] = 0.0
            x = torch.from_numpy(LEFT)
            dense = model(x)
            predict = technique.make_predict(model)
        return [predict(x).tolist(), dense.tolist(), list(predict.layers)]

    def encoders(self):
        """PyTorch's own encoders, which may compute without a call of their linear layers.

        For each: predictions, those of the dense model, and how many layers are sparse.
        """
        torch, nn = self.torch, self.torch.nn

        class Padded(nn.Module):
            def __init__(self, encoder):
                super().__init__()
                self.encoder = encoder

            def forward(self, x, padding):
                # What stands where the padding is means nothing, and depends on the path.
                y = self.encoder(x, src_key_padding_mask=padding)
                return y.masked_fill(padding[..., None], 0.0)

        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        whole = nn.TransformerEncoder(layer, 2)
        with torch.no_grad():
            for module in whole.modules():
                if type(module) is nn.Linear:
                    module.weight.mul_(torch.rand_like(module.weight) > 0.8).mul_(5.0)
        x, padding = torch.randn(3, 5, 8), torch.arange(5) >= torch.tensor([[5], [3], [4]])
        cases = {"layer": (whole.layers[0], x), "encoder": (whole, x)}
        cases["padded"] = (Padded(whole), x, padding)
        found = {}
        for name, (model, *inputs) in cases.items():
            predict = technique.make_predict(model.eval(), min_sparsity=0.5)
            with torch.no_grad():
                dense = model(*inputs)
            found[name] = [predict(tuple(inputs)).tolist(), dense.tolist(), len(predict.layers)]
        return found


class TensorFlow:
    def __init__(self):
        import tensorflow as tf

        self.tf = tf

    def two_outputs(self, path):
        """Of a file and of its model, one after the other."""
        layers, x = self.tf.keras.layers, self.tf.random.normal((4, 16))
        row = self.tf.keras.Input((16,))
        model = self.tf.keras.Model(row, [layers.Dense(8)(row), layers.Dense(5)(row)])
        model.set_weights([np.where(abs(w) > 0.4, w, 0.0) for w in model.get_weights()])
        found = sparse_files.load_file(sparse_files.export_file(model, x, path))(x)
        return [np.array(part).tolist() for part in (*found, *model(x))]

    def same_names(self):
        """Blocks that each hold a layer "up": which are sparse, and how many bytes each has."""
        keras, layers = self.tf.keras, self.tf.keras.layers

        class Block(layers.Layer):
            def __init__(self, units):
                super().__init__()
                self.up = layers.Dense(units, name="up")

            def call(self, x):
                return self.up(x)

        x = keras.Input((4,))
        model = keras.Model(x, layers.Dense(5, name="up_1")(Block(3)(Block(2)(x))))
        model.set_weights([np.zeros(value.shape, np.float32) for value in model.get_weights()])
        return technique.make_predict(model).layers

    def masked(self):
        pruning, keras = import_module("tf_impl.compression.pruning"), self.tf.keras
        model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(8)])
        settings = {"final_sparsity": 0.9, "begin_step": 0, "end_step": 1, "frequency": 1}
        masked, update = pruning.apply_pruning(model, **settings)
        update(1)
        x, path = self.tf.constant(LEFT), Path(tempfile.mkdtemp()) / "file"
        masked(x, training=True)
        return [
            raised(technique.make_predict, masked),
            raised(sparse_files.export_file, masked, x, path),
        ]

    def half(self):
        keras = self.tf.keras
        layer = keras.layers.Dense(4, kernel_initializer="zeros", dtype="mixed_bfloat16")
        return keras.Sequential([keras.Input((4,)), layer])

    def foreign(self):
        tf = self.tf
        keras, layers = tf.keras, tf.keras.layers

        class Inside(layers.Layer):
            def __init__(self):
                super().__init__()
                self.wide = layers.Dense(8, activation="relu", name="wide")

            def build(self, shape):
                self.wide.build(shape)
                self.built = True

            def call(self, x):
                return self.wide(x)

        class Two(keras.Model):
            def __init__(self):
                super().__init__()
                self.inside = Inside()
                self.drop = layers.Dropout(0.5)
                self.head = layers.Dense(3, use_bias=False, name="head")

            def call(self, a, b, training=False):
                x = self.inside(tf.stack([a, b], 1))
                return {"y": self.head(self.drop(x, training=training))}

        def load(wide, head):
            wide.set_weights([KERNELS["wide"], BIAS])
            head.set_weights([KERNELS["head"]])

        inputs = tf.constant(LEFT), tf.constant(RIGHT)
        subclassed = Two()
        subclassed(*inputs)
        load(subclassed.inside.wide, subclassed.head)
        predict = technique.make_predict(subclassed)
        found = {
            "two inputs": [
                np.array(predict(inputs)["y"]).tolist(),
                np.array(subclassed(*inputs)["y"]).tolist(),
                list(predict.layers),
            ]
        }
        # The layer computes as ever outside of the graph, and goes on training.
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(subclassed(*inputs)["y"])
        found["trains"] = tape.gradient(loss, subclassed.inside.wide.kernel) is not None
        a, b = keras.Input((5,)), keras.Input((5,))
        wide = layers.Dense(8, "relu", name="wide")
        head = layers.Dense(3, use_bias=False, name="head")
        functional = keras.Model([a, b], head(layers.Dropout(0.5)(wide(layers.Add()([a, b])))))
        load(wide, head)
        predict = technique.make_predict(functional)
        found["functional"] = [
            np.array(predict(list(inputs))).tolist(),
            np.array(functional(list(inputs))).tolist(),
            list(predict.layers),
        ]
        found["same names"] = self.same_names()
        over_places = layers.Dense(8, lambda x: tf.nn.softmax(x, axis=1))
        other = keras.Sequential([keras.Input((3, 5)), over_places])
        other.set_weights([KERNELS["wide"], BIAS])
        x = tf.reshape(tf.concat(inputs, 0), (6, 3, 5))
        both = technique.make_predict(other)(x), other(x)
        found["other axis"] = [np.array(value).tolist() for value in both]
        found["unbuilt"] = raised(technique.make_predict, Two())
        return found


def main() -> None:
    kit.runtime.configure(threads=1, seed=0)
    workers.report((transformer, copies, files, refusals, foreign))


own = PyTorch() if FRAMEWORK == "pt" else TensorFlow()
if __name__ == "__main__":
    main()
