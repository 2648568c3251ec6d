import contextlib
import os
import time
from pathlib import Path

import numpy as np

from bench.harness import timing

_free_at = [0.0]  # when the fake asynchronous device has done all that was put on it


class Clock:
    """In the place of `time`: it passes by sleeping alone, and who sleeps has slept at once."""

    def __init__(self):
        self.now = 0.0

    def perf_counter(self):
        return self.now

    process_time = monotonic = perf_counter

    def sleep(self, seconds):
        self.now += seconds


def configure(*, threads, seed):
    if chunk := os.environ.get("FAKE_WARM_S"):  # its steps are of microseconds, and steady
        timing.WARM_S = float(chunk)
    if os.environ.get("FAKE_CLOCK"):
        globals()["time"] = timing.time = Clock()
    found = int(os.environ.get("FAKE_THREADS", threads))  # some builds ignore what is asked
    return {"intra_op": found, "inter_op": threads}


def versions():
    return {"numpy": np.__version__}


def device():
    return os.environ.get("FAKE_DEVICE", "cpu")


def device_info():
    return {"name": "fake"}


def onednn():
    return True


def to_evaluation(model):
    model.evaluates = True


def first_compile():
    folder = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
    folder.mkdir()  # which fails where one was there: a run needs it once
    (folder / "machine").touch()
    return 0.5


def put_on_device(seconds, result):
    """Queue work on the fake device and return at once; `to_float` waits for the result."""
    _free_at[0] = ready = max(time.perf_counter(), _free_at[0]) + seconds
    return lambda: (_wait_until(ready), result)[1]


def synchronize():
    _wait_until(_free_at[0])


def _wait_until(moment):
    left = moment - time.perf_counter()
    if left > 0:
        time.sleep(left)


def to_float(loss):
    return float(loss() if callable(loss) else loss)


def state_bytes(model, optimizer):
    size = sum(array.nbytes for array in model.weights.values())
    return {"parameters": size, "gradients": size if optimizer else 0, "optimizer": 0}


def reset_device_peak():
    pass


def device_peak():
    return None if device() == "cpu" else {"allocated": 1 << 20, "reserved": 1 << 21}


def operator_dtypes(step, x, y):
    return {"matmul": {"float32": 1}}


def trace_count(step):
    return getattr(step, "traces", None)


def matmul_flops(*, size, dtype, seconds):
    if dtype == os.environ.get("ABORTS"):
        os._exit(1)
    if dtype == os.environ.get("REFUSES"):
        raise NotImplementedError(f"no product of {dtype}")
    return {"float32": 4e9, "bfloat16": 8e9, "int8": 1.6e10}[dtype]


one_thread = contextlib.nullcontext
