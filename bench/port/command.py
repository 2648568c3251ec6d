"""Find where a model and its port to the other framework first differ, and why.

    twinbench port my_model.py

The file is one for `twinbench try`. pytorch() and tensorflow() return
(model, loss_fn) or (model, loss_fn, optimizer), batch(size, seed) returns
(x, y), and copy_weights(pytorch_model, tensorflow_model) copies the weights.
Without copy_weights, weights are matched by name, order and shape, and
copy_weights.py is written beside the file for you to keep.

These are compared, in this order: batch, weights, outputs in evaluation and in
training mode, dropout, running statistics, loss, gradients, updates, and ten
steps of training. The exit status is 0 if nothing differs, 1 if something
does, 2 after an error.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

from bench.port.causes import CATALOGUE, TOLD
from bench.port.report import STEPS, Finding, Report
from bench.report import parsers
from bench.report.text import hanging, plain, wrap
from shared.user_model import BadFile, look

WIDTH, INDENT = 80, 13
MOST_MATCHES = 60  # lines
SLOW_S = 2.0  # after which people are told what is done


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit status (1: the models differ, 2: an error)."""
    parser = parsers.described("twinbench port", __doc__)
    parser.add_argument("file", metavar="my_model.py", help="a file with both models")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--speed", action="store_true", help="if nothing differs, explain the time (some minutes)"
    )
    parser.add_argument(
        "--write-weights", metavar="FILE", help="write copy_weights to this new file"
    )
    given = parser.parse_args(arguments)
    try:
        file = look(given.file)
        target = _target(given.write_weights, file.path, "copy_weights" in file.functions)
        from bench.port.compare import port

        report = port(file, say=_Progress())
        if given.speed and report.certificate:
            report.speed = _speed(given.file)
    except ValueError as error:  # BadFile is one
        print(f"{parser.prog}: {plain(error)}", file=sys.stderr)
        return 2
    if given.json:
        print(json.dumps(dataclasses.asdict(report), indent=2))
    else:
        print("\n".join(lines(report, file.path.name)))
    if target and report.code:
        target.write_text(report.code, encoding="utf-8")
        print(f"\n{target} written: keep it, and import copy_weights from it.", file=sys.stderr)
    elif report.copied and not given.write_weights:
        there = file.path.with_name("copy_weights.py").name
        print(f"\n{there} exists and was not changed.", file=sys.stderr)
    return 1 if report.findings else 0


def _target(asked: str | None, file: Path, has_copy: bool) -> Path | None:
    """Where the match is written: where it was asked for, or beside a file that has none."""
    if asked:
        if Path(asked).exists():
            raise BadFile(f"{asked} exists: give another name")
        return Path(asked)
    beside = file.with_name("copy_weights.py")
    return None if has_copy or beside.exists() else beside


def _speed(path: str) -> str:
    """What `twinbench why` answers in one sentence, from processes of each framework."""
    command = [sys.executable, "-m", "bench", "why", path, "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise ValueError("the models agree, but could not be timed: see above")
    answer = json.loads(done.stdout)
    times = (f"{side['name']} {median(side['rounds']) * 1e3:.3g} ms" for side in
             (answer["a"], answer["b"]))  # fmt: skip
    return f"a step takes {', '.join(times)}. {answer['sentence']}"


class _Progress:
    """Says what is looked at, once it has taken a while."""

    def __init__(self) -> None:
        self.start = time.monotonic()

    def __call__(self, words: str) -> None:
        passed = time.monotonic() - self.start
        if passed >= SLOW_S or words.startswith("importing"):
            print(f"[{passed:3.0f} s] {words}", file=sys.stderr, flush=True)


def lines(report: Report, name: str) -> list[str]:
    """The answer, within 80 columns: the first difference, others, what was equal, the match."""
    text = _headline(report, name)
    for place, finding in enumerate(report.findings):
        text += ["", *_finding(finding, place)]
    if report.equal:
        text += ["", *hanging("Equal", "; ".join(report.equal), WIDTH, INDENT)]
    for note in report.notes:
        text += hanging("Note", note, WIDTH, INDENT)
    text += _certificate(report, name)
    text += _matches(report)
    return text


def _headline(report: Report, name: str) -> list[str]:
    first = report.findings[0] if report.findings else None
    if first is None:
        words = "Nothing differs: the models compute and train the same"
        words += ", once weights are copied." if report.copied else "."
        return wrap(words, WIDTH)
    place = f" at {_layers(first)}" if _layers(first) else ""
    title = CATALOGUE[first.cause].title if first.cause else "no known cause explains it"
    return wrap(f"The first difference is in {STEPS[first.step]}{place}: {title}.", WIDTH)


def _layers(finding: Finding) -> str:
    names = [name for name in (finding.layer_pt, finding.layer_tf) if name]
    return " / ".join(dict.fromkeys(names))


def _finding(finding: Finding, place: int) -> list[str]:
    cause = CATALOGUE.get(finding.cause or "")
    more = f", and {finding.places - 1} more like it" if finding.places > 1 else ""
    head = f"{place + 1}. {cause.title if cause else 'no known cause'}"
    text = wrap(head, WIDTH)
    text += hanging("   where", f"{STEPS[finding.step]}: {_layers(finding)}{more}", WIDTH, INDENT)
    size = f"{finding.size:.1e} of its size" + (
        f"; up to {finding.bound:.0e} would be rounding" if finding.bound else ""
    )
    text += hanging("   size", size, WIDTH, INDENT)
    text += hanging("   before it", f"equal: {finding.before}", WIDTH, INDENT)
    if cause:
        lines = {
            "change": f"{finding.change_pt} in PyTorch",
            "or": f"{finding.change_tf} in Keras",
            "checked": TOLD[cause.told],
            "PyTorch": cause.pytorch,
            "Keras": cause.tensorflow,
            "why": cause.why,
        }
        for label, words in lines.items():
            text += hanging(f"   {label}", words.replace("`", ""), WIDTH, INDENT)
    return text


def _certificate(report: Report, name: str) -> list[str]:
    done = report.certificate
    if done is None:
        return []
    words = (
        f"{done.steps} training steps on {done.steps} batches, dropout off: losses within "
        f"{done.loss:.0e} (bound {done.loss_bound:.0e}), weights afterwards within "
        f"{done.weights:.0e} (bound {done.weights_bound:.0e})"
    )
    speed = report.speed or f"`twinbench port {name} --speed` times both"
    speed += f"; `twinbench try {name}` measures memory, too"
    return [*hanging("Certificate", words, WIDTH, INDENT), *hanging("Speed", speed, WIDTH, INDENT)]


def _matches(report: Report) -> list[str]:
    if not report.copied:
        return []
    text = ["", "Weights that belong together (PyTorch, Keras, how they were matched)"]
    for match in report.matches[:MOST_MATCHES]:
        text += hanging(f"   {match.layer_pt}", f"{match.layer_tf} ({match.how})", WIDTH, 36)
    left = len(report.matches) - MOST_MATCHES
    return text + ([f"   and {left} more: all are in copy_weights.py"] if left > 0 else [])
