"""Tuned input pipelines: what is lent is guarded, and an interrupted run leaves nothing behind.

That they give the samples that all loaders give is tested in `test_folder.py`.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from types import SimpleNamespace

import psutil
import pytest

from bench.input.bench_tuned_folder import probe
from shared import parallel
from tests.input import pipelines
from tests.input.pipelines import shared_memory
from tests.input.test_folder import scenario
from tests.network.namespaces import refusal
from tests.workers import ROOT

IN_PROCESSES = ("parallel", "uint8", "tuned")
permitted = pytest.mark.skipif(refusal() is not None, reason=f"no namespaces: {refusal()}")
linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc and /dev/shm")


@pytest.fixture(scope="module")
def evidence():
    return pipelines.evidence()


# The service ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def service(evidence, tmp_path_factory):
    """What a process found that has tf.data's service, in a network where it can."""
    out = tmp_path_factory.mktemp("service") / "found.json"
    words = map(str, ("-m", "tests.input.service_worker", evidence.good, evidence.bad, out))
    parallel.run([([sys.executable, *words], parallel.environment(2))], out_of_reach=True)
    return json.loads(out.read_text())


def test_a_service_makes_the_batches_of_the_tuned_loader(evidence, service):
    """With one worker in its order, and an epoch that was left; with two each of them once."""
    tuned = scenario(evidence, "tf", "epochs")
    assert service["1 workers"] == tuned["tuned standard"]
    assert service["resumed"] == tuned["tuned resumed"]
    for made, epoch in zip(service["2 workers"], tuned["tuned standard"], strict=True):
        assert sorted(made["digests"]) == sorted(epoch["digests"])
        assert made["dtypes"] == epoch["dtypes"]


def test_an_epoch_that_a_service_was_left_in_does_not_hold_up_the_next(evidence, service):
    assert service["after a break"] == scenario(evidence, "tf", "epochs")["tuned standard"][1]


def test_what_a_service_cannot_do_is_one_clear_line(service):
    assert service["nobody"].startswith("ValueError: no tf.data service answers at 'grpc://localh")
    assert service["no address"].startswith("ValueError: no tf.data service answers at 'localhost'")
    assert service["damaged"].startswith("ValueError: the service can't make a batch: ")
    assert not [line for line in service.values() if isinstance(line, str) and "\n" in line]


@permitted
def test_nobody_outside_reaches_the_servers_of_these_tests(service):
    assert service["interfaces"] == ["lo"]


# The ring ---------------------------------------------------------------------------------------


def test_a_batch_is_valid_until_the_next_but_one_is_asked_for(evidence):
    valid = scenario(evidence, "pt", "lent")["valid"]
    assert valid == [True] * 12


@pytest.mark.parametrize("what", ["kept", "kept a part"])
def test_a_batch_that_is_kept_is_not_overwritten(evidence, what):
    message = scenario(evidence, "pt", "lent")[what]
    assert message.startswith("RuntimeError: a batch of tuned_loader is still in use two batches")
    assert message.endswith("copy what you keep (x.clone())")


def test_a_copy_may_be_kept(evidence):
    assert scenario(evidence, "pt", "lent")["kept a copy"] is None


def test_an_epoch_after_one_that_was_left_is_whole_and_right(evidence):
    """Although workers were under way, and the last batch was still held."""
    found = scenario(evidence, "pt", "lent")
    assert found["after a break"] == found["expected"]
    assert found["held"]


def test_threads_alone_are_refused_where_every_loader_has_them():
    framework = SimpleNamespace(__name__="tf_impl")
    work = SimpleNamespace(settings={"loader": "threads"})
    with pytest.raises(NotImplementedError, match=r"tf\.data has no other workers than threads"):
        probe(framework, work, ())


# What is left -----------------------------------------------------------------------------------


@linux
@pytest.mark.parametrize("name", IN_PROCESSES)
def test_workers_end_with_their_loader(evidence, name):
    found = scenario(evidence, "pt", "ends")
    assert found[f"{name} left"] == [2, True]
    assert found[f"{name} failed"] == ["ZeroDivisionError: division by zero", True]


@linux
@pytest.mark.parametrize("name", IN_PROCESSES)
def test_a_killed_worker_is_an_error_and_no_hang(evidence, name):
    message, seconds, gone = scenario(evidence, "pt", "ends")[f"{name} killed"]
    # Where batches move, the connection that one came through may be the first to break.
    errors = ("RuntimeError: DataLoader worker (pid", "RuntimeError: DataLoader worker ended")
    assert message.startswith(errors[:1] if name == "tuned" else errors)
    assert seconds < 20
    assert gone


@linux
def test_what_breaks_as_a_dying_worker_hands_over_a_batch_is_one_error(evidence):
    said = scenario(evidence, "pt", "ends")["broken"]
    assert said == ["RuntimeError: DataLoader worker ended while it handed over a batch"] * 3


@linux
def test_no_shared_memory_is_left(evidence):
    assert scenario(evidence, "pt", "ends")["shared memory"] == []


@linux
def test_workers_of_a_killed_process_end_by_themselves(evidence):
    """And leave no shared memory; torch's workers look for their parent every 5 s."""
    before = shared_memory()
    command = [sys.executable, "-m", "tests.input.folder_worker", "victim", evidence.good]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, cwd=ROOT, text=True, **pipes) as main:
        try:
            workers = [psutil.Process(pid) for pid in json.loads(main.stdout.readline())]
        finally:
            main.kill()
    assert len(workers) == 2 * len(IN_PROCESSES)
    _, left = psutil.wait_procs(workers, timeout=30)
    assert left == []
    deadline = time.monotonic() + 5
    while shared_memory() - before and time.monotonic() < deadline:
        time.sleep(0.1)
    assert shared_memory() <= before
