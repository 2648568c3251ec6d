"""A program that disturbs a run: `python -m bench.validation.neighbours PROGRAM`.

It detaches from its parent, because a run does not count the use by its own children. It prints its
process number, and works until its standard input ends.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import threading
import time
from pathlib import Path

from bench.harness import machine

REST, CHUNK = 1 << 30, 1 << 28  # bytes that are left free, and that are taken at once


def burn() -> None:
    """Use a core."""
    while True:
        pass


def bursts() -> None:
    """Use a core every other fifth of a second."""
    while True:
        end = time.monotonic() + 0.2
        while time.monotonic() < end:
            pass
        time.sleep(0.2)


def bandwidth() -> None:
    """Read and write memory that no cache holds."""
    import numpy as np

    source, target = np.ones(1 << 25), np.ones(1 << 25)
    while True:
        np.copyto(target, source)


def disk() -> None:
    """Write to the disk, and wait until it is there."""
    data = bytes(1 << 22)
    with tempfile.TemporaryFile() as file:
        while True:
            file.seek(0)
            for _ in range(16):
                file.write(data)
            file.flush()
            os.fsync(file.fileno())


def memory() -> None:
    """Take nearly all memory, release it, and repeat."""
    import numpy as np

    with contextlib.suppress(OSError):  # no Linux: whoever ends what grows too large takes this one
        Path("/proc/self/oom_score_adj").write_text("1000")
    while True:
        taken = []
        while machine.free_memory() > REST + CHUNK:
            taken.append(np.ones(CHUNK // 8))
        time.sleep(0.2)


PROGRAMS = {program.__name__: program for program in (burn, bursts, bandwidth, disk, memory)}


def end_with_input() -> None:
    """End this process when its standard input is closed."""
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    if hasattr(os, "fork") and os.fork():
        os._exit(0)
    print(os.getpid(), flush=True)
    threading.Thread(target=end_with_input, daemon=True).start()
    PROGRAMS[sys.argv[1]]()
