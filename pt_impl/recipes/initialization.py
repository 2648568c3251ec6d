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

Its twin: `tf_impl/recipes/initialization.py`.

Where the frameworks differ and why:
- The defaults: `nn.Linear` and `nn.Conv2d` draw weights and biases with variance 1 / (3 fan_in), a
  sixth of He's ("kaiming_uniform" with a slope of sqrt(5), kept for old results); Keras draws
  Glorot's uniform kernels and biases of zero. Between equal widths that is three times PyTorch's
  variance. Behind rectifiers both vanish with depth, PyTorch's sooner.
- `nn.MultiheadAttention` draws query, key and value as one matrix, whose fan_out is three times too
  large; Keras draws its (width, heads, size) kernels as if they were convolutions, with fans that
  are `heads` and more times too large. Here each projection has its own fans.
- `nn.init` takes transposed convolutions' fans the wrong way round, and so does Keras, which also
  counts a depthwise convolution's channels in its fan_in. Here fans are what meets in one output.
- Keras cuts its normal distributions off at two deviations. Here both draw whole ones.
- Draws are each framework's own: twins share the variance, not the numbers.

When it helps and when it hurts: deep networks without normalisation or residuals train with the
right variance, or not at all. With BatchNorm the scale of a kernel in front of it does not matter
to the output, only to the size of a step. Residual blocks pass gradients by their branches: small
kernels do no harm there, while a branch that keeps its input's size doubles the sum's, so that each
scheme explodes with depth where nothing normalises. There `gain` = 1 / sqrt(blocks) is right.
Weights that were trained are lost: freeze what is to stay. Embeddings, kernels tied to one,
normalisation and every other parameter are left, and the report names them: what models draw by
design (a zero scale at a block's end, 0.02 in transformers) is not known here.

Run it alone: `python -m pt_impl.recipes.initialization` prints gradients of 30 layers by scheme.

Copy with it: nothing.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves  # torch has no public one

SCHEMES = ("he_normal", "he_uniform", "glorot_normal", "glorot_uniform", "orthogonal", "default")


@dataclass(frozen=True)
class _Kernel:
    """A parameter as `shape` (groups, ...) whose axes `order` makes it (groups, inputs, outputs).

    rectified: whether He's schemes may take it for a rectifier's. recurrent: of the hidden state.
    """

    parameter: nn.Parameter
    shape: tuple[int, ...]
    order: tuple[int, ...]
    inputs: int
    fan_in: float
    fan_out: float
    rectified: bool = True
    recurrent: bool = False


def apply_initialization(
    model: nn.Module, *, scheme: str = "he_normal", gain: float = 1.0, seed: int = 0
) -> dict[str, str]:
    """Draw the kernels of dense, convolutional, recurrent and attention layers anew, in place.

    gain: a factor for all kernels but recurrent ones, not with "default". Returns for each
    parameter what became of it: the scheme, "zeros", or "left: ..." with the reason: frozen, shared
    with an embedding, or of a layer that is none of these. The global random state stays. Raises
    ValueError for an unknown scheme and a model without parameters yet, NotImplementedError for
    kernels that are computed from others (weight norm and the like), before anything is changed.
    """
    if scheme not in SCHEMES or gain <= 0 or (scheme == "default" and gain != 1):
        raise ValueError(
            f"scheme is one of {', '.join(SCHEMES)} and gain above 0 (1 with default), "
            f"not {scheme!r} and {gain}"
        )
    _refuse(model)
    kept = {id(p): "frozen" for p in model.parameters() if not p.requires_grad}
    for module in model.modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            kept |= {id(module.weight): "of or shared with an embedding"}
    done: dict[int, str] = {}
    generator = torch.Generator().manual_seed(seed)
    for module in _layers(model):
        if scheme == "default":
            _reset(module, kept, done, generator)
            continue
        for kernel in _kernels(module):
            if id(kernel.parameter) not in kept and id(kernel.parameter) not in done:
                done[id(kernel.parameter)] = _draw(kernel, scheme, gain, generator)
        for bias in _biases(module):
            if id(bias) not in kept:
                done[id(bias)] = _write_bias(bias, module)
    owners = {
        id(p): type(module).__name__
        for module in model.modules()
        for p in module._parameters.values()
    }
    return {
        name: done.get(id(p)) or f"left: {kept.get(id(p)) or f'of {owners[id(p)]}'}"
        for name, p in model.named_parameters()
    }


def gradient_norms(model: nn.Module, loss_fn: Callable, x, y) -> dict[str, float]:
    """The L2 norm of the loss's gradient by each layer's parameters, in the model's order.

    The last one, "output", is by the model's output; a layer of this name is "output (layer)". The
    model runs once in the mode that it is in; gradients, buffers and the random state are as
    before. loss_fn: `loss_fn(output, y)`. x: a tuple of arguments, a mapping of keywords, or the
    one argument.
    """
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    # With its place: a model may put another tensor there.
    buffers = [
        (module, name, buffer, buffer.clone())
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
    ]
    try:
        with torch.random.fork_rng():
            output = _call(model, x)
            leaves = [t for t in _leaves(output) if isinstance(t, Tensor) and t.requires_grad]
            loss = loss_fn(output, y)
        gradients = torch.autograd.grad(loss, [p for _, p in named] + leaves, allow_unused=True)
    finally:
        with torch.no_grad():
            for module, name, buffer, value in buffers:
                setattr(module, name, buffer.copy_(value))
    squares: dict[str, float] = {}
    layers = [name.rpartition(".")[0] or name for name, _ in named]
    names = [f"{name} (layer)" if name == "output" else name for name in layers]
    names += ["output"] * len(leaves)
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


def _leaves(output) -> list:
    """What an output holds, also in the dataclasses and mappings that torch does not know."""
    found = []
    for leaf in tree_leaves(output):
        if is_dataclass(leaf):
            found += _leaves([getattr(leaf, field.name) for field in fields(leaf)])
        elif isinstance(leaf, Mapping):
            found += _leaves(list(leaf.values()))
        else:
            found.append(leaf)
    return found


def _layers(model: nn.Module) -> list[nn.Module]:
    """The layers that hold kernels; an attention stands for its projection."""
    attentions = [m for m in model.modules() if isinstance(m, nn.MultiheadAttention)]
    within = {m.out_proj for m in attentions}
    kinds = (nn.Linear, nn.modules.conv._ConvNd, nn.RNNBase, nn.RNNCellBase, nn.MultiheadAttention)
    return [m for m in model.modules() if isinstance(m, kinds) and m not in within]


def _kernels(module: nn.Module) -> list[_Kernel]:
    """The kernels of a layer, each as groups of matrices of what meets in one output."""
    if isinstance(module, nn.Linear):
        return [_dense(module.weight, 1)]
    if isinstance(module, nn.modules.conv._ConvTransposeNd):
        return [_convolution(module, transposed=True)]
    if isinstance(module, nn.modules.conv._ConvNd):
        return [_convolution(module, transposed=False)]
    if isinstance(module, nn.MultiheadAttention):
        joint, output = module.in_proj_weight, module.out_proj.weight
        apart = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
        found = [_dense(weight, 1, rectified=False) for weight in apart if weight is not None]
        found += [] if joint is None else [_dense(joint, 3, rectified=False)]
        return [*found, _dense(output, 1, rectified=False)]
    return [
        _dense(
            parameter,
            1 if "_hr" in name else _gates(module),
            rectified=False,
            recurrent="weight_hh" in name,
        )
        for name, parameter in module.named_parameters(recurse=False)
        if name.startswith("weight")
    ]


def _dense(weight: nn.Parameter, groups: int, *, rectified=True, recurrent=False) -> _Kernel:
    """(groups x outputs, inputs)."""
    outputs, inputs = weight.shape[0] // groups, weight.shape[1]
    shape = (groups, outputs, inputs)
    return _Kernel(weight, shape, (0, 2, 1), inputs, inputs, outputs, rectified, recurrent)


def _convolution(module: nn.Module, *, transposed: bool) -> _Kernel:
    """(groups x outputs, inputs, *window), or (groups x inputs, outputs, *window) if transposed."""
    weight, groups, window = module.weight, module.groups, math.prod(module.kernel_size)
    shape = (groups, weight.shape[0] // groups, *weight.shape[1:])
    spatial = tuple(range(3, len(shape)))
    first, second = shape[1], shape[2]
    if transposed:  # an output of stride s gets a part of the window: 1 / s of it each way
        fan_in = first * window / math.prod(module.stride)
        order = (0, 1, *spatial, 2)
        return _Kernel(weight, shape, order, first * window, fan_in, second * window)
    order = (0, 2, *spatial, 1)
    return _Kernel(weight, shape, order, second * window, second * window, first * window)


def _gates(module: nn.Module) -> int:
    if isinstance(module, nn.LSTM | nn.LSTMCell):
        return 4
    return 3 if isinstance(module, nn.GRU | nn.GRUCell) else 1


@torch.no_grad()
def _draw(kernel: _Kernel, scheme: str, gain: float, generator: torch.Generator) -> str:
    """Draw a kernel; return the name of what was drawn."""
    if kernel.recurrent:
        scheme, gain = "orthogonal", 1.0
    elif not kernel.rectified:
        scheme = scheme.replace("he_", "glorot_")
    sizes = [kernel.shape[axis] for axis in kernel.order]
    outputs = math.prod(sizes) // kernel.shape[0] // kernel.inputs
    value = torch.empty(kernel.shape[0], kernel.inputs, outputs)
    if scheme == "orthogonal":
        for matrix in value:
            nn.init.orthogonal_(matrix, gain, generator=generator)
    else:
        fans = kernel.fan_in if scheme.startswith("he") else (kernel.fan_in + kernel.fan_out) / 2
        variance = gain**2 * (2 if scheme.startswith("he") else 1) / fans
        if scheme.endswith("normal"):
            value.normal_(0, math.sqrt(variance), generator=generator)
        else:
            limit = math.sqrt(3 * variance)
            value.uniform_(-limit, limit, generator=generator)
    back = [kernel.order.index(axis) for axis in range(len(sizes))]
    value = value.reshape(sizes).permute(back)
    kernel.parameter.copy_(value.reshape(kernel.parameter.shape))
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
        bias[size : 2 * size] = 1.0  # gates stand in the order input, forget, cell, output
        return "zeros, and ones for the forget gate"
    return "zeros"


def _reset(module: nn.Module, kept: dict, done: dict, generator: torch.Generator) -> None:
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
    done |= {id(p): "default" for p in module.parameters() if id(p) not in kept}


def _refuse(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if any(nn.parameter.is_lazy(p) for p in module._parameters.values()):
            raise ValueError(f"{name} has no parameters yet: call the model once on an example")
        computed = nn.utils.parametrize.is_parametrized(module)
        hooks = [type(hook).__name__ for hook in module._forward_pre_hooks.values()]
        if computed or {"WeightNorm", "SpectralNorm"} & set(hooks):
            raise NotImplementedError(
                f"{name}: its weight is computed from others: initialize first, then parametrize"
            )


def _call(model: nn.Module, x):
    if isinstance(x, Mapping):
        return model(**x)
    return model(*x) if isinstance(x, tuple) else model(x)


def deep_network(*, layers: int = 30, width: int = 64, residual: bool = False) -> nn.Module:
    """Dense layers with rectifiers and a head of 10, plain or with a shortcut around each."""
    return _DeepNetwork(layers, width, residual)


class _DeepNetwork(nn.Module):
    def __init__(self, layers: int, width: int, residual: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.head = nn.Linear(width, 10)
        self.residual = residual

    def forward(self, x: Tensor) -> Tensor:
        """(n, width) -> (n, 10)."""
        for layer in self.layers:
            out = torch.relu(layer(x))
            x = x + out if self.residual else out
        return self.head(x)


def main() -> None:
    """Print the gradient of the first layer, over the output's, of 30 layers by scheme."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 64, generator=generator)
    y = torch.randint(10, (64,), generator=generator)
    print("scheme            plain   unhealthy   residual   unhealthy")
    for scheme in SCHEMES:
        row = []
        for residual in (False, True):
            model = deep_network(residual=residual)
            apply_initialization(model, scheme=scheme)
            norms = gradient_norms(model, nn.functional.cross_entropy, x, y)
            row += [norms["layers.0"] / norms["output"], len(find_unhealthy(norms))]
        print(f"{scheme:15}{row[0]:8.1g}{row[1]:12}{row[2]:11.1g}{row[3]:12}")


if __name__ == "__main__":
    main()
