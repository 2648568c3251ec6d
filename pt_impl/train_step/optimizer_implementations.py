"""Implementations of one optimizer rule: AdamW, four ways to run the same update.

What it changes: how many kernels an update takes and how often it reads and writes memory; not the
result. AdamW reads a weight, a gradient and two moments and writes three of them: some eight
operations a tensor, each a pass over memory of its own (for_loop); the same operations handed over
once for all tensors (foreach); one kernel that passes once over the memory of all tensors (fused);
or whatever `torch.compile` makes of the loop (compiled).

Its twin: `tf_impl/train_step/optimizer_implementations.py`.

Where the frameworks differ and why:
- PyTorch brings the three implementations as arguments of one optimizer. Its default is the loop on
  a CPU and foreach on CUDA. Keras has one implementation, a loop too, which runs inside a
  `tf.function`; XLA compiles it (`jit_compile=True`). It has no foreach and no fused one.
- PyTorch runs the loop from Python; TensorFlow's executor runs the graph of the loop, and may run
  the updates of several tensors at the same time.
- Keras adds its epsilon before the second moment is corrected for bias, PyTorch after.

When it helps and when it hurts: fused helps wherever the update is a visible share of a step: many
parameters and little arithmetic for each, small batches, many small tensors. foreach saves kernel
launches on a GPU and needs intermediates as large as the model; on a CPU, where there is no launch
to save, it can be slower than the loop. compiled needs its compile time back. None helps a step
that the forward and backward pass dominate.

Run it alone: `python -m pt_impl.train_step.optimizer_implementations` prints all four on 10 million
weights.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from inspect import signature

import torch
from torch import Tensor, nn

Update = tuple[torch.optim.Optimizer, Callable[[], None]]


def for_loop_update(
    model: nn.Module,
    gradients: Sequence[Tensor],
    *,
    learning_rate: float,
    weight_decay: float = 0.01,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
) -> Update:
    """Update one tensor after the other, operation by operation: the default on a CPU.

    Returns (optimizer, update); `update()` applies to the trainable parameters of `model` what the
    tensors in `gradients` hold then. gradients: one dense tensor a trainable parameter, in the
    order of `model.parameters()`, of its shape and dtype; they become the parameters' `.grad`. In
    training the backward pass puts them there, and `optimizer.step` alone is all there is to copy.

    The rule: w -= lr weight_decay w, then w -= lr m̂ / (sqrt(v̂) + eps), with m̂ and v̂ the moments of
    `beta1` and `beta2` corrected for bias (Loshchilov and Hutter, 2019).

    Raises ValueError for gradients that do not fit and for settings out of range, before anything
    is changed.
    """
    parameters = _fitting(model, gradients, learning_rate, weight_decay, beta1, beta2, eps)
    optimizer = torch.optim.AdamW(
        parameters,
        lr=learning_rate,
        betas=(beta1, beta2),
        eps=eps,
        weight_decay=weight_decay,
        amsgrad=False,
        foreach=False,
        fused=False,
    )
    _give(parameters, gradients)
    return optimizer, optimizer.step


def foreach_update(
    model: nn.Module,
    gradients: Sequence[Tensor],
    *,
    learning_rate: float,
    weight_decay: float = 0.01,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
) -> Update:
    """Run each operation once for all tensors: the default on CUDA.

    Arguments, rule, result and errors as in `for_loop_update`.
    """
    parameters = _fitting(model, gradients, learning_rate, weight_decay, beta1, beta2, eps)
    optimizer = torch.optim.AdamW(
        parameters,
        lr=learning_rate,
        betas=(beta1, beta2),
        eps=eps,
        weight_decay=weight_decay,
        amsgrad=False,
        foreach=True,
    )
    _give(parameters, gradients)
    return optimizer, optimizer.step


def fused_update(
    model: nn.Module,
    gradients: Sequence[Tensor],
    *,
    learning_rate: float,
    weight_decay: float = 0.01,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
) -> Update:
    """Run one hand-written kernel over all tensors of a device and dtype.

    Arguments, rule, result and errors as in `for_loop_update`; also NotImplementedError for
    parameters that are not floating-point numbers, which the kernel refuses.
    """
    parameters = _fitting(model, gradients, learning_rate, weight_decay, beta1, beta2, eps)
    if strange := [p.dtype for p in parameters if not p.is_floating_point()]:
        raise NotImplementedError(f"torch's fused AdamW updates no {strange[0]} parameters")
    optimizer = torch.optim.AdamW(
        parameters,
        lr=learning_rate,
        betas=(beta1, beta2),
        eps=eps,
        weight_decay=weight_decay,
        amsgrad=False,
        fused=True,
    )
    _give(parameters, gradients)
    return optimizer, optimizer.step


def compiled_update(
    model: nn.Module,
    gradients: Sequence[Tensor],
    *,
    learning_rate: float,
    weight_decay: float = 0.01,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
) -> Update:
    """Let `torch.compile` fuse the operations of PyTorch's default; the first update compiles.

    Arguments, rule, result and errors as in `for_loop_update`. A learning rate that changes is
    compiled once more unless it is a tensor. Source: "Compiling the optimizer with torch.compile",
    docs.pytorch.org/tutorials.
    """
    parameters = _fitting(model, gradients, learning_rate, weight_decay, beta1, beta2, eps)
    optimizer = torch.optim.AdamW(
        parameters,
        lr=learning_rate,
        betas=(beta1, beta2),
        eps=eps,
        weight_decay=weight_decay,
        amsgrad=False,
    )
    _give(parameters, gradients)
    # Not fullgraph: the optimizer switches gradients off and on around what is compiled.
    return optimizer, _compile(optimizer.step)


def _compile(function: Callable) -> Callable:
    """`torch.compile`, such that it never runs eagerly because others were compiled before.

    torch keeps 8 compilations of one piece of code (`torch._dynamo.config.recompile_limit`), of all
    optimizers of a process together, and runs what comes after them eagerly.
    """
    if "isolate_recompiles" in signature(torch.compile).parameters:  # torch 2.15 has it
        return torch.compile(function, isolate_recompiles=True)
    torch._dynamo.config.fail_on_recompile_limit_hit = True  # then the ninth raises
    return torch.compile(function)


def update_operators(update: Callable) -> dict[str, int]:
    """Count the operators of one update, by name; a compiled region counts as "compiled".

    Returns for example {"_foreach_add_": 1, "_fused_adamw_": 1}. Only operators that nothing but
    Python called are counted. Calls the update twice, since the first call may compile.
    """
    update()
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profile:
        update()
    counts = Counter()
    waiting = list(profile.profiler.kineto_results.experimental_event_tree())
    while waiting:
        event = waiting.pop()
        if event.name.startswith("aten::"):
            counts[event.name.removeprefix("aten::")] += 1
        elif "Torch-Compiled Region" in event.name:
            counts["compiled"] += 1
        else:  # a Python scope, such as the optimizer's own
            waiting += event.children
    return dict(counts)


def _fitting(model, gradients, learning_rate, weight_decay, beta1, beta2, eps) -> list:
    """The trainable parameters; raises ValueError where gradients or settings do not fit."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    if len(parameters) != len(gradients):
        raise ValueError(f"{len(gradients)} gradients for {len(parameters)} trainable parameters")
    for index, (p, g) in enumerate(zip(parameters, gradients, strict=True)):
        if (p.shape, p.dtype, torch.strided) != (g.shape, g.dtype, g.layout):
            raise ValueError(
                f"gradient {index} is {tuple(g.shape)}, {g.dtype}, {g.layout}: its parameter takes"
                f" {tuple(p.shape)}, {p.dtype}, dense"
            )
    if min(learning_rate, weight_decay, eps) < 0 or not (0 <= beta1 < 1 and 0 <= beta2 < 1):
        raise ValueError(
            "learning_rate, weight_decay and eps must be at least 0, beta1 and beta2 in [0, 1)"
        )
    return parameters


def _give(parameters, gradients) -> None:
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient


def main() -> None:
    """Print all implementations on a transformer of 10 million weights, in interleaved samples."""
    import os
    import statistics
    import time

    from pt_impl.kit import models, runtime
    from shared.specs import TASKS
    from shared.weights import init_weights

    runtime.configure(threads=os.cpu_count() or 1, seed=0)
    spec = TASKS["text-gpt-wide"].model
    updates, kept = {}, {}
    for make in (for_loop_update, foreach_update, fused_update, compiled_update):
        model = models.build(spec, init_weights(spec, seed=0))
        gradients = [torch.full_like(p, 0.01) for p in model.parameters()]
        name = make.__name__.removesuffix("_update")
        kept[name], updates[name] = make(model, gradients, learning_rate=1e-3)
        updates[name]()
    taken = {name: [] for name in updates}
    for _ in range(20):
        for name, update in updates.items():
            start = time.perf_counter()
            for _ in range(5):
                update()
            runtime.synchronize()
            taken[name].append((time.perf_counter() - start) / 5)
    print(f"AdamW, {models.parameter_count(model):,} weights: ms an update, ratio, operators")
    for name, times in taken.items():
        seconds, first = statistics.median(times), statistics.median(taken["for_loop"])
        operators = sum(update_operators(updates[name]).values())
        print(f"{name:9}{seconds * 1e3:8.2f}{seconds / first:7.2f}  {operators}")


if __name__ == "__main__":
    main()
