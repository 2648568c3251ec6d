"""Initialization: the size of initial weights, so that signals keep their size through the layers.

    apply_initialization(model, scheme="he_normal")  # before the first step

What it changes: the weights before the first step. Each kernel is drawn again with a mean of zero:

- "he_normal", "he_uniform" (He et al., 2015, "Delving Deep into Rectifiers"): variance 2 / fan_in,
  so that a rectifier's output keeps the mean square of its input;
- "glorot_normal", "glorot_uniform" (Glorot and Bengio, 2010): 2 / (fan_in + fan_out), for layers
  that are linear around zero, forward and backward alike;
- "orthogonal" (Saxe et al., 2014): a matrix that keeps every length; after a rectifier use `gain` =
  sqrt(2); "default": the framework's default.

Its twin: `tf_impl/recipes/initialization.py`.

Where the frameworks differ and why:
- Defaults: `nn.Linear` and `nn.Conv2d` draw variance 1 / (3 fan_in), a sixth of He's. Keras draws
  Glorot's uniform kernels and biases of zero.
- Keras truncates normal distributions at two standard deviations. They are not truncated here.
- Both compute wrong fans for attention and transposed convolutions. Here fan_in counts the inputs
  of one output.
- Keras's layers use their initializers when they are built. Here the weights of built layers are
  overwritten.
- The same scheme gives both frameworks the same variance, not the same numbers.

When it helps and when it hurts: it decides whether deep networks without normalisation or residuals
train at all. Before BatchNorm the scale does not matter. Residual branches that keep their input's
size explode with depth: use `gain` = 1 / sqrt(blocks). Trained weights are lost: freeze those to
keep. Special initial weights of a model (0.02 in transformers) are lost, too.

Run it alone: `python -m pt_impl.recipes.initialization` prints outputs of 30 layers by scheme.

Copy with it: `pt_impl/kit/checks/initialization.py`, `pt_impl/kit/kernels.py`.
"""

import math

import torch
from torch import nn

from pt_impl.kit.checks.initialization import check_initialization
from pt_impl.kit.kernels import Kernel, layer_kernels

SCHEMES = ("he_normal", "he_uniform", "glorot_normal", "glorot_uniform", "orthogonal", "default")


def apply_initialization(
    model: nn.Module, *, scheme: str = "he_normal", gain: float = 1.0, seed: int = 0
) -> dict[str, str]:
    """Draw the kernels of dense, convolutional, recurrent and attention layers anew, in place.

    Biases begin at zero, but an LSTM's forget gate at one (Jozefowicz et al., 2015). No rectifier
    follows gates and projections of attention: He's schemes draw them as Glorot's. Recurrent
    kernels are orthogonal in all schemes but the default. The global random state stays.

    Args:
        scheme: one of `SCHEMES`.
        gain: a factor for all kernels but recurrent ones, not with "default".
        seed: of the draws.

    Returns:
        For each parameter what became of it: the scheme, "zeros", or "left: ..." with the reason:
        frozen, shared with an embedding, or of a layer that is none of these.

    Raises:
        ValueError: an unknown scheme, or a model without parameters yet.
        NotImplementedError: kernels that are computed from others (weight norm and the like).
    """
    check_initialization(model, scheme, gain, SCHEMES)
    kept = {id(p): "frozen" for p in model.parameters() if not p.requires_grad}
    for module in model.modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            kept |= {id(module.weight): "of or shared with an embedding"}
    done: dict[int, str] = {}
    generator = torch.Generator().manual_seed(seed)
    for module, kernels in layer_kernels(model):
        if scheme == "default":
            done |= _reset(module, kept, generator)
            continue
        for kernel in kernels:
            at = id(kernel.parameter)
            if at not in kept and at not in done:
                done[at] = _draw(kernel, scheme, gain, generator)
        for bias in _biases(module):
            if id(bias) not in kept:
                done[id(bias)] = _write_bias(bias, module)
    return _report(model, kept, done)


def _draw(kernel: Kernel, scheme: str, gain: float, generator: torch.Generator) -> str:
    """Draw a kernel; return the name of what was drawn."""
    if kernel.recurrent:
        scheme, gain = "orthogonal", 1.0
    elif not kernel.rectified:
        scheme = scheme.replace("he_", "glorot_")
    value = torch.empty(kernel.matrices)
    he = scheme.startswith("he")
    fans = kernel.fan_in if he else (kernel.fan_in + kernel.fan_out) / 2
    variance = gain**2 * (2 if he else 1) / fans
    if scheme == "orthogonal":
        for matrix in value:
            nn.init.orthogonal_(matrix, gain, generator=generator)
    elif scheme.endswith("normal"):
        value.normal_(0, math.sqrt(variance), generator=generator)
    else:
        limit = math.sqrt(3 * variance)
        value.uniform_(-limit, limit, generator=generator)
    kernel.write(value)
    return scheme


def _biases(module: nn.Module) -> list[nn.Parameter]:
    own = module.named_parameters(recurse=False)
    found = [p for name, p in own if "bias" in name and name not in ("bias_k", "bias_v")]
    if isinstance(module, nn.MultiheadAttention) and module.out_proj.bias is not None:
        found.append(module.out_proj.bias)
    return found


@torch.no_grad()
def _write_bias(bias: nn.Parameter, module: nn.Module) -> str:
    """Zero, but one for the forget gate of an LSTM, in the first of its two biases."""
    bias.zero_()
    inputs = {id(p) for name, p in module.named_parameters(recurse=False) if "bias_ih" in name}
    if isinstance(module, nn.LSTM | nn.LSTMCell) and id(bias) in inputs:
        size = len(bias) // 4
        bias[size : 2 * size] = 1.0  # gates are in the order input, forget, cell, output
        return "zeros, and ones for the forget gate"
    return "zeros"


def _reset(module: nn.Module, kept: dict[int, str], generator: torch.Generator) -> dict[int, str]:
    """Draw as the layer's own constructor does; what is kept gets its values back."""
    values = [(p, p.detach().clone()) for p in module.parameters() if id(p) in kept]
    reset = getattr(module, "reset_parameters", None) or module._reset_parameters
    with torch.random.fork_rng():
        torch.manual_seed(int(torch.randint(2**31, (1,), generator=generator)))
        if isinstance(module, nn.MultiheadAttention):  # draws all but this one
            module.out_proj.reset_parameters()
        reset()
    with torch.no_grad():
        for parameter, value in values:
            parameter.copy_(value)
    return {id(p): "default" for p in module.parameters() if id(p) not in kept}


def _report(model: nn.Module, kept: dict[int, str], done: dict[int, str]) -> dict[str, str]:
    owners = {
        id(p): type(module).__name__
        for module in model.modules()
        for p in module._parameters.values()
    }
    return {
        name: done.get(id(p)) or f"left: {kept.get(id(p)) or f'of {owners[id(p)]}'}"
        for name, p in model.named_parameters()
    }


def main() -> None:
    """Print the mean square of the output of 30 layers, plain and residual, by scheme."""
    from pt_impl.kit.examples import deep_network

    x = torch.randn(256, 64, generator=torch.Generator().manual_seed(0))
    print("scheme             plain   residual")
    for scheme in SCHEMES:
        row = []
        for residual in (False, True):
            model = deep_network(layers=30, width=64, residual=residual)
            apply_initialization(model, scheme=scheme)
            with torch.no_grad():
                row.append(float(model(x).square().mean()))
        print(f"{scheme:15}{row[0]:9.1g}{row[1]:11.1g}")


if __name__ == "__main__":
    main()
