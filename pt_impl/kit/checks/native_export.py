"""What native export refuses."""

from importlib.util import find_spec

import torch
from torch import nn

PRECISIONS = ("float32", "bfloat16")


def check_native_export(precision: str) -> None:
    """Refuse a precision that no package has."""
    if precision not in PRECISIONS:
        raise ValueError(f"unknown precision {precision!r}: {' or '.join(PRECISIONS)}")


def check_evaluating(model: nn.Module) -> None:
    """Refuse a model in training mode, whose dropout would be compiled in."""
    if any(module.training for module in model.modules()):
        raise ValueError("the model is in training mode: call model.eval() first")


def check_tensorrt() -> None:
    """Refuse a machine without TensorRT."""
    if not torch.cuda.is_available():
        raise NotImplementedError("Torch-TensorRT needs an NVIDIA GPU; none was found")
    if find_spec("torch_tensorrt") is None:
        raise NotImplementedError("torch-tensorrt is not installed: pip install torch-tensorrt")
