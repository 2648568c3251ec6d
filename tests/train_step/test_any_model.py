"""Every train step is plain Keras code at its neutral setting, whatever the Keras model.

Keras 3 and tf_keras run in a process each (`any_model_worker.py`). More models of Keras 3 stand in
`tests/zoo`; here are those of which each step has to treat something in a way of its own. Weights
and statistics are compared by relative L2 per tensor, losses by their relative difference.
"""

from __future__ import annotations

import numpy as np
import pytest

from tests import workers

SIDES = ("tf", "tf_keras")
BAR = 1e-5
HALF_WIDTH = 0.02  # bfloat16 has 8 significant bits


@pytest.fixture(scope="module")
def evidence():
    """What each worker found: {"tf": {scenario: {model: difference or error}}, ...}."""
    return workers.run("train_step.any_model_worker", SIDES)


def too_far(found: dict, bar: float) -> dict:
    assert found
    return {name: by for name, by in found.items() if not (isinstance(by, float) and by < bar)}


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("scenario", ["kit_step", "xla", "xla_blocks"])
def test_the_step_is_the_plain_one(evidence, side, scenario):
    assert too_far(evidence[side][scenario], BAR) == {}


@pytest.mark.parametrize("scenario", ["eager", "xla_model", "float32", "recomputed"])
def test_with_keras_3_the_step_is_the_plain_one(evidence, scenario):
    assert too_far(evidence["tf"][scenario], BAR) == {}


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize(
    ("scenario", "kind"),
    [
        ("accumulated", "3"),
        ("clipped", "loosely"),
        ("clipped", "guarded"),
        ("clipped", "each"),
        ("stacked", "1"),
        ("stacked", "2"),
        ("stacked", "2 compiled"),
    ],
)
def test_neutral_settings_and_parts_are_the_plain_step(evidence, side, scenario, kind):
    """Slices of embeddings stay slices, and what the loss does not reach does not decay."""
    assert too_far(evidence[side][scenario][kind], BAR) == {}


def test_slices_reach_the_optimizer(evidence):
    found = evidence["tf"]["sparse"]
    assert found == {"accumulation": True, "clipping": True, "guard": True, "stacking": True}


def test_bfloat16_computes_nearly_the_same(evidence):
    found = evidence["tf"]["half_width"]
    assert too_far(found, HALF_WIDTH) == {}
    assert max(found.values()) > 1e-5


def test_half_width_models_add_their_own_losses_in_float32(evidence):
    found = evidence["tf"]["policies"]
    wrong = {
        name: by
        for name, by in found.items()
        if isinstance(by, str) or by[0] > HALF_WIDTH or by[1] != "float32"
    }
    assert wrong == {}
    assert len(found) == 8


def test_a_list_model_takes_the_tuples_of_a_pipeline(evidence):
    found = evidence["tf"]["from_a_pipeline"]
    assert found["type"] == "tuple"
    assert found["predicted"] < 1e-6
    first = found["losses"][0]
    assert found["losses"] == pytest.approx(len(found["losses"]) * [first], rel=HALF_WIDTH)
    assert len(found["losses"]) >= 5


def test_xla_draws_other_masks_of_the_same_share(evidence):
    found = {name: np.array(drawn) > 0 for name, drawn in evidence["tf"]["masks"].items()}
    assert np.array_equal(found["graph"], found["again"])
    assert 0.4 < (found["graph"] != found["xla"]).mean() < 0.6
    assert found["xla"].mean() == pytest.approx(0.5, abs=0.05)


@pytest.mark.parametrize("side", SIDES)
def test_fit_by_keras_own_means_is_the_step(evidence, side):
    """`global_clipnorm`, `clipnorm`, accumulation's steps and its mixin, policies, recomputing."""
    found = dict(evidence[side]["in_fit"])
    assert found.pop("clip matters") > 0.01
    own, accumulated = found.pop("losses of fit", (1.0, 1.0))  # Keras 3's
    assert accumulated == pytest.approx(own, rel=1e-6)
    assert too_far(found, BAR) == {}
    assert len(found) == (7 if side == "tf" else 2)


def test_stacking_clips_the_unscaled_gradients(evidence):
    for dtype, moved in evidence["tf"]["settings"]["moved"].items():
        assert moved == pytest.approx(0.01, rel=0.01), dtype


@pytest.mark.parametrize("side", SIDES)
def test_blocks_are_compiled_each(evidence, side):
    found = evidence[side]["settings"]
    assert found["compiled"] >= 4  # at least two layers, forward and backward
    assert 2 * found["replaced"] == found["compiled"]
    for name in ("block", "predict"):
        assert found[name].startswith("ValueError: blocks: the model has no layer 'blok'; it has")


@pytest.mark.parametrize("side", SIDES)
def test_what_xla_would_lose_is_refused(evidence, side):
    found = evidence[side]["settings"]
    for said in found.get("legacy", ()):  # of tf_keras
        assert said.startswith("NotImplementedError: a legacy optimizer: take the one of its name")
    assert "'inner' gives a mask, which XLA's program would keep" in found["mask"]
    for error, unchanged in found["loop"]:
        assert error.startswith("NotImplementedError: the model has a loop (an LSTM or GRU")
        assert "\n" not in error
        assert unchanged
