"""PyTorch's models and words for the tests of stacked compression."""

import torch

from pt_impl.compression import distillation, pruning, quantization_aware_training  # noqa: F401
from pt_impl.kit import file_zeros, int8_files  # noqa: F401
from tests.compression import quick

quick.capture_patterns_once()


class Heads(torch.nn.Module):
    """Two heads with such kernels."""

    def __init__(self, kernels):
        super().__init__()
        self.used, self.unused = torch.nn.Linear(6, 3), torch.nn.Linear(6, 3)
        for head, kernel in zip(self.children(), kernels, strict=True):
            head.weight.data.copy_(torch.from_numpy(kernel.T.copy()))
            torch.nn.init.zeros_(head.bias)

    def forward(self, x):
        return {"used": self.used(x), "unused": self.unused(x)}


def kernels(model):
    return [head.weight.detach().numpy().T.copy() for head in model.children()]
