"""Simulate several hosts on this machine, and project the times of many more.

    twinbench network hosts --hosts 2 --latency 5ms --bandwidth 100mbit COMMAND
    twinbench network sweeps --framework pt RECORD
    twinbench network projection RECORD --bandwidth 10gbit --latency 50us

It needs Linux with network namespaces. docs/many_machines.md has the results.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from dataclasses import asdict, fields
from pathlib import Path

from bench import quantities
from bench.network import hosts, sweeps
from bench.network.hosts import Hosts, Link, Refused
from bench.network.projection import JOB, TITLES, content
from bench.network.ring import Job
from bench.report import parsers, readme
from bench.report.replace import write_atomically
from bench.report.tables import parts_as_markdown, parts_as_text

BEGIN, END = "<!-- projection:begin -->", "<!-- projection:end -->"
WHAT = {
    "hosts": "Run COMMAND in a shell on every host at once, with the variables of a cluster "
    "manager: RANK (of the host), WORLD_SIZE, MASTER_ADDR, MASTER_PORT, GLOO_SOCKET_IFNAME and "
    "TF_CONFIG. Each line of output begins with its host. The exit status is the first that is "
    "not 0.",
    "sweeps": "Time all-reduces between 2, 4 and 8 hosts, which takes two minutes. A RECORD that "
    "was cut short is completed.",
    "projection": "Fit a model to 2 and 4 hosts, check it on 8, and project the step of a job to "
    "8 to 1,024 replicas. The options describe the job.",
}
# field of a job -> how it is read, what it is
KINDS = {
    "compute": (quantities.seconds, "time of one batch on one device, such as 100ms"),
    "size": (quantities.size, "size of all gradients, such as 100MB"),
    "latency": (quantities.seconds, "of a link, one way, such as 50us"),
    "bandwidth": (quantities.bits, "of a link, such as 10gbit"),
    "layers": (int, "layers that can be sharded or put on different devices"),
    "every": (int, "steps between synchronisations"),
    "micro_batches": (int, "micro-batches per batch, in a pipeline"),
    "activations": (quantities.size, "sent per batch between two devices, such as 10MB"),
}


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit status (1: a check failed, 2: an error)."""
    parser = _parser()
    given = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        return given.run(given)
    except (ValueError, Refused, RuntimeError) as error:
        print(f"{parser.prog} {given.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = parsers.described("twinbench network", __doc__)
    choice = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    run, live, shown = (
        choice.add_parser(name, help=what, description=what) for name, what in WHAT.items()
    )
    run.set_defaults(run=_hosts)
    live.set_defaults(run=_sweeps)
    shown.set_defaults(run=_projection)
    run.add_argument("--hosts", type=int, default=2, help="number of hosts (default: 2)")
    one_way = "of each link, one way, such as 5ms or 50us"
    run.add_argument("--latency", type=quantities.seconds, default=0.0, help=one_way)
    run.add_argument("--bandwidth", type=quantities.bits, help="of each link, such as 100mbit")
    run.add_argument("--seconds", type=float, default=600.0, help="time limit (default: 600)")
    run.add_argument("line", metavar="COMMAND", help="shell command to run on every host")
    live.add_argument("--framework", choices=TITLES, required=True)
    live.add_argument("record", type=Path, help="file to write, or to go on with")
    shown.add_argument("records", type=Path, nargs="+", metavar="record", help="file of `sweeps`")
    shown.add_argument("--page", type=Path, help="put the tables between this page's markers")
    shown.add_argument(
        "--check", action="store_true", help="with --page: only exit 1 if the page is outdated"
    )
    for name, (kind, meaning) in KINDS.items():
        option, usual = f"--{name.replace('_', '-')}", getattr(JOB, name)
        shown.add_argument(option, type=kind, default=usual, metavar="X", help=meaning)
    return parser


def _hosts(given: argparse.Namespace) -> int:
    link = Link(given.latency, given.bandwidth)
    with Hosts(given.hosts, link, seconds=given.seconds) as made:
        return hosts.run(made, given.line)


def _sweeps(given: argparse.Namespace) -> int:
    begun = sweeps.load(given.record, unfinished=True) if given.record.exists() else None
    for record in sweeps.measure(given.framework, begun):
        write_atomically({given.record: sweeps.encode(record)})
        last = record.sweeps[-1]
        print(f"{last.replicas} hosts, {last.bandwidth_bit_s:.0f} bit/s", file=sys.stderr)
    return 0


def _projection(given: argparse.Namespace) -> int:
    job = Job(**{field.name: getattr(given, field.name) for field in fields(Job)})
    wrong = [name for name, value in asdict(job).items() if value <= 0 and name != "latency"]
    if wrong:
        raise ValueError(f"--{wrong[0].replace('_', '-')}: give more than 0")
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
        print(f"{given.page} is outdated: make it again without --check", file=sys.stderr)
        return 1
    if not given.check:
        write_atomically({given.page: new})
        print(given.page)
    return 0
