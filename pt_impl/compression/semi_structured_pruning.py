"""Semi-structured pruning: two zeros in every four weights, the pattern of sparse tensor cores.

    model = apply_two_to_four(model)  # a trained one; train it again, with an optimizer for it
    model = finalize_two_to_four(model)
    model = compress_two_to_four(model.half().cuda())  # to predict on an Nvidia GPU

What it changes: four weights of neighbouring inputs form a group. The two smaller ones become zero,
and stay zero while the model trains on (Mishra et al., 2021, section 4: train, prune once, train
again with the same recipe). In a group of fewer weights two stay: a kernel with three inputs loses
a third, one with two inputs nothing.

Its twin: `tf_impl/compression/semi_structured_pruning.py`.

Where the frameworks differ and why:
- PyTorch (`torch.nn.utils.prune`) masks weights and gradients. Keras 3 has no pruning. Here the
  layers read masked kernels, and gradients are masked.
- tf_keras: TensorFlow Model Optimization (tfmot) masks variables in the forward pass. Steps change
  masked weights, and the next pass sets them to zero again.
- Only PyTorch has GPU kernels for the pattern: `compress_two_to_four` skips the zeros of linear
  layers, for up to twice the speed. TensorFlow's converters keep the zeros.

When it helps and when it hurts: it helps on hardware that can use the pattern. It costs less
accuracy than removing channels, and more than the same number of freely chosen zeros. On a CPU it
gains nothing: kernels stay dense tensors.

Run it alone: `python -m pt_impl.compression.semi_structured_pruning` compares the dense with the
masked model.

Copy with it: `pt_impl/kit/checks/semi_structured_pruning.py`, `pt_impl/kit/masks.py`.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import prune

from pt_impl.kit.checks.semi_structured_pruning import (
    check_compressible,
    check_semi_structured_pruning,
    prunable,
)
from pt_impl.kit.masks import copied, mask_whoever_reads, remove_masks


def apply_two_to_four(model: nn.Module) -> nn.Module:
    """Return a copy of `model` that trains and predicts with two of each four weights masked.

    Masked are `nn.Linear` and `nn.Conv2d` without groups, by their present weights, and of these
    types exactly: a subclass may read its weight without a forward pass. A kernel that is an
    embedding, too, stays dense, and one that a parametrization computes. Make the optimizer for the
    copy; `model` stays as it is. Finalize the copy before it is copied, exported or saved.

    Raises ValueError for a model that is masked already and one without such layers;
    NotImplementedError for a kernel that two layers share and a model that Python cannot copy.
    Source: Mishra et al., 2021, "Accelerating Sparse Deep Neural Networks"; `torch.nn.utils.prune`.
    """
    check_semi_structured_pruning(model)
    model = copied(model)
    layers = prunable(model).values()
    for layer in layers:
        prune.custom_from_mask(layer, "weight", _two_of_four(layer.weight.detach()))
    mask_whoever_reads(model, layers)
    return model


def finalize_two_to_four(model: nn.Module) -> nn.Module:
    """Write the zeros into the weights, remove the masks and return `model`, changed.

    Raises ValueError for a model without masks.
    """
    remove_masks(model, "apply_two_to_four")
    return model


def compress_two_to_four(model: nn.Module) -> nn.Module:
    """Return a copy of a finalized model that leaves the zeros of linear layers out, to predict.

    For an Nvidia GPU from Ampere on and a model in float16 or bfloat16. Compressed are `nn.Linear`
    of this type exactly with two zeros in each four weights, of multiples of 64 inputs and 32
    outputs, which the kernels take; the rest stays dense. Compile the copy.

    Raises ValueError for a model with masks and one without such a layer; NotImplementedError for
    another device or dtype.
    Source: `torch.sparse.to_sparse_semi_structured` (a prototype in PyTorch).
    """
    names = check_compressible(model)
    model = copied(model).eval()
    for layer in map(model.get_submodule, names):
        packed = torch.sparse.to_sparse_semi_structured(layer.weight.detach())
        layer.weight = nn.Parameter(packed, requires_grad=False)
    return model


def _two_of_four(weight: Tensor) -> Tensor:
    """A mask that keeps the larger two of each four along the inputs; of equal ones the first."""
    magnitude = weight.abs().movedim(1, -1)
    groups = F.pad(magnitude, (0, -magnitude.shape[-1] % 4)).unflatten(-1, (-1, 4))
    order = groups.argsort(dim=-1, descending=True, stable=True)
    mask = torch.ones_like(groups).scatter(-1, order[..., 2:], 0.0).flatten(-2)
    return mask[..., : magnitude.shape[-1]].movedim(-1, 1).contiguous()


def main() -> None:
    """Print the digits CNN trained to its plateau, and from there on dense and masked."""
    from pt_impl.kit import training
    from pt_impl.kit.demo import Demo

    demo = Demo("digits-cnn")
    recipe = demo.task.recipe
    model, optimizer, loss_fn = demo.build()
    demo.fit(training.make_train_step(model, optimizer, loss_fn), epochs=recipe.epochs)
    print(f"trained     {demo.score(model):6.1f}")
    masked = apply_two_to_four(model)
    for name, own in (("dense", model), ("two of four", masked)):
        step = training.make_train_step(own, training.make_optimizer(own, recipe), loss_fn)
        demo.fit(step, epochs=recipe.epochs)
        print(f"{name:12}{demo.score(own):6.1f}")
    finalize_two_to_four(masked)


if __name__ == "__main__":
    main()
