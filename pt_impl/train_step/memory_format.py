"""Memory format: where the channels of an image lie in memory.

    apply_memory_format(model)  # "channels_last", before the first step of the optimizer
    x = convert_batch(x)  # each batch

What it changes: the strides of 4-D parameters and activations. "channels_last" keeps the channels
of one pixel together in memory, as convolution kernels like to read them. "channels_first" keeps
each channel's image together. Shapes stay (n, channels, height, width). Names, checkpoints and
results don't change either. Only `x.view(n, -1)` raises: use `x.flatten(1)`.

Its twin: `tf_impl/train_step/memory_format.py`.

Where the frameworks differ and why:
- PyTorch: the format is a property of each tensor (its strides), so any model is converted in
  place.
- TensorFlow: it is in a layer's configuration (`data_format`, and the `axis` of BatchNorm). So the
  model is rebuilt, and outputs are compared. Layers with an unknown channel axis are refused.
- The default is channels_first in PyTorch and channels_last in TensorFlow. So comparing the
  baselines also compares formats. The rows "channels_last" have the same format.

When it helps and when it hurts: it speeds up convolutions on a CPU, where oneDNN reads
channels_last without a conversion, and on a GPU in half precision (tensor cores). It hurts if
operators without a channels_last kernel convert there and back, or if convolutions are so small
that other operators dominate. It gains less if channels are not a multiple of 8 or 16.

Run it alone: `python -m pt_impl.train_step.memory_format` compares channels_first with
channels_last.

Copy with it: `pt_impl/kit/calling.py`, `pt_impl/kit/checks/memory_format.py`.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from pt_impl.kit.calling import map_tensors
from pt_impl.kit.checks.memory_format import check_memory_format, check_name

_FORMATS = {"channels_first": torch.contiguous_format, "channels_last": torch.channels_last}


def apply_memory_format(model: nn.Module, *, memory_format: str = "channels_last") -> nn.Module:
    """Convert the 4-D parameters of `model` in place and return it.

    Convolutions then convert an input in another format by themselves and give theirs on; convert
    the batch all the same (`convert_batch`), since operators before the first convolution follow
    the batch. Parameters stay the same objects, so an optimizer may exist already. It makes its
    state in the format of its parameters at its first step; convert before that. Source: "Channels
    Last Memory Format in PyTorch", docs.pytorch.org/tutorials.

    Args:
        model: changed in place.
        memory_format: "channels_last" or "channels_first" (PyTorch's default).

    Raises:
        ValueError: another format, or a model without 4-D parameters; nothing is changed then.
        NotImplementedError: 5-D parameters, which have other formats.
    """
    check_memory_format(model, memory_format)
    for parameter in model.parameters():
        if parameter.dim() == 4:
            parameter.data = parameter.data.to(memory_format=_FORMATS[memory_format])
    return model


def convert_batch(x, *, memory_format: str = "channels_last"):
    """Return `x` with its 4-D tensors in `memory_format`, copied where they are not so already.

    x: a tensor, or nested tuples, lists and dicts of tensors; shapes and values stay. A mapping of
    another class becomes a dict. Raises ValueError for another format.
    """
    check_name(memory_format)
    chosen = _FORMATS[memory_format]

    def convert(tensor: Tensor) -> Tensor:
        # Not `contiguous(memory_format=...)`: one channel is "contiguous" in both formats, so it
        # would keep the strides, and a convolution reads its format from them.
        return tensor.to(memory_format=chosen) if tensor.dim() == 4 else tensor

    return map_tensors(convert, dict(x) if isinstance(x, Mapping) else x)


def main() -> None:
    """Print channels_first against channels_last on the digits CNN."""
    from functools import partial

    from pt_impl.kit import training
    from pt_impl.kit.demo import Demo

    demo, steps = Demo("digits-cnn"), {}
    for name in _FORMATS:
        model, optimizer, loss_fn = demo.build()
        apply_memory_format(model, memory_format=name)
        step = training.make_train_step(model, optimizer, loss_fn)
        convert = partial(convert_batch, memory_format=name)
        steps[name] = lambda x, y, step=step, convert=convert: step(convert(x), y)
    for name, ms in demo.times(steps).items():
        print(f"{name:15}{ms:8.2f} ms a step")


if __name__ == "__main__":
    main()
