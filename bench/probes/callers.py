"""A process that runs instances of a model under load, and reports what callers see.

`python -m bench.probes.callers REQUEST` reads a JSON request and writes its `answer` file. It is a
new process, so that no thread pool is sized yet, and may run in a cgroup with a quota.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np

from bench.harness.machine import THREAD_VARIABLES, end_with_parent
from bench.harness.processes import ROOT
from shared import cgroups, serving
from shared.serving import Server, Setting
from shared.specs import TASKS
from shared.user_model import arrays, first

LIMIT_S = 600  # after which a process counts as hung
SECONDS = 0.5  # of one caller, and of many; of each setting in a search
BEYOND = 0.25  # CPU seconds a second that an instance may use beyond its pools' threads
LOADERS = {"onnx": "load_onnx", "openvino": "load_openvino"}  # of shared/runtimes.py
FILLS: dict[str, Callable[[int, int], Setting]] = {  # from cores and callers
    "as installed": lambda cores, callers: Setting(1, callers, 0),
    "one at a time, as installed": lambda cores, callers: Setting(1, 1, 0),
    "one at a time": lambda cores, callers: Setting(1, 1, cores),
    "a thread each": lambda cores, callers: Setting(1, cores, 1),
    "an instance a core": lambda cores, callers: Setting(cores, 1, 1, bind=cores > 1),
}
SEARCHED = "searched"


# In the parent ----------------------------------------------------------------------------------


def ask(request: dict, folder: Path, *, quota: float | None) -> dict:
    """The answer of a new process, in a cgroup of so many cores if there is a quota.

    Raises NotImplementedError if this process may not make a cgroup, and RuntimeError with the
    reason if the process fails.
    """
    answer, asked = folder / "answer.json", folder / "request.json"
    asked.write_text(json.dumps(request | {"answer": str(answer)}), encoding="utf-8")
    program = [sys.executable, "-m", "bench.probes.callers", str(asked)]
    environment = {k: v for k, v in os.environ.items() if k not in THREAD_VARIABLES}
    with _in_group(quota) as prefix:
        done = subprocess.run(
            [*prefix, *program],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            timeout=LIMIT_S,
        )
    if done.returncode or not answer.is_file():
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        raise RuntimeError(f"a fresh process failed: {lines[-1] if lines else done.returncode}")
    return json.loads(answer.read_text("utf-8"))


@contextlib.contextmanager
def _in_group(quota: float | None) -> Iterator[list[str]]:
    """What to put before a command that runs in a group with this quota."""
    if quota is None:
        yield []
        return
    outer = cgroups.divisible()
    if outer is None:
        raise NotImplementedError("no cgroup with a CPU quota can be made: run as root")
    group = outer / f"twinbench-callers-{os.getpid()}"
    group.mkdir()
    try:
        cgroups.set_quota(group, quota)
        yield ["sh", "-c", 'echo $$ > "$1/cgroup.procs" && shift && exec "$@"', "sh", str(group)]
    finally:
        _remove(group)


def _remove(group: Path) -> None:
    for _ in range(50):  # killed instances leave it a moment later
        with contextlib.suppress(OSError):
            return group.rmdir()
        time.sleep(0.1)
    group.rmdir()  # what keeps it is an error


# In the fresh process ---------------------------------------------------------------------------


def make_call(package: str, task: str, weights: str, mode: str) -> Callable:
    """The framework's prediction for an array, or train step for a pair of arrays."""
    kit = {
        name: importlib.import_module(f"{package}.kit.{name}")
        for name in ("data", "models", "training", "runtime")
    }
    spec = TASKS[task]
    with np.load(weights, allow_pickle=False) as file:
        model = kit["models"].build(spec.model, dict(file))
    if mode == "train":
        optimizer = kit["training"].make_optimizer(model, spec.recipe)
        loss_of = kit["training"].loss_of(spec)
        step = kit["training"].make_train_step(model, optimizer, loss_of)
        return lambda batch: kit["runtime"].to_float(step(*kit["data"].to_device(*batch)))
    kit["runtime"].to_evaluation(model)
    predict = kit["training"].make_predict(model)
    return lambda x: arrays(first(predict(kit["data"].to_device(x, np.zeros(len(x)))[0])))


def load_in_place(package: str, setting: Setting, **given) -> Callable:
    """A framework's instance, by its technique."""
    technique = importlib.import_module(f"{package}.deployment.serving_threads")
    return technique.load(partial(make_call, package, **given), setting)


def load_file(runtime: str, path: str, setting: Setting) -> Callable:
    """A runtime's instance."""
    load = getattr(importlib.import_module("shared.runtimes"), LOADERS[runtime])
    more = {"check": False} if runtime == "onnx" else {}
    return serving.pools_of(partial(load, path, **more), setting)


def serve(load: Callable, samples: list, *, fill: str, repetitions: int, shared: bool) -> dict:
    """What one caller, and twice as many as cores, see; in a search, what its best setting gives.

    Raises RuntimeError if instances use more cores than they were given.
    """
    cores = cgroups.usable_threads()
    evidence = {"cores": cores, "quota": min(cgroups.cpu_quota(), 1e6), "callers": 2 * cores}
    if fill == SEARCHED:
        tried = serving.search(
            load, samples, callers=2 * cores, seconds=SECONDS, cores=cores, shared=shared
        )
        setting = tried[0].setting
        evidence["tried"] = [
            {"setting": str(one.setting), "latency_ms": 1e3 * one.latency, "rate": one.rate}
            for one in tried
        ]
    else:
        setting = FILLS[fill](cores, 2 * cores)
    start = time.perf_counter()
    with Server(load, setting, samples[0]) as server:
        started_s = time.perf_counter() - start
        one, many = [], []
        for _ in range(repetitions):
            one.append(serving.measure(server, samples, callers=1, seconds=SECONDS))
            many.append(serving.measure(server, samples, callers=2 * cores, seconds=SECONDS))
        evidence |= {"setting": str(setting), "started": server.started}
        _check(server, many)
        return {
            "start": [started_s],
            "latency": [load.median for load in one],
            "rate": [load.rate for load in many],
            "waiting_p95": [load.p95 for load in many],
            "cores": [load.cores for load in many],
            "threads": [max(load.threads) for load in many],
            "memory": [server.memory()],
            "evidence": evidence,
        }


def _check(server: Server, loads: list) -> None:
    """The setting took effect: pools, processors, and what the instances used."""
    setting = server.setting
    if setting.threads:
        for one in server.started:
            if one["pools"].get("intra_op") not in (None, setting.threads):
                raise RuntimeError(f"{setting.threads} threads were asked for: {one['pools']}")
    if setting.bind:
        bound = [cpu for one in server.started for cpu in one["processors"]]
        if len(bound) != len(set(bound)):
            raise RuntimeError("two instances are bound to one processor")
    if setting.threads and setting.at_once == 1:
        most = setting.processes * (setting.threads + BEYOND)
        used = median(load.cores for load in loads)
        if used > most:
            raise RuntimeError(f"instances used {used:.2f} cores, more than their {most:.2f}")


def main() -> None:
    """Serve the request in a file."""
    end_with_parent()
    request = json.loads(Path(sys.argv[1]).read_text("utf-8"))
    with np.load(request["samples"], allow_pickle=False) as file:
        parts = [file[name] for name in sorted(file)]
    samples = list(zip(*parts, strict=True)) if len(parts) > 1 else list(parts[0])
    if request["runtime"]:
        load = partial(load_file, request["runtime"], request["path"])
    else:
        load = partial(load_in_place, request["package"], **request["given"])
    found = serve(load, samples, **request["how"])
    Path(request["answer"]).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
