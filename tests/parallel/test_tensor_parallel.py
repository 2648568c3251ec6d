"""Tensor parallel and hybrid: equal work, and devices that hold half of each pair."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from shared.specs import TASKS
from tests.parallel.splitting import (
    SEED,
    assert_biases_do_not_decay,
    assert_local,
    assert_refused,
    assert_work_of_one_process,
    sizes,
)

FRAMEWORKS = ("pt", "tf")
MODELS = "model_parallel"
PT, TF = pytest.mark.only("pt"), pytest.mark.only("tf")
SHARDS = 2
TENSOR, HYBRID = "tensor_parallel:tensor_parallel", "tensor_parallel:hybrid"
RUNS = {  # run -> what makes the step, model, (replicas, shards), settings
    "tensor mixed": (TENSOR, "mixed", (1, SHARDS), {"pairs": "up > down"}),
    "gpt hybrid": (HYBRID, "gpt", (2, SHARDS), {"pairs": "block*.up > block*.down"}),
    "tensor cnn": (TENSOR, "cnn", (1, SHARDS), {"pairs": "up > down"}),
    "mixed hybrid": (HYBRID, "mixed", (2, SHARDS), {"pairs": "up > down"}),
}
# At each change one of tensor parallelism alone, and the hybrid that is measured.
NAMES = [*RUNS][:2] + [pytest.param(n, marks=pytest.mark.campaign) for n in [*RUNS][2:]]


def of_a_part(model):
    """Elements that one of two shards holds: half of the pairs, all of the rest."""
    halved = (".up.kernel", ".up.bias", ".down.kernel")
    each = sizes(model).items()
    return sum(n // SHARDS if f".{name}".endswith(halved) else n for name, n in each)


@pytest.mark.parametrize("name", NAMES)
def test_ten_steps_end_at_the_weights_of_one_process(ran, alone, agrees, name):
    assert_work_of_one_process(ran(name), RUNS[name][1], alone, agrees, name)


@PT
def test_pt_replicas_with_unequal_parts_of_a_batch_weigh_each_sample_alike(models):
    losses, gradients = models.of_unequal_replicas(SEED)
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert np.allclose(*gradients, rtol=0, atol=1e-6)


@TF
def test_tf_weight_decay_leaves_out_what_the_optimizer_was_told(technique, models, train_split):
    split, _, step = technique.tensor_parallel(models.undecayed, pairs="up > down")
    x = models.tensor(np.ones((4, 6), np.float32))
    step(x, x, 4)
    assert_biases_do_not_decay(split.arrays())


@PT
@pytest.mark.parametrize("name", NAMES)
def test_pt_a_process_holds_half_of_each_pair_which_replicas_share(ran, name):
    """FSDP2 shards each parameter by its first axis, which may be odd."""
    marks, (_, model, (replicas, _), _) = ran(name).marks, RUNS[name]
    elements, part = [mark["elements"] for mark in marks], of_a_part(model)
    assert len(elements) == replicas * SHARDS
    assert sum(elements) == SHARDS * part
    assert elements == [part] * 2 if replicas == 1 else max(elements) < 0.7 * part
    assert all(mark["momenta"] == mark["elements"] for mark in marks)


@PT
def test_pt_processes_use_the_loopback_interface_alone_and_share_the_threads(ran):
    assert_local(ran("gpt hybrid").marks)


@PT
def test_pt_replicas_share_each_block_of_a_pair_by_itself(technique, models):
    model, blocks = models.gpt()[0], TASKS["text-gpt"].model.layers
    every = [f"block{number}" for number in range(blocks)]
    for pairs, wanted in (
        ("block*.up > block*.down", every),
        ("block1.up > block1.down", ["block1"]),
    ):
        plan = technique.plan_pairs(model, pairs=pairs)
        found = technique._blocks(model, plan)
        assert [name for name, module in model.named_modules() if module in found] == wanted


@TF
@pytest.mark.parametrize("name", NAMES)
def test_tf_a_device_holds_half_of_each_pair_and_of_its_momenta(ran, name):
    (built,), (_, model, (replicas, _), _) = ran(name).built, RUNS[name]
    assert all(len(set(devices)) == replicas * SHARDS for devices in built["devices"])
    each = [sum(parts) for parts in zip(*built["elements"], strict=True)]
    assert each == [of_a_part(model)] * replicas * SHARDS
    assert built["momenta"] == built["elements"]


PART_REFUSALS = [
    ({"shards": 3}, "pairs: up > down: (16, 16) do not go into 3 shards"),
    ({"shards": 1}, "pairs: up > down: (16, 16) do not go into 1 shards"),
    ({"pairs": "nothing > down"}, "pairs: 'nothing > down' matches [[], ['down']]: "),
    ({"pairs": "up"}, "pairs: 'up' matches [['up']]: "),
    ({"pairs": "up, down > down"}, "pairs: 'up' matches [['up']]: "),
    ({"pairs": "down > up"}, "pairs: down > up: (10, 8) do not go into 2 shards"),
    ({"pairs": "conv0 > conv1"}, "pairs: conv0 is a Conv2"),
]


def test_parts_that_do_not_fit_get_one_clear_line(technique, models, train_split):
    cases = [(models.cnn, *case) for case in PART_REFUSALS] + models.PART_REFUSALS
    for build, changes, message in cases:
        split = functools.partial(technique.tensor_parallel, build)
        assert_refused(split, message, **{"pairs": "up > down"} | changes)
