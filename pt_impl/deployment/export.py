"""Export: the model as a file that a runtime without PyTorch loads and runs.

    path = export_onnx(model, example_inputs, "model.onnx")
    predict = shared.runtimes.load_onnx(path, threads=1)
    logits = predict(array)  # any number of samples

What it changes: what runs the model. Its operators and weights are written to a file. ONNX Runtime,
OpenVINO, LiteRT or ExecuTorch optimize it for the machine and run it, without PyTorch and without
the model's source. Results differ by rounding.

Its twin: `tf_impl/deployment/export.py`.

Where the frameworks differ and why:
- PyTorch has to record a graph first: `torch.export` traces one call. If code branches on a dynamic
  size, it takes the example's branch. TensorFlow has a graph, which tf2onnx translates.
- tf2onnx writes operators that ONNX lacks without an error. ONNX's checker finds them.
- Files take images in the framework's layout: NCHW from PyTorch, NHWC from TensorFlow. ONNX's
  operators take only NCHW and LiteRT's only NHWC. So TensorFlow's ONNX files and PyTorch's LiteRT
  files begin with a transposition.
- ONNX Runtime's tool makes int8 ONNX files for both. OpenVINO reads them.
- Small devices: LiteRT (TFLite) comes with TensorFlow. PyTorch has ExecuTorch, and litert-torch for
  LiteRT: both are extra packages.
- Keras 3's `export(format="onnx")` calls tf2onnx, too, but only the batch size is dynamic.

When it helps and when it hurts: it helps a program that only predicts: it starts at once and needs
a fraction of the memory. Small models gain most, since most of their time is the framework's
overhead. A file can't train, and can't hold operators that the format lacks, or branches on values.
Compare a file with its model on real data before you use it.

Run it alone: `python -m pt_impl.deployment.export` prints the time of each runtime at batch 1.

Copy with it: `pt_impl/kit/signatures.py`, `shared/onnx_quantization.py`, `shared/runtimes.py`.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import nn

from pt_impl.kit.signatures import Signature, recording, tensors_of
from shared import runtimes

# The most that a file's outputs may be from the model's, in relative L2: kernels round otherwise,
# and what int8 loses is the user's to judge, unless little is left.
MOST_APART = {"float32": 1e-3, "int8": 0.5}
_TORCH = ", in an environment with torch 2.14 (docs/install.md)"
# Of an example with less than 16 samples (Signature's has two at least) PyTorch's choice between
# kernels of 1x1 convolutions makes 15 the largest batch of ExecuTorch's file.
_TIMES = 8


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

    example_inputs: a tensor, a tuple of the model's positional arguments or a dict of its named
    ones, on its device; what in them is no tensor stays as it is. metadata: strings by name that
    the file carries. dynamic_batch: axis 0 of every input may have any size, else the example's;
    dynamic_sequence: axis 1 too. Inputs keep the names of the model's arguments, outputs those of
    a dict or dataclass, else output_0, output_1, ... in their order. precision: "float32", or
    "int8" of weights and activations, whose ranges are those that the example inputs give: a few
    hundred real samples, on the CPU. The model is left as it is.

    ONNX Runtime loads the file and gives what the model gives, to `MOST_APART`, before it is at
    `path`. Raises ValueError for another precision, NotImplementedError with the reason where the
    model cannot be translated, has nothing to quantize or is another one in the file, and
    ModuleNotFoundError that names a missing package. Above 2 GiB protobuf refuses one file.
    Sources: `torch.onnx.export(dynamo=True)`; `onnxruntime.quantization.quantize_static`.
    """
    _check_precision(precision)
    for name in ("onnx", "onnxscript", "onnxruntime"):
        runtimes.package(name, name)
    batches = _calibration(example_inputs, dynamic_batch) if precision == "int8" else None
    sizes = {"dynamic_batch": dynamic_batch, "dynamic_sequence": dynamic_sequence}
    signature = Signature(model, example_inputs, **sizes)
    with recording(model, "ONNX"):
        program = torch.onnx.export(
            signature,
            signature.example,
            dynamo=True,
            dynamic_shapes=signature.dynamic_shapes(),
            input_names=signature.inputs,
            output_names=signature.outputs,
            verbose=False,
        )
    signature.look_beyond(program.exported_program)
    program.model.metadata_props.update(metadata or {})
    with runtimes.draft(path) as draft:
        program.save(str(draft), external_data=False)  # by default weights are a second file
        _check(runtimes.load_onnx, draft, signature, "float32")
        if precision == "int8":
            from shared import onnx_quantization

            onnx_quantization.replace(draft, batches)
            _check(runtimes.load_onnx, draft, signature, "int8")
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
    _check_precision(precision)
    openvino = runtimes.openvino_package()
    if precision == "int8":
        _calibration(example_inputs, dynamic_batch)
    sizes = {"dynamic_batch": dynamic_batch, "dynamic_sequence": dynamic_sequence}
    signature = Signature(model, example_inputs, **sizes)
    if precision == "float32":
        converted = _converted(signature)
    else:
        with TemporaryDirectory() as folder:
            onnx = Path(folder, "model.onnx")
            export_onnx(model, example_inputs, onnx, **sizes, precision=precision)
            converted = openvino.convert_model(str(onnx))
    for name, value in (metadata or {}).items():
        converted.set_rt_info(value, ["metadata", name])
    with runtimes.draft(path) as draft:
        openvino.save_model(converted, str(draft), compress_to_fp16=False)  # which is the default
        _check(runtimes.load_openvino, draft, signature, precision)
    return Path(path)


def _converted(signature: Signature):
    """OpenVINO's model, with the names and the open sizes of the signature."""
    openvino, example = runtimes.openvino_package(), signature.example
    with recording(signature.model, "OpenVINO"):
        program = signature.program()
        converted = openvino.convert_model(program)
    signature.look_beyond(program)
    for place, given in enumerate(converted.inputs):  # the conversion opens every size
        sizes = list(example[place].shape)
        for axis in signature.open_axes[place]:
            sizes[axis] = -1
        given.get_node().set_partial_shape(openvino.PartialShape(sizes))
    for given, name in zip(converted.inputs, signature.inputs, strict=True):
        given.get_tensor().set_names({name})
    for given, name in zip(converted.outputs, signature.outputs, strict=True):
        given.get_tensor().set_names({name})
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
) -> Path:
    """Write the model in evaluation mode as a LiteRT file (.tflite) and return its path.

    Arguments, result and errors as in `export_onnx`, in float32; names and metadata are in a zip
    archive at the file's end. The file is recorded with the sizes of the example, and LiteRT lays
    it out anew for others. That fails where an operator holds a size, as a reshape does:
    NotImplementedError, and `dynamic_batch=False` writes it. Source: `litert_torch.convert`.
    """
    converter = runtimes.package("litert_torch", "litert-torch", where=_TORCH)
    sizes = {"dynamic_batch": dynamic_batch, "dynamic_sequence": dynamic_sequence}
    signature = Signature(model, example_inputs, **sizes)
    with recording(model, "LiteRT"):
        converted = converter.convert(signature, signature.example)
    with runtimes.draft(path) as draft:
        converted.export(str(draft))
        _describe(draft, metadata, signature)
        _check(runtimes.load_litert, draft, signature, "float32")
    return Path(path)


def export_executorch(
    model: nn.Module,
    example_inputs,
    path,
    metadata: dict | None = None,
    *,
    dynamic_batch: bool = True,
    dynamic_sequence: bool = False,
    largest: int = 256,
) -> Path:
    """Write the model in evaluation mode as an ExecuTorch file (.pte), lowered to XNNPACK.

    Arguments, result and errors as in `export_onnx`, in float32; names and metadata are in a zip
    archive at the file's end. Operators that XNNPACK lacks run in ExecuTorch's own kernels.
    largest: of an open size, for which memory is planned whatever comes.
    Source: `executorch.exir.to_edge_transform_and_lower`.
    """
    exir = runtimes.package("executorch.exir", "executorch")
    backend = "executorch.backends.xnnpack.partition.xnnpack_partitioner"
    xnnpack = runtimes.package(backend, "executorch")
    sizes = {"dynamic_batch": dynamic_batch, "dynamic_sequence": dynamic_sequence}
    signature = Signature(model, example_inputs, **sizes)
    if dynamic_batch:
        signature.example = tuple(torch.cat([part] * _TIMES) for part in signature.example)
    signature.largest = largest
    with recording(model, "ExecuTorch"):
        program = signature.program()
        parts = [xnnpack.XnnpackPartitioner()]
        file = exir.to_edge_transform_and_lower(program, partitioner=parts).to_executorch()
    signature.look_beyond(program)
    with runtimes.draft(path) as draft:
        draft.write_bytes(file.buffer)
        _describe(draft, metadata, signature)
        _check(runtimes.load_executorch, draft, signature, "float32")
    return Path(path)


def _describe(path, metadata: dict | None, signature: Signature) -> None:
    names = {"inputs": signature.inputs, "outputs": signature.outputs}
    runtimes.describe(path, metadata, **names, open_axes=signature.open_axes)


def _check_precision(precision: str) -> None:
    if precision not in MOST_APART:
        raise ValueError(f"unknown precision {precision!r}: float32 or int8")


def _calibration(example_inputs, dynamic_batch: bool) -> Iterator:
    """The example inputs in batches, as arrays: ValueError where they are none."""
    arrays = [part.cpu().numpy() for part in tensors_of(example_inputs)]
    size = 32 if dynamic_batch or not arrays else max(len(arrays[0]), 1)
    return runtimes.calibration_batches(arrays, size=size)


def _check(load: Callable, draft: Path, signature: Signature, precision: str) -> None:
    """Refuse a file in which the model is another one."""
    if precision == "int8":  # one batch is enough where float32 has been compared
        samples, beyond = signature.samples[:1], []
    else:
        samples, beyond = signature.samples, signature.beyond
    runtimes.check_file(load, draft, samples, bound=MOST_APART[precision], beyond=beyond)


def main() -> None:
    """Export the digits CNN and print how long a prediction of each file takes at batch 1."""
    from pt_impl.kit.demo import Demo
    from pt_impl.kit.training import make_predict

    demo, threads = Demo(batch_size=1), torch.get_num_threads()
    model, x = demo.build()[0].cpu().eval(), demo.batches[0][0].cpu()
    with TemporaryDirectory() as folder:
        onnx = export_onnx(model, x, Path(folder, "model.onnx"))
        openvino = export_openvino(model, x, Path(folder, "model.xml"))
        predicts = {
            "PyTorch": make_predict(model),
            "ONNX Runtime": runtimes.load_onnx(onnx, threads=threads),
            "OpenVINO": runtimes.load_openvino(openvino, threads=threads),
        }
    calls = {name: lambda x, y, own=own: own(x.cpu()) for name, own in predicts.items()}
    for name, milliseconds in demo.times(calls).items():
        print(f"{name:13}{1e3 * milliseconds:6.0f} µs")


if __name__ == "__main__":
    main()
