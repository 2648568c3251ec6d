"""What Keras's own trainer on PyTorch refuses: other models, another backend, no compiler."""

import sys


def check_keras_backend(model) -> None:
    """Raise ValueError unless it is a Keras model on PyTorch."""
    keras = sys.modules.get("keras")
    if keras is None or not isinstance(model, keras.Model):
        raise ValueError(f"a {type(model).__name__} is no keras.Model")
    if keras.config.backend() != "torch":
        raise ValueError(
            f"Keras computes with {keras.config.backend()}: set KERAS_BACKEND=torch before it is"
            " imported"
        )


def check_compiled(model) -> None:
    """Raise NotImplementedError where Keras goes on without compiling, with no more than a warning.

    A layer may say that it can't be compiled (`supports_jit`).
    """
    if not model.jit_compile:
        raise NotImplementedError("Keras does not compile it: a layer of it has supports_jit=False")
