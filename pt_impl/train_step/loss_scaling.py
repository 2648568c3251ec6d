"""Loss scaling: gradients that float16 can hold.

    scaler = LossScaler(model)
    scaler.backward(loss)  # instead of loss.backward()
    scaler.step(optimizer)  # instead of optimizer.step()

What it changes: the loss is multiplied by a scale before gradients are taken, and gradients are
divided by it before the update. float16 holds 6e-8 to 65,504 only, and a gradient is often smaller.
A step whose gradients overflow changes no weight and halves the scale. After many good steps the
scale doubles (Micikevicius et al., 2018, section 3.2). The scale is a power of two, so it adds no
rounding.

Its twin: `tf_impl/train_step/loss_scaling.py`.

Where the frameworks differ and why:
- PyTorch: `GradScaler` is separate from the optimizer. Unless the optimizer is fused, it reads a
  flag from the device in every step to decide whether to skip the update.
- TensorFlow: Keras's `LossScaleOptimizer` wraps the optimizer and decides inside the graph.

When it helps and when it hurts: training in float16 needs it: on GPUs without bfloat16 (Volta,
Turing), or for float16's three extra bits. With bfloat16 and float32 it only costs a pass over all
gradients. Most CPUs emulate float16, which is for tests only.
- Clip gradients after `scaler.unscale(optimizer)`: scaled ones exceed any bound.

Run it alone: `python -m pt_impl.train_step.loss_scaling` shows how too large a scale falls.

Copy with it: `pt_impl/kit/calling.py`, `pt_impl/kit/checks/loss_scaling.py`,
`pt_impl/kit/checks/mixed_precision.py`, `pt_impl/train_step/mixed_precision.py`.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from pt_impl.kit.calling import call, to_float32
from pt_impl.kit.checks.loss_scaling import check_loss_scaling
from pt_impl.train_step.mixed_precision import MixedPrecision


class LossScaler:
    """Backward pass and update with a scaled loss: torch's `GradScaler`, which keeps a state.

    Args:
        model: its device is where the scale is.
        initial_scale: the loss is multiplied by a scale that starts here.
        growth_interval: the scale doubles after so many good steps in a row.
        enabled: False passes loss and update through, for a loop in which float16 is a setting.

    Raises:
        ValueError: a scale that is not positive, an interval below 1, a model without parameters.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        initial_scale: float = 65536.0,
        growth_interval: int = 2000,
        enabled: bool = True,
    ) -> None:
        check_loss_scaling(model, initial_scale, growth_interval)
        self.scaler = torch.amp.GradScaler(
            next(model.parameters()).device.type,
            init_scale=initial_scale,
            growth_interval=growth_interval,
            enabled=enabled,
        )

    def backward(self, loss: Tensor) -> None:
        """Run the backward pass of the scaled loss."""
        self.scaler.scale(loss).backward()

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients by the scale, for what stands between `backward` and `step`."""
        self.scaler.unscale_(optimizer)

    def step(self, *optimizers: torch.optim.Optimizer) -> None:
        """Update the parameters, unless a gradient is not finite; then choose the next scale.

        Once for all optimizers of the loss: each skips where one of its gradients is not finite.
        """
        for optimizer in optimizers:
            self.scaler.step(optimizer)  # unscales what is still scaled
        self.scaler.update()

    def loss_scale(self) -> float:
        """Read the scale; 1.0 where it is not enabled."""
        return self.scaler.get_scale()

    def state_dict(self) -> dict:
        """The scale and its count of good steps: save it beside those of model and optimizer."""
        return self.scaler.state_dict()

    def load_state_dict(self, state: dict) -> None:
        """Resume from what `state_dict` returned."""
        self.scaler.load_state_dict(state)


def make_train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_fn: Callable,
    *,
    dtype: str = "float16",
    keep_fp32: str = "",
    initial_scale: float = 65536.0,
    growth_interval: int = 2000,
) -> Callable:
    """Make the train step in float16 with a scaled loss, over the model's float32 parameters.

    Args:
        model, optimizer: as ever; the model is put into training mode.
        loss_fn: `loss_fn(output, y)` is given float32.
        dtype, keep_fp32: as in `MixedPrecision`; in float32 scaling changes no result.
        initial_scale, growth_interval: as in `LossScaler`.

    Returns:
        `step(x, y) -> loss`, a float32 scalar on the device, not scaled. x: a tuple of the model's
        positional arguments, a mapping of its keywords, or its one argument. `step.loss_scale()`
        reads the scale; `step.state_dict()` and `step.load_state_dict(state)` save and resume it.

    Raises:
        As `LossScaler` and `MixedPrecision`.
    """
    scaler = LossScaler(model, initial_scale=initial_scale, growth_interval=growth_interval)
    precision = MixedPrecision(model, dtype=dtype, keep_fp32=keep_fp32)
    model.train()

    def step(x, y):
        optimizer.zero_grad(set_to_none=True)
        with precision.autocast():
            output = call(model, x)
        loss = loss_fn(to_float32(output), y)
        scaler.backward(loss)
        scaler.step(optimizer)
        return loss.detach()

    step.loss_scale = scaler.loss_scale
    step.state_dict, step.load_state_dict = scaler.state_dict, scaler.load_state_dict
    return step


def main() -> None:
    """Print loss and scale of the digits CNN in float16, from a scale that overflows at first."""
    from pt_impl.kit import runtime
    from pt_impl.kit.demo import Demo

    demo = Demo("digits-cnn", batch_size=32)
    model, optimizer, loss_fn = demo.build()
    step = make_train_step(model, optimizer, loss_fn, initial_scale=2.0**28, growth_interval=3)
    print("step   loss     scale after it")
    for number, batch in enumerate(demo.batches):
        loss = runtime.to_float(step(*batch))
        print(f"{number:4}{loss:8.4f}{step.loss_scale():15.0f}")


if __name__ == "__main__":
    main()
