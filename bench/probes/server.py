"""A process that acts like a deployed model: it loads, predicts, and reports the times.

`python -m bench.probes.server REQUEST` reads a JSON request, loads one model with its loader
("module:function") and writes the `answer` file. It imports only NumPy and what the loader imports,
because the import is measured.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import signal
import sys
import time
from pathlib import Path
from statistics import median, quantiles

import numpy as np

from bench.harness import memory

CALLS = 1_000  # of a latency, from which a 99th percentile is given; in half a second at least;
SHORTEST_S = 0.5
FEWEST_CALLS = 20  # and no more than these once it takes as long as is asked for
RATE_S = 0.2  # of calls at each batch size, but at least
FEWEST_RATE_CALLS = 3


def serve(
    load: str, arguments: dict, rows: str, threads: int, batches: list[int], longest_s: float
) -> dict:
    """Times and peak memory of a process that starts, loads and predicts one sample.

    rows: a .npy file of samples. longest_s: time limit of slow predictions of one sample for the
    latency; with 0, neither that nor a load after all imports is measured. batches: sizes whose
    samples/s are measured. Times are in seconds, memory in bytes.
    """
    x = np.load(rows, mmap_mode="r", allow_pickle=False)  # only what is used is read
    module, _, function = load.partition(":")
    make = getattr(importlib.import_module(module), function)
    predict = make(**arguments, threads=threads)
    convert = getattr(predict, "convert", lambda array: array)  # to what waits in memory anyway
    one = convert(np.array(x[:1]))
    predict(one)
    measured = {"ready": time.monotonic(), "threads": predict.threads}
    if longest_s:
        measured |= latency(predict, one, longest_s)
    measured["memory"] = memory.peak()
    measured["rates"] = {size: rate(predict, convert(np.array(x[:size])), size) for size in batches}
    if longest_s:
        start = time.perf_counter()
        make(**arguments, threads=threads)
        measured["load"] = time.perf_counter() - start
    return measured


def latency(predict, one, longest_s: float) -> dict:
    """Median and 95th percentile of predictions of one sample; the 99th of a thousand or more."""
    times: list[float] = []
    begin = time.perf_counter()

    def enough(least: int, seconds: float) -> bool:
        return len(times) >= least and time.perf_counter() - begin > seconds

    while not (enough(CALLS, SHORTEST_S) or enough(FEWEST_CALLS, longest_s)):
        start = time.perf_counter()
        predict(one)
        times.append(time.perf_counter() - start)
    percent = quantiles(times, n=100)
    last = percent[98] if len(times) >= CALLS else None
    return {"latency": median(times), "latency_p95": percent[94], "latency_p99": last}


def rate(predict, some, size: int) -> float:
    """Samples/s of a batch size, from the median call; the first two may lay out or trace."""
    predict(some)
    predict(some)
    times: list[float] = []
    while sum(times) < RATE_S or len(times) < FEWEST_RATE_CALLS:
        start = time.perf_counter()
        predict(some)
        times.append(time.perf_counter() - start)
    return size / median(times)


def load_in_place(path: str, *, package: str, task: str, make: str, threads: int):
    """The framework itself: build the task's model with the weights in `path`, and predict.

    make: "module:function" that turns the model into `predict(tensor)`.
    """
    kit = {
        name: importlib.import_module(f"{package}.kit.{name}")
        for name in ("data", "models", "runtime")
    }
    specs = importlib.import_module("shared.specs")
    configured = kit["runtime"].configure(threads=threads, seed=0)
    with np.load(path, allow_pickle=False) as file:
        model = kit["models"].build(specs.TASKS[task].model, dict(file))
    kit["runtime"].to_evaluation(model)
    module, _, function = make.partition(":")
    call = getattr(importlib.import_module(module), function)(model)

    def predict(x):
        output = call(x)
        kit["runtime"].synchronize()
        return output

    predict.convert = lambda array: kit["data"].to_device(array, array)[0]
    predict.threads = configured["intra_op"]
    return predict


def main() -> None:
    """Serve the request in a file."""
    if sys.platform == "linux":  # end with who asked, even inside a call that never returns
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # 1 is PR_SET_PDEATHSIG
    request = json.loads(Path(sys.argv[1]).read_text("utf-8"))
    answer = Path(request.pop("answer"))
    answer.write_text(json.dumps(serve(**request)), encoding="utf-8")


if __name__ == "__main__":
    main()
