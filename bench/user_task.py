"""A user's own model as a task of the suite: it is checked, and techniques are chosen for it.

`prepare` checks the file in a new process per framework and writes the weights and batches that
every row starts from. `technique` says what of a technique is measured on it.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from bench.harness import machine
from bench.harness.durations import Durations
from bench.harness.machine import KERAS_BACKEND
from bench.harness.matches import configure
from bench.harness.plan import FRAMEWORKS, Case, Technique, Variant, Workload
from bench.harness.processes import (
    TIMED_OUT,
    Failed,
    ParentKey,
    Processes,
    TimeLimits,
    Unsupported,
)
from bench.harness.user_model import LEAST_PARITY, SCATTER
from shared import scratch, user_model
from shared.specs import TASKS, Task
from shared.user_model import BadFile, File

SHARE_OF_FREE = 0.9  # of the memory that is free, which a check may take
WATCHED_S = 0.05
CHECK_S = 300  # after which a check counts as hung
# Seconds that a row's worker takes beside its steps, and about how many steps its block has.
AROUND_S, STEPS_A_BLOCK = 3.0, 60
TRIALS, TRIAL_S = 5, 6.0  # of the finder of a batch size: a framework's import, and some steps

# Why a technique is not measured, where its benchmark file gives no reason.
OF_A_FAMILY = {
    "input": "the file makes its own batches",
    "parallel": "it needs several devices: see docs/many_devices.md",
    "recipes": "it changes what is learned, which only a whole training shows",
    "adaptation": "it needs two domains, and a file has one",
    "compression": "it needs a whole training: use its code, see docs/your_model.md",
    "diagnosis": "it diagnoses, and changes nothing",
}


@dataclass(frozen=True)
class UserModel:
    """A user's file that passed its check: its task, and what the check measured.

    `interpreters`: framework -> its Python, where that is not this one.
    """

    file: File
    task: Task
    about: dict
    interpreters: dict[str, str]

    @property
    def sides(self) -> list[str]:
        """The frameworks in which it is measured."""
        return list(self.about["sides"])

    @property
    def keras_backend(self) -> str | None:
        """The Keras backend that the user set, in the file or before it; None without Keras."""
        if "tf" not in self.sides or self.file.is_keras:  # which has its backend on each side
            return None
        by_file = self.about["sides"]["tf"].get("keras_backend")
        return by_file if by_file != KERAS_BACKEND else os.environ.get("KERAS_BACKEND")

    def note(self, durations: Durations, cases: list[Case]) -> None:
        """Note the expected time of its rows, by the check, if no earlier run has them."""
        for case in cases:
            side = self.about["sides"][case.framework]
            durations.note_bytes(case.id, side["peak_bytes"])
            predicts = 0.3 if case.workload.mode == "predict" else 1.0
            share = case.workload.batch_size / self.task.compute_batch
            training = self.about["train_steps"] * side["step_s"] * machine.usable_threads()
            durations.seconds.setdefault("training", {}).setdefault(case.id, training)
            block = AROUND_S + STEPS_A_BLOCK * predicts * share * side["step_s"]
            durations.seconds.setdefault("block", {}).setdefault(case.id, block)
            if case.technique == "batch_size_finder":
                durations.seconds.setdefault("probe", {}).setdefault(case.id, TRIALS * TRIAL_S)


# Checking ----------------------------------------------------------------------------------------


def prepare(
    path: str,
    results: Path,
    interpreters: dict[str, str],
    wanted: set[str],
    say: Callable[[str], None],
) -> UserModel:
    """Check a file in each installed framework that is `wanted` (all if that is empty).

    say: called with what begins. Raises BadFile with one line. The results are written to a folder
    in `results`/data, completely or not at all. It belongs to this run until its process ends.
    Folders that earlier runs left there are removed.
    """
    file = user_model.look(path)
    sides = [side for side in file.sides if not wanted or side in wanted]
    if not sides:
        has = " and ".join(FRAMEWORKS[side].title for side in file.sides)
        raise BadFile(f"{file.path.name} has a model for {has} only: leave out --framework")
    place = results.resolve() / "data"
    place.mkdir(parents=True, exist_ok=True)
    scratch.sweep(place, "own-")
    folder, _ = scratch.made(place, f"own-{file.name}-")
    try:
        (folder / user_model.SOURCE).write_bytes(file.text)
        with (
            tempfile.TemporaryDirectory(dir=folder) as logs,
            Processes(
                Path(logs), interpreters=interpreters, limits=TimeLimits(request=CHECK_S)
            ) as processes,
        ):
            about = _check(processes, file, sides, folder, say) | {"folder": folder.name}
        user_model.write_about(folder, about)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    task = user_model.task(about)
    TASKS[task.name] = task
    return UserModel(file, task, about, interpreters)


def _check(
    processes: Processes,
    file: File,
    sides: list[str],
    folder: Path,
    say: Callable[[str], None],
) -> dict:
    """What `about.json` says: of each side, and of both."""
    checked, missing = {}, {}
    paired = len(sides) > 1 and ("copy_weights" in file.functions or file.is_keras)
    pairs: dict[str, str] = {}
    for side in sides:
        try:
            if paired and side == "tf" and "pt" in checked and file.is_keras:
                user_model.save_weights(folder / "tf", user_model.load_weights(folder / "pt"))
            elif paired and side == "tf" and "pt" in checked:
                say("copying PyTorch's weights into TensorFlow's model")
                copied = _copied(processes, file, folder)
                if copied is None:
                    paired = False
                    say("weights can't be copied: PyTorch's Python has no TensorFlow")
                else:
                    pairs[copied["weights_sha256"]] = checked["pt"]["weights_sha256"]
            say(f"a few steps in {FRAMEWORKS[side].title}")
            checked[side] = _ask(processes, file, side, "check", folder)
        except _Missing as error:
            missing[side] = f"{error}; install it with: {FRAMEWORKS[side].install}"
    if not checked:
        side, reason = next(iter(missing.items()))
        raise BadFile(f"{FRAMEWORKS[side].title} could not be started: {reason}")
    sizes = {side: one["batch_size"] for side, one in checked.items()}
    if len(set(sizes.values())) > 1:
        raise BadFile(
            f"the frameworks' batches have {' and '.join(map(str, sizes.values()))} samples: make "
            "them equal"
        )
    labels = {one["labels_sha256"] for one in checked.values()}
    paired = paired and len(checked) > 1
    if paired and len(labels) > 1:
        raise BadFile("batch returns different targets for the two frameworks: make them equal")
    return {
        "path": str(file.path),
        "name": file.name,
        "cwd": os.getcwd(),
        "batch_size": next(iter(sizes.values())),
        "paired": paired,
        "pairs": pairs,
        "missing": missing,
        "evaluates": "evaluate" in file.functions,
        "margin": next(iter(checked.values()))["margin"],
        "train_steps": next(iter(checked.values()))["train_steps"],
        "parity": max(LEAST_PARITY, *(SCATTER * one["scatter"] for one in checked.values())),
        "sides": checked,
    }


def _copied(processes: Processes, file: File, folder: Path) -> dict | None:
    """The weights that the file's function copied; None where one Python lacks a framework."""
    try:
        return _ask(processes, file, "pt", "check_pair", folder)
    except BadFile as error:
        if "ModuleNotFoundError: No module named 'tensorflow'" in str(error):
            return None
        raise


class _Missing(Exception):
    """A framework is not installed."""


def _ask(processes: Processes, file: File, side: str, op: str, folder: Path) -> dict:
    """Ask a freshly executed worker, and end it where it takes more memory than is free."""
    flavour = FRAMEWORKS[side].flavours[0]
    key = ParentKey(side, flavour, "as installed", "main", machine.usable_threads())
    try:
        worker = processes.execute(key, f"{op}-{side}")
    except Failed as error:
        raise BadFile(f"{file.path.name}: {_with_log(str(error), processes.logs)}") from None
    guard = None
    try:
        try:
            configure(worker, processes.limits, seed=user_model.SEED)
        except Failed as error:
            if "ModuleNotFoundError" in str(error):
                raise _Missing(str(error).removeprefix("ModuleNotFoundError: ")) from None
            raise
        with _Guard(worker.peer.pid) as guard:
            given = {"path": str(file.path), "folder": str(folder), "cwd": os.getcwd()}
            return worker.ask(processes.limits.request, op, **given)
    except Unsupported as error:
        raise BadFile(f"{file.path.name}: {error}") from None
    except Failed as error:
        reason = str(error).removeprefix("BadFile: ")
        if guard and guard.ended:
            reason = (
                f"a step needs more than the {guard.most / 1e9:.1f} GB of free memory: give batch "
                "a smaller default size"
            )
        elif reason == TIMED_OUT.format(op, processes.limits.request):
            reason += ": give batch a smaller default size"
        name = f"{file.path.name}:"
        raise BadFile(reason if reason.startswith(name) else f"{name} {reason}") from None
    finally:
        worker.stop(kill=True)


def _with_log(reason: str, logs: Path) -> str:
    """The last line of a log in the place of its name: it is deleted with the check."""
    if not (named := re.search(r"\(see (.+\.log)\)", reason)):
        return reason
    path = logs / named[1]
    lines = path.read_text("utf-8", "replace").strip().splitlines() if path.is_file() else []
    return reason.replace(named[0], f"({lines[-1]})" if lines else "").strip()


class _Guard:
    """Ends a process that takes more memory than is free, before the machine has none left."""

    def __init__(self, pid: int) -> None:
        self.process, self.ended = psutil.Process(pid), False
        self.most = SHARE_OF_FREE * machine.free_memory()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> _Guard:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(WATCHED_S):
            try:
                if self.process.memory_info().rss > self.most:
                    self.ended = True
                    self.process.kill()
                    return
            except psutil.Error:
                return


# What is measured --------------------------------------------------------------------------------


def technique(usual: Technique, model: UserModel) -> Technique | None:
    """What of a technique is measured on a user's file; None if nothing is."""
    asked = usual.user_model
    if not usual.is_measured_of_users:
        return None
    effort, trained = least_effort(usual), model.about["evaluates"] and asked.learns
    return replace(
        usual,
        variants=tuple(map(_variant, asked.of(usual.variants))),
        workloads=tuple(
            Workload(model.task.name, batch, effort, mode=mode, timed=asked.timed, accuracy=trained)
            for batch, mode in asked.works
        ),
        probes=not asked.timed,
        cold_starts=1,
        counts=False,
    )


def least_effort(usual: Technique) -> str:
    """The lowest effort that measures it."""
    return "ordinary" if usual.family == "compression" else "default"  # it takes its time


def _variant(usual: Variant) -> Variant:
    """A variant, which is measured whenever its technique is.

    What rounds in another dtype is no rounding of the model's: it changes the mathematics.
    """
    changes = usual.changes or ("math" if usual.loss_tolerance else None)
    return replace(usual, effort="default", changes=changes)


def left_out(every: dict[str, Technique]) -> dict[str, str]:
    """Technique -> why it is not measured on a user's file."""
    return {
        name: one.user_model or OF_A_FAMILY[one.family]
        for name, one in every.items()
        if not one.is_measured_of_users
    }
