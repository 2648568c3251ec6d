"""What the tests of the harness share: runs of the faulty technique with the NumPy kit."""

import contextlib
import fcntl
import os
import shutil
import signal
import tempfile
import uuid
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import TextIO

import hypothesis
import pytest

from bench.harness import matches, plan, speed
from bench.harness.plan import Effort
from bench.harness.processes import TimeLimits
from bench.harness.run import Run, Settings
from bench.harness.run_plan import Plan
from bench.harness.selection import cases_of, choose, with_baselines
from shared import scratch
from tests import workers
from tests.harness import command_line, fake_plugin, faulty
from tests.harness.command_line import MARK
from tests.network.namespaces import refusal

pytest_plugins = ("tests.frameworks",)

# Other processes may keep the cores busy: how long an example takes says nothing.
BUSY = {"deadline": None, "suppress_health_check": [hypothesis.HealthCheck.too_slow]}
hypothesis.settings.register_profile("each change", max_examples=40, **BUSY)
hypothesis.settings.register_profile("campaign", max_examples=100, **BUSY)

# A shell starts what runs in its background with Ctrl-C ignored, and so would all that starts here.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Files of few and long tests begin, so that none is the last to end.
SHORT = ("analysis", "report", "shared")
# Fixtures of a module in which the harness measures time or what others do to it.
MEASURING = {"harness/test_harness.py": {"faults"}}
MEASURING |= {
    f"diagnosis/test_{name}.py": {"models"} for name in ("bottleneck", "memory_growth", "profiling")
}
TURN = pytest.StashKey[TextIO]()  # while a test runs, and between two that run alone

LIMITS = TimeLimits(start=60, request=30, sample=20, train=60)

ONE_BLOCK = Effort(blocks=1, rounds=5, seeds=1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--campaign", action="store_true", help="run also the tests that are marked `campaign`"
    )


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads its options
def pytest_cmdline_main(config: pytest.Config) -> None:
    """The whole suite runs in two processes, a file in one of them; what is named runs in one.

    A third does not end sooner on two cores: it imports all frameworks once more.
    """
    if hasattr(config, "workerinput"):  # one of the two, which would start two more
        return
    everything = config.args_source is pytest.Config.ArgsSource.TESTPATHS
    if everything and config.getoption("numprocesses", 0) is None and not config.option.usepdb:
        config.option.numprocesses, config.option.dist = 2, "loadfile"
        config.option.loadscopereorder = False


def pytest_configure(config: pytest.Config) -> None:
    # A test's own pytest is not one of the two: pytest-benchmark would not measure there.
    for name in [name for name in os.environ if name.startswith("PYTEST_XDIST_")]:
        del os.environ[name]
    if not hasattr(config, "workerinput"):
        _write_to_scratch(config)
    for name in ("TORCHINDUCTOR_COMPILE_THREADS", "TORCHINDUCTOR_VEC_ISA_OK"):
        os.environ.setdefault(name, "1")  # see `workers.environment`
    config.addinivalue_line("markers", "alone: what it measures needs the machine for itself")
    config.addinivalue_line("markers", "campaign: runs with --campaign alone, not at each change")
    if config.getoption("campaign", False):
        os.environ[workers.CAMPAIGN] = "1"
    hypothesis.settings.load_profile("campaign" if workers.campaign() else "each change")


def _write_to_scratch(config: pytest.Config) -> None:
    """What all processes of the session leave behind goes with it, or is swept by the next one.

    The folders that pytest keeps to look into stay where they were.
    """
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
    kept = contextlib.ExitStack()
    config.add_cleanup(kept.close)
    os.environ |= scratch.environment(kept.enter_context(scratch.folder()))
    tempfile.tempdir = None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not workers.campaign():
        left_out = [item for item in items if item.get_closest_marker("campaign")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]
    for file, fixtures in MEASURING.items():
        of_file = [item for item in items if item.path.as_posix().endswith(f"tests/{file}")]
        for fixture in fixtures:
            asking = (item for item in of_file if fixture in item.fixturenames)
            for item in islice(asking, 1):  # the others look at what was measured
                item.add_marker("alone")
    # Those of a file that run alone come first, and wait for the other process once.
    place = {path: number for number, path in enumerate(dict.fromkeys(i.path for i in items))}
    items.sort(
        key=lambda item: (item.path.parent.name in SHORT, place[item.path], not _is_alone(item))
    )


def _is_alone(item: pytest.Item | None) -> bool:
    return item is not None and item.get_closest_marker("alone") is not None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None):
    """Nothing runs in the other process beside a test that is marked `alone`, or between two."""
    if not hasattr(item.config, "workerinput"):
        return (yield)
    stash = item.config.stash
    if TURN not in stash:
        stash[TURN] = _turn(item)
    try:
        return (yield)
    finally:
        if not (_is_alone(item) and _is_alone(nextitem)):
            with stash[TURN] as now:
                # Even where a process that was forked by the test holds it, too.
                fcntl.flock(now, fcntl.LOCK_UN)
            del stash[TURN]


def _turn(item: pytest.Item) -> TextIO:
    """Wait until a test may run; what is locked while it does."""
    folder = item.config.cache.mkdir("alone")
    now = (folder / "now").open("w")
    with (folder / "next").open("w") as following:
        # Who waits to be alone keeps others from beginning.
        fcntl.flock(following, fcntl.LOCK_EX)
        fcntl.flock(now, fcntl.LOCK_EX if _is_alone(item) else fcntl.LOCK_SH)
        fcntl.flock(following, fcntl.LOCK_UN)
    return now


@pytest.fixture(scope="session")
def results_folder(tmp_path_factory) -> Path:
    """One folder for the results of all runs, so that their data is made once."""
    return tmp_path_factory.mktemp("results")


@pytest.fixture
def fakes(monkeypatch):
    """Both frameworks are the NumPy kit."""
    for name, framework in fake_plugin.FAKES.items():
        monkeypatch.setitem(plan.FRAMEWORKS, name, framework)


@pytest.fixture(scope="module")
def fakes_in_module():
    """The same for the fixtures of a module."""
    with pytest.MonkeyPatch.context() as patch:
        for name, framework in fake_plugin.FAKES.items():
            patch.setitem(plan.FRAMEWORKS, name, framework)
        yield


@pytest.fixture(scope="session")
def measure(results_folder, tmp_path_factory):
    """Measure variants of a technique; returns the record and what led to it.

    Every process of the run carries a mark of its own in its environment, `mark`. `machine`:
    functions of `bench.harness.speed` that take the place of those which measure it.
    """

    def run(
        *variants,
        technique=faulty.TECHNIQUE,
        frameworks=("pt",),
        amount=ONE_BLOCK,
        limits=LIMITS,
        machine=None,
        **settings,
    ) -> SimpleNamespace:
        every = cases_of(technique, "tests.harness.faulty", "default")
        chosen = choose(every, tasks=set(), variants=set(variants), frameworks=set(frameworks))
        cases = with_baselines(chosen, every)
        made = Plan({technique.name: cases}, {technique.name: technique}, amount)
        folder = tmp_path_factory.mktemp("run")
        said: list[str] = []
        with pytest.MonkeyPatch.context() as patch:
            mark = uuid.uuid4().hex
            patch.setenv(MARK, mark)
            patch.setenv("FAKE_WARM_S", "0.005")
            for name, value in fake_plugin.ALL_ROUNDS.items():
                patch.setattr(matches, name, value)
            for name, measured in (fake_plugin.STEADY | (machine or {})).items():
                patch.setattr(speed, name, measured)
            settings = Settings(results=results_folder, limits=limits, **settings)
            results = Run(made, settings, folder, said.append).measure()
        return SimpleNamespace(
            results=results,
            folder=folder,
            said=said,
            mark=mark,
            cases={(case.framework, case.variant): case for case in results.cases},
            comparisons=results.comparisons,
        )

    return run


@pytest.fixture(scope="session")
def bench_file(tmp_path_factory) -> Path:
    """A benchmark of the faulty technique."""
    path = tmp_path_factory.mktemp("benchmarks") / "bench_faulty.py"
    path.write_text(command_line.BENCH_FILE)
    return path


@pytest.fixture(scope="session")
def start(bench_file, results_folder):
    """Start pytest on the benchmark of the faulty technique."""

    def start(*arguments, **environment):
        arguments = (bench_file, f"--results={results_folder}", *arguments)
        return command_line.start(*arguments, folder=bench_file.parent, **environment)

    return start


@pytest.fixture(scope="session")
def run(bench_file, results_folder):
    """Run the same to its end."""

    def run(*arguments, **environment):
        arguments = (bench_file, f"--results={results_folder}", *arguments)
        return command_line.run(*arguments, folder=bench_file.parent, **environment)

    return run


CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
QUIET = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]
QUIET += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]


@pytest.fixture(scope="module")
def browser():
    """Chromium, without a window."""
    api = pytest.importorskip("playwright.sync_api", reason="needs the package playwright")
    path = next(filter(None, map(shutil.which, CHROMIUM)), None)
    if path is None:
        pytest.skip(f"needs a browser: {', '.join(CHROMIUM)}")
    with api.sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=path, args=QUIET)
        yield launched
        launched.close()


@pytest.fixture
def hosts_permitted():
    """Skips, with the reason, where this machine permits no network namespaces."""
    if reason := refusal():
        pytest.skip(reason)
