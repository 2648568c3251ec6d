"""The wheel works where there is no clone."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from bench.analysis.reading import load

pytestmark = pytest.mark.timeout(600)
ROOT = Path(__file__).resolve().parents[1]


def ran(command: list, **given) -> str:
    ended = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, check=False, **given
    )
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-2000:]
    return ended.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder with what the wheel holds, and nothing else of this project."""
    folder = tmp_path_factory.mktemp("a wheel")
    source = folder / "source"  # a copy, since a build leaves files beside what it builds
    for name in ("bench", "pt_impl", "tf_impl", "shared"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
    ran([*build, "--no-index", "-w", folder, source])
    (wheel,) = folder.glob("twinbench-*.whl")
    with zipfile.ZipFile(wheel) as opened:
        opened.extractall(folder / "site")
    return folder / "site"


def test_try_measures_a_model_from_an_empty_folder(installed, tmp_path):
    env = os.environ | {"PYTHONPATH": str(installed)}
    twinbench = [sys.executable, "-m", "bench"]
    where = ran(
        [sys.executable, "-c", "import bench; print(bench.__file__)"], cwd=tmp_path, env=env
    )
    assert Path(where.strip()).is_relative_to(installed)
    ran([*twinbench, "try", "--example", "my_model.py"], cwd=tmp_path, env=env)
    file = tmp_path / "my_model.py"
    file.write_text(file.read_text("utf-8").replace("size=64", "size=8"), encoding="utf-8")
    asked = ["--framework", "pt", "--technique", "gradient_clipping", "--effort", "quick"]
    answer = ran([*twinbench, "try", "my_model.py", *asked], cwd=tmp_path, env=env)
    assert "time of a train step" in answer
    record = load(tmp_path / "results/latest")
    assert {case.variant for case in record.cases if case.has_times} >= {"plain", "clip"}
