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

from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import nn
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

    x: a tensor, or a tuple of the model's positional arguments; y: a tensor or tuple; axis 0 of
    all their tensors is the batch. loss: float32 scalar, the mean over the batch if `loss_fn` is a
    mean. channels_last: convert the model's 4-D parameters, in place, and each batch. compiled:
    with `torch.compile`; the first step compiles, and the second does again for an optimizer that
    has no state before the first. dtype: "float32" or "bfloat16" under autocast, over float32
    parameters; `loss_fn` gets float32. micro_batches: parts of equal size that a batch is cut
    into; their gradients add up to that of the mean.

    Raises ValueError for an unknown dtype, parameters that are bfloat16 already, channels_last
    without a 4-D parameter and fewer than one micro-batch; the step does for a batch that cannot
    be cut into equal parts. NotImplementedError where the device has no autocast.
    """
    device = _check(model, channels_last, dtype, micro_batches)
    # First of all: a compiled graph is specialised on the strides that it sees.
    if channels_last:
        model.to(memory_format=torch.channels_last)
    model.train()
    half = dtype == "bfloat16"

    def mean_loss(x, y):
        # Inside the compiled region, so that casts are fused with what they feed. The backward
        # pass repeats the dtypes of the forward pass; it never runs under autocast.
        with torch.autocast(device, torch.bfloat16) if half else nullcontext():
            output = model(*x) if isinstance(x, tuple) else model(x)
        return loss_fn(_to_float32(output), y)

    update = optimizer.step
    if compiled:
        mean_loss = torch.compile(mean_loss)
        # A fused update is one kernel already, and compiling it would only wrap it.
        if not optimizer.defaults.get("fused"):
            update = torch.compile(update)

    def step(x, y):
        if channels_last:
            x = _channels_last(x)
        optimizer.zero_grad(set_to_none=True)
        # Outermost, so that one compiled graph of the small shape serves every part, and its
        # activations are gone before the next one's come.
        total = 0.0
        for part_x, part_y in _parts(x, y, micro_batches):
            loss = mean_loss(part_x, part_y) / micro_batches
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
    ranks = {tensor.dim() for tensor in (*model.parameters(), *model.buffers())}
    if channels_last and (4 not in ranks or 5 in ranks):
        raise ValueError("channels_last converts 4-D parameters: the model has none, or 5-D ones")
    device = next(model.parameters()).device.type
    if dtype == "bfloat16":
        for name, parameter in model.named_parameters():
            if parameter.dtype in (torch.bfloat16, torch.float16):
                raise ValueError(f"master weights are float32, but {name} is {parameter.dtype}")
        if not torch.amp.is_autocast_available(device):
            raise NotImplementedError(f"torch has no autocast for the device {device!r}")
    return device


def _parts(x, y, count: int) -> list[tuple]:
    """(x, y) cut along the batch into `count` parts of equal size; views, not copies."""
    if count == 1:
        return [(x, y)]
    size = len(x[0] if isinstance(x, tuple) else x)
    if size % count:
        raise ValueError(f"a batch of {size} cannot be cut into {count} parts of equal size")
    size //= count
    return [
        tree_map(lambda v, start=start: v[start : start + size], (x, y))
        for start in range(0, count * size, size)
    ]


def _channels_last(x):
    # `to`, since one channel is "contiguous" in either format and would keep its strides.
    return tree_map(lambda v: v.to(memory_format=torch.channels_last) if v.dim() == 4 else v, x)


def _to_float32(tree):
    """Cast the bfloat16 and float16 tensors of a tensor, tuple, list or dict to float32."""
    half = (torch.bfloat16, torch.float16)
    return tree_map(lambda v: v.float() if getattr(v, "dtype", None) in half else v, tree)


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
