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
- What `torch.compile` cannot trace runs in Python, in silence (a graph break);
  `fullgraph_train_step` makes it raise. XLA compiles everything or raises.
- Another shape: torch compiles again, then for any size of that axis; XLA compiles for each shape.
- torch has modes (`mode`), keeps its kernels on disk for the next process and needs a C++ compiler
  on a CPU; XLA has none of the three. Keras has `fit` (`fit_loop`). TorchScript (`traced_model`,
  `scripted_model`) is torch's old compiler, now deprecated.

When it helps and when it hurts: it helps elementwise work between products (normalisation, GELU,
losses, updates) and, on a GPU, many small kernels. Convolutions and products are libraries' kernels
either way. Each call checks guards, which small steps feel, and the first calls compile: that time
over the time saved in a step is the break-even. "reduce-overhead" does nothing on a CPU.

Run it alone: `python -m pt_impl.train_step.compilation` prints eager against compiled steps.

Copy with it: nothing.
"""

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from functools import partial
from inspect import signature
from types import MethodType

import torch
from torch import nn
from torch.optim import Optimizer

_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")


def compile_function(function: Callable, *, mode: str = "default") -> Callable:
    """`torch.compile`, such that it never runs eagerly because others were compiled before.

    torch keeps 8 compilations of one piece of code (`torch._dynamo.config.recompile_limit`), of all
    models of a process together, and runs what comes after them eagerly.

    Args:
        function: a loss of a batch, a step, a model.
        mode: "default", "reduce-overhead" (CUDA graphs), "max-autotune" (tries kernels out; CUDA
            graphs) or "max-autotune-no-cudagraphs".

    Returns:
        The function; its first calls compile.

    Raises:
        ValueError: an unknown mode.
    """
    _check_mode(mode)
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
    _check_mode(mode)
    modules = _find_blocks(model, blocks) if blocks.strip(" ,") else [model]
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
        loss = loss_fn(_call(model, x), y)
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
        loss = loss_fn(_call(model, x), y)
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

    def loss_of(x, y):
        return loss_fn(_call(model, x), y)

    loss_of = _compile(loss_of, fullgraph=True)
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
    """Make the step with the model alone compiled; loss and update stay eager.

    Args, Returns: as in `eager_train_step`; mode, blocks, Raises: as in `apply_compile`.
    """
    return eager_train_step(apply_compile(model, mode=mode, blocks=blocks), optimizer, loss_fn)


def eager_predict(model: nn.Module) -> Callable:
    """Make `predict(x) -> output`, x as in the step: in evaluation mode, then modes as found."""

    def predict(x):
        modes = {module: module.training for module in model.modules()} if _trains(model) else {}
        try:
            if modes:
                model.eval()
            # What a model keeps of a call, such as a mask, is trained with later.
            with torch.no_grad() if modes else torch.inference_mode():
                return _call(model, x)
        finally:
            for module, mode in modes.items():
                if module.training != mode:
                    module.train(mode)  # some do more in it, as LoRA does

    return predict


def graph_predict(model: nn.Module) -> Callable:
    """Predict with a captured graph and eager's kernels, as in `graph_train_step`."""
    return eager_predict(_compile(model, backend="aot_eager"))


def compiled_predict(model: nn.Module, *, mode: str = "default", blocks: str = "") -> Callable:
    """Predict with the compiled model; Args and Raises as in `apply_compile`.

    With CUDA graphs, the next call overwrites the output.
    """
    return eager_predict(apply_compile(model, mode=mode, blocks=blocks))


def traced_model(model: nn.Module, x) -> nn.Module:
    """Legacy: the model as TorchScript records one call on `x`, to use in its place.

    It shares the parameters, and keeps mode (training or evaluation) and branches of that call.
    Raises NotImplementedError with torch's reason where the call cannot be recorded.
    """
    name = "example_kwarg_inputs" if isinstance(x, Mapping) else "example_inputs"
    # With its place: a model may put another tensor there.
    before = [
        (module, place, buffer, buffer.clone())
        for module in model.modules()
        for place, buffer in module.named_buffers(recurse=False)
    ]
    try:
        return torch.jit.trace(model, check_trace=False, **{name: _plain(x)})
    except RuntimeError as error:
        raise _refusal(error) from error
    finally:  # recording ran the model, which leaves a mark on BatchNorm's statistics
        for module, place, buffer, value in before:
            setattr(module, place, buffer.copy_(value))


def scripted_model(model: nn.Module) -> nn.Module:
    """Legacy: the model as TorchScript reads it from its source, with the same parameters.

    Raises NotImplementedError with torch's reason where TorchScript lacks what the source uses.
    """
    try:
        return torch.jit.script(model)
    except (RuntimeError, torch.jit.frontend.FrontendError) as error:
        raise _refusal(error) from error


def _refusal(error: Exception) -> NotImplementedError:
    reason = next(line for line in str(error).splitlines() if line.strip())
    return NotImplementedError(f"TorchScript refuses the model: {reason.strip(' :')}")


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
        names = [name for name in modules if fnmatchcase(name, pattern)]
        if not names:
            known = ", ".join(modules)
            raise ValueError(f"blocks: the model has no block {pattern!r}; it has {known}")
        chosen |= dict.fromkeys(names)
    inside = {n for n in chosen for other in chosen if n.startswith(f"{other}.")}
    return [modules[name] for name in chosen if name not in inside]


def _check_mode(mode: str) -> None:
    if mode not in _MODES:
        raise ValueError(f"unknown mode {mode!r}: choose one of {', '.join(_MODES)}")


def _compile(function: Callable, *, blocks: int = 1, **settings) -> Callable:
    if "isolate_recompiles" in signature(torch.compile).parameters:  # torch 2.15 has it
        settings["isolate_recompiles"] = True
        if blocks > 1:  # one piece of code for all of them, each of which has modes and shapes
            settings["recompile_limit"] = blocks * torch._dynamo.config.recompile_limit
    else:
        torch._dynamo.config.fail_on_recompile_limit_hit = True  # then the ninth raises
    return torch.compile(function, **settings)


def _trains(model: nn.Module) -> bool:
    """Whether any part is in training mode; a walk by `modules()` takes several times as long."""
    left = [model]
    while left:
        module = left.pop()
        if module.training:
            return True
        left += [part for part in module._modules.values() if part is not None]
    return False


def _call(model: nn.Module, x):
    """Call the model as PyTorch's users do: a tuple is its arguments, a mapping its keywords."""
    if isinstance(x, Mapping):
        return model(**x)
    return model(*x) if isinstance(x, tuple) else model(x)


def _plain(x):
    """A mapping as a dict: other ones the compiler may not know."""
    return dict(x) if isinstance(x, Mapping) else x


def main() -> None:
    """Print eager against compiled steps on the digits CNN, in interleaved samples."""
    import os
    import time

    from pt_impl.kit import models, runtime, training
    from shared.specs import TASKS
    from shared.weights import init_weights

    runtime.configure(threads=os.cpu_count() or 1, seed=0)
    task, steps, times = TASKS["digits-cnn"], {}, {}
    x, y = (v.to(runtime.device()) for v in (torch.randn(128, 1, 32, 32), torch.arange(128) % 10))
    for make in (eager_train_step, compiled_model_train_step, compiled_train_step):
        model = models.build(task.model, init_weights(task.model, seed=0))
        optimizer = training.make_optimizer(model, task.recipe)
        steps[make.__name__] = make(model, optimizer, training.cross_entropy)
    for name, step in 100 * list(steps.items()):
        start = time.perf_counter()
        step(x, y)
        runtime.synchronize()
        times.setdefault(name, []).append(time.perf_counter() - start)
    for name, samples in times.items():
        print(f"{name:26} first {samples[0]:5.2f} s, then {1e3 * sorted(samples)[50]:6.2f} ms")


if __name__ == "__main__":
    main()
