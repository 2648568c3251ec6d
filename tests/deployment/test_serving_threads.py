"""Pools follow affinity and quota, instances have threads and processors, and answers are right.

What ran is told by the system: the CPU time of each thread of each process.
"""

from __future__ import annotations

import os
from functools import partial

import numpy as np
import pytest

from shared import cgroups, runtimes, serving
from shared.serving import Server, Setting, candidates
from tests.deployment import pools

FRAMEWORKS = ("pt", "tf")
X = np.random.default_rng(0).normal(size=(512, 512)).astype(np.float32)
AFFINITY = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no affinity here")


def most_that_worked(server, callers, wanted):
    """Threads that did work, until it was as many as are wanted: on a busy machine some wait."""
    counts = [0]
    while max(counts) < wanted and len(counts) < 40:
        (count,) = serving.measure(server, [X], callers=callers, seconds=0.5).threads
        counts.append(count)
    return max(counts)


@AFFINITY
def test_an_affinity_of_one_core_leaves_one_thread():
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        assert cgroups.usable_threads() == 1
    finally:
        os.sched_setaffinity(0, before)


def test_pools_are_sized_by_the_quota_and_instances_have_processors_of_their_own(
    technique, framework, tmp_path, monkeypatch
):
    """The quota of a file as the kernel has it. Each instance uses no more, and does as NumPy."""
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    (tmp_path / "groups").write_text("0::/\n")
    monkeypatch.setattr(cgroups, "MOUNT", tmp_path)
    monkeypatch.setattr(cgroups, "OWN", tmp_path / "groups")
    assert cgroups.usable_threads() == 1
    processes = min(2, len(cgroups.processors()))
    make = partial(pools.make_product, framework)
    with technique.serve(make, X, processes=processes, bind=True) as server:
        assert np.allclose(server(X), X @ X, atol=1e-3)
        started = server.started
        load = serving.measure(server, [X], callers=4, seconds=0.5)
    assert [one["pools"]["intra_op"] for one in started] == [1] * processes
    assert 0 < load.cores < 1.25 * processes
    assert len(load.latencies) == pytest.approx(load.rate * 0.5, rel=0.5)
    if processes < 2 or not hasattr(os, "sched_setaffinity"):
        return
    first, second = (one["processors"] for one in started)
    assert not set(first) & set(second)
    assert len(load.threads) == 2
    assert min(load.threads) >= 1  # both answered


@pytest.mark.only("pt")
def test_pt_every_caller_brings_a_team(technique):
    """Two requests at once on pools of two: four threads did work, in one process."""
    make = partial(pools.make_product, "pt")
    with technique.serve(make, X, at_once=2, threads=2) as server:
        assert most_that_worked(server, callers=2, wanted=4) == 4


@pytest.mark.only("tf")
def test_tf_pools_are_made_once(technique, kit):
    """After the first operation they keep their size."""
    kit.runtime.to_float(kit.data.to_device(X, X)[0][0, 0])
    with pytest.raises(RuntimeError, match="cannot be modified after initialization"):
        technique.size_pools(threads=7)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("loader", ["load_onnx", "load_openvino"])
def test_pools_of_runtimes_have_the_threads_that_are_asked_for(tmp_path, loader, threads):
    """So many did work, and no more; both runtimes read an ONNX file."""
    path = pools.write_product(tmp_path / "product.onnx", size=len(X))
    load = partial(serving.pools_of, partial(getattr(runtimes, loader), path))
    with Server(load, Setting(threads=threads), X) as server:
        assert np.allclose(server(X), X @ X, atol=1e-3)
        assert server.started[0]["pools"] == {"intra_op": threads}
        assert most_that_worked(server, callers=2, wanted=threads) == threads


@pytest.mark.parametrize("cores", [1, 2, 6, 16, 96])
def test_a_search_tries_what_fills_the_cores(cores):
    tried = candidates(cores)
    apart = [one for one in tried if one.at_once == 1]
    assert all(cores / 2 < one.processes * one.threads <= cores for one in apart)
    assert {1, cores} <= {one.processes for one in apart}
    assert len(tried) == len(set(tried)) <= 8


def test_the_best_of_a_search_is_measured_again(monkeypatch):
    """A setting that was lucky once is not the answer."""
    rates = {1: [10.0, 4.0], 2: [9.0, 8.0]}  # by processes: first, again

    def tried(load, setting, samples, callers, seconds):
        return serving.Tried(setting, 0.1, rates[setting.processes].pop(0))

    monkeypatch.setattr(serving, "_try", tried)
    best, other = serving.search(None, [X], callers=1, cores=2, shared=False)
    assert (best.setting.processes, best.rate, other.rate) == (2, 8.0, 4.0)


def test_why_an_instance_fails_is_said():
    with pytest.raises(RuntimeError, match="an instance failed: ValueError: no such model"):
        Server(pools.failing, Setting(), X)
    with pytest.raises(RuntimeError, match="an instance ended: its output says why"):
        Server(pools.ending, Setting(), X)
    with (
        Server(pools.ending_later, Setting(), X) as server,
        pytest.raises(RuntimeError, match="an instance ended: its output says why"),
    ):
        serving.measure(server, [X], callers=3, seconds=0.5)


REFUSALS = [{"threads": -1}, {"inter_op": 0}]


@pytest.mark.parametrize("settings", REFUSALS)
def test_a_refusal_says_why(technique, settings):
    with pytest.raises(ValueError, match="threads are 0 or more and inter_op 1 or more"):
        technique.size_pools(**settings)
