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
- LiteRT is TensorFlow's own small runtime; PyTorch needs a further package to write its files.
- Keras 3's own `export(format="onnx")` calls tf2onnx too, but opens every model's batch and no
  other size, and tf_keras has none; this works in both flavours.

When it helps and when it hurts: it helps a program that only predicts, which starts at once and
takes a fraction of the memory, and small models, whose time in a framework is mostly the
framework's. Training stays behind, and so does what the format cannot say: operators that it lacks.
Check an export against its model on real data before it is used.

Run it alone: `python -m tf_impl.deployment.export` prints how far the files' predictions are from
the model's, and how long they take.
"""

import json
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import tensorflow as tf
from tensorflow.python.framework.convert_to_constants import convert_variables_to_constants_v2

from shared import calibration, runtimes

_OPSET = 18  # the newest that tf2onnx 1.17 writes
_QUANTIZER = "shared.onnx_quantization", "onnxruntime"  # and the package that it needs


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

    example_inputs: a tensor or a tuple of the model's positional arguments; anything else (a list)
    is handed over as it is. metadata: strings by name that the file carries. dynamic_batch: axis 0
    of every input may have any size, else the example's; dynamic_sequence: axis 1 too. Several
    outputs become outputs of their own, of a dict in the order of its sorted keys. precision:
    "float32", or "int8" of weights and activations, whose ranges are those that the example inputs
    give: a few hundred real samples. The model is left as it is.

    Raises ValueError for another precision, NotImplementedError with the reason where the model
    cannot be translated or has nothing to quantize, and ModuleNotFoundError that names a missing
    package. Above 2 GiB protobuf refuses one file.
    Sources: `tf2onnx.convert.from_function`, `onnxruntime.quantization.quantize_static`.
    """
    if precision not in ("float32", "int8"):
        raise ValueError(f"unknown precision {precision!r}: float32 or int8")
    runtimes.package("onnx", "onnx")
    convert = runtimes.package("tf2onnx.convert", "tf2onnx")
    if precision == "int8":
        parts = [part.numpy() for part in tf.nest.flatten(example_inputs)]
        batches = calibration.batches(parts, size=32 if dynamic_batch else len(parts[0]))
    predict, signature = _function(model, example_inputs, dynamic_batch, dynamic_sequence)
    file, _ = convert.from_function(predict, input_signature=signature, opset=_OPSET)
    for name, value in (metadata or {}).items():
        file.metadata_props.add(key=name, value=value)
    Path(path).write_bytes(file.SerializeToString())
    try:
        runtimes.check_onnx(path)
    except ValueError as error:
        Path(path).unlink()
        raise NotImplementedError(f"ONNX can't take this model: {error}") from error
    if precision == "int8":
        runtimes.package(*_QUANTIZER).replace(path, batches)
    return Path(path)


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


def _for_openvino(model, example_inputs, dynamic_batch: bool, dynamic_sequence: bool):
    openvino = runtimes.openvino_package()
    predict, signature = _function(model, example_inputs, dynamic_batch, dynamic_sequence)
    try:
        converted = openvino.convert_model(predict.get_concrete_function(*signature))
    except Exception as error:  # of the frontend that finds an operator it does not know
        _, _, summary = str(error).rpartition("Summary:")
        reason = runtimes.one_line(RuntimeError(summary))
        raise NotImplementedError(f"OpenVINO can't take this model: {reason}") from error
    for output in converted.outputs:  # among them ends of the graph that nobody reads
        if not any(name.startswith("output_") for name in output.names):
            converted.remove_result(output.node)
    return converted


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

    Arguments, result and errors as in `export_onnx`; metadata stands in a zip archive at the file's
    end. precision: "float32"; "float16" of the weights in the file, which halves it, a CPU computes
    in float32 either way; "int8" of weights and activations, the model's inputs and outputs staying
    as they are. Raises ValueError for another precision. Source: `tf.lite.TFLiteConverter`.
    """
    if precision not in ("float32", "float16", "int8"):
        raise ValueError(f"unknown precision {precision!r}: float32, float16 or int8")
    predict, signature = _function(model, example_inputs, dynamic_batch, dynamic_sequence)
    graph = predict.get_concrete_function(*signature)
    # Given a Keras 3 model in place of its function, it loses the weights without a word.
    converter = tf.lite.TFLiteConverter.from_concrete_functions([graph], predict)
    if precision != "float32":
        converter.optimizations = [tf.lite.Optimize.DEFAULT]
    if precision == "float16":
        converter.target_spec.supported_types = [tf.float16]
    elif precision == "int8":
        # It keeps the variables of Keras 3 as such, and cannot calibrate then.
        frozen = convert_variables_to_constants_v2(graph)
        converter = tf.lite.TFLiteConverter.from_concrete_functions([frozen])
        converter.optimizations = [tf.lite.Optimize.DEFAULT]
        samples = [*calibration.batches(tf.nest.flatten(example_inputs), size=1)]
        converter.representative_dataset = lambda: map(list, samples)
        converter.target_spec.supported_ops = [tf.lite.OpsSet.TFLITE_BUILTINS_INT8]
    try:
        file = converter.convert()
    except Exception as error:  # a private class, and others of MLIR
        reason = runtimes.one_line(error)
        raise NotImplementedError(f"LiteRT can't take this model: {reason}") from error
    Path(path).write_bytes(file)
    with zipfile.ZipFile(path, "a") as archive:  # what follows the model is not read by runtimes
        archive.writestr(runtimes.METADATA, json.dumps(metadata or {}))
    return Path(path)


def _function(
    model: tf.keras.Model, example_inputs, dynamic_batch: bool, dynamic_sequence: bool
) -> tuple[Callable, list[tf.TensorSpec]]:
    """The model as a function of its tensors one by one, and what each of them may be."""
    if not model.built:
        raise ValueError("the model has no variables yet: call it once on an example input")
    open_axes = [0] * dynamic_batch + [1] * dynamic_sequence
    tensors = tf.nest.flatten(example_inputs)
    given = [tensor.name.split(":")[0] for tensor in getattr(model, "inputs", None) or []]
    names = given if len(given) == len(tensors) else [f"input_{n}" for n in range(len(tensors))]
    signature = []
    for name, tensor in zip(names, tensors, strict=True):
        sizes = [None if axis in open_axes else size for axis, size in enumerate(tensor.shape)]
        signature.append(tf.TensorSpec(sizes, tensor.dtype, name=name))

    @tf.function(jit_compile=False)
    def predict(*parts):
        x = tf.nest.pack_sequence_as(example_inputs, parts)
        found = model(*x, training=False) if isinstance(x, tuple) else model(x, training=False)
        return {f"output_{n}": part for n, part in enumerate(tf.nest.flatten(found))}

    try:
        predict.get_concrete_function(*signature)
    except Exception as error:  # which quotes code before it comes to the point
        told = re.search(r"^\s*\w*Error: (.+)$", str(error), re.MULTILINE)
        reason = told[1] if told else runtimes.one_line(error)
        raise NotImplementedError(f"the model can't be traced with this: {reason}") from error
    return predict, signature


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
            taken = []
            for _ in range(200):
                start = time.perf_counter()
                predict(one)
                taken.append(time.perf_counter() - start)
            print(f"{name:13} differs by {apart:.0e}, {1e6 * statistics.median(taken):5.0f} µs")


if __name__ == "__main__":
    main()
