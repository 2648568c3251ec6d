"""Memory format: where the channels of an image lie in memory.

What it changes: the strides of 4-D parameters and activations. "channels_last" keeps the channels
of one pixel side by side, as convolution kernels like to read them; "channels_first" keeps each
channel's image together. Shapes stay (n, channels, height, width), and so do names, checkpoints and
results: nothing in the model's code has to know, but for `x.view(n, -1)`, which raises for such
strides: `x.flatten(1)` takes them.

Its twin: `tf_impl/train_step/memory_format.py`.

Where the frameworks differ and why:
- Here the format is a property of each tensor (its strides), chosen by whoever makes it, and an
  operator passes on the format of its input. A Keras layer has it in its configuration, and a
  tensor's shape says it: (n, height, width, channels) or (n, channels, height, width). A built
  model can be converted in place here and must be rebuilt there.
- The default is channels_first here and channels_last in TensorFlow. So a baseline of PyTorch
  against one of TensorFlow also compares formats; the rows "channels_last" are alike in it.
- On a GPU TensorFlow's graph optimizer chooses the format of convolutions by itself, whatever the
  model says. PyTorch leaves it to its user.

When it helps and when it hurts: it helps convolutions on a CPU (oneDNN reads it without a
conversion) and on a GPU with half-width types (tensor cores). It hurts where an operator without a
channels_last kernel converts there and back, and where shapes are so small that the operators
between convolutions decide. Channels that are no multiple of 8 or 16 gain less.

Run it alone: `python -m pt_impl.train_step.memory_format` prints channels_first against
channels_last.

Copy with it: nothing.
"""

from collections.abc import Mapping

import torch
from torch import nn

_FORMATS = {"channels_last": torch.channels_last, "channels_first": torch.contiguous_format}


def apply_memory_format(model: nn.Module, *, memory_format: str = "channels_last") -> nn.Module:
    """Convert the 4-D parameters of `model` in place and return it.

    memory_format: "channels_last" or "channels_first" (PyTorch's default). Convolutions then
    convert an input in another format by themselves and give theirs on; convert the batch all the
    same (`convert_batch`), since operators before the first convolution follow the batch.

    Parameters stay the same objects, so an optimizer may exist already. It makes its state in the
    format of its parameters at its first step; convert before that. Source: "Channels Last Memory
    Format in PyTorch", docs.pytorch.org/tutorials.

    Raises ValueError for another format and for a model without 4-D parameters;
    NotImplementedError for 5-D ones, which have formats of their own. Nothing is changed then.
    """
    chosen = _chosen(memory_format)
    # Buffers are no weights: a causal mask is 4-D, and a table of positions may be 5-D.
    ranks = {parameter.dim() for parameter in model.parameters()}
    if 5 in ranks:
        raise NotImplementedError(
            "torch has no channels_last for 5-D tensors such as the weights of Conv3d: they have"
            " torch.channels_last_3d"
        )
    if 4 not in ranks:
        raise ValueError("the model has no 4-D parameter, so there is no convolution to convert")
    for parameter in model.parameters():
        if parameter.dim() == 4:
            parameter.data = parameter.data.to(memory_format=chosen)
    return model


def convert_batch(x, *, memory_format: str = "channels_last"):
    """Return `x` with its 4-D tensors in `memory_format`, copied where they are not so already.

    x: a tensor, or nested tuples, lists and mappings of tensors; shapes and values stay. Raises
    ValueError for another format.
    """
    return _convert(x, _chosen(memory_format))


def _convert(tree, chosen: torch.memory_format):
    if isinstance(tree, torch.Tensor):
        # Not `contiguous(memory_format=...)`: one channel is "contiguous" in both formats, so it
        # would keep the strides, and a convolution reads its format from them.
        return tree.to(memory_format=chosen) if tree.dim() == 4 else tree
    if isinstance(tree, Mapping):
        return {key: _convert(part, chosen) for key, part in tree.items()}
    if isinstance(tree, tuple | list):
        parts = [_convert(part, chosen) for part in tree]
        return type(tree)(*parts) if hasattr(tree, "_fields") else type(tree)(parts)
    return tree


def _chosen(memory_format: str) -> torch.memory_format:
    if memory_format not in _FORMATS:
        raise ValueError(
            f"unknown memory format {memory_format!r}: choose one of {', '.join(_FORMATS)}"
        )
    return _FORMATS[memory_format]


def main() -> None:
    """Print channels_first against channels_last on the digits CNN, in interleaved samples."""
    import os
    import statistics
    import tempfile
    import time
    from pathlib import Path

    from pt_impl.kit import data, models, operators, runtime, training
    from shared import datasets
    from shared.specs import TASKS
    from shared.weights import init_weights

    runtime.configure(threads=os.cpu_count() or 1, seed=0)
    task = TASKS["digits-cnn"]
    with tempfile.TemporaryDirectory() as folder:
        x, y = datasets.load(datasets.materialise(task.dataset, Path(folder)), "train")
        batches = datasets.first_batches(x, y, task.compute_batch, 10, seed=0)
    batches = data.resident_batches(batches)
    steps, kept, losses, times = {}, {}, {}, {name: [] for name in ("channels_first", *_FORMATS)}
    for name in times:
        model = models.build(task.model, init_weights(task.model, seed=0))
        kept[name] = apply_memory_format(model, memory_format=name)
        optimizer = training.make_optimizer(model, task.recipe)
        steps[name] = training.make_train_step(model, optimizer, training.cross_entropy)
    for _ in range(20):
        for name, step in steps.items():
            start = time.perf_counter()
            for x, y in batches:
                losses[name] = step(convert_batch(x, memory_format=name), y)
            runtime.synchronize()
            times[name].append((time.perf_counter() - start) / len(batches))
    print(f"digits-cnn, batch {task.compute_batch}: ms a step, ratio, last loss, formats")
    baseline = statistics.median(times["channels_first"])
    for name, step in steps.items():
        seconds, loss = statistics.median(times[name]), runtime.to_float(losses[name])
        x, y = batches[0]
        x = convert_batch(x, memory_format=name)
        seen = operators.convolution_formats(kept[name], lambda step=step, x=x, y=y: step(x, y))
        print(f"{name:15}{seconds * 1e3:8.2f}{seconds / baseline:7.2f}{loss:9.4f}  {seen}")


if __name__ == "__main__":
    main()
