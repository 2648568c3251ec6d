"""Export: the model as a file that a runtime without TensorFlow loads and runs.

    path = export_litert(model, example_inputs, "model.tflite")  # export_onnx, export_openvino
    predict = shared.runtimes.load_litert(path, threads=1)
    logits = predict(array)  # any number of samples

What it changes: what runs the model. Its operators and weights are written to a file. ONNX Runtime,
OpenVINO or LiteRT optimize it for the machine and run it, without TensorFlow and without the
model's source. Results differ by rounding.

Its twin: `pt_impl/deployment/export.py`, which says where the frameworks differ.

When it helps and when it hurts: it helps a program that only predicts: it starts at once and needs
a fraction of the memory. Small models gain most, since most of their time is the framework's
overhead. A file can't train, and can't hold operators that the format lacks, or branches on values.
Compare a file with its model on real data before you use it.

Run it alone: `python -m tf_impl.deployment.export` prints the time of each runtime at batch 1.

Copy with it: `shared/onnx_quantization.py`, `shared/runtimes.py`, `tf_impl/kit/signatures.py`.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import tensorflow as tf

from shared import runtimes
from tf_impl.kit.signatures import Signature, freeze, refuse_for_runtimes, refuse_loops

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
    sizes = {"dynamic_batch": dynamic_batch, "dynamic_sequence": dynamic_sequence}
    signature = Signature(model, example_inputs, **sizes)
    refuse_for_runtimes(signature)
    batches = _calibration(signature, precision, size=32 if dynamic_batch else 0)
    frozen = freeze(signature.trace(inlined=True))
    names = [tensor.name for tensor in frozen.inputs + frozen.outputs]
    renamed = dict(zip(names, signature.inputs + signature.outputs, strict=True))
    with runtimes.translating("ONNX"):
        file, _ = convert.from_graph_def(
            frozen.graph.as_graph_def(),
            input_names=[tensor.name for tensor in frozen.inputs],
            output_names=[tensor.name for tensor in frozen.outputs],
            opset=_OPSET,
            custom_op_handlers={"Erfc": (_complement_of_erf, [])},
            tensors_to_rename=renamed,
        )
    for name, value in (metadata or {}).items():
        file.metadata_props.add(key=name, value=value)
    with runtimes.draft(path) as draft:
        draft.write_bytes(file.SerializeToString())
        _check(runtimes.load_onnx, draft, signature, "float32")
        if precision == "int8":
            from shared import onnx_quantization

            onnx_quantization.replace(draft, batches)
            _check(runtimes.load_onnx, draft, signature, "int8")
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
    sizes = {"dynamic_batch": dynamic_batch, "dynamic_sequence": dynamic_sequence}
    signature = Signature(model, example_inputs, **sizes)
    refuse_for_runtimes(signature)
    if precision == "float32":
        function = signature.trace(inlined=True).get_concrete_function()
        with runtimes.translating("OpenVINO"), runtimes.openvino_on_python_3_13():
            converted = openvino.convert_model(function)  # of a frozen one it loses loops
        _name(converted, signature)
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


def _name(converted, signature: Signature) -> None:
    """Give OpenVINO's inputs and outputs their names, and take ends that nobody reads away."""
    for kind, names in (("input", signature.inputs), ("output", signature.outputs)):
        known = {f"{kind}_{place:04}": name for place, name in enumerate(names)}
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

    Arguments, result and errors as in `export_onnx`; names and metadata are in a zip archive at
    the file's end. precision: "float32"; "float16" of the weights in the file, which halves it, a
    CPU computes in float32 either way; "int8" of weights and activations, the model's inputs and
    outputs staying as they are. NotImplementedError too for a loop over time (LSTM, GRU) in int8,
    or with an open size: `dynamic_batch=False` writes it. Source: `tf.lite.TFLiteConverter`.
    """
    _check_precision(precision, *MOST_APART)
    runtimes.package("ai_edge_litert.interpreter", "ai-edge-litert")
    sizes = {"dynamic_batch": dynamic_batch, "dynamic_sequence": dynamic_sequence}
    signature = Signature(model, example_inputs, **sizes)
    refuse_for_runtimes(signature)
    batches = _calibration(signature, precision, size=1 if dynamic_batch else 0)
    frozen = freeze(signature.trace(inlined=True))
    refuse_loops(frozen, is_open=dynamic_batch or dynamic_sequence, in_int8=precision == "int8")
    # Given a Keras 3 model in place of its function, it loses the weights without a word.
    converter = tf.lite.TFLiteConverter.from_concrete_functions([frozen])
    if precision != "float32":
        converter.optimizations = [tf.lite.Optimize.DEFAULT]
    if precision == "float16":
        converter.target_spec.supported_types = [tf.float16]
    elif precision == "int8":
        samples = [*batches]
        converter.representative_dataset = lambda: map(list, samples)
        converter.target_spec.supported_ops = [tf.lite.OpsSet.TFLITE_BUILTINS_INT8]
    with runtimes.translating("LiteRT"):
        file = converter.convert()
    with runtimes.draft(path) as draft:
        draft.write_bytes(file)
        runtimes.describe(draft, metadata, inputs=signature.inputs, outputs=signature.outputs)
        _check(runtimes.load_litert, draft, signature, precision)
    return Path(path)


def _check_precision(precision: str, *known: str) -> None:
    if precision not in known:
        *others, last = known
        raise ValueError(f"unknown precision {precision!r}: {', '.join(others)} or {last}")


def _calibration(signature: Signature, precision: str, *, size: int) -> Iterator | None:
    """For int8, the example inputs in batches, as arrays: ValueError where they are none.

    size: of a batch; 0 is that of the example.
    """
    if precision != "int8":
        return None
    arrays = [part.numpy() for part in signature.example]
    return runtimes.calibration_batches(arrays, size=size or max(len(arrays[0]), 1))


def _check(load: Callable, draft: Path, signature: Signature, precision: str) -> None:
    """Refuse a file in which the model is another one."""
    # One batch is enough where the rest of the mathematics has been compared.
    samples = signature.samples[:1] if precision == "int8" else signature.samples
    runtimes.check_file(load, draft, samples, bound=MOST_APART[precision])


def main() -> None:
    """Export the digits CNN and print how long a prediction of each file takes at batch 1."""
    from tf_impl.kit.demo import Demo
    from tf_impl.kit.training import make_predict

    demo = Demo(batch_size=1)
    model, x = demo.build()[0], demo.batches[0][0]
    threads = tf.config.threading.get_intra_op_parallelism_threads()
    with TemporaryDirectory() as folder:
        onnx = export_onnx(model, x, Path(folder, "model.onnx"))
        openvino = export_openvino(model, x, Path(folder, "model.xml"))
        litert = export_litert(model, x, Path(folder, "model.tflite"))
        predicts = {
            "TensorFlow": make_predict(model),
            "ONNX Runtime": runtimes.load_onnx(onnx, threads=threads),
            "OpenVINO": runtimes.load_openvino(openvino, threads=threads),
            "LiteRT": runtimes.load_litert(litert, threads=threads),
        }
    calls = {name: lambda x, y, own=own: own(x) for name, own in predicts.items()}
    for name, milliseconds in demo.times(calls).items():
        print(f"{name:13}{1e3 * milliseconds:6.0f} µs")


if __name__ == "__main__":
    main()
