"""One update of BatchNorm's statistics a step: pooled over the parts, and nothing else changes."""

from __future__ import annotations

import functools
from importlib import import_module

import numpy as np
import pytest

from tests import workers
from tests.frameworks import apart
from tests.train_step import steps
from tests.train_step.steps import CNN, gradients, statistics
from tests.train_step.test_gradient_accumulation import LEFT, PARTS, TARGET

FRAMEWORKS = ("pt", *workers.keras())
MODELS = "steps"
PT, TF = pytest.mark.only("pt"), pytest.mark.only("tf")
MOMENTUM = CNN.bn_momentum
PLACES = {"conv0": 64, "conv1": 16}  # pixels that a BatchNorm sees of a sample


@pytest.fixture(scope="module")
def makers(impl, technique):
    """Parts with an update each, and with one."""
    each = import_module(f"{impl.__name__}.train_step.gradient_accumulation")
    return {"each": each.make_train_step, "once": technique.make_train_step}


@pytest.fixture(scope="module")
def applied(kit, makers, models):
    """`applied()`: of a plain step, whole and by the parts alone; `applied("once", n)`: in n."""

    @functools.cache
    def applied(by=None, parts=None):
        ((x, y),) = steps.batches(kit, CNN, 1, 10)
        if by:
            return steps.applied(kit, models, CNN, makers[by], [(x, y)], micro_batches=parts)[0]
        stream = [(x, y), *((x[a:b], y[a:b]) for a, b in PARTS)]
        return steps.applied(kit, models, CNN, None, stream)

    return applied


def test_ten_steps_agree_and_have_the_losses_of_plain_accumulation(kit, makers, agrees):
    """Nothing in training reads the running statistics."""
    stream, losses = steps.batches(kit, CNN, 10, 30), {}
    for name, make in makers.items():
        prepared = steps.prepare(kit, CNN, make, micro_batches=4)
        losses[name] = steps.losses_of(kit, prepared, stream)
    assert losses["once"] == losses["each"]
    agrees("ten steps", {"losses": losses["once"]}, 1e-5)


def test_gradients_are_those_of_plain_accumulation(applied):
    assert steps.same(gradients(applied("once", 3)), gradients(applied("each", 3)))


def test_one_part_updates_as_the_plain_step(applied):
    whole, *_ = applied()
    assert steps.farthest(statistics(applied("once", 1)), statistics(whole)) < 1e-6


def test_statistics_pool_the_parts(framework, applied):
    """Mean and variance of all values together, each framework with its own kind of variance."""
    before, (_, *alone), expected = statistics(steps.teacher_weights(CNN)), applied(), {}
    seen = [
        {n: (v - (1 - MOMENTUM) * before[n]) / MOMENTUM for n, v in statistics(part).items()}
        for part in alone
    ]
    for layer, places in PLACES.items():
        counts = np.array([[3], [3], [4]]) * places
        shares, total = counts / counts.sum(), counts.sum()
        means = np.array([part[f"{layer}.bn.mean"] for part in seen])
        variances = np.array([part[f"{layer}.bn.variance"] for part in seen])
        mean = (shares * means).sum(0)
        if framework == "pt":  # unbiased
            variances = variances * (counts - 1) / counts
        variance = (shares * (variances + (means - mean) ** 2)).sum(0)
        if framework == "pt":
            variance = variance * total / (total - 1)
        expected |= {f"{layer}.bn.mean": mean, f"{layer}.bn.variance": variance}
    expected = {n: (1 - MOMENTUM) * before[n] + MOMENTUM * v for n, v in expected.items()}
    assert steps.farthest(statistics(applied("once", 3)), expected) < 1e-5


def test_they_equal_one_large_batch_in_the_first_layer_alone(flavour, applied):
    (whole, *_), ours, each = applied(), applied("once", 3), applied("each", 3)
    # tf_keras pools unbiased variances, too large by 1/n for the n values of a part.
    rough = 1 / (3 * PLACES["conv0"]) if flavour == "tf_keras" else 1e-5
    for name, bar in (("conv0.bn.mean", 1e-5), ("conv0.bn.variance", rough)):
        assert apart(ours[name], whole[name]) < bar
        assert apart(each[name], whole[name]) > 10 * bar
    assert steps.farthest(statistics(ours), statistics(whole)) > 1e-3


def pooled_twice(momentum, ddof):
    """Mean and variance of a new layer after two updates from all of the data."""
    kept = (1 - momentum) ** 2
    return (1 - kept) * LEFT.mean(0), kept + (1 - kept) * LEFT.var(0, ddof=ddof)


@PT
def test_norms_of_pytorch_over_few_values(technique, models):
    """Parts of two and three rows, where the bias of a variance is large; the model stays as is."""
    torch, nn = models.torch, models.torch.nn
    norms = [nn.BatchNorm1d(4), nn.BatchNorm1d(4, momentum=None), nn.BatchNorm1d(4)]
    model = nn.Sequential(*norms, nn.Linear(4, 4))
    optimizer = models.descent(model, 0.0)
    step = technique.make_train_step(model, optimizer, models.squares, micro_batches=4)
    first, cumulative, frozen = norms
    frozen.eval()
    for _ in range(2):
        step(models.tensor(LEFT), models.tensor(TARGET))
    mean, variance = pooled_twice(0.1, ddof=1)
    assert apart(models.numpy(first.running_mean), mean) < 1e-6
    assert apart(models.numpy(first.running_var), variance) < 1e-6
    # Its input has a variance of 1 in each part: unbiased over nine rows that is 9/8.
    assert np.allclose(cumulative.running_var, 9 / 8, rtol=1e-2)
    assert [int(norm.num_batches_tracked) for norm in norms] == [2, 2, 0]
    assert torch.equal(frozen.running_mean, torch.zeros(4))
    before = first.running_mean.clone()
    with pytest.raises(RuntimeError):
        step(models.tensor(LEFT[:, :3].copy()), models.tensor(TARGET))
    assert torch.equal(first.running_mean, before)
    assert [norm.momentum for norm in norms] == [0.1, None, 0.1]
    assert not any(module._forward_hooks for module in model.modules())


@PT
@pytest.mark.parametrize("kind", ["recomputed", "untracked"])
def test_only_what_the_first_run_tracks_is_pooled(technique, models, kind):
    """Not what a recomputed block sees again, nor what a layer does not track."""
    from pt_impl.train_step.activation_checkpointing import apply_checkpointing

    torch, nn, seen = models.torch, models.torch.nn, []

    class Perturbed(nn.BatchNorm1d):
        def forward(self, x):
            output = super().forward(x)
            self.track_running_stats = False  # as virtual adversarial training does
            for _ in range(often):
                super().forward(x[:2] + 100.0)
            self.track_running_stats = True
            return output

    for often in (0, 1):
        torch.manual_seed(0)
        norm = Perturbed(4) if kind == "untracked" else nn.BatchNorm1d(4)
        model = nn.Sequential(nn.Sequential(norm, nn.Linear(4, 4)), nn.ReLU())
        if kind == "recomputed" and often:
            apply_checkpointing(model, blocks="0")
        optimizer = models.descent(model, 0.0)
        step = technique.make_train_step(model, optimizer, models.squares, micro_batches=4)
        step(models.tensor(LEFT), models.tensor(TARGET))
        seen.append([norm.running_mean.tolist(), norm.running_var.tolist()])
    assert seen[0] == seen[1]


@TF
def test_norms_of_keras_over_few_values(technique, models):
    """One within a layer, and a frozen one."""
    layers = models.layers

    class Inside(layers.Layer):
        def __init__(self):
            super().__init__()
            self.norm = layers.BatchNormalization(momentum=0.9)

        def call(self, x, training=False):
            return self.norm(x, training=training)

    inside, frozen = Inside(), layers.BatchNormalization()
    frozen.trainable = False
    model = models.keras.Sequential([models.keras.Input((4,)), inside, frozen, layers.Dense(4)])
    before = [np.array(weight) for weight in frozen.weights]
    optimizer = models.descent(model, 0.0)
    step = technique.make_train_step(model, optimizer, models.squares, micro_batches=4)
    for _ in range(2):
        step(models.tensor(LEFT), models.tensor(TARGET))
    mean, variance = pooled_twice(0.1, ddof=0)
    assert apart(np.array(inside.norm.moving_mean), mean) < 1e-6
    assert apart(np.array(inside.norm.moving_variance), variance) < 1e-6
    assert all(map(np.array_equal, before, frozen.get_weights()))
    assert (inside.norm.momentum, frozen.momentum) == (0.9, 0.99)


@TF
@pytest.mark.parametrize("traced_before", [True, False])
def test_a_call_that_is_a_graph_of_its_own_knows_the_momentum(technique, models, traced_before):
    """That of a part in the step, and again its own in a plain call afterwards."""
    tf, keras, layers = models.tf, models.keras, models.layers

    class Decorated(keras.Model):
        def __init__(self):
            super().__init__()
            self.norm, self.head = layers.BatchNormalization(momentum=0.9), layers.Dense(4)

        @tf.function
        def call(self, x, training=False):
            return self.head(self.norm(x, training=training))

    model, x = Decorated(), models.tensor(LEFT)
    model(x)  # Keras's first call of a model, which builds it, changes no variable
    if traced_before:
        model(x, training=True)
    optimizer = models.descent(model, 0.0)
    step = technique.make_train_step(model, optimizer, models.squares, micro_batches=3)
    trained = tf.function(lambda: model(x, training=True))
    for call, *arguments in ((step, x, models.tensor(TARGET)), (trained,)):
        model.norm.moving_mean.assign(tf.zeros(4))
        call(*arguments)
        mean = np.array(model.norm.moving_mean)
        np.testing.assert_allclose(mean, 0.1 * LEFT.mean(0), rtol=1e-5, atol=1e-7)


@TF
def test_batch_renormalisation_is_refused(makers, models):
    renorm = models.layers.BatchNormalization(renorm=True)
    model = models.keras.Sequential([models.keras.Input((4,)), renorm, models.layers.Dense(2)])
    arguments = model, models.descent(model), models.squares
    with pytest.raises(NotImplementedError, match="accumulated statistics: batch renorm"):
        makers["once"](*arguments)
    makers["each"](*arguments)
