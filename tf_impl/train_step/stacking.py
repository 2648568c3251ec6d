"""Stacking: several techniques in one train step, in the order that works.

    model = prepare_model(model, memory_format="channels_last")
    optimizer = tf.keras.optimizers.SGD(0.1)  # of the changed model
    step = make_train_step(model, optimizer, loss_fn, dtype="bfloat16", micro_batches=4)

What it changes: one step has a setting for each technique. The defaults give the plain step. The
order, and its reasons:

1. memory format: Keras rebuilds the model from its layers' configurations, which know nothing of
   what follows.
2. recomputed blocks: they replace a layer's `call`, which the later parts call.
3. the optimizer: after the model is final. In float16 it is wrapped in one that scales.
4. dtype policies, around forward pass and gradients, since recomputed blocks run forward again.
5. accumulation, within them: a part is traced once, with the policies that it runs under.
6. clipping, at max_norm times the scale: Keras unscales within the update. Once, after all parts.
7. the update, which the scaling optimizer may skip.
8. compilation, around everything: XLA makes one program of the step, update included.

Its twin: `pt_impl/train_step/stacking.py`, which says where the frameworks differ.

When it helps and when it hurts: gains do not multiply. Operators that are limited by memory
bandwidth (BatchNorm, ReLU) gain from compilation or from bfloat16, but not fully from both.
Accumulation and recomputation save memory and cost time. Add one technique at a time, measure, and
leave out what does not help.
- On a CPU XLA may be slower than the oneDNN kernels that TensorFlow's graphs call. It computes
  bfloat16 in float32 if it has no kernel for it.

Run it alone: `python -m tf_impl.train_step.stacking` adds one technique after another to the digits
CNN.

Copy with it: `tf_impl/kit/calling.py`, `tf_impl/kit/checks/activation_checkpointing.py`,
`tf_impl/kit/checks/compilation.py`, `tf_impl/kit/checks/gradient_accumulation.py`,
`tf_impl/kit/checks/gradient_clipping.py`, `tf_impl/kit/checks/loss_scaling.py`,
`tf_impl/kit/checks/memory_format.py`, `tf_impl/kit/checks/mixed_precision.py`,
`tf_impl/kit/checks/stacking.py`, `tf_impl/kit/rebuilding.py`, `tf_impl/kit/submodels.py`,
`tf_impl/train_step/activation_checkpointing.py`, `tf_impl/train_step/compilation.py`,
`tf_impl/train_step/gradient_accumulation.py`, `tf_impl/train_step/gradient_clipping.py`,
`tf_impl/train_step/loss_scaling.py`, `tf_impl/train_step/memory_format.py`,
`tf_impl/train_step/mixed_precision.py`.
"""

import math
from collections.abc import Callable

import tensorflow as tf

from tf_impl.kit.calling import add_own_losses, call, to_float32
from tf_impl.kit.checks.stacking import check_stacking
from tf_impl.train_step.activation_checkpointing import apply_checkpointing
from tf_impl.train_step.compilation import compile_function
from tf_impl.train_step.gradient_accumulation import GradientAccumulator
from tf_impl.train_step.gradient_clipping import GradientClipper
from tf_impl.train_step.loss_scaling import LossScaler
from tf_impl.train_step.memory_format import apply_memory_format, convert_batch
from tf_impl.train_step.mixed_precision import MixedPrecision


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
    scaler = LossScaler(model, enabled=dtype == "float16")
    precision = MixedPrecision(model, dtype=dtype, keep_fp32=keep_fp32)
    optimizer, variables = scaler.wrap(optimizer), model.trainable_variables
    _build(model, optimizer, compiled)

    def gradients_of(x, y, share):
        with tf.GradientTape() as tape:
            output = to_float32(call(model, x, training=True))
            loss = add_own_losses(loss_fn(output, y), model)
            if micro_batches > 1:  # tf.cast would round a number to float32
                loss *= tf.cast(share, loss.dtype) if tf.is_tensor(share) else share
            scaled = scaler.scale(loss)
        return loss, tape.gradient(scaled, variables)

    def train(x, y):
        if memory_format:
            x = convert_batch(x, memory_format=memory_format)
        with precision.policies():
            loss, gradients = accumulator.run(gradients_of, x, y)
        gradients = clipper.clip(gradients, scale=scaler.gradient_scale())
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return loss

    step = compile_function(train) if compiled else tf.function(train, jit_compile=False)
    step.loss_scale, step.optimizer = scaler.loss_scale, optimizer
    return step


def _build(model: tf.keras.Model, optimizer: tf.keras.optimizers.Optimizer, compiled: bool) -> None:
    """Make the optimizer's variables, which XLA would not."""
    check_stacking(model, optimizer, compiled=compiled)
    if not getattr(optimizer, "built", False):
        optimizer.build(model.trainable_variables)


def main() -> None:
    """Print the ladder on the digits CNN, rung by rung."""
    from tf_impl.kit import runtime, training
    from tf_impl.kit.demo import Demo

    demo, steps, settings = Demo("digits-cnn"), {}, {}
    for name, value in (
        ("baseline", None),
        ("memory_format", "channels_last"),
        ("compiled", True),
        ("dtype", "bfloat16"),
        ("micro_batches", 2),
    ):
        settings |= {} if value is None else {name: value}
        model, _, loss_fn = demo.build()
        model = prepare_model(model, memory_format=settings.get("memory_format", ""))
        optimizer = training.make_optimizer(model, demo.task.recipe)
        steps[name] = make_train_step(model, optimizer, loss_fn, **settings)
    print("each on top of those before it: ms a step, loss after it")
    for name, ms in demo.times(steps).items():
        print(f"{name:14}{ms:9.2f}{runtime.to_float(steps[name](*demo.batches[0])):9.4f}")


if __name__ == "__main__":
    main()
