"""TorchScript, torch's old compiler, now deprecated: the rows of compilation are compared with it.

It has no twin: `tf.function` is TensorFlow's tracer.
"""

from collections.abc import Mapping

import torch
from torch import nn


def traced_model(model: nn.Module, x) -> nn.Module:
    """Return the model as TorchScript records one call on `x`, to use in its place.

    It shares the parameters, and keeps mode (training or evaluation) and branches of that call.
    Raises NotImplementedError with torch's reason where the call cannot be recorded.
    """
    mapping = isinstance(x, Mapping)
    example = {"example_kwarg_inputs": dict(x)} if mapping else {"example_inputs": x}
    # With its place: a model may put another tensor there.
    before = [
        (module, place, buffer, buffer.clone())
        for module in model.modules()
        for place, buffer in module.named_buffers(recurse=False)
    ]
    try:
        return torch.jit.trace(model, check_trace=False, **example)
    except RuntimeError as error:
        raise _refusal(error) from error
    finally:  # recording ran the model, which leaves a mark on BatchNorm's statistics
        for module, place, buffer, value in before:
            setattr(module, place, buffer.copy_(value))


def scripted_model(model: nn.Module) -> nn.Module:
    """Return the model as TorchScript reads it from its source, with the same parameters.

    Raises NotImplementedError with torch's reason where TorchScript lacks what the source uses.
    """
    try:
        return torch.jit.script(model)
    except (RuntimeError, torch.jit.frontend.FrontendError) as error:
        raise _refusal(error) from error


def _refusal(error: Exception) -> NotImplementedError:
    reason = next(line for line in str(error).splitlines() if line.strip())
    return NotImplementedError(f"TorchScript refuses the model: {reason.strip(' :')}")
