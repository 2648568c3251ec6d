"""Models of others: names of inputs, state in layers of layers, other dtypes, files not ours.

Each framework runs in a process of its own (`foreign_worker.py`).
"""

from __future__ import annotations

import numpy as np
import pytest

from tests import workers


@pytest.fixture(scope="module")
def evidence():
    """What each worker found: {"pt": {scenario: ...}, ...}."""
    return workers.run("compression.foreign_worker", ("pt", *workers.keras()))


@pytest.fixture
def pt(evidence):
    return evidence["pt"]


@pytest.fixture(params=workers.keras())
def tf(request, evidence):
    return evidence[request.param]


def test_pt_inputs_by_name_are_taken_by_name_whatever_their_order(pt):
    assert max(pt["names_of_inputs"]["apart"]) < 1e-6
    assert pt["names_of_inputs"]["others"] == "ValueError: the file takes a, b, not a, c"


def test_pt_a_file_runs_no_code_that_it_names_as_a_keyword(pt):
    assert pt["code_in_a_keyword"]["said"].startswith("ValueError: ")
    assert " takes no " in pt["code_in_a_keyword"]["said"]
    assert not pt["code_in_a_keyword"]["ran"]


@pytest.mark.parametrize("region", ["autocast", "no_grad"])
def test_pt_a_graph_within_the_graph_is_refused_in_words(pt, region):
    said = pt["graphs_within"][region]
    assert said.startswith("NotImplementedError: ")
    assert "a graph of its own: autocast, no_grad or cond within forward" in said


def test_pt_a_model_that_cannot_be_captured_is_refused_with_its_line_and_nothing_is_printed(pt):
    refused, printed = pt["graphs_within"]["branch"]
    assert refused.startswith("NotImplementedError: torch.export cannot capture it: ")
    assert ": return x + 1 if x.sum() > 0 else x)" in refused
    assert printed == ""


@pytest.mark.parametrize("way", ["ptq", "weights", "qat", "ptq in memory", "qat in memory"])
def test_pt_a_program_takes_the_sizes_of_its_example_and_any_number_of_samples(pt, way):
    own, more, large = pt["other_sizes"][way]
    assert (own, more) == (None, None)
    assert large == (
        "ValueError: inputs must be float32 [any], float32 [any, 3, 8, 8], as those of the example,"
        " not float32 [2], float32 [2, 3, 9, 8]"
    )


@pytest.mark.parametrize("way", ["ptq", "qat"])
def test_pt_layers_that_stay_in_float32_are_named(pt, way):
    (said,) = set(pt["left_in_float32"][f"1d {way}"])
    assert said.startswith("left in float32: 0.weight: ")
    assert pt["left_in_float32"][f"2d {way}"] == []


def test_pt_what_is_drawn_next_is_what_would_have_been(pt):
    assert pt["drawn"] == {"qat": True, "file": True, "ptq": True}


def test_pt_the_one_slope_of_all_channels_stays(pt):
    assert pt["a_shared_slope"] == [3, 1]


def test_pt_a_file_that_can_not_be_read_again_leaves_nothing(pt):
    assert pt["a_file_that_fails"]["said"]
    assert pt["a_file_that_fails"]["left"] == []


def test_pt_bfloat16_is_refused_with_its_reason(pt):
    for way, said in pt["bfloat16"].items():
        assert said.startswith("NotImplementedError: "), way
        assert "BFloat16" in said, way


def test_pt_a_file_for_the_cpu_predicts_there_whatever_else_the_machine_has(pt):
    assert pt["a_file_for_the_cpu"] < 1e-6


def test_pt_a_pass_puts_modes_back_as_layers_change_them(pt):
    """One merges weights to predict, and has to take them apart again; a frozen one stays so."""
    for way, models in pt["merged"].items():
        assert models == [[[True, True, False], False]] * 2, way


@pytest.mark.parametrize("way", ["pruned", "2:4"])
def test_pt_a_weight_is_masked_for_whoever_reads_it(pt, way):
    found = pt["a_weight_that_another_reads"][way]
    assert found.pop("in order")  # as a saved optimizer knows parameters
    assert found == {"apart": 0.0, "in evaluation": 0.0, "zeros": 0.5, "hooks": 0}


def test_pt_a_loss_gets_what_the_student_gives_and_not_its_logits_alone(pt):
    assert pt["a_loss_of_an_object"] == [True, True]


@pytest.mark.parametrize("model", ["nested", "texts", "own"])
def test_tf_a_smaller_copy_has_the_state_of_layers_within_layers(tf, model):
    found = tf["state_within"][model]
    assert found["whole"] < 1e-5
    assert found["half"] < 1e-5


def test_tf_layers_that_are_frozen_within_a_layer_stay_frozen(tf):
    whole, smaller = tf["frozen_within"]
    assert smaller == whole
    assert not all(whole)


def test_tf_an_export_deletes_no_folder_of_others(tf):
    found = tf["a_folder_that_is_there"]
    assert found["said"].startswith("FileExistsError: ")
    assert found["kept"]
    assert found["twice"] == [None, None]


@pytest.mark.parametrize(
    "maker", ["plain", "graph", "blocks", "parts", "logits", "stored", "features", "sparse"]
)
def test_keras_3_a_loss_scaler_changes_no_update(evidence, maker):
    apart, moved = evidence["tf"]["scaled_loss"][maker]
    assert moved > 1e-3
    assert apart < 1e-5 * max(moved, 1.0)


@pytest.mark.parametrize("way", ["pruned, False", "pruned, True", "2:4, False", "2:4, True"])
def test_keras_3_a_kernel_is_masked_for_whoever_reads_it(evidence, way):
    found = evidence["tf"]["a_kernel_that_another_reads"][way]
    assert found["apart"] == 0.0
    assert found["zeros"] == 0.5
    assert np.allclose(found["norms"], 1.0, atol=1e-5)  # of what is left: a constraint of its own
    assert found["constraint"] == "UnitNorm"


def test_keras_3_a_layer_that_is_a_graph_of_its_own_is_changed_within(evidence):
    (plain, products), (decorated, its_products) = evidence["tf"]["functions_within"].values()
    assert its_products == products > 0
    for ours, theirs in zip(decorated, plain, strict=True):
        assert np.allclose(ours, theirs, atol=1e-6)


def test_keras_3_masks_and_features_compute_in_half_width(evidence):
    found = evidence["tf"]["half_width"]
    assert np.isfinite([*found["masked"], *found["features"]]).all()
    assert found["zeros"] == 0.5
    assert found["features"][-1] < found["features"][0]


def test_keras_3_adapters_stay_what_they_are_in_a_copy_and_are_not_pruned(evidence):
    found = evidence["tf"]["adapters"]
    assert max(found["apart"]) == 0.0
    assert found["trained"][0] == found["trained"][1]
    for refused in (found["pruned"], found["2:4"]):
        assert refused == (
            "NotImplementedError: 'adapted' makes its kernel of others (LoRA, integers)"
        )
    assert found["units"] == [8, 3]
    assert "LoRA" in found["whole"][0]
