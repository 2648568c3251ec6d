"""Weight quantization: weights of linear layers in 8 or 4 bits, everything else in float.

    model = apply_int8(model, example_inputs)  # a copy, on the CPU
    predict = torch.compile(model)

What it changes: the weights of dense layers become integers and scales, and float32 again when they
are multiplied. Activations do not change. int8 has one scale per output. int4 has one per 32 inputs
of an output, since 16 levels are too few for a whole row.

Its twin: `tf_impl/compression/weight_quantization.py`.

Where the frameworks differ and why:
- PyTorch: torchao replaces the weight tensors of any `nn.Module`.
- TensorFlow: Keras's `model.quantize` changes a model in place. So it gets a copy, and the model
  has to be one that Keras can rebuild.
- PyTorch has a kernel for 4-bit weights on a CPU. With float32 activations it is many times slower
  than float weights.
- TensorFlow has no such kernel: the graph first converts the weights to floats, once for kernels of
  at most 100 KiB in float32, otherwise in every call.

When it helps and when it hurts: files and downloads shrink to a quarter or an eighth. It saves time
if reading weights takes longest: one sample and large layers. With many samples the conversion only
adds time. For speed on a CPU, quantize activations, too (`post_training_quantization.py`).
- torchao calls its int4 weights a prototype.

Run it alone: `python -m pt_impl.compression.weight_quantization` prints time and size at each
width.

Copy with it: `pt_impl/kit/checks/example_inputs.py`, `pt_impl/kit/checks/weight_quantization.py`.
"""

import copy

from torch import nn
from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig
from torchao.quantization import Int8WeightOnlyConfig, quantize_

from pt_impl.kit.checks.weight_quantization import check_rounded, check_weight_quantization

GROUP = 32  # inputs that share a scale in int4


def apply_int8(model: nn.Module, inputs) -> nn.Module:
    """Return a copy of the model, in evaluation mode on the CPU, with int8 weights.

    They are symmetric, with a scale for each output. Only linear layers that are called have theirs
    rounded: not the one within `nn.MultiheadAttention`, which reads it itself, and none whose
    weight a parametrization computes (weight norm). An embedding that is tied to a layer keeps its
    weight in float32. TorchInductor would make floats of int8 weights once and keep them
    ("freezing"): compile without it. The model is left as it is.

    Args:
        inputs: one sample or more, on which the copy is compared with the model: a tensor, a tuple
            of the model's positional arguments or a dict of those by name, tensors all; samples
            along the first axis.

    Raises ValueError for inputs that the model does not take; NotImplementedError for a model that
    calls no linear layer; RuntimeError where outputs are more than a relative 0.5 off the model's.
    Source: torchao's `Int8WeightOnlyConfig`.
    """
    names = check_weight_quantization(model, inputs)
    # Its settings of TorchInductor are for GPUs, and of the whole process.
    return _rounded(model, inputs, names, Int8WeightOnlyConfig(set_inductor_config=False))


def apply_int4(model: nn.Module, inputs) -> nn.Module:
    """Return a copy with 4-bit weights, a scale and a zero point for each 32 inputs of an output.

    A layer stays in float32 where its inputs are no multiple of 32, or its outputs of 16: the
    kernel takes no other. NotImplementedError where that is all of them. Else as `apply_int8`.
    Source: torchao's `PrototypeInt4WeightOnlyConfig`.
    """
    names = check_weight_quantization(model, inputs, inputs_by=GROUP, outputs_by=16)
    config = PrototypeInt4WeightOnlyConfig(group_size=GROUP, set_inductor_config=False)
    return _rounded(model, inputs, names, config)


def _rounded(model: nn.Module, inputs, names: set[str], config) -> nn.Module:
    rounded = copy.deepcopy(model).cpu().eval()
    quantize_(rounded, config, filter_fn=lambda module, name: name in names)
    check_rounded(rounded, model, inputs)
    return rounded


def main() -> None:
    """Print time and size of a stack of large linear layers at each width, for one sample."""
    import tempfile
    from pathlib import Path
    from timeit import repeat

    import torch

    from pt_impl.kit.quantized_files import load_quantized, save_quantized

    model = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(4)))
    x = torch.randn(1, 2048)
    rounded = {"float32": model, "int8": apply_int8(model, x), "int4": apply_int4(model, x)}
    print("weights  ms for 1     MB")
    with tempfile.TemporaryDirectory() as folder:
        for title, each in rounded.items():
            path = save_quantized(each, x, Path(folder, title))
            predict = load_quantized(path)
            best = min(repeat(lambda: predict(x), number=1, repeat=50))  # noqa: B023
            print(f"{title:8}{1e3 * best:9.3f}{path.stat().st_size / 1e6:7.1f}")


if __name__ == "__main__":
    main()
