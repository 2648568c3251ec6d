"""The ring model: what it predicts, that a fit finds it again, what its intervals cover."""

from dataclasses import replace
from itertools import product
from statistics import mean

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as some

from bench.network import ring
from bench.network.ring import Estimate, Job, Measured

JOB = Job(0.1, 100e6, 50e-6, 10e9, layers=24, every=8, micro_batches=4, activations=10e6)
SIZES = (4e3, 4e4, 2e5, 8e5, 2e6)
LINKS = ((5e-3, 50e6), (1e-3, 200e6))

replicas = some.integers(2, 1024)
sizes = some.floats(1, 1e10)
positive = some.floats(1e-3, 1e3)


def made(a, o, b, *, noise=None, counts=(2, 4), links=LINKS) -> list[Measured]:
    """Points of a ring with these parameters, off by `noise` in their logarithm."""
    random = np.random.default_rng(noise)
    points = []
    for count, (latency, bandwidth), size in product(counts, links, SIZES):
        seconds = 2 * (count - 1) * (a * latency + o)
        seconds += 2 * (count - 1) / count * size * 8 * b / bandwidth
        seconds *= 1.0 if noise is None else float(np.exp(random.normal(0, 0.05)))
        points.append(Measured(count, latency, bandwidth, size, seconds))
    return points


@given(replicas, sizes)
def test_a_ring_sends_less_than_twice_the_size_in_steps_of_one_part(count, size):
    steps, sent = ring.steps_and_bytes(count, size)
    assert steps == 2 * (count - 1)
    assert sent == pytest.approx(steps * size / count)
    assert size <= sent * (1 + 1e-12) < 2 * size * (1 + 1e-12)


@settings(max_examples=30)
@given(some.floats(0.5, 4), some.floats(1e-5, 1e-2), some.floats(0.8, 2))
def test_a_fit_finds_the_parameters_of_exact_times(a, o, b):
    model = ring.fit(made(a, o, b))
    assert model.parameters == pytest.approx((a, o, b), rel=1e-4)
    assert model.scatter < 1e-4
    checked = ring.validate(model, made(a, o, b, counts=(8,)))
    assert abs(checked.largest) < 1e-4
    assert checked.mean < 1e-4
    assert model.alpha(2e-3).value == pytest.approx(a * 2e-3 + o, rel=1e-4)
    assert model.beta(1e9).value == pytest.approx(8 * b / 1e9, rel=1e-4)


def test_intervals_cover_the_truth_as_often_as_they_say():
    truth = (2.0, 2e-4, 1.05)
    covered = []
    for seed in range(200):
        model = ring.fit(made(*truth, noise=seed))
        for row, value in zip(np.eye(3), truth, strict=True):
            estimate = model.linear(row)
            covered.append(estimate.low <= value <= estimate.high)
    assert 0.91 < mean(covered) < 0.98


@settings(max_examples=20)
@given(some.floats(0.1, 10), some.integers(0, 100))
def test_a_slower_clock_changes_nothing_but_the_unit(factor, seed):
    points = made(2.0, 1e-3, 1.0, noise=seed)
    slow = [replace(p, seconds=p.seconds * factor) for p in points]
    fast, slow = ring.fit(points), ring.fit(slow)
    assert slow.alpha(1e-3).value == pytest.approx(fast.alpha(1e-3).value * factor, rel=1e-3)
    assert slow.scatter == pytest.approx(fast.scatter, rel=1e-3)


def test_no_parameter_is_below_zero():
    points = [replace(p, seconds=p.seconds / 10) if p.latency == 1e-3 else p for p in made(2, 0, 1)]
    model = ring.fit(points)
    assert min(model.parameters) >= 0
    assert model.scatter > 0.1  # and it says that it does not fit


@pytest.mark.parametrize(
    "points",
    [
        [],
        made(2, 1e-4, 1)[:3],
        made(2, 1e-4, 1, links=LINKS[:1]),  # one latency: what is the link's, what the hosts'?
        [p for p in made(2, 1e-4, 1) if p.latency == 5e-3 and p.size == 4e3],
    ],
)
def test_what_cannot_tell_the_parameters_apart_is_refused(points):
    with pytest.raises(ValueError, match="a fit needs four, of two latencies"):
        ring.fit(points)


def test_a_time_of_nothing_is_refused():
    points = made(2, 1e-4, 1)
    with pytest.raises(ValueError, match="not above 0"):
        ring.fit([replace(points[0], seconds=0.0), *points[1:]])


def test_the_error_of_a_model_is_found_and_has_its_sign():
    model = ring.fit(made(2, 1e-4, 1))
    unseen = made(2, 1e-4, 1, counts=(8,))
    slow = [replace(p, seconds=p.seconds * 1.25) for p in unseen]
    checked = ring.validate(model, slow)
    assert checked.errors == pytest.approx([-0.2] * len(slow), rel=1e-3)
    assert (checked.mean, checked.largest) == pytest.approx((0.2, -0.2), rel=1e-3)
    assert checked.scatter == pytest.approx(np.log(1.25), rel=1e-3)
    with pytest.raises(ValueError, match="no measurement on 8 hosts"):
        ring.validate(model, [])


# Strategies ---------------------------------------------------------------------------------------


@given(replicas, positive)
def test_costs_of_the_strategies(count, factor):
    job = replace(JOB, compute=factor, size=factor * 1e6)
    compute, steps, sent = ring.all_reduce(count, job)
    assert compute == factor
    # ZeRO's own figure: half as much again as data parallel.
    assert ring.sharded(count, job) == pytest.approx((factor, 36 * steps, 1.5 * sent))
    assert ring.less_often(count, job) == pytest.approx((factor, steps / 8, sent / 8))
    assert ring.less_often(count, replace(job, every=1)) == ring.all_reduce(count, job)


@given(some.integers(1, 512), some.integers(1, 64))
def test_a_pipeline_idles_for_its_stages_less_one(count, micro):
    """GPipe's bubble: (n − 1) / (m + n − 1) of the turns."""
    job = replace(JOB, layers=512, micro_batches=micro)
    compute, turns, sent = ring.pipeline(count, job)
    m = micro * count
    assert 1 - job.compute / compute == pytest.approx((count - 1) / (m + count - 1))
    assert turns == 2 * (m + count - 1)
    assert sent == pytest.approx(turns * job.activations / micro)


def test_a_pipeline_has_no_more_stages_than_layers():
    assert ring.pipeline(24, JOB) is not None
    assert ring.pipeline(25, JOB) is None
    model = ring.fit(made(2, 1e-4, 1))
    checked = ring.validate(model, made(2, 1e-4, 1, counts=(8,)))
    assert [p.replicas for p in ring.project(model, checked, ring.pipeline, JOB)] == [8, 16]
    assert ring.project(model, checked, ring.pipeline, replace(JOB, layers=4)) == []
    assert ring.scales_to([]) is None


@settings(max_examples=30)
@given(some.floats(1e-3, 10), some.floats(1e3, 1e9), some.integers(0, 50))
def test_a_projection_holds_together(compute, size, seed):
    """Its bounds enclose it, hiding never costs, and it falls with the link's speed."""
    model = ring.fit(made(2.0, 2e-4, 1.0, noise=seed))
    checked = ring.validate(model, made(2.0, 2e-4, 1.0, noise=seed + 1, counts=(8,)))
    job = replace(JOB, compute=compute, size=size)
    better = replace(job, bandwidth=100e9, latency=5e-6)
    for cost in ring.STRATEGIES.values():
        steps = ring.project(model, checked, cost, job)
        for one, fast in zip(steps, ring.project(model, checked, cost, better), strict=True):
            assert compute <= one.step.low < one.step.value < one.step.high
            assert one.hidden <= one.step.value
            assert 0 < one.share <= 1
            assert fast.step.value < one.step.value


def test_a_doubt_of_the_validation_widens_the_interval():
    model = ring.fit(made(2.0, 2e-4, 1.0, noise=1))
    unseen = made(2, 2e-4, 1, counts=(8,))
    slow = [replace(p, seconds=p.seconds * 1.5) for p in unseen]
    good, bad = (ring.validate(model, points) for points in (unseen, slow))
    ours, theirs = (ring.project(model, c, ring.all_reduce, JOB)[0].step for c in (good, bad))
    assert ours.value == theirs.value
    assert theirs.high > ours.high
    assert theirs.low < ours.low


@given(some.floats(1e-6, 10), some.floats(1e-6, 10))
def test_where_scaling_ends(fixed, per_replica):
    """Of a step of f + p·n seconds, twice the replicas give 2(f + pn)/(f + 2pn) the throughput."""
    steps = [(n, fixed + per_replica * n) for n in ring.REPLICAS]
    gains = [2 * (fixed + per_replica * n) / (fixed + 2 * per_replica * n) for n in ring.REPLICAS]
    assume(min(abs(gain - ring.LEAST_GAIN) for gain in gains) > 1e-9)
    ends = [n for n, gain in zip(ring.REPLICAS, gains, strict=True) if gain < ring.LEAST_GAIN]
    assert ring.scales_to(steps) == (ends[0] if ends and ends[0] < 1024 else 1024)


def test_an_estimate_shows_its_bounds():
    model = ring.fit(made(2.0, 2e-4, 1.0, noise=3))
    estimate = model.linear([1.0, 0.0, 0.0])
    assert isinstance(estimate, Estimate)
    assert estimate.low < estimate.value < estimate.high
