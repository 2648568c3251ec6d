"""What a worker is asked in a match: first steps, warm-up, samples."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
from itertools import chain, cycle, islice
from math import ceil
from pathlib import Path
from statistics import median

from msgspec import structs

from bench.harness import memory
from bench.harness.answers import Finished, FirstCall, NextSteps, Proof, Sample, Warmed
from bench.harness.energy import Meter
from shared.user_model import dealt, first, shape_of

SAMPLE_S = 0.010  # a sample lasts at least this long
WARM_S = 0.05  # a chunk of warm-up steps lasts so long at least
WARM_CHUNKS = 20
MOST_WARM_S = 1.0  # slow steps settle within fewer
SETTLE_S = 0.05
SLOW_S = 1.0  # a step that lasts longer needs none before it: what it finds in caches is nothing
# Batches of several shapes are one sample; where that lasts longer, samples take parts in turn: as
# many as a block has rounds at least. By the file's plain step, so that all rows do the same.
WHOLE_S, PARTS = 0.5, 3
CERTIFIED_S = 2.0  # steps of a certificate end after so long, where they are slow,
FEWEST_CERTIFIED = 2  # but never before so many more than the first


def other_threads_run() -> bool:
    """Whether another thread of this process runs now; False if unknown.

    By the state in /proc, because CPU clocks of running threads advance only with the kernel's
    tick.
    """
    this = str(threading.get_native_id())
    for task in Path("/proc/self/task").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # a thread that has just ended
            if (
                task.name != this
                and (task / "stat").read_text().rpartition(")")[2].split()[0] == "R"
            ):
                return True
    return False


class Timing:
    """Operations on a prepared case: see `worker.Operations`."""

    last_s = 0.0  # what the last step of its certificate took
    # What samples take, each the next, where shapes vary; then every row has the same in each.
    parts: tuple = ()
    part: tuple = ()

    @property
    def slow(self) -> bool:
        """Whether its steps take longer than `SLOW_S`."""
        return self.last_s > SLOW_S

    def _op_first_call(self) -> FirstCall:
        """The first call, timed, and its loss."""
        start = time.perf_counter()
        output = self.call(*self.batches[0])
        self.kit.runtime.synchronize()
        seconds = time.perf_counter() - start
        return FirstCall(seconds=seconds, loss=self._loss(output, self.batches[0][1]))

    def _op_next_steps(self) -> NextSteps:
        """The losses of the steps after it: with its own half of a certificate, of ten at most."""
        losses, first = [], time.perf_counter()
        for batch in self.batches[1:]:
            start = time.perf_counter()
            losses.append(self._loss(self.call(*batch), batch[1]))
            end = time.perf_counter()
            self.last_s = end - start
            if end - first > CERTIFIED_S and len(losses) >= FEWEST_CERTIFIED:
                break
        return NextSteps(losses=losses)

    def _op_warm(self, steps: int | None = None) -> Warmed:
        """Step until steps stop trending, then fix how many make a sample.

        Not where that is known: it was so many `steps` in an earlier block, or one step lasts
        longer than a sample. The first rounds of a block are its warm-up then: where they are
        slower, they do not count. Where shapes vary, each is seen twice at least: a compiler may
        make code for each. Nor is a loop of the framework's known before it has run.
        """
        self.stream = cycle(self.batches)
        if self.shape_count > 1:
            self.part = tuple(self.batches)
        if self.last_s > 2 * SAMPLE_S:
            steps = steps or 1
        if self.part or self.prepared.loop or not steps:
            steps = self._calibrated()
        self.steps = steps
        gc.freeze()  # what is garbage too: collecting takes longer than a sample
        gc.disable()
        self.traces = self._trace_count()
        empty = self._empty_sample()
        self.meter = Meter()
        self._settle()
        self._mark()
        return Warmed(steps=self.steps, empty_s=empty)

    def _calibrated(self) -> int:
        """How many steps make a sample, once steps have stopped trending."""
        previous, step_s = float("inf"), float("inf")
        start = time.perf_counter()
        for chunk in range(WARM_CHUNKS):
            previous, step_s = step_s, self._chunk()
            steady = abs(step_s - previous) < 0.05 * step_s
            seen = chunk or not self.part
            if seen and (steady or time.perf_counter() - start > MOST_WARM_S):
                break
        if self.part:
            sides = self.impl.about["sides"].values()
            whole_s = max(side["step_s"] for side in sides) * len(self.batches)
            self.parts = dealt(self.batches, PARTS) if whole_s > WHOLE_S else (self.part,)
            self.part = self.parts[0]
        return self._steps_a_sample(step_s)

    @property
    def shape_count(self) -> int:
        """How many different shapes its batches have."""
        return len(set(map(shape_of, self.batches)))

    def _next_part(self) -> None:
        """Let the next sample take the next part of the batches, where they are in parts."""
        if self.parts:
            self.parts = (*self.parts[1:], self.parts[0])
            self.part = self.parts[-1]
            self.steps = self._whole(self.steps if len(self.parts) == 1 else 1)

    def _whole(self, count: int) -> int:
        """So many steps, or some more: a sample has all batches of its part equally often."""
        length = max(1, len(self.part))
        return length * ceil(count / length)

    def _steps_a_sample(self, step_s: float) -> int:
        """How many steps last `SAMPLE_S`, tried out: in a row a step may cost less than alone.

        The fastest of a few tries counts, since the machine may be busier now than later.
        """
        count = self._whole(max(1, ceil(SAMPLE_S / step_s)))
        if step_s > 2 * SAMPLE_S:
            return count
        for _ in range(5):
            step_s = min(self._timed(count)[0] for _ in range(3))
            if count * step_s >= SAMPLE_S:
                break
            count = self._whole(ceil(1.1 * SAMPLE_S / step_s))
        return count

    def _chunk(self) -> float:
        """Median seconds a step over a chunk of warm-up; of several shapes the mean over all."""
        if self.part:
            return self._timed(len(self.part))[0]
        taken: list[float] = []
        while sum(taken) < WARM_S:
            taken.append(self._timed(1)[0])
        return median(taken)

    def _trace_count(self) -> int:
        timed = self.prepared.predict if self.work.mode == "predict" else self.prepared.step
        return self.kit.runtime.trace_count(timed)

    def _empty_sample(self) -> float:
        """What the harness adds to a step: seconds a step of a sample whose step does nothing."""
        return median(self._loop(self._take(self.steps), lambda x, y: None)[0] for _ in range(5))

    def _timed(self, count: int) -> tuple[float, object]:
        """Seconds a step over `count` steps, after an untimed one if short, and the last loss.

        Where shapes vary, the first step has the first shape, and the untimed one the last.
        """
        if self.part:
            untimed = self.prepared.loop or not self.slow
            self.stream = chain(self.part[-1:] if untimed else (), cycle(self.part))
        if self.prepared.loop:
            seconds, loss = self.prepared.loop(self._take(count + 1))
            return seconds / count, loss
        if not self.slow:
            self.call(*next(self.stream))
        return self._loop(self._take(count), self.call)

    def _loop(self, batches: list, step) -> tuple[float, object]:
        """Seconds a step over `batches`, synchronised at the edges only, and the last loss."""
        synchronize = self.kit.runtime.synchronize
        loss = None
        synchronize()
        start = time.perf_counter()
        for x, y in batches:
            loss = step(x, y)
        synchronize()
        return (time.perf_counter() - start) / len(batches), loss

    def _take(self, count: int) -> list:
        return list(islice(self.stream, count))

    def _op_sample(self) -> Sample:
        """One sample, with what the process did while it waited.

        Where steps have become so fast that it was too short, it is taken once more, of more steps.
        The last loss is read after the clock has stopped, and once more: if the first takes longer,
        the device was still at work and the sample is wrong. Energy is that of all steps, an
        untimed one among them.
        """
        waiting_cpu = time.process_time() - self.cpu_mark
        waited = time.perf_counter() - self.wall_mark
        self._next_part()
        seconds, output, energy = self._metered()
        while seconds * self.steps < SAMPLE_S:
            self.steps = self._whole(max(self.steps + 1, ceil(1.1 * SAMPLE_S / seconds)))
            seconds, output, energy = self._metered()
        late = self._reading(output) - self._reading(output)
        self._settle()
        self._mark()
        return Sample(
            seconds=seconds,
            steps=self.steps,
            late_s=max(0.0, late) / self.steps,
            energy_j=energy,
            waiting_cpu_s=waiting_cpu,
            waited_s=waited,
        )

    def _metered(self) -> tuple[float, object, float | None]:
        """What `_timed` finds, and the joules of a step where a counter tells."""
        self.meter.start()
        seconds, output = self._timed(self.steps)
        joules = self.meter.stop()
        untimed = bool(self.prepared.loop) or not self.slow
        return seconds, output, None if joules is None else joules / (self.steps + untimed)

    def _reading(self, output) -> float:
        """Seconds that it takes to bring the loss, or one of the logits, to Python."""
        start = time.perf_counter()
        if self.work.mode == "predict":
            output = first(output)
            output = output[(0,) * len(output.shape)]
        self.kit.runtime.to_float(output)
        return time.perf_counter() - start

    def _settle(self) -> None:
        """Wait until the pools of threads have gone to sleep, so that nobody else is disturbed.

        OpenMP's threads spin for some milliseconds after a parallel region (GOMP_SPINCOUNT, libgomp
        manual), Eigen's for less. That is left as it is within a sample; between samples it would
        take a core from whoever comes next. A process that never sleeps is found by its CPU time.
        """
        deadline = time.perf_counter() + SETTLE_S
        while other_threads_run() and time.perf_counter() < deadline:
            time.sleep(0.0005)

    def _mark(self) -> None:
        self.cpu_mark, self.wall_mark = time.process_time(), time.perf_counter()

    def _op_finish(self, evidence: bool) -> Finished:
        """Whether steps were traced again, and on request the proof that the technique happened."""
        traces, peak = self._trace_count(), memory.proportional_peak()
        modules = self._modules() if evidence else None  # of the case, not of its proof
        proof = self._op_evidence() if evidence else Proof()
        if self.part and traces is not None and proof.evidence is not None:
            counted = {"shapes": self.shape_count, "graphs_of_shapes": traces}
            proof = structs.replace(proof, evidence=proof.evidence | counted)
        return Finished(
            traces_before=self.traces,
            traces=traces,
            peak_bytes=peak,
            modules=modules,
            evidence=proof.evidence,
            not_applied=proof.not_applied,
        )
