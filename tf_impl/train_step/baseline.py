"""The baselines that the reference train step is held against.

What it changes: nothing. `make_hand_written_step` is the custom loop of TensorFlow's own guides,
`make_fit_loop` Keras's `fit`, so that the kit's `training.make_train_step` can be shown to cost
nothing over either.

Its twin: `pt_impl/train_step/baseline.py`.

Where the frameworks differ and why: Keras brings a training loop, `fit`, which feeds itself from a
tf.data pipeline, keeps metrics and calls callbacks after each batch (`make_fit_loop`); PyTorch has
none.

When it helps and when it hurts: `fit` costs a fixed time for each batch, which small steps feel
and large ones do not.

Run it alone: `python -m tf_impl.train_step.baseline` prints the kit's step against the hand-written
one.

Copy with it: nothing.
"""

import inspect
import time
from collections.abc import Callable

import tensorflow as tf


def make_hand_written_step(
    model: tf.keras.Model, optimizer: tf.keras.optimizers.Optimizer
) -> Callable:
    """Make step(x, y) -> loss as TensorFlow's guides write it: one tf.function, float32.

    `x` is what the model takes in `fit`, `y` int64 (n,); the loss is a scalar. Raises ValueError,
    before anything is changed, for a model that gives anything but one tensor of logits,
    NotImplementedError for an optimizer that expects a scaled loss.
    Source: "Writing a training loop from scratch", tensorflow.org/guide.
    """
    scales = isinstance(optimizer, tf.keras.mixed_precision.LossScaleOptimizer)
    if scales or getattr(optimizer, "loss_scale_factor", None):
        raise NotImplementedError("a scaled loss: this is the step in float32, which needs none")
    loss_fn = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            output = _call(model, x, training=True)
            _check_output(output)
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
        _check_output(_fit_call(model, batches[0][0]))
        x, y = tf.nest.map_structure(lambda *parts: tf.stack(parts), *batches)
        source = tf.data.Dataset.from_tensor_slices((x, y))
        history = model.fit(source, verbose=0, callbacks=[Clock()])
        return ends[-1] - ends[0], history.history["loss"][0]

    return loop


def _check_output(output) -> None:
    if not tf.is_tensor(output):
        raise ValueError(
            "the guide's step has one loss, cross-entropy of logits (n, classes): "
            f"the model gives a {type(output).__name__}"
        )


def _fit_call(model, x):
    """The output for x as `fit` hands it over: always as one argument."""
    try:
        return model(x, training=False)
    except TypeError as error:
        raise ValueError(f"`fit` hands x over as one argument, and the model: {error}") from error


def _call(model, x, training: bool):
    """Call `model` as `fit` does: x is one argument, but where `call` needs several."""
    inputs = inspect.signature(model.call).parameters.values()
    inputs = [p for p in inputs if p.name not in ("training", "mask") and p.kind != p.VAR_KEYWORD]
    if isinstance(x, dict) and len(inputs) > 1 and x.keys() <= {p.name for p in inputs}:
        return model(**x, training=training)
    needed = sum(2 if p.kind == p.VAR_POSITIONAL else p.default is p.empty for p in inputs)
    if isinstance(x, tuple | list) and needed > 1:
        return model(*x, training=training)
    return model(x, training=training)


def main() -> None:
    """Print the kit's step against the hand-written one on the digits CNN, interleaved."""
    import statistics
    import tempfile
    from pathlib import Path

    from shared import datasets
    from shared.specs import TASKS
    from shared.weights import init_weights
    from tf_impl.kit import data, models, runtime, training

    task = TASKS["digits-cnn"]
    weights = init_weights(task.model, seed=0)
    with tempfile.TemporaryDirectory() as folder:
        x, y = datasets.load(datasets.materialise(task.dataset, Path(folder)), "train")
        batches = datasets.first_batches(x, y, task.small_batch, 10, seed=0)
    batches = data.resident_batches(batches)
    steps = {}
    for name in ("kit", "hand_written"):
        model = models.build(task.model, weights)
        optimizer = training.make_optimizer(model, task.recipe)
        if name == "kit":
            steps[name] = training.make_train_step(model, optimizer, training.cross_entropy)
        else:
            steps[name] = make_hand_written_step(model, optimizer)
    samples = {name: [] for name in steps}
    for _ in range(50):
        for name, step in steps.items():
            start = time.perf_counter()
            for batch in batches:
                step(*batch)
            runtime.synchronize()
            samples[name].append((time.perf_counter() - start) / len(batches))
    for name, times in samples.items():
        print(f"{name:14} {statistics.median(times[10:]) * 1e3:.3f} ms a step")


if __name__ == "__main__":
    main()
