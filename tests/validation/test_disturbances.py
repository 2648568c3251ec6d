"""Disturbances: neighbours that really disturb and really end, and verdicts that are held to."""

import contextlib
import os
import threading
import time
from math import log
from pathlib import Path

import psutil
import pytest

from bench.harness import machine
from bench.validation import command, disturbances, neighbours
from bench.validation.disturbances import Disturbed, judged
from shared import cgroups

pytestmark = pytest.mark.timeout(120)


def blocks(*ratios: tuple[float, float]) -> list[dict[str, float]]:
    """Blocks of which the pair of equal work, and that of 10% more, have these ratios."""
    return [{"same0": 0.0, "same1": log(equal), "slow10_0": log(more)} for equal, more in ratios]


def test_true_verdicts_are_none_that_is_wrong():
    pairs = judged("nobody", "pt", blocks((1.0, 1.1), (1.001, 1.101), (0.999, 1.099)))
    assert [pair.verdict for pair in pairs] == ["equivalent", "slower"]
    assert not any(pair.wrong for pair in pairs)


@pytest.mark.parametrize(
    ("ratios", "wrong"),
    [
        (((1.1, 1.1), (1.101, 1.101), (1.099, 1.099)), [True, False]),
        (((0.9, 1.1), (0.901, 1.101), (0.899, 1.099)), [True, False]),
        (((1.0, 1.0), (1.001, 1.001), (0.999, 0.999)), [False, True]),
        (((1.0, 0.9), (1.001, 0.901), (0.999, 0.899)), [False, True]),
        (((0.7, 0.8), (1.3, 1.4), (1.0, 1.1)), [False, False]),  # it can't tell
    ],
)
def test_a_verdict_that_is_not_true_is_wrong(ratios, wrong):
    pairs = judged("cores", "pt", blocks(*ratios))
    assert [pair.wrong for pair in pairs] == wrong
    assert ["WRONG" in str(pair) for pair in pairs] == wrong


def test_what_could_not_be_measured_says_why_and_is_not_wrong():
    for pair in judged("disk", "tf", [], "timeout: no answer", 0.4):
        assert pair.reason == "could not be measured: timeout: no answer"
        assert not pair.wrong
        assert "others had 40% of the cores" in str(pair)


@pytest.mark.alone
@pytest.mark.parametrize("program", [name for name in neighbours.PROGRAMS if name != "memory"])
def test_a_neighbour_works_until_it_is_ended(program):
    watch = machine.Watch()
    with disturbances.neighbours(program, 2) as pids:
        started = [psutil.Process(pid) for pid in pids]
        assert len(started) == 2
        deadline = time.monotonic() + 30
        while min(sum(c.cpu_times()[:2]) + io_of(c) for c in started) < 0.5:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        taken = watch.stop()
    assert not psutil.wait_procs(started, timeout=20)[1]
    if taken.others is not None and program != "disk":  # which waits
        cores = len(os.sched_getaffinity(0))
        assert taken.others * cores * taken.seconds > 0.8  # two burned half a second each


def io_of(process: psutil.Process) -> float:
    """Half a gigabyte is worth half a second."""
    return process.io_counters().write_bytes / 1e9


def test_memory_is_taken_up_to_a_rest_and_given_back(monkeypatch):
    """Of a machine with little, since it takes what there is."""
    left, seen, place = [600], [], Path("/proc/self/oom_score_adj")
    before = place.read_text() if place.exists() else None
    monkeypatch.setattr(neighbours, "REST", 100)
    monkeypatch.setattr(neighbours, "CHUNK", 80)
    monkeypatch.setattr(neighbours.Path, "write_text", lambda *_: None)

    def free():
        seen.append(left[0])
        left[0] -= 80  # what is taken now
        return seen[-1]

    def pause(seconds):
        left[0] = 600
        if len(seen) > 12:
            raise KeyboardInterrupt

    monkeypatch.setattr(neighbours.machine, "free_memory", free)
    monkeypatch.setattr(neighbours.time, "sleep", pause)
    with pytest.raises(KeyboardInterrupt):
        neighbours.memory()
    once = [600, 520, 440, 360, 280, 200, 120]  # above a rest of 100 and a chunk of 80, but for one
    assert seen == [*once, *once]
    assert before == (place.read_text() if place.exists() else None)


@pytest.fixture
def cores(tmp_path, monkeypatch):
    """Two cores whose clock may be set."""
    for core in range(2):
        folder = tmp_path / f"policy{core}"
        folder.mkdir()
        (folder / "scaling_max_freq").write_text("3000000")
        (folder / "cpuinfo_min_freq").write_text("800000")
    monkeypatch.setattr(disturbances, "CLOCKS", tmp_path)
    return tmp_path


def test_the_clock_is_lowered_and_let_go(cores, monkeypatch):
    monkeypatch.setattr(disturbances, "EVERY_S", 0.05)
    monkeypatch.setattr(disturbances, "STOPPED_S", 0.05)
    seen = set()
    with disturbances.kinds()["clock"]():
        deadline = time.monotonic() + 20
        while len(seen) < 2:
            assert time.monotonic() < deadline
            seen |= {file.read_text() for file in cores.glob("*/scaling_max_freq")} - {""}
    assert seen == {"3000000", "800000"}
    assert {file.read_text() for file in cores.glob("*/scaling_max_freq")} == {"3000000"}


def test_a_clock_that_may_not_be_set_is_no_kind(cores):
    for file in cores.glob("*/scaling_max_freq"):
        file.unlink()
    assert "clock" not in disturbances.kinds()


@contextlib.contextmanager
def sleeper():
    """A worker that does nothing."""
    process = psutil.Popen(["sleep", "600"])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def in_a_group(process: psutil.Process) -> bool:
    return "/twinbench-" in Path(f"/proc/{process.pid}/cgroup").read_text()


@pytest.mark.alone
@pytest.mark.parametrize(
    ("kind", "struck"),
    [
        ("stopped", lambda p: p.status() == psutil.STATUS_STOPPED),
        pytest.param(
            "cores taken",
            lambda p: len(os.sched_getaffinity(p.pid)) == 1,
            marks=pytest.mark.skipif(os.cpu_count() < 2, reason="one core"),
        ),
        pytest.param(
            "quota",
            in_a_group,
            marks=pytest.mark.skipif(not cgroups.divisible(), reason="no group can be made here"),
        ),
    ],
)
def test_workers_are_struck_and_let_go(kind, struck, monkeypatch):
    monkeypatch.setattr(disturbances, "EVERY_S", 0.1)
    monkeypatch.setattr(disturbances, "STOPPED_S", 0.3)
    threads = threading.active_count()
    with sleeper() as process:
        mine = len(os.sched_getaffinity(0))
        with disturbances.kinds()[kind]():
            deadline = time.monotonic() + 20
            while not struck(process):
                assert time.monotonic() < deadline
                time.sleep(0.01)
        assert process.status() != psutil.STATUS_STOPPED
        assert len(os.sched_getaffinity(process.pid)) == mine
        assert not in_a_group(process)
    assert threading.active_count() <= threads


@pytest.mark.alone
@pytest.mark.campaign
def test_a_disturbed_run_judges_its_pairs(results_folder, fakes, capsys):
    """With the NumPy kit: whole from the command to its lines, and nobody left."""
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    options = ["--framework", "pt", "--kinds", "one core", "--results", str(results_folder)]
    status = command.main(["disturbances", *options])
    *lines, last = capsys.readouterr().out.splitlines()
    assert [line.split(" pt ")[1].split(":")[0][:10] for line in lines] == [
        f"{name:10}" for name in disturbances.PAIRS
    ]
    assert last.startswith("2 disturbed pairs: ")
    assert status == any("WRONG" in line for line in lines)
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before


@pytest.fixture
def disturb(monkeypatch, tmp_path):
    """Run the command where each disturbed run is judged so; returns the exit status."""
    kinds = {"cores": contextlib.nullcontext}
    monkeypatch.setattr(disturbances, "kinds", lambda: kinds)

    def run(pairs, *options):
        monkeypatch.setattr(disturbances, "disturbed", lambda *_: pairs)
        return command.main(["disturbances", "--results", str(tmp_path), *options])

    return run


def test_a_wrong_verdict_is_the_exit_status(disturb, capsys):
    pair = Disturbed("cores", "pt", "equal work", 1.2, (1.1, 1.3), "slower", None)
    assert disturb([pair], "--framework", "pt") == 1
    assert "1 with a verdict, 1 of them wrong" in capsys.readouterr().out


def test_the_verdicts_are_kept_and_shown(disturb, page):
    cores = Disturbed("cores", "pt", "equal work", 1.2, (1.1, 1.3), "slower", None)
    why = "could not be measured: timeout"
    more = [
        Disturbed("cores", "pt", "10% more", 1.1, (0.9, 1.3), None, 0.4),
        Disturbed("disk", "tf", "equal work", None, None, None, None, why),
    ]
    disturb([cores, *more], "--publish")
    assert "2 of 2 verdicts were wrong" in page()
    assert "| cores | PyTorch | 2 slower | 2 can't tell | 2 |" in page()
    assert "| disk | TensorFlow | 2 could not be measured: timeout |  | 0 |" in page()
    # One kind alone takes the place of what was kept of it.
    right = Disturbed("cores", "pt", "equal work", 1.0, (0.9, 1.1), "inconclusive", None)
    assert disturb([right], "--kinds", "cores", "--publish") == 0
    assert "0 of 2 verdicts were wrong" in page()
    assert "| cores | PyTorch | 2 inconclusive |" in page()
    assert "| disk | TensorFlow |" in page()
