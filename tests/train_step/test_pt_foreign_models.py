"""PyTorch's train-step techniques on models that nobody here wrote equal plain code, or refuse.

All run in one process (`pt_foreign_worker.py`). Where nothing but the order of the same operations
could differ, techniques are held to the last bit.
"""

from __future__ import annotations

import platform

import pytest

from bench.harness.machine import describe
from tests import workers

MODELS = (
    "tied",
    "attention",
    "encoder",
    "lstm",
    "two_inputs",
    "keywords",
    "in_place",
    "pieces",
)
FEW = ("tied", "keywords", "in_place")  # to be captured, which takes a second each
EXACT = (
    "kit",
    "float32",
    "bfloat16",
    "bfloat16 clipped",
    "eager",
    "graph",
    "1 part",
    "parts",
    "clip",
    "no clip",
    "guard",
    "clip each",
    "checkpointing",
    "products",
    "stacking",
    "stacking bfloat16",
)
ROUNDING = {"channels_last": 1e-5, "stacking parts": 1e-6}  # other kernels; sums, then a division
NO_IMAGES = "ValueError: the model has no 4-D parameter, so there is no convolution to convert"
REFUSED = {("channels_last", model): NO_IMAGES for model in MODELS if model != "in_place"} | {
    (
        "products",
        "in_place",
    ): "NotImplementedError: save_products: block 'depthwise' changes a product"
    " in place (aten.hardtanh_.default), so that its second run would find another one",
}
# oneDNN has none for x86 without AVX-512.
NO_BFLOAT16_LSTM = platform.machine() in ("x86_64", "AMD64") and (
    "avx512f" not in describe(1)["isa"]
)


@pytest.fixture(scope="module")
def found():
    return workers.run("train_step.pt_foreign_worker", ("pt",))["pt"]


@pytest.mark.parametrize(
    ("technique", "model"),
    [
        (technique, model)
        for technique in (*EXACT, *ROUNDING)
        for model in (FEW if technique == "graph" else MODELS)
    ],
)
def test_a_technique_equals_plain_code_or_refuses(found, technique, model):
    """Losses, parameters and buffers of two steps."""
    result = found["matrix"][technique][model]
    if model == "lstm" and "bfloat16" in technique and NO_BFLOAT16_LSTM:
        # Plain code fails, and the technique is refused before anything runs.
        assert "no nn.LSTM in half precision" in result["raised"]
    elif (technique, model) in REFUSED:
        assert result == {"raised": REFUSED[technique, model]}
    elif technique in EXACT:
        assert result == {"apart": 0.0}
    else:
        assert result.keys() == {"apart"}
        assert result["apart"] < ROUNDING[technique]


def test_every_technique_and_model_is_named_here(found):
    assert found["matrix"].keys() == {*EXACT, *ROUNDING}
    for technique, row in found["matrix"].items():
        assert row.keys() == set(FEW if technique == "graph" else MODELS)


def test_half_width_parameters(found):
    rows = dict(found["half_width"])
    for name in ("mixed_precision", "stacking"):
        assert rows.pop(name).startswith("ValueError: master weights are float32, but ")
    assert set(rows.values()) == {0.0}


def test_a_mapping_is_cut_by_its_tensors_not_by_its_keys(found):
    """Seven rows in seven parts."""
    assert found["rows"] == {name: [1] * 7 for name in ("gradient_accumulation", "stacking")}


def test_predictions(found):
    predictions = dict(found["predictions"])
    # The fused kernel of the encoder computes in float32 whatever autocast says on a CPU.
    assert predictions.pop("matmul") == {"bfloat16": 10}
    assert predictions == dict.fromkeys(predictions, True)


def test_a_prediction_puts_modes_back_as_layers_change_them(found):
    """One merges weights to predict, and has to take them apart again; a frozen one stays so."""
    ways = ("kit", "reduced_precision", "compilation", "baseline")
    assert found["merged"] == {way: [[True, True, False, True], False] for way in ways}


def test_a_loss_gets_float32_in_the_structure_that_the_model_returns(found):
    for name, kind in (("keywords", "Output"), ("pieces", "dict"), ("two_inputs", "tuple")):
        for seen in found["outputs"][name]:
            assert seen[0] == kind
            assert set(seen[1:]) == {"torch.float32"}


def test_a_mapping_in_float32_is_of_its_class(found):
    whole, half = "torch.float32", "torch.bfloat16"
    assert found["outputs"]["mapping"] == 2 * [[True, whole, whole, half]]


def test_logits_of_a_dataclass(found):
    logits = found["logits"]
    assert logits["loss"]
    assert logits["hand-written"]
    assert logits["accuracy"] == pytest.approx(logits["by hand"], rel=1e-12)


def test_float16_is_unscaled_before_it_is_clipped(found):
    assert found["float16"]["clipped"] == 0.0
    assert found["float16"]["not clipped"] > 1e-3
    assert found["float16"]["free"] == 0.0  # the closed step is the pieces in a plain loop


def test_float16_scales_one_loss_for_two_optimizers(found):
    assert found["float16"]["two optimizers"] == 0.0


@pytest.mark.parametrize("technique", ["loss_scaling", "stacking"])
def test_loss_scaling_is_saved_and_resumed(found, technique):
    """With its count of good steps: the resumed step doubles its scale when the first one does."""
    went_on, resumed, fresh = found["float16"][technique]
    assert went_on == resumed != fresh
    assert found["float16"]["not scaled"] == {}


def test_what_cannot_be_done_is_refused_in_one_line_before_anything_changes(found):
    refusals = dict(found["refusals"])
    assert refusals["keep_fp32"].startswith("NotImplementedError: keep_fp32: MultiheadAttention")
    assert refusals["keep_fp32"].endswith(": keep 'attention'")
    assert refusals["blocks"].startswith("NotImplementedError: blocks: MultiheadAttention reads")
    assert refusals["untouched"]
    assert refusals["max_norm"].startswith("ValueError: max_norm must be above 0")
    assert refusals["norms"].startswith("NotImplementedError: accumulated statistics: SyncB")
    for name in ("gradient_accumulation", "stacking"):
        steps = refusals[name]
        assert steps.pop("kept"), name
        assert "hold a PackedSequence, which cannot be cut into parts" in steps["packed"]
        assert steps["disagree"].endswith("need one first axis, the samples: got 5, 7")
        assert "a scalar" in steps["scalar"]
        assert all(line.startswith("ValueError: ") for line in steps.values())


def test_buffers_are_no_weights_to_a_memory_format(found):
    """Masks are 4-D and tables may be 5-D: they neither count as convolutions nor stop one."""
    refusals = found["refusals"]
    assert refusals["memory format tied"] == [NO_IMAGES, True]
    assert refusals["memory format in_place"] == [None, True]
    assert refusals["stacking tied"] == NO_IMAGES
    assert refusals["stacking in_place"] is None


def test_optimizer_implementations(found):
    """Tied weights are updated once; the fused kernel rounds otherwise."""
    for name, apart in found["optimizers"].items():
        assert apart < (1e-6 if name.endswith("fused") else 1e-12), name


def test_sparse_gradients(found):
    sparse = found["sparse"]
    assert sparse["clip"] == sparse["guard"] == 0.0
    assert sparse["parts"] < 1e-6
    assert "values of the gradient of embedding.weight are not finite" in sparse["guarded"]


@pytest.mark.parametrize(
    "kind",
    [
        *("graph", "compiled", "fullgraph", "model", "blocks"),
        *("predict", "stacking", "update", "in place"),
    ],
)
def test_the_ninth_compiled_model_of_a_process_is_compiled_too(found, kind):
    """torch keeps eight compilations of one piece of code, here two, and runs others eagerly."""
    graphs = found["ninth"][kind]
    assert graphs == [graphs[0]] * 3
    assert graphs[0] > 0


def test_like_blocks_share_a_compilation(found):
    """One for the first block, whose input needs no gradient, and one for all others."""
    regions = found["regions"]
    for count in ("2", "8"):
        assert regions[count]["graphs"] == 2
        assert regions[count]["apart"] < 1e-6
    assert regions["compiled"] == [True, False]  # a copy computes with its own weights
    assert regions["kept"]
    assert regions["unknown"].startswith("ValueError: blocks: the model has no block 'layer*'; it")


def test_unlike_blocks_have_a_compilation_each(found):
    """Five of them where torch keeps two compilations of one piece of code."""
    assert found["regions"]["unlike"] == 5


def test_the_compiled_ladder_takes_keywords_and_a_dataclass(found):
    """bfloat16 keeps 8 significant bits."""
    assert found["compiled"] < 2**-8
