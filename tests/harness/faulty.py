"""A technique in NumPy whose variants go wrong in every way that the harness must survive."""

import gc
import importlib.util
import os
import random
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from bench.harness import timing
from bench.harness.machine import TUNED_ALLOCATOR
from bench.harness.plan import WARM, Prepared, Technique, Variant, Workload
from bench.harness.stages import train_on, train_plain
from shared.user_model import NoFigure

LEAK = 50_000_000
LEFT = []  # what writing a file leaves in memory
ARTIFACT = 100_000
DEVICE_STEP_S = 3e-3

FAULTS = (
    "raises",
    "raises_late",
    "exits",
    "sys_exits",
    "killed",
    "killed_late",
    "out_of_memory",
    "prints",
    "refuses",
    "not_applied",
    "wrong_weight",
    "shuffled_batch",
    "nan_loss",
    "retraces",
    "burns_cpu",
    "unsynchronised",
    "synchronised",
    "odd_evidence",
    "fails_as_installed",
    "fails_in_training",
    "has_no_figure",
    "leaves_a_child",
    "leaks",
    "imports_late",
)

TECHNIQUE = Technique(
    family="faults",
    name="faulty",
    title="Faults",
    variants=(
        Variant("good", role="baseline"),
        Variant("same"),
        Variant("seldom", effort="ordinary"),
        Variant("hangs"),
        *(Variant(name) for name in FAULTS),
        Variant("as_installed", allocator="as installed"),
        Variant("needs_compiler", requires="compiler"),
        Variant("needs_gpu", requires="cuda"),
    ),
    workloads=(Workload("digits-cnn", "small", accuracy=True),),
    differs_by_design=("Nothing: both sides are the same NumPy.",),
    counts=True,
)

# No first call and no memory, which would take processes of their own.
TRAINED = replace(
    TECHNIQUE, variants=tuple(replace(each, measured=WARM) for each in TECHNIQUE.variants)
)

OPTIMIZER = "an optimizer"  # without state
FEW = ("good", "same", "seldom", "raises_late", "refuses", "prints")
SMALL = replace(TECHNIQUE, variants=tuple(v for v in TECHNIQUE.variants if v.name in FEW))

# Predictions of a file are timed, and each case has a probe of its own.
PREDICTED = Technique(
    family="faults",
    name="predicted",
    title="Predictions",
    variants=(
        Variant("good", role="baseline"),
        Variant("same"),
        Variant("raises_in_probe"),
        Variant("killed_writing"),
        Variant("leaves_much"),
    ),
    workloads=(Workload("digits-cnn", "small", mode="predict"),),
    cold_starts=2,
    probes=True,
)

# Nothing is timed: only what is measured in processes of its own.
UNTIMED = replace(
    TECHNIQUE, workloads=(Workload("digits-cnn", "small", timed=False),), name="untimed"
)

# On the fake device a step lasts what it shall last, within 1%.
PLANTED = Technique(
    family="faults",
    name="planted",
    title="Planted differences",
    variants=(
        Variant("on_device", role="baseline", measured=WARM),
        Variant("the_same", measured=WARM),
        Variant("slower_by_a_tenth", measured=WARM),
        Variant("faster_less_accurate", measured=WARM),
    ),
    workloads=(Workload("digits-cnn", "small", accuracy=True),),
)
DEVICE_SHARES = {
    "on_device": 1.0,
    "the_same": 1.0,
    "slower_by_a_tenth": 1.1,
    "faster_less_accurate": 0.5,
    "synchronised": 1.0,
}


def prepare(impl, work):
    weights = dict(work.weights)
    if work.variant == "wrong_weight":
        weights["head.kernel"] = weights["head.kernel"] + np.float32(1e-6)
    model = impl.kit.models.build(work.task.model, weights)
    share = 0.0 if work.variant in DEVICE_SHARES else 1.0
    step = impl.kit.training.make_train_step(model, None, None, share=share)
    before = BEFORE.get(work.variant)
    if before:
        before()
    make = STEPS.get(work.variant)
    if make:
        step = make(step, impl)
    elif work.variant in DEVICE_SHARES:
        step = _on_device(step, impl, DEVICE_SHARES[work.variant] * DEVICE_STEP_S)
    train = STAGES.get(work.variant)
    if train:
        train = train(impl, work, model)
    if work.variant == "faster_less_accurate":
        model.points_lost = 5.0
    predict = impl.kit.training.make_predict(model)
    if work.mode == "predict":
        write = partial(_write_file, work.variant, model)
        nothing = {"write": write, "read": _read_file, "train": lambda stages: None}
        return Prepared(_raise, _raise, model, OPTIMIZER, **nothing)
    predict = {"fails_in_training": _raise, "has_no_figure": _no_figure}.get(work.variant, predict)
    return Prepared(step, predict, model, OPTIMIZER, train=train)


def took_effect(impl, work, prepared, batch):
    reason = "nothing happened" if work.variant == "not_applied" else None
    evidence = {"operator_dtypes": impl.kit.runtime.operator_dtypes(prepared.step, *batch)}
    if work.variant == "odd_evidence":
        evidence["count"] = np.int64(3)  # JSON has no such thing
    return evidence, reason


def probe(impl, work, batches):
    if work.variant == "raises_in_probe":
        raise RuntimeError("the probe is wrong")
    return {
        "first_pixels": {"value": float(batches[0][0].mean()), "unit": "1", "samples": None},
        "budget": {"value": work.memory_budget, "unit": "bytes", "samples": None},
        "evidence": {"sent": ["a", "b"]},
    }


def _write_file(variant, model, path):
    """Predictions need one number of the weights. Each writing is a line in the file `WRITES`."""
    number = np.abs(model.weights["head.kernel"]).mean(dtype=np.float64)
    path.mkdir()
    (path / "weights").write_bytes(number.tobytes() + bytes(ARTIFACT - 9))
    if log := os.environ.get("WRITES"):
        with open(log, "a") as file:
            file.write(f"{variant}\n")
        if variant == "killed_writing" and Path(log).read_text().count(variant) == 1:
            os.kill(os.getpid(), signal.SIGKILL)
    if variant == "leaves_much":
        LEFT.append(np.ones(LEAK, np.uint8))
    (path / "version").write_bytes(b"1")


def _read_file(path):
    if (path / "version").read_bytes() != b"1":
        raise ValueError("it is not whole")
    number = np.frombuffer((path / "weights").read_bytes()[:8])[0]
    return lambda x: np.full((len(x), 10), x.mean() + number)


def _raise(*_):
    raise RuntimeError("this is wrong\nand more of it")


def _no_figure(*_):
    raise NoFigure("mine.py:3: in evaluate KeyError: 'labels'")


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


def _hang():
    print("hangs from now on")
    time.sleep(3600)


def _fail_as_installed():
    if not TUNED_ALLOCATOR.keys() <= os.environ.keys():
        raise RuntimeError("works with the tuned allocator alone")


def _import_late():
    if importlib.util.find_spec("library"):
        importlib.import_module("library")


def _compile():
    (Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]) / "program").touch(exist_ok=False)


def _plainly(impl, work):
    model = impl.kit.models.build(work.task.model, work.weights)
    step = impl.kit.training.make_train_step(model, None, None)
    return Prepared(step, impl.kit.training.make_predict(model), model, OPTIMIZER)


STAGES = {
    "plain": lambda impl, work, model: train_plain(impl, model),
    "plain_too": lambda impl, work, model: train_plain(impl, model),
    "goes_on": lambda impl, work, model: train_on(
        impl, replace(work, settings={"more": True}), _plainly, epochs=2
    ),
}

BEFORE = {
    "compiles": _compile,
    "imports_late": _import_late,
    "raises": _raise,
    "exits": lambda: os._exit(3),
    "sys_exits": lambda: sys.exit(3),
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "hangs": _hang,
    "out_of_memory": _out_of_memory,
    "prints": _print,
    "refuses": _refuse,
    "fails_as_installed": _fail_as_installed,
    "leaves_a_child": lambda: subprocess.Popen(["sleep", "3600"]),
}


def _raises_late(plain, impl):
    calls = []

    def step(x, y):
        calls.append(1)
        if len(calls) > 40:
            raise ValueError("step 41 is too much")
        return plain(x, y)

    return step


def _killed_late(plain, impl):
    """Killed by somebody else, for example the kernel, while it is sampled (collector off)."""

    def step(x, y):
        step.calls += not gc.isenabled()
        if step.calls == 100:
            os.kill(os.getpid(), signal.SIGKILL)
        return plain(x, y)

    step.calls = 0
    return step


def _retraces(plain, impl):
    def step(x, y):
        step.traces += 1
        return plain(x, y)

    step.traces = 1
    return step


def _burns_cpu(plain, impl):
    """A thread spins; its process's clock is planted, since a busy machine has no core for it."""
    clocks = {"perf_counter": time.perf_counter, "sleep": time.sleep}
    timing.time = SimpleNamespace(**clocks, process_time=lambda: 0.5 * time.perf_counter())

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


def _on_device(plain, impl, seconds):
    """Work on the fake asynchronous device, for which `runtime.synchronize` waits."""
    noise = random.Random(os.getpid())

    def step(x, y):
        return impl.kit.runtime.put_on_device(seconds * noise.uniform(0.99, 1.01), plain(x, y))

    return step


def _unsynchronised(plain, impl):
    """Work on a device that `runtime.synchronize` knows nothing of."""
    free_at = [0.0]

    def step(x, y):
        loss = plain(x, y)
        free_at[0] = ready = max(time.perf_counter(), free_at[0]) + DEVICE_STEP_S

        def result():
            left = ready - time.perf_counter()
            if left > 0:
                time.sleep(left)
            return loss

        return result

    return step


def _leaks(plain, impl):
    kept = []

    def step(x, y):
        if len(kept) == 5:  # well into the steady phase
            kept.append(np.ones(LEAK, np.uint8))
        elif len(kept) < 5:
            kept.append(None)
        return plain(x, y)

    return step


def _shuffled(plain, impl):
    calls = []

    def step(x, y):
        calls.append(1)
        return plain(x + 1, y) if len(calls) == 3 else plain(x, y)

    return step


STEPS = {
    "raises_late": _raises_late,
    "killed_late": _killed_late,
    "retraces": _retraces,
    "burns_cpu": _burns_cpu,
    "unsynchronised": _unsynchronised,
    "leaks": _leaks,
    "shuffled_batch": _shuffled,
    "nan_loss": lambda plain, impl: lambda x, y: plain(x, y) * float("nan"),
}
