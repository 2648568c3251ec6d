"""What pyproject.toml installs is enough: alone, with either framework, and with both."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import tomllib
from functools import cache
from importlib.metadata import packages_distributions, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
# Folder, extras: what the folder's files import has to be among the dependencies and these.
NEEDS = (
    ("bench", ()),
    ("shared", ("torch",)),
    ("shared", ("tensorflow",)),
    ("pt_impl", ("torch",)),
    ("tf_impl", ("tensorflow",)),
    ("bench/port", ("torch", "tensorflow")),
)
# Runs in processes that have more: port compares both frameworks, doctor asks each runtime.
APART = ("bench/port", "bench/doctor/runtimes.py")
COLLECT = """
import json, sys
from importlib.machinery import PathFinder
absent = set(json.loads(sys.argv[1]))
class Installed:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in absent:
            return PathFinder.find_spec(name, path, target)
sys.meta_path[:] = [Installed() if one is PathFinder else one for one in sys.meta_path]
import pytest
plugin = ["-p", "pytest_benchmark.plugin"]
sys.exit(pytest.main(["bench/", *plugin, "--benchmark-only", "--collect-only", "-q"]))
"""


@cache
def asked_for(*extras: str) -> frozenset[str]:
    """The distributions that an installation with these extras brings along."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    parts = [project["dependencies"], *map(project["optional-dependencies"].get, extras)]
    known, new = (
        set(),
        {canonicalize_name(Requirement(line).name) for part in parts for line in part},
    )
    while new:
        known |= new
        required = [Requirement(text) for one in new for text in required_by(one)]
        wanted = [r for r in required if r.marker is None or r.marker.evaluate({"extra": ""})]
        new = {canonicalize_name(requirement.name) for requirement in wanted} - known
    return frozenset(known | {"twinbench"})


def required_by(name: str) -> list[str]:
    try:
        return requires(name) or []
    except ModuleNotFoundError:  # for another platform, or a choice of several
        return []


@cache
def absent(*extras: str) -> frozenset[str]:
    """The modules of this environment that an installation with these extras lacks."""
    installed = asked_for(*extras)
    return frozenset(
        module
        for module, owners in packages_distributions().items()
        if not installed & set(map(canonicalize_name, owners))
    )


def imported(folder: str) -> dict[str, str]:
    """The modules that the files of a folder import, and a file that does."""
    places = {}
    for path in sorted((ROOT / folder).rglob("*.py")):
        place = path.relative_to(ROOT).as_posix()
        if place.startswith(APART) and folder not in APART:
            continue
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and not node.level else []
            places |= {name.partition(".")[0]: place for name in names}
    return places


@pytest.mark.parametrize(("folder", "extras"), NEEDS)
def test_what_is_imported_is_installed(folder, extras):
    places = imported(folder)
    assert len(places) > 5
    assert {name: places[name] for name in places.keys() & absent(*extras)} == {}


def test_what_only_a_framework_has_would_be_missed():
    assert "torch" in imported("pt_impl").keys() & absent("tensorflow")
    assert {"onnx", "onnxruntime"} <= imported("shared").keys() & absent()


def test_the_set_of_the_extra_edge_is_within_the_bounds_of_all_that_it_asks_for():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    lines = (ROOT / "constraints-edge.txt").read_text("utf-8").splitlines()
    pairs = (line.split("==") for line in lines if not line.startswith("#"))
    pins = {canonicalize_name(name): version for name, version in pairs}
    extras = project["optional-dependencies"]
    for text in (*project["dependencies"], *extras["torch"], *extras["edge"]):
        one = Requirement(text)
        assert one.name == "twinbench" or one.specifier.contains(pins[canonicalize_name(one.name)])


def test_the_benchmark_is_collected_where_no_framework_is_installed():
    """As in the environment of docs/gpu.md that only runs it."""
    done = subprocess.run(
        [sys.executable, "-c", COLLECT, json.dumps(sorted(absent()))],
        cwd=ROOT,
        env=os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "bench_mixed_precision" in done.stdout
