"""Quantization-aware training (QAT): train on with the rounding that an int8 model will have.

What it changes: in the forward pass each convolution and dense layer multiplies rounded numbers.
A weight w becomes s * clamp(round(w / s), -n, n) with n = 2**(weight_bits - 1) - 1 and s = max|w| /
n of its output channel in this very step. Activations have 8 bits, a scale and a zero point for
each tensor, whose range is a moving average over batches. The gradient passes the rounding as if
it were not there, and is zero where a value was clipped (straight-through estimator; Jacob et al.,
2018, arXiv:1712.05877). Ranges start from `example_inputs`, so an export without training is
post-training quantization by the same quantizer.

Its twin: `pt_impl/compression/quantization_aware_training.py`.

Where the frameworks differ and why:
- TensorFlow Model Optimization (tfmot) wraps the layers of a functional or Sequential tf_keras
  model; torchao works on a graph of operators that `torch.export` captured from any module.
- BatchNorm: here the kernel itself is fake-quantized, and the converter folds BatchNorm into it
  later; there it is the folded kernel, w * gamma / sqrt(running variance). With a scale for each
  channel both round alike.
- A range moves by 0.1% of the way a batch here, by 1% there. A dense kernel has one scale in all
  here, one for each output there. Outputs of pooling and of the last layer have 8 bits here.
- Files: here LiteRT's (TensorFlow Lite), in which weights of at most 4 bits are int4, on a grid of
  15 values: the 3 of 2 bits lie on it, the 7 of 3 bits don't. XNNPACK has no int4 convolution:
  LiteRT's own takes two to three times as long as int8. There weights of any width are int8.

When it helps and when it hurts: below 8 bits, where rounding trained weights costs accuracy. At 8
bits rounding alone usually loses nothing: try that first, since a step of this takes up to twice as
long. It needs a trained model, data with labels, and a learning rate that is not large.

Run it alone: `TF_USE_LEGACY_KERAS=1 python -m tf_impl.compression.quantization_aware_training`
prints the accuracy of files of 8, 4 and 2 bits, trained on and not.
"""

import os
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import tensorflow as tf

from tf_impl.kit import programs

MOST_APART = 0.1  # relative L2 of a file's outputs to the model's: some values round the other way
_DECAY = 0.999  # of tfmot's moving averages, fixed there
_QUANTIZED = {"Conv2D", "DepthwiseConv2D", "SeparableConv1D", "SeparableConv2D", "Dense"}
_PRODUCTS = ("CONV_2D", "DEPTHWISE_CONV_2D", "FULLY_CONNECTED", "BATCH_MATMUL")
_RANGE = re.compile(r"(activation|output)_(min|max)(:0)?$")  # not of a kernel, nor of the input


def prepare_qat(model: tf.keras.Model, example_inputs, *, weight_bits: int) -> tf.keras.Model:
    """Return a copy of `model` that computes with rounded weights and activations, to be trained.

    Make the optimizer for the copy; `model` stays as it is.
    example_inputs: real samples, as a tensor or the list of the model's inputs, with whose ranges
    activations start. weight_bits: 2 to 8; at 2 bits weights are -s, 0 and s.

    Quantized are Conv2D, DepthwiseConv2D, SeparableConv and Dense with what tfmot fuses to them.
    Raises ValueError for other bits, inputs without samples, not finite or that the model does not
    take, a model without variables and one without such a layer;
    NotImplementedError for 3 bits and where tfmot can't follow: Keras 3, a subclassed model, a
    model within the model, a layer that it does not know.
    Source: `tfmot.quantization.keras.quantize_apply` with its `DefaultNBitQuantizeScheme`.
    """
    if weight_bits not in range(2, 9):
        raise ValueError(f"weight_bits must be 2 to 8, not {weight_bits!r}")
    if weight_bits == 3:
        raise NotImplementedError("LiteRT would put 3 bits on the grid of 4: take 2 or 4")
    _check(model)
    programs.check(model, example_inputs)
    keras = _tfmot().quantization.keras
    scheme = keras.experimental.default_n_bit.DefaultNBitQuantizeScheme(
        num_bits_weight=weight_bits, num_bits_activation=8
    )
    try:
        prepared = keras.quantize_apply(keras.quantize_annotate_model(model), scheme)
    except (ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise NotImplementedError(f"tfmot can't quantize the model: {reason}") from error
    _find_ranges(prepared, example_inputs)
    return prepared


def export_qat(model: tf.keras.Model, example_inputs, path: str | Path) -> Path:
    """Write a model from `prepare_qat` as a LiteRT file of integers.

    `model` stays as it is. Before anything is written, the file's outputs for `example_inputs` are
    compared with the model's.

    Raises ValueError for a model without fake quantization, RuntimeError where outputs differ by
    more than a relative `MOST_APART`. Source: `tf.lite.TFLiteConverter`.
    """
    if not _ranges(model):
        raise ValueError("the model has no fake quantization: it comes from prepare_qat")
    content = _convert(model, [tf.lite.Optimize.DEFAULT])
    pair = _make_predict(content)(example_inputs), model(example_inputs, training=False)
    for ours, theirs in zip(*map(tf.nest.flatten, pair), strict=True):
        apart = float(tf.norm(ours - theirs) / tf.norm(theirs))
        if not apart <= MOST_APART:
            raise RuntimeError(f"outputs of the converted model are {apart:.0%} off the trained's")
    Path(path).write_bytes(content)
    return Path(path)


def export_float(model: tf.keras.Model, example_inputs, path: str | Path) -> Path:
    """Write `model` in float32, for the same runtime: what int8 is to be compared with."""
    Path(path).write_bytes(_convert(model, []))
    return Path(path)


def load_quantized(path: str | Path) -> Callable:
    """Return `predict(x) -> output` of a file of this module, run by LiteRT with XNNPACK.

    x: a tensor, or a list of the model's inputs. A call with another shape than the one before
    prepares buffers anew. Threads are TensorFlow's. `predict.operators(x)` counts integer ones.
    The file is data: LiteRT executes nothing but its own operators. Raises FileNotFoundError
    without it, ValueError where it is no whole file or something else. A changed weight goes
    unnoticed: the format has no checksum.
    """
    try:
        return _make_predict(Path(path).read_bytes())
    except (ValueError, RuntimeError) as error:
        what = " ".join(str(error).split())
        raise ValueError(f"{path} is no whole LiteRT file: {what}") from error


def _tfmot():
    """Import it: late, since it takes seconds and chooses the Keras of an undecided process."""
    import tensorflow_model_optimization as tfmot

    return tfmot


def _check(model: tf.keras.Model) -> None:
    """Refuse what tfmot can't quantize, and what has nothing to quantize."""
    if tf.keras.Model.__module__.partition(".")[0] != "tf_keras":
        raise NotImplementedError(
            "tfmot quantizes models of tf_keras, this process runs Keras 3: set "
            "TF_USE_LEGACY_KERAS=1 before TensorFlow is imported"
        )
    if not (isinstance(model, tf.keras.Sequential) or model._is_graph_network):
        raise NotImplementedError(
            "tfmot quantizes functional and Sequential models, not subclassed"
        )
    if not model.built:
        raise ValueError("the model has no variables yet: call it once on an example input")
    names = {type(layer).__name__ for layer in model._flatten_layers()}
    if not names & _QUANTIZED:
        raise ValueError("the model has no convolution or dense layer to quantize")


def _ranges(model: tf.keras.Model) -> list[tf.Variable]:
    """The ends of the ranges of all activations."""
    return [v for v in model.non_trainable_variables if _RANGE.search(v.name)]


def _find_ranges(model: tf.keras.Model, example_inputs) -> None:
    """Let activations start with their ranges on the examples, with BatchNorm as when predicting.

    tfmot starts them at -6 and 6, from where its average would take thousands of steps: each pass
    goes a thousandth of the way to what it sees, and here the whole way. What a layer sees is right
    once those before it are.
    """
    layers = [getattr(layer, "layer", layer) for layer in model.layers]
    norms = [layer for layer in layers if isinstance(layer, tf.keras.layers.BatchNormalization)]
    trainable = [norm.trainable for norm in norms]
    ranges = _ranges(model)
    for norm in norms:
        norm.trainable = False  # Keras's switch to running statistics, which then stay
    for _ in range(len(ranges) // 2 + 1):
        before = [tf.identity(end) for end in ranges]
        model(example_inputs, training=True)
        for end, old in zip(ranges, before, strict=True):
            end.assign(old + (end - old) / (1 - _DECAY))
        if all(abs(end - old) <= 0.01 * abs(old) for end, old in zip(ranges, before, strict=True)):
            break
    for norm, found in zip(norms, trainable, strict=True):
        norm.trainable = found


def _convert(model: tf.keras.Model, optimizations: list) -> bytes:
    """The model as the content of a LiteRT file, for any batch size."""
    inputs = [tf.TensorSpec(x.shape, x.dtype, f"x{i:03}") for i, x in enumerate(model.inputs)]
    predict = tf.function(lambda *x: model(x[0] if len(x) == 1 else list(x), training=False))
    concrete = predict.get_concrete_function(*inputs)
    converter = tf.lite.TFLiteConverter.from_concrete_functions([concrete], model)
    converter.optimizations = optimizations
    return converter.convert()


def _make_predict(content: bytes) -> Callable:
    from ai_edge_litert.interpreter import Interpreter

    threads = tf.config.threading.get_intra_op_parallelism_threads() or os.cpu_count()
    interpreter = Interpreter(model_content=content, num_threads=threads)
    interpreter.allocate_tensors()
    inputs = sorted(interpreter.get_input_details(), key=lambda one: one["name"])
    outputs = sorted(interpreter.get_output_details(), key=lambda one: one["name"])
    shapes = []

    def predict(x):
        arrays = [np.asarray(one) for one in tf.nest.flatten(x)]
        if shapes != [array.shape for array in arrays]:
            for given, array in zip(inputs, arrays, strict=True):
                interpreter.resize_tensor_input(given["index"], array.shape)
            interpreter.allocate_tensors()
            shapes[:] = [array.shape for array in arrays]
        for given, array in zip(inputs, arrays, strict=True):
            interpreter.set_tensor(given["index"], array)
        interpreter.invoke()
        found = [tf.constant(interpreter.get_tensor(one["index"])) for one in outputs]
        return found[0] if len(found) == 1 else found

    def operators(x):
        predict(x)
        kinds = {one["index"]: one["dtype"].__name__ for one in interpreter.get_tensor_details()}
        ran = (one for one in interpreter._get_ops_details() if one["op_name"] in _PRODUCTS)
        dtypes = ((one["op_name"], kinds[one["inputs"][1]]) for one in ran)
        return dict(Counter(name for name, dtype in dtypes if dtype.startswith("int")))

    predict.operators = operators
    return predict


def main() -> None:
    """Print the accuracy of the digits CNN's files at several widths, trained on and not."""
    import tempfile

    from shared import datasets
    from shared.specs import TASKS
    from shared.weights import init_weights
    from tf_impl.kit import data, models, training

    task, folder = TASKS["digits-cnn"], Path(tempfile.mkdtemp())
    made = datasets.materialise(task.dataset, folder)
    (x, y), test = (data.to_device(*datasets.load(made, split)) for split in ("train", "test"))

    def train(model, epochs):
        optimizer = training.make_optimizer(model, task.recipe)
        step = training.make_train_step(model, optimizer, training.cross_entropy)
        training.fit(step, x, y, batch_size=64, epochs=epochs, seed=0)

    def show(what, path):
        predict = load_quantized(path)
        accuracy = training.evaluate(predict, *test, metric="accuracy", batch_size=599)
        size = path.stat().st_size
        print(f"{what}: {accuracy:.1f}%, {size} bytes, {predict.operators(test[0][:599])}")

    model = models.build(task.model, init_weights(task.model, seed=0))
    train(model, task.recipe.epochs)
    show("float32", export_float(model, x[:64], folder / "file"))
    for bits in (8, 4, 2):
        prepared = prepare_qat(model, x[:256], weight_bits=bits)
        show(f"{bits} bits, rounded", export_qat(prepared, x[:64], folder / "file"))
        train(prepared, epochs=2)
        show(f"{bits} bits, 2 epochs", export_qat(prepared, x[:64], folder / "file"))


if __name__ == "__main__":
    main()
