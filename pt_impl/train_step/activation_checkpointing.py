"""Activation checkpointing: recompute the inside of blocks in the backward pass, not store it.

What it changes: a named block keeps its inputs alone for the backward pass. What it computed on
the way to its output is freed, and computed once more when the gradient gets there, under the
random numbers, autocast and buffers of the first time. Losses, gradients, dropout masks and running
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
- On a GPU, cuDNN's recurrent layers draw dropout from a state that nothing puts back; a block with
  one begins it anew in each run, from torch's generator: other masks than the plain model's, and
  the same in both runs.
- Both frameworks would update BatchNorm's running statistics twice. Here the second run writes
  into copies of what the first one changed, there it runs in a scope that drops assignments.
- PyTorch can keep some operators' outputs (`save_products`) and hand what is kept to the host and
  back (`offload`). TensorFlow has neither: `tf.recompute_grad` repeats all of a block.
- This backward pass stops the second run at the last tensor it needs, so a block's last product is
  not repeated; TensorFlow's graph optimizer prunes it.

When it helps and when it hurts: it helps where activations outweigh parameters, gradients and the
optimizer's state, that is deep models, long sequences and large batches; the freed memory buys a
larger batch. It costs up to a third of a step's arithmetic; `save_products` gives back less memory
and repeats only what is cheap. Small blocks save nothing, since each keeps its input; one block
around everything saves nothing either, since its inside is all alive when it runs again. On a CPU,
glibc may hold on to much of what is freed, because recomputed tensors and gradients alternate in
its heap; MALLOC_MMAP_THRESHOLD_=65536 gives it back.

Run it alone: `python -m pt_impl.train_step.activation_checkpointing` prints baseline against
technique.

Copy with it: nothing.
"""

import pickle
import random
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.utils._python_dispatch import TorchDispatchMode  # torch has no public one
from torch.utils._pytree import tree_leaves  # torch has no public one
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts


def apply_checkpointing(
    model: nn.Module, *, blocks: str, save_products: bool = False, offload: bool = False
) -> nn.Module:
    """Have the blocks of `model` recomputed in the backward pass.

    Calls without gradients run as before. A block takes any arguments and returns any structure of
    tensors. It must do the same both times: what it changes other than buffers (a counter, a list)
    it changes twice. Buffers that it changes (BatchNorm's statistics) are kept as they were before
    each forward pass, so that the second run finds what the first one found; and so are the numbers
    that it draws from torch, Python, NumPy or a `torch.Generator` that is an attribute of a module.
    Source: `torch.utils.checkpoint`, use_reentrant=False.

    Args:
        model: changed in place.
        blocks: comma-separated names of submodules as in `model.named_modules()`, or patterns with
            *, ? and [] ("block*", "stage*.block?"). What lies within another chosen block is
            recomputed with it. "" chooses none.
        save_products: keep the outputs of matrix products, convolutions and attention, and repeat
            only the rest, such as activations and normalisation.
        offload: move a block's inputs from the device to the host until the second run.

    Returns:
        The model.

    Raises:
        ValueError: before anything is changed, a name or pattern that no submodule has, or a block
            that is recomputed already.
        NotImplementedError: before that, a block that its owner never calls, or under torch's old
            `spectral_norm`; in the forward pass, a block that changes its own input, or with
            save_products a product, which the second run would find changed, and offload where the
            inputs are on the host. With save_products a second backward pass raises torch's
            RuntimeError.
    """
    for name, module in _find_blocks(model, blocks).items():
        # A partial object, since copy.deepcopy follows it to the copy's own module; a closure
        # would keep computing with the parameters of the original.
        options = _Options(name, save_products, offload)
        module.forward = partial(_recomputed, module, module.forward, options)
    return model


@dataclass
class _Options:
    """Of one block. `changing`: the buffers that its first pass changed; None before that."""

    name: str
    save_products: bool
    offload: bool
    changing: set[tuple[str, str]] | None = None


def _find_blocks(model: nn.Module, blocks: str) -> dict[str, nn.Module]:
    """The submodules that `blocks` names, but for those inside another of them."""
    # Containers such as ModuleList never run themselves, so there is nothing to recompute.
    modules = {
        name: module
        for name, module in model.named_modules()
        if name and type(module).forward is not nn.Module.forward
    }
    chosen: dict[str, None] = {}
    for pattern in filter(None, map(str.strip, blocks.split(","))):
        names = [name for name in modules if fnmatchcase(name, pattern)]
        if not names:
            known = ", ".join(modules)
            raise ValueError(f"blocks: the model has no block {pattern!r}; it has {known}")
        chosen |= dict.fromkeys(names)
    inside = {n for n in chosen for other in chosen if n.startswith(f"{other}.")}
    blocks_found = {name: modules[name] for name in chosen if name not in inside}
    for name, module in blocks_found.items():
        if _is_recomputed(module):
            raise ValueError(f"blocks: {name!r} is recomputed already")
        owner = modules.get(name.rpartition(".")[0], model)
        if isinstance(owner, nn.MultiheadAttention):
            raise NotImplementedError(
                f"blocks: MultiheadAttention reads the weights of {name!r} and never calls it"
            )
        if any(isinstance(hook, SpectralNorm) for hook in module._forward_pre_hooks.values()):
            raise NotImplementedError(
                f"blocks: a hook of {name!r} makes its weight, which a second run would find of a"
                " later pass: take torch.nn.utils.parametrizations.spectral_norm"
            )
    return blocks_found


def _is_recomputed(module: nn.Module) -> bool:
    return getattr(vars(module).get("forward"), "func", None) is _recomputed


def _recomputed(module: nn.Module, forward: Callable, options: _Options, /, *args, **kwargs):
    """Run `forward`, and have the backward pass run it again."""
    run = partial(checkpoint, partial(forward, **kwargs), *args, use_reentrant=False)
    if not torch.is_grad_enabled():
        return run()
    selected = partial(create_selective_checkpoint_contexts, _products())
    # A compiler sees the update of a buffer as an output of the forward pass, and never repeats it.
    if torch.compiler.is_compiling():
        return run(context_fn=selected) if options.save_products else run()
    leaves = tree_leaves((args, kwargs))
    inputs = [v for v in leaves if isinstance(v, Tensor) and not v.is_inference()]
    versions = [leaf._version for leaf in inputs]
    before = _Before(module)
    _renew_recurrent_dropout(module)

    def contexts():
        if not options.save_products:
            return nullcontext(), before  # which another backward pass enters again
        first, second = selected()
        return _Both(first, _Watch(options.name)), _Both(before, second)

    with _on_host(inputs) if options.offload else nullcontext():
        output = run(context_fn=contexts)
    before.keep_changed(options)
    if versions != [leaf._version for leaf in inputs]:
        raise NotImplementedError(
            f"block {options.name!r} changes its input in place, so that its second run would find"
            " another one: let it begin with a layer that is not in place"
        )
    return output


def _renew_recurrent_dropout(module: nn.Module) -> None:
    """Have cuDNN's recurrent layers draw their masks from torch's generator in this run.

    They draw from a state of their own that begins anew only when torch's generator is set, as
    `checkpoint` does before the second run: that would find other masks than the first.
    """
    if not torch.cuda.is_initialized():
        return
    recurrent = [layer for layer in module.modules() if isinstance(layer, nn.RNNBase)]
    drawing = [layer for layer in recurrent if layer.training and layer.dropout > 0]
    for device in {next(layer.parameters()).device for layer in drawing}:
        if device.type == "cuda":
            torch.cuda.set_rng_state(torch.cuda.get_rng_state(device), device)


def _products() -> list:
    """The operators whose outputs `save_products` keeps, where this version of torch has them."""
    names = "mm addmm bmm baddbmm convolution mkldnn_rnn_layer _cudnn_rnn _addmm_activation"
    attention = "flash_attention efficient_attention cudnn_attention flash_attention_for_cpu"
    names = names.split() + [f"_scaled_dot_product_{name}" for name in attention.split()]
    return [getattr(torch.ops.aten, n).default for n in names if hasattr(torch.ops.aten, n)]


class _Watch(TorchDispatchMode):
    """Refuses what changes a kept product in place, which torch misses where a view lies between.

    Such as `y += x` after a linear layer of three axes, or what a GRU does on a CPU.
    """

    def __init__(self, name: str):
        super().__init__()
        self.name, self.products, self.kept = name, set(_products()), set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is not torch.ops.aten.relu_.default:  # done twice, it is done once
            for argument, value in zip(function._schema.arguments, args, strict=False):
                if getattr(argument.alias_info, "is_write", False) and _places(value) & self.kept:
                    raise NotImplementedError(
                        f"save_products: block {self.name!r} changes a product in place"
                        f" ({function}), so that its second run would find another one"
                    )
        output = function(*args, **(kwargs or {}))
        if function in self.products:
            self.kept |= _places(output)
        return output


def _places(tree) -> set[int]:
    """Where the tensors of a structure lie."""
    return {v.untyped_storage().data_ptr() for v in tree_leaves(tree) if isinstance(v, Tensor)}


def _on_host(inputs: list[Tensor]):
    """The context in which what autograd keeps is moved to the host, and back when it is needed."""
    if any(leaf.device.type == "cpu" and leaf.requires_grad for leaf in inputs):
        raise NotImplementedError("offload: the activations of a block are on the host already")
    return torch.autograd.graph.save_on_cpu(pin_memory=torch.cuda.is_available())


class _Both:
    """Two contexts as one, which may be entered again."""

    def __init__(self, *contexts):
        self.contexts = contexts

    def __enter__(self) -> None:
        for context in self.contexts:
            context.__enter__()

    def __exit__(self, *error: object) -> None:
        for context in reversed(self.contexts):
            context.__exit__(*error)


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

    def keep_changed(self, options: _Options) -> None:
        """Forget what the first run has not changed, such as masks."""
        if options.changing is None:  # once by value, which a change through `.data` shows in
            options.changing = {
                key
                for key, owner, buffer, _, copy in self.copies
                if getattr(owner, key[1], None) is not buffer or not torch.equal(buffer, copy)
            }
        self.copies = [
            (key, owner, buffer, version, copy)
            for key, owner, buffer, version, copy in self.copies
            if key in options.changing
            or getattr(owner, key[1], None) is not buffer
            or buffer._version != version
        ]
        self.generators = [
            (read, write, state)
            for read, write, state in self.generators
            if pickle.dumps(read()) != pickle.dumps(state)
        ]

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
