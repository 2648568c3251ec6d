"""Export: the model as a file that a runtime without TensorFlow loads and runs.

What it changes: who runs the model. Its operators and weights are written to a file, which ONNX
Runtime, OpenVINO or LiteRT optimize for the machine and run, with neither TensorFlow nor the
model's source there (`shared/runtimes.py` loads it). The mathematics stays; results differ by
rounding.

Its twin: `pt_impl/deployment/export.py`.

Where the frameworks differ and why:
- TensorFlow has its graph, which tf2onnx translates; PyTorch has to record one first. tf2onnx
  writes an operator that ONNX lacks into the file all the same, so that ONNX's checker has to find
  it, and does here.
- Images go in as in the framework: NHWC here, NCHW there. ONNX's operators know NCHW alone, so that
  files from here begin with a transposition; LiteRT's know NHWC alone.
- tf2onnx writes the parts of a LayerNormalization or a GELU, PyTorch's exporter the whole. ONNX
  Runtime puts the GELU together again; Keras 3's normalisation it does not recognise.
- int8 comes from ONNX Runtime's tool on both sides, over each one's own file; OpenVINO takes that
  file. LiteRT's int8 is this side's own converter's.
- Which sizes are open is said in the signature here, whatever the example's; in `torch.export` a
  size of one in the example is a constant.
- A branch on an open size sees None in the trace: a shorter and a longer sequence are tried.
  `torch.export` knows the bounds of the example's side, beyond which its files are tried.
- LiteRT is TensorFlow's own small runtime; PyTorch needs a further package to write its files.
- Keras 3's own `export(format="onnx")` calls tf2onnx too, but opens every model's batch and no
  other size, and tf_keras has none; this works in both flavours.

When it helps and when it hurts: it helps a program that only predicts, which starts at once and
takes a fraction of the memory, and small models, whose time in a framework is mostly the
framework's. Training stays behind, and so does what the format cannot say: operators that it lacks.
Check an export against its model on real data before it is used.

Run it alone: `python -m tf_impl.deployment.export` prints how far the files' predictions are from
the model's, and how long they take.

Copy with it: `shared/onnx_quantization.py`, `shared/runtimes.py`, `tf_impl/kit/signatures.py`.
"""

import json
import re
import shutil
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

import numpy as np
import tensorflow as tf
from tensorflow.python.framework.convert_to_constants import convert_variables_to_constants_v2

from shared import runtimes
from tf_impl.kit.signatures import (
    call,
    input_names,
    named_tensors,
    refuse_state,
    tables,
    to_tensors,
)

# The most that a file's outputs may be from the model's, in relative L2: kernels round otherwise,
# and what int8 loses is the user's to judge, unless little is left.
MOST_APART = {"float32": 1e-3, "float16": 2e-2, "int8": 0.5}
_OPSET = 18  # the newest that tf2onnx 1.17 writes


def export_onnx(
    model: tf.keras.Model,
    example_inputs,
    path,
    metadata: dict | None = None,
    *,
    dynamic_batch: bool = True,
    dynamic_sequence: bool = False,
    precision: str = "float32",
) -> Path:
    """Write the model in evaluation mode as one ONNX file and return its path.

    example_inputs: what the model is called with, as `fit` hands it over: a tensor, or a tuple,
    list or dict of them; a tuple is unpacked where `call` takes several arguments. metadata:
    strings by name that the file carries. dynamic_batch: axis 0 of every input may have any size,
    else the example's; dynamic_sequence: axis 1 too. Inputs keep the names that they have in a dict
    or in the model, outputs those of a dict, else output_0, output_1, ... in their order.
    precision: "float32", or "int8" of weights and activations, whose ranges are those that the
    example inputs give: a few hundred real samples. The model is left as it is.

    ONNX Runtime loads the file and gives what the model gives, to `MOST_APART`, before it is at
    `path`. Raises ValueError for another precision, NotImplementedError with the reason where the
    model cannot be translated, has nothing to quantize or is another one in the file, and
    ModuleNotFoundError that names a missing package. Above 2 GiB protobuf refuses one file.
    Sources: `tf2onnx.convert.from_graph_def`, `onnxruntime.quantization.quantize_static`.
    """
    _check_precision(precision, "float32", "int8")
    for name in ("onnx", "onnxruntime"):
        runtimes.package(name, name)
    convert = runtimes.package("tf2onnx.convert", "tf2onnx")
    batches = _calibration(example_inputs, precision, dynamic_batch)
    graph = _freeze(model, example_inputs, dynamic_batch, dynamic_sequence)
    tensors = graph.function.inputs + graph.function.outputs
    with _refusing("ONNX"):
        file, _ = convert.from_graph_def(
            graph.function.graph.as_graph_def(),
            input_names=[tensor.name for tensor in graph.function.inputs],
            output_names=[tensor.name for tensor in graph.function.outputs],
            opset=_OPSET,
            custom_op_handlers={"Erfc": (_complement_of_erf, [])},
            tensors_to_rename={
                tensor.name: name
                for tensor, name in zip(tensors, graph.inputs + graph.outputs, strict=True)
            },
        )
    for name, value in (metadata or {}).items():
        file.metadata_props.add(key=name, value=value)
    with _written(path) as draft:
        draft.write_bytes(file.SerializeToString())
        _check(runtimes.load_onnx, draft, graph, "float32")
        if batches is not None:
            from shared import onnx_quantization

            onnx_quantization.replace(draft, batches)
            _check(runtimes.load_onnx, draft, graph, "int8")
    return Path(path)


def _complement_of_erf(graph, node, name: str, args) -> None:
    """For tf2onnx: exact GELU is written with Erfc, which ONNX lacks, and is 1 - Erf there."""
    output, dtype = node.output[0], graph.get_dtype(node.output[0])
    shape = graph.get_shape(output)
    graph.remove_node(node.name)
    erf = graph.make_node("Erf", node.input, shapes=[shape], dtypes=[dtype])
    one = graph.make_const(f"{node.name}_one", np.ones((), np.float32))
    if graph.get_dtype(one.output[0]) != dtype:
        one = graph.make_node("Cast", one.output, attr={"to": dtype}, dtypes=[dtype])
    parts = [one.output[0], erf.output[0]]
    graph.make_node("Sub", parts, outputs=[output], shapes=[shape], dtypes=[dtype])


def export_openvino(
    model: tf.keras.Model,
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
    _check_precision(precision, "float32", "int8")
    openvino = runtimes.openvino_package()
    _calibration(example_inputs, precision, dynamic_batch)
    graph = _freeze(model, example_inputs, dynamic_batch, dynamic_sequence)
    if precision == "float32":
        with _refusing("OpenVINO"), _on_python_3_13():
            converted = openvino.convert_model(graph.traced)  # of a frozen one it loses loops
        _name(converted, graph)
    else:
        with TemporaryDirectory() as folder:
            opened = {"dynamic_batch": dynamic_batch, "dynamic_sequence": dynamic_sequence}
            file = Path(folder, "model.onnx")
            export_onnx(model, example_inputs, file, **opened, precision=precision)
            converted = openvino.convert_model(str(file))
    for name, value in (metadata or {}).items():
        converted.set_rt_info(value, ["metadata", name])
    with _written(path) as draft:
        openvino.save_model(converted, str(draft), compress_to_fp16=False)  # which is the default
        _check(runtimes.load_openvino, draft, graph, precision)
    return Path(path)


def _name(converted, graph: "_Graph") -> None:
    """Give OpenVINO's inputs and outputs their names, and take ends that nobody reads away."""
    for kind, names in (("input", graph.inputs), ("output", graph.outputs)):
        known = {_numbered(kind, place): name for place, name in enumerate(names)}
        for given in getattr(converted, f"{kind}s"):
            own = {name.split(":")[0] for name in given.names} & known.keys()
            if own:
                given.get_tensor().set_names({known[own.pop()]})
            elif kind == "output":
                converted.remove_result(given.node)


def export_litert(
    model: tf.keras.Model,
    example_inputs,
    path,
    metadata: dict | None = None,
    *,
    dynamic_batch: bool = True,
    dynamic_sequence: bool = False,
    precision: str = "float32",
) -> Path:
    """Write the model in evaluation mode as a LiteRT file (.tflite) and return its path.

    Arguments, result and errors as in `export_onnx`; names and metadata stand in a zip archive at
    the file's end. precision: "float32"; "float16" of the weights in the file, which halves it, a
    CPU computes in float32 either way; "int8" of weights and activations, the model's inputs and
    outputs staying as they are. NotImplementedError too for a loop over time (LSTM, GRU) in int8,
    or with an open size: `dynamic_batch=False` writes it. Source: `tf.lite.TFLiteConverter`.
    """
    _check_precision(precision, *MOST_APART)
    runtimes.package("ai_edge_litert.interpreter", "ai-edge-litert")
    batches = _calibration(example_inputs, precision, dynamic_batch, size=1)
    graph = _freeze(model, example_inputs, dynamic_batch, dynamic_sequence)
    loops = any(node.op in _LISTS for node in graph.function.graph.as_graph_def().node)
    if loops and (dynamic_batch or dynamic_sequence):
        raise NotImplementedError(
            "LiteRT's loops over time (LSTM, GRU) take fixed sizes alone: dynamic_batch=False"
        )
    if loops and precision == "int8":  # its calibration of one ends the process
        raise NotImplementedError("LiteRT's loops over time (LSTM, GRU) can't be in int8")
    # Given a Keras 3 model in place of its function, it loses the weights without a word.
    converter = tf.lite.TFLiteConverter.from_concrete_functions([graph.function])
    if precision != "float32":
        converter.optimizations = [tf.lite.Optimize.DEFAULT]
    if precision == "float16":
        converter.target_spec.supported_types = [tf.float16]
    elif precision == "int8":
        samples = [*batches]
        converter.representative_dataset = lambda: map(list, samples)
        converter.target_spec.supported_ops = [tf.lite.OpsSet.TFLITE_BUILTINS_INT8]
    with _refusing("LiteRT"):
        file = converter.convert()
    with _written(path) as draft:
        draft.write_bytes(file)
        with zipfile.ZipFile(draft, "a") as archive:  # what follows the model no runtime reads
            archive.writestr(runtimes.METADATA, json.dumps(metadata or {}))
            names = {"inputs": graph.inputs, "outputs": graph.outputs}
            archive.writestr(runtimes.SIGNATURE, json.dumps(names))
        _check(runtimes.load_litert, draft, graph, precision)
    return Path(path)


_LISTS = ("TensorListReserve", "TensorListFromTensor")


@dataclass(frozen=True)
class _Graph:
    """A model as a function of tensors one by one: as it was traced, and without variables.

    inputs, outputs: their names, in order. samples: inputs of some calls and what the model made of
    them.
    """

    traced: tf.types.experimental.ConcreteFunction
    function: tf.types.experimental.ConcreteFunction
    inputs: list[str]
    outputs: list[str]
    samples: list[tuple[list, list]]


def _freeze(model, example_inputs, dynamic_batch: bool, dynamic_sequence: bool) -> _Graph:
    """Trace the model and make constants of all that it reads: variables, and adapted state."""
    if not model.built:
        raise ValueError("the model has no variables yet: call it once on an example input")
    refuse_state(model)
    example_inputs = to_tensors(example_inputs)
    tensors = tf.nest.flatten(example_inputs)
    if not tensors or not all(tensor.shape.rank for tensor in tensors):
        raise ValueError("the model's inputs are tensors with the samples along the first axis")
    _refuse_texts(tensors)
    if tables(model):
        raise NotImplementedError(
            "the model looks values up in tables, which the runtimes lack: export the model behind"
            " its lookups, and give it codes"
        )
    dynamic = (dynamic_batch, dynamic_sequence)
    open_axes = [axis for axis, is_open in enumerate(dynamic) if is_open]
    signature = []
    for place, tensor in enumerate(tensors):
        sizes = [None if axis in open_axes else size for axis, size in enumerate(tensor.shape)]
        signature.append(tf.TensorSpec(sizes, tensor.dtype, name=_numbered("input", place)))
    names: list[str] = []

    @tf.function(jit_compile=False)
    def predict(*parts):
        # Nothing is assigned: a layer that will not drop draws a seed for its dropout all the same.
        with getattr(tf.keras, "StatelessScope", nullcontext)(), _inlined():
            named = named_tensors(call(model, tf.nest.pack_sequence_as(example_inputs, parts)))
        names[:] = [name for name, _ in named]
        return {_numbered("output", place): tensor for place, (_, tensor) in enumerate(named)}

    with _refusing("The trace of a call"):
        traced = predict.get_concrete_function(*signature)
        function = convert_variables_to_constants_v2(traced, lower_control_flow=False)
    more = [tf.concat([tensor, tensor[:1]], 0) for tensor in tensors]
    samples: list[tuple[list, list]] = []

    def sample(given: list) -> None:
        own = named_tensors(call(model, tf.nest.pack_sequence_as(example_inputs, given)))
        samples.append(([part.numpy() for part in given], [np.asarray(part) for _, part in own]))

    for given in (tensors, more)[: 1 + dynamic_batch]:
        sample(given)
    for given in _other_lengths(tensors) if dynamic_sequence else ():
        with suppress(Exception):  # some models take one length, or know a longest one
            sample(given)
    inputs = input_names(model, example_inputs, len(tensors))
    return _Graph(traced, function, inputs, names, samples)


def _refuse_texts(tensors: list) -> None:
    if strings := [tensor for tensor in tensors if tensor.dtype == tf.string]:
        raise NotImplementedError(
            f"{len(strings)} of the model's inputs are texts, which the runtimes' vectorization "
            "lacks: export the model behind it, and give it codes"
        )


def _other_lengths(tensors: list[tf.Tensor]) -> list[list[tf.Tensor]]:
    """Inputs whose sequences, along axis 1, are one shorter, and twice as long."""
    has_some = [tensor.shape.rank > 1 and tensor.shape[1] > 1 for tensor in tensors]
    pairs = list(zip(tensors, has_some, strict=True))
    shorter = [tensor[:, :-1] if some else tensor for tensor, some in pairs]
    return [shorter, [tf.concat([tensor, tensor], 1) if some else tensor for tensor, some in pairs]]


def _numbered(kind: str, place: int) -> str:
    """A name within the graph, whose order as text is that of the places."""
    return f"{kind}_{place:04}"


@contextmanager
def _inlined() -> Iterator[None]:
    """Write functions within the model out: Keras lets XLA compile one, which no file can say."""
    before = tf.config.functions_run_eagerly()
    tf.config.run_functions_eagerly(True)  # within a trace: into its graph
    try:
        yield
    finally:
        tf.config.run_functions_eagerly(before)


def _check_precision(precision: str, *known: str) -> None:
    if precision not in known:
        *others, last = known
        raise ValueError(f"unknown precision {precision!r}: {', '.join(others)} or {last}")


def _calibration(
    example_inputs, precision: str, dynamic_batch: bool, size: int = 32
) -> Iterator | None:
    """For int8, the example inputs in batches, as arrays: ValueError where they are none."""
    if precision != "int8":
        return None
    tensors = [tf.convert_to_tensor(part) for part in tf.nest.flatten(example_inputs)]
    _refuse_texts(tensors)
    parts = [tensor.numpy() for tensor in tensors]
    fixed = not dynamic_batch and len(parts) and parts[0].ndim
    return runtimes.calibration_batches(parts, size=max(len(parts[0]), 1) if fixed else size)


@contextmanager
def _written(path) -> Iterator[Path]:
    """A file to write; it and what lies beside it go to `path` if nothing is raised."""
    path = Path(path)
    if not path.parent.is_dir():
        raise FileNotFoundError(f"no folder {path.parent}")
    with TemporaryDirectory(dir=path.parent) as folder:
        draft = Path(folder, path.name)
        yield draft
        for file in Path(folder).iterdir():
            shutil.move(file, path.with_name(file.name))


def _check(load: Callable, path: Path, graph: _Graph, precision: str) -> None:
    """Refuse a file that its runtime does not load, or in which the model is another one."""
    try:
        predict = load(path, threads=1)
        # One batch is enough where the rest of the mathematics has been compared.
        samples = graph.samples[:1] if precision == "int8" else graph.samples
        runtimes.check_same(predict, samples, bound=MOST_APART[precision])
    except Exception as error:
        reason = runtimes.one_line(error).replace(str(path), "it")
        raise NotImplementedError(
            f"the file does not give what the model gives: {reason}"
        ) from error


@contextmanager
def _on_python_3_13() -> Iterator[None]:
    """OpenVINO (2026.4) imports TensorFlow by `exec` and deletes the name by another, which fails.

    It has that module already.
    """
    from openvino.frontend.tensorflow import utils

    with mock.patch.object(utils, "exec", create=True, return_value=None):
        yield


@contextmanager
def _refusing(target: str) -> Iterator[None]:
    """Turn an error of a translation into NotImplementedError with its reason on one line."""
    try:
        yield
    except Exception as error:  # of many classes; it quotes code before it comes to the point
        text = str(error).rpartition("Summary:")[2]  # of OpenVINO
        line = re.search(r"^\s*\w*Error: (.+)$", text, re.MULTILINE)
        reason = line[1] if line else runtimes.one_line(RuntimeError(text))
        raise NotImplementedError(f"{target} can't take this: {reason}") from error


def main() -> None:
    """Export the digits CNN and print its files' differences and their time at batch 1."""
    import os
    import statistics
    import tempfile
    import time

    from shared.specs import TASKS
    from shared.weights import init_weights
    from tf_impl.kit import models, runtime, training

    threads = runtime.configure(threads=os.cpu_count() or 1, seed=0)["intra_op"]
    spec = TASKS["digits-cnn"].model
    model = models.build(spec, init_weights(spec, seed=0))
    one, many = tf.random.normal((1, 32, 32, 1)), tf.random.normal((64, 32, 32, 1))
    with tempfile.TemporaryDirectory() as folder:
        onnx = export_onnx(model, one, Path(folder, "model.onnx"))
        openvino = export_openvino(model, one, Path(folder, "model.xml"))
        litert = export_litert(model, one, Path(folder, "model.tflite"))
        predicts = {
            "TensorFlow": training.make_predict(model),
            "ONNX Runtime": runtimes.load_onnx(onnx, threads=threads),
            "OpenVINO": runtimes.load_openvino(openvino, threads=threads),
            "LiteRT": runtimes.load_litert(litert, threads=threads),
        }
        expected = predicts["TensorFlow"](many).numpy()
        for name, predict in predicts.items():
            apart = abs(expected - predict(many)).max()
            times = []
            for _ in range(200):
                start = time.perf_counter()
                predict(one)
                times.append(time.perf_counter() - start)
            print(f"{name:13} differs by {apart:.0e}, {1e6 * statistics.median(times):5.0f} µs")


if __name__ == "__main__":
    main()
