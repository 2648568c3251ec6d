"""Sweeps of all-reduces between hosts made by `bench.network.hosts`, and their record.

The links are so slow that they are the limit, and not the cores that all hosts share.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from importlib import metadata
from itertools import product
from pathlib import Path
from statistics import median
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from bench.harness import machine
from bench.network.hosts import Hosts, Link
from bench.network.ring import Measured
from bench.record import Base, Environment, Positive, load_json
from shared import scratch

SCHEMA = 1
LINKS = (Link(latency=5e-3, bandwidth=50e6), Link(latency=0.5e-3, bandwidth=200e6))
FITTED_AT, VALIDATED_AT = (2, 4), 8
FLOATS = (1_000, 10_000, 50_000, 200_000, 500_000)
REPEATS = 9
LIMIT_S = 150  # for one sweep, the start of its processes included
PACKAGES = {"pt": "torch", "tf": "tensorflow"}


class Sweep(Base, frozen=True, kw_only=True, eq=False):
    """All-reduces between some hosts over one link.

    seconds: by bytes (as text), one value per repetition: that of the slowest host.
    """

    replicas: Annotated[int, Meta(gt=0)]
    latency_s: Positive
    bandwidth_bit_s: Positive
    seconds: dict[str, Annotated[list[Positive], Meta(min_length=1)]]


class Record(Base, frozen=True, kw_only=True, eq=False):
    """The sweeps of one framework on one machine."""

    schema_version: Literal[1]
    framework: Literal["pt", "tf"]
    version: str
    started: str
    finished: bool
    environment: Environment
    sweeps: list[Sweep]


def measure(framework: str, begun: Record | None = None) -> Iterator[Record]:
    """Sweep every number of hosts over every link; yields the record after each.

    begun: the record of a run that was cut short, whose sweeps are kept. Raises Refused if there
    can be no hosts, RuntimeError if a program fails, ValueError if `begun` is from another machine
    or version.
    """
    record = Record(
        schema_version=SCHEMA,
        framework=framework,
        version=metadata.version(PACKAGES[framework]),
        started=datetime.now(UTC).isoformat(timespec="seconds"),
        finished=False,
        environment=machine.describe(threads=1),
        sweeps=[],
    )
    if begun:
        if _conditions(begun) != _conditions(record):
            raise ValueError(
                "the record has another framework, version or machine: give a new file"
            )
        record = begun
    done = [(one.replicas, one.latency_s, one.bandwidth_bit_s) for one in record.sweeps]
    wanted = [*product((*FITTED_AT, VALIDATED_AT), LINKS)]
    for replicas, link in wanted:
        if (replicas, link.latency, link.bandwidth) not in done:
            sweeps = [*record.sweeps, sweep(framework, replicas, link)]
            record = record.but(sweeps=sweeps, finished=len(sweeps) == len(wanted))
            yield record


def _conditions(record: Record) -> tuple:
    environment = record.environment
    return record.framework, record.version, environment.cpu, environment.logical_cores


def sweep(framework: str, replicas: int, link: Link) -> Sweep:
    """Time each all-reduce between so many hosts."""
    program = [sys.executable, "-m", f"{framework}_impl.kit.collectives"]
    program += ["--floats", ",".join(map(str, FLOATS)), "--repeats", str(REPEATS)]
    with Hosts(replicas, link, seconds=LIMIT_S) as hosts:
        answers = [json.loads(text) for text in run_on_each(hosts, program)]
    return Sweep(
        replicas=replicas,
        latency_s=link.latency,
        bandwidth_bit_s=link.bandwidth,
        seconds={
            str(4 * count): list(map(max, *(answer[str(count)] for answer in answers)))
            for count in FLOATS
        },
    )


def run_on_each(hosts: Hosts, program: list[str]) -> list[str]:
    """Run a program on every host, on one thread without GPU, and return the output of each.

    Raises RuntimeError with the last error line as soon as one fails.
    """
    quiet = dict.fromkeys(machine.THREAD_VARIABLES, "1")
    quiet |= {"TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": "-1"}
    with scratch.folder() as folder:
        texts = [[folder / f"{n}.{kind}" for kind in "oe"] for n in range(hosts.count)]
        started = []
        for host, (out, err) in enumerate(texts):
            with out.open("w") as stdout, err.open("w") as stderr:
                settings = {"env": hosts.environment(host) | quiet, "stdout": stdout}
                started.append(hosts.start(host, program, **settings, stderr=stderr))
        failed = _first_failure(started)
        if failed is not None:
            last = texts[failed][1].read_text("utf-8", "replace").strip().splitlines()[-1:]
            status = started[failed].returncode
            raise RuntimeError(f"host {failed} ended with status {status}: {' '.join(last)}")
        return [out.read_text("utf-8") for out, _ in texts]


def _first_failure(started: list[subprocess.Popen]) -> int | None:
    """Wait until all have ended, or one has failed; which. The hosts end what goes on."""
    while True:
        states = [process.poll() for process in started]
        for host, status in enumerate(states):
            if status:
                return host
        if None not in states:
            return None
        time.sleep(0.05)


# The record ---------------------------------------------------------------------------------------


def load(path: Path, *, unfinished: bool = False) -> Record:
    """A record of `measure`. Raises ValueError with one line for anything else.

    unfinished: accept only one that was cut short.
    """
    record = load_json(path, Record, "a record of sweeps")
    try:
        points(record)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    if record.finished is unfinished:
        reason = "it is finished" if unfinished else "it was cut short: go on with `sweeps`"
        raise ValueError(f"{path}: {reason}")
    return record


def encode(record: Record) -> str:
    """A record as JSON."""
    return msgspec.json.format(msgspec.json.encode(record), indent=1).decode() + "\n"


def points(record: Record) -> list[Measured]:
    """A point for each number of hosts, link and size: the median of its repetitions.

    Raises ValueError if a size is not a number of bytes.
    """
    measured = []
    for one in record.sweeps:
        for text, seconds in one.seconds.items():
            size = float(text)
            if not 0 < size < float("inf"):
                raise ValueError(f"{text} is not a number of bytes")
            link = one.latency_s, one.bandwidth_bit_s
            measured.append(Measured(one.replicas, *link, size, median(seconds)))
    return measured
