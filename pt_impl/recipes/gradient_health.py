"""Gradient health: how much gradient reaches each layer, and which layers get too little.

    norms = gradient_norms(model, loss_fn, x, y)
    print(find_unhealthy(norms))  # {} is healthy

What it changes: nothing. `gradient_norms` runs one batch forward and back, and returns the norm of
the gradient with respect to each layer's weights and to the model's output. `find_unhealthy` names
the layers whose gradient vanishes or explodes: a thousand times smaller or larger than the output's
(Glorot and Bengio, 2010, "Understanding the difficulty of training deep feedforward neural
networks").

Its twin: `tf_impl/recipes/gradient_health.py`.

Where the frameworks differ and why:
- PyTorch: a module runs in its current mode. TensorFlow: a Keras model runs with `training=True`,
  and its losses are added, as `fit` does.
- Layers are modules in PyTorch and paths of variables in Keras.
- Buffers (PyTorch) and variables (TensorFlow) that the run changes are restored.

When it helps and when it hurts: use it before a training, and if the loss does not fall. It costs
one train step. Inputs in the hundreds look like exploding gradients: normalise them. Norms that are
good at first need not stay so.

Run it alone: `python -m pt_impl.recipes.gradient_health` shows 30 layers, plain and residual.

Copy with it: `pt_impl/kit/calling.py`, `pt_impl/kit/values.py`, `shared/findings.py`.
"""

import math
from collections.abc import Callable, Mapping

import torch
from torch import nn

from pt_impl.kit.calling import call, tensors, unchanged
from pt_impl.kit.values import check_checkpoints


def gradient_norms(model: nn.Module, loss_fn: Callable, x, y) -> dict[str, float]:
    """Return the L2 norm of the loss's gradient by each layer's parameters, in the model's order.

    The last one, "output", is by the model's output; a layer of this name is "output (layer)". The
    model runs once in the mode that it is in; gradients, buffers and the random state are as
    before.

    Args:
        model, x: a tuple is the model's arguments, a mapping its keywords, all else its one input.
        loss_fn: `loss_fn(output, y)`.

    Raises NotImplementedError for a reentrant checkpoint in the model.
    """
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    with unchanged(model):
        output = call(model, x)
        outputs = [tensor for tensor in tensors(output) if tensor.requires_grad]
        loss = loss_fn(output, y)
        check_checkpoints(loss)
        wanted = [*trained.values(), *outputs]
        gradients = torch.autograd.grad(loss, wanted, allow_unused=True)
    layers = [name.rpartition(".")[0] or name for name in trained]
    names = [f"{name} (layer)" if name == "output" else name for name in layers]
    names += ["output"] * len(outputs)
    squares: dict[str, float] = {}
    for name, gradient in zip(names, gradients, strict=True):
        square = 0.0 if gradient is None else float(gradient.double().square().sum())
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


def main() -> None:
    """Print the first layer's gradient of 30, over the output's, and how many are unhealthy."""
    from pt_impl.kit.examples import deep_network

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 64, generator=generator)
    y = torch.randint(10, (64,), generator=generator)
    for name, residual in (("plain", False), ("residual", True)):
        model = deep_network(layers=30, width=64, residual=residual)
        norms = gradient_norms(model, nn.functional.cross_entropy, x, y)
        unhealthy = find_unhealthy(norms)
        first = next(iter(norms.values())) / norms["output"]
        print(f"{name:10}{first:9.1g} of the output's{len(unhealthy):4} unhealthy layers")
        print(*[f"  {layer}: {why}" for layer, why in list(unhealthy.items())[:2]], sep="\n")


if __name__ == "__main__":
    main()
