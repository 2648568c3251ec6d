"""Plain is what plain framework code does, and each rung has its effect on top of it."""

from __future__ import annotations

import ast
from pathlib import Path

import numpy as np
import pytest

from bench.ladders import command

DECAY = 0.7  # of the worker


def of(found, scenario):
    return found[f"image_classification {scenario}"]


def apart(ours, theirs):
    """The largest relative difference."""
    ours, theirs = np.array(ours), np.array(theirs)
    return float(np.max(np.abs(ours - theirs) / np.abs(theirs)))


def test_the_plain_program_is_plain_framework_code(every):
    found = of(every, "plain")
    assert apart(found["epochs"], found["by hand"]) < 1e-5
    assert len(found["epochs"]) == 6  # two epochs of 24 photos in batches of 8


def test_twins_agree_in_their_first_losses(evidence):
    ours, theirs = (of(evidence[side], "plain")["shared"] for side in ("pt", "tf"))
    assert apart(ours, theirs) < 1e-5


def test_the_pipeline_gives_the_same_batches_another_way(every):
    found = of(every, "input_pipeline")
    assert any(module.endswith("tuned_folder") for module in found["made in"])
    assert apart(found["epochs"], of(every, "plain")["epochs"]) < 1e-4


def test_mixed_precision_computes_in_bfloat16_over_float32_weights(every):
    found = of(every, "mixed_precision")
    for part in ("step", "predict"):
        assert set(found[part]["convolution"]) == {"bfloat16"}
    assert found["weights"] == ["float32"]


def test_memory_format_moves_the_channels_and_nothing_else(evidence):
    for side in ("pt", "tf"):
        found = of(evidence[side], "memory_format")
        assert apart(found["loss"], of(evidence[side], "plain")["shared"][0]) < 1e-5
        assert found["last"]
        assert found["plain last"] == (side == "tf")  # there it is the default


def test_accumulation_takes_the_batch_in_halves(every):
    found = of(every, "accumulation")
    assert apart(found["whole"], np.mean(found["halves"])) < 1e-5
    at_once = of(every, "plain")["shared"][0]  # of the same batch
    assert apart(found["whole"], at_once) > 1e-4  # BatchNorm sees halves


def test_compiled_steps_are_compiled_and_the_same(evidence):
    for side in ("pt", "tf"):
        found = of(evidence[side], "compiled")
        assert apart(found["shared"], of(evidence[side], "plain")["shared"]) < 1e-4
        assert found["graphs"]
    assert of(evidence["tf"], "compiled")["xla"]


def test_the_average_is_that_of_numpy_and_is_used(every):
    found = of(every, "averaged_weights")
    seen = [{name: np.array(value) for name, value in each.items()} for each in found["seen"]]
    for name, average in seen[0].items():
        for each in seen[1:]:
            average = DECAY * average + (1 - DECAY) * each[name]
        assert np.allclose(found["used"][name], average, rtol=1e-5, atol=1e-6)
    assert not np.allclose(found["used"]["head.kernel"], seen[-1]["head.kernel"], atol=1e-6)
    assert found["statistics changed"]


def test_pruning_leaves_a_smaller_network_that_trains_on(every):
    found = of(every, "pruned")
    assert found["after"] < 0.5 * found["before"]
    assert len(found["losses"]) == 6  # two epochs
    assert np.isfinite(found["losses"]).all()
    assert found["averages"]  # what is below stays
    assert found["predicts"] == [8, 6]


def test_int8_is_what_is_deployed(every):
    found = of(every, "int8")
    assert found["int8 tensors"] >= 3  # two convolutions and the head
    ours, theirs = (np.array(found[name]["logits"]) for name in ("int8", "float32"))
    assert 0 < np.linalg.norm(ours - theirs) / np.linalg.norm(theirs) < 0.2


def test_a_rung_that_is_none_is_refused_with_the_names_of_those_that_are(every):
    said = of(every, "refused")
    assert "'faster'" in said
    assert "input_pipeline" in said


@pytest.mark.parametrize("side", ["pt", "tf"])
@pytest.mark.parametrize("name", command.LADDERS)
def test_rungs_of_a_ladder_are_those_of_its_program(side, name):
    ladder = command.find(name)
    path = Path(__file__).parents[2] / f"{side}_impl/ladders/{ladder.program}.py"
    (names,) = [
        ast.literal_eval(node.value)
        for node in ast.parse(path.read_text("utf-8")).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "RUNGS"
    ]
    assert tuple(rung.name for rung in ladder.rungs) == names
