"""Every train step is plain code at its neutral setting, whatever the model, and its kind in `fit`.

More models stand in tests/zoo, whose record is not made at each change. Here one model has all that
a step has to treat in a way of its own. Both Keras always run.
"""

from __future__ import annotations

import copy
import re
from functools import partial
from unittest import mock

import numpy as np
import pytest

from tests.frameworks import apart
from tests.train_step import steps

FRAMEWORKS = ("pt", "tf", "tf_keras")
PT, TF = pytest.mark.only("pt"), pytest.mark.only("tf", "tf_keras")
KERAS_3, LEGACY = pytest.mark.only("tf"), pytest.mark.only("tf_keras")
BAR = 1e-5
HALF_WIDTH = 0.02  # bfloat16 has 8 significant bits


def kinds(names, *marks):
    return [pytest.param(name, marks=marks, id=name) for name in names]


@PT
@pytest.mark.parametrize("kind", ["everything", "in_place"])
@pytest.mark.parametrize(
    "name",
    [
        *("kit", "float32", "bfloat16", "eager", "graph", "1 part", "parts", "clip", "clip each"),
        *("no clip", "guard", "recomputed", "products", "channels_last"),
        *("stacking", "stacking parts", "stacking bfloat16"),
    ],
)
def test_a_step_of_pytorch_equals_plain_code_or_is_refused(models, name, kind):
    """Losses, parameters and buffers; to the last bit where the order of operations is the same."""
    if refused := models.REFUSED.get((name, kind)):
        with pytest.raises((ValueError, NotImplementedError), match=re.escape(refused)):
            models.compare(name, kind)
    else:
        assert models.compare(name, kind) <= models.BARS.get(name, 0.0)


@pytest.mark.parametrize(
    "name",
    [
        *kinds(("kit", "xla", "xla blocks", "parts", "loosely", "guard", "each"), TF),
        *kinds(("stacking", "stacking parts", "stacking compiled"), TF),
        *kinds(("float32", "eager", "xla model"), KERAS_3),
    ],
)
def test_a_step_of_keras_equals_plain_code(models, name):
    """Slices of embeddings stay slices, and what the loss does not reach does not decay."""
    for kind in models.STEPS[name][1]:
        assert models.compare(name, kind) < BAR, kind


# PyTorch -----------------------------------------------------------------------------------------


@PT
@pytest.mark.parametrize("name", ["eager", "graph", "clip", "parts", "recomputed"])
def test_parameters_may_be_half_width(models, name):
    ours, theirs = models.STEPS[name]
    models.torch.compiler.reset()
    half = partial(models.trained, models.foreign.in_place, dtype=models.torch.bfloat16)
    assert all(map(np.array_equal, half(ours), half(theirs)))


@PT
@pytest.mark.parametrize("kind", ["everything", "pieces"])
@pytest.mark.parametrize("name", ["kit", "eager", "float32"])
def test_predictions_are_those_of_the_model(models, name, kind):
    model, x, _, _ = getattr(models.foreign, kind)()
    predicted = models.predictors[name](model)(x)
    with models.torch.no_grad():
        expected = models.call(model.eval(), x)
    pairs = zip(models.leaves(predicted), models.leaves(expected), strict=True)
    assert all(models.torch.equal(a, b) for a, b in pairs)


@PT
def test_the_fused_kernel_of_an_encoder_is_left_out_in_half_width(kit, models):
    """It computes in float32, whatever autocast says on a CPU."""
    torch = models.torch
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model, x = (
        torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False),
        torch.ones(7, 5, 8),
    )
    predict = models.reduced_precision.make_predict(model, dtype="bfloat16")
    ran = kit.runtime.operator_dtypes(lambda x, y: predict(x), x, None)
    assert ran["matmul"] == {"bfloat16": 10}
    assert torch.backends.mha.get_fastpath_enabled()


@PT
@pytest.mark.parametrize("name", ["kit", "eager", "float32", "baseline"])
def test_a_prediction_puts_modes_back_as_layers_change_them(models, name):
    """One merges weights to predict, and has to take them apart again; a frozen one stays so."""
    torch, foreign = models.torch, models.foreign
    model = torch.nn.Sequential(foreign.Merging(), torch.nn.BatchNorm1d(4), foreign.Keeping())
    if name == "baseline":
        step = models.baseline.make_hand_written_step(model, models.optimizer_of(model))
        run = partial(step, y=torch.arange(3))
    else:
        run = models.predictors[name](model)
    model[1].eval()
    run(torch.randn(3, 4))
    assert [module.training for module in model.modules()] == [True, True, False, True]
    assert not model[0].merged
    model(torch.randn(3, 4)).sum().backward()


@PT
@pytest.mark.parametrize("kind", ["everything", "pieces"])
def test_a_loss_gets_float32_in_the_structure_that_the_model_returns(models, kind):
    model, x, y, loss_fn = getattr(models.foreign, kind)()

    def watched(output, y):
        assert isinstance(output, dict if kind == "pieces" else models.foreign.Output)
        assert {part.dtype for part in models.leaves(output)} == {models.torch.float32}
        return loss_fn(output, y)

    for make in (models.mixed_precision.make_train_step, models.stacked):
        make(model, models.optimizer_of(model), watched, dtype="bfloat16")(x, y)


@PT
@pytest.mark.parametrize("kind", ["Named", "Linked"])
def test_a_mapping_in_float32_is_of_its_class(models, kind):
    torch, kind = models.torch, getattr(models.foreign, kind)
    half = kind(logits=torch.ones(2, dtype=torch.bfloat16))
    whole = models.mixed_precision.to_float32(half)
    assert type(whole) is kind
    assert whole.logits.dtype == whole["logits"].dtype == torch.float32
    assert half.logits.dtype == torch.bfloat16


@PT
def test_logits_of_a_dataclass(kit, models):
    """The kit's loss, its evaluation and the hand-written step take them."""
    torch = models.torch

    class Classifier(torch.nn.Linear):
        def forward(self, x):
            return models.foreign.Output(logits=super().forward(x))

    model, x, y = Classifier(4, 3), torch.randn(9, 4), torch.arange(9) % 3
    plain = torch.nn.functional.cross_entropy(model(x).logits, y)
    assert torch.equal(kit.training.cross_entropy(model(x), y), plain)
    predict = kit.training.make_predict(model)
    hits = (model(x).logits.argmax(-1) == y).double().mean().item()
    accuracy = kit.training.evaluate(predict, x, y, metric="accuracy", batch_size=3)
    assert accuracy == pytest.approx(100 * hits)
    step = models.baseline.make_hand_written_step(model, models.optimizer_of(model))
    assert torch.equal(step(x, y), plain.detach())


@PT
@pytest.mark.parametrize("name", ["clip", "guard", "parts"])
def test_sparse_gradients(models, name):
    torch, weights = models.torch, []
    codes, target = torch.arange(21).reshape(7, 3) % 9, torch.ones(7, 4)
    for make in models.STEPS[name]:
        torch.manual_seed(0)
        bag = torch.nn.EmbeddingBag(9, 4, sparse=True)
        step = make(bag, torch.optim.SGD(bag.parameters(), lr=1.0), torch.nn.MSELoss())
        step(codes, target)
        weights.append(bag.weight.detach())
    assert apart(*weights) < 1e-6


@PT
def test_the_guard_names_a_sparse_gradient_that_is_not_finite(models):
    torch = models.torch
    bag = torch.nn.EmbeddingBag(9, 4, sparse=True)
    bag.weight.data[0] = float("nan")

    def steep(output, y):
        return torch.nan_to_num(output).sum() + (output * 0).nan_to_num().sqrt().sum()

    step = models.finite_guard.make_train_step(bag, models.torch.optim.SGD(bag.parameters()), steep)
    with pytest.raises(
        FloatingPointError, match=r"values of the gradient of weight are not finite"
    ):
        step(torch.zeros(2, 3, dtype=torch.int64), torch.ones(2))


@PT
@pytest.mark.parametrize(
    "name",
    [
        *("graph", "compiled", "fullgraph", "model", "blocks"),
        *("predict", "stacking", "update", "in place"),
    ],
)
def test_the_ninth_compiled_model_of_a_process_is_compiled_too(models, name):
    """torch keeps eight compilations of one piece of code, here two, and runs others eagerly."""
    torch, counts = models.torch, []
    with models.captured() as graphs:
        for depth in range(1, 4):
            model = models.foreign.Deep(depth)
            make = models.COMPILED[name]
            step = make(model, torch.optim.SGD(model.parameters()), torch.nn.MSELoss())
            step(torch.randn(5, 4), torch.randn(5, 4))
            counts.append(len(graphs) - sum(counts))
    assert counts == [counts[0]] * 3
    assert counts[0] > 0


@PT
@pytest.mark.parametrize("count", [2, 8])
def test_like_blocks_share_a_compilation(models, count):
    """One for the first block, whose input needs no gradient, and one for all others."""
    torch, losses = models.torch, []
    blocks = models.with_settings(models.compilation.compiled_model_train_step, blocks="blocks.*")
    with models.captured() as graphs:
        for make in (models.eager, blocks):
            model = models.foreign.Deep(2, blocks=count)
            step = make(model, models.optimizer_of(model), torch.nn.MSELoss())
            losses.append([step(torch.ones(5, 4), torch.zeros(5, 4)).item() for _ in range(2)])
    assert len(graphs) == 2
    assert apart(losses[1], losses[0]) < 1e-6
    copied = copy.deepcopy(model)
    assert all(block._compiled_call_impl for block in model.blocks)
    assert not any(module._compiled_call_impl for module in copied.modules())  # its own weights


@PT
def test_unlike_blocks_have_a_compilation_each(models):
    """Five of them where torch keeps two compilations of one piece of code."""
    torch = models.torch
    unlike = torch.nn.Sequential(*[models.foreign.Deep(depth) for depth in range(1, 6)])
    with models.captured() as graphs:
        models.compilation.apply_compile(unlike, blocks="?")(torch.randn(5, 4))
    assert len(graphs) == 5


@PT
def test_the_compiled_ladder_takes_keywords_and_a_dataclass(models):
    """It is traced and differentiated as ever, and runs PyTorch's own kernels."""
    torch = models.torch
    settings = {"dtype": "bfloat16", "micro_batches": models.SAMPLES}
    with mock.patch.object(torch, "compile", partial(torch.compile, backend="aot_eager")):
        losses = [
            models.trained(
                models.foreign.everything,
                models.with_settings(models.stacked, compiled=compiled, **settings),
            )[0]
            for compiled in (True, False)
        ]
    assert apart(*losses) < HALF_WIDTH


def attentive(make, models, **settings):
    model = models.foreign.Attention()
    return make(model, models.optimizer_of(model), models.torch.nn.MSELoss(), **settings)


def packed(models):
    pack = models.torch.nn.utils.rnn.pack_sequence
    return pack([models.torch.ones(2, 8), models.torch.ones(1, 8)]), models.torch.ones(2)


PT_REFUSALS = [
    (
        lambda m: attentive(m.mixed_precision.make_train_step, m, keep_fp32="attention.out_proj"),
        r"keep_fp32: MultiheadAttention.*: keep 'attention'",
    ),
    (
        lambda m: m.checkpointing(m.foreign.Attention(), blocks="head, attention.out_proj"),
        "blocks: MultiheadAttention reads",
    ),
    (
        lambda m: m.accumulated_statistics.make_train_step(m.nn.SyncBatchNorm(2), None, None),
        "accumulated statistics: SyncB",
    ),
    (lambda m: attentive(m.stacked, m, micro_batches=2)(*packed(m)), "hold a PackedSequence"),
    (
        lambda m: m.compilation.compiled_model_train_step(
            m.foreign.Deep(1), None, None, blocks="blocks.0, layer*"
        ),
        r"blocks: the model has no block 'layer\*'; it",
    ),
]


@PT
@pytest.mark.parametrize(("call", "message"), PT_REFUSALS)
def test_pytorch_refuses_in_one_line(models, call, message):
    with pytest.raises((ValueError, NotImplementedError), match=message) as raised:
        call(models)
    assert "\n" not in str(raised.value)


@PT
def test_a_refusal_wraps_no_layer(models):
    model = models.foreign.Attention()
    with pytest.raises(ValueError, match="max_norm must be above 0"):
        models.stacked(model, None, None, dtype="bfloat16", keep_fp32="head", max_norm=0.0)
    assert "forward" not in vars(model.head)


# Keras -------------------------------------------------------------------------------------------


@KERAS_3
@pytest.mark.parametrize("name", ["parts", "clipped", "guard", "stacking parts"])
def test_slices_of_embeddings_reach_the_optimizer(models, name):
    assert models.slices_reach_the_optimizer(name)


@KERAS_3
def test_bfloat16_computes_nearly_the_same(models):
    model, optimizer, x, y, loss_fn = models.made("everything_but_dropout")
    step = models.mixed_precision.make_train_step(model, optimizer, loss_fn)
    losses = [float(step(x, y)) for _ in range(2)]
    assert BAR < apart(losses, models.reference("everything_but_dropout")[0].tolist()) < HALF_WIDTH


@KERAS_3
@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_half_width_models_add_their_own_losses_in_float32(models, policy):
    """Each step takes a model of such a policy as it is; the last one compiles its layers."""
    with models.global_policy(policy):
        model, _, x, y, loss_fn = models.made("regularized")
    for name in ("kit", "eager", "xla", "loosely", "parts", "stacking", "xla model"):
        if policy == "mixed_float16" and name != "kit":
            break
        expected = sum(float(part) for part in (loss_fn(model(x, training=True), y), *model.losses))
        optimizer = models.descent(model, 0.05)
        optimizer.build(model.trainable_variables)
        loss = models.STEPS[name][0](model, optimizer, loss_fn)(x, y)
        assert loss.dtype.name == "float32"
        assert float(loss) == pytest.approx(expected, rel=HALF_WIDTH), name


@KERAS_3
def test_a_list_model_takes_the_tuples_of_a_pipeline(models):
    (model, _, x, y, _), losses = models.made("list_model_of_a_tuple"), []
    x, y = next(iter(models.tf.data.Dataset.from_tensor_slices((x, y)).batch(len(y))))
    assert isinstance(x, tuple)
    expected = np.array(model(x, training=False))
    for predict in models.predictions(model):
        assert np.abs(predict(x) - expected).max() < 1e-6
    for name in ("kit", "graph", "bfloat16", "stacking", "loosely", "parts"):
        model, optimizer, *_, loss_fn = models.made("list_model_of_a_tuple")
        losses.append(float(models.STEPS[name][0](model, optimizer, loss_fn)(x, y)))
    assert losses == pytest.approx(len(losses) * losses[:1], rel=HALF_WIDTH)


@TF
def test_blocks_are_compiled_each(models):
    """Each forward and backward."""
    programs, layers = models.compiled_blocks()
    assert programs == 2 * layers >= 4


@TF
def test_clipping_in_fit_by_keras_own_means_is_the_step(models):
    for setting, name in (("global_clipnorm", "clipped"), ("clipnorm", "clipped each")):
        step = models.of_step("subclassed", models.STEPS[name][0])
        assert models.far(models.of_fit("subclassed", **{setting: 0.1}), step) < BAR
        assert models.far(models.of_fit("subclassed"), step) > 0.01


@KERAS_3
def test_accumulation_in_fit_is_the_step(models):
    """By Keras's own setting, and by the mixin."""
    parts = models.of_step("subclassed", models.STEPS["2 parts"][0])
    keras = {"batch_size": models.ROWS // 2, "gradient_accumulation_steps": 2}
    assert models.far(models.of_fit("subclassed", **keras), parts) < BAR
    assert models.far(models.of_fit("subclassed", models.with_accumulation), parts) < BAR


@KERAS_3
def test_the_mixins_loss_of_an_epoch_is_that_of_keras(models):
    """The last batch is smaller; the model has no variables before."""
    random, losses = np.random.default_rng(0), []
    x, y = random.normal(size=(12, 4)), random.normal(size=(12, 2))
    for change in (lambda model: model, models.with_accumulation):
        models.keras.utils.set_random_seed(0)
        model = change(models.unbuilt())
        model.compile(models.descent(model), "mse")
        losses += model.fit(x, y, batch_size=8, shuffle=False, verbose=0).history["loss"]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


@KERAS_3
def test_half_width_in_fit_is_the_step(models):
    """By Keras's own policy, and within the technique's policies."""
    half = models.of_step("sequence", models.mixed_precision.make_train_step)
    with models.global_policy("mixed_bfloat16"):
        assert models.far(models.of_fit("sequence"), half) < BAR
    assert models.far(models.fit_in_policies("sequence"), half) < BAR


TF_REFUSALS = [
    *(
        pytest.param(partial(call, blocks="blok"), "blocks: the model has no layer 'blok'; it has")
        for call in (
            lambda m, blocks: m.xla_model(*m.made("branches")[:2], None, blocks=blocks),
            lambda m, blocks: m.compilation.compiled_predict(m.made("branches")[0], blocks=blocks),
        )
    ),
    (lambda m: m.masking_inside(), "'inner' gives a mask, which XLA's program would keep"),
    *(
        pytest.param(
            lambda m, name=name: m.STEPS[name][0](*m.legacy(), m.squares),
            "a legacy optimizer: take the one of its name",
            marks=LEGACY,
        )
        for name in ("clipped", "guard", "stacking", "xla")
    ),
    pytest.param(
        lambda m: m.copy_optimizer(m.legacy()[1], m.legacy()[0].trainable_variables),
        "a legacy optimizer: take the one of its name",
        marks=LEGACY,
    ),
]


@TF
@pytest.mark.parametrize(("call", "message"), TF_REFUSALS)
def test_keras_models_are_refused_in_one_line(models, call, message):
    with pytest.raises((ValueError, NotImplementedError), match=re.escape(message)):
        call(models)


@TF
@pytest.mark.parametrize("blocks", ["", pytest.param("block", marks=KERAS_3)])
def test_a_loop_that_xla_would_lose_is_refused_before_a_weight_moves(models, blocks):
    model, optimizer, x, y, loss_fn = models.made("recurrent")
    before = model.get_weights()
    step = models.xla_model(model, optimizer, loss_fn, blocks=blocks)
    with pytest.raises(NotImplementedError, match=r"^the model has a loop \(an LSTM or GRU"):
        step(x, y)
    assert all(map(np.array_equal, model.get_weights(), before))


@LEGACY
@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("bfloat16", {"keep_fp32": "head"}, "tf_keras cannot switch a built model"),
        ("bfloat16", {"dtype": "float16"}, "set_global_policy('mixed_float16')"),
        ("recomputed", {"blocks": "conv*"}, "tf_keras would draw other dropout masks"),
    ],
)
def test_legacy_keras_is_refused_and_its_model_kept(kit, models, name, settings, message):
    """The neutral setting works."""
    make = models.LEGACY[name]
    prepared = steps.prepare(kit, steps.CNN)
    before = steps.weights_of(kit, prepared.model), models.policies(prepared.model)
    arguments = prepared.model, prepared.optimizer, kit.training.cross_entropy
    with pytest.raises(NotImplementedError, match=re.escape(message)):
        make(*arguments, **settings)
    assert steps.same(steps.weights_of(kit, prepared.model), before[0])
    assert models.policies(prepared.model) == before[1]
    stream = steps.batches(kit, steps.CNN, 3)
    prepared.step = make(*arguments, **models.NEUTRAL[name])
    plain = steps.losses_of(kit, steps.prepare(kit, steps.CNN), stream)
    assert steps.losses_of(kit, prepared, stream) == plain
