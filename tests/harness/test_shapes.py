"""Batches whose shapes vary are timed over all of these shapes, in the same order in every row."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest

from bench import user_answer
from bench.harness import timing, user_model
from bench.harness.plan import Prepared
from shared.user_model import dealt, joined, samples, save_batches, shape_of
from tests import records

LENGTHS = (5, 90, 40, 10, 70, 20, 60, 30, 80, 50)


def batches(lengths=LENGTHS) -> list[tuple]:
    return [(np.zeros((2, length)), np.zeros(2)) for length in lengths]


class Clock:
    """Time that passes as steps take it."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Bench(timing.Timing):
    """A worker whose step takes a millisecond, or as long as is said, a position."""

    def __init__(
        self, clock: Clock, step_s: float = 1e-3, given: list | None = None, plain_s: float = 1e-3
    ) -> None:
        self.seen: list[int] = []
        self.batches = batches() if given is None else given
        self.prepared = Prepared(None, None, None, None)
        self.work = SimpleNamespace(mode="train")
        runtime = SimpleNamespace(synchronize=lambda: None, to_float=float)
        runtime.trace_count = lambda step: len(set(self.seen))
        self.kit = SimpleNamespace(runtime=runtime)
        self.impl = SimpleNamespace(about={"sides": {"pt": {"step_s": plain_s}}})
        self._clock, self._step_s = clock, step_s

    def call(self, x, y) -> float:
        self.seen.append(x.shape[1])
        self._clock.sleep(self._step_s * x.shape[1] / 50)
        return 0.0

    def timed(self) -> list[int]:
        """The lengths of one sample, without the untimed step."""
        self.seen.clear()
        sample = self._op_sample()
        return self.seen[-sample.steps :]

    def _op_evidence(self):
        return timing.Proof(evidence={})

    def _modules(self):
        return []


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(timing.time, "perf_counter", made.perf_counter)
    monkeypatch.setattr(timing, "other_threads_run", lambda: False)
    monkeypatch.setattr(timing.gc, "disable", lambda: None)
    monkeypatch.setattr(timing.gc, "freeze", lambda: None)
    return made


def test_a_sample_has_every_shape_equally_often_in_the_order_of_the_batches(clock):
    bench = Bench(clock)
    bench._op_warm()
    for _ in range(3):
        timed = bench.timed()
        assert timed == list(LENGTHS) * (len(timed) // len(LENGTHS))
        assert len(bench.seen) == len(timed) + 1


def test_rows_of_another_speed_are_timed_over_the_same_shapes(clock):
    slow, fast = Bench(clock, 3e-2), Bench(clock, 1e-5)
    for bench in (slow, fast):
        bench._op_warm()
    assert Counter(slow.timed()) == dict.fromkeys(LENGTHS, 1)
    often = Counter(fast.timed())
    assert often == dict.fromkeys(LENGTHS, often[LENGTHS[0]])


def test_steps_a_sample_are_the_mean_over_the_shapes(clock):
    bench = Bench(clock)
    bench._op_warm()
    assert bench._op_sample().seconds == pytest.approx(1e-3 * np.mean(LENGTHS) / 50)


@pytest.mark.parametrize("step_s", [0.5, 3.0])
def test_of_slow_steps_a_few_samples_have_all_shapes_together(clock, step_s):
    bench = Bench(clock, step_s, plain_s=0.5)
    bench.last_s = step_s
    bench._op_warm()
    rounds = [bench.timed() for _ in range(timing.PARTS)]
    assert sorted(length for part in rounds for length in part) == sorted(LENGTHS)
    assert bench.timed() == rounds[0]


def test_every_shape_is_seen_twice_before_graphs_are_counted(clock):
    bench = Bench(clock, 3.0)
    bench._op_warm()
    assert min(Counter(bench.seen).values()) >= 2
    finished = bench._op_finish(evidence=True)
    assert finished.evidence == {"shapes": 10, "graphs_of_shapes": 10}


def test_batches_of_one_shape_are_timed_as_before(clock):
    bench = Bench(clock, given=batches([50] * 10))
    bench._op_warm()
    assert bench.part == ()
    assert bench._op_finish(evidence=True).evidence == {}


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_parts_are_of_about_equal_size(count):
    parts = dealt(batches(), count)
    sizes = [sum(x.size for x, _ in part) / len(part) for part in parts]
    assert Counter(x.shape[1] for part in parts for x, _ in part) == Counter(LENGTHS)
    assert max(sizes) / min(sizes) < 1.5


def test_samples_are_those_of_the_first_shape(tmp_path):
    made = batches((5, 5, *LENGTHS[1:9]))
    save_batches(tmp_path, made)
    x, _ = samples(tmp_path, 100)
    assert x.shape == (4, 5)
    assert shape_of(joined(made[:2], 2)) == ((4, 5), (4,))


def test_the_check_counts_shapes_and_padding():
    x = np.arange(1, 41).repeat(8).reshape(40, 8).T.copy()
    x[:, 20:] = 0
    known = user_model._of_shapes([(x, x), (x[:, :20], x[:, :20])])
    assert known["shapes"] == 2
    assert known["padding"] == pytest.approx(0.25)
    assert known["to_longest"] == pytest.approx(0.25)


@pytest.mark.parametrize(("shapes", "said"), [(10, True), (1, False), (None, False)])
def test_the_answer_says_shapes_padding_and_graphs(shapes, said):
    """`None`: a run of before knows of no shapes."""
    side = {} if shapes is None else {"shapes": shapes, "padding": 0.25, "to_longest": 0.5}
    model = SimpleNamespace(sides=["pt"], about={"sides": {"pt": side}})
    graphs = {"evidence": {"shapes": 10, "graphs_of_shapes": 3}}
    cases = [records.case("compiled", **graphs), records.case("base")]
    lines = user_answer._shapes(records.record(cases), model)
    text = " ".join(" ".join(lines).split())
    assert ("Batches have 10 shapes: every row times its steps over all of them" in text) is said
    assert (
        "25% of their positions are padding, 50% if all were padded to the longest" in text
    ) is said
    assert (text.count("3 graphs for these shapes") == 1) is said
