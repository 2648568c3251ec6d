"""Weight quantization: the weights of dense layers in 8 or 4 bits, everything else in float.

What it changes: what a dense layer reads. Its weights become integers and scales, in float32 again
where they are multiplied; activations are as they were. int8 has a scale for each output, int4 one
for each 32 inputs of an output, since 16 levels are too few for a whole row.

Its twin: `pt_impl/compression/weight_quantization.py`.

Where the frameworks differ and why:
- Keras has `model.quantize`, which changes a model in place, so that a copy of its layers is
  needed: functional models alone. torchao replaces the weight tensors of any `nn.Module`.
- Keras gives a layer another call, for integers, past which `TimeDistributed` goes straight to
  the one for floats.
- TensorFlow has no kernel that multiplies 8-bit or 4-bit weights by floats: the graph makes floats
  of the weights first. PyTorch has one for 4 bits on a CPU, which is slow over float32 activations.
- Both do so in each call, but TensorFlow does it once for kernels of at most 100 KiB in float32.
- The copy is traced and its graph written, since a file of Keras would need the code of custom
  layers to be read again.

When it helps and when it hurts: files and downloads shrink to a quarter or an eighth. Time is saved
where reading weights takes longest, with one sample and large layers, and by kernels that read
integers; with many samples the same products are made and the conversion comes on top. For speed
on a CPU, quantize activations too (`post_training_quantization.py`).

Run it alone: `python -m tf_impl.compression.weight_quantization` prints time and size at each
width.

Copy with it: `tf_impl/kit/comparing.py`, `tf_impl/kit/copying.py`, `tf_impl/kit/saving.py`,
`tf_impl/kit/tracing.py`.
"""

import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

import tensorflow as tf

from tf_impl.kit import comparing, copying, saving, tracing

GROUP = 32  # inputs that share a scale in int4
# Relative L2: a file's outputs to the model's that was written, rounded weights to the model's.
SAME, MOST_APART = 1e-4, 0.5


def keep_float32(model: tf.keras.Model, inputs, path) -> Path:
    """Write the model as it is for `load_quantized`; else as `quantize_int8`."""
    return _write(model, inputs, path)


def apply_int8(model: tf.keras.Model, inputs) -> tf.keras.Model:
    """Return a copy of the model with the weights of `quantize_int8`, which raises the same."""
    return _quantize(model, inputs, bits=8)


def apply_int4(model: tf.keras.Model, inputs) -> tf.keras.Model:
    """Return a copy of the model with the weights of `quantize_int4`, which raises the same."""
    return _quantize(model, inputs, bits=4)


def quantize_int8(model: tf.keras.Model, inputs, path) -> Path:
    """Write `path`: dense layers with int8 weights, symmetric, a scale for each output.

    A dense layer that `TimeDistributed` wraps stays in float32, and a warning names it: `Dense`
    alone does the same for each step of time. The model is left as it is.

    Args:
        inputs: one sample or more, for shapes, dtypes and a comparison of what was written: a
            tensor, or a tuple, list or dict of tensors as `fit` takes them; samples along the first
            axis.

    Returns the path.
    Raises, and writes nothing, ValueError for inputs that the model does not take;
    NotImplementedError for a model that Keras cannot copy or compute so, for tf_keras, and for a
    model that has no dense layer; RuntimeError where outputs are more than a relative `MOST_APART`
    off the model's, or the file's are not those of the quantized model.
    Source: Keras's `Int8QuantizationConfig` without a quantizer of activations.
    """
    return _write(apply_int8(model, inputs), inputs, path)


def quantize_int4(model: tf.keras.Model, inputs, path) -> Path:
    """Write `path`: dense layers with 4-bit weights, a scale for each 32 inputs of an output.

    Else as `quantize_int8`.
    Source: Keras's `Int4QuantizationConfig`.
    """
    return _write(apply_int4(model, inputs), inputs, path)


def load_quantized(path) -> Callable:
    """Return `predict(x) -> output` over a file of this module, as a graph.

    x: any number of samples, of the sizes of the example.

    Raises FileNotFoundError, and ValueError for a file that is damaged or something else, and in a
    call for other sizes.
    """
    program = saving.load(path)

    def predict(x):
        tracing.check_sizes(program, x)
        return program(*tf.nest.flatten(x))

    return predict


def _quantize(model: tf.keras.Model, inputs, *, bits: int) -> tf.keras.Model:
    if not hasattr(tf.keras, "quantizers"):
        raise NotImplementedError("tf_keras has no quantization of weights: use Keras 3")
    tracing.trace(model, inputs)  # whatever is wrong with it, before it is copied
    _check_layers(model)
    copy = copying.copy_model(model, inputs)
    distributed = _distributed(copy)
    kinds = tf.keras.quantizers
    config = (
        kinds.Int8QuantizationConfig(activation_quantizer=None)
        if bits == 8
        else kinds.Int4QuantizationConfig(block_size=GROUP)
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # layers that stay in float: all but dense ones
        copy.quantize(
            config=config, filters=lambda layer: _is_dense(layer) and layer not in distributed
        )
    copying.retrace(copy)
    try:
        apart = comparing.apart(tracing.outputs(copy, inputs), tracing.outputs(model, inputs))
    except Exception as error:  # of a layer that reads another one's kernel
        line = " ".join(str(error).split())[:300]
        raise NotImplementedError(f"Keras's weights do not compute in it: {line}") from error
    if not apart <= MOST_APART:
        raise RuntimeError(f"outputs of the quantized model are {apart:.2%} off the model's")
    return copy


def _check_layers(model: tf.keras.Model) -> None:
    """Refuse a model that keeps all its weights; warn of dense layers that keep theirs."""
    dense = [layer for layer in model._flatten_layers() if _is_dense(layer)]
    left = [layer for layer in _distributed(model) if layer in dense]
    if len(left) == len(dense):
        where = " outside of TimeDistributed" if left else ""
        raise NotImplementedError(f"the model has no dense layer{where}")
    if left:
        warnings.warn(
            f"left in float32: {', '.join(layer.name for layer in left)}: TimeDistributed calls "
            "them past Keras's quantization; Dense alone does the same",
            stacklevel=4,
        )


def _distributed(model: tf.keras.Model) -> list:
    """The layers that TimeDistributed wraps: it calls their `call`, which reads integers then."""
    wrappers = tf.keras.layers.TimeDistributed
    return [one.layer for one in model._flatten_layers() if isinstance(one, wrappers)]


def _is_dense(layer) -> bool:
    return type(layer) is tf.keras.layers.Dense


def _write(model: tf.keras.Model, inputs, path) -> Path:
    """Write what predicts the same, read again, as the model that is written."""
    part = saving.save(tracing.trace(model, inputs), f"{path}.part")
    read = saving.load(part)(*tracing.input_tensors(inputs))
    apart = comparing.apart(read, tracing.outputs(model, inputs))
    if not apart <= SAME:
        part.unlink()
        raise RuntimeError(f"outputs of the file are {apart:.2%} off the model's")
    return part.replace(path)


def main() -> None:
    """Print time and size of a stack of large dense layers at each width, for one sample."""
    import time
    from statistics import median

    tf.keras.utils.set_random_seed(0)
    stack = [tf.keras.layers.Dense(2048) for _ in range(4)]
    model = tf.keras.Sequential([tf.keras.Input((2048,)), *stack])
    x = tf.random.normal((1, 2048))
    with tempfile.TemporaryDirectory() as folder:
        print("weights  ms for 1     MB")
        for title, write in (
            ("float32", keep_float32),
            ("int8", quantize_int8),
            ("int4", quantize_int4),
        ):
            path, times = write(model, x, Path(folder) / title), []
            predict = load_quantized(path)
            for _ in range(50):
                start = time.perf_counter()
                predict(x)
                times.append((time.perf_counter() - start) * 1e3)
            print(f"{title:8}{median(times):9.3f}{path.stat().st_size / 1e6:7.1f}")


if __name__ == "__main__":
    main()
