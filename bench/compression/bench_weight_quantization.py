"""Weight quantization: what 8-bit and 4-bit weights of dense layers save, and what they cost."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from bench.harness.examples import examples
from bench.harness.helpers import kit_module, need_cpu, plain
from bench.harness.plan import (
    PREDICTIONS,
    Prepared,
    Technique,
    UserModel,
    Variant,
    Work,
    Workload,
    other_math,
)
from bench.harness.stages import train_plain

# Relative losses of twins: they round the same weights by rules of their own.
APART = 0.05
RUNTIMES = {"pt": "TorchInductor", "tf": "TensorFlow graph"}
FOLDED = 100 * 1024  # bytes in float32: TensorFlow makes floats of smaller kernels once
_row = partial(other_math, loss_tolerance=APART, runtimes=RUNTIMES)

TECHNIQUE = Technique(
    family="compression",
    name="weight_quantization",
    effort="ordinary",
    title="Weight quantization: dense layers in 8 or 4 bits",
    user_model=UserModel(PREDICTIONS[1:], ("fp32", "int8_weights", "int4_weights"), learns=True),
    variants=(
        Variant("fp32", {"apply": ""}, role="baseline", title="float32", runtimes=RUNTIMES),
        _row("int8_weights", "8-bit weights", apply="apply_int8"),
        _row("int4_weights", "4-bit weights", "ordinary", apply="apply_int4"),
    ),
    workloads=(
        Workload("text-gpt-wide", "small", mode="predict"),
        Workload(
            "text-gpt", "compute", effort="ordinary", mode="predict", accuracy=True, timed=False
        ),
        Workload("text-gpt-wide", "compute", effort="full", mode="predict"),
    ),
    differs_by_design=(
        "PyTorch has a kernel that multiplies 4-bit weights; TensorFlow first converts them to "
        "floats. int4 has a zero point per group in both, int8 is symmetric.",
    ),
    notes=(
        "fp32 is the same graph with float weights: compiled in PyTorch, a graph function in "
        "TensorFlow. Embeddings and activations stay in float32.",
        "Size is that of the deployed file.",
    ),
    counts=True,
)


def prepare(impl, work: Work) -> Prepared:
    """The baseline's step, and predictions of a file that is written and loaded."""
    row = plain(impl, work)
    need_cpu(impl)
    technique = impl.compression.weight_quantization
    files = kit_module(impl, "quantized_files")

    def write(path):
        model, (example, _) = row.model, impl.kit.data.to_device(*examples(work, 2))
        if work.settings["apply"]:
            model = getattr(technique, work.settings["apply"])(model, example)
        files.save_quantized(model, example, path)

    read, train = files.load_quantized, train_plain(impl, row.model)
    return replace(row, write=write, read=read, train=train)


def took_effect(impl, work: Work, prepared: Prepared, batch) -> tuple[dict, str | None]:
    """The file holds the kernels in integers of so many bits, and a call reads them; none of fp32.

    PyTorch's kernel for 4 bits takes multiples of 32 inputs and 16 outputs alone.
    """
    integers, path = kit_module(impl, "integers"), prepared.artifact
    held, read = integers.tensor_bytes(path), integers.integer_bytes_read(path, batch[0])
    evidence = {"bytes_by_dtype": held, "integer_bytes_read": read}
    evidence["int8_operators"] = integers.integer_operators(prepared.predict, path, batch[0])
    size = held.get("int8", 0) + held.get("uint8", 0)
    if work.variant == "fp32":
        return evidence, "it holds integers" if size or read else None
    if not size:
        return evidence, "no weight is held in integers"
    bits = {"int8_weights": 8, "int4_weights": 4}[work.variant]
    shapes = [value.shape for name, value in work.weights.items() if name.endswith(".kernel")]
    if bits == 4:
        shapes = [(rows, columns) for rows, columns in shapes if not rows % 32 and not columns % 16]
    sizes = [rows * columns for rows, columns in shapes]
    wanted = sum(sizes) * bits // 8
    if size < wanted:
        return evidence, f"{size} bytes are integers, not {wanted} or more"
    wanted = sum(one for one in sizes if 4 * one > FOLDED) * bits // 8
    if sum(read.values()) < wanted:
        return evidence, f"a call reads {read} bytes of integers, not {wanted} or more"
    return evidence, None
