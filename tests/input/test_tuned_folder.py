"""Tuned input pipelines: what is lent is guarded, and an interrupted run leaves nothing behind.

That they give the samples that all loaders give is tested in `test_folder.py`.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import pickle
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import numpy as np
import psutil
import pytest

from bench.input.bench_tuned_folder import probe
from shared import parallel
from tests.input.pipelines import (
    RESUMED,
    Epoch,
    array,
    assert_ends_with_its_processes,
    assert_gone,
    children,
    shared_memory,
    taken,
)
from tests.network.namespaces import refusal
from tests.workers import ROOT

FRAMEWORKS = ("pt", "tf")
PT, TF = pytest.mark.only("pt"), pytest.mark.only("tf")
in_processes = pytest.mark.parametrize("name", ["parallel", "uint8", "tuned"])
permitted = pytest.mark.skipif(refusal() is not None, reason=f"no namespaces: {refusal()}")
linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc and /dev/shm")


# The service ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def service(folders, tmp_path_factory):
    """What a process found that has tf.data's service, in a network where it can."""
    out = tmp_path_factory.mktemp("service") / "found"
    words = map(str, ("-m", "tests.input.service_worker", folders.good, folders.bad, out))
    parallel.run([([sys.executable, *words], parallel.environment(2))], out_of_reach=True)
    return pickle.loads(out.read_bytes())


@TF
def test_tf_a_service_makes_the_batches_of_the_tuned_loader(load, folders, service):
    """With one worker in its order, and an epoch that was left; with two each of them once."""
    tuned = load("tuned", folders.good)
    epochs = [taken(tuned), taken(tuned)]
    assert [Epoch(*found) for found in service["1 workers"]] == epochs
    assert Epoch(*service["resumed"]) == taken(load("tuned", folders.good, start_batch=RESUMED))
    assert Epoch(*service["after a break"]) == epochs[1]
    for found, epoch in zip(service["2 workers"], epochs, strict=True):
        batches = [sorted(x.tobytes() for x in images) for images in (found[0], epoch.images)]
        assert batches[0] == batches[1]


@TF
def test_tf_what_a_service_cannot_do_is_one_clear_line(service):
    nobody = "ValueError: no tf.data service answers at "
    assert service["nobody"].startswith(f"{nobody}'grpc://localh")
    assert service["no address"].startswith(f"{nobody}'localhost'")
    assert service["damaged"].startswith("ValueError: the service can't make a batch: ")
    assert not [line for line in service.values() if isinstance(line, str) and "\n" in line]


@TF
@permitted
def test_tf_nobody_outside_reaches_the_servers_of_these_tests(service):
    assert service["interfaces"] == ["lo"]


def test_threads_alone_are_refused_where_every_loader_has_them():
    framework = SimpleNamespace(__name__="tf_impl")
    work = SimpleNamespace(settings={"loader": "threads"})
    with pytest.raises(NotImplementedError, match=r"tf\.data's workers are always threads"):
        probe(framework, work, ())


# The ring ---------------------------------------------------------------------------------------


def wait_until_idle(pause=0.005, limit=10):
    """Return when no worker has anything left to write: all of them sleep, look after look."""
    deadline, looks = time.monotonic() + limit, 0
    while looks < 5:
        if time.monotonic() > deadline:
            raise TimeoutError(f"workers were still busy after {limit} s")
        time.sleep(pause)
        idle = all(child.status() == psutil.STATUS_SLEEPING for child in children())
        looks = looks + 1 if idle else 0


@pytest.fixture
def ring(load, folders):
    """The tuned loader of one image at a time."""
    return load("tuned", folders.good, batch_size=1)


@PT
def test_pt_a_batch_is_valid_until_the_next_but_one_is_asked_for(ring):
    previous = None
    for x, _ in ring:
        wait_until_idle()  # so that a worker that would write to it has done so
        assert previous is None or np.array_equal(array(previous[0]), previous[1])
        previous = x, array(x)


@PT
@pytest.mark.parametrize("part", [lambda x: x, lambda x: x[0, 1, 5]])
def test_pt_a_batch_that_is_kept_is_not_overwritten(ring, part):
    message = r"^a batch of tuned_loader is still in use two batches.*copy what you keep \(x\.clone"
    with pytest.raises(RuntimeError, match=message):
        kept = [part(x) for x, _ in ring]  # noqa: F841 - it is what is tested


@PT
def test_pt_a_copy_may_be_kept(ring):
    assert len([x.clone() for x, _ in ring]) == 13


@PT
def test_pt_an_epoch_after_one_that_was_left_is_whole_and_right(load, folders, ring):
    """Although workers were under way, and the last batch was still held."""
    for number, (x, _) in enumerate(ring):  # noqa: B007 - x is held
        if number == 5:
            break
    held, batches = array(x), iter(ring)
    first, _ = next(batches)
    wait_until_idle()
    assert np.array_equal(held, array(x))
    found = [array(first)]
    del x, first
    found += taken(batches).images
    expected = taken(load("threads", folders.good, batch_size=1, start_batch=13))
    assert all(map(np.array_equal, found, expected.images))
    assert len(found) == 13


# What is left -----------------------------------------------------------------------------------


@linux
@PT
@in_processes
def test_pt_workers_end_with_their_loader(load, folders, name):
    assert_ends_with_its_processes(lambda: load(name, folders.good))
    others, made = children(), load(name, folders.good)
    with pytest.raises(ZeroDivisionError):
        [1 / 0 for _ in made]
    workers = children(others)
    del made
    gc.collect()
    assert_gone(workers)


def kill_one(loader, others, workers):
    """Kill a worker, no process of others, in an epoch, and go on, epoch after epoch."""
    for _ in range(20):
        for number, _ in enumerate(loader):
            if number == 1 and not workers:
                workers += children(others)
                os.kill(workers[0].pid, signal.SIGKILL)


@linux
@PT
@in_processes
def test_pt_a_killed_worker_is_an_error_and_no_hang(load, folders, name):
    """And no shared memory is left."""
    before, others, start, workers = shared_memory(), children(), time.monotonic(), []
    made = load(name, folders.good)
    # Where batches move, the connection that one came through may be the first to break.
    message = r"DataLoader worker \(pid" + ("" if name == "tuned" else "|DataLoader worker ended")
    with pytest.raises(RuntimeError, match=message):
        kill_one(made, others, workers)
    with contextlib.suppress(RuntimeError):  # torch's own, at every signal of a child until then
        del made
        gc.collect()
    assert time.monotonic() - start < 120  # beside other work, too; a hang would not end
    assert_gone(workers)
    # torch makes a file and unlinks it in the next line: one kill of twenty comes in between, and
    # nobody else knows of that one.
    torn = f"torch_{workers[0].pid}_"
    assert not [file for file in shared_memory() - before if not file.startswith(torn)]


@linux
@PT
@pytest.mark.parametrize("error", [EOFError, ConnectionResetError, ConnectionRefusedError])
def test_pt_what_breaks_as_a_dying_worker_hands_over_a_batch_is_one_error(impl, error):
    """Each was seen after a kill."""
    import torch

    from pt_impl.kit.photos import PhotoLoader

    def batches():
        yield torch.zeros(1), [0], []
        raise error

    with pytest.raises(RuntimeError, match="DataLoader worker ended while it handed over"):
        list(PhotoLoader(batches(), "raise"))


@linux
@PT
def test_pt_workers_of_a_killed_process_end_by_themselves(load, folders):
    """And leave no shared memory; torch's workers look for their parent every 5 s."""
    before = shared_memory()
    command = [sys.executable, "-m", "tests.input.abandoned_loaders", folders.good]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, cwd=ROOT, text=True, **pipes) as main:
        try:
            workers = [psutil.Process(pid) for pid in json.loads(main.stdout.readline())]
        finally:
            main.kill()
    assert len(workers) == 6
    assert_gone(workers, seconds=30)
    deadline = time.monotonic() + 5
    while shared_memory() - before and time.monotonic() < deadline:
        time.sleep(0.1)
    assert shared_memory() <= before
