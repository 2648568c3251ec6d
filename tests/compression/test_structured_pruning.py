"""Weak channels are really gone, the rest computes as before, and alike in both frameworks."""

from __future__ import annotations

import functools
import re
import warnings
from dataclasses import replace

import numpy as np
import pytest

from bench.compression import bench_structured_pruning
from bench.compression.bench_structured_pruning import smaller
from bench.harness.plan import Work
from bench.harness.stages import Stages
from shared.specs import TASKS, CNNSpec, ResNetSpec, parameter_count, parameter_shapes, state_shapes
from tests import workers
from tests.compression import teaching
from tests.frameworks import apart

FRAMEWORKS = ("pt", *workers.keras())
PT, TF = pytest.mark.only("pt"), pytest.mark.only("tf", "tf_keras")
BAR = 1e-5  # the parity of the tasks with CNNs
CNN = CNNSpec((8, 8, 2), ((8, 1), (10, 2)), num_classes=10)
RESNET = ResNetSpec((8, 8, 1), 1, (4, 8), num_classes=10)
KEPT = {0.0: (8, 10), 0.3: (6, 7), 0.5: (4, 5), 0.95: (1, 1)}


@functools.cache
def start():
    return teaching.teacher_weights(CNN)


@pytest.fixture(scope="module")
def batches(kit):
    return teaching.batches(kit, CNN, 10)


@pytest.fixture(scope="module")
def pruned(kit, technique, batches):
    """`pruned(share)`: the CNN with fewer channels, fresh."""

    def make(share):
        return technique.remove_channels(kit.models.build(CNN, start()), batches[0][0], share=share)

    return make


@pytest.fixture(scope="module")
def predict(kit, models, batches):
    return lambda model: models.numpy(kit.training.make_predict(model)(batches[0][0]))


def train(kit, model, stream):
    step = kit.training.make_train_step(
        model, teaching.optimizer_of(kit, model), kit.training.cross_entropy
    )
    return teaching.losses_of(kit, step, stream)


def cut(weights, share):
    """The smaller network's weights, cut out of the full ones in NumPy."""
    kept, inputs = {}, slice(None)
    for layer, count in zip(("conv0", "conv1"), KEPT[share], strict=True):
        kernel = weights[f"{layer}.kernel"]
        norms = np.abs(kernel).sum((0, 1, 2))
        stay = np.sort(np.argsort(norms)[len(norms) - count :])
        kept[f"{layer}.kernel"] = kernel[:, :, inputs][..., stay]
        for kind in ("gamma", "beta", "mean", "variance"):
            kept[f"{layer}.bn.{kind}"] = weights[f"{layer}.bn.{kind}"][stay]
        inputs = stay
    return kept | {"head.kernel": weights["head.kernel"][inputs], "head.bias": weights["head.bias"]}


@pytest.mark.parametrize("share", KEPT)
def test_the_strongest_channels_stay_and_nothing_else(kit, technique, batches, share):
    model, spec = kit.models.build(CNN, start()), smaller(CNN, share)
    less = teaching.weights_of(kit, technique.remove_channels(model, batches[0][0], share=share))
    assert teaching.farthest(less, cut(start(), share)) == 0
    shapes = {name: value.shape for name, value in less.items()}
    assert shapes == parameter_shapes(spec) | state_shapes(spec)
    assert (parameter_count(spec) < parameter_count(CNN)) == (share > 0)
    assert teaching.farthest(teaching.weights_of(kit, model), start()) == 0


def test_removed_channels_are_those_that_give_nothing(kit, pruned, predict):
    """Removing the weaker half equals the full network in which that half is silent."""
    weights = {name: value.copy() for name, value in start().items()}
    for layer in ("conv0", "conv1"):
        norms = np.abs(weights[f"{layer}.kernel"]).sum((0, 1, 2))
        weak = np.argsort(norms)[: len(norms) // 2]
        for kind in ("gamma", "beta"):
            weights[f"{layer}.bn.{kind}"][weak] = 0.0
    silent = predict(kit.models.build(CNN, weights))
    assert apart(predict(pruned(0.5)), silent) < BAR
    assert apart(predict(kit.models.build(CNN, start())), silent) > 0.1


def test_a_share_of_zero_is_the_baseline(kit, pruned, batches):
    plain = train(kit, kit.models.build(CNN, start()), batches)
    assert apart(train(kit, pruned(0.0), batches), plain) < 1e-6


def test_twins_agree(kit, technique, models, agrees, pruned, predict, batches):
    """On a residual network, too."""
    less = pruned(0.5)
    agrees("CNN", {"predictions": predict(less), "losses": train(kit, less, batches)}, BAR)
    ((x, _),) = teaching.batches(kit, RESNET, samples=6)
    model = kit.models.build(RESNET, teaching.teacher_weights(RESNET))
    less = technique.remove_channels(model, x, share=0.5)
    predictions = models.numpy(kit.training.make_predict(less)(x))
    before, after = (kit.models.parameter_count(one) for one in (model, less))
    agrees("ResNet", {"predictions": predictions, "count": float(after)}, BAR)
    assert after < 0.3 * before


def test_the_benchmark_takes_channels_from_a_trained_model(
    impl, kit, technique, models, predict, batches, tmp_path
):
    """Its second stage takes no step here."""
    task, stream, epochs = replace(TASKS["digits-cnn"], model=CNN), batches[:4], []

    def fit(step, count):
        if not epochs:
            for batch in stream:
                step(*batch)
        epochs.append(count)

    work = Work(task, "channels_50", {"share": 0.5}, batch_size=16, weights=start())
    stages = Stages(impl, task, start(), 0, tmp_path, fit)
    found = bench_structured_pruning.prepare(impl, work).train(stages)(batches[0][0])
    assert epochs == [task.recipe.epochs, 4]
    trained = kit.models.build(CNN, start())
    optimizer = kit.training.make_optimizer(trained, task.recipe)
    step = kit.training.make_train_step(trained, optimizer, kit.training.cross_entropy)
    teaching.losses_of(kit, step, stream)
    wanted = predict(technique.remove_channels(trained, batches[0][0], share=0.5))
    assert apart(models.numpy(found), wanted) < BAR
    assert apart(predict(trained), wanted) > 0.01


# Models of foreign construction ------------------------------------------------------------------

# Half of all channels, and of each group's: kernels as PyTorch has them.
WIDTHS = {
    "stem": [4, 3, 3, 3],
    "left": [4, 4, 3, 3],
    "deep": [4, 1, 3, 3],
    "grouped": [6, 2, 1, 1],
    "point": [3, 4, 1, 1],
    "hidden": [5, 36],
    "head": [4, 5],
    "more": [2, 5],
}


def branch_weights(silent=False):
    """Weights of the model with branches; silent: nothing reads the weaker half."""
    random, weights = np.random.default_rng(9), {}
    shapes = {"stem": (3, 3, 3, 8), "left": (3, 3, 8, 8), "deep": (3, 3, 8, 1)}
    shapes |= {"grouped": (1, 1, 4, 12), "point": (1, 1, 8, 6)}
    shapes |= {"hidden": (72, 10), "head": (10, 4), "more": (10, 2)}
    for layer, shape in shapes.items():
        weights[f"{layer}.kernel"] = random.normal(size=shape)
        if layer != "deep":
            weights[f"{layer}.bias"] = random.normal(size=shape[-1])
    for kind in ("gamma", "beta", "mean", "variance"):
        weights[f"norm.{kind}"] = random.uniform(0.5, 1.5, 18)
    if silent:
        silence(weights)
    return {name: value.astype(np.float32) for name, value in weights.items()}


def silence(weights):
    """Zero what reads the weaker half of the channels."""

    def norms(layer):
        kernel = np.abs(weights[f"{layer}.kernel"])
        return kernel.reshape(-1, kernel.shape[-1]).sum(0)

    deep = np.abs(weights["deep.kernel"]).sum((0, 1, 3))
    # The grouped convolution reads two runs of four, and makes two of six.
    shared = weaker(norms("stem") + norms("left") + deep, 2)
    both = np.concatenate([weaker(norms("grouped"), 2), weaker(norms("point"), 1)])
    hidden = weaker(norms("hidden"), 1)
    weights["left.kernel"][:, :, shared] = 0.0
    weights["point.kernel"][:, :, shared] = 0.0
    for channel in np.flatnonzero(shared):
        run, place = divmod(channel, 4)
        weights["grouped.kernel"][:, :, place, 6 * run : 6 * run + 6] = 0.0
    weights["hidden.kernel"].reshape(4, 18, 10)[:, both] = 0.0  # pixel by pixel
    for layer in ("head", "more"):
        weights[f"{layer}.kernel"][hidden] = 0.0


def weaker(norms, runs):
    """Mark the smaller half of a run, in the same places of each."""
    sums = norms.reshape(runs, -1).sum(0)
    return np.tile(sums < np.median(sums), runs)


def test_channels_are_followed_through_branches(technique, models, agrees):
    """Biases, a sum, a product, groups, a concatenation, flattened pixels, two inputs, outputs."""
    images = np.random.default_rng(3).normal(size=(5, 8, 8, 3)).astype(np.float32)
    model, x = models.branches(branch_weights(), images)
    less = technique.remove_channels(model, x, share=0.5)
    silent, _ = models.branches(branch_weights(silent=True), images)
    outputs = models.results(less, x)
    for ours, quiet, full in zip(
        outputs, models.results(silent, x), models.results(model, x), strict=True
    ):
        assert apart(ours, quiet) < BAR
        assert apart(full, quiet) > 0.1
    assert models.kernels(less) == WIDTHS
    agrees("branches", dict(zip(("y", "more"), outputs, strict=True)), BAR)


ELSE = "the smaller model computes something else"
OTHERS = [  # model, what is left of it, and what the warning says
    # By plain linear layers the residual stream goes with the rest.
    pytest.param(
        "Attention",
        {
            "tokens.weight": [4, 5],
            "place": [1, 6, 4],
            "norm.weight": [4],
            "up.weight": [6, 4],
            "query.weight": [8, 4],
        },
        [f"'query': {ELSE}"],
        marks=PT,
    ),
    pytest.param(
        "Attention",
        {"tokens.0": [5, 4], "attention.0": [4, 2, 3], "attention.6": [2, 3, 4], "up.0": [4, 6]},
        [],
        marks=TF,
    ),
    pytest.param("Recurrent", {"up.weight": [8, 5], "hidden.weight": [4, 6]}, ["'up'"], marks=PT),
    pytest.param("Recurrent", {"up.0": [5, 8], "hidden.0": [6, 4]}, ["'up'"], marks=TF),
    pytest.param(
        "norms",
        {"0.weight": [4, 6, 3], "1.weight": [4], "3.weight": [4, 2, 2], "6.weight": [3, 8]},
        [],
        marks=PT,
    ),
    pytest.param(
        "norms", {"conv.0": [3, 5, 4], "groups.0": [4], "transposed.0": [2, 2, 4]}, [], marks=TF
    ),
    pytest.param("twice", {"twice.0": [4, 4], "first.0": [5, 4]}, [], marks=TF),
    pytest.param(
        "Encoder",
        {"encoder.linear1.weight": [6, 8], "up.weight": [8, 5]},
        ["'up'"],
        marks=PT,
    ),
    # `torch_pruning` alone would follow rotary positions without end.
    pytest.param(
        "Rotary",
        {"turned.weight": [8, 5], "up.weight": [3, 8]},
        ["'turned': torch_pruning loses count of them"],
        marks=PT,
    ),
    pytest.param("Auxiliary", {"up.weight": [4, 5], "aside.weight": [3, 4]}, [], marks=PT),
    pytest.param(
        "squares",
        {"0.weight": [8, 5], "2.weight": [3, 8]},
        ["'0': the model's code needs the channels it has"],
        marks=PT,
    ),
    pytest.param(
        "alone",
        {"0.weight": [8, 6, 3]},
        ["'0': its groups of 1 channels lose none at this share"],
        marks=PT,
    ),
]


def removed(technique, model, x):
    """The smaller model and the warnings."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        less = technique.remove_channels(model, x, share=0.5)
    return less, " ".join(str(one.message) for one in said)


@pytest.mark.parametrize(("name", "widths", "lines"), OTHERS)
def test_what_can_go_goes_and_a_warning_names_what_stays(technique, models, name, widths, lines):
    less, said = removed(technique, getattr(models, name)(), models.ROWS)
    assert models.widths(less) | widths == models.widths(less)
    assert models.finite(less, models.ROWS)
    assert bool(said) == bool(lines)
    assert all(line in said for line in lines), said


@PT
def test_pt_frozen_layers_stay_frozen(technique, models):
    less, _ = removed(technique, models.frozen(), models.ROWS)
    assert models.widths(less)["0.weight"] == [4, 5]
    assert not any(parameter.requires_grad for parameter in less.parameters())
    assert all(module.training for module in less.modules())


@PT
def test_pt_half_precision_may_round_otherwise(technique, models):
    """In float32 the same model is refused: "rounds" below."""
    less, _ = removed(technique, models.Rounding().bfloat16(), models.ROWS.bfloat16())
    assert models.widths(less)["up.weight"] == [4, 5]
    assert models.finite(less, models.ROWS.bfloat16())


@PT
def test_pt_pixels_are_taken_away_in_any_spelling(technique, models):
    for spelling in models.SPELLINGS:
        model, x = models.spelled(spelling)
        less = technique.remove_channels(model, x, share=0.5)
        assert less.head.in_features == model.head.in_features / 2, spelling


# Bad input ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [1.0, -0.1, float("nan")])
def test_shares_are_of_some_channels(kit, pruned, share):
    with pytest.raises(ValueError, match=f"share must be at least 0 and below 1, not {share}"):
        pruned(share)


CHANNELS = "the model's code needs the channels it has: "
MASKS = "the model has pruning masks: finalize it first"
UNFOLLOWED = {
    "outputs": "can lose channels: all of them are its outputs",
    "no head": "all of them are its outputs",
    "masked": MASKS,
}
UNFOLLOWED_PT = {
    "no layer": "the model has no convolution or linear layer to take channels from",
    "masked, after a prediction": MASKS,
    "unknown": f"'0': {ELSE}",
    "shuffles": "can't trace the model: its code shuffles channels",
    "mixes": f"'conv': {ELSE}",
    "misnamed": f"'conv': {ELSE}",
    "over channels": f"'conv': {ELSE}",
    "rounds": ELSE,
    "flattens samples": f"'conv': {CHANNELS}",
    "splits": f"'conv': {CHANNELS}",
    "tied": "Linear shares its weight with another module",
    "transposed groups": "ConvTranspose2d groups them with other channels",
    "branch": "'trunk': 'b.weight', which the example does not run, may read them",
    "no copy": "Python cannot copy the model: Only Tensors",
}
UNFOLLOWED_TF = {
    "no layer": "the model has no convolution or dense layer to take channels from",
    **dict.fromkeys(("unknown", "mixes", "mixes inside", "by a layer", "misnamed"), ELSE),
    "two outputs": "all of them are its outputs",
    "subclassed": "a subclassed model has no graph",
}
REFUSALS = [
    *UNFOLLOWED.items(),
    *(pytest.param(*row, marks=PT) for row in UNFOLLOWED_PT.items()),
    *(pytest.param(*row, marks=TF) for row in UNFOLLOWED_TF.items()),
]


@pytest.mark.parametrize(("name", "message"), REFUSALS)
def test_a_refusal_says_why(technique, models, name, message):
    kind = ValueError if "finalize" in message or "has no c" in message else NotImplementedError
    with pytest.raises(kind) as caught:
        technique.remove_channels(*models.UNFOLLOWED[name](), share=0.5)
    assert re.search(re.escape(message), " ".join(str(caught.value).split()))
