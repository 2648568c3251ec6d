"""Keeps what a run measures: state and record as files, the time of its parts, and progress."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from bench import record as types
from bench.harness import record
from bench.harness import state as states
from bench.harness.folders import replace_file
from bench.harness.progress import Progress
from bench.harness.remaining import seconds_left, whole_s
from bench.harness.run_plan import Plan
from bench.harness.state import RunState

LONG_S = 180.0  # to wait for the end of a run
# Of the time between blocks: what is derived for the record, which a run needs at its end.
SHARE_OF_WRITING = 0.0025

Show = Callable[[types.Record, str | None], None]


class Recorder:
    """Writes the files of a run into `folder` as it goes.

    Both files are replaced atomically, so an interrupted run keeps what it has finished. `show` is
    called with the record after the first pass and after each further one, and with what the run
    has just reached: its "first_table", or "intervals" of all times, or None. `most`: seconds after
    which the run ends.
    """

    def __init__(
        self,
        folder: Path,
        plan: Plan,
        state: RunState,
        *,
        say: Callable[[str], None],
        show: Show = lambda record, reached: None,
        most: float | None = None,
    ) -> None:
        self.folder, self.plan, self.state, self.show = folder, plan, state, show
        self.progress = Progress(say, most)
        self._since = time.monotonic()
        self._within = 0.0  # seconds of the parts within the one that is measured
        self._next_record = 0.0

    def say(self, part: str, what: str) -> None:
        """Report that a part of the run is at `what`."""
        left, _ = seconds_left(self.plan, self.state)
        self.progress.at(part, what, left, whole_s(self.plan, self.state))

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Note the time of a part of the run; a part within it is not counted twice."""
        start, outer, self._within = time.monotonic(), self._within, 0.0
        try:
            yield
        finally:
            took = time.monotonic() - start
            self.state.spend(name, took - self._within)
            self._within = outer + took

    def save(self, block: bool = False) -> None:
        """Write the state, and the record after a `block` or from time to time."""
        with self.part("writing"):
            self._save_state()
            if block or time.monotonic() >= self._next_record:
                self._write_record()

    def write(self) -> types.Record:
        """Write the state and the record, and return it."""
        self._save_state()
        return self._write_record()

    def _save_state(self) -> None:
        """The state is written first: what the record shows, the state holds."""
        now = time.monotonic()
        self.state.spend("total", now - self._since)
        self._since = now
        states.save(self.state, self.folder)

    def _write_record(self) -> types.Record:
        start = time.monotonic()
        whole = record.whole(self.plan, self.state)
        replace_file(self.folder / "results.json", types.encode(whole).decode())
        now = time.monotonic()
        self._next_record = now + (now - start) / SHARE_OF_WRITING
        return whole

    def show_table(self, reached: str, *, cut: bool) -> None:
        """Show the record, and note when the run has `reached` a stage, unless something was `cut`.

        The first table is reached when every match of small models has a block; intervals, when all
        matches have the blocks of the first look. Neither is shown shortly before the end.
        """
        seconds = self.state.seconds
        new = seconds[reached] is None and not cut
        if new:
            seconds[reached] = seconds["total"] + time.monotonic() - self._since
        first = reached == "first_table"
        told = new and (first or seconds_left(self.plan, self.state)[0] > LONG_S)
        with self.part("writing"):
            self.show(self.write(), reached if told else None)
