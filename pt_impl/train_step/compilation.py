"""Compilation: machine code for the whole train step, instead of one operator after another.

    step = compiled_train_step(model, optimizer, loss_fn)  # a whole step, or
    apply_compile(model, blocks="layers.*")  # only the model; the loop stays as it is

What it changes: how operators run. In eager mode Python calls one kernel after another. A captured
graph runs without Python. A compiler also fuses neighbouring operators into one kernel, which saves
memory traffic. Results differ by rounding, since sums are taken in another order.

Its twin: `tf_impl/train_step/compilation.py`.

Where the frameworks differ and why:
- XLA makes one program of forward pass, loss, gradients and update. `torch.compile` makes at least
  three graphs: it breaks at `loss.backward()` and around the update.
- If `torch.compile` can't trace something, that part runs in Python without a warning (a graph
  break). `fullgraph_train_step` forbids that. XLA compiles everything or raises.
- `torch.compile` compiles again for a second shape, and then for any size of that axis. XLA
  compiles for every shape.
- `torch.compile` keeps its kernels on disk for the next process, and needs a C++ compiler on a CPU.
  XLA keeps nothing by default and needs none.
- In `fit`, Keras 3's `jit_compile="auto"` uses XLA only on machines with a GPU.
  `steps_per_execution` runs that many batches in one graph.

When it helps and when it hurts: it speeds up elementwise work between matrix products:
normalisation, GELU, losses, updates. On a GPU it also helps with many small kernels. Convolutions
and matrix products gain little: libraries compute them either way. The first calls compile. That
time divided by the time saved per step is the break-even.
- Each call checks guards, which slows small steps. Equal blocks (`blocks`) share one compilation.

Run it alone: `python -m pt_impl.train_step.compilation` compares eager with compiled steps.

Copy with it: `pt_impl/kit/calling.py`, `pt_impl/kit/checks/compilation.py`.
"""

from collections.abc import Callable, Mapping
from functools import partial
from inspect import signature
from types import MethodType

import torch
from torch import nn
from torch.optim import Optimizer

from pt_impl.kit.calling import call, evaluating
from pt_impl.kit.checks.compilation import check_blocks, check_compilation


def compile_function(function: Callable, *, mode: str = "default") -> Callable:
    """`torch.compile`, such that it never runs eagerly because others were compiled before.

    Args:
        function: a loss of a batch, a step, a model.
        mode: "default", "reduce-overhead" (CUDA graphs; nothing on a CPU), "max-autotune" (tries
            kernels out; CUDA graphs) or "max-autotune-no-cudagraphs".

    Returns:
        The function; its first calls compile.

    Raises:
        ValueError: an unknown mode.
    """
    check_compilation(mode)
    return _compile(function, mode=mode)


def apply_compile(model: nn.Module, *, mode: str = "default", blocks: str = "") -> nn.Module:
    """Compile the model, forward and backward; whoever calls it runs what was compiled.

    Names, parameters and `state_dict` stay; a copy of the model is eager. Source: "Reducing
    torch.compile cold start compilation time with regional compilation", in PyTorch's tutorials.

    Args:
        model: changed in place.
        mode: as in `compile_function`.
        blocks: comma-separated names of submodules as in `model.named_modules()`, or patterns with
            *, ? and [] ("block*"): each is compiled by itself, like ones together, and the rest of
            the model stays eager. "" compiles the model as a whole. torch's limit of 8 compilations
            (256 in all) holds for each block; before torch 2.15, for all together: it then raises.

    Returns:
        The model.

    Raises:
        ValueError: before anything is changed, an unknown mode, or a name that no submodule has.
    """
    check_compilation(mode)
    modules = check_blocks(model, blocks) if blocks.strip(" ,") else [model]
    # As `nn.Module.compile`, but one `torch.compile` for all blocks: like ones find what is there.
    compiled = _compile(_run, blocks=len(modules), mode=mode)
    for module in modules:
        module._compiled_call_impl = partial(compiled, module)
    return model


def _run(module: nn.Module, /, *args, **kwargs):
    # `module(...)` itself torch would run eagerly for its own layers.
    return module._call_impl(*args, **kwargs)


def compile_optimizer(optimizer: Optimizer) -> Optimizer:
    """Compile an optimizer's update; return the optimizer, changed.

    A fused one is one kernel already. Do it before a scheduler is made. SGD with momentum compiles
    once more in the second step, when its buffers are there; a learning rate that changes does too,
    unless it is a tensor.
    """
    # A method of this optimizer, so that schedulers and GradScaler call it as they do any other's.
    optimizer.step = MethodType(_compile(type(optimizer).step), optimizer)
    return optimizer


def eager_train_step(model: nn.Module, optimizer: Optimizer, loss_fn: Callable) -> Callable:
    """Make the step as PyTorch runs it by default: operator by operator.

    Args:
        model, optimizer: as ever; the model is put into training mode.
        loss_fn: `loss_fn(output, y)` returns a scalar.

    Returns:
        `step(x, y) -> loss`, on the device, detached. x: a tuple of the model's positional
        arguments, a mapping of its keywords, or its one argument.
    """
    model.train()

    def step(x, y):
        optimizer.zero_grad(set_to_none=True)
        loss = loss_fn(call(model, x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def graph_train_step(model: nn.Module, optimizer: Optimizer, loss_fn: Callable) -> Callable:
    """Make the step captured as graphs that run with eager's kernels: nothing is fused.

    "aot_eager" is a backend for debugging. Args, Returns: as in `eager_train_step`.
    """
    return _compile(eager_train_step(model, optimizer, loss_fn), backend="aot_eager")


def compiled_train_step(
    model: nn.Module, optimizer: Optimizer, loss_fn: Callable, *, mode: str = "default"
) -> Callable:
    """Make the whole step under `torch.compile`; the first calls compile.

    Source: "Introduction to torch.compile" and "Compiling the optimizer with torch.compile",
    docs.pytorch.org/tutorials.

    Args, Returns: as in `eager_train_step`; mode and Raises as in `compile_function`. What is said
    of learning rates in `compile_optimizer` holds here too.
    """

    def train(x, y):
        loss = loss_fn(call(model, x), y)
        loss.backward()
        optimizer.step()
        return loss

    compiled = compile_function(train, mode=mode)
    model.train()

    def step(x, y):
        optimizer.zero_grad(set_to_none=True)  # never compiled: inside, it would split the graphs
        # A copy, since with CUDA graphs the next step writes its loss to the same place.
        return compiled(_plain(x), y).detach().clone()

    return step


def fullgraph_train_step(model: nn.Module, optimizer: Optimizer, loss_fn: Callable) -> Callable:
    """Make the step with forward and loss as one graph or an error, the update compiled apart.

    In pieces, because `fullgraph` refuses the breaks of a whole step. Args, Returns: as in
    `eager_train_step`; where the graph would break, the first call raises torch's own error.
    """
    loss_of = _compile(lambda x, y: loss_fn(call(model, x), y), fullgraph=True)
    update = _compile(optimizer.step)
    model.train()

    def step(x, y):
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of(_plain(x), y)
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
    """Make the step with only the model compiled; loss and update stay eager.

    Args, Returns: as in `eager_train_step`; mode, blocks, Raises: as in `apply_compile`.
    """
    return eager_train_step(apply_compile(model, mode=mode, blocks=blocks), optimizer, loss_fn)


def eager_predict(model: nn.Module) -> Callable:
    """Make `predict(x) -> output`, x as in the step: in evaluation mode, then modes as found."""

    def predict(x):
        # What a model in training keeps of a call, such as a mask, is trained with later.
        without_gradients = torch.no_grad() if model.training else torch.inference_mode()
        with evaluating(model), without_gradients:
            return call(model, x)

    return predict


def graph_predict(model: nn.Module) -> Callable:
    """Predict with a captured graph and eager's kernels, as in `graph_train_step`."""
    return eager_predict(_compile(model, backend="aot_eager"))


def compiled_predict(model: nn.Module, *, mode: str = "default", blocks: str = "") -> Callable:
    """Predict with the compiled model; Args and Raises as in `apply_compile`.

    With CUDA graphs, the next call overwrites the output.
    """
    return eager_predict(apply_compile(model, mode=mode, blocks=blocks))


def _compile(function: Callable, *, blocks: int = 1, **settings) -> Callable:
    """`torch.compile` that does not give up.

    torch keeps 8 compilations of one piece of code (`torch._dynamo.config.recompile_limit`), of all
    models of a process together, and runs what comes after them eagerly.
    """
    if "isolate_recompiles" in signature(torch.compile).parameters:  # torch 2.15 has it
        settings["isolate_recompiles"] = True
        if blocks > 1:  # one piece of code for all of them, each of which has modes and shapes
            settings["recompile_limit"] = blocks * torch._dynamo.config.recompile_limit
    else:
        torch._dynamo.config.fail_on_recompile_limit_hit = True  # then the ninth raises
    return torch.compile(function, **settings)


def _plain(x):
    """A mapping as a dict: other ones the compiler may not know."""
    return dict(x) if isinstance(x, Mapping) else x


def main() -> None:
    """Print eager against compiled steps on the digits CNN, and how long the first call takes."""
    import time

    from pt_impl.kit.demo import Demo

    demo, steps = Demo("digits-cnn"), {}
    for make in (eager_train_step, compiled_model_train_step, compiled_train_step):
        steps[make.__name__] = step = make(*demo.build())
        start = time.perf_counter()
        step(*demo.batches[0])
        print(f"{make.__name__:26} first call {time.perf_counter() - start:6.2f} s")
    for name, ms in demo.times(steps).items():
        print(f"{name:26} then {ms:12.2f} ms a step")


if __name__ == "__main__":
    main()
