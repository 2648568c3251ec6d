"""Padding changes no loss and no gradient, nor does packing; graphs are as many as asked for.

All is compared with plain framework code: each sample alone, as long as it is.
"""

from __future__ import annotations

import contextlib
import importlib

import numpy as np
import pytest

from shared import lengths
from shared.specs import GPTSpec
from shared.weights import init_weights
from tests import workers

FRAMEWORKS = ("pt", "tf")
MOST = 16
SPEC = GPTSpec(vocabulary=11, sequence_length=MOST, width=8, heads=2, layers=2)
LENGTHS = [3, 16, 5, 2, 7, 4]
RANDOM = np.random.default_rng(0)
SAMPLES = [tuple(RANDOM.integers(0, 11, (2, n))) for n in LENGTHS]
PADDINGS = [{"padding": name, "multiple": 4} for name in lengths.PADDINGS]


@pytest.fixture
def build(impl):
    """`build()`: a small GPT with the weights of seed 0."""
    packed = importlib.import_module(f"{impl.__name__}.kit.packed")
    return lambda: packed.build(SPEC, init_weights(SPEC, seed=0))


@pytest.fixture
def of_batch(technique, models):
    """`of_batch(model, x, y)`: the loss and the gradient of all weights, as NumPy."""

    def of_batch(model, x, y):
        return models.loss_and_gradients(model, lambda: technique.token_loss(model(*x), y))

    return of_batch


@pytest.fixture
def alone(build, models):
    """The loss and gradients of each sample alone with the framework's own loss, by its tokens."""
    model, loss, gradients = build(), 0.0, None
    for codes, labels in SAMPLES:
        share = len(codes) / sum(LENGTHS)
        one, grads = models.loss_and_gradients(
            model, lambda codes=codes, labels=labels: models.plain_loss(model, codes, labels)
        )
        loss += share * one
        weighted = [share * g for g in grads]
        gradients = weighted if gradients is None else list(map(np.add, gradients, weighted))
    return loss, gradients


def assert_same(found, wanted):
    assert found[0] == pytest.approx(wanted[0], rel=1e-5)
    assert len(found[1]) == len(wanted[1])
    for one, other in zip(found[1], wanted[1], strict=True):
        assert np.allclose(one, other, atol=1e-6)


@pytest.mark.parametrize("settings", PADDINGS, ids=lambda one: one["padding"])
def test_padding_changes_neither_loss_nor_gradient(technique, build, of_batch, alone, settings):
    x, y = technique.pad(SAMPLES, most=MOST, **settings)
    assert_same(of_batch(build(), x, y), alone)


def test_packed_with_a_block_mask_is_each_sample_alone(technique, build, of_batch, alone):
    """In fewer rows; with a mask that is only causal it is not."""
    (codes, positions, allowed), y = technique.pack(SAMPLES, most=MOST)
    assert tuple(codes.shape) == (3, MOST)
    assert_same(of_batch(build(), (codes, positions, allowed), y), alone)
    loss, _ = of_batch(build(), (codes, positions), y)
    assert abs(loss - alone[0]) > 1e-4


def test_the_frameworks_agree(technique, build, of_batch, agrees):
    loss, gradients = of_batch(build(), *technique.pack(SAMPLES, most=MOST))
    squares = sum(float((one**2).sum()) for one in gradients)
    agrees("packed", {"loss": loss, "gradient": np.array([squares**0.5])}, 1e-5)


@pytest.mark.parametrize(("padding", "length"), [("longest", 7), ("multiple", 8), ("few", 8)])
def test_a_batch_is_as_long_as_its_padding_says(technique, padding, length):
    (codes,), y = technique.pad(SAMPLES[2:], padding=padding, multiple=4, most=MOST)
    assert tuple(codes.shape) == tuple(y.shape) == (4, length)
    wanted = np.full((4, length), technique.NO_LABEL)
    for row, (_, labels) in enumerate(SAMPLES[2:]):
        wanted[row, : len(labels)] = labels
    assert np.array_equal(np.asarray(y), wanted)


GRAPHS = [
    pytest.param("plain", 0, marks=pytest.mark.only("pt")),
    pytest.param("static", 4, marks=[pytest.mark.only("pt"), pytest.mark.campaign]),
    pytest.param("dynamic", 1, marks=[pytest.mark.only("pt"), pytest.mark.campaign]),
    pytest.param("marked", 1, marks=pytest.mark.only("pt")),
    pytest.param("plain", 4, marks=pytest.mark.only("tf")),
    pytest.param("relaxed", 2, marks=pytest.mark.only("tf")),
    pytest.param("signature", 1, marks=pytest.mark.only("tf")),
]


@pytest.mark.parametrize(("shapes", "graphs"), GRAPHS)
def test_four_lengths_make_so_many_graphs(technique, kit, build, models, shapes, graphs):
    """And the losses of plain steps, whatever is compiled."""

    def losses(shapes):
        models.forget_graphs()
        model = build()
        optimizer = models.sgd(model, 0.1)
        pairs = [technique.pad(SAMPLES[at : at + 1] * 2, most=MOST) for at in (0, 2, 4, 1)]
        # Graphs are counted whatever becomes of them: their code is generated in campaigns.
        with contextlib.nullcontext() if workers.campaign() else workers.without_inductor():
            step = technique.make_train_step(model, optimizer, shapes=shapes)
            made = [kit.runtime.to_float(step(x, y)) for x, y in pairs]
        return made, kit.runtime.trace_count(step) or 0

    found, traced = losses(shapes)
    assert traced == graphs
    assert found == pytest.approx(losses("plain")[0], rel=1e-5)
    assert found[0] != found[-1]


@pytest.mark.only("tf")
def test_tf_a_bucketed_dataset_has_every_sample_once(technique):
    batches = list(technique.bucketed_batches(SAMPLES, batch_size=2, boundaries=(4, 8)))
    longest = []
    rows = []
    for (codes,), y in batches:
        real = (y.numpy() != technique.NO_LABEL).sum(axis=1)
        longest.append((int(real.min()), int(real.max())))
        rows += [tuple(row[:n]) for row, n in zip(codes.numpy(), real, strict=True)]
    assert sorted(rows) == sorted(tuple(codes) for codes, _ in SAMPLES)
    assert all(low // 4 == high // 4 or high >= 8 for low, high in longest)


# Without a framework ------------------------------------------------------------------------------


@pytest.mark.parametrize("by_length", [False, True])
def test_an_epoch_has_every_sample_once_and_alike_ones_together(by_length):
    drawn = lengths.skewed_lengths(500, most=64, seed=1)
    assert 10 < np.median(drawn) < 16
    assert drawn.max() == 64
    cut = lengths.batches(drawn, batch_size=8, seed=2, by_length=by_length)
    assert sorted(np.concatenate(cut)) == list(range(500))
    share = 1 - drawn.sum() / sum(len(some) * drawn[some].max() for some in cut)
    assert share < 0.2 if by_length else share > 0.4
    other = lengths.batches(drawn, batch_size=8, seed=3, by_length=by_length)
    assert {tuple(sorted(some)) for some in cut} != {tuple(sorted(some)) for some in other}


def test_rows_are_full_and_none_is_longer():
    drawn = lengths.skewed_lengths(300, most=64, seed=1).tolist()
    rows = lengths.first_fit(drawn, most=64)
    assert sorted(one for row in rows for one in row) == list(range(300))
    sums = [sum(drawn[one] for one in row) for row in rows]
    assert max(sums) <= 64
    assert len(rows) <= -(-sum(drawn) // 64) + 1


REFUSALS = [
    (lambda t: t.pad(SAMPLES, padding="none"), "unknown padding 'none': choose one of longest"),
    (lambda t: t.pad(SAMPLES, most=8), "a sample of 16 is longer than most, 8"),
    (lambda t: t.pack(SAMPLES, most=8), "a sample of 16 is longer than most, 8"),
    (lambda t: t.make_train_step(None, None, shapes="fixed"), "unknown shapes 'fixed'"),
]


@pytest.mark.parametrize(("call", "message"), REFUSALS)
def test_a_refusal_says_why(technique, call, message):
    with pytest.raises(ValueError, match=message):
        call(technique)
