"""Threads and memory are those that the groups of a process allow, on made-up trees and live."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from math import inf

import psutil
import pytest

from bench.harness import machine
from shared import cgroups
from tests.workers import ROOT

MIB = 1 << 20


@pytest.fixture
def tree(monkeypatch, tmp_path):
    """Write the groups of a process: what /proc says, and files by their places below the mount."""

    def write(own: str, files: dict[str, str]) -> None:
        monkeypatch.setattr(cgroups, "MOUNT", tmp_path / "mount")
        monkeypatch.setattr(cgroups, "OWN", tmp_path / "own")
        (tmp_path / "own").write_text(own)
        for name, text in files.items():
            path = tmp_path / "mount" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    return write


NEW, OLD = "0::/slice/job\n", "4:memory:/docker/1\n1:cpu,cpuacct:/docker/1\n0::/\n"


@pytest.mark.parametrize(
    ("own", "files", "cores"),
    [
        (NEW, {}, inf),
        (NEW, {"slice/job/cpu.max": "max 100000\n"}, inf),
        (NEW, {"slice/job/cpu.max": "50000 100000\n"}, 0.5),
        (NEW, {"slice/job/cpu.max": "max 100000", "slice/cpu.max": "250000 100000"}, 2.5),
        (NEW, {"cpu.max": "150000 100000"}, 1.5),  # a container: its group is the mount
        (NEW, {"elsewhere/cpu.max": "50000 100000"}, inf),
        (OLD, {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, inf),
        (OLD, {"cpu/cpu.cfs_quota_us": "75000", "cpu/cpu.cfs_period_us": "50000"}, 1.5),
        (
            OLD,
            {
                "cpu/docker/1/cpu.cfs_quota_us": "300000",
                "cpu/docker/1/cpu.cfs_period_us": "100000",
            },
            3.0,
        ),
    ],
)
def test_the_quota_is_the_least_of_all_groups(tree, monkeypatch, own, files, cores):
    tree(own, files)
    assert cgroups.cpu_quota() == cores
    monkeypatch.setattr(cgroups.os, "sched_getaffinity", lambda _: set(range(64)), raising=False)
    assert machine.usable_threads() == (64 if cores == inf else max(1, int(cores)))


@pytest.mark.parametrize(
    ("own", "files", "free"),
    [
        (NEW, {}, inf),
        (NEW, {"slice/job/memory.max": "max", "slice/job/memory.current": "5"}, inf),
        (
            NEW,
            {
                "slice/job/memory.max": f"{100 * MIB}",
                "slice/job/memory.current": f"{90 * MIB}",
                "slice/job/memory.stat": f"anon 7\ninactive_file {30 * MIB}\nactive_file 9",
            },
            40 * MIB,
        ),
        (
            OLD,
            {
                "memory/docker/1/memory.limit_in_bytes": f"{100 * MIB}",
                "memory/docker/1/memory.usage_in_bytes": f"{120 * MIB}",
                "memory/docker/1/memory.stat": f"inactive_file 1\ntotal_inactive_file {5 * MIB}",
            },
            0,
        ),
    ],
)
def test_free_memory_counts_what_the_system_would_take_back(tree, own, files, free):
    tree(own, files)
    assert cgroups.free_memory() == free
    system = psutil.virtual_memory().total
    assert machine.free_memory() <= min(free, system)


def test_elsewhere_nothing_is_limited(monkeypatch, tmp_path):
    monkeypatch.setattr(cgroups, "OWN", tmp_path / "nothing")
    assert cgroups.cpu_quota() == cgroups.free_memory() == inf


@pytest.fixture
def half_a_core():
    """A group of this machine's with a quota of half a core, gone after the test."""
    outer = cgroups.divisible()
    if outer is None:
        pytest.skip("no control group can be made here")
    group = outer / f"twinbench-test-{os.getpid()}"
    group.mkdir()
    try:
        cgroups.set_quota(group, 0.5)
        yield group
    finally:
        group.rmdir()


def printed(group, program):
    """What a program prints, as JSON, that runs in the group."""
    command = 'echo $$ > "$1/cgroup.procs" && exec "$2" -c "$3"'
    done = subprocess.run(
        ["sh", "-c", command, "sh", str(group), sys.executable, program],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)


def test_a_process_in_a_group_with_a_quota_sees_it(half_a_core):
    program = (
        "import json; from bench.harness import machine; from shared import cgroups; "
        "print(json.dumps([cgroups.cpu_quota(), machine.usable_threads()]))"
    )
    assert printed(half_a_core, program) == [0.5, 1]


def test_the_class_of_a_machine_has_the_quota(half_a_core):
    program = (
        "import json; from bench.analysis.machine_class import words; from bench.harness import "
        "machine; print(json.dumps(words(machine.describe(machine.usable_threads()))))"
    )
    assert "at most 0.5 cores by quota" in printed(half_a_core, program)
