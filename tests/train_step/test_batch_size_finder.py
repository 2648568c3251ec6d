"""The batch-size finder: its search on made-up memory, its trials in real processes.

The trials are in `batch_size_trials.py`; NumPy stands in for a model but in one real case a side.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import subprocess
import sys
import uuid
from pathlib import Path

import psutil
import pytest

from pt_impl.kit import trials
from shared import batch_sizes
from tests.harness.command_line import MARK, marked
from tests.network.namespaces import wait_until

ROOT = Path(__file__).resolve().parents[2]
MB = 1 << 20
linux = pytest.mark.skipif(sys.platform != "linux", reason="resident peaks of the Linux kernel")


@pytest.fixture
def finder():
    """PyTorch's module, which imports no framework by itself. Its twin searches alike."""
    return importlib.import_module("pt_impl.train_step.batch_size_finder")


NO_TORCH = """
from types import SimpleNamespace
OutOfMemoryError = MemoryError
cuda = SimpleNamespace(is_available=lambda: False)
"""


@pytest.fixture
def pt(tmp_path, monkeypatch):
    """Its trials run NumPy alone, and find a torch that takes no three seconds to import."""
    (package := tmp_path / "torch").mkdir()
    (package / "__init__.py").write_text(NO_TORCH)
    (package / "_dynamo.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    return importlib.import_module("pt_impl.train_step.batch_size_finder")


def trial(name):
    return f"tests.train_step.batch_size_trials:{name}"


# The search -----------------------------------------------------------------------------------


def searched(finder, monkeypatch, memory, *, budget, maximum=65536):
    """Search where a batch takes `memory(size)` bytes, or is killed where that is None."""

    def fake(make_trial, size, allowed, seconds):
        peak = memory(size)
        if peak is None:
            return batch_sizes.Trial(size, "killed")
        return batch_sizes.Trial(size, "fits" if peak <= allowed else "too large", peak, 1.0)

    monkeypatch.setattr(finder, "run_trial", fake)
    return finder.find_batch_size("any:thing", budget_bytes=budget, maximum=maximum)


def noise(size):
    """Up to 1% of 100 MB, the same for a size each time."""
    return (size * 7919 % 101) / 101 * MB


CURVES = {
    "affine": lambda size: 100 * MB + 0.2 * MB * size,
    "noisy": lambda size: 100 * MB + 0.2 * MB * size + noise(size),
    "no fixed part": lambda size: 50 * MB * size,
    "one more is too many": lambda size: 400 * MB * size,
    "almost flat": lambda size: 100 * MB + 20_000 * size,
    "steps": lambda size: 100 * MB + 32 * MB * math.ceil(size / 100),
    "jump": lambda size: MB * size + (200 * MB if size > 150 else 0),
    "superlinear": lambda size: 10 * MB + 2000 * size**2,
}


@pytest.mark.parametrize("killed", [False, True])
@pytest.mark.parametrize("curve", CURVES)
def test_the_size_found_fits_and_the_next_does_not(finder, monkeypatch, curve, killed):
    budget, memory = 512 * MB, CURVES[curve]

    def peak(size):
        # A trial far above the budget is killed before its peak is known.
        return None if killed and memory(size) > budget + 64 * MB else memory(size)

    found = searched(finder, monkeypatch, peak, budget=budget)
    assert memory(found.batch_size) <= budget
    assert found.peak_bytes == memory(found.batch_size)
    assert found.limit == "budget"
    larger = found.batch_size + max(1, found.batch_size // 20)
    # A line knows nothing of steps: there the next size that was tried must have failed.
    assert memory(larger) > budget or curve == "steps"
    assert len(found.trials) <= (14 if curve in ("steps", "jump", "superlinear") else 8)
    assert len({t.batch_size for t in found.trials}) == len(found.trials)


def test_few_trials_where_memory_is_affine(finder, monkeypatch):
    found = searched(finder, monkeypatch, CURVES["affine"], budget=512 * MB)
    assert 0.95 * 2060 <= found.batch_size <= 2060
    assert len(found.trials) == 4


@pytest.mark.parametrize("maximum", [1, 2, 7, 300])
def test_the_maximum_is_tried_and_named(finder, monkeypatch, maximum):
    found = searched(finder, monkeypatch, CURVES["affine"], budget=512 * MB, maximum=maximum)
    assert (found.batch_size, found.limit) == (maximum, "maximum")
    assert max(t.batch_size for t in found.trials) == maximum


def test_a_first_batch_that_is_too_large_is_told(finder, monkeypatch):
    with pytest.raises(ValueError, match="batch size 1 takes 52,428,800 bytes, more than the b"):
        searched(finder, monkeypatch, CURVES["no fixed part"], budget=40 * MB)
    with pytest.raises(ValueError, match="batch size 1 takes all memory there is"):
        searched(finder, monkeypatch, lambda size: None, budget=40 * MB)


@pytest.mark.parametrize(
    ("make_trial", "settings", "said"),
    [
        ("numpy", {}, "\"module:function\", not 'numpy'"),
        (":step", {}, "\"module:function\", not ':step'"),
        (None, {}, '"module:function", not None'),
        ("a:b", {"budget_bytes": 0}, "must be positive"),
        ("a:b", {"maximum": 0}, "must be positive"),
        ("a:b", {"trial_seconds": 0.0}, "must be positive"),
    ],
)
def test_bad_settings_are_refused_before_any_trial(finder, monkeypatch, make_trial, settings, said):
    monkeypatch.setattr(finder, "run_trial", lambda *_: pytest.fail("a trial was started"))
    with pytest.raises(ValueError, match=said):
        finder.find_batch_size(make_trial, **({"budget_bytes": MB} | settings))


# Trials in processes of their own -------------------------------------------------------------


@linux
def test_a_trial_that_prints_reports_its_real_peak(pt):
    found = pt.find_batch_size(trial("talkative"), budget_bytes=120 * MB, maximum=16)
    assert (found.batch_size, found.limit) == (16, "maximum")
    # 20 MB held, and the larger batch's 16 MB on top.
    assert found.peak_bytes == pytest.approx(36 * MB, rel=0.05)
    assert 0 < found.samples_per_s < 1000  # a sample sleeps for a millisecond


@linux
def test_a_trial_that_takes_too_much_is_killed(pt, others, monkeypatch):
    """It and its helper are gone, and with them their memory."""
    mark, seen = uuid.uuid4().hex, set()
    monkeypatch.setenv(MARK, mark)  # which its processes inherit
    watch = batch_sizes._watch

    def watching(*arguments):
        ended = watch(*arguments)
        seen.update(marked(mark))
        return ended

    monkeypatch.setattr(batch_sizes, "_watch", watching)
    tried = trials.run_trial(trial("greedy"), 16, 60 * MB, 60.0)
    assert tried == batch_sizes.Trial(16, "killed")
    assert len(seen) == 2
    wait_until(lambda: not marked(mark), seconds=10, what="the end of its processes")
    assert children() <= others


def children():
    return {c for c in psutil.Process().children() if c.status() != psutil.STATUS_ZOMBIE}


@pytest.fixture
def others():
    """What other tests left running in this process, a browser for example."""
    return children()


@linux
def test_a_trial_that_runs_out_of_memory_does_not_fit(pt):
    assert trials.run_trial(trial("full"), 16, 60 * MB, 60.0) == batch_sizes.Trial(
        16, "out of memory"
    )


@linux
def test_a_trial_that_hangs_is_ended(pt, others):
    with pytest.raises(RuntimeError, match="batch size 1 takes longer than trial_seconds"):
        pt.find_batch_size(trial("hanging"), budget_bytes=60 * MB, trial_seconds=1.0)
    assert children() <= others


@linux
@pytest.mark.parametrize(
    ("name", "size", "kind", "said"),
    [
        (
            "fragile",
            16,
            RuntimeError,
            "the trial at batch size 16 failed: ArithmeticError: nine is",
        ),
        ("unsupported", 1, NotImplementedError, "NotImplementedError: upstream refuses this"),
        ("vanishing", 1, RuntimeError, "batch size 1 failed: it ended with status 3"),
        (
            "nothing",
            1,
            ValueError,
            "module 'tests.train_step.batch_size_trials' has no function 'nothing'",
        ),
    ],
)
def test_a_trial_that_fails_stops_the_search_with_one_line(pt, name, size, kind, said):
    with pytest.raises(kind, match=said) as raised:
        trials.run_trial(trial(name), size, 60 * MB, 60.0)
    assert "\n" not in str(raised.value)


@linux
@pytest.mark.parametrize(
    ("make_trial", "budget", "said"),
    [
        ("affine", 10 * MB, r"batch size 1 takes 2[12],.* than the budget of 10,485"),
        ("affine", 1 << 50, "is more than the machine has free"),
        ("nowhere:step", 60 * MB, "No module named 'nowhere'"),
    ],
)
def test_what_cannot_be_tried_is_told(pt, make_trial, budget, said):
    with pytest.raises(ValueError, match=said):
        pt.find_batch_size(
            make_trial if ":" in make_trial else trial(make_trial), budget_bytes=budget
        )


@linux
@pytest.mark.parametrize("side", ["pt", "tf"])
def test_a_real_model(side):
    """In a process of its own, as a script would: the first trial is of all that is asked for."""
    program = (
        f"import json; from {side}_impl.train_step.batch_size_finder import find_batch_size\n"
        f"found = find_batch_size('{side}_impl.kit.training:digits_cnn',"
        f" budget_bytes=500 << 20, maximum=1)\n"
        "print(json.dumps([found.batch_size, found.limit, found.peak_bytes, found.samples_per_s]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env=os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    size, limit, peak, rate = json.loads(done.stdout)
    assert (size, limit) == (1, "maximum")
    assert 0 < peak < 500 * MB
    assert rate > 0
