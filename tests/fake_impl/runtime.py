import time

import numpy as np

_wanted = {}


def configure(*, threads, seed):
    _wanted["threads"] = threads
    return {"intra_op": threads, "inter_op": threads}


def versions():
    return {"numpy": np.__version__}


def device():
    return "cpu"


def device_info():
    return {}


def synchronize():
    """Nothing: wrong for the asynchronous step of the faulty technique, and meant to be."""


def to_float(loss):
    return float(loss() if callable(loss) else loss)


def state_bytes(model, optimizer):
    size = sum(array.nbytes for array in model.weights.values())
    return {"parameters": size, "gradients": size, "optimizer": 0}


def reset_device_peak():
    pass


def device_peak():
    return None


def operator_dtypes(step, x, y):
    return {"matmul": {"float32": 1}}


def trace_count(step):
    return getattr(step, "traces", None)


def matmul_flops(*, size, dtype, seconds):
    start = time.perf_counter()
    a = np.ones((256, 256), np.float32)
    a @ a
    return 2 * 256**3 / (time.perf_counter() - start)
