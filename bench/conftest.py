"""The benchmark as a pytest plugin: options, plan, progress, and a test item per case.

Everything is measured before the first item runs. Each item then replays its samples into
pytest-benchmark, so that tables, JSON, comparisons and histograms work as usual.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import io
import os
import re
import shlex
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import pytest

from bench import resume, user_answer, user_task
from bench.harness import devices, machine
from bench.harness import state as states
from bench.harness.command import find_interpreter, this_command
from bench.harness.conditions import OtherConditions
from bench.harness.durations import learned
from bench.harness.folders import new_folder, replace_file
from bench.harness.plan import EFFORTS, FRAMEWORKS, Case, Technique
from bench.harness.progress import clock
from bench.harness.run import Run, Settings
from bench.harness.run_plan import Plan, techniques
from bench.harness.selection import (
    at_a_glance,
    at_first_work,
    cases_of,
    choose,
    comes_unasked,
    one_by_one,
    spare_controls,
    with_baselines,
)
from bench.harness.state import Asked
from bench.quantities import size
from bench.record import Record, encode
from bench.report import tables
from bench.report.files import FORMATS, OWN, write_reports
from bench.report.text import wrap
from bench.user_task import UserModel
from bench.why import of_record
from shared.choices import unknown
from shared.specs import TASKS
from shared.user_model import BadFile

STATE = pytest.StashKey["State"]()
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
SEEN = {
    "first_table": "Provisional, after {}: measured once, no intervals yet. The run goes on in",
    "intervals": "After {} all times have intervals. Memory, accuracy and the rest follow in",
}
WHY_S = 90.0  # limit of the time for causes, of a run on a file
SHARE_OF_MEMORY = 0.8  # of the free memory, for all contenders of a match together


@dataclass
class State:
    """What the hooks below share."""

    settings: Settings
    chosen: dict[str, set[str]]
    begun: resume.Begun | None
    watch: machine.Watch
    model: UserModel | None = None
    cases: dict[str, Case] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    why: bool = False
    gpu: devices.Gpu | None = None
    hint: str | None = None  # where -k left nothing
    plan: Plan | None = None
    results: Record | None = None
    folder: Path | None = None


class ReplayClock:
    """A timer for pytest-benchmark that advances only by the samples it is given."""

    def __init__(self) -> None:
        self.now = 0.0
        self.__name__ = "samples"

    def __call__(self) -> float:
        """Seconds."""
        return self.now

    def advance(self, samples: list[float]):
        """A function that advances the clock by the next sample at each call."""
        stream = iter(samples)

        def step() -> None:
            self.now += next(stream)

        return step


CLOCK = ReplayClock()


def pytest_addoption(parser: pytest.Parser) -> None:
    """The benchmark's command-line options."""
    group = parser.getgroup("twinbench", "the same technique in PyTorch and TensorFlow")
    group.addoption(
        "--effort",
        metavar="|".join(EFFORTS),
        help="how many rows; quick measures once, without intervals (default: default)",
    )
    group.addoption(
        "--blocks", metavar="N", help="repeat each measurement exactly N times, in new processes"
    )
    group.addoption("--plan", action="store_true", help="show the plan; measure nothing")
    group.addoption("--minutes", metavar="N", help="end after N minutes, and keep the results")
    group.addoption(
        "--memory-budget",
        metavar="SIZE",
        help="memory for the largest batch, such as 2GB (default: 512MB, or 70%% of what is free "
        "with --model)",
    )
    group.addoption("--results", metavar="DIR", help="folder for results (default: results)")
    group.addoption(
        "--resume",
        nargs="?",
        const="",
        metavar="FOLDER",
        help="go on with an interrupted run (default: results/latest)",
    )
    group.addoption("--model", metavar="FILE", help="measure your own model, not the tasks")
    group.addoption("--why", action="store_true", help="with --model: also explain the gains")
    group.addoption("--technique", metavar="A,B", help="only these techniques")
    group.addoption("--task", metavar="A,B", help="only these tasks")
    group.addoption("--variant", metavar="A,B", help="only these variants (and their baselines)")
    group.addoption("--framework", metavar="pt|tf", help="only this framework")
    for name, framework in FRAMEWORKS.items():
        group.addoption(
            f"--{name}-python", metavar="PATH", help=f"a Python that has {framework.title}"
        )


def pytest_configure(config: pytest.Config) -> None:
    """Check every option before collection; a wrong one is a usage error of one line."""
    if sys.platform == "linux" and not Path("/proc/self/stat").exists():
        raise pytest.UsageError("/proc is not mounted: times and memory are read from it")
    _check_temporary()
    if isinstance(sys.stdout, io.TextIOWrapper):  # a console without UTF-8 loses no line
        sys.stdout.reconfigure(errors="backslashreplace")
    option = config.getoption
    known = techniques()
    names = {v.name for technique in known.values() for v in technique.variants}
    chosen = {
        "technique": _names("technique", option("technique"), known),
        "task": _names("task", option("task"), TASKS),
        "variant": _names("variant", option("variant"), names | {"control"}),
        "framework": _names("framework", option("framework"), FRAMEWORKS),
    }
    if option("effort") not in (None, *EFFORTS):
        raise _unknown("effort", option("effort"), EFFORTS)
    asked = {
        "--effort": option("effort"),
        "--blocks": _blocks(option("blocks")),
        "--memory-budget": _bytes(option("memory_budget")),
        "--model": option("model") and os.path.abspath(option("model")),
        **{f"--{name}": sorted(names) or None for name, names in chosen.items()},
        **{f"--{name}-python": _interpreter(name, option(f"{name}_python")) for name in FRAMEWORKS},
        "-k": option("keyword") or None,
        "-m": option("markexpr") or None,
    }
    results, begun = Path(option("results") or "results").resolve(), None
    if option("resume") is None:
        asked["--effort"] = asked["--effort"] or "default"
    else:
        try:
            begun = resume.begun(Path(option("resume") or results / "latest"))
            asked = begun.asked(asked)
            chosen = {name: set(asked[f"--{name}"] or ()) for name in chosen}
            if asked["--model"]:
                begun.check_file(Path(asked["--model"]))
        except ValueError as error:
            raise _refused(error) from None
        if option("results") and begun.folder.parent != results:
            raise _refused(f"{begun.folder} is not in {results}: leave out --results")
        results = begun.folder.parent
        for name in FRAMEWORKS:
            _interpreter(name, asked[f"--{name}-python"])
    settings = replace(_settings(asked, results), minutes=_minutes(option("minutes")))
    model, watch = None, machine.Watch()
    if asked["--model"] and not _off(config):
        model = _checked_model(asked, settings)
        about = {"file": model.file.path.name, "sha256": model.file.sha256()}
        settings = replace(settings, model=about)
    gpu = None
    if not (model or chosen["task"]):
        gpu = devices.used_gpu(chosen["framework"] or FRAMEWORKS, settings.interpreters)
    config.stash[STATE] = State(settings, chosen, begun, watch, model, why=option("why"), gpu=gpu)


def _check_temporary() -> None:
    """A usage error where no temporary file can be written."""
    try:
        tempfile.gettempdir()
    except OSError:
        raise pytest.UsageError(
            "no folder for temporary files can be written: set TMPDIR to one that can"
        ) from None


def _checked_model(asked: dict, settings: Settings) -> UserModel:
    """A user's file, checked; raises UsageError with one line if something is wrong with it."""
    wanted, every = set(asked["--framework"] or ()), techniques()
    left_out = user_task.left_out(every)
    for name in asked["--technique"] or ():
        if name in left_out:
            raise pytest.UsageError(
                f"--technique: {name} can't be measured on a file: {left_out[name]}"
            )
        least = user_task.least_effort(every[name])
        if asked["--effort"] == "quick" and least != "default":
            raise pytest.UsageError(
                f"--effort quick leaves out --technique {name}: give --effort {least}"
            )

    def say(what: str) -> None:
        print(f"checking {asked['--model']}: {what} ...", file=sys.stderr, flush=True)

    try:
        return user_task.prepare(
            asked["--model"], settings.results, settings.interpreters, wanted, say
        )
    except BadFile as error:
        raise pytest.UsageError(f"--model: {error}") from None
    except OSError as error:
        place = error.filename or settings.results
        raise pytest.UsageError(
            f"{place} can't be written ({error.strerror}): give another folder, --results DIR"
        ) from None
    except KeyboardInterrupt:
        raise pytest.UsageError("interrupted before anything was measured") from None


def _off(config: pytest.Config) -> bool:
    """Whether nothing is to be measured."""
    names = ("collectonly", "benchmark_skip", "benchmark_disable")
    return any(config.getoption(name, False) for name in names)


def _settings(asked: dict, results: Path) -> Settings:
    """The settings of a run with these options."""
    return Settings(
        effort=asked["--effort"],
        blocks=asked["--blocks"],
        memory_budget=asked["--memory-budget"],
        results=results,
        command=this_command(),
        interpreters={name: p for name in FRAMEWORKS if (p := asked[f"--{name}-python"])},
        asked=Asked(options=asked),
    )


def _refused(why: object) -> pytest.UsageError:
    return pytest.UsageError(f"--resume: {why}")


def _names(option: str, given: str | None, known) -> set[str]:
    if given is None:
        return set()
    wanted = {name.strip() for name in given.split(",")}
    for name in sorted(wanted - set(known)):
        raise _unknown(option, name, sorted(known))
    return wanted


def _unknown(option: str, name: str, known: Iterable[str]) -> pytest.UsageError:
    return pytest.UsageError(f"--{option}: {unknown(name, known)}")


def _interpreter(name: str, given: str | None) -> str | None:
    if given is None:
        return None
    path = find_interpreter(given)
    if path is None:
        raise pytest.UsageError(
            f"--{name}-python: {given!r} does not start as Python 3.11 or newer; give the path of "
            "an interpreter, such as .venv/bin/python"
        )
    return path


def _blocks(given: str | None) -> int | None:
    if given is None:
        return None
    if not re.fullmatch(r"\d{1,6}", given) or int(given) < 1:
        raise pytest.UsageError(f"--blocks: give 1 or more, not {given!r}")
    return int(given)


def _minutes(given: str | None) -> float | None:
    if given is None:
        return None
    if not re.fullmatch(r"\d{1,9}(\.\d+)?", given) or float(given) == 0:
        raise pytest.UsageError(f"--minutes: give a number above 0, such as 5, not {given!r}")
    return float(given)


def _bytes(given: str | None) -> int | None:
    if given is None:
        return None
    with contextlib.suppress(argparse.ArgumentTypeError):
        if (found := size(given)) >= 1:
            return int(found)
    raise pytest.UsageError(f"--memory-budget: give a size such as 512MB or 2GB, not {given!r}")


class BenchFile(pytest.Module):
    """A file that declares a technique; it needs no code for its items."""

    def collect(self) -> Iterable[pytest.Item | pytest.Collector]:
        """Its function gets the file's name, by which items are shown and selected."""
        setattr(self.obj, self.path.stem, _replay_case)
        return super().collect()


def _replay_case(case, replay) -> None:
    replay(case)


def pytest_pycollect_makemodule(
    module_path: Path, parent: pytest.Collector
) -> pytest.Module | None:
    """Collect bench files as `BenchFile`."""
    if module_path.name.startswith("bench_"):
        return BenchFile.from_parent(parent, path=module_path)
    return None


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One item per case of the module's technique."""
    if "case" not in metafunc.fixturenames:
        return
    state = metafunc.config.stash[STATE]
    chosen = state.chosen
    technique = _of_its_size(metafunc.module.TECHNIQUE, state)
    if state.model:
        technique = user_task.technique(technique, state.model)
        if technique is None:
            metafunc.parametrize("case", [])
            return
    effort = state.settings.effort
    if effort == "default" and _asks_for(state, technique.name):
        effort = "ordinary"
    cases = cases_of(technique, metafunc.module.__name__, effort)
    named = _asks_for(state, technique.name)
    if not (state.model or chosen["task"]):
        if not (named or comes_unasked(technique, effort)):
            cases = []
        elif effort == "quick":
            cases = at_a_glance(cases, named=named)
        state.left_out += [technique.name] * (not cases)
    if not (state.model or chosen["task"] or chosen["variant"]):
        cases = one_by_one(cases)
        if effort != state.settings.effort:
            cases = at_first_work(cases)
    if chosen["technique"] and technique.name not in chosen["technique"]:
        cases = []
    sides = chosen["framework"] or set(state.model.sides if state.model else ())
    picked = choose(cases, tasks=chosen["task"], variants=chosen["variant"], frameworks=sides)
    state.cases |= {case.id: case for case in cases}
    metafunc.parametrize(
        "case", [case.id for case in picked], ids=lambda name: name.split("/", 1)[1]
    )


def _techniques(state: State) -> dict[str, Technique]:
    """The techniques of the suite, or what of them is measured of a user's file."""
    every = techniques()
    if not state.model:
        return {name: _of_its_size(each, state) for name, each in every.items()}
    found = {name: user_task.technique(each, state.model) for name, each in every.items()}
    return {name: each for name, each in found.items() if each}


def _of_its_size(technique: Technique, state: State) -> Technique:
    """A technique with work of the GPU's size, where the run is on one."""
    if state.gpu is None:
        return technique
    return devices.of_its_size(technique, devices.class_of(state.gpu))


def _asks_for(state: State, technique: str) -> bool:
    """Whether a technique, or a variant, is asked for by name, which shows its ordinary rows."""
    options = state.settings.asked.options
    words = set(re.findall(r"\w+", options["-k"] or ""))
    named = any(f"_{word}_" in f"_{technique}_" for word in words)
    return named or technique in state.chosen["technique"] or bool(state.chosen["variant"])


def _parameter(item: pytest.Item) -> object:
    """A benchmark's parameter: a case's id, or pytest's mark where the options left it none."""
    if "replay" in getattr(item, "fixturenames", ()) and hasattr(item, "callspec"):
        return item.callspec.params.get("case")
    return None


def pytest_itemcollected(item: pytest.Item) -> None:
    """Group items by technique and task; their clock is the replayed samples."""
    case_id = _parameter(item)
    if isinstance(case_id, str):
        group = "/".join(case_id.split("/")[:2])
        item.add_marker(pytest.mark.benchmark(timer=CLOCK, group=group))
        # A case that failed has nothing to replay; its own reason is enough.
        item.add_marker(pytest.mark.filterwarnings("ignore:Benchmark fixture was not used"))


@pytest.hookimpl(trylast=True)  # after -k
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect controls that the run does not need, and files without a case.

    If no file has a case, it is a usage error. A resumed run selects what it did before.
    """
    state = config.stash[STATE]
    if not items and config.option.keyword:
        state.hint = (
            f"-k {config.option.keyword!r} matches no row of --effort {state.settings.effort}:\n"
            "--technique NAME adds rows of that technique, --effort full all rows."
        )
    empty = [item for item in items if _parameter(item) and not isinstance(_parameter(item), str)]
    if empty and len(empty) == len(items):
        files = {item.module.TECHNIQUE.name for item in empty}
        raise pytest.UsageError(_nothing_left(state, files))
    selected = [state.cases[name] for item in items if (name := _parameter(item)) in state.cases]
    others = {case.id for case in spare_controls(selected)}
    if state.begun:
        others = {case.id for case in selected} - set(state.begun.selected)
    out = empty + [item for item in items if _parameter(item) in others]
    if out:
        config.hook.pytest_deselected(items=out)
        items[:] = [item for item in items if item not in out]


def _nothing_left(state: State, files: set[str]) -> str:
    """Why the options left no case of the techniques of `files`: another effort may have some."""
    chosen = state.chosen
    asked = " ".join(f"--{name} {','.join(sorted(each))}" for name, each in chosen.items() if each)
    named = [each for name, each in _techniques(state).items() if name in files]
    named = [each for each in named if each.name in (chosen["technique"] or files)]
    names = {f"{name}s": chosen[name] for name in ("task", "variant", "framework")}
    for effort in EFFORTS[1:]:
        if any(choose(cases_of(each, "", effort), **names) for each in named):
            return f"--effort {state.settings.effort} leaves out {asked}: give --effort {effort}"
    return f"no row matches {asked}: leave one of them out"


def pytest_collection_finish(session: pytest.Session) -> None:
    """Plan what the selected items need, or what a resumed run had planned."""
    state = session.config.stash[STATE]
    wanted = [
        state.cases[_parameter(item)] for item in session.items if _parameter(item) in state.cases
    ]
    selected = [case.id for case in wanted]
    needed = with_baselines(wanted, list(state.cases.values()))
    if state.begun:
        selected = state.begun.selected
        if gone := next((name for name in state.begun.cases if name not in state.cases), None):
            raise _refused(f"{gone} was not collected: give the same files as the run began with")
        needed = [state.cases[name] for name in state.begun.cases]
    asked = Asked(options=state.settings.asked.options, selected=selected)
    state.settings = replace(state.settings, asked=asked)
    by_technique: dict[str, list[Case]] = {}
    for case in needed:
        by_technique.setdefault(case.technique, []).append(case)
    if by_technique:
        state.plan = _plan(by_technique, state)


def _plan(cases: dict[str, list[Case]], state: State) -> Plan:
    """The plan of these cases on this machine, as earlier runs found it."""
    settings = state.settings
    here = (
        state.begun.record.environment
        if state.begun
        else machine.describe(machine.usable_threads())
    )
    durations = learned(settings.results, here, settings.amount.rounds, on_gpu=bool(state.gpu))
    every = [case for of_technique in cases.values() for case in of_technique]
    durations.note_alone(every)
    if state.model:
        state.model.note(durations, every)
    room = SHARE_OF_MEMORY * machine.free_memory()
    named = any(_asks_for(state, name) for name in _techniques(state))
    left_out = () if named else tuple(state.left_out)
    return Plan(cases, _techniques(state), settings.amount, durations, room, left_out, state.gpu)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Measure everything, before the items replay it; with --plan only print the plan."""
    config, state = session.config, session.config.stash[STATE]
    if state.plan is None or _off(config):
        return None
    if session.testsfailed and not config.option.continue_on_collection_errors:
        return None  # pytest is about to say which file it could not collect
    if config.getoption("plan"):
        print(f"\n{_planned(state)}")
        return True
    _check_enabled(config)
    speaker = Speaker(quiet=config.option.verbose < 0 and not state.model)
    with config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        if state.begun and state.begun.finished:
            state.folder, state.results = state.begun.folder, state.begun.record
            speaker.plan(f"{state.folder} is finished: nothing is left to measure")
            return None
        _measure(state, speaker)
    return None


def _planned(state: State) -> str:
    """The plan, part by part."""
    begun = state.begun
    folder = begun.folder if begun else state.settings.results
    run = Run(state.plan, state.settings, folder, str, begun and begun.state)
    return f"{run.describe()}{_cautions(state)}\n\n{run.table()}"


def _cautions(state: State) -> str:
    """Warnings of what makes the plan's times wrong on this machine."""
    return _busy(state) + _overruled(state)


def _overruled(state: State) -> str:
    """Warnings of the user's settings that the run ignores."""
    backend = os.environ.get("KERAS_BACKEND")
    if state.model:
        backend = state.model.keras_backend
    elif not any(case.framework == "tf" for case in state.plan.every):
        backend = None
    said = machine.overruled(machine.usable_threads(), backend)
    return "".join(f"\n!! {line}" for text in said for line in wrap(f"{text}.", 77))


def _busy(state: State) -> str:
    """A warning where other programs used the machine since this one was started."""
    warning = machine.busy(state.watch.stop().others)
    if not warning:
        return ""
    return f"\n!! {warning}.\n!! Stop them: they make results noisy and the run longer."


def _measure(state: State, speaker: Speaker) -> None:
    """Measure what is planned into a new folder, or into that of a run that is taken up."""
    begun = state.begun
    try:
        state.folder = begun.folder if begun else new_folder(state.settings.results)
    except OSError as error:
        place = error.filename or state.settings.results
        raise pytest.UsageError(
            f"--results: {place} can't be written ({error.strerror}): give another folder"
        ) from None
    try:
        show = partial(_show, state, speaker)
        run = Run(
            state.plan, state.settings, state.folder, speaker.say, begun and begun.state, show
        )
        if begun:
            states.claim(state.folder, begun.record.started)
    except ValueError as error:
        raise _refused(f"{state.folder}: {error}") from None
    except OSError as error:
        raise _refused(f"{error.filename} can't be written ({error.strerror})") from None
    speaker.plan(f"{run.describe()}{_cautions(state)}")
    again = f"--resume {_typed(state.folder)} goes on"
    try:
        _run(state, run, again)
        if state.why and state.model:
            _explain(state, speaker)
    except OtherConditions as error:
        raise _refused(f"{state.folder}: {error}") from None
    except OSError as error:
        if not _unwritten(error, state):
            raise
        wants = "with more space" if error.errno in NO_ROOM else "once it can be written"
        pytest.exit(f"{error.filename}: {error.strerror}; {wants}, {again}", returncode=2)
    finally:
        speaker.end()
        if state.results:
            _report(state.folder)


def _run(state: State, run: Run, again: str) -> None:
    """Run to the end. Whatever stops it, the record keeps what is measured."""
    try:
        state.results = run.measure()
    except OtherConditions:
        raise
    except KeyboardInterrupt:
        state.results = run.recorder.write()
        pytest.exit(f"interrupted: {again} where it ended", returncode=2)
    except BaseException as error:
        if not _unwritten(error, state):
            state.results = run.recorder.write()
        raise


def _explain(state: State, speaker: Speaker) -> None:
    """Keep in the record where the answer's differences come from."""
    data = str(state.settings.results / "data" / state.model.about["folder"])
    state.results = of_record.of_a_file(state.results, state.cases, data, WHY_S, speaker.say)
    replace_file(state.folder / "results.json", encode(state.results).decode())


def _unwritten(error: BaseException, state: State) -> bool:
    """Whether there was no room for a file, or one of the results could not be written."""
    if not isinstance(error, OSError):
        return False
    among = Path(str(error.filename)).is_relative_to(state.settings.results)
    return error.errno in NO_ROOM or among


def _report(folder: Path) -> None:
    """Make the reports. If they can't be written, a line says so: the record is kept."""
    try:
        write_reports(folder)
    except ValueError as error:
        print(error, file=sys.stderr)


def _show(state: State, speaker: Speaker, record: Record, reached: str | None) -> None:
    """Make the report of what is measured. Show the answer the first time, and with intervals."""
    (state.folder / OWN).unlink(missing_ok=True)  # from before a --resume
    _report(state.folder)
    if reached and not state.settings.amount.first_pass_alone:
        head = SEEN[reached].format(clock(record.seconds[reached]))
        speaker.plan(f"{tables.answered(record, width=80)}\n\n{head}\n{state.folder}")


def _check_enabled(config: pytest.Config) -> None:
    """Refuse to share the machine with other test processes."""
    if getattr(config.option, "numprocesses", None):
        raise pytest.UsageError("benchmarks can't run in parallel: leave out -n")


class Speaker:
    """Progress: one line that is rewritten on a terminal, a line per part elsewhere."""

    def __init__(self, quiet: bool) -> None:
        self.live = sys.stderr.isatty()
        self.quiet = quiet or (bool(os.environ.get("CI")) and not self.live)

    def plan(self, text: str) -> None:
        """Print the plan, before anything is measured."""
        if not self.quiet:
            print(f"\n{text}", file=sys.stderr, flush=True)

    def say(self, line: str) -> None:
        """Print what is measured now."""
        if self.quiet:
            return
        if self.live:
            print(f"\r\x1b[K{line[:79]}", end="", file=sys.stderr, flush=True)
        else:
            print(line, file=sys.stderr, flush=True)

    def end(self) -> None:
        """Clear the line."""
        if self.live and not self.quiet:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


@pytest.fixture
def replay(request: pytest.FixtureRequest, benchmark):
    """Replay a case's samples into pytest-benchmark, or give its status and reason."""

    def give(case_id: str) -> None:
        state = request.config.stash[STATE]
        if state.results is None:
            pytest.skip("benchmarks are disabled")
        by_id = {case.id: case for case in state.results.cases}
        asked = by_id[case_id]
        case = asked if asked.status != "OK" else by_id[asked.program_id]
        samples = [
            sample
            for blocks in case.timing.step_s.values()
            for samples in blocks.values()
            for sample in samples
        ]
        if case.status == "OK" and not asked.timed:
            pytest.skip("no times of steps; the report has what was measured")
        if case.status == "OK" and not samples and not state.results.finished:
            pytest.skip("not measured yet: --resume goes on")
        if case.status == "UNSUPPORTED":
            pytest.skip(f"{case.status}: {case.reason}")
        if case.status != "OK" or not samples:
            pytest.fail(f"{case.status}: {case.reason}", pytrace=False)
        benchmark.extra_info["case"] = case_id
        benchmark.pedantic(CLOCK.advance(samples), rounds=len(samples), iterations=1)

    return give


@pytest.hookimpl(wrapper=True, tryfirst=True)  # prints after all that pytest prints
def pytest_terminal_summary(terminalreporter, config: pytest.Config):
    """Print the files that were written, then the answer; with -v all tables before them."""
    state = config.stash.get(STATE, None)
    shown = state is not None and state.results is not None
    benchmarks = getattr(config, "_benchmarksession", None)
    if shown and benchmarks and not _asks_pytest_benchmark(config):
        benchmarks.quiet = True
    done = yield
    if state is not None and state.hint:
        terminalreporter.write_line(state.hint)
    if shown:
        if config.option.verbose > 0:
            terminalreporter.write_line(tables.detail(state.results, width=80))
        skipped = bool(terminalreporter.stats.get("skipped"))
        terminalreporter.write_line("\n".join(["", *_way_on(state, skipped)]))
        if state.model:
            user_answer.write(state.folder, state.results, state.model)
            _report(state.folder)  # the page begins with it
            terminalreporter.write_line(f"\n{user_answer.read(state.folder)}")
        else:
            terminalreporter.write_line(f"\n{tables.answered(state.results, width=80)}")
    return done


def _asks_pytest_benchmark(config: pytest.Config) -> bool:
    """Whether an option of pytest-benchmark was given that is about its output."""
    selecting = (
        "--benchmark-only",
        "--benchmark-disable",
        "--benchmark-skip",
        "--benchmark-enable",
    )
    return any(
        argument.startswith("--benchmark-") and argument not in selecting
        for argument in config.invocation_params.args
    )


def _way_on(state: State, skipped: bool) -> list[str]:
    """Where everything was written, and what to do with it."""
    lines = []
    if not state.results.finished:
        again = f"--resume {_typed(state.folder)} goes on where it ended."
        if state.model:
            again = f"twinbench try {_typed(state.model.file.path)} {again}"
        lines += ["The run is not finished; what was measured is kept.", again]
    if skipped:
        lines.append("Skipped items have no times of steps; the report has what was measured.")
    places = [state.folder / name for name in ("results.json", *FORMATS.values())]
    lines += [str(path) for path in places if path.exists()]
    folder = _typed(state.folder)
    lines.append(f"All rows: twinbench choose {folder} --all")
    lines.append(f"All tables: twinbench report {folder} --format terminal")
    return lines


def _typed(path: Path) -> str:
    """A path as it is typed in a command, from here where there is a way."""
    with contextlib.suppress(ValueError):  # on Windows there is none to another drive
        path = os.path.relpath(path)
    return shlex.quote(str(path))
