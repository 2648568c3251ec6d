"""Stacking: the techniques of a train step on top of one another, in the order that works.

What it changes: one step takes any of them, each behind its own setting, and every setting at its
default gives the plain float32 step of one `tf.function`. The usual ladder: channels_last, then
XLA, then bfloat16 layers, then accumulation over micro-batches.

The order, and its reasons:
1. memory format: Keras rebuilds the model from its layers' configurations, which know nothing of
   what follows.
2. recomputed blocks: they take the place of a layer's `call`, which all that follows calls.
3. the optimizer: after the model is what it will be. Its implementation is its maker's choice; in
   float16 it is wrapped in one that scales.
4. dtype policies, around forward pass and gradients, since recomputed blocks run forward again.
5. accumulation, within them: a part is traced once, with the policies that it runs under.
6. clipping, at max_norm times the scale: Keras unscales within the update. Once, after all parts.
7. the update, which the scaling optimizer may skip.
8. compilation, around everything: XLA makes one program of the step, update included.

Its twin: `pt_impl/train_step/stacking.py`.

Where the frameworks differ and why:
- channels_last is TensorFlow's default and changes nothing here; PyTorch converts the model.
- compiled: XLA compiles the whole step, micro-batches and update included, to one program; there
  the forward and backward pass and the update are compiled apart, and Python runs the rest.
- bfloat16: Keras decides per layer while the graph is traced, autocast per operator.
- Memory format and recomputed groups of layers make a new model here; there it is changed in place.
- BatchNorm normalises each micro-batch by itself in both, so accumulation is another computation
  for a model that has it, and the same one for a model without.

When it helps and when it hurts: gains do not multiply. What is bound by memory (BatchNorm, ReLU)
gains from compilation or bfloat16, not from both in full; accumulation and recomputation cost time
and save memory. On a CPU XLA may lose to the oneDNN kernels that TensorFlow's graphs call, and it
computes bfloat16 in float32 where it has no kernel for it. Add one rung at a time, measure, and
leave out what does not pay.

Run it alone: `python -m tf_impl.train_step.stacking` prints the ladder on the digits CNN.

Copy with it: `tf_impl/train_step/activation_checkpointing.py`,
`tf_impl/train_step/compilation.py`, `tf_impl/train_step/gradient_accumulation.py`,
`tf_impl/train_step/gradient_clipping.py`, `tf_impl/train_step/memory_format.py`,
`tf_impl/train_step/mixed_precision.py`.
"""

import inspect
import math
from collections.abc import Callable

import tensorflow as tf

from tf_impl.train_step.activation_checkpointing import apply_checkpointing
from tf_impl.train_step.compilation import compile_function
from tf_impl.train_step.gradient_accumulation import GradientAccumulator
from tf_impl.train_step.gradient_clipping import GradientClipper
from tf_impl.train_step.memory_format import apply_memory_format, convert_batch
from tf_impl.train_step.mixed_precision import MixedPrecision, to_float32


def prepare_model(
    model: tf.keras.Model, *, memory_format: str = "", recomputed: str = ""
) -> tf.keras.Model:
    """Apply what changes the model itself (1, 2). Make the optimizer of what this returns (3).

    Args:
        model: with its variables.
        memory_format: as in `apply_memory_format`; "" leaves it as it is.
        recomputed: the blocks of `apply_checkpointing`; "" are none.

    Returns:
        The model to train.

    Raises:
        As the two, before anything is changed by the one that raises.
    """
    if memory_format:
        model = apply_memory_format(model, memory_format=memory_format)
    if recomputed:
        model = apply_checkpointing(model, blocks=recomputed)
    return model


def make_train_step(
    model: tf.keras.Model,
    optimizer: tf.keras.optimizers.Optimizer,
    loss_fn: Callable,
    *,
    memory_format: str = "",
    dtype: str = "float32",
    keep_fp32: str = "",
    micro_batches: int = 1,
    max_norm: float = math.inf,
    compiled: bool = False,
) -> Callable:
    """Make the step with all that is asked for (3 to 8); the defaults are the plain step.

    Args:
        model: what `prepare_model` returned.
        optimizer: over its variables.
        loss_fn: `loss_fn(output, y)` is given float32 and returns a mean over samples.
        memory_format: what batches are converted to, as the model was.
        dtype, keep_fp32: as in `MixedPrecision`.
        micro_batches: as in `GradientAccumulator`.
        max_norm: as in `GradientClipper`.
        compiled: whether XLA compiles the whole step; the first step compiles.

    Returns:
        `step(x, y) -> loss`, a float32 scalar on the device, the mean over the batch. x: a tensor
        or a structure of tensors, handed over as `fit` does: as one argument, but where the model's
        `call` needs several. `step.optimizer` is what updates the variables: save it to resume.

    Raises:
        As the techniques, before anything is changed.
    """
    accumulator = GradientAccumulator(model, micro_batches=micro_batches)
    clipper = GradientClipper(model, max_norm=max_norm)
    precision = MixedPrecision(model, dtype=dtype, keep_fp32=keep_fp32)
    optimizer, variables = precision.wrap(optimizer), model.trainable_variables

    def gradients_of(x, y, share):
        with tf.GradientTape() as tape:
            output = to_float32(_call(model, x, training=True))
            loss = _with_own_losses(loss_fn(output, y), model)
            if micro_batches > 1:  # tf.cast would round a number to float32
                loss *= tf.cast(share, loss.dtype) if tf.is_tensor(share) else share
            scaled = precision.scale(loss)
        return loss, tape.gradient(scaled, variables)

    def train(x, y):
        if memory_format:
            x = convert_batch(x, memory_format=memory_format)
        with precision.policies():
            loss, gradients = accumulator.run(gradients_of, x, y)
        gradients = clipper.clip(gradients, scale=precision.gradient_scale())
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return loss

    _build(optimizer, variables)
    step = compile_function(train) if compiled else tf.function(train, jit_compile=False)
    step.loss_scale, step.optimizer = precision.loss_scale, optimizer
    return step


def _build(optimizer, variables: list) -> None:
    """Make the optimizer's variables, which XLA would not."""
    if not hasattr(optimizer, "build"):
        raise NotImplementedError(
            "a legacy optimizer: take the one of its name in keras.optimizers"
        )
    if not getattr(optimizer, "built", False):
        optimizer.build(variables)


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


def _with_own_losses(loss, model):
    """Add the model's own losses (of regularisers, of `add_loss`) as `fit` does, in float32."""
    loss = tf.cast(loss, tf.float32) if loss.dtype.size < 4 else loss
    return sum((tf.cast(term, loss.dtype) for term in model.losses), loss)


def main() -> None:
    """Print the ladder on the digits CNN, rung by rung, in interleaved samples."""
    import os
    import statistics
    import tempfile
    import time
    from pathlib import Path

    from shared import datasets
    from shared.specs import TASKS
    from shared.weights import init_weights
    from tf_impl.kit import data, models, runtime, training

    runtime.configure(threads=os.cpu_count() or 1, seed=0)
    task = TASKS["digits-cnn"]
    with tempfile.TemporaryDirectory() as folder:
        x, y = datasets.load(datasets.materialise(task.dataset, Path(folder)), "train")
        batches = datasets.first_batches(x, y, task.compute_batch, 10, seed=0)
    batches = data.resident_batches(batches)
    ladder = (
        ("memory_format", "channels_last"),
        ("compiled", True),
        ("dtype", "bfloat16"),
        ("micro_batches", 2),
    )
    settings, rungs = {}, {"baseline": {}}
    for name, value in ladder:
        settings = settings | {name: value}
        rungs[f"+ {name}"] = settings
    steps, losses, times = {}, {}, {name: [] for name in rungs}
    for name, settings in rungs.items():
        model = models.build(task.model, init_weights(task.model, seed=0))
        model = prepare_model(model, memory_format=settings.get("memory_format", ""))
        optimizer = training.make_optimizer(model, task.recipe)
        steps[name] = make_train_step(model, optimizer, training.cross_entropy, **settings)
    for _ in range(20):
        for name, step in steps.items():
            start = time.perf_counter()
            for batch in batches:
                losses[name] = step(*batch)
            runtime.synchronize()
            times[name].append((time.perf_counter() - start) / len(batches))
    print(f"digits-cnn, batch {task.compute_batch}: ms a step, ratio, loss after 200 steps")
    baseline = statistics.median(times["baseline"])
    for name, samples in times.items():
        seconds, loss = statistics.median(samples), runtime.to_float(losses[name])
        print(f"{name:16}{seconds * 1e3:8.2f}{seconds / baseline:7.2f}{loss:9.4f}")


if __name__ == "__main__":
    main()
