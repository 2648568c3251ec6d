"""Optimizer implementations: four ways to run the same update, AdamW's.

    optimizer = fused_optimizer(model, learning_rate=1e-3)  # the training loop stays as it is

What it changes: how many kernels an update runs, and how often it reads and writes memory. The
result is the same. AdamW reads a weight, a gradient and two moments, and writes three of them.
for_loop runs about eight operations per tensor, each a pass over memory. foreach launches each
operation once for all tensors. fused is one kernel with one pass over the memory of all tensors.
compiled is the loop after `torch.compile`.

Its twin: `tf_impl/train_step/optimizer_implementations.py`.

Where the frameworks differ and why:
- PyTorch has three implementations as arguments of one optimizer. Its default is the loop on a CPU
  and foreach on CUDA. Keras has one, a loop inside a `tf.function`, which XLA can compile.
- fused is one kernel over all tensors in PyTorch. In TensorFlow it is `ResourceApplyAdam`, from
  before Keras 3, one variable at a time. TensorFlow has no such kernel of AdamW itself, and no
  foreach.
- Keras adds epsilon before the second moment is corrected for bias, PyTorch after. With
  `eps * sqrt(1 - beta2)` the first update is the same. Later ones differ by a relative
  eps / sqrt(v̂) at most.
- TensorFlow stores an embedding's gradient as slices, one per lookup. If a batch holds an id twice,
  Keras 3 adds up the squares. fused squares the sum, as PyTorch does.

When it helps and when it hurts: fused helps if the update takes a good part of a step: many
parameters with little arithmetic each, small batches, many small tensors. It compiles nothing.
compiled helps in the same cases, but its compile time has to be repaid. Neither helps if most time
goes to the forward and backward pass.
- foreach saves kernel launches on a GPU, and needs temporary memory as large as the model. On a CPU
  it can be slower than the loop.

Run it alone: `python -m pt_impl.train_step.optimizer_implementations` compares all four on 10
million weights.

Copy with it: `pt_impl/kit/checks/optimizer_implementations.py`.
"""

from inspect import signature
from types import MethodType

import torch
from torch import nn

from pt_impl.kit.checks import optimizer_implementations as checks


def for_loop_optimizer(
    model: nn.Module,
    *,
    learning_rate: float,
    weight_decay: float = 0.01,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
) -> torch.optim.AdamW:
    """AdamW that updates tensor by tensor, operation by operation: the default on a CPU.

    The rule: w -= lr weight_decay w, then w -= lr m̂ / (sqrt(v̂) + eps), with m̂ and v̂ the moments
    corrected for bias (Loshchilov and Hutter, 2019).

    Args:
        model: its parameters are updated, those that have a `.grad`.
        learning_rate, weight_decay: both at least 0.
        beta1, beta2: how much of the first and the second moment a step keeps, below 1.
        eps: added to the root of the second moment.

    Returns:
        The optimizer.

    Raises:
        ValueError: a setting is out of range.
    """
    checks.check_optimizer_implementations(learning_rate, weight_decay, beta1, beta2, eps)
    return torch.optim.AdamW(
        model.parameters(),
        lr=learning_rate,
        betas=(beta1, beta2),
        eps=eps,
        weight_decay=weight_decay,
        foreach=False,
        fused=False,
    )


def foreach_optimizer(
    model: nn.Module,
    *,
    learning_rate: float,
    weight_decay: float = 0.01,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
) -> torch.optim.AdamW:
    """AdamW that runs each operation once for all tensors: the default on CUDA.

    Args, Returns, Raises: as in `for_loop_optimizer`.
    """
    checks.check_optimizer_implementations(learning_rate, weight_decay, beta1, beta2, eps)
    return torch.optim.AdamW(
        model.parameters(),
        lr=learning_rate,
        betas=(beta1, beta2),
        eps=eps,
        weight_decay=weight_decay,
        foreach=True,
    )


def fused_optimizer(
    model: nn.Module,
    *,
    learning_rate: float,
    weight_decay: float = 0.01,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
) -> torch.optim.AdamW:
    """AdamW that runs one hand-written kernel over all tensors of a device and dtype.

    Args, Returns, Raises: as in `for_loop_optimizer`; also NotImplementedError for parameters that
    are not floating-point numbers, which the kernel refuses.
    """
    checks.check_optimizer_implementations(learning_rate, weight_decay, beta1, beta2, eps)
    checks.check_floating(model)
    return torch.optim.AdamW(
        model.parameters(),
        lr=learning_rate,
        betas=(beta1, beta2),
        eps=eps,
        weight_decay=weight_decay,
        fused=True,
    )


def compiled_optimizer(
    model: nn.Module,
    *,
    learning_rate: float,
    weight_decay: float = 0.01,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
) -> torch.optim.AdamW:
    """AdamW whose operations `torch.compile` fuses; the first update compiles.

    A learning rate that changes is compiled once more unless it is a tensor. Source: "Compiling the
    optimizer with torch.compile", docs.pytorch.org/tutorials.

    Args, Returns, Raises: as in `for_loop_optimizer`.
    """
    checks.check_optimizer_implementations(learning_rate, weight_decay, beta1, beta2, eps)
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=learning_rate,
        betas=(beta1, beta2),
        eps=eps,
        weight_decay=weight_decay,
    )
    # A method of this optimizer, so that schedulers and GradScaler call it as they do any other's.
    optimizer.step = MethodType(_compile(type(optimizer).step), optimizer)
    return optimizer


def fused_sgd(model: nn.Module, *, learning_rate: float, momentum: float = 0.9) -> torch.optim.SGD:
    """SGD with momentum in one kernel for all tensors: `fused` is not only AdamW's.

    Args:
        model: its parameters are updated, those that have a `.grad`.
        learning_rate: at least 0.
        momentum: v = momentum v + g; w -= learning_rate v; below 1.

    Returns:
        The optimizer.

    Raises:
        ValueError: a setting is out of range. NotImplementedError: as in `fused_optimizer`.
    """
    checks.check_sgd(learning_rate, momentum)
    checks.check_floating(model)
    return torch.optim.SGD(model.parameters(), lr=learning_rate, momentum=momentum, fused=True)


def _compile(function):
    """`torch.compile`, such that it never runs eagerly because others were compiled before.

    torch keeps 8 compilations of one piece of code (`torch._dynamo.config.recompile_limit`), of all
    optimizers of a process together, and runs what comes after them eagerly.
    """
    # Not fullgraph: the optimizer switches gradients off and on around what is compiled.
    if "isolate_recompiles" in signature(torch.compile).parameters:  # torch 2.15 has it
        return torch.compile(function, isolate_recompiles=True)
    torch._dynamo.config.fail_on_recompile_limit_hit = True  # then the ninth raises
    return torch.compile(function)


def main() -> None:
    """Print all implementations on a transformer of 10 million weights."""
    from pt_impl.kit import models, training
    from pt_impl.kit.demo import Demo

    demo, updates = Demo("text-gpt-wide"), {}
    for make in (for_loop_optimizer, foreach_optimizer, fused_optimizer, compiled_optimizer):
        model, *_ = demo.build()
        gradients = [torch.full_like(parameter, 0.01) for parameter in model.parameters()]
        update = training.make_update(model, make(model, learning_rate=1e-3), gradients)
        update()
        updates[make.__name__] = lambda x, y, update=update: update()
    print(f"AdamW, {models.parameter_count(model):,} weights")
    for name, ms in demo.times(updates, rounds=5).items():
        print(f"{name:20}{ms:8.2f} ms an update")


if __name__ == "__main__":
    main()
