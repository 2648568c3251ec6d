"""Find mistakes in a setup, in half a minute.

    twinbench doctor                looks at this machine
    twinbench doctor my_model.py    and at the model, its step and its batches

It checks threads, CPU instructions, modes, shapes and the input pipeline. The
file is one for `twinbench try` or `twinbench diagnose`. Each framework runs in
a new process, as your programs start it. A finding says what was measured,
what to do about it, and what a record shows that this gains.
"""

from __future__ import annotations

import json
import sys
import textwrap
from dataclasses import asdict
from pathlib import Path

from bench.analysis.reading import load
from bench.doctor import asking, judges
from bench.doctor import host as hosts
from bench.doctor.files import sides_of
from bench.doctor.findings import WIDTH, Finding, lines
from bench.doctor.gains import newest, shown, with_gain
from bench.doctor.host import Host
from bench.harness import machine
from bench.record import FRAMEWORKS
from bench.report import parsers
from shared.health import Facts

LIMIT_S = 28.0
SHARES = {2: 0.6, 1: 0.9}  # of what is left, where so many frameworks are still to be asked
BY_DEFAULT = {
    "pt": "PyTorch runs eagerly unless torch.compile is called",
    "tf": "Keras runs fit and predict as graphs",
}


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit status (2: an error)."""
    parser = parsers.described("twinbench doctor", __doc__)
    parser.add_argument("file", nargs="?", type=Path, metavar="my_model.py", help="a model's file")
    parser.add_argument("--framework", choices=FRAMEWORKS, help="only this framework")
    parsers.add_record(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")
    given = parser.parse_args(arguments)
    watch, clock = machine.Watch(), asking.Clock(LIMIT_S)
    try:
        path = given.file and given.file.resolve()
        sides = [given.framework] if given.framework else list(FRAMEWORKS)
        if path:
            sides = sides_of(given.file, given.framework)
        records = {shown(place): load(place) for place in given.record or ()} or newest()
    except ValueError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    here = hosts.here()
    known, remarks, whole = {}, [], True
    for place, side in enumerate(sides):
        facts, why = asking.facts(side, path, clock, share=SHARES[len(sides) - place])
        known[side] = facts
        remarks += [why] if why else []
        whole = whole and (not why or why.endswith(asking.LEFT_OUT))
    source = path.read_text("utf-8", "replace") if path else ""
    without = any(facts.without_onednn_s for facts in known.values())
    with_onednn_s = asking.with_onednn(clock) if without else None
    every = judges.judged(here, known, source, _speeds(here, known, clock), with_onednn_s)
    runtimes = asking.runtimes(clock)
    every += [one for name, n in runtimes.items() for one in judges.runtime(here, name, n)]
    findings = [with_gain(one, records) for one in every]
    threads = {FRAMEWORKS[side]: f.pools.threads for side, f in known.items() if f.pools}
    threads |= {name: {"intra-op": count} for name, count in runtimes.items()}
    remarks += [
        f"{n} not checked: {why}" for facts in known.values() for n, why in facts.skipped.items()
    ]
    attempt = watch.stop()
    if busy := machine.busy(attempt.others):
        remarks.append(f"{busy}: times are noisy, run this again when it is quiet")
    seconds = attempt.seconds
    if given.json:
        told = {"findings": [asdict(one) for one in findings], "remarks": remarks}
        told |= {"threads": threads, "usable_cores": here.usable, "seconds": seconds}
        told |= {"by_default": {side: BY_DEFAULT[side] for side in sides}}
        print(json.dumps(told))
    else:
        print("\n".join(text(here, findings, threads, remarks, seconds, whole=whole)))
    return 0


def _speeds(here: Host, known: dict[str, Facts], clock: asking.Clock) -> dict[str, float]:
    """Seconds of a step of the file's Keras model on the backend asked for and on TensorFlow."""
    for facts in known.values():
        backend = facts.keras_backend
        if backend in ("", "tensorflow"):
            backend = here.variables.get("KERAS_BACKEND", "")
        if facts.keras and facts.batches and backend not in ("", "tensorflow"):
            return asking.keras_speeds(facts.keras, facts.batches.samples, backend, clock)
    return {}


def text(
    here: Host,
    findings: list[Finding],
    threads: dict[str, dict[str, int]],
    remarks: list[str],
    seconds: float,
    *,
    whole: bool = True,
) -> list[str]:
    """The answer as lines: the findings, or that there are none.

    remarks: what was not checked, or disturbed. whole: whether the frameworks reported everything.
    """
    wrong = [one for one in findings if one.wrong]
    pools = [f"{name} {pool['intra-op']}" for name, pool in threads.items()]
    looked = f"{hosts.words(here)}; threads: {', '.join(pools) or 'not known'}; {seconds:.0f} s"
    head = f"{len(wrong)} found" if wrong else "Nothing found"
    if not whole:
        head += ", but not everything was checked"
    told = [f"{head} ({looked})"]
    for finding in findings:
        told += lines(finding)
    return told + textwrap.wrap("; ".join(remarks), WIDTH) if remarks else told


def warn(path: Path | None = None) -> None:
    """Print mistakes that can be seen without a process, before `try` and `diagnose` begin."""
    for finding in judges.quick(hosts.here(), path):
        print("\n".join(lines(finding)), file=sys.stderr, flush=True)
