"""The soft loss is NumPy's, it teaches where the widespread mistake does not, and twins agree.

The optimizer of the gradient tests, `models.recorder`, puts the gradient in the weight's place.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from unittest import mock

import numpy as np
import pytest

from bench.compression import bench_distillation
from bench.compression.bench_distillation import TECHNIQUE
from bench.harness.plan import EFFORT, Case, Work
from bench.harness.run_plan import Plan
from bench.harness.selection import cases_of
from bench.harness.worker import Operations
from shared import datasets, teacher
from shared.specs import TASKS, DatasetSpec, ResNetSpec, parameter_count
from shared.weights import init_weights
from tests import workers
from tests.compression import teaching
from tests.compression.teaching import CNN, GPT, LEFT, RESNET, TARGET, WIDE
from tests.frameworks import apart

FRAMEWORKS = ("pt", *workers.keras())
SETTINGS = {"temperature": 3.0, "alpha": 0.75}
SMALL = ResNetSpec((32, 32, 1), 1, (4, 6, 8), num_classes=10)  # a teacher of the benchmark
DIGITS = DatasetSpec("small-digits", "digits", train_size=96, test_size=64)


# The loss ----------------------------------------------------------------------------------------


def log_softmax(logits):
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def soft(student, teacher_logits, temperature):
    """Value and gradient of T^2 KL(teacher || student), by hand in float64."""
    log_p, log_q = (log_softmax(v / temperature) for v in (teacher_logits, student))
    p, q = np.exp(log_p), np.exp(log_q)
    positions = student.size // student.shape[-1]
    value = temperature**2 * (p * (log_p - log_q)).sum() / positions
    return value, temperature * (q - p) / positions


@pytest.mark.parametrize("shape", [(5,), (6, 5), (4, 3, 5)], ids=["one", "samples", "positions"])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 4.0])
def test_value_and_gradient_of_the_soft_loss_are_those_of_numpy(
    technique, models, shape, temperature
):
    logits = np.random.default_rng(7).normal(0.0, 3.0, (2, *shape))
    value, gradient = models.soft(technique, *logits, temperature)
    expected, expected_gradient = soft(*logits, temperature)
    assert value == pytest.approx(expected, rel=1e-10)
    assert apart(gradient, expected_gradient) < 1e-10


def test_the_soft_loss_of_opposite_certainties_is_finite(technique, models):
    """Probabilities underflow here, logarithms do not."""
    far = np.array([[400.0, 0.0, -400.0]])
    value, gradient = models.soft(technique, far, far[:, ::-1].copy(), 1.0)
    assert value == pytest.approx(800.0)
    assert np.allclose(gradient, [[1.0, 0.0, -1.0]])


def test_narrow_logits_are_cast_up(technique, models):
    logits = np.random.default_rng(7).normal(0.0, 3.0, (2, 6, 5))
    narrow = [models.cast(one, "bfloat16") for one in logits]
    loss = technique.soft_loss(*narrow, temperature=1.0)
    wide = technique.soft_loss(*(models.cast(one, "float64") for one in narrow), temperature=1.0)
    assert models.numpy(loss).dtype == np.float32
    assert float(loss) == pytest.approx(float(wide), rel=1e-6)


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
def test_gradients_of_a_linear_student_are_those_of_numpy(kit, technique, models, alpha):
    random = np.random.default_rng(5)
    x, y = random.normal(size=(7, 4)).astype(np.float32), random.integers(0, 3, 7)
    kernels = random.normal(size=(2, 4, 3)).astype(np.float32)
    student, guide = (models.linear(kernel) for kernel in kernels)
    settings = {"temperature": 2.0, "alpha": alpha}
    step = technique.make_train_step(
        student, guide, models.recorder(student), kit.training.cross_entropy, **settings
    )
    loss = kit.runtime.to_float(step(*kit.data.to_device(x, y)))
    value, gradient = soft(*(x.astype(float) @ kernel for kernel in kernels), 2.0)
    log_q = log_softmax(x.astype(float) @ kernels[0])
    hard = -log_q[np.arange(len(y)), y].mean()
    pull = alpha * gradient + (1 - alpha) * (np.exp(log_q) - np.eye(3)[y]) / len(y)
    assert loss == pytest.approx(alpha * value + (1 - alpha) * hard, rel=1e-5)
    assert apart(models.kernel(student), x.T @ pull) < 1e-5


@pytest.mark.parametrize(
    ("student", "guide", "bar"), [(CNN, RESNET, 1e-5), (GPT, WIDE, 1e-4)], ids=["cnn", "gpt"]
)
def test_twins_agree_in_loss_and_gradient(kit, technique, models, agrees, student, guide, bar):
    (batch,), model = teaching.batches(kit, student), teaching.student_of(kit, student)
    step = technique.make_train_step(
        model,
        teaching.teacher_of(kit, guide),
        models.recorder(model),
        kit.training.cross_entropy,
        **SETTINGS,
    )
    loss = kit.runtime.to_float(step(*batch))
    gradients = teaching.trainable_of(kit, model, student)
    agrees(f"one step of {type(student).__name__}", {"loss": loss, **gradients}, bar)


# The step ----------------------------------------------------------------------------------------


@pytest.fixture
def train(kit, technique):
    """`train(stream, guide, **settings)`: losses and weights of CNN; guide None: logits stored."""

    def train(stream, guide=None, **settings):
        student = teaching.student_of(kit)
        rest = teaching.optimizer_of(kit, student), kit.training.cross_entropy
        if guide is None:
            step = technique.make_stored_train_step(student, *rest, **settings)
        else:
            step = technique.make_train_step(student, guide, *rest, **settings)
        losses = teaching.losses_of(kit, step, stream)
        return losses, teaching.weights_of(kit, student)

    return train


def test_alpha_zero_is_the_plain_step_and_runs_no_teacher(kit, models, train):
    stream, student = teaching.batches(kit, CNN, 4), teaching.student_of(kit)
    optimizer = teaching.optimizer_of(kit, student)
    step = kit.training.make_train_step(student, optimizer, kit.training.cross_entropy)
    plain = teaching.losses_of(kit, step, stream)
    wanted = teaching.weights_of(kit, student)
    for losses, weights in (
        train(stream, models.dense(3), alpha=0.0),  # which would not take such inputs
        train([(x, (y, y)) for x, y in stream], alpha=0.0),
    ):
        assert apart(losses, plain) <= models.NEUTRAL
        assert teaching.farthest(weights, wanted) <= models.NEUTRAL


def test_stored_logits_teach_as_the_teacher_does(kit, technique, models, train, agrees):
    """Twins take the same ten steps, too."""
    stream, guide = teaching.batches(kit, CNN, 10), teaching.teacher_of(kit)
    losses, _ = train(stream, guide, **SETTINGS)
    assert losses[-1] < losses[0]
    agrees("ten steps", {"losses": losses}, 1e-5)
    images = np.concatenate([models.channels_last(x) for x, _ in stream])
    x, y = kit.data.to_device(images, np.concatenate([models.numpy(y) for _, y in stream]))
    stored = technique.store_logits(guide, x, batch_size=27)  # the last one is smaller
    predicted = kit.training.make_predict(guide)(x)
    assert apart(models.numpy(stored), models.numpy(predicted)) < 1e-6
    from_store = [(x, (y, stored[8 * i : 8 * i + 8])) for i, (x, y) in enumerate(stream)]
    assert apart(train(from_store, **SETTINGS)[0], losses) < 1e-5
    # The same through the kit's loop, which cuts tuples of labels.
    last = []
    for make, others, labels in (
        (technique.make_stored_train_step, (), (y, stored)),
        (technique.make_train_step, (guide,), y),
    ):
        student = teaching.student_of(kit)
        optimizer = teaching.optimizer_of(kit, student)
        step = make(student, *others, optimizer, kit.training.cross_entropy, **SETTINGS)
        last.append(kit.training.fit(step, x, labels, batch_size=8, epochs=1, seed=4))
    assert last[0] == pytest.approx(last[1], rel=1e-5)


def test_the_teacher_is_left_as_it_was(kit, models, train):
    """Its BatchNorm too, part of which was in training mode before."""
    guide = teaching.teacher_of(kit)
    models.mix_modes(guide)
    before, modes = teaching.weights_of(kit, guide), models.modes(guide)
    _, learned = train(teaching.batches(kit, CNN, 3), guide, **SETTINGS)
    assert teaching.farthest(teaching.weights_of(kit, guide), before) == 0
    assert models.modes(guide) == modes
    assert models.gradients(guide) == 0
    fresh = teaching.weights_of(kit, teaching.student_of(kit))
    for name in ("head.kernel", "conv0.bn.mean"):
        assert not np.array_equal(learned[name], fresh[name])


# Whether it teaches ------------------------------------------------------------------------------


@pytest.fixture
def alone(kit, technique, models):
    """`alone(steps)`: a student starts from 0 and hears the teacher alone.

    Returns its losses, how far its kernel moved, and how often it agrees with the teacher.
    """
    random = np.random.default_rng(2)
    x, y = kit.data.to_device(random.normal(size=(64, 4)).astype("f4"), np.zeros(64, np.int64))
    guide = models.linear(random.normal(0.0, 2.0, (4, 3)).astype("f4"))

    def train(steps):
        student = models.linear(np.zeros((4, 3), np.float32))
        settings = {"temperature": 2.0, "alpha": 1.0}
        step = technique.make_train_step(
            student, guide, models.descent(student, 1.0), teaching.never, **settings
        )
        losses = teaching.losses_of(kit, step, [(x, y)] * steps)
        ours, theirs = (models.numpy(kit.training.make_predict(m)(x)) for m in (student, guide))
        agreement = (ours.argmax(-1) == theirs.argmax(-1)).mean()
        return losses, abs(models.kernel(student)).max(), agreement

    return train


def test_the_soft_loss_alone_teaches(alone):
    losses, _, agreement = alone(60)
    assert agreement > 0.9
    assert losses[-1] < losses[0] / 10


@pytest.mark.parametrize("mistake", ["mistaken", "half_mistaken"])
def test_the_widespread_mistake_does_not(technique, models, alone, monkeypatch, mistake):
    """KLDivergence()(log_softmax, log_softmax), or the teacher's softmax: not one bit moves."""
    monkeypatch.setattr(technique, "soft_loss", getattr(models, mistake))
    losses, moved, agreement = alone(3)
    assert agreement < 0.9
    assert moved == 0.0
    assert len(set(losses)) == 1
    assert losses[0] > 1 or mistake == "mistaken"  # and looks plausible


# Bad input ---------------------------------------------------------------------------------------


def taught(technique, models, student=None, guide=None, **settings):
    """A step of two dense models."""
    student, guide = student or models.dense(3), guide or models.dense(3)
    return technique.make_train_step(
        student, guide, models.descent(student), models.kit.training.cross_entropy, **settings
    )


def stored(technique, models, student=None, **settings):
    """The same with stored logits."""
    student = student or models.dense(3)
    return technique.make_stored_train_step(
        student, models.descent(student), models.kit.training.cross_entropy, **settings
    )


ONE_SHAPE = "student and teacher must give logits of one shape, with the same classes: "
OTHER_CLASSES = f"{ONE_SHAPE}the student gives [9, 3], the teacher [9, 4]"
NO_CLASSES = "have no two classes along axis -1"
ELSEWHERE = "have the classes along axis 1, not -1"
TF = pytest.mark.only("tf", "tf_keras")
REFUSALS = [
    *(
        (partial(make, temperature=value), f"temperature must be above 0 and finite, not {value}")
        for make in (taught, stored)
        for value in (0.0, -1.0, float("nan"), float("inf"))
    ),
    *(
        (partial(make, alpha=value), f"alpha must be between 0 and 1, not {value}")
        for make in (taught, stored)
        for value in (-0.1, 1.1, float("nan"))
    ),
    (lambda t, m: taught(t, m, m.freeze(m.dense(3))), "the student has no trainable "),
    (lambda t, m: taught(t, m, None, m.dense(4))(m.X, m.Y), OTHER_CLASSES),
    (lambda t, m: stored(t, m)(m.X, (m.Y, m.dense(4)(m.X))), OTHER_CLASSES),
    (
        lambda t, m: taught(t, m, None, m.Forked(3))(m.X, m.Y),
        f"{ONE_SHAPE}the student gives [9, 3], the teacher dict",
    ),
    (lambda t, m: taught(t, m, m.dense(1), m.dense(1), alpha=1.0)(m.X, m.Y), NO_CLASSES),
    (lambda t, m: taught(t, m, m.flat(), m.flat(), alpha=1.0)(m.X, m.Y), NO_CLASSES),
    (
        lambda t, m: taught(t, m, None, m.dense(3, "softmax"))(m.X, m.Y),
        "the teacher gives probabilities",
    ),
    (
        lambda t, m: taught(t, m, m.dense(3, "softmax"), None)(m.X, m.Y),
        "the student gives probabilities",
    ),
    (
        lambda t, m: stored(t, m)(m.X, (m.Y, t.store_logits(m.dense(3, "softmax"), m.X))),
        "the teacher gives probabilities",
    ),
    (lambda t, m: taught(t, m, m.pixels(0), m.pixels(1))(m.X, m.MAP), ELSEWHERE),
    (lambda t, m: taught(t, m, m.two_maps(0), m.two_maps(1))(m.X, m.MAP), ELSEWHERE),
    (
        lambda t, m: taught(t, m, m.two_maps(0), m.two_maps(1))(m.X, {"aux": m.MAP, "out": m.MAP}),
        ELSEWHERE,
    ),
    pytest.param(lambda t, m: taught(t, m, m.Two(3)), "the student has no variables yet", marks=TF),
    pytest.param(
        lambda t, m: taught(t, m, None, m.Two(3)),
        "the teacher has no variables yet: call it once",
        marks=TF,
    ),
    pytest.param(
        lambda t, m: m.fit(m.regularized(m.Student)),
        "the student has no teacher yet: say learn_from(teacher)",
        marks=pytest.mark.only("tf"),
    ),
]


@pytest.mark.parametrize(("call", "message"), REFUSALS)
def test_a_refusal_says_why(technique, models, call, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        call(technique, models)


def test_a_refusal_changes_nothing(kit, technique, models):
    (batch,), student = teaching.batches(kit, CNN), teaching.student_of(kit)
    rest = teaching.optimizer_of(kit, student), kit.training.cross_entropy
    before, state = teaching.weights_of(kit, student), models.state(rest[0])
    fewer = teaching.teacher_of(kit, replace(RESNET, num_classes=4))
    step = technique.make_train_step(student, fewer, *rest)
    with pytest.raises(ValueError, match="logits of one shape"):
        step(*batch)
    even = models.cast(np.full((8, 5), 0.2), "float32")
    for target, message in (
        ({"all": 9 * even}, "logits of one shape"),
        (even, "the teacher gives probabilities"),
    ):
        step = technique.make_stored_train_step(student, *rest)
        with pytest.raises(ValueError, match=message):
            step(batch[0], (batch[1], target))
    assert teaching.farthest(teaching.weights_of(kit, student), before) == 0
    assert models.state(rest[0]) == state
    technique.make_train_step(student, teaching.teacher_of(kit), *rest)(*batch)  # it goes on


# Any inputs and outputs --------------------------------------------------------------------------


def test_models_of_several_inputs(kit, technique, models):
    """A tuple of arguments, a list, or names, as each framework's models take them."""
    cases = [(0.7, case) for case in models.two_inputs()]
    cases += [(0.8, case) for case in models.by_name()]
    for bar, (student, guide, x) in cases:
        step = taught(technique, models, student, guide)
        losses = teaching.losses_of(kit, step, [(x, models.Y)] * 20)
        assert losses[-1] < bar * losses[0]
        predicted = models.predicted(guide, x)
        assert models.numpy(predicted).shape == (9, 3)
        rows = technique.store_logits(guide, x, batch_size=4)
        assert apart(models.numpy(rows), models.numpy(predicted)) < 1e-5


def test_an_argument_that_is_none_goes_with_every_part_that_is_stored(technique, models):
    guide, x, with_none = models.optional_inputs()
    rows, others = (
        models.numpy(technique.store_logits(guide, given, batch_size=4)) for given in (with_none, x)
    )
    assert len(rows) == 9
    assert np.allclose(rows, others, atol=1e-6)


def test_several_outputs_are_stored_and_their_soft_losses_added(kit, technique, models):
    student, guide = models.Forked(3), models.Forked(6)
    rows = technique.store_logits(guide, models.X, batch_size=4)
    ours, theirs = (models.predicted(model, models.X) for model in (student, guide))
    assert rows.keys() == theirs.keys() == {"classes", "size"}
    for name, value in theirs.items():
        assert np.allclose(models.numpy(rows[name]), models.numpy(value), rtol=1e-6, atol=1e-6)
    added = sum(
        kit.runtime.to_float(technique.soft_loss(ours[n], theirs[n], temperature=4.0)) for n in ours
    )
    loss = taught(technique, models, student, guide, alpha=1.0)(models.X, models.Y)
    assert kit.runtime.to_float(loss) == pytest.approx(added, rel=1e-5)
    loss = stored(technique, models, models.Forked(3), alpha=1.0)(models.X, (models.Y, rows))
    assert kit.runtime.to_float(loss) == pytest.approx(added, rel=1e-5)


def test_classes_are_along_the_axis_that_is_said(kit, technique, models):
    student, guide = models.pixels(0), models.pixels(1)
    logits = (models.numpy(models.predicted(m, models.X)) for m in (student, guide))
    value, _ = soft(*(np.moveaxis(one.astype(float), 1, -1) for one in logits), 4.0)
    step = taught(technique, models, student, guide, alpha=1.0, class_axis=1)
    loss = kit.runtime.to_float(step(models.X, models.MAP))
    assert loss == pytest.approx(value, rel=1e-5)


def test_of_a_dict_with_logits_these_alone_are_taught(kit, technique, models):
    student, guide = models.Forked(3, "logits"), models.Forked(3, "logits")
    wanted = models.predicted(guide, models.X)["logits"]
    rows = technique.store_logits(guide, models.X, batch_size=4)
    assert np.allclose(models.numpy(rows), models.numpy(wanted), rtol=0, atol=1e-6)
    loss = taught(technique, models, student, guide, alpha=1.0)(models.X, models.Y)
    assert abs(kit.runtime.to_float(loss)) < 1e-6  # whatever else the two models give


# Keras alone -------------------------------------------------------------------------------------


@pytest.fixture
def in_fit(models):
    """`in_fit(**settings)`: a student and its teacher, ready for `fit`."""

    def make(**settings):
        guide, student = models.regularized(), models.regularized(models.Student)
        guide.set_weights([-3 * weight for weight in guide.get_weights()])
        student.learn_from(guide, **settings)
        student.compile(models.descent(student), models.CLASSES)
        return student, guide

    return make


@pytest.mark.only("tf")
def test_tf_in_fit_a_student_learns_as_in_the_step(kit, technique, models, in_fit):
    """Whatever its teacher's share, with its own losses."""
    first = set()
    for alpha in (0.0, 0.75, 1.0):
        settings = {"temperature": 3.0, "alpha": alpha}
        student, guide = in_fit(**settings)
        plain = models.regularized()
        step = taught(technique, models, plain, guide, **settings)
        losses = teaching.losses_of(kit, step, [(models.X, models.Y)] * 2)
        assert models.fit(student, epochs=2) == pytest.approx(losses, rel=1e-5), alpha
        weights, others = student.get_weights(), plain.get_weights()
        assert len(weights) == len(others) == 4  # none of the teacher's
        for one, other in zip(weights, others, strict=True):
            assert np.allclose(one, other, rtol=1e-5, atol=1e-6), alpha
        first.add(round(losses[0], 3))
    assert len(first) == 3


@pytest.mark.only("tf")
def test_tf_evaluation_has_no_teacher(kit, models, in_fit):
    student, _ = in_fit(**SETTINGS)
    evaluated = student.evaluate(models.X, models.Y, batch_size=9, verbose=0)
    labels = kit.training.cross_entropy(student(models.X), models.Y)
    assert evaluated == pytest.approx(float(labels + sum(student.losses)), rel=1e-5)


@pytest.mark.only("tf")
def test_tf_in_fit_samples_have_weights(models, in_fit):
    def loss(x, y, weights=None):
        student, _ = in_fit(**SETTINGS)
        own = float(sum(student.losses))
        return models.fit(student, x, y, sample_weight=weights)[0] - own

    half = np.arange(9) < 4
    first = loss(LEFT, TARGET, half.astype(float))
    assert loss(LEFT, TARGET, np.zeros(9)) == pytest.approx(0, abs=1e-5)
    assert loss(LEFT, TARGET, np.ones(9)) > 2 * first / 3 > 0
    assert first == pytest.approx(loss(LEFT[half], TARGET[half]) * 4 / 9, rel=1e-4)


def in_steps(technique, models, student, guide, x):
    taught(technique, models, student, guide)(x, models.Y)


def in_stored_steps(technique, models, student, guide, x):
    rows = technique.store_logits(guide, x, batch_size=4)
    stored(technique, models, student)(x, (models.Y, rows))


def in_keras_fit(technique, models, student, guide, x):
    student.learn_from(guide)
    student.compile("sgd", models.CLASSES)
    models.fit(student, x)


@pytest.mark.only("tf")
@pytest.mark.parametrize("learn", [in_steps, in_stored_steps, in_keras_fit])
def test_tf_no_evaluation_moves_seeds_on(kit, technique, models, learn):
    """Neither the teacher's pass nor a look at what the student gives: two of one LSTM."""
    x, plain = models.X[:, :, None], models.recurrent()
    optimizer = models.descent(plain)
    kit.training.make_train_step(plain, optimizer, kit.training.cross_entropy)(x, models.Y)
    student, guide = models.recurrent(models.Student), models.recurrent()
    before = models.seeds(guide)
    assert before
    learn(technique, models, student, guide, x)
    assert models.seeds(guide) == before
    assert models.seeds(student) == models.seeds(plain)


# The teacher's file ------------------------------------------------------------------------------


def test_the_student_has_at_most_a_tenth_of_the_parameters():
    student = TASKS["digits-student"]
    assert parameter_count(student.model) <= parameter_count(teacher.TASK.model) / 10
    assert student.dataset == teacher.TASK.dataset


@pytest.fixture
def predict_recorded(kit):
    """What the file's teacher predicts."""
    guide = kit.models.build(teacher.TASK.model, teacher.load().weights)
    return kit.training.make_predict(guide)


@pytest.mark.only("pt")
def test_the_teacher_has_the_recorded_accuracy(kit, predict_recorded, tmp_path):
    data = datasets.materialise(teacher.TASK.dataset, tmp_path)
    test = kit.data.to_device(*datasets.load(data, "test"))
    accuracy = kit.training.evaluate(
        predict_recorded, *test, metric=teacher.TASK.metric, batch_size=256
    )
    one_image = 100 / teacher.TASK.dataset.test_size
    assert accuracy == pytest.approx(teacher.load().accuracy, abs=2 * one_image)
    assert accuracy > 95


def test_the_teacher_is_the_same_in_both_frameworks(kit, models, agrees, predict_recorded):
    images = np.random.default_rng(8).normal(size=(20, *teacher.TASK.model.input_shape))
    x, _ = kit.data.to_device(images.astype(np.float32), np.zeros(20, np.int64))
    agrees("recorded teacher", {"logits": models.numpy(predict_recorded(x))}, 1e-5)


@pytest.fixture
def operations(impl):
    """The harness's worker, in this process."""
    worker = Operations()
    worker.impl, worker.kit = impl, impl.kit
    return worker


@pytest.mark.only("pt")
def test_a_teacher_is_trained_rounded_and_written(kit, operations, tmp_path, monkeypatch):
    """The worker's half of `twinbench teacher`, with a small teacher."""
    name, load, start = teacher.TASK.name, teacher.load, init_weights(SMALL, 0)
    task = TASKS[name]
    recipe = replace(task.recipe, accuracy_batch_size=32, epochs=1)
    monkeypatch.setitem(TASKS, name, replace(task, model=SMALL, dataset=DIGITS, recipe=recipe))
    workload, variant = replace(TECHNIQUE.workloads[0], task=name), TECHNIQUE.variants[0]
    module = "bench.train_step.bench_baseline"
    case = Case("train_step", "baseline", module, "pt", None, variant, workload)
    data, path = datasets.materialise(DIGITS, tmp_path), tmp_path / "teacher.npz"
    with teaching.small_teacher(SMALL):
        stages = [(0.05, 1), (0.005, 1)]
        answer = operations._op_teach(case.message(), str(data), 0, stages, str(path))
        written = load(path)
    predict = kit.training.make_predict(kit.models.build(SMALL, written.weights))
    test = kit.data.to_device(*datasets.load(data, "test"))
    again = kit.training.evaluate(predict, *test, metric="accuracy", batch_size=64)
    assert answer.value == written.accuracy == again  # of the file, not of what was trained
    for part in ("head.kernel", "stem.bn.mean"):
        assert not np.array_equal(written.weights[part], start[part])


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "teacher.npz"
    path.write_bytes(teacher.PATH.read_bytes())
    return path


def test_what_is_saved_is_what_is_loaded(file):
    first = teacher.load(file)
    teacher.save(first, file)
    again = teacher.load(file)
    assert again.accuracy == first.accuracy
    assert all(np.array_equal(again.weights[n], first.weights[n]) for n in first.weights)
    assert {str(value.dtype) for value in again.weights.values()} == {"float32"}


def without_head(path):
    arrays = dict(np.load(path))
    del arrays["head.kernel"]
    np.savez(path, **arrays)


def another_shape(path):
    arrays = dict(np.load(path))
    np.savez(path, **arrays | {"head.bias": np.zeros(7, np.float16)})


def not_finite(path):
    arrays = dict(np.load(path))
    np.savez(path, **arrays | {"head.bias": np.full(10, np.nan, np.float16)})


def pickled(path):
    np.savez(path, **dict(np.load(path)) | {"head.bias": np.array([print], dtype=object)})


def cut(path):
    path.write_bytes(path.read_bytes()[:-1000])


def flipped(path):
    damaged = bytearray(path.read_bytes())
    damaged[len(damaged) // 2] ^= 0xFF
    path.write_bytes(damaged)


DAMAGE = {
    without_head: "does not hold the weights of digits-resnet20",
    another_shape: "does not hold the weights of digits-resnet20",
    not_finite: "not finite",
    pickled: "is damaged",
    cut: "is damaged",
    flipped: "is damaged",
}


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda damage: damage.__name__)
def test_a_damaged_teacher_is_refused(file, damage):
    damage(file)
    with pytest.raises(ValueError, match="twinbench teacher") as caught:
        teacher.load(file)
    assert DAMAGE[damage] in str(caught.value)


def test_a_missing_teacher_says_how_to_make_it(tmp_path):
    with pytest.raises(FileNotFoundError, match="twinbench teacher"):
        teacher.load(tmp_path / "none.npz")


# The benchmark -----------------------------------------------------------------------------------


@pytest.fixture
def judge(impl, kit):
    """`judge(variant)`: the benchmark's evidence of it with a small teacher, and its verdict."""

    def judge(name):
        task = TASKS["digits-student"]
        (variant,) = [v for v in TECHNIQUE.variants if v.name == name]
        work = Work(task, name, variant.settings, 6, init_weights(task.model, 1))
        images = np.random.default_rng(3).normal(size=(6, *task.model.input_shape))
        x, y = kit.data.to_device(images.astype(np.float32), np.arange(6))
        with teaching.small_teacher(SMALL):
            prepared = bench_distillation.prepare(impl, work)
            batch = (x, prepared.targets(x, y)) if prepared.targets else (x, y)
            return bench_distillation.took_effect(impl, work, prepared, batch)

    return judge


@pytest.mark.parametrize(
    "variant",
    [
        "stored",
        # Those that differ little between the frameworks: a Keras model takes a second to trace.
        *(pytest.param(v, marks=pytest.mark.only("pt")) for v in ("alone", "taught", "neutral")),
    ],
)
def test_the_benchmark_proves_that_the_teacher_taught(judge, variant):
    evidence, reason = judge(variant)
    assert reason is None, evidence
    assert evidence["norm_of_labels"] > 0
    assert ("norm_of_teacher" in evidence) == (variant in ("stored", "taught"))


def test_the_benchmark_sees_a_teacher_that_teaches_nothing(technique, models, judge, monkeypatch):
    monkeypatch.setattr(technique, "soft_loss", models.mistaken)
    assert judge("stored")[1] == "the teacher's term has no gradient"


@pytest.mark.only("pt")
def test_the_benchmark_sees_a_teacher_that_says_the_labels_again(
    kit, technique, judge, monkeypatch
):
    _, labels = kit.data.to_device(np.zeros((6, 1), np.float32), np.arange(6))

    def again(ours, theirs, *, temperature, class_axis):
        return kit.training.cross_entropy(ours, labels)

    monkeypatch.setattr(technique, "soft_loss", again)
    assert judge("stored")[1] == "the teacher's gradient is that of the labels"


@pytest.mark.only("pt")
def test_a_worker_asks_the_teacher_once_for_all_seeds(technique, operations, tmp_path, monkeypatch):
    """In PyTorch: the harness does the same with TensorFlow."""
    task = TASKS["digits-student"]
    small = replace(task, dataset=DIGITS, recipe=replace(task.recipe, accuracy_batch_size=32))
    monkeypatch.setitem(TASKS, "digits-student", small)
    asked = mock.Mock(side_effect=technique.store_logits)
    monkeypatch.setattr(technique, "store_logits", asked)
    data, module = str(datasets.materialise(DIGITS, tmp_path)), bench_distillation.__name__

    def train(name, seeds):
        (variant,) = [v for v in TECHNIQUE.variants if v.name == name]
        place = "compression", "distillation", module, "pt", None
        message = Case(*place, variant, TECHNIQUE.workloads[0]).message()
        stages = {"stages": str(tmp_path / name), "prove": False}
        values = [operations._op_train(message, data, s, **stages).value for s in seeds]
        times = asked.call_count
        operations._op_build(message, data, 0)
        first = operations._op_first_call().loss
        return values, [first, *operations._op_next_steps().losses], times

    with teaching.small_teacher(SMALL):
        values, losses, times = train("stored", (0, 1))
        (value,), taught_losses, _ = train("taught", (0,))
    assert times == 1
    assert len(values) == 2
    assert losses == pytest.approx(taught_losses, rel=1e-4)
    assert abs(values[0] - value) < 2  # one of 64 images may fall to the other side by rounding


def test_what_a_cheaper_row_computes_is_not_trained_again():
    cases = cases_of(TECHNIQUE, "module", "ordinary")
    plan = Plan({TECHNIQUE.name: cases}, {TECHNIQUE.name: TECHNIQUE}, EFFORT["default"])
    untrained = {case.variant.name for case in cases if not plan.trained(case)}
    assert untrained == {"taught", "control"}
