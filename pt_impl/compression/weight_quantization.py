"""Weight quantization: the weights of dense layers in 8 or 4 bits, everything else in float.

What it changes: what a linear layer reads. Its weights become integers and scales, in float32 again
where they are multiplied; activations are as they were. int8 has a scale for each output, int4 one
for each 32 inputs of an output, since 16 levels are too few for a whole row.

Its twin: `tf_impl/compression/weight_quantization.py`.

Where the frameworks differ and why:
- torchao replaces the weight tensors of any `nn.Module`; Keras has `model.quantize`, which changes
  a model in place, so that a copy of its layers is needed: functional models alone.
- PyTorch has a kernel that multiplies 4-bit weights on a CPU (`_weight_int4pack_mm_for_cpu`), which
  over float32 activations is many times slower than float weights. TensorFlow has none for either
  width: the graph makes floats of the weights first. So does PyTorch for int8 weights.
- TorchInductor would make these floats once and keep them ("freezing"), so it does not freeze a
  file with int8 weights. TensorFlow keeps those of kernels of at most 100 KiB in float32.
- The int4 weights of torchao have a zero point, and are a prototype upstream.

When it helps and when it hurts: files and downloads shrink to a quarter or an eighth. Time is saved
where reading weights takes longest, with one sample and large layers, and by kernels that read
integers; with many samples the same products are made and the conversion comes on top. For speed
on a CPU, quantize activations too (`post_training_quantization.py`).

Run it alone: `python -m pt_impl.compression.weight_quantization` prints time and size at each
width.

Copy with it: `pt_impl/kit/checks/example_inputs.py`, `pt_impl/kit/comparing.py`,
`pt_impl/kit/saving.py`, `pt_impl/kit/tracing.py`.
"""

import copy
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch._inductor import config as inductor
from torch.utils._pytree import tree_map  # torch has no public one
from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig
from torchao.quantization import Int8WeightOnlyConfig, quantize_
from torchao.utils import unwrap_tensor_subclass

from pt_impl.kit import comparing, saving, tracing
from pt_impl.kit.checks import example_inputs

GROUP = 32  # inputs that share a scale in int4
# Relative L2: a file's outputs to the model's that was written, rounded weights to the model's.
SAME, MOST_APART = 1e-4, 0.5


def keep_float32(model: nn.Module, inputs, path) -> Path:
    """Write the model as it is for `load_quantized`; else as `quantize_int8`."""
    example_inputs.check_example_inputs(model, inputs)
    return _write(copy.deepcopy(model).cpu().eval(), inputs, path)


def apply_int8(model: nn.Module, inputs) -> nn.Module:
    """Return a copy of the model, in evaluation mode on the CPU, with weights in int8.

    Raises as `quantize_int8` does.
    """
    return _quantize(model, inputs, Int8WeightOnlyConfig(set_inductor_config=False))


def apply_int4(model: nn.Module, inputs) -> nn.Module:
    """Return a copy of the model, in evaluation mode on the CPU, with weights in int4.

    Raises as `quantize_int4` does.
    """
    config = PrototypeInt4WeightOnlyConfig(group_size=GROUP, set_inductor_config=False)
    return _quantize(model, inputs, config, groups=(GROUP, 16))


def quantize_int8(model: nn.Module, inputs, path) -> Path:
    """Write `path`: linear layers with int8 weights, symmetric, a scale for each output.

    Only layers that are called have their weights rounded: not the one within
    `nn.MultiheadAttention`, which reads it itself, and none whose weight a parametrization computes
    (weight norm). An embedding that is tied to a layer keeps its weight in float32. The model is
    left as it is.

    Args:
        inputs: one sample or more, for shapes, dtypes and a comparison of what was written: a
            tensor, a tuple of the model's positional arguments or a dict of those by name, tensors
            all; samples along the first axis.

    Returns the path.
    Raises, and writes nothing, ValueError for inputs that the model does not take;
    NotImplementedError for a model that torch.export cannot capture or that calls no linear layer;
    RuntimeError where outputs are more than a relative `MOST_APART` off the model's, or the file's
    are not those of the quantized model.
    Source: torchao's `Int8WeightOnlyConfig`.
    """
    return _write(apply_int8(model, inputs), inputs, path)


def quantize_int4(model: nn.Module, inputs, path) -> Path:
    """Write `path`: linear layers with 4-bit weights, a scale for each 32 inputs of an output.

    A layer stays in float32 where its inputs are no multiple of 32, or its outputs of 16: the
    kernel takes no other. NotImplementedError where that is all of them. Else as `quantize_int8`.
    Source: torchao's `PrototypeInt4WeightOnlyConfig`.
    """
    return _write(apply_int4(model, inputs), inputs, path)


def load_quantized(path) -> Callable:
    """Return `predict(x) -> output` over a file of this module, compiled, on the CPU.

    x: any number of samples, of the sizes of the example. The first call for a shape compiles.

    Raises FileNotFoundError, and ValueError for a file that is damaged or something else, and in a
    call for other sizes.
    """
    program, known = saving.load(path), set()
    compiled = torch.compile(program)
    # Frozen int8 weights would be made floats once, and kept so.
    freezing = all(tensor.dtype is not torch.int8 for tensor in program.buffers())

    def predict(x):
        shapes = tuple((part.shape, part.device) for part in tracing.input_tensors(x))
        with torch.inference_mode():
            if shapes in known:
                return tracing.outputs(compiled, x)
            tracing.check_sizes(program, x)
            with inductor.patch(freezing=freezing):  # is read while a shape is compiled
                output = tracing.outputs(compiled, x)
        known.add(shapes)
        return output

    return predict


def _quantize(model: nn.Module, inputs, config, groups: tuple[int, int] = (1, 1)) -> nn.Module:
    """A copy with the weights of `config`, of layers whose inputs and outputs `groups` divide."""
    example_inputs.check_example_inputs(model, inputs)
    whole = tracing.trace(model, inputs)  # whatever is wrong with it, before a copy is changed
    model, inputs = copy.deepcopy(model).cpu().eval(), tree_map(Tensor.cpu, inputs)
    called = _called(model, inputs)

    def fits(module: nn.Module, name: str = "") -> bool:
        return module in called and not any(
            size % group for size, group in zip(module.weight.shape[::-1], groups, strict=True)
        )

    if not called:
        raise NotImplementedError("the model has no linear layer that it calls")
    if any(layer.weight.dtype == torch.float64 for layer in called):
        raise NotImplementedError("torchao rounds no weights of float64: call .float() first")
    if not any(fits(layer) for layer in called):
        multiples = f"multiples of {groups[0]} inputs and {groups[1]} outputs"
        raise NotImplementedError(f"the model has no linear layer with {multiples}")
    quantize_(model, config, filter_fn=fits)
    with torch.no_grad():
        wanted = tracing.outputs(whole, inputs)
        try:
            apart = comparing.apart(tracing.outputs(model, inputs), wanted)
        except Exception as error:  # of a module that reads the weight of another one
            line = " ".join(str(error).split())[:300]
            raise NotImplementedError(f"torchao's weights do not compute in it: {line}") from error
    if not apart <= MOST_APART:
        raise RuntimeError(f"outputs of the quantized model are {apart:.2%} off the model's")
    return model


def _called(model: nn.Module, inputs) -> set[nn.Linear]:
    """Linear layers that are called: not that which `nn.MultiheadAttention` reads.

    Not those whose weight is computed before each pass, as a weight norm does.
    """
    called = set()
    hooks = [
        layer.register_forward_hook(lambda layer, *_: called.add(layer))
        for layer in model.modules()
        if isinstance(layer, nn.Linear) and "weight" in layer._parameters
    ]
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # it calls no layer; not for integers
    try:
        with torch.no_grad():
            tracing.outputs(model, inputs)
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        for hook in hooks:
            hook.remove()
    return called


def _write(model: nn.Module, inputs, path) -> Path:
    """Write what predicts the same, read again, as the model that is quantized."""
    inputs = tree_map(Tensor.cpu, inputs)
    with torch.no_grad():
        expected = tracing.outputs(model, inputs)
    model = copy.deepcopy(model)
    unwrap_tensor_subclass(model)  # a program holds plain tensors
    part = saving.save(tracing.trace(model, inputs), f"{path}.part")
    try:
        with torch.no_grad():
            apart = comparing.apart(tracing.outputs(saving.load(part), inputs), expected)
    except Exception:
        part.unlink()
        raise
    if not apart <= SAME:
        part.unlink()
        raise RuntimeError(f"outputs of the file are {apart:.2%} off the quantized model's")
    return part.replace(path)


def main() -> None:
    """Print time and size of a stack of large linear layers at each width, for one sample."""
    import time
    from statistics import median

    torch.manual_seed(0)
    stack = [nn.Linear(2048, 2048) for _ in range(4)]
    model, x = nn.Sequential(*stack), torch.randn(1, 2048)
    with tempfile.TemporaryDirectory() as folder:
        print("weights  ms for 1     MB")
        for title, write in (
            ("float32", keep_float32),
            ("int8", quantize_int8),
            ("int4", quantize_int4),
        ):
            path, times = write(model, x, Path(folder) / title), []
            predict = load_quantized(path)
            for _ in range(50):
                start = time.perf_counter()
                predict(x)
                times.append((time.perf_counter() - start) * 1e3)
            print(f"{title:8}{median(times):9.3f}{path.stat().st_size / 1e6:7.1f}")


if __name__ == "__main__":
    main()
