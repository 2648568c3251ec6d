"""Explain why one of two programs is faster, in milliseconds that add up.

    twinbench why TASK                  plain steps of PyTorch and TensorFlow
    twinbench why TASK --technique T    a technique and its baseline
    twinbench why my_model.py           a file for `twinbench try`
    twinbench why results/latest        the main ratios of a record
    twinbench why A B                   two records of different machines

Both programs are timed in turns without a profiler, then profiled once. The
profiler's cost is subtracted, and the parts are scaled to the time without it.
The answer is one sentence, the experiments that tested it, and tables by kind
of work and by layer. docs/why.md explains the kinds.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

import msgspec

from bench.analysis.reading import load, results_file
from bench.harness.plan import FRAMEWORKS
from bench.record import Record, Why, encode
from bench.report import causes, parsers
from bench.report.files import write_reports
from bench.report.replace import write_atomically
from bench.why import of_record, pairs, two_machines
from bench.why.causes import MEASURED, Cause, milliseconds, sentence
from bench.why.difference import Difference, Line
from shared.user_model import BadFile

ROWS = 12  # of the table of layers
SMALL = 0.01  # of the difference: lines below are one line


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit status (2: an error)."""
    given, prog = _parsed(arguments)
    try:
        told = _of_records(given) if _is_record(given.what[0]) else _of_pair(given)
    except (ValueError, BadFile) as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return 2
    print(json.dumps(told) if given.json else "\n".join(told))
    return 0


def _is_record(what: str) -> bool:
    return what.endswith(".json") or Path(what).is_dir()


def _of_pair(given: argparse.Namespace) -> dict | list[str]:
    if len(given.what) > 1:
        raise ValueError("give one task or file, or two records")
    (given.what,) = given.what
    with tempfile.TemporaryDirectory() as folder:
        pair = pairs.asked(given, Path(folder))
        difference, named = pairs.explained(pair, rounds=given.rounds, thorough=given.thorough)
    return (as_json if given.json else text)(difference, named)


def _of_records(given: argparse.Namespace) -> dict | list[str]:
    records = [load(Path(one)) for one in given.what]
    if len(records) > 1:
        return two_machines.told(records, given.what)
    (record,) = records
    if given.write:
        file = results_file(Path(given.what[0]))
        of_record.check_machine(record)
        with contextlib.ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            request = of_record.of_suite(folder)
            for changed in of_record.with_causes(record, request, 60 * given.minutes):
                record = changed
                write_atomically({file: encode(record).decode()})
        write_reports(file)
    if given.json:
        return {"why": msgspec.to_builtins(record.why)}
    if not record.why:
        hint = (
            "see the lines above" if given.write else "twinbench why RECORD --write measures them"
        )
        return [f"The record has no causes: {hint}."]
    return [line for one in causes.known(record) for line in of_why(record, one)]


def _parsed(arguments: list[str] | None) -> tuple[argparse.Namespace, str]:
    parser = parsers.described("twinbench why", __doc__)
    parser.add_argument(
        "what", nargs="+", metavar="TASK|FILE|RECORD", help="what to explain: see above"
    )
    parser.add_argument(
        "--batch", type=int, metavar="B", help="samples per step (default: the task's)"
    )
    parser.add_argument("--predict", action="store_true", help="time predictions, not train steps")
    parser.add_argument("--technique", metavar="T", help="compare a technique and its baseline")
    parser.add_argument(
        "--variant", metavar="V", help="variant of the technique (default: the first)"
    )
    parser.add_argument(
        "--framework", choices=FRAMEWORKS, help="framework of the technique (default: pt)"
    )
    parser.add_argument(
        "--framework-pair", action="store_true", help="compare the technique in both frameworks"
    )
    parser.add_argument(
        "--write", action="store_true", help="measure a record's ratios, and add the causes to it"
    )
    parser.add_argument(
        "--minutes", type=float, default=10.0, metavar="N", help="limit of --write (default: 10)"
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=pairs.ROUNDS,
        metavar="N",
        help=f"rounds of timed steps (default: {pairs.ROUNDS})",
    )
    parser.add_argument(
        "--thorough", action="store_true", help="also run the experiments that need new processes"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    given = parser.parse_args(arguments)
    if given.rounds < 2:
        parser.error(f"--rounds: give 2 or more, not {given.rounds}")
    if given.batch is not None and given.batch < 1:
        parser.error(f"--batch: give 1 or more, not {given.batch}")
    if given.variant and not given.technique:
        parser.error("--variant: give --technique, too")
    if given.write and not (len(given.what) == 1 and _is_record(given.what[0])):
        parser.error("--write: give one record, such as results/latest")
    return given, parser.prog


# Words -------------------------------------------------------------------------------------------


def text(difference: Difference, named: list[Cause]) -> list[str]:
    """The sentence, what was tested, and both tables."""
    a, b = difference.a, difference.b
    lines = [sentence(difference, named) + "."]
    for one in named:
        if one.evidence:
            lines.append(f"  {one.kind}: {one.status}; {one.evidence}")
        elif one.status != MEASURED:
            lines.append(f"  {one.kind}: measured; why is a guess, no experiment decides it")
    low, high = (end * 1e3 for end in difference.interval)
    lines += [
        "",
        f"a step: {a.name} {a.step * 1e3:.3f} ms, {b.name} {b.step * 1e3:.3f} ms; "
        f"the difference lies in {low:.3f} to {high:.3f} ms (99%)",
        f"the profiler's cost, taken out: {a.profiler_cost:+.1%} and {b.profiler_cost:+.1%} of a "
        f"step; the parts are scaled by {a.scale:.2f} and {b.scale:.2f}",
        _with_profilers(difference),
        "",
    ]
    lines += _table("kind of work", difference, difference.kinds)
    lines += ["", *_table("layer and pass", difference, difference.layers, ROWS)]
    lines += ["", *_unpaired(difference), *_products(difference)]
    return lines


def _with_profilers(difference: Difference) -> str:
    """What the profiled steps differ by, which no scaling has touched."""
    told = f"with the profilers on, the steps differ by {difference.profiled * 1e3:.3f} ms"
    if difference.is_noise:
        return told
    return f"{told}: {difference.profiled / difference.seconds - 1:+.0%}"


def of_why(record: Record, one: Why) -> list[str]:
    """The sentence and the table that a record keeps."""
    lines = [f"{causes.heading(record, one)}: {one.sentence}."]
    lines += [f"  {told}" for told in (causes.agreement(record, one), *causes.evidence(one))]
    lines.append(f"  {'kind of work':40}{_short(one.names[0])}{_short(one.names[1])}{'more':>13}")
    for what, (a, b) in one.kinds.items():
        lines.append(f"  {what:40}" + "".join(f"{s * 1e3:13.3f}" for s in (a, b, a - b)))
    return [*lines, ""]


def _unpaired(difference: Difference) -> list[str]:
    """The layers that have weights and no partner."""
    both = zip((difference.a.name, difference.b.name), difference.unpaired, strict=True)
    return [
        f"layers of {name} without a pair, which count for what is around them: {', '.join(some)}"
        for name, some in both
        if some
    ]


def _table(title: str, difference: Difference, every: list[Line], most: int = 99) -> list[str]:
    """Lines of both sides and their difference, which the last sums up."""
    least = SMALL * abs(difference.seconds)
    shown = [one for one in every[:most] if abs(one.more) >= least or one.what == "not attributed"]
    rest = [one for one in every if one not in shown]
    if rest:
        shown.append(Line("all others", sum(r.a for r in rest), sum(r.b for r in rest)))
    shown.append(Line("the step", difference.a.step, difference.b.step))
    rows = [f"{title:40}{'':>2}{_short(difference.a.name)}{_short(difference.b.name)}{'more':>13}"]
    for one in shown:
        values = "".join(f"{value * 1e3:13.3f}" for value in (one.a, one.b, one.more))
        rows.append(f"{one.what[:41]:42}{values}")
    return rows


def _short(name: str) -> str:
    return f"{name[:12]:>13}"


def _products(difference: Difference) -> list[str]:
    """The products and convolutions that take most, with library and share of the peak."""
    rows = []
    for side in (difference.a, difference.b):
        for one in sorted(side.products, key=lambda one: -one.seconds)[:5]:
            peak = max(s.facts.peaks.get(one.dtype, 0.0) for s in (difference.a, difference.b))
            share = one.flops / one.seconds / peak if peak and one.seconds and one.flops else None
            shape = "x".join(map(str, one.shape)) or "?"
            if len(one.shape) == 13:
                n, *size, kh, kw, inner, outputs = one.shape[:8]
                shape = f"{n}x{'x'.join(map(str, size))} by {kh}x{kw}x{inner}x{outputs}"
            told = f"{one.layer or '-'} {one.kind} {shape} {one.dtype}: {one.calls:.0f} calls, "
            told += f"{milliseconds(one.seconds)} ms, {one.ran_by or 'library not known'}"
            rows.append(f"{side.name}: {told}" + (f", {share:.0%} of peak" if share else ""))
    return rows


def as_json(difference: Difference, named: list[Cause]) -> dict:
    """The same as plain data."""
    return {
        "sentence": sentence(difference, named),
        "seconds": difference.seconds,
        "profiled": difference.profiled,
        "interval": difference.interval,
        "is_noise": difference.is_noise,
        "causes": [asdict(one) for one in named],
        "kinds": [asdict(one) for one in difference.kinds],
        "layers": [asdict(one) for one in difference.layers],
        "layers_without_a_pair": difference.unpaired,
        "a": msgspec.to_builtins(difference.a),
        "b": msgspec.to_builtins(difference.b),
    }
