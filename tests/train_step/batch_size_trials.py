"""Trials for the batch-size finder: each function(batch_size) returns a step without arguments."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import numpy as np

FIXED, EACH = 20 << 20, 1 << 20  # bytes: memory is FIXED + EACH * batch_size


def affine(batch_size):
    """Memory that is affine in the batch size: the model is held, a step's arrays come and go."""
    model = np.ones(FIXED, np.uint8)

    def step():
        time.sleep(0.001 * batch_size)
        return int(np.ones(EACH * batch_size, np.uint8)[0]) + int(model[0])

    return step


def talkative(batch_size):
    """Prints, also from below Python, what must not be taken for a result."""
    print('{"peak_bytes": 1, "samples_per_s": 1}')
    os.write(1, b'{"peak_bytes": 1}\n')
    return affine(batch_size)


def greedy(batch_size):
    """Takes memory without end from four samples on: bounded here, in case nobody stops it.

    It has a helper, as loaders have.
    """
    kept = []
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])

    def step():
        while batch_size >= 4 and len(kept) < 60:
            kept.append(np.ones(20 << 20, np.uint8))
            time.sleep(0.01)

    return step


def fragile(batch_size):
    """Raises above eight samples."""
    if batch_size > 8:
        raise ArithmeticError("nine is\ntoo many")
    return affine(batch_size)


def unsupported(batch_size):
    raise NotImplementedError("upstream refuses this")


def hanging(batch_size):
    time.sleep(60)


def full(batch_size):
    """The allocator gives up above eight samples."""
    if batch_size > 8:
        raise MemoryError
    return affine(batch_size)


def vanishing(batch_size):
    """Ends without a word."""
    os._exit(3)
