"""Structured pruning: whole channels leave a convolutional network, which becomes a smaller one.

What it changes: of each convolution the channels whose filters have the smallest L1 norm go (Li et
al., 2017, "Pruning Filters for Efficient ConvNets", section 3.1), with their BatchNorm entries and
with what the next layer would have read of them. The result is an ordinary dense model with fewer
channels: less arithmetic, less memory, a smaller file, on any hardware and in any runtime. Removing
a share s of all channels leaves about (1 - s)^2 of the multiply-accumulates and weights, since each
layer loses inputs and outputs.

Its twin: `tf_impl/compression/structured_pruning.py`.

Where the frameworks differ and why:
- Which layer feeds which stands in a Keras model's graph. A PyTorch model is code, so here it is
  traced (`torch.fx`), and its `forward` stays as it is over smaller modules; there the model is
  cloned with other layer configurations. Subclassed Keras models have no graph and are refused.
- Flattened images are ordered channel by channel here (NCHW), pixel by pixel there (NHWC).
- `torch.nn.utils.prune.ln_structured` only masks channels, and saves nothing. TensorFlow Model
  Optimization has no structured pruning.

When it helps and when it hurts: it is the kind of pruning that makes a model faster everywhere. It
costs more accuracy than single weights do at the same share, since a channel cannot be picked
apart: train the smaller model on. From a start at random, training the small model from scratch is
as good (Liu et al., 2019, "Rethinking the Value of Network Pruning"). Kernels gain little where
the channels that stay no longer fill vector registers: prefer counts that are multiples of 8 or 16.

Run it alone: `python -m pt_impl.compression.structured_pruning` prints sizes and times of smaller
models.
"""

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.utils import prune

# What changes no channel by another: element by element, or pixel by pixel within a channel.
_MODULES = (
    *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Sigmoid, nn.Tanh, nn.Identity),
    *(nn.Dropout, nn.Dropout2d, nn.ZeroPad2d, nn.MaxPool2d, nn.AvgPool2d),
    *(nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d),
)
_CALLS = (
    *(torch.relu, torch.sigmoid, torch.tanh, F.relu, F.relu6, F.leaky_relu, F.elu, F.gelu, F.silu),
    *(F.dropout, F.dropout2d, F.max_pool2d, F.avg_pool2d, F.adaptive_avg_pool2d),
    *(F.adaptive_max_pool2d, "relu", "relu_", "sigmoid", "tanh"),
)


def remove_channels(model: nn.Module, *, share: float) -> nn.Module:
    """Return a smaller copy of `model`: `share` of each convolution's channels are gone.

    model: a chain of 2-D convolutions with BatchNorm, activations and pooling between them, from
    the input to the first `nn.Linear`; what comes after that is of any kind and stays as it is.
    `model` itself is left as it was; make a new optimizer for the copy.
    share: at least 0 and below 1. Of n channels the round(n * (1 - share)) whose whole filters have
    the largest L1 norm stay, at least one, in their order; of equal ones the first.

    Raises ValueError for another share, a model with pruning masks and one without 2-D
    convolutions; NotImplementedError, which names the place, where the model is no such chain:
    branches, grouped convolutions, other layers, a module that runs twice, no linear layer.
    Source: Li et al. (2017).
    """
    if not 0.0 <= share < 1.0:
        raise ValueError(f"share must be at least 0 and below 1, not {share!r}")
    if prune.is_pruned(model):
        raise ValueError("the model has pruning masks: finalize it first")
    if not any(type(module) is nn.Conv2d for module in model.modules()):
        raise ValueError("the model has no 2-D convolution to take channels from")
    chain = _chain(model)
    model = copy.deepcopy(model)
    stay = None  # which channels of what flows here are left; None: all, as in the input
    for name in chain:
        stay = _shrink(model.get_submodule(name), stay, share)
    return model


def _chain(model: nn.Module) -> list[str]:
    """The modules with weights, in order, up to the first linear layer."""
    try:
        graph = fx.symbolic_trace(model).graph
    except Exception as error:  # whatever the model's code raises on a stand-in for a tensor
        raise NotImplementedError(f"torch.fx can't trace the model: {error}") from error
    node = next(node for node in graph.nodes if node.op == "placeholder")
    found, images = [], True
    while True:
        previous, node = node, _only_user(node)
        module = model.get_submodule(node.target) if node.op == "call_module" else None
        kind = type(module)
        if node.all_input_nodes != [previous]:
            raise NotImplementedError(f"{_place(node)} joins branches of the model")
        if images and kind in (nn.Conv2d, nn.BatchNorm2d):
            if node.target in found:
                raise NotImplementedError(f"{node.target!r} runs more than once")
            if kind is nn.Conv2d and module.groups != 1:
                raise NotImplementedError(f"{node.target!r} is a grouped convolution")
            found.append(node.target)
        elif not images and kind is nn.Linear:
            return [*found, node.target]
        elif images and _takes_pixels_away(node, module):
            images = False
        elif not (node.target in _CALLS if module is None else kind in _MODULES):
            raise NotImplementedError(f"{_place(node)} can't be followed from channel to channel")


def _only_user(node: fx.Node) -> fx.Node:
    users = list(node.users)
    if len(users) != 1:
        raise NotImplementedError(f"{_place(node)} feeds {len(users)} operators, not one")
    if users[0].op == "output":
        raise NotImplementedError("no nn.Linear follows: the last channels are the model's output")
    return users[0]


def _place(node: fx.Node) -> str:
    return repr(node.target if node.op == "call_module" else node.name)


def _takes_pixels_away(node: fx.Node, module: nn.Module | None) -> bool:
    """Whether (n, c, h, w) becomes (n, c * h * w), or (n, c) by a mean or maximum over the rest."""
    if module is not None:
        return type(module) is nn.Flatten and (module.start_dim, module.end_dim) == (1, -1)
    flattens = node.target in ("flatten", torch.flatten)
    names = ("start_dim", "end_dim") if flattens else ("dim", "keepdim")
    settings = dict(zip(names, node.args[1:], strict=False)) | node.kwargs
    if flattens:
        return {"end_dim": -1} | settings == {"start_dim": 1, "end_dim": -1}
    reduces = node.target in ("mean", torch.mean, "amax", torch.amax)
    pixels = (2, 3), [2, 3], (-2, -1), [-2, -1]
    return reduces and settings in [{name: dims} for name in ("dim", "axis") for dims in pixels]


@torch.no_grad()
def _shrink(module: nn.Module, stay: Tensor | None, share: float) -> Tensor | None:
    """Cut what a module reads and, of a convolution, what it makes; return what flows on."""
    if type(module) is nn.Conv2d:
        largest = _largest(module.weight, share)
        _cut(module, "weight", stay, dim=1)
        _cut(module, "weight", largest)
        _cut(module, "bias", largest)
        module.out_channels, module.in_channels = module.weight.shape[:2]
        return largest
    if type(module) is nn.BatchNorm2d:
        for name in ("weight", "bias", "running_mean", "running_var"):
            _cut(module, name, stay)
        if stay is not None:
            module.num_features = int(stay.sum())
        return stay
    if stay is not None:
        # A flattened channel is a run of columns, one for each of its pixels.
        pixels = module.in_features // len(stay)
        _cut(module, "weight", stay.repeat_interleave(pixels), dim=1)
        module.in_features = module.weight.shape[1]
    return None


def _largest(weight: Tensor, share: float) -> Tensor:
    """Mark the filters that stay. Norms are summed in float64, so that twins agree."""
    norms = weight.double().abs().flatten(1).sum(1)
    count = max(round(len(norms) * (1 - share)), 1)
    marked = torch.zeros(len(norms), dtype=torch.bool, device=weight.device)
    marked[norms.argsort(descending=True, stable=True)[:count]] = True
    return marked


def _cut(module: nn.Module, name: str, stay: Tensor | None, dim: int = 0) -> None:
    """Keep the marked slices of a parameter or buffer along `dim`."""
    tensor = getattr(module, name)
    if tensor is None or stay is None:
        return
    smaller = tensor.index_select(dim, stay.nonzero()[:, 0])
    if isinstance(tensor, nn.Parameter):
        smaller = nn.Parameter(smaller, tensor.requires_grad)
    setattr(module, name, smaller)


def main() -> None:
    """Print the trained digits CNN, and from there on with fewer and fewer channels."""
    import statistics
    import tempfile
    import time
    from pathlib import Path

    from pt_impl.kit import data, models, runtime, training
    from shared import datasets
    from shared.specs import TASKS
    from shared.weights import init_weights

    task = TASKS["digits-cnn"]
    recipe, size = task.recipe, task.recipe.accuracy_batch_size
    with tempfile.TemporaryDirectory() as folder:
        folder = datasets.materialise(task.dataset, Path(folder))
        train = data.to_device(*datasets.load(folder, "train"))
        test = data.to_device(*datasets.load(folder, "test"))
    x = test[0][: task.compute_batch]
    weights = init_weights(task.model, seed=0)
    rows = {"trained": 0.0, "0% removed": 0.0, "50%": 0.5, "80%": 0.8, "90%": 0.9}
    print(f"channels    parameters  ms a batch of {len(x)}  accuracy")
    for name, share in rows.items():
        model = remove_channels(models.build(task.model, weights), share=share)
        optimizer = training.make_optimizer(model, recipe)
        step = training.make_train_step(model, optimizer, training.cross_entropy)
        training.fit(step, *train, batch_size=size, epochs=recipe.epochs, seed=0)
        predict, taken = training.make_predict(model), []
        for _ in range(50):
            start = time.perf_counter()
            predict(x)
            runtime.synchronize()
            taken.append((time.perf_counter() - start) * 1e3)
        accuracy = training.evaluate(predict, *test, metric="accuracy", batch_size=size)
        count, ms = models.parameter_count(model), statistics.median(taken[10:])
        print(f"{name:10}{count:12}{ms:19.2f}{accuracy:10.1f}")
        if name == "trained":
            weights = models.export_weights(model)


if __name__ == "__main__":
    main()
