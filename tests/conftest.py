"""What the tests of the harness share: runs of the faulty technique with the NumPy kit."""

import signal
import uuid
from pathlib import Path
from types import SimpleNamespace

import hypothesis
import pytest

from bench.harness import plan
from bench.harness.plan import Effort, cases_of, choose, with_baselines
from bench.harness.processes import TimeLimits
from bench.harness.run import Run, Settings
from bench.harness.schedule import Plan
from tests.harness import command_line, fake_plugin, faulty
from tests.harness.command_line import MARK
from tests.network.namespaces import refusal

# Other processes may keep the cores busy: how long an example takes says nothing.
hypothesis.settings.register_profile(
    "busy machine", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("busy machine")

# A shell starts what runs in its background with Ctrl-C ignored, and so would all that starts here.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

LIMITS = TimeLimits(start=60, request=30, sample=20, train=60)

ONE_BLOCK = Effort(blocks=1, rounds=5, seeds=1)


@pytest.fixture(scope="session")
def results_folder(tmp_path_factory) -> Path:
    """One folder for the results of all runs, so that their data is made once."""
    return tmp_path_factory.mktemp("results")


@pytest.fixture(scope="session")
def inductor(tmp_path_factory) -> dict[str, str]:
    """The environment of workers that compile: one cache, and no pool that imports torch."""
    folder = str(tmp_path_factory.mktemp("inductor"))
    return {"TORCHINDUCTOR_CACHE_DIR": folder, "TORCHINDUCTOR_COMPILE_THREADS": "1"}


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

    Every process of the run carries a mark of its own in its environment, `mark`.
    """

    def run(
        *variants,
        technique=faulty.TECHNIQUE,
        frameworks=("pt",),
        amount=ONE_BLOCK,
        limits=LIMITS,
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
            settings = Settings(results=results_folder, limits=limits, **settings)
            results = Run(made, settings, folder, said.append).measure()
        return SimpleNamespace(
            results=results,
            folder=folder,
            said=said,
            mark=mark,
            cases={(c["framework"], c["variant"]): c for c in results["cases"]},
            comparisons=results["comparisons"],
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

    def run(*arguments, files=(), **environment):
        arguments = (*(files or [bench_file]), f"--results={results_folder}", *arguments)
        return command_line.start(*arguments, folder=bench_file.parent, **environment)

    return run


@pytest.fixture
def hosts_permitted():
    """Skips, with the reason, where this machine permits no network namespaces."""
    if reason := refusal():
        pytest.skip(reason)
