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
from collections.abc import Callable

import torch
from torch import nn
from torch.optim import Optimizer

_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")


def eager_train_step(model: nn.Module, optimizer: Optimizer, loss_fn: Callable) -> Callable:
    """Return `step(x, y) -> loss` as PyTorch runs it by default: operator by operator.

    x: a tensor, or a tuple of the model's positional arguments; anything else (a list, a dict) is
    handed over as it is. loss: the scalar `loss_fn(output, y)`, on the device, detached. The model
    is put into training mode.
    """
    model.train()

    def step(x, y):
        optimizer.zero_grad(set_to_none=True)
        loss = loss_fn(model(*x) if isinstance(x, tuple) else model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def graph_train_step(model: nn.Module, optimizer: Optimizer, loss_fn: Callable) -> Callable:
    """The step captured as graphs that run with eager's kernels: nothing is fused.

    "aot_eager" is a backend for debugging. Arguments and result as in `eager_train_step`.
    """
    return torch.compile(eager_train_step(model, optimizer, loss_fn), backend="aot_eager")


def compiled_train_step(
    model: nn.Module, optimizer: Optimizer, loss_fn: Callable, *, mode: str = "default"
) -> Callable:
    """The whole step under `torch.compile`; the first calls compile.

    Arguments and result as in `eager_train_step`. mode: "default", "reduce-overhead" (CUDA graphs),
    "max-autotune" (tries kernels out; CUDA graphs) or "max-autotune-no-cudagraphs". SGD with
    momentum compiles its update again in the second step, when its buffers are there; so does a
    learning rate that changes, unless it is a tensor. torch keeps 8 compilations of one piece of
    code (`torch._dynamo.config.recompile_limit`), of all models together, and runs what comes after
    them eagerly: `torch.compiler.reset()` between models. Raises ValueError for an unknown mode.

    Source: "Introduction to torch.compile" and "Compiling the optimizer with torch.compile",
    docs.pytorch.org/tutorials.
    """
    _check_mode(mode)
    model.train()

    @torch.compile(mode=mode)
    def train(x, y):
        loss = loss_fn(model(*x) if isinstance(x, tuple) else model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    def step(x, y):
        optimizer.zero_grad(set_to_none=True)  # never compiled: inside, it would split the graphs
        # A copy, since with CUDA graphs the next step writes its loss to the same place.
        return train(x, y).detach().clone()

    return step


def fullgraph_train_step(model: nn.Module, optimizer: Optimizer, loss_fn: Callable) -> Callable:
    """Forward and loss as one graph or an error, the update compiled apart.

    In pieces, because `fullgraph` refuses the breaks of a whole step. Arguments and result as in
    `eager_train_step`; where the graph would break, the first call raises torch's own error.
    """
    model.train()
    update = torch.compile(optimizer.step)

    @torch.compile(fullgraph=True)
    def forward(x, y):
        return loss_fn(model(*x) if isinstance(x, tuple) else model(x), y)

    def step(x, y):
        optimizer.zero_grad(set_to_none=True)
        loss = forward(x, y)
        loss.backward()  # runs the backward graph, which was made with the forward one
        update()
        return loss.detach()

    return step


def compiled_model_train_step(
    model: nn.Module, optimizer: Optimizer, loss_fn: Callable, *, mode: str = "default"
) -> Callable:
    """The model alone compiled, forward and backward; loss and update stay eager.

    Arguments and result as in `eager_train_step`, mode and errors as in `compiled_train_step`.
    """
    _check_mode(mode)
    return eager_train_step(torch.compile(model, mode=mode), optimizer, loss_fn)


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
                return model(*x) if isinstance(x, tuple) else model(x)
        finally:
            for module in training:
                module.training = True

    return predict


def graph_predict(model: nn.Module) -> Callable:
    """Predict with a captured graph and eager's kernels, as in `graph_train_step`."""
    return eager_predict(torch.compile(model, backend="aot_eager"))


def compiled_predict(model: nn.Module, *, mode: str = "default") -> Callable:
    """Predict with the compiled model; mode and errors as in `compiled_train_step`.

    With CUDA graphs, the next call overwrites the output.
    """
    _check_mode(mode)
    return eager_predict(torch.compile(model, mode=mode))


def traced_model(model: nn.Module, x) -> nn.Module:
    """Legacy: the model as TorchScript records one call on `x`, to use in its place.

    It shares the parameters, and keeps mode (training or evaluation) and branches of that call.
    Raises NotImplementedError with torch's reason where the call cannot be recorded.
    """
    before = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        inputs = x if isinstance(x, tuple) else (x,)
        return _torchscript(torch.jit.trace, model, inputs, check_trace=False)
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
