"""The baselines: plain train steps, with which the kit's plain step is compared.

    step = make_hand_written_step(model, optimizer)

What it changes: nothing. `make_hand_written_step` is the custom loop of TensorFlow's guides, and
`make_fit_loop` is Keras's `fit`. They show that the kit's `training.make_train_step` is as fast.

Its twin: `pt_impl/train_step/baseline.py`, which says where the frameworks differ.

When it helps and when it hurts: `fit` costs a fixed time per batch, which matters only for small
steps.

Run it alone: `python -m tf_impl.train_step.baseline` compares the kit's step with the hand-written
one.

Copy with it: `tf_impl/kit/calling.py`, `tf_impl/kit/checks/baseline.py`.
"""

import time
from collections.abc import Callable

import tensorflow as tf

from tf_impl.kit.calling import call
from tf_impl.kit.checks.baseline import check_baseline, check_fit, check_output


def make_hand_written_step(
    model: tf.keras.Model, optimizer: tf.keras.optimizers.Optimizer
) -> Callable:
    """Make step(x, y) -> loss as TensorFlow's guides write it: one tf.function, float32.

    `x` is what the model takes in `fit`, `y` int64 (n,); the loss is a scalar. Raises ValueError,
    before anything is changed, for a model that gives anything but one tensor of logits,
    NotImplementedError for an optimizer that expects a scaled loss.
    Source: "Writing a training loop from scratch", tensorflow.org/guide.
    """
    check_baseline(optimizer)
    loss_fn = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            output = call(model, x, training=True)
            check_output(output)  # while the graph is traced
            loss = loss_fn(y, output)
            loss += sum(model.losses)  # of regularisers
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    return step


def make_fit_loop(model: tf.keras.Model, optimizer: tf.keras.optimizers.Optimizer) -> Callable:
    """Make loop(batches) -> (seconds, loss) that trains through `model.fit` with its defaults.

    `seconds` passes between the end of the first batch and the end of the last, so that what `fit`
    does once an epoch does not count; `loss` is the mean over the batches, a float. It raises
    ValueError, before anything is changed, for what `make_hand_written_step` refuses.
    """
    model.compile(
        optimizer=optimizer, loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    )

    class Clock(tf.keras.callbacks.Callback):
        """Notes when each batch has ended."""

        def on_train_batch_end(self, batch, logs=None):
            """Note the time; Keras has read the loss on the host by then."""
            ends.append(time.perf_counter())

    ends: list[float] = []

    def loop(batches):
        ends.clear()
        check_fit(model, batches[0][0])
        x, y = tf.nest.map_structure(lambda *parts: tf.stack(parts), *batches)
        source = tf.data.Dataset.from_tensor_slices((x, y))
        history = model.fit(source, verbose=0, callbacks=[Clock()])
        return ends[-1] - ends[0], history.history["loss"][0]

    return loop


def main() -> None:
    """Print the kit's step against the hand-written one on the digits CNN."""
    from tf_impl.kit import training
    from tf_impl.kit.demo import Demo

    demo = Demo("digits-cnn", batch_size=4)
    model, optimizer, loss_fn = demo.build()
    steps = {"kit": training.make_train_step(model, optimizer, loss_fn)}
    model, optimizer, _ = demo.build()
    steps["hand-written"] = make_hand_written_step(model, optimizer)
    for name, ms in demo.times(steps, rounds=50).items():
        print(f"{name:14}{ms:8.3f} ms a step")


if __name__ == "__main__":
    main()
