"""One framework's share of the quantization tests, in a process of its own.

`python post_training_quantization_worker.py pt|tf` runs every scenario and prints one line of JSON:
scenario -> what was found, or {"error": traceback}. `test_post_training_quantization.py` judges.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from shared import onnx_quantization, operators
from shared.specs import CNNSpec
from shared.weights import init_weights
from tests import workers
from tests.compression import quick
from tests.workers import raised

FRAMEWORK = sys.argv[1]
OWN = ("compression.post_training_quantization", "kit.int8_files")
impl = workers.implementation(FRAMEWORK, *OWN)
kit = impl.kit
technique, files_of_int8 = impl.compression.post_training_quantization, impl.kit.int8_files
integers = import_module(f"{impl.__name__}.kit.integers")
SPEC = CNNSpec((16, 16, 1), ((16, 2), (64, 1), (128, 2)), num_classes=10)
WAYS = {
    "float32": ("keep_float32", "load_int8"),
    "static": ("apply_static_int8", "load_int8"),
    "dynamic": ("apply_dynamic_int8", "load_int8"),
    "onnxruntime float32": ("keep_onnxruntime_float32", "load_onnxruntime"),
    "onnxruntime": ("quantize_onnxruntime_int8", "load_onnxruntime"),
}
WRITERS = tuple(write for write, _ in WAYS.values())

random = np.random.default_rng(5)
IMAGES = random.normal(size=(120, 16, 16, 1)).astype(np.float32)
LABELS = np.zeros(120, np.int64)
LEFT, RIGHT = (random.normal(size=(40, 24)).astype(np.float32) for _ in range(2))
COLUMNS = [100.0, -3.0, 0.5], [20.0, 3.0, 0.1]  # of a table: means and standard deviations
KERNELS = [random.normal(size=shape).astype(np.float32) / 5 for shape in ((24, 48), (48, 5))]


def function(name):
    """A function that writes or reads a file; what is quantized in memory is written, too."""
    found = getattr(files_of_int8, name, None) or getattr(technique, name)
    if not name.startswith("apply"):
        return found

    def write(model, x, path, **settings):
        return files_of_int8.save_int8(found(model, x, **settings), model, x, path)

    return write


def weights():
    """Initial weights whose BatchNorm does something, and whose logits are apart."""
    found = init_weights(SPEC, seed=2)
    for name in found:
        if name.endswith((".mean", ".beta")):
            found[name] = random.normal(size=found[name].shape).astype(np.float32) / 5
        elif name.endswith(".variance"):
            found[name] = random.uniform(0.5, 2, found[name].shape).astype(np.float32)
    found["head.kernel"] = 3 * found["head.kernel"]
    return found


WEIGHTS = weights()


def built():
    model = kit.models.build(SPEC, WEIGHTS)
    x, _ = kit.data.to_device(IMAGES, LABELS)
    return model, x


# Scenarios for both frameworks ----------------------------------------------------------------


def ran(predict, read, path, x):
    """Operators over integers of one prediction."""
    if read == "load_onnxruntime":
        return onnx_quantization.integer_operators(path, (np.asarray(x),))
    return integers.integer_operators(predict, path, x)


FILES = {}  # by way, of `variants`


def variants(folder):
    """Each file of the CNN: what it predicts, its bytes, and what ran over integers.

    The static one is compiled as users have it, and all others are its kind.
    """
    model, x = built()
    before = kit.models.export_weights(model)
    found = {"model": np.array(kit.training.make_predict(model)(x[:64])).tolist()}
    for name, (write, read) in WAYS.items():
        path = folder / name
        returned = function(write)(model, x[64:], path)
        with contextlib.nullcontext() if name == "static" else quick.without_code():
            predict = function(read)(path, threads=1)
        found[name] = {
            "logits": np.array(predict(x[:64])).tolist(),
            "bytes": returned.stat().st_size,
            "same path": Path(returned) == path,
            "operators": ran(predict, read, path, x[:64]),
            "threads": predict.threads,
        }
        FILES[name] = path.read_bytes()
        if FRAMEWORK != "pt" and read == "load_int8":
            found[name]["delegated"] = operators.litert_delegated(path)
    for name, apply in (
        ("static", technique.apply_static_int8),
        ("dynamic", technique.apply_dynamic_int8),
    ):
        found[name]["in memory"] = np.array(own.run(apply(model, x[64:]), x[:64])).tolist()
    for name in ("static", "onnxruntime"):  # another number of samples than in calibration
        with quick.without_code():
            predict = function(WAYS[name][1])(folder / name)
        found[name]["others"] = [np.array(predict(x[:size])).tolist() for size in own.sizes]
    with quick.without_code():
        predict = files_of_int8.load_int8(folder / "static")
    (folder / "static").write_bytes(b"something else")
    found["overwritten"] = np.array(predict(x[:1])).tolist()
    after = kit.models.export_weights(model)
    found["kept"] = all(np.array_equal(before[name], after[name]) for name in before)
    found["mode"] = own.mode(model)
    return found


@quick.without_code()
def foreign(folder):
    """Models that are not ours: predictions of the model, of static int8 and of ONNX int8."""
    found = {}
    for name, (model, x, expected) in own.foreign().items():
        found[name] = [np.array(expected).tolist()]
        for way in ("static", "onnxruntime"):
            write, read = map(function, WAYS[way])
            predict = read(write(model, x, folder / f"{name} {way}"))
            found[name].append(np.array(predict(x)).tolist())
    return found


@quick.without_code()
def written_otherwise(folder):
    """Layers of a subclass and by functions: integer operators that ran, and the difference."""
    if FRAMEWORK != "pt":
        return {}
    torch = own.torch

    class Own(torch.nn.Conv2d):
        pass

    class Functions(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.kernel = Own(1, 8, 3), torch.nn.Parameter(torch.randn(4, 8) / 4)

        def forward(self, x):
            x = torch.relu(self.conv(x)).mean((2, 3))
            return torch.nn.functional.linear(x, self.kernel)

    model, (_, x) = Functions(), built()
    path = function("apply_static_int8")(model, x, folder / "file")
    predict = files_of_int8.load_int8(path)
    with torch.no_grad():
        wanted = model(x)
    apart = (predict(x) - wanted).norm() / wanted.norm()
    return {"operators": integers.integer_operators(predict, path, x), "apart": apart.item()}


def refusals(folder):
    """What bad calibration data and models raise, and the files that were left."""
    model, x = built()
    shifted, _ = kit.data.to_device(IMAGES[:, :, :, [0, 0]], LABELS)
    endless, _ = kit.data.to_device(np.full_like(IMAGES, np.inf), LABELS)
    wide, _ = kit.data.to_device(IMAGES.astype(np.float64), LABELS)
    cases = {
        "empty": (model, x[:0]),
        "array": (model, IMAGES),
        "two lengths": (model, (x, x[:5])),
        "shape": (model, shifted),
        "dtype": (model, wide),
        "infinite": (model, endless),
        **own.refused(x),
    }
    # Some models only some writers refuse.
    asked = {"twice": ["apply_static_int8"], "inverse": WRITERS[:3]}
    asked["no layer"] = [write for write in WRITERS if not write.startswith("keep")]
    found = {}
    for name, given in cases.items():
        writers = asked.get(name, WRITERS)
        found[name] = {w: raised(function(w), *given, folder / "x") for w in writers}
    most, files_of_int8.MOST_APART = files_of_int8.MOST_APART, -1.0  # no file is as near as this
    found["far"] = raised(function("apply_static_int8"), model, x, folder / "x")
    files_of_int8.MOST_APART = most
    step = (max(IMAGES[:32].max(), 0) - min(IMAGES[:32].min(), 0)) / 255
    rounded, _ = kit.data.to_device(np.float32(np.round(IMAGES[:32] / step) * step), LABELS[:32])
    predict = kit.training.make_predict(model)
    moved, plain = (np.array(predict(images)) for images in (rounded, x[:32]))
    found["moved"] = float(np.linalg.norm(moved - plain) / np.linalg.norm(plain))
    return found | {"files": [path.name for path in folder.iterdir()]}


def constructions(folder):
    """Models of other construction: how far each file is off the model, or what is raised.

    Their files are compiled in campaigns, where there are more of them; else what stands in them
    runs as it is.
    """
    found = {}
    as_asked = contextlib.nullcontext if workers.campaign() else workers.without_inductor
    tracing, comparing = (
        import_module(f"{FRAMEWORK}_impl.kit.{name}") for name in ("tracing", "comparing")
    )
    for name, (model, x, ways) in own.constructions().items():
        if name in own.rare and not workers.campaign():
            continue
        expected = own.expected(tracing, model, x)
        for way in ways:
            write, read = map(function, WAYS[way])
            try:
                with as_asked():
                    predicted = read(write(model, x, folder / "file"))(x)
                pairs = zip(own.parts(predicted), own.parts(expected), strict=True)
                found[f"{name}, {way}"] = [comparing.apart(*pair) for pair in pairs]
            except NotImplementedError as error:
                found[f"{name}, {way}"] = str(error)
    return found


@quick.without_code()
def untouched(folder):
    """Of a file with dynamic int8: how far what convolutions give is off, and what a head does."""
    if FRAMEWORK != "pt":
        return {}
    nn, torch = own.torch.nn, own.torch

    class Parts(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.head = nn.Conv2d(3, 8, 3), nn.Linear(8, 4)

        def forward(self, x):
            y = torch.relu(self.conv(x))
            return {"conv": y, "head": self.head(y.mean((2, 3)))}

    model, x = Parts(), torch.randn(16, 3, 8, 8)
    predict = files_of_int8.load_int8(function("apply_dynamic_int8")(model, x, folder / "file"))
    with torch.no_grad():
        predicted, expected = predict(x), model(x)
    return {
        name: ((predicted[name] - value).norm() / value.norm()).item()
        for name, value in expected.items()
    }


@quick.without_code()
def wide(folder):
    """Activations of 16 bits and of 8: how far files are off, or what is raised, and the files.

    The kernel lies on a grid of 8 bits, so that only activations are rounded.
    """
    kernel = random.integers(-127, 128, (24, 48)).astype(np.float32) / 127
    kernel[0] = 1
    (model, x), found = own.dense(kernel), {}
    expected = LEFT @ kernel
    for bits in (8, 16, 4):
        path = folder / str(bits)
        said = raised(function("apply_static_int8"), model, x, path, activation_bits=bits)
        found[str(bits)] = said
        if said is None:
            ours = np.array(files_of_int8.load_int8(path)(x))
            found[str(bits)] = float(np.linalg.norm(ours - expected) / np.linalg.norm(expected))
    return found | {"files": sorted(path.name for path in folder.iterdir())}


class Bomb:
    """Makes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def files(folder):
    """What damaged and foreign files raise; a bomb makes the folder "burst" where it goes off."""
    burst = folder / "burst"
    pickled = pickle.dumps(Bomb(burst))
    found = {}
    for way in ("static", "onnxruntime"):
        whole, read = FILES[way], function(WAYS[way][1])
        damaged = {
            f"first {percent}%": whole[: len(whole) * percent // 100] for percent in (0, 10, 60, 99)
        }
        contents = damaged | {"text": b"no model\n" * 99, "bomb": pickled} | own.bombs(Bomb(burst))
        found[way] = {"missing": raised(read, folder / "none")}
        for name, content in contents.items():
            path = folder / "damaged"
            path.write_bytes(content)
            found[way][name] = raised(read, path)
    found["burst"] = [burst.is_dir()]
    pickle.loads(pickled)  # the bomb is one
    found["burst"].append(burst.is_dir())
    return found


def threads(folder):
    """How many threads a runtime adds to the process when it is asked for three."""
    _, x = built()
    found = {}
    for way in own.pools:
        path, read = folder / way, function(WAYS[way][1])
        path.write_bytes(FILES[way])
        read(path, threads=1)(x)
        before = len(os.listdir("/proc/self/task"))
        predict = read(path, threads=3)
        predict(x)
        found[way] = [len(os.listdir("/proc/self/task")) - before, predict.threads]
        del predict  # and its threads
    return found


class PyTorch:
    sizes = (1,)  # each one compiles
    rare = ("recurrent", "token")  # captured and quantized in ten seconds
    pools = ("onnxruntime",)  # TorchInductor uses the one pool of the process

    def __init__(self):
        import torch

        self.torch = torch

    def mode(self, model):
        return model.training

    def run(self, quantized, x):
        return quantized(x)

    def parts(self, output):
        """The tensors of a structure; a model's own object holds logits."""
        return self.torch.utils._pytree.tree_leaves(getattr(output, "logits", output))

    def bombs(self, bomb):
        """A file of PyTorch's own format with the bomb among the tensors."""
        path = Path(tempfile.mkdtemp()) / "bomb"
        self.torch.save({"nodes": [], "tensors": [bomb], "names": []}, path)
        program = [["placeholder", [], {}], ["aten.save.default", [1, str(bomb.path)], {}]]
        self.torch.save({"nodes": program, "tensors": [], "names": []}, path.with_name("program"))
        calls = [["operator.attrgetter", ["x"], {}], ["output", [["%0"]], {}]]
        self.torch.save({"nodes": calls, "tensors": [], "names": []}, path.with_name("calls"))
        return {p.name: p.read_bytes() for p in path.parent.iterdir()}

    def foreign(self):
        torch, nn = self.torch, self.torch.nn

        class Two(nn.Module):
            def __init__(self):
                super().__init__()
                self.inside = nn.ModuleDict({"wide": nn.Linear(24, 48, bias=False)})
                self.drop, self.head = nn.Dropout(0.5), nn.Linear(48, 5, bias=False)

            def forward(self, a, b):
                x = torch.relu(self.inside["wide"](a + b))
                return self.head(self.drop(x).reshape(a.shape[0], -1))

        model = Two()
        with torch.no_grad():
            for layer, kernel in zip((model.inside["wide"], model.head), KERNELS, strict=True):
                layer.weight.copy_(torch.from_numpy(kernel.T))
        x = torch.from_numpy(LEFT), torch.from_numpy(RIGHT)
        model.eval()
        with torch.no_grad():
            expected = model(*x)
        return {"two inputs": (model.train(), x, expected)}

    def dense(self, kernel):
        layer = self.torch.nn.Linear(24, 48, bias=False)
        with self.torch.no_grad():
            layer.weight.copy_(self.torch.from_numpy(kernel.T))
        return layer, self.torch.from_numpy(LEFT)

    def expected(self, tracing, model, x):
        with self.torch.no_grad():
            return tracing.outputs(model.eval(), x)

    def constructions(self):
        torch, nn = self.torch, self.torch.nn
        torch.manual_seed(0)

        class Residual(nn.Module):
            def __init__(self):
                super().__init__()
                self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
                self.depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8)
                self.grouped, self.head = nn.Conv2d(8, 8, 1, groups=2), nn.Linear(8, 16)

            def forward(self, image):
                x = torch.relu(self.norm(self.first(image)))
                x = torch.relu(x + self.grouped(nn.functional.gelu(self.depthwise(x))))
                return {"logits of it": self.head(x.mean((2, 3))), "pair": (x.mean(1), [x.sum(2)])}

        class Recurrent(nn.Module):
            def __init__(self):
                super().__init__()
                self.table, self.lstm = nn.Embedding(20, 16), nn.LSTM(16, 32, batch_first=True)
                self.head = nn.Linear(32, 16)

            def forward(self, codes):
                x = torch.cat([torch.ones(len(codes), 1, 16), self.table(codes)], 1)
                return self.head(self.lstm(x)[0][:, -1])

        class Tied(nn.Module):
            def __init__(self):
                super().__init__()
                self.table, self.middle = nn.Embedding(64, 32), nn.Linear(32, 32)
                self.head = nn.Linear(32, 64, bias=False)
                self.head.weight = self.table.weight

            def forward(self, b, a):
                y = self.head(self.middle(self.table(a)))
                return SimpleNamespace(logits=y * b[:, None, None], more="words")

        class Table(nn.Module):
            def __init__(self):
                super().__init__()
                self.register_buffer("mean", torch.tensor(COLUMNS[0]))
                self.register_buffer("deviation", torch.tensor(COLUMNS[1]))
                self.hidden, self.head = nn.Linear(3, 64), nn.Linear(64, 32)

            def forward(self, x):
                return self.head(torch.relu(self.hidden((x - self.mean) / self.deviation)))

        codes = torch.randint(0, 20, (12, 5))
        table = torch.randn(12, 3) * torch.tensor(COLUMNS[1]) + torch.tensor(COLUMNS[0])

        class Token(nn.Module):
            """One that stands for all of them, and small: what rounds on their grid loses it."""

            def __init__(self):
                super().__init__()
                self.token = nn.Parameter(0.02 * torch.randn(1, 1, 32))
                layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
                self.encoder, self.head = nn.TransformerEncoder(layer, 2), nn.Linear(32, 16)

            def forward(self, x):  # of `len` torch.export makes a constant, so that Dynamo captures
                x = torch.cat([self.token.expand(len(x), -1, -1), x], 1)
                return self.head(self.encoder(x)[:, 0])

        encoder = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
        return {
            "residual": (
                Residual(),
                torch.randn(12, 3, 8, 8),
                ("float32", "static", "dynamic", "onnxruntime"),
            ),
            "recurrent": (Recurrent(), codes, ("static", "onnxruntime")),
            "table": (Table(), table, ("static", "onnxruntime")),
            "tied": (Tied(), {"b": torch.rand(12) + 1, "a": codes}, ("static", "onnxruntime")),
            "attention": (encoder, torch.randn(12, 5, 32), ("static",)),
            "token": (Token(), torch.randn(12, 5, 32), ("static", "onnxruntime")),
        }

    def refused(self, x):
        nn = self.torch.nn

        class Branches(nn.Module):
            def __init__(self):
                super().__init__()
                self.conv = nn.Conv2d(1, 8, 3)

            def forward(self, x):
                y = self.conv(x)
                return y if y.sum() > 0 else -y

        class Named(nn.Conv2d):
            def forward(self, x):
                return {"y": super().forward(x), "name": "y"}

        class Twice(nn.Module):
            def __init__(self):
                super().__init__()
                self.conv = nn.Conv2d(1, 1, 3)

            def forward(self, x):
                return self.conv(self.conv(x))

        return {
            "twice": (Twice(), x),
            "no layer": (nn.ReLU(), x),
            "branches": (Branches(), x),
            "no tensor": (Named(1, 8, 3), x),
        }


class TensorFlow:
    sizes = (7, 1)
    rare = ()
    pools = ("static", "onnxruntime")

    def __init__(self):
        import tensorflow as tf

        self.tf = tf

    def mode(self, model):
        return None

    def run(self, quantized, x):
        return files_of_int8.interpret(quantized)(x)

    def parts(self, output):
        return self.tf.nest.flatten(output)

    def bombs(self, bomb):
        return {}

    def foreign(self):
        tf = self.tf
        keras, layers = tf.keras, tf.keras.layers

        class Two(keras.Model):
            def __init__(self):
                super().__init__()
                self.wide = layers.Dense(48, activation="relu", use_bias=False)
                self.drop, self.head = layers.Dropout(0.5), layers.Dense(5, use_bias=False)

            def call(self, a, b, training=False):
                return self.head(self.drop(self.wide(a + b), training=training))

        def load(wide, head):
            wide.set_weights(KERNELS[:1])
            head.set_weights(KERNELS[1:])

        x = tf.constant(LEFT), tf.constant(RIGHT)
        subclassed = Two()
        subclassed(*x)
        load(subclassed.wide, subclassed.head)
        a, b = keras.Input((24,)), keras.Input((24,))
        wide, head = Two().wide, layers.Dense(5, use_bias=False)
        functional = keras.Model([a, b], head(layers.Dropout(0.5)(wide(layers.Add()([a, b])))))
        load(wide, head)
        return {
            "two inputs": (subclassed, x, subclassed(*x)),
            "functional": (functional, list(x), functional(list(x))),
        }

    def dense(self, kernel):
        keras = self.tf.keras
        layer = keras.layers.Dense(48, use_bias=False)
        model = keras.Sequential([keras.Input((24,)), layer])
        layer.set_weights([kernel])
        return model, self.tf.constant(LEFT)

    def expected(self, tracing, model, x):
        return tracing.outputs(model, x)

    def constructions(self):
        tf = self.tf
        keras, layers = tf.keras, tf.keras.layers
        keras.utils.set_random_seed(0)

        image = keras.Input((8, 8, 3))
        norm = layers.Normalization()
        norm.adapt(5 + 9 * np.random.default_rng(0).normal(size=(64, 8, 8, 3)).astype(np.float32))
        x = first = layers.ReLU()(layers.BatchNormalization()(layers.Conv2D(8, 3)(norm(image))))
        x = layers.Activation("gelu")(layers.DepthwiseConv2D(3, padding="same")(x))
        x = layers.ReLU()(layers.Add()([first, layers.Conv2D(8, 1, groups=2)(x)]))
        outputs = {"z": layers.Dense(16)(layers.GlobalAveragePooling2D()(x)), "a": (first, [x])}

        codes = keras.Input((5,), dtype="int32")
        recurrent = layers.LSTM(64, dropout=0.1)(layers.Embedding(20, 16)(codes))
        recurrent = layers.Dense(64)(recurrent)

        sequence = keras.Input((5, 32))
        attended = layers.MultiHeadAttention(4, 8)(sequence, sequence)
        attended = layers.Dense(32)(layers.LayerNormalization()(sequence + attended))

        padded, mask = keras.Input((5, 32)), keras.Input((1, 5))
        heads = layers.MultiHeadAttention(4, 8)(padded, padded, attention_mask=mask)
        masked = keras.Model([padded, mask], layers.Dense(32)(heads))

        class Tied(layers.Layer):
            def __init__(self):
                super().__init__()
                self.table, self.middle = layers.Embedding(64, 32), layers.Dense(32)

            def call(self, a):
                return tf.matmul(
                    self.middle(self.table(a)), self.table.embeddings, transpose_b=True
                )

        a, b = keras.Input((5,), dtype="int32", name="a"), keras.Input((), name="b")
        tied = keras.Model({"b": b, "a": a}, layers.Multiply()([Tied()(a), b[:, None, None]]))

        row = keras.Input((6,))
        many = keras.Model(row, [layers.Dense(size + 2)(row) for size in range(12)])

        columns, variance = keras.Input((3,)), np.square(COLUMNS[1])
        standardise = layers.Normalization(mean=COLUMNS[0], variance=variance)
        table = layers.Dense(64, "relu")(standardise(columns))
        table = keras.Model(columns, layers.Dense(32)(table))
        random = np.random.default_rng(1)
        given = tf.constant(random.integers(0, 20, (12, 5)), tf.int32)

        def normal(*shape):
            return tf.constant(random.normal(size=shape), tf.float32)

        both, weighty = ("static", "onnxruntime"), ("static", "dynamic")  # 1,024 and more
        mask = tf.constant(12 * [[[1.0] * 3 + [0.0] * 2]])
        return {
            "residual": (
                keras.Model(image, outputs),
                5 + 9 * normal(12, 8, 8, 3),
                ("float32", *both),
            ),
            "recurrent": (keras.Model(codes, recurrent), given, (*weighty, "onnxruntime")),
            "attention": (keras.Model(sequence, attended), normal(12, 5, 32), weighty),
            "masked": (masked, [9 * normal(12, 5, 32), mask], ("float32", *both)),
            "tied": (tied, {"b": 1 + normal(12) ** 2, "a": given}, (*weighty, "onnxruntime")),
            "many": (many, normal(12, 6), both),
            "table": (table, normal(12, 3) * COLUMNS[1] + COLUMNS[0], both),
        }

    def refused(self, x):
        tf = self.tf
        keras, layers = tf.keras, tf.keras.layers

        class Inverse(layers.Layer):
            def call(self, x):
                return tf.linalg.inv(tf.squeeze(x, -1))

        inputs = keras.Input((16, 16, 1))
        nothing = keras.Model(inputs, layers.ReLU()(inputs))
        inverse = keras.Model(inputs, Inverse()(inputs))

        class Named(keras.Model):
            def __init__(self):
                super().__init__()
                self.conv = layers.Conv2D(8, 3)

            def call(self, x):
                return {"y": self.conv(x), "name": "y"}

        named = Named()
        named(x)
        unbuilt = keras.Sequential([layers.Dense(3)])
        return {
            "no layer": (nothing, x),
            "inverse": (inverse, x),
            "no tensor": (named, x),
            "unbuilt": (unbuilt, x),
        }


def main() -> None:
    kit.runtime.configure(threads=1, seed=0)
    scenarios = [variants, foreign, constructions, untouched, wide, written_otherwise]
    scenarios += [refusals, files, threads]
    workers.report(map(workers.in_a_folder, scenarios))


own = PyTorch() if FRAMEWORK == "pt" else TensorFlow()
if __name__ == "__main__":
    main()
