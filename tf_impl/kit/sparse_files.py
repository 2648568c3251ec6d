"""LiteRT files whose kernels hold the values that are not zero, and their places.

PyTorch has no such file: its exporters refuse CSR tensors. LiteRT's kernels leave blocks of zeros
out; what is scattered is written out densely again when the file is loaded.
"""

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import tensorflow as tf
from tensorflow.python.framework.convert_to_constants import convert_variables_to_constants_v2

from tf_impl.kit import comparing, tracing
from tf_impl.kit.checks.sparse_inference import refuse_masks

_SAME = 1e-4  # relative L2 of a file's outputs


def export_file(model: tf.keras.Model, example_inputs, path, *, sparse: bool = True) -> Path:
    """Write `model` as a LiteRT file: kernels as the values that are not zero, and their places.

    Not `sparse`: all values, for the same runtime. example_inputs: as in `tracing.trace`. The
    model is left as it is.

    Raises ValueError for a model with pruning masks and where no kernel has zeros enough for it to
    pay, NotImplementedError where LiteRT's converter can't take the model, RuntimeError where the
    file predicts something else than the model.
    Source: `tf.lite.Optimize.EXPERIMENTAL_SPARSITY`.
    """
    refuse_masks(model)
    program = tracing.trace(model, example_inputs).get_concrete_function()
    try:
        frozen = convert_variables_to_constants_v2(program)
        converter = tf.lite.TFLiteConverter.from_concrete_functions([frozen])
        converter.optimizations = [tf.lite.Optimize.EXPERIMENTAL_SPARSITY] if sparse else []
        content = converter.convert()
    except Exception as error:
        reason = tracing.one_line(error)
        raise NotImplementedError(f"LiteRT's converter refuses it: {reason}") from error
    if sparse and not _sparse_tensors(_interpreter(content)):
        raise ValueError("no kernel of the model has zeros enough to be stored sparsely: prune it")
    part = Path(f"{path}.part")
    part.write_bytes(content)
    few = tf.nest.map_structure(lambda tensor: tensor[:32], example_inputs)
    apart = comparing.apart(load_file(part)(few), tracing.outputs(model, few))
    if not apart <= _SAME:
        part.unlink()
        raise RuntimeError(f"LiteRT computes something else with it: {apart:.2%} off the model")
    return part.replace(path)


def load_file(path) -> Callable:
    """Return `predict(x) -> output` of a file of `export_file`, run by LiteRT with XNNPACK.

    x: as `example_inputs`. Several outputs are a tuple, those of a dict in the order of its sorted
    keys. Threads are those of TensorFlow.
    `predict.sparse` is the number of tensors that are sparse in the file. Executes no code of it.

    Raises FileNotFoundError, and ValueError for a file that is cut or something else. A changed
    weight goes unnoticed: the format has no checksum.
    """
    content = Path(path).read_bytes()
    try:
        interpreter = _interpreter(content)
        interpreter.allocate_tensors()
    except (ValueError, RuntimeError) as error:
        what = " ".join(str(error).split())
        raise ValueError(f"{path} is not a complete LiteRT file: {what}") from error
    inputs = sorted(interpreter.get_input_details(), key=lambda one: one["name"])
    outputs = [one["index"] for one in interpreter.get_output_details()]
    shapes = []

    def predict(x):
        arrays = [np.asarray(part) for part in tf.nest.flatten(x)]
        if shapes != [array.shape for array in arrays]:
            for given, array in zip(inputs, arrays, strict=True):
                interpreter.resize_tensor_input(given["index"], array.shape)
            interpreter.allocate_tensors()
            shapes[:] = [array.shape for array in arrays]
        for given, array in zip(inputs, arrays, strict=True):
            interpreter.set_tensor(given["index"], array)
        interpreter.invoke()
        found = tuple(tf.constant(interpreter.get_tensor(place)) for place in outputs)
        return found[0] if len(found) == 1 else found

    predict.sparse = _sparse_tensors(interpreter)
    return predict


def _interpreter(content: bytes):
    """LiteRT with a file's content, and as many threads as TensorFlow has."""
    from ai_edge_litert.interpreter import Interpreter  # only for files

    threads = tf.config.threading.get_intra_op_parallelism_threads() or os.cpu_count()
    return Interpreter(model_content=content, num_threads=threads)


def _sparse_tensors(interpreter) -> int:
    return sum(bool(one["sparsity_parameters"]) for one in interpreter.get_tensor_details())
