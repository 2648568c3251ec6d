"""Find what makes your own model faster or smaller.

    twinbench try --example         write my_model.py to start from
    twinbench try my_model.py       measure everything that applies to it

The file defines pytorch() or tensorflow(), or both, which return
(model, loss_fn), and batch(size, seed), which returns (x, y). The file is
checked first; if something is wrong, one line says what, and nothing is
measured. The result is the advice, and code to copy that was run as printed.

The run is the same as

    pytest bench/ --benchmark-only --model my_model.py

so `twinbench choose`, `compare` and `report` read its results, too.
"""

from __future__ import annotations

import shlex
import signal
import subprocess
import sys
from pathlib import Path

from bench.doctor import command as doctor
from bench.harness.processes import ROOT
from bench.report import parsers
from shared.user_model import BadFile, look

EXAMPLE = Path(__file__).with_name("example_model.txt")
MINUTES = "12"
# Options of the run that are handed on. Unknown ones are handed on after them.
OPTIONS = {
    "--framework": ("pt|tf", "only this framework"),
    "--technique": ("A,B", "only these techniques"),
    "--effort": (
        "quick|default|ordinary",
        "quick measures once, without intervals; ordinary adds int8 and fewer channels",
    ),
    "--blocks": ("N", "repeat each measurement exactly N times, in new processes"),
    "--memory-budget": ("SIZE", "memory for the largest batch (default: 70%% of what is free)"),
    "--results": ("DIR", "folder for results (default: results)"),
    "--resume": ("FOLDER", "go on with an interrupted run"),
}


def write_example(path: Path) -> int:
    """Write the file to start from; never over another."""
    if path.exists():
        print(f"twinbench try: {path} exists: give another name", file=sys.stderr)
        return 2
    try:
        path.write_text(EXAMPLE.read_text("utf-8"), encoding="utf-8")
    except OSError as error:
        print(f"twinbench try: {path} can't be written ({error.strerror})", file=sys.stderr)
        return 2
    print(f"{path} written. Put your model into it, then: twinbench try {shlex.quote(str(path))}")
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit status (2: an error)."""
    parser = parsers.described("twinbench try", __doc__)
    parser.add_argument(
        "file", nargs="?", default="my_model.py", metavar="my_model.py", help="your model's file"
    )
    parser.add_argument("--example", action="store_true", help="write a file to start from")
    parser.add_argument(
        "--minutes", default=MINUTES, metavar="N", help=f"end after N minutes (default: {MINUTES})"
    )
    parser.add_argument("--plan", action="store_true", help="show the plan; measure nothing")
    for name, (metavar, words) in OPTIONS.items():
        parser.add_argument(name, metavar=metavar, help=words)
    given, others = parser.parse_known_args(arguments)
    if given.example:
        return write_example(Path(given.file))
    try:
        path = look(given.file).path
    except BadFile as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    doctor.warn(path)
    command = [sys.executable, "-m", "pytest", "-q", "-rN", "-p", "no:cacheprovider"]
    # An installed package has no pyproject.toml, which says so in a clone.
    command += ["--import-mode=importlib", "-o", "python_files=bench_*.py"]
    command += ["-o", "python_functions=bench_*"]
    command += [
        str(ROOT / "bench"),
        "--benchmark-only",
        "--model",
        given.file,
        "--minutes",
        given.minutes,
    ]
    for name in OPTIONS:
        value = getattr(given, name.strip("-").replace("-", "_"))
        command += [name, value] if value is not None else []
    command += ["--why"] * (given.effort != "quick") + ["--plan"] * given.plan + others
    status = _wait_for(subprocess.Popen(command))
    # The answer lists rows that failed with their reason, so pytest's 1 is no error of the run.
    return 0 if status == 1 else 2 if status else 0


def _wait_for(run: subprocess.Popen) -> int:
    """Its exit status. Ctrl-C is left to the run, which keeps what it has measured."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        return run.wait()
    finally:
        signal.signal(signal.SIGINT, before)


if __name__ == "__main__":
    sys.exit(main())
