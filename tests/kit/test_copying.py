"""A copy of a model has all of its state and shares none; so has an optimizer made for a copy."""

from __future__ import annotations

import re

import numpy as np
import pytest

FRAMEWORKS = ("pt", "tf", "tf_keras")
PT, KERAS = pytest.mark.only("pt"), pytest.mark.only("tf", "tf_keras")
KERAS_3 = pytest.mark.only("tf")

MODELS_OF_PT = ("without_example", "by_a_tuple", "by_names", "with_extra_state")
MODELS_OF_KERAS = (
    "normalization",
    "vocabulary",
    "buckets",
    "dicts",
    "nested",
    "recurrent",
    "silenced",
    "late",
    "task",
    "tied",
    "attending",
    "subclassed",
)
MADE = [pytest.param(name, marks=PT) for name in MODELS_OF_PT]
MADE += [pytest.param(name, marks=KERAS) for name in MODELS_OF_KERAS]
MADE += [pytest.param(name, marks=KERAS_3) for name in ("sound", "draws")]


@pytest.mark.parametrize("name", MADE)
def test_a_copy_has_all_state_and_shares_none(kit, models, name):
    model, example, x = getattr(models, name)()
    before, ours = models.state(model), models.tensors(model)
    copy = kit.copying.copy_model(model, example)
    assert all(map(np.array_equal, before, models.state(model)))
    theirs = models.tensors(copy)
    assert not ours & theirs
    assert len(ours) == len(theirs)
    assert models.traits(model) == models.traits(copy)
    outputs = [models.outputs(one, x) for one in (model, copy)]
    assert all(np.ptp(output) > 0 for output in outputs[0])
    for pair in zip(*outputs, strict=True):
        np.testing.assert_allclose(*pair, atol=1e-6)


REFUSALS = [
    pytest.param(call, message, marks=mark)
    for call, message, mark in (
        (lambda c, m: c(m.masked()), "Python cannot copy the model: Only Tensors", PT),
        (lambda c, m: c(m.Hides(), m.X), "the copy computes something else", PT),
        (lambda c, m: c(m.dense(), m.X[:, :2]), "does not take the example input", PT),
        (lambda c, m: c(m.Scaled(3)), "the model has no variables yet", KERAS),
        (lambda c, m: c(m.subclassed()[0]), "pass an example input x", KERAS),
        (lambda c, m: c(m.subclassed()[0], m.X[:, :2]), "does not take the example", KERAS),
        (
            lambda c, m: c(m.subclassed(m.Forgets)[0], m.X),
            "Keras cannot rebuild the model: ",
            KERAS,
        ),
        (lambda c, m: c(m.moving(), m.X), "Keras rebuilds another model than", KERAS),
    )
]


@pytest.mark.parametrize(("call", "message"), REFUSALS)
def test_what_cannot_be_copied_is_refused(kit, models, call, message):
    with pytest.raises((ValueError, NotImplementedError), match=re.escape(message)) as caught:
        call(kit.copying.copy_model, models)
    assert "\n" not in str(caught.value)


@KERAS_3
def test_a_copy_has_what_clone_model_loses(kit, models):
    """What `Normalization` adapted, and the seeds of dropout."""
    model, *_ = models.normalization()
    bare = models.cloned(model)
    ours, theirs = (models.outputs(one, models.X)[0] for one in (model, bare))
    assert abs(ours - theirs).max() > 0.1 * abs(ours).max()
    copy = kit.copying.copy_model(model)
    assert np.allclose(model(models.X, training=True), copy(models.X, training=True))


@KERAS
def test_inputs_by_name_have_the_dtypes_of_the_inputs_of_these_names(kit, models):
    model, right, wrong = models.named_inputs()
    kit.tracing.check_example_inputs(model, right)
    with pytest.raises(ValueError, match="it takes int32, float32"):
        kit.tracing.check_example_inputs(model, wrong)


@PT
def test_complex_outputs_are_compared_in_both_of_their_parts(models):
    one, other, nan = (models.complex_of(v) for v in (1j, 2j, 1j * float("nan")))
    assert models.comparing.apart(one, other) > 0.1
    assert models.comparing.apart(nan, nan) == models.comparing.apart(one, one) == 0.0


@PT
def test_an_extra_state_is_no_weight(kit, models):
    model, other = models.Counting(4, 2), models.Counting(4, 2)
    other.steps = 5
    weights = kit.user_model.export_weights(model)
    assert weights.keys() == {"weight", "bias"}
    kit.user_model.import_weights(other, weights)
    assert other.steps == kit.copying.copy_model(other).steps == 5
    assert all(map(np.array_equal, models.state(other), models.state(model)))


# A file's optimizer ------------------------------------------------------------------------------


@PT
@pytest.mark.parametrize("foreach", [None, True])
def test_a_files_optimizer_trains_the_same_fused(kit, models, foreach):
    file = kit.user_model.UserModel(lambda: models.fine_tuned(momentum=0.9, foreach=foreach))
    usual, _ = models.updated(file, file.optimizer)
    fused, ran = models.updated(file, file.fused_optimizer)
    for pair in zip(usual, fused, strict=True):
        np.testing.assert_allclose(*pair, rtol=1e-5, atol=1e-6)
    assert any("_fused_sgd" in name for name in ran)


@PT
def test_a_files_optimizer_is_made_again_for_a_copy(kit, models):
    file = kit.user_model.UserModel(models.fine_tuned)
    copy = kit.copying.copy_model(file.build(None))
    groups = file.optimizer(copy, models.SGD).param_groups
    assert [group["lr"] for group in groups] == [0.2, 0.1]
    for group, layer in zip(groups, (copy[2], copy[1]), strict=True):
        assert [*map(id, group["params"])] == [*map(id, layer.parameters())]
    with pytest.raises(NotImplementedError, match="has parameters that the model has not"):
        file.optimizer(models.dense(), models.SGD)


@KERAS
@pytest.mark.parametrize("way", ["by name", "by variable"])
def test_a_files_optimizer_leaves_out_of_its_decay_what_it_was_told(kit, models, way):
    """Keras does not keep that in an optimizer's configuration."""
    file = kit.user_model.UserModel(lambda: models.undecayed(way))
    model = file.build()
    models.apply(file.optimizer(model, models.SGD), model, 0.0)
    assert [float(value.mean()) for value in models.state(model)] == pytest.approx([0.95, 1.0])
    if way == "by variable":
        with pytest.raises(NotImplementedError, match="exclude_from_weight_decay: "):
            file.optimizer(models.undecayed(way)[0], models.SGD)


@KERAS
def test_a_files_optimizer_keeps_a_schedule_without_a_configuration(kit, models):
    file = kit.user_model.UserModel(models.scheduled)
    model = file.build()
    optimizer = file.optimizer(model, models.SGD)
    for _ in "ab":
        models.apply(optimizer, model, 1.0)
    assert float(models.state(model)[0][0, 0]) == 0.25
    assert isinstance(file._last._learning_rate, models.Halved)
