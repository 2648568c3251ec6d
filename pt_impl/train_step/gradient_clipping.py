"""Gradient clipping, and a guard that stops before values that are not finite reach the weights.

What it changes: between backward pass and update, all gradients are multiplied by
min(1, max_norm / norm), where norm is the L2 norm of all of them as one vector (Pascanu et al.,
2013, "On the difficulty of training recurrent neural networks"). The step keeps its direction.
`VariableClipper` clips each tensor by its own norm, which bends it. `FiniteGuard` stops a step
where an input, the loss or a gradient holds NaN or infinity, and says which, before any weight
changes. BatchNorm's running statistics change in the forward pass: take them from a checkpoint
then.

Its twin: `tf_impl/train_step/gradient_clipping.py`.

Where the frameworks differ and why:
- `clip_grad_norm_` over all parameters is Keras's `global_clipnorm` and TensorFlow's
  `clip_by_global_norm`, but for a 1e-6 that PyTorch adds to the norm. Keras's `clipnorm` is per
  variable: another step for the same number.
- Clipping spreads what is not finite: a NaN makes every gradient NaN; an infinite norm makes every
  other gradient 0 here (max_norm / inf) and NaN there. So the guard looks before.
- The guard reads one flag from the device in each step, which waits for it: on a GPU, Python can
  no longer run ahead. There the graph decides whether to update, and Python reads the same flag.
- Under loss scaling gradients are `scale` times too large: `GradScaler.unscale_` comes before
  `clip`. Keras unscales within `apply`, so there scaled gradients are clipped at max_norm * scale.

When it helps and when it hurts: it helps where single batches give gradients far above the usual
(recurrent networks, transformers early on). Log `step.gradient_norm()` and set max_norm where few
steps are above: a bound that always binds fixes the length of every step and takes the learning
rate's part (less so for Adam). It costs two passes over the gradients, whatever the batch; the
guard costs one, one over the inputs, and the flag. Where nothing is clipped, guarded or measured,
no norm is taken.

Run it alone: `python -m pt_impl.train_step.gradient_clipping` prints the plain step against both.

Copy with it: nothing.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from numbers import Real

import torch
from torch import Tensor, nn

_DATA = "look at the data and its preprocessing (missing values, a division by zero)"
_LOSS = "look at the learning rate, the weights, and at log, exp and divisions before the loss"
_GRADIENT = "look for sqrt, norm, log or a division at 0 (torch.autograd.detect_anomaly names it)"


class GradientClipper:
    """Clips all gradients of a model by their global L2 norm: between `backward` and `step`.

    Args:
        model: whose parameters' `.grad` are scaled, in place.
        max_norm: the most that the norm may be after clipping; `math.inf` clips nothing.

    Raises:
        ValueError: max_norm is not above 0, or the model has no trainable parameters.
    """

    def __init__(self, model: nn.Module, *, max_norm: float = 1.0) -> None:
        self.parameters, self.max_norm = _checked(model, max_norm), max_norm

    def norm(self) -> Tensor:
        """The L2 norm of all gradients as one vector, a scalar on the device."""
        gradients = [p.grad for p in _trained(self.parameters)]
        norm = nn.utils.get_total_norm(gradients)
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
        self.parameters, self.max_norm = _checked(model, max_norm), max_norm

    def clip(self) -> None:
        """Scale each gradient to `max_norm` at most."""
        if self.max_norm == math.inf:
            return
        for parameter in _trained(self.parameters):
            nn.utils.clip_grad_norm_(parameter, self.max_norm)


class FiniteGuard:
    """Stops a step before values that are not finite reach the weights, and says where they are.

    Args:
        model: whose gradients are looked at.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model, self.steps = model, 0

    def check(self, x, y, loss: Tensor, norm: Tensor) -> None:
        """Look at a step after its backward pass. The one place that waits for the device.

        Args:
            x, y: the batch: a tensor, or tuples, lists and mappings of tensors.
            loss: a scalar.
            norm: of all gradients, before clipping (`GradientClipper.norm`); finite where they are.

        Raises:
            FloatingPointError: the number of the step, the first tensor that is not finite (an
                input, the loss, or the gradient nearest to the output), how many of its values, and
                where to look.
        """
        self.steps += 1
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
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_fn: Callable,
    *,
    max_norm: float = 1.0,
    check_finite: bool = False,
    measure_norm: bool = False,
) -> Callable:
    """Make the plain train step with clipping by the global norm and the guard.

    Args:
        model, optimizer: as ever; the model is put into training mode.
        loss_fn: `loss_fn(output, y)` returns a scalar.
        max_norm: the most that the norm may be after clipping, of what the optimizer holds;
            `math.inf` does not clip.
        check_finite: whether a `FiniteGuard` looks at each step.
        measure_norm: take the norm also where neither needs it, for `step.gradient_norm()`.

    Returns:
        `step(x, y) -> loss`, a scalar on the device. x: a tuple of the model's positional
        arguments, a mapping of its keywords, or its one argument. `step.gradient_norm()` reads what
        the last step's norm was before clipping (NaN before the first), which waits for the device;
        it raises ValueError where no norm is taken.

    Raises:
        ValueError: as `GradientClipper`. The step: FloatingPointError, as `FiniteGuard.check`;
            weights and optimizer are as before then.
    """
    clipper, guard = GradientClipper(model, max_norm=max_norm), FiniteGuard(model)
    needs_norm = max_norm < math.inf or check_finite or measure_norm
    norm = torch.tensor(math.nan) if needs_norm else None
    model.train()

    def step(x, y):
        nonlocal norm
        optimizer.zero_grad(set_to_none=True)
        loss = loss_fn(_call(model, x), y)
        loss.backward()
        if needs_norm:
            clipper.parameters = _held(optimizer)
            norm = clipper.norm()
        if check_finite:
            guard.check(x, y, loss, norm)
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

    Args, Returns, Raises: as in `make_train_step`; no guard and no `gradient_norm`.
    """
    clipper = VariableClipper(model, max_norm=max_norm)
    model.train()

    def step(x, y):
        optimizer.zero_grad(set_to_none=True)
        loss = loss_fn(_call(model, x), y)
        loss.backward()
        clipper.parameters = _held(optimizer)
        clipper.clip()
        optimizer.step()
        return loss.detach()

    return step


def _call(model: nn.Module, x):
    """Call the model as PyTorch's users do: a tuple is its arguments, a mapping its keywords."""
    if isinstance(x, Mapping):
        return model(**x)
    return model(*x) if isinstance(x, tuple) else model(x)


def _checked(model: nn.Module, max_norm: float) -> list[nn.Parameter]:
    """Check the settings; return all parameters, of which others may train later."""
    if not isinstance(max_norm, Real) or not max_norm > 0:
        raise ValueError(f"max_norm must be above 0 (inf does not clip), not {max_norm!r}")
    parameters = list(model.parameters())
    if not any(parameter.requires_grad for parameter in parameters):
        raise ValueError("the model has no trainable parameters: there is no gradient to clip")
    return parameters


def _held(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """What the update changes: what it leaves out keeps, and adds up, gradients of other steps."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _trained(parameters: list[nn.Parameter]) -> list[nn.Parameter]:
    return [p for p in parameters if p.requires_grad and p.grad is not None]


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
    """Print the plain step against clipping and the guard on the digits CNN, interleaved."""
    import statistics
    import time

    from pt_impl.kit import models, runtime, training
    from shared.specs import TASKS
    from shared.weights import init_weights

    task = TASKS["digits-cnn"]
    batch = torch.randn(128, 1, 32, 32), torch.zeros(128, dtype=torch.int64)
    batch = [part.to(runtime.device()) for part in batch]
    rows = {"plain": {}, "clip": {}, "clip and guard": {"check_finite": True}}
    steps, times = {}, {name: [] for name in rows}
    for name, settings in rows.items():
        model = models.build(task.model, init_weights(task.model, seed=0))
        optimizer = training.make_optimizer(model, task.recipe)
        make = training.make_train_step if name == "plain" else make_train_step
        steps[name] = make(model, optimizer, training.cross_entropy, **settings)
    for _ in range(200):
        for name, step in steps.items():
            start = time.perf_counter()
            step(*batch)
            runtime.synchronize()
            times[name].append((time.perf_counter() - start) * 1e3)
    for name, samples in times.items():
        print(f"{name:14}{statistics.median(samples):8.2f} ms a step")


if __name__ == "__main__":
    main()
