"""Quantization-aware training: was it worth it, against rounding alone, and what does it cost?"""

from __future__ import annotations

import inspect
import re
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from bench.harness.examples import examples
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
from bench.harness.stages import Stages, train_plain

MORE_EPOCHS = 2  # beyond the recipe's, in every row: with fake quantization, or without
EXAMPLES = 256  # images of the training split that set the ranges of activations
# TensorFlow Model Optimization's own route, which knows no other Keras.
LEGACY = {"frameworks": ("tf",), "flavours": ("tf_keras",)}
# Twins round to the same grids, but not everywhere at the same places (see differs_by_design).
ROUNDED_LOSSES = 0.05
TRAINS, PREDICTS = Measure(modes=("train",)), Measure(modes=("predict",))
PRODUCTS = re.compile("conv|linear|fully_connected|matmul", re.IGNORECASE)


def _rows(bits: int, effort: str, **sides) -> tuple[Variant, Variant]:
    """Rounding in training, and after it, which is the same program for whoever predicts."""
    common = {"weight_bits": bits, "effort": effort} | sides
    named = f"int{bits}" if bits == 8 else f"{bits}-bit weights"
    common |= {"changes": "math", "loss_tolerance": ROUNDED_LOSSES}
    common |= {"program": f"rounded_{bits}", "runtimes": OWN_RUNTIMES}
    # A step takes as long at any number of bits: fake quantization computes in float32.
    measured = Measure() if bits == 8 else PREDICTS
    return (
        row(
            f"qat_{bits}",
            f"{named}, trained with rounding",
            measured=measured,
            price=Price(epochs=MORE_EPOCHS),
            **common,
        ),
        row(
            f"ptq_{bits}",
            f"{named}, rounded after training",
            measured=PREDICTS,
            price=Price(calibration=True),
            **common,
        ),
    )


def _baselines(effort: str, **sides) -> tuple[Variant, Variant]:
    """Of predictions those of a file, of train steps the plain one."""
    kinds, own = ((PREDICTS, "float_file"), (TRAINS, "plain")), {"runtimes": OWN_RUNTIMES} | sides
    return tuple(
        row("fp32", "float32", effort, role="baseline", measured=measured, program=program, **own)
        for measured, program in kinds
    )


TECHNIQUE = Technique(
    family="compression",
    name="quantization_aware_training",
    title="Quantization-aware training",
    variants=(
        *_baselines("default"),
        *_rows(8, "default"),
        *_rows(2, "ordinary"),
        *_rows(4, "full"),
        *_baselines("full", **LEGACY),
        *_rows(8, "full", **LEGACY),
    ),
    workloads=(
        Workload("digits-cnn", "compute", mode="predict", accuracy=True, training=3.0),
        Workload("digits-cnn", "compute", effort="ordinary"),
    ),
    differs_by_design=(
        "PyTorch trains a captured graph with torchao's fake quantization and runs int8 kernels of "
        "oneDNN, compiled by TorchInductor. TensorFlow's layers compute with fake quantization "
        "(in tf_keras rows TensorFlow Model Optimization wraps them), and LiteRT runs the file. "
        "All rows run there, the baselines' too.",
        "Weights below 8 bits are int8 in PyTorch's file, with values unused. In TensorFlow's they "
        "are int4 from 4 bits down, for which LiteRT's fast library has no convolution.",
        "PyTorch's ranges of activations follow the batches ten times as fast, its dense kernel "
        "has a scale for each output, and its logits are not rounded. On an x86 CPU without VNNI "
        "its activations have 7 bits, since oneDNN's kernels would overflow with 8.",
    ),
    notes=(
        "Accuracy is of the deployed file. Every row trains for the recipe's epochs and then "
        f"{MORE_EPOCHS} more at the same learning rate. In these, only qat rows have fake "
        "quantization. ptq is rounded after training by the same quantizer, with ranges from "
        f"{EXAMPLES} training images. So ptq and qat differ only in training.",
        "The price of training is a train step of qat_8 over one of fp32, whatever the number of "
        "bits. Predictions of ptq take as long as those of qat.",
        "Timed files have the weights of the model that the run has trained for predictions, and "
        "not those of a row's training.",
    ),
    counts=True,
)


def prepare(impl, work: Work) -> Prepared:
    """The step, with fake quantization in qat rows; or the predictions of the deployed file."""
    row = Row(impl, work, impl.kit.models.build(work.task.model, work.weights))
    plain = row.model
    if work.mode == "train" and row.is_trained_rounding:
        row.round()
    step, optimizer = row.step()
    predict = impl.kit.training.make_predict(row.model)
    if work.mode == "train":
        return Prepared(step, predict, plain, optimizer)
    need_cpu(impl)
    read = kit_module(impl, "int8_files").load_int8
    return Prepared(step, predict, plain, optimizer, write=row.write, read=read, train=row.train)


@dataclass
class Row:
    """A model on its way to a file, which may begin to round before it is trained, or after."""

    impl: Any
    work: Work
    model: Any
    rounds: bool = False

    @property
    def is_trained_rounding(self) -> bool:
        """Whether fake quantization is there while it trains."""
        return self.work.variant.startswith("qat")

    @cached_property
    def examples(self):
        """Real inputs, which set the ranges of activations."""
        return self.impl.kit.data.to_device(*examples(self.work, EXAMPLES))[0]

    def round(self) -> None:
        """Put fake quantization in."""
        bits = self.work.settings["weight_bits"]
        technique = self.impl.compression.quantization_aware_training
        self.model = technique.prepare_qat(self.model, self.examples, weight_bits=bits)
        self.rounds = True

    def step(self) -> tuple:
        """A step of the model as it is now, with a new optimizer."""
        training = self.impl.kit.training
        optimizer = training.make_optimizer(self.model, self.work.task.recipe)
        return training.make_train_step(self.model, optimizer, training.cross_entropy), optimizer

    def train(self, stages: Stages) -> None:
        """To the plateau in float32, then on, with fake quantization or without."""
        if not self.is_trained_rounding:
            train_plain(self.impl, self.model, MORE_EPOCHS)(stages)
            return
        train_plain(self.impl, self.model)(stages)
        self.round()
        stages.fit(self.step()[0], MORE_EPOCHS)

    def write(self, path: Path) -> None:
        """Write the file, of a model that rounds, at the latest here, where the row does."""
        technique = self.impl.compression.quantization_aware_training
        if "weight_bits" in self.work.settings and not self.rounds:
            self.round()
        files = kit_module(self.impl, "int8_files")
        if self.rounds:
            files.save_as_it_is(technique.convert_qat(self.model, self.examples), path)
        else:
            files.keep_float32(self.model, self.examples, path)


def took_effect(impl, work: Work, prepared: Prepared, batch) -> tuple[dict, str | None]:
    """Fake quantizers stand in the step that is timed; the file's products are of integers."""
    if work.mode == "train":
        return _judge_step(work, _fake_quantizers(impl, prepared, batch))
    integers = kit_module(impl, "integers")
    ran = integers.integer_operators(prepared.predict, prepared.artifact, batch[0])
    return _judge_file(work, {name: count for name, count in ran.items() if PRODUCTS.search(name)})


def _judge_step(work: Work, fake: dict[str, int]) -> tuple[dict, str | None]:
    evidence = {"fake_quantizers": fake}
    if not work.settings:
        return evidence, "the step rounds" if fake else None
    return evidence, None if fake else "the step has no fake quantization"


def _judge_file(work: Work, operators: dict[str, int]) -> tuple[dict, str | None]:
    evidence = {"operators": operators}
    if not work.settings:
        return evidence, "products ran on integers" if operators else None
    ran = sum(operators.values())
    kernels = sum(name.endswith(".kernel") for name in work.weights)
    return evidence, None if ran == kernels else f"{ran} of {kernels} products ran on integers"


def _fake_quantizers(impl, prepared: Prepared, batch) -> dict[str, int]:
    """Name -> number: modules of the model that PyTorch trains, operators of TensorFlow's graph."""
    if impl.__name__ == "tf_impl":
        operators = prepared.step.get_concrete_function(*batch).graph.get_operations()
        names = [operator.type for operator in operators if "Gradient" not in operator.type]
    else:
        trained = inspect.getclosurevars(prepared.step).nonlocals["model"]
        names = [type(module).__name__ for module in trained.modules()]
    return dict(Counter(name for name in names if "FakeQuant" in name))
