"""One framework's share of the tests of quantization-aware training, in a process of its own.

`python quantization_aware_training_worker.py pt|tf|tf_keras` runs every scenario and prints one
line of JSON: scenario -> what was found, or {"error": traceback}.
`test_quantization_aware_training.py` judges.
"""

from __future__ import annotations

import copy
import sys
import tempfile
from collections import OrderedDict
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path

import numpy as np

from bench.compression import bench_quantization_aware_training as bench
from bench.harness.plan import Work
from shared.specs import TASKS, CNNSpec
from shared.weights import init_weights
from tests import workers
from tests.compression import quick
from tests.workers import raised_on_one_line as raised

FRAMEWORK = "pt" if sys.argv[1:] == ["pt"] else "tf"
OWN = ("compression.quantization_aware_training", "kit.int8_files")
impl = workers.implementation(FRAMEWORK, *OWN)
kit = impl.kit
technique, int8_files = impl.compression.quantization_aware_training, impl.kit.int8_files
checks = impl.kit.checks.quantization_aware_training
CNN = CNNSpec((8, 8, 2), ((8, 1), (12, 2)), num_classes=5)
TASK = replace(TASKS["digits-cnn"], model=CNN)
FOLDER = Path(tempfile.mkdtemp())
RARE = ("recurrent", "pooled")


def images(count, seed=11):
    """Noisy images of five classes, and their labels: the same in every process."""
    random = np.random.default_rng(seed)
    y = random.integers(0, 5, count)
    shapes = np.random.default_rng(3).normal(size=(5, *CNN.input_shape))
    x = random.normal(size=(count, *CNN.input_shape)) + shapes[y]
    return kit.data.to_device(x.astype(np.float32), y)


def start():
    """Weights where no scale is 1 and no statistic is that of a new layer."""
    random, weights = np.random.default_rng(5), init_weights(CNN, seed=1)
    for name, value in weights.items():
        if name.endswith(("gamma", "variance")):
            weights[name] = random.uniform(0.5, 1.5, value.shape).astype(np.float32)
        elif name.endswith(("beta", "bias", "mean")):
            weights[name] = random.normal(0.0, 0.3, value.shape).astype(np.float32)
    return weights


def train(model, steps, rate=0.05):
    """SGD with momentum over one stream; the losses."""
    recipe = replace(TASK.recipe, learning_rate=rate)
    optimizer = kit.training.make_optimizer(model, recipe)
    step = kit.training.make_train_step(model, optimizer, kit.training.cross_entropy)
    return [kit.runtime.to_float(step(*images(32, seed=100 + number))) for number in range(steps)]


def outputs(predict, x):
    return np.array(predict(x)).tolist()


def apart(ours, theirs):
    """Relative L2."""
    ours, theirs = np.array(ours, np.float64), np.array(theirs, np.float64)
    return float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs))


# Scenarios for both frameworks ----------------------------------------------------------------


def oracle():
    """Outputs of one 1x1 convolution, its kernel and its input, whose range is 0 to 1."""
    random = np.random.default_rng(2)
    kernel = random.normal(size=(1, 1, 6, 4)).astype(np.float32)
    x = random.uniform(0, 1, (5, 3, 3, 6)).astype(np.float32)
    x.flat[:2] = 0, 1
    found = {"kernel": kernel.tolist(), "x": x.tolist()}
    model, inputs = own.convolution(kernel), kit.data.to_device(x, np.zeros(5))[0]
    if FRAMEWORK == "tf":
        found["3"] = raised(technique.prepare_qat, model, inputs, weight_bits=3)
    for bits in (2, 4, 5, 8):
        prepared = technique.prepare_qat(model, inputs, weight_bits=bits)
        found[str(bits)] = own.channels_last(own.evaluate(prepared, inputs))
        if bits in (4, 5):  # `files` has the others
            path = exported(prepared, inputs, FOLDER / f"oracle{bits}")
            found[f"levels {bits}"] = own.levels(path)
    return found


TRAINED = {}  # by bits, of `losses`: preparing takes seconds in PyTorch


def losses():
    """Ten losses of each width; whether the model given stays; and 8 bits at first.

    That is how far they are from float32, in outputs and gradients, before any training.
    """
    x, y = images(64)
    found = {"kept": []}
    for bits in (8, 2):
        model = kit.models.build(CNN, start())
        TRAINED[bits] = prepared = technique.prepare_qat(model, x, weight_bits=bits)
        if bits == 8:
            ours, theirs = own.evaluate(prepared, x), outputs(kit.training.make_predict(model), x)
            first, plain = (own.gradients(one, x, y) for one in (prepared, model))
            found["neutral"] = {
                "outputs": apart(ours, theirs),
                "gradients": {name: apart(first[name], plain[name]) for name in plain},
                "rounded": ours != theirs,
            }
        found[str(bits)] = train(prepared, 10)
        for name, value in kit.models.export_weights(model).items():
            found["kept"].append(np.array_equal(value, start()[name]))
    return found


def worth():
    """Accuracy on new images: float32, rounded after training, and trained on with rounding."""
    x, y = images(512, seed=1)
    model = kit.models.build(CNN, init_weights(CNN, seed=1))
    train(model, 60)
    found = {"float": accuracy(outputs(kit.training.make_predict(model), x), y)}
    for bits in (8, 2):
        prepared = technique.prepare_qat(model, images(64)[0], weight_bits=bits)
        found[f"ptq {bits}"] = accuracy(own.evaluate(prepared, x), y)
        if bits == 2:
            train(prepared, 60)
            found["qat 2"] = accuracy(own.evaluate(prepared, x), y)
    return found


def exported(model, x, path):
    """The file of a model from `prepare_qat`."""
    return int8_files.save_as_it_is(technique.convert_qat(model, x), path)


def accuracy(logits, y):
    return float(np.mean(np.argmax(logits, -1) == np.asarray(y)))


def products(predict, path, x):
    """Products over integers of one prediction."""
    integers = import_module(f"{FRAMEWORK}_impl.kit.integers")
    ran = integers.integer_operators(predict, path, x)
    return {name: count for name, count in ran.items() if bench.PRODUCTS.search(name)}


def files():
    """A file of each width after some training: what it predicts, holds and runs."""
    x, _ = images(64)
    found = {}
    for bits, prepared in TRAINED.items():
        state = own.state(prepared)
        path = exported(prepared, x, FOLDER / f"file{bits}")
        kept = own.state(prepared)
        # As static int8 loads its file, which post-training quantization compiles as users do.
        with quick.without_code():
            predict = int8_files.load_int8(path)
        theirs = own.evaluate(prepared, x)
        found[str(bits)] = {
            "apart": apart(predict(x), theirs),
            "same class": accuracy(outputs(predict, x), np.argmax(theirs, -1)),
            "other batches": [apart(predict(x[:rows]), theirs[:rows]) for rows in own.sizes(bits)],
            "levels": own.levels(path),
            "operators": products(predict, path, x),
            "bytes": path.stat().st_size,
            "kept": all(np.array_equal(state[name], kept[name]) for name in state),
        }
    model = kit.models.build(CNN, start())
    path = int8_files.keep_float32(model, x, FOLDER / "float")
    with quick.without_code():
        predict = int8_files.load_int8(path)
    return found | {
        "float": {
            "apart": apart(predict(x), outputs(kit.training.make_predict(model), x)),
            "operators": products(predict, path, x),
            "bytes": path.stat().st_size,
        }
    }


def damaged():
    """What loading says of files that are cut, altered, of another kind, empty or not there."""
    content, path, found = (FOLDER / "file8").read_bytes(), FOLDER / "damaged", {}
    others = {
        "cut": content[: len(content) // 2],
        "cut short": content[:-16],
        "text": b"not a model\n" * 100,
        "empty": b"",
    }
    for name, bad in (others | own.bad_files()).items():
        path.write_bytes(bad)
        found[name] = raised(int8_files.load_int8, path)
    found["missing"] = raised(int8_files.load_int8, FOLDER / "missing")
    return found | {"executed": (FOLDER / "executed").exists()}


def refusals():
    """What bad input raises, and that the model is as before."""
    (x, _), model = images(64), kit.models.build(CNN, start())
    before = kit.models.export_weights(model)
    found = {
        f"bits {bits!r}": raised(technique.prepare_qat, model, x, weight_bits=bits)
        for bits in (1, 9, 0, 2.5, "8", None)
    }
    found["nothing"] = raised(technique.prepare_qat, own.without_kernels(), x, weight_bits=8)
    found["unprepared"] = raised(exported, model, x, FOLDER / "unprepared")
    found["written"] = (FOLDER / "unprepared").exists()
    most, checks.MOST_APART = checks.MOST_APART, -1.0  # no file is as near as this
    one, rows = (
        own.convolution(np.ones((1, 1, 6, 4), np.float32)),
        np.ones((2, 3, 3, 6), np.float32),
    )
    rows, _ = kit.data.to_device(rows, np.zeros(2))
    found["file"] = raised(technique.prepare_qat, one, rows, weight_bits=8)
    checks.MOST_APART = most
    for name, given in own.bad_inputs(x).items():
        found[name] = raised(technique.prepare_qat, model, given, weight_bits=8)
    after = kit.models.export_weights(model)
    found["unchanged"] = all(np.array_equal(before[name], after[name]) for name in before)
    return found | {
        name: raised(technique.prepare_qat, bad, given, weight_bits=8)
        for name, (bad, given) in own.unsupported(x).items()
    }


def constructions():
    """Models of other construction: what 8 bits change, files against models, and training.

    All of them in campaigns.
    """
    found = {}
    tracing, comparing = (
        import_module(f"{FRAMEWORK}_impl.kit.{name}") for name in ("tracing", "comparing")
    )
    for name, (model, x) in own.constructions().items():
        if name in RARE and not workers.campaign():
            continue
        prepared = technique.prepare_qat(model, x, weight_bits=8)
        expected, rounded = own.called(tracing, model, x), own.called(tracing, prepared, x)
        path = exported(prepared, x, FOLDER / "constructed")
        with quick.without_code():
            predict = int8_files.load_int8(path)
        found[name] = {
            "rounded": comparing.apart(rounded, expected),
            "same again": comparing.apart(own.called(tracing, prepared, x), rounded),
            "file": comparing.apart(predict(x), rounded),
            "products": sum(products(predict, path, x).values()),
            "losses": own.fitted(tracing, prepared, x),
        }
    return found


def drifted():
    """A model that was changed between the comparison's two sides must not be written."""
    return own.drifted(FOLDER / "drifted") | {"written": (FOLDER / "drifted").exists()}


def goes_on():
    """Losses of a model that was exported, and whether it moves."""
    state = own.state(TRAINED[8])
    after = train(TRAINED[8], 2)
    moved = any(not np.array_equal(state[name], v) for name, v in own.state(TRAINED[8]).items())
    return bool(np.isfinite(after).all()) and moved


def evidence():
    """What the benchmark's proof says: of its rows, and of rows that are not what they say."""
    x, y = (np.array(part) for part in images(256))
    if FRAMEWORK == "pt":
        x = x.transpose(0, 2, 3, 1)
    data = FOLDER / "data"
    data.mkdir()
    for name, array in (("x", x), ("y", y)):
        np.save(data / f"train_{name}.npy", array)
    found = {}
    for variant, bits, mode in (
        ("fp32", None, "train"),
        ("qat_8", 8, "train"),
        ("fp32", None, "predict"),
        ("qat_8", 8, "predict"),
    ):
        work = Work(
            task=TASK,
            variant=variant,
            settings={"weight_bits": bits} if bits else {},
            batch_size=32,
            weights=start(),
            mode=mode,
            data=str(data),
            folder=Path(tempfile.mkdtemp(dir=FOLDER)),
        )
        prepared = bench.prepare(impl, work)
        if prepared.write:
            path = work.folder / "model"
            prepared.write(path)
            with quick.without_code():
                prepared = replace(prepared, predict=prepared.read(path), artifact=path)
        batch = images(64)
        prepared.step(*batch) if mode == "train" else prepared.predict(batch[0])
        found[f"{mode} {variant}"] = bench.took_effect(impl, work, prepared, batch)
        if variant == "fp32":
            feigned = replace(work, variant="qat_8", settings={"weight_bits": 8})
            found[f"{mode} feigned"] = bench.took_effect(impl, feigned, prepared, batch)
    return found


# Scenarios of one framework, on models that are not ours --------------------------------------


class PyTorch:
    def sizes(self, bits):
        return (3,) if bits == 2 else ()  # each batch size of the other compiles

    def constructions(self):
        """Dropout inside of attention, an LSTM's; dicts in, structures and `.logits` out."""
        torch, nn = self.torch, self.torch.nn
        torch.manual_seed(0)

        class Structured(nn.Module):
            def __init__(self):
                super().__init__()
                self.conv, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
                self.grouped, self.head = nn.Conv2d(8, 8, 1, groups=2), nn.Linear(8, 4)

            def forward(self, image, scale):
                x = torch.relu(self.norm(self.conv(image)))
                x = torch.relu(x + self.grouped(x)) * scale[:, None, None, None]
                outputs = {"y": self.head(x.mean((2, 3))), "pair": (x.mean(1), [x.sum(2)])}
                return OrderedDict(outputs)

        class Recurrent(nn.Module):
            def __init__(self):
                super().__init__()
                self.lstm = nn.LSTM(8, 16, num_layers=2, dropout=0.5, batch_first=True)
                self.head = nn.Linear(16, 4)

            def forward(self, x):
                return Logits(self.head(self.lstm(x)[0][:, -1]))

        image = {"scale": torch.rand(8) + 1, "image": torch.randn(8, 3, 6, 6)}
        return {
            "attention": (
                nn.TransformerEncoderLayer(16, 2, 32, 0.5, batch_first=True),
                torch.randn(8, 5, 16),
            ),
            "structured": (Structured(), image),
            "recurrent": (Recurrent(), torch.randn(8, 5, 8)),
        }

    def called(self, tracing, model, x):
        """In evaluation mode, which changes no range to speak of."""
        model = copy.deepcopy(model).eval()
        if hasattr(model, "graph"):
            model.apply(self.pt2e().disable_observer)
        with self.torch.no_grad():
            return tracing.outputs(model, x)

    def fitted(self, tracing, model, x):
        optimizer, found = self.torch.optim.SGD(model.parameters(), lr=0.05), []
        for _ in range(10):
            optimizer.zero_grad()
            output = tracing.outputs(model, x)
            first = output["y"] if isinstance(output, dict) else output
            loss = ((first - 1) ** 2).mean()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        return found

    def __init__(self):
        import torch

        self.torch = torch

    def evaluate(self, prepared, x):
        """What a prepared model gives in evaluation mode; its ranges stay."""
        model = copy.deepcopy(prepared).eval()
        model.apply(self.pt2e().disable_observer)
        with self.torch.no_grad():
            return model(*x if isinstance(x, tuple) else (x,)).numpy().tolist()

    def pt2e(self):
        return import_module("torchao.quantization.pt2e")

    def channels_last(self, output):
        return np.array(output).transpose(0, 2, 3, 1).tolist()

    def convolution(self, kernel):
        layer = self.torch.nn.Conv2d(*kernel.shape[2:], 1, bias=False)
        with self.torch.no_grad():
            layer.weight.copy_(self.torch.from_numpy(kernel.transpose(3, 2, 0, 1).copy()))
        return layer

    def without_kernels(self):
        return self.torch.nn.BatchNorm2d(2)

    def gradients(self, model, x, y):
        model = copy.deepcopy(model)
        kit.training.cross_entropy(model(x), y).backward()
        named = dict(model.named_parameters())
        return {name: p.grad.numpy().tolist() for name, p in named.items()}

    def state(self, model):
        return {name: value.clone().numpy() for name, value in model.state_dict().items()}

    def levels(self, path):
        """Different values of each kernel in the file."""
        tensors = self.torch.load(path, weights_only=True)["tensors"]
        return [len(t.unique()) for t in tensors if t.dtype == self.torch.int8]

    def bad_files(self):
        """Files that are whole and not what they should be."""
        torch = self.torch
        good = torch.load(FOLDER / "file8", weights_only=True)

        def saved(**changed):
            torch.save(good | changed, FOLDER / "bad")
            return (FOLDER / "bad").read_bytes()

        def with_call(name, *args, **kwargs):
            return saved(nodes=[*good["nodes"][:1], [name, list(args), kwargs], *good["nodes"][1:]])

        mark = str(FOLDER / "executed")
        return {
            "code": saved(tensors=Executed(mark)),
            "another library": with_call("os.system", f"touch {mark}"),
            "a file is opened": with_call("aten.from_file.default", mark, True, 8),
        }

    def unsupported(self, x):
        torch = self.torch

        class Branches(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.head = torch.nn.Linear(8, 2)

            def forward(self, x):
                x = x.mean((1, 2))
                return self.head(x) if x.sum() > 0 else self.head(-x)

        return {
            "branches": (Branches(), x),
            "one sample": (kit.models.build(CNN), x[:1]),
            "half": (kit.models.build(CNN).half(), x.half()),
            "double": (kit.models.build(CNN).double(), x.double()),
        }

    def bad_inputs(self, x):
        """Inputs without samples, of another kind, not finite, of another shape and dtype."""
        return {
            "empty": x[:0],
            "no tensor": 3,
            "infinite": x * np.inf,
            "shape": x[:, :1],
            "dtype": x.double(),
        }

    def drifted(self, path):
        """Weights whose range is long gone: the kernel in the file is not the trained one."""
        x, _ = images(64)
        prepared = copy.deepcopy(TRAINED[8])
        with self.torch.no_grad():
            dict(prepared.named_parameters())["conv0.conv.weight"].mul_(float("nan"))
        return {"raised": raised(exported, prepared, x, path)}

    def side_by_side(self):
        """What capturing might lose, in one model: how far it and its file are from float32.

        Of tensors of unequal ranges side by side, which are averaged, at the start and much later;
        of BatchNorm after additions that are the model's; of BatchNorm whose variances lie below
        its epsilon and whose statistics move fast.
        """
        torch, nn = self.torch, self.torch.nn

        class Parts(nn.Module):
            def __init__(self):
                super().__init__()
                self.first, self.second = nn.Conv2d(3, 8, 3), nn.Conv2d(3, 8, 3)
                self.both = nn.Sequential(nn.Conv2d(16, 8, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1))
                self.head = nn.Linear(8, 4)
                with torch.no_grad():
                    self.second.weight.mul_(8)
                self.sums = nn.ModuleList(nn.Conv2d(3, 3, 3, padding=1) for _ in range(3))
                self.norms = nn.ModuleList(nn.BatchNorm2d(3) for _ in range(3))
                self.literal = nn.ModuleList(
                    nn.Sequential(nn.Conv2d(3, 8, 3, bias=bias), narrow(), nn.Hardswish())
                    for bias in (False, True)
                )

            def forward(self, x):
                joined = self.both(torch.cat([self.first(x), self.second(x)], 1))
                (residual, constant, after), norms = self.sums, self.norms
                return {
                    "joined": self.head(joined.flatten(1)),
                    "residual": norms[0](residual(x) + x),
                    "constant": constant(norms[1](x + 1.0)),
                    "convolution plus 1": norms[2](after(x) + 1.0),
                    "no bias": self.literal[0](x),
                    "bias": self.literal[1](x),
                }

        def narrow():
            norm = nn.BatchNorm2d(8, eps=1e-3, momentum=0.5)
            norm.running_var.fill_(1e-6)
            return norm

        torch.manual_seed(0)
        source, x = Parts(), torch.randn(32, 3, 6, 6)
        prepared = technique.prepare_qat(source, x, weight_bits=8)
        path = exported(prepared, x, FOLDER / "parts")
        with torch.no_grad():
            wanted = copy.deepcopy(source).eval()(x)
        tracing = import_module("pt_impl.kit.tracing")
        with workers.without_inductor():  # what the file computes, not with which kernels
            found = {"file": int8_files.load_int8(path)(x)}
        found["start"] = self.called(tracing, prepared, x)
        later = copy.deepcopy(prepared).eval()
        with torch.no_grad():
            for _ in range(200):  # ranges follow every pass
                later(x)
        found["later"] = self.called(tracing, later, x)
        source.train()(x), prepared.train()(x)
        moved = [
            [v for n, v in self.state(m).items() if "literal" in n and "_var" in n]
            for m in (prepared, source)
        ]
        return {
            "apart": {
                when: {name: apart(outputs[name], wanted[name]) for name in wanted}
                for when, outputs in found.items()
            },
            "variances": [apart(*pair) for pair in zip(*moved, strict=True)],
            "kernels": len(self.levels(path)),
        }

    def named_devices(self):
        """A graph that was captured on a GPU, once it is on the CPU: what it computes."""
        torch = self.torch
        graph = torch.fx.Graph()
        ops, gpu, x = torch.ops.aten, torch.device("cuda"), graph.placeholder("x")
        ones = graph.call_function(ops.ones.default, ([2],), {"device": gpu})
        moved = graph.call_function(ops.to.device, (x, gpu, torch.float32))
        graph.output(graph.call_function(ops.add.Tensor, (ones, moved)))
        program = kit.pt2e_repairs.copy_to_cpu(torch.fx.GraphModule(torch.nn.Module(), graph))
        return program(torch.ones(2)).tolist()

    def norms_apart(self):
        """BatchNorm that torchao cannot fold: how far a model and its file are from float32."""
        torch, nn = self.torch, self.torch.nn
        layers = {
            "no weights": (nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8, affine=False)),
            "no statistics": (nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8, track_running_stats=False)),
            "transposed": (nn.ConvTranspose2d(4, 8, 3, groups=2), nn.BatchNorm2d(8)),
        }
        found = {}
        for name, parts in layers.items():
            source = nn.Sequential(nn.Conv2d(3, parts[0].in_channels, 1), *parts, nn.Hardswish())
            x = torch.randn(32, 3, 6, 6)
            prepared = technique.prepare_qat(source, x, weight_bits=8)
            source(x), prepared(x)
            moved = [
                [v for n, v in self.state(m).items() if "running" in n] for m in (prepared, source)
            ]
            path = exported(prepared, x, FOLDER / "norms")
            with workers.without_inductor():
                file = int8_files.load_int8(path)(x)
            wanted = source.eval()(x).detach()
            found[name] = {
                "model": apart(self.evaluate(prepared, x), wanted),
                "file": apart(file, wanted),
                "statistics": [apart(*pair) for pair in zip(*moved, strict=True)],
            }
        return found

    def foreign(self):
        """Two inputs, a custom forward, dropout, layers that stay in float32, two outputs."""
        torch, nn = self.torch, self.torch.nn

        class Two(nn.Module):
            def __init__(self):
                super().__init__()
                self.conv = nn.Conv2d(1, 4, 3, padding=1)
                self.norm = nn.BatchNorm2d(4)
                self.table = nn.Embedding(5, 4)
                self.layer_norm = nn.LayerNorm(4)
                self.drop = nn.Dropout(0.5)
                self.head = nn.ModuleDict({"inside": nn.Linear(4, 2)})

            def forward(self, image, codes):
                x = torch.relu(self.norm(self.conv(image))).mean((2, 3))
                x = self.drop(self.layer_norm(x + self.table(codes)))
                return self.head["inside"](x.view(image.shape[0], 4))

        torch.manual_seed(0)
        source = Two()
        source.norm.eval()  # modes differ, and have to stay
        kept, modes = copy.deepcopy(source.state_dict()), [m.training for m in source.modules()]
        x = torch.randn(16, 1, 6, 6), torch.arange(16) % 5
        target = x[0].mean((1, 2, 3)) + x[1]
        model = technique.prepare_qat(source, x, weight_bits=4)
        names = [name for name, _ in model.named_parameters()]
        optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.05), []
        for _ in range(30):
            optimizer.zero_grad()
            loss = ((model(*x)[:, 0] - target) ** 2).mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        twice = [model(*x).detach() for _ in range(2)]
        statistics = self.state(model)
        model.eval()
        twice += [model(*x).detach() for _ in range(2)]
        moved = {n for n, v in self.state(model).items() if not np.array_equal(v, statistics[n])}
        model.train()
        copied = copy.deepcopy(model).eval()
        twice += [copied(*x).detach() for _ in range(2)]
        kit.training.make_predict(model)(x)  # which puts modes back by itself
        twice += [model(*x).detach() for _ in range(2)]
        again = self.state(model)
        path = exported(model, x, FOLDER / "foreign")
        with workers.without_inductor():
            predicted = int8_files.load_int8(path)(x)
        return {
            "losses": losses,
            "names": sorted(names) == sorted(name for name, _ in source.named_parameters()),
            "source kept": all(torch.equal(kept[n], v) for n, v in source.state_dict().items()),
            "modes kept": modes == [m.training for m in source.modules()],
            "dropout": [apart(*twice[:2]), apart(*twice[2:4])],
            "dropout of a copy": apart(*twice[4:6]),
            "dropout after a prediction": apart(*twice[6:]),
            "statistics moved in evaluation": sorted(n for n in moved if "running" in n),
            "statistics moved after a prediction": [
                n for n, v in again.items() if "running" in n and np.any(v != statistics[n])
            ],
            "apart": apart(predicted, self.evaluate(model, x)),
        }


@dataclass
class Logits:
    """What some models return."""

    logits: object
    more: str = "words"


class Executed:
    """Unpickling it makes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (self.path, "w")


class TensorFlow:
    def sizes(self, bits):
        return 3, 1

    def __init__(self):
        import tensorflow as tf

        self.tf, self.layers = tf, tf.keras.layers

    def evaluate(self, prepared, x):
        return np.array(prepared(x, training=False)).tolist()

    def constructions(self):
        """Models of Keras 3: subclassed, two inputs, structures; what each must not lose."""
        tf, keras, layers = self.tf, self.tf.keras, self.layers
        keras.utils.set_random_seed(0)
        image, scale = keras.Input((6, 6, 3)), keras.Input((8,))
        norm = layers.Normalization()
        norm.adapt(9 * np.random.default_rng(0).normal(size=(64, 6, 6, 3)).astype(np.float32) + 5)
        x = first = layers.ReLU()(layers.BatchNormalization()(layers.Conv2D(8, 3)(norm(image))))
        x = layers.Activation("swish")(layers.DepthwiseConv2D(3, padding="same")(x))
        x = layers.ReLU()(layers.Add()([first, layers.Conv2D(8, 1, groups=2)(x)]))
        x = layers.Multiply()([layers.GlobalAveragePooling2D()(x), scale])
        outputs = {"y": layers.Dense(4)(x), "pair": (x, [layers.Dense(3, "sigmoid")(x)])}

        sequence = keras.Input((5, 16))
        x = layers.LayerNormalization()(
            sequence + layers.MultiHeadAttention(2, 8)(sequence, sequence)
        )
        attended = layers.Dense(4, "tanh")(layers.Conv1D(8, 3, activation="gelu")(x))
        recurrent = layers.Dense(4)(layers.LSTM(8)(layers.Dropout(0.5)(sequence)))
        vector, small = keras.Input((16,)), keras.initializers.RandomNormal(stddev=0.02)
        narrow = layers.Dense(8, kernel_initializer=small)(vector)  # beside what has no grid
        joined = layers.Concatenate()([narrow, layers.LayerNormalization()(vector)])
        both = layers.Dense(8)  # two calls, of which the first sees the larger values
        shared = layers.Concatenate()([both(vector), both(layers.Rescaling(0.2)(vector))])
        picture = keras.Input((8, 8, 3))
        pooled = layers.AveragePooling2D(2)(layers.Conv2D(8, 3, padding="same")(picture))
        pooled = layers.Concatenate()([pooled, layers.Conv2D(4, 1, activation="relu")(pooled)])
        pooled = layers.Dense(4)(layers.GlobalAveragePooling2D()(pooled))
        random, row = tf.random.normal, tf.random.normal((8, 5, 16))
        activated = layers.Conv2D(8, 3, activation=layers.LeakyReLU(0.2))(picture)
        activated = layers.Dense(4, activation=layers.ReLU())(layers.Flatten()(activated))
        subclassed = Subclassed()
        subclassed(row[:, 0], row[:, 1])
        return {
            "structured": (
                keras.Model([image, scale], outputs),
                (9 * random((8, 6, 6, 3)) + 5, random((8, 8))),
            ),
            "attention": (keras.Model(sequence, attended), row),
            "recurrent": (keras.Model(sequence, recurrent), row),
            "concatenated": (keras.Model(vector, layers.Dense(4)(joined)), row[:, 0]),
            "shared": (keras.Model(vector, layers.Dense(4)(shared)), row[:, 0]),
            "subclassed": (subclassed, (row[:, 0], row[:, 1])),
            "pooled": (keras.Model(picture, pooled), random((8, 8, 8, 3))),
            "activated": (keras.Model(picture, activated), random((8, 8, 8, 3))),
        }

    def called(self, tracing, model, x):
        return tracing.outputs(model, x)

    def fitted(self, tracing, model, x):
        optimizer, found = self.tf.keras.optimizers.SGD(0.05), []

        @self.tf.function
        def step():
            with self.tf.GradientTape() as tape:
                output = tracing.outputs(model, x, training=True)
                first = output["y"] if isinstance(output, dict) else output
                loss = self.tf.reduce_mean((first - 1) ** 2)
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
            return loss

        before = [self.tf.identity(variable) for variable in model.non_trainable_variables]
        found = [float(step()) for _ in range(10)]
        after = model.non_trainable_variables
        names = [v.name for v, old in zip(after, before, strict=True) if np.any(v != old)]
        assert any("max" in name for name in names), names  # ranges follow the batches
        return found

    def channels_last(self, output):
        return output

    def functional(self, shape, *layers):
        x = inputs = self.tf.keras.Input(shape)
        for layer in layers:
            x = layer(x)
        return self.tf.keras.Model(inputs, x)

    def convolution(self, kernel):
        model = self.functional((3, 3, 6), self.layers.Conv2D(4, 1, use_bias=False))
        model.set_weights([kernel])
        return model

    def without_kernels(self):
        return self.functional((8, 8, 2), self.layers.ReLU())

    def gradients(self, model, x, y):
        before = model.get_weights()  # whose statistics and ranges follow the batch
        with self.tf.GradientTape() as tape:
            loss = kit.training.cross_entropy(model(x, training=True), y)
        variables = model.trainable_variables
        gradients = tape.gradient(loss, variables)
        model.set_weights(before)
        names = [v.name.removeprefix("quant_").split(":")[0] for v in variables]
        return {n: g.numpy().tolist() for n, g in zip(names, gradients, strict=True)}

    def state(self, model):
        return {str(i): value for i, value in enumerate(model.get_weights())}

    def levels(self, path):
        """Different values of each kernel in the file."""
        from ai_edge_litert.interpreter import Interpreter, OpResolverType

        plain = OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES  # kernels as they are in the file
        interpreter = Interpreter(model_path=str(path), experimental_op_resolver_type=plain)
        interpreter.allocate_tensors()
        products = ("CONV_2D", "DEPTHWISE_CONV_2D", "FULLY_CONNECTED")
        ran = [one for one in interpreter._get_ops_details() if one["op_name"] in products]
        return [len(np.unique(interpreter.get_tensor(one["inputs"][1]))) for one in ran]

    def bad_files(self):
        return {}

    def unsupported(self, x):
        keras, layers = self.tf.keras, self.layers

        class Subclassed(keras.Model):
            def __init__(self):
                super().__init__()
                self.dense = layers.Dense(3)

            def call(self, x):
                return self.dense(x)

        subclassed, unbuilt = Subclassed(), keras.Sequential([layers.Dense(3)])
        subclassed(x)
        inside = self.functional((8, 8, 2), layers.Conv2D(3, 1))
        normed = self.functional((8, 8, 2), layers.Conv2D(3, 1), layers.LayerNormalization())
        policies = {"half": "mixed_bfloat16", "double": "float64"}
        others = {
            name: (self.functional((8, 8, 2), layers.Conv2D(3, 1, dtype=policy, name="own")), x)
            for name, policy in (policies if sys.argv[1] == "tf" else {}).items()
        }
        return others | {
            "subclassed": (subclassed, x),
            "unbuilt": (unbuilt, x),
            "within": (self.functional((8, 8, 2), inside, layers.Dense(3)), x),
            "unknown layer": (normed, x),
        }

    def bad_inputs(self, x):
        """Inputs without samples, of another kind, not finite, of another shape and dtype."""
        return {
            "empty": x[:0],
            "no tensor": 3,
            "infinite": x * np.inf,
            "shape": x[..., :1],
            "dtype": self.tf.cast(x, "float64"),
        }

    def amplified(self):
        """A deep model with random weights: a value that rounds otherwise changes them all."""
        tf, stack = self.tf, [self.tf.keras.Input((8,))]
        tf.keras.utils.set_random_seed(0)
        for _ in range(30):
            norm = self.layers.BatchNormalization(momentum=0.0)
            stack += [self.layers.Dense(16), norm, self.layers.ReLU()]
        model = tf.keras.Sequential([*stack, self.layers.Dense(3)])
        model(tf.random.normal((256, 8)), training=True)
        x = tf.random.normal((32, 8))
        return {"raised": raised(technique.prepare_qat, model, x, weight_bits=8)}

    def drifted(self, path):
        x, _ = images(64)
        kernel = TRAINED[8].trainable_variables[0]
        kept = np.array(kernel)
        kernel.assign(kept * float("nan"))
        said = raised(exported, TRAINED[8], x, path)
        kernel.assign(kept)
        return {"raised": said}

    def foreign(self):
        """A functional model of two inputs and a Sequential one."""
        tf, layers = self.tf, self.layers
        tf.keras.utils.set_random_seed(0)
        left, right = tf.keras.Input((6, 6, 1)), tf.keras.Input((4,))
        x = layers.Conv2D(4, 3, padding="same", activation="relu")(left)
        x = layers.Add()([layers.GlobalAveragePooling2D()(x), right])
        two = tf.keras.Model([left, right], layers.Dense(2)(layers.Dropout(0.2)(x)))
        stack = [layers.Dense(8, use_bias=False), layers.BatchNormalization(), layers.ReLU()]
        stack = [tf.keras.Input((4,)), *stack, layers.Dense(2)]
        image, row = tf.random.normal((16, 6, 6, 1)), tf.random.normal((16, 4))
        models = {
            "functional": (two, [image, row]),
            "sequential": (tf.keras.Sequential(stack), row),
        }
        return {name: self.train_foreign(name, *given) for name, given in models.items()}

    def many(self):
        """A model of 12 inputs, each of its own size of values: files against models."""
        x = self.tf.random.normal((32, 3))
        inputs = [self.tf.keras.Input((3,)) for _ in range(12)]
        head = self.layers.Dense(2)(self.layers.Concatenate()(inputs))
        model, given = self.tf.keras.Model(inputs, head), [(place + 1) * x for place in range(12)]
        prepared = technique.prepare_qat(model, given, weight_bits=8)
        found = {}
        for name, write, source in (
            ("qat", exported, prepared),
            ("float", int8_files.keep_float32, model),
        ):
            predict = int8_files.load_int8(write(source, given, FOLDER / name))
            found[name] = apart(predict(given), source(given, training=False))
        return found

    def train_foreign(self, name, source, x):
        kept, target = source.get_weights(), self.tf.reduce_sum(self.tf.nest.flatten(x)[-1], 1)
        model = technique.prepare_qat(source, x, weight_bits=4)
        model.compile(self.tf.keras.optimizers.SGD(0.05), "mse")
        y = self.tf.stack([target, -target], 1)
        history = model.fit(x, y, batch_size=16, epochs=30, verbose=0)
        path = exported(model, x, FOLDER / name)
        return {
            "losses": history.history["loss"],
            "names": len(model.trainable_weights) == len(source.trainable_weights),
            "source kept": all(map(np.array_equal, kept, source.get_weights())),
            "apart": apart(int8_files.load_int8(path)(x), model(x, training=False)),
        }


if FRAMEWORK == "tf":
    import tensorflow as tf

    class Subclassed(tf.keras.Model):
        """Two arguments, and sums that are no layer."""

        def __init__(self, **settings):
            super().__init__(**settings)
            self.wide, self.head = tf.keras.layers.Dense(16), tf.keras.layers.Dense(4)

        def call(self, a, b):
            return self.head(tf.nn.relu(self.wide(a) + b))


def main():
    scenarios = [oracle, losses, worth, files, damaged, refusals]
    scenarios += [drifted, goes_on, evidence, own.foreign]
    if sys.argv[1] != "tf_keras":
        scenarios += [constructions]
    if FRAMEWORK == "pt":
        scenarios += [own.side_by_side, own.norms_apart, own.named_devices]
    else:
        scenarios += [own.many]
    scenarios += [own.amplified] if sys.argv[1] == "tf" else []
    workers.report(scenarios)


kit.runtime.configure(threads=1, seed=0)
if FRAMEWORK == "pt":
    quick.capture_patterns_once()
own = PyTorch() if FRAMEWORK == "pt" else TensorFlow()
if __name__ == "__main__":
    main()
