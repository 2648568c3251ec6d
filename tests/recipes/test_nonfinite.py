"""The first that is not finite is named, and a checked step gives the weights back."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from tests import workers
from tests.compression.teaching import CNN, RECIPE, farthest, student_of, weights_of
from tests.recipes.samples import BATCH, arrays, same

FRAMEWORKS = ("pt", *workers.keras())
MODELS = "recipes"


@pytest.fixture
def find(technique, models):
    """`find(model, loss)`: the report's text, on eight samples of a clean dataset."""
    x, y = (part[:8] for part in arrays())

    def run(model, loss=None, x=x, y=y):
        loss = loss or models.cross_entropy
        return str(
            technique.find_nonfinite(model, loss, models.tensor(x), models.tensor(y), batch=7)
        )

    return run


def test_the_first_that_is_not_finite_is_named(models, find):
    bad = arrays(8)[0]
    bad[2, 0, 0, 0] = math.inf
    found = find(models.with_norm(), x=bad)
    assert "not finite: batch 7: x: 1 infinite of 512 values" in found
    found = find(models.with_norm(), lambda z, y: models.mean(models.cross_entropy(z, y)) / 0.0)
    assert "not finite: batch 7: loss: it is inf" in found
    for model, words in models.broken():
        assert words in find(model), words
    model, words = models.broken_foreign()
    images = np.random.default_rng(0).uniform(0, 1, (2, 32, 32, 3)).astype(np.float32)
    assert words in find(model, x=images, y=np.arange(2))


def test_a_clean_model_is_left_as_it_was(models, find):
    model = models.with_norm()
    before = models.state(model)
    for _ in range(2):
        assert find(model) == "batch 7: nothing found"
    assert same(before, models.state(model))
    assert models.has_no_hooks(model)


@pytest.mark.parametrize(
    ("rate", "bad", "steps", "words"),
    [
        (0.05, None, [8], ""),
        (0.05, 5, [5], "not finite: batch 5: x: 1 NaN of 1024 values"),
        (1e20, None, range(1, 8), "not finite: batch"),
    ],
    ids=["clean", "bad batch", "diverges"],
)
def test_a_checked_step_names_the_batch_and_gives_the_weights_back(
    kit, technique, models, rate, bad, steps, words
):
    model, loss = student_of(kit), kit.training.cross_entropy
    optimizer = kit.training.make_optimizer(model, replace(RECIPE, learning_rate=rate))
    plain = kit.training.make_train_step(model, optimizer, loss)
    # A step may return a number, too.
    given = plain if bad is None else lambda x, y: float(plain(x, y))
    step, taken = technique.make_checked_step(given, model, loss), 0
    x, y = arrays()
    x = np.repeat(x, CNN.input_shape[-1], axis=-1)
    if bad is not None:
        x[bad * BATCH + 1, 0, 0, 0] = np.nan
    parts = [(x[at : at + BATCH], y[at : at + BATCH]) for at in range(0, 64, BATCH)]
    said = ""
    for batch in kit.data.resident_batches(parts):
        before = weights_of(kit, model)
        try:
            assert math.isfinite(step(*batch))
        except FloatingPointError as error:
            said = str(error)
            break
        taken += 1
    assert taken in steps
    assert words in said
    assert bool(words) == bool(said)
    if said:
        assert farthest(weights_of(kit, model), before) == 0


@pytest.mark.only("pt")
def test_pt_a_checked_step_takes_a_model_of_any_state(kit, technique, models):
    """An extra state, and a buffer that is not saved."""
    model, loss = models.Counting(), models.cross_entropy
    plain = kit.training.make_train_step(model, models.sgd(model), loss)
    step = technique.make_checked_step(plain, model, loss)
    x, y = models.torch.ones(2, 4), models.tensor([0, 1])
    step(x, y)
    with pytest.raises(FloatingPointError, match="batch 1: x: 8 infinite of 8 values"):
        step(x / 0, y)
    assert model.calls.item() == 1
