"""Layer split and pipelines: equal work, stages that are really apart, errors, nothing left behind.

Each framework runs in a process of its own (`model_parallel_worker.py`), PyTorch's stages in more.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from bench.harness.machine import usable_threads
from bench.probes import model_parallel
from bench.probes.model_parallel import Alone, Glance
from shared.specs import TASKS, parameter_count
from tests.input import pipelines
from tests.kit import parity
from tests.parallel.model_parallel_models import weights
from tests.parallel.model_parallel_worker import RUNS, STEPS

SIDES = ("pt", "tf")
BARS = {"cnn": 1e-5, "mixed": 1e-5, "norm": 1e-5, "gpt": 1e-4}
ELEMENTS = {
    "cnn": sum(value.size for value in weights(norm=False).values()),
    "gpt": parameter_count(TASKS["text-gpt"].model),
    "mixed": 12 * 8 + 6 * 8 + 8 + 8 * 16 + 16 + 16 * 10 + 10,
}
STAGES = {"split": 2, "three stages": 3, "1f1b": 2}
MODELS = {name: run[0] for name, run in RUNS["model"].items()}


@functools.cache
def evidence() -> dict:
    """What both workers found, which run at the same time. Once a session."""
    with tempfile.TemporaryDirectory() as folder:
        return pipelines.run_workers("parallel.model_parallel_worker", Path(folder), folder)


def scenario(side: str, name: str) -> dict:
    return pipelines.scenario(evidence(), side, name)


def arrays(side: str, run: str) -> dict:
    scenario(side, "alone"), scenario(side, "together")
    every, start = evidence()[side]["images"], f"{run}/"
    return {k.removeprefix(start): v for k, v in every.items() if k.startswith(start)}


# Equal work -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", STAGES)
@pytest.mark.parametrize("side", SIDES)
def test_ten_steps_end_at_the_weights_of_one_process(side, name):
    model = MODELS[name]
    alone = arrays(side, f"alone {model}")
    assert len(alone["losses"]) == STEPS
    assert alone["losses"][-1] != alone["losses"][0]
    parity.check(arrays(side, f"model {name}"), alone, BARS[model])


@pytest.mark.parametrize("name", [name for name, model in MODELS.items() if model != "mixed"])
def test_both_frameworks_end_at_the_same_weights(name):
    ours, theirs = (arrays(side, f"model {name}") for side in SIDES)
    if MODELS[name] == "norm":  # Keras feeds the running variance with the biased one
        ours, theirs = ({k: v for k, v in d.items() if "variance" not in k} for d in (ours, theirs))
    parity.check(ours, theirs, BARS[MODELS[name]])


@pytest.mark.parametrize("side", SIDES)
def test_batchnorm_sees_a_micro_batch_at_a_time_as_in_gradient_accumulation(side):
    found = arrays(side, "model norm")
    parity.check(found, arrays(side, "alone norm in parts"), BARS["norm"])
    whole = arrays(side, "alone norm")
    assert parity.difference("bn.gamma", found["bn.gamma"], whole["bn.gamma"]) > 1e-3


def test_weights_that_are_drawn_in_each_process_are_those_of_the_seed():
    found = scenario("pt", "drawn")
    alone, together = found["losses"]
    assert together == pytest.approx(alone, rel=1e-5)
    assert found["names"][0] == found["names"][1]


def test_stages_are_given_inputs_by_name_and_place_whichever_the_model_uses_first():
    found = scenario("pt", "ordered")
    assert len(found) == 6
    assert max(found.values()) == 0.0, found


def test_a_process_that_fails_says_why_before_it_leaves_the_others():
    """Whose exchange with it fails at once, in words that say nothing of the reason."""
    said, left = scenario("pt", "failing")
    assert "out of luck" in str(said)
    assert not left


@pytest.mark.parametrize("kind", ["model", "tensor"])
def test_weight_decay_leaves_out_what_the_optimizer_was_told(kind):
    found = scenario("tf", "undecayed")[kind]
    assert found.keys() == {"up/kernel", "up/bias", "down/kernel", "down/bias"}
    assert found["up/bias"] == found["down/bias"] == 1.0


# Stages -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", STAGES)
def test_each_process_has_the_parameters_and_the_optimizer_of_its_stage_alone(name):
    marks = scenario("pt", "together")[f"model {name}"]["marks"]
    assert len(marks) == STAGES[name]
    assert all(mark["elements"] < ELEMENTS[MODELS[name]] for mark in marks)
    empty = sum(mark["elements"] == 0 for mark in marks)
    assert empty == (1 if name == "three stages" else 0)
    assert sum(mark["elements"] for mark in marks) == ELEMENTS[MODELS[name]]
    assert all(mark["momenta"] == mark["elements"] for mark in marks)


def test_processes_use_the_loopback_interface_alone_and_share_the_threads():
    for run in scenario("pt", "together").values():
        for mark in run["marks"]:
            # A socket of both versions of IP shows the loopback of the fourth as mapped.
            assert set(mark["addresses"]) <= {"127.0.0.1", "::ffff:127.0.0.1"}
            assert mark["addresses"]
            assert mark["threads"] == 1


@pytest.mark.parametrize("name", STAGES)
def test_each_device_has_the_variables_and_the_optimizer_of_its_stage_alone(name):
    built = scenario("tf", "together")[f"model {name}"]["built"]
    assert len(built) == STAGES[name]
    for place, stage in enumerate(built):
        devices = {device.rpartition("/")[2] for pair in stage["devices"] for device in pair}
        without = name == "three stages" and place == 1
        assert devices == (set() if without else {f"device:CPU:{place}"})
    assert sum(sum(stage["elements"]) for stage in built) == ELEMENTS[MODELS[name]]


def kept(passed: list, mark: str) -> list[int]:
    """How many micro-batches were past a mark and not yet back, after each that went by."""
    found = [0]
    for name, way in passed:
        if name == mark:
            found.append(found[-1] + (1 if way == "forward" else -1))
    assert found[-1] == 0
    assert len(found) == 1 + 2 * 8
    return found


def test_in_gpipe_all_micro_batches_go_forward_before_one_goes_back():
    passed = scenario("tf", "schedules")["gpipe"]
    assert kept(passed, "second") == [*range(9), *range(7, -1, -1)]
    assert max(kept(passed, "first")) == 8


def test_in_1f1b_a_stage_keeps_no_more_micro_batches_than_there_are_stages_from_it_on():
    passed = scenario("tf", "schedules")["1f1b"]
    assert max(kept(passed, "first")) <= 2
    assert max(kept(passed, "second")) == 1


@pytest.mark.parametrize("side", SIDES)
def test_steps_end_one_after_another_on_the_clock_of_the_caller(side):
    for run in scenario(side, "together").values():
        begin, end = run["around"]
        times = [begin, *run["ended"], end]
        assert len(times) == STEPS + 2
        assert times == sorted(times)


# Errors -----------------------------------------------------------------------------------------

SAYS = {
    "batch": "ValueError: 4 micro_batches do not divide a batch of 6",
    "no micro_batches": "ValueError: 0 micro_batches do not divide a batch of 8",
    "schedule": "ValueError: schedule must be gpipe or 1f1b, not 'zigzag'",
    "too few": "ValueError: 1f1b with 3 stages needs 3 micro_batches or more",
    "cut": "ValueError: cut: there is no ",
    "no cut": "ValueError: cut: there is no ",
    "first": "ValueError: cut: ",
    "twice": "ValueError: cut: ",
}
REFUSES = {
    "pt": {
        "tied": "NotImplementedError: a parameter is used twice: pipelining would train copies",
        "untraceable": "NotImplementedError: torch.export can't trace the model: ",
    },
    "tf": {
        "subclassed": "NotImplementedError: only a functional or Sequential model",
        "clipping": "NotImplementedError: global_clipnorm: a stage would clip by the norm of its ",
        "scaling": "NotImplementedError: a scaled loss: a stage would look for overflow in its ",
        "undecayed_by_variable": "NotImplementedError: exclude_from_weight_decay: variables of ",
        "skipping": "NotImplementedError: cut: up can't be: ",
        "tied": "NotImplementedError: cut: up can't be: ",
        "devices": "ValueError: 6 stages need as many devices, not 4",
    },
}


@pytest.mark.parametrize("side", SIDES)
def test_what_does_not_fit_gets_one_clear_line(side):
    every, start = scenario(side, "refused"), "model "
    found = {k.removeprefix(start): v for k, v in every.items() if k.startswith(start)}
    expected = SAYS | REFUSES[side]
    assert found.keys() == expected.keys()
    for name, words in expected.items():
        assert found[name] is not None, name
        assert found[name].startswith(words), found[name]
        assert "\n" not in found[name]


# What is measured -------------------------------------------------------------------------------


def test_figures_are_those_between_the_end_of_the_first_step_and_of_the_last():
    ended = [10.0, 12.0, 14.0]
    glances = [
        Glance(9.0, 50.0, [900, 900], 7_000),
        Glance(9.9, 51.0, [100, 100], 8_000),
        Glance(11.9, 53.0, [300, 400], 8_600),
        Glance(13.9, 55.0, [500, 100], 9_200),
        Glance(14.1, 60.0, [900, 900], 99_000),
    ]
    found = model_parallel.figures(glances, ended, batch_size=8)
    values = {name: metric["value"] for name, metric in found.items()}
    idle = 100 * max(0.0, 1 - 4.0 / (4.0 * usable_threads()))
    assert values.pop("cores_idle") == pytest.approx(idle)
    assert values == {
        "samples_per_s": 4.0,
        "memory_each": 500,
        "memory_all": 700,
        "sent_bytes": 600.0,
    }


def test_steps_that_nobody_saw_are_an_error():
    with pytest.raises(RuntimeError, match="3 steps took too little time to be looked at"):
        model_parallel.figures([Glance(9.0, 1.0, [1], None)], [10.0, 10.01, 10.02], batch_size=8)


def test_processes_that_are_started_are_looked_at_in_place_of_this_one():
    with model_parallel.watched() as glances:
        child = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(60,))
        child.start()
        deadline = time.monotonic() + 30
        started = []
        while not started and time.monotonic() < deadline:
            time.sleep(0.05)
            started = [each for each in glances if each.resident and each.cpu_s < own_cpu_s()]
        child.kill()
        child.join()
    assert started
    assert all(len(each.resident) == 1 for each in started)


def own_cpu_s() -> float:
    times = os.times()
    return times.user + times.system


@pytest.mark.parametrize(("cores", "threads"), [(6, 6), (1, 2)])
def test_stages_share_the_threads_that_one_process_has(monkeypatch, cores, threads):
    """Which a container's quota cuts, whatever cores there are; one each at least."""
    ran = []

    def launch(make, build, data, run, settings):
        ran.append(run)
        raise RuntimeError("seen")

    data = SimpleNamespace(to_device=lambda *arrays: arrays)
    impl = SimpleNamespace(__name__="impl", kit=SimpleNamespace(data=data))
    monkeypatch.setattr(model_parallel, "usable_threads", lambda: cores)
    monkeypatch.setattr(model_parallel.parallel, "find", lambda name: launch)
    batches, devices = [(np.ones(4), np.ones(4))], {"replicas": 1, "parts": 2}
    with pytest.raises(RuntimeError, match="seen"):
        model_parallel.measure(impl, SimpleNamespace(batch_size=4), batches, "a:b", devices=devices)
    assert ran[0].threads == threads


OFF = 1 + 2 * TASKS["text-gpt"].parity


@pytest.mark.parametrize(
    ("wrong", "off", "said"),
    [
        ("the losses", OFF, "2.0e"),
        ("head.kernel", OFF, "2.0e"),
        ("the losses", np.nan, "nan"),
        ("head.bias", np.nan, "nan"),
    ],
)
def test_a_case_that_does_other_work_fails(wrong, off, said):
    models = SimpleNamespace(to_canonical=lambda name, array: array)
    impl = SimpleNamespace(kit=SimpleNamespace(models=models))
    work = SimpleNamespace(task=TASKS["text-gpt"])
    names = ("head.kernel", "head.bias")
    wanted = Alone({name: np.ones(4) for name in names}, [2.0, 1.0], [0.0, 1.0])
    model_parallel.check(impl, work, wanted, wanted)
    weights = {name: np.ones(4) * (off if wrong == name else 1) for name in names}
    losses = [2.0, off if wrong == "the losses" else 1.0]
    said = f"not the work of one process: {wrong} differ by {said}"
    with pytest.raises(RuntimeError, match=said):
        model_parallel.check(impl, work, Alone(weights, losses, [0.0, 1.0]), wanted)
