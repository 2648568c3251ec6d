"""Non-finite guard: NaN and infinity stop a step before they reach the weights.

    guard = FiniteGuard(model)
    loss.backward()
    guard.check(x, y, loss, norm)  # before optimizer.step(); norm: of all gradients

What it changes: a step whose batch, loss or gradients hold NaN or infinity raises
FloatingPointError. The error says where they are and where to look. Weights and optimizer are as
before the step. BatchNorm's running statistics are not, since the forward pass has changed them:
take those from a checkpoint.

Its twin: `tf_impl/train_step/finite_guard.py`.

Where the frameworks differ and why:
- PyTorch: Python reads one flag from the device and then updates. The flag is the norm of all
  gradients, which is finite if they are.
- TensorFlow: the graph decides whether to update, and Python reads the flags afterwards, one per
  gradient. So Python has to call the step, not a `tf.function`.
- Reading the flag waits for the device: on a GPU Python can no longer run ahead.
- Keras's `callbacks.TerminateOnNaN` in `fit` looks at the loss only after the weights have changed.

When it helps and when it hurts: it helps if a run turns to NaN and nobody knows when. It costs one
pass over the gradients and one over the inputs. Loss scaling in float16 expects infinite gradients
and skips such steps itself. `recipes/nonfinite.py` finds the layer where NaN began, in a second
run.
- Clipping needs the same norm. Check before gradients are clipped, which spreads non-finite values.

Run it alone: `python -m pt_impl.train_step.finite_guard` compares it with the plain step, and puts
NaN into a batch.

Copy with it: `pt_impl/kit/calling.py`, `pt_impl/kit/checks/finite_guard.py`.
"""

import math
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor, nn

from pt_impl.kit.calling import call
from pt_impl.kit.checks.finite_guard import check_finite_guard

_DATA = "look at the data and its preprocessing (missing values, a division by zero)"
_LOSS = "look at the learning rate, the weights, and at log, exp and divisions before the loss"
_GRADIENT = "look for sqrt, norm, log or a division at 0 (torch.autograd.detect_anomaly names it)"


class FiniteGuard:
    """Stops a step before values that are not finite reach the weights, and says where they are.

    Args:
        model: whose gradients are looked at.

    Raises:
        ValueError: the model has no trainable parameters.
    """

    def __init__(self, model: nn.Module) -> None:
        check_finite_guard(model)
        self.model, self.steps = model, 0

    def check(self, x, y, loss: Tensor, norm: Tensor) -> None:
        """Look at a step after its backward pass. The one place that waits for the device.

        Args:
            x, y: the batch: a tensor, or tuples, lists and mappings of tensors.
            loss: a scalar.
            norm: of all gradients (`torch.nn.utils.get_total_norm`), before any clipping.

        Raises:
            FloatingPointError: the number of the step, the first tensor that is not finite (an
                input, the loss, or the gradient nearest to the output), how many of its values, and
                where to look.
        """
        self.steps += 1
        if hasattr(norm, "full_tensor"):  # of a sharded model
            norm = norm.full_tensor()
        # An input's largest absolute value is NaN where one value is.
        inputs = [torch.linalg.vector_norm(t, math.inf) for _, t in _inputs(x, y)]
        finite = [torch.isfinite(value) for value in (norm, loss, *inputs)]
        if not torch.stack(finite).all():
            raise FloatingPointError(f"step {self.steps}: {self._culprit(x, y, loss)}")

    def _culprit(self, x, y, loss: Tensor) -> str:
        """Name the first tensor with values that are not finite, and say where to look."""
        suspects = [(name, tensor, _DATA) for name, tensor in _inputs(x, y)]
        suspects.append(("the loss", loss, _LOSS))
        # The backward pass comes from the output, where a model's last parameters usually are.
        for name, parameter in reversed(list(self.model.named_parameters())):
            gradient = parameter.grad
            if gradient is None:
                continue
            if gradient.is_sparse:  # torch has no isfinite for it
                gradient = gradient.coalesce().values()
            suspects.append((f"the gradient of {name}", gradient, _GRADIENT))
        for name, tensor, advice in suspects:
            bad = int((~torch.isfinite(tensor)).sum())
            if bad:
                return f"{bad} of {tensor.numel()} values of {name} are not finite: {advice}"
        return "each gradient is finite but their norm overflows: look at the scale of the loss"


def make_train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, loss_fn: Callable
) -> Callable:
    """Make the plain train step with the guard before its update.

    Args:
        model, optimizer: as ever; the model is put into training mode.
        loss_fn: `loss_fn(output, y)` returns a scalar.

    Returns:
        `step(x, y) -> loss`, a scalar on the device. x: a tuple of the model's positional
        arguments, a mapping of its keywords, or its one argument. It raises FloatingPointError as
        `FiniteGuard.check` does; weights and optimizer are as before then.

    Raises:
        ValueError: as `FiniteGuard`.
    """
    guard = FiniteGuard(model)
    model.train()

    def step(x, y):
        optimizer.zero_grad(set_to_none=True)
        loss = loss_fn(call(model, x), y)
        loss.backward()
        # Of what the update changes: what it leaves out adds up gradients of other steps.
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        norm = nn.utils.get_total_norm([p.grad for p in held if p.grad is not None])
        guard.check(x, y, loss, norm)
        optimizer.step()
        return loss.detach()

    return step


def _inputs(x, y) -> list[tuple[str, Tensor]]:
    """The floating-point tensors of x and y with their names, such as "input x[0]"."""
    return [*_floating("input x", x), *_floating("input y", y)]


def _floating(name: str, tree) -> Iterator[tuple[str, Tensor]]:
    if isinstance(tree, Mapping | list | tuple):
        for key, value in tree.items() if isinstance(tree, Mapping) else enumerate(tree):
            yield from _floating(f"{name}[{key!r}]", value)
    elif isinstance(tree, Tensor) and (tree.is_floating_point() or tree.is_complex()):
        if tree.layout != torch.strided:  # torch has no norm of a sparse one
            tree = (tree.coalesce() if tree.is_sparse else tree).values()
        if tree.numel():
            yield name, tree


def main() -> None:
    """Print the plain step against the guarded one, and what it says of a batch with a NaN."""
    from pt_impl.kit import training
    from pt_impl.kit.demo import Demo

    demo = Demo("digits-cnn")
    steps = {
        "plain": training.make_train_step(*demo.build()),
        "guarded": make_train_step(*demo.build()),
    }
    for name, ms in demo.times(steps).items():
        print(f"{name:10}{ms:8.2f} ms a step")
    x, y = demo.batches[0]
    x[0, 0, 0, 0] = math.nan
    try:
        steps["guarded"](x, y)
    except FloatingPointError as error:
        print(error)


if __name__ == "__main__":
    main()
