"""Stacking: the techniques of a train step on top of one another, in the order that works.

What it changes: one step takes any of them, each behind its own setting, and every setting at its
default gives the plain eager float32 step. The usual ladder: channels_last, then `torch.compile`,
then bfloat16 under autocast, then a fused optimizer, then accumulation over micro-batches.

The order, and its reasons:
1. memory format: a compiled graph is specialised on the strides that it sees.
2. recomputed blocks: they take the place of a block's `forward`, which all that follows calls.
3. the optimizer: after the model is what it will be. Its implementation is its maker's choice.
4. autocast, around the forward pass alone: the backward pass repeats the dtypes of the forward one.
5. compilation, around autocast and loss: the compiler fuses the casts.
6. accumulation, around what is compiled: one graph of the small shape serves every part.
7. unscaling, then clipping: scaled gradients are above any bound. Once, after the last part.
8. the update, which the scaler may skip.

Its twin: `tf_impl/train_step/stacking.py`.

Where the frameworks differ and why:
- channels_last changes something here only: it is TensorFlow's default.
- compiled: here the forward pass with the loss is one region, which brings its backward pass, and
  an optimizer that is not fused is another; what lies between, Python runs. There XLA compiles the
  whole step, micro-batches and all, to one program.
- bfloat16: autocast decides per operator, and for compiled code while it is traced; Keras decides
  per layer.
- A model is changed in place here; there memory format and recomputed groups of layers make a new
  one.
- BatchNorm normalises each micro-batch by itself in both, so accumulation is another computation
  for a model that has it, and the same one for a model without.

When it helps and when it hurts: gains do not multiply. What is bound by memory (BatchNorm, ReLU)
gains from compilation or bfloat16, not from both in full; fused only counts where the update is a
visible share of what is left; accumulation and recomputation cost time and save memory. A CPU
without bfloat16 units emulates it, and convolutions then take several times as long, compiled or
not. Add one rung at a time, measure, and leave out what does not pay.

Run it alone: `python -m pt_impl.train_step.stacking` prints the ladder on the digits CNN.

Copy with it: `pt_impl/train_step/activation_checkpointing.py`,
`pt_impl/train_step/compilation.py`, `pt_impl/train_step/gradient_accumulation.py`,
`pt_impl/train_step/gradient_clipping.py`, `pt_impl/train_step/memory_format.py`,
`pt_impl/train_step/mixed_precision.py`.
"""

import math
from collections.abc import Callable, Mapping

import torch
from torch import nn

from pt_impl.train_step.activation_checkpointing import apply_checkpointing
from pt_impl.train_step.compilation import compile_function, compile_optimizer
from pt_impl.train_step.gradient_accumulation import GradientAccumulator
from pt_impl.train_step.gradient_clipping import GradientClipper
from pt_impl.train_step.memory_format import apply_memory_format, convert_batch
from pt_impl.train_step.mixed_precision import MixedPrecision, to_float32


def prepare_model(model: nn.Module, *, memory_format: str = "", recomputed: str = "") -> nn.Module:
    """Apply what changes the model itself (1, 2). Make the optimizer of what this returns (3).

    Args:
        model: changed in place.
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
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_fn: Callable,
    *,
    memory_format: str = "",
    dtype: str = "float32",
    keep_fp32: str = "",
    micro_batches: int = 1,
    max_norm: float = math.inf,
    compiled: bool = False,
) -> Callable:
    """Make the step with all that is asked for (4 to 8); the defaults are the plain step.

    Args:
        model: what `prepare_model` returned; it is put into training mode.
        optimizer: over its parameters. compiled compiles its update too, unless it is fused.
        loss_fn: `loss_fn(output, y)` is given float32 and returns a mean over samples.
        memory_format: what batches are converted to, as the model was.
        dtype, keep_fp32, micro_batches, max_norm: as in the pieces of these techniques.
        compiled: whether `torch.compile` compiles forward pass, loss and update, in the first step;
            an optimizer that has no state before it compiles in the second once more.

    Returns:
        `step(x, y) -> loss`, a float32 scalar on the device, the mean over the batch; x as in the
        pieces. `step.state_dict()` and `step.load_state_dict(state)` save and resume the scaler.

    Raises:
        As the techniques, before anything is changed.
    """
    accumulator = GradientAccumulator(model, micro_batches=micro_batches)
    clipper = GradientClipper(model, max_norm=max_norm)
    precision = MixedPrecision(model, dtype=dtype, keep_fp32=keep_fp32)  # last: changes the model
    mean_loss = _mean_loss(model, loss_fn, precision)
    if compiled:
        mean_loss = compile_function(mean_loss)
        if not optimizer.defaults.get("fused"):  # which is one kernel already
            compile_optimizer(optimizer)
    model.train()

    def backward(x, y, share):
        loss = mean_loss(x, y)
        if micro_batches > 1:
            loss = loss * share
        precision.backward(loss)
        return loss.detach()

    def step(x, y):
        accumulator.check(x, y)
        if memory_format:
            x = convert_batch(x, memory_format=memory_format)
        optimizer.zero_grad(set_to_none=True)
        loss = accumulator.run(backward, x, y)
        if max_norm < math.inf:
            precision.unscale(optimizer)
            _clip(clipper, optimizer)
        precision.step(optimizer)
        return loss

    return _with_scale(step, precision)


def _clip(clipper: GradientClipper, optimizer: torch.optim.Optimizer) -> None:
    """Clip what the optimizer holds: other gradients are still scaled, and add up over steps."""
    clipper.parameters = [p for group in optimizer.param_groups for p in group["params"]]
    clipper.clip()


def _with_scale(step: Callable, precision: MixedPrecision) -> Callable:
    """The step with the scaler's state at hand."""
    step.loss_scale = precision.loss_scale
    step.state_dict, step.load_state_dict = precision.state_dict, precision.load_state_dict
    return step


def _mean_loss(model: nn.Module, loss_fn: Callable, precision: MixedPrecision) -> Callable:
    """The forward pass under autocast, and the loss of its output in float32."""

    def mean_loss(x, y):
        with precision.autocast():
            output = _call(model, x)
        return loss_fn(to_float32(output), y)

    return mean_loss


def _call(model: nn.Module, x):
    """Call the model as PyTorch's users do: a tuple is its arguments, a mapping its keywords."""
    if isinstance(x, Mapping):
        return model(**x)
    return model(*x) if isinstance(x, tuple) else model(x)


def main() -> None:
    """Print the ladder on the digits CNN, rung by rung, in interleaved samples."""
    import os
    import statistics
    import tempfile
    import time
    from pathlib import Path

    from pt_impl.kit import data, models, runtime, training
    from shared import datasets
    from shared.specs import TASKS
    from shared.weights import init_weights

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
