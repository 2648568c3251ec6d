"""Post-training quantization: a trained model in 8-bit integers, for a CPU, without training.

    quantized = apply_static_int8(model, images[:256])
    torch._inductor.config.freezing = True  # without it int8 is no faster than float32
    predict = torch.compile(quantized, dynamic=False)

What it changes: the numbers that a trained model computes with. A float tensor becomes integers and
a scale, q = round(x / scale) + zero point (Jacob et al., 2018, arXiv:1712.05877). Static
quantization takes the ranges of activations from calibration data. Dynamic quantization computes
them at run time. ONNX Runtime's tool is static, too.

Its twin: `tf_impl/compression/post_training_quantization.py`.

Where the frameworks differ and why:
- PyTorch: the runtime is TorchInductor. It compiles for each shape, and fuses integer operators
  only if it may fold constants ("freezing").
- TensorFlow: the runtime is LiteRT, which interprets a file written by TensorFlow's converter.
- Activations are unsigned in PyTorch and signed in LiteRT.
- Dynamic quantization: PyTorch has it for linear layers of any size. LiteRT has it for
  convolutions, too, but not for kernels of fewer than 1,024 weights.

When it helps and when it hurts: on a CPU with units for int8 (VNNI, AMX) static int8 is two to four
times as fast if convolutions and matrix products dominate. Without these units it can be slower.
Weights shrink to a quarter. It hurts if a few values are far larger than the rest, or if
calibration data is not like later inputs. Compare accuracy before you deploy.

Run it alone: `python -m pt_impl.compression.post_training_quantization` prints time, size and
accuracy.

Copy with it: `pt_impl/kit/checks/post_training_quantization.py`, `pt_impl/kit/tracing.py`,
`shared/onnx_quantization.py`.
"""

import copy
import platform
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import fx, nn
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86

from pt_impl.kit.checks import post_training_quantization as checks
from pt_impl.kit.tracing import Program, input_tensors, outputs, trace

OPSET = 18  # of ONNX: the newest that tf2onnx writes, too
SAME, MOST_APART = 1e-4, 0.5  # relative L2 of a file's outputs: in float32, in integers


def apply_static_int8(
    model: nn.Module, calibration, *, activation_bits: int = 8, keep_float: tuple = ()
) -> fx.GraphModule:
    """Return a copy of the model over int8 weights and uint8 activations, a graph for the CPU.

    Rounded are Conv2d, Linear and, before a ReLU, Conv1d; a warning names the convolutions and
    linear layers that stay in float32. Of an output with `.logits` the graph gives these. Compile
    it with frozen weights; `kit/int8_files.py` does so, and writes it to a file. The model is left
    as it is.

    Args:
        model: takes any number of samples; returns tensors, also in tuples, lists and dicts. So
            does the graph, of the sizes of the calibration data: a call with others raises
            ValueError.
        calibration: a tensor, a tuple of the model's positional arguments or a dict of those by
            name, tensors all; samples along the first axis, such as a few hundred of the training
            split.
        activation_bits: 8; oneDNN has no integer kernels for 16.
        keep_float: numbers of layers, of `int8_layers`, that stay in float32.

    Raises ValueError for calibration data that is empty, not finite, or that the model does not
    take; NotImplementedError for a model that torch.export cannot capture or that has no layer to
    quantize, and for 16 bits.
    Source: torchao's `X86InductorQuantizer`.
    """
    checks.check_post_training_quantization(model, calibration, activation_bits)
    config = x86.get_default_x86_inductor_quantization_config(reduce_range=_overflows())
    quantizer = x86.X86InductorQuantizer().set_global(config)
    quantized = _quantize(model, calibration, quantizer, keep_float)
    if not keep_float:
        checks.warn_of_float_layers(quantized)
    return quantized


def int8_layers(model: nn.Module, calibration) -> list[str]:
    """Return the names of the modules with a layer to round, in the order in which they run."""
    checks.check_post_training_quantization(model, calibration)
    return checks.layer_modules(trace(model, calibration))


def apply_fx_int8(model: nn.Module, calibration) -> fx.GraphModule:
    """Return the model in static int8 by the deprecated route: FX, modules of oneDNN's kernels.

    It predicts in eager mode, and needs no compilation. PyTorch has marked `torch.ao.quantization`
    as deprecated; `apply_static_int8` is what replaces it.

    Raises ValueError as `apply_static_int8`; NotImplementedError for a model that torch.fx cannot
    trace.
    Source: `torch.ao.quantization.quantize_fx`.
    """
    from torch.ao.quantization import get_default_qconfig_mapping, quantize_fx

    checks.check_post_training_quantization(model, calibration)
    copied = copy.deepcopy(model).cpu().eval()
    few = next(_batches(calibration))
    example = few if isinstance(few, tuple) else (few,)
    with checks.refusals("torch.fx cannot quantize it"), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        mapping = get_default_qconfig_mapping("x86")
        observed = quantize_fx.prepare_fx(copied, mapping, example_inputs=example)
        with torch.no_grad():
            for batch in _batches(calibration):
                outputs(observed, batch)
        return quantize_fx.convert_fx(observed)


def apply_dynamic_int8(model: nn.Module, calibration) -> fx.GraphModule:
    """Return a copy with int8 weights in linear layers; activations get their scale at each call.

    A call has one scale for all of its samples, so a prediction depends on what comes with it.
    Convolutions stay in float32: upstream has no dynamic ones. Else as `apply_static_int8`; one
    sample of calibration data is enough: only its shape and dtype are read.
    """
    checks.check_post_training_quantization(model, calibration)
    config = x86.get_default_x86_inductor_quantization_config(
        is_dynamic=True, reduce_range=_overflows()
    )
    # As a global one it would round the activations of convolutions, for no kernel.
    quantizer = x86.X86InductorQuantizer().set_function_type_qconfig(nn.functional.linear, config)
    return _quantize(model, calibration, quantizer)


@torch.random.fork_rng(devices=[])  # torchao draws numbers
def _quantize(model: nn.Module, calibration, quantizer, keep_float: tuple = ()) -> fx.GraphModule:
    graph = trace(model, calibration)
    checks.name_sources(graph)
    names = checks.layer_modules(graph)
    for number in keep_float:
        quantizer.set_module_name_qconfig(names[number], None)
    with checks.refusals("torchao cannot quantize it"):
        observed = prepare_pt2e(graph, quantizer)
        with torch.no_grad():
            for batch in _batches(calibration):
                outputs(observed, batch)
        quantized = convert_pt2e(observed).requires_grad_(False)  # it is for predictions
    checks.check_quantized(quantized)
    return Program(quantized, quantized.graph)


def _overflows() -> bool:
    """Whether oneDNN adds pairs of products in 16 bits: on x86 without VNNI.

    Activations get 7 bits there, as torchao asks; what is quantized on a CPU with VNNI is not for
    one without.
    """
    x86_64 = platform.machine().lower() in ("x86_64", "amd64")
    return x86_64 and not torch.cpu._is_vnni_supported()


def _batches(x, size: int = 32) -> Iterator:
    """Parts of the samples, on the CPU, in the structure of `x`."""
    for start in range(0, len(input_tensors(x)[0]), size):
        yield _map(lambda part: part[start : start + size].cpu(), x)  # noqa: B023


def _map(function: Callable, x):
    if isinstance(x, dict):
        return {name: function(part) for name, part in x.items()}
    return tuple(map(function, x)) if isinstance(x, tuple) else function(x)


def keep_onnxruntime_float32(model: nn.Module, calibration, path) -> Path:
    """Write the model as it is, in float32, to an ONNX file for `load_onnxruntime`.

    One sample of calibration data is enough: only its shape and dtype are read. Before the file is
    there, it is read again and compared with the model.

    Raises as `apply_static_int8`; NotImplementedError, too, where torch.onnx cannot export it, and
    RuntimeError where outputs are more than a relative `SAME` off the model's.
    """
    checks.check_post_training_quantization(model, calibration)
    graph = trace(model, calibration)
    two = _map(lambda part: part[[0, -1]].cpu(), calibration)  # one would fix their number
    keywords = two if isinstance(two, dict) else None
    arguments = () if keywords else input_tensors(two)
    varies = _map(lambda _: {0: torch.export.Dim.DYNAMIC}, keywords or arguments)
    with checks.refusals("torch.onnx cannot export it"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a graph has no mode: it was traced for evaluation
        program = torch.onnx.export(
            graph,
            arguments,
            kwargs=keywords,
            opset_version=OPSET,
            dynamic_shapes=varies,
            dynamo=True,
            verbose=False,
        )
    part = Path(f"{path}.part")
    program.save(part)
    return checks.keep_if_near(part, path, load_onnxruntime, graph, calibration, SAME)


def quantize_onnxruntime_int8(
    model: nn.Module, calibration, path, *, keep_float: tuple = ()
) -> Path:
    """Write an ONNX file for `load_onnxruntime`: static int8, quantized by ONNX Runtime's own tool.

    keep_float: numbers of layers in the order in which they run, which stay in float32. Else as
    `keep_onnxruntime_float32`, but that outputs may be a relative `MOST_APART` off.
    Source: `onnxruntime.quantization.quantize_static` (QDQ).
    """
    from shared import onnx_quantization

    part = Path(f"{path}.part")
    with tempfile.TemporaryDirectory() as folder:
        whole = keep_onnxruntime_float32(model, calibration, Path(folder) / "whole.onnx")
        batches = (_arrays(batch) for batch in _batches(calibration))
        onnx_quantization.quantize(whole, part, batches, keep_float=keep_float)
    graph = trace(model, calibration)
    return checks.keep_if_near(part, path, load_onnxruntime, graph, calibration, MOST_APART)


def load_onnxruntime(path, *, threads: int = 0) -> Callable:
    """Return `predict(x) -> output` over an ONNX file in ONNX Runtime, on the CPU.

    x: as the calibration data. `predict.threads` is the number of the session's threads.

    Args:
        threads: 0: as many as PyTorch has.

    Raises FileNotFoundError, and ValueError for a file that is damaged or something else.
    """
    from shared import onnx_quantization

    session = onnx_quantization.open_session(path, threads=threads or torch.get_num_threads())
    names = [given.name for given in session.get_inputs()]

    def predict(x):
        if isinstance(x, dict):  # in the file's order
            if x.keys() != set(names):
                raise ValueError(f"the file takes {', '.join(names)}, not {', '.join(x)}")
            x = tuple(x[name] for name in names)
        found = [torch.from_numpy(y) for y in onnx_quantization.run(session, _arrays(x))]
        return found[0] if len(found) == 1 else tuple(found)

    predict.threads = session.get_session_options().intra_op_num_threads
    return predict


def _arrays(x) -> tuple:
    return tuple(part.numpy() for part in input_tensors(x))


def main() -> None:
    """Print time, size and accuracy of the trained digits CNN in float32 and in int8."""
    from pt_impl.kit import int8_files, training
    from pt_impl.kit.demo import Demo

    demo = Demo("digits-cnn", batch_size=32)
    model, optimizer, loss_fn = demo.build()
    demo.fit(training.make_train_step(model, optimizer, loss_fn), epochs=demo.task.recipe.epochs)
    x, test = demo.train[0][:256], [part.cpu() for part in demo.test]
    path = Path(tempfile.mkdtemp()) / "model"
    print("                   ms for 32     KB  accuracy")
    for title, write, read in (
        ("float32", int8_files.keep_float32, int8_files.load_int8),
        (
            "int8",
            lambda *at: int8_files.save_int8(apply_static_int8(*at[:2]), *at),
            int8_files.load_int8,
        ),
        ("ONNX Runtime float32", keep_onnxruntime_float32, load_onnxruntime),
        ("ONNX Runtime int8", quantize_onnxruntime_int8, load_onnxruntime),
    ):
        predict = read(write(model, x, path))
        ms = demo.times({title: lambda x, y: predict(x.cpu())})[title]  # noqa: B023
        accuracy = training.evaluate(predict, *test, metric="accuracy", batch_size=32)
        print(f"{title:20}{ms:8.2f}{path.stat().st_size / 1e3:7.0f}{accuracy:10.1f}")


if __name__ == "__main__":
    main()
