"""Stacking: several techniques in one train step, in the order that works.

    model = prepare_model(model, memory_format="channels_last")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)  # of the changed model
    step = make_train_step(model, optimizer, loss_fn, dtype="bfloat16", micro_batches=4)

What it changes: one step has a setting for each technique. The defaults give the plain step. The
order, and its reasons:

1. memory format: a compiled graph is specialised on the strides that it sees.
2. recomputed blocks: they replace a block's `forward`, which the later parts call.
3. the optimizer: after the model is final. You choose its implementation.
4. autocast, only around the forward pass: the backward pass repeats its dtypes.
5. compilation, around autocast and loss: the compiler fuses the casts.
6. accumulation, around what is compiled: one graph of the small shape serves every part.
7. unscaling, then clipping, once after the last part: scaled gradients exceed any bound.
8. the update, which the scaler may skip.

Its twin: `tf_impl/train_step/stacking.py`.

Where the frameworks differ and why:
- channels_last is TensorFlow's default, so it changes something only in PyTorch.
- Compiled in PyTorch: forward pass and loss are one region, an optimizer that is not fused is
  another, and Python runs what lies between. Compiled in TensorFlow: XLA makes one program of the
  whole step.
- PyTorch changes the model in place. In TensorFlow memory format and recomputed layers make a new
  model.

When it helps and when it hurts: gains do not multiply. Operators that are limited by memory
bandwidth (BatchNorm, ReLU) gain from compilation or from bfloat16, but not fully from both.
Accumulation and recomputation save memory and cost time. Add one technique at a time, measure, and
leave out what does not help.
- A CPU without bfloat16 units emulates it, several times slower.

Run it alone: `python -m pt_impl.train_step.stacking` adds one technique after another to the digits
CNN.

Copy with it: `pt_impl/kit/calling.py`, `pt_impl/kit/checks/activation_checkpointing.py`,
`pt_impl/kit/checks/compilation.py`, `pt_impl/kit/checks/gradient_accumulation.py`,
`pt_impl/kit/checks/gradient_clipping.py`, `pt_impl/kit/checks/loss_scaling.py`,
`pt_impl/kit/checks/memory_format.py`, `pt_impl/kit/checks/mixed_precision.py`,
`pt_impl/kit/recomputation.py`, `pt_impl/train_step/activation_checkpointing.py`,
`pt_impl/train_step/compilation.py`, `pt_impl/train_step/gradient_accumulation.py`,
`pt_impl/train_step/gradient_clipping.py`, `pt_impl/train_step/loss_scaling.py`,
`pt_impl/train_step/memory_format.py`, `pt_impl/train_step/mixed_precision.py`.
"""

import math
from collections.abc import Callable
from functools import reduce

import torch
from torch import nn

from pt_impl.kit.calling import call, to_float32
from pt_impl.train_step.activation_checkpointing import apply_checkpointing
from pt_impl.train_step.compilation import compile_function, compile_optimizer
from pt_impl.train_step.gradient_accumulation import GradientAccumulator
from pt_impl.train_step.gradient_clipping import GradientClipper
from pt_impl.train_step.loss_scaling import LossScaler
from pt_impl.train_step.memory_format import apply_memory_format, convert_batch
from pt_impl.train_step.mixed_precision import MixedPrecision


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
    scaler = LossScaler(model, enabled=dtype == "float16")
    precision = MixedPrecision(model, dtype=dtype, keep_fp32=keep_fp32)  # last: changes the model
    mean_loss = _mean_loss(model, loss_fn, precision)
    if compiled:
        mean_loss = _compile(mean_loss, optimizer)
    model.train()

    def step(x, y):
        if memory_format:
            x = convert_batch(x, memory_format=memory_format)
        parts = accumulator.split(x, y)  # raises while there are gradients that would be lost
        optimizer.zero_grad(set_to_none=True)
        losses = []
        for part_x, part_y, share in parts:
            loss = mean_loss(part_x, part_y)
            if micro_batches > 1:
                loss = loss * share
            scaler.backward(loss)
            losses.append(loss.detach())
        if max_norm < math.inf:
            scaler.unscale(optimizer)
            _clip(clipper, optimizer)
        scaler.step(optimizer)
        return reduce(torch.add, losses)

    step.loss_scale = scaler.loss_scale
    step.state_dict, step.load_state_dict = scaler.state_dict, scaler.load_state_dict
    return step


def _mean_loss(model: nn.Module, loss_fn: Callable, precision: MixedPrecision) -> Callable:
    """The forward pass under autocast, and the loss of its output in float32."""

    def mean_loss(x, y):
        with precision.autocast():
            output = call(model, x)
        return loss_fn(to_float32(output), y)

    return mean_loss


def _compile(mean_loss: Callable, optimizer: torch.optim.Optimizer) -> Callable:
    if not optimizer.defaults.get("fused"):  # which is one kernel already
        compile_optimizer(optimizer)
    return compile_function(mean_loss)


def _clip(clipper: GradientClipper, optimizer: torch.optim.Optimizer) -> None:
    """Clip what the optimizer holds: other gradients are still scaled, and add up over steps."""
    clipper.parameters = [p for group in optimizer.param_groups for p in group["params"]]
    clipper.clip()


def main() -> None:
    """Print the ladder on the digits CNN, rung by rung."""
    from pt_impl.kit import runtime, training
    from pt_impl.kit.demo import Demo

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
