"""What decays is what was asked for, by both kinds of decay, and labels and dropout do theirs."""

from __future__ import annotations

import re
from types import SimpleNamespace

import numpy as np
import pytest
from scipy import special

from bench.harness.plan import Work
from bench.recipes import bench_regularization
from shared.specs import TASKS
from shared.weights import init_weights
from tests import workers

FRAMEWORKS = ("pt", *workers.keras())
MODELS = "recipes"
DECAY = 0.3
WORDS = {"biases": ("dense.bias",), "norms": ("norm",), "embeddings": ("embedding",)}
PT, TF = pytest.mark.only("pt"), pytest.mark.only("tf", "tf_keras")
CODES = np.arange(12)


def decays(name, asked):
    """Whether a parameter of `models.language()` decays where this is asked for."""
    words = ["dense.weight", "dense.kernel", *(word for kind in asked for word in WORDS[kind])]
    return any(word in name.replace("/", ".") for word in words)


# Decay -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asked", [(), tuple(WORDS)], ids=["kernels", "everything"])
def test_the_penalty_and_its_gradient_are_those_of_the_formula(technique, models, asked):
    model, settings = models.language(), dict.fromkeys(asked, True)
    value, gradients = models.gradients(
        model, lambda: technique.l2_penalty(model, weight_decay=DECAY, **settings)
    )
    weights = {n: v for n, v in models.parameters(model).items() if decays(n, asked)}
    squares = sum(np.square(weight).sum() for weight in weights.values())
    assert value == pytest.approx(DECAY / 2 * squares, rel=1e-6)
    assert weights.keys() == {name for name, found in gradients.items() if found is not None}
    for name, weight in weights.items():
        assert np.allclose(gradients[name], DECAY * weight, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("asked", [(), ("biases",), ("norms",), ("embeddings",)])
def test_only_what_was_asked_for_decays(technique, models, asked):
    model = models.language()
    models.fill(model, 1.0)
    optimizer, settings = models.adamw(model, 0.1, decay=0.9), dict.fromkeys(asked, True)
    names = technique.apply_decoupled_decay(model, optimizer, weight_decay=DECAY, **settings)
    models.still(model, optimizer, steps=3)
    for name, weight in models.parameters(model).items():
        left = (1 - 0.1 * DECAY) ** 3 if decays(name, asked) else 1.0
        assert np.allclose(weight, left, rtol=1e-5), name
        assert (name in names) == decays(name, asked), name


def test_under_sgd_both_are_one_and_under_adam_they_are_not(kit, technique, models, agrees):
    """Two weights of one whose gradients are +-1 and +-100. Twins train alike with either decay."""
    inputs = [np.array([[1.0, 100.0]], np.float32) * (-1) ** step for step in range(200)]
    found = {}
    for rule, make, rate in (("sgd", models.sgd, 1e-3), ("adam", models.adamw, 1e-2)):
        for kind in ("nothing", "l2", "decoupled"):
            model, loss_fn = models.linear(np.ones((2, 1), np.float32)), models.total
            optimizer = make(model, rate)
            if kind == "l2":
                loss_fn = technique.make_penalized_loss(loss_fn, model, weight_decay=0.1)
            if kind == "decoupled":
                technique.apply_decoupled_decay(model, optimizer, weight_decay=0.1)
            step = kit.training.make_train_step(model, optimizer, loss_fn)
            for x in inputs:
                step(models.tensor(x), models.tensor(np.zeros(1)))
            found[f"{rule}, {kind}"] = models.kernel(model).ravel()
    assert np.allclose(found["sgd, l2"], found["sgd, decoupled"], atol=2e-4)
    assert np.all(found["sgd, nothing"] - found["sgd, l2"] > 0.01)
    share = (1 - 1e-2 * 0.1) ** 200
    assert np.allclose(found["adam, decoupled"], share, atol=0.02)  # the same for both weights
    lost = found["adam, nothing"] - found["adam, l2"]
    # The penalty is divided by the size of the gradient: a hundredth of it moves the other weight.
    assert lost[0] > max(0.05, 20 * lost[1])
    agrees("200 steps", found, 1e-4)


def test_what_was_frozen_decays_once_it_trains_as_the_rest_does(technique, models):
    model = models.dense_layers()
    models.fill(model, 1.0)
    models.train_layer(models.layers(model)[0], False)
    optimizer = models.adamw(model, 0.1)
    loss = technique.make_penalized_loss(models.total, model, weight_decay=0.5)
    technique.apply_decoupled_decay(model, optimizer, weight_decay=0.5)
    models.train_layer(models.layers(model)[0], True)
    penalized = float(loss(models.tensor(np.zeros(1, np.float32)), None))
    models.still(model, optimizer)
    assert penalized == pytest.approx(0.5 / 2 * 8)
    means = [weight.mean() for weight in models.parameters(model).values()]
    assert means == pytest.approx([0.95, 1.0, 0.95, 1.0])


def test_the_penalty_of_doubles_is_a_double(technique, models):
    penalty = technique.l2_penalty(models.wide(), weight_decay=0.5)
    assert models.numpy(penalty).dtype == np.float64


@PT
def test_groups_are_split_without_a_loss(kit, technique, models):
    """In the middle of a training: moments stay, names and a rate of its own go with each group."""
    model, rate = models.language(), models.tensor(np.float32(0.1))
    optimizer = models.adamw(model, rate)
    step = kit.training.make_train_step(model, optimizer, kit.training.cross_entropy)
    step(models.tensor(CODES), models.tensor(CODES))
    kept = {id(p): moments["exp_avg"].clone() for p, moments in optimizer.state.items()}
    technique.apply_decoupled_decay(model, optimizer, weight_decay=0.1)
    held = [id(p) for group in optimizer.param_groups for p in group["params"]]
    assert sorted(held) == sorted(map(id, model.parameters()))
    assert all((optimizer.state[p]["exp_avg"] == kept[id(p)]).all() for p in optimizer.state)
    one, other = optimizer.param_groups
    assert one["param_names"] == ["frozen.weight", "dense.weight"]
    assert one["lr"] == other["lr"]
    assert one["lr"] is not other["lr"]
    part = models.adamw(model.dense)
    names = technique.apply_decoupled_decay(model, part, weight_decay=0.1, norms=True)
    assert names == ["dense.weight"]  # not what another optimizer may train


@pytest.mark.only("tf")
def test_tf_kernels_that_are_no_matrices_decay_under_muon_as_the_rest_does(technique, models):
    model = models.convolution_and_dense()
    models.fill(model, 1.0)
    optimizer = models.keras.optimizers.Muon(0.1)
    technique.apply_decoupled_decay(model, optimizer, weight_decay=0.5)
    models.still(model, optimizer)
    means = [weight.mean() for weight in models.parameters(model).values()]
    assert means == pytest.approx([0.95, 1.0, 0.95, 1.0])


def test_kernels_of_models_of_others_decay(technique, models):
    """Also behind spectral and weight normalisation: not an embedding, nor what normalises."""
    model = models.foreign()
    assert len(technique.decayed_parameters(model)) == models.kernels_of(model) > 20
    model, kernels = models.computed()
    assert technique.decayed_parameters(model) == kernels


def test_an_epoch_takes_the_same_share_away_at_any_batch(technique):
    scaled = technique.scale_decay(weight_decay=0.01, batch_size=256)
    assert (1 - 0.1 * scaled) ** 4 == pytest.approx((1 - 0.1 * 0.01) ** 16, rel=1e-4)


# Labels and dropout ------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5])
def test_smoothed_labels_are_those_of_the_formula(technique, models, share):
    random = np.random.default_rng(2)
    logits = random.normal(0, 3, (2, 5, 7)).astype(np.float32)
    labels = random.integers(0, 7, (2, 5))
    value, gradient = models.gradient_at(
        lambda z: technique.smoothed_cross_entropy(z, models.tensor(labels), smoothing=share),
        logits,
    )
    log = special.log_softmax(logits.astype(float), -1)
    target = np.eye(7)[labels] * (1 - share) + share / 7
    assert value == pytest.approx(-(target * log).sum(-1).mean(), rel=1e-5)
    assert np.allclose(gradient, (np.exp(log) - target) / 10, atol=1e-6)


def test_dropout_stands_before_the_head(technique, models):
    """Whatever is around the head; and its rate changes."""
    x = np.ones((20, models.WIDTH), np.float32)
    for model in models.identities():
        names = models.parameters(model).keys()
        changed = technique.add_dropout(model, rate=0.75)
        dropped = models.output(changed, x, training=True)
        assert np.unique(dropped).tolist() == [0.0, 4.0]  # what is kept is divided by a quarter
        assert (dropped > 0).mean() == pytest.approx(0.25, abs=0.03)
        assert (models.output(changed, x) == 1.0).all()
        assert models.parameters(changed).keys() == names
        assert len(technique.set_dropout_rate(changed, rate=0.25)) == 1
        kept = (models.output(changed, x, training=True) > 0).mean()
        assert kept == pytest.approx(0.75, abs=0.03)
        with pytest.raises(ValueError, match="set_dropout_rate"):
            technique.add_dropout(changed, rate=0.5)


def test_rates_of_dropouts_that_are_on_change(technique, models):
    model = models.dropped()
    assert technique.set_dropout_rate(model, rate=0.6)
    assert models.dropout_rates(model) == [0.6, 0.0, 0.6, 0.6, 0.6]


@TF
def test_tf_a_model_with_dropout_is_called_as_before(technique, models):
    dicts, x = models.of_dicts()
    changed = technique.add_dropout(dicts, rate=0.5)
    assert np.allclose(changed(x)["logits"], dicts(x)["logits"])
    (codes,) = technique.add_dropout(models.of_integers(), rate=0.5).inputs
    assert codes.dtype == "int32"


def decay(technique, model, optimizer_of):
    return technique.apply_decoupled_decay(model, optimizer_of(model), weight_decay=0.1)


def smooth_all(t, m):
    return t.smoothed_cross_entropy(m.tensor(np.zeros((1, 2), "f4")), m.tensor([0]), smoothing=1.0)


L2 = "use AdamW or decoupled_weight_decay=True, or l2_penalty"
REFUSALS = [
    (lambda t, m: t.set_dropout_rate(m.dense_layers(), rate=0.5), "no dropout that is on"),
    (lambda t, m: t.set_dropout_rate(m.dropped(), rate=1.0), "below 1, not 1.0"),
    (lambda t, m: t.l2_penalty(m.dense_layers(), weight_decay=-1.0), "0 or more, not -1.0"),
    (smooth_all, "smoothing is at least 0 and below 1, not 1.0"),
    (lambda t, m: t.add_dropout(m.dense_layers(), rate=0.5, head="tail"), "no head 'tail'"),
    (lambda t, m: t.add_dropout(m.without_dense(), rate=0.5), "no head ''"),
    (lambda t, m: t.scale_decay(weight_decay=0.1, batch_size=0), "1 or more, not 0, 64"),
    *(
        pytest.param(call, message, marks=PT)
        for call, message in (
            (
                lambda t, m: decay(t, m.language(), lambda model: m.adamw(model.norm)),
                "nothing in the optimizer",
            ),
            (lambda t, m: decay(t, m.language(), m.scheduled), "the optimizer has a scheduler"),
            (lambda t, m: decay(t, m.wide(), m.adam), L2),
            (
                lambda t, m: decay(t, m.wide(), m.momentum),
                L2,
            ),
            (lambda t, m: t.add_dropout(m.two_heads(), rate=0.5), "a head beside boxes: name one"),
            (
                lambda t, m: t.add_dropout(m.dropout_at_the_end_of_a_part(), rate=0.5),
                "1 has dropout before it",
            ),
        )
    ),
    *(
        pytest.param(call, message, marks=TF)
        for call, message in (
            (lambda t, m: decay(t, m.wide(), m.built), "optimizer is built"),
            (lambda t, m: t.add_dropout(m.language(), rate=0.5, head="dense"), "no graph of"),
            (lambda t, m: t.add_dropout(m.branched(), rate=0.5), "no graph of layers that ends"),
            (lambda t, m: t.add_dropout(m.dense_within_another(), rate=0.5), "name the head"),
        )
    ),
]


@pytest.mark.parametrize(("call", "message"), REFUSALS)
def test_a_refusal_says_why(technique, models, call, message):
    with pytest.raises((ValueError, NotImplementedError), match=re.escape(message)):
        call(technique, models)


# Rows --------------------------------------------------------------------------------------------


def row(name):
    """The work of a row of the benchmark."""
    (variant,) = [v for v in bench_regularization.TECHNIQUE.variants if v.name == name]
    task = TASKS["digits-few"]
    return Work(task, name, variant.settings, 8, init_weights(task.model, seed=3))


@pytest.mark.parametrize("name", ["none", "without_batchnorm"])
def test_a_sample_s_output_depends_on_its_companions_by_batchnorm_alone(impl, kit, models, name):
    """Of four samples among two sets of others."""
    work = row(name)
    drawn = np.random.default_rng(4).normal(size=(12, 32, 32, 1)).astype(np.float32)
    prepared = bench_regularization.prepare(impl, work)
    among = [np.concatenate([drawn[:4], drawn[start : start + 4]]) for start in (4, 8)]
    one, other = (models.output(prepared.model, x, training=True)[:4] for x in among)
    kept = kit.models.export_weights(prepared.model)
    for part, weight in work.weights.items():
        if part.endswith(".kernel"):
            assert np.array_equal(kept[part], weight)
    biases = sorted(part for part in kept if part.endswith(".bias"))
    batch = kit.data.to_device(among[0], np.arange(8))
    shown = bench_regularization.took_effect(impl, row("without_batchnorm"), prepared, batch)
    if name == "none":
        assert np.abs(one - other).max() > 0.1
        assert biases == ["head.bias"]
        assert "conv0.bn.mean" in shown[1]
    else:
        assert np.abs(one - other).max() < 1e-6
        assert biases == [*(f"conv{number}.bias" for number in range(4)), "head.bias"]
        assert shown == ({"tensors": 10}, None)
    losses = [kit.runtime.to_float(prepared.step(*batch)) for _ in range(30)]
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize(
    ("name", "rate", "batch"),
    [
        ("decoupled", 0.05, None),
        ("decoupled_x2", 0.05, 120),
        ("decoupled_x2_scaled", 0.1, 120),
    ],
)
def test_rows_of_twice_the_batch_have_the_decay_as_it_is_and_scaled(
    impl, models, name, rate, batch
):
    prepared, asked = bench_regularization.prepare(impl, row(name)), {}
    prepared.train(SimpleNamespace(watch=lambda *_, **how: asked.update(how)))
    assert models.decay_of(prepared.optimizer) == pytest.approx(rate)
    assert asked["batch_size"] == batch
