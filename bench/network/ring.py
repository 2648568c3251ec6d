"""The ring model of collectives, fitted to measured all-reduces, and what follows from it.

A ring of n processes sums `size` bytes in 2(n−1) steps. In each, every process sends a part of
size/n to its neighbour (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters
of workstations", 2009):

    t = 2(n−1)·α + 2(n−1)/n · size · β

α, the seconds of an empty step, is a·latency + o: how often a message waits for the link (once if
it is sent at once, twice if it is requested first), and the hosts' time. β, the seconds per byte,
is 8·b/bandwidth; b is 1 if only payload is sent. So a fit over links of several latencies and
bandwidths predicts other links.

All functions are pure. Times are in seconds, sizes in bytes, bandwidths in bits per second.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from math import exp

import numpy as np
from numpy.typing import ArrayLike
from scipy import optimize, stats

CONFIDENCE = 0.95
LEAST_GAIN = 1.5  # of throughput, from twice the replicas: below it a strategy stops scaling
REPLICAS = (8, 16, 32, 64, 128, 256, 512, 1024)


@dataclass(frozen=True)
class Measured:
    """The time of an all-reduce: the median of its repetitions."""

    replicas: int
    latency: float
    bandwidth: float
    size: float
    seconds: float


@dataclass(frozen=True)
class Estimate:
    """A value and the bounds of its 95% interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Fit:
    """a, o and b, their covariance, and the scatter of the measurements around the model.

    scatter: standard deviation of the relative residuals. freedom: points minus parameters.
    """

    parameters: tuple[float, float, float]
    covariance: np.ndarray
    scatter: float
    freedom: int

    @property
    def quantile(self) -> float:
        """The quantile of Student's t for a two-sided interval."""
        return float(stats.t.ppf((1 + CONFIDENCE) / 2, self.freedom))

    def linear(self, row: ArrayLike) -> Estimate:
        """A weighted sum of the parameters; no bound is below 0."""
        row = np.asarray(row)
        value = float(row @ self.parameters)
        half = self.quantile * float(np.sqrt(max(0.0, row @ self.covariance @ row)))
        return Estimate(value, max(0.0, value - half), value + half)

    def alpha(self, latency: float) -> Estimate:
        """Seconds of an empty step over a link of this latency."""
        return self.linear([latency, 1.0, 0.0])

    def beta(self, bandwidth: float) -> Estimate:
        """Seconds per byte over a link of this bandwidth."""
        return self.linear([0.0, 0.0, 8.0 / bandwidth])


def steps_and_bytes(replicas: int, size: float) -> tuple[float, float]:
    """The steps of an all-reduce, and the bytes that each process sends in all of them."""
    return 2.0 * (replicas - 1), 2.0 * (replicas - 1) / replicas * size


def coefficients(steps: float, sent: float, latency: float, bandwidth: float) -> np.ndarray:
    """The factors of a, o and b in the time of so many steps and bytes."""
    return np.array([steps * latency, steps, 8.0 * sent / bandwidth])


def _row(point: Measured) -> np.ndarray:
    steps, sent = steps_and_bytes(point.replicas, point.size)
    return coefficients(steps, sent, point.latency, point.bandwidth)


def fit(points: list[Measured]) -> Fit:
    """Fit a, o and b by least squares of relative residuals, none below 0.

    Raises ValueError if the points can't tell the three apart.
    """
    rows = np.array([_row(point) for point in points]).reshape(-1, 3)
    times = np.array([point.seconds for point in points])
    if len(points) <= 3 or np.linalg.matrix_rank(rows / (np.abs(rows).max(0) + 1e-300)) < 3:
        raise ValueError("too few measurements: a fit needs four, of two latencies and two sizes")
    if times.min() <= 0:
        raise ValueError("a time is not above 0: the record is damaged")
    # A point counts by its relative error, or the largest sizes alone would.
    relative = rows / times[:, None]
    solved = optimize.lsq_linear(relative, np.ones(len(points)), (0.0, np.inf), method="bvls").x
    freedom = len(points) - 3
    scatter = float(np.sqrt(((relative @ solved - 1) ** 2).sum() / freedom))
    covariance = scatter**2 * np.linalg.inv(relative.T @ relative)
    return Fit(tuple(map(float, solved)), covariance, scatter, freedom)


def predict(model: Fit, point: Measured) -> Estimate:
    """The model's time for a point, without its measurement; the interval is the model's."""
    return model.linear(_row(point))


@dataclass(frozen=True)
class Validation:
    """How far the model is from measurements that it was not fitted to.

    errors: predicted over measured, minus 1, for each point. scatter: root mean square of the
    logarithms of predicted over measured.
    """

    errors: list[float]
    scatter: float

    @property
    def mean(self) -> float:
        """The mean of the absolute errors."""
        return float(np.mean(np.abs(self.errors)))

    @property
    def largest(self) -> float:
        """The error that is farthest from 0."""
        return max(self.errors, key=abs)


def validate(model: Fit, points: list[Measured]) -> Validation:
    """Compare the model with measurements. Raises ValueError if there are none."""
    if not points:
        raise ValueError("no measurement on 8 hosts, which validates the model")
    ratios = np.array([predict(model, point).value / point.seconds for point in points])
    return Validation([float(r) - 1 for r in ratios], float(np.sqrt((np.log(ratios) ** 2).mean())))


# Strategies ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """What is trained, and over which links.

    Each replica adds a batch, so a step with n replicas has n batches.

        compute        seconds of forward, backward and update for one batch on one device
        size           bytes of all gradients, which is also that of all parameters
        layers         parts in which the model is sharded, or can be cut
        every          steps between synchronisations
        micro_batches  per batch, in a pipeline
        activations    bytes that one batch sends between two parts
    """

    compute: float
    size: float
    latency: float
    bandwidth: float
    layers: int
    every: int
    micro_batches: int
    activations: float


# strategy -> replicas, job -> seconds of compute, steps and bytes of communication; None where it
# is impossible.
Cost = tuple[float, float, float]


def all_reduce(replicas: int, job: Job) -> Cost:
    """Data parallel: all gradients are summed in a ring, once a step."""
    return job.compute, *steps_and_bytes(replicas, job.size)


def sharded(replicas: int, job: Job) -> Cost:
    """FSDP: a layer's parameters are gathered in forward and in backward, its gradients scattered.

    Each of the three is half a ring all-reduce, for every layer.
    """
    steps, sent = steps_and_bytes(replicas, job.size)
    return job.compute, 1.5 * steps * job.layers, 1.5 * sent


def less_often(replicas: int, job: Job) -> Cost:
    """Data parallel that synchronises every so many steps; the mean of a step."""
    steps, sent = steps_and_bytes(replicas, job.size)
    return job.compute, steps / job.every, sent / job.every


def pipeline(replicas: int, job: Job) -> Cost | None:
    """One stage per device; micro-batches follow one another, forward and then backward (GPipe).

    With m micro-batches in all, m + n − 1 turns pass until the last has left the last stage. In
    each it is passed on once forward and once backward.
    """
    if replicas > job.layers:
        return None
    count = job.micro_batches * replicas
    turns = count + replicas - 1
    passed = job.activations / job.micro_batches
    return job.compute * turns / count, 2.0 * turns, 2.0 * turns * passed


STRATEGIES: dict[str, Callable[[int, Job], Cost | None]] = {
    "all-reduce in every step": all_reduce,
    "sharded (FSDP)": sharded,
    "synchronising less often": less_often,
    "pipeline": pipeline,
}


@dataclass(frozen=True)
class Projected:
    """A step with so many replicas.

    step: seconds without overlap of communication and compute, with its interval. hidden: seconds
    with as much overlap as possible. share: throughput per replica without overlap, over that of a
    single device.
    """

    replicas: int
    step: Estimate
    hidden: float
    share: float


def project(
    model: Fit, checked: Validation, strategy: Callable[[int, Job], Cost | None], job: Job
) -> list[Projected]:
    """A strategy's step for each number of replicas that is possible with it.

    The interval includes the uncertainty of the fit, and the error that the validation found, as if
    each further point were as far off.
    """
    projected = []
    for replicas in REPLICAS:
        cost = strategy(replicas, job)
        if cost is None:
            continue
        compute, steps, sent = cost
        row = coefficients(steps, sent, job.latency, job.bandwidth)
        value = float(row @ model.parameters)
        doubt = max(checked.scatter, model.scatter) ** 2
        doubt += float(row @ model.covariance @ row) / value**2
        factor = exp(model.quantile * doubt**0.5)
        step = Estimate(compute + value, compute + value / factor, compute + value * factor)
        share = job.compute / step.value
        projected.append(Projected(replicas, step, max(compute, value), share))
    return projected


def scales_to(steps: list[tuple[int, float]]) -> int | None:
    """The replicas up to which each doubling raised throughput by at least `LEAST_GAIN`.

    None without any steps. steps: by number of replicas, doubling, the seconds of a step.
    """
    for (few, before), (more, after) in pairwise(steps):
        if (more / after) / (few / before) < LEAST_GAIN:
            return few
    return steps[-1][0] if steps else None
