"""Recomputation: the second run of a block finds what the first one found, on any model.

`torch.utils.checkpoint` puts back torch's random generators and autocast for the second run. What
it leaves as the first run left it is put back here: buffers, such as BatchNorm's statistics and the
vectors of spectral norm; the generators of Python, NumPy and of a module's own. cuDNN's recurrent
layers draw dropout from a state that nothing can put back: it begins anew in each run. What is
changed in place, by a block or after it, cannot be put back, and is refused. All of it can go where
torch does it.
"""

import inspect
import pickle
import random
from collections.abc import Callable
from contextlib import nullcontext

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode  # torch has no public one
from torch.utils._pytree import tree_leaves  # torch has no public one
from torch.utils.checkpoint import checkpoint

from pt_impl.kit.checks.activation_checkpointing import check_unchanged

# Whether torch asks if hooks of kept tensors see the outputs that `save_products` keeps, too.
ASKS_FOR_HOOKS = "respect_saved_tensors_hooks" in inspect.signature(checkpoint).parameters


class Replay:
    """Runs a block so that its second run does what the first one did.

    Args:
        name: of the block, for what is refused.
        module: the block.
    """

    def __init__(self, name: str, module: nn.Module) -> None:
        self.name, self.module = name, module
        # The buffers that the first pass changed; None before that.
        self.changing: set[tuple[str, str]] | None = None

    def run(self, checkpointed: Callable, inputs, contexts: Callable, kept: list):
        """Return `checkpointed(context_fn=...)`, with contexts that put the block's state back.

        contexts: the `context_fn` of `torch.utils.checkpoint` to go on with. kept: the operators
        whose outputs it keeps.

        Raises NotImplementedError for a block that changes what its second run reads: one of the
        inputs, or a kept output; in the backward pass, where these are changed after it.
        """
        leaves = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]
        leaves = [leaf for leaf in leaves if not leaf.is_inference()]
        versions = [leaf._version for leaf in leaves]
        before = _Before(self.module)
        _renew_recurrent_dropout(self.module)

        def context_fn():
            first, second = contexts()
            return first, _Both(before, second)

        # Hooks that are there already, such as those that move inputs to the host, stay the only.
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)  # torch has no public one
        told = {"respect_saved_tensors_hooks": not hooks} if kept and ASKS_FOR_HOOKS else {}
        watch = _Watch(self.name, kept) if kept else nullcontext()
        with nullcontext() if hooks else check_unchanged(self.name), watch:
            output = checkpointed(context_fn=context_fn, **told)
        self.changing = before.keep_changed(self.changing)
        if versions != [leaf._version for leaf in leaves]:
            raise NotImplementedError(
                f"block {self.name!r} changes its input in place, so that its second run would find"
                " another one: let it begin with a layer that is not in place"
            )
        return output


class _Before:
    """A block's buffers and generators as they are now; as a context, they stand in for its own.

    A second run inside the context reads and draws what the first one did, and its updates
    (BatchNorm's running statistics) are dropped.
    """

    def __init__(self, module: nn.Module):
        clones = {id(buffer): (buffer._version, buffer.clone()) for buffer in module.buffers()}
        self.copies = [
            ((prefix, name), owner, buffer, *clones[id(buffer)])
            for prefix, owner in module.named_modules()
            for name, buffer in owner.named_buffers(recurse=False)
        ]
        self.generators = [(read, write, read()) for read, write in _generators(module)]

    def keep_changed(self, changing: set | None) -> set:
        """Forget what the first run has not changed, such as masks; return what ever changes."""
        if changing is None:  # once by value, which a change through `.data` shows in
            changing = {
                key
                for key, owner, buffer, _, copy in self.copies
                if getattr(owner, key[1], None) is not buffer or not torch.equal(buffer, copy)
            }
        self.copies = [
            (key, owner, buffer, version, copy)
            for key, owner, buffer, version, copy in self.copies
            if key in changing
            or getattr(owner, key[1], None) is not buffer
            or buffer._version != version
        ]
        self.generators = [
            (read, write, state)
            for read, write, state in self.generators
            if pickle.dumps(read()) != pickle.dumps(state)
        ]
        return changing

    def __enter__(self) -> None:
        self.own = [getattr(owner, name) for (_, name), owner, *_ in self.copies]
        again = {id(copy): copy.clone() for *_, copy in self.copies}  # for another backward pass
        for (_, name), owner, *_, copy in self.copies:
            setattr(owner, name, again[id(copy)])
        self.drawn = [read() for read, _, _ in self.generators]
        for _, write, state in self.generators:
            write(state)

    def __exit__(self, *_: object) -> None:
        for ((_, name), owner, *_), buffer in zip(self.copies, self.own, strict=True):
            setattr(owner, name, buffer)
        for (_, write, _), state in zip(self.generators, self.drawn, strict=True):
            write(state)


def _generators(module: nn.Module) -> list[tuple[Callable, Callable]]:
    """How to read and to set the generators that torch does not put back by itself."""
    held = (value for owner in module.modules() for value in vars(owner).values())
    own = [(g.get_state, g.set_state) for g in held if isinstance(g, torch.Generator)]
    numpy = np.random.get_state, np.random.set_state
    return [(random.getstate, random.setstate), numpy, *own]


def _renew_recurrent_dropout(module: nn.Module) -> None:
    """Have cuDNN's recurrent layers draw their masks from torch's generator in this run.

    They draw from a separate state that begins anew only when torch's generator is set, as
    `checkpoint` does before the second run: that would find other masks than the first.
    """
    if not torch.cuda.is_initialized():
        return
    recurrent = [layer for layer in module.modules() if isinstance(layer, nn.RNNBase)]
    drawing = [layer for layer in recurrent if layer.training and layer.dropout > 0]
    for device in {next(layer.parameters()).device for layer in drawing}:
        if device.type == "cuda":
            torch.cuda.set_rng_state(torch.cuda.get_rng_state(device), device)


class _Watch(TorchDispatchMode):
    """Refuses what changes a kept output in place, which torch misses where a view lies between.

    Such as `y += x` after a linear layer of three axes, or what a GRU does on a CPU.
    """

    def __init__(self, name: str, keeping: list):
        super().__init__()
        self.name, self.keeping, self.kept = name, set(keeping), set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is not torch.ops.aten.relu_.default:  # done twice, it is done once
            for argument, value in zip(function._schema.arguments, args, strict=False):
                if getattr(argument.alias_info, "is_write", False) and _places(value) & self.kept:
                    raise NotImplementedError(
                        f"save_products: block {self.name!r} changes a product in place"
                        f" ({function}), so that its second run would find another one"
                    )
        output = function(*args, **(kwargs or {}))
        if function in self.keeping:
            self.kept |= _places(output)
        return output


def _places(tree) -> set[int]:
    """Where the tensors of a structure lie."""
    return {v.untyped_storage().data_ptr() for v in tree_leaves(tree) if isinstance(v, Tensor)}


class _Both:
    """Two contexts as one, which another backward pass may enter again."""

    def __init__(self, *contexts):
        self.contexts = contexts

    def __enter__(self) -> None:
        for context in self.contexts:
            context.__enter__()

    def __exit__(self, *error: object) -> None:
        for context in reversed(self.contexts):
            context.__exit__(*error)
