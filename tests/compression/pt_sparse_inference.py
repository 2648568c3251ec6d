"""PyTorch's models and words for the tests of sparse inference."""

import torch
from torch import nn
from torch.nn.utils import prune

from pt_impl.compression import sparse_inference
from tests.compression.pt_distillation import numpy


def predicted(model, x):
    """What a dense model predicts, and what it does over sparse kernels; the names of these."""
    predict = sparse_inference.make_predict(model)
    with torch.no_grad():
        dense = model.eval()(*x if isinstance(x, tuple) else (x,))
    return numpy(dense), numpy(predict(x)), list(predict.layers)


def linear(kernel, bias):
    layer = nn.Linear(*kernel.shape, bias=bias is not None)
    layer.weight.data.copy_(torch.from_numpy(kernel.T.copy()))
    if bias is not None:
        layer.bias.data.copy_(torch.from_numpy(bias))
    return layer


class Two(nn.Module):
    """Two inputs, and a layer within another."""

    def __init__(self, kernel, bias, head):
        super().__init__()
        self.inside = nn.ModuleDict({"wide": linear(kernel, bias)})
        self.drop, self.head = nn.Dropout(0.5), linear(head, None)

    def forward(self, a, b):
        return self.head(self.drop(torch.relu(self.inside["wide"](torch.stack([a, b], 1)))))


two_inputs = Two
WIDE = "inside.wide"


def tensor(array):
    return torch.from_numpy(array)


def half():
    model = nn.Linear(4, 4, dtype=torch.bfloat16)
    nn.init.zeros_(model.weight)
    return model


def masked():
    model = nn.Sequential(nn.Linear(5, 8))
    prune.l1_unstructured(model[0], "weight", 0.9)
    return model


def masked_after_a_prediction():
    """Which leaves a masked weight that is a tensor like others."""
    model = masked()
    with torch.no_grad():
        model(torch.ones(2, 5))
    return model


def no_copy():
    """A weight is computed, and a pass had gradients."""
    model = nn.Sequential(nn.utils.weight_norm(nn.Linear(4, 4)), nn.Linear(4, 4))
    nn.init.zeros_(model[1].weight)
    model(torch.ones(2, 4))
    return model


def what_ran_of_three_places():
    """The types of layers that ran where one stands at three places, one of them deeper."""
    layer, ran = nn.Linear(8, 8), []
    nn.init.zeros_(layer.weight)
    predict = sparse_inference.make_predict(nn.Sequential(layer, layer, nn.Sequential(layer)))
    hook = nn.modules.module.register_module_forward_pre_hook(
        lambda module, inputs: ran.append(type(module).__name__)
    )
    predict(torch.ones(2, 8))
    hook.remove()
    return ran, list(predict.layers)


class Asking(nn.Module):
    """It asks its layer for width, dtype and device, as T5 does."""

    def __init__(self, kernel):
        super().__init__()
        self.wide = linear(kernel, None)

    def forward(self, x):
        x = x.double().to(self.wide.weight.device, self.wide.weight.dtype)
        return self.wide(x) / self.wide.in_features + self.wide.out_features


def hooked(kernel):
    """A layer with hooks, and one whose weight a hook makes in each call."""
    model = nn.Sequential(linear(kernel, None), nn.utils.weight_norm(nn.Linear(8, 8)))
    model[0].register_forward_hook(lambda layer, inputs, output: 10 * output)
    model[0].register_forward_pre_hook(
        lambda layer, args, named: ((2 * args[0],), named), with_kwargs=True
    )
    with torch.no_grad():
        model[1].weight_v[:, :7] = 0.0
        model(torch.ones(1, 5))  # now it can be copied
    return model


class Padded(nn.Module):
    """What stands where the padding is means nothing, and depends on the path."""

    def __init__(self, encoder):
        super().__init__()
        self.encoder = encoder

    def forward(self, x, padding):
        return self.encoder(x, src_key_padding_mask=padding).masked_fill(padding[..., None], 0.0)


def encoder():
    """PyTorch's own, which may compute without a call of its linear layers."""
    torch.manual_seed(0)
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2).eval()
    for module in model.modules():
        if type(module) is nn.Linear:
            module.weight.data.mul_(torch.rand_like(module.weight) > 0.8).mul_(5.0)
    return model, torch.randn(3, 5, 8)


def padded():
    model, x = encoder()
    return Padded(model).eval(), (x, torch.arange(5) >= torch.tensor([[5], [3], [4]]))
