"""Semi-structured pruning: two zeros in each four weights, the pattern of sparse tensor cores.

What it changes: of each four weights of a dense or convolution kernel that read neighbouring inputs
the two of smaller magnitude are masked, once, and stay masked while the model trains on (Mishra et
al., 2021, "Accelerating Sparse Deep Neural Networks", section 4: train, prune once, train again
from these weights with the same recipe). Of a group that the inputs do not fill two weights stay:
a kernel of three inputs loses a third, one of two or fewer loses nothing.

Its twin: `tf_impl/compression/semi_structured_pruning.py`.

Where the frameworks differ and why:
- `torch.nn.utils.prune` masks weights and gradients. TensorFlow Model Optimization (tfmot) masks
  variables in the forward pass, of functional and Sequential models of tf_keras.
- A GPU multiplies the pattern at up to twice the speed: `compress_two_to_four` leaves the zeros out
  of linear layers, in half precision, on CUDA alone. TensorFlow has no kernels for it; its
  converters keep the zeros.

When it helps and when it hurts: half of the weights by a rule that hardware can use, which costs
less accuracy than channels do and more than free choice of the same number. On a CPU it buys
nothing: kernels stay dense tensors.

Run it alone: `python -m pt_impl.compression.semi_structured_pruning` prints the dense model against
the masked.
"""

import copy
from collections import Counter

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import prune


def apply_two_to_four(model: nn.Module) -> nn.Module:
    """Return a copy of `model` that trains and predicts with two of each four weights masked.

    Masked are `nn.Linear` and `nn.Conv2d` without groups, by their present weights, and of these
    types exactly: a subclass may read its weight without a forward pass. A kernel that is an
    embedding, too, stays dense, as embeddings do, and one that a parametrization computes. Make the
    optimizer for the copy; `model` stays as it is. Finalize the copy before it is copied, exported
    or saved.

    Raises ValueError for a model that is masked already and one without such layers;
    NotImplementedError for a kernel that two layers share and a model that Python cannot copy.
    Source: Mishra et al. (2021); `torch.nn.utils.prune`.
    """
    if prune.is_pruned(model):
        raise ValueError("the model has pruning masks already: finalize it first")
    _check_layers(model)
    model = _copy(model)
    layers = _prunable(model)
    for layer in layers:
        prune.custom_from_mask(layer, "weight", _two_of_four(layer.weight.detach()))
        _put_bias_last(layer)
    model.register_forward_pre_hook(_MaskUncalled(layers))
    return model


def finalize_two_to_four(model: nn.Module) -> nn.Module:
    """Write the zeros into the weights, remove the masks and return `model`, changed.

    Raises ValueError for a model without masks.
    """
    masked = [module for module in model.modules() if hasattr(module, "weight_mask")]
    if not masked:
        raise ValueError("the model has no masks: it comes from apply_two_to_four, and only once")
    for module in masked:
        prune.remove(module, "weight")
        _put_bias_last(module)
    for key, hook in list(model._forward_pre_hooks.items()):
        if isinstance(hook, _MaskUncalled):
            del model._forward_pre_hooks[key]
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
    if prune.is_pruned(model):
        raise ValueError("the model has pruning masks: finalize it first")
    layers = {name: layer for name, layer in model.named_modules() if _is_compressible(layer)}
    if not layers:
        raise ValueError("the model has no nn.Linear with the pattern and multiples of 64 and 32")
    for name, layer in layers.items():
        weight = layer.weight
        if not weight.is_cuda or torch.cuda.get_device_capability(weight.device) < (8, 0):
            raise NotImplementedError(
                f"{name} is on {weight.device}: only Nvidia GPUs from Ampere on multiply 2:4"
            )
        if weight.dtype not in (torch.float16, torch.bfloat16):
            raise NotImplementedError(f"{name} is {weight.dtype}: 2:4 takes float16 and bfloat16")
    model = _copy(model).eval()
    for name in layers:
        layer = model.get_submodule(name)
        packed = torch.sparse.to_sparse_semi_structured(layer.weight.detach())
        layer.weight = nn.Parameter(packed, requires_grad=False)
    return model


class _MaskUncalled:
    """Masks, before a pass, the weights of layers that a pass did not call; all in another mode.

    Some modules read the weight of a layer and do not call it, such as the attention of
    torchvision's Swin Transformer, or do so in evaluation alone: the layer's own hook does not run.
    """

    def __init__(self, layers: list[nn.Module]) -> None:
        self.layers, self.seen, self.mode = layers, [0] * len(layers), None

    def __call__(self, model: nn.Module, inputs) -> None:
        traced = torch.compiler.is_compiling()  # a compiler leaves out what nobody reads
        for index, layer in enumerate(self.layers):
            if self.seen[index] == id(layer.weight):  # a call makes another
                self.seen[index] = None
            if traced or self.mode != model.training or self.seen[index] is None:
                for hook in layer._forward_pre_hooks.values():
                    if isinstance(hook, prune.BasePruningMethod):
                        hook(layer, inputs)
            if not traced and self.seen[index] is not None:
                self.seen[index] = id(layer.weight)
        if not traced:
            self.mode = model.training


def _put_bias_last(module: nn.Module) -> None:
    """Undo that `prune` puts the weight there: saved optimizers know parameters by their order."""
    if "bias" in module._parameters:
        module._parameters["bias"] = module._parameters.pop("bias")


def _copy(model: nn.Module) -> nn.Module:
    try:
        return copy.deepcopy(model)
    except Exception as error:  # of `weight_norm` after a pass with gradients: a computed tensor
        line = " ".join(str(error).split())
        raise NotImplementedError(f"Python cannot copy the model: {line}") from error


def _is_compressible(module: nn.Module) -> bool:
    if type(module) is not nn.Linear or "weight" not in module._parameters:
        return False
    if module.in_features % 64 or module.out_features % 32:
        return False
    return bool(((module.weight.unflatten(1, (-1, 4)) != 0).sum(-1) <= 2).all())


def _prunable(model: nn.Module) -> list[nn.Module]:
    """Each layer once."""
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    return [
        module
        for module in model.modules()
        if (type(module) is nn.Linear or (type(module) is nn.Conv2d and module.groups == 1))
        and "weight" in module._parameters  # not computed before each pass, as `weight_norm` does
        and id(module.weight) not in embeddings
    ]


def _check_layers(model: nn.Module) -> None:
    """Refuse a model without layers, and a kernel whose other owner would use it unmasked."""
    layers = set(_prunable(model))
    if not layers:
        raise ValueError("the model has no nn.Linear or nn.Conv2d to prune")
    modules = dict(model.named_modules())
    owners = Counter(id(p) for m in modules.values() for p in m.parameters(recurse=False))
    for name, module in modules.items():
        if module in layers and owners[id(module.weight)] > 1:
            raise NotImplementedError(
                f"torch.nn.utils.prune masks one module's tensor, but {name}.weight has two owners"
            )


def _two_of_four(weight: Tensor) -> Tensor:
    """A mask that keeps the larger two of each four along the inputs; of equal ones the first."""
    magnitude = weight.abs().movedim(1, -1)
    groups = F.pad(magnitude, (0, -magnitude.shape[-1] % 4)).unflatten(-1, (-1, 4))
    order = groups.argsort(dim=-1, descending=True, stable=True)
    mask = torch.ones_like(groups).scatter(-1, order[..., 2:], 0.0).flatten(-2)
    return mask[..., : magnitude.shape[-1]].movedim(-1, 1).contiguous()


def main() -> None:
    """Print the digits CNN trained to its plateau, and from there on dense and masked."""
    import tempfile
    from pathlib import Path

    from pt_impl.kit import data, models, training
    from shared import datasets
    from shared.specs import TASKS
    from shared.weights import init_weights

    task = TASKS["digits-cnn"]
    recipe, size = task.recipe, task.recipe.accuracy_batch_size
    with tempfile.TemporaryDirectory() as folder:
        folder = datasets.materialise(task.dataset, Path(folder))
        train = data.to_device(*datasets.load(folder, "train"))
        test = data.to_device(*datasets.load(folder, "test"))
    weights = init_weights(task.model, seed=0)
    print("model        accuracy  zeros in all kernels")
    for name in ("trained", "dense", "two of four"):
        model = models.build(task.model, weights)
        if name == "two of four":
            model = apply_two_to_four(model)
        optimizer = training.make_optimizer(model, recipe)
        step = training.make_train_step(model, optimizer, training.cross_entropy)
        training.fit(step, *train, batch_size=size, epochs=recipe.epochs, seed=0)
        if name == "two of four":
            model = finalize_two_to_four(model)
        predict = training.make_predict(model)
        accuracy = training.evaluate(predict, *test, metric="accuracy", batch_size=size)
        kernels = [v for k, v in models.export_weights(model).items() if k.endswith("kernel")]
        zeros = sum((k == 0).sum() for k in kernels) / sum(k.size for k in kernels)
        print(f"{name:12}{accuracy:9.1f}{zeros:22.3f}")
        if name == "trained":
            weights = models.export_weights(model)


if __name__ == "__main__":
    main()
