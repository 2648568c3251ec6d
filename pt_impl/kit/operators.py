"""What a call really ran: the evidence that benchmarks and tests want of a technique of the step.

What it holds: formats of convolutions, operators of an update, graphs of a step. No technique
needs it.
Twin: `tf_impl/kit/operators.py`.
Where the frameworks differ: PyTorch's profiler and hooks see operators as they run; TensorFlow's
run time hands out the graphs that it ran.
"""

from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor, nn


def convolution_formats(model: nn.Module, call: Callable) -> dict[str, int]:
    """Count the activations that convolution layers read and wrote in `call()`, by memory format.

    Returns for example {"channels_last": 7}. An activation that is both, with one channel or one
    pixel, is not counted; one that is neither counts as "other". Hooks on the layers look at the
    tensors themselves: that the weights are channels_last proves nothing.
    """
    counts = Counter()

    def look(module, args, kwargs, output):
        counts.update(map(_format_of, (*args[:1], *kwargs.values(), output)))

    layers = [m for m in model.modules() if isinstance(m, (nn.Conv2d, nn.ConvTranspose2d))]
    hooks = [layer.register_forward_hook(look, with_kwargs=True) for layer in layers]
    try:
        call()
    finally:
        for hook in hooks:
            hook.remove()
    return {name: number for name, number in counts.items() if name != "both"}


def onednn_operators(call: Callable) -> int:
    """Count the operators of oneDNN that `call()` ran; those of a backward pass have no name."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        call()
    return sum("mkldnn" in event.name for event in profile.events())


def _format_of(tensor: Tensor) -> str:
    if tensor.dim() != 4:  # one image without a batch
        return "both"
    last = tensor.is_contiguous(memory_format=torch.channels_last)
    first = tensor.is_contiguous()
    if last and first:
        return "both"
    if last:
        return "channels_last"
    return "channels_first" if first else "other"


def update_operators(update: Callable) -> dict[str, int]:
    """Count the operators of one update, by name; a compiled region counts as "compiled".

    Returns for example {"_foreach_add_": 1, "_fused_adamw_": 1}. Only operators that nothing but
    Python called are counted. Calls the update twice, since the first call may compile.
    """
    update()
    counts = Counter()
    events = _recorded(update)
    while events:
        event = events.pop()
        if event.name.startswith("aten::"):
            counts[event.name.removeprefix("aten::")] += 1
        elif "Torch-Compiled Region" in event.name:
            counts["compiled"] += 1
        else:  # a Python scope, such as the optimizer's own
            events += event.children
    return dict(counts)


def executed_graphs(function: Callable, *inputs) -> dict:
    """Say what one call of `function` ran in captured graphs, and what not in compiled ones.

    Returns for example {"graphs": 3, "compiled": 3, "outside": {"ones_like": 1}, "breaks": []}: the
    captured graphs, those that inductor compiled, operators that ran outside of these, and reasons
    for graph breaks in this process so far. Calls `function` three times, since two may compile.
    """
    function(*inputs)
    function(*inputs)
    graphs, compiled, outside = set(), 0, Counter()
    waiting = [(event, None) for event in _recorded(lambda: function(*inputs))]
    while waiting:
        event, graph = waiting.pop()
        if event.name.startswith(("Torch-Compiled Region", "CompiledFunctionBackward")):
            graph = event.name, event.start_time_ns
        if event.name.startswith("aten::"):
            graphs.add(graph)
            outside[event.name.removeprefix("aten::")] += 1
        elif event.name.startswith("## Call CompiledFxGraph"):
            graphs.add(graph)  # only now: a region may be only Python
            compiled += 1
        else:
            waiting += [(child, graph) for child in event.children]
    breaks = sorted(why.splitlines()[0] for why in torch._dynamo.utils.counters["graph_break"])
    return {
        "graphs": len(graphs - {None}),
        "compiled": compiled,
        "outside": dict(outside),
        "breaks": breaks,
    }


def _recorded(call: Callable) -> list:
    """The outermost events of one call, as the profiler saw them."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        call()
    return list(profile.profiler.kineto_results.experimental_event_tree())
