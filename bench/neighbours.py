"""What disturbs a run in bad company: `python -m bench.neighbours PROGRAM`, until it is ended."""

from __future__ import annotations

import os
import sys
import tempfile
import time

from bench.harness import machine


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


PROGRAMS = {each.__name__: each for each in (burn, bursts, bandwidth, disk)}


if __name__ == "__main__":
    machine.end_with_parent()
    PROGRAMS[sys.argv[1]]()
