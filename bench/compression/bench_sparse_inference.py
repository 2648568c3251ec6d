"""What does sparsity buy? Predictions of a transformer whose dense layers are pruned."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from bench.compression import bench_pruning
from bench.harness.examples import examples
from bench.harness.helpers import kit_module, plain
from bench.harness.plan import Prepared, Technique, Variant, Work, Workload, row
from bench.harness.sizes import model_size
from shared.layer_search import distance
from shared.specs import GPTSpec, parameter_shapes

NO_FILE = "PyTorch has no file with sparse kernels: its exporters refuse CSR tensors"
SAME = 1e-4  # relative L2: predictions of sparse and of dense kernels, the task's parity


def _row(name: str, title: str, percent: int, effort: str, **settings) -> Variant:
    name, title = f"{name}_{percent}", title.format(f"{percent}%")
    return row(name, title, effort, changes="weights", sparsity=percent / 100, **settings)


def _masked(percent: int, effort: str) -> Variant:
    return _row("masked", "{} zeros in dense tensors", percent, effort)


def _csr(percent: int, effort: str) -> Variant:
    return _row("csr", "CSR kernels, {} zeros", percent, effort, min_sparsity=percent / 100 - 0.01)


def _file(percent: int, effort: str) -> Variant:
    return _row("sparse_file", "LiteRT, {} zeros, sparse", percent, effort, file="sparse")


def _structured(percent: int, effort: str) -> Variant:
    return _row("structured", "dense, {} fewer weights", percent, effort, narrower=True)


TECHNIQUE = Technique(
    family="compression",
    name="sparse_inference",
    effort="ordinary",
    title="Sparse inference: what do zeros buy?",
    # Weights that nobody trained are timed: what keeps accuracy is trained as pruning's rows.
    price=bench_pruning.TECHNIQUE.price,
    variants=(
        Variant("dense", role="baseline", title="dense", program="plain"),
        _csr(90, "default"),
        _structured(90, "default"),
        _masked(90, "ordinary"),
        _csr(50, "ordinary"),
        _file(90, "ordinary"),
        _file(50, "ordinary"),
        _row(
            "dense_file",
            "LiteRT, {} zeros, dense",
            90,
            "ordinary",
            frameworks=("tf",),
            file="dense",
        ),
        _csr(80, "full"),
        _csr(95, "full"),
        _masked(50, "full"),
        _masked(80, "full"),
        _masked(95, "full"),
        _file(80, "full"),
        _file(95, "full"),
        _structured(50, "full"),
        _structured(80, "full"),
        _structured(95, "full"),
    ),
    workloads=(
        Workload("text-gpt-wide", "small", mode="predict"),
        Workload("text-gpt-wide", "compute", effort="full", mode="predict"),
    ),
    differs_by_design=(
        "PyTorch multiplies CSR matrices with MKL, TensorFlow with its operator. In TensorFlow "
        "the dense kernels stay in memory, as variables of the model.",
        "Only LiteRT has files with sparse kernels: sparse_file is UNSUPPORTED in PyTorch.",
    ),
    notes=(
        "masked: this share of each dense kernel, the smallest weights, are zeros in a dense "
        "tensor. csr: the same weights as CSR matrices. The proof has the bytes of both. "
        "structured: a dense transformer with fewer channels and as many weights left.",
        "sparse_file is a LiteRT file whose kernels store only nonzero weights; dense_file has "
        "the same weights with their zeros. Both run in LiteRT, and size on disk is theirs. "
        "Their ratios are to TensorFlow's dense prediction, so they mostly show the runtime. "
        "What zeros gain in LiteRT is sparse_file over dense_file.",
        "Weights are initial ones, because speed does not depend on them. What pruning and "
        "removed channels do to accuracy is measured under pruning and structured pruning.",
    ),
    counts=True,
)


def prepare(impl, work: Work) -> Prepared:
    """Dense or sparse predictions over pruned weights; the step is the baseline's."""
    settings = dict(work.settings)
    sparsity, kind = settings.pop("sparsity", 0.0), settings.pop("file", None)
    if kind and impl.__name__ == "pt_impl":
        raise NotImplementedError(NO_FILE)
    spec = work.task.model
    if settings.pop("narrower", False):
        spec = narrower(spec, sparsity)
        weights = {
            name: work.weights[name][tuple(map(slice, shape))]
            for name, shape in parameter_shapes(spec).items()
        }
    else:
        weights = {name: pruned(name, value, sparsity) for name, value in work.weights.items()}
    model = impl.kit.models.build(spec, weights)
    row = plain(impl, work, model)
    impl.kit.runtime.to_evaluation(model)
    if settings:
        predict = impl.compression.sparse_inference.make_predict(model, **settings)
        row = replace(row, predict=predict)
    if not kind:
        return row

    files = kit_module(impl, "sparse_files")

    def write(path):
        x, _ = impl.kit.data.to_device(*examples(work, 2))
        files.export_file(model, x, path, sparse=kind == "sparse")

    return replace(row, write=write, read=files.load_file)


def narrower(spec: GPTSpec, share: float) -> GPTSpec:
    """The transformer of fewer channels whose kernels lack `share` of the weights.

    Kernels shrink with the square of the width, which is a multiple of the number of heads.
    """
    channels = spec.width * math.sqrt(1 - share) / spec.heads
    return replace(spec, width=spec.heads * round(channels))


def pruned(name: str, value: np.ndarray, sparsity: float) -> np.ndarray:
    """The weights, with the smallest of a dense kernel zero."""
    count = round(sparsity * value.size)
    if not name.endswith(".kernel") or not count:
        return value
    order = np.argsort(np.abs(value), axis=None, kind="stable")
    less = value.copy()
    less.flat[order[:count]] = 0.0
    return less


def took_effect(impl, work: Work, prepared: Prepared, batch) -> tuple[dict, str | None]:
    """Kernels have their zeros; sparse ones predict what dense ones do and hold fewer values."""
    weights = impl.kit.models.export_weights(prepared.model)
    kernels = [value for name, value in weights.items() if name.endswith(".kernel")]
    size = sum(kernel.size for kernel in kernels)
    if work.settings.get("narrower"):
        return _judge_narrower(work, weights, size)
    zeros = 1.0 - sum(int(np.count_nonzero(kernel)) for kernel in kernels) / size
    evidence = {"zeros": zeros, "kernel_bytes": sum(kernel.nbytes for kernel in kernels)}
    wanted = work.settings.get("sparsity", 0.0)
    if abs(zeros - wanted) > 1e-3:
        return evidence, f"{zeros:.1%} of the kernels are zeros, not {wanted:.0%}"
    if "min_sparsity" in work.settings:
        layers = prepared.predict.layers
        evidence["kernel_bytes"] = sum(sparse for _, sparse in layers.values())
        sparse, wanted = len(layers), len(kernels)
    elif kind := work.settings.get("file"):
        sparse, wanted = prepared.predict.sparse, len(kernels) if kind == "sparse" else 0
    else:
        return evidence, None
    dense = impl.kit.training.make_predict(prepared.model)
    apart = distance(prepared.predict(batch[0]), dense(batch[0]))
    evidence["apart_from_dense"] = apart
    if sparse != wanted:
        return evidence, f"{sparse} kernels are sparse, not {wanted}"
    return evidence, None if apart < SAME else f"predictions differ by {apart:.1e}"


def _judge_narrower(work: Work, weights: dict, size: int) -> tuple[dict, str | None]:
    whole = sum(value.size for name, value in work.weights.items() if name.endswith(".kernel"))
    spec, removed = narrower(work.task.model, work.settings["sparsity"]), 1 - size / whole
    evidence = {"width": spec.width, "measured": model_size(spec, weights), "removed": removed}
    if abs(removed - work.settings["sparsity"]) < 0.01:
        return evidence, None
    return evidence, f"{removed:.1%} of the weights are gone"
