"""Frozen inference: predictions with weights as constants, compiled whole and by blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from bench.harness.examples import examples
from bench.harness.helpers import kit_module, plain
from bench.harness.plan import Measure, Prepared, Price, Technique, Variant, Work, Workload
from shared.layer_search import distance
from shared.user_model import arrays

UNSUPPORTED = {
    "tf": {
        "fuse_conv_bn": "Keras has no pass for it: grappler does it in a graph with constants, see"
        " frozen_predict",
        "save_cache": "XLA's cache is a folder named in TF_XLA_FLAGS: there is no call",
        "load_cache": "XLA's cache is a folder named in TF_XLA_FLAGS: there is no call",
    }
}
SAME = 1e-4  # relative L2 of predictions: kernels round otherwise
TWICE = 2.0  # what weights are multiplied by, to see that a frozen model does not
IMAGES = Measure(tasks=("photos-resnet18", "digits-cnn"))
BLOCKED = Measure(tasks=("text-gpt-deep",))  # twelve blocks alike
BLOCKS = {"pt": "block*", "tf": "block*.attention"}  # by framework, of text-gpt-deep


def _row(name: str, title: str, *, price: Price | None = None, **fields) -> Variant:
    return Variant(name, {"way": name}, title=title, price=price, **fields)


def _both(name: str, title: str) -> tuple[Variant, ...]:
    """A row that needs a C++ compiler in PyTorch alone."""
    return (
        _row(name, title, frameworks=("pt",), requires="compiler", measured=BLOCKED),
        _row(name, title, frameworks=("tf",), price=Price(compiled=True), measured=BLOCKED),
    )


TECHNIQUE = Technique(
    family="deployment",
    name="frozen_inference",
    effort="ordinary",
    title="Frozen inference: constants, BatchNorm in its convolution, compiled blocks, a cache",
    user_model="native_export compiles a user's model with frozen weights in place",
    composed_of=("train_step.compilation",),
    variants=(
        Variant("baseline", role="baseline", title="the framework in place", program="plain"),
        _row("fused", "BatchNorm folded", frameworks=("pt",), measured=IMAGES),
        _row(
            "frozen",
            "constants, compiled",
            frameworks=("pt",),
            requires="compiler",
            measured=IMAGES,
        ),
        _row("frozen", "constants, grappler", frameworks=("tf",), measured=IMAGES),
        _row(
            "carried",
            "constants, cache carried",
            frameworks=("pt",),
            requires="compiler",
            measured=IMAGES,
        ),
        *_both("compiled", "compiled as a whole"),
        *_both("blocks", "compiled by blocks"),
    ),
    workloads=(
        Workload("digits-cnn", "single", mode="predict"),
        Workload("photos-resnet18", "single", mode="predict"),
        Workload("text-gpt-deep", "small", mode="predict"),
    ),
    differs_by_design=(
        "Constants are compiled by TorchInductor (freezing) in PyTorch, and folded by grappler "
        "in TensorFlow, which compiles nothing.",
        "A block is a transformer block in PyTorch, compiled once for all blocks. In TensorFlow "
        "it is the attention layer in it, with one XLA program each.",
    ),
    notes=(
        "The first call of each row is in a new process with empty caches. carried first loads "
        "the file that another process has saved.",
        "Weights are initial ones: neither time nor evidence depends on them.",
    ),
)


def prepare(impl, work: Work) -> Prepared:
    """The row's predictions."""
    row = plain(impl, work)
    way = work.settings.get("way")
    if way is None:
        return row
    if way == "carried":
        return replace(row, write=partial(_write, impl, work, row), read=partial(_read, impl, row))
    return replace(row, predict=_predict(impl, way, row.model))


def _predict(impl, way: str, model) -> Callable:
    if way == "fused":
        fused = impl.deployment.frozen_inference.fuse_conv_bn(model)
        return impl.kit.training.make_predict(fused)
    if way == "frozen":
        return impl.deployment.frozen_inference.frozen_predict(model)
    blocks = BLOCKS[impl.__name__[:2]] if way == "blocks" else ""
    return impl.train_step.compilation.compiled_predict(model, blocks=blocks)


def _write(impl, work: Work, row: Prepared, path: Path) -> None:
    """The cache of what this process has compiled for the row's first batch."""
    batch = examples(work, work.batch_size)
    x, _ = impl.kit.data.to_device(*batch)
    impl.deployment.frozen_inference.frozen_predict(row.model)(x)
    impl.deployment.frozen_inference.save_cache(path)


def _read(impl, row: Prepared, path: Path) -> Callable:
    impl.deployment.frozen_inference.load_cache(path)
    return impl.deployment.frozen_inference.frozen_predict(row.model)


def took_effect(impl, work: Work, prepared: Prepared, batch) -> tuple[dict, str | None]:
    """Predictions are the model's; what is folded is gone; what is frozen does not move."""
    way, x, models = work.settings.get("way"), batch[0], impl.kit.models
    if way is None:
        return {}, None
    wanted, given = (
        arrays(predict(x)) for predict in (plain(impl, work).predict, prepared.predict)
    )
    evidence = {"apart": distance(given, wanted)}
    if not evidence["apart"] < SAME:
        return evidence, "its predictions are others than the model's"
    if way == "fused":
        fused = models.export_weights(impl.deployment.frozen_inference.fuse_conv_bn(prepared.model))
        evidence["batch_norms"] = sum(name.endswith(".mean") for name in fused)
        before = sum(name.endswith(".mean") for name in work.weights)
        gone = before > 0 == evidence["batch_norms"]
        return evidence, None if gone else "a BatchNorm is left, or there was none"
    if way in ("frozen", "carried"):
        models.import_weights(
            prepared.model, {name: TWICE * value for name, value in work.weights.items()}
        )
        evidence["moved"] = distance(arrays(prepared.predict(x)), given)
        if evidence["moved"]:
            return evidence, "predictions follow weights that are changed later"
    if way == "carried":
        hits = kit_module(impl, "checks.frozen_inference").cache_hits()
        return evidence | {"cache_hits": hits}, None if hits else "nothing of the cache was found"
    if way in ("compiled", "blocks"):
        ran = kit_module(impl, "operators").executed_graphs(prepared.predict, x)
        evidence["compiled"] = ran["compiled"]
        return evidence, None if ran["compiled"] else "nothing compiled ran"
    return evidence, None
