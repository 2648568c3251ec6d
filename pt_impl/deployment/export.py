"""Export: the model as a file that a runtime without PyTorch loads and runs.

What it changes: who runs the model. Its operators and weights are written to a file, which ONNX
Runtime or OpenVINO optimize for the machine and run, with neither PyTorch nor the model's source
there (`shared/runtimes.py` loads it). The mathematics stays; results differ by rounding.

Its twin: `tf_impl/deployment/export.py`.

Where the frameworks differ and why:
- PyTorch has to record a graph first: `torch.export` follows one call of the model, which
  `torch.onnx.export` translates with onnxscript. TensorFlow has its graph, and tf2onnx translates
  it; an operator that ONNX lacks it writes into the file all the same, for a checker to find.
- Images go in as in the framework: NCHW here, NHWC there. ONNX's operators know NCHW alone, so that
  TensorFlow's files begin with a transposition; LiteRT's know NHWC alone.
- PyTorch's exporter writes LayerNormalization and Gelu as such, tf2onnx their parts. ONNX Runtime
  puts the GELU together again; Keras 3's normalisation it does not recognise.
- int8 comes from ONNX Runtime's tool on both sides, over each one's own file; OpenVINO takes that
  file. LiteRT's int8 is TensorFlow's own converter's.
- A size of one in the example becomes a constant in `torch.export`; TensorFlow is told which sizes
  are open, whatever the example.
- TensorFlow writes LiteRT files itself. PyTorch's way there is a package of its own, litert-torch,
  which is not among those that this project is tested with.

When it helps and when it hurts: it helps a program that only predicts, which starts at once and
takes a fraction of the memory, and small models, whose time in a framework is mostly the
framework's. Training stays behind, and so does what the format cannot say: branches on values,
operators that it lacks. Check an export against its model on real data before it is used.

Run it alone: `python -m pt_impl.deployment.export` prints how far the files' predictions are from
the model's, and how long they take.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map  # torch has no public one

from shared import calibration, runtimes

_QUANTIZER = "shared.onnx_quantization", "onnxruntime"  # and the package that it needs


def export_onnx(
    model: nn.Module,
    example_inputs,
    path,
    metadata: dict | None = None,
    *,
    dynamic_batch: bool = True,
    dynamic_sequence: bool = False,
    precision: str = "float32",
) -> Path:
    """Write the model in evaluation mode as one ONNX file and return its path.

    example_inputs: a tensor or a tuple of the model's positional arguments, on its device.
    metadata: strings by name that the file carries. dynamic_batch: axis 0 of every input may have
    any size, else the example's; dynamic_sequence: axis 1 too. Several outputs, also in a dict,
    become outputs of their own. precision: "float32", or "int8" of weights and activations, whose
    ranges are those that the example inputs give: a few hundred real samples, on the CPU. The model
    is left as it is.

    Raises ValueError for another precision, NotImplementedError with the reason where the model
    cannot be translated or has nothing to quantize, and ModuleNotFoundError that names a missing
    package. Above 2 GiB protobuf refuses one file. Sources: `torch.onnx.export(dynamo=True)`, which
    by itself puts weights into a second file; `onnxruntime.quantization.quantize_static`.
    """
    if precision not in ("float32", "int8"):
        raise ValueError(f"unknown precision {precision!r}: float32 or int8")
    for name in ("onnx", "onnxscript"):
        runtimes.package(name, name)
    if precision == "int8":
        parts = [part.cpu().numpy() for part in tree_leaves(example_inputs)]
        batches = calibration.batches(parts, size=32 if dynamic_batch else len(parts[0]))
    arguments, shapes = _opened(example_inputs, dynamic_batch, dynamic_sequence)
    with _evaluating(model), _refusing("ONNX", torch.onnx.OnnxExporterError):
        program = torch.onnx.export(
            model, arguments, dynamo=True, dynamic_shapes=shapes, verbose=False
        )
    program.model.metadata_props.update(metadata or {})
    program.save(str(path), external_data=False)
    runtimes.check_onnx(path)
    if precision == "int8":
        runtimes.package(*_QUANTIZER).replace(path, batches)
    return Path(path)


def export_openvino(
    model: nn.Module,
    example_inputs,
    path,
    metadata: dict | None = None,
    *,
    dynamic_batch: bool = True,
    dynamic_sequence: bool = False,
    precision: str = "float32",
) -> Path:
    """Write the model in evaluation mode for OpenVINO: `path` (.xml), weights in a .bin beside it.

    Arguments, result and errors as in `export_onnx`; int8 goes through such a file. Weights in
    float32 stay so; in which precision they are used is said when the model is loaded.
    Source: `openvino.convert_model`.
    """
    openvino = runtimes.openvino_package()
    if precision == "float32":
        converted = _for_openvino(model, example_inputs, dynamic_batch, dynamic_sequence)
    else:
        with TemporaryDirectory() as folder:
            opened = {"dynamic_batch": dynamic_batch, "dynamic_sequence": dynamic_sequence}
            file = Path(folder, "model.onnx")
            export_onnx(model, example_inputs, file, **opened, precision=precision)
            converted = openvino.convert_model(str(file))
    for name, value in (metadata or {}).items():
        converted.set_rt_info(value, ["metadata", name])
    openvino.save_model(converted, str(path), compress_to_fp16=False)  # which is the default
    return Path(path)


def _for_openvino(model: nn.Module, example_inputs, dynamic_batch: bool, dynamic_sequence: bool):
    openvino = runtimes.openvino_package()
    arguments, shapes = _opened(example_inputs, dynamic_batch, dynamic_sequence)
    with _evaluating(model), torch.no_grad(), _refusing("OpenVINO", Exception):
        program = torch.export.export(model, arguments, dynamic_shapes=shapes)
        converted = openvino.convert_model(program)
    open_axes = [0] * dynamic_batch + [1] * dynamic_sequence
    for place, tensor in enumerate(tree_leaves(arguments)):  # the conversion opens every size
        sizes = [-1 if axis in open_axes else size for axis, size in enumerate(tensor.shape)]
        converted.inputs[place].get_node().set_partial_shape(openvino.PartialShape(sizes))
    converted.validate_nodes_and_infer_types()
    return converted


def export_litert(
    model: nn.Module,
    example_inputs,
    path,
    metadata: dict | None = None,
    *,
    dynamic_batch: bool = True,
    dynamic_sequence: bool = False,
    precision: str = "float32",
) -> Path:
    """Refuse, whatever the precision: raises NotImplementedError."""
    raise NotImplementedError(
        "PyTorch has no LiteRT exporter of its own: the package litert-torch is one, and is not "
        "installed with this project; export_onnx is"
    )


def _opened(example_inputs, dynamic_batch: bool, dynamic_sequence: bool) -> tuple:
    """The model's positional arguments, and for each the axes whose size is open."""
    arguments = example_inputs if isinstance(example_inputs, tuple) else (example_inputs,)
    axes = [0] * dynamic_batch + [1] * dynamic_sequence
    for axis in axes:  # a size of one would become a constant
        arguments = tree_map(
            lambda part, axis=axis: torch.cat([part] * 2, axis) if part.shape[axis] == 1 else part,
            arguments,
        )
    open_axes = dict.fromkeys(axes, torch.export.Dim.DYNAMIC)
    return arguments, tree_map(lambda part: open_axes, arguments)


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, then every module's mode as found."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def _refusing(target: str, kind: type[Exception]) -> Iterator[None]:
    """Turn an error of a translation into NotImplementedError with its reason on one line."""
    try:
        yield
    except kind as error:
        text = str(error)
        for heading in ("## Exception summary", "Summary:"):  # of torch.onnx, of OpenVINO
            text = text.partition(heading)[2] or text
        reason = runtimes.one_line(RuntimeError(text))
        raise NotImplementedError(f"{target} can't take this model: {reason}") from error


def main() -> None:
    """Export the digits CNN and print its files' differences and their time at batch 1."""
    import statistics
    import tempfile
    import time

    from pt_impl.kit import models, runtime, training
    from shared.specs import TASKS
    from shared.weights import init_weights

    threads = runtime.configure(threads=torch.get_num_threads(), seed=0)["intra_op"]
    spec = TASKS["digits-cnn"].model
    model = models.build(spec, init_weights(spec, seed=0)).eval()
    one, many = torch.randn(1, 1, 32, 32), torch.randn(64, 1, 32, 32)
    with tempfile.TemporaryDirectory() as folder:
        onnx = export_onnx(model, one, Path(folder, "model.onnx"))
        openvino = export_openvino(model, one, Path(folder, "model.xml"))
        predicts = {
            "PyTorch": training.make_predict(model),
            "ONNX Runtime": runtimes.load_onnx(onnx, threads=threads),
            "OpenVINO": runtimes.load_openvino(openvino, threads=threads),
        }
        expected = predicts["PyTorch"](many).numpy()
        for name, predict in predicts.items():
            apart = abs(expected - predict(many)).max()
            taken = []
            for _ in range(200):
                start = time.perf_counter()
                predict(one)
                taken.append(time.perf_counter() - start)
            print(f"{name:13} differs by {apart:.0e}, {1e6 * statistics.median(taken):5.0f} µs")


if __name__ == "__main__":
    main()
