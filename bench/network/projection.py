"""From all-reduces over slow links to the step time of a job with up to 1,024 replicas.

The ring model of `bench.network.ring` is fitted to sweeps of 2 and 4 hosts, checked on 8, and used
to project the step of a job for 8 to 1,024 replicas.
"""

from __future__ import annotations

from bench.network import ring, sweeps
from bench.network.ring import Estimate, Fit, Job, Projected, Validation
from bench.network.sweeps import FITTED_AT, VALIDATED_AT, Record
from bench.report.formatting import MISSING, number
from bench.report.technique_tables import Table, of_figures, of_words

TITLES = {"pt": "PyTorch, gloo", "tf": "TensorFlow, RING"}
NO_UPSTREAM = {"tf": {"sharded (FSDP)", "pipeline"}}  # strategies that a framework does not have
PROJECTION = "PROJECTION, not a measurement"
# The job that is projected unless the options say otherwise.
JOB = Job(
    compute=0.1,
    size=100e6,
    latency=50e-6,
    bandwidth=10e9,
    layers=24,
    every=8,
    micro_batches=4,
    activations=10e6,
)


def content(records: list[Record], job: Job) -> list[str | Table]:
    """The sentences and tables, in order. Raises ValueError if a record can't be fitted."""
    parts: list[str | Table] = []
    for record in records:
        parts += _framework(record, job)
    return parts


def _framework(record: Record, job: Job) -> list[str | Table]:
    title = TITLES[record.framework]
    every = sweeps.points(record)
    model = ring.fit([point for point in every if point.replicas in FITTED_AT])
    unseen = [point for point in every if point.replicas == VALIDATED_AT]
    checked = ring.validate(model, unseen)
    absent = NO_UPSTREAM.get(record.framework, set())
    projected = {
        name: ring.project(model, checked, cost, job)
        for name, cost in ring.STRATEGIES.items()
        if name not in absent
    }
    package = sweeps.PACKAGES[record.framework]
    measured = (
        f"Measured on {record.environment.cpu} with {package} {record.version}, "
        f"{record.started}, load {number(record.environment.load)} at the start. "
        f"The model is off by {checked.mean:.1%} in the mean and by {checked.largest:+.1%} at most "
        f"at {VALIDATED_AT} hosts, which it was not fitted to."
    )
    assumed = f"{PROJECTION}: {_described(job)}. {_UNITS}"
    return [
        measured,
        _parameters(title, model, every),
        _validation(title, model, unseen, checked),
        assumed,
        _steps(title, projected),
        _limits(title, projected),
    ]


_UNITS = (
    "Each replica adds a batch. A step: time in ms and its 95% interval where no "
    "communication is hidden behind compute · time where as much is as can be · throughput of a "
    "replica where nothing is hidden, as a share of one device."
)


def _described(job: Job) -> str:
    return (
        f"{number(job.compute * 1e3)} ms of compute, {number(job.size / 1e6)} MB of gradients, "
        f"links of {number(job.bandwidth / 1e9)} Gbit/s and {number(job.latency * 1e6)} µs, "
        f"{job.layers} layers, synchronising every {job.every} steps where less often, "
        f"{job.micro_batches} micro-batches of a batch and {number(job.activations / 1e6)} MB "
        "over a cut in a pipeline"
    )


def _table(title: str, heads: list[str], rows: list[list[str]]) -> Table:
    return Table(title, [*of_words(heads[0]), *of_figures(*heads[1:])], rows)


def _bounds(estimate: Estimate, factor: float = 1.0) -> str:
    value, low, high = (number(part * factor) for part in vars(estimate).values())
    return f"{value} ({low}–{high})"


def _parameters(title: str, model: Fit, every: list[ring.Measured]) -> Table:
    rows = [
        ["a: latencies of the link in a step", _bounds(model.linear([1.0, 0.0, 0.0]))],
        ["o: the hosts' own time in a step, ms", _bounds(model.linear([0.0, 1.0, 0.0]), 1e3)],
        ["b: bytes sent for one of payload", _bounds(model.linear([0.0, 0.0, 1.0]))],
    ]
    for latency, bandwidth in dict.fromkeys((p.latency, p.bandwidth) for p in every):
        link = f"at {number(latency * 1e3)} ms and {number(bandwidth / 1e6)} Mbit/s"
        rows.append([f"α {link}, ms", _bounds(model.alpha(latency), 1e3)])
        rows.append([f"β {link}, ms/MB", _bounds(model.beta(bandwidth), 1e9)])
    rows.append(["scatter about the model", f"{model.scatter:.1%}"])
    return _table(f"{title}: the ring model, fitted", ["", "(95% interval)"], rows)


def _validation(title: str, model: Fit, unseen: list[ring.Measured], checked: Validation) -> Table:
    rows = [
        [
            f"{number(p.latency * 1e3)} ms, {number(p.bandwidth / 1e6)} Mbit/s",
            number(p.size / 1e3),
            number(p.seconds * 1e3),
            number(ring.predict(model, p).value * 1e3),
            f"{error:+.1%}",
        ]
        for p, error in zip(unseen, checked.errors, strict=True)
    ]
    heads = ["link", "all-reduce of [kB]", "measured [ms]", "predicted [ms]", "error"]
    return _table(f"{title}: predicted for {VALIDATED_AT} hosts, and measured", heads, rows)


def _steps(title: str, projected: dict[str, list[Projected]]) -> Table:
    rows = []
    for replicas in ring.REPLICAS:
        in_strategies = [_of(steps, replicas) for steps in projected.values()]
        rows.append([f"{replicas:,}", *map(_step, in_strategies)])
    return _table(f"{title}: {PROJECTION}: a step", ["replicas", *projected], rows)


def _of(steps: list[Projected], replicas: int) -> Projected | None:
    return next((one for one in steps if one.replicas == replicas), None)


def _step(projected: Projected | None) -> str:
    if projected is None:
        return MISSING
    hidden = number(projected.hidden * 1e3)
    return f"{_bounds(projected.step, 1e3)} · {hidden} · {projected.share:.0%}"


def _limits(title: str, projected: dict[str, list[Projected]]) -> Table:
    rows = []
    for name, steps in projected.items():
        ends = [
            ring.scales_to([(one.replicas, time(one)) for one in steps])
            for time in (
                lambda one: one.step.value,
                lambda one: one.step.high,
                lambda one: one.step.low,
                lambda one: one.hidden,
            )
        ]
        value, low, high, hidden = (_end(end, steps) for end in ends)
        rows.append([name, f"{value} ({low}–{high})", hidden])
    heads = ["", "nothing hidden (95%)", "as much hidden as can be"]
    gain = f"twice the replicas give at least {ring.LEAST_GAIN} times the throughput up to"
    return _table(f"{title}: {PROJECTION}: {gain}", heads, rows)


def _end(replicas: int | None, steps: list[Projected]) -> str:
    """Where scaling ends; the last number looked at may not be the end."""
    if replicas is None:
        return MISSING
    last = replicas == ring.REPLICAS[-1]
    return f"{replicas:,}{' or more' if last else ''}"
