"""Resident memory and its peaks, and what the allocator keeps, in processes of their own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.harness import machine, memory

ROOT = Path(__file__).resolve().parents[2]
SIZE = 50_000_000
pytestmark = pytest.mark.timeout(60)
linux = pytest.mark.skipif(sys.platform != "linux", reason="figures of the Linux kernel")
glibc = pytest.mark.skipif(
    sys.platform != "linux" or not os.confstr("CS_GNU_LIBC_VERSION"), reason="settings of glibc"
)


def answer(program, allocator="as installed"):
    """What `program` prints as JSON in a process of its own."""
    environment = machine.process_environment(threads=1, flavour=None, allocator=allocator)
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        check=True,
        timeout=50,
    )
    return json.loads(done.stdout)


PHASES = f"""
import json
import numpy as np
from bench.harness import memory
start = memory.resident()
resets = [memory.reset_peak()]
kept = np.ones({SIZE}, np.uint8)
held = memory.resident()
for _ in range(3):
    passing = np.ones(2 * {SIZE}, np.uint8)
    del passing
peak = memory.peak()
resets.append(memory.reset_peak())
quiet = memory.peak()
del kept
resets.append(memory.reset_peak())
print(json.dumps(dict(
    resets=resets, held=held - start, peak=peak - start, quiet=quiet - start,
    after=memory.peak() - start,
)))
"""


FORKED = f"""
import json, mmap, os, tempfile
import numpy as np
from bench.harness import memory
with tempfile.TemporaryFile() as file:
    file.write(bytes({SIZE}))
    file.flush()
    mapped = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
mapped[::4096].sum()
before, (end, other) = memory.resident(), os.pipe()
if not os.fork():
    inherited = memory.resident()
    done = memory.adopt_pages(os.getppid())
    adopted = memory.resident()
    mapped[::4096].sum()
    found = dict(done=done, before=before, inherited=inherited, adopted=adopted)
    os.write(other, json.dumps(found | dict(used=memory.resident())).encode())
    os._exit(0)
print(os.read(end, 4096).decode())
"""


@linux
def test_a_fork_that_adopts_its_parent_s_pages_is_as_large_and_stays_so():
    """Without it the pages of files, such as libraries, would count when they are touched."""
    found = answer(FORKED)
    assert found["done"]
    assert found["inherited"] < found["before"] - SIZE / 2
    assert abs(found["adopted"] - found["before"]) < SIZE / 20
    assert found["used"] - found["adopted"] < SIZE / 50


@linux
def test_each_phase_has_a_peak_of_its_own():
    found = answer(PHASES)
    assert found["resets"] == [True, True, True]
    assert found["held"] == pytest.approx(SIZE, rel=0.1)
    assert found["peak"] == pytest.approx(3 * SIZE, rel=0.1)  # passed, and was seen
    assert found["quiet"] == pytest.approx(SIZE, rel=0.1)  # set back to what is held
    assert abs(found["after"]) < 0.1 * SIZE


@linux
def test_a_peak_is_at_least_what_is_resident():
    assert memory.peak() >= memory.resident() - (1 << 20) > 0


def test_where_the_kernel_says_nothing_there_is_no_figure(monkeypatch, tmp_path):
    monkeypatch.setattr(memory, "_STATUS", tmp_path / "missing")
    monkeypatch.setattr(memory, "_CLEAR", tmp_path / "missing" / "clear_refs")
    assert memory.resident() is None
    assert memory.peak() is None
    assert memory.reset_peak() is False
    assert memory.keeps_freed_memory() is None


KEEPS = "import json; from bench.harness import memory; print(json.dumps({}))"


@glibc
@pytest.mark.parametrize(("allocator", "keeps"), [("tuned", True), ("as installed", False)])
def test_the_tuned_allocator_keeps_what_is_freed(allocator, keeps):
    assert answer(KEEPS.format("memory.keeps_freed_memory()"), allocator) is keeps


@glibc
def test_the_question_itself_leaves_nothing_behind():
    program = KEEPS.format(
        "[memory.resident(), memory.keeps_freed_memory(), memory.keeps_freed_memory(),"
        " memory.resident()]"
    )
    before, *_, after = answer(program)
    assert after - before < 8 << 20


def test_settings_of_the_user_do_not_leak_into_the_plain_allocator(monkeypatch):
    for name in machine.TUNED_ALLOCATOR:
        monkeypatch.setenv(name, "1")
    plain = machine.process_environment(threads=1, flavour=None, allocator="as installed")
    assert not machine.TUNED_ALLOCATOR.keys() & plain.keys()
    tuned = machine.process_environment(threads=1, flavour=None, allocator="tuned")
    assert machine.TUNED_ALLOCATOR.items() <= tuned.items()


def test_threads_and_flavour_are_set_before_the_import():
    found = machine.process_environment(threads=3, flavour="tf_keras", allocator="tuned")
    assert {found[name] for name in machine.THREAD_VARIABLES} == {"3"}
    assert found["TF_USE_LEGACY_KERAS"] == "1"
    other = machine.process_environment(threads=3, flavour="keras3", allocator="tuned")
    assert other["TF_USE_LEGACY_KERAS"] == "0"


# Threads that may be used -----------------------------------------------------------------------


@linux
def test_threads_respect_affinity():
    core = min(os.sched_getaffinity(0))
    program = (
        f"import json, os; os.sched_setaffinity(0, {{{core}}}); "
        "from bench.harness import machine; print(json.dumps(machine.usable_threads()))"
    )
    assert answer(program) == 1


def test_the_machine_is_described(monkeypatch):
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    found = machine.describe(threads=2)
    assert found.isa_limits == {"ONEDNN_MAX_CPU_ISA": "AVX2"}
    assert found.threads == 2
    assert found.cpu
    assert found.memory_bytes > 1 << 29
    assert found.logical_cores >= 1
    assert found.packages["bench"]["numpy"]


SHARED = """
import json, os
from multiprocessing import Pipe, get_context, shared_memory
import numpy as np
from bench.harness import memory

def hold(ours, theirs):
    theirs.close()
    array = np.frombuffer(block.buf, np.uint8)
    seen = int(array.sum())  # touches every page
    ours.send(seen)
    ours.recv()
    os._exit(0)

before = memory.proportional([os.getpid()])
block = shared_memory.SharedMemory(create=True, size=50_000_000)
np.frombuffer(block.buf, np.uint8)[:] = 1
alone = memory.proportional([os.getpid()])
pipe, theirs = Pipe()
child = get_context("fork").Process(target=hold, args=(theirs, pipe))
child.start()
pipe.recv()
both = memory.proportional([os.getpid(), child.pid])
half = memory.proportional([os.getpid()])
pipe.send(None)
child.join()
gone = memory.proportional([os.getpid(), child.pid])
block.unlink()
print(json.dumps([figure - before for figure in (alone, both, half, gone)]))
os._exit(0)
"""


@linux
@pytest.mark.alone  # what others map of its libraries is shared, too
def test_shared_pages_count_once_among_processes():
    alone, both, half, gone = answer(SHARED)
    assert alone == pytest.approx(SIZE, rel=0.1)
    assert both == pytest.approx(SIZE, rel=0.3)  # the child has some pages of its own
    assert half < 0.7 * SIZE
    assert gone == pytest.approx(SIZE, rel=0.1)
