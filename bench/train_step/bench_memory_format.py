"""Memory format: images as channels_last or channels_first, in training and prediction."""

from __future__ import annotations

from dataclasses import replace

from bench.harness.helpers import kit_module, plain
from bench.harness.plan import (
    TRAIN_STEP,
    Prepared,
    Technique,
    UserModel,
    Variant,
    Work,
    Workload,
    row,
)

DEFAULTS = {"pt_impl": "channels_first", "tf_impl": "channels_last"}

CHANNELS_LAST = {"memory_format": "channels_last"}

TECHNIQUE = Technique(
    family="train_step",
    name="memory_format",
    title="Memory format of images",
    remedies=("arithmetic", "memory bandwidth"),
    user_model=UserModel(TRAIN_STEP, ("default", "channels_last")),
    variants=(
        Variant("default", role="baseline", title="the framework's own format", program="plain"),
        Variant(
            "channels_last", CHANNELS_LAST, title="channels_last (NHWC)", stacking=CHANNELS_LAST
        ),
        row("channels_first", "channels_first (NCHW)", "ordinary", memory_format="channels_first"),
    ),
    workloads=(
        Workload("photos-resnet18", "compute"),
        Workload("digits-cnn", "compute", effort="ordinary"),
        Workload("digits-cnn", "compute", effort="ordinary", mode="predict"),
        Workload("photos-resnet18", "compute", effort="ordinary", mode="predict"),
        Workload("digits-resnet20", "compute", effort="full"),
        Workload("digits-resnet20", "compute", effort="full", mode="predict"),
    ),
    differs_by_design=(
        "default is channels_first (NCHW) in PyTorch and channels_last (NHWC) in TensorFlow. "
        "Both frameworks read the same format in the rows channels_last, and in channels_first.",
        "PyTorch converts a model in place, and a tensor keeps its shape. Keras rebuilds the "
        "model, and the batch is transposed.",
    ),
    notes=(
        "In each framework one row is its default set by the technique: channels_last in "
        "TensorFlow, channels_first in PyTorch. Its ratio to the baseline should be 1.",
        "A batch comes in the framework's default format and is converted within the timed step, "
        "as in a training loop. A loader that makes the format saves that.",
        "TensorFlow's CPU kernels support only channels_last, oneDNN's both: channels_first is "
        "UNSUPPORTED if TensorFlow does not use oneDNN.",
    ),
)


def prepare(impl, work: Work) -> Prepared:
    """The baseline's step and prediction, over a converted model and converted batches."""
    model = impl.kit.models.build(work.task.model, work.weights)
    if work.settings:
        model = impl.train_step.memory_format.apply_memory_format(model, **work.settings)
    row = plain(impl, work, model)
    if not work.settings:
        return row
    step, predict = row.step, row.predict
    convert = impl.train_step.memory_format.convert_batch

    def converting_step(x, y):
        return step(convert(x, **work.settings), y)

    def converting_predict(x):
        return predict(convert(x, **work.settings))

    return replace(row, step=converting_step, predict=converting_predict)


def took_effect(impl, work: Work, prepared: Prepared, batch) -> tuple[dict, str | None]:
    """Convolutions read and wrote (PyTorch) or ran (TensorFlow) in the format alone."""

    def call():
        return prepared.predict(batch[0]) if work.mode == "predict" else prepared.step(*batch)

    operators = kit_module(impl, "operators")
    formats = operators.convolution_formats(prepared.model, call)
    wanted = work.settings.get("memory_format", DEFAULTS[impl.__name__])
    # On a GPU grappler decides; what it decided stands in the evidence.
    free = impl.__name__ == "tf_impl" and not impl.kit.runtime.device().startswith("CPU")
    as_it_is = work.task.model.from_file and not work.settings
    if set(formats) == {wanted} or (free and formats) or as_it_is:
        return {"convolution_formats": formats}, None
    seen = ", ".join(sorted(formats)) or "no format"
    return {"convolution_formats": formats}, f"convolutions ran in {seen}, not in {wanted} alone"
