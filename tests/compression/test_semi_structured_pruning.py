"""Two of each four weights are zero, the smaller two, and stay so, alike in both frameworks."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

from bench.compression import bench_semi_structured_pruning as bench
from bench.harness.plan import Work
from bench.harness.stages import Stages
from shared.specs import TASKS, CNNSpec
from shared.weights import init_weights
from tests.compression import teaching

FRAMEWORKS = ("pt", "tf", "tf_keras")
MODELS = "pruning"
PT, TF = pytest.mark.only("pt"), pytest.mark.only("tf", "tf_keras")
CNN = CNNSpec((8, 8, 3), ((6, 1), (8, 2)), num_classes=10)  # groups of 3, of 4 and 2, of 4 and 4
# Of three inputs two stay; of six, four and two make 2 + 2; of eight half.
ZEROS = {"conv0.kernel": 1 / 3, "conv1.kernel": 1 / 3, "head.kernel": 1 / 2}


def start(*, ties=False):
    """Initial weights; with `ties` of few different magnitudes."""
    weights = init_weights(CNN, seed=1)
    for name in ZEROS if ties else ():
        weights[name] = (np.round(4 * weights[name]) / 4).astype(np.float32)
    return weights


def by_hand(kernel):
    """The kernel with the smaller two of each four inputs zero, group by group."""
    less = kernel.copy()
    rows = np.moveaxis(less, -2, -1)  # a view
    for place in np.ndindex(rows.shape[:-1]):
        for first in range(0, rows.shape[-1], 4):
            group = rows[place][first : first + 4]
            for index in sorted(range(len(group)), key=lambda i: (-abs(group[i]), i))[2:]:
                group[index] = 0.0
    return less


def train(kit, model, stream):
    optimizer = kit.training.make_optimizer(model, TASKS["digits-cnn"].recipe)
    step = kit.training.make_train_step(model, optimizer, kit.training.cross_entropy)
    return teaching.losses_of(kit, step, stream)


@pytest.mark.parametrize("ties", [False, True])
def test_the_smaller_two_of_four_are_zero(kit, technique, ties):
    weights = start(ties=ties)
    source = kit.models.build(CNN, weights)
    final = technique.finalize_two_to_four(technique.apply_two_to_four(source))
    after = teaching.weights_of(kit, final)
    for name, share in ZEROS.items():
        assert np.array_equal(after[name], by_hand(weights[name])), name
        assert ties or np.mean(after[name] == 0) == pytest.approx(share)
    kernels = after["head.kernel"], start()["head.kernel"]
    assert [bench.most_of_four(kernel) for kernel in kernels] == [2, 4]
    assert teaching.farthest(teaching.weights_of(kit, source), weights) == 0


def test_masks_hold_while_sgd_with_momentum_trains(kit, technique, models, agrees):
    """Twins lose alike, and finalizing keeps predictions."""
    stream = teaching.batches(kit, CNN, 10, samples=16)
    model = technique.apply_two_to_four(kit.models.build(CNN, start()))
    losses = train(kit, model, stream)
    agrees("ten steps", {"losses": losses}, 1e-5)
    assert losses[-1] < losses[0]
    final = technique.finalize_two_to_four(model)
    masked, plain = (
        models.numpy(kit.training.make_predict(one)(stream[0][0])) for one in (model, final)
    )
    assert np.allclose(masked, plain, rtol=1e-6, atol=1e-6)
    assert np.abs(plain).max() > 0.1
    weights = teaching.weights_of(kit, final)
    for name in ZEROS:
        first = by_hand(start()[name])
        assert np.array_equal(weights[name] == 0, first == 0), name
        assert not np.allclose(weights[name], first)


def test_the_benchmark_masks_a_trained_model(impl, kit, technique, models, tmp_path):
    """No stage but the first, which rows share, takes a step here."""
    task, stream = replace(TASKS["digits-cnn"], model=CNN), teaching.batches(kit, CNN, 4)
    x, epochs = stream[0][0], []

    def fit(step, count):
        if not epochs:
            for batch in stream:
                step(*batch)
        epochs.append(count)

    shared = Stages(impl, task, start(), 0, tmp_path, fit)
    dense, masked = (
        models.numpy(bench.prepare(impl, work).train(shared)(x))
        for work in (
            Work(task, "dense", {}, batch_size=16, weights=start()),
            Work(task, "masked", {"masked": True}, batch_size=16, weights=start()),
        )
    )
    assert epochs == [task.recipe.epochs, 4, 4]
    trained = kit.models.build(CNN, start())
    train(kit, trained, stream)
    whole, after = (
        models.numpy(kit.training.make_predict(one)(x))
        for one in (trained, technique.apply_two_to_four(trained))
    )
    assert np.allclose(dense, whole, rtol=1e-5, atol=1e-5)
    assert np.allclose(masked, after, rtol=1e-5, atol=1e-5)
    assert not np.allclose(after, whole, atol=0.01)


def test_linear_layers_and_plain_convolutions_alone_are_pruned(technique, models):
    source = models.Grouped()
    zeros = models.zeros_by_layer(
        technique.finalize_two_to_four(technique.apply_two_to_four(source))
    )
    assert zeros == {"conv": 0.5, "head": 0.5, "grouped": 0.0, "table": 0.0}
    assert models.zeros_by_layer(source)["head"] == 0.0


@PT
def test_pt_an_embedding_stays_dense_where_it_is_the_head_too(technique, models):
    final = technique.finalize_two_to_four(technique.apply_two_to_four(models.language()))
    assert models.zeros_by_layer(final) == {"0": 0.0, "1": 0.5, "2": 0.0}
    assert final[2].weight is final[0].weight


@PT
@pytest.mark.parametrize(
    ("make", "masks"),
    [("twice", [True, False, True]), ("newly_computed", [False, False, True])],
)
def test_pt_a_layer_has_one_mask_and_what_is_computed_none(technique, models, make, masks):
    model = technique.apply_two_to_four(getattr(models, make)())
    assert [hasattr(module, "weight_mask") for module in model] == masks


@PT
def test_pt_kernels_have_the_pattern_that_gpus_leave_zeros_out_of(technique, models):
    """PyTorch's own conversion, which drops what is not in the pattern, keeps all of it."""
    masked, other = (technique.apply_two_to_four(models.wide()) for _ in range(2))
    final = technique.finalize_two_to_four(other).half()
    kernel = final[0].weight.detach().clone()
    assert models.packed_and_unpacked(kernel).equal(kernel)
    for model, message in (
        (models.wide(), "the model has no nn.Linear with the pattern"),
        (masked, "the model has pruning masks"),
        (final, "0 is on cpu: only Nvidia GPUs from Ampere"),
    ):
        with pytest.raises((ValueError, NotImplementedError), match=message):
            technique.compress_two_to_four(model)
    assert final[0].weight.equal(kernel)


# Bad input ---------------------------------------------------------------------------------------


def of(make):
    """A refusal of the model that the helpers make of a name."""
    return lambda t, m: t.apply_two_to_four(getattr(m, make)())


def dense(models):
    return models.linear(np.ones((8, 8), np.float32))


REFUSALS = [
    (
        lambda t, m: t.apply_two_to_four(t.apply_two_to_four(dense(m))),
        "the model has pruning masks already",
    ),
    (lambda t, m: t.finalize_two_to_four(dense(m)), "the model has no masks"),
    (
        lambda t, m: t.finalize_two_to_four(t.finalize_two_to_four(t.apply_two_to_four(dense(m)))),
        "the model has no masks",
    ),
    (of("without_kernels"), "the model has no "),
    pytest.param(
        of("tied"),
        "torch.nn.utils.prune masks one module's tensor, but 0.weight has two owners",
        marks=PT,
    ),
    pytest.param(
        lambda t, m: t.apply_two_to_four(m.language()[::2]),
        "the model has no nn.Linear or nn.Conv2d to prune",
        marks=PT,
    ),
    pytest.param(of("computed"), "Python cannot copy the model: Only Tensors", marks=PT),
    pytest.param(of("unbuilt"), "the model has no variables yet", marks=TF),
    pytest.param(of("subclassed"), "a subclassed model says nothing", marks=pytest.mark.only("tf")),
    *(
        pytest.param(of(make), message, marks=pytest.mark.only("tf_keras"))
        for make, message in (
            ("subclassed", "tfmot prunes functional"),
            ("twice", "'shared' runs more than once"),
            ("within", "'deep' is within another layer"),
        )
    ),
]


@pytest.mark.parametrize(("call", "message"), REFUSALS)
def test_a_refusal_says_why(technique, models, call, message):
    with pytest.raises((ValueError, NotImplementedError)) as caught:
        call(technique, models)
    assert re.search(re.escape(message), " ".join(str(caught.value).split()))
