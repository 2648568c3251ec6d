"""Who computes beside whom while the contenders of a match begin: with planted workers."""

import threading
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from bench.harness.answers import Built, Configured, FirstCall, NextSteps
from bench.harness.matches import Match
from bench.harness.processes import TimeLimits
from bench.harness.selection import cases_of
from bench.harness.turns import Turns
from tests.harness import faulty

WAIT = 20  # seconds after which a test that would hang fails


class Cores:
    """Notes which of the planted workers compute at the same time."""

    def __init__(self):
        self.lock, self.at_work, self.beside = threading.Lock(), {}, {}

    @contextmanager
    def computing(self, what):
        """Compute, and note who else did at any moment."""
        with self.lock:
            self.at_work[what] = others = set(self.at_work)
            for other in others:
                self.at_work[other].add(what)
        yield
        with self.lock:
            self.beside[what] = self.at_work.pop(what)


class Planted:
    """A worker; `together` is passed by builds and first calls that others have to be beside."""

    def __init__(self, key, label, cores, together):
        self.key, self.label, self.cores, self.together = key, label, cores, together

    def ask(self, limit, op, **given):
        with self.cores.computing((self.label, op)):
            if self.together and op in self.together:
                self.together[op].wait(WAIT)
            else:
                threading.Event().wait(0.01)  # long enough for others to come beside
        return {
            "configure": Configured(threads={}, keeps_freed_memory=None),
            "build": Built(weights_sha256="", wrote=False),
            "first_call": FirstCall(seconds=1.0, loss=0.0),
            "next_steps": NextSteps(losses=[0.0]),
        }[op]

    def stop(self, kill=False):
        pass


def begin(cases, together=None):
    """Begin a match of planted workers in two lanes; who computed beside whom."""
    cores = Cores()
    processes = SimpleNamespace(
        limits=TimeLimits(),
        scratch=Path("nowhere"),
        fork=lambda key, label: Planted(key, label, cores, together),
    )
    match = Match(
        *(processes, cases),
        data={case.workload.task: "" for case in cases},
        threads=2,
        seed=0,
        evidence=False,
        side_by_side=2,
    )
    match._begin()
    assert {played.status for played in match.played.values()} == {"OK"}
    return cores.beside


def contenders(framework, count, **fields):
    every = cases_of(faulty.TECHNIQUE, "tests.harness.faulty", "default")
    first = next(case for case in every if case.framework == framework)
    names = [f"{fields.get('requires', 'eager')}-{number}" for number in range(count)]
    return [replace(first, variant=replace(first.variant, name=n, **fields)) for n in names]


def test_an_eager_step_has_nobody_beside_it_not_even_who_starts_or_builds():
    cases = [c for pair in zip(contenders("pt", 6), contenders("tf", 6), strict=True) for c in pair]
    beside = begin(cases)
    steps = {what for what in beside if what[1] == "next_steps"}
    eager = {what for what in beside if what[1] == "first_call" and "-pt-" in what[0]}
    assert (len(steps), len(eager)) == (12, 6)
    assert {
        what: others for what, others in beside.items() if what in steps | eager and others
    } == {}


@pytest.mark.parametrize(
    ("framework", "fields"), [("tf", {}), ("pt", {"requires": "compiler"})], ids=["tf", "compiler"]
)
def test_lanes_build_and_trace_beside_each_other(framework, fields):
    """Each waits for another in the same stage: one by one, none would come."""
    together = {op: threading.Barrier(2) for op in ("configure", "build", "first_call")}
    beside = begin(contenders(framework, 2, **fields), together)
    assert all(
        op in {other for _, other in beside[name, op]} for name, op in beside if op in together
    )


def test_who_waits_for_the_cores_is_let_in_before_anybody_else_begins():
    turns, order = Turns(), []

    def step():
        with turns.undisturbed():
            order.append("step")

    def build():
        with turns.beside():
            order.append("build")

    with turns.beside():
        first = threading.Thread(target=step)
        first.start()
        with turns._changed:
            turns._changed.wait_for(lambda: turns._waiting, WAIT)
        second = threading.Thread(target=build)
        second.start()
        second.join(0.05)
        assert order == []
    for thread in (first, second):
        thread.join(WAIT)
    assert order == ["step", "build"]
