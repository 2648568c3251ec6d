"""Quantization-aware training (QAT): train on with the rounding that an int8 model will have.

What it changes: in the forward pass each convolution and linear layer multiplies rounded numbers.
A weight w becomes s * clamp(round(w / s), -n, n) with n = 2**(weight_bits - 1) - 1 and s = max|w| /
n of its output channel in this very step. Activations have 8 bits, a scale and a zero point for
each tensor, whose range is a moving average over batches. The gradient passes the rounding as if
it were not there, and is zero where a value was clipped (straight-through estimator; Jacob et al.,
2018, arXiv:1712.05877). Ranges start from `example_inputs`, so an export without training is
post-training quantization by the same quantizer.

Its twin: `tf_impl/compression/quantization_aware_training.py`.

Where the frameworks differ and why:
- torchao works on a graph of operators that `torch.export` captured from any module; TensorFlow
  Model Optimization (tfmot) wraps the layers of a functional tf_keras model.
- BatchNorm: here the rounded kernel is the folded one, w * gamma / sqrt(running variance), and the
  convolution's output is divided again before BatchNorm; there it is the kernel itself, which the
  converter folds later. With a scale for each channel both round alike.
- On an x86 CPU without VNNI oneDNN adds products in 16 bits, which overflow. There activations get
  7 bits here, as torchao asks; a file made on a CPU with VNNI is not for one without.
- A range moves by 1% of the way a batch here, by 0.1% there. A linear kernel has a scale for each
  output here, one in all there. Concatenations, averages and the last layer's output are float32
  here, of 8 bits there.
- Files: here a graph and integers, compiled when loaded; weights of any width are int8 that leaves
  values unused, so fewer bits compress better and run no faster. There at most 4 bits are int4.

When it helps and when it hurts: below 8 bits, where rounding trained weights costs accuracy. At 8
bits rounding alone usually loses nothing: try that first, since a step of this takes up to twice as
long. It needs a trained model, data with labels, and a learning rate that is not large.

Run it alone: `python -m pt_impl.compression.quantization_aware_training` prints the accuracy of
files of 8, 4 and 2 bits, trained on and not.

Copy with it: `pt_impl/kit/checks/example_inputs.py`, `pt_impl/kit/checks/float_layers.py`,
`pt_impl/kit/comparing.py`, `pt_impl/kit/saving.py`, `pt_impl/kit/tracing.py`.
"""

import copy
import operator
import platform
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, fx, nn
from torch._inductor import config as inductor
from torch.utils._pytree import tree_map
from torchao.quantization import pt2e
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_qat_pt2e
from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86

from pt_impl.kit import comparing, saving, tracing
from pt_impl.kit.checks import float_layers
from pt_impl.kit.checks.example_inputs import check_example_inputs

MOST_APART = 0.1  # relative L2 of a file's outputs to the model's: some values round the other way
SAME = 1e-3  # of the captured model to the model, both in float32
_ATEN = torch.ops.aten
_MODES = {  # the argument of whether the operator trains, or of its probability
    _ATEN.batch_norm.default: 5,
    _ATEN.native_batch_norm.default: 5,
    _ATEN.instance_norm.default: 5,
    _ATEN.dropout.default: 2,
    _ATEN.dropout_.default: 2,
    _ATEN.feature_dropout.default: 2,
    _ATEN.feature_dropout_.default: 2,
    _ATEN.alpha_dropout.default: 2,
    _ATEN.alpha_dropout_.default: 2,
    _ATEN.feature_alpha_dropout.default: 2,
    _ATEN.feature_alpha_dropout_.default: 2,
    _ATEN.rrelu.default: 3,
    _ATEN.rrelu_.default: 3,
    _ATEN.scaled_dot_product_attention.default: 4,
    _ATEN.lstm.input: 6,
    _ATEN.gru.input: 6,
    _ATEN.rnn_tanh.input: 6,
    _ATEN.rnn_relu.input: 6,
}
_NORMS = (
    _ATEN.batch_norm.default,
    _ATEN.native_batch_norm.default,
    _ATEN.instance_norm.default,
)


@torch.random.fork_rng(devices=[])  # torchao draws numbers
def prepare_qat(model: nn.Module, example_inputs, *, weight_bits: int) -> nn.Module:
    """Return a copy of `model` that computes with rounded weights and activations, to be trained.

    It is in training mode; its `train()` and `eval()` switch BatchNorm, dropout and stochastic
    depth, while ranges follow every pass in both. Make the optimizer for the copy, whose parameters
    keep their names; `model` stays as it is.

    example_inputs: two real samples or more, as a tensor or the tuple of the model's positional
    arguments. It is traced with them, for any number of samples of their sizes (a call with others
    raises ValueError), and ranges start with theirs.
    weight_bits: 2 to 8; at 2 bits weights are -s, 0 and s.

    Quantized are Conv2d, Linear and, before a ReLU, Conv1d, with what can be fused to them; the
    rest stays float32, and a warning names the convolutions and linear layers that do.
    The copy is exported on trial: what cannot be exported is not trained, either.
    Raises ValueError for other bits, one sample, values that are not finite, inputs that the model
    does not take, and a model without such a layer;
    NotImplementedError, with the reason, for a model in another dtype, where `torch.export` can't
    capture the model, for one that does other things of its own in training alone, and where
    torchao can't follow it; RuntimeError as `export_qat`.
    Source: torchao's `prepare_qat_pt2e` with `X86InductorQuantizer`.
    """
    if weight_bits not in range(2, 9):
        raise ValueError(f"weight_bits must be 2 to 8, not {weight_bits!r}")
    _check_dtypes(model)
    check_example_inputs(model, example_inputs)
    if len(tracing.input_tensors(example_inputs)[0]) < 2:
        raise ValueError("example_inputs must be tensors of at least two samples")
    captured = tracing.trace(model, example_inputs, training=True)
    _give_stochastic_depth_modes(captured.graph)
    _set_norms_apart(captured.graph)
    _check_evaluation(captured, model, example_inputs)
    for node in captured.graph.find_nodes(op="call_function", target=_ATEN.linear.default):
        # Whoever called it, such as multi-head attention: the quantizer looks for this function.
        node.meta["source_fn_stack"] = [(node.name, nn.functional.linear)]
    for node in captured.graph.nodes:
        if node.target in (_ATEN.add.Tensor, _ATEN.add_.Tensor) and len(node.all_input_nodes) < 2:
            # Of a convolution and a number the quantizer would make one with two tensors, and fail.
            node.meta.pop("source_fn_stack", None), node.meta.pop("torch_fn", None)
    literals = _norm_literals(captured.graph)
    try:
        prepared = prepare_qat_pt2e(captured, _quantizer(weight_bits))
    except Exception as error:
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise NotImplementedError(f"torchao can't quantize the model: {reason}") from error
    if not _is_prepared(prepared):
        raise ValueError("the model has no Conv1d, Conv2d or Linear to quantize")
    _restore_norms(prepared.graph, literals)
    prepared = _Prepared(prepared, prepared.graph)
    prepared.eval()
    with torch.no_grad():
        tracing.outputs(
            prepared, example_inputs
        )  # ranges begin with the first values that are seen
    with tempfile.TemporaryDirectory() as folder:  # what cannot be exported is not trained, either
        export_qat(prepared, example_inputs, Path(folder) / "model")
    return prepared.train()


@torch.random.fork_rng(devices=[])  # torchao draws numbers
def export_qat(model: nn.Module, example_inputs, path) -> Path:
    """Write a model from `prepare_qat` for the CPU: integers and names of operators, no code.

    `model` stays as it is. Outputs of what is written are compared with its own first.

    Raises ValueError for a model without fake quantization, RuntimeError where outputs for
    `example_inputs` differ by more than `MOST_APART`. Source: torchao's `convert_pt2e`.
    """
    if not _is_prepared(model):
        raise ValueError("the model has no fake quantization: it comes from prepare_qat")
    model = _to_cpu(copy.deepcopy(model)).eval()
    inputs = tree_map(Tensor.cpu, example_inputs)
    model.apply(pt2e.disable_observer)
    with torch.no_grad():
        wanted = tracing.outputs(model, inputs)
        # Where a model amplifies what rounds the other way, no other program is near it.
        moved = comparing.apart(
            tracing.outputs(model, tree_map(_a_thousandth_more, inputs)), wanted
        )
        _fold_norms(model)
        path, part = Path(path), Path(f"{path}.part")
        converted = convert_pt2e(model)
        float_layers.warn_of_float_layers(converted)
        saving.save(converted, part)
        apart = comparing.apart(tracing.outputs(saving.load(part), inputs), wanted)
    if not apart <= MOST_APART:
        part.unlink()
        raise RuntimeError(
            f"outputs of the converted model are {apart:.0%} off those before, which move by "
            f"{moved:.0%} where inputs change by a thousandth: {_why(apart, moved)}"
        )
    return part.replace(path)


def _to_cpu(graph: fx.GraphModule) -> fx.GraphModule:
    """Move a graph to the CPU, with the devices that its operators name, as `zeros` does."""
    graph.cpu()
    for node in graph.graph.nodes:
        node.args = fx.node.map_aggregate(node.args, _named_on_cpu)
        node.kwargs = fx.node.map_aggregate(node.kwargs, _named_on_cpu)
    graph.recompile()
    return graph


def _named_on_cpu(argument):
    return torch.device("cpu") if isinstance(argument, torch.device) else argument


def _why(apart: float, moved: float) -> str:
    if moved > apart / 4:
        return "the model amplifies all rounding, as untrained ones do, so that no file is near it"
    return "torchao's converter makes something else of it"


def _a_thousandth_more(x: Tensor) -> Tensor:
    """At most a quarter of a step of 8 bits; of less the rounding of the inputs leaves nothing."""
    return x * (1 + 1e-3) if x.is_floating_point() else x


def export_float(model: nn.Module, example_inputs, path) -> Path:
    """Write `model` as it is, in float32, for the same runtime: what int8 is to be compared with.

    Raises ValueError where the model does not take `example_inputs`, NotImplementedError where
    `torch.export` can't capture it.
    """
    check_example_inputs(model, example_inputs)
    return saving.save(tracing.trace(model, example_inputs), path)


def load_quantized(path) -> Callable:
    """Return `predict(x) -> output` of a file of this module, compiled by TorchInductor.

    x: a tensor, or a tuple of positional arguments: any number of samples, of the sizes of the
    example. The first call with each shape compiles, which needs a C++ compiler; weights are frozen
    into the graph, or int8 would be no faster than float32.

    Raises FileNotFoundError, and ValueError for a file that is damaged or something else, before
    anything of it runs, and in a call for other sizes.
    """
    program = saving.load(path)
    # Not one graph for any batch size: TorchInductor 2.15 then expects another memory layout of
    # int8 convolutions than oneDNN returns.
    compiled, known = torch.compile(program, dynamic=False, fullgraph=True), set()

    def predict(x):
        shapes = tuple((part.shape, part.device) for part in tracing.input_tensors(x))
        with torch.no_grad():
            if shapes in known:
                return tracing.outputs(compiled, x)
            tracing.check_sizes(program, x)
            # Tracing and compiling must both see it: torch.compile's options reach only the second.
            with inductor.patch(freezing=True):
                output = tracing.outputs(compiled, x)
        known.add(shapes)
        return output

    return predict


def _give_stochastic_depth_modes(graph: fx.Graph) -> None:
    """Let stochastic depth be dropout of ones, which draws the same and can be switched.

    What is captured in training would draw for ever. Whether a row survives is drawn with
    `noise.bernoulli_(q).div_(q)`, in torchvision's StochasticDepth and timm's DropPath.
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

    Those without weights or statistics, and behind transposed convolutions, which stay float32.
    """
    for norm in graph.find_nodes(op="call_function", target=_ATEN.batch_norm.default):
        x, gamma, _, mean = norm.args[:4]
        if gamma is not None and mean is not None and "transpose" not in str(x.target):
            continue
        with graph.inserting_before(norm):
            three = graph.call_function(_ATEN.native_batch_norm.default, norm.args[:8])
            apart = graph.call_function(operator.getitem, (three, 0))
        apart.meta = dict(norm.meta)
        norm.replace_all_uses_with(apart)
        graph.erase_node(norm)


def _check_dtypes(model: nn.Module) -> None:
    half = torch.float16, torch.bfloat16
    parameters, buffers = model.named_parameters(), model.named_buffers()
    wrong = [each for each in parameters if each[1].dtype in (*half, torch.float64)]
    wrong += [each for each in buffers if each[1].dtype in half]
    for name, tensor in wrong:
        raise NotImplementedError(
            f"{name} is {tensor.dtype}: torchao rounds models of float32: call .float() first"
        )


def _check_evaluation(captured: fx.GraphModule, model: nn.Module, example_inputs) -> None:
    """Raise unless the graph, switched to evaluation, is the model in evaluation mode.

    `torch.export` follows one branch of `if self.training`.
    """
    model, few = copy.deepcopy(model).eval(), tree_map(lambda part: part[:2], example_inputs)
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # it gives other numbers where inputs are padded
    try:
        with torch.no_grad():
            wanted = tracing.outputs(model, few)
            found = tracing.outputs(_switch(captured, training=False), few)
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
    if comparing.apart(found, wanted) > SAME:
        random = torch.Tag.nondeterministic_seeded
        draws = {
            str(node.target)
            for node in captured.graph.nodes
            if node.target not in _MODES and random in getattr(node.target, "tags", ())
        }
        raise NotImplementedError(
            "what the model does in training alone (`if self.training`) would stay in its"
            " evaluation: a graph can switch dropout, BatchNorm and stochastic depth, and nothing"
            " else" + (f", such as {', '.join(sorted(draws))}" if draws else "")
        )
    _switch(captured, training=True)


class _Prepared(tracing.Program):
    """A captured model whose modes switch by `train()` and `eval()`, those of its copies too."""

    _switched = None  # the mode of what the graph calls; a copy does not know it

    def train(self, mode: bool = True) -> nn.Module:
        """Set the mode of what the graph calls."""
        super().train(mode)
        self._switched = mode
        return _switch(self, mode)

    def __call__(self, *arguments, **named):
        """Compute in the mode of `training`, which others set and put back without `train()`."""
        if self._switched != self.training:
            self.train(self.training)
        return super().__call__(*arguments, **named)


def _is_prepared(model: nn.Module) -> bool:
    return any(isinstance(module, pt2e.FakeQuantize) for module in model.modules())


def _switch(model: fx.GraphModule, training: bool) -> fx.GraphModule:
    """Set a captured model's mode: of BatchNorm and dropout, also inside of other operators.

    torchao's own switch captures patterns to look for, in half a second, and knows fewer operators.
    """
    for node in model.graph.nodes:
        place = _MODES.get(node.target, len(node.args))
        if node.target in _NORMS and node.args[3] is None:
            continue  # without running statistics it is the same in both modes
        if place < len(node.args):
            usual = node.meta.setdefault("in training", node.args[place])
            node.update_arg(place, usual if training else type(usual)(0))
    model.recompile()
    return model


def _norm_literals(graph: fx.Graph) -> dict[str, tuple[float, float]]:
    """Momentum and epsilon of each BatchNorm, by the name of its running variance."""
    norms = graph.find_nodes(op="call_function", target=_ATEN.batch_norm.default)
    return {norm.args[4].target: norm.args[6:8] for norm in norms if norm.args[4] is not None}


def _restore_norms(graph: fx.Graph, literals: dict[str, tuple[float, float]]) -> None:
    """Undo that torchao gives each BatchNorm behind a convolution PyTorch's default literals."""
    for norm in graph.find_nodes(op="call_function", target=_ATEN.batch_norm.default):
        if norm.args[4] is not None:
            for place, literal in zip((6, 7), literals[norm.args[4].target], strict=True):
                norm.update_arg(place, literal)
    for total in graph.find_nodes(op="call_function", target=_ATEN.add.Tensor):
        of = getattr(total.args[0], "target", None)
        if of in literals and isinstance(
            total.args[1], float
        ):  # under the root that scales a kernel
            total.update_arg(1, literals[of][1])


def _quantizer(weight_bits: int) -> x86.X86InductorQuantizer:
    usual = x86.get_default_x86_inductor_quantization_config(is_qat=True, reduce_range=_saturates())
    most = 2 ** (weight_bits - 1) - 1
    # The usual fused observer finds scales as if for -128..127, this one as convert_pt2e does; its
    # average is of the last step alone.
    fake = pt2e.FakeQuantize.with_args(
        observer=pt2e.MovingAveragePerChannelMinMaxObserver, averaging_constant=1.0
    )
    weight = replace(usual.weight, quant_min=-most, quant_max=most, observer_or_fake_quant_ctr=fake)
    quantizer = x86.X86InductorQuantizer().set_global(replace(usual, weight=weight))
    for function in (torch.cat, nn.functional.avg_pool2d, nn.functional.adaptive_avg_pool2d):
        # What is joined, and both sides of an average, would share one moving range, which comes to
        # lie between theirs and clips the wider one. They are float32.
        quantizer.set_function_type_qconfig(function, None)
    return quantizer


def _saturates() -> bool:
    """Whether integer kernels overflow: x86 without VNNI adds pairs of products in 16 bits."""
    x86_64 = platform.machine().lower() in ("x86_64", "amd64")
    return x86_64 and not torch.cpu._is_vnni_supported()


def _fold_norms(module: fx.GraphModule) -> None:
    """Turn each BatchNorm after a convolution into its bias: the kernel holds the scale already.

    Others get the operator below their own. `convert_pt2e` would do both, but where it sees one
    BatchNorm it captures a hundred patterns to look for, which takes far longer than all the rest.
    """
    aten, graph = _ATEN, module.graph

    def value(node):
        return operator.attrgetter(node.target)(module)  # the name may have dots

    for norm in graph.find_nodes(op="call_function", target=aten.batch_norm.default):
        x, gamma, beta, mean, variance, training, momentum, eps, _ = norm.args
        convolution, bias = _normalised(x, value)
        with graph.inserting_before(convolution or norm):
            if convolution is None:
                given = x, gamma, beta, mean, variance, training, momentum, eps
                three = graph.call_function(aten.native_batch_norm.default, given)
                norm.replace_all_uses_with(graph.call_function(operator.getitem, (three, 0)))
                continue
            factor = value(gamma) / (value(variance) + eps).sqrt()
            folded = value(beta) + (bias - value(mean)) * factor
            module.register_buffer(f"{norm.name}_bias", folded)
            convolution.update_arg(2, graph.get_attr(f"{norm.name}_bias"))
        norm.replace_all_uses_with(convolution)
    graph.eliminate_dead_code()
    module.recompile()


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


def main() -> None:
    """Print the accuracy of the digits CNN's files at several widths, trained on and not."""
    from pt_impl.kit import data, models, training
    from shared import datasets
    from shared.specs import TASKS
    from shared.weights import init_weights

    task, folder = TASKS["digits-cnn"], Path(tempfile.mkdtemp())
    made = datasets.materialise(task.dataset, folder)
    (x, y), test = (data.to_device(*datasets.load(made, split)) for split in ("train", "test"))
    test = [part.cpu() for part in test]  # for files, which are a CPU's

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
