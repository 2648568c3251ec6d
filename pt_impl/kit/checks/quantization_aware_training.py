"""What quantization-aware training refuses: what cannot be captured, switched or converted."""

import contextlib
import copy
import warnings
from collections.abc import Iterator

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves, tree_map  # torch has no public one
from torchao.quantization import pt2e

from pt_impl.kit.pt2e_repairs import MODES, copy_to_cpu, switch
from pt_impl.kit.tracing import input_tensors, outputs

MOST_APART = 0.1  # relative L2 of converted outputs to the model's: some values round the other way
SAME = 1e-3  # of the captured model to the model, both in float32
_LAYERS = tuple(
    getattr(torch.ops.aten, name)
    for name in ("linear", *(f"conv{kind}{n}d" for kind in ("", "_transpose") for n in (1, 2, 3)))
)


def check_quantization_aware_training(model: nn.Module, example_inputs, weight_bits: int) -> None:
    """Refuse other bits, other dtypes than float32, and inputs that the model does not take."""
    if weight_bits not in range(2, 9):
        raise ValueError(f"weight_bits must be 2 to 8, not {weight_bits!r}")
    half = torch.float16, torch.bfloat16
    parameters, buffers = model.named_parameters(), model.named_buffers()
    wrong = [each for each in parameters if each[1].dtype in (*half, torch.float64)]
    wrong += [each for each in buffers if each[1].dtype in half]
    for name, tensor in wrong:
        raise NotImplementedError(
            f"{name} is {tensor.dtype}: torchao rounds models of float32: call .float() first"
        )
    _check_inputs(model, example_inputs)
    if len(input_tensors(example_inputs)[0]) < 2:
        raise ValueError("example_inputs must be tensors of at least two samples")


def _check_inputs(model: nn.Module, inputs) -> None:
    tensors = input_tensors(inputs)
    if not all(isinstance(part, Tensor) and part.ndim for part in tensors):
        kinds = ", ".join(type(part).__name__ for part in tensors)
        raise ValueError(f"inputs must be tensors with samples along an axis, not {kinds}")
    counts = [len(part) for part in tensors]
    if not counts or min(counts) == 0 or len(set(counts)) > 1:
        raise ValueError(f"inputs must have samples, as many in each tensor, not {counts}")
    if not all(part.isfinite().all() for part in tensors):
        raise ValueError("inputs hold values that are not finite")
    try:
        copied = copy.deepcopy(model).cpu().eval()
    except Exception as error:  # of tensors that are no leaves, and of whatever a module holds
        raise NotImplementedError(f"the model cannot be copied: {_one_line(error)}") from error
    try:
        with torch.no_grad():
            output = outputs(copied, tree_map(lambda part: part[[0, 0]].cpu(), inputs))
    except Exception as error:
        given = ", ".join(f"{str(part.dtype)[6:]} {list(part.shape[1:])}" for part in tensors)
        raise ValueError(f"the model takes no samples of {given}: {_one_line(error)}") from error
    for part in tree_leaves(output):
        if not isinstance(part, Tensor):
            raise NotImplementedError(
                f"the model returns {type(part).__name__}, which is no tensor"
            )


def check_evaluation(captured: fx.GraphModule, model: nn.Module, example_inputs) -> None:
    """Refuse a graph that, switched to evaluation, is not the model in evaluation mode.

    `torch.export` follows one branch of `if self.training`.
    """
    model, few = copy.deepcopy(model).eval(), tree_map(lambda part: part[:2], example_inputs)
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # it gives other numbers where inputs are padded
    try:
        with torch.no_grad():
            wanted = outputs(model, tree_map(Tensor.clone, few))  # it may change them in place
            found = outputs(switch(captured, training=False), few)
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
    if not _apart(found, wanted) <= SAME:
        random = torch.Tag.nondeterministic_seeded
        draws = {
            str(node.target)
            for node in captured.graph.nodes
            if node.target not in MODES and random in getattr(node.target, "tags", ())
        }
        raise NotImplementedError(
            "what the model does in training alone (`if self.training`) would stay in its"
            " evaluation: a graph can switch dropout, BatchNorm and stochastic depth, and nothing"
            " else" + (f", such as {', '.join(sorted(draws))}" if draws else "")
        )
    switch(captured, training=True)


@contextlib.contextmanager
def refusals() -> Iterator[None]:
    """Let what torchao raises, of many kinds, be a NotImplementedError of one line."""
    try:
        yield
    except Exception as error:
        raise NotImplementedError(
            f"torchao can't quantize the model: {_one_line(error)}"
        ) from error


def check_rounded(prepared: nn.Module) -> None:
    """Refuse a model that has no layer to quantize."""
    if not _rounds(prepared):
        raise ValueError("the model has no Conv1d, Conv2d or Linear to quantize")


def check_prepared(model: nn.Module) -> None:
    """Refuse a model that does not come from `prepare_qat`."""
    if not _rounds(model):
        raise ValueError("the model has no fake quantization: it comes from prepare_qat")


def check_converted(converted: fx.GraphModule, model: nn.Module, example_inputs) -> None:
    """Refuse a graph over integers that is not near the model; warn of layers left in float32."""
    inputs, model = tree_map(Tensor.cpu, example_inputs), copy_to_cpu(model)
    model.apply(pt2e.disable_observer)
    with torch.no_grad():
        wanted = outputs(model, inputs)
        apart = _apart(outputs(converted, inputs), wanted)
        # Where a model amplifies what rounds the other way, no other program is near it.
        moved = _apart(outputs(model, tree_map(_a_thousandth_more, inputs)), wanted)
    if not apart <= MOST_APART:
        why = "torchao's converter makes something else of it"
        if moved > apart / 4:
            why = (
                "the model amplifies all rounding, as untrained ones do, so that no file is near it"
            )
        raise RuntimeError(
            f"outputs of the converted model are {apart:.0%} off those before, which move by "
            f"{moved:.0%} where inputs change by a thousandth: {why}"
        )
    _warn_of_float_layers(converted)


def _why(apart: float, moved: float) -> str:
    if moved > apart / 4:
        return "the model amplifies all rounding, as untrained ones do, so that no file is near it"
    return "torchao's converter makes something else of it"


def _warn_of_float_layers(converted: fx.GraphModule) -> None:
    left = []
    for node in converted.graph.nodes:
        if getattr(node.target, "overloadpacket", None) in _LAYERS:
            weight = node.args[1]
            if "dequantize" not in str(weight.target):
                left.append(weight.target if weight.op == "get_attr" else node.name)
    if left:
        warnings.warn(
            f"left in float32: {', '.join(map(str, left))}: torchao rounds Conv2d and Linear, and "
            "Conv1d only before ReLU",
            stacklevel=5,
        )


def _rounds(model: nn.Module) -> bool:
    return any(isinstance(module, pt2e.FakeQuantize) for module in model.modules())


def _a_thousandth_more(x: Tensor) -> Tensor:
    """At most a quarter of a step of 8 bits; of less the rounding of the inputs leaves nothing."""
    return x * (1 + 1e-3) if x.is_floating_point() else x


def _apart(ours, theirs) -> float:
    """The largest relative L2 difference of an output; inf where a shape or an infinity differs."""
    ours, theirs = tree_leaves(ours), tree_leaves(theirs)
    if [part.shape for part in ours] != [part.shape for part in theirs]:
        return float("inf")
    return max(map(_distance, ours, theirs), default=0.0)


def _distance(ours: Tensor, theirs: Tensor) -> float:
    ours, theirs = (v.to(torch.promote_types(v.dtype, torch.float64)) for v in (ours, theirs))
    same = (ours == theirs) | (ours.isnan() & theirs.isnan())
    difference = torch.where(same, 0.0, ours - theirs).norm().item()
    whole = torch.where(theirs.isfinite(), theirs, 0.0).norm().item() or 1.0
    return difference / whole if difference == difference else float("inf")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
