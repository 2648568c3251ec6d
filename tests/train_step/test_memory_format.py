"""Images really are read in the format asked for, with the same results, and bad input is refused.

TensorFlow's own CPU kernels may refuse channels_first, so that XLA runs it here.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from unittest import mock

import pytest

from shared.specs import TASKS, layers
from shared.weights import init_weights
from tests import workers
from tests.frameworks import apart
from tests.train_step import steps

FRAMEWORKS = ("pt", *workers.keras())
PT, TF = pytest.mark.only("pt"), pytest.mark.only("tf", "tf_keras")
CNN = TASKS["digits-cnn"].model
# A block of each kind: the others are the same layers.
RESNET = replace(TASKS["digits-resnet20"].model, blocks_per_stage=1)
FIRST, LAST = "channels_first", "channels_last"


@pytest.fixture(scope="module")
def prepare(kit, technique):
    """`prepare(spec, format)`: a model, its converting step and prediction."""

    def prepare(spec, memory_format=None):
        model, convert = kit.models.build(spec, init_weights(spec, seed=1)), lambda x: x
        if memory_format:
            model = technique.apply_memory_format(model, memory_format=memory_format)
            convert = partial(technique.convert_batch, memory_format=memory_format)
        optimizer = kit.training.make_optimizer(model, steps.RECIPE)
        step = kit.training.make_train_step(model, optimizer, kit.training.cross_entropy)
        predict = kit.training.make_predict(model)
        return SimpleNamespace(
            model=model,
            step=lambda x, y: step(convert(x), y),
            predict=lambda x: predict(convert(x)),
        )

    return prepare


def test_formats_train_alike(kit, models, prepare, agrees):
    """The default one is the baseline to the last bit."""
    stream = steps.batches(kit, CNN, 5, 16)
    losses = {
        name: steps.losses_of(kit, prepare(CNN, name), stream)
        for name in (None, models.DEFAULT, LAST)
    }
    assert losses[models.DEFAULT] == losses[None]
    assert apart(losses[LAST], losses[None]) < TASKS["digits-cnn"].parity
    agrees("five steps", {"losses": losses[LAST]}, TASKS["digits-cnn"].parity)


@pytest.mark.parametrize(
    ("spec", "memory_format"),
    [
        pytest.param(CNN, None, id="plain"),
        pytest.param(CNN, FIRST, id=FIRST, marks=PT),
        pytest.param(CNN, LAST, id=LAST),
        pytest.param(RESNET, LAST, id="resnet"),
    ],
)
def test_every_convolution_runs_in_the_format(kit, models, prepare, spec, memory_format):
    prepared, ((x, y),) = prepare(spec, memory_format), steps.batches(kit, spec)
    seen = models.operators.convolution_formats
    training = seen(prepared.model, lambda: prepared.step(x, y))
    predicting = seen(prepared.model, lambda: prepared.predict(x))
    wanted = memory_format or models.DEFAULT
    assert set(training) == set(predicting) == {wanted}
    if wanted == LAST:
        counts = models.counts(len(layers(spec)) - 1)
        assert (training[LAST], predicting[LAST]) == counts


# PyTorch -----------------------------------------------------------------------------------------


@PT
def test_an_optimizer_from_before_goes_on(kit, technique):
    prepared = steps.prepare(kit, CNN)
    before = [id(parameter) for parameter in prepared.model.parameters()]
    assert technique.apply_memory_format(prepared.model) is prepared.model
    assert before == [id(parameter) for parameter in prepared.model.parameters()]
    for x, y in steps.batches(kit, CNN):
        prepared.step(technique.convert_batch(x), y)
    kernel = prepared.model.conv1.conv.weight
    state = prepared.optimizer.state[kernel]["momentum_buffer"]
    assert state.stride() == kernel.stride() != kernel.contiguous().stride()


@PT
def test_a_batch_of_one_channel_gets_the_strides(technique, models):
    torch = models.torch
    x = torch.arange(2.0 * 6 * 5).reshape(2, 1, 6, 5)
    last = technique.convert_batch(x)
    assert last.stride() == (30, 1, 5, 1)
    assert torch.equal(x, last)
    assert technique.convert_batch(last) is last
    tree = {"images": (last, [last]), "codes": torch.arange(6).reshape(2, 3)}
    back = technique.convert_batch(tree, memory_format=FIRST)
    assert back["images"][0].stride() == back["images"][1][0].stride() == (30, 30, 5, 1)
    assert back["codes"] is tree["codes"]


@PT
def test_a_custom_model_computes_the_same_and_keeps_its_buffers(technique, models):
    model, torch = models.Two(), models.torch
    x = torch.randn(4, 3, 8, 8), torch.randn(4, 3, 8, 8)
    before, names = model(*x)["logits"].detach(), list(model.state_dict())
    technique.apply_memory_format(model)
    x = technique.convert_batch(x)
    assert apart(model(*x)["logits"].detach(), before) < 1e-5
    seen = models.operators.convolution_formats(model, lambda: model(*x))
    assert seen == {LAST: 6}
    assert list(model.state_dict()) == names
    assert model.table.is_contiguous()
    assert not any(module._forward_hooks for module in model.modules())


@PT
def test_the_evidence_sees_an_operator_that_breaks_the_format(technique, models):
    model = technique.apply_memory_format(models.Reshaping())
    x = technique.convert_batch(models.torch.randn(2, 4, 8, 8))
    seen = models.operators.convolution_formats(model, lambda: model(x))
    assert seen == {FIRST: 1, LAST: 3}


# TensorFlow --------------------------------------------------------------------------------------


@TF
def test_channels_first_works_or_is_refused_in_the_words_of_tensorflow(kit, technique):
    """It works on a GPU, and on a CPU on which TensorFlow uses oneDNN."""
    model, settings = steps.prepare(kit, CNN).model, {"memory_format": FIRST}
    assert technique.apply_memory_format(model) is model
    said = workers.raised(technique.apply_memory_format, model, **settings)
    if said:
        assert kit.runtime.device() == "CPU:0"
        assert re.search("no training in channels_first here: The Conv2D op.*NHWC", said)
    else:
        copy = technique.apply_memory_format(model, **settings)
        ((x, _),) = steps.batches(kit, CNN)
        ours = kit.training.make_predict(copy)(technique.convert_batch(x, **settings))
        assert apart(ours, kit.training.make_predict(model)(x)) < 1e-5


@TF
@pytest.mark.parametrize(("start", "other"), [(LAST, FIRST), (FIRST, LAST)])
def test_a_rebuilt_model_computes_the_same(technique, models, start, other):
    """Losses, gradients and running statistics, of images and codes, in both directions."""
    model, results = models.network(start), []
    # The steps compare more; other tests show what its own comparison finds.
    with models.by_xla(), mock.patch.object(technique, "check_copy"):
        copy = technique.apply_memory_format(model, memory_format=other)
    images, codes, y = models.normal(6, 8, 10, 3), models.normal(6, 4), models.tf.range(6) % 3
    for one, memory_format in ((model, start), (copy, other)):
        x = technique.convert_batch([images, codes], memory_format=memory_format)
        results.append(models.one_step(one, x, y))
    assert len(results[0]) == 13
    assert max(apart(a, b) for a, b in zip(*results, strict=True)) < 1e-5
    assert (models.formats(model), models.formats(copy)) == ({start}, {other})
    assert [v.name for v in model.weights] == [v.name for v in copy.weights]
    assert not {id(v) for v in model.weights} & {id(v) for v in copy.weights}


@TF
@pytest.mark.parametrize(
    "kind",
    [
        *("adapted", "sequences", "by_a_lambda"),
        pytest.param("by_operators", marks=pytest.mark.only("tf")),
    ],
)
def test_copies_of_models_that_hold_more_than_images_compute_the_same(technique, models, kind):
    with models.by_xla():
        assert models.difference(technique, getattr(models, kind)()) < 1e-5


@TF
def test_a_sequential_model_is_rebuilt(technique, models):
    kinds = models.layers
    parts = [kinds.Conv2D(3, 3), kinds.BatchNormalization(), kinds.GlobalAveragePooling2D()]
    model = models.keras.Sequential([models.keras.Input((6, 8, 2)), *parts, kinds.Dense(2)])
    with models.by_xla():
        copy = technique.apply_memory_format(model, memory_format=FIRST)
    assert (copy.input_shape, copy.output_shape) == ((None, 2, 6, 8), (None, 2))


@TF
def test_a_copy_that_computes_something_else_is_refused(technique, models):
    lost = mock.patch.object(technique, "copy_state")
    said = "the copy's output differs by a relative "
    with models.by_xla(), lost, pytest.raises(NotImplementedError, match=said):
        technique.apply_memory_format(models.pixels(), memory_format=FIRST)


STRANGE = {"name": "strange"}
ORDER = "'strange' may depend on the order of the axes"
TF_REFUSALS = [
    (lambda m: m.subclassed(), "functional and Sequential models only"),
    (lambda m: m.over(m.layers.UnitNormalization(**STRANGE)), ORDER),
    (lambda m: m.over(m.layers.Conv2D(2, 1, activation="softmax", **STRANGE)), ORDER),
    (lambda m: m.over(m.layers.Reshape((72,), **STRANGE)), ORDER),
    (lambda m: m.over(m.layers.Dense(3, **STRANGE)), ORDER),
    (lambda m: m.over(m.layers.Rescaling([1.0, 2.0], **STRANGE)), ORDER),
    (lambda m: m.over(m.layers.BatchNormalization(axis=2, **STRANGE)), "'strange' works on axis 2"),
    (lambda m: m.over(m.layers.LayerNormalization((1, 3), **STRANGE)), "'strange' works on axis "),
    (lambda m: m.nested(), "may depend on the order of the axes"),
    (
        lambda m: m.over(m.layers.Conv2D(2, 1, data_format=FIRST)),
        "the model has layers of both formats",
    ),
    (lambda m: m.without_images(), "the model has no 2-D layer"),
    pytest.param(lambda m: m.by_operators(), "TFOpLambda", marks=pytest.mark.only("tf_keras")),
]


@TF
@pytest.mark.parametrize(("make", "message"), TF_REFUSALS)
def test_what_cannot_be_rebuilt_is_refused(technique, models, make, message):
    with (
        models.by_xla(),
        pytest.raises((ValueError, NotImplementedError), match=re.escape(message)),
    ):
        technique.apply_memory_format(make(models), memory_format=FIRST)


# Both --------------------------------------------------------------------------------------------

UNKNOWN = "unknown memory format "
REFUSALS = [
    (lambda t, m: t.apply_memory_format(m.dense(), memory_format="channels_lost"), UNKNOWN),
    (lambda t, m: t.convert_batch(None, memory_format="NHWC"), UNKNOWN),
    (lambda t, m: t.apply_memory_format(m.dense()), "the model has no "),
    pytest.param(
        lambda t, m: t.apply_memory_format(m.tabled()), "the model has no 4-D parameter", marks=PT
    ),
    pytest.param(
        lambda t, m: t.apply_memory_format(m.nn.Conv3d(2, 2, 3)),
        "torch has no channels_last for 5-D",
        marks=PT,
    ),
    pytest.param(
        lambda t, m: t.apply_memory_format(m.without_images()), "has no 2-D layer", marks=TF
    ),
]


@pytest.mark.parametrize(("call", "message"), REFUSALS)
def test_a_refusal_says_why(technique, models, call, message):
    with pytest.raises((ValueError, NotImplementedError), match=message):
        call(technique, models)
