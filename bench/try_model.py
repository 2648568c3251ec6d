"""What makes your own model faster or leaner: every technique that applies to it, measured.

    twinbench try my_model.py [--minutes N] [--framework pt|tf] [--technique A,B] [--plan]
    twinbench try --example [my_model.py]

The file has a function pytorch() or tensorflow(), or both, that returns (model, loss_fn), and one
batch(size, seed) that returns (x, y); --example writes one to start from. It is checked first: what
is wrong with it is said in one line, and nothing is measured. The run is that of

    pytest bench/ --benchmark-only --model my_model.py

whose record, page, `choose` and `compare` work on it as on any other. After it stand the answer and
the code to copy, which was run as it is printed.
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
# Options of the run that are handed on; what is not among them is handed on, too, and comes last.
OPTIONS = {
    "--framework": ("pt|tf", "only this framework"),
    "--technique": ("A,B", "only these techniques"),
    "--effort": (
        "quick|default|ordinary",
        "one block; what is usual; int8 and fewer channels, too",
    ),
    "--blocks": ("N", "exactly N blocks, though fewer may decide"),
    "--memory-budget": ("SIZE", "for the largest batch, such as 2GB (default: what is free)"),
    "--results": ("DIR", "where results go (default: results)"),
    "--resume": ("FOLDER", "go on with a run that was interrupted"),
}


def write_example(path: Path) -> int:
    """Write the file to start from; never over another."""
    if path.exists():
        print(f"twinbench try: {path} is there already: give another name", file=sys.stderr)
        return 2
    try:
        path.write_text(EXAMPLE.read_text("utf-8"), encoding="utf-8")
    except OSError as error:
        print(f"twinbench try: {path} can't be written ({error.strerror})", file=sys.stderr)
        return 2
    print(
        f"{path} is written. Put your model into it, then: twinbench try {shlex.quote(str(path))}"
    )
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit status (2: an error)."""
    parser = parsers.described("twinbench try", __doc__)
    parser.add_argument("file", nargs="?", default="my_model.py", metavar="my_model.py")
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
    # Rows that failed stand in the answer with their reason: pytest's 1 is no error of the run.
    return 0 if status == 1 else 2 if status else 0


def _wait_for(run: subprocess.Popen) -> int:
    """How it ended. Ctrl-C is the run's, which ends with what it has and says how to go on."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        return run.wait()
    finally:
        signal.signal(signal.SIGINT, before)


if __name__ == "__main__":
    sys.exit(main())
