"""Recomputation happens, changes no number, saves memory, and does so alike in both frameworks.

Each framework runs in a process of its own (`activation_checkpointing_worker.py`), tf_keras in a
third.
"""

from __future__ import annotations

import sys

import numpy as np
import pytest

from tests import workers

PARITY = {"resnet": 1e-5, "gpt": 1e-4}
EXACT = 1e-5  # a second run rounds as the first did; a compiler may not
BLOCKS = 2


@pytest.fixture(scope="module")
def evidence():
    """What each worker found."""
    return workers.run("train_step.activation_checkpointing_worker", ("pt", "tf", "tf_keras"))


@pytest.fixture(params=["pt", "tf"])
def found(request, evidence):
    return evidence[request.param]


@pytest.fixture
def pt(evidence):
    return evidence["pt"]


@pytest.fixture
def tf(evidence):
    return evidence["tf"]


def leaves(tree):
    """The lists of numbers of a tree, in order."""
    if isinstance(tree, dict):
        return [leaf for name in sorted(tree) for leaf in leaves(tree[name])]
    if isinstance(tree, list) and any(isinstance(part, list) for part in tree):
        return [leaf for part in tree for leaf in leaves(part)]
    return [np.atleast_1d(tree)]


def difference(one, other):
    """The largest relative L2 difference of two trees of numbers, list by list."""
    pairs = zip(leaves(one), leaves(other), strict=True)
    return max(np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-12) for a, b in pairs)


# It changes no number -------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["resnet", "gpt"])
def test_three_steps_are_those_of_the_plain_model(found, family):
    """Losses, weights and BatchNorm's statistics: none of them updated twice."""
    rows = dict(found["steps"][family])
    plain = rows.pop("plain")
    assert rows
    for blocks, row in rows.items():
        assert difference(row, plain) < EXACT, blocks


@pytest.mark.parametrize("family", ["resnet", "gpt"])
def test_the_twins_agree(pt, tf, family):
    for blocks, row in pt["steps"][family].items():
        losses = tf["steps"][family][blocks]["losses"]
        assert difference(losses, row["losses"]) < PARITY[family], blocks


def test_pt_dropout_keeps_its_masks(pt):
    """Two inputs, keywords named as checkpoint's own, dicts, and BatchNorm beside the dropout."""
    rows = pt["two_inputs"]
    assert difference(rows["blocks.*"], rows["None"]) < EXACT
    assert difference(rows["other_masks"], rows["None"]) > 0.1
    assert "no block 'blocks'; it has blocks.0, " in rows["container"]


def test_pt_a_second_run_finds_the_buffers_of_the_first(pt):
    """Spectral norm reads what it changes; a graph runs backward twice; a frozen BatchNorm."""
    assert difference(pt["buffers"]["recomputed"], pt["buffers"]["plain"]) < EXACT


@pytest.mark.parametrize("source", ["python", "numpy", "own"])
def test_pt_a_second_run_draws_the_numbers_of_the_first(pt, source):
    """And takes none of those that come next."""
    assert pt["numbers"][f"{source} recomputed"] == pt["numbers"][f"{source} plain"]


def test_pt_only_what_training_changes_is_copied(pt):
    """Two vectors and a count of BatchNorm and one mean of a block, and no mask."""
    held = pt["held"]
    assert difference(held["recomputed"], held["plain"]) < EXACT
    copied = held["recomputed bytes"] - held["plain bytes"]
    assert copied < held["mask"] / 2
    assert held["mask"] == 2**18


def test_pt_copies_compute_with_their_own_weights(pt):
    copies = pt["copies"]
    assert copies["same_names"]
    assert copies["own_weights"]
    assert copies["copied"] == "ValueError: blocks: '0' is recomputed already"


@pytest.mark.parametrize("inside", ["norm", "batch_norm"])
def test_pt_compiles(pt, inside):
    eager, compiled = pt["compiled"][inside]
    assert difference(compiled, eager) < EXACT


def test_tf_dropout_keeps_its_masks(tf):
    """Gradients, statistics and seeds of two steps; `tf.recompute_grad` alone has others."""
    rows = dict(tf["functional"])
    plain, naive = rows.pop("plain"), rows.pop("naive")
    for blocks, row in rows.items():
        assert difference(row, plain) < EXACT, blocks
    assert difference(naive["gradients0"], plain["gradients0"]) > 0.1


@pytest.mark.parametrize("scenario", ["attention", "subclassed"])
def test_tf_randomness_masks_and_modes_inside_layers(tf, scenario):
    rows = {name: row for name, row in tf[scenario].items() if name != "unbuilt"}
    plain = rows.pop("plain")
    for blocks, row in rows.items():
        assert difference(row, plain) < EXACT, blocks


@pytest.mark.parametrize("scenario", ["sequential", "submodels"])
def test_tf_blocks_in_other_models(tf, scenario):
    rows = dict(tf["nested"][scenario])
    plain = rows.pop("plain")
    for blocks, row in rows.items():
        assert difference(row, plain) < EXACT, blocks


def test_tf_fit_and_mixed_precision(tf):
    rows = tf["fit"]
    assert difference(rows["conv*"], rows[""]) < EXACT
    assert rows[""][1] < rows[""][0]


# It happens -----------------------------------------------------------------------------------


def test_pt_the_backward_pass_repeats_each_block_up_to_its_last_product(pt):
    """FLOPs of a block of the worker's GPT: qkv, attention's two products, projection and `up`."""
    samples, length, width = 4, 8, 16
    linear = 2 * samples * length * width * width
    block = 3 * linear + 2 * (2 * samples * length * length * width) + linear + 4 * linear
    forward, backward = pt["flops"]["plain"]
    assert pt["flops"]["block*"] == [forward, backward + BLOCKS * block]
    assert pt["flops"]["block1"] == [forward, backward + block]


def test_products_are_repeated(found):
    """Five a block: PyTorch's attention is one and it enters `down`, TensorFlow's is two."""
    products = found["products"]
    assert products["both"] - products["plain"] == 5 * BLOCKS


def test_pt_products_are_kept_and_the_rest_is_repeated(pt):
    """Dropout's masks too: the gradients are those of the plain model."""
    plain, recomputed, products = (
        pt["selected"][name] for name in ("plain", "recomputed", "products")
    )
    assert recomputed["flops"] > plain["flops"] == products["flops"]
    assert plain["tanh"] == 0
    assert min(recomputed["tanh"], products["tanh"]) >= 4  # two a block
    for row in (recomputed, products):
        assert difference(row["gradients"], plain["gradients"]) < EXACT


@pytest.mark.skipif(sys.platform != "linux", reason="resident peaks of the Linux kernel")
def test_pt_memory_falls(pt):
    """Not in TensorFlow, whose executor orders what is ready: here 14% to 72% were saved."""
    memory = pt["memory"]
    assert 0 < memory["recomputed"] < 0.55 * memory["plain"]


# Bad input ------------------------------------------------------------------------------------


def test_unknown_names_are_told_the_choices(found):
    refusals = found["refusals"]
    assert refusals["unknown"].startswith("ValueError: blocks: the model has no block 'blok1'; it")
    assert refusals["pattern"].startswith("ValueError: blocks: the model has no block 'stage*'; it")
    for name in ("unknown", "pattern"):
        assert " block0, " in refusals[name]
        assert "\n" not in refusals[name]
    assert refusals["unchanged"]
    assert refusals["twice"] == "ValueError: blocks: 'block0' is recomputed already"


def test_pt_refuses_what_a_second_run_would_find_changed(pt):
    """And to offload from the host to the host; without gradients both run as before."""
    refused = pt["own_inputs"]
    start = "NotImplementedError: block '1' changes its input in place, so that its second run"
    assert refused["in place"].startswith(start)
    assert refused["on the host"].startswith("NotImplementedError: offload: the activations of a")
    assert refused["in place, evaluated"] is refused["on the host, evaluated"] is None


def test_pt_products_that_are_changed_in_place_are_refused_seen_by_torch_or_not(pt):
    found = dict(pt["products_in_place"])
    assert found.pop("twice").startswith("RuntimeError: Trying to backward an extra time")
    assert found.pop("relu") is found.pop("tanh") is None
    for name, said in found.items():
        assert said.startswith("NotImplementedError: save_products: block '0' changes a"), name


def test_pt_a_gradient_penalty_goes_through_a_block(pt):
    """But for a weight that a hook outside of the block makes, which is refused."""
    penalty = pt["penalty"]
    assert penalty["block"] == penalty["plain"]
    start = "NotImplementedError: blocks: a hook of '0' makes its weight"
    assert penalty["hooked"].startswith(start)


def test_tf_refuses_what_a_second_run_would_get_wrong(tf):
    refused = tf["refused"]
    assert "'loss' adds a loss, which no gradient would get out of" in refused["loss"]
    assert "'draw' draws with RandomUniform, anew in the second run" in refused["draw"]
    assert "'global' changes state of others, anew in the second run" in refused["global"]
    assert "'complex' takes or gives complex numbers" in refused["complex"]
    assert "'codes' has no floating-point input" in refused["no_float"]
    assert refused["overlap"].startswith("ValueError: blocks: ")
    assert refused["overlap"].endswith(" overlap")
    for name in ("loss", "draw", "global", "complex", "penalty"):
        assert refused[name].startswith("NotImplementedError: ")
    assert tf["subclassed"]["unbuilt"].startswith("ValueError: the model has no variables yet")


def test_tf_keras_refuses_and_keeps_the_model(evidence):
    refusal = evidence["tf_keras"]["tf_keras_refusal"]
    assert refusal["refused"].startswith("NotImplementedError: tf_keras ")
    assert refusal["neutral"]
