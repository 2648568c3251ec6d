"""One framework's share of the profiler's tests; `worker.py` runs it."""

from __future__ import annotations

import importlib
import json
import queue
import tempfile
import threading
import time
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean
from unittest import mock

import numpy as np

from shared import profiles
from shared.profiles import STEP, WAITING
from tests import workers
from tests.diagnosis import steps
from tests.diagnosis.steps import NAME, impl

profiling = impl.diagnosis.profiling
LATE = 0.015


def told(breakdown) -> dict:
    """A breakdown without its long lists."""
    return asdict(breakdown) | {"operators": [asdict(o) for o in breakdown.operators]}


def counted(step, batches, steps: int) -> dict:
    """The breakdown of one turn, which has the same operators as four."""
    with mock.patch.object(profiling, "_TURNS", 1):
        return told(profiling.profile_steps(step, batches, steps=steps))


def sleeping():
    """Known seconds of waiting, forward and backward; timed by a clock of our own, too."""
    batch = steps.data(8, 16)
    inner = steps.sleeping_step(steps.dense(8, 8, 2))
    begins, ends = [], []

    def batches():
        while True:
            begins.append(time.perf_counter())
            steps.nap(LATE, "waiting")
            yield batch

    def step(x, y):
        inner(x, y)
        ends.append(time.perf_counter())

    with mock.patch.object(profiles, "SETTLING", 0.0):  # nothing is made ahead
        profile = profiling.profile_steps(step, batches(), steps=20, warmup=5)
    taken = [end - begin for begin, end in zip(begins, ends, strict=True)]
    # After the warm-up and the profiler's first use four turns of 1 + 5 plain and 1 + 5 profiled.
    turns = [taken[6 + 12 * turn : 18 + 12 * turn] for turn in range(4)]
    by_our_clock = {
        "plain": fmean(seconds for turn in turns for seconds in turn[1:6]),
        "profiled": fmean(seconds for turn in turns for seconds in turn[7:12]),
    }
    slept = {part: fmean(naps[6:]) for part, naps in steps.SLEPT.items()}
    return told(profile) | {"own": by_our_clock, "slept": slept, "steps": len(taken)}


def between_operators():
    """A step that sleeps, and one that works in Python, between operators."""
    batch, plain = steps.data(8, 16), steps.plain_step(steps.dense(8, 8, 2))

    def asleep(x, y):
        steps.nap(0.01, "asleep")
        return plain(x, y)

    robbed = []  # seconds in which others had the core

    def busy(x, y):
        begin, start = time.perf_counter(), time.thread_time()
        while time.thread_time() < start + 0.01:
            pass
        robbed.append(time.perf_counter() - begin - 0.01)
        return plain(x, y)

    profiled = {
        name: told(profiling.profile_steps(step, [batch], steps=8))
        for name, step in (("asleep", asleep), ("busy", busy))
    }
    return profiled | {"slept": fmean(steps.SLEPT["asleep"]), "robbed": fmean(robbed)}


def operators():
    """Three dense layers: three products forward, five backward."""
    batch = steps.data(64, 32)
    return counted(steps.plain_step(steps.dense(64, 64, 64, 2)), [batch], steps=4)


def products():
    """Products of known size, by themselves; and those of networks, forward and backward."""
    steps.forget()
    profiled = {name: _undisturbed(step, batch) for name, (step, batch) in steps.products().items()}
    images = np.random.default_rng(0).normal(size=(4, 16, 16, 3)).astype(np.float32)
    batch = impl.kit.data.to_device(images, np.arange(4) % 2)
    step = steps.plain_step(steps.convolutional())
    profiled["network"] = counted(step, [batch], steps=4)
    step, batches = importlib.import_module(f"{impl.__name__}.kit.examples").train_step(
        "digits-cnn", 4
    )
    profiled["task"] = counted(step, batches, steps=4)
    return profiled


def _undisturbed(step, batch, tries=5):
    """The profile of a product; in campaigns taken again where others had the cores."""
    found = counted(step, [batch], steps=4)
    for _ in range(tries if workers.campaign() else 0):
        if all((one["of_peak"] or 0.0) < 1.3 for one in found["operators"]):
            break
        found = told(profiling.profile_steps(step, [batch], steps=40))
    return found


def beside_the_step():
    """What prepares the next batches in the background is not the step's."""
    batch = steps.data(8, 16)
    step = steps.plain_step(steps.dense(8, 8, 2))
    if NAME == "pt":
        return counted(step, [batch], steps=4)
    import tensorflow as tf

    def prepare(number):
        x = tf.ones((300, 300)) * tf.cast(number, tf.float32)
        return tf.reduce_sum(tf.linalg.cholesky(x @ x + 1e6 * tf.eye(300)))

    numbers = tf.data.Dataset.range(1_000).map(prepare, num_parallel_calls=1).prefetch(4)
    with mock.patch.object(profiles, "SETTLING", 0.0):  # or there are not enough
        return counted(lambda number: step(*batch), ((number,) for number in numbers), steps=8)


def made_ahead():
    """A loader that is slower than the step, and fills a queue while nothing is taken of it."""
    batch, plain = steps.data(8, 16), steps.plain_step(steps.dense(8, 8, 2))
    made, full, ended = queue.Queue(16), threading.Event(), threading.Event()

    def make():
        while not ended.wait(LATE):
            try:
                made.put_nowait(batch)
            except queue.Full:
                full.set()

    def step(x, y):  # the first one lasts until there is no room for more, as if it compiled
        assert full.wait(60), "the loader made nothing ahead"
        return plain(x, y)

    thread = threading.Thread(target=make)
    thread.start()
    try:
        return counted(step, iter(made.get, None), steps=8)
    finally:
        ended.set()
        thread.join()


def opened(log: Path) -> list[str] | None:
    """The operators that TensorBoard's plug-in finds in a log; None where it is not installed."""
    if find_spec("torch_tb_profiler" if NAME == "pt" else "xprof") is None:
        return None
    if NAME == "pt":
        from torch_tb_profiler.profiler.data import RunProfileData

        with tempfile.TemporaryDirectory() as cache:
            found = RunProfileData.parse("worker", "1", str(log), cache)
            found.process()
        return [operator.name for operator in found.op_list_groupby_name]
    from xprof.convert.raw_to_tool_data import xspace_to_tool_data

    table = json.loads(xspace_to_tool_data([str(log)], "framework_op_stats", {})[0])[0]
    names = [column["id"] for column in table["cols"]]
    return [row["c"][names.index("type")]["v"] for row in table["rows"]]


def without_a_graph():
    """Two products that Python calls by themselves, and one in a function; batches of tf.data."""
    if NAME == "pt":
        return {}
    import tensorflow as tf

    product = tf.function(tf.matmul)
    batches = tf.data.Dataset.from_tensors(tf.ones((64, 64)))
    return counted(lambda x: product(tf.tanh(x @ x) @ x, x), batches, steps=4)


def files():
    """The three files, as their readers find them."""
    batch = steps.data(8, 16)
    step = steps.plain_step(steps.dense(8, 8, 2))
    with tempfile.TemporaryDirectory() as folder:
        profiled = profiling.profile_steps(step, [batch], steps=4, folder=folder)
        trace = json.loads((Path(folder) / "trace.json").read_text())["traceEvents"]
        stacks = (Path(folder) / "stacks.txt").read_text().splitlines()
        (log,) = [p for p in (Path(folder) / "tensorboard").rglob("*") if p.is_file()]
        if NAME == "pt":
            names = {event.get("name") for event in json.loads(log.read_text())["traceEvents"]}
        else:
            from tensorflow.tsl.profiler.protobuf import xplane_pb2

            planes = xplane_pb2.XSpace.FromString(log.read_bytes()).planes
            names = {entry.name for plane in planes for entry in plane.event_metadata.values()}
        marks = [e for e in trace if e.get("name") == STEP and e.get("ph") == "X"]
        return {
            "log": log.name,
            "log marks": sorted(names & {STEP, WAITING}),
            "trace marks": len(marks),
            "trace whole": all({"ts", "dur", "pid", "tid"} <= event.keys() for event in marks),
            "stacks": stacks,
            "opened": opened(log),
            "memory": len(profiled.memory),
        }


def refused():
    """What is said."""
    batch, step = steps.data(8, 16), steps.plain_step(steps.dense(8, 2))

    def said(*arguments, **settings):
        try:
            profiling.profile_steps(*arguments, **settings)
        except (ValueError, NotImplementedError) as error:
            return f"{type(error).__name__}: {error}"
        return ""

    reasons = {
        "no batches": said(step, []),
        "few steps": said(step, [batch], steps=2),
    }
    if NAME == "tf":
        import tensorflow as tf

        reasons["xla"] = said(
            tf.function(lambda x, y: x @ tf.transpose(x), jit_compile=True), [batch]
        )
    return reasons


SCENARIOS = (operators, beside_the_step, without_a_graph, files, refused)
TIMED = (sleeping, between_operators, products, made_ahead)
