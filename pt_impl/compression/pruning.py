"""Magnitude pruning: while a model trains, more and more of its smallest weights become zero.

    model, update = apply_pruning(model, final_sparsity=0.8, begin_step=0, end_step=1000)
    for number, (x, y) in enumerate(batches, 1):  # with an optimizer for the new model
        update(number)  # before the step
    model = finalize_pruning(model)  # after training

What it changes: kernels of dense and convolution layers are multiplied by masks of zeros and ones
in every forward pass. The masks are updated every `frequency` steps. Their share of zeros rises
fast at first and slowly later (Zhu and Gupta, 2017, section 3). The largest weights stay: of each
layer, or of all layers together (`apply_global_pruning`).

Its twin: `tf_impl/compression/pruning.py`.

Where the frameworks differ and why:
- PyTorch (`torch.nn.utils.prune`) masks gradients too, so a pruned weight stays pruned. It has no
  schedule.
- Keras 3 has no pruning. Here the layers read masked kernels, and gradients are masked.
- tf_keras: TensorFlow Model Optimization (tfmot) masks only in the forward pass. A step changes
  pruned weights, so a weight may return when masks are updated. It has no global magnitude. It can
  choose the layers for which a runtime has sparse kernels (`apply_latency_pruning`).

When it helps and when it hurts: files compress better, and sparse kernels can use the zeros
(`sparse_inference.py`). By itself it makes nothing faster or smaller: zeros in a dense tensor are
multiplied like other numbers. Leave steps for recovery after `end_step`. Global magnitude can make
a whole layer zero.

Run it alone: `python -m pt_impl.compression.pruning` compares the dense model with 80% and 95%
zeros.

Copy with it: `pt_impl/kit/checks/pruning.py`, `pt_impl/kit/masks.py`.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from pt_impl.kit.checks.pruning import check_pruning, check_step, prunable
from pt_impl.kit.masks import copied, mask_whoever_reads, remove_masks


def apply_pruning(
    model: nn.Module,
    *,
    final_sparsity: float,
    begin_step: int,
    end_step: int,
    frequency: int = 100,
    min_weights: int = 0,
) -> tuple[nn.Module, Callable]:
    """Return a copy of `model` that can be pruned, and `update(step)`: each layer by itself.

    Make the optimizer for the copy, whose kernels are called `weight_orig`; `model` stays as it is.
    A masked model cannot be deep-copied, and masks reach `weight` in the forward pass: finalize it
    before it is copied, exported or saved.

    Args:
        model: masked are `nn.Linear` and convolutions of these types exactly. Dense stay
            depthwise convolutions, kernels that are embeddings, too, and those that a
            parametrization computes (weight norm, spectral norm).
        final_sparsity: share of zeros at `end_step`, at least 0 and below 1; 0 changes nothing. Of
            n weights of a layer, n times the share are masked, rounded.
        begin_step, end_step, frequency: new masks at steps `begin_step`, `begin_step + frequency`,
            ... `end_step`.
        min_weights: layers with fewer stay dense, most of all a first one: they weigh little.

    Returns:
        The copy, and `update(step)`, to be called before each train step with its number, counted
        from 1. It makes the masks, on the device, and raises ValueError for a step below 1.

    Raises:
        ValueError, before anything is changed: settings that cannot work, a model that is pruned
            already, and one without such layers.
        NotImplementedError: a kernel that two layers share, a model that Python cannot copy.

    Source: `torch.nn.utils.prune`; schedule: Zhu and Gupta, 2017, "To prune, or not to prune".
    """
    check_pruning(model, final_sparsity, begin_step, end_step, frequency, min_weights)
    model, layers = _masked(model, min_weights)
    groups = [[layer] for layer in layers]
    return model, _make_update(groups, final_sparsity, begin_step, end_step, frequency)


def apply_global_pruning(
    model: nn.Module,
    *,
    final_sparsity: float,
    begin_step: int,
    end_step: int,
    frequency: int = 100,
    min_weights: int = 0,
) -> tuple[nn.Module, Callable]:
    """Do what `apply_pruning` does, with one threshold for all layers together.

    Arguments, result and errors are the same; the share of zeros is that of all kernels, as in
    `torch.nn.utils.prune.global_unstructured`.
    """
    check_pruning(model, final_sparsity, begin_step, end_step, frequency, min_weights)
    model, layers = _masked(model, min_weights)
    return model, _make_update([layers], final_sparsity, begin_step, end_step, frequency)


def finalize_pruning(model: nn.Module) -> nn.Module:
    """Write the zeros into the weights, remove the masks and return `model`, changed.

    Names and types are those of the model that was pruned. Training on would fill the zeros again.
    Raises ValueError for a model without masks.
    """
    remove_masks(model, "apply_pruning")
    return model


def _masked(model: nn.Module, min_weights: int) -> tuple[nn.Module, list[nn.Module]]:
    """Return a copy with masks of ones, and its layers that have them."""
    model = copied(model)
    layers = list(prunable(model, min_weights).values())
    for layer in layers:
        prune.identity(layer, "weight")
    mask_whoever_reads(model, layers)
    return model, layers


def _make_update(
    groups: list[list], final: float, begin: int, end: int, frequency: int
) -> Callable:
    """Make `update(step)`; each group of layers has one threshold."""

    def update(step: int) -> None:
        check_step(step)
        if begin <= step <= end and (step - begin) % frequency == 0:
            sparsity = _sparsity(step, final, begin, end)
            for layers in groups:
                _mask_smallest(layers, sparsity)

    return update


def _sparsity(step: int, final: float, begin: int, end: int) -> Tensor:
    """The share of zeros at `step`: a float32 scalar, computed in the order in which tfmot does.

    In float64 some counts of weights would be rounded to another integer.
    """
    left = 1 - torch.tensor(float(step - begin)) / (end - begin)
    return final - final * left**3


@torch.no_grad()
def _mask_smallest(layers: list[nn.Module], sparsity: Tensor) -> None:
    """Mask all but the largest weights of `layers`; what is masked stays so."""
    magnitudes = [(layer.weight_orig * layer.weight_mask).abs() for layer in layers]
    every = torch.cat([magnitude.flatten() for magnitude in magnitudes])
    count = len(every)
    threshold = every.kthvalue(count - _kept(count, sparsity) + 1).values  # the smallest that stays
    for layer, magnitude in zip(layers, magnitudes, strict=True):
        layer.weight_mask.mul_(magnitude >= threshold)


def _kept(count: int, sparsity: Tensor) -> int:
    """How many of `count` weights stay: one or more, and no more than there are.

    float32 rounds counts above 2**24, up as well.
    """
    return min(max(int(torch.round(count * (1 - sparsity))), 1), count)


def main() -> None:
    """Print the digits CNN trained to its plateau, and from there on dense and pruned."""
    import itertools

    from pt_impl.kit import training
    from pt_impl.kit.demo import Demo

    demo = Demo("digits-cnn")
    recipe = demo.task.recipe
    trained, optimizer, loss_fn = demo.build()
    demo.fit(training.make_train_step(trained, optimizer, loss_fn), epochs=recipe.epochs)
    print("zeros  ms a step  accuracy")
    for sparsity in (0.0, 0.8, 0.95):
        settings = {"begin_step": 0, "end_step": 200, "frequency": 10, "min_weights": 1000}
        model, update = apply_pruning(trained, final_sparsity=sparsity, **settings)
        step = training.make_train_step(model, training.make_optimizer(model, recipe), loss_fn)
        numbers = itertools.count(1)
        ms = demo.fit(lambda x, y: update(next(numbers)) or step(x, y), epochs=recipe.epochs)  # noqa: B023
        print(f"{sparsity:5.0%}{ms:11.2f}{demo.score(finalize_pruning(model)):10.1f}")


if __name__ == "__main__":
    main()
