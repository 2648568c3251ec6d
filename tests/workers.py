"""Workers: the processes in which tests run the frameworks, all of a module at the same time."""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

from bench.harness import machine

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT_S = 600


KIT = ("models", "data", "training", "runtime")
CAMPAIGN = "TWINBENCH_CAMPAIGN"  # in the environment of a pytest with --campaign


def campaign() -> bool:
    """Whether all is to be tried, and not only what a change is held to."""
    return CAMPAIGN in os.environ


def keras() -> tuple[str, ...]:
    """The workers of a technique whose code is the same for either Keras: one of each in campaigns.

    `train_step/test_any_model.py`, `kit`, and the techniques whose rows run tf_keras always have
    both.
    """
    return ("tf", "tf_keras") if campaign() else ("tf",)


def implementation(framework: str, *modules: str):
    """The package of "pt" or "tf" with its kit and, for example, "compression.pruning" imported."""
    package = f"{framework}_impl"
    for module in (*(f"kit.{name}" for name in KIT), *modules):
        importlib.import_module(f"{package}.{module}")
    return importlib.import_module(package)


def has_vnni() -> bool:
    """Whether integer kernels have all 8 bits: those of x86 without VNNI would overflow."""
    x86 = platform.machine() in ("x86_64", "AMD64")
    return not x86 or "avx512_vnni" in machine.describe(1).isa


def raised(function: Callable, *args, **kwargs) -> str | None:
    """The error of a call; None where there is none."""
    try:
        function(*args, **kwargs)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


class Scenarios(dict):
    """What a worker found by scenario; a look-up fails with the traceback where it raised one.

    It fails, too, where nothing was found: a test that looks at each of none would pass.
    """

    def __init__(self, name: str, found: dict) -> None:
        super().__init__(found)
        self.name = name
        self.framework = "pt" if name == "pt" else "tf"

    def __getitem__(self, scenario: str):
        found = super().__getitem__(scenario)
        if isinstance(found, dict) and "error" in found:
            raise AssertionError(found["error"])
        assert found not in ({}, []), f"{scenario} found nothing in {self.name}"
        return found


class Parent:
    """A process that forks workers, one at a time, and has imported what they need (`warm.py`)."""

    def __init__(self, name: str, folder: Path = ROOT) -> None:
        framework = {"tf_keras": "tf", "keras3": "tf"}.get(name, name)
        self._pipes = subprocess.Popen(
            [sys.executable, "-m", "tests.warm", framework],
            cwd=folder,
            env=environment(name),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        atexit.register(self._end)

    def fork(self, **request: object) -> int | None:
        """The exit status of a process; None after its time is over."""
        print(json.dumps(request), file=self._pipes.stdin, flush=True)
        answer = self._pipes.stdout.readline()
        assert answer, "the parent of the workers ended: what it said stands above"
        return json.loads(answer)

    def run(
        self,
        module: str,
        *arguments: object,
        folder: Path = ROOT,
        timeout: int = TIMEOUT_S,
        **variables: str,
    ) -> subprocess.CompletedProcess:
        """`python -m MODULE ARGUMENTS` in `folder`: what it said, and its status as of `fork`."""
        with tempfile.TemporaryDirectory() as said:
            out, err = Path(said, "out"), Path(said, "err")
            out.touch()
            err.touch()
            status = self.fork(
                module=module,
                arguments=list(map(str, arguments)),
                environment=variables,
                folder=str(folder),
                out=str(out),
                err=str(err),
                timeout=timeout,
            )
            texts = out.read_text("utf-8"), err.read_text("utf-8")
        return subprocess.CompletedProcess([module, *arguments], status, *texts)

    def _end(self) -> None:
        self._pipes.stdin.close()
        self._pipes.wait()


@functools.cache
def parent(name: str) -> Parent:
    """The parent of all workers of a name in this session."""
    return Parent(name)


def environment(name: str) -> dict[str, str]:
    """The environment of a worker, whatever the tests were started with."""
    unset = ("TF_USE_LEGACY_KERAS", "KINETO_LOG_LEVEL")
    others = {key: value for key, value in os.environ.items() if key not in unset}
    legacy = {"TF_USE_LEGACY_KERAS": "1"} if name == "tf_keras" else {}
    # One thread compiles: a pool would import torch once more. Which of the CPU's instructions the
    # compiler knows it need not show in each empty cache, which takes eight seconds. What calls the
    # kernels of a package need not be fast. Threads that wait leave the core to the workers beside
    # them.
    quiet = {
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "TORCHINDUCTOR_VEC_ISA_OK": "1",
        "AOT_INDUCTOR_COMPILE_WRAPPER_OPT_LEVEL": "O0",
        "OMP_WAIT_POLICY": "passive",
    }
    return others | quiet | legacy


def report(scenarios: Iterable[Callable], *arguments) -> None:
    """Print what each scenario found, by its name, as the last line of a worker.

    On standard error stands how long each took, and its CPU seconds, those of its children too.
    """
    found = {}
    for scenario in scenarios:
        start, cpu = time.monotonic(), sum(os.times()[:4])
        try:
            found[scenario.__name__] = scenario(*arguments)
        except Exception:
            found[scenario.__name__] = {"error": traceback.format_exc()}
        took = f"{time.monotonic() - start:.1f} s, CPU {sum(os.times()[:4]) - cpu:.1f} s"
        print(f"{scenario.__name__}: {took}", file=sys.stderr)
    print(json.dumps(found))


@contextlib.contextmanager
def without_inductor() -> Iterator[None]:
    """`torch.compile` traces and differentiates as ever, and runs PyTorch's own kernels.

    Nothing changes where torch is not imported.
    """
    if torch := sys.modules.get("torch"):
        traced = functools.partial(torch.compile, backend="aot_eager")
        with mock.patch.object(torch, "compile", traced):
            yield
    else:
        yield


def run(
    worker: str,
    names: Collection[str] = ("pt", "tf", "tf_keras"),
    arguments: Callable[[str], Sequence] = lambda name: (),
    *,
    fresh: bool = False,
    **variables: str,
) -> dict[str, Scenarios]:
    """What `python -m tests.WORKER NAME ARGUMENTS` prints in its last line, by name.

    "tf_keras" is TensorFlow with legacy Keras; `arguments` gives those of a name. The environment
    has `variables` as well. Workers are forked from a parent that has imported their framework;
    `fresh` starts them as users do, for what is settled when a process starts.
    """

    def one(name: str) -> Scenarios:
        module, given = f"tests.{worker}", [name, *map(str, arguments(name))]
        if fresh:
            command = [sys.executable, "-m", module, *given]
            settings = {"cwd": ROOT, "env": environment(name) | variables, "timeout": TIMEOUT_S}
            done = subprocess.run(command, capture_output=True, text=True, **settings)
        else:
            done = parent("tf" if name == "keras3" else name).run(module, *given, **variables)
        assert done.returncode == 0, f"{name} ended with {done.returncode}: {done.stderr[-3000:]}"
        return Scenarios(name, json.loads(done.stdout.splitlines()[-1]))

    with ThreadPoolExecutor(len(names)) as pool:
        return dict(zip(names, pool.map(one, names), strict=True))
