"""Stacking: the optimizations of a train step on top of one another, in the order that works.

What it changes: one step takes them all, each behind its own setting, and every setting at its
default gives the plain eager float32 step. The usual ladder: channels_last, then `torch.compile`,
then bfloat16 under autocast, then a fused optimizer, then accumulation over micro-batches.

Its twin: `tf_impl/train_step/stacking.py`.

Where the frameworks differ and why:
- channels_last changes something here only: it is TensorFlow's default.
- compiled: here the forward pass with the loss is one region, which brings its backward pass, and
  an optimizer that is not fused is another; what lies between, Python runs. There XLA compiles the
  whole step, micro-batches and all, to one program.
- bfloat16: autocast decides per operator, and for compiled code while it is traced; Keras decides
  per layer.
- fused: an argument of PyTorch's optimizers. Keras has none, since XLA fuses the update with the
  rest of a compiled step.
- BatchNorm normalises each micro-batch by itself in both, so accumulation is another computation
  for a model that has it, and the same one for a model without.

When it helps and when it hurts: gains do not multiply. What is bound by memory (BatchNorm, ReLU)
gains from compilation or bfloat16, not from both in full; fused only counts where the update is a
visible share of what is left; accumulation costs time and saves memory. A CPU without bfloat16
units emulates it, and convolutions then take several times as long, compiled or not. Add one rung
at a time, measure, and leave out what does not pay.

Run it alone: `python -m pt_impl.train_step.stacking` prints the ladder on the digits CNN.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from copy import copy
from dataclasses import fields, is_dataclass
from inspect import signature

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_map  # torch has no public one

_DTYPES = ("float32", "bfloat16")


def make_optimizer(
    model: nn.Module, *, learning_rate: float, momentum: float = 0.9, fused: bool = False
) -> torch.optim.Optimizer:
    """Make SGD with momentum over the parameters of `model`: v = momentum v + g; w -= lr v.

    fused: one kernel for all parameters, on CPU and CUDA; otherwise PyTorch's default, a loop on a
    CPU and multi-tensor kernels on CUDA. Adam, AdamW and Adagrad take `fused` as well. Make it
    before or after `make_train_step`, which converts parameters in place: its state takes over
    their format at the first step. Raises ValueError for settings out of range.
    """
    if learning_rate < 0 or not 0 <= momentum < 1:
        raise ValueError("learning_rate must be at least 0 and momentum in [0, 1)")
    return torch.optim.SGD(
        model.parameters(),
        lr=learning_rate,
        momentum=momentum,
        dampening=0.0,
        weight_decay=0.0,
        nesterov=False,
        fused=fused or None,  # False would also switch the multi-tensor kernels off
    )


def make_train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_fn: Callable,
    *,
    channels_last: bool = False,
    compiled: bool = False,
    dtype: str = "float32",
    micro_batches: int = 1,
) -> Callable:
    """Return `step(x, y) -> loss` with all that is asked for; the defaults are the plain step.

    x: a tuple of the model's positional arguments, a mapping of its keywords, or its one argument;
    y: a tensor or a structure of tensors. loss: float32 scalar, the mean over the batch if
    `loss_fn` is a mean. channels_last: convert the model's 4-D parameters, in place, and each
    batch. compiled: with `torch.compile`; the first step compiles, and the second does again for an
    optimizer that has no state before the first. dtype: "float32" or "bfloat16" under autocast,
    over float32 parameters; `loss_fn` gets float32. micro_batches: parts of equal size that a batch
    is cut into, along axis 0 of all tensors in x and y (None, numbers and strings go to every
    part); their gradients add up to that of the mean.

    Raises ValueError for an unknown dtype, parameters that are bfloat16 already, channels_last
    without a 4-D parameter and fewer than one micro-batch; the step does, before anything is
    changed, for a batch that cannot be cut into equal parts. NotImplementedError where the device
    has no autocast.
    """
    device = _check(model, channels_last, dtype, micro_batches)
    if channels_last:  # first of all: a compiled graph is specialised on the strides that it sees
        _parameters_to_channels_last(model)
    model.train()
    half = dtype == "bfloat16"

    def mean_loss(args, kwargs, y):
        # Inside the compiled region, which fuses casts; the backward pass repeats their dtypes.
        with torch.autocast(device, torch.bfloat16) if half else nullcontext():
            output = model(*args, **kwargs)
        return loss_fn(_to_float32(output), y)

    update = optimizer.step
    if compiled:
        mean_loss = _compile(mean_loss)
        if not optimizer.defaults.get("fused"):  # which is one kernel already
            update = _compile(update)

    def step(x, y):
        args, kwargs = _arguments(x)
        if channels_last:
            args, kwargs = _channels_last((args, kwargs))
        parts = _parts((args, kwargs, y), micro_batches)
        optimizer.zero_grad(set_to_none=True)
        # Outermost: one compiled graph of the small shape serves every part, one after the other.
        total = 0.0
        for part in parts:
            loss = mean_loss(*part) / micro_batches
            loss.backward()
            total = total + loss.detach()
        update()
        return total

    return step


def _check(model: nn.Module, channels_last: bool, dtype: str, micro_batches: int) -> str:
    """Check the settings against the model, before it is changed; return its device's type."""
    if dtype not in _DTYPES:
        raise ValueError(f"unknown dtype {dtype!r}: choose one of {', '.join(_DTYPES)}")
    if micro_batches < 1:
        raise ValueError(f"micro_batches must be at least 1, not {micro_batches}")
    # Buffers are no weights: a causal mask is 4-D too.
    ranks = {parameter.dim() for parameter in model.parameters()}
    if channels_last and (4 not in ranks or 5 in ranks):
        raise ValueError("channels_last converts 4-D parameters: the model has none, or 5-D ones")
    if not ranks:
        raise ValueError("the model has no parameters: there is nothing to train")
    device = next(model.parameters()).device.type
    if dtype == "bfloat16":
        for name, parameter in model.named_parameters():
            if parameter.dtype in (torch.bfloat16, torch.float16):
                raise ValueError(f"master weights are float32, but {name} is {parameter.dtype}")
        if not torch.amp.is_autocast_available(device):
            raise NotImplementedError(f"torch has no autocast for the device {device!r}")
    return device


def _arguments(x) -> tuple[tuple, dict]:
    """What the model is called with: a tuple is its arguments, a mapping its keywords."""
    if isinstance(x, Mapping):
        return (), dict(x)
    return (x if isinstance(x, tuple) else (x,)), {}


def _parts(batch, count: int) -> list:
    """A batch cut along axis 0 into `count` parts of equal size; views, not copies."""
    if count == 1:
        return [batch]
    sizes = {leaf.shape[0] if leaf.dim() else "a scalar" for leaf in _tensors(batch)}
    if len(sizes) != 1 or "a scalar" in sizes:
        found = ", ".join(sorted(map(str, sizes)))
        raise ValueError(f"the tensors of x and y need one first axis, the samples: got {found}")
    (size,) = sizes
    if size % count or not size:
        raise ValueError(f"a batch of {size} cannot be cut into {count} parts of equal size")
    size //= count
    return [
        _map(lambda leaf, start=start: leaf[start : start + size], batch)
        for start in range(0, count * size, size)
    ]


def _tensors(tree) -> Iterator[Tensor]:
    """The tensors of nested tuples, lists and mappings; ValueError for what cannot be cut."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, Mapping | tuple | list) and not isinstance(tree, PackedSequence):
        for part in tree.values() if isinstance(tree, Mapping) else tree:
            yield from _tensors(part)
    elif not isinstance(tree, int | float | str | None):
        raise ValueError(f"x and y hold a {type(tree).__name__}, which cannot be cut into parts")


def _map(function: Callable, tree):
    """`function` of each tensor of nested tuples, lists and mappings."""
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, Mapping):
        return {key: _map(function, part) for key, part in tree.items()}
    if isinstance(tree, tuple | list):
        parts = [_map(function, part) for part in tree]
        return type(tree)(*parts) if hasattr(tree, "_fields") else type(tree)(parts)
    return tree


def _channels_last(x):
    # `to`, since one channel is "contiguous" in either format and would keep its strides.
    return _map(lambda v: v.to(memory_format=torch.channels_last) if v.dim() == 4 else v, x)


def _parameters_to_channels_last(model: nn.Module) -> None:
    # Not `model.to`, which would convert 4-D buffers and stop at 5-D ones.
    for parameter in model.parameters():
        if parameter.dim() == 4:
            parameter.data = parameter.data.to(memory_format=torch.channels_last)


def _compile(function: Callable) -> Callable:
    """`torch.compile`, such that it never runs eagerly because others were compiled before.

    torch keeps 8 compilations of one piece of code (`torch._dynamo.config.recompile_limit`), of all
    models of a process together, and runs what comes after them eagerly.
    """
    if "isolate_recompiles" in signature(torch.compile).parameters:  # torch 2.15 has it
        return torch.compile(function, isolate_recompiles=True)
    torch._dynamo.config.fail_on_recompile_limit_hit = True  # then the ninth raises
    return torch.compile(function)


def _to_float32(tree):
    """Cast every bfloat16 or float16 tensor of an output to float32, in whatever holds it."""
    return tree_map(_leaf_to_float32, tree)


def _leaf_to_float32(leaf):
    if getattr(leaf, "dtype", None) in (torch.bfloat16, torch.float16):
        return leaf.float()
    if is_dataclass(leaf):  # those that torch does not know as containers
        leaf = copy(leaf)
        for field in fields(leaf):
            object.__setattr__(leaf, field.name, _to_float32(getattr(leaf, field.name)))
    elif isinstance(leaf, Mapping):
        return {key: _to_float32(value) for key, value in leaf.items()}
    return leaf


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
    rungs, settings, fused = {"baseline": ({}, False)}, {}, False
    for name, value in (
        ("channels_last", True),
        ("compiled", True),
        ("dtype", "bfloat16"),
        ("fused", True),
        ("micro_batches", 2),
    ):
        fused = fused or name == "fused"
        settings = settings if name == "fused" else settings | {name: value}
        rungs[f"+ {name}"] = (settings, fused)
    steps, losses, taken = {}, {}, {name: [] for name in rungs}
    for name, (settings, fused) in rungs.items():
        model = models.build(task.model, init_weights(task.model, seed=0))
        optimizer = make_optimizer(model, learning_rate=task.recipe.learning_rate, fused=fused)
        steps[name] = make_train_step(model, optimizer, training.cross_entropy, **settings)
    for _ in range(20):
        for name, step in steps.items():
            start = time.perf_counter()
            for batch in batches:
                losses[name] = step(*batch)
            runtime.synchronize()
            taken[name].append((time.perf_counter() - start) / len(batches))
    print(f"digits-cnn, batch {task.compute_batch}: ms a step, ratio, loss after 200 steps")
    for name, times in taken.items():
        seconds, first = statistics.median(times), statistics.median(taken["baseline"])
        loss = runtime.to_float(losses[name])
        print(f"{name:16}{seconds * 1e3:8.2f}{seconds / first:7.2f}{loss:9.4f}")


if __name__ == "__main__":
    main()
