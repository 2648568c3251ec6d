"""A leak and a cache are told apart, from noise too, and a planted leak is found in 50 rounds."""

from __future__ import annotations

import numpy as np
import pytest

from shared.growth import CACHE, LEAK, judge

FRAMEWORKS = ("pt", "tf")
MODELS = "steps"
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


class Chunk:
    def __init__(self):
        self.bytes = np.ones(2**20, np.uint8)


def test_what_was_planted_is_found(models):
    """A step that keeps 1 MB a round, one that fills a cache of 30 MB, one that keeps nothing."""
    batch, plain = models.batch(8, 16), models.plain_step(models.dense(8, 8, 2))
    kept, cache = [], {}

    def leak(x, y):
        kept.append(Chunk())
        return plain(x, y)

    def fill(named):  # a batch that is a dict comes whole
        cache.setdefault(len(cache) if len(cache) < 15 else 0, np.ones(2 * 2**20, np.uint8))
        return plain(named["x"], named["y"])

    named = dict(zip("xy", batch, strict=True))
    for verdict, step, given in (
        ("steady", plain, batch),
        ("cache", fill, named),
        ("leak", leak, batch),
    ):
        growth = models.memory_growth.watch_memory(step, [given], rounds=50)
        assert growth.verdict == verdict
    assert growth.per_round == pytest.approx(2**20, rel=0.3)
    assert dict(growth.growing)[f"{Chunk.__module__}.Chunk"] == 1.0
    assert str(growth).startswith("leak: +")
    assert "MB with every round; objects more a round: " in str(growth)


def test_a_cache_by_shape_is_no_leak(models):
    """One that fills for as long as there are new shapes, and a leak at the same batches."""
    batches, cache, kept = [(np.ones(n, np.float32),) for n in range(1, 101)], {}, []

    def fill(x):
        if len(x) not in cache:
            cache[len(x)] = np.ones(2**20, np.uint8)

    def leak(x):
        kept.append(np.ones(2**20, np.uint8))

    filled, leaking = (models.memory_growth.watch_memory(s, batches) for s in (fill, leak))
    assert (filled.verdict, leaking.verdict) == (CACHE, LEAK)
    assert filled.per_round == pytest.approx(2**20, rel=0.3)
    assert filled.again < 0.1 * MB < 0.7 * MB < leaking.again
    assert "where old batches come again (a cache by shape" in str(filled)


def test_the_frameworks_own_leak_is_found(models):
    step, calls = models.leaking()
    watched = models.memory_growth.watch_memory(
        step, [models.batch(64, 256)], rounds=30, steps=calls
    )
    assert watched.verdict == "leak"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rounds": 5}, "growth needs 12 rounds"),
        ({"warmup": 0}, "growth needs 12 rounds"),
        ({"least": 0.0}, "growth needs 12 rounds"),
        ({"steps": 0}, "growth needs 1 step a round, not 0"),
    ],
)
def test_settings_out_of_range_are_refused(models, settings, message):
    with pytest.raises(ValueError, match=message):
        models.memory_growth.watch_memory(lambda x: None, [(1,)], **settings)
