"""`twinbench COMMAND`: all but the benchmark itself, which is `pytest bench/`."""

from __future__ import annotations

import argparse
import errno
import os
import sys
from importlib import import_module

# command -> the module with its `main(arguments) -> exit status`, and what it does
COMMANDS = {
    "choose": ("bench.choose", "what to use for one aim, from the rows of a run"),
    "try": ("bench.try_model", "what makes your own model faster or leaner"),
    "doctor": ("bench.doctor.command", "what is wrong with a set-up, in half a minute"),
    "port": ("bench.port.command", "where a port to the other framework differs first, and why"),
    "diagnose": ("bench.diagnose", "what holds a train step back, and what was measured to help"),
    "why": ("bench.why.command", "where the difference of two programs comes from"),
    "claims": ("bench.claims", "which published claims hold in a run"),
    "priorities": ("bench.priorities", "which technique pays, its price, and a path to choose by"),
    "compare": ("bench.compare", "what changed between two runs"),
    "machines": ("bench.machines", "records of several machines, and what holds on all"),
    "report": ("bench.report.command", "make the reports of a run again, or print its tables"),
    "validate": ("bench.validation.command", "test the measurements by pairs with known answers"),
    "shards": ("shared.conversion", "convert a folder of images to tar, TFRecord or arrays"),
    "network": ("bench.network.command", "several hosts on this machine, and the time of many"),
    "ladder": ("bench.ladders.command", "a whole training, with one more technique at a time"),
    "docs": ("bench.docs.command", "make the pages of docs/techniques again"),
    "teacher": ("bench.teacher", "train the teacher of the distillation benchmarks again"),
}
# Of a place where nothing can be written.
UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM)
UNWRITABLE += (errno.ENOTDIR, errno.EEXIST, errno.EISDIR)


def main(arguments: list[str] | None = None) -> int:
    """Run a command; return its exit status (2: an error)."""
    parser = argparse.ArgumentParser(
        prog="twinbench",
        description=__doc__,
        epilog="\n".join(f"  {name:11} {what}" for name, (_, what) in COMMANDS.items())
        + "\n\n`twinbench COMMAND --help` tells its options.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", metavar="COMMAND", choices=COMMANDS)
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
