"""From all-reduces over slow links to the step time of a job with up to 1,024 replicas.

    twinbench projection measure --framework pt RECORD
    twinbench projection show RECORD [RECORD] [--bandwidth 10gbit] [--latency 50us] [...]

`measure` takes some two minutes and times all-reduces between 2, 4 and 8 hosts that
`bench.network.hosts` makes; where RECORD was cut short, it goes on. `show` fits the ring model of
`bench.network.ring` to those of 2 and 4, says how far it is off at 8, and projects the step of a
job, which the options describe, for 8 to 1,024 replicas. With `--page` it puts the tables between
the markers of a page; `--check` only says whether they are there.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from dataclasses import asdict, fields
from pathlib import Path

from bench.network import quantities, ring, sweeps
from bench.network.hosts import Refused
from bench.network.ring import Estimate, Fit, Job, Projected, Validation
from bench.network.sweeps import FITTED_AT, VALIDATED_AT, Record
from bench.report import parsers, readme
from bench.report.blocks import Table, of_figures, of_words
from bench.report.figures import MISSING, number
from bench.report.replace import write_atomically
from bench.report.tables import parts_as_markdown, parts_as_text

BEGIN, END = "<!-- projection:begin -->", "<!-- projection:end -->"
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


# Text: paragraphs and tables ----------------------------------------------------------------------


def content(records: list[Record], job: Job) -> list[str | Table]:
    """What is shown, in order. Raises ValueError where a record does not allow a fit."""
    parts: list[str | Table] = []
    for record in records:
        parts += _framework(record, job)
    return parts


def _framework(record: Record, job: Job) -> list[str | Table]:
    title = TITLES[record["framework"]]
    every = sweeps.points(record)
    model = ring.fit([point for point in every if point.replicas in FITTED_AT])
    unseen = [point for point in every if point.replicas == VALIDATED_AT]
    checked = ring.validate(model, unseen)
    absent = NO_UPSTREAM.get(record["framework"], set())
    projected = {
        name: ring.project(model, checked, cost, job)
        for name, cost in ring.STRATEGIES.items()
        if name not in absent
    }
    package = sweeps.PACKAGES[record["framework"]]
    measured = (
        f"Measured on {record['environment']['cpu']} with {package} {record['version']}, "
        f"{record['started']}, load {number(record['environment'].get('load'))} at the start. "
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
    "Each replica adds a batch of its own. A step: time in ms and its 95% interval where no "
    "communication is hidden behind compute · time where as much is as can be · throughput of a "
    "replica where nothing is hidden, as a share of that of a device alone."
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
    value, low, high = (number(each * factor) for each in vars(estimate).values())
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
        found = [_of(steps, replicas) for steps in projected.values()]
        rows.append([f"{replicas:,}", *map(_step, found)])
    return _table(f"{title}: {PROJECTION}: a step", ["replicas", *projected], rows)


def _of(steps: list[Projected], replicas: int) -> Projected | None:
    return next((one for one in steps if one.replicas == replicas), None)


def _step(found: Projected | None) -> str:
    if found is None:
        return MISSING
    return f"{_bounds(found.step, 1e3)} · {number(found.hidden * 1e3)} · {found.share:.0%}"


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


# Command line -------------------------------------------------------------------------------------

# field of a job -> how it is read, what it is
KINDS = {
    "compute": (quantities.seconds, "of one batch on one device, such as 100ms"),
    "size": (quantities.size, "of all gradients, such as 100MB"),
    "latency": (quantities.seconds, "of a link, one way, such as 50us"),
    "bandwidth": (quantities.bits, "of a link, such as 10gbit"),
    "layers": (int, "parts of the model that are sharded, or between which it may be cut"),
    "every": (int, "steps from one synchronisation to the next"),
    "micro_batches": (int, "of one batch, in a pipeline"),
    "activations": (quantities.size, "that a batch carries over a cut, such as 10MB"),
}


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit status (1: a check failed, 2: an error)."""
    parser = parsers.described("twinbench projection", __doc__)
    choice = parser.add_subparsers(dest="command", required=True)
    live = choice.add_parser("measure", help="time all-reduces between hosts")
    live.add_argument("--framework", choices=TITLES, required=True)
    live.add_argument("record", type=Path, help="the file to write")
    shown = choice.add_parser("show", help="fit, validate and project")
    shown.add_argument("records", type=Path, nargs="+", help="files of `measure`")
    shown.add_argument("--page", type=Path, help="put the tables into this page")
    shown.add_argument("--check", action="store_true", help="with --page: exit 1 if they differ")
    for name, (kind, meaning) in KINDS.items():
        option, usual = f"--{name.replace('_', '-')}", getattr(JOB, name)
        shown.add_argument(option, type=kind, default=usual, help=meaning)
    given = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        return _measure(given) if given.command == "measure" else _show(given)
    except (ValueError, Refused, RuntimeError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _measure(given: argparse.Namespace) -> int:
    begun = sweeps.load(given.record, unfinished=True) if given.record.exists() else None
    for record in sweeps.measure(given.framework, begun):
        write_atomically({given.record: json.dumps(record, indent=1) + "\n"})
        last = record["sweeps"][-1]
        print(f"{last['replicas']} hosts, {last['bandwidth_bit_s']:.0f} bit/s", file=sys.stderr)
    return 0


def _show(given: argparse.Namespace) -> int:
    job = Job(**{field.name: getattr(given, field.name) for field in fields(Job)})
    wrong = [name for name, value in asdict(job).items() if value <= 0 and name != "latency"]
    if wrong:
        raise ValueError(f"--{wrong[0].replace('_', '-')} must be above 0")
    parts = content([sweeps.load(path) for path in given.records], job)
    if given.page is None:
        print(parts_as_text(parts, int(os.environ.get("COLUMNS", "100"))), end="")
        return 0
    old = readme.read(given.page)
    try:
        new = readme.between(old, BEGIN, END, parts_as_markdown(parts))
    except ValueError as error:
        raise ValueError(f"{given.page}: {error}") from None
    if given.check and old != new:
        print(f"{given.page}: its tables are not what the records give", file=sys.stderr)
        return 1
    if not given.check:
        write_atomically({given.page: new})
        print(given.page)
    return 0
