"""Something to build for what builds its model in each process: examples of "module:function".

What it holds: functions that give a model, its optimizer (without steps behind it) and its loss,
a task's train step with its batches, and a deep network for what depth does.
Twin: `pt_impl/kit/examples.py`.
"""

import tempfile
from pathlib import Path

import tensorflow as tf

from shared import datasets
from shared.specs import TASKS
from shared.weights import init_weights
from tf_impl.kit import data, models, training


def deep_network(*, layers: int = 30, width: int = 64, residual: bool = False) -> tf.keras.Model:
    """Return dense layers with rectifiers and a head of 10, plain or with shortcuts."""
    inputs = x = tf.keras.Input((width,))
    for number in range(layers):
        out = tf.keras.layers.Dense(width, activation="relu", name=f"layers_{number}")(x)
        x = tf.keras.layers.Add()([x, out]) if residual else out
    return tf.keras.Model(inputs, tf.keras.layers.Dense(10, name="head")(x))


def digits_cnn() -> tuple:
    """Return the digits CNN from the weights of seed 0."""
    return _built("digits-cnn")


def text_gpt_wide() -> tuple:
    """Return a transformer of ten million parameters, from the weights of seed 0."""
    return _built("text-gpt-wide")


def train_step(task: str, batch_size: int | None = None) -> tuple:
    """Return the plain step of a task, and four batches of its data in memory.

    batch_size: None is the task's compute batch. Raises ValueError for a task whose data is files.
    """
    known = [name for name, one in TASKS.items() if one.dataset.kind != "photos"]
    if task not in known:
        raise ValueError(f"{task!r} is no task with data in memory; these are: {', '.join(known)}")
    size = batch_size or TASKS[task].compute_batch
    with tempfile.TemporaryDirectory() as folder:
        place = datasets.materialise(TASKS[task].dataset, Path(folder))
        x, y = data.to_device(*(part[: 4 * size] for part in datasets.load(place, "train")))
    step = training.make_train_step(*_built(task))
    return step, [(x[at : at + size], y[at : at + size]) for at in range(0, len(x), size)]


def _built(task: str) -> tuple:
    task = TASKS[task]
    model = models.build(task.model, init_weights(task.model, seed=0))
    return model, training.make_optimizer(model, task.recipe), training.loss_of(task)
