"""What the parity tests share: the arrays of each side, and the comparison that they all use."""

import functools
import tempfile
from pathlib import Path

import numpy as np

from tests import workers

SIDES = ("pt", "keras3", "tf_keras")


def arrays() -> dict[str, dict[str, np.ndarray]]:
    """Side -> the arrays of its worker; each side runs once a session, in its own process."""
    found, failure = _run()
    assert not failure, failure
    return found


@functools.cache
def _run() -> tuple[dict[str, dict[str, np.ndarray]], str]:
    """The arrays of each side, and what failed: kept too, so that no test runs it again."""
    with tempfile.TemporaryDirectory() as folder:
        outputs = {side: Path(folder) / f"{side}.npz" for side in SIDES}
        try:
            workers.run("kit.parity_worker", SIDES, lambda side: [folder, outputs[side]])
        except AssertionError as error:
            return {}, str(error)
        return {side: dict(np.load(path)) for side, path in outputs.items()}, ""


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
