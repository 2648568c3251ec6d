"""A technique whose variants go wrong in every way that the harness must survive."""

import os
import signal
import sys
import threading
import time

import numpy as np

from bench.harness.plan import Prepared, Technique, Variant, Workload

LEAK = 50_000_000

TECHNIQUE = Technique(
    name="faulty",
    title="Faults",
    variants=(
        Variant("good", role="baseline", effort="quick"),
        Variant("same"),
        *(
            Variant(name)
            for name in (
                "raises",
                "raises_late",
                "exits",
                "killed",
                "hangs",
                "out_of_memory",
                "prints",
                "refuses",
                "not_applied",
                "wrong_weight",
                "shuffled_batch",
                "retraces",
                "burns_cpu",
                "unsynchronised",
                "slower_by_a_tenth",
                "leaks",
            )
        ),
        Variant("needs_compiler", requires="compiler"),
        Variant("needs_gpu", requires="cuda"),
    ),
    workloads=(Workload("digits-cnn", "small", accuracy=True),),
)


def prepare(kit, work):
    weights = dict(work.weights)
    if work.variant == "wrong_weight":
        weights["head.kernel"] = weights["head.kernel"] + np.float32(1e-6)
    model = kit.models.build(work.task.model, weights)
    plain = kit.training.make_train_step(model, None, None)
    before = BEFORE.get(work.variant)
    if before:
        before()
    make = STEPS.get(work.variant)
    return Prepared(make(plain) if make else plain, kit.training.make_predict(model), model, None)


def took_effect(kit, work, prepared, batch):
    reason = "nothing happened" if work.variant == "not_applied" else None
    return {"operator_dtypes": kit.runtime.operator_dtypes(prepared.step, *batch)}, reason


def _raise():
    raise RuntimeError("this is wrong\nand more of it")


def _refuse():
    raise NotImplementedError("upstream refuses this model")


def _out_of_memory():
    import resource

    limit = 1 << 30
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    np.ones(limit, np.uint8)


def _print():
    print("a line on standard output")
    os.write(1, b"and bytes on its descriptor\n")
    print("and on standard error", file=sys.stderr)


BEFORE = {
    "raises": _raise,
    "exits": lambda: os._exit(3),
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "hangs": lambda: time.sleep(3600),
    "out_of_memory": _out_of_memory,
    "prints": _print,
    "refuses": _refuse,
}


def _raises_late(plain):
    calls = []

    def step(x, y):
        calls.append(1)
        if len(calls) > 40:
            raise ValueError("step 41 is too much")
        return plain(x, y)

    return step


def _retraces(plain):
    def step(x, y):
        step.traces += 1
        return plain(x, y)

    step.traces = 1
    return step


def _burns_cpu(plain):
    def spin():
        while True:
            pass

    def step(x, y):
        if not started:
            started.append(threading.Thread(target=spin, daemon=True))
            started[0].start()
        return plain(x, y)

    started = []
    return step


def _unsynchronised(plain):
    """An asynchronous device: a step returns at once, its result comes later."""
    clock = {"free_at": 0.0}

    def step(x, y):
        loss = plain(x, y)
        clock["free_at"] = ready = max(time.perf_counter(), clock["free_at"]) + 1e-3

        def result():
            time.sleep(max(0.0, ready - time.perf_counter()))
            return loss

        return result

    return step


def _slower(plain):
    def step(x, y):
        start = time.perf_counter()
        loss = plain(x, y)
        end = time.perf_counter()
        while time.perf_counter() - end < 0.1 * (end - start):
            pass
        return loss

    return step


def _leaks(plain):
    kept = []

    def step(x, y):
        if len(kept) == 5:  # well into the steady phase
            kept.append(np.ones(LEAK, np.uint8))
        elif len(kept) < 5:
            kept.append(None)
        return plain(x, y)

    return step


def _shuffled(plain):
    calls = []

    def step(x, y):
        calls.append(1)
        return plain(x + 1, y) if len(calls) == 3 else plain(x, y)

    return step


STEPS = {
    "raises_late": _raises_late,
    "retraces": _retraces,
    "burns_cpu": _burns_cpu,
    "unsynchronised": _unsynchronised,
    "slower_by_a_tenth": _slower,
    "leaks": _leaks,
    "shuffled_batch": _shuffled,
}
