"""The conditions of a run, its machine and frameworks; --resume checks that they are unchanged."""

from __future__ import annotations

import re
from contextlib import suppress

import msgspec

from bench.analysis import machine_class
from bench.harness import isolated_measurements, machine, speed
from bench.harness import state as states
from bench.harness.plan import FRAMEWORKS, SEED, Case, Framework
from bench.harness.processes import Failed, Processes, Unsupported, Worker
from bench.harness.run_plan import Plan
from bench.harness.state import RunState
from bench.harness.worker import on_cpu
from bench.record import Attempt, Environment, Speed

ORDER = "starts: balanced Latin square; rounds: random; another for each match"


class OtherConditions(Exception):
    """Machine, versions or settings changed, so new measurements do not compare with old ones."""


def of_machine(threads: int, model: dict[str, str] | None = None) -> Environment:
    """The environment before a framework is asked; `model`: see `run.Settings`."""
    return machine.describe(threads).but(seeds=[SEED], order=ORDER, model=model)


def describe(
    processes: Processes, plan: Plan, environment: Environment
) -> tuple[Environment, dict[str, str]]:
    """The whole environment, asking each framework; and why a framework can't be imported."""
    missing: dict[str, str] = {}
    products: dict[str, dict[str, Speed]] = {}
    watch = machine.Watch()
    packages, devices, gpu = dict(environment.packages), {}, None
    onednn: dict[str, bool] = {}
    allocator: dict = {"settings": machine.TUNED_ALLOCATOR}
    for name in dict.fromkeys(case.framework for case in plan.every):
        try:
            described = isolated_measurements.describe(processes, name, environment.threads)
        except (Failed, Unsupported) as error:
            missing[name] = str(error)
            continue
        packages[name] = described.versions | {"python": described.python}
        devices[name], allocator[name] = described.device, described.keeps_freed_memory
        onednn[name] = described.onednn
        if not on_cpu(described.device):
            gpu = described.device_info
        products[name] = described.products
    threads, processor = environment.threads, environment.processor
    cache = max(processor.caches.values(), default=0) if processor else 0
    whole = environment.but(
        packages=packages,
        devices=devices,
        gpu=gpu,
        allocator=allocator,
        onednn=", ".join(
            f"{FRAMEWORKS[n].title} {'on' if on else 'off'}" for n, on in onednn.items()
        ),
        products=products,
        peak_flops=_peaks(products),
        bandwidth=speed.bandwidth(threads, cache),
        chain=speed.chain(threads),
        disturbed=_disturbed(watch.stop()),
    )
    return whole, missing


def at_end(processes: Processes, environment: Environment) -> Environment:
    """The environment with the float32 products of each framework, measured again."""
    again = {}
    for name in environment.products:
        with suppress(Failed, Unsupported):
            asked = name, environment.threads, ("float32",)
            again[name] = isolated_measurements.describe(processes, *asked).products
    return environment.but(products_at_end=again)


class Device:
    """A GPU: a waiting worker computes matrix products on it."""

    def __init__(self, processes: Processes, framework: str, threads: int) -> None:
        self._processes, self._asked = processes, (framework, threads)
        self._worker: Worker | None = None

    def float32_product(self) -> float | None:
        """FLOP/s; None if the framework fails to compute it."""
        try:
            if self._worker is None:
                self._worker = isolated_measurements.asked(self._processes, *self._asked)
            limit = self._processes.limits.request
            found = self._worker.ask(limit, "describe", dtypes=["float32"])
            return found.products["float32"].all
        except (Failed, Unsupported):
            return None


def device(processes: Processes, environment: Environment) -> Device | None:
    """The GPU of a run, by the first framework that uses it; None without one."""
    names = [name for name, where in environment.devices.items() if not on_cpu(where)]
    return Device(processes, names[0], environment.threads) if names else None


def _peaks(products: dict[str, dict[str, Speed]]) -> dict[str, float]:
    """The best product of each dtype in which rows are computed, of either framework."""
    peaks: dict[str, float] = {}
    for speeds in products.values():
        for dtype in ("float32", "bfloat16"):
            if dtype in speeds:  # beside other programs one thread may do more than all
                best = speeds[dtype]
                peaks[dtype] = max(peaks.get(dtype, 0.0), best.all, best.one or 0.0)
    return peaks


def _disturbed(meanwhile: Attempt) -> float | None:
    """The share of the cores that others took, or the machine's host."""
    return max(filter(None, (meanwhile.others, meanwhile.stolen)), default=meanwhile.others)


def check_same(state: RunState, environment: Environment) -> None:
    """Raise OtherConditions if a resumed run began under other conditions."""
    if not state.described:  # it ended before it had measured anything
        state.code = states.code()
        return
    if not machine_class.same_class(state.environment, environment):
        apart = machine_class.differences(state.environment, environment)
        raise OtherConditions(f"the run began on another machine: {'; '.join(apart)}")
    before = {"code": state.code} | msgspec.to_builtins(state.environment)
    now = {"code": states.code()} | msgspec.to_builtins(environment)
    if others := states.differences(before, now):
        raise OtherConditions(f"this changed since the run began: {'; '.join(others)}")


def note(plan: Plan, state: RunState, environment: Environment, missing: dict[str, str]) -> None:
    """Keep the environment. Cases that need what is missing become UNSUPPORTED."""
    if not state.described:
        state.environment = environment
    for case in plan.every:
        if case.framework in missing:
            refuse(state, case, missing[case.framework])
        needs, of_case = case.variant.requires, state.cases[case.id]
        if needs == "compiler" and not machine.compiler():
            of_case.fail("UNSUPPORTED", "needs a C++ compiler: install one, such as g++")
        elif needs == "cuda" and on_cpu(state.environment.devices.get(case.framework, "cpu")):
            of_case.fail("UNSUPPORTED", "needs a CUDA GPU")


def refuse(state: RunState, case: Case, reason: str) -> None:
    """Note that the case's framework can't be started."""
    words = not_started(FRAMEWORKS[case.framework], reason)
    state.cases[case.id].fail("UNSUPPORTED", words)


def not_started(framework: Framework, reason: str) -> str:
    """Why a framework can't be started, and how to install it if it is missing."""
    words = f"{framework.title} could not be started ({reason})"
    if re.match(r"(?!ModuleNotFoundError|ImportError)\w+Error: ", reason):
        return words
    return f"{words}; install it with: {framework.install}"
