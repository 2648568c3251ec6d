"""The environments of docs/gpu.md have all that they need, and nothing hides that."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib.metadata import packages_distributions, requires

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.docs.pages import ROOT, commands

pytestmark = pytest.mark.timeout(240)

ONLY = """
import json, sys
from importlib.machinery import PathFinder
allowed, known = map(set, json.loads(sys.argv[1]))
class Only:
    def find_spec(self, name, path=None, target=None):
        absent = name.partition(".")[0] in known - allowed
        return None if absent else PathFinder.find_spec(name, path, target)
sys.meta_path[:] = [Only() if finder is PathFinder else finder for finder in sys.meta_path]
"""
IMPORT = """
from importlib import import_module
from pathlib import Path
for path in sorted(Path(sys.argv[2]).glob("*/*.py")) + sorted(Path("bench").glob("*/bench_*.py")):
    import_module(".".join(path.with_suffix("").parts))
import_module("bench.harness.parent")
"""
COLLECT = """
import pytest
plugin = ["-p", "pytest_benchmark.plugin"]
sys.exit(pytest.main(["bench/", *plugin, "--benchmark-only", "--collect-only", "-q"]))
"""


@cache
def closure(name: str) -> frozenset[str]:
    """A distribution and all that it brings along."""
    known, new = set(), {canonicalize_name(name)}
    while new:
        known |= new
        required = [Requirement(text) for one in new for text in _requires(one)]
        wanted = [r for r in required if r.marker is None or r.marker.evaluate({"extra": ""})]
        new = {canonicalize_name(requirement.name) for requirement in wanted} - known
    return frozenset(known)


def _requires(name: str) -> list[str]:
    try:
        return requires(name) or []
    except ModuleNotFoundError:  # for another platform, or a choice of several
        return []


def in_environment(environment: str, program: str, package: str) -> subprocess.CompletedProcess:
    """Run a program with what the page installs into an environment, and nothing else."""
    (text,) = [
        text
        for text in commands("docs/gpu.md")
        if text.startswith(f"python3 -m venv {environment} ")
    ]
    words = text.partition("pip install ")[2].replace("'", "").split(" ")
    installed = {"twinbench"}.union(*(closure(word.partition("[")[0]) for word in words))
    modules = packages_distributions()
    allowed = [
        name for name, owners in modules.items() if installed & set(map(canonicalize_name, owners))
    ]
    return subprocess.run(
        [sys.executable, "-c", ONLY + program, json.dumps([allowed, list(modules)]), package],
        cwd=ROOT,
        env=os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )


NEEDS = {
    ".venv-pt": (IMPORT, "pt_impl"),
    ".venv-tf": (IMPORT, "tf_impl"),
    ".venv": (COLLECT, ""),
}


@pytest.fixture(scope="module")
def imported() -> dict[str, subprocess.CompletedProcess]:
    """What each environment of the page imports, two at a time."""
    with ThreadPoolExecutor(2) as pool:
        done = pool.map(lambda name: in_environment(name, *NEEDS[name]), NEEDS)
        return dict(zip(NEEDS, done, strict=True))


@pytest.mark.campaign
@pytest.mark.parametrize("environment", NEEDS)
def test_an_environment_of_the_gpu_page_has_all_that_it_needs(imported, environment):
    done = imported[environment]
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


@pytest.mark.campaign
def test_what_an_environment_does_not_have_would_be_missed():
    done = in_environment(".venv", IMPORT, "pt_impl")
    assert done.returncode == 1
    assert "No module named 'torch'" in done.stderr
