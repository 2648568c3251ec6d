"""What gradient accumulation refuses: batches that cannot be cut, and models without gradients."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence


def check_gradient_accumulation(model: nn.Module, micro_batches: int) -> None:
    """Raise ValueError for a number of parts below 1, and a model without trainable parameters."""
    if not isinstance(micro_batches, int) or micro_batches < 1:
        raise ValueError(f"micro_batches must be an integer of at least 1, not {micro_batches!r}")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError("the model has no trainable parameters: there is no gradient to add")


def count_samples(batch, micro_batches: int) -> int:
    """Return the number of samples, which all tensors of a batch have along their first axis.

    Raises ValueError where they disagree, for fewer samples than parts, and for what cannot be cut.
    """
    sizes = {tuple(leaf.shape[:1]) for leaf in _tensors(batch)}
    if len(sizes) != 1 or () in sizes:
        got = ", ".join(str(size[0]) if size else "a scalar" for size in sorted(sizes))
        raise ValueError(f"the tensors of x and y need one first axis, the samples: got {got}")
    ((samples,),) = sizes
    if samples < micro_batches:
        raise ValueError(
            f"{samples} samples do not fill {micro_batches} micro-batches: drop this batch, or make"
            " fewer parts"
        )
    return samples


def _tensors(tree) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        if tree.is_nested or tree.layout != torch.strided:
            kind = "nested" if tree.is_nested else str(tree.layout).removeprefix("torch.")
            raise ValueError(f"x and y hold a {kind} tensor, which cannot be cut into parts")
        yield tree
    elif isinstance(tree, Mapping | tuple | list) and not isinstance(tree, PackedSequence):
        for part in tree.values() if isinstance(tree, Mapping) else tree:
            yield from _tensors(part)
    elif not isinstance(tree, int | float | str | None):
        raise ValueError(f"x and y hold a {type(tree).__name__}, which cannot be cut into parts")
