"""Features are regressed and compared as NumPy does it, they teach, and twins agree.

The optimizer of the gradient tests, `models.recorder`, puts the gradient in the weight's place.
"""

from __future__ import annotations

import functools
import re
from dataclasses import replace

import numpy as np
import pytest

from bench.compression import bench_feature_distillation as bench
from bench.harness.plan import Work
from shared.specs import TASKS, ResNetSpec
from shared.weights import init_weights
from tests import workers
from tests.compression import teaching
from tests.compression.teaching import CNN
from tests.frameworks import apart

FRAMEWORKS = ("pt", *workers.keras())
MODELS = "distillation"
BAR = 1e-5
WEIGHT = 0.5
REACHED = ("conv0.", "conv1.")  # the layers that lead to the regressor
DEEP = ResNetSpec((32, 32, 1), 3, (4, 6, 8), num_classes=10)  # with the layers of the benchmark


@pytest.fixture(scope="module")
def attach(technique, models):
    """`attach(student, guide, x)`, or with other layers than those of CNN and RESNET."""

    def attach(student, guide, x, ours=None, theirs=None):
        layers = {"student_layer": ours or models.LAYERS[0]}
        layers |= {"teacher_layer": theirs or models.LAYERS[1]}
        return technique.attach_regressor(student, guide, x, **layers)

    return attach


@pytest.fixture(scope="module")
def teach(kit, technique, models, attach):
    """`teach(student, x, **settings)`: the step that learns a teacher's features, and its model.

    optimizer: makes one of a model; that of the task is the default.
    """

    def teach(student, x, optimizer=None, loss_fn=None, guide=None, **settings):
        guide, loss_fn = guide or teaching.teacher_of(kit), loss_fn or kit.training.cross_entropy
        both = attach(student, guide, x)
        optimizer = optimizer(both) if optimizer else teaching.optimizer_of(kit, both)
        settings |= {"teacher_layer": models.LAYERS[1]}
        return technique.make_train_step(both, guide, optimizer, loss_fn, **settings), both

    return teach


@pytest.fixture(scope="module")
def stream(kit):
    return teaching.batches(kit, CNN, 5)


def plain_step(kit, student, optimizer):
    return kit.training.make_train_step(student, optimizer, kit.training.cross_entropy)


@pytest.fixture(scope="module")
def plain(kit, stream):
    """Losses and weights of five steps without features."""
    student = teaching.student_of(kit)
    step = plain_step(kit, student, teaching.optimizer_of(kit, student))
    return teaching.losses_of(kit, step, stream), teaching.weights_of(kit, student)


@pytest.fixture(scope="module")
def learn(kit, teach, stream):
    """`learn(weight)`: losses and weights of five steps with features."""

    @functools.cache
    def learn(weight):
        student = teaching.student_of(kit)
        step, _ = teach(student, stream[0][0], weight=weight)
        return teaching.losses_of(kit, step, stream), teaching.weights_of(kit, student)

    return learn


# The step ----------------------------------------------------------------------------------------


def test_the_regressor_starts_alike_everywhere(kit, models, attach, stream):
    both = attach(teaching.student_of(kit), teaching.teacher_of(kit), stream[0][0])
    drawn = np.random.default_rng(0).normal(0.0, 6**-0.5, (6, 12))
    assert np.allclose(models.regressor(both)["kernel"], drawn, atol=1e-7)


@pytest.fixture(scope="module")
def gradients(kit, models, teach, stream):
    """Loss and gradients of one step, those of the regressor, and the features' error before it."""
    student = teaching.student_of(kit)
    step, both = teach(student, stream[0][0], models.recorder, weight=WEIGHT)
    error = models.feature_error(both, teaching.teacher_of(kit), models.LAYERS[1], stream[0][0])
    loss = kit.runtime.to_float(step(*stream[0]))
    return loss, teaching.trainable_of(kit, student, CNN), models.regressor(both), error


def test_the_loss_is_that_of_labels_and_features(gradients, plain):
    loss, _, _, error = gradients
    labels = plain[0][0]
    assert loss == pytest.approx(labels + WEIGHT * error, rel=1e-5)
    assert WEIGHT * error > 0.1 * labels  # or there is nothing to see


def test_twins_agree_in_loss_and_gradient(gradients, learn, agrees):
    """Those of the regressor too."""
    loss, student, regressor, _ = gradients
    agrees("one step", {"loss": loss} | student | regressor, BAR)
    agrees("five steps", {"losses": learn(WEIGHT)[0]}, BAR)


def test_the_features_reach_the_layers_before_the_regressor_and_no_others(
    kit, models, gradients, stream
):
    student = teaching.student_of(kit)
    plain_step(kit, student, models.recorder(student))(*stream[0])
    for name, labels in teaching.trainable_of(kit, student, CNN).items():
        difference = apart(gradients[1][name], labels)
        assert (difference > 1e-2) == name.startswith(REACHED), name
        assert difference > 1e-2 or difference < 1e-6


def test_weight_zero_is_the_plain_step(models, learn, plain):
    losses, weights = learn(0.0)
    assert apart(losses, plain[0]) <= models.NEUTRAL
    assert teaching.farthest(weights, plain[1]) <= models.NEUTRAL
    assert teaching.farthest(learn(WEIGHT)[1], plain[1]) > 1e-3


def test_the_features_alone_are_learned(kit, models, teach):
    (batch,), student = teaching.batches(kit, CNN, samples=32), teaching.student_of(kit)
    before = teaching.trainable_of(kit, student, CNN)
    step, _ = teach(student, batch[0], lambda both: models.descent(both, 0.05), models.no_loss)
    losses = teaching.losses_of(kit, step, [batch] * 60)
    assert losses[-1] < losses[0] / 2
    after = teaching.trainable_of(kit, student, CNN)
    moved = [name for name in before if not np.array_equal(before[name], after[name])]
    assert moved
    assert all(name.startswith(REACHED) for name in moved)


def test_the_teacher_is_left_as_it_was(kit, models, teach, stream):
    """Its BatchNorm too, part of which was in training mode before."""
    guide, student = teaching.teacher_of(kit), teaching.student_of(kit)
    models.mix_modes(guide)
    before, modes = teaching.weights_of(kit, guide), models.modes(guide)
    step, _ = teach(student, stream[0][0], guide=guide)
    teaching.losses_of(kit, step, stream)
    assert teaching.farthest(teaching.weights_of(kit, guide), before) == 0
    assert models.modes(guide) == modes
    assert models.gradients(guide) == 0
    learned, fresh = (teaching.weights_of(kit, m) for m in (student, teaching.student_of(kit)))
    for name in ("head.kernel", "conv0.bn.mean"):
        assert not np.array_equal(learned[name], fresh[name])


# Bad input ---------------------------------------------------------------------------------------


def attached(t, m, ours=None, theirs=None):
    """A regressor between layers of CNN and RESNET."""
    ((x, _),) = teaching.batches(m.kit, CNN)
    layers = {"student_layer": ours or m.LAYERS[0], "teacher_layer": theirs or m.LAYERS[1]}
    student, guide = teaching.student_of(m.kit), teaching.teacher_of(m.kit)
    return t.attach_regressor(student, guide, x, **layers)


def between(t, student, guide, x, ours="norm", theirs="norm"):
    """The same between other models."""
    return t.attach_regressor(student, guide, x, student_layer=ours, teacher_layer=theirs)


def step_of(t, m, both, optimizer=None, **settings):
    optimizer, guide = optimizer or m.descent(both), teaching.teacher_of(m.kit)
    settings |= {"teacher_layer": m.LAYERS[1]}
    return t.make_train_step(both, guide, optimizer, m.kit.training.cross_entropy, **settings)


def without_regressor(t, m):
    """A step whose optimizer holds the student's weights alone."""
    student = teaching.student_of(m.kit)
    ((x, _),) = teaching.batches(m.kit, CNN)
    both = between(t, student, teaching.teacher_of(m.kit), x, *m.LAYERS)
    return step_of(t, m, both, teaching.optimizer_of(m.kit, student))


def frozen(t, m):
    student = teaching.student_of(m.kit)
    m.freeze(student)
    ((x, _),) = teaching.batches(m.kit, CNN)
    return step_of(t, m, between(t, student, teaching.teacher_of(m.kit), x, *m.LAYERS))


PT, TF = pytest.mark.only("pt"), pytest.mark.only("tf", "tf_keras")
UNKNOWN = "the model has no layer 'conv7'; it has "
SHAPES = ": name layers that differ only in channels"
ONCE = "it must give one tensor, once"
SUBCLASSED = "Two is subclassed and has no graph in which to find 'norm'"
REFUSALS = [
    (lambda t, m: attached(t, m, ours="conv7"), UNKNOWN),
    (lambda t, m: attached(t, m, theirs="conv7"), UNKNOWN),
    (lambda t, m: attached(t, m, ours=m.OTHER_PIXELS), SHAPES),
    (lambda t, m: attached(t, m, ours="head"), SHAPES),
    *(
        (
            lambda t, m, weight=weight: step_of(t, m, attached(t, m), weight=weight),
            f"weight must be at least 0 and finite, not {weight}",
        )
        for weight in (-1.0, float("nan"), float("inf"))
    ),
    (frozen, "the student has no trainable "),
    (lambda t, m: between(t, m.twice(), m.twice(), m.X, "0", "1"), f"'0' runs 2 times: {ONCE}"),
    pytest.param(
        without_regressor,
        "the optimizer lacks the regressor: make it from taught.parameters()",
        marks=PT,
    ),
    pytest.param(
        lambda t, m: between(t, m.nn.GRU(4, 4), m.dense(3), m.X, "", "0"),
        f"'' gives a tuple: {ONCE}",
        marks=PT,
    ),
    pytest.param(
        lambda t, m: between(t, m.subclassed(3), m.functional(6), m.PAIR), SUBCLASSED, marks=TF
    ),
    pytest.param(
        lambda t, m: between(t, m.functional(3), m.subclassed(6), m.PAIR), SUBCLASSED, marks=TF
    ),
    pytest.param(
        lambda t, m: between(t, m.unbuilt(), m.functional(6), m.PAIR),
        "the model has no variables yet",
        marks=TF,
    ),
]


@pytest.mark.parametrize(("call", "message"), REFUSALS)
def test_a_refusal_says_why(technique, models, call, message):
    with pytest.raises((ValueError, NotImplementedError), match=re.escape(message)):
        call(technique, models)


@TF
def test_tf_an_optimizer_without_the_regressor_is_refused_in_the_first_step(
    technique, models, stream
):
    step = without_regressor(technique, models)
    with pytest.raises((KeyError, ValueError)):
        step(*stream[0])


def test_a_refusal_changes_nothing(kit, technique, models, attach, stream):
    student, guide = teaching.student_of(kit), teaching.teacher_of(kit)
    for ours, theirs in (("conv7", None), (None, "conv7"), (models.OTHER_PIXELS, None)):
        with pytest.raises(ValueError, match="layer"):
            attach(student, guide, stream[0][0], ours, theirs)
    fresh = teaching.weights_of(kit, teaching.student_of(kit))
    assert teaching.farthest(teaching.weights_of(kit, student), fresh) == 0


@TF
def test_tf_a_refused_subclassed_model_is_unchanged(technique, models):
    student = models.subclassed(3)
    before = student.get_weights()
    with pytest.raises(NotImplementedError):
        between(technique, student, models.functional(6), models.PAIR)
    assert all(map(np.array_equal, before, student.get_weights()))


# Any models --------------------------------------------------------------------------------------


def follow(kit, technique, models, x, student, guide, layer, rate=0.1, loss_fn=None):
    """Losses of twenty steps in which one layer of a student follows that of its name."""
    both = between(technique, student, guide, x, layer, layer)
    step = technique.make_train_step(
        both,
        guide,
        models.descent(both, rate),
        loss_fn or kit.training.cross_entropy,
        teacher_layer=layer,
    )
    return teaching.losses_of(kit, step, [(x, models.Y)] * 20)


def test_models_of_two_inputs(kit, technique, models):
    student, guide, x = models.two_inputs_in_a_graph()
    losses = follow(kit, technique, models, x, student, guide, "norm")
    assert losses[-1] < 0.7 * losses[0]


def test_inputs_by_name(kit, technique, models):
    for student, guide, x in models.by_name():
        losses = follow(kit, technique, models, x, student, guide, "body")
        assert losses[-1] < losses[0]


def test_the_loss_gets_all_that_the_student_gives(kit, technique, models):
    def loss_fn(output, labels):
        hard = kit.training.cross_entropy(output["classes"], labels)
        return hard + (output["size"] ** 2)[0, 0]

    student, guide = models.Forked(3), models.Forked(6)
    losses = follow(kit, technique, models, models.X, student, guide, "hidden", 0.01, loss_fn)
    assert losses[-1] < 0.7 * losses[0]


def smaller(m, student, x):
    """Half of its channels are removed."""
    return m.structured_pruning.remove_channels(student, x, share=0.5)


def masked(m, student, x):
    """Half of all kernels are zero, without masks that would keep them so."""
    settings = {"final_sparsity": 0.5, "begin_step": 0, "end_step": 1, "frequency": 1}
    student, update = m.pruning.apply_pruning(student, **settings)
    update(1)
    still = replace(teaching.RECIPE, learning_rate=0.0)
    optimizer = m.kit.training.make_optimizer(student, still)
    plain_step(m.kit, student, optimizer)(*teaching.batches(m.kit, CNN)[0])
    return m.pruning.finalize_pruning(student)


@pytest.mark.parametrize(("prune", "channels"), [(smaller, 3), (masked, 6)])
def test_students_that_pruning_made(kit, models, teach, attach, stream, agrees, prune, channels):
    """Layers that a copy took over have been called before, in another graph."""
    source, x = teaching.student_of(kit), stream[0][0]
    student = prune(models, source, x)
    step, both = teach(student, x)
    agrees(prune.__name__, {"losses": teaching.losses_of(kit, step, stream)}, BAR)
    attach(student, teaching.teacher_of(kit), x, ours=models.ACTIVATION)  # behind a layer
    assert models.regressor(both)["kernel"].shape[0] == channels
    fresh = teaching.weights_of(kit, teaching.student_of(kit))
    assert teaching.farthest(teaching.weights_of(kit, source), fresh) == 0


@PT
def test_pt_channels_of_a_series_are_second_behind_a_convolution(technique, models):
    series = models.torch.ones(2, 4, 9)
    pair = (models.nn.Sequential(models.nn.Conv1d(4, width, 1)) for width in (3, 6))
    both = between(technique, *pair, series, "0", "0")
    assert list(both(series)[1].shape) == [2, 6, 9]


@PT
def test_pt_channels_of_images_are_last_behind_a_linear_layer_and_else_second(technique, models):
    """Of as many each: the regressor's kernel tells which axis it takes for theirs."""
    nn, images = models.nn, models.torch.ones(2, 4, 4, 5)

    class Sum(nn.Sequential):
        def forward(self, x):
            return x + super().forward(x)

    rows = nn.Sequential(nn.Linear(5, 5), nn.Dropout())
    for layer, shape in (
        (rows, [5, 5]),
        (Sum(nn.LayerNorm(5)), [5, 5]),
        (nn.Conv2d(4, 4, 1), [4, 4, 1, 1]),
    ):
        model = nn.Sequential(layer)
        both = between(technique, model, model, images, "0", "0")
        assert list(both.regressor.weight.shape) == shape


@PT
def test_pt_a_teacher_changes_no_input(kit, technique, models):
    """Of either technique, though its first layer works in place."""
    nn, logits = models.nn, models.distillation
    guide, student = nn.Sequential(nn.ReLU(True), nn.Linear(4, 3)), nn.Linear(4, 3)
    x = (-models.X).clamp(max=-1)
    step = logits.make_train_step(
        student, guide, models.descent(student), kit.training.cross_entropy
    )
    step(x, models.Y)
    logits.store_logits(guide, x)
    between(technique, guide, guide, x, "1", "1")
    assert not (x > -1).any()


@PT
def test_pt_hooks_are_removed(kit, technique, models):
    student, guide, x = models.two_inputs_in_a_graph()
    follow(kit, technique, models, x, student, guide, "norm")
    assert not [m for m in (*guide.modules(), *student.modules()) if m._forward_hooks]


@PT
def test_pt_nothing_behind_the_teachers_layer_runs_after_the_first_step(kit, technique, models):
    ((student, guide, x),) = models.by_name()
    both, total = between(technique, student, guide, x, "body", "body"), x["left"] + x["right"]
    with models.torch.no_grad():
        # What the layer returned, not what an operation in place has made of it since.
        pair = both.regressor(student.body(total)), guide.body(total)
        error = models.nn.functional.mse_loss(*pair).item()
    step = technique.make_train_step(
        both, guide, models.descent(both), models.no_loss, teacher_layer="body"
    )
    guide.ran, losses = 0, []
    for _ in range(3):
        losses.append(step(x, models.Y).item())
        assert guide.ran == 1
    assert losses[0] == pytest.approx(error, rel=1e-5)
    assert losses[-1] < losses[0]


@pytest.mark.only("tf")
def test_tf_the_teachers_pass_moves_no_seeds_on(kit, technique, models):
    """Nor does a look at the student's layer: two of one LSTM."""
    x, plain = models.X[:, :, None], models.recurrent()
    plain_step(kit, plain, models.descent(plain))(x, models.Y)
    student, guide = models.recurrent(), models.recurrent()
    before = models.seeds(guide)
    assert before
    both = between(technique, student, guide, x, "read", "read")
    technique.make_train_step(
        both, guide, models.descent(both), kit.training.cross_entropy, teacher_layer="read"
    )(x, models.Y)
    assert models.seeds(guide) == before
    assert models.seeds(student) == models.seeds(plain)


# The benchmark -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "variant",
    [
        "features",
        # The same code in both frameworks: a Keras model takes a second to trace.
        pytest.param("alone", marks=PT),
        pytest.param("neutral", marks=PT),
    ],
)
def test_the_benchmark_proves_what_the_features_reached(impl, kit, technique, variant):
    task = TASKS["digits-student"]
    (settings,) = [v.settings for v in bench.TECHNIQUE.variants if v.name == variant]
    work = Work(task, variant, settings, 6, init_weights(task.model, 1))
    images = np.random.default_rng(3).normal(size=(6, *task.model.input_shape))
    batch = kit.data.to_device(images.astype(np.float32), np.arange(6))
    with teaching.small_teacher(DEEP):
        prepared = bench.prepare(impl, work)
        evidence, reason = bench.took_effect(impl, work, prepared, batch)
    assert reason is None, evidence
    assert (evidence["norm_of_features"] > 1e-3) == (variant == "features")
