"""Initialization and gradient health: how large weights begin, and what reaches each layer.

What it changes: the weights before the first step. Each kernel is drawn anew with a mean of zero:

- "he_normal", "he_uniform" (He et al., 2015, "Delving Deep into Rectifiers"): variance 2 / fan_in,
  so that a rectifier's output keeps the mean square of its input, through any number of layers;
- "glorot_normal", "glorot_uniform" (Glorot and Bengio, 2010, "Understanding the difficulty of
  training deep feedforward neural networks"): 2 / (fan_in + fan_out), for layers that are linear
  around zero, forward and backward alike;
- "orthogonal" (Saxe et al., 2014, "Exact solutions to the nonlinear dynamics of learning in deep
  linear networks"): a matrix that keeps every length; behind a rectifier with `gain` = sqrt(2);
- "default": what this framework's own layers begin with.

Biases begin at zero, but an LSTM's forget gate at one (Jozefowicz et al., 2015). Gates and
projections of attention are matrices of their own and followed by no rectifier: He's schemes draw
them as Glorot's, and recurrent kernels are orthogonal in all schemes but the default.

`gradient_norms` looks at one batch, and `find_unhealthy` says which layers get too little of it.

Its twin: `pt_impl/recipes/initialization.py`.

Where the frameworks differ and why:
- The defaults: Keras draws Glorot's uniform kernels and biases of zero. `nn.Linear` and `nn.Conv2d`
  draw weights and biases with variance 1 / (3 fan_in), a sixth of He's: between equal widths a
  third of Keras's variance. Behind rectifiers both vanish with depth, PyTorch's sooner.
- Keras draws the (width, heads, size) kernels of `MultiHeadAttention` as if they were convolutions,
  with fans that are `heads` and more times too large; `nn.MultiheadAttention` draws query, key and
  value as one matrix, whose fan_out is three times too large. Here each projection has its own.
- Keras counts a depthwise convolution's channels in its fan_in, and takes transposed convolutions'
  fans the wrong way round, which `nn.init` does, too. Here fans are what meets in one output.
- `HeNormal` and `GlorotNormal` cut the distribution off at two deviations. Here it is whole, as
  PyTorch's.
- Keras's layers hold initializers, used when they are built; this writes to built layers.
- Gradients are those of `training=True`; PyTorch has a mode for each module.
- Draws are each framework's own: twins share the variance, not the numbers.

When it helps and when it hurts: deep networks without normalisation or residuals train with the
right variance, or not at all. With BatchNorm the scale of a kernel in front of it does not matter
to the output, only to the size of a step. Residual blocks pass gradients by their branches: small
kernels do no harm there, while a branch that keeps its input's size doubles the sum's, so that each
scheme explodes with depth where nothing normalises. There `gain` = 1 / sqrt(blocks) is right.
Weights that were trained are lost: freeze what is to stay. Embeddings, kernels tied to one,
normalisation and every other parameter are left, and the report names them: what models draw by
design (a zero scale at a block's end, 0.02 in transformers) is not known here.

Run it alone: `python -m tf_impl.recipes.initialization` prints gradients of 30 layers by scheme.

Copy with it: nothing.
"""

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import tensorflow as tf

SCHEMES = ("he_normal", "he_uniform", "glorot_normal", "glorot_uniform", "orthogonal", "default")


@dataclass(frozen=True)
class _Kernel:
    """A variable as `shape` whose axes `order` makes it (groups, inputs, outputs).

    groups, inputs: their sizes. rectified: whether He's schemes may take it for a rectifier's.
    recurrent: of the hidden state.
    """

    variable: tf.Variable
    shape: tuple[int, ...]
    order: tuple[int, ...]
    groups: int
    inputs: int
    fan_in: float
    fan_out: float
    rectified: bool = True
    recurrent: bool = False


def apply_initialization(
    model: tf.keras.Model, *, scheme: str = "he_normal", gain: float = 1.0, seed: int = 0
) -> dict[str, str]:
    """Draw the kernels of dense, convolutional, recurrent and attention layers anew, in place.

    gain: a factor for all kernels but recurrent ones, not with "default". Returns for each
    parameter what became of it: the scheme, "zeros", or "left: ..." with the reason: frozen, shared
    with an embedding, or of a layer that is none of these. The global random state stays. Raises
    ValueError for an unknown scheme and a model without variables yet, NotImplementedError for
    kernels that are computed from others (spectral norm, LoRA, integers), before anything is
    changed.
    """
    if scheme not in SCHEMES or gain <= 0 or (scheme == "default" and gain != 1):
        raise ValueError(
            f"scheme is one of {', '.join(SCHEMES)} and gain above 0 (1 with default), "
            f"not {scheme!r} and {gain}"
        )
    _refuse(model)
    layers = list(model._flatten_layers(include_self=True))
    # Keras 3 freezes single variables, too.
    owned = [(layer, v) for layer in layers for v in _own(layer)]
    kept = {id(v): "frozen" for layer, v in owned if not (layer.trainable and v.trainable)}
    for layer in layers:
        if isinstance(layer, tf.keras.layers.Embedding):
            kept |= {id(v): "of or shared with an embedding" for v in _own(layer)}
    done: dict[int, str] = {}
    generator = np.random.default_rng(seed)
    attentions = _within_attention(layers)
    for layer in layers:
        for kernel in _kernels(layer, rectified=id(layer) not in attentions):
            if id(kernel.variable) not in kept and id(kernel.variable) not in done:
                draw = _draw_default if scheme == "default" else _draw
                number = int(generator.integers(2**31))
                done[id(kernel.variable)] = draw(kernel, scheme, gain, number)
        bias = getattr(layer, "bias", None) if _kernels(layer) else None
        if bias is not None and id(bias) not in kept:
            said = _write_bias(bias, layer)  # Keras's own, too
            done[id(bias)] = "default" if scheme == "default" else said
    return {
        _name(v): done.get(id(v)) or f"left: {kept.get(id(v)) or f'of {type(layer).__name__}'}"
        for layer, v in owned
    }


def gradient_norms(model: tf.keras.Model, loss_fn: Callable, x, y) -> dict[str, float]:
    """The L2 norm of the loss's gradient by each layer's variables, in the model's order.

    The last one, "output", is by the model's output; a layer of this name is "output (layer)". The
    model runs once as it trains; all variables and the global generator are as before. loss_fn:
    `loss_fn(output, y)`, not Keras's order; the model's own losses are added, as `fit` does. x: a
    tuple or list of arguments where `call` takes several, else the one argument.
    """
    variables = model.trainable_variables
    # All: SpectralNormalization writes to its kernel.
    written = [*model.variables, tf.random.get_global_generator().state]
    kept = [tf.identity(variable) for variable in written]
    try:
        with tf.GradientTape() as tape:
            output = _call(model, x)
            loss = loss_fn(output, y)
            loss = sum((tf.cast(term, loss.dtype) for term in model.losses), loss)
        leaves = [t for t in tf.nest.flatten(output) if tf.as_dtype(t.dtype).is_floating]
        gradients = tape.gradient(loss, [*variables, *leaves])
    finally:
        for variable, value in zip(written, kept, strict=True):
            variable.assign(value)
    squares: dict[str, float] = {}
    layers = [_name(v).rpartition("/")[0] or _name(v) for v in variables]
    names = [f"{name} (layer)" if name == "output" else name for name in layers]
    names += ["output"] * len(leaves)
    for name, gradient in zip(names, gradients, strict=True):
        square = 0.0 if gradient is None else _square(gradient)
        squares[name] = squares.get(name, 0.0) + square
    return {name: math.sqrt(square) for name, square in squares.items()}


def find_unhealthy(norms: Mapping[str, float], *, factor: float = 1000.0) -> dict[str, str]:
    """Return the layers whose gradient vanishes or explodes, and why, from `gradient_norms`.

    The measure is the norm at the model's output, so that the loss's scale does not matter: a
    layer's is the product of what enters it and what comes back to it, both about one an element
    where variance is kept. Below 1 / `factor` of it a gradient vanishes, above `factor` it explodes
    (as it does behind inputs of hundreds: normalise these).
    """
    output = norms["output"]
    found = {}
    for name, norm in norms.items():
        if not math.isfinite(norm):
            found[name] = f"no finite gradient: {norm}"
        elif norm == 0:
            found[name] = "no gradient: nothing of the loss depends on it, or it is lost on the way"
        elif norm * factor < output:
            found[name] = f"vanishing: {norm:.2g} where the output's is {output:.2g}"
        elif norm > factor * output:
            found[name] = f"exploding: {norm:.2g} where the output's is {output:.2g}"
    return found


def _kernels(layer, *, rectified: bool = True) -> list[_Kernel]:
    """The kernels of a layer, each as groups of matrices of what meets in one output."""
    kinds = tf.keras.layers
    if isinstance(layer, kinds.Dense):
        inputs, outputs = layer.kernel.shape
        return [_Kernel(layer.kernel, (1, inputs, outputs), (0, 1, 2), 1, inputs, inputs, outputs)]
    if isinstance(layer, kinds.EinsumDense):
        return [_einsum(layer, rectified)]
    if isinstance(layer, kinds.SeparableConv1D | kinds.SeparableConv2D):
        return [_depthwise(layer.depthwise_kernel), _convolution(layer.pointwise_kernel, 1)]
    if isinstance(layer, kinds.DepthwiseConv1D | kinds.DepthwiseConv2D):
        old = getattr(layer, "depthwise_kernel", None)  # tf_keras
        return [_depthwise(layer.kernel if old is None else old)]
    if isinstance(layer, kinds.Conv1DTranspose | kinds.Conv2DTranspose | kinds.Conv3DTranspose):
        return [_transposed(layer)]
    if isinstance(layer, kinds.Conv1D | kinds.Conv2D | kinds.Conv3D):
        return [_convolution(layer.kernel, layer.groups)]
    gates = {kinds.LSTMCell: 4, kinds.GRUCell: 3, kinds.SimpleRNNCell: 1}
    count = next((n for kind, n in gates.items() if isinstance(layer, kind)), 0)
    return _recurrent(layer, count) if count else []


def _einsum(layer, rectified: bool) -> _Kernel:
    """What the kernel shares with the input alone is summed over: its inputs."""
    given, _, output = layer.equation.replace(" ", "").partition("->")
    given, _, kernel = given.partition(",")
    groups = [at for at, axis in enumerate(kernel) if axis in given and axis in output]
    inputs = [at for at, axis in enumerate(kernel) if axis not in output]
    outputs = [at for at, axis in enumerate(kernel) if axis not in given]
    shape = tuple(layer.kernel.shape)
    sizes = [math.prod(shape[at] for at in axes) for axes in (groups, inputs, outputs)]
    order = (*groups, *inputs, *outputs)
    return _Kernel(layer.kernel, shape, order, sizes[0], sizes[1], sizes[1], sizes[2], rectified)


def _convolution(kernel, groups: int) -> _Kernel:
    """(*window, inputs, groups x outputs)."""
    *window, inputs, outputs = kernel.shape
    shape = (*window, inputs, groups, outputs // groups)
    axes, size = len(shape), math.prod(window)
    order = (axes - 2, *range(axes - 2), axes - 1)
    fans = size * inputs, size * outputs // groups
    return _Kernel(kernel, shape, order, groups, fans[0], *fans)


def _depthwise(kernel) -> _Kernel:
    """(*window, channels, outputs of each): every channel is a group."""
    *window, channels, outputs = kernel.shape
    axes, size = len(kernel.shape), math.prod(window)
    order = (axes - 2, *range(axes - 2), axes - 1)
    return _Kernel(kernel, tuple(kernel.shape), order, channels, size, size, size * outputs)


def _transposed(layer) -> _Kernel:
    """(*window, outputs, inputs); an output of stride s gets 1 / s of the window each way."""
    *window, outputs, inputs = layer.kernel.shape
    axes, size = len(layer.kernel.shape), math.prod(window)
    order = (*range(axes - 2), axes - 1, axes - 2)
    fan_in = size * inputs / math.prod(layer.strides)
    shape = tuple(layer.kernel.shape)
    return _Kernel(layer.kernel, shape, order, 1, size * inputs, fan_in, size * outputs)


def _recurrent(cell, gates: int) -> list[_Kernel]:
    """(inputs, gates x units): every gate is a group."""
    found = []
    for kernel, recurrent in ((cell.kernel, False), (cell.recurrent_kernel, True)):
        inputs, units = kernel.shape[0], cell.units
        shape, order = (inputs, gates, units), (1, 0, 2)
        found.append(_Kernel(kernel, shape, order, gates, inputs, inputs, units, False, recurrent))
    return found


def _draw(kernel: _Kernel, scheme: str, gain: float, seed: int) -> str:
    """Draw a kernel; return the name of what was drawn."""
    if kernel.recurrent:
        scheme, gain = "orthogonal", 1.0
    elif not kernel.rectified:
        scheme = scheme.replace("he_", "glorot_")
    outputs = math.prod(kernel.shape) // kernel.groups // kernel.inputs
    shape = (kernel.groups, kernel.inputs, outputs)
    if scheme == "orthogonal":
        draw = [tf.keras.initializers.Orthogonal(gain, seed + n) for n in range(kernel.groups)]
        value = tf.stack([one(shape[1:]) for one in draw])
    else:
        fans = kernel.fan_in if scheme.startswith("he") else (kernel.fan_in + kernel.fan_out) / 2
        variance = gain**2 * (2 if scheme.startswith("he") else 1) / fans
        if scheme.endswith("normal"):
            value = tf.random.stateless_normal(shape, [seed, 0], stddev=math.sqrt(variance))
        else:
            limit = math.sqrt(3 * variance)
            value = tf.random.stateless_uniform(shape, [seed, 0], -limit, limit)
    value = tf.reshape(value, [kernel.shape[axis] for axis in kernel.order])
    value = tf.transpose(value, [kernel.order.index(axis) for axis in range(len(kernel.shape))])
    kernel.variable.assign(tf.cast(tf.reshape(value, kernel.variable.shape), kernel.variable.dtype))
    return scheme


def _draw_default(kernel: _Kernel, scheme: str, gain: float, seed: int) -> str:
    """Draw as Keras's layers do where nothing is said."""
    initializers = tf.keras.initializers
    kind = initializers.Orthogonal if kernel.recurrent else initializers.GlorotUniform
    kernel.variable.assign(kind(seed=seed)(tuple(kernel.variable.shape), kernel.variable.dtype))
    return "default"


def _write_bias(bias, layer) -> str:
    """Zero, but one for the forget gate of an LSTM."""
    value = np.zeros(bias.shape, np.float32)
    forget = isinstance(layer, tf.keras.layers.LSTMCell)
    if forget:  # gates stand in the order input, forget, cell, output
        value[layer.units : 2 * layer.units] = 1.0
    bias.assign(tf.cast(value, bias.dtype))
    return "zeros, and ones for the forget gate" if forget else "zeros"


def _refuse(model: tf.keras.Model) -> None:
    if not model.built:
        raise ValueError("the model has no variables yet: call it once on an example input")
    for layer in model._flatten_layers(include_self=False):
        computed = isinstance(layer, tf.keras.layers.SpectralNormalization)
        changed = getattr(layer, "lora_enabled", False) or getattr(layer, "quantization_mode", None)
        if computed or changed:
            raise NotImplementedError(
                f"{layer.name}: its kernel is computed from others: initialize first, then wrap, "
                "adapt or quantize"
            )


def _within_attention(layers: list) -> set[int]:
    """Layers of an attention: its projections, behind which no rectifier stands."""
    kinds = (tf.keras.layers.MultiHeadAttention,)
    kinds += tuple(filter(None, [getattr(tf.keras.layers, "GroupQueryAttention", None)]))
    found = [layer for layer in layers if isinstance(layer, kinds)]
    return {id(inner) for layer in found for inner in layer._flatten_layers(include_self=False)}


def _own(layer) -> list:
    """The parameters that this layer itself holds, not its layers'."""
    new = getattr(layer, "_trainable_variables", None)  # tf_keras says weights
    return list(layer._trainable_weights if new is None else new)


def _name(variable) -> str:
    return getattr(variable, "path", variable.name)


def _square(gradient) -> float:
    return float(tf.reduce_sum(tf.square(tf.cast(tf.convert_to_tensor(gradient), tf.float64))))


def _call(model: tf.keras.Model, x):
    """Call `model` as `fit` does: x is one argument, but where `call` needs several."""
    inputs = inspect.signature(model.call).parameters.values()
    inputs = [p for p in inputs if p.name not in ("training", "mask") and p.kind != p.VAR_KEYWORD]
    if isinstance(x, dict) and len(inputs) > 1 and x.keys() <= {p.name for p in inputs}:
        return model(**x, training=True)
    needed = sum(2 if p.kind == p.VAR_POSITIONAL else p.default is p.empty for p in inputs)
    if isinstance(x, tuple | list) and needed > 1:
        return model(*x, training=True)
    return model(x, training=True)


def deep_network(*, layers: int = 30, width: int = 64, residual: bool = False) -> tf.keras.Model:
    """Dense layers with rectifiers and a head of 10, plain or with a shortcut around each."""
    inputs = x = tf.keras.Input((width,))
    for number in range(layers):
        out = tf.keras.layers.Dense(width, activation="relu", name=f"layers_{number}")(x)
        x = tf.keras.layers.Add()([x, out]) if residual else out
    return tf.keras.Model(inputs, tf.keras.layers.Dense(10, name="head")(x))


def main() -> None:
    """Print the gradient of the first layer, over the output's, of 30 layers by scheme."""
    random = np.random.default_rng(0)
    x = tf.constant(random.normal(size=(64, 64)).astype(np.float32))
    y = tf.constant(random.integers(0, 10, 64))
    losses = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    print("scheme            plain   unhealthy   residual   unhealthy")
    for scheme in SCHEMES:
        row = []
        for residual in (False, True):
            model = deep_network(residual=residual)
            apply_initialization(model, scheme=scheme)
            norms = gradient_norms(model, lambda output, y: losses(y, output), x, y)
            first = next(iter(norms.values()))
            row += [first / norms["output"], len(find_unhealthy(norms))]
        print(f"{scheme:15}{row[0]:8.1g}{row[1]:12}{row[2]:11.1g}{row[3]:12}")


if __name__ == "__main__":
    main()
