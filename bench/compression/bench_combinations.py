"""Compression, stacked: what pruning, distillation and 8 bits do to size, time and accuracy."""

from __future__ import annotations

from functools import partial
from itertools import count

from bench.compression.bench_quantization_aware_training import ROUNDED_LOSSES
from bench.compression.bench_quantization_aware_training import Row as RoundedRow
from bench.compression.bench_sparse_inference import pruned
from bench.harness.helpers import kit_module, need_cpu
from bench.harness.plan import (
    OWN_RUNTIMES,
    Measure,
    Prepared,
    Price,
    Technique,
    Variant,
    Work,
    Workload,
    row,
)
from bench.harness.stages import Stages
from shared import teacher

# Fixed before anything was measured: the settings of the techniques that are stacked, and their
# epochs. All rows train as long, in three parts at one learning rate, each with a new optimizer:
# the recipe's epochs, those in which pruned rows are pruned, those in which rows are rounded.
PRUNING_EPOCHS, ROUNDING_EPOCHS = 4, 2
SCHEDULE = {"begin_step": 0, "end_step": 420, "frequency": 10}  # of the 560 steps of 4 epochs
LESSON = {"temperature": 4.0, "alpha": 0.9}
# 80% of all: layers of fewer weights, 2% of them, stay dense.
PRUNED, ROUNDED = {"final_sparsity": 0.82, "min_weights": 1_000}, {"weight_bits": 8}
PROOF_STEPS = 10  # of training with rounding, after which zeros are still there


def _row(name: str, title: str, effort: str = "default", timed: bool = True, **settings) -> Variant:
    given = {"changes": "weights" if "final_sparsity" in settings else "math"}
    given |= {"loss_tolerance": ROUNDED_LOSSES if "weight_bits" in settings else None}
    given["price"] = Price(epochs=PRUNING_EPOCHS + ROUNDING_EPOCHS, teacher="alpha" in settings)
    given |= {"measured": Measure(time=timed), "runtimes": OWN_RUNTIMES}
    return row(name, title, effort, **given, **settings)


TECHNIQUE = Technique(
    family="compression",
    name="combinations",
    effort="ordinary",
    title="Compression, stacked: prune or distil, then quantize",
    variants=(
        row("0_fp32", "float32", role="baseline", program="float_file", runtimes=OWN_RUNTIMES),
        _row("2_pruned_int8", "80% zeros, int8", "ordinary", **PRUNED, **ROUNDED),
        _row("2_distilled_int8", "distilled, int8", **LESSON, **ROUNDED),
        _row("1_pruned", "80% zeros", effort="ordinary", **PRUNED),
        # Other weights in the graph of 0_fp32.
        _row("1_distilled", "distilled", effort="ordinary", timed=False, **LESSON),
    ),
    workloads=(Workload("digits-cnn", "compute", mode="predict", accuracy=True, training=3.0),),
    differs_by_design=(
        "The runtime is TorchInductor with frozen weights in PyTorch, LiteRT with XNNPACK in "
        "TensorFlow, in float32 rows, too.",
        "Masks and fake quantizers differ as described under pruning and "
        "quantization_aware_training.",
    ),
    notes=(
        "Each row includes those before it: 2_pruned_int8 is 1_pruned, trained on with rounding "
        "while its zeros stay. 2_distilled_int8 is 1_distilled, rounded after training.",
        "Accuracy is of the deployed file. Every row trains for the recipe's epochs, then for "
        f"{PRUNING_EPOCHS} and {ROUNDING_EPOCHS} more at one learning rate. Pruned rows reach 80% "
        f"of zeros after {SCHEDULE['end_step']} of the first {SCHEDULE['end_step'] * 4 // 3} "
        "additional steps. Rows in 8 bits round in the last epochs. Distilled rows learn from "
        f"{teacher.TASK.name} in all (T = {LESSON['temperature']:g}, alpha = "
        f"{LESSON['alpha']:g}).",
        "Size is that of the file with initial weights, as it is and compressed; in pruned rows "
        "the smallest weights are zero. Neither runtime gains speed from zeros.",
        "1_distilled predicts as fast as 0_fp32, because it is the same model with other "
        "weights. It is not timed, so a chart of step times may show 0_fp32 instead.",
    ),
    composed_of=(
        "compression.distillation",
        "compression.pruning",
        "compression.quantization_aware_training",
    ),
    counts=True,
)


def prepare(impl, work: Work) -> Prepared:
    """Predictions of the file of the row, from its initial weights or from what was trained."""
    need_cpu(impl)
    row = Row(impl, work)
    plain, (step, optimizer) = row.model, row.plain_step()
    predict = impl.kit.training.make_predict(plain)
    targets = row.lessons if "alpha" in work.settings else None
    read = kit_module(impl, "int8_files").load_int8
    return Prepared(
        *(step, predict, plain, optimizer),
        targets=targets,
        write=row.write,
        read=read,
        train=row.train,
    )


class Row(RoundedRow):
    """A model on its way to a file, by the settings of its row."""

    def __init__(self, impl, work: Work) -> None:
        """Start from initial weights, the smallest of them zero: what is timed is not trained."""
        weights, share = dict(work.weights), work.settings.get("final_sparsity", 0.0)
        for name in large_kernels(work):
            weights[name] = pruned(name, weights[name], share)
        super().__init__(impl, work, impl.kit.models.build(work.task.model, weights))

    def lessons(self, x, y) -> tuple:
        """Labels, and what the teacher says of the images."""
        guide = self.impl.kit.models.build(teacher.TASK.model, teacher.load().weights)
        return y, self.impl.compression.distillation.store_logits(guide, x)

    def plain_step(self) -> tuple:
        """A step of the model as it is now, taught if the row is, with a new optimizer."""
        training = self.impl.kit.training
        optimizer = training.make_optimizer(self.model, self.work.task.recipe)
        make, lesson = training.make_train_step, {}
        if "alpha" in self.work.settings:
            make = self.impl.compression.distillation.make_stored_train_step
            lesson = {name: self.work.settings[name] for name in LESSON}
        return make(self.model, optimizer, training.cross_entropy, **lesson), optimizer

    def sparse_step(self):
        """A step that keeps the zeros of the model as it is now."""
        training = self.impl.kit.training
        optimizer = training.make_optimizer(self.model, self.work.task.recipe)
        make = self.impl.compression.combinations.make_sparse_train_step
        return make(self.model, optimizer, training.cross_entropy)

    def train(self, stages: Stages) -> None:
        """All stages, from the initial weights as they are."""
        if "final_sparsity" not in self.work.settings:
            self.build(self.dense(stages))
            return
        settings = {name: self.work.settings[name] for name in PRUNED} | SCHEDULE
        prune = partial(self.prune, settings)
        self.build(
            stages.shared("pruned", prune, stages.plain(), epochs=PRUNING_EPOCHS, **settings)
        )
        if "weight_bits" in self.work.settings:
            self.round()
        stages.fit(self.sparse_step(), ROUNDING_EPOCHS)

    def build(self, weights: dict) -> None:
        """Go on from `weights`."""
        self.model = self.impl.kit.models.build(self.work.task.model, weights)

    def dense(self, stages: Stages) -> dict:
        """The weights of a row without zeros: all three stages alike, taught or not."""
        weights = self.work.weights
        lesson = {name: self.work.settings.get(name) for name in LESSON}
        for epochs in (None, PRUNING_EPOCHS, ROUNDING_EPOCHS):
            if "alpha" in self.work.settings:
                weights = stages.shared("distilled", self.teach, weights, epochs, **lesson)
            else:
                weights = stages.plain(weights, epochs)
        return weights

    def teach(self, weights: dict) -> tuple:
        """A step that learns from the teacher, and what it trains."""
        self.build(weights)
        return self.plain_step()[0], lambda: self.model

    def prune(self, settings: dict, weights: dict) -> tuple:
        """A step that prunes, and the model that it leaves."""
        self.build(weights)
        technique = self.impl.compression.pruning
        self.model, update = technique.apply_pruning(self.model, **settings)
        (step, _), numbers = self.plain_step(), count(1)

        def pruning_step(x, y):
            update(next(numbers))
            return step(x, y)

        return pruning_step, lambda: technique.finalize_pruning(self.model)


def took_effect(impl, work: Work, prepared: Prepared, batch) -> tuple[dict, str | None]:
    """The file has its zeros, after steps with rounding, too; its products are of integers."""
    share = work.settings.get("final_sparsity", 0.0)
    integers = kit_module(impl, "integers")
    file_zeros = kit_module(impl, "file_zeros")
    ran = integers.integer_operators(prepared.predict, prepared.artifact, batch[0])
    evidence = {
        "operators": ran,
        "zeros_in_file": file_zeros.kernel_zeros(prepared.artifact),
    }
    if bool(evidence["operators"]) != ("weight_bits" in work.settings):
        return evidence, f"{sum(evidence['operators'].values())} products ran on integers"
    if not share:
        return evidence, None
    row = Row(impl, work)
    if "weight_bits" in work.settings:
        row.round()
    step = row.sparse_step()
    for _ in range(PROOF_STEPS):
        step(*batch)
    path = work.folder / "after_steps"
    row.write(path)
    evidence["zeros_after_steps"] = file_zeros.kernel_zeros(path)
    for name in ("zeros_in_file", "zeros_after_steps"):
        kept = sum(zeros > share - 0.01 for zeros in evidence[name].values())
        if kept != len(large_kernels(work)):
            return evidence, f"{name}: {kept} kernels have {share:.0%}"
    return evidence, None


def large_kernels(work: Work) -> list[str]:
    """Names of the kernels that are pruned, if any."""
    least = work.settings.get("min_weights", 0)
    return [n for n, value in work.weights.items() if n.endswith(".kernel") and value.size >= least]
