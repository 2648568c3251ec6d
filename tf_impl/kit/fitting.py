"""Keras's `fit` as a loop that is timed, with so many batches a call of its graph.

It has no twin: PyTorch has no `fit`.
"""

import time
from collections.abc import Callable

import tensorflow as tf


def fit_loop(
    model: tf.keras.Model,
    optimizer: tf.keras.optimizers.Optimizer,
    loss_fn: Callable,
    *,
    steps_per_execution: int = 1,
) -> Callable:
    """Make a loop that trains through `model.fit`, and times it.

    Args:
        model, optimizer: as ever; the model has its variables.
        loss_fn: `loss_fn(output, y)` returns a scalar. tf_keras hands labels (n,) to it as (n, 1).
        steps_per_execution: batches that one call of Keras's graph trains on; else its defaults.

    Returns:
        `loop(batches) -> (seconds, loss)`. batches: (x, y) of equal shapes, x as the model takes it
        in `fit`. The first call is left out of `seconds`, and with it what `fit` does once an
        epoch. So that only whole calls are timed, the batches are repeated to fill them, and
        `seconds` is scaled to len(batches) - 1 steps; a single batch is trained on once. loss: the
        mean over all batches, a float. `loop.calls()`: how many calls the last loop made.

    Raises:
        ValueError: fewer than one step a call. The loop: NotImplementedError in Keras 3 for several
        outputs with labels in another structure, of which `fit` makes a loss for each output.
    """
    if steps_per_execution < 1:
        raise ValueError(f"steps_per_execution must be at least 1, not {steps_per_execution}")

    class Loss(tf.keras.losses.Loss):
        """`loss_fn` as it is; Keras's own `__call__` would make labels floating-point numbers."""

        def __call__(self, y_true, y_pred, sample_weight=None):
            return loss_fn(y_pred, y_true)

    class Clock(tf.keras.callbacks.Callback):
        """Notes when each call has ended: Keras has read the loss on the host by then."""

        def on_train_batch_end(self, batch, logs=None):
            ends.append(time.perf_counter())

    model.compile(optimizer=optimizer, loss=Loss(), steps_per_execution=steps_per_execution)
    ends: list[float] = []

    def loop(batches):
        ends.clear()
        _refuse_other_labels(model, batches[0][1])
        timed_calls = -(-(len(batches) - 1) // steps_per_execution)
        steps = (1 + timed_calls) * steps_per_execution if timed_calls else 1
        stacked = tf.nest.map_structure(lambda *parts: tf.stack(parts), *batches)
        source = tf.data.Dataset.from_tensor_slices(stacked).repeat().take(steps)
        history = model.fit(source, shuffle=False, verbose=0, callbacks=[Clock()])
        each = (ends[-1] - ends[0]) / max(1, timed_calls * steps_per_execution)
        return each * (len(batches) - 1), history.history["loss"][0]

    loop.calls = lambda: len(ends)
    return loop


def _refuse_other_labels(model: tf.keras.Model, y) -> None:
    outputs = getattr(model, "output", None)
    kinds = [kind for kind in (dict, (list, tuple)) if isinstance(outputs, kind)]
    if hasattr(tf.keras, "StatelessScope") and kinds and not isinstance(y, kinds[0]):
        raise NotImplementedError(
            f"`fit` of Keras 3 has a loss for each of the model's {len(outputs)} outputs: give"
            " labels for each, or take a step (`graph_train_step`)"
        )
