"""A user's Keras model on PyTorch is trained as Keras trains it, by the steps of any technique."""

from __future__ import annotations

import os

import numpy as np
import pytest

from tests.frameworks import apart

FRAMEWORKS = ("pt",)
random = np.random.default_rng(4)
X, Y = random.normal(size=(8, 5)).astype(np.float32), random.integers(0, 3, 8)


@pytest.fixture(scope="module")
def keras(impl):
    """Keras 3 on PyTorch, as `try` starts it."""
    os.environ["KERAS_BACKEND"] = "torch"
    import keras

    return keras


@pytest.fixture
def given(keras):
    """What a file's `keras()` gives: `given(dropout)`."""

    def make(dropout=0.0, **settings):
        layers = keras.layers
        parts = [keras.Input((5,)), layers.Dense(8, activation="relu", **settings)]
        parts += [layers.BatchNormalization(), layers.Dropout(dropout), layers.Dense(3)]
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        return keras.Sequential(parts), loss, keras.optimizers.Adam(0.05)

    return make


@pytest.fixture
def built(kit, given):
    """`built(dropout)`: the file's model as a run has it, its weights and its batch."""
    from pt_impl.kit import user_model

    def build(dropout=0.0, **settings):
        file_model = user_model.UserModel(lambda: given(dropout, **settings))
        return user_model, file_model, file_model.build(), user_model.to_device(X, Y)

    return build


def test_its_losses_are_those_of_keras_own_trainer(kit, given, built):
    user_model, file_model, model, batch = built()
    weights = user_model.export_weights(model)
    optimizer = file_model.optimizer(model, None)
    step = kit.training.make_train_step(model, optimizer, file_model.loss)
    losses = [kit.runtime.to_float(step(*batch)) for _ in range(4)]
    theirs, loss, rule = given()
    theirs.set_weights(list(weights.values()))
    theirs.compile(rule, loss)
    wanted = [float(theirs.train_on_batch(X, Y)) for _ in range(4)]
    assert apart(losses, wanted) < 1e-5
    assert losses[-1] < 0.9 * losses[0]
    predicted = kit.training.make_predict(model)(batch[0])
    assert apart(predicted, theirs.predict_on_batch(X)) < 1e-4
    assert model.training  # as it was
    kept = kit.runtime.state_bytes(model, optimizer)["optimizer"]
    assert kept >= 2 * 4 * sum(value.numel() for value in model.trained().values())


def test_weights_are_numbered_as_in_tensorflow_and_copied(built):
    user_model, file_model, model, _ = built()
    weights = user_model.export_weights(model)
    assert [value.shape for value in weights.values()][:3] == [(5, 8), (8,), (8,)]
    assert list(weights) == [f"{place:04d}" for place in range(8)]
    again = file_model.build({name: value + 1 for name, value in weights.items()})
    assert np.array_equal(user_model.export_weights(again)["0000"], weights["0000"] + 1)
    assert len(user_model.named_parameters(again)) == 6  # not what BatchNorm counts
    with pytest.raises(ValueError, match="the weights do not fit the model"):
        user_model.import_weights(model, {"0000": weights["0000"]})


def test_dropout_is_drawn_anew_from_a_seed(built):
    user_model, _, model, (x, _) = built(0.5)
    outputs = []
    for seed in (1, 1, 2):
        user_model.reseed(model, seed)
        outputs.append(model.train()(x).detach())
    assert apart(outputs[1], outputs[0]) == 0 < apart(outputs[2], outputs[0])


def test_a_check_says_what_is_known_or_wrong(keras, given, built):
    user_model, file_model, model, batch = built()
    found = user_model.check(file_model, model, batch)
    assert found["has_optimizer"]
    assert found["own_step"] is None
    user_model, file_model, model, batch = built(kernel_regularizer="l2")
    with pytest.raises(user_model.BadFile, match="the Keras model adds losses"):
        user_model.check(file_model, model, batch)
    model, loss, _ = given()
    for returned, words in (
        ((model, type(loss)), "has to give a loss of keras.losses, or a function"),
        ((model, loss, "sgd"), "returns a str as its optimizer"),
    ):
        with pytest.raises(user_model.BadFile, match=words):
            user_model.UserModel(lambda returned=returned: returned).build()
