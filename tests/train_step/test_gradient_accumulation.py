"""Parts of a batch add up to the batch, one at a time, and alike in both frameworks.

The optimizer of most tests puts the gradient in the weight's place, so that gradients are compared
and not what is left of them in a sum.
"""

from __future__ import annotations

import functools
import re
import sys

import numpy as np
import pytest

from tests import workers
from tests.frameworks import apart
from tests.train_step import steps
from tests.train_step.steps import CNN, GPT, gradients, statistics, weighted

FRAMEWORKS = ("pt", *workers.keras())
MODELS = "steps"
PT, KERAS_3 = pytest.mark.only("pt"), pytest.mark.only("tf")
BARS = {CNN: 1e-5, GPT: 1e-4}  # the parity of the tasks with such models
PARTS = ((0, 3), (3, 6), (6, 10))  # of ten samples
SHARES = [0.3, 0.3, 0.4]
random = np.random.default_rng(3)
LEFT, RIGHT, TARGET = (random.normal(size=(9, 4)).astype(np.float32) for _ in range(3))


@pytest.fixture(scope="module")
def applied(kit, technique, models):
    """`applied(spec)`: of a plain step, whole and by the parts alone; `applied(spec, n)`: in n."""

    @functools.cache
    def applied(spec, parts=None):
        ((x, y),) = steps.batches(kit, spec, 1, 10)
        if parts:
            make = technique.make_train_step
            return steps.applied(kit, models, spec, make, [(x, y)], micro_batches=parts)[0]
        stream = [(x, y), *((x[a:b], y[a:b]) for a, b in PARTS)]
        return steps.applied(kit, models, spec, None, stream)

    return applied


@pytest.fixture(scope="module")
def prepare(kit, technique):
    """`prepare(spec)`: a model and its step in four parts."""
    return lambda spec: steps.prepare(kit, spec, technique.make_train_step, micro_batches=4)


# Gradients ---------------------------------------------------------------------------------------


def test_parts_add_up_to_the_gradient_of_the_batch_and_count_by_their_samples(applied, agrees):
    """The plain mean of the parts' gradients is far outside the bar."""
    (whole, *alone), bar = applied(GPT), BARS[GPT]
    for parts in (1, 3):
        assert steps.farthest(applied(GPT, parts), whole) < bar
    assert steps.farthest(weighted(alone, SHARES), whole) < bar
    assert steps.farthest(weighted(alone, [1 / 3] * 3), whole) > 100 * bar
    agrees("gpt in 3 parts", gradients(applied(GPT, 3)), bar)


def test_batchnorm_normalises_each_part_by_itself_and_updates_its_statistics_once_a_part(applied):
    """The gradient is that of the parts alone, and by design not that of the batch."""
    (whole, *alone), ours = applied(CNN), applied(CNN, 3)
    parts = weighted([gradients(part) for part in alone], SHARES)
    assert steps.farthest(gradients(ours), parts) < BARS[CNN]
    assert steps.farthest(gradients(ours), gradients(whole)) > 100 * BARS[CNN]
    before = statistics(steps.teacher_weights(CNN))
    kept, expected = 1 - CNN.bn_momentum, before
    for part in alone:  # (1 - m) before + m seen
        seen = {name: value - kept * before[name] for name, value in statistics(part).items()}
        expected = weighted([expected, seen], [kept, 1.0])
    assert steps.farthest(statistics(ours), expected) < 1e-5


def test_ten_steps_agree(kit, prepare, agrees):
    losses = steps.losses_of(kit, prepare(CNN), steps.batches(kit, CNN, 10, 30))
    assert losses[-1] < losses[0]
    agrees("ten steps", {"losses": losses}, BARS[CNN])


# One part at a time ------------------------------------------------------------------------------


def test_each_part_goes_forward_and_backward_before_the_next(technique, models):
    model, events = models.spied()
    step = technique.make_train_step(model, models.descent(model), models.squares, micro_batches=4)
    step(models.tensor(LEFT), models.tensor(TARGET[:, :3]))
    rows = [2, 2, 2, 3]
    assert events == [f"{what} {n}" for n in rows for what in ("forward", "backward")]


@pytest.mark.skipif(sys.platform != "linux", reason="resident peaks of the Linux kernel")
def test_parts_save_the_activations(technique, models):
    """12 activations of 16 MiB in one part, a sixteenth of that in sixteen."""
    x, peaks = models.tensor(np.full((1024, 4096), 0.1, np.float32)), {}
    for parts in (16, 1):
        model = models.deep()
        make = technique.make_train_step
        step = make(model, models.descent(model), models.squares, micro_batches=parts)
        step(x[:16], x[:16])  # what only a first step needs
        peaks[parts] = steps.peak(lambda step=step: step(x, x))
    # Some of it may fit into what the process held before.
    assert peaks[1] > 8 * 2**24
    assert peaks[16] < peaks[1] / 3


def test_ragged_batches(kit, framework, prepare):
    """Batches of several sizes in turn, each as the plain step has it."""
    stream = [steps.batches(kit, GPT, 1, size)[0] for size in (10, 4, 10, 4, 10)]
    ours = prepare(GPT)
    losses = steps.losses_of(kit, ours, stream)
    assert apart(losses, steps.losses_of(kit, steps.prepare(kit, GPT), stream)) < 1e-5
    assert kit.runtime.trace_count(ours.step) == (None if framework == "pt" else 2)


@KERAS_3
def test_a_graph_that_does_not_know_the_batch(kit, models, prepare):
    tf, prepared = models.tf, prepare(GPT)
    signature = [tf.TensorSpec((None, GPT.sequence_length), tf.int64)] * 2
    prepared.step = tf.function(prepared.step, input_signature=signature)
    stream = [steps.batches(kit, GPT, 1, size)[0] for size in (10, 9, 4)]
    losses = steps.losses_of(kit, prepared, stream)
    assert apart(losses, steps.losses_of(kit, steps.prepare(kit, GPT), stream)) < 1e-5
    before = steps.weights_of(kit, prepared.model)
    with pytest.raises(tf.errors.InvalidArgumentError, match="do not fill 4 micro-batches"):
        prepared.step(*(part[:3] for part in stream[0]))
    assert steps.same(steps.weights_of(kit, prepared.model), before)
    assert prepared.step.experimental_get_tracing_count() == 1


# Models that are not ours ------------------------------------------------------------------------


@KERAS_3
def test_a_double_precision_model(technique, models):
    """`fit` does not tell its graph how many samples there are: their shares are float32 then."""
    keras, tf, weights = models.keras, models.tf, {}
    x, y = (tf.constant(value.astype(np.float64)) for value in (LEFT, TARGET))

    class Accumulated(technique.AccumulatedTraining, keras.Model):
        pass

    def plain(model, optimizer):
        with tf.GradientTape() as tape:
            loss = models.squares(model(x, training=True), y)
        variables = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))

    with models.in_float64():
        for name in ("plain", "step", "fit", "fit in parts"):
            inputs = keras.Input((4,))
            kind = Accumulated if name == "fit in parts" else keras.Model
            model = kind(inputs, keras.layers.Dense(4, kernel_initializer="ones")(inputs))
            optimizer = keras.optimizers.SGD(0.1)
            if name.startswith("fit"):
                model.compile(optimizer, "mse")
                model.fit(x, y, batch_size=len(LEFT), epochs=3, shuffle=False, verbose=0)
            else:
                step = technique.make_train_step(model, optimizer, models.squares)
                for _ in range(3):
                    step(x, y) if name == "step" else plain(model, optimizer)
            weights[name] = np.array(model.weights[0])
    np.testing.assert_allclose(weights["step"], weights["plain"], rtol=1e-14)
    np.testing.assert_allclose(weights["fit"], weights["plain"], rtol=1e-14)
    np.testing.assert_allclose(weights["fit in parts"], weights["fit"], rtol=1e-7)


@KERAS_3
def test_parts_of_equal_size_have_a_static_shape(kit, technique, models):
    """Of a functional model with a list of inputs."""
    keras, layers, shapes, losses = models.keras, models.layers, [], []

    class Look(layers.Layer):
        def call(self, x):
            shapes.append(x.shape[0])
            return x

    x, y = [models.tensor(LEFT), models.tensor(RIGHT)], models.tensor(TARGET)
    for make, settings in (
        (kit.training.make_train_step, {}),
        (technique.make_train_step, {"micro_batches": 3}),
    ):
        keras.utils.set_random_seed(0)
        a, b = keras.Input((4,)), keras.Input((4,))
        model = keras.Model([a, b], Look()(layers.Dense(4)(layers.Add()([a, b]))))
        step = make(model, models.descent(model), models.squares, **settings)
        losses.append([float(step(x, y)) for _ in range(3)])
    assert apart(*losses) < 1e-6
    assert shapes[-1] == 3


# Bad input ---------------------------------------------------------------------------------------


def make(technique, models, model=None, **settings):
    model = model or models.dense()
    return technique.make_train_step(model, models.descent(model), models.squares, **settings)


def call(technique, models, x, y, micro_batches=4):
    return make(technique, models, micro_batches=micro_batches)(x, y)


ONES = np.ones((9, 4), np.float32)
REFUSALS = [
    *(
        (
            lambda t, m, parts=parts: make(t, m, micro_batches=parts),
            f"micro_batches must be an integer of at least 1, not {parts!r}",
        )
        for parts in (0, -2, 2.0, "4")
    ),
    (
        lambda t, m: call(t, m, m.tensor(ONES[:3]), m.tensor(ONES[:3])),
        "3 samples do not fill 4 micro-batches: drop this batch",
    ),
    (
        lambda t, m: call(t, m, m.tensor(ONES), m.tensor(ONES[:8])),
        "need one first axis, the samples: got ",
    ),
    (lambda t, m: call(t, m, m.tensor(ONES), m.tensor(np.float32(1.0))), "a scalar"),
    (lambda t, m: make(t, m, m.freeze(m.dense())), "the model has no trainable"),
    pytest.param(
        lambda t, m: make(t, m, m.unbuilt()),
        "the model has no variables yet: call it once",
        marks=pytest.mark.only("tf", "tf_keras"),
    ),
    pytest.param(
        lambda t, m: call(t, m, m.tf.sparse.from_dense(ONES), m.tensor(ONES)),
        "a SparseTensor is not cut into parts",
        marks=KERAS_3,
    ),
]


@pytest.mark.parametrize(("call", "message"), REFUSALS)
def test_a_refusal_says_why(technique, models, call, message):
    with pytest.raises((ValueError, NotImplementedError), match=re.escape(message)):
        call(technique, models)


def test_a_batch_that_cannot_be_cut_changes_nothing(kit, models, prepare):
    prepared, (batch,) = prepare(CNN), steps.batches(kit, CNN, 1, 10)
    before = steps.weights_of(kit, prepared.model), models.state(prepared.optimizer)
    with pytest.raises(ValueError, match="do not fill"):
        prepared.step(batch[0][:3], batch[1][:3])
    assert steps.same(steps.weights_of(kit, prepared.model), before[0])
    assert models.state(prepared.optimizer) == before[1]
    assert steps.losses_of(kit, prepared, [batch]) == steps.losses_of(kit, prepare(CNN), [batch])


@PT
@pytest.mark.parametrize("kind", ["sparse_coo", "nested"])
def test_what_cannot_be_cut_is_refused_before_gradients_are_dropped(technique, models, kind):
    torch, model = models.torch, models.dense()
    x = torch.ones(9, 4)
    x = x.to_sparse() if kind == "sparse_coo" else torch.nested.nested_tensor(list(x))
    model.weight.grad = torch.ones_like(model.weight)
    with pytest.raises(ValueError, match=f"x and y hold a {kind} tensor, which cannot be cut"):
        make(technique, models, model)(x, torch.ones(9, 3))
    assert model.weight.grad is not None


# Replicas and shards -----------------------------------------------------------------------------

LOOPBACK = pytest.mark.skipif(sys.platform != "linux", reason="the loopback interface is lo there")


@pytest.fixture(scope="module")
def replicas(tmp_path_factory):
    """What two processes found that train together."""
    store = tmp_path_factory.mktemp("replicas") / "store"
    worker, loopback = "train_step.pt_replicas", {"GLOO_SOCKET_IFNAME": "lo"}
    return workers.run(worker, ("pt",), lambda name: [store], **loopback)["pt"]


@LOOPBACK
@pytest.mark.parametrize(("kind", "buckets"), [("ddp", 1), ("shards", 2)])
def test_replicas_exchange_once_a_step_and_have_the_gradient_of_the_whole_batch(
    replicas, kind, buckets
):
    """As often as PyTorch's own step, whatever the parts, and again in a plain step afterwards."""
    for parts in ("None", "1", "3"):
        assert replicas[kind][parts]["sent"] == [buckets, buckets]  # shards: a root and a block
        for ours, plain in zip(replicas[kind][parts]["gradients"], replicas["plain"], strict=True):
            np.testing.assert_allclose(ours, plain, rtol=1e-5, atol=1e-7)


@LOOPBACK
def test_shards_are_clipped_by_the_norm_of_all(replicas):
    shards, plain = replicas["clipped"]["shards"], replicas["clipped"]["plain"]
    assert shards["norm"] == pytest.approx(plain["norm"], rel=1e-5)
    for ours, theirs in zip(shards["weights"], plain["weights"], strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
