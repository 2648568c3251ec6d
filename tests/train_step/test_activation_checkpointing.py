"""Recomputation happens, changes no number, saves memory, and does so alike in both frameworks.

What tf_keras refuses stands in test_any_model.py.
"""

from __future__ import annotations

import copy
import ctypes
import re
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from bench.train_step import bench_activation_checkpointing
from tests.frameworks import apart
from tests.train_step import steps
from tests.train_step.steps import RESNET

FRAMEWORKS = ("pt", "tf")
PT, TF = pytest.mark.only("pt"), pytest.mark.only("tf")
EXACT = 1e-5  # a second run rounds as the first did; a compiler may not
GPT = replace(steps.GPT, sequence_length=8, width=16, layers=2)


def far(ours, theirs):
    """The largest relative L2 distance of two arrays of a list."""
    return max(apart(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.fixture(scope="module")
def prepare(kit, technique):
    """`prepare(spec, blocks)`: a model and its step, with blocks recomputed."""

    def make(blocks, model, *rest):
        model = technique.apply_checkpointing(model, blocks=blocks)
        optimizer = kit.training.make_optimizer(model, steps.RECIPE)
        return kit.training.make_train_step(model, optimizer, rest[-1])

    return lambda spec, blocks: steps.prepare(kit, spec, lambda *given: make(blocks, *given))


# It changes no number ----------------------------------------------------------------------------


@PT
def test_another_kernel_of_attention_changes_no_number_and_keeps_its_scores(kit, technique, models):
    def attending(kernel):
        made = steps.prepare(kit, GPT)
        made.step = technique.make_attention_step(made.step, kernel=kernel)
        return made

    stream = steps.batches(kit, GPT, 3)
    plain, flash, math = steps.prepare(kit, GPT), attending("flash"), attending("math")
    losses = steps.losses_of(kit, plain, stream)
    assert apart(steps.losses_of(kit, math, stream), losses) < EXACT
    assert steps.losses_of(kit, flash, stream) == losses  # it is what the CPU has by itself
    counted = [
        sum(kit.runtime.operator_dtypes(each.step, *stream[0])["matmul"].values())
        for each in (math, plain)
    ]
    more = bench_activation_checkpointing.MORE_PRODUCTS_UNFUSED
    assert counted[0] == counted[1] + more * GPT.layers
    with pytest.raises(ValueError, match="kernel: 'fast' is none of math, flash, efficient, cudnn"):
        technique.make_attention_step(plain.step, kernel="fast")


@pytest.mark.parametrize(
    ("spec", "blocks", "bar"),
    [(RESNET, "stage*.block*", 1e-5), (GPT, "block*", 1e-4)],
    ids=["resnet", "gpt"],
)
def test_three_steps_are_those_of_the_plain_model_and_twins_agree(
    kit, prepare, agrees, spec, blocks, bar
):
    """Losses, weights and BatchNorm's statistics: none of them updated twice.

    Five products of a block are repeated: PyTorch's attention is one and it enters `down`,
    TensorFlow's is two.
    """
    stream = steps.batches(kit, spec, 3)
    plain, recomputed = prepare(spec, ""), prepare(spec, blocks)
    losses = steps.losses_of(kit, recomputed, stream)
    assert apart(losses, steps.losses_of(kit, plain, stream)) < EXACT
    weights = [steps.weights_of(kit, prepared.model) for prepared in (recomputed, plain)]
    assert steps.farthest(*weights) < EXACT
    agrees(spec.family, {"losses": losses}, bar)
    if spec is GPT:
        more, usual = (
            sum(kit.runtime.operator_dtypes(prepared.step, *stream[0])["matmul"].values())
            for prepared in (recomputed, plain)
        )
        assert more - usual == 5 * GPT.layers


@PT
@pytest.mark.parametrize("name", ["keywords", "statistics", "masks", "python", "numpy", "own"])
def test_a_second_run_finds_what_the_first_did(technique, models, name):
    """Masks, buffers, generators; and it takes none of the numbers that come next."""
    plain = models.trained(technique, name, "")
    assert far(models.trained(technique, name), plain) < EXACT
    if name == "keywords":
        assert far(models.trained(technique, name, seed=1)[1:-3], plain[1:-3]) > 0.1


@TF
@pytest.mark.parametrize(
    "name", ["functional", "attention", "subclassed", "sequential", "submodels"]
)
def test_blocks_of_any_model_keep_masks_modes_statistics_and_seeds(technique, models, name):
    plain = models.trained_in_a_graph(technique, name)
    for blocks in models.MAKERS[name][-1]:
        assert far(models.trained_in_a_graph(technique, name, blocks), plain) < EXACT, blocks
    if name == "functional":  # `tf.recompute_grad` alone draws other masks
        assert far(models.naive()[1:10], plain[1:10]) > 0.1


@PT
def test_only_what_training_changes_is_copied(technique, models):
    """Two vectors and a count of BatchNorm and one mean of a block, and no mask."""
    held = [
        models.held(technique.apply_checkpointing(models.masked(), blocks=blocks), x)
        for blocks, x in (("*", models.torch.randn(6, 8)), ("", models.torch.randn(6, 8)))
    ]
    assert held[0] - held[1] < 2**17  # half a mask


@PT
def test_copies_compute_with_their_own_weights(technique, models):
    torch = models.torch
    model, x = models.perceptron(), torch.randn(3, 8)
    model = torch.nn.Sequential(model.eval(), torch.nn.Linear(8, 1))
    before, plain = list(model.state_dict()), model(x)
    technique.apply_checkpointing(model, blocks="0")
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert list(model.state_dict()) == before
    assert torch.equal(model(x), plain)
    assert not twin(x).any()
    with pytest.raises(ValueError, match="blocks: '0' is recomputed already"):
        technique.apply_checkpointing(twin, blocks="0")


@PT
@pytest.mark.parametrize("inside", ["LayerNorm", "BatchNorm1d"])
def test_recomputed_blocks_compile(technique, models, inside):
    torch, rows = models.torch, []
    for compiled in (False, True):
        torch.manual_seed(0)
        block = models.perceptron(getattr(torch.nn, inside))
        block[3].p = 0.0
        model = technique.apply_checkpointing(torch.nn.Sequential(block), blocks="0")
        run = torch.compile(model, backend="aot_eager") if compiled else model
        run(torch.ones(5, 8).cumsum(0)).square().sum().backward()
        tensors = [*(p.grad for p in model.parameters()), *model.buffers()]
        rows.append([np.array(tensor, float) for tensor in tensors])
    assert far(rows[1], rows[0]) < EXACT


@TF
def test_fit_and_a_half_width_policy_put_on_afterwards(kit, technique, models):
    from tf_impl.train_step import mixed_precision

    keras, rows = models.keras, []
    ((x, y),) = steps.batches(kit, steps.CNN)
    for blocks in ("", "conv*"):
        model = technique.apply_checkpointing(steps.prepare(kit, steps.CNN).model, blocks=blocks)
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        losses = model.fit(x, y, epochs=2, batch_size=8, verbose=0).history["loss"]
        arguments = model, keras.optimizers.SGD(0.1), kit.training.cross_entropy
        step = mixed_precision.make_train_step(*arguments)
        rows.append(losses + [float(step(x, y)) for _ in range(3)])
    assert apart(rows[1], rows[0]) < EXACT
    assert rows[0][1] < rows[0][0]


# It happens --------------------------------------------------------------------------------------


@PT
@pytest.mark.parametrize(("blocks", "count"), [("block*", 2), ("block1", 1)])
def test_the_backward_pass_repeats_each_block_up_to_its_last_product(
    kit, prepare, models, blocks, count
):
    """FLOPs of a block: qkv, attention's two products, projection and `up`."""
    samples, length, width = 4, 8, 16
    linear = 2 * samples * length * width * width
    block = 3 * linear + 2 * (2 * samples * length * length * width) + linear + 4 * linear
    ((x, y),) = steps.batches(kit, GPT, samples=samples)
    flops = []
    for prepared in (prepare(GPT, ""), prepare(GPT, blocks)):
        with models.FlopCounterMode(display=False) as forward:
            loss = kit.training.cross_entropy(prepared.model(x), y)
        with models.FlopCounterMode(display=False) as backward:
            loss.backward()
        flops.append([forward.get_total_flops(), backward.get_total_flops()])
    assert flops[1] == [flops[0][0], flops[0][1] + count * block]


def test_recomputed_convolutions_count_as_recomputed(monkeypatch, kit, technique, models):
    """In the proof of a user's row; its model has no other product."""
    made = [
        models.step_of(technique.apply_checkpointing(models.of_convolutions(), blocks=blocks))
        for blocks in ("", "block")
    ]
    plain, recomputed = (SimpleNamespace(step=step) for step in made)
    monkeypatch.setattr(bench_activation_checkpointing, "plain", lambda *_: plain)
    impl = SimpleNamespace(kit=kit, blocks="block")
    task = SimpleNamespace(model=SimpleNamespace(from_file=True))
    work = SimpleNamespace(settings={"every": 1}, task=task)
    batch = models.PICTURES, models.PICTURES
    proof, fault = bench_activation_checkpointing.took_effect(impl, work, recomputed, batch)
    assert fault is None
    assert proof["repeated_products"] >= 1
    _, fault = bench_activation_checkpointing.took_effect(impl, work, plain, batch)
    assert fault == "repeated 0 products, not 1 or more"


@PT
def test_products_are_kept_and_the_rest_is_repeated(technique, models):
    """Dropout's masks too: the gradients are those of the plain model."""
    torch, flops, tanh, gradients = models.torch, [], [], []
    for settings in ({"blocks": ""}, {"blocks": "*"}, {"blocks": "*", "save_products": True}):
        torch.manual_seed(0)
        model = torch.nn.Sequential(models.perceptron(), models.perceptron())
        technique.apply_checkpointing(model, **settings)
        with models.FlopCounterMode(display=False) as counter:
            loss = model(torch.randn(4, 8)).square().sum()
            with torch.profiler.profile() as profile:
                loss.backward()
        flops.append(counter.get_total_flops())
        tanh.append({e.key: e.count for e in profile.key_averages()}.get("aten::tanh", 0))
        gradients.append([p.grad.numpy() for p in model.parameters()])
    assert flops[1] > flops[0] == flops[2]
    assert tanh[0] == 0
    assert min(tanh[1:]) >= 4  # two a block
    assert max(far(row, gradients[0]) for row in gradients[1:]) < EXACT


@PT
@pytest.mark.skipif(sys.platform != "linux", reason="resident peaks of the Linux kernel")
def test_memory_falls(technique, models):
    """Of a deep, narrow net on many samples.

    Not in TensorFlow, whose executor orders what is ready: 14% to 72% were saved there.
    """
    # Resident memory is what is alive: freed blocks of 64 KiB and more go back at once.
    ctypes.CDLL(None).mallopt(-3, 65536)  # M_MMAP_THRESHOLD
    torch, peaks = models.torch, []
    for blocks in ("*", ""):
        model = torch.nn.Sequential(*[models.perceptron() for _ in range(12)])
        technique.apply_checkpointing(model, blocks=blocks)
        x = torch.randn(40_000, 8)
        model(x[:8]).sum().backward()
        peaks.append(steps.peak(lambda model=model, x=x: model(x).sum().backward()))
    assert 0 < peaks[0] < 0.55 * peaks[1]


# Bad input ---------------------------------------------------------------------------------------


def apply(technique, model, blocks="0", **settings):
    return technique.apply_checkpointing(model, blocks=blocks, **settings)


def block_of(models, layer):
    nn = models.torch.nn
    return nn.Sequential(nn.Linear(4, 4), nn.Sequential(layer, nn.Linear(4, 4)))


def gpt(models):
    return models.kit.models.build(GPT)


REFUSALS = [
    (lambda t, m: apply(t, gpt(m), "block0, blok1"), "the model has no block 'blok1'; it has"),
    (lambda t, m: apply(t, gpt(m), "stage*"), "blocks: the model has no block 'stage*'; it has"),
    (
        lambda t, m: apply(t, apply(t, gpt(m), "block0"), "block0, block1"),
        "blocks: 'block0' is recomputed already",
    ),
    *(
        pytest.param(call, message, marks=PT)
        for call, message in (
            (lambda t, m: apply(t, m.Two(), "blocks"), "no block 'blocks'; it has blocks.0, "),
            (
                lambda t, m: apply(t, block_of(m, m.torch.nn.SiLU(inplace=True)), "1")(m.X),
                "block '1' changes its input in place, so that its second run",
            ),
            (
                lambda t, m: apply(t, block_of(m, m.torch.nn.SiLU()), "1", offload=True)(m.X),
                "offload: the activations of a",
            ),
            (
                lambda t, m: apply(t, m.torch.nn.Sequential(m.hooked())),
                "blocks: a hook of '0' makes its weight",
            ),
        )
    ),
    *(
        pytest.param(call, message, marks=TF)
        for call, message in (
            (lambda t, m: m.unfit(t, "loss"), "'loss' adds a loss, which no gradient would"),
            (lambda t, m: m.unfit(t, "draw"), "'draw' draws with RandomUniform, anew in the"),
            (lambda t, m: m.unfit(t, "global"), "'global' changes state of others, anew in"),
            (lambda t, m: m.unfit(t, "complex"), "'complex' takes or gives complex numbers"),
            (
                lambda t, m: m.trained_in_a_graph(t, "attention", "codes"),
                "'codes' has no floating-point",
            ),
            (lambda t, m: apply(t, m.interleaved(), "a, b"), " overlap"),
            (lambda t, m: apply(t, m.unbuilt()), "the model has no variables yet"),
            (lambda t, m: m.penalized(t, "dense*"), ""),
        )
    ),
]


@pytest.mark.parametrize(("call", "message"), REFUSALS)
def test_a_refusal_says_why(technique, models, call, message):
    with pytest.raises((ValueError, NotImplementedError), match=re.escape(message)):
        call(technique, models)


@PT
def test_without_gradients_all_runs_as_before(technique, models):
    nn = models.torch.nn
    with models.torch.no_grad():
        apply(technique, block_of(models, nn.SiLU(inplace=True)), "1")(models.X)
        apply(technique, block_of(models, nn.SiLU()), "1", offload=True)(models.X)


@PT
@pytest.mark.parametrize("name", ["gru", "silu", "added"])
def test_products_that_are_changed_in_place_are_refused_seen_by_torch_or_not(
    technique, models, name
):
    model = models.torch.nn.ModuleList([models.WRITING[name]()])
    apply(technique, model, save_products=True)
    with pytest.raises(NotImplementedError, match="save_products: block '0' changes a"):
        model[0](models.torch.ones(2, 3, 4, requires_grad=True))


@PT
@pytest.mark.parametrize(
    ("changed", "save_products", "refused"),
    [
        ("input", False, True),
        ("input", True, True),
        ("product", False, False),
        ("product", True, True),
    ],
)
def test_what_is_changed_in_place_after_a_block_is_refused_or_right(
    technique, models, changed, save_products, refused
):
    gradients = []
    for blocks in ("", "block"):
        models.torch.manual_seed(0)
        model = apply(technique, models.Shared(changed), blocks, save_products=save_products)
        loss = model(models.X).sum()
        if blocks and refused:
            with pytest.raises(NotImplementedError, match=r"'block', .* is changed in place after"):
                loss.backward()
            return
        loss.backward()
        gradients.append([parameter.grad.numpy() for parameter in model.parameters()])
    assert far(*gradients) < EXACT


@PT
@pytest.mark.parametrize("name", ["relu", "tanh"])
def test_kept_products_run_backward_once(technique, models, name):
    model = models.torch.nn.ModuleList([models.WRITING[name]()])
    apply(technique, model, save_products=True)
    loss = model[0](models.torch.ones(2, 3, 4, requires_grad=True)).square().sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="Trying to backward an extra time"):
        loss.backward()


@PT
def test_a_gradient_penalty_goes_through_a_block(technique, models):
    assert models.penalized(technique, "1") == models.penalized(technique, "")
