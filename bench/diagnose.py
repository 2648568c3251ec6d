"""Find what limits a train step, and which techniques helped against it.

    twinbench diagnose digits-cnn       a task of this suite, in both frameworks
    twinbench diagnose model.py         your own step

The file defines make(), which returns (step, batches). `step(*batch)` trains.
`batches` is an iterable of tuples; a batch that is no tuple, such as a dict,
is passed whole. Its imports tell the framework. The step is profiled in a new
process. Gains come from --record, or from results/latest if it has intervals,
or from the published record.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import json
import os
import re
import subprocess
import sys
import textwrap
from itertools import chain
from pathlib import Path

from bench.analysis.questions import Remedy, remedies
from bench.analysis.reading import load
from bench.analysis.table import level
from bench.doctor import command as doctor
from bench.doctor.files import check_make, framework_of, read
from bench.doctor.gains import newest, sentence, shown
from bench.harness import machine
from bench.harness.run_plan import remedying
from bench.harness.worker import ending
from bench.record import FRAMEWORKS, Record
from bench.report import parsers
from bench.report.answer import full_name
from shared.bottlenecks import LIMITS

MOST = 5  # remedies
# Of the cores' time, which other programs may use: with more they move a verdict by themselves.
MOST_TO_TELL = min(LIMITS.values())
LEAST_STEPS = 4  # that the profiler takes in turns
TRAINING = re.compile(r"backward|[Gg]radient|train_|\.train\(|minimize|\.fit\(|autograd")


def can_tell(diagnosis: dict) -> bool:
    """Whether the machine was quiet enough for a verdict, as far as is known."""
    return (diagnosis.get("others") or 0.0) <= MOST_TO_TELL


def known(records: dict[str, Record], framework: str, diagnosis: dict) -> list[Remedy]:
    """The remedies of all records, the best gain first; none if the verdict is open."""
    if not can_tell(diagnosis):
        return []
    name, predicts = diagnosis["bottleneck"], diagnosis.get("predicts", False)
    every = [remedies(r, framework, name, of_prediction=predicts) for r in records.values()]
    return sorted(chain.from_iterable(every), key=lambda one: level(one.goal.figure, one.gain))


def as_json(remedy: Remedy) -> dict:
    """The same as plain data."""
    return {
        "technique": remedy.row.case.technique,
        "row": full_name(remedy.row),
        "work": remedy.work.title,
        "figure": remedy.goal.figure,
        "ratio": remedy.gain.value,
        "ci": remedy.gain.bounds,
    }


def diagnosed(framework: str, given: argparse.Namespace) -> dict:
    """The diagnosis by a new process of the framework. ValueError with its last error line."""
    command = [sys.executable, "-m", f"{framework}_impl.diagnosis.bottleneck", given.what]
    command += ["--json", "--steps", str(given.steps)]
    if given.batch_size is not None:
        command += ["--batch-size", str(given.batch_size)]
    if given.folder:
        command += ["--folder", str(Path(given.folder) / framework)]
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "3", "KINETO_LOG_LEVEL": "99"} | dict(os.environ)
    given_back = {"capture_output": True, "text": True, "errors": "replace"}
    done = subprocess.run(command, **given_back, env=quiet, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        if done.returncode < 0 or not lines:  # killed, for lack of memory perhaps
            lines.append("; ".join([*lines[-1:], f"it {ending(done.returncode)}"]))
        name = f"{Path(given.what).name}:"  # with which what is said of a file begins
        told = next((line for line in reversed(lines) if line.startswith(name)), None)
        raise ValueError(told or f"{given.what} in {FRAMEWORKS[framework]}: {lines[-1]}")
    for line in reversed(done.stdout.splitlines()):  # a file may print more as it ends
        with contextlib.suppress(ValueError):
            if isinstance(found := json.loads(line), dict) and "bottleneck" in found:
                return found
    raise ValueError(f"{given.what} exited before its step was measured: let make() return")


def watched(framework: str, given: argparse.Namespace) -> dict:
    """The result of `diagnosed`, whether it is a prediction, and the load of other programs.

    A graph that is compiled as a whole hides its parts. Then words in the file show whether it
    trains.
    """
    watch = machine.Watch()
    diagnosis = diagnosed(framework, given)
    parts, path = diagnosis["breakdown"], Path(given.what)
    trains = path.suffix != ".py" or parts["backward"] or parts["optimizer"]
    predicts = not trains and not TRAINING.search(path.read_text("utf-8", "replace"))
    diagnosis |= {"others": watch.stop().others, "predicts": predicts}
    if not can_tell(diagnosis):
        diagnosis["evidence"] = diagnosis["evidence"][:1]  # where its time went, beside the others
    if framework == "tf" and predicts and _calls_predict(path):
        diagnosis["evidence"].append(
            "predict of Keras builds a dataset at each call: for one batch call the model itself, "
            "model(x, training=False), within a tf.function"
        )
    return diagnosis


def _calls_predict(path: Path) -> bool:
    """Whether a file calls a method of that name."""
    calls = (node.func for node in ast.walk(read(path)) if isinstance(node, ast.Call))
    return any(isinstance(called, ast.Attribute) and called.attr == "predict" for called in calls)


def text(framework: str, diagnosis: dict, records: dict[str, Record]) -> list[str]:
    """The verdict, its evidence and the remedies, in lines of 80 columns."""
    name, busy = diagnosis["bottleneck"], machine.busy(diagnosis.get("others"))
    verdict = "healthy, bound by arithmetic" if diagnosis["healthy"] else f"bottleneck: {name}"
    if not can_tell(diagnosis):
        verdict = f"bottleneck unknown: other programs used {diagnosis['others']:.0%} of the cores"
        verdict += "; stop them and run this again"
    lines = [f"{FRAMEWORKS[framework]}: {verdict}"]
    if busy and can_tell(diagnosis):
        lines.append(f"  !! {busy}: stop them, they make results noisy")
    lines += [f"  {line}" for line in diagnosis["evidence"]]
    cost = max(0.0, diagnosis["breakdown"]["cost"])  # on a busy machine it drowns in the noise
    lines.append(f"  the profiler cost {cost:.1%} of the step, which is subtracted above")
    if can_tell(diagnosis):
        lines += _help(framework, diagnosis, records)
    return [_wrapped(line) for line in lines]


def _help(framework: str, diagnosis: dict, records: dict[str, Record]) -> list[str]:
    """What was measured to help, or what may."""
    name, place = diagnosis["bottleneck"], ", ".join(records) or "no record"
    if help_ := known(records, framework, diagnosis):
        helped = [f"    {sentence(remedy)}" for remedy in help_[:MOST]]
        return [f"  what helped against {name} ({place}):", *helped]
    techniques = remedying(name)
    if diagnosis.get("predicts"):
        techniques = [t for t in techniques if any(w.mode == "predict" for w in t.workloads)]
    names = ", ".join(one.name for one in techniques) or "nothing in this suite"
    return [f"  no row of {place} shows a gain; techniques against {name}: {names}"]


def _wrapped(line: str) -> str:
    indent = line[: len(line) - len(line.lstrip())] + "    "
    uncut = {"break_on_hyphens": False, "break_long_words": False}
    return textwrap.fill(line, 80, subsequent_indent=indent, **uncut)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit status (2: an error)."""
    parser = parsers.described("twinbench diagnose", __doc__)
    parser.add_argument("what", metavar="TASK|model.py", help="a task's name, or a file")
    parser.add_argument("--framework", choices=FRAMEWORKS, help="only this framework")
    parsers.add_record(parser)
    parser.add_argument("--batch-size", type=int, metavar="N", help="of a task")
    parser.add_argument(
        "--steps", type=int, default=20, metavar="N", help="profile N steps (default: 20)"
    )
    parser.add_argument("--folder", help="keep the profiler's files in this folder")
    parser.add_argument("--json", action="store_true", help="print JSON")
    given = parser.parse_args(arguments)
    of_file = given.what.endswith(".py")
    if given.batch_size is not None and of_file:
        parser.error("--batch-size: only for a task; a file makes its own batches")
    if given.batch_size is not None and given.batch_size < 1:
        parser.error(f"--batch-size: give 1 or more, not {given.batch_size}")
    if given.steps < LEAST_STEPS:
        parser.error(f"--steps: give {LEAST_STEPS} or more, not {given.steps}")
    try:
        if of_file:
            check_make(Path(given.what))
        sides = [given.framework] if given.framework else list(FRAMEWORKS)
        if of_file:
            sides = [framework_of(Path(given.what), given.framework)]
        records = {shown(place): load(place) for place in given.record or ()} or newest()
        if not given.json:
            doctor.warn(Path(given.what) if of_file else None)
        diagnoses = {side: watched(side, given) for side in sides}
    except ValueError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    if given.json:
        told = {
            side: one
            | {"can_tell": can_tell(one), "remedies": list(map(as_json, known(records, side, one)))}
            for side, one in diagnoses.items()
        }
        print(json.dumps(told))
        return 0
    for side, one in diagnoses.items():
        print("\n".join(text(side, one, records)))
    return 0
