"""Files of models over int8 activations: compared with the model first, and run by LiteRT.

Twin: `pt_impl/kit/int8_files.py`.
Where the frameworks differ: what is quantized is the content of a LiteRT file here, which is
interpreted. There it is a graph of operators, written as names and tensors, which TorchInductor
compiles for each shape.
"""

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import tensorflow as tf

from tf_impl.kit.checks.post_training_quantization import keep_if_near, refusals
from tf_impl.kit.tracing import litert_function, trace

SAME, MOST_APART = 1e-4, 0.5  # relative L2 of a file's outputs: in float32, in integers


def keep_float32(model: tf.keras.Model, x, path) -> Path:
    """Write the model as it is, in float32, for `load_int8`; the model is left as it is.

    x: one sample or more: a tensor, or a tuple, list or dict of tensors as `fit` takes them;
    samples along the first axis. The file takes any number of samples of these sizes. Before it is
    there, it is read again and compared with the model.

    Returns the path. Raises, and writes nothing, ValueError for inputs that the model does not
    take; NotImplementedError for a model that the converter refuses; RuntimeError where the file
    gives something else.
    """
    program = trace(model, x)
    converter = tf.lite.TFLiteConverter.from_concrete_functions([litert_function(program)], program)
    with refusals("LiteRT's converter refuses it"):
        content = converter.convert()
    part = save_as_it_is(content, f"{path}.part")
    return keep_if_near(part, path, load_int8, model, x, SAME)


def save_int8(quantized: bytes, model: tf.keras.Model, x, path) -> Path:
    """Write what `apply_static_int8` or `apply_dynamic_int8` made of the model, for `load_int8`.

    x: as for `keep_float32`. Returns the path. Raises, and writes nothing, RuntimeError where
    outputs for x are more than a relative `MOST_APART` off the model's.
    """
    part = save_as_it_is(quantized, f"{path}.part")
    return keep_if_near(part, path, load_int8, model, x, MOST_APART)


def save_as_it_is(quantized: bytes, path) -> Path:
    """Write what `convert_qat` returned, which it has compared, for `load_int8`."""
    Path(path).write_bytes(quantized)
    return Path(path)


def load_int8(path, *, threads: int = 0) -> Callable:
    """Return `predict(x) -> output` over a LiteRT file, by XNNPACK, on the CPU, one call at a time.

    x: as for `keep_float32`. Several outputs are a tuple, of a dict in the order of its sorted
    keys. Another number of samples than in the call before prepares buffers anew. The file of a
    model with a loop, such as that of an LSTM, is run once for each sample. `predict.threads` is
    the number of its threads.
    threads: of the interpreter's own pool; 0: as many as TensorFlow has.

    The file is data: LiteRT executes nothing but its own operators. A changed weight goes
    unnoticed: the format has no checksum. Raises FileNotFoundError, and ValueError for a file that
    is damaged or something else.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"there is no file {path}")
    try:
        # Its bytes: a file that is mapped could be written over.
        return interpret(Path(path).read_bytes(), threads=threads)
    except (ValueError, RuntimeError) as error:
        what = " ".join(str(error).split())[:300]
        raise ValueError(f"{path} is not a complete LiteRT file: {what}") from None


def interpret(content: bytes, *, threads: int = 0) -> Callable:
    """Return `predict(x) -> output` over the content of a LiteRT file; else as `load_int8`."""
    from ai_edge_litert.interpreter import Interpreter

    threads = threads or tf.config.threading.get_intra_op_parallelism_threads() or os.cpu_count()
    interpreter = Interpreter(model_content=content, num_threads=threads)
    interpreter.allocate_tensors()
    inputs = sorted(interpreter.get_input_details(), key=lambda detail: detail["name"])
    outputs = interpreter.get_output_details()
    single = any(detail["shape_signature"][0] == 1 for detail in inputs)  # of a model with a loop
    shapes: list = []

    def run(arrays):
        if shapes != [array.shape for array in arrays]:  # memory is laid out for one size
            for detail, array in zip(inputs, arrays, strict=True):
                interpreter.resize_tensor_input(detail["index"], array.shape, strict=True)
            interpreter.allocate_tensors()
            shapes[:] = [array.shape for array in arrays]
        for detail, array in zip(inputs, arrays, strict=True):
            interpreter.set_tensor(detail["index"], array)
        interpreter.invoke()
        return [interpreter.get_tensor(detail["index"]) for detail in outputs]

    def predict(x):
        arrays = [np.asarray(part) for part in tf.nest.flatten(x)]
        if single:
            samples = [run([part[None] for part in row]) for row in zip(*arrays, strict=True)]
            found = [np.concatenate(parts) for parts in zip(*samples, strict=True)]
        else:
            found = run(arrays)
        found = tuple(map(tf.constant, found))
        return found[0] if len(found) == 1 else found

    predict.threads = threads
    return predict
