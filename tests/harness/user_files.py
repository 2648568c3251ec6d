"""Files of users, good and bad: what a check in a worker says of them, and what rows make of them.

python -m tests.harness.user_files pt|tf
"""

import importlib
import json
import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np

from bench.deployment import bench_export
from bench.harness.plan import Work
from bench.harness.user_model import Side
from bench.harness.worker import KIT, Operations
from bench.train_step import (
    bench_batch_size_finder,
    bench_gradient_accumulation,
    bench_memory_format,
    bench_mixed_precision,
    bench_stacking,
)
from shared import user_model
from shared.user_model import BadFile
from tests.workers import raised

HEAD = """
import numpy as np
def batch(size=8, seed=0):
    random = np.random.default_rng(seed)
    return random.standard_normal((size, 6), dtype=np.float32), random.integers(0, 3, size)
"""
PLAIN = {
    "pt": """
def pytorch():
    import torch.nn.functional as F
    from torch import nn
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)), F.cross_entropy
""",
    "tf": """
def tensorflow():
    import tensorflow as tf
    from tensorflow.keras import layers
    model = tf.keras.Sequential([layers.Dense(8, activation="relu"), layers.Dense(3)])
    return model, tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
""",
}
NAME = {"pt": "pytorch", "tf": "tensorflow"}
# As many files begin: each copy of the model draws the same numbers.
SEED = {
    "pt": "__import__('torch').manual_seed(0)",
    "tf": "__import__('tensorflow').keras.utils.set_random_seed(0)",
}
# A change of the plain file: (old, new), by framework where it differs.
BAD = {
    "raises": ("return nn", "raise RuntimeError('no weights')\n    return nn"),
    "one_thing": (", F.cross_entropy", ""),
    "no_model": ("return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))", "return 7"),
    "loss_class": ("F.cross_entropy", "nn.CrossEntropyLoss"),
    "loss_takes_other": ("F.cross_entropy", "lambda y, o: F.cross_entropy(o, y)"),
    "loss_not_scalar": ("F.cross_entropy", "lambda o, y: F.cross_entropy(o, y, reduction='none')"),
    "loss_nan": ("F.cross_entropy", "lambda o, y: F.cross_entropy(o, y) * float('nan')"),
    "loss_detached": ("F.cross_entropy", "lambda o, y: F.cross_entropy(o.detach(), y)"),
    "wrong_width": ("size, 6", "size, 5"),
    "float64": (", dtype=np.float32", ""),
    "wrong_size": ("standard_normal((size,", "standard_normal((size + 1,"),
    "other_numbers": ("default_rng(seed)", "default_rng()"),
    "no_size": ("size=8", "size=None"),
    "random": ("nn.ReLU()", "Noise()"),
    "too_large": ("nn.ReLU()", "Huge()"),
    "closure": (
        "return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)), F.cross_entropy",
        "import torch; model = nn.Linear(6, 3)\n"
        "    return model, F.cross_entropy, torch.optim.LBFGS(model.parameters())",
    ),
    "bfloat16": (
        "random.standard_normal((size, 6), dtype=np.float32)",
        "__import__('torch').ones(size, 6).bfloat16()",
    ),
    "targets_first": ("F.cross_entropy", "lambda y_true, y_pred: y_true.square().mean()"),
    "all_targets": ("nn.Linear(8, 3)), F.cross_entropy", "nn.Linear(8, 1)), F.mse_loss"),
    "frozen": ("nn.Linear(8, 3))", "nn.Linear(8, 3)).requires_grad_(False)"),
    "other_s_optimizer": (
        ", F.cross_entropy",
        ", F.cross_entropy, __import__('torch').optim.SGD(nn.Linear(6, 8).parameters(), 0.1)",
    ),
    "command_line": ("    import", "    __import__('sys').argv[1]\n    import"),
    "ends": (
        "    import",
        "    __import__('argparse').ArgumentParser().error('--data')\n    import",
    ),
}
# What is looked at is the same code in both frameworks, but for what the framework has to tell.
BAD_TF = {
    "raises": ("model = tf", "raise RuntimeError('no weights')\n    model = tf"),
    "loss_class": ("(from_logits=True)", ""),
    "loss_takes_other": (
        "tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)",
        "tf.keras.losses.sparse_categorical_crossentropy",
    ),
    "loss_not_scalar": ("(from_logits=True)", "(from_logits=True, reduction=None)"),
    "loss_nan": (
        "tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)",
        "lambda o, y: tf.reduce_mean(o) * float('nan')",
    ),
    "loss_detached": (
        "tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)",
        "lambda o, y: tf.reduce_mean(tf.stop_gradient(o))",
    ),
    "random": ('layers.Dense(8, activation="relu")', "layers.Dense(8), Noise()"),
    "too_large": ('layers.Dense(8, activation="relu")', "layers.Dense(8), Huge()"),
    "late_weights": ('layers.Dense(8, activation="relu")', "Late()"),
}
# What stands before a changed file, by the change.
MODULES = {
    "random": {
        "pt": """
import torch
class Noise(torch.nn.Module):
    def forward(self, x):
        return x + torch.randn_like(x)
""",
        "tf": """
import tensorflow as tf
class Noise(tf.keras.layers.Layer):
    def call(self, x):
        return x + tf.random.normal(tf.shape(x))
""",
    },
    "too_large": {  # for any machine: a petabyte
        "pt": """
import torch
class Huge(torch.nn.Module):
    def forward(self, x):
        return x + torch.zeros(250 * 10**12).sum()
""",
        "tf": """
import tensorflow as tf
class Huge(tf.keras.layers.Layer):
    def call(self, x):
        return x + tf.reduce_sum(tf.random.uniform((tf.size(x), 5 * 10**12)))
""",
    },
    "late_weights": {
        "tf": """
import tensorflow as tf
class Late(tf.keras.layers.Layer):
    def __init__(self):
        super().__init__()
        self.first, self.second = tf.keras.layers.Dense(8), tf.keras.layers.Dense(8)
    def call(self, x, training=False):
        x = self.first(x)
        return self.second(x) if training else x
""",
    },
}
# As files may begin that take the cores for themselves.
THREADS = {
    "pt": "import torch\ntorch.set_num_threads(2)\n",
    "tf": "import tensorflow as tf\ntf.config.threading.set_intra_op_parallelism_threads(2)\n",
}
SHUFFLED = """
import numpy as np
def batches():
    random = np.random.default_rng()
    for _ in range(10):
        yield random.standard_normal((8, 6), dtype=np.float32), random.integers(0, 3, 8)
"""
# Functions of a file of twins that copies weights wrongly.
PAIRS = {
    "shuffled": "    tensorflow_model.set_weights([tensor.numpy().T for tensor in theirs])",
    "copies": "    tensorflow_model.set_weights([tensor.numpy().T for tensor in theirs])",
    "not_transposed": "    tensorflow_model.set_weights([tensor.numpy() for tensor in theirs])",
    "leaves_one_out": "    theirs[-1] = 0 * theirs[-1]\n"
    "    tensorflow_model.set_weights([tensor.numpy().T for tensor in theirs])",
    "other_outputs": "    tensorflow_model.pop()",
}
INPUTS = """
import numpy as np
def batch(size=8, seed=0):
    random = np.random.default_rng(seed)
    draw = lambda *shape: random.standard_normal((size, *shape), dtype=np.float32)
    return {"left": draw(6), "right": draw(4)}, draw()
"""
MORE = {
    "pt": {
        "dict_inputs": f"""{INPUTS}
import torch
from torch import nn
class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 5), nn.Linear(4, 5)
        self.file = nn.Parameter(torch.zeros(()))
    def forward(self, left, right):
        return (self.a(left) * self.b(right)).sum(-1) + self.file
def pytorch():
    model = Two()
    return model, nn.functional.mse_loss, torch.optim.Adam(model.parameters(), lr=0.01)
""",
        "as_it_is": f"""{HEAD}
import torch
from torch import nn
class Images(nn.Sequential):
    def forward(self, x):
        return super().forward(x.double()[..., None, None])
def pytorch():
    model = Images(nn.Conv2d(6, 8, 3, padding=1), nn.Flatten(), nn.Linear(8, 3)).double()
    model.to(memory_format=torch.channels_last)
    return model, nn.functional.cross_entropy, torch.optim.SGD(model.parameters(), 0.1, fused=True)
""",
        "own_step": f"""{HEAD}
from torch import nn
class Lit(nn.Linear):  # as a LightningModule has it
    def training_step(self, batch, batch_idx):
        return 7
def pytorch():
    return Lit(6, 3), nn.functional.cross_entropy
""",
        "logits": f"""{HEAD}
from types import SimpleNamespace
from torch import nn
class Wrapped(nn.Module):
    def __init__(self):
        super().__init__()
        self.inside = nn.Linear(6, 3)
    def forward(self, x):
        return SimpleNamespace(logits=self.inside(x))
def pytorch():
    return Wrapped(), lambda output, y: nn.functional.cross_entropy(output.logits, y)
""",
        "own_loss": f"""{HEAD}
from dataclasses import dataclass
import torch
from torch import nn
@dataclass
class Output:  # as transformers has it, which takes the labels as an input
    loss: torch.Tensor
    logits: torch.Tensor
class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.inside = nn.Linear(6, 3)
    def forward(self, values, labels):
        logits = self.inside(values)
        return Output(nn.functional.cross_entropy(logits, labels), logits)
def pytorch():
    return Classifier(), lambda output, y: output.loss
plain = batch
def batch(size=8, seed=0):
    x, y = plain(size, seed)
    return {{"values": x, "labels": y}}, y
""",
        "two_outputs": f"""{HEAD}
from torch import nn
class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 3), nn.Linear(6, 1)
    def forward(self, x):
        return self.a(x), self.b(x)
def pytorch():
    return Heads(), lambda o, y: nn.functional.cross_entropy(o[0], y) + o[1].square().mean()
""",
        "diverges": f"""{HEAD}
def pytorch():
    import torch
    model = torch.nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e6)
    return model, lambda o, y: o.square().square().mean(), optimizer
""",
        "evaluate_fails": f"""{HEAD}{PLAIN["pt"]}
def evaluate(predict):
    return predict(np.zeros((4, 6), np.float32)).argmax(-1)[9]
""",
        "same_numbers": f"""{HEAD.replace("default_rng(seed)", "default_rng(0)")}{PLAIN["pt"]}
def evaluate(predict):
    return 50.0
""",
        "fraction": f"""{HEAD}{PLAIN["pt"]}
def evaluate(predict):
    x, y = batch(100, 7)
    return float((predict(x).argmax(-1) == y).mean())
""",
        "evaluates": f"""{HEAD}{PLAIN["pt"]}
margin = 0.5
def evaluate(predict, framework):
    assert framework == "pytorch"
    x, y = batch(100, 7)
    return 100 * float((predict(x).argmax(-1) == y).mean())
""",
        "batches": """
def batches():
    import torch
    data = torch.utils.data.TensorDataset(torch.randn(160, 6), torch.randint(0, 3, (160,)))
    return torch.utils.data.DataLoader(data, batch_size=16)
"""
        + PLAIN["pt"],
    },
    "tf": {
        "own_step": HEAD
        + PLAIN["tf"]
        .replace("tf.keras.Sequential", "Own")
        .replace(
            "import layers",
            "import layers\n    class Own(tf.keras.Sequential):\n"
            "        def train_step(self, data):\n            return 7",
        ),
        "dict_inputs": f"""{INPUTS}
def tensorflow():
    import tensorflow as tf
    from tensorflow.keras import layers
    inputs = {{"left": tf.keras.Input((6,)), "right": tf.keras.Input((4,))}}
    both = layers.Dense(5)(inputs["left"]) * layers.Dense(5)(inputs["right"])
    model = tf.keras.Model(inputs, layers.Reshape(())(layers.Dense(1)(both)))
    return model, tf.keras.losses.MeanSquaredError(), tf.keras.optimizers.Adam(0.01)
""",
        "two_outputs": f"""{HEAD}
def tensorflow():
    import tensorflow as tf
    from tensorflow.keras import layers
    x = tf.keras.Input((6,))
    model = tf.keras.Model(x, [layers.Dense(3)(x), layers.Dense(1)(x)])
    own = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return model, lambda o, y: own(y, o[0]) + tf.reduce_mean(o[1] ** 2)
""",
        "batches": """
def batches():
    import tensorflow as tf
    x, y = tf.random.normal((160, 6)), tf.random.uniform((160,), 0, 3, tf.int64)
    return tf.data.Dataset.from_tensor_slices((x, y)).batch(16)
"""
        + PLAIN["tf"],
    },
}


def texts(side: str) -> dict[str, str]:
    """Every file of a framework by its name."""
    plain = HEAD + PLAIN[side]
    found = {"threads": THREADS[side] + plain}  # first: TensorFlow has its threads once it runs
    if side == "pt":
        found["threads"] += "make = pytorch\ndef pytorch():\n    torch.set_num_threads(2)\n"
        found["threads"] += "    return make()\n"
    for name, (old, new) in (BAD if side == "pt" else BAD_TF).items():
        assert old in plain, name
        before = MODULES.get(name, {}).get(side, "")
        found[name] = before + plain.replace(old, new)
    layer = {"pt": ("nn.ReLU()", "nn.Dropout(0.5)"), "tf": ('activation="relu"), ', ")")}[side]
    dropout = plain.replace(*layer)
    if side == "tf":
        dropout = plain.replace("layers.Dense(3)]", "layers.Dropout(0.5), layers.Dense(3)]")
    maker = f"def {NAME[side]}():\n"
    seeded = dropout.replace(maker, f"{maker}    {SEED[side]}\n")
    return found | {"plain": plain, "dropout": dropout, "seeded": seeded} | MORE[side]


EXPORTED = ("plain", "dict_inputs", "two_outputs", "own_loss")


def own_work(side: str, folder: Path, about: dict, path: Path) -> tuple[Work, Side]:
    """A row of a sound file that changes nothing, and the file's side."""
    whole = {"path": str(path), "name": "own", "folder": "own", "paired": False, "pairs": {}}
    whole |= {"parity": 1e-5, "cwd": str(folder)}
    shared = {name: about[name] for name in ("batch_size", "margin", "train_steps", "evaluates")}
    user_model.write_about(folder, whole | shared | {"sides": {side: about}})
    impl = Side(importlib.import_module(f"{side}_impl"), folder)
    work = Work(impl.task, "baseline", {}, 8, impl.weights, data=str(impl.folder))
    return work, impl


def rows(side: str, folder: Path, about: dict, path: Path) -> dict:
    """What a row in ONNX Runtime and a trial of the finder of a batch size make of a sound file."""
    work, impl = own_work(side, folder, about, path)
    files = Path(tempfile.mkdtemp(dir=folder))
    work = replace(work, variant="onnx", settings={"route": "onnx"}, mode="predict", files=files)
    bench = Operations()
    bench.impl, bench.kit, bench.work = impl, impl.kit, work
    bench.prepared = bench_export.prepare(impl, work)
    bench._deploy()
    exported = bench.prepared
    x, y = impl.kit.data.resident_batches(impl.batches(8))[0]
    losses = [
        bench._loss(predict(x), y)
        for predict in (exported.predict, impl.kit.training.make_predict(exported.model))
    ]
    evidence, reason = bench_export.took_effect(impl, work, exported, (x, y))
    few = replace(work, settings={"micro_batches": 4}, batch_size=2)
    os.environ[bench_batch_size_finder.OWN_FILE] = str(folder)
    step = getattr(bench_batch_size_finder, f"{side}_own")(20)
    return {
        "losses": losses,
        "not_applied": reason,
        "checked": evidence["samples"],
        "loss_of_20": impl.kit.runtime.to_float(step()),
        "of_20": [list(leaf.shape) for leaf in user_model.leaves(impl.of_size(20))],
        "too_few": raised(bench_gradient_accumulation.prepare, impl, few),
        "most": [impl.most_samples(times * about["step_s"]) for times in (10.01, 0.5)],
    }


def untouched(side: str, folder: Path, about: dict, path: Path) -> list[str | None]:
    """Why rows that change nothing of a file would not count as applied."""
    work, impl = own_work(side, folder, about, path)
    importlib.import_module(f"{side}_impl.train_step.mixed_precision")
    batch = impl.kit.data.resident_batches(impl.batches(8))[0]
    benches = (bench_stacking, bench_mixed_precision, bench_memory_format)
    return [each.took_effect(impl, work, each.prepare(impl, work), batch)[1] for each in benches]


def threads(side: str) -> int:
    """How many this process computes with."""
    if side == "pt":
        return sys.modules["torch"].get_num_threads()
    return sys.modules["tensorflow"].config.threading.get_intra_op_parallelism_threads()


def twin(bench: Operations, path: Path, place: Path) -> bool:
    """Whether a file that was checked has its twin's batches where it is checked as one."""
    theirs = [(np.ones((16, 6), np.float32), np.ones(16, np.int64))] * user_model.BATCHES
    user_model.save_batches(place / "pt", theirs)
    bench._op_check(str(path), str(place), str(place))
    return all((x == 1).all() for x, _ in user_model.load_batches(place / "tf"))


def pairs(bench: Operations, folder: Path) -> dict[str, str | None]:
    """What a check says of each way to copy weights; None where it is a sound one."""
    found = {}
    for name, copying in PAIRS.items():
        path, place = folder / f"pair_{name}.py", folder / f"pair_{name}"
        place.mkdir()
        head = "def copy_weights(pytorch_model, tensorflow_model):\n"
        theirs = "    theirs = list(pytorch_model.state_dict().values())\n"
        data = SHUFFLED if name == "shuffled" else HEAD
        path.write_text(f"{data}{PLAIN['pt']}{PLAIN['tf']}{head}{theirs}{copying}\n")
        check = {"path": str(path), "folder": str(place), "cwd": str(folder)}
        (place / user_model.SOURCE).write_bytes(path.read_bytes())
        bench._op_check(**check)
        try:
            bench._op_check_pair(**check)
            found[name] = None
        except BadFile as error:
            found[name] = str(error)
    return found


def main() -> None:
    """Check every file; print what was said of each as JSON."""
    side = sys.argv[1]
    bench, found = Operations(), {}
    bench._op_configure(f"{side}_impl", threads=1, seed=0, imports=[])
    assert KIT
    with tempfile.TemporaryDirectory() as folder:
        for name, text in texts(side).items():
            path, place = Path(folder, f"file_{name}.py"), Path(folder, name)
            path.write_text(text)
            place.mkdir()
            (place / user_model.SOURCE).write_text(text)
            try:
                about = bench._op_check(str(path), str(place), folder)
                batches = user_model.load_batches(place / side)
                shapes = [list(leaf.shape) for leaf in user_model.leaves(batches[0])]
                found[name] = about | {"shapes": shapes, "threads": threads(side)}
                if name in (*EXPORTED, "batches"):
                    found[name]["rows"] = rows(side, place, about, path)
                if name == "as_it_is":
                    found[name]["untouched"] = untouched(side, place, about, path)
                if (side, name) == ("tf", "batches"):
                    found[name]["twin"] = twin(bench, path, place)
            except BadFile as error:
                written = sorted(each.name for each in place.rglob("*"))
                written.remove(user_model.SOURCE)
                found[name] = {"bad": str(error), "written": written}
        if side == "pt":
            found["pairs"] = pairs(bench, Path(folder))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
