"""Initialization: the size of initial weights, so that signals keep their size through the layers.

    apply_initialization(model, scheme="he_normal")  # before the first step

What it changes: the weights before the first step. Each kernel is drawn again with a mean of zero:

- "he_normal", "he_uniform" (He et al., 2015, "Delving Deep into Rectifiers"): variance 2 / fan_in,
  so that a rectifier's output keeps the mean square of its input;
- "glorot_normal", "glorot_uniform" (Glorot and Bengio, 2010): 2 / (fan_in + fan_out), for layers
  that are linear around zero, forward and backward alike;
- "orthogonal" (Saxe et al., 2014): a matrix that keeps every length; after a rectifier use `gain` =
  sqrt(2); "default": the framework's default.

Its twin: `pt_impl/recipes/initialization.py`, which says where the frameworks differ.

When it helps and when it hurts: it decides whether deep networks without normalisation or residuals
train at all. Before BatchNorm the scale does not matter. Residual branches that keep their input's
size explode with depth: use `gain` = 1 / sqrt(blocks). Trained weights are lost: freeze those to
keep. Special initial weights of a model (0.02 in transformers) are lost, too.

Run it alone: `python -m tf_impl.recipes.initialization` prints outputs of 30 layers by scheme.

Copy with it: `tf_impl/kit/checks/initialization.py`, `tf_impl/kit/kernels.py`.
"""

import math

import numpy as np
import tensorflow as tf

from tf_impl.kit.checks.initialization import check_initialization
from tf_impl.kit.kernels import Kernel, layer_kernels

SCHEMES = ("he_normal", "he_uniform", "glorot_normal", "glorot_uniform", "orthogonal", "default")


def apply_initialization(
    model: tf.keras.Model, *, scheme: str = "he_normal", gain: float = 1.0, seed: int = 0
) -> dict[str, str]:
    """Draw the kernels of dense, convolutional, recurrent and attention layers anew, in place.

    Biases begin at zero, but an LSTM's forget gate at one (Jozefowicz et al., 2015). No rectifier
    follows gates and projections of attention: He's schemes draw them as Glorot's. Recurrent
    kernels are orthogonal in all schemes. The global random state stays.

    Args:
        scheme: one of `SCHEMES`.
        gain: a factor for all kernels but recurrent ones, not with "default".
        seed: of the draws.

    Returns:
        For each parameter what became of it: the scheme, "zeros", or "left: ..." with the reason:
        frozen, shared with an embedding, or of a layer that is none of these.

    Raises:
        ValueError: an unknown scheme, or a model without variables yet.
        NotImplementedError: kernels that are computed from others (spectral norm, LoRA, integers).
    """
    check_initialization(model, scheme, gain, SCHEMES)
    owned = [(layer, v) for layer in model._flatten_layers() for v in _own_variables(layer)]
    # Keras 3 freezes single variables, too.
    kept = {id(v): "frozen" for layer, v in owned if not (layer.trainable and v.trainable)}
    for layer, variable in owned:
        if isinstance(layer, tf.keras.layers.Embedding):
            kept[id(variable)] = "of or shared with an embedding"
    done: dict[int, str] = {}
    generator = np.random.default_rng(seed)
    for layer, kernels in layer_kernels(model):
        for kernel in kernels:
            at = id(kernel.variable)
            if at not in kept and at not in done:
                draw = _draw_default if scheme == "default" else _draw
                done[at] = draw(kernel, scheme, gain, int(generator.integers(2**31)))
        bias = getattr(layer, "bias", None)
        if bias is not None and id(bias) not in kept:
            said = _write_bias(bias, layer)  # Keras's own, too
            done[id(bias)] = "default" if scheme == "default" else said
    return {
        getattr(v, "path", v.name): done.get(id(v))
        or f"left: {kept.get(id(v)) or f'of {type(layer).__name__}'}"
        for layer, v in owned
    }


def _draw(kernel: Kernel, scheme: str, gain: float, seed: int) -> str:
    """Draw a kernel; return the name of what was drawn."""
    if kernel.recurrent:
        scheme, gain = "orthogonal", 1.0
    elif not kernel.rectified:
        scheme = scheme.replace("he_", "glorot_")
    groups, *shape = kernel.matrices
    he = scheme.startswith("he")
    fans = kernel.fan_in if he else (kernel.fan_in + kernel.fan_out) / 2
    variance = gain**2 * (2 if he else 1) / fans
    if scheme == "orthogonal":
        draws = [tf.keras.initializers.Orthogonal(gain, seed + n) for n in range(groups)]
        value = tf.stack([draw(shape) for draw in draws])
    elif scheme.endswith("normal"):
        value = tf.random.stateless_normal(kernel.matrices, [seed, 0], stddev=math.sqrt(variance))
    else:
        limit = math.sqrt(3 * variance)
        value = tf.random.stateless_uniform(kernel.matrices, [seed, 0], -limit, limit)
    kernel.write(value)
    return scheme


def _draw_default(kernel: Kernel, scheme: str, gain: float, seed: int) -> str:
    """Draw as Keras's layers do where nothing is said."""
    initializers = tf.keras.initializers
    kind = initializers.Orthogonal if kernel.recurrent else initializers.GlorotUniform
    kernel.variable.assign(kind(seed=seed)(tuple(kernel.variable.shape), kernel.variable.dtype))
    return "default"


def _write_bias(bias, layer: tf.keras.layers.Layer) -> str:
    """Zero, but one for the forget gate of an LSTM."""
    value = np.zeros(bias.shape, np.float32)
    forget = isinstance(layer, tf.keras.layers.LSTMCell)
    if forget:  # gates are in the order input, forget, cell, output
        value[layer.units : 2 * layer.units] = 1.0
    bias.assign(tf.cast(value, bias.dtype))
    return "zeros, and ones for the forget gate" if forget else "zeros"


def _own_variables(layer: tf.keras.layers.Layer) -> list:
    """The parameters that this layer itself holds, not its layers'."""
    new = getattr(layer, "_trainable_variables", None)  # tf_keras says weights
    return list(layer._trainable_weights if new is None else new)


def main() -> None:
    """Print the mean square of the output of 30 layers, plain and residual, by scheme."""
    from tf_impl.kit.examples import deep_network

    x = tf.random.stateless_normal((256, 64), [0, 0])
    print("scheme             plain   residual")
    for scheme in SCHEMES:
        row = []
        for residual in (False, True):
            model = deep_network(layers=30, width=64, residual=residual)
            apply_initialization(model, scheme=scheme)
            row.append(float(tf.reduce_mean(model(x) ** 2)))
        print(f"{scheme:15}{row[0]:9.1g}{row[1]:11.1g}")


if __name__ == "__main__":
    main()
