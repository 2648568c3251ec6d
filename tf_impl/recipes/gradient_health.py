"""Gradient health: how much gradient reaches each layer, and which layers get too little.

    norms = gradient_norms(model, loss_fn, x, y)
    print(find_unhealthy(norms))  # {} is healthy

What it changes: nothing. `gradient_norms` runs one batch forward and back, and returns the norm of
the gradient with respect to each layer's weights and to the model's output. `find_unhealthy` names
the layers whose gradient vanishes or explodes: a thousand times smaller or larger than the output's
(Glorot and Bengio, 2010, "Understanding the difficulty of training deep feedforward neural
networks").

Its twin: `pt_impl/recipes/gradient_health.py`, which says where the frameworks differ.

When it helps and when it hurts: use it before a training, and if the loss does not fall. It costs
one train step. Inputs in the hundreds look like exploding gradients: normalise them. Norms that are
good at first need not stay so.

Run it alone: `python -m tf_impl.recipes.gradient_health` shows 30 layers, plain and residual.

Copy with it: `tf_impl/kit/calling.py`.
"""

import math
from collections.abc import Callable, Mapping

import tensorflow as tf

from tf_impl.kit.calling import add_own_losses, call, tensors, unchanged


def gradient_norms(model: tf.keras.Model, loss_fn: Callable, x, y) -> dict[str, float]:
    """Return the L2 norm of the loss's gradient by each layer's variables, in the model's order.

    The last one, "output", is by the model's output; a layer of this name is "output (layer)". The
    model runs once as it trains; all variables and the global generator are as before.

    Args:
        model, x: x is the one input, or the arguments of a `call` that takes several.
        loss_fn: `loss_fn(output, y)`, not Keras's order; the model's own losses are added.
    """
    variables = model.trainable_variables
    with unchanged(model):
        with tf.GradientTape() as tape:
            output = call(model, x, training=True)
            loss = add_own_losses(loss_fn(output, y), model)
        outputs = [tensor for tensor in tensors(output) if tensor.dtype.is_floating]
        gradients = tape.gradient(loss, [*variables, *outputs])
    paths = [getattr(variable, "path", variable.name) for variable in variables]
    layers = [path.rpartition("/")[0] or path for path in paths]
    names = [f"{name} (layer)" if name == "output" else name for name in layers]
    names += ["output"] * len(outputs)
    squares: dict[str, float] = {}
    for name, gradient in zip(names, gradients, strict=True):
        square = 0.0 if gradient is None else _square(gradient)
        squares[name] = squares.get(name, 0.0) + square
    return {name: math.sqrt(square) for name, square in squares.items()}


def _square(gradient) -> float:
    """The sum of squares of a gradient; that of an embedding is of the rows that were looked up."""
    return float(tf.reduce_sum(tf.square(tf.cast(tf.convert_to_tensor(gradient), tf.float64))))


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


def main() -> None:
    """Print the first layer's gradient of 30, over the output's, and how many are unhealthy."""
    from tf_impl.kit.examples import deep_network

    x = tf.random.stateless_normal((64, 64), [0, 0])
    y = tf.random.stateless_uniform((64,), [0, 1], 0, 10, tf.int64)
    losses = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    for name, residual in (("plain", False), ("residual", True)):
        model = deep_network(layers=30, width=64, residual=residual)
        norms = gradient_norms(model, lambda output, y: losses(y, output), x, y)
        unhealthy = find_unhealthy(norms)
        first = next(iter(norms.values())) / norms["output"]
        print(f"{name:10}{first:9.1g} of the output's{len(unhealthy):4} unhealthy layers")
        print(*[f"  {layer}: {why}" for layer, why in list(unhealthy.items())[:2]], sep="\n")


if __name__ == "__main__":
    main()
