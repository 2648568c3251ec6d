"""Files of quantized models: written if they predict the same, and read to predict as a graph.

Twin: `pt_impl/kit/quantized_files.py`.
Where the frameworks differ: TensorFlow runs the graph of a file as it is; PyTorch's is compiled by
TorchInductor, for each shape.
"""

from collections.abc import Callable
from pathlib import Path

import tensorflow as tf

from tf_impl.kit import saving
from tf_impl.kit.comparing import apart
from tf_impl.kit.tracing import check_sizes, input_tensors, outputs, trace

SAME = 1e-4  # relative L2: the outputs of a file to those of the model that was written


def save_quantized(model: tf.keras.Model, inputs, path) -> Path:
    """Write a model, in float or with Keras's integer weights, as a file that predicts the same.

    inputs: one sample or more: a tensor, or a tuple, list or dict of tensors as `fit` takes them;
    samples along the first axis. The file takes any number of samples of these sizes. The model is
    left as it is.

    Returns the path. Raises, and writes nothing, ValueError for inputs that the model does not
    take; NotImplementedError for a model that cannot be traced; RuntimeError where the file, read
    again, gives something else.
    """
    part = saving.save(trace(model, inputs), f"{path}.part")
    try:
        off = apart(saving.load(part)(*input_tensors(inputs)), outputs(model, inputs))
        if not off <= SAME:
            raise RuntimeError(f"outputs of the file are {off:.2%} off the model's")
        return part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def load_quantized(path, *, threads: int = 0) -> Callable:
    """Return `predict(x) -> output` over a file of `kit/saving.py`, as a graph.

    x: any number of samples, of the sizes of the example. `predict.threads` is TensorFlow's number
    of threads, 0 for one a core.
    threads: 0 leaves that number; another one is set for the whole process, which has one pool.

    Raises FileNotFoundError, and ValueError for a file that is damaged or something else, and in a
    call for other sizes; RuntimeError for another number of threads than TensorFlow runs already.
    """
    if threads:
        tf.config.threading.set_intra_op_parallelism_threads(threads)
    program = saving.load(path)

    def predict(x):
        check_sizes(program, x)
        return program(*tf.nest.flatten(x))

    predict.threads = tf.config.threading.get_intra_op_parallelism_threads()
    return predict
