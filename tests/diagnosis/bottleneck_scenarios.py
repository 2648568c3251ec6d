"""One framework's share of the tests of the bottleneck; `worker.py` runs it."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import sys
from unittest import mock

from tests.diagnosis import steps
from tests.diagnosis.steps import impl

find = impl.diagnosis.bottleneck.find_bottleneck


def planted():
    """Each bottleneck, planted in a step; and a healthy step."""
    steps.forget()
    large = steps.data(512, 256)
    healthy = steps.plain_step(steps.dense(512, 512, 512, 512, 2))
    tiny = steps.plain_step(steps.dense(4, 4, 4, 4, 4, 2))
    words = steps.codes(200_000, 32, 4), steps.data(4, 32)[1]
    small = steps.dense(8, 8, 2)
    metric = steps.with_metric(steps.plain_step(small), small)
    diagnoses = {
        "healthy": find(healthy, [large], steps=8),
        "slow loader": find(healthy, steps.late_batches(large, 0.05), steps=8),
        "tiny model": find(tiny, [steps.data(4, 2)], steps=8),
        "huge embedding": find(
            steps.plain_step(steps.table(200_000, 64), "adam"), [words], steps=8
        ),
        "synchronising metric": find(metric, [steps.data(8, 64)], steps=8),
        "blocked exchange": find(steps.exchanging(healthy, 0.06), [large], steps=8),
    }
    return {name: one.as_json() | {"said": str(one)} for name, one in diagnoses.items()}


def tasks():
    """A task's step and its batches, and what the program says of it; files are refused."""
    examples = importlib.import_module(f"{impl.__name__}.kit.examples")
    step, batches = examples.train_step("digits-cnn", 4)
    losses = [float(step(*batch)) for batch in batches]
    try:
        examples.train_step("photos")
    except ValueError as error:
        reason = str(error)
    arguments = ["program", "digits-cnn", "--batch-size", "4", "--steps", "4", "--json"]
    printed = io.StringIO()
    with mock.patch.object(sys, "argv", arguments), contextlib.redirect_stdout(printed):
        impl.diagnosis.bottleneck.main()
    sizes, told = [len(y) for _, y in batches], json.loads(printed.getvalue())
    return {"sizes": sizes, "losses": losses, "said": reason, "told": told}


def flavours():
    """Steps of either Keras: a loop of one's own, and what `compile` makes of a model."""
    if steps.NAME == "pt":
        return {}
    import keras
    import tensorflow as tf
    import tf_keras

    steps.forget()

    class Own(tf_keras.optimizers.Adam):
        """An optimizer of a user's."""

    class Own3(keras.optimizers.Adam):
        """The same of Keras 3."""

    def model_of(flavour):
        hidden = [flavour.layers.Dense(width, activation="relu") for width in (128, 128)]
        model = flavour.Sequential([*hidden, flavour.layers.Dense(10)])
        model.build((None, 64))
        return model, flavour.losses.SparseCategoricalCrossentropy(from_logits=True)

    def loop(flavour, optimizer):
        model, loss_fn = model_of(flavour)

        @tf.function
        def step(x, y):
            with tf.GradientTape() as tape:
                loss = loss_fn(y, model(x, training=True))
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
            return loss

        return step

    def compiled(flavour, **settings):
        model, loss_fn = model_of(flavour)
        model.compile("adam", loss_fn, **settings)
        return model.train_on_batch

    batch = tf.ones((64, 64)), tf.zeros((64,), tf.int32)
    made = {
        "Keras 3, a loop": loop(keras, Own3()),
        "Keras 3, compile": compiled(keras, jit_compile=False),
        "tf_keras, a loop": loop(tf_keras, Own()),
        "tf_keras, an old optimizer": loop(tf_keras, tf_keras.optimizers.legacy.SGD()),
        "tf_keras, compile": compiled(tf_keras),
    }
    with mock.patch.object(impl.diagnosis.profiling, "_TURNS", 1):  # nobody looks at the seconds
        return {name: find(step, [batch], steps=4).as_json() for name, step in made.items()}


SCENARIOS = (tasks, flavours)
TIMED = (planted,)
