"""Repairs of what torchao's PT2E does to a graph in quantization-aware training.

All are of torchao 0.18 with torch 2.15. Each can go once its symptom is gone without it, which
`tests/compression/test_quantization_aware_training.py` and `tests/zoo/test_randomness.py` show.
It has no twin: TensorFlow has layers, whose calls know their mode.
"""

import copy
import operator
from collections.abc import Callable

import torch
from torch import Tensor, fx, nn

from pt_impl.kit.tracing import Program

_ATEN = torch.ops.aten
_NORMS = (_ATEN.batch_norm.default, _ATEN.native_batch_norm.default, _ATEN.instance_norm.default)
_DROPOUTS = ("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout")
# Operators that compute something else in training -> the argument that says so.
MODES = (
    dict.fromkeys(_NORMS, 5)
    | {getattr(_ATEN, f"{name}{ending}").default: 2 for name in _DROPOUTS for ending in ("", "_")}
    | {_ATEN.rrelu.default: 3, _ATEN.rrelu_.default: 3}
    | {_ATEN.scaled_dot_product_attention.default: 4}  # a probability, as that of dropout
    | {getattr(_ATEN, name).input: 6 for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")}
)


def repair_captured(captured: fx.GraphModule) -> dict[str, tuple[float, float]]:
    """Change a graph, captured in training mode, so that `prepare_qat_pt2e` gets it right.

    Returns momentum and epsilon of each BatchNorm, for `restore_norms`.
    """
    graph = captured.graph
    _give_stochastic_depth_a_mode(graph)
    _set_norms_apart(graph)
    for node in graph.find_nodes(op="call_function", target=_ATEN.linear.default):
        # The quantizer looks for this function and misses other callers, as multi-head attention.
        node.meta["source_fn_stack"] = [(node.name, nn.functional.linear)]
    for node in graph.nodes:
        if node.target in (_ATEN.add.Tensor, _ATEN.add_.Tensor) and len(node.all_input_nodes) < 2:
            # Of a convolution and a number it would make one with two tensors, and fail.
            node.meta.pop("source_fn_stack", None), node.meta.pop("torch_fn", None)
    norms = graph.find_nodes(op="call_function", target=_ATEN.batch_norm.default)
    return {norm.args[4].target: norm.args[6:8] for norm in norms if norm.args[4] is not None}


def _give_stochastic_depth_a_mode(graph: fx.Graph) -> None:
    """Let stochastic depth be dropout of ones, which draws the same and can be switched.

    Symptom: a graph that was captured in training draws in evaluation, too. torchvision's
    StochasticDepth and timm's DropPath draw with `noise.bernoulli_(q).div_(q)`.
    """
    for draw in graph.find_nodes(op="call_function", target=_ATEN.bernoulli_.float):
        noise, survives = (*draw.args, 0.5)[:2]  # a default is left out
        users = [user for user in draw.users if user.args[:2] == (draw, survives)]
        if [user.target for user in users] != [_ATEN.div_.Tensor]:
            continue
        with graph.inserting_before(draw):
            ones = graph.call_function(_ATEN.ones_like.default, (noise,))
            dropped = graph.call_function(_ATEN.dropout.default, (ones, 1 - survives, True))
        ones.meta, dropped.meta = dict(noise.meta), dict(draw.meta)
        for node in (*users, draw):
            node.replace_all_uses_with(dropped)
            graph.erase_node(node)


def _set_norms_apart(graph: fx.Graph) -> None:
    """Keep from torchao each BatchNorm that it would fold and cannot, by the operator below it.

    Symptom: it fails for those without weights or statistics, and takes transposed convolutions,
    which stay float32, for plain ones.
    """
    for norm in graph.find_nodes(op="call_function", target=_ATEN.batch_norm.default):
        x, gamma, _, mean = norm.args[:4]
        if gamma is None or mean is None or "transpose" in str(x.target):
            _use_native(graph, norm)


def _use_native(graph: fx.Graph, norm: fx.Node) -> None:
    with graph.inserting_before(norm):
        three = graph.call_function(_ATEN.native_batch_norm.default, norm.args[:8])
        apart = graph.call_function(operator.getitem, (three, 0))
    apart.meta = dict(norm.meta)
    norm.replace_all_uses_with(apart)
    graph.erase_node(norm)


def restore_norms(prepared: fx.GraphModule, literals: dict[str, tuple[float, float]]) -> None:
    """Give each BatchNorm its own momentum and epsilon again.

    Symptom: `prepare_qat_pt2e` gives each one behind a convolution PyTorch's default literals.
    """
    graph = prepared.graph
    for norm in graph.find_nodes(op="call_function", target=_ATEN.batch_norm.default):
        if norm.args[4] is not None:
            for place, literal in zip((6, 7), literals[norm.args[4].target], strict=True):
                norm.update_arg(place, literal)
    for total in graph.find_nodes(op="call_function", target=_ATEN.add.Tensor):
        of = getattr(total.args[0], "target", None)
        if of in literals and isinstance(total.args[1], float):  # under a root that scales a kernel
            total.update_arg(1, literals[of][1])


class SwitchableProgram(Program):
    """A captured model whose modes switch by `train()` and `eval()`, those of its copies too.

    Symptom: modules of `torch.export` refuse both. torchao's own switch captures patterns to look
    for, in half a second, and knows only BatchNorm and plain dropout.
    """

    _switched = None  # the mode of what the graph calls; a copy does not know it

    def train(self, mode: bool = True) -> nn.Module:
        """Set the mode of what the graph calls."""
        super().train(mode)
        self._switched = mode
        return switch(self, mode)

    def __call__(self, *arguments, **named):
        """Compute in the mode of `training`, which others set and put back without `train()`."""
        if self._switched != self.training:
            self.train(self.training)
        return super().__call__(*arguments, **named)


def switch(model: fx.GraphModule, training: bool) -> fx.GraphModule:
    """Set a captured model's mode: of BatchNorm and dropout, also inside of other operators."""
    for node in model.graph.nodes:
        place = MODES.get(node.target, len(node.args))
        if node.target in _NORMS and node.args[3] is None:
            continue  # without running statistics it is the same in both modes
        if place < len(node.args):
            usual = node.meta.setdefault("in training", node.args[place])
            node.update_arg(place, usual if training else type(usual)(0))
    model.recompile()
    return model


def copy_to_cpu(model: fx.GraphModule) -> fx.GraphModule:
    """Return a copy on the CPU, in evaluation mode.

    Symptom: `Module.cpu` leaves the devices that operators of a graph name, as `zeros` does.
    """

    def on_cpu(argument):
        return torch.device("cpu") if isinstance(argument, torch.device) else argument

    model = copy.deepcopy(model).cpu().eval()
    for node in model.graph.nodes:
        node.args = fx.node.map_aggregate(node.args, on_cpu)
        node.kwargs = fx.node.map_aggregate(node.kwargs, on_cpu)
    model.recompile()
    return model


def fold_norms(model: fx.GraphModule) -> None:
    """Turn each BatchNorm after a convolution into its bias: the kernel holds the scale already.

    Others get the operator below their own. Symptom: `convert_pt2e` does both, but where it sees a
    BatchNorm it captures a hundred patterns to look for, which takes far longer than the rest.
    """
    graph = model.graph

    def value(node):
        return operator.attrgetter(node.target)(model)  # the name may have dots

    for norm in graph.find_nodes(op="call_function", target=_ATEN.batch_norm.default):
        x, gamma, beta, mean, variance, _, _, eps, _ = norm.args
        convolution, bias = _normalised(x, value)
        if convolution is None:
            _use_native(graph, norm)
            continue
        factor = value(gamma) / (value(variance) + eps).sqrt()
        model.register_buffer(f"{norm.name}_bias", value(beta) + (bias - value(mean)) * factor)
        with graph.inserting_before(convolution):
            convolution.update_arg(2, graph.get_attr(f"{norm.name}_bias"))
        norm.replace_all_uses_with(convolution)
    graph.eliminate_dead_code()
    model.recompile()


def _normalised(x: fx.Node, value: Callable) -> tuple[fx.Node | None, Tensor | float]:
    """The scaled convolution that torchao put before a BatchNorm, with its bias; None without."""
    bias = 0.0
    if x.target is _ATEN.add.Tensor:
        x, shaped = x.args
        source = shaped.args[0] if isinstance(shaped, fx.Node) and shaped.args else None
        if getattr(source, "op", None) != "get_attr":
            return None, bias  # a sum that the model makes
        bias = value(source)
    scaled = getattr(x, "target", None) is _ATEN.div.Tensor and isinstance(x.args[1], fx.Node)
    convolutions = _ATEN.conv1d.default, _ATEN.conv2d.default
    return (x.args[0] if scaled and x.args[0].target in convolutions else None), bias
