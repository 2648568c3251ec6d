"""Mixed precision: half-width arithmetic over float32 master weights.

What it changes: the forward pass runs under `torch.autocast`, so that convolutions and matrix
products read and write bfloat16 or float16, and their gradients follow. Parameters, their
gradients, the optimizer's state and the loss stay float32. float16 holds 6e-8 to 65,504 only, so
the loss is scaled up before the backward pass and the gradients down after it; a step whose
gradients overflow is skipped and halves the scale. bfloat16 has float32's range: no scaling.

Its twin: `tf_impl/train_step/mixed_precision.py`.

Where the frameworks differ and why:
- autocast decides per operator while it runs, Keras per layer while the graph is traced. bfloat16
  plus float32 is float32 here, so a residual stream that starts as float32 (an embedding) stays
  so; a Keras layer casts what it gets and gives, and the stream is bfloat16.
- autocast casts a weight once per forward pass, and gathers from the float32 embedding; Keras
  casts at every use, an embedding as a whole.
- BatchNorm and LayerNorm keep float32 parameters and statistics on both sides. On a CPU, PyTorch's
  kernels read bfloat16 and add up in float32 (on CUDA, autocast runs LayerNorm and softmax in
  float32); Keras casts normalisation to float32 and back.
- `GradScaler` reads a flag from the device in every step to decide whether to skip (unless the
  optimizer is fused); Keras decides inside the graph.

When it helps and when it hurts: it helps large convolutions and matrix products on hardware with
such units (CUDA: float16 since Volta, bfloat16 since Ampere; CPUs: AVX512-BF16, AMX) and halves
the memory of activations. It hurts small steps, which pay for the casts, and CPUs that emulate the
dtype (most do for float16: for tests only). On a CPU the fused attention of short sequences can
take several times longer backward in bfloat16 than in float32; `sdpa_kernel(SDPBackend.MATH)`
around the step then helps. bfloat16 has 8 significant bits: keep layers that add up small
differences in float32 (`keep_fp32`).

Run it alone: `python -m pt_impl.train_step.mixed_precision` prints float32 against bfloat16.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from dataclasses import fields, is_dataclass

import torch
from torch import nn
from torch.utils._pytree import tree_map  # torch has no public one

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def make_train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_fn: Callable,
    *,
    dtype: str = "bfloat16",
    keep_fp32: str = "",
    initial_scale: float = 65536.0,
    growth_interval: int = 2000,
    max_norm: float = math.inf,
) -> Callable:
    """Return `step(x, y) -> loss` that computes in `dtype` over the model's float32 parameters.

    x: a tuple of the model's positional arguments, a mapping of its keywords, or its one argument.
    loss: float32 scalar on the device, not scaled. `loss_fn(output, y)` gets float32.
    dtype: "bfloat16", "float16" or "float32" (the plain step).
    keep_fp32: names of layers, comma-separated, that compute in float32 with all they contain. The
    model itself is left as it is. float16 only: the loss is multiplied by a scale that starts at
    `initial_scale`, halves when a gradient is not finite (and no weight changes) and doubles after
    `growth_interval` good steps in a row. `step.loss_scale()` reads it (1.0 without scaling);
    `step.state_dict()` and `step.load_state_dict(state)` save and resume it with its count of good
    steps, as those of model and optimizer do. max_norm: the most that the L2 norm of all gradients
    may be, of unscaled ones; inf does not clip.

    Raises ValueError for an unknown dtype or layer, half-width parameters or a scaling or max_norm
    that cannot work; NotImplementedError where the device cannot compute in `dtype` and for a layer
    to keep whose weights its owner reads without calling it.
    """
    autocast, kept = _precision(model, dtype, keep_fp32)
    _check_settings(initial_scale, growth_interval, max_norm)
    device = _device_type(model)
    scaler = torch.amp.GradScaler(
        device,
        init_scale=initial_scale,
        growth_interval=growth_interval,
        enabled=dtype == "float16",  # if not, it passes loss and step through untouched
    )
    model.train()

    def step(x, y):
        optimizer.zero_grad(set_to_none=True)
        # The backward pass is outside autocast (each operator repeats the dtype of its forward)
        # and inside _in_float32, for checkpointed layers, which run forward again.
        with _in_float32(kept, device):
            with autocast():
                output = _call(model, x)
            loss = loss_fn(_to_float32(output), y)
            scaler.scale(loss).backward()
        if max_norm < math.inf:
            scaler.unscale_(optimizer)  # first: scaled gradients are above any bound
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        scaler.step(optimizer)  # unscales if need be; no update if a gradient is not finite
        scaler.update()
        return loss.detach()

    step.loss_scale = scaler.get_scale
    step.state_dict, step.load_state_dict = scaler.state_dict, scaler.load_state_dict
    return step


def _check_settings(initial_scale: float, growth_interval: int, max_norm: float) -> None:
    if initial_scale <= 0 or growth_interval < 1:
        raise ValueError("initial_scale must be positive and growth_interval at least 1")
    if not max_norm > 0:
        raise ValueError(f"max_norm must be above 0 (inf does not clip), not {max_norm!r}")


def make_predict(model: nn.Module, *, dtype: str = "bfloat16", keep_fp32: str = "") -> Callable:
    """Return `predict(x) -> output` in evaluation mode: computed in `dtype`, given as float32.

    x, dtype, keep_fp32 and errors as in `make_train_step`; the model's modes are left as found.
    """
    autocast, kept = _precision(model, dtype, keep_fp32)
    device = _device_type(model)

    def predict(x):
        training = [m for m in model.modules() if m.training] if model.training else []
        fused = torch.backends.mha.get_fastpath_enabled()
        try:
            if training:
                model.eval()
            # The fused kernel of TransformerEncoderLayer knows no autocast of a CPU: it would
            # compute in float32, and without calling the layers inside.
            torch.backends.mha.set_fastpath_enabled(fused and dtype == "float32")
            with torch.inference_mode(), _in_float32(kept, device), autocast():
                return _to_float32(_call(model, x))
        finally:
            torch.backends.mha.set_fastpath_enabled(fused)
            for module in training:
                module.training = True

    return predict


def _call(model: nn.Module, x):
    """Call the model as PyTorch's users do: a tuple is its arguments, a mapping its keywords."""
    if isinstance(x, Mapping):
        return model(**x)
    return model(*x) if isinstance(x, tuple) else model(x)


def _precision(
    model: nn.Module, dtype: str, keep_fp32: str
) -> tuple[Callable[[], AbstractContextManager], list[nn.Module]]:
    """Check the settings; return what opens an autocast region, and the modules kept out of it."""
    if dtype not in _DTYPES:
        raise ValueError(f"unknown dtype {dtype!r}: choose one of {', '.join(_DTYPES)}")
    kept = _find_modules(model, keep_fp32)
    if dtype == "float32":
        return nullcontext, []
    for name, parameter in model.named_parameters():
        if parameter.dtype in (torch.bfloat16, torch.float16):
            raise ValueError(f"master weights are float32, but {name} is {parameter.dtype}")
    device = _device_type(model)
    if not torch.amp.is_autocast_available(device):
        raise NotImplementedError(f"torch has no autocast for the device {device!r}")
    bfloat16_on_gpu = (device, dtype) == ("cuda", "bfloat16")
    if bfloat16_on_gpu and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise NotImplementedError("this GPU has no bfloat16 arithmetic: choose float16")
    return lambda: torch.autocast(device, _DTYPES[dtype]), kept


def _device_type(model: nn.Module) -> str:
    parameter = next(model.parameters(), None)
    if parameter is None:
        raise ValueError("the model has no parameters: there is nothing to compute with")
    return parameter.device.type


def _find_modules(model: nn.Module, names: str) -> list[nn.Module]:
    """Return the named submodules and all that they contain, each once."""
    modules = dict(model.named_modules())
    found: dict[nn.Module, None] = {}
    for name in filter(None, map(str.strip, names.split(","))):
        if name not in modules:
            known = ", ".join(filter(None, modules))
            raise ValueError(f"keep_fp32: the model has no layer {name!r}; it has {known}")
        owner = name.rpartition(".")[0]
        if owner and isinstance(modules[owner], nn.MultiheadAttention):
            raise NotImplementedError(
                f"keep_fp32: MultiheadAttention reads the weights of {name!r} and never calls it:"
                f" keep {owner!r}"
            )
        found |= dict.fromkeys(modules[name].modules())
    return list(found)


@contextmanager
def _in_float32(modules: list[nn.Module], device: str) -> Iterator[None]:
    """Let `modules` compute outside autocast, on float32 inputs, until the context ends.

    `forward` is replaced for one step only: another step of the same model wraps nothing twice.
    """
    before = [vars(module).get("forward") for module in modules]
    for module in modules:
        module.forward = _outside_autocast(module.forward, device)
    try:
        yield
    finally:
        for module, forward in zip(modules, before, strict=True):
            del module.forward
            if forward is not None:
                module.forward = forward


def _outside_autocast(forward: Callable, device: str) -> Callable:
    def run(*args, **kwargs):
        args, kwargs = _to_float32((args, kwargs))
        with torch.autocast(device, enabled=False):
            return forward(*args, **kwargs)

    return run


def _to_float32(tree):
    """Cast every bfloat16 or float16 tensor of an output to float32, in whatever holds it."""
    return tree_map(_leaf_to_float32, tree)


def _leaf_to_float32(leaf):
    if getattr(leaf, "dtype", None) in (torch.bfloat16, torch.float16):
        return leaf.float()
    if is_dataclass(leaf):  # those that torch does not know as containers
        leaf = copy(leaf)
        for field in fields(leaf):
            object.__setattr__(leaf, field.name, _to_float32(getattr(leaf, field.name)))
    elif isinstance(leaf, Mapping):
        return {key: _to_float32(value) for key, value in leaf.items()}
    return leaf


def main() -> None:
    """Print float32 against bfloat16 on the digits CNN, in interleaved samples."""
    import os
    import statistics
    import tempfile
    import time
    from pathlib import Path

    from pt_impl.kit import data, models, runtime, training
    from shared import datasets
    from shared.specs import TASKS
    from shared.weights import init_weights

    runtime.configure(threads=os.cpu_count() or 1, seed=0)
    task = TASKS["digits-cnn"]
    with tempfile.TemporaryDirectory() as folder:
        x, y = datasets.load(datasets.materialise(task.dataset, Path(folder)), "train")
        batches = datasets.first_batches(x, y, task.compute_batch, 10, seed=0)
    batches = data.resident_batches(batches)
    steps, losses, taken = {}, {}, {"float32": [], "bfloat16": []}
    for dtype in taken:
        model = models.build(task.model, init_weights(task.model, seed=0))
        make = training.make_train_step if dtype == "float32" else make_train_step
        optimizer = training.make_optimizer(model, task.recipe)
        steps[dtype] = make(model, optimizer, training.cross_entropy)
    for _ in range(20):
        for dtype, step in steps.items():
            start = time.perf_counter()
            for batch in batches:
                losses[dtype] = step(*batch)
            runtime.synchronize()
            taken[dtype].append((time.perf_counter() - start) / len(batches))
    print(f"digits-cnn, batch {task.compute_batch}: ms a step, ratio, loss after 200 steps, ran in")
    baseline = statistics.median(taken["float32"])
    for dtype, step in steps.items():
        seconds, loss = statistics.median(taken[dtype]), runtime.to_float(losses[dtype])
        ran = runtime.operator_dtypes(step, *batches[0])
        print(f"{dtype:9}{seconds * 1e3:8.2f}{seconds / baseline:7.2f}{loss:9.4f}  {ran}")


if __name__ == "__main__":
    main()
