"""Chooses the two programs to compare, and measures them."""

from __future__ import annotations

import sys
import time
from argparse import Namespace
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import msgspec

from bench import user_task
from bench.harness import machine
from bench.harness.plan import FRAMEWORKS, Case, Technique, Variant, Workload
from bench.harness.run_plan import techniques
from bench.why import experiments
from bench.why.causes import Cause, causes
from bench.why.difference import Difference, compare
from bench.why.side import Request, Running, with_libraries
from shared import datasets
from shared.cgroups import usable_threads
from shared.choices import unknown
from shared.specs import TASKS

ROUNDS = 7
BASELINE = "its baseline"  # what the baseline of a row is called
Say = Callable[[str], None]


def asked(given: Namespace, folder: Path) -> tuple[Request, Request]:
    """What each side runs, by the options. Raises ValueError for unknown names."""
    every = techniques()
    name = given.technique or "baseline"
    if name not in every:
        raise ValueError(f"--technique: {unknown(name, every)}")
    technique = every[name]
    task, data, sides, size = _work(given, folder)
    twins = given.framework_pair or not given.technique
    if twins and len(sides) < 2:
        raise ValueError(f"{given.what} has a model for one framework only: give --technique")
    framework = given.framework or next(iter(sides))
    needed = list(FRAMEWORKS) if twins else [framework]
    base = next((one for one in technique.variants if one.role == "baseline"), None)
    if base is None:
        raise ValueError(f"--technique: {name} has no baseline to compare with")
    variants = [base] * len(needed)
    if given.technique:
        variants = _variants(technique, given.variant, needed)
    both = list(zip(needed, variants, strict=True))
    if not twins:
        both.append((framework, _compared_with(technique, variants[0], framework, base)))
    work = Workload(task, "compute", mode="predict" if given.predict else "train")
    a, b = (
        request(
            case_of(technique, one, side, work),
            FRAMEWORKS[side].title if twins else _name(one, side, work.mode),
            data,
            size,
        )
        for side, one in both
    )
    return a, b


def _compared_with(technique: Technique, one: Variant, side: str, base: Variant) -> Variant:
    """The row of a framework that a record compares another with: `against`, or the baseline."""
    known = {it.name: it for it in technique.variants if side in it.frameworks}
    return known.get(one.against, base)


def _name(variant: Variant, side: str, mode: str) -> str:
    if variant.role == "baseline":
        return BASELINE
    return variant.called(side, mode)


def _variants(technique: Technique, name: str | None, sides: list[str]) -> list[Variant]:
    """The variant of a name (without one, the first that there is) in each of the frameworks."""
    known: dict[str, dict[str, Variant]] = {}
    for one in technique.variants:
        if one.role == "variant":
            known.setdefault(one.name, {}).update(dict.fromkeys(one.frameworks, one))
    fitting = [n for n, of_side in known.items() if set(sides) <= set(of_side)]
    chosen = name or next(iter(fitting), None)
    if chosen not in fitting:
        where = " and ".join(FRAMEWORKS[side].title for side in sides)
        if not fitting:
            raise ValueError(f"{technique.name} has no variant in {where}")
        raise ValueError(f"--variant of {technique.name} in {where}: {unknown(name, fitting)}")
    return [known[chosen][side] for side in sides]


def case_of(technique: Technique, variant: Variant, side: str, work: Workload) -> Case:
    """A row in a framework. Raises ValueError if it does not exist there."""
    if side not in variant.frameworks:
        raise ValueError(f"{variant.name} of {technique.name} is not for {side}")
    module = f"bench.{technique.family}.bench_{technique.name}"
    flavour = FRAMEWORKS[side].flavours[0]
    place = technique.family, technique.name, module, side, flavour
    return Case(*place, variant, work, technique.composed_of)


def request(case: Case, name: str, data: str, size: int) -> Request:
    """What a process runs. data: the folder of the task's data. size: samples per step."""
    return Request(
        name=name,
        framework=case.framework,
        case=msgspec.structs.replace(case.message(), batch_size=size),
        data=data,
        threads=usable_threads(),
        allocator=case.variant.allocator or "tuned",
        variables=case.variant.environment,
    )


def _work(given: Namespace, folder: Path) -> tuple[str, str, list[str], int]:
    """The task, the folder of its data, its frameworks, and samples a step."""
    if given.what not in TASKS and not given.what.endswith(".py"):
        raise ValueError(f"task {unknown(given.what, TASKS)}; or give a file.py or a record")
    if given.what in TASKS:
        task = TASKS[given.what]
        if task.dataset.kind == "photos":
            raise ValueError(f"{given.what} reads image files: give a task of arrays")
        data = str(datasets.materialise(task.dataset, folder))
        return task.name, data, list(FRAMEWORKS), given.batch or task.compute_batch
    if given.batch is not None:
        raise ValueError("--batch: only for a task; a file makes its own batches")
    wanted = {given.framework} if given.framework else set()
    model = user_task.prepare(given.what, folder, {}, wanted, say)
    place = folder.resolve() / "data" / model.about["folder"]
    return model.task.name, str(place), model.sides, model.about["batch_size"]


def say(what: str) -> None:
    """Print to standard error."""
    print(f"{what} ...", file=sys.stderr, flush=True)


def explained(
    pair: tuple[Request, Request],
    *,
    rounds: int = ROUNDS,
    thorough: bool = False,
    seconds: float | None = None,
    say: Say = say,
) -> tuple[Difference, list[Cause]]:
    """The difference of two sides, and its causes after the experiments.

    thorough: also experiments in new processes. seconds: limit; raises ValueError after it.
    """
    end = None if seconds is None else time.monotonic() + seconds
    watch = machine.Watch()
    with ExitStack() as stack:
        a, b = (stack.enter_context(Running(one, seconds=seconds)) for one in pair)
        a.wait()
        b.wait()
        say(f"{rounds} rounds of steps, in turns, then a profile of each")
        for number in range(rounds):
            for one in (a, b) if number % 2 else (b, a):
                one.round()
        sides = [one.side() for one in (a, b)]
        if busy := machine.busy(watch.stop().others):
            say(f"{busy}: end them, or figures scatter")
        difference = compare(*sides)
        if any(one.kind in experiments.COMPUTED for one in causes(difference)):
            say("which libraries compute")
            left = None if end is None else end - time.monotonic()
            difference = compare(*with_libraries(pair, sides, left))
        say("testing what was found")
        named = experiments.tested(causes(difference), difference, a, b)
    named = experiments.with_onednn(named, difference, *pair)
    if thorough:
        named = experiments.thorough(named, difference, *pair)
    return difference, named
