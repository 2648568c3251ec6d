"""Something to build for what builds its model in each process: examples of "module:function".

What it holds: functions that give a model, its optimizer (without steps behind it) and its loss,
a task's train step with its batches, and a deep network for what depth does.
Twin: `pt_impl/kit/examples.py`.
"""

import tensorflow as tf

from shared import demo
from shared.specs import TASKS
from tf_impl.kit.demo import Demo


def deep_network(*, layers: int = 30, width: int = 64, residual: bool = False) -> tf.keras.Model:
    """Return dense layers with rectifiers and a head of 10, plain or with shortcuts."""
    inputs = x = tf.keras.Input((width,))
    for number in range(layers):
        out = tf.keras.layers.Dense(width, activation="relu", name=f"layers_{number}")(x)
        x = tf.keras.layers.Add()([x, out]) if residual else out
    return tf.keras.Model(inputs, tf.keras.layers.Dense(10, name="head")(x))


def digits_cnn() -> tuple:
    """Return the digits CNN from the weights of seed 0."""
    return demo.built(Demo.kit, TASKS["digits-cnn"])


def text_gpt_wide() -> tuple:
    """Return a transformer of ten million parameters, from the weights of seed 0."""
    return demo.built(Demo.kit, TASKS["text-gpt-wide"])


def train_step(task: str, batch_size: int | None = None) -> tuple:
    """Return the plain step of a task, and four batches of its data; see `shared/demo.py`."""
    return demo.train_step(Demo.kit, task, batch_size)
