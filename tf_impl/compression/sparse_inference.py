"""Sparse inference: skip the zeros of pruned dense layers, with CSR matrices.

    predict = make_predict(model, min_sparsity=0.9)  # of a pruned, finalized model
    output = predict(x)

What it changes: the kernel of each dense layer with enough zeros is stored as a compressed sparse
row (CSR) matrix: the values that are not zero, their columns, and where each row begins. The
product visits only these values. Predictions are those of the dense model, up to rounding. A value
takes 8 bytes with its index, 4 in a dense kernel: below 50% zeros the sparse kernel is larger.

Its twin: `pt_impl/compression/sparse_inference.py`, which says where the frameworks differ.

When it helps and when it hurts: with few zeros it is slower, also at 50%: a dense product uses wide
vector units on contiguous data, a sparse one has to gather. Removing whole channels
(`structured_pruning.py`), or 2:4 patterns on a GPU, suit hardware better. It is for prediction
only: sparse kernels can't be trained.
- It helps on a CPU from about 90% zeros on, if layers are large.

Run it alone: `python -m tf_impl.compression.sparse_inference` compares dense with CSR at several
sparsities.

Copy with it: `tf_impl/kit/checks/sparse_inference.py`, `tf_impl/kit/tracing.py`.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain, count

import numpy as np
import tensorflow as tf

from tf_impl.kit.checks.sparse_inference import check_sparse_inference, to_csr
from tf_impl.kit.tracing import inlined, outputs


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
    Source: `tf.raw_ops.SparseMatrixMatMul`.
    """
    kernels = check_sparse_inference(model, min_sparsity)
    # Outputs by inputs, since the operator takes the sparse matrix first.
    sparse = {layer: to_csr(kernel.T) for layer, kernel in kernels.items()}

    @tf.function(jit_compile=False, reduce_retracing=True)
    def predict(x):
        with _multiplied_sparsely(sparse), inlined():
            return outputs(model, x)

    predict.layers = {
        name: (kernels[layer].nbytes, _bytes(sparse[layer], kernels[layer].dtype))
        for name, layer in _by_name(kernels).items()
    }
    return predict


def _by_name(layers: Iterable) -> dict:
    """Every layer under its name, or that and a number: Keras has names unique within a block."""
    found = {}
    for layer in layers:
        names = chain([layer.name], (f"{layer.name}_{number}" for number in count(1)))
        found[next(name for name in names if name not in found)] = layer
    return found


def _bytes(matrix: tf.Tensor, dtype) -> int:
    """Bytes of a CSR matrix's values and indices."""
    parts = tf.raw_ops.CSRSparseMatrixComponents(csr_sparse_matrix=matrix, index=0, type=dtype)
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
        a=kernel, b=rows, transpose_b=True, transpose_output=True
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
    from tf_impl.kit import training
    from tf_impl.kit.demo import Demo

    demo = Demo()
    demo.batches = [(tf.random.normal((32, 1024)),)]
    print("zeros  dense [ms]  CSR [ms]  dense [MB]  CSR [MB]")
    for sparsity in (0.5, 0.8, 0.9, 0.95):
        stack = [tf.keras.layers.Dense(1024, "relu"), tf.keras.layers.Dense(1024)]
        model = tf.keras.Sequential([tf.keras.Input((1024,)), *stack])
        for layer in stack:
            size = np.abs(layer.kernel)
            smallest = np.quantile(size, sparsity, method="lower")
            layer.kernel.assign(layer.kernel * tf.cast(size > smallest, tf.float32))
        sparse = make_predict(model, min_sparsity=sparsity - 0.01)
        ms = demo.times({"dense": training.make_predict(model), "sparse": sparse})
        dense_mb, sparse_mb = (sum(b) / 1e6 for b in zip(*sparse.layers.values(), strict=True))
        times = f"{ms['dense']:12.3f}{ms['sparse']:10.3f}"
        print(f"{sparsity:5}{times}{dense_mb:12.2f}{sparse_mb:10.2f}")


if __name__ == "__main__":
    main()
