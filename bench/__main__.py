"""Optimization techniques in PyTorch and TensorFlow, measured side by side.

The benchmark itself is `pytest bench/ --benchmark-only`.
"""

from __future__ import annotations

import argparse
import errno
import os
import sys
from importlib import import_module

# command -> the module with its `main(arguments) -> exit status`, and what it does
COMMANDS = {
    "choose": ("bench.choose", "choose a framework and a technique from a run's results"),
    "try": ("bench.try_model", "find what makes your own model faster or smaller"),
    "doctor": ("bench.doctor.command", "find mistakes in a setup, in half a minute"),
    "port": ("bench.port.command", "find where a port to the other framework first differs"),
    "diagnose": ("bench.diagnose", "find what limits a train step, and what helps"),
    "why": ("bench.why.command", "explain why one of two programs is faster"),
    "claims": ("bench.claims", "check published claims against a run"),
    "priorities": ("bench.priorities", "list what each technique gains and costs"),
    "compare": ("bench.compare", "show what changed between two runs"),
    "machines": ("bench.machines", "collect the records of several machines"),
    "report": ("bench.report.command", "print a run's tables, or make its reports again"),
    "validate": ("bench.validation.command", "test the benchmark itself on known answers"),
    "shards": ("shared.conversion", "convert a folder of images to tar, TFRecord or arrays"),
    "network": ("bench.network.command", "simulate several hosts on this machine"),
    "ladder": ("bench.ladders.command", "run a whole training, adding one technique at a time"),
    "docs": ("bench.docs.command", "make the pages of docs/techniques again"),
    "teacher": ("bench.teacher", "train the teacher of the distillation benchmarks again"),
}
# Errors of a place where nothing can be written.
UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM)
UNWRITABLE += (errno.ENOTDIR, errno.EEXIST, errno.EISDIR)


def main(arguments: list[str] | None = None) -> int:
    """Run a command; return its exit status (2: an error)."""
    parser = argparse.ArgumentParser(
        prog="twinbench",
        usage="twinbench COMMAND ...",
        description=__doc__,
        epilog="\n".join(
            ["commands:"]
            + [f"  {name:11} {what}" for name, (_, what) in COMMANDS.items()]
            + ["", "`twinbench COMMAND --help` explains a command and its options."]
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", metavar="COMMAND", choices=COMMANDS, help=argparse.SUPPRESS)
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    if not (sys.argv[1:] if arguments is None else arguments):
        parser.print_help(sys.stderr)
        return 2
    given = parser.parse_args(arguments)
    sys.stdout.reconfigure(errors="backslashreplace")  # a console without UTF-8 loses no line
    try:
        status = import_module(COMMANDS[given.command][0]).main(given.arguments)
        sys.stdout.flush()
    except BrokenPipeError:  # a reader such as `head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print(f"\ntwinbench {given.command}: interrupted", file=sys.stderr)
        return 130
    except OSError as error:
        if error.filename is None or error.errno not in UNWRITABLE:
            raise
        print(f"twinbench {given.command}: {error.filename}: {error.strerror}", file=sys.stderr)
        return 2
    return status


if __name__ == "__main__":
    sys.exit(main())
