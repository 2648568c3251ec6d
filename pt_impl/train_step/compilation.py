"""Compilation: capture a train step or a model as graphs, and turn those into machine code.

What it changes: who runs the operators. Eager, Python asks for one kernel after the other; a
captured graph runs without Python; a compiler fuses neighbouring operators into kernels of its own,
which saves trips to memory. Results differ by rounding, since sums are taken in another order.

Its twin: `tf_impl/train_step/compilation.py`.

Where the frameworks differ and why:
- XLA makes one program of forward, loss, gradients and update. `torch.compile` makes at least three
  graphs: it breaks at `loss.backward()` (the backward graph is made with the forward one, autograd
  runs it), and torch's optimizers break around their update on purpose. torch 2.15 can trace
  `backward()` (`torch._dynamo.config.trace_autograd_ops`, private, off by default).
- `torch.compile` can take each repeated block by itself: like blocks share one compilation, which
  takes a fraction of the time, and nothing is fused across their borders. XLA compiles each one.
- What `torch.compile` cannot trace runs in Python, in silence (a graph break); `fullgraph` makes it
  raise. XLA compiles everything or raises.
- Another shape: torch compiles again, then for any size of that axis; XLA compiles for each shape.
- torch has modes, keeps its kernels on disk for the next process and needs a C++ compiler on a CPU;
  XLA has none of the three. Keras has `fit`. TorchScript is torch's old compiler, now deprecated.

When it helps and when it hurts: it helps elementwise work between products (normalisation, GELU,
losses, updates) and, on a GPU, many small kernels. Convolutions and products are libraries' kernels
either way. Each call checks guards, which small steps feel, and the first calls compile: that time
over the time saved in a step is the break-even. "reduce-overhead" does nothing on a CPU.

Run it alone: `python -m pt_impl.train_step.compilation` prints eager against compiled steps.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from functools import partial
from inspect import signature

import torch
from torch import nn
from torch.optim import Optimizer

_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")


def eager_train_step(model: nn.Module, optimizer: Optimizer, loss_fn: Callable) -> Callable:
    """Return `step(x, y) -> loss` as PyTorch runs it by default: operator by operator.

    x: a tuple of the model's positional arguments, a mapping of its keywords, or its one argument.
    loss: the scalar `loss_fn(output, y)`, on the device, detached. The model is put into training
    mode.
    """
    model.train()

    def step(x, y):
        args, kwargs = _arguments(x)
        optimizer.zero_grad(set_to_none=True)
        loss = loss_fn(model(*args, **kwargs), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def graph_train_step(model: nn.Module, optimizer: Optimizer, loss_fn: Callable) -> Callable:
    """The step captured as graphs that run with eager's kernels: nothing is fused.

    "aot_eager" is a backend for debugging. Arguments and result as in `eager_train_step`.
    """
    return _compile(eager_train_step(model, optimizer, loss_fn), backend="aot_eager")


def compiled_train_step(
    model: nn.Module, optimizer: Optimizer, loss_fn: Callable, *, mode: str = "default"
) -> Callable:
    """The whole step under `torch.compile`; the first calls compile.

    Arguments and result as in `eager_train_step`. mode: "default", "reduce-overhead" (CUDA graphs),
    "max-autotune" (tries kernels out; CUDA graphs) or "max-autotune-no-cudagraphs". SGD with
    momentum compiles its update again in the second step, when its buffers are there; a learning
    rate that changes is compiled once more, unless it is a tensor. Raises ValueError for an unknown
    mode.

    Source: "Introduction to torch.compile" and "Compiling the optimizer with torch.compile",
    docs.pytorch.org/tutorials.
    """
    _check_mode(mode)
    model.train()

    def train(args, kwargs, y):
        loss = loss_fn(model(*args, **kwargs), y)
        loss.backward()
        optimizer.step()
        return loss

    compiled = _compile(train, mode=mode)

    def step(x, y):
        optimizer.zero_grad(set_to_none=True)  # never compiled: inside, it would split the graphs
        # A copy, since with CUDA graphs the next step writes its loss to the same place.
        return compiled(*_arguments(x), y).detach().clone()

    return step


def fullgraph_train_step(model: nn.Module, optimizer: Optimizer, loss_fn: Callable) -> Callable:
    """Forward and loss as one graph or an error, the update compiled apart.

    In pieces, because `fullgraph` refuses the breaks of a whole step. Arguments and result as in
    `eager_train_step`; where the graph would break, the first call raises torch's own error.
    """
    model.train()
    update = _compile(optimizer.step)
    forward = _compile(lambda args, kwargs, y: loss_fn(model(*args, **kwargs), y), fullgraph=True)

    def step(x, y):
        optimizer.zero_grad(set_to_none=True)
        loss = forward(*_arguments(x), y)
        loss.backward()  # runs the backward graph, which was made with the forward one
        update()
        return loss.detach()

    return step


def compiled_model_train_step(
    model: nn.Module,
    optimizer: Optimizer,
    loss_fn: Callable,
    *,
    mode: str = "default",
    blocks: str = "",
) -> Callable:
    """The model alone compiled, forward and backward; loss and update stay eager.

    Arguments and result as in `eager_train_step`, mode and errors as in `compiled_train_step`.
    blocks: comma-separated names of submodules as in `model.named_modules()`, or patterns with *, ?
    and [] ("block*"): each of them is compiled by itself, and the rest of the model stays eager; ""
    compiles the model as a whole. Blocks stay compiled in the model, whoever calls it; a copy of
    the model has them eager. Also raises ValueError, before anything is changed, for a name that no
    submodule has. Source: "Reducing torch.compile cold start compilation time with regional
    compilation", docs.pytorch.org/tutorials.
    """
    return eager_train_step(_compiled_model(model, mode, blocks), optimizer, loss_fn)


def fit_loop(
    model: nn.Module, optimizer: Optimizer, loss_fn: Callable, *, steps_per_execution: int = 1
) -> Callable:
    """Refuse: raises NotImplementedError."""
    raise NotImplementedError("PyTorch has no fit: its users write the loop")


def eager_predict(model: nn.Module) -> Callable:
    """Return `predict(x) -> output`, x as in the step: in evaluation mode, then modes as found."""

    def predict(x):
        training = [m for m in model.modules() if m.training] if model.training else []
        try:
            if training:
                model.eval()
            with torch.inference_mode():
                args, kwargs = _arguments(x)
                return model(*args, **kwargs)
        finally:
            for module in training:
                module.training = True

    return predict


def graph_predict(model: nn.Module) -> Callable:
    """Predict with a captured graph and eager's kernels, as in `graph_train_step`."""
    return eager_predict(_compile(model, backend="aot_eager"))


def compiled_predict(model: nn.Module, *, mode: str = "default", blocks: str = "") -> Callable:
    """Predict with the compiled model; settings and errors as in `compiled_model_train_step`.

    With CUDA graphs, the next call overwrites the output.
    """
    return eager_predict(_compiled_model(model, mode, blocks))


def _compiled_model(model: nn.Module, mode: str, blocks: str) -> nn.Module:
    """The model compiled as a whole, or the model with `blocks` compiled, each by itself."""
    _check_mode(mode)
    if not blocks.strip(" ,"):
        return _compile(model, mode=mode)
    chosen = _find_blocks(model, blocks)
    # As `nn.Module.compile`, but one `torch.compile` for all blocks: like ones find what is there.
    compiled = _compile(_run, mode=mode)
    for module in chosen:
        module._compiled_call_impl = partial(compiled, module)
    return model


def _run(module: nn.Module, /, *args, **kwargs):
    return module._call_impl(
        *args, **kwargs
    )  # itself, torch would run it eagerly for its own layers


def _find_blocks(model: nn.Module, blocks: str) -> list[nn.Module]:
    """The submodules that `blocks` names, but for those inside another of them."""
    # Containers such as ModuleList never run themselves, so there is nothing to compile.
    modules = {
        name: module
        for name, module in model.named_modules()
        if name and type(module).forward is not nn.Module.forward
    }
    chosen: dict[str, None] = {}
    for pattern in filter(None, map(str.strip, blocks.split(","))):
        found = [name for name in modules if fnmatchcase(name, pattern)]
        if not found:
            known = ", ".join(modules)
            raise ValueError(f"blocks: the model has no block {pattern!r}; it has {known}")
        chosen |= dict.fromkeys(found)
    inside = {n for n in chosen for other in chosen if n.startswith(f"{other}.")}
    return [modules[name] for name in chosen if name not in inside]


def _compile(function: Callable, **settings) -> Callable:
    """`torch.compile`, such that it never runs eagerly because others were compiled before.

    torch keeps 8 compilations of one piece of code (`torch._dynamo.config.recompile_limit`), of all
    models of a process together, and runs what comes after them eagerly.
    """
    if "isolate_recompiles" in signature(torch.compile).parameters:  # torch 2.15 has it
        settings["isolate_recompiles"] = True
    else:
        torch._dynamo.config.fail_on_recompile_limit_hit = True  # then the ninth raises
    return torch.compile(function, **settings)


def _arguments(x) -> tuple[tuple, dict]:
    """What the model is called with: a tuple is its arguments, a mapping its keywords."""
    if isinstance(x, Mapping):
        return (), dict(x)
    return (x if isinstance(x, tuple) else (x,)), {}


def traced_model(model: nn.Module, x) -> nn.Module:
    """Legacy: the model as TorchScript records one call on `x`, to use in its place.

    It shares the parameters, and keeps mode (training or evaluation) and branches of that call.
    Raises NotImplementedError with torch's reason where the call cannot be recorded.
    """
    args, kwargs = _arguments(x)
    inputs = {"example_kwarg_inputs": kwargs} if kwargs else {"example_inputs": args}
    before = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        return _torchscript(torch.jit.trace, model, check_trace=False, **inputs)
    finally:  # recording ran the model, which leaves a mark on BatchNorm's statistics
        for buffer, value in before:
            buffer.copy_(value)


def scripted_model(model: nn.Module) -> nn.Module:
    """Legacy: the model as TorchScript reads it from its source, with the same parameters.

    Raises NotImplementedError with torch's reason where TorchScript lacks what the source uses.
    """
    return _torchscript(torch.jit.script, model)


def _torchscript(compile_it: Callable, *args, **kwargs) -> nn.Module:
    try:
        return compile_it(*args, **kwargs)
    except (RuntimeError, torch.jit.frontend.FrontendError) as error:
        reason = next(line for line in str(error).splitlines() if line.strip())
        raise NotImplementedError(f"TorchScript refuses the model: {reason.strip(' :')}") from error


def _check_mode(mode: str) -> None:
    if mode not in _MODES:
        raise ValueError(f"unknown mode {mode!r}: choose one of {', '.join(_MODES)}")


def executed_graphs(function: Callable, *inputs) -> dict:
    """Say what one call of `function` ran in captured graphs, and what not in compiled ones.

    Returns for example {"graphs": 3, "compiled": 3, "outside": {"ones_like": 1}, "breaks": []}: the
    captured graphs, those that inductor compiled, operators that ran outside of these, and reasons
    for graph breaks in this process so far. Calls `function` three times, since two may compile.
    """
    function(*inputs)
    function(*inputs)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        function(*inputs)
    graphs, compiled, outside = set(), 0, Counter()
    waiting = [(root, None) for root in profile.profiler.kineto_results.experimental_event_tree()]
    while waiting:
        event, graph = waiting.pop()
        if event.name.startswith(("Torch-Compiled Region", "CompiledFunctionBackward")):
            graph = event.name, event.start_time_ns
        if event.name.startswith(("## Call CompiledFxGraph", "aten::")):
            graphs.add(graph)  # only now: a region may be Python alone
            compiled += event.name.startswith("##")
            outside.update([event.name[6:]] * event.name.startswith("aten::"))
        else:
            waiting += [(child, graph) for child in event.children]
    breaks = sorted(why.splitlines()[0] for why in torch._dynamo.utils.counters["graph_break"])
    found = {"graphs": len(graphs - {None}), "compiled": compiled}
    return found | {"outside": dict(outside), "breaks": breaks}


def main() -> None:
    """Print eager against compiled steps on the digits CNN, in interleaved samples."""
    import os
    import time

    from pt_impl.kit import models, runtime, training
    from shared.specs import TASKS
    from shared.weights import init_weights

    runtime.configure(threads=os.cpu_count() or 1, seed=0)
    task, steps, taken = TASKS["digits-cnn"], {}, {}
    x, y = (v.to(runtime.device()) for v in (torch.randn(128, 1, 32, 32), torch.arange(128) % 10))
    for make in (eager_train_step, compiled_model_train_step, compiled_train_step):
        model = models.build(task.model, init_weights(task.model, seed=0))
        optimizer = training.make_optimizer(model, task.recipe)
        steps[make.__name__] = make(model, optimizer, training.cross_entropy)
    for name, step in 100 * list(steps.items()):
        start = time.perf_counter()
        step(x, y)
        runtime.synchronize()
        taken.setdefault(name, []).append(time.perf_counter() - start)
    for name, times in taken.items():
        print(f"{name:26} first {times[0]:5.2f} s, then {1e3 * sorted(times)[50]:6.2f} ms")


if __name__ == "__main__":
    main()
