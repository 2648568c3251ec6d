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
- In Keras 3 the layers of a copy of any model compute with TensorFlow's fake quantization, placed
  by what follows what in one pass. TensorFlow Model Optimization (tfmot) has no Keras 3: for
  tf_keras it wraps the layers of a functional or Sequential model. torchao works on a graph of
  operators that `torch.export` captured from any module.
- BatchNorm: here the kernel itself is fake-quantized, and the converter folds BatchNorm into it
  later; there it is the folded kernel, w * gamma / sqrt(running variance). With a scale for each
  channel both round alike.
- A range moves by 1% of the way a batch in Keras 3 and there, by 0.1% in tfmot. Dense kernels have
  a scale for each output in Keras 3 and there, one in all in tfmot. Outputs of pooling and of the
  last layer have 8 bits here.
- A layer that runs several times has one grid for all of its calls in Keras 3, as wide as the
  widest needs; there each call has its own.
- A dense layer that rounds is a 1x1 convolution in Keras 3's file, as fast: of a matrix product
  LiteRT's converter loses which axis has the scales.
- Files: here LiteRT's (TensorFlow Lite), in which weights of at most 4 bits are int4, on a grid of
  15 values: the 3 of 2 bits lie on it, the 7 of 3 bits don't. XNNPACK has no int4 convolution:
  LiteRT's own takes two to three times as long as int8. There weights of any width are int8.

When it helps and when it hurts: below 8 bits, where rounding trained weights costs accuracy. At 8
bits rounding alone usually loses nothing: try that first, since a step of this takes up to twice as
long. It needs a trained model, data with labels, and a learning rate that is not large.

Run it alone: `python -m tf_impl.compression.quantization_aware_training`
prints the accuracy of files of 8, 4 and 2 bits, trained on and not.

Copy with it: `tf_impl/kit/comparing.py`, `tf_impl/kit/copying.py`, `tf_impl/kit/tracing.py`.
"""

import os
import re
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import tensorflow as tf
from tensorflow.python.framework.convert_to_constants import convert_variables_to_constants_v2

from tf_impl.kit import comparing, copying, tracing

MOST_APART = 0.1  # relative L2 of a file's outputs to the model's: some values round the other way
SAME = 1e-4  # of a file in float32
TRIED = 32  # examples with which an export is tried, in Keras 3
RATE = 0.01  # of the way that a range goes to those of a batch, in Keras 3
_DECAY = 0.999  # of tfmot's moving averages, fixed there
_QUANTIZED = {"Conv2D", "DepthwiseConv2D", "SeparableConv1D", "SeparableConv2D", "Dense"}
_LOOPS = {"While", "StatelessWhile"}
_RANGE = re.compile(r"(activation|output)_(min|max)(:0)?$")  # not of a kernel, nor of the input


def prepare_qat(model: tf.keras.Model, example_inputs, *, weight_bits: int) -> tf.keras.Model:
    """Return a copy of `model` that computes with rounded weights and activations, to be trained.

    Make the optimizer for the copy; `model` stays as it is.
    example_inputs: real samples, as a tensor or the tuple, list or dict of the model's inputs, with
    whose ranges activations start. weight_bits: 2 to 8; at 2 bits weights are -s, 0 and s.

    Quantized are Conv2D, DepthwiseConv2D and Dense, with the BatchNorm and ReLU behind them; in
    Keras 3 Conv1D and EinsumDense, too, with one scale for a kernel; in tf_keras SeparableConv. The
    rest stays float32. In Keras 3 the copy is exported on trial, so what LiteRT refuses is not
    trained.

    Raises ValueError for other bits, inputs without samples, not finite or that the model does not
    take, a model without variables and one without such a layer;
    NotImplementedError for 3 bits, for a model that Keras cannot copy, where LiteRT's converter
    can't follow, and in tf_keras where tfmot can't: a subclassed model, a model within the model, a
    layer that it does not know.
    Source: `tf.quantization.fake_quant_with_min_max_vars_per_channel` and, of tfmot,
    `quantize_apply` with its `DefaultNBitQuantizeScheme`.
    """
    if weight_bits not in range(2, 9):
        raise ValueError(f"weight_bits must be 2 to 8, not {weight_bits!r}")
    if weight_bits == 3:
        raise NotImplementedError("LiteRT would put 3 bits on the grid of 4: take 2 or 4")
    tracing.check_example_inputs(model, example_inputs)
    if _is_tf_keras():
        return _prepare_tf_keras(model, example_inputs, weight_bits)
    prepared = _prepare_keras3(model, example_inputs, weight_bits)
    few = tf.nest.map_structure(lambda part: part[:TRIED], example_inputs)
    with tempfile.TemporaryDirectory() as folder:  # what cannot be exported is not trained, either
        export_qat(prepared, few, Path(folder) / "model")
    return prepared


def _prepare_tf_keras(model, example_inputs, weight_bits: int):
    _check(model)
    keras = _tfmot().quantization.keras
    scheme = keras.experimental.default_n_bit.DefaultNBitQuantizeScheme(
        num_bits_weight=weight_bits, num_bits_activation=8
    )
    try:
        prepared = keras.quantize_apply(keras.quantize_annotate_model(model), scheme)
        _find_ranges(prepared, example_inputs)
    except Exception as error:  # of as many classes as there are layers that it does not know
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise NotImplementedError(f"tfmot can't quantize the model: {reason}") from error
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
    return _write(model, example_inputs, path, [tf.lite.Optimize.DEFAULT], MOST_APART)


def export_float(model: tf.keras.Model, example_inputs, path: str | Path) -> Path:
    """Write `model` in float32, for the same runtime: what int8 is to be compared with.

    Raises ValueError where the model does not take `example_inputs`, NotImplementedError where the
    converter refuses it, RuntimeError where the file predicts something else.
    """
    return _write(model, example_inputs, path, [], SAME)


def load_quantized(path: str | Path) -> Callable:
    """Return `predict(x) -> output` of a file of this module, run by LiteRT with XNNPACK.

    x: as `example_inputs`. Several outputs are a tuple, of a dict in the order of its sorted keys.
    A call with another shape than the one before prepares buffers anew. The file of a model with a
    loop, such as that of an LSTM, is run once for each sample. Threads are TensorFlow's.
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


def _is_tf_keras() -> bool:
    return tf.keras.Model.__module__.partition(".")[0] == "tf_keras"


def _check(model: tf.keras.Model) -> None:
    """Refuse what tfmot can't quantize, and what has nothing to quantize."""
    if not (isinstance(model, tf.keras.Sequential) or model._is_graph_network):
        raise NotImplementedError(
            "tfmot quantizes functional and Sequential models, not subclassed"
        )
    names = {type(layer).__name__ for layer in model._flatten_layers()}
    if not names & _QUANTIZED:
        raise ValueError("the model has no convolution or dense layer to quantize")


# Keras 3 --------------------------------------------------------------------------------------


def _prepare_keras3(model, example_inputs, weight_bits: int):
    copy = copying.copy_model(model, example_inputs)
    with tracing.inlined():
        calls, returned = _record(copy, example_inputs)
    places, times = _places(calls, returned), Counter(layer for layer, *_ in calls)
    if not any(isinstance(layer, _products()) for layer in places):
        raise ValueError("the model has no convolution or dense layer to quantize")
    for layer in places:
        if layer.compute_dtype != "float32":
            raise NotImplementedError(
                f"{layer.name!r} computes in {layer.compute_dtype}: models of float32 are rounded"
            )
    ranges = [
        moving
        for layer, names in places.items()
        for moving in _round_layer(layer, names, weight_bits, several=times[layer] > 1)
    ]
    copying.retrace(copy)
    for moving in ranges:
        moving.starts = True
    with tracing.inlined():  # eager: what a layer sees is right once those before are
        tracing.outputs(copy, example_inputs)
    for moving in ranges:
        moving.starts = False
    return copy


def _products() -> tuple[type, ...]:
    """Layers whose kernel is rounded. Transposed and separable ones stay in float32."""
    kinds = tf.keras.layers
    return kinds.Conv1D, kinds.Conv2D, kinds.DepthwiseConv2D, kinds.Dense, kinds.EinsumDense


def _record(model, inputs) -> tuple[list, set[int]]:
    """Calls of innermost layers, (layer, what goes in, what comes out); tensors that are returned.

    A product is one with the layer that may be its activation. Calls that hand on what they got,
    such as those of dropout, are left out.
    """
    calls = []

    def recording(layer, plain):
        def call(*arguments, **settings):
            output = plain(*arguments, **settings)
            sides = [
                [part for part in tf.nest.flatten(side) if tf.is_tensor(part)]
                for side in ((arguments, settings), output)
            ]
            if not {id(part) for part in sides[1]} <= {id(part) for part in sides[0]}:
                calls.append((layer, *sides))
            return output

        return call

    layers = list(model._flatten_layers(include_self=False))
    products = [layer for layer in layers if isinstance(layer, _products())]
    inside = {id(part) for one in products for part in one._flatten_layers(include_self=False)}
    innermost = [
        layer
        for layer in layers
        if layer in products or (len(layer._flatten_layers()) == 1 and id(layer) not in inside)
    ]
    for layer in innermost:
        layer.call = recording(layer, layer.call)
    try:
        output = tracing.outputs(model, inputs)
    finally:
        for layer in innermost:
            del layer.call
    return calls, {id(part) for part in tf.nest.flatten(output)}


def _places(calls: list, returned: set[int]) -> dict:
    """Where values are rounded: layer -> of "input", "inside" and "output"; every product is there.

    The input of a product, unless it lies on a grid already. Its output, behind the BatchNorm and
    the ReLU that the converter makes a part of it; "inside", before any other activation of its
    own. Outputs of sums and the like, so that these run over integers, too. And all that is
    concatenated: what has no grid would get its neighbour's, which may be too narrow for it.
    """
    places, grid, done = defaultdict(set), set(), set()
    users, makers = defaultdict(list), {}
    for number, (layer, inputs, outputs) in enumerate(calls):
        for tensor in inputs:
            users[id(tensor)].append(number)
        makers |= {id(tensor): layer for tensor in outputs}

    def follower(number: int) -> int | None:
        """The only call that reads the output of another one."""
        place = id(calls[number][2][0])
        return users[place][0] if len(users[place]) == 1 and place not in returned else None

    for number, (layer, inputs, outputs) in enumerate(calls):
        if number in done:
            continue
        if isinstance(layer, _products()):
            names = places[layer]  # may stay empty: the kernel is rounded all the same
            if id(inputs[0]) not in grid:
                names.add("input")
            if not _is_fused(layer.activation):
                names.add("inside")
            elif layer.activation is tf.keras.activations.linear:
                place = follower(number)
                if place and isinstance(calls[place][0], tf.keras.layers.BatchNormalization):
                    number, place = place, follower(place)
                    done.add(number)
                if place and _is_relu(calls[place][0]):
                    number = place
                    done.add(number)
            places[calls[number][0]].add("output")
            grid.add(id(calls[number][2][0]))
        elif isinstance(layer, _joints()) and all(t.dtype.is_floating for t in outputs):
            bare = {id(tensor) for tensor in inputs} - grid
            if isinstance(layer, tf.keras.layers.Concatenate):
                for place in bare & makers.keys():
                    places[makers[place]].add("output")
                grid |= bare & makers.keys()
            places[layer].add("output")
            grid.update(map(id, outputs))
        elif isinstance(layer, _movers()) and all(id(tensor) in grid for tensor in inputs):
            grid.update(map(id, outputs))
    return places


def _is_fused(activation) -> bool:
    kinds = tf.keras.activations
    return activation in (None, kinds.linear, kinds.relu, kinds.relu6)


def _is_relu(layer) -> bool:
    if isinstance(layer, tf.keras.layers.ReLU):
        return layer.max_value in (None, 6) and not layer.negative_slope and not layer.threshold
    return isinstance(layer, tf.keras.layers.Activation) and _is_fused(layer.activation)


def _joints() -> tuple[type, ...]:
    """Layers between products whose output gets a grid of its own."""
    kinds = tf.keras.layers
    return (
        kinds.Add,
        kinds.Subtract,
        kinds.Multiply,
        kinds.Average,
        kinds.Concatenate,
        kinds.Activation,
        kinds.ReLU,
        kinds.LeakyReLU,
        kinds.GlobalAveragePooling1D,
        kinds.GlobalAveragePooling2D,
    )


def _movers() -> tuple[type, ...]:
    """Layers that give values that they got, so that these stay on their grid.

    LiteRT's averages of windows lie on it, too: it has no others.
    """
    kinds = tf.keras.layers
    return (
        kinds.Flatten,
        kinds.Reshape,
        kinds.Permute,
        kinds.ZeroPadding1D,
        kinds.ZeroPadding2D,
        kinds.MaxPooling1D,
        kinds.MaxPooling2D,
        kinds.AveragePooling1D,
        kinds.AveragePooling2D,
        kinds.GlobalMaxPooling1D,
        kinds.GlobalMaxPooling2D,
    )


class _Range:
    """The grid of one tensor: 256 values between ends that follow what is seen in training.

    several: calls of the layer in one pass, which have one grid, as wide as the widest needs.
    """

    def __init__(self, layer, name: str, activation=None, *, several: bool) -> None:
        # The integer kernels of these have one range, which cannot move.
        fixed = {
            "sigmoid": (0.0, 255 / 256),
            "softmax": (0.0, 255 / 256),
            "tanh": (-1.0, 127 / 128),
        }
        self.ends, self.starts = fixed.get(getattr(activation, "__name__", None)), False
        self.moves, self.several = self.ends is None, several
        if self.moves:
            self.ends = [
                layer.add_weight(
                    shape=(),
                    initializer="zeros",
                    dtype="float32",
                    trainable=False,
                    name=f"{name}_{end}",
                )
                for end in ("min", "max")
            ]

    def __call__(self, x, training):
        values = tf.cast(x, tf.float32)
        if self.moves and (self.starts or training):
            rate, (low, high) = 1.0 if self.starts else RATE, self.ends
            # A grid has a zero, which padding needs.
            seen = tf.minimum(tf.reduce_min(values), 0.0), tf.maximum(tf.reduce_max(values), 1e-6)
            if self.several:
                seen = tf.minimum(seen[0], low), tf.maximum(seen[1], high)
            low.assign(low + rate * (seen[0] - low))
            high.assign(high + rate * (seen[1] - high))
        low, high = (tf.convert_to_tensor(end) for end in self.ends)
        return tf.cast(tf.quantization.fake_quant_with_min_max_vars(values, low, high), x.dtype)


def _round_layer(layer, names: set[str], bits: int, *, several: bool) -> list[_Range]:
    """Let a layer compute with a rounded kernel, input and output, from now on; its ranges."""
    activation = getattr(layer, "activation", None)
    layer._tracker.unlock()  # Keras's own way to give a built layer more variables
    ranges = {
        name: _Range(layer, name, activation if name == "output" else None, several=several)
        for name in names
    }
    layer._tracker.lock()
    product = isinstance(layer, _products())
    plain = partial(_product, layer, bits) if product else layer.call

    def call(*arguments, **settings):
        training = layer._get_call_context().training
        if "input" in ranges:
            arguments = (ranges["input"](arguments[0], training), *arguments[1:])
        if "inside" in ranges:
            inside = partial(ranges["inside"], training=training)
            output = activation(_without_activation(layer, plain, inside, arguments, settings))
        else:
            output = plain(*arguments, **settings)
        return ranges["output"](output, training) if "output" in ranges else output

    layer.call = call
    return list(ranges.values())


def _without_activation(layer, plain, inside, arguments, settings):
    activation, layer.activation = layer.activation, None
    try:
        return inside(plain(*arguments, **settings))
    finally:
        layer.activation = activation


def _product(layer, bits: int, x, *arguments, **settings):
    """What the layer computes, with its kernel on a grid."""
    kernel = _round_kernel(layer, bits)
    if type(layer) is not tf.keras.layers.Dense:
        with tf.keras.StatelessScope(state_mapping=[(layer.kernel, kernel)]):
            return type(layer).call(layer, x, *arguments, **settings)
    # As a 1x1 convolution: for a matrix product the converter turns a kernel, not its scales' axis.
    y = tf.reshape(x, (-1, 1, 1, x.shape[-1]))
    y = tf.nn.conv2d(y, tf.cast(kernel, x.dtype), 1, "VALID")
    if layer.use_bias:  # before it is reshaped, or the converter loses it
        y = tf.nn.bias_add(y, tf.cast(layer.bias, x.dtype))
    shape = [-1 if size is None else size for size in x.shape[:-1]]
    if shape.count(-1) > 1:
        shape = tf.unstack(tf.shape(x)[:-1])
    y = tf.reshape(y, [*shape, layer.units])
    return y if layer.activation is None else layer.activation(y)


def _round_kernel(layer, bits: int):
    """The kernel on a symmetric grid: of each output channel, or where it cannot, one in all.

    The converter has no scales of channels for what it reshapes: Conv1D and EinsumDense.
    """
    kernel = tf.cast(tf.convert_to_tensor(layer.kernel), tf.float32)
    if isinstance(layer, tf.keras.layers.Conv1D | tf.keras.layers.EinsumDense):
        most = tf.stop_gradient(tf.reduce_max(tf.abs(kernel)))
        most = tf.where(most > 0, most, 1.0)
        return tf.quantization.fake_quant_with_min_max_vars(
            kernel, -most, most, num_bits=bits, narrow_range=True
        )
    shape = kernel.shape
    if isinstance(layer, tf.keras.layers.DepthwiseConv2D):  # each input channel has its outputs
        kernel = tf.reshape(kernel, (*shape[:2], 1, -1))
    elif type(layer) is tf.keras.layers.Dense:
        kernel, shape = kernel[None, None], (1, 1, *shape)
    axes = list(range(len(kernel.shape) - 1))
    most = tf.stop_gradient(tf.reduce_max(tf.abs(kernel), axes))
    most = tf.where(most > 0, most, 1.0)
    kernel = tf.quantization.fake_quant_with_min_max_vars_per_channel(
        kernel, -most, most, num_bits=bits, narrow_range=True
    )
    return tf.reshape(kernel, shape)


# tfmot ----------------------------------------------------------------------------------------


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


# Files ----------------------------------------------------------------------------------------


def _write(model: tf.keras.Model, inputs, path, optimizations: list, most: float) -> Path:
    """Write a LiteRT file for any batch size, if it predicts what the model does, nearly.

    With a loop, such as an LSTM's, it is for one sample: the converter takes no other.
    """
    program = tracing.trace(model, inputs)
    concrete = program.get_concrete_function()
    if any(node.type in _LOOPS for node in concrete.graph.get_operations()):
        one = [tf.TensorSpec([1, *s.shape[1:]], s.dtype, s.name) for s in program.input_signature]
        concrete = tf.function(program.python_function).get_concrete_function(*one)
    frozen = convert_variables_to_constants_v2(concrete)
    converter = tf.lite.TFLiteConverter.from_concrete_functions([frozen])
    converter.optimizations = optimizations
    try:
        content = converter.convert()
    except Exception as error:
        reason = tracing.one_line(error)
        raise NotImplementedError(f"LiteRT's converter refuses it: {reason}") from error
    part = Path(f"{path}.part")
    part.write_bytes(content)
    try:
        apart = comparing.apart(load_quantized(part)(inputs), tracing.outputs(model, inputs))
    except Exception as error:
        part.unlink()
        reason = " ".join(str(error).split())[:300]
        raise NotImplementedError(f"LiteRT cannot run the file: {reason}") from error
    if not apart <= most:
        part.unlink()
        # Where a model amplifies what rounds the other way, no other program is near it.
        more = tf.nest.map_structure(_a_thousandth_more, inputs)
        moved = comparing.apart(tracing.outputs(model, more), tracing.outputs(model, inputs))
        raise RuntimeError(
            f"outputs of the converted model are {apart:.0%} off those before, which move by "
            f"{moved:.0%} where inputs change by a thousandth: {_why(apart, moved)}"
        )
    return part.replace(path)


def _why(apart: float, moved: float) -> str:
    if moved > apart / 4:
        return "the model amplifies all rounding, as untrained ones do, so that no file is near it"
    return "LiteRT's converter makes something else of it"


def _a_thousandth_more(x: tf.Tensor) -> tf.Tensor:
    """At most a quarter of a step of 8 bits; of less the rounding of the inputs leaves nothing."""
    return x * (1 + 1e-3) if x.dtype.is_floating else x


def _make_predict(content: bytes) -> Callable:
    from ai_edge_litert.interpreter import Interpreter

    threads = tf.config.threading.get_intra_op_parallelism_threads() or os.cpu_count()
    interpreter = Interpreter(model_content=content, num_threads=threads)
    interpreter.allocate_tensors()
    inputs = sorted(interpreter.get_input_details(), key=lambda one: one["name"])
    outputs = interpreter.get_output_details()
    single = any(one["shape_signature"][0] == 1 for one in inputs)  # of a model with a loop
    shapes = []

    def run(arrays):
        if shapes != [array.shape for array in arrays]:
            for given, array in zip(inputs, arrays, strict=True):
                interpreter.resize_tensor_input(given["index"], array.shape)
            interpreter.allocate_tensors()
            shapes[:] = [array.shape for array in arrays]
        for given, array in zip(inputs, arrays, strict=True):
            interpreter.set_tensor(given["index"], array)
        interpreter.invoke()
        return [interpreter.get_tensor(one["index"]) for one in outputs]

    def predict(x):
        arrays = [np.asarray(one) for one in tracing.input_tensors(x)]
        if single:
            rows = zip(*arrays, strict=True)
            samples = [run([part[None] for part in row]) for row in rows]
            found = [np.concatenate(parts) for parts in zip(*samples, strict=True)]
        else:
            found = run(arrays)
        found = tuple(map(tf.constant, found))
        return found[0] if len(found) == 1 else found

    return predict


def main() -> None:
    """Print the accuracy of the digits CNN's files at several widths, trained on and not."""
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
        print(f"{what}: {accuracy:.1f}%, {size} bytes")

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
