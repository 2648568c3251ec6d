"""Gradient clipping: no batch, however unusual, moves the weights far.

    clipper = GradientClipper(model, max_norm=1.0)
    loss.backward()
    clipper.clip()  # before optimizer.step()

What it changes: all gradients are multiplied by min(1, max_norm / norm) before the update. The norm
is the L2 norm of all gradients as one vector (Pascanu et al., 2013, "On the difficulty of training
recurrent neural networks"). The step keeps its direction. `VariableClipper` clips each tensor by
its own norm, which changes the direction.

Its twin: `tf_impl/train_step/gradient_clipping.py`.

Where the frameworks differ and why:
- PyTorch's `clip_grad_norm_` over all parameters is Keras's `global_clipnorm`, except that PyTorch
  adds 1e-6 to the norm. Keras's `clipnorm` is per variable: another step for the same number.
- Loss scaling in PyTorch: `GradScaler.unscale_` comes before `clip`.
- Loss scaling in Keras: its optimizer unscales within `apply`. So gradients are clipped at
  `max_norm * scale`.
- TensorFlow stores an embedding's gradient as slices, one per lookup. The norm is that of their
  sums, which `tf.linalg.global_norm` and Keras's clipping get wrong.

When it helps and when it hurts: it helps if single batches give unusually large gradients:
recurrent networks, transformers early in training. Log `step.gradient_norm()` and set max_norm so
that few steps exceed it. If every step exceeds it, all steps have the same length, and max_norm
acts as a learning rate. It costs two passes over the gradients, whatever the batch. A NaN makes
every gradient NaN: `finite_guard.py` stops such steps.

Run it alone: `python -m pt_impl.train_step.gradient_clipping` compares the plain step with both.

Copy with it: `pt_impl/kit/calling.py`, `pt_impl/kit/checks/gradient_clipping.py`.
"""

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from pt_impl.kit.calling import call
from pt_impl.kit.checks.gradient_clipping import check_gradient_clipping


class GradientClipper:
    """Clips all gradients of a model by their global L2 norm: between `backward` and `step`.

    Args:
        model: whose parameters' `.grad` are scaled, in place. `parameters` holds them all, of which
            some may train later; set it to clip others.
        max_norm: the most that the norm may be after clipping; `math.inf` clips nothing.

    Raises:
        ValueError: max_norm is not above 0, or the model has no trainable parameters.
    """

    def __init__(self, model: nn.Module, *, max_norm: float = 1.0) -> None:
        check_gradient_clipping(model, max_norm)
        self.parameters, self.max_norm = list(model.parameters()), max_norm

    def norm(self) -> Tensor:
        """Return the L2 norm of all gradients as one vector, a scalar on the device."""
        norm = nn.utils.get_total_norm([p.grad for p in _trained(self.parameters)])
        return norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # of a sharded model

    def clip(self, norm: Tensor | None = None) -> None:
        """Scale the gradients to `max_norm` at most. norm: what `norm()` returned, if known."""
        if self.max_norm == math.inf:
            return
        if norm is None:
            norm = self.norm()
        nn.utils.clip_grads_with_norm_(_trained(self.parameters), self.max_norm, norm)


class VariableClipper:
    """Clips each parameter's gradient by its own L2 norm, which Keras calls `clipnorm`.

    Args, Raises: as in `GradientClipper`.
    """

    def __init__(self, model: nn.Module, *, max_norm: float = 1.0) -> None:
        check_gradient_clipping(model, max_norm)
        self.parameters, self.max_norm = list(model.parameters()), max_norm

    def clip(self) -> None:
        """Scale each gradient to `max_norm` at most."""
        if self.max_norm == math.inf:
            return
        for parameter in _trained(self.parameters):
            nn.utils.clip_grad_norm_(parameter, self.max_norm)


def make_train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_fn: Callable,
    *,
    max_norm: float = 1.0,
    measure_norm: bool = False,
) -> Callable:
    """Make the plain train step with clipping by the global norm.

    Args:
        model, optimizer: as ever; the model is put into training mode.
        loss_fn: `loss_fn(output, y)` returns a scalar.
        max_norm: the most that the norm may be after clipping, of what the optimizer holds;
            `math.inf` does not clip.
        measure_norm: take the norm where nothing is clipped, too, for `step.gradient_norm()`.

    Returns:
        `step(x, y) -> loss`, a scalar on the device. x: a tuple of the model's positional
        arguments, a mapping of its keywords, or its one argument. `step.gradient_norm()` reads what
        the last step's norm was before clipping (NaN before the first), which waits for the device;
        it raises ValueError where no norm is taken.

    Raises:
        ValueError: as `GradientClipper`.
    """
    clipper = GradientClipper(model, max_norm=max_norm)
    norm = torch.tensor(math.nan) if max_norm < math.inf or measure_norm else None
    model.train()

    def step(x, y):
        nonlocal norm
        optimizer.zero_grad(set_to_none=True)
        loss = loss_fn(call(model, x), y)
        loss.backward()
        if norm is not None:
            clipper.parameters = _held(optimizer)
            norm = clipper.norm()
            clipper.clip(norm)
        optimizer.step()
        return loss.detach()

    def gradient_norm() -> float:
        if norm is None:
            raise ValueError("no norm is taken: ask for it with measure_norm=True")
        return norm.item()

    step.gradient_norm = gradient_norm
    return step


def make_per_variable_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_fn: Callable,
    *,
    max_norm: float = 1.0,
) -> Callable:
    """Make the plain train step with each parameter's gradient clipped by its own L2 norm.

    Args, Returns, Raises: as in `make_train_step`, without `gradient_norm`.
    """
    clipper = VariableClipper(model, max_norm=max_norm)
    model.train()

    def step(x, y):
        optimizer.zero_grad(set_to_none=True)
        loss = loss_fn(call(model, x), y)
        loss.backward()
        clipper.parameters = _held(optimizer)
        clipper.clip()
        optimizer.step()
        return loss.detach()

    return step


def _held(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """What the update changes: what it leaves out keeps, and adds up, gradients of other steps."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _trained(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    return [p for p in parameters if p.requires_grad and p.grad is not None]


def main() -> None:
    """Print the plain step against clipping by all gradients' norm and by each one's."""
    from pt_impl.kit import training
    from pt_impl.kit.demo import Demo

    demo = Demo("digits-cnn")
    steps = {
        "plain": training.make_train_step(*demo.build()),
        "clipped": make_train_step(*demo.build()),
        "each clipped": make_per_variable_step(*demo.build()),
    }
    for name, ms in demo.times(steps).items():
        print(f"{name:14}{ms:8.2f} ms a step")
    print(f"norm of the last step's gradients: {steps['clipped'].gradient_norm():.3f}")


if __name__ == "__main__":
    main()
