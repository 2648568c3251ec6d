"""Accuracy-aware quantization: int8 with a planted outlier, and with the layers in float it asks.

The outlier is planted after training: one channel of a convolution is 256 times larger, and what
reads it divides by as much. In float the model is the same, bit for bit.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from bench.compression.bench_post_training_quantization import KERNELS, ONNX
from bench.harness.examples import examples
from bench.harness.helpers import need_cpu, plain
from bench.harness.plan import OWN_RUNTIMES, Prepared, Price, Technique, Variant, Work, Workload
from bench.harness.stages import train_plain
from shared import operators
from shared.layer_search import LayerSearch, distance, plant_outlier

# Fixed before the benchmark was measured, as are the cases and the seeds. The factor was chosen
# among 1, 16 and 256 on an untrained model: at 16 integers lost nothing.
OUTLIER = {"layer": "conv1", "reader": "conv2", "factor": 256.0}
CALIBRATION, JUDGED = 256, 256  # samples of the training split: the first, and those after them
MOST = 0.1  # relative L2 of outputs that a search allows, that of exports in int8
SAME = 1e-5  # relative: what the outlier does to predictions in float
EVIDENCE = "search.json"  # beside the file that a row writes


def _row(name: str, title: str, runtime: str = "own", *, searches: bool = True, **more) -> Variant:
    settings = {"runtime": runtime, "searches": searches}
    price = Price(calibration=True)
    runtimes = OWN_RUNTIMES if runtime == "own" else {}
    given = {"changes": "math", "loss_tolerance": 0.5, "price": price, "runtimes": runtimes}
    return Variant(name, settings, title=title, **given, **more)


TECHNIQUE = Technique(
    family="compression",
    effort="ordinary",
    name="accuracy_aware_quantization",
    title="Accuracy-aware int8: the layers that lose too much stay in float",
    user_model="its outlier is planted in a model of the suite; its function takes any model",
    variants=(
        Variant("fp32", role="baseline", title="float32", runtimes=OWN_RUNTIMES),
        _row("all_int8", "int8 in every layer", searches=False),
        _row("accuracy_aware", "int8, sensitive layers in float"),
        _row("onnxruntime_all_int8", "int8 in ONNX Runtime", ONNX, searches=False),
        _row(
            "onnxruntime_accuracy_aware",
            "the same with layers in float",
            ONNX,
            against="onnxruntime_all_int8",
        ),
    ),
    workloads=(Workload("digits-cnn", "compute", mode="predict", accuracy=True, training=2.0),),
    differs_by_design=(
        "torchao rounds a layer's inputs; LiteRT and ONNX Runtime also round its outputs. So the "
        "search keeps the layer that reads the outlier in float in PyTorch's runtime, and also "
        "the one that makes it in the other two.",
        "The frameworks keep different layers in float and use different runtimes: their losses "
        "count as equal work within a half.",
    ),
    notes=(
        f"The planted channel is {OUTLIER['factor']:g} times larger after {OUTLIER['layer']}, and "
        f"{OUTLIER['reader']} divides by it. fp32 is the planted model in float32.",
        f"Ranges come from {CALIBRATION} images of the training split. A search compares the "
        f"outputs for the {JUDGED} images after them: they may differ from float by {MOST:.0%}.",
        "Files count however large their error is, because the error is the result. "
        "post_training_quantization refuses files with an error above a half.",
        "onnxruntime_accuracy_aware is compared with int8 in every layer in ONNX Runtime, which "
        "shows the cost of layers in float. That row is compared with the float32 file of the "
        "framework's runtime: its loss of accuracy is of interest, not its ratio of times.",
    ),
)


def prepare(impl, work: Work) -> Prepared:
    """Predictions of the row's file of the planted model."""
    need_cpu(impl)
    row = plain(impl, work)
    read = _files(impl).load_int8
    if work.settings.get("runtime") == ONNX:
        read = impl.compression.post_training_quantization.load_onnxruntime
    return replace(
        row,
        write=partial(_write, impl, work, row.model),
        read=read,
        train=train_plain(impl, row.model),
    )


def _write(impl, work: Work, model, path: Path) -> None:
    """The row's file of the planted model, and what the search has seen beside it."""
    planted = _planted(impl, work, model)
    x, _ = impl.kit.data.to_device(*examples(work, CALIBRATION + JUDGED))
    calibration, judged = x[:CALIBRATION], x[CALIBRATION:]
    wanted = np.asarray(impl.kit.training.make_predict(planted)(judged))

    def error(predict: Callable) -> float:
        return distance(predict(judged), wanted)

    technique, settings = impl.compression.accuracy_aware_quantization, work.settings
    search: LayerSearch | None = None
    if not settings:
        _files(impl).keep_float32(planted, calibration, path)
    elif settings["runtime"] == ONNX:
        if settings["searches"]:
            search = technique.search_onnxruntime_int8(planted, calibration, error, most=MOST)
        _write_onnx(impl, planted, calibration, path, search.kept if search else ())
    elif settings["searches"]:
        quantized, search = technique.apply_accuracy_aware_int8(
            planted, calibration, error, most=MOST
        )
        _files(impl).save_as_it_is(quantized, path)
    else:
        quantization = impl.compression.post_training_quantization
        _files(impl).save_as_it_is(quantization.apply_static_int8(planted, calibration), path)
    if search:
        Path(path).with_name(EVIDENCE).write_text(json.dumps(search.as_json()))


def _write_onnx(impl, planted, calibration, path: Path, kept: tuple[int, ...]) -> None:
    """The file in int8, however far off: the function of the technique would refuse that."""
    from shared import onnx_quantization

    arrays = np.asarray(calibration)
    batches = [(arrays[start : start + 32],) for start in range(0, len(arrays), 32)]
    with TemporaryDirectory() as folder:
        whole = Path(folder) / "whole.onnx"
        quantization = impl.compression.post_training_quantization
        quantization.keep_onnxruntime_float32(planted, calibration, whole)
        onnx_quantization.quantize(whole, path, batches, keep_float=kept)


def _planted(impl, work: Work, model):
    """A copy of the model with the outlier."""
    weights = plant_outlier(impl.kit.models.export_weights(model), **OUTLIER)
    return impl.kit.models.build(work.task.model, weights)


def _files(impl):
    return importlib.import_module(f"{impl.__name__}.kit.int8_files")


def took_effect(impl, work: Work, prepared: Prepared, batch) -> tuple[dict, str | None]:
    """In float the outlier changes nothing; a search keeps layers, and the others are integers."""
    x, path, make = batch[0], prepared.artifact, impl.kit.training.make_predict
    plainly = np.asarray(make(prepared.model)(x))
    planted = np.asarray(make(_planted(impl, work, prepared.model))(x))
    evidence = {"planted_apart": distance(planted, plainly)}
    if not evidence["planted_apart"] < SAME:
        return evidence, "the outlier changes what the model gives in float"
    if not work.settings:
        return evidence, None
    evidence["error"] = distance(prepared.predict(x), planted)
    kernels = sum(name.endswith(".kernel") for name in work.weights)
    ran = _integer_layers(impl, work, prepared, x)
    kept = 0
    if work.settings["searches"]:
        search = json.loads(path.with_name(EVIDENCE).read_text())
        evidence |= search
        kept = len(search["kept_in_float"])
        if not kept:
            return evidence, "the search kept no layer in float"
        if not search["errors"][-1] <= MOST:
            return evidence, "layers in float do not make the error small enough"
    evidence["integer_layers"] = ran
    reason = None if ran == kernels - kept else f"{ran} of {kernels} layers ran over integers"
    return evidence, reason


def _integer_layers(impl, work: Work, prepared: Prepared, x) -> int:
    """How many layers of the file run over integers."""
    if work.settings["runtime"] == ONNX:
        ran = operators.onnx_integer_layers(prepared.artifact, np.asarray(x))
    else:
        integers = importlib.import_module(f"{impl.__name__}.kit.integers")
        ran = integers.integer_operators(prepared.predict, prepared.artifact, x)
    return sum(number for name, number in ran.items() if KERNELS.search(name))
