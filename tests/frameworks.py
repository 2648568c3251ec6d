"""Tests in a framework's process: ordinary pytest, which this plugin starts there.

A test file names its frameworks, `FRAMEWORKS = ("pt", "tf")`, and imports none of them. A test that
takes one of the fixtures below runs once for each, as `test_x[pt]` and `test_x[tf]`. This process
asks a warm parent (`tests/warm.py`) to fork a process that runs pytest on those tests, and shows
the reports as its own. `pytest FILE --here pt` runs those of PyTorch in this process, for --pdb.
"""

from __future__ import annotations

import ast
import functools
import importlib
import os
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType

import numpy as np
import pytest

from tests import workers

REPORTS = pytest.StashKey[dict]()  # file -> test -> its reports, or why there are none
HOW_TO_SAVE = "other arrays than those saved: `pytest {} --save-arrays` writes them"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("frameworks")
    group.addoption("--here", metavar="pt|tf|tf_keras", help="run its tests in this process")
    group.addoption("--save-arrays", action="store_true", help="PyTorch writes tests/*/arrays")
    group.addoption("--reports-to", metavar="FILE", help="write reports there, too")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "only(names): of the file's frameworks, these alone")
    config.stash[REPORTS] = {}
    if config.option.here:
        os.environ.update(workers.environment(config.option.here))
    if config.option.reports_to:
        config.pluginmanager.register(_Writer(config))


# What a test may take ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def flavour(request: pytest.FixtureRequest) -> str:
    """ "pt", "tf", or "tf_keras", which is TensorFlow with legacy Keras."""
    return request.param


@pytest.fixture(scope="module")
def framework(flavour: str) -> str:
    """ "pt" or "tf"."""
    return "pt" if flavour == "pt" else "tf"


@pytest.fixture(scope="module")
def impl(framework: str) -> ModuleType:
    """`pt_impl` or `tf_impl` with its kit: one thread, seed 0."""
    return _implementation(framework)


@pytest.fixture(scope="module")
def kit(impl: ModuleType) -> ModuleType:
    """`impl.kit`."""
    return impl.kit


@pytest.fixture(scope="module")
def technique(impl: ModuleType, request: pytest.FixtureRequest) -> ModuleType:
    """What the file tests: `impl.FAMILY.x` in tests/FAMILY/test_x.py."""
    name = request.path.stem.removeprefix("test_")
    return importlib.import_module(f"{impl.__name__}.{request.path.parent.name}.{name}")


@pytest.fixture(scope="module")
def models(impl: ModuleType, framework: str, request: pytest.FixtureRequest) -> ModuleType:
    """What differs between the frameworks: pt_x.py or tf_x.py beside test_x.py, of equal names.

    Those of another test where the file names it, `MODELS = "y"`.
    """
    name = getattr(request.module, "MODELS", request.path.stem.removeprefix("test_"))
    return importlib.import_module(f"tests.{request.path.parent.name}.{framework}_{name}")


@pytest.fixture
def agrees(request: pytest.FixtureRequest, flavour: str) -> Callable[[str, dict, float], None]:
    """`agrees(name, {"loss": ..., "kernel": ...}, bar)` compares with what PyTorch has saved.

    Arrays by relative L2 distance, a loss or each of a list of losses by relative difference. The
    arrays are committed, in arrays/test_x.npz beside test_x.py.
    """
    file = request.path.parent / "arrays" / f"{request.path.stem}.npz"
    saved = dict(np.load(file)) if file.exists() else {}

    def compare(name: str, values: dict, bar: float) -> None:
        if request.config.option.save_arrays:
            saved[name] = _together(values)
            file.parent.mkdir(exist_ok=True)
            np.savez_compressed(file, **saved)
        kept = saved.get(name, np.zeros((), []))
        assert set(kept.dtype.names) == set(values), HOW_TO_SAVE.format(request.node.nodeid)
        distances = {what: apart(value, kept[what]) for what, value in values.items()}
        # The words are given, since this module is imported before pytest rewrites its asserts.
        beyond = {what: far for what, far in distances.items() if not far < bar}
        assert beyond == {}, f"{name} beyond {bar:g}: {beyond}"

    return compare


def apart(ours, theirs) -> float:
    """The relative L2 distance of two arrays; of numbers, the largest relative difference."""
    a, b = np.asarray(ours, float), np.asarray(theirs, float)
    assert a.shape == b.shape, f"{a.shape} is not {b.shape}"
    if isinstance(ours, (list, float)):
        return float(np.max(np.abs(a - b) / np.where(b == 0, 1.0, np.abs(b))))
    return float(np.linalg.norm(a - b) / (np.linalg.norm(b) or 1.0))


def _together(values: dict) -> np.ndarray:
    """Arrays by name as the fields of one: a file of few arrays has few headers."""
    arrays = {
        what: np.asarray(value, float if isinstance(value, (list, float)) else np.float32)
        for what, value in values.items()
    }
    fields = [(what, array.dtype, array.shape) for what, array in arrays.items()]
    return np.array(tuple(arrays.values()), fields)


@functools.cache
def _implementation(framework: str) -> ModuleType:
    impl = workers.implementation(framework)
    impl.kit.runtime.configure(threads=1, seed=0)
    return impl


# How they get there ------------------------------------------------------------------------------


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "flavour" in metafunc.fixturenames:
        metafunc.parametrize("flavour", metafunc.module.FRAMEWORKS, indirect=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items[:] = [item for item in items if _is_for(item, _flavour(item))]
    here = config.option.here or ("pt" if config.option.save_arrays else None)
    others = [item for item in items if here and _flavour(item) not in (None, here)]
    config.hook.pytest_deselected(items=others)
    items[:] = [item for item in items if item not in set(others)]


def _is_for(item: pytest.Item, flavour: str | None) -> bool:
    """Whether the marks `only` of a test, or of a row of its table, leave it this framework."""
    return all(flavour in mark.args for mark in item.iter_markers("only"))


def _flavour(item: pytest.Item) -> str | None:
    """The framework in which a test runs; None for one that needs none."""
    return item.callspec.params.get("flavour") if hasattr(item, "callspec") else None


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """Show the reports of a test that ran elsewhere; the first of a file has all of them run."""
    if _flavour(item) is None or item.config.option.here:
        return None
    reports = item.config.stash[REPORTS]
    if item.path not in reports:
        reports[item.path] = _run_file(item)
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for report in reports[item.path][item.nodeid]:
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    item.session._setupstate.teardown_exact(nextitem)  # what an earlier test has set up here
    return True


def _run_file(item: pytest.Item) -> dict[str, list[pytest.TestReport]]:
    """The reports of all selected tests of the item's file, all frameworks at the same time."""
    tests: dict[str, list[pytest.Item]] = {}
    for other in item.session.items:
        if other.path == item.path and _flavour(other):
            tests.setdefault(_flavour(other), []).append(other)
    with ThreadPoolExecutor(len(tests)) as pool:
        found = pool.map(lambda name: _run_in(name, tests[name]), tests)
        return {test: reports for one in found for test, reports in one.items()}


def _run_in(name: str, tests: list[pytest.Item]) -> dict[str, list[pytest.TestReport]]:
    """The reports of one framework's tests; a failure for a test that has none or not all."""
    config, option = tests[0].config, tests[0].config.option
    switches = {"-l": option.showlocals, "--runxfail": option.runxfail}
    switches |= {"--campaign": workers.campaign(), "--save-arrays": option.save_arrays}
    values = [
        f"--tb={option.tbstyle}",
        f"--maxfail={option.maxfail or 0}",
        f"--verbosity={option.verbose}",
    ]
    values += [f"--rootdir={config.rootpath}", "-p", "tests.frameworks", "-p", "no:cacheprovider"]
    with tempfile.NamedTemporaryFile("r", suffix=".txt") as lines:
        done = workers.parent(name).run(
            "pytest",
            *(f"--here={name}", f"--reports-to={lines.name}", *values),
            *(switch for switch, given in switches.items() if given),
            *(test.nodeid for test in tests),
            folder=config.rootpath,
        )
        sent = [ast.literal_eval(line) for line in lines]  # tuples stay, as JSON's do not
    reports: dict[str, list[pytest.TestReport]] = {test.nodeid: [] for test in tests}
    for data in sent:
        report = config.hook.pytest_report_from_serializable(config=config, data=data)
        reports[report.nodeid].append(report)
    for test in tests:
        if not reports[test.nodeid] or reports[test.nodeid][-1].when != "teardown":
            reports[test.nodeid].append(_unreported(test, name, done))
    return reports


def _unreported(test: pytest.Item, name: str, done) -> pytest.TestReport:
    """The failure of a test whose process ended before it did."""
    how = "had to be killed" if done.returncode is None else f"ended with {done.returncode}"
    why = f"the process of {name} {how} before this test's end"
    output = [("what it said last", f"{done.stdout}{done.stderr}"[-3000:])]
    return pytest.TestReport(test.nodeid, test.location, {}, "failed", why, "call", output)


class _Writer:
    """Writes each report where the process that asked for it reads them."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self.config.hook.pytest_report_to_serializable(config=self.config, report=report)
        with open(self.config.option.reports_to, "a", encoding="utf-8") as lines:
            print(repr(data), file=lines)
