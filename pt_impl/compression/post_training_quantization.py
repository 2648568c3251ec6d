"""Post-training quantization: a trained model in 8-bit integers, for a CPU, without training.

What it changes: the numbers that a trained model computes with. A float tensor becomes integers and
a scale, q = round(x / scale) + zero point (Jacob et al., 2018, "Quantization and Training of Neural
Networks for Efficient Integer-Arithmetic-Only Inference", section 2).

- static: weights and activations; the ranges of activations come from calibration data
- dynamic: weights; each activation is quantized when it is there, by its own range

The `apply_` functions return the quantized model, the others write it to a file, which
`load_quantized` or, for ONNX, `load_onnxruntime` reads; neither executes code from it.
`keep_float32` and `keep_onnxruntime_float32` write the model as it is for the same runtimes: what
the others are to be compared with.

Its twin: `tf_impl/compression/post_training_quantization.py`.

Where the frameworks differ and why:
- The runtime here is TorchInductor, which compiles on the first call for a shape; there it is
  LiteRT, which interprets a converted file. Both frameworks can go to ONNX Runtime.
- Inductor joins integer operators only around constants that it may fold ("freezing"). Without
  that, the same model is no faster than in float32.
- `torch.export.load` runs the pickles that a file may hold, so the file here is the graph as names
  of operators, and its tensors (`pt_impl/kit/saving.py`). A LiteRT file is data by nature.
- Activations are unsigned here and signed there; weights have a scale for each output on both.
- On an x86 CPU without VNNI oneDNN adds products in 16 bits, which overflow. There activations get
  7 bits here, as torchao asks; a file made on a CPU with VNNI is not for one without.
- Dynamic quantization leaves convolutions in float32 here; LiteRT has kernels for them.

When it helps and when it hurts: on a CPU with units for int8 (VNNI, AMX), static int8 is two to
four times as fast where convolutions and matrix products dominate; without them it can be slower.
Files shrink to a quarter. It hurts where few values are far larger than the rest, and where
calibration data is not like what comes later: compare accuracy before it is deployed.

Run it alone: `python -m pt_impl.compression.post_training_quantization` prints time, size and
agreement.

Copy with it: `pt_impl/kit/checks/example_inputs.py`, `pt_impl/kit/checks/float_layers.py`,
`pt_impl/kit/comparing.py`, `pt_impl/kit/saving.py`, `pt_impl/kit/tracing.py`,
`shared/onnx_quantization.py`.
"""

import copy
import operator
import platform
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from torch import fx, nn
from torch._inductor import config as inductor
from torch.utils._pytree import tree_map
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86

from pt_impl.kit import comparing, saving, tracing
from pt_impl.kit.checks import float_layers
from pt_impl.kit.checks.example_inputs import check_example_inputs

OPSET = 18  # of ONNX: the newest that tf2onnx writes, too
_ATEN, _CALLS = torch.ops.aten, nn.functional
SAME, MOST_APART = 1e-4, 0.5  # relative L2 of a file's outputs: in float32, in integers
_ROUNDED = (
    torch.ops.quantized_decomposed.dequantize_per_channel.default,
    torch.ops.quantized_decomposed.dequantize_per_tensor.default,
)
# An operator of a graph -> what torchao's quantizer looks for, whichever way a model calls it.
_SOURCES = {
    _ATEN.conv2d.default: _CALLS.conv2d,
    _ATEN.linear.default: _CALLS.linear,
    _ATEN.relu.default: _CALLS.relu,
    _ATEN.relu_.default: _CALLS.relu,
    _ATEN.add.Tensor: operator.add,
    _ATEN.add_.Tensor: operator.add,
}


def keep_float32(model: nn.Module, calibration, path) -> Path:
    """Write the model as it is, in float32, for `load_quantized`; else as `quantize_static_int8`.

    One sample of calibration data is enough: only its shape and dtype are read.
    """
    check_example_inputs(model, calibration)
    graph = tracing.trace(model, calibration)
    return _write(graph, graph, calibration, path, SAME)


def apply_static_int8(model: nn.Module, calibration, *, activation_bits: int = 8) -> nn.Module:
    """Return a copy of the model over int8 weights and uint8 activations, a graph of operators.

    It predicts what the file of `quantize_static_int8` does, which raises the same: fast once it is
    compiled as `load_quantized` does. A call raises ValueError for other sizes of a sample.
    """
    _, quantized = _quantize(model, calibration, activation_bits=activation_bits, dynamic=False)
    return quantized


def apply_dynamic_int8(model: nn.Module, calibration) -> nn.Module:
    """Return a copy of the model with the weights of `quantize_dynamic_int8`, a graph."""
    _, quantized = _quantize(model, calibration, activation_bits=8, dynamic=True)
    return quantized


def quantize_static_int8(model: nn.Module, calibration, path, *, activation_bits: int = 8) -> Path:
    """Write `path`: convolutions and linear layers over int8 weights and uint8 activations.

    Rounded are Conv2d, Linear and, before a ReLU, Conv1d; a warning names the convolutions and
    linear layers that stay in float32. The model is left as it is. Of an output with `.logits` the
    file predicts these. It is for the CPU; before it is there, it is read again and compared with
    the model.

    Args:
        model: takes any number of samples; returns tensors, also in tuples, lists and dicts. What
            is written takes any number of samples, of the sizes of the calibration data.
        calibration: a tensor, a tuple of the model's positional arguments or a dict of those by
            name, tensors all; samples along the first axis, such as a few hundred of the training
            split.
        activation_bits: 8; oneDNN has no integer kernels for 16.

    Returns the path.
    Raises, and writes nothing, ValueError for calibration data that is empty, not finite, or that
    the model does not take; NotImplementedError for a model that torch.export cannot capture or
    that has no layer to quantize, and for 16 bits; RuntimeError where outputs are more than a
    relative `MOST_APART` off the model's.
    Source: torchao's `X86InductorQuantizer`.
    """
    graph, quantized = _quantize(model, calibration, activation_bits=activation_bits, dynamic=False)
    return _write(quantized, graph, calibration, path, MOST_APART)


def quantize_dynamic_int8(model: nn.Module, calibration, path) -> Path:
    """Write `path`: linear layers over int8 weights; activations get their scale at each call.

    A call has one scale for all of its samples, so a prediction depends on what comes with it.
    Convolutions stay in float32: upstream has no dynamic ones. Else as `quantize_static_int8`; one
    sample of calibration data is enough: only its shape and dtype are read.
    """
    graph, quantized = _quantize(model, calibration, activation_bits=8, dynamic=True)
    return _write(quantized, graph, calibration, path, MOST_APART)


def keep_onnxruntime_float32(model: nn.Module, calibration, path) -> Path:
    """Write the model as it is to an ONNX file for `load_onnxruntime`; else as `keep_float32`."""
    check_example_inputs(model, calibration)
    graph = tracing.trace(model, calibration)
    two = next(_batches(calibration, size=2))
    if len(tracing.input_tensors(two)[0]) < 2:  # one would fix their number
        two = tree_map(lambda part: part[[0, 0]], two)
    keywords = two if isinstance(two, dict) else {}
    arguments = () if keywords else tracing.input_tensors(two)
    varies = tree_map(lambda _: {0: torch.export.Dim.DYNAMIC}, keywords or arguments)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a graph has no mode: it was traced for evaluation
            program = torch.onnx.export(
                graph,
                arguments,
                kwargs=keywords or None,
                opset_version=OPSET,
                dynamic_shapes=varies,
                dynamo=True,
                verbose=False,
            )
    except Exception as error:
        raise NotImplementedError(f"torch.onnx cannot export it: {_line(error)}") from error
    part = Path(f"{path}.part")
    program.save(part)
    return _keep(part, path, load_onnxruntime, graph, calibration, SAME)


def quantize_onnxruntime_int8(model: nn.Module, calibration, path) -> Path:
    """Write an ONNX file for `load_onnxruntime`: static int8, quantized by ONNX Runtime's own tool.

    Else as `quantize_static_int8`. Source: `onnxruntime.quantization.quantize_static` (QDQ).
    """
    from shared import onnx_quantization

    with tempfile.TemporaryDirectory() as folder:
        whole = keep_onnxruntime_float32(model, calibration, Path(folder) / "whole.onnx")
        batches = (_arrays(batch) for batch in _batches(calibration))
        part = Path(f"{path}.part")
        onnx_quantization.quantize(whole, part, batches)
    check_example_inputs(model, calibration)
    graph = tracing.trace(model, calibration)
    return _keep(part, path, load_onnxruntime, graph, calibration, MOST_APART)


def load_quantized(path, *, threads: int = 0) -> Callable:
    """Return `predict(x) -> output` over a file of this module, compiled, on the CPU.

    x: any number of samples, of the sizes of the example. The first call for a shape compiles;
    there can be eight. `predict.threads` is their number.

    Args:
        threads: 0 leaves PyTorch's number; another one is set for the whole process, which has one
            pool.

    Raises FileNotFoundError, and ValueError for a file that is damaged or something else, and in a
    call for other sizes.
    """
    if threads:
        torch.set_num_threads(threads)
    program = saving.load(path)
    # Upstream's integer convolutions are compiled wrongly for a size that varies.
    compiled = torch.compile(program, dynamic=False, fullgraph=True)
    known = set()

    def predict(x):
        shapes = tuple((part.shape, part.device) for part in tracing.input_tensors(x))
        with torch.inference_mode():
            if shapes in known:
                return tracing.outputs(compiled, x)
            tracing.check_sizes(program, x)
            with inductor.patch(freezing=True):  # is read while a shape is compiled
                output = tracing.outputs(compiled, x)
        known.add(shapes)
        return output

    predict.threads = torch.get_num_threads()
    return predict


def load_onnxruntime(path, *, threads: int = 0) -> Callable:
    """Return `predict(x) -> output` over an ONNX file in ONNX Runtime, on the CPU.

    Else as `load_quantized`, but the threads are the session's own; 0: as many as PyTorch has.
    """
    from shared import onnx_quantization

    session = onnx_quantization.open_session(path, threads=threads or torch.get_num_threads())
    names = [given.name for given in session.get_inputs()]

    def predict(x):
        if isinstance(x, dict):  # in the file's order
            if x.keys() != set(names):
                raise ValueError(f"the file takes {', '.join(names)}, not {', '.join(x)}")
            x = tuple(x[name] for name in names)
        outputs = [torch.from_numpy(y) for y in onnx_quantization.run(session, _arrays(x))]
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    predict.threads = session.get_session_options().intra_op_num_threads
    return predict


def _arrays(x) -> tuple[np.ndarray, ...]:
    return tuple(part.numpy() for part in tracing.input_tensors(x))


def _batches(x, size: int = 32) -> Iterator:
    """Parts of the samples, on the CPU, in the structure of `x`."""
    for start in range(0, len(tracing.input_tensors(x)[0]), size):
        yield tree_map(lambda part: part[start : start + size].cpu(), x)  # noqa: B023


def _keep(part: Path, path, load: Callable, graph: fx.GraphModule, x, most: float) -> Path:
    """Give the file `part` its name if it predicts for `x` what the graph does, nearly."""
    batch = next(_batches(x))
    try:
        with torch.no_grad():
            apart = comparing.apart(load(part)(batch), tracing.outputs(graph, batch))
    except Exception as error:
        part.unlink()
        raise NotImplementedError(f"the runtime cannot run the file: {_line(error)}") from error
    if not apart <= most:
        part.unlink()
        raise RuntimeError(
            f"outputs of the file are {apart:.2%} off the model's, which move by "
            f"{_moved(graph, batch):.2%} where its inputs alone have 8 bits"
        )
    return part.replace(path)


def _moved(graph: fx.GraphModule, x) -> float:
    """How far 8 bits for the inputs move what the model gives: some models amplify all rounding."""
    rounded = tree_map(_to_8_bits, x)
    with torch.no_grad():
        return comparing.apart(tracing.outputs(graph, rounded), tracing.outputs(graph, x))


def _to_8_bits(x: torch.Tensor) -> torch.Tensor:
    if not x.is_floating_point():
        return x
    scale = (x.max().clamp(min=0) - x.min().clamp(max=0)).clamp(min=1e-12) / 255
    return (x / scale).round() * scale


@torch.random.fork_rng(devices=[])  # torchao draws numbers
def _quantize(
    model: nn.Module, calibration, *, activation_bits: int, dynamic: bool
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """The model as a graph of operators, and that graph over integers."""
    if activation_bits == 16:
        raise NotImplementedError("oneDNN's integer kernels take activations of 8 bits, not of 16")
    if activation_bits != 8:
        raise ValueError(f"activation_bits must be 8 or 16, not {activation_bits!r}")
    check_example_inputs(model, calibration)
    graph = tracing.trace(model, calibration)
    _name_sources(graph)
    quantizer = x86.X86InductorQuantizer()
    config = x86.get_default_x86_inductor_quantization_config(
        is_dynamic=dynamic, reduce_range=_saturates()
    )
    if dynamic:  # as a global one it would round the activations of convolutions, for no kernel
        quantizer.set_function_type_qconfig(_CALLS.linear, config)
    else:
        quantizer.set_global(config)
    try:
        observed = prepare_pt2e(copy.deepcopy(graph), quantizer)
        with torch.no_grad():
            for batch in _batches(calibration):
                tracing.outputs(observed, batch)
        quantized = convert_pt2e(observed).requires_grad_(False)  # it is for predictions
    except Exception as error:
        raise NotImplementedError(f"torchao cannot quantize it: {_line(error)}") from error
    if not any(node.target in _ROUNDED for node in quantized.graph.nodes):
        raise NotImplementedError("the model has no layer that torchao quantizes")
    if not dynamic:
        float_layers.warn_of_float_layers(quantized)
    return graph, tracing.Program(quantized, quantized.graph)


def _saturates() -> bool:
    """Whether integer kernels overflow: x86 without VNNI adds pairs of products in 16 bits."""
    x86_64 = platform.machine().lower() in ("x86_64", "amd64")
    return x86_64 and not torch.cpu._is_vnni_supported()


def _name_sources(graph: fx.GraphModule) -> None:
    """Tell torchao's quantizer which function each operator is, whichever way a model calls it.

    Raises NotImplementedError where two operators read one weight.
    """
    weights = set()
    for node in graph.graph.nodes:
        layer = node.target in (_ATEN.conv2d.default, _ATEN.linear.default)
        if layer and node.args[1].op == "get_attr":
            weight = node.args[1].target
            if weight in weights:
                raise NotImplementedError(f"a layer is called twice, the one of {weight}")
            weights.add(weight)
        if node.target in _SOURCES:
            node.meta["source_fn_stack"] = [(node.name, _SOURCES[node.target])]


def _write(program: fx.GraphModule, graph: fx.GraphModule, x, path, most: float) -> Path:
    def load(part):
        read = saving.load(part)
        return lambda batch: tracing.outputs(read, batch)

    return _keep(saving.save(program, f"{path}.part"), path, load, graph, x, most)


def _line(error: Exception) -> str:
    """An error's words as one line."""
    return " ".join(str(error).split())[:300] or type(error).__name__


def main() -> None:
    """Print time, size and accuracy of the trained digits-resnet20 in float32 and in int8."""
    import time
    from statistics import median

    from pt_impl.kit import data, models, training
    from shared import datasets
    from shared import teacher as trained

    model = models.build(trained.TASK.model, trained.load().weights)
    with tempfile.TemporaryDirectory() as name:
        folder = datasets.materialise(trained.TASK.dataset, Path(name))
        x, _ = data.to_device(*datasets.load(folder, "train"))
        test = data.to_device(*datasets.load(folder, "test"))
        test = [part[:1792].cpu() for part in test]  # for files, which are a CPU's
        print("                   ms for 32     KB  accuracy")
        for title, write, load in (
            ("float32", keep_float32, load_quantized),
            ("int8", quantize_static_int8, load_quantized),
            ("ONNX Runtime float32", keep_onnxruntime_float32, load_onnxruntime),
            ("ONNX Runtime int8", quantize_onnxruntime_int8, load_onnxruntime),
        ):
            path, times = write(model, x[:256], Path(name) / "model"), []
            predict = load(path)
            for _ in range(30):
                start = time.perf_counter()
                predict(test[0][:32])
                times.append((time.perf_counter() - start) * 1e3)
            accuracy = training.evaluate(predict, *test, metric="accuracy", batch_size=32)
            size = path.stat().st_size / 1e3
            print(f"{title:20}{median(times):8.2f}{size:7.0f}{accuracy:10.1f}")


if __name__ == "__main__":
    main()
