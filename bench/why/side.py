"""A side in a new process: `python -m bench.why.side` answers requests, one line of JSON each.

Output of the framework and its libraries goes to standard error, or to a file that is read for the
verbose lines of oneDNN and MKL. `Running` is the process as the command sees it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from contextlib import ExitStack, nullcontext
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from bench.harness import machine
from bench.harness.plan import FRAMEWORKS, SEED, CaseMessage
from bench.harness.processes import ROOT
from bench.why import libraries
from bench.why.measured import Side
from shared.step_events import PRODUCTS
from shared.user_model import one_line

VERBOSE = {"ONEDNN_VERBOSE": "1", "MKL_VERBOSE": "1"}
MARK = "twinbench: verbose steps"  # stands before them and after them
VERBOSE_STEPS = 2
MOST_SHAPES = 12
ON_A_GPU = (
    "the step runs on a GPU, whose kernels have no kinds of work here: hide the GPU "
    "(CUDA_VISIBLE_DEVICES=) and ask of the CPU"
)
Shape = tuple[tuple[int, ...], str]  # of a product, and its dtype


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """What a process measures. name: in words. data: the folder of the task's data."""

    name: str
    framework: str
    case: CaseMessage
    data: str
    threads: int
    allocator: str = "tuned"
    variables: dict[str, str] = {}


class Alone(msgspec.Struct, frozen=True, kw_only=True):
    """What is computed separately, see `measuring.Program.compute`."""

    kind: str
    shape: tuple[int, ...]
    dtype: str
    train: bool = False


class Running:
    """A measuring process; a context that ends it."""

    def __init__(
        self, request: Request, log: Path | None = None, seconds: float | None = None
    ) -> None:
        """Start it. seconds: after which it is stopped."""
        self.request = request
        flavour = FRAMEWORKS[request.framework].flavours[0]
        environment = machine.process_environment(
            threads=request.threads, flavour=flavour, allocator=request.allocator
        )
        environment |= {"KINETO_LOG_LEVEL": "99", "TF_CPP_MIN_LOG_LEVEL": "3"}
        self._open = ExitStack()
        if log is None:
            log = Path(self._open.enter_context(tempfile.TemporaryDirectory())) / "log"
        self.log = log
        self._log = self._open.enter_context(log.open("w+b"))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.why.side"],
            cwd=ROOT,
            env=environment | request.variables,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
        )
        if seconds is not None:
            timer = threading.Timer(max(seconds, 0.0), self._process.kill)
            timer.start()
            self._open.callback(timer.cancel)
        self._send(msgspec.json.encode(request))
        self.ready = False

    def __enter__(self) -> Running:
        return self

    def __exit__(
        self, kind: type | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe:
                pipe.close()
        if kind is not None:
            self._process.kill()
        self._process.wait()
        self._open.close()

    def wait(self) -> None:
        """Wait until it has built its step. Raises ValueError with the reason if it can't."""
        if not self.ready:
            self._answer()
            self.ready = True

    def round(self) -> float:
        """Seconds per step of a round of steps."""
        return self._ask("round")

    def side(self) -> Side:
        """All measurements, and a profile."""
        return msgspec.convert(self._ask("side"), Side)

    def compute(self, one: Alone, *, single: bool) -> float:
        """Seconds of a separate product, convolution or attention, on one thread or on all."""
        return self._ask("compute", single=single, **msgspec.to_builtins(one))

    def single(self) -> float:
        """Seconds of a step on one thread."""
        return self._ask("single")

    def verbose(self, shapes: list[Shape]) -> None:
        """Take steps that log library calls, then products of these shapes."""
        self._ask("verbose", shapes=shapes)

    def _ask(self, what: str, **given: object) -> Any:
        self.wait()
        self._send(json.dumps({"what": what, **given}).encode())
        return self._answer()

    def _send(self, line: bytes) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise ValueError(f"{self.request.name}: {self._last_words()}") from None

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise ValueError(f"{self.request.name}: {self._last_words()}")
        answer = json.loads(line)
        if "error" in answer:
            raise ValueError(f"{self.request.name}: {answer['error']}")
        return answer["value"]

    def _last_words(self) -> str:
        if self._process.wait() == -signal.SIGKILL:
            return "it was stopped: it took too long, or memory was short"
        self._log.seek(0)
        lines = self._log.read().decode("utf-8", "replace").strip().splitlines()
        return lines[-1] if lines else "its process ended without a word"


def with_libraries(
    pair: tuple[Request, Request], sides: list[Side], seconds: float | None = None
) -> list[Side]:
    """The sides with the library of each product, by the verbose output of oneDNN and MKL.

    This needs new processes, since printing takes time. seconds: limit. A side without products is
    unchanged: OpenVINO computes wrong results in oneDNN's verbose mode.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        known, runs = list(sides), {}
        for place, (one, side) in enumerate(zip(pair, sides, strict=True)):
            if side.products:
                request = msgspec.structs.replace(one, variables=one.variables | VERBOSE)
                running = Running(request, folder / str(place), seconds)
                runs[place] = stack.enter_context(running)
        for place, running in runs.items():
            shapes = _shapes(sides[place])
            running.verbose(shapes)
            text = running.log.read_text("utf-8", "replace")
            _, steps, *alone, _ = [part.splitlines() for part in text.split(MARK)]
            printed = {shape: lines for (shape, _), lines in zip(shapes, alone, strict=True)}
            calls = libraries.read(steps, printed)
            known[place] = libraries.with_libraries(sides[place], calls)
    return known


def _shapes(side: Side) -> list[Shape]:
    """The products that take most, each shape and dtype once."""
    products = sorted(side.products, key=lambda one: -one.seconds)
    every = [(p.shape, p.dtype) for p in products if len(p.shape) == 3 and None not in p.shape]
    return list(dict.fromkeys(every))[:MOST_SHAPES]


# In the process ----------------------------------------------------------------------------------


def main() -> None:
    """Build the program, and answer requests until the input ends."""
    machine.end_with_parent()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what others print

    def answer(**what: object) -> None:
        answers.write(msgspec.json.encode(what).decode() + "\n")

    request = msgspec.json.decode(sys.stdin.readline(), type=Request)
    try:
        program = _built(request)
    except Exception as error:
        answer(error=one_line(error))
        return
    answer(value=True)
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            answer(value=_answered(program, asked.pop("what"), asked))
        except Exception as error:
            answer(error=one_line(error))


def _built(request: Request) -> Any:
    from bench.harness.worker import Operations
    from bench.why.measuring import Program

    operations = Operations()
    framework = FRAMEWORKS[request.framework]
    operations._op_configure(framework.package, request.threads, SEED, list(framework.preload))
    operations._op_build(request.case, request.data, SEED)
    batches = getattr(operations.impl, "stream", None) or operations.batches
    model = operations.prepared.model
    impl = sys.modules[framework.package]
    if not impl.kit.runtime.device().lower().startswith("cpu"):
        raise ValueError(ON_A_GPU)
    file = bool(operations.prepared.write)
    program = Program(request.name, impl, operations.call, batches, model, of_file=file)
    program.round()
    program.rounds.clear()
    return program


def _answered(program: Any, what: str, given: dict) -> Any:
    if what == "round":
        return program.round()
    if what == "side":
        return program.side()
    if what == "compute":
        threads = program.impl.kit.runtime.one_thread if given.pop("single") else nullcontext
        with threads():
            return program.compute(**given)
    if what == "single":
        with program.impl.kit.runtime.one_thread():
            return program.alone()
    if what == "verbose":
        print(MARK, flush=True)
        for _ in range(VERBOSE_STEPS):
            program.take()
        print(MARK, flush=True)
        for shape, dtype in given["shapes"]:
            program.compute(PRODUCTS, shape, dtype, seconds=0.0)
            print(MARK, flush=True)
        return True
    raise ValueError(f"unknown request: {what}")


if __name__ == "__main__":
    main()
