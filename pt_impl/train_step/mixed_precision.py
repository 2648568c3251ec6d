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
- A layer that is kept in float32 has its `forward` wrapped here, for good; there layers get their
  policies for a trace and have their own again after it.
- `GradScaler` reads a flag from the device in every step to decide whether to skip (unless the
  optimizer is fused); Keras decides inside the graph.

When it helps and when it hurts: it helps large convolutions and matrix products on hardware with
such units (CUDA: float16 since Volta, bfloat16 since Ampere; CPUs: AVX512-BF16, AMX) and halves
the memory of activations. It hurts small steps, which pay for the casts, and CPUs that emulate the
dtype (most do for float16: for tests only). On a CPU the fused attention of short sequences can
take several times longer backward in bfloat16 than in float32; `sdpa_kernel(SDPBackend.MATH)`
around the step then helps. bfloat16 has 8 significant bits: keep layers that add up small
differences in float32 (`keep_fp32`). Keep `Conv3d` over tiny volumes too: on CPUs with bfloat16
units oneDNN's gradients of their weights can be garbage (of 16 channels over 2 x 4 x 4).

Run it alone: `python -m pt_impl.train_step.mixed_precision` prints float32 against bfloat16.

Copy with it: nothing.
"""

from collections.abc import Callable, Mapping, MutableMapping
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from dataclasses import fields, is_dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map  # torch has no public one

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


class MixedPrecision:
    """Autocast for the forward pass and, in float16, a scaler for the loss, which keeps a state.

    One object trains one model; what it does to a plain loop:

        with precision.autocast():
            output = model(x)
        loss = loss_fn(to_float32(output), y)
        precision.backward(loss)
        precision.unscale(optimizer)  # where gradients are clipped or looked at, before that
        precision.step(optimizer)

    Args:
        model: of float32 parameters.
        dtype: "bfloat16", "float16" or "float32", which changes nothing.
        keep_fp32: names of layers, comma-separated, that compute in float32 with all they contain.
            They do so under any autocast from then on; without it they are as they were.
        initial_scale: float16 only: the loss is multiplied by a scale that starts here.
        growth_interval: the scale halves when a gradient is not finite (and no weight changes) and
            doubles after so many good steps in a row.

    Raises:
        ValueError: an unknown dtype or layer, half-width parameters or a scaling that cannot work.
        NotImplementedError: the device cannot compute in `dtype`, a layer has no kernel for it, or
            the owner of a layer to keep reads its weights without calling it.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        dtype: str = "bfloat16",
        keep_fp32: str = "",
        initial_scale: float = 65536.0,
        growth_interval: int = 2000,
    ) -> None:
        if initial_scale <= 0 or growth_interval < 1:
            raise ValueError("initial_scale must be positive and growth_interval at least 1")
        kept = _check(model, dtype, keep_fp32)
        self.device, self.dtype = _device_type(model), dtype
        self.scaler = torch.amp.GradScaler(
            self.device,
            init_scale=initial_scale,
            growth_interval=growth_interval,
            enabled=dtype == "float16",  # if not, it passes loss and step through untouched
        )
        if dtype != "float32":
            for module in kept:
                _keep_in_float32(module, self.device)

    def autocast(self) -> AbstractContextManager:
        """The region for the forward pass, and for nothing else."""
        if self.dtype == "float32":
            return nullcontext()
        return torch.autocast(self.device, _DTYPES[self.dtype])

    def backward(self, loss: Tensor) -> None:
        """Run the backward pass of the scaled loss; outside the region, as autograd repeats it."""
        self.scaler.scale(loss).backward()

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients by the scale, for what stands between `backward` and `step`."""
        self.scaler.unscale_(optimizer)

    def step(self, *optimizers: torch.optim.Optimizer) -> None:
        """Update the parameters, unless a gradient is not finite; then choose the next scale.

        Once for all optimizers of the loss: each skips where a gradient of its own is not finite.
        """
        for optimizer in optimizers:
            self.scaler.step(optimizer)  # unscales what is still scaled
        self.scaler.update()

    def loss_scale(self) -> float:
        """Read the scale; 1.0 without scaling."""
        return self.scaler.get_scale()

    def state_dict(self) -> dict:
        """The scale and its count of good steps: save it beside those of model and optimizer."""
        return self.scaler.state_dict()

    def load_state_dict(self, state: dict) -> None:
        """Resume from what `state_dict` returned."""
        self.scaler.load_state_dict(state)


def make_train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_fn: Callable,
    *,
    dtype: str = "bfloat16",
    keep_fp32: str = "",
    initial_scale: float = 65536.0,
    growth_interval: int = 2000,
) -> Callable:
    """Make the plain train step, computed in `dtype` over the model's float32 parameters.

    Args:
        model, optimizer: as ever; the model is put into training mode.
        loss_fn: `loss_fn(output, y)` is given float32.
        dtype, keep_fp32, initial_scale, growth_interval: as in `MixedPrecision`.

    Returns:
        `step(x, y) -> loss`, a float32 scalar on the device, not scaled. x: a tuple of the model's
        positional arguments, a mapping of its keywords, or its one argument. `step.loss_scale()`
        reads the scale; `step.state_dict()` and `step.load_state_dict(state)` save and resume it.

    Raises:
        As `MixedPrecision`.
    """
    precision = MixedPrecision(
        model,
        dtype=dtype,
        keep_fp32=keep_fp32,
        initial_scale=initial_scale,
        growth_interval=growth_interval,
    )
    model.train()

    def step(x, y):
        optimizer.zero_grad(set_to_none=True)
        with precision.autocast():
            output = _call(model, x)
        loss = loss_fn(to_float32(output), y)
        precision.backward(loss)
        precision.step(optimizer)
        return loss.detach()

    step.loss_scale = precision.loss_scale
    step.state_dict, step.load_state_dict = precision.state_dict, precision.load_state_dict
    return step


def make_predict(model: nn.Module, *, dtype: str = "bfloat16", keep_fp32: str = "") -> Callable:
    """Make `predict(x) -> output` in evaluation mode: computed in `dtype`, given as float32.

    Args, Raises: as in `make_train_step`. The model's modes are left as found.
    """
    precision = MixedPrecision(model, dtype=dtype, keep_fp32=keep_fp32)

    def predict(x):
        modes = {module: module.training for module in model.modules()} if _trains(model) else {}
        fused = torch.backends.mha.get_fastpath_enabled()
        try:
            if modes:
                model.eval()
            # The fused kernel of TransformerEncoderLayer knows no autocast of a CPU: it would
            # compute in float32, and without calling the layers inside.
            torch.backends.mha.set_fastpath_enabled(fused and dtype == "float32")
            # What a model keeps of a call, such as a mask, is trained with later.
            with torch.no_grad() if modes else torch.inference_mode(), precision.autocast():
                output = _call(model, x)
            return to_float32(output)
        finally:
            torch.backends.mha.set_fastpath_enabled(fused)
            for module, mode in modes.items():
                if module.training != mode:
                    module.train(mode)  # some do more in it, as LoRA does

    return predict


def to_float32(tree):
    """Cast every bfloat16 or float16 tensor of an output to float32, in whatever holds it."""
    if isinstance(tree, Tensor):
        return _leaf_to_float32(tree)
    return tree_map(_leaf_to_float32, tree)


def _leaf_to_float32(leaf):
    if getattr(leaf, "dtype", None) in (torch.bfloat16, torch.float16):
        return leaf.float()
    if is_dataclass(leaf):  # those that torch does not know as containers
        leaf = copy(leaf)
        for field in fields(leaf):
            object.__setattr__(leaf, field.name, to_float32(getattr(leaf, field.name)))
    elif isinstance(leaf, MutableMapping):  # of its own class, whose attributes are kept
        leaf = copy(leaf)
        for held in (getattr(leaf, "__dict__", {}), leaf):
            for key, value in list(held.items()):
                held[key] = to_float32(value)
    elif isinstance(leaf, Mapping):
        return {key: to_float32(value) for key, value in leaf.items()}
    return leaf


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


def _check(model: nn.Module, dtype: str, keep_fp32: str) -> list[nn.Module]:
    """Check the settings against model and device; return the modules to keep in float32."""
    if dtype not in _DTYPES:
        raise ValueError(f"unknown dtype {dtype!r}: choose one of {', '.join(_DTYPES)}")
    kept = _find_modules(model, keep_fp32)
    device = _device_type(model)
    if dtype == "float32":
        return kept
    for name, parameter in model.named_parameters():
        if parameter.dtype in (torch.bfloat16, torch.float16):
            raise ValueError(f"master weights are float32, but {name} is {parameter.dtype}")
    if not torch.amp.is_autocast_available(device):
        raise NotImplementedError(f"torch has no autocast for the device {device!r}")
    bfloat16_on_gpu = (device, dtype) == ("cuda", "bfloat16")
    if bfloat16_on_gpu and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise NotImplementedError("this GPU has no bfloat16 arithmetic: choose float16")
    for name, module in model.named_modules():
        if device == "cpu" and isinstance(module, nn.Bilinear) and module not in kept:
            raise NotImplementedError(
                f"a CPU's autocast does not cast what nn.Bilinear gets: keep_fp32={name!r}"
            )
    return kept


def _device_type(model: nn.Module) -> str:
    parameter = next(model.parameters(), None)
    if parameter is None:
        raise ValueError("the model has no parameters: there is nothing to compute with")
    return parameter.device.type


def _find_modules(model: nn.Module, names: str) -> list[nn.Module]:
    """Return the named submodules and all that they contain, each once."""
    modules = dict(model.named_modules())
    kept: dict[nn.Module, None] = {}
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
        kept |= dict.fromkeys(modules[name].modules())
    return list(kept)


def _keep_in_float32(module: nn.Module, device: str) -> None:
    """Have `module` compute outside autocast, on float32 inputs."""
    if getattr(vars(module).get("forward"), "func", None) is not _outside_autocast:
        # A partial object, since copy.deepcopy follows it to the copy's own module; a closure
        # would keep computing with the parameters of the original.
        module.forward = partial(_outside_autocast, module.forward, device)


def _outside_autocast(forward: Callable, device: str, /, *args, **kwargs):
    if not torch.is_autocast_enabled(device):
        return forward(*args, **kwargs)
    args, kwargs = to_float32((args, kwargs))
    with torch.autocast(device, enabled=False):
        return forward(*args, **kwargs)


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
    steps, losses, times = {}, {}, {"float32": [], "bfloat16": []}
    for dtype in times:
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
            times[dtype].append((time.perf_counter() - start) / len(batches))
    print(f"digits-cnn, batch {task.compute_batch}: ms a step, ratio, loss after 200 steps, ran in")
    baseline = statistics.median(times["float32"])
    for dtype, step in steps.items():
        seconds, loss = statistics.median(times[dtype]), runtime.to_float(losses[dtype])
        ran = runtime.operator_dtypes(step, *batches[0])
        print(f"{dtype:9}{seconds * 1e3:8.2f}{seconds / baseline:7.2f}{loss:9.4f}  {ran}")


if __name__ == "__main__":
    main()
