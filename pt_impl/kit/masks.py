"""Masks of `torch.nn.utils.prune` on any module: which layers can have one, and when it applies.

Where the frameworks differ: Keras has no masks, and TensorFlow Model Optimization wraps
whole layers.
"""

import copy
from collections import Counter
from collections.abc import Iterable

import torch
from torch import nn
from torch.nn.utils import prune


def maskable(model: nn.Module, kinds: Iterable[type]) -> dict[str, nn.Module]:
    """Return the layers of these types whose weight may be masked: name -> layer, each once.

    Of these types exactly: a subclass may read its weight without a forward pass, as that of
    `nn.MultiheadAttention` does. A head whose kernel is an embedding is none of them, since what is
    looked up would lose its smallest entries, nor is a weight that is computed before each pass.
    """
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    return {
        name: module
        for name, module in model.named_modules()
        if type(module) in kinds
        and "weight" in module._parameters
        and id(module.weight) not in embeddings
    }


def refuse_shared(model: nn.Module, layers: dict[str, nn.Module]) -> None:
    """Raise NotImplementedError for a weight whose other owner would use it unmasked."""
    owners = Counter(id(p) for m in model.modules() for p in m.parameters(recurse=False))
    for name, layer in layers.items():
        if owners[id(layer.weight)] > 1:
            raise NotImplementedError(
                f"torch.nn.utils.prune masks one module's tensor, but {name}.weight has two owners"
            )


def copied(model: nn.Module) -> nn.Module:
    """Return a copy; NotImplementedError where Python cannot make one."""
    try:
        with torch.no_grad():  # TorchScript copies parameters by an operator: they were no leaves
            twin = copy.deepcopy(model)
    except Exception as error:  # of `weight_norm` after a pass with gradients: a computed tensor
        line = " ".join(str(error).split())
        raise NotImplementedError(f"Python cannot copy the model: {line}") from error
    for ours, theirs in zip(twin.parameters(), model.parameters(), strict=True):
        ours.requires_grad_(theirs.requires_grad)
    return twin


def mask_whoever_reads(model: nn.Module, layers: Iterable[nn.Module]) -> None:
    """Let the masks of layers hold for other modules that read their weights, too.

    Parameters keep their order: saved optimizers know them by it.
    """
    for layer in layers:
        _put_bias_last(layer)
    model.register_forward_pre_hook(_MaskUncalled(list(layers)))


def remove_masks(model: nn.Module, maker: str) -> None:
    """Write the zeros into the weights and take the masks away; ValueError where there are none.

    maker: the function that the model should come from.
    """
    masked = [module for module in model.modules() if hasattr(module, "weight_mask")]
    if not masked:
        raise ValueError(f"the model has no masks: it comes from {maker}, and only once")
    for module in masked:
        prune.remove(module, "weight")
        _put_bias_last(module)
    for key, hook in list(model._forward_pre_hooks.items()):
        if isinstance(hook, _MaskUncalled):
            del model._forward_pre_hooks[key]


def _put_bias_last(module: nn.Module) -> None:
    """Undo that `prune` puts the weight there."""
    if "bias" in module._parameters:
        module._parameters["bias"] = module._parameters.pop("bias")


class _MaskUncalled:
    """Masks, before a pass, the weights of layers that a pass did not call; all in another mode.

    Some modules read the weight of a layer and do not call it, such as the attention of
    torchvision's Swin Transformer, or do so only in evaluation: the layer's own hook does not run.
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
