"""Export: the model as a file that a runtime without TensorFlow loads and runs.

What it changes: who runs the model. Its operators and weights are written to a file, which ONNX
Runtime, OpenVINO or LiteRT optimize for the machine and run, with neither TensorFlow nor the
model's source there (`shared/runtimes.py` loads it). The mathematics stays; results differ by
rounding.

Its twin: `pt_impl/export.py`.

Where the frameworks differ and why:
- TensorFlow has its graph, which tf2onnx translates; PyTorch has to record one first. tf2onnx
  writes an operator that ONNX lacks into the file all the same, so that ONNX's checker has to find
  it, and does here.
- Images go in as in the framework: NHWC here, NCHW there. ONNX's operators know NCHW alone, so that
  files from here begin with a transposition; LiteRT's know NHWC alone.
- tf2onnx writes the parts of a LayerNormalization or a GELU, PyTorch's exporter the whole. ONNX
  Runtime puts the GELU together again; Keras 3's normalisation it does not recognise.
- Which sizes are open is said in the signature here, whatever the example's; in `torch.export` a
  size of one in the example is a constant.
- LiteRT is TensorFlow's own small runtime; PyTorch needs a further package to write its files.
- Keras 3's own `export(format="onnx")` calls tf2onnx too, but opens every model's batch and no
  other size, and tf_keras has none; this works in both flavours.

When it helps and when it hurts: it helps a program that only predicts, which starts at once and
takes a fraction of the memory, and small models, whose time in a framework is mostly the
framework's. Training stays behind, and so does what the format cannot say: operators that it lacks.
Check an export against its model on real data before it is used.

Run it alone: `python -m tf_impl.export` prints how far the files' predictions are from the model's,
and how long they take.
"""

import json
import zipfile
from collections.abc import Callable
from pathlib import Path

import tensorflow as tf

from shared import runtimes

_OPSET = 18  # the newest that tf2onnx 1.17 writes


def export_onnx(
    model: tf.keras.Model,
    example_inputs,
    path,
    metadata: dict | None = None,
    *,
    dynamic_batch: bool = True,
    dynamic_sequence: bool = False,
) -> Path:
    """Write the model in evaluation mode as one ONNX file and return its path.

    example_inputs: a tensor or a tuple of the model's positional arguments; anything else (a list)
    is handed over as it is. metadata: strings by name that the file carries. dynamic_batch: axis 0
    of every input may have any size, else the example's; dynamic_sequence: axis 1 too. Several
    outputs become outputs of their own, of a dict in the order of its sorted keys. The model is
    left as it is.

    Raises NotImplementedError with the reason where the model cannot be translated, and
    ModuleNotFoundError that names a missing package. Above 2 GiB protobuf refuses one file.
    Source: `tf2onnx.convert.from_function`.
    """
    runtimes.package("onnx", "onnx")
    convert = runtimes.package("tf2onnx.convert", "tf2onnx")
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
    return Path(path)


def export_openvino(
    model: tf.keras.Model,
    example_inputs,
    path,
    metadata: dict | None = None,
    *,
    dynamic_batch: bool = True,
    dynamic_sequence: bool = False,
) -> Path:
    """Write the model in evaluation mode for OpenVINO: `path` (.xml), weights in a .bin beside it.

    Arguments, result and errors as in `export_onnx`. Weights stay float32; in which precision they
    are used is said when the model is loaded. Source: `openvino.convert_model`.
    """
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
    for name, value in (metadata or {}).items():
        converted.set_rt_info(value, ["metadata", name])
    openvino.save_model(converted, str(path), compress_to_fp16=False)  # which is the default
    return Path(path)


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
    end. precision: of the weights in the file, "float32" or "float16", which halves it; a CPU
    computes in float32 either way. Raises ValueError for another precision.
    Source: `tf.lite.TFLiteConverter`.
    """
    if precision not in ("float32", "float16"):
        raise ValueError(f"unknown precision {precision!r}: float32 or float16")
    predict, signature = _function(model, example_inputs, dynamic_batch, dynamic_sequence)
    graph = predict.get_concrete_function(*signature)
    # Given a Keras 3 model in place of its function, it loses the weights without a word.
    converter = tf.lite.TFLiteConverter.from_concrete_functions([graph], predict)
    if precision == "float16":
        converter.optimizations = [tf.lite.Optimize.DEFAULT]
        converter.target_spec.supported_types = [tf.float16]
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

    return predict, signature


def main() -> None:
    """Export the digits CNN and print its files' differences and their time at batch 1."""
    import os
    import statistics
    import tempfile
    import time

    from shared.specs import TASKS
    from shared.weights import init_weights
    from tf_impl import models, runtime, training

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
