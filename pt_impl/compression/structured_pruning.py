"""Structured pruning: remove whole channels, which gives a smaller dense model.

    model = remove_channels(model, x[:2], share=0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)  # a new one; train the model on

What it changes: each convolution and dense layer loses the channels whose filters have the smallest
L1 norm (Li et al., 2017, section 3.1). Their normalisation and the weights of later layers that
read them go, too. Layers whose outputs are added, or filtered one by one, lose the same channels: a
dependency group (Fang et al., 2023). The result is an ordinary dense model. Removing a share s
leaves about (1 - s)^2 of the arithmetic and weights.

Its twin: `tf_impl/compression/structured_pruning.py`.

Where the frameworks differ and why:
- PyTorch: a module is code, so `torch_pruning` traces it. `forward` does not change. Channels that
  it splits or reshapes by fixed numbers are kept.
- TensorFlow: the graph of a functional Keras model shows which layer feeds which. The smaller model
  is a clone with other layer configurations. Subclassed models are refused.
- `nn.MultiheadAttention` has one width for everything, and stays whole. Keras's
  `MultiHeadAttention` loses input and output channels.

When it helps and when it hurts: it makes a model faster on any hardware, in any runtime. It costs
more accuracy than pruning the same share of single weights. Training the small model from random
weights can be as good (Liu et al., 2019). Kernels gain little if the remaining channels no longer
fill vector registers: prefer multiples of 8 or 16.

Run it alone: `python -m pt_impl.compression.structured_pruning` prints sizes and times of smaller
models.

Copy with it: `pt_impl/kit/channels.py`, `pt_impl/kit/checks/structured_pruning.py`.
"""

import warnings

import torch
from torch import nn

from pt_impl.kit.channels import Channels, Group, is_depthwise, makes_channels
from pt_impl.kit.checks.structured_pruning import (
    check_groups,
    check_structured_pruning,
    copied,
    fault,
    groups_to_cut,
    in_words,
)


def remove_channels(model: nn.Module, x, *, share: float) -> nn.Module:
    """Return a smaller copy of `model`: `share` of the channels of its layers are gone.

    Cut are convolutions and `nn.Linear`, but those whose channels are the model's outputs. What
    else can't be followed from channel to channel stays whole, and a warning names it. `model`
    itself is left as it was; make a new optimizer for the copy.

    Args:
        model: any module.
        x: example input: a tensor, a tuple of the positional arguments, a mapping of the named
            ones. Layers that it does not run keep the channels that they may read.
        share: at least 0 and below 1. Of n channels the round(n * (1 - share)) whose filters have
            the largest L1 norm stay, at least one, in their order; of equal ones the first. Norms
            of layers that make the same channels are added up. Where a convolution or
            `nn.GroupNorm` divides channels into groups, each loses those in the same places.

    Raises:
        ValueError: another share, a model with pruning masks, and one without such layers.
        NotImplementedError, with the reason: Python cannot copy the model, or no layer can be cut
            such that the copy's outputs are those of the model in which nothing reads what is gone.

    Source: Li et al., 2017, "Pruning Filters for Efficient ConvNets"; `torch_pruning` (Fang et al.,
    2023, "DepGraph: Towards Any Structural Pruning").
    """
    check_structured_pruning(model, share)
    original = copied(model)
    channels = Channels(original, x)
    groups, uncut = groups_to_cut(original, channels)
    removals = [(group, _weakest(original, group, share)) for group in groups]
    smaller, left, faults = _remove(original, x, removals, channels.training)
    uncut |= faults
    check_groups(left, uncut)
    for group, weakest in left:
        if share and not weakest:
            size = group.size // max(group.runs)
            uncut[group.name] = f"its groups of {size} channels lose none at this share"
    if uncut:
        warnings.warn(f"left whole: {in_words(uncut)}", stacklevel=2)
    for module, source in zip(smaller.modules(), model.modules(), strict=True):
        module.training = source.training
    for parameter, source in zip(smaller.parameters(), model.parameters(), strict=True):
        parameter.requires_grad_(source.requires_grad)
    return smaller


def _weakest(model: nn.Module, group: Group, share: float) -> set[int]:
    """The channels of a group that go. Norms are summed in float64, so that twins agree."""
    norms = torch.zeros(group.size, dtype=torch.float64)
    for use in group.uses:
        layer = dict(model.named_modules()).get(use.name)
        if is_depthwise(layer) or (use.side == "out" and makes_channels(layer)):
            weight = layer.weight.detach().cpu().double().abs()
            filters = weight.transpose(0, 1) if getattr(layer, "transposed", False) else weight
            here, there = torch.tensor(use.channels).T
            norms.index_add_(0, there, filters.flatten(1).sum(1)[here])
    norms = norms.reshape(max(group.runs), -1).sum(0)
    count = max(round(len(norms) * (1 - share)), 1)
    weakest = norms.argsort(descending=True, stable=True)[count:].tolist()
    return {run * len(norms) + place for run in range(max(group.runs)) for place in weakest}


def _remove(model: nn.Module, x, removals: list, training: bool) -> tuple[nn.Module, list, dict]:
    """Return a copy without channels, those of `removals` that it lost, and why it kept others."""
    smaller, why = _cut(model, x, removals, training)
    if not why:
        return smaller, removals, {}
    uncut = _at_fault(model, x, removals, why, training)
    left = [(group, weakest) for group, weakest in removals if group.name not in uncut]
    smaller, why = _cut(model, x, left, training)
    if why:  # they are at fault only together
        return model, [], uncut | {group.name: why for group, _ in left}
    return smaller, left, uncut


def _at_fault(model: nn.Module, x, removals: list, why: str, training: bool) -> dict[str, str]:
    """Find by halves which groups are at fault by themselves, of several that are together."""
    if len(removals) == 1:
        return {removals[0][0].name: why}
    found = {}
    for half in (removals[: len(removals) // 2], removals[len(removals) // 2 :]):
        _, why = _cut(model, x, half, training)
        if why:
            found |= _at_fault(model, x, half, why, training)
    return found


def _cut(model: nn.Module, x, removals: list, training: bool) -> tuple[nn.Module, str]:
    """Return a copy without the channels, and what is wrong with it, if anything."""
    smaller, removed, cuts = copied(model), {}, {}
    for group, weakest in removals:
        for use in group.uses:
            here = {channel for channel, of_group in use.channels if of_group in weakest}
            if here:
                removed.setdefault((use.name, use.side), set()).update(here)
                cuts[use.name, use.side] = use.cut
    try:
        for (name, side), channels in removed.items():
            parent, _, own = name.rpartition(".")
            owner = smaller.get_submodule(parent)
            setattr(owner, own, cuts[name, side](getattr(owner, own), sorted(channels)))
    except Exception as error:  # such as of a weight that is computed
        return model, f"torch_pruning can't cut it: {' '.join(str(error).split())}"
    return smaller, fault(smaller, model, x, removed, training) if removed else ""


def main() -> None:
    """Print the trained digits CNN with fewer and fewer channels, each trained on."""
    from pt_impl.kit import models, training
    from pt_impl.kit.demo import Demo

    demo = Demo("digits-cnn")
    recipe = demo.task.recipe
    trained, optimizer, loss_fn = demo.build()
    demo.fit(training.make_train_step(trained, optimizer, loss_fn), epochs=recipe.epochs)
    print("removed  parameters  ms a batch  accuracy")
    for share in (0.0, 0.5, 0.8, 0.9):
        model = remove_channels(trained, demo.test[0][:2], share=share)
        optimizer = training.make_optimizer(model, recipe)
        demo.fit(training.make_train_step(model, optimizer, loss_fn), epochs=recipe.epochs)
        predict = training.make_predict(model)
        ms = demo.times({"": lambda x, y, predict=predict: predict(x)})[""]
        print(f"{share:7.0%}{models.parameter_count(model):12}{ms:12.2f}{demo.score(model):10.1f}")


if __name__ == "__main__":
    main()
