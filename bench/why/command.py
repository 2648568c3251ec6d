"""Where the difference of two programs comes from, in milliseconds that sum to it.

    twinbench why TASK [--batch B]                        PyTorch's plain step and TensorFlow's
    twinbench why TASK --technique T [--variant V] [--framework pt|tf]   T and its baseline
    twinbench why my_model.py [the same options]          of a file for `twinbench try`

Both are timed in rounds that take turns, without a profiler; then each is profiled once, what the
profiler costs is taken out, and the parts are scaled to the steps without it. By kind of work and
by layer, with one sentence above, and the experiments that were run to test it. docs/why.md says
what each kind is.
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

from bench import user_task
from bench.harness import machine
from bench.harness.plan import FRAMEWORKS, Case, CaseMessage, Technique, Variant, Workload
from bench.harness.run_plan import techniques
from bench.report import parsers
from bench.why import experiments
from bench.why.causes import MEASURED, Cause, causes, milliseconds, sentence
from bench.why.difference import Difference, Line, compare
from bench.why.libraries import with_libraries
from bench.why.side import Request, Running, used_libraries
from shared import datasets
from shared.cgroups import usable_threads
from shared.specs import TASKS
from shared.user_model import BadFile

ROUNDS = 7
ROWS = 12  # of the table of layers
SMALL = 0.01  # of the difference: lines below are one line


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit status (2: an error)."""
    given, prog = _parsed(arguments)
    try:
        with contextlib.ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            pair = _pair(given, folder)
            difference, named = explained(pair, given)
    except (ValueError, BadFile) as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return 2
    if given.json:
        print(json.dumps(as_json(difference, named)))
    else:
        print("\n".join(text(difference, named)))
    return 0


def _parsed(arguments: list[str] | None) -> tuple[argparse.Namespace, str]:
    parser = parsers.described("twinbench why", __doc__)
    parser.add_argument("what", metavar="TASK|my_model.py")
    parser.add_argument("--batch", type=int, metavar="B", help="samples a step (a task's own)")
    parser.add_argument("--predict", action="store_true", help="of predictions, not train steps")
    parser.add_argument("--technique", metavar="T", help="its row and its baseline")
    parser.add_argument("--variant", metavar="V", help="of the technique (its first)")
    parser.add_argument("--framework", choices=FRAMEWORKS, help="of the technique (pt)")
    parser.add_argument("--framework-pair", action="store_true", help="the technique's twins")
    parser.add_argument("--rounds", type=int, default=ROUNDS, metavar="N", help="of timed steps")
    parser.add_argument("--thorough", action="store_true", help="test in new processes, too")
    parser.add_argument("--json", action="store_true", help="for other programs")
    given = parser.parse_args(arguments)
    if given.rounds < 2:
        parser.error("--rounds: give 2 or more")
    if given.batch is not None and given.batch < 1:
        parser.error("--batch: give 1 or more")
    if given.variant and not given.technique:
        parser.error("--variant: give its --technique, too")
    return given, parser.prog


# What is compared --------------------------------------------------------------------------------


def _pair(given: argparse.Namespace, folder: Path) -> tuple[Request, Request]:
    """What either side runs. Raises ValueError for names that there are not."""
    every = techniques()
    name = given.technique or "baseline"
    if name not in every:
        raise ValueError(f"there is no technique {name!r}: {', '.join(sorted(every))}")
    technique = every[name]
    task, data, sides, size = _work(given, folder)
    base = next((one for one in technique.variants if one.role == "baseline"), None)
    others = [one for one in technique.variants if one is not base and one.role == "variant"]
    if base is None or (given.technique and not others):
        raise ValueError(f"{name} has no rows to compare")
    variant = _variant(technique, given.variant, others) if given.technique else base
    twins = given.framework_pair or not given.technique
    if twins and len(sides) < 2:
        raise ValueError(f"{given.what} has a model for one framework: give --technique")
    framework = given.framework or next(iter(sides))
    both = [(side, variant) for side in ("pt", "tf")]
    if not twins:
        both = [(framework, variant), (framework, base)]
    mode = "predict" if given.predict else "train"
    return tuple(
        Request(
            name=FRAMEWORKS[side].title if twins else one.title or one.name,
            framework=side,
            case=_message(technique, one, side, task, size, mode),
            data=data,
            threads=usable_threads(),
            allocator=one.allocator or "tuned",
        )
        for side, one in both
    )


def _variant(technique: Technique, name: str | None, others: list[Variant]) -> Variant:
    chosen = [one for one in others if name in (None, one.name)]
    if not chosen:
        names = ", ".join(one.name for one in others)
        raise ValueError(f"{technique.name} has no variant {name!r}: {names}")
    return chosen[0]


def _message(
    technique: Technique, variant: Variant, side: str, task: str, size: int, mode: str
) -> CaseMessage:
    if side not in variant.frameworks:
        raise ValueError(f"{variant.name} of {technique.name} is not for {side}")
    module = f"bench.{technique.family}.bench_{technique.name}"
    place = technique.family, technique.name, module
    work = Workload(task, "compute", mode=mode)
    case = Case(*place, side, FRAMEWORKS[side].flavours[0], variant, work, technique.composed_of)
    return msgspec.structs.replace(case.message(), batch_size=size)


def _work(given: argparse.Namespace, folder: Path) -> tuple[str, str, list[str], int]:
    """The task, the folder of its data, its frameworks, and samples a step."""
    if given.what not in TASKS and not given.what.endswith(".py"):
        names = ", ".join(sorted(TASKS))
        raise ValueError(f"there is no task {given.what!r}: {names}; or give a file.py")
    if given.what in TASKS:
        task = TASKS[given.what]
        if task.dataset.kind == "photos":
            raise ValueError(f"{given.what} is a folder of files: give a task of arrays")
        data = str(datasets.materialise(task.dataset, folder))
        return task.name, data, list(FRAMEWORKS), given.batch or task.compute_batch
    if given.batch is not None:
        raise ValueError("--batch is that of a task: a file brings its own batches")
    wanted = {given.framework} if given.framework else set()
    model = user_task.prepare(given.what, folder, {}, wanted, _say)
    place = folder.resolve() / "data" / model.about["folder"]
    return model.task.name, str(place), model.sides, model.about["batch_size"]


def _say(what: str) -> None:
    print(f"{what} ...", file=sys.stderr, flush=True)


# Measuring ---------------------------------------------------------------------------------------


def explained(
    pair: tuple[Request, Request], given: argparse.Namespace
) -> tuple[Difference, list[Cause]]:
    """The difference of two sides, and its causes after the experiments."""
    watch = machine.Watch()
    _say("which libraries compute")
    known = [used_libraries(request) for request in pair]
    with Running(pair[0]) as a, Running(pair[1]) as b:
        a.wait()
        b.wait()
        _say(f"{given.rounds} rounds of steps, in turns, then a profile of each")
        for number in range(given.rounds):
            for one in (a, b) if number % 2 else (b, a):
                one.round()
        sides = [
            with_libraries(one.side(), calls) for one, calls in zip((a, b), known, strict=True)
        ]
        difference = compare(*sides)
        named = causes(difference)
        if busy := machine.busy(watch.stop().others):
            _say(f"{busy}: end them, or figures scatter")
        _say("testing what was found")
        named = experiments.tested(named, difference, a, b)
    if given.thorough:
        named = experiments.thorough(named, difference, *pair)
    return difference, named


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
        "",
    ]
    lines += _table("kind of work", difference, difference.kinds)
    lines += ["", *_table("layer and pass", difference, difference.layers, ROWS)]
    lines += ["", *_products(difference)]
    return lines


def _table(title: str, difference: Difference, every: list[Line], most: int = 99) -> list[str]:
    """Lines of both sides and their difference, which the last sums up."""
    least = SMALL * abs(difference.seconds)
    shown = [one for one in every[:most] if abs(one.more) >= least or one.what == "not attributed"]
    rest = [one for one in every if one not in shown]
    if rest:
        shown.append(Line("all others", sum(r.a for r in rest), sum(r.b for r in rest)))
    shown.append(Line("the step", difference.a.step, difference.b.step))
    rows = [f"{title:40}{'':>2}{_short(difference.a.name)}{_short(difference.b.name)}{'more':>11}"]
    for one in shown:
        values = "".join(f"{value * 1e3:11.3f}" for value in (one.a, one.b, one.more))
        rows.append(f"{one.what[:41]:42}{values}")
    return rows


def _short(name: str) -> str:
    return f"{name[:10]:>11}"


def _products(difference: Difference) -> list[str]:
    """The products and convolutions that take most, with library and share of the peak."""
    rows = []
    for side in (difference.a, difference.b):
        for one in sorted(side.products, key=lambda one: -one.seconds)[:5]:
            peak = max(s.facts.peaks.get(one.dtype, 0.0) for s in (difference.a, difference.b))
            share = one.flops / one.seconds / peak if peak and one.seconds and one.flops else None
            shape = "x".join(map(str, one.shape)) or "?"
            told = f"{one.layer or '-'} {one.kind} {shape} {one.dtype}: {one.calls:.0f} calls, "
            told += f"{milliseconds(one.seconds)} ms, {one.library or 'library not known'}"
            rows.append(f"{side.name}: {told}" + (f", {share:.0%} of peak" if share else ""))
    return rows


def as_json(difference: Difference, named: list[Cause]) -> dict:
    """The same for other programs."""
    return {
        "sentence": sentence(difference, named),
        "seconds": difference.seconds,
        "interval": difference.interval,
        "is_noise": difference.is_noise,
        "causes": [asdict(one) for one in named],
        "kinds": [asdict(one) for one in difference.kinds],
        "layers": [asdict(one) for one in difference.layers],
        "a": msgspec.to_builtins(difference.a),
        "b": msgspec.to_builtins(difference.b),
    }
