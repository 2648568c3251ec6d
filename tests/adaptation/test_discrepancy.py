"""The discrepancy is that of NumPy, its gradient that of finite differences; it draws together."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest

from tests import workers
from tests.adaptation.test_adversarial import apart

WIDTHS = {"several": (0.25, 0.5, 1.0, 2.0, 4.0), "one": (0.5,)}


def features():
    """Those of the worker."""
    random = np.random.default_rng(1)
    source = random.normal(size=(6, 4)) + 30
    target = 1.5 * random.normal(size=(9, 4)) + 31
    return [part.astype(np.float32).astype(float) for part in (source, target)]


def squared(a, b):
    return sum((x - y) ** 2 for x, y in zip(a, b, strict=True))


def mean_squared(source, target):
    rows = [*source, *target]
    return np.mean([squared(a, b) for a, b in permutations(rows, 2)])


def mmd(source, target, widths, scale):
    """Pair by pair, as the formula has it."""

    def kernel(a, b):
        return np.mean([np.exp(-squared(a, b) / (width * scale)) for width in widths])

    def within(rows):
        pairs = permutations(rows, 2)
        return np.mean([kernel(a, b) for a, b in pairs])

    across = np.mean([kernel(a, b) for a in source for b in target])
    return within(source) + within(target) - 2 * across


@pytest.mark.parametrize("name", WIDTHS)
def test_the_value_is_that_of_numpy(every, name):
    source, target = features()
    wanted = mmd(source, target, WIDTHS[name], mean_squared(source, target))
    assert wanted > 0.05
    assert float(every["discrepancy values"][name]["value"]) == pytest.approx(wanted, rel=1e-4)


@pytest.mark.parametrize("name", WIDTHS)
def test_the_gradient_is_that_of_finite_differences(every, name):
    """Of a scale that is constant."""
    parts = features()
    scale, step = mean_squared(*parts), 1e-4
    for place, given in enumerate(every["discrepancy values"][name]["gradients"]):
        wanted = np.zeros_like(parts[place])
        for index in np.ndindex(wanted.shape):
            ends = []
            for sign in (1, -1):
                moved = [part.copy() for part in parts]
                moved[place][index] += sign * step
                ends.append(mmd(*moved, WIDTHS[name], scale))
            wanted[index] = (ends[0] - ends[1]) / (2 * step)
        assert np.linalg.norm(given - wanted) / np.linalg.norm(wanted) < 1e-4


def test_twins_agree_in_value_and_gradient(evidence):
    for name in WIDTHS:
        ours = evidence["pt"]["discrepancy values"][name]
        for other in workers.keras():
            theirs = evidence[other]["discrepancy values"][name]
            assert float(ours["value"]) == pytest.approx(float(theirs["value"]), rel=1e-5)
            pairs = (dict(enumerate(found["gradients"])) for found in (ours, theirs))
            assert apart(*pairs) < 1e-5


def test_features_that_are_all_the_same_have_none(every):
    found = every["discrepancy degenerate"]
    assert found["same"] == 0
    assert np.all(np.isfinite(found["gradients"]))
    assert found["maps"] == pytest.approx(found["flat"], rel=1e-6)


def test_it_is_zero_on_average_for_domains_that_are_alike(every):
    found = every["discrepancy chance"]
    assert abs(found["mean"]) < 3 * found["standard error"] < 0.03


def test_ten_steps_of_twins_agree(evidence):
    for weight in ("1.0", "0.0"):
        ours = evidence["pt"]["discrepancy ten_steps"][weight]
        for other in workers.keras():
            theirs = evidence[other]["discrepancy ten_steps"][weight]
            assert np.allclose(ours["losses"], theirs["losses"], rtol=1e-5)
            assert apart(ours["weights"], theirs["weights"]) < 1e-5


def test_without_weight_it_is_not_there(every):
    found = every["discrepancy ten_steps"]
    assert apart(found["0.0"]["weights"], found["1.0"]["weights"]) > 1e-3


def test_features_come_together(every):
    found = every["discrepancy together"]
    assert found["1.0"] < found["0.0"] / 2


def test_low_precision_is_computed_in_float32(every):
    dtype, found, wanted = every["discrepancy low_precision"]
    assert dtype.endswith("float32")
    assert found == wanted


def test_domains_that_do_not_go_together_are_refused(evidence):
    found = evidence["pt"]["discrepancy forms"]
    assert found.pop("without a mask") is True
    assert len(found) == 4
    assert all(found.values()), found


def test_features_need_a_row_a_sample(every):
    assert "features need a row a sample" in every["discrepancy forms"]["rows"]


def test_bad_settings_are_refused(every):
    assert all(every["discrepancy refusals"])


def test_a_domain_of_one_sample_is_refused_in_a_graph_too(every):
    assert "needs two samples" in every["discrepancy one_sample"]
