"""What the parity tests share: the arrays of each side, and the comparison that they all use."""

import functools
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
# Side -> framework, and what chooses the Keras flavour.
SIDES = {"pt": ("pt", {}), "keras3": ("tf", {}), "tf_keras": ("tf", {"TF_USE_LEGACY_KERAS": "1"})}
TIMEOUT_S = 600


def arrays() -> dict[str, dict[str, np.ndarray]]:
    """Side -> the arrays of its worker; each side runs once a session, in its own process."""
    found, failures = _run()
    assert not failures, "\n".join(failures)
    return found


@functools.cache
def _run() -> tuple[dict[str, dict[str, np.ndarray]], list[str]]:
    """The arrays of each side, and what failed: kept too, so that no test runs it again."""
    found, failures = {}, []
    with tempfile.TemporaryDirectory() as folder:
        outputs = {side: Path(folder) / f"{side}.npz" for side in SIDES}
        workers = {side: _start(side, Path(folder), outputs[side]) for side in SIDES}
        for side, worker in workers.items():
            try:
                _, errors = worker.communicate(timeout=TIMEOUT_S)
            except subprocess.TimeoutExpired:
                worker.kill()
                errors = f"{worker.communicate()[1]}\nnot done after {TIMEOUT_S} s"
            if worker.returncode == 0:
                found[side] = dict(np.load(outputs[side]))
            else:
                failures.append(f"the worker of {side} failed:\n{errors[-3000:]}")
    return found, failures


def _start(side: str, folder: Path, output: Path) -> subprocess.Popen:
    framework, flavour = SIDES[side]
    others = {k: v for k, v in os.environ.items() if k != "TF_USE_LEGACY_KERAS"}
    command = [sys.executable, "-m", "tests.kit.parity_worker", framework, folder, output]
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env=others | {"TF_CPP_MIN_LOG_LEVEL": "3"} | flavour,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def part(side: str, prefix: str) -> dict[str, np.ndarray]:
    """The arrays of `side` below `prefix`, without it."""
    start = f"{prefix}/"
    found = {k.removeprefix(start): v for k, v in arrays()[side].items() if k.startswith(start)}
    assert found, f"{side} has nothing below {prefix}"
    return found


def difference(name: str, ours: np.ndarray, theirs: np.ndarray) -> float:
    """Relative L2 of two tensors; of losses the largest relative difference of a step."""
    ours, theirs = ours.astype(np.float64), theirs.astype(np.float64)
    if ours.shape != theirs.shape:
        return np.inf
    if name == "losses":
        return float(np.max(np.abs(ours - theirs) / np.abs(theirs)))
    scale = np.linalg.norm(theirs)
    return float(np.linalg.norm(ours - theirs) / (scale or 1.0))


def check(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray], bar: float) -> None:
    """Assert that both have the same arrays, each within `bar`; name the five worst else."""
    assert ours.keys() == theirs.keys()
    found = {name: difference(name, ours[name], theirs[name]) for name in theirs}
    beyond = sorted(((d, n) for n, d in found.items() if not d <= bar), reverse=True)
    worst = ", ".join(f"{name} {value:.1e}" for value, name in beyond[:5])
    assert not beyond, f"{len(beyond)} of {len(found)} differ by more than {bar:.0e}: {worst}"
