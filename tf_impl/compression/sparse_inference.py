"""Sparse inference: predict with the zeros of pruned dense layers left out, as CSR matrices.

What it changes: the kernel of each `Dense` layer with enough zeros is stored as a compressed sparse
row (CSR) matrix: the values that are not zero, their columns, and where each row begins. The
product visits these values alone. Predictions are those of the dense model, up to rounding. A value
costs 8 bytes with its index, 4 when dense: below 50% of zeros the sparse kernel is the larger one.
`export_file` does the same to a file: LiteRT's format has sparse tensors.

Its twin: `pt_impl/compression/sparse_inference.py`.

Where the frameworks differ and why:
- Here the model is left alone and its dense layers compute otherwise while the graph is traced, in
  any kind of model. There a copy of the model gets other modules in place of its linear layers.
- TensorFlow has two sparse products: `tf.sparse.sparse_dense_matmul` over coordinates, which runs
  on one thread, and the one of its `CSRSparseMatrix`, which runs on all but has no public name.
  This is the second. PyTorch calls MKL.
- For convolutions neither framework has sparse kernels: they stay dense on both sides.
- Files with sparse tensors are LiteRT's, whose kernels leave blocks of zeros out; what is
  scattered, as here, is written out densely again when the file is loaded. PyTorch has none.

When it helps and when it hurts: on a CPU, from about 90% of zeros on, where layers are large; a
dense product uses wide vector units on data in order, a sparse one gathers, so at 50% of zeros it
is the slower one. It is the price of zeros anywhere: whole channels gone (structured pruning) or
2:4 patterns on a GPU suit hardware better. It is for prediction: kernels do not train.

Run it alone: `python -m tf_impl.compression.sparse_inference` prints dense against CSR at several
sparsities.

Copy with it: `tf_impl/kit/comparing.py`, `tf_impl/kit/tracing.py`.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain, count
from pathlib import Path

import numpy as np
import tensorflow as tf
from tensorflow.python.framework.convert_to_constants import convert_variables_to_constants_v2
from tensorflow.python.ops.linalg.sparse.sparse_csr_matrix_ops import CSRSparseMatrix

from tf_impl.kit import comparing, tracing

SAME = 1e-4  # relative L2 of a file's outputs


def make_predict(model: tf.keras.Model, *, min_sparsity: float = 0.7) -> Callable:
    """Return `predict(x) -> output` in evaluation mode, over sparse kernels of dense layers.

    x: a tensor, or a structure of them as `fit` hands it over: unpacked only where `call` takes
    several arguments. min_sparsity: share of zeros from which on a layer becomes sparse, above 0
    and at most 1.
    `predict.layers` maps the name of each such layer to (bytes of the dense kernel, bytes of the
    sparse one); of layers with the same name the later ones get a number ("up", "up_1"). The model
    is left as it is; sparse kernels are copies, so make them after training.

    Layers are `Dense` exactly, at any depth: a subclass may use its kernel in another way.

    Raises ValueError for another min_sparsity, a model without variables, one with pruning masks
    and where no dense layer has so many zeros; NotImplementedError for kernels that are not float32
    or float64.
    Source: TensorFlow's `CSRSparseMatrix` (`tf.raw_ops.SparseMatrixMatMul`).
    """
    if not 0.0 < min_sparsity <= 1.0:
        raise ValueError(f"min_sparsity must be above 0 and at most 1, not {min_sparsity!r}")
    if not model.built:
        raise ValueError("the model has no variables yet: call it once on an example input")
    _refuse_masks(model)
    kernels = {}
    for layer in model._flatten_layers():
        if type(layer) is tf.keras.layers.Dense:
            kernel = np.array(layer.kernel)
            if np.mean(kernel == 0) >= min_sparsity:
                kernels[layer] = kernel
    if not kernels:
        raise ValueError(f"no dense layer of the model has {min_sparsity:.0%} of zeros: prune it")
    for layer in kernels:
        if layer.compute_dtype not in ("float32", "float64"):
            raise NotImplementedError(f"{layer.name!r} computes in {layer.compute_dtype}")
    # Outputs by inputs, since the operator takes the sparse matrix first.
    sparse = {layer: CSRSparseMatrix(kernel.T) for layer, kernel in kernels.items()}

    @tf.function(jit_compile=False, reduce_retracing=True)
    def predict(x):
        with _multiplied_sparsely(sparse), tracing.inlined():
            return tracing.outputs(model, x)

    predict.layers = {
        name: (kernels[layer].nbytes, _bytes(sparse[layer]))
        for name, layer in _by_name(kernels).items()
    }
    return predict


def export_file(model: tf.keras.Model, example_inputs, path, *, sparse: bool = True) -> Path:
    """Write `model` as a LiteRT file: kernels as the values that are not zero, and their places.

    Not `sparse`: all values, for the same runtime. example_inputs: as in `tracing.trace`. The
    model is left as it is.

    Raises ValueError for a model with pruning masks and where no kernel has zeros enough for it to
    pay, NotImplementedError where LiteRT's converter can't take the model, RuntimeError where the
    file predicts something else than the model.
    Source: `tf.lite.Optimize.EXPERIMENTAL_SPARSITY`.
    """
    _refuse_masks(model)
    program = tracing.trace(model, example_inputs).get_concrete_function()
    frozen = convert_variables_to_constants_v2(program)
    converter = tf.lite.TFLiteConverter.from_concrete_functions([frozen])
    converter.optimizations = [tf.lite.Optimize.EXPERIMENTAL_SPARSITY] if sparse else []
    try:
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
    if not apart <= SAME:
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
        raise ValueError(f"{path} is no whole LiteRT file: {what}") from error
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


def _refuse_masks(model: tf.keras.Model) -> None:
    for layer in model._flatten_layers():  # of tfmot, or a `call` over a mask
        if hasattr(layer, "pruning_obj") or hasattr(vars(layer).get("call"), "mask"):
            raise ValueError("the model has pruning masks: finalize it first")


def _by_name(layers: Iterable) -> dict:
    """Every layer under its name, or that and a number: Keras has names unique within a block."""
    found = {}
    for layer in layers:
        names = chain([layer.name], (f"{layer.name}_{number}" for number in count(1)))
        found[next(name for name in names if name not in found)] = layer
    return found


def _interpreter(content: bytes):
    """LiteRT with a file's content, and as many threads as TensorFlow has."""
    from ai_edge_litert.interpreter import Interpreter  # for files alone

    threads = tf.config.threading.get_intra_op_parallelism_threads() or os.cpu_count()
    return Interpreter(model_content=content, num_threads=threads)


def _sparse_tensors(interpreter) -> int:
    return sum(bool(one["sparsity_parameters"]) for one in interpreter.get_tensor_details())


def _bytes(matrix: CSRSparseMatrix) -> int:
    """Bytes of a CSR matrix's values and indices."""
    parts = tf.raw_ops.CSRSparseMatrixComponents(
        csr_sparse_matrix=matrix._matrix, index=0, type=matrix.dtype
    )
    return sum(part.numpy().nbytes for part in parts)


@contextmanager
def _multiplied_sparsely(sparse: dict) -> Iterator[None]:
    """Let the layers compute with their sparse kernels until the context ends: for one trace."""
    before = {layer: vars(layer).get("call") for layer in sparse}
    try:
        for layer, kernel in sparse.items():
            layer.call = partial(_product, layer, kernel)
        yield
    finally:
        for layer, call in before.items():
            del layer.call
            if call is not None:
                layer.call = call


def _product(layer, kernel, inputs, training=None):
    """What a dense layer computes: (..., in) -> (..., out). Keras 3 hands over `training`."""
    rows = tf.reshape(inputs, (-1, inputs.shape[-1]))
    product = tf.raw_ops.SparseMatrixMatMul(
        a=kernel._matrix, b=rows, transpose_b=True, transpose_output=True
    )
    if layer.use_bias:
        product = product + tf.cast(layer.bias, product.dtype)
    shape = tf.concat([tf.shape(inputs)[:-1], [layer.units]], 0)
    product = tf.reshape(product, shape)
    product.set_shape([*inputs.shape[:-1], layer.units])
    # Of the whole product: an activation may be over another axis than that of the units.
    return product if layer.activation is None else layer.activation(product)


def main() -> None:
    """Print dense layers of 1,024 units against CSR at several shares of zeros, interleaved."""
    import statistics
    import time

    from tf_impl.kit import runtime, training

    tf.keras.utils.set_random_seed(0)
    x = tf.random.normal((32, 1024))
    print("zeros  dense [ms]  CSR [ms]  dense [MB]  CSR [MB]")
    for sparsity in (0.5, 0.8, 0.9, 0.95):
        stack = [tf.keras.layers.Dense(1024, "relu"), tf.keras.layers.Dense(1024)]
        model = tf.keras.Sequential([tf.keras.Input((1024,)), *stack])
        for layer in stack:
            kernel, bias = layer.get_weights()
            size = np.abs(kernel)
            smallest = np.quantile(size, sparsity, method="lower")
            layer.set_weights([kernel * (size > smallest), bias])
        sparse = make_predict(model, min_sparsity=sparsity - 0.01)
        times = {training.make_predict(model): [], sparse: []}
        for _ in range(100):
            for predict, own in times.items():
                start = time.perf_counter()
                predict(x)
                runtime.synchronize()
                own.append((time.perf_counter() - start) * 1e3)
        dense_ms, sparse_ms = (statistics.median(own[10:]) for own in times.values())
        dense_mb, sparse_mb = (sum(b) / 1e6 for b in zip(*sparse.layers.values(), strict=True))
        print(f"{sparsity:5}{dense_ms:12.3f}{sparse_ms:10.3f}{dense_mb:12.2f}{sparse_mb:10.2f}")


if __name__ == "__main__":
    main()
