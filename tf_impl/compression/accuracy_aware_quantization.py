"""Accuracy-aware quantization: int8, except for layers that lose too much accuracy.

    quantized, search = apply_accuracy_aware_int8(model, images[:256], error, most=0.1)
    print(search.as_json())  # which layer costs what, and which stay in float

What it changes: which layers `post_training_quantization.py` quantizes. First each layer is
quantized with all others in float. The error of the predictions is its sensitivity. Then the most
sensitive layers stay in float, one more at a time, until the error is small enough. This is a
greedy search, as in Intel's Neural Compressor and in NNCF. It needs one quantized model per layer,
and one more for each layer that stays in float.

Its twin: `pt_impl/compression/accuracy_aware_quantization.py`, which says where the frameworks
differ.

When it helps and when it hurts: it helps if a few values are far larger than the rest: they use up
the range of their tensor, and all others become zero. Then one layer in float is enough. If every
layer loses a little, many stay in float, and quantization-aware training is better. Judge by
samples that were not used for calibration.

Run it alone: `python -m tf_impl.compression.accuracy_aware_quantization` prints what a planted
outlier does to each layer.

Copy with it: `shared/layer_search.py`, `shared/onnx_quantization.py`,
`tf_impl/compression/post_training_quantization.py`,
`tf_impl/kit/checks/post_training_quantization.py`, `tf_impl/kit/int8_files.py`,
`tf_impl/kit/tracing.py`.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import tensorflow as tf

from shared.layer_search import LayerSearch, find_layers_to_keep
from tf_impl.compression import post_training_quantization as quantization
from tf_impl.kit.int8_files import interpret
from tf_impl.kit.tracing import input_tensors


def apply_accuracy_aware_int8(
    model: tf.keras.Model, calibration, error: Callable, *, most: float = 0.1
) -> tuple[bytes, LayerSearch]:
    """Return the model in static int8 but for layers that lose too much, and what was tried.

    Each attempt calibrates anew. The model is left as it is.

    Args:
        calibration: as for `apply_static_int8`.
        error: `error(predict)` says how bad predictions are; less is better, such as points of
            accuracy lost on samples with labels, or the distance of outputs from the model's.
        most: the error that is allowed.

    Raises as `apply_static_int8`.
    """
    names = quantization.int8_layers(model, calibration)

    def make(kept):
        return quantization.apply_static_int8(model, calibration, keep_float=kept)

    search = find_layers_to_keep(names, lambda kept: error(interpret(make(kept))), most=most)
    return make(search.kept), search


def search_onnxruntime_int8(
    model: tf.keras.Model, calibration, error: Callable, *, most: float = 0.1
) -> LayerSearch:
    """Return the search of `apply_accuracy_aware_int8` in ONNX Runtime.

    `quantize_onnxruntime_int8(..., keep_float=search.kept)` writes the file.
    Source: `onnxruntime.quantization.quantize_static`, its `nodes_to_exclude`.
    """
    from shared import onnx_quantization

    with tempfile.TemporaryDirectory() as folder:
        whole, path = Path(folder) / "whole.onnx", Path(folder) / "model.onnx"
        quantization.keep_onnxruntime_float32(model, calibration, whole)
        batches = [
            tuple(np.asarray(part[start : start + 1]) for part in input_tensors(calibration))
            for start in range(len(input_tensors(calibration)[0]))
        ]

        def error_of(kept):
            onnx_quantization.quantize(whole, path, batches, keep_float=kept)
            return error(quantization.load_onnxruntime(path))

        return find_layers_to_keep(onnx_quantization.layers(whole), error_of, most=most)


def main() -> None:
    """Print what rounding each layer costs a digits CNN with one channel 256 times larger."""
    from shared.layer_search import distance, plant_outlier
    from tf_impl.kit import models, training
    from tf_impl.kit.demo import Demo

    demo = Demo("digits-cnn", batch_size=32)
    model, optimizer, loss_fn = demo.build()
    demo.fit(training.make_train_step(model, optimizer, loss_fn))
    weights = plant_outlier(models.export_weights(model), layer="conv1", reader="conv2")
    planted = models.build(demo.task.model, weights)
    x = demo.train[0][:64]
    wanted = training.make_predict(planted)(x)
    _, search = apply_accuracy_aware_int8(planted, x, lambda p: distance(p(x), wanted))
    for name, value in search.as_json().items():
        print(name, value)


if __name__ == "__main__":
    main()
