"""Sweeps of all-reduces between hosts that `bench.network.hosts` makes, and their record.

The links are so slow that they, and not the cores that all hosts share, are the limit.
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
from typing import Any

from bench.analysis.values import is_number
from bench.harness import machine
from bench.network.hosts import Hosts, Link
from bench.network.ring import Measured
from shared import scratch

SCHEMA = 1
LINKS = (Link(latency=5e-3, bandwidth=50e6), Link(latency=0.5e-3, bandwidth=200e6))
FITTED_AT, VALIDATED_AT = (2, 4), 8
FLOATS = (1_000, 10_000, 50_000, 200_000, 500_000)
REPEATS = 9
LIMIT_S = 150  # for one sweep, the start of its processes included
PACKAGES = {"pt": "torch", "tf": "tensorflow"}

Record = dict[str, Any]


def measure(framework: str, begun: Record | None = None) -> Iterator[Record]:
    """Sweep every number of hosts over every link; yields the record after each.

    begun: the record of a run that was cut short, whose sweeps are kept

    Raises Refused where there can be no hosts, RuntimeError where a program fails, ValueError where
    `begun` is of another machine or version.
    """
    record = {
        "schema_version": SCHEMA,
        "framework": framework,
        "version": metadata.version(PACKAGES[framework]),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "finished": False,
        "environment": machine.describe(threads=1),
        "sweeps": [],
    }
    if begun:
        if _conditions(begun) != _conditions(record):
            raise ValueError("the record is of another framework, version or machine")
        record = begun
    done = [(one["replicas"], one["latency_s"], one["bandwidth_bit_s"]) for one in record["sweeps"]]
    every = [*product((*FITTED_AT, VALIDATED_AT), LINKS)]
    for replicas, link in every:
        if (replicas, link.latency, link.bandwidth) not in done:
            record["sweeps"].append(sweep(framework, replicas, link))
            record["finished"] = len(record["sweeps"]) == len(every)
            yield record


def _conditions(record: Record) -> list:
    environment = record["environment"]
    same = ("schema_version", "framework", "version")
    return [*(record[name] for name in same), environment["cpu"], environment["logical_cores"]]


def sweep(framework: str, replicas: int, link: Link) -> Record:
    """The seconds of each all-reduce by its bytes: those of the host that took longest."""
    program = [sys.executable, "-m", f"{framework}_impl.kit.collectives"]
    program += ["--floats", ",".join(map(str, FLOATS)), "--repeats", str(REPEATS)]
    with Hosts(replicas, link, seconds=LIMIT_S) as hosts:
        answers = [json.loads(text) for text in run_on_each(hosts, program)]
    return {
        "replicas": replicas,
        "latency_s": link.latency,
        "bandwidth_bit_s": link.bandwidth,
        "seconds": {
            str(4 * count): list(map(max, *(answer[str(count)] for answer in answers)))
            for count in FLOATS
        },
    }


def run_on_each(hosts: Hosts, program: list[str]) -> list[str]:
    """Run a program on every host, on one thread and no GPU, and return what each printed.

    Raises RuntimeError, with the last line of its errors, as soon as one fails.
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
    """A record of `measure`. Raises ValueError in one line for anything else.

    unfinished: take one that was cut short, and no other
    """
    try:
        record = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError):
        raise ValueError(f"{path}: not JSON, or cut off before its end") from None
    try:
        _check(record, unfinished)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: not a record of sweeps ({error!r})") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return record


def _check(record: Record, unfinished: bool) -> None:
    if record["schema_version"] != SCHEMA:
        raise ValueError(f"its schema is {record['schema_version']!r}, this program reads {SCHEMA}")
    if record["framework"] not in PACKAGES:
        raise ValueError(f"there is no framework {record['framework']!r}")
    if record["finished"] is unfinished:
        raise ValueError("it is finished" if unfinished else "its run was cut short: measure on")
    words = (record["version"], record["started"], record["environment"]["cpu"])
    if not all(isinstance(word, str) for word in words):
        raise ValueError("its version, start and cpu are not texts")
    for point in points(record):
        if not all(is_number(value) and value > 0 for value in vars(point).values()):
            raise ValueError(f"{point} is not a measurement")


def points(record: Record) -> list[Measured]:
    """A point for each number of hosts, link and size: the median of its repetitions."""
    return [
        Measured(
            replicas=one["replicas"],
            latency=one["latency_s"],
            bandwidth=one["bandwidth_bit_s"],
            size=float(size),
            seconds=median(seconds),
        )
        for one in record["sweeps"]
        for size, seconds in one["seconds"].items()
    ]
