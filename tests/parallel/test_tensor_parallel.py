"""Tensor parallel and hybrid: equal work, weights that are really split, errors, nothing left.

Each framework runs in a process of its own (`model_parallel_worker.py`), PyTorch's parts in more.
"""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

import pytest

from shared.specs import TASKS, parameter_shapes
from tests.input import pipelines
from tests.kit import parity
from tests.parallel.model_parallel_models import weights
from tests.parallel.model_parallel_worker import RUNS, STEPS

SIDES = ("pt", "tf")
BARS = {"cnn": 1e-5, "mixed": 1e-5, "gpt": 1e-4}
MODELS = {name: run[0] for name, run in RUNS["tensor"].items()}
PARTS = {"cnn": 2, "mixed hybrid": 4, "gpt hybrid": 4}
SHARDS = 2


@functools.cache
def evidence() -> dict:
    """What both workers found, which run at the same time. Once a session."""
    with tempfile.TemporaryDirectory() as folder:
        return pipelines.run_workers(
            "parallel.model_parallel_worker", Path(folder), "tensor", folder
        )


def scenario(side: str, name: str) -> dict:
    return pipelines.scenario(evidence(), side, name)


def arrays(side: str, run: str) -> dict:
    scenario(side, "alone"), scenario(side, "together")
    every, start = evidence()[side]["images"], f"{run}/"
    return {k.removeprefix(start): v for k, v in every.items() if k.startswith(start)}


def sizes(model: str) -> dict[str, int]:
    """Elements of each parameter."""
    if model == "cnn":
        return {name: value.size for name, value in weights(norm=False).items()}
    if model == "mixed":
        found = {"codes": 12 * 8, "numbers.kernel": 6 * 8, "numbers.bias": 8}
        found |= {"up.kernel": 8 * 16, "up.bias": 16, "down.kernel": 16 * 10, "down.bias": 10}
        return found
    shapes = parameter_shapes(TASKS["text-gpt"].model)
    return {name: functools.reduce(int.__mul__, shape, 1) for name, shape in shapes.items()}


def of_a_part(model: str) -> int:
    """Elements that one of two shards holds: half of the pairs, all of the rest."""
    halved = (".up.kernel", ".up.bias", ".down.kernel")
    return sum(
        size // SHARDS if f".{name}".endswith(halved) else size
        for name, size in sizes(model).items()
    )


# Equal work -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize("side", SIDES)
def test_ten_steps_end_at_the_weights_of_one_process(side, name):
    model = MODELS[name]
    alone = arrays(side, f"alone {model}")
    assert len(alone["losses"]) == STEPS
    assert alone["losses"][-1] != alone["losses"][0]
    parity.check(arrays(side, name), alone, BARS[model])


@pytest.mark.parametrize("name", ["cnn", "gpt hybrid"])
def test_both_frameworks_end_at_the_same_weights(name):
    parity.check(arrays("pt", name), arrays("tf", name), BARS[MODELS[name]])


# Parts ------------------------------------------------------------------------------------------


def test_a_process_holds_half_of_each_pair():
    marks = scenario("pt", "together")["cnn"]["marks"]
    assert [mark["elements"] for mark in marks] == [of_a_part("cnn")] * SHARDS
    assert all(mark["momenta"] == mark["elements"] for mark in marks)


@pytest.mark.parametrize("name", ["mixed hybrid", "gpt hybrid"])
def test_in_the_hybrid_replicas_share_what_a_part_holds(name):
    """FSDP2 shards each parameter by its first axis, which may be odd."""
    marks = scenario("pt", "together")[name]["marks"]
    assert len(marks) == PARTS[name]
    assert sum(mark["elements"] for mark in marks) == SHARDS * of_a_part(MODELS[name])
    assert max(mark["elements"] for mark in marks) < 0.7 * of_a_part(MODELS[name])
    assert all(mark["momenta"] == mark["elements"] for mark in marks)


def test_replicas_share_each_block_of_a_pair_by_itself():
    found = scenario("pt", "groups")
    blocks = TASKS["text-gpt"].model.layers
    assert found["gpt"] == [f"block{number}" for number in range(blocks)]
    assert found["one pair"] == ["block1"]


def test_processes_use_the_loopback_interface_alone_and_share_the_threads():
    for run in scenario("pt", "together").values():
        for mark in run["marks"]:
            assert mark["addresses"] == ["127.0.0.1"]
            assert mark["threads"] == 1


@pytest.mark.parametrize("name", PARTS)
def test_a_device_holds_half_of_each_pair_and_of_its_momenta(name):
    (built,) = scenario("tf", "together")[name]["built"]
    assert all(len(set(devices)) == PARTS[name] for devices in built["devices"])
    each = [sum(parts) for parts in zip(*built["elements"], strict=True)]
    assert each == [of_a_part(MODELS[name])] * PARTS[name]
    assert built["momenta"] == built["elements"]


@pytest.mark.parametrize("side", SIDES)
def test_steps_end_one_after_another_on_the_clock_of_the_caller(side):
    for run in scenario(side, "together").values():
        begin, end = run["around"]
        times = [begin, *run["ended"], end]
        assert len(times) == STEPS + 2
        assert times == sorted(times)


# Errors -----------------------------------------------------------------------------------------

SAYS = {
    "steps": "ValueError: 0 steps of 8 from 44 samples, 44 labels",
    "batch": "ValueError: 2 replicas do not divide a batch of 45",
    "labels": "ValueError: 10 steps of 8 from 44 samples, 43 labels",
    "no function": "ValueError: module tests.parallel.model_parallel_models has no function ",
    "no module": "ValueError: build names nowhere, which can't be imported: ",
    "no colon": 'ValueError: build must be "module:function", not ',
    "replicas": "ValueError: 3 replicas do not divide a batch of 8",
    "shards": "ValueError: pairs: up > down: (16, 16) do not go into 3 shards",
    "one shard": "ValueError: pairs: up > down: (16, 16) do not go into 1 shards",
    "pairs": "ValueError: pairs: 'nothing > down' matches [[], ['down']]: ",
    "no pair": "ValueError: pairs: 'up' matches [['up']]: ",
    "uneven": "ValueError: pairs: 'up' matches [['up']]: ",
    "order": "ValueError: pairs: down > up: (10, 8) do not go into 2 shards",
    "convolution": "NotImplementedError: pairs: conv0 is a Conv2",
    "devices": "ValueError: 8 parts need ",
}
REFUSES = {
    "pt": {
        "tied": "NotImplementedError: a parameter is used twice: parts would train copies of it"
    },
    "tf": {},
}


@pytest.mark.parametrize("side", SIDES)
def test_what_does_not_fit_gets_one_clear_line_before_anything_starts(side):
    found = scenario(side, "refused")
    expected = SAYS | REFUSES[side]
    assert found["said"].keys() == expected.keys()
    for name, words in expected.items():
        said = found["said"][name]
        assert said is not None, name
        assert said.startswith(words), said
        assert "\n" not in said
    assert found["started"] == 0


def test_where_a_process_is_killed_the_others_end_and_the_caller_is_told():
    found = scenario("pt", "failing")
    assert "terminated with signal SIGKILL" in found["said"]
    assert found["seconds"] < 60
    assert found["left"] == []


def test_no_process_is_left():
    assert all(run["left"] == [] for run in scenario("pt", "together").values())
