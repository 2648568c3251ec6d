"""Quantization-aware training (QAT): train with the rounding that the int8 model will have.

    model = prepare_qat(model, images[:256], weight_bits=8)  # then train it as before
    content = convert_qat(model, images[:256])  # int8, for LiteRT
    pathlib.Path("model.tflite").write_bytes(content)

What it changes: each convolution and dense layer multiplies rounded numbers in the forward pass. A
weight w becomes s * clamp(round(w / s), -n, n) with n = 2**(weight_bits - 1) - 1 and s = max|w| / n
of its output channel in this step. Activations have 8 bits, with a scale and a zero point per
tensor, whose range is a moving average over batches. The gradient ignores the rounding, and is zero
where a value was clipped (straight-through estimator; Jacob et al., 2018, arXiv:1712.05877).

Its twin: `pt_impl/compression/quantization_aware_training.py`, which says where the frameworks
differ.

When it helps and when it hurts: it helps below 8 bits, where rounding a trained model costs
accuracy. At 8 bits that often costs little: try it first (`post_training_quantization.py`). A step
takes up to twice as long. It needs a trained model, labelled data and a small learning rate.

Run it alone: `python -m tf_impl.compression.quantization_aware_training` prints the accuracy with
8, 4 and 2 bits, with and without this training.

Copy with it: `tf_impl/kit/checks/quantization_aware_training.py`, `tf_impl/kit/copying.py`,
`tf_impl/kit/fake_quantization.py`, `tf_impl/kit/tracing.py`.
"""

from functools import partial

import tensorflow as tf

from tf_impl.kit.checks import quantization_aware_training as checks
from tf_impl.kit.copying import copy_model, retrace
from tf_impl.kit.fake_quantization import is_product, rounding_places, start_tfmot_ranges
from tf_impl.kit.tracing import inlined, litert_function, outputs, trace

RATE = 0.01  # of the way that a range goes to those of a batch, in Keras 3
TRIED = 32  # examples with which a conversion is tried, in Keras 3


def prepare_qat(model: tf.keras.Model, example_inputs, *, weight_bits: int) -> tf.keras.Model:
    """Return a copy of `model` that computes with rounded weights and activations, to be trained.

    Make the optimizer for the copy; `model` stays as it is.

    Args:
        example_inputs: real samples, as a tensor or the tuple, list or dict of the model's inputs.
            Ranges start with theirs: a conversion without training is post-training quantization
            by the same quantizer.
        weight_bits: 2 or 4 to 8; at 2 bits weights are -s, 0 and s.

    Quantized are Conv2D, DepthwiseConv2D and Dense, with the BatchNorm and ReLU behind them; in
    Keras 3 Conv1D and EinsumDense, too, with one scale for a kernel; in tf_keras SeparableConv. The
    rest stays float32.

    Raises ValueError for other bits, inputs without samples, not finite or that the model does not
    take, a model without variables and one without such a layer; NotImplementedError for 3 bits,
    for a model that Keras cannot copy, and in tf_keras where tfmot can't follow; in Keras 3 as
    `convert_qat`, too, which is tried: what cannot be converted is not trained, either.
    Source: `tf.quantization.fake_quant_with_min_max_vars_per_channel` and, of tfmot,
    `quantize_apply` with its `DefaultNBitQuantizeScheme`.
    """
    checks.check_quantization_aware_training(model, example_inputs, weight_bits)
    if tf.keras.Model.__module__.startswith("tf_keras"):
        return _prepare_tf_keras(model, example_inputs, weight_bits)
    prepared = copy_model(model, example_inputs)
    places = rounding_places(prepared, example_inputs)
    checks.check_places(places)
    ranges = [
        each for layer, names in places.items() for each in _round_layer(layer, names, weight_bits)
    ]
    retrace(prepared)
    for each in ranges:
        each.starts = True
    with inlined():  # eager: what a layer sees is right once those before are
        outputs(prepared, example_inputs)
    for each in ranges:
        each.starts = False
    convert_qat(prepared, tf.nest.map_structure(lambda part: part[:TRIED], example_inputs))
    return prepared


def _round_layer(layer, names: set[str], bits: int) -> list["_Range"]:
    """Let a layer compute with a rounded kernel, input and output, from now on; its ranges."""
    activation, several = getattr(layer, "activation", None), "several" in names
    layer._tracker.unlock()  # Keras's own way to give a built layer more variables
    ranges = {
        name: _Range(layer, name, activation if name == "output" else None, several=several)
        for name in sorted(names - {"several"})
    }
    layer._tracker.lock()
    plain = partial(_product, layer, bits) if is_product(layer) else layer.call

    def call(*arguments, **settings):
        training = layer._get_call_context().training
        if "input" in ranges:
            arguments = (ranges["input"](arguments[0], training), *arguments[1:])
        if "inside" in ranges:
            layer.activation = None
            try:
                inside = plain(*arguments, **settings)
            finally:
                layer.activation = activation
            output = activation(ranges["inside"](inside, training))
        else:
            output = plain(*arguments, **settings)
        return ranges["output"](output, training) if "output" in ranges else output

    layer.call = call
    return list(ranges.values())


class _Range:
    """The grid of one tensor: 256 values between ends that follow what is seen in training.

    several: the layer is called several times in one pass. Its calls have one grid, as wide as the
    widest needs.
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
        settings = {"shape": (), "initializer": "zeros", "dtype": "float32", "trainable": False}
        if self.moves:
            self.ends = [
                layer.add_weight(**settings, name=f"{name}_{end}") for end in ("min", "max")
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
    """The kernel on a symmetric grid: of each output channel, or where it cannot, one in all."""
    kernel, kinds = tf.cast(tf.convert_to_tensor(layer.kernel), tf.float32), tf.keras.layers
    # The converter has no scales of channels for what it reshapes.
    whole, shape = isinstance(layer, kinds.Conv1D | kinds.EinsumDense), kernel.shape
    if isinstance(layer, kinds.DepthwiseConv2D):  # each input channel has its outputs
        kernel = tf.reshape(kernel, (*shape[:2], 1, -1))
    elif type(layer) is kinds.Dense:
        kernel, shape = kernel[None, None], (1, 1, *shape)
    axes = list(range(len(kernel.shape) - (0 if whole else 1)))
    most = tf.stop_gradient(tf.reduce_max(tf.abs(kernel), axes))
    most = tf.where(most > 0, most, 1.0)
    fake = tf.quantization
    round_to = fake.fake_quant_with_min_max_vars_per_channel
    if whole:
        round_to = fake.fake_quant_with_min_max_vars
    return tf.reshape(round_to(kernel, -most, most, num_bits=bits, narrow_range=True), shape)


def _prepare_tf_keras(model, example_inputs, weight_bits: int):
    # Late: it takes seconds, and chooses the Keras of an undecided process.
    import tensorflow_model_optimization as tfmot

    keras = tfmot.quantization.keras
    scheme = keras.experimental.default_n_bit.DefaultNBitQuantizeScheme(
        num_bits_weight=weight_bits, num_bits_activation=8
    )
    with checks.refusals("tfmot can't quantize the model"):
        prepared = keras.quantize_apply(keras.quantize_annotate_model(model), scheme)
        start_tfmot_ranges(prepared, checks.ranges(prepared), example_inputs)
    return prepared


def convert_qat(model: tf.keras.Model, example_inputs) -> bytes:
    """Return what `prepare_qat` made over integers: the content of a LiteRT file.

    It takes any number of samples; with a loop, such as that of an LSTM, one. `kit/int8_files.py`
    writes it, and runs it with XNNPACK. `model` stays as it is.

    Raises ValueError for a model without fake quantization, NotImplementedError where LiteRT's
    converter can't follow, RuntimeError where outputs for `example_inputs` differ by more than a
    relative 0.1. Source: `tf.lite.TFLiteConverter`.
    """
    checks.ranges(model)
    program = trace(model, example_inputs)
    converter = tf.lite.TFLiteConverter.from_concrete_functions([litert_function(program)], program)
    converter.optimizations = [tf.lite.Optimize.DEFAULT]
    with checks.refusals("LiteRT's converter refuses it"):
        content = converter.convert()
    checks.check_converted(content, model, example_inputs)
    return content


def main() -> None:
    """Print the accuracy of the digits CNN at several widths, rounded, and then trained on."""
    from tf_impl.kit import training
    from tf_impl.kit.demo import Demo

    demo = Demo("digits-cnn")
    model, optimizer, loss_fn = demo.build()
    demo.fit(training.make_train_step(model, optimizer, loss_fn), epochs=demo.task.recipe.epochs)
    print(f"float32: {demo.score(model):.1f}%")
    for bits in (8, 4, 2):
        prepared = prepare_qat(model, demo.train[0][:256], weight_bits=bits)
        rounded = demo.score(prepared)
        optimizer = training.make_optimizer(prepared, demo.task.recipe)
        demo.fit(training.make_train_step(prepared, optimizer, loss_fn), epochs=2)
        print(f"{bits} bits: {rounded:.1f}% rounded, {demo.score(prepared):.1f}% after 2 epochs")


if __name__ == "__main__":
    main()
