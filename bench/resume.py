"""Which run `--resume` goes on with, and whether today's options are those that it began with.

Nothing here measures. `bench/conftest.py` calls it before anything is collected.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from bench.analysis.reading import load, results_file
from bench.harness import state as states
from bench.harness.state import RunState
from bench.record import Record


@dataclass(frozen=True)
class Begun:
    """A run that --resume goes on with: its folder, its record and its state."""

    folder: Path
    record: Record
    state: RunState

    @property
    def finished(self) -> bool:
        """Whether nothing is left to measure."""
        failed = any(case.status == "FAILED" for case in self.record.cases)
        return self.record.finished and not failed

    @property
    def cases(self) -> list[str]:
        """The ids of all cases that it measures, in the order of its record."""
        return list(self.state.cases)

    @property
    def selected(self) -> list[str]:
        """The ids of the selected cases; the others are their baselines."""
        return self.state.asked.selected

    def asked(self, given: dict) -> dict:
        """The options that the run began with, by the names of `given`.

        ValueError if an option is given now (not None) and was different then.
        """
        then = self.state.asked.options
        if then.keys() != given.keys():
            raise ValueError(f"{self.folder}: {states.FILE} is damaged")
        for option, value in given.items():
            if value not in (None, then[option]):
                how = "without" if then[option] is None else f"with {_words(then[option])} as"
                raise ValueError(f"{self.folder} began {how} {option}: leave out {option}")
        return then

    def check_file(self, path: Path) -> None:
        """ValueError if the user's file has changed since it was measured."""
        environment = self.record.environment
        if environment.peak_flops is None or not path.is_file():
            return  # nothing was measured, or it will be refused
        if hashlib.sha256(path.read_bytes()).hexdigest() != environment.model["sha256"]:
            raise ValueError(
                f"{path.name} changed since {self.folder} began: start a new run, without --resume"
            )


def _words(value: object) -> str:
    return ",".join(value) if isinstance(value, list) else str(value)


def begun(path: Path) -> Begun:
    """The run in the folder `path`. ValueError with one line if it can't go on."""
    if not results_file(path).is_file():
        raise ValueError(f"{path} has no results.json: give the folder of a run")
    folder = results_file(path).parent.resolve()
    record = load(folder)
    try:
        return Begun(folder, record, states.load(folder, record.started))
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from None
