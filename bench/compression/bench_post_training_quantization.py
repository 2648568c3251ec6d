"""Post-training quantization: what 8-bit integers buy on a CPU in each runtime, and their price."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from bench.harness.accuracy import even_batch
from bench.harness.examples import examples
from bench.harness.helpers import kit_module, need_cpu, plain
from bench.harness.plan import (
    OWN_RUNTIMES,
    PREDICTIONS,
    Measure,
    Prepared,
    Price,
    Technique,
    UserModel,
    Variant,
    Work,
    Workload,
)
from bench.harness.stages import train_plain
from shared import datasets, operators, teacher
from shared.user_model import leaves

# Fixed before anything was measured, as are the cases and the seeds. The margin of accuracy is the
# task's, one point.
CALIBRATION = 256  # samples: the first of the training split
APART = 0.05  # relative: losses of int8 twins, whose scales differ by design
KERNELS = re.compile("conv|gemm|matmul|qlinear_|::linear|fully_connected", re.IGNORECASE)
ONNX = "onnxruntime"  # in the settings of a row
UNSUPPORTED = {"tf": {"apply_fx_int8": "this is PyTorch's older way, which torchao replaces"}}


def _row(name: str, title: str, apply: str, runtime: str = "own", **fields) -> Variant:
    settings = {"apply": apply, "runtime": runtime}
    if runtime == "own":
        fields = {"runtimes": OWN_RUNTIMES} | fields
    if "int8" in name:
        fields |= {"changes": "math", "loss_tolerance": APART}
        # Ranges that are found as it runs need no calibration.
        fields |= {"price": Price(calibration=name != "dynamic_int8")}
    return Variant(name, settings, title=title, **fields)


TECHNIQUE = Technique(
    family="compression",
    name="post_training_quantization",
    title="Post-training quantization: int8 in the runtimes that would be deployed",
    user_model=UserModel(
        PREDICTIONS[1:],
        ("fp32", "static_int8", "onnxruntime_int8", "onnxruntime_fp32"),
        learns=True,
    ),
    variants=(
        _row("fp32", "float32", "", role="baseline", program="float_file"),
        _row("static_int8", "int8", "apply_static_int8"),
        _row(
            "onnxruntime_int8",
            "int8 in ONNX Runtime",
            "quantize_onnxruntime_int8",
            ONNX,
            against="onnxruntime_fp32",
        ),
        _row(
            "onnxruntime_fp32",
            "float32 in ONNX Runtime",
            "keep_onnxruntime_float32",
            ONNX,
            measured=Measure(accuracy=False),
        ),
        # The same weights as fp32: neither its accuracy nor its memory is of interest here.
        Variant(
            "fp32_in_framework",
            effort="ordinary",
            measured=Measure(accuracy=False, cold=False),
            title="float32 in the framework",
            program="plain",
        ),
        _row(
            "dynamic_int8",
            "int8, ranges found as it runs",
            "apply_dynamic_int8",
            effort="ordinary",
        ),
        _row(
            "fx_int8",
            "int8 by the deprecated route, eager",
            "apply_fx_int8",
            effort="ordinary",
            frameworks=("pt",),
            runtimes={},
        ),
    ),
    workloads=(
        Workload("photos-resnet18", "compute", mode="predict"),
        Workload(
            "digits-cnn",
            "compute",
            mode="predict",
            accuracy=True,
            training=2.0,
            effort="ordinary",
        ),
        Workload("digits-resnet20", "compute", effort="full", mode="predict"),
        Workload("digits-resnet20", "small", effort="full", mode="predict"),
        Workload("digits-cnn", "small", effort="full", mode="predict"),
    ),
    differs_by_design=(
        "The runtime is TorchInductor with frozen weights in PyTorch, LiteRT with XNNPACK in "
        "TensorFlow. onnxruntime is the same on both sides, with a file from each framework's "
        "exporter.",
        "Activations are unsigned in PyTorch and ONNX Runtime, and signed in LiteRT. torchao "
        "cuts their ranges by a histogram, the others take the extremes. So int8 rows count as "
        f"equal work if their losses differ by less than {APART:.0%}.",
        "On an x86 CPU without VNNI, integer kernels add products in 16 bits, which overflow. So "
        "activations have 7 bits in PyTorch, and weights 7 bits in ONNX Runtime, as both "
        "recommend; LiteRT's kernels need neither.",
        "Dynamic quantization covers only linear layers in PyTorch, and also convolutions in "
        "LiteRT.",
    ),
    notes=(
        "fp32 is the float32 model in the runtime of static_int8, so the ratio shows what "
        "quantization gains. onnxruntime_int8 is compared with onnxruntime_fp32, so that the "
        "change of runtime does not count; its accuracy is compared with fp32's. "
        "fp32_in_framework is the framework's prediction: eager in PyTorch, a tf.function in "
        "TensorFlow.",
        f"Ranges of activations come from {CALIBRATION} images of the training split. Accuracy is "
        "of the files of models trained in float32, one per seed; for the teacher "
        f"({teacher.TASK.name}, trained once) it is of one file per row.",
        "fx_int8 is torch.ao.quantization, which PyTorch has deprecated in favour of "
        "static_int8: modules in memory, in eager mode, without a file.",
        "Size is that of the deployed file.",
    ),
    counts=True,
)


def prepare(impl, work: Work) -> Prepared:
    """The framework's own step and predictions, or those of a file that a runtime has loaded."""
    row = plain(impl, work)
    if not work.settings:
        return row
    need_cpu(impl)
    if work.settings["apply"] in UNSUPPORTED["tf"]:
        return _in_memory(impl, work, row)
    read = kit_module(impl, "int8_files").load_int8
    if work.settings["runtime"] == ONNX:
        read = impl.compression.post_training_quantization.load_onnxruntime
    return replace(
        row,
        write=partial(_write, impl, work, row.model),
        read=read,
        train=train_plain(impl, row.model),
    )


def _in_memory(impl, work: Work, row: Prepared) -> Prepared:
    """A row without a file: its model is quantized where it is, once it is trained."""
    calibration, _ = impl.kit.data.to_device(*examples(work, CALIBRATION))

    def quantized():
        technique = impl.compression.post_training_quantization
        model = getattr(technique, work.settings["apply"])(row.model, calibration)
        return impl.kit.training.make_predict(model)

    def train(stages):
        train_plain(impl, row.model)(stages)
        return quantized()

    return replace(row, predict=quantized(), train=train)


def _write(impl, work: Work, model, path: Path) -> None:
    """The row's file of `model`."""
    calibration, _ = impl.kit.data.to_device(*examples(work, CALIBRATION))
    technique, files = impl.compression.post_training_quantization, kit_module(impl, "int8_files")
    if not work.settings["apply"]:
        files.keep_float32(model, calibration, path)
    elif work.settings["runtime"] == ONNX:
        getattr(technique, work.settings["apply"])(model, calibration, path)
    else:
        quantized = getattr(technique, work.settings["apply"])(model, calibration)
        files.save_int8(quantized, model, calibration, path)


def _of_teacher(impl, work: Work, read: Callable) -> dict[str, dict]:
    """The accuracy in percent that trained weights, the teacher's, have in the row's file."""
    trained = impl.kit.models.build(teacher.TASK.model, teacher.load().weights)
    path = work.folder / "teacher"
    _write(impl, work, trained, path)
    predict = read(path)
    x, y = impl.kit.data.to_device(*datasets.load(Path(work.data), "test"))
    batch = even_batch(len(x))
    value = impl.kit.training.evaluate(predict, x, y, metric=work.task.metric, batch_size=batch)
    return {"accuracy_of_teacher": {"value": value, "unit": "%"}}


def took_effect(impl, work: Work, prepared: Prepared, batch) -> tuple[dict, str | None]:
    """Each layer of a static int8 row ran over integers, some of a dynamic one, none of fp32."""
    if not work.settings:
        return {}, None
    path, x = prepared.artifact, batch[0]
    if work.settings["runtime"] == ONNX:
        ran = operators.onnx_integer_layers(path, *map(np.asarray, leaves(x)))
    else:
        integers = kit_module(impl, "integers")
        ran = integers.integer_operators(prepared.predict, path, x)
    evidence = {"int8_operators": ran}
    if prepared.artifact:
        evidence["threads"] = prepared.predict.threads
    if impl.__name__ == "tf_impl" and work.settings["runtime"] != ONNX:
        evidence["xnnpack_runs_all"] = operators.litert_delegated(path)
        if not evidence["xnnpack_runs_all"]:
            return evidence, "LiteRT's own kernels run some of it, not XNNPACK's"
    if work.task is teacher.TASK and prepared.artifact:
        evidence["measured"] = _of_teacher(impl, work, prepared.read)
    layers = sum(number for name, number in ran.items() if KERNELS.search(name))
    kernels = sum(name.endswith(".kernel") for name in work.weights)
    if "int8" not in work.variant:
        return evidence, f"{layers} layers ran over integers" if ran else None
    if work.variant == "dynamic_int8" or work.task.model.from_file:
        return evidence, None if layers else "no layer ran over integers"
    reason = None if layers == kernels else f"{layers} of {kernels} layers ran over integers"
    return evidence, reason
