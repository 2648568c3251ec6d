"""Gradient clipping, and a guard that stops before values that are not finite reach the weights.

What it changes: between backward pass and update, all gradients are multiplied by
min(1, max_norm / norm), where norm is the L2 norm of all of them as one vector (Pascanu et al.,
2013, "On the difficulty of training recurrent neural networks"). The step keeps its direction.
`make_per_variable_step` clips each tensor by its own norm, which bends it; `make_scaled_step` clips
under loss scaling. With `check_finite` a step stops where an input, the loss or a gradient holds
NaN or infinity, and says which, before any weight changes. BatchNorm's running statistics change
in the forward pass: take them from a checkpoint then.

Its twin: `tf_impl/train_step/gradient_clipping.py`.

Where the frameworks differ and why:
- `clip_grad_norm_` over all parameters is Keras's `global_clipnorm` and TensorFlow's
  `clip_by_global_norm`, but for a 1e-6 that PyTorch adds to the norm. Keras's `clipnorm` is per
  variable: another step for the same number.
- Clipping spreads what is not finite: a NaN makes every gradient NaN; an infinite norm makes every
  other gradient 0 here (max_norm / inf) and NaN there. So the guard looks before.
- The guard reads one flag from the device in each step, which waits for it: on a GPU, Python can
  no longer run ahead. There the graph decides whether to update, and Python reads the same flag.
- `GradScaler` has `unscale_`, for what stands between backward pass and update. Keras unscales
  within `apply`, so there scaled gradients are clipped at max_norm times the scale.

When it helps and when it hurts: it helps where single batches give gradients far above the usual
(recurrent networks, transformers early on). Log `step.gradient_norm()` and set max_norm where few
steps are above: a bound that always binds fixes the length of every step and takes the learning
rate's part (less so for Adam). It costs two passes over the gradients, whatever the batch; the
guard costs one, one over the inputs, and the flag.

Run it alone: `python -m pt_impl.train_step.gradient_clipping` prints the plain step against both.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from numbers import Real

import torch
from torch import Tensor, nn

_DATA = "look at the data and its preprocessing (missing values, a division by zero)"
_LOSS = "look at the learning rate, the weights, and at log, exp and divisions before the loss"
_GRADIENT = "look for sqrt, norm, log or a division at 0 (torch.autograd.detect_anomaly names it)"


def make_train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_fn: Callable,
    *,
    max_norm: float = 1.0,
    check_finite: bool = False,
) -> Callable:
    """Return `step(x, y) -> loss` that clips the gradients by their global L2 norm.

    x: a tuple of the model's positional arguments, a mapping of its keywords, or its one argument.
    loss: scalar on the device. max_norm: the most that the norm may be after clipping; `math.inf`
    only measures. `step.gradient_norm()` reads what it was before (NaN before the first step),
    which waits for the device. check_finite: the guard, clipping or not.

    Raises ValueError for a max_norm that is not above 0 and for a model without trainable
    parameters. With check_finite `step` raises FloatingPointError: the number of its call, the
    first tensor that is not finite (an input, the loss, or the gradient nearest to the output), how
    many values, and where to look. Weights and optimizer are as before then.
    """
    parameters = _parameters(model, max_norm)
    model.train()
    calls, norm = 0, torch.tensor(math.nan)

    def step(x, y):
        nonlocal calls, norm
        calls += 1
        optimizer.zero_grad(set_to_none=True)
        loss = loss_fn(_call(model, x), y)
        loss.backward()
        norm = _norm(parameters)
        if check_finite and not _all_finite(x, y, loss, norm):
            raise FloatingPointError(f"step {calls}: {_culprit(model, x, y, loss)}")
        if max_norm < math.inf:
            nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
        optimizer.step()
        return loss.detach()

    step.gradient_norm = lambda: norm.item()
    return step


def make_per_variable_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_fn: Callable,
    *,
    max_norm: float = 1.0,
) -> Callable:
    """Return `step(x, y) -> loss` that clips each parameter's gradient by its own L2 norm.

    What Keras calls `clipnorm`. Arguments and errors as in `make_train_step`; no `gradient_norm`.
    """
    parameters = _parameters(model, max_norm)
    model.train()

    def step(x, y):
        optimizer.zero_grad(set_to_none=True)
        loss = loss_fn(_call(model, x), y)
        loss.backward()
        if max_norm < math.inf:
            for parameter in parameters:
                nn.utils.clip_grad_norm_(parameter, max_norm)
        optimizer.step()
        return loss.detach()

    return step


def make_scaled_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_fn: Callable,
    *,
    max_norm: float = 1.0,
    initial_scale: float = 65536.0,
) -> Callable:
    """Return `step(x, y) -> loss` that clips by the global norm under loss scaling.

    The order is the point: the gradients of the scaled loss are `scale` times too large, so they
    are unscaled before they are clipped. The arithmetic is the model's own: for float16 put
    `torch.autocast` around its forward pass (mixed_precision has it, and clips there too). A step
    whose gradients are not finite changes no weight and halves the scale (2,000 good ones double
    it), which is part of the method: there is no guard here. `step.loss_scale()` reads the scale,
    `step.state_dict()` and `step.load_state_dict(state)` save and resume it. All else as in
    `make_train_step`. Raises ValueError for what that refuses, for a scale that is not above 0 and
    for float16 parameters, whose gradients cannot be unscaled within their range.
    """
    parameters = _parameters(model, max_norm)
    if not initial_scale > 0:
        raise ValueError(f"initial_scale must be above 0, not {initial_scale!r}")
    if any(parameter.dtype == torch.float16 for parameter in parameters):
        raise ValueError("master weights are float32, but the model has float16 parameters")
    scaler = torch.amp.GradScaler(parameters[0].device.type, init_scale=initial_scale)
    model.train()

    def step(x, y):
        optimizer.zero_grad(set_to_none=True)
        loss = loss_fn(_call(model, x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)  # also notes whether all are finite, for step()
        if max_norm < math.inf:
            nn.utils.clip_grad_norm_(parameters, max_norm)
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    step.loss_scale = scaler.get_scale
    step.state_dict, step.load_state_dict = scaler.state_dict, scaler.load_state_dict
    return step


def _call(model: nn.Module, x):
    """Call the model as PyTorch's users do: a tuple is its arguments, a mapping its keywords."""
    if isinstance(x, Mapping):
        return model(**x)
    return model(*x) if isinstance(x, tuple) else model(x)


def _parameters(model: nn.Module, max_norm: float) -> list[nn.Parameter]:
    """Check the settings; return the trainable parameters."""
    if not isinstance(max_norm, Real) or not max_norm > 0:
        raise ValueError(f"max_norm must be above 0 (inf does not clip), not {max_norm!r}")
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not parameters:
        raise ValueError("the model has no trainable parameters: there is no gradient to clip")
    return parameters


def _norm(parameters: list[nn.Parameter]) -> Tensor:
    norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # of a model in shards


def _all_finite(x, y, loss: Tensor, norm: Tensor) -> bool:
    """Whether inputs, loss and gradients are finite. The one place that waits for the device.

    The norm stands for all gradients. An input's largest absolute value stands for the input: it
    is NaN where one value is.
    """
    largest = [torch.linalg.vector_norm(t, math.inf) for _, t in _inputs(x, y)]
    return bool(torch.stack([torch.isfinite(v) for v in (norm, loss, *largest)]).all())


def _culprit(model: nn.Module, x, y, loss: Tensor) -> str:
    """Name the first tensor with values that are not finite, and say where to look."""
    tensors = [(name, tensor, _DATA) for name, tensor in _inputs(x, y)]
    tensors += [("the loss", loss, _LOSS)]
    # The backward pass comes from the output, where a model's last parameters usually are.
    for name, parameter in reversed(list(model.named_parameters())):
        if parameter.grad is not None:
            gradient = parameter.grad
            if gradient.is_sparse:  # torch has no isfinite for it
                gradient = gradient.coalesce().values()
            tensors.append((f"the gradient of {name}", gradient, _GRADIENT))
    for name, tensor, advice in tensors:
        if bad := int((~torch.isfinite(tensor)).sum()):
            return f"{bad} of {tensor.numel()} values of {name} are not finite: {advice}"
    return "each gradient is finite but their norm overflows: look at the scale of the loss"


def _inputs(x, y) -> list[tuple[str, Tensor]]:
    """The floating-point tensors of x and y with their names, such as "input x[0]"."""
    return [*_floating("input x", x), *_floating("input y", y)]


def _floating(name: str, tree) -> Iterator[tuple[str, Tensor]]:
    if isinstance(tree, Mapping | list | tuple):
        for key, value in tree.items() if isinstance(tree, Mapping) else enumerate(tree):
            yield from _floating(f"{name}[{key!r}]", value)
    elif isinstance(tree, Tensor) and tree.is_floating_point() and tree.numel():
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
    steps, taken = {}, {name: [] for name in rows}
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
            taken[name].append((time.perf_counter() - start) * 1e3)
    for name, times in taken.items():
        print(f"{name:14}{statistics.median(times):8.2f} ms a step")


if __name__ == "__main__":
    main()
