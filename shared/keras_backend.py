"""What Keras's own trainer refuses: other models, another backend, no compiler."""

from __future__ import annotations

import inspect
import sys


def check_keras_backend(model, backend: str) -> None:
    """Raise ValueError unless it is a Keras 3 model on this backend, such as "torch"."""
    keras = sys.modules.get("keras")
    if keras is None or not isinstance(model, keras.Model):
        raise ValueError(f"a {type(model).__name__} is no keras.Model")
    if keras.config.backend() != backend:
        raise ValueError(
            f"Keras computes with {keras.config.backend()}: set KERAS_BACKEND={backend} before it"
            " is imported"
        )
    _check_call(model)


def _check_call(model) -> None:
    """Raise NotImplementedError where `call` needs more than the one argument that Keras gives."""
    needed = [
        one.name
        for one in inspect.signature(model.call).parameters.values()
        if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)
        and one.default is one.empty
        and one.name not in ("training", "mask")
    ]
    if len(needed) > 1:
        raise NotImplementedError(
            f"Keras hands a model one argument, and its call takes {' and '.join(needed)}: let it "
            "take them as one tuple or dict"
        )


def check_compiled(model) -> None:
    """Raise NotImplementedError where Keras goes on without compiling, with no more than a warning.

    A layer may say that it can't be compiled (`supports_jit`).
    """
    if not model.jit_compile:
        raise NotImplementedError("Keras does not compile it: a layer of it has supports_jit=False")
