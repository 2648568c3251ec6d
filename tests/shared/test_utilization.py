"""What a program uses: a busy thread is told from an idle one, and NVML's samples come back."""

from __future__ import annotations

import _thread
import ctypes
import itertools
import subprocess
import sys
import threading
import time
import types
from statistics import fmean, pstdev

import pytest

from shared import utilization
from shared.utilization import watch_utilization
from tests.workers import ROOT

BURNED = 0.5  # CPU seconds, however long others keep the core


def burn() -> None:
    end = time.thread_time() + BURNED
    while time.thread_time() < end:
        pass


def named(used, name):
    (thread,) = [thread for thread in used.threads if thread.name == name]
    return thread


def cpu_seconds(used, name) -> float:
    return named(used, name).mean * used.seconds


def test_shares_are_of_all_time_and_of_the_busiest_sample(monkeypatch):
    """Of planted samples: (when, CPU seconds by thread)."""
    planted = [
        (0.0, {1: 5.0, 2: 1.0}),
        (1.0, {1: 5.9, 2: 1.0, 3: 0.5}),
        (2.0, {1: 6.0, 2: 1.1, 3: 0.5}),  # 3 began after the first sample
        (2.1, {1: 6.1, 2: 1.1}),  # too short to tell how busy a thread was at most
    ]
    now = iter([when for when, _ in planted])
    samples = iter([{n: (when, s) for n, s in threads.items()} for when, threads in planted])
    threads = utilization._Threads(interval=1.0)
    monkeypatch.setattr(utilization.time, "perf_counter", lambda: next(now))
    monkeypatch.setattr(utilization, "_cpu_seconds", lambda: next(samples))
    monkeypatch.setattr(utilization, "_system_name", lambda number: f"thread {number}")
    for _ in planted:
        threads.sample()
    assert threads.seconds == 2.1
    figures = [(one.name, one.mean * 2.1, one.most) for one in threads.figures(but=None)]
    assert figures == [
        ("thread 1", pytest.approx(1.1), pytest.approx(0.9)),
        ("thread 3", pytest.approx(0.5), pytest.approx(0.5)),
        ("thread 2", pytest.approx(0.1), pytest.approx(0.1)),
    ]
    assert "thread 1" not in [one.name for one in threads.figures(but=1)]


def test_a_busy_thread_is_told_from_an_idle_one_by_name():
    burned, awake = threading.Event(), threading.Event()

    def work():
        burn()
        burned.set()
        awake.wait()  # what a thread used since the last sample that met it is not known

    busy = threading.Thread(target=work, name="busy one")
    idle = threading.Thread(target=awake.wait, name="idle one")
    idle.start()
    with watch_utilization(interval=0.2) as used:
        busy.start()
        burned.wait()
    awake.set()
    assert cpu_seconds(used, "busy one") == pytest.approx(BURNED, abs=0.05)
    assert named(used, "busy one").mean <= named(used, "busy one").most <= 1.0
    assert cpu_seconds(used, "idle one") < 0.05
    assert used.threads[0].name == "busy one"
    lines = str(used).splitlines()
    assert lines[2].startswith("thread ")
    assert lines[3].split()[:2] == ["busy", "one"]
    assert all(len(line) <= 80 for line in lines)


@pytest.mark.alone
@pytest.mark.campaign
def test_a_hundred_idle_threads_do_not_hide_the_busiest_sample():
    """A sample that waits for the interpreter's lock at each thread takes longer than others."""
    begun, burned, awake = threading.Event(), threading.Event(), threading.Event()

    def work():
        begun.wait()
        burn()
        burned.set()
        awake.wait()

    threading.Thread(target=work, name="busy one").start()
    for _ in range(150):
        threading.Thread(target=awake.wait, daemon=True).start()
    with watch_utilization(interval=0.1) as used:
        begun.set()
        burned.wait()
    awake.set()
    assert cpu_seconds(used, "busy one") == pytest.approx(BURNED, abs=0.06)
    assert named(used, "busy one").mean - 0.06 < named(used, "busy one").most <= 1.0


def test_a_thread_of_a_pool_has_the_systems_name_and_counts_until_it_ends(monkeypatch):
    sample, burned, ended = utilization._Threads.sample, threading.Event(), threading.Event()
    met = threading.Semaphore(0)  # samples that began after it had burned

    def counted(threads):
        after = burned.is_set()
        sample(threads)
        if after:
            met.release()

    def pool():
        ctypes.CDLL(None).prctl(15, b"pool-worker", 0, 0, 0)  # 15: PR_SET_NAME
        burn()
        burned.set()
        met.acquire()
        ended.set()

    monkeypatch.setattr(utilization._Threads, "sample", counted)
    with watch_utilization(interval=0.1) as used:
        _thread.start_new_thread(pool, ())  # which no list of Python's has
        ended.wait()
    assert cpu_seconds(used, "pool-worker") == pytest.approx(BURNED, abs=0.06)


def test_an_interval_of_nothing_is_refused():
    with pytest.raises(ValueError, match="above 0 s, not 0"), watch_utilization(interval=0):
        pass


# GPUs ---------------------------------------------------------------------------------------------


class Driver(types.ModuleType):
    """NVML of a GPU whose figures go up and down, a part of one, and one of the host's memory.

    Of the last two not all is told.
    """

    class NVMLError(Exception):
        pass

    def __init__(self, broken=""):
        super().__init__("pynvml")
        self.broken, self.ended = broken, False
        self.percents, self.sizes = itertools.cycle([10, 90, 50]), itertools.cycle([2, 8, 5])
        self.gave = {"busy": [], "bytes": []}

    def nvmlInit(self):  # noqa: N802
        if self.broken:
            raise self.NVMLError(self.broken)

    def nvmlDeviceGetCount(self):  # noqa: N802
        return 3

    def nvmlDeviceGetHandleByIndex(self, number):  # noqa: N802
        return number

    def nvmlDeviceGetName(self, gpu):  # noqa: N802
        return f"Made-up {gpu}"

    def nvmlDeviceGetUtilizationRates(self, gpu):  # noqa: N802
        if gpu:
            raise self.NVMLError("Not Supported")
        self.gave["busy"].append(next(self.percents))
        return types.SimpleNamespace(gpu=self.gave["busy"][-1], memory=0)

    def nvmlDeviceGetMemoryInfo(self, gpu):  # noqa: N802
        if gpu == 2:
            raise self.NVMLError("Not Supported")
        if gpu == 1:
            return types.SimpleNamespace(used=10**9, total=4 * 10**9, free=3 * 10**9)
        self.gave["bytes"].append(next(self.sizes) * 10**9)
        return types.SimpleNamespace(used=self.gave["bytes"][-1], total=80 * 10**9, free=0)

    def nvmlShutdown(self):  # noqa: N802
        self.ended = True


def watched(monkeypatch, driver, seconds=0.0):
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    with watch_utilization(interval=0.02) as used:
        time.sleep(seconds)
    return used


def test_samples_of_nvml_come_back_as_mean_most_and_bytes(monkeypatch):
    driver = Driver()
    used = watched(monkeypatch, driver, 0.5)
    first, part, hosts = used.gpus
    assert len(driver.gave["busy"]) > 5
    assert first.mean == pytest.approx(fmean(driver.gave["busy"]) / 100)
    assert first.most == 0.9
    assert first.sd == pytest.approx(pstdev(driver.gave["busy"]) / 100)
    assert first.mean_bytes == pytest.approx(fmean(driver.gave["bytes"]))
    assert (first.most_bytes, first.whole_bytes) == (8 * 10**9, 80 * 10**9)
    assert (part.mean, part.most, part.sd, part.most_bytes) == (None, None, None, 10**9)
    assert (hosts.mean_bytes, hosts.most_bytes, hosts.whole_bytes) == (None, None, None)
    assert used.without == ""
    assert driver.ended
    lines = str(used).splitlines()
    assert lines[1].split() == [
        *("0", "Made-up", "0", f"{first.mean:.0%}", "90%"),
        *(f"{first.mean_bytes / 1e9:.2f}", "GB", "8.00", "GB", "80.0", "GB"),
    ]
    assert lines[2].split()[3:5] == ["?", "?"]
    assert lines[3].split()[3:] == ["?", "?", "?", "GB", "?", "GB", "?", "GB"]
    assert all(len(line) <= 80 for line in lines)


@pytest.mark.parametrize(
    ("driver", "reason"),
    [
        (None, "no GPU: nvidia-ml-py is not installed"),
        (Driver("Driver Not Loaded"), "no GPU: NVML says: Driver Not Loaded"),
    ],
)
def test_without_nvml_it_is_said_why_and_threads_are_told(monkeypatch, driver, reason):
    used = watched(monkeypatch, driver)
    assert used.gpus == ()
    assert str(used).startswith(reason)
    assert named(used, "MainThread")


# The command --------------------------------------------------------------------------------------

PROGRAM = """
import sys, threading, time
print(sys.argv, __name__)
def burn():
    end = time.thread_time() + 0.4
    while time.thread_time() < end: pass
thread = threading.Thread(target=burn, name="burning")
thread.start(); thread.join()
sys.exit(sys.argv[1])
"""


def run(*arguments, cwd=ROOT):
    command = [sys.executable, "-m", "shared.utilization", *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True)


def test_a_program_runs_as_it_would_alone_and_is_watched(tmp_path):
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    done = run(path, "7 of 9")
    assert (done.returncode, done.stderr) == (1, "7 of 9\n")
    first, _, *table = done.stdout.splitlines()
    assert first == f"[{str(path)!r}, '7 of 9'] __main__"
    shares = {line.split()[0]: int(line.split()[1].rstrip("%")) for line in table if "%" in line}
    assert shares["burning"] > 2 * shares["MainThread"]
    done = run("-m", "timeit", "-n", "1", "pass")
    assert done.returncode == 0
    assert "1 loop" in done.stdout
    assert "MainThread" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ((), "usage: "),
        (("missing.py",), "missing.py: there is no such program"),
        (("-m", "missing_module"), "missing_module: there is no such program"),
    ],
)
def test_what_is_no_program_is_said_in_a_line(arguments, reason):
    done = run(*arguments)
    assert done.returncode == 1
    assert done.stderr.startswith(reason)
    assert len(done.stderr.splitlines()) == 1
