"""Activation checkpointing: recompute the inside of blocks in the backward pass, not store it.

What it changes: a named block keeps its inputs alone for the backward pass. What it computed on
the way to its output is freed, and computed once more when the gradient gets there, under the
random state, autocast and buffers of the first time. Losses, gradients, dropout masks and running
statistics are those of the plain model. With a model of n like blocks, memory for activations
falls from n times the inside of a block to n block inputs plus one inside, for one more forward
pass (Chen et al., 2016, "Training Deep Nets with Sublinear Memory Cost").

Its twin: `tf_impl/train_step/activation_checkpointing.py`.

Where the frameworks differ and why:
- A block is a submodule here, whose `forward` is replaced in place: names, types, parameters and
  `state_dict` stay. A functional Keras model is flat, so there a block may be a group of layers
  whose names begin alike; the twin returns a new model over the same layers.
- `torch.utils.checkpoint` puts the random generators back for the second run, and dropout draws
  its masks again. TensorFlow has no generator state to put back: the twin reads the seeds before
  the first run and gives them to the second.
- Both frameworks would update BatchNorm's running statistics twice. Here the second run writes
  into copies of the block's buffers, there it runs in a scope that drops assignments.
- This backward pass stops the second run at the last tensor it needs, so a block's last product is
  not repeated; TensorFlow's graph optimizer prunes it.

When it helps and when it hurts: it helps where activations outweigh parameters, gradients and the
optimizer's state, that is deep models, long sequences and large batches; the freed memory buys a
larger batch. It costs up to a third of a step's arithmetic. Small blocks save nothing, since each
keeps its input; one block around everything saves nothing either, since its inside is all alive
when it runs again. On a CPU, glibc may hold on to much of what is freed, because recomputed tensors
and gradients alternate in its heap; MALLOC_MMAP_THRESHOLD_=65536 gives it back.

Run it alone: `python -m pt_impl.train_step.activation_checkpointing` prints baseline against
technique.
"""

from collections.abc import Callable
from contextlib import nullcontext
from fnmatch import fnmatchcase
from functools import partial

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


def apply_checkpointing(model: nn.Module, *, blocks: str) -> nn.Module:
    """Have the blocks of `model` recomputed in the backward pass; return the model, changed.

    blocks: comma-separated names of submodules as in `model.named_modules()`, or patterns with *,
    ? and [] ("block*", "stage*.block?"). What lies within another chosen block is recomputed with
    it. "" chooses none. A block takes any arguments and returns any structure of tensors. It must
    do the same both times: what it changes other than buffers (a counter, a list) it changes twice.

    The buffers of a block in training mode are copied in each forward pass, so that the second run
    finds what the first one found. Calls without gradients run as before.

    Raises ValueError, before anything is changed, for a name or pattern that no submodule has and
    for a block that is recomputed already. Source: `torch.utils.checkpoint`, use_reentrant=False.
    """
    for module in _find_blocks(model, blocks):
        # A partial object, since copy.deepcopy follows it to the copy's own module; a closure
        # would keep computing with the parameters of the original.
        module.forward = partial(_recomputed, module, module.forward)
    return model


def _find_blocks(model: nn.Module, blocks: str) -> list[nn.Module]:
    """The submodules that `blocks` names, but for those inside another of them."""
    # Containers such as ModuleList never run themselves, so there is nothing to recompute.
    modules = {
        name: module
        for name, module in model.named_modules()
        if name and type(module).forward is not nn.Module.forward
    }
    chosen: dict[str, None] = {}
    for pattern in filter(None, map(str.strip, blocks.split(","))):
        found = [name for name in modules if fnmatchcase(name, pattern)]
        if not found:
            known = ", ".join(modules)
            raise ValueError(f"blocks: the model has no block {pattern!r}; it has {known}")
        chosen |= dict.fromkeys(found)
    inside = {n for n in chosen for other in chosen if n.startswith(f"{other}.")}
    for name in chosen.keys() - inside:
        if _is_recomputed(modules[name]):
            raise ValueError(f"blocks: {name!r} is recomputed already")
    return [modules[name] for name in chosen if name not in inside]


def _is_recomputed(module: nn.Module) -> bool:
    return getattr(vars(module).get("forward"), "func", None) is _recomputed


def _recomputed(module: nn.Module, forward: Callable, /, *args, **kwargs):
    """Run `forward`, and have the backward pass run it again."""
    settings = {}
    # A compiler sees the update of a buffer as an output of the forward pass, and never repeats it.
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        found = _Buffers(module)
        if found.copies:
            settings["context_fn"] = lambda: (nullcontext(), found)
    return checkpoint(partial(forward, **kwargs), *args, use_reentrant=False, **settings)


class _Buffers:
    """A block's buffers as they are now; as a context, they stand in for those of the block.

    A second run inside the context reads what the first one read, and its updates (BatchNorm's
    running statistics) are dropped.
    """

    def __init__(self, module: nn.Module):
        self.copies = [
            (owner, name, buffer.clone())
            for owner in module.modules()
            if owner.training  # else BatchNorm reads its statistics and changes nothing
            for name, buffer in owner.named_buffers(recurse=False)
        ]

    def __enter__(self) -> None:
        self.own = [getattr(owner, name) for owner, name, _ in self.copies]
        for owner, name, copy in self.copies:
            setattr(owner, name, copy.clone())  # the graph may be run backward more than once

    def __exit__(self, *_: object) -> None:
        for (owner, name, _), buffer in zip(self.copies, self.own, strict=True):
            setattr(owner, name, buffer)


def main() -> None:
    """Print blocks recomputed against all kept, in order of memory: a process's peak only rises."""
    import time
    from pathlib import Path

    import numpy as np

    from pt_impl.kit import data, models, runtime, training
    from shared.specs import TASKS
    from shared.weights import init_weights

    task, status = TASKS["text-gpt-deep"], Path("/proc/self/status")
    shape = (task.compute_batch, task.model.sequence_length)
    x = np.random.default_rng(0).integers(0, task.model.vocabulary, shape)
    x, y = data.to_device(x, x)
    print("text-gpt-deep, batch 16: s a step, loss after five, peak resident memory")
    for blocks in ("block*", "block[02468], block10", ""):
        model = models.build(task.model, init_weights(task.model, seed=0))
        model = apply_checkpointing(model, blocks=blocks)
        optimizer = training.make_optimizer(model, task.recipe)
        step = training.make_train_step(model, optimizer, training.cross_entropy)
        step(x, y)
        start = time.perf_counter()
        losses = [runtime.to_float(step(x, y)) for _ in range(4)]
        seconds = (time.perf_counter() - start) / len(losses)
        lines = status.read_text().splitlines() if status.exists() else []
        peak = next((line[6:].strip() for line in lines if line.startswith("VmHWM:")), "unknown")
        print(f"{blocks or 'none':24}{seconds:7.3f}{losses[-1]:9.4f}  {peak}")


if __name__ == "__main__":
    main()
