"""Tensor parallel and hybrid: equal work, weights that are really split, errors, nothing left.

Each framework runs in a process of its own (`model_parallel_worker.py`), PyTorch's parts in more.
"""

from __future__ import annotations

import functools

import pytest

from shared.specs import TASKS, parameter_shapes
from tests.kit import parity
from tests.parallel.model_parallel_models import weights
from tests.parallel.model_parallel_worker import RUNS, STEPS
from tests.parallel.test_model_parallel import arrays, scenario

SIDES = ("pt", "tf")
BARS = {"cnn": 1e-5, "mixed": 1e-5, "gpt": 1e-4}
MODELS = {name: run[0] for name, run in RUNS["tensor"].items()}
PARTS = {"cnn": 2, "mixed hybrid": 4, "gpt hybrid": 4}
SHARDS = 2


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
    parity.check(arrays(side, f"tensor {name}"), alone, BARS[model])


@pytest.mark.parametrize("name", ["cnn", "gpt hybrid"])
def test_both_frameworks_end_at_the_same_weights(name):
    pt, tf = (arrays(side, f"tensor {name}") for side in SIDES)
    parity.check(pt, tf, BARS[MODELS[name]])


def test_pt_replicas_with_unequal_parts_of_a_batch_weigh_each_sample_alike():
    found = scenario("pt", "unequal")
    assert found["losses"][0] == pytest.approx(found["losses"][1], rel=1e-6)
    assert found["apart"] < 1e-6


# Parts ------------------------------------------------------------------------------------------


def test_a_process_holds_half_of_each_pair():
    marks = scenario("pt", "together")["tensor cnn"]["marks"]
    assert [mark["elements"] for mark in marks] == [of_a_part("cnn")] * SHARDS
    assert all(mark["momenta"] == mark["elements"] for mark in marks)


@pytest.mark.parametrize("name", ["mixed hybrid", "gpt hybrid"])
def test_in_the_hybrid_replicas_share_what_a_part_holds(name):
    """FSDP2 shards each parameter by its first axis, which may be odd."""
    marks = scenario("pt", "together")[f"tensor {name}"]["marks"]
    assert len(marks) == PARTS[name]
    assert sum(mark["elements"] for mark in marks) == SHARDS * of_a_part(MODELS[name])
    assert max(mark["elements"] for mark in marks) < 0.7 * of_a_part(MODELS[name])
    assert all(mark["momenta"] == mark["elements"] for mark in marks)


def test_replicas_share_each_block_of_a_pair_by_itself():
    found = scenario("pt", "groups")
    blocks = TASKS["text-gpt"].model.layers
    assert found["gpt"] == [f"block{number}" for number in range(blocks)]
    assert found["one pair"] == ["block1"]


@pytest.mark.parametrize("name", PARTS)
def test_a_device_holds_half_of_each_pair_and_of_its_momenta(name):
    (built,) = scenario("tf", "together")[f"tensor {name}"]["built"]
    assert all(len(set(devices)) == PARTS[name] for devices in built["devices"])
    each = [sum(parts) for parts in zip(*built["elements"], strict=True)]
    assert each == [of_a_part(MODELS[name])] * PARTS[name]
    assert built["momenta"] == built["elements"]


# Errors -----------------------------------------------------------------------------------------

SAYS = {
    "shards": "ValueError: pairs: up > down: (16, 16) do not go into 3 shards",
    "one shard": "ValueError: pairs: up > down: (16, 16) do not go into 1 shards",
    "pairs": "ValueError: pairs: 'nothing > down' matches [[], ['down']]: ",
    "no pair": "ValueError: pairs: 'up' matches [['up']]: ",
    "uneven": "ValueError: pairs: 'up' matches [['up']]: ",
    "order": "ValueError: pairs: down > up: (10, 8) do not go into 2 shards",
    "convolution": "NotImplementedError: pairs: conv0 is a Conv2",
}
REFUSES = {
    "pt": {
        "tied": "NotImplementedError: a parameter is used twice: parts would train copies of it"
    },
    "tf": {
        "sparse": "NotImplementedError: on one device Adam squares the sparse gradient of ",
        "scaling": "NotImplementedError: a scaled loss: train in bfloat16",
        "muon": "NotImplementedError: Muon asks for the paths of variables: DTensor's have none",
        "bound": "NotImplementedError: up/kernel has a constraint: variables of DTensor have none",
    },
}


@pytest.mark.parametrize("side", SIDES)
def test_what_does_not_fit_gets_one_clear_line(side):
    every, start = scenario(side, "refused"), "tensor "
    found = {k.removeprefix(start): v for k, v in every.items() if k.startswith(start)}
    expected = SAYS | REFUSES[side]
    assert found.keys() == expected.keys()
    for name, words in expected.items():
        assert found[name] is not None, name
        assert found[name].startswith(words), found[name]
        assert "\n" not in found[name]
