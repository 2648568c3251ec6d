"""What sparse inference refuses, and the CSR matrices for which TensorFlow has no public name."""

import numpy as np
import tensorflow as tf
from tensorflow.python.ops.linalg.sparse.sparse_csr_matrix_ops import CSRSparseMatrix


def check_sparse_inference(model: tf.keras.Model, min_sparsity: float) -> dict:
    """Return the kernels with so many zeros: dense layer -> kernel.

    Raises ValueError for another min_sparsity, a model without variables, one with pruning masks,
    and where no layer has so many; NotImplementedError for layers that do not compute in float32 or
    float64.
    """
    if not 0.0 < min_sparsity <= 1.0:
        raise ValueError(f"min_sparsity must be above 0 and at most 1, not {min_sparsity!r}")
    if not model.built:
        raise ValueError("the model has no variables yet: call it once on an example input")
    refuse_masks(model)
    kernels = {}
    for layer in model._flatten_layers():
        # Of this type exactly: a subclass may use its kernel in another way.
        if type(layer) is tf.keras.layers.Dense:
            kernel = np.array(layer.kernel)
            if np.mean(kernel == 0) >= min_sparsity:
                kernels[layer] = kernel
    if not kernels:
        raise ValueError(f"no dense layer of the model has {min_sparsity:.0%} of zeros: prune it")
    for layer in kernels:
        if layer.compute_dtype not in ("float32", "float64"):
            raise NotImplementedError(f"{layer.name!r} computes in {layer.compute_dtype}")
    return kernels


def to_csr(matrix: np.ndarray) -> tf.Tensor:
    """Return a CSR matrix as `tf.raw_ops` take it.

    The operator that makes one (`tf.raw_ops.DenseToCSRSparseMatrix`) gives it no shape that a
    graph could read.
    """
    return CSRSparseMatrix(matrix)._matrix


def refuse_masks(model: tf.keras.Model) -> None:
    """Raise ValueError for a model with pruning masks."""
    for layer in model._flatten_layers():  # of tfmot, or a `call` over a mask
        if hasattr(layer, "pruning_obj") or hasattr(vars(layer).get("call"), "mask"):
            raise ValueError("the model has pruning masks: finalize it first")
