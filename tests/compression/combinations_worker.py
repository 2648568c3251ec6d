"""One framework's share of the tests of stacked compression, in a process of its own.

`python -m tests.compression.combinations_worker pt|tf|tf_keras` runs every scenario and prints one
line of JSON: scenario -> what was found, or {"error": traceback}. `test_combinations.py` judges.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np

from bench.compression import bench_combinations as bench
from bench.compression.bench_sparse_inference import pruned
from bench.harness.plan import Work
from bench.harness.stages import Stages
from shared.specs import TASKS, CNNSpec
from shared.weights import init_weights
from tests import workers
from tests.compression import quick
from tests.workers import raised_on_one_line as raised

FRAMEWORK = "pt" if sys.argv[1:] == ["pt"] else "tf"
STACKED = ("distillation", "pruning", "quantization_aware_training", "combinations")
impl = workers.implementation(
    FRAMEWORK, *(f"compression.{name}" for name in STACKED), "kit.file_zeros", "kit.int8_files"
)
kit = impl.kit
technique, qat = impl.compression.combinations, impl.compression.quantization_aware_training
CNN = CNNSpec((8, 8, 2), ((8, 1), (12, 2)), num_classes=10)
TASK = TASKS["digits-cnn"]
FOLDER = Path(tempfile.mkdtemp())
SHARE = 0.75


def batches(count):
    """The same in every process."""
    random, found = np.random.default_rng(11), []
    for _ in range(count):
        y = random.integers(0, 10, 16)
        x = random.normal(size=(16, *CNN.input_shape)) + y[:, None, None, None] / 3
        found.append((x.astype(np.float32), y))
    return kit.data.resident_batches(found)


def start(share=SHARE):
    """Initial weights, of whose kernels the smallest are zero."""
    weights = init_weights(CNN, seed=1)
    return {name: pruned(name, value, share) for name, value in weights.items()}


def step_of(model, make, **recipe):
    recipe = replace(TASK.recipe, **recipe)
    optimizer = kit.training.make_optimizer(model, recipe)
    return make(model, optimizer, kit.training.cross_entropy)


def kernels(weights):
    return {n: v.tolist() for n, v in weights.items() if n.endswith("kernel")}


def steps():
    """Weights after steps of each kind, by each optimizer, and the losses on the way."""
    found = {"before": kernels(start())}
    rules = {
        "sgd": {"optimizer": "sgd"},
        "adamw": {"optimizer": "adamw", "learning_rate": 1e-3, "weight_decay": 0.1},
        "rmsprop": {"optimizer": "rmsprop", "learning_rate": 1e-3},
    }
    for name, rule in rules.items():
        model = kit.models.build(CNN, start())
        step = step_of(model, technique.make_sparse_train_step, **rule)
        losses = [kit.runtime.to_float(step(*batch)) for batch in batches(10)]
        weights = kit.models.export_weights(model)
        found[name] = {
            "losses": losses,
            "after": kernels(weights),
            "beta moved": bool(np.any(weights["conv0.bn.beta"])),
        }
    return found


def two_heads():
    """Kernels before and after a step of a model of whose two heads the loss reads one."""
    random = np.random.default_rng(5)
    x, y = random.normal(size=(8, 6)).astype(np.float32), random.integers(0, 3, 8)
    kernels = random.normal(size=(2, 6, 3)).astype(np.float32)
    kernels = [pruned("head.kernel", kernel, 0.5) for kernel in kernels]
    model, read = two_heads_of(kernels)
    before = read()
    optimizer = kit.training.make_optimizer(model, replace(TASK.recipe, optimizer="sgd"))

    def loss_fn(outputs, labels):
        return kit.training.cross_entropy(outputs["used"], labels)

    technique.make_sparse_train_step(model, optimizer, loss_fn)(*kit.data.to_device(x, y))
    return {"before": before, "after": read()}


def two_heads_of(kernels):
    """A model that is not ours, and a function that reads its two kernels, inputs by outputs."""
    if FRAMEWORK == "tf":
        import tensorflow as tf

        layers, x = tf.keras.layers, tf.keras.Input((6,))
        heads = [layers.Dense(3, name=name) for name in ("used", "unused")]
        model = tf.keras.Model(x, {head.name: head(x) for head in heads})
        for head, kernel in zip(heads, kernels, strict=True):
            head.kernel.assign(kernel)
        return model, lambda: [head.kernel.numpy().tolist() for head in heads]
    import torch

    class Heads(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = torch.nn.Linear(6, 3), torch.nn.Linear(6, 3)

        def forward(self, x):
            return {"used": self.used(x), "unused": self.unused(x)}

    model = Heads()
    for head, kernel in zip(model.children(), kernels, strict=True):
        head.weight.data.copy_(torch.from_numpy(kernel.T.copy()))
        torch.nn.init.zeros_(head.bias)
    return model, lambda: [head.weight.detach().T.tolist() for head in model.children()]


def one_step():
    """What one step of descent changes, with and without the zeros kept."""
    found = {}
    for name in ("make_sparse_train_step", "make_train_step"):
        make = getattr(technique if "sparse" in name else kit.training, name)
        model = kit.models.build(CNN, start())
        step_of(model, make, momentum=0.0)(*batches(1)[0])
        weights = kit.models.export_weights(model)
        found[name] = kernels({n: v - start()[n] for n, v in weights.items()})
    return found


def files():
    """The zeros of a float32 file, and of 8-bit ones trained with each kind of step."""
    stream, found = batches(10), {}
    x = stream[0][0]
    model = kit.models.build(CNN, start())
    path = kit.int8_files.keep_float32(model, x, FOLDER / "float")
    found["float"] = list(kit.file_zeros.kernel_zeros(path).values())
    for name, make in (
        ("sparse", technique.make_sparse_train_step),
        ("plain", kit.training.make_train_step),
    ):
        prepared = qat.prepare_qat(model, x, weight_bits=8)
        step = step_of(prepared, make)
        for batch in stream:
            step(*batch)
        path = kit.int8_files.save_as_it_is(qat.convert_qat(prepared, x), FOLDER / name)
        found[name] = list(kit.file_zeros.kernel_zeros(path).values())
    found["bytes"] = [(FOLDER / name).stat().st_size for name in ("float", "sparse")]
    return found


def refusals():
    """What bad input raises."""
    dense = kit.models.build(CNN, start(share=0.0))
    (FOLDER / "text").write_text("not a model\n" * 100)
    return {
        "dense": raised(step_of, dense, technique.make_sparse_train_step),
        "missing": raised(kit.file_zeros.kernel_zeros, FOLDER / "missing"),
        "text": raised(kit.file_zeros.kernel_zeros, FOLDER / "text"),
        "operator": unknown_operator(),
    }


def unknown_operator():
    """What a whole file raises that needs an operator which its runtime does not have."""
    if FRAMEWORK == "pt":
        return None
    import tensorflow as tf

    inverse = tf.function(tf.linalg.inv).get_concrete_function(tf.TensorSpec([2, 2]))
    converter = tf.lite.TFLiteConverter.from_concrete_functions([inverse])
    converter.allow_custom_ops = True
    (FOLDER / "inverse").write_bytes(converter.convert())
    return raised(kit.file_zeros.kernel_zeros, FOLDER / "inverse")


def benchmark():
    """Epochs of the stages; of the highest rows zeros and size of the file, and the proof.

    Of all rows in PyTorch and in campaigns, else of one stack and its baseline.
    """
    every = FRAMEWORK == "pt" or workers.campaign()
    data = FOLDER / "data"
    data.mkdir()
    random = np.random.default_rng(3)
    x = random.normal(size=(120, 32, 32, 1)).astype(np.float32)
    y = random.integers(0, 10, 120)
    for name, array in (("x", x), ("y", y)):
        np.save(data / f"train_{name}.npy", array)
    x, y = kit.data.to_device(x, y)
    bench.SCHEDULE = {"begin_step": 0, "end_step": 4, "frequency": 1}
    found, proofs, trained = {}, {}, {}
    for variant in bench.TECHNIQUE.variants:
        if not every and variant.name not in ("0_fp32", "2_pruned_int8"):
            continue
        work = Work(
            task=TASK,
            variant=variant.name,
            settings=variant.settings,
            batch_size=32,
            weights=init_weights(TASK.model, seed=0),
            mode="predict",
            data=str(data),
            folder=Path(tempfile.mkdtemp(dir=FOLDER)),
        )
        prepared, epochs = bench.prepare(impl, work), []
        labels = prepared.targets(x, y) if prepared.targets else y
        shapes = [list(part.shape) for part in labels] if prepared.targets else None

        def fit(step, more, labels=labels, epochs=epochs):
            epochs.append(more)
            kit.training.fit(step, x, labels, batch_size=20, epochs=1, seed=0)

        prepared.train(Stages(impl, TASK, work.weights, 0, FOLDER / "stages", fit))
        trained[variant.name] = {"epochs": epochs, "targets": shapes}
        if variant.name.startswith("1_"):  # the beginning of another row
            continue
        path = work.folder / "model"
        prepared.write(path)
        found[variant.name] = {
            "zeros": list(kit.file_zeros.kernel_zeros(path).values()),
            "bytes": path.stat().st_size,
        }
        if variant.name not in ("0_fp32", "2_pruned_int8"):
            continue
        with quick.without_code():
            deployed = replace(prepared, predict=prepared.read(path), artifact=path)
        batch = x[:32], y[:32]
        proofs[variant.name] = bench.took_effect(impl, work, deployed, batch)
        if variant.name == "0_fp32":
            for name, feigned in (("pruned", bench.PRUNED), ("rounded", bench.ROUNDED)):
                other = replace(work, settings=feigned)
                proofs[name] = bench.took_effect(impl, other, deployed, batch)
    return {"rows": found, "proofs": proofs, "trained": trained}


def main() -> None:
    kit.runtime.configure(threads=1, seed=0)
    if FRAMEWORK == "pt":
        quick.capture_patterns_once()
    # The benchmark's rows of TensorFlow train with tf_keras.
    rows = (benchmark,) if sys.argv[1] != "tf" else ()
    workers.report((steps, two_heads, one_step, files, refusals, *rows))


if __name__ == "__main__":
    main()
