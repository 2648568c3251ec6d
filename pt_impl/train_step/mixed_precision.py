"""Mixed precision: 16-bit arithmetic over float32 master weights.

    precision = MixedPrecision(model)  # bfloat16
    with precision.autocast():  # only around the forward pass
        output = model(x)
    loss = loss_fn(to_float32(output), y)

What it changes: convolutions and matrix products compute in bfloat16 or float16, and so do their
gradients. Weights, their gradients, the optimizer's state and the loss stay float32. bfloat16 has
float32's range and 8 significant bits. float16 holds 6e-8 to 65,504 only: smaller gradients become
zero, unless the loss is scaled (`loss_scaling.py`).

Its twin: `tf_impl/train_step/mixed_precision.py`.

Where the frameworks differ and why:
- PyTorch: autocast decides for each operator while it runs. TensorFlow: Keras decides for each
  layer while the graph is traced.
- PyTorch: bfloat16 plus float32 is float32. So the skip connections of a Transformer stay
  float32. A Keras layer casts its inputs and outputs, so there they are bfloat16: less memory, less
  precision.
- PyTorch casts a weight once per forward pass, Keras at every use.
- BatchNorm and LayerNorm keep float32 parameters and statistics in both.
- tf_keras models are refused: their dtypes are fixed when they are built.

When it helps and when it hurts: it speeds up large convolutions and matrix products if the hardware
has units for the dtype. On GPUs: float16 since Volta, bfloat16 since Ampere. On CPUs: AVX512-BF16
and AMX. Activations kept in 16 bits take half the memory. It slows down small steps, by its casts,
and CPUs that emulate the dtype. Keep layers that add up small differences in float32 (`keep_fp32`).
- On a CPU the backward pass of fused attention over short sequences can become several times
  slower. `sdpa_kernel(SDPBackend.MATH)` around the step then helps.
- Keep `Conv3d` over tiny volumes in float32: oneDNN's bfloat16 can get its gradients wrong.

Run it alone: `python -m pt_impl.train_step.mixed_precision` compares float32 with bfloat16.

Copy with it: `pt_impl/kit/calling.py`, `pt_impl/kit/checks/mixed_precision.py`.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch import nn

from pt_impl.kit.calling import call, to_float32
from pt_impl.kit.checks.mixed_precision import check_mixed_precision


class MixedPrecision:
    """The autocast region of a model's forward pass, and layers that it leaves in float32.

    Args:
        model: of float32 parameters.
        dtype: "bfloat16", "float16" or "float32", which changes nothing.
        keep_fp32: names of layers, comma-separated, that compute in float32 with all they contain.
            They do so under any autocast from then on; without it they are as they were.

    Raises:
        ValueError: an unknown dtype or layer, or half-width parameters.
        NotImplementedError: the device cannot compute in `dtype`, a layer has no kernel for it, or
            the owner of a layer to keep reads its weights without calling it.
    """

    def __init__(self, model: nn.Module, *, dtype: str = "bfloat16", keep_fp32: str = "") -> None:
        kept = check_mixed_precision(model, dtype, keep_fp32)
        self.dtype, self.device = dtype, next(model.parameters()).device.type
        if dtype != "float32":
            for module in kept:
                _keep_in_float32(module, self.device)

    def autocast(self) -> AbstractContextManager:
        """The region for the forward pass, and for nothing else: autograd repeats its dtypes."""
        if self.dtype == "float32":
            return nullcontext()
        return torch.autocast(self.device, getattr(torch, self.dtype))


def make_train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_fn: Callable,
    *,
    dtype: str = "bfloat16",
    keep_fp32: str = "",
) -> Callable:
    """Make the plain train step, computed in `dtype` over the model's float32 parameters.

    Args:
        model, optimizer: as ever; the model is put into training mode.
        loss_fn: `loss_fn(output, y)` is given float32.
        dtype, keep_fp32: as in `MixedPrecision`.

    Returns:
        `step(x, y) -> loss`, a float32 scalar on the device. x: a tuple of the model's positional
        arguments, a mapping of its keywords, or its one argument.

    Raises:
        As `MixedPrecision`.
    """
    precision = MixedPrecision(model, dtype=dtype, keep_fp32=keep_fp32)
    model.train()

    def step(x, y):
        optimizer.zero_grad(set_to_none=True)
        with precision.autocast():
            output = call(model, x)
        loss = loss_fn(to_float32(output), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


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
    from pt_impl.kit import runtime
    from pt_impl.kit.demo import Demo

    demo, steps = Demo("digits-cnn"), {}
    for dtype in ("float32", "bfloat16"):
        model, optimizer, loss_fn = demo.build()
        steps[dtype] = make_train_step(model, optimizer, loss_fn, dtype=dtype)
    print("dtype     ms a step  loss after it  ran in")
    for dtype, ms in demo.times(steps).items():
        loss = runtime.to_float(steps[dtype](*demo.batches[0]))
        ran = runtime.operator_dtypes(steps[dtype], *demo.batches[0])
        print(f"{dtype:10}{ms:9.2f}{loss:15.4f}  {ran}")


if __name__ == "__main__":
    main()
