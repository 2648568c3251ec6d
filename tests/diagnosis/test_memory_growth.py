"""A leak and a cache are told apart, from noise too, and a planted leak is found in 50 rounds."""

from __future__ import annotations

import numpy as np
import pytest

from shared.growth import judge

MB = 1e6
ROUNDS = np.arange(50)


def noisy(sizes):
    return list(300 * MB + sizes * MB + np.random.default_rng(0).normal(size=len(sizes)) * MB)


@pytest.mark.parametrize(
    ("case", "sizes", "verdict"),
    [
        ("noise alone", 0.0 * ROUNDS, "steady"),
        ("a leak of 1 MB", 1.0 * ROUNDS, "leak"),
        ("a leak in chunks of 8 MB", 8.0 * (ROUNDS // 8), "leak"),
        ("a cache of 40 MB", np.minimum(2.0 * ROUNDS, 40.0), "cache"),
        ("a cache that fills half-way", np.minimum(1.0 * ROUNDS, 30.0), "cache"),
        ("one large block", 100.0 * (ROUNDS > 10), "cache"),
        ("one large block, late", 100.0 * (ROUNDS > 40), "cache"),
        ("one block at the end", 20.0 * (ROUNDS > 45), "steady"),
        ("a leak in two chunks of 6 MB", 6.0 * (ROUNDS // 16), "leak"),
        ("a peak that is given back", 100.0 * (abs(ROUNDS - 10) < 5), "steady"),
        ("a leak after a cache", np.minimum(4.0 * ROUNDS, 40.0) + 1.0 * ROUNDS, "leak"),
    ],
)
def test_the_line_is_judged(case, sizes, verdict):
    assert judge(noisy(sizes), least=0.25)[0] == verdict, case


def test_what_was_planted_is_found(every):
    planted = every["memory_growth planted"]
    assert {name: one["verdict"] for name, one in planted.items()} == {
        "steady": "steady",
        "cache": "cache",
        "leak": "leak",
    }
    assert planted["leak"]["per_round"] == pytest.approx(2**20, rel=0.3)
    growing = dict(planted["leak"]["growing"])
    assert growing["tests.diagnosis.memory_growth_scenarios.planted.<locals>.Chunk"] == 1.0
    assert planted["leak"]["said"].startswith("leak: +")
    assert "MB with every round; objects more a round: " in planted["leak"]["said"]


def test_the_frameworks_own_leak_is_found(every):
    assert every["memory_growth of_the_framework"]["verdict"] == "leak"


def test_settings_out_of_range_are_refused(every):
    reasons = every["memory_growth refused"]
    assert reasons.pop() == "growth needs 1 step a round, not 0"
    assert len(reasons) == 3
    assert all(said.startswith("growth needs 12 rounds") for said in reasons)
