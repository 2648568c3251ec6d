"""Weight quantization: weights of dense layers in 8 or 4 bits, everything else in float.

    model = apply_int8(model, example_inputs)  # a copy
    predict = tf.function(model)

What it changes: the weights of dense layers become integers and scales, and float32 again when they
are multiplied. Activations do not change. int8 has one scale per output. int4 has one per 32 inputs
of an output, since 16 levels are too few for a whole row.

Its twin: `pt_impl/compression/weight_quantization.py`, which says where the frameworks differ.

When it helps and when it hurts: files and downloads shrink to a quarter or an eighth. It saves time
if reading weights takes longest: one sample and large layers. With many samples the conversion only
adds time. For speed on a CPU, quantize activations, too (`post_training_quantization.py`).

Run it alone: `python -m tf_impl.compression.weight_quantization` prints time and size at each
width.

Copy with it: `tf_impl/kit/checks/weight_quantization.py`, `tf_impl/kit/copying.py`.
"""

import warnings

import tensorflow as tf

from tf_impl.kit.checks.weight_quantization import check_rounded, check_weight_quantization
from tf_impl.kit.copying import copy_model, retrace

GROUP = 32  # inputs that share a scale in int4


def apply_int8(model: tf.keras.Model, inputs) -> tf.keras.Model:
    """Return a copy of the model with int8 weights in its dense layers.

    They are symmetric, with a scale for each output. A dense layer that `TimeDistributed` wraps
    stays in float32, and a warning names it: `Dense` by itself does the same for each step of time.
    A subclass of `Dense` stays as it is. The model is left as it is.

    Args:
        inputs: one sample or more, on which the copy is compared with the model: a tensor, or a
            tuple, list or dict of tensors as `fit` takes them; samples along the first axis.

    Raises ValueError for inputs that the model does not take; NotImplementedError for a model that
    Keras cannot copy or compute so, for tf_keras, and for a model that has no dense layer;
    RuntimeError where outputs are more than a relative 0.5 off the model's.
    Source: Keras's `Int8QuantizationConfig` without a quantizer of activations.
    """
    check_weight_quantization(model, inputs)
    config = tf.keras.quantizers.Int8QuantizationConfig(activation_quantizer=None)
    return _rounded(model, inputs, config)


def apply_int4(model: tf.keras.Model, inputs) -> tf.keras.Model:
    """Return a copy with 4-bit weights, a scale for each 32 inputs of an output.

    Else as `apply_int8`.
    Source: Keras's `Int4QuantizationConfig`.
    """
    check_weight_quantization(model, inputs)
    config = tf.keras.quantizers.Int4QuantizationConfig(block_size=GROUP)
    return _rounded(model, inputs, config)


def _rounded(model: tf.keras.Model, inputs, config) -> tf.keras.Model:
    rounded = copy_model(model, inputs)  # Keras quantizes in place
    wrapped = [
        layer.layer
        for layer in rounded._flatten_layers()
        if isinstance(layer, tf.keras.layers.TimeDistributed)
    ]

    def is_rounded(layer) -> bool:
        return type(layer) is tf.keras.layers.Dense and layer not in wrapped

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # layers that stay in float: all but dense ones
        rounded.quantize(config=config, filters=is_rounded)
    retrace(rounded)
    check_rounded(rounded, model, inputs)
    return rounded


def main() -> None:
    """Print time and size of a stack of large dense layers at each width, for one sample."""
    import tempfile
    from pathlib import Path
    from timeit import repeat

    from tf_impl.kit.quantized_files import load_quantized, save_quantized

    layers = [tf.keras.layers.Dense(2048) for _ in range(4)]
    model = tf.keras.Sequential([tf.keras.Input((2048,)), *layers])
    x = tf.random.normal((1, 2048))
    rounded = {"float32": model, "int8": apply_int8(model, x), "int4": apply_int4(model, x)}
    print("weights  ms for 1     MB")
    with tempfile.TemporaryDirectory() as folder:
        for title, each in rounded.items():
            path = save_quantized(each, x, Path(folder, title))
            predict = load_quantized(path)
            best = min(repeat(lambda: predict(x), number=1, repeat=50))  # noqa: B023
            print(f"{title:8}{1e3 * best:9.3f}{path.stat().st_size / 1e6:7.1f}")


if __name__ == "__main__":
    main()
