"""What Keras's own trainer on TensorFlow refuses: other models, another backend, no compiler."""

import sys


def check_keras_backend(model) -> None:
    """Raise ValueError unless it is a Keras 3 model on TensorFlow."""
    keras = sys.modules.get("keras")
    if keras is None or not isinstance(model, keras.Model):
        raise ValueError(f"a {type(model).__name__} is no keras.Model")
    if keras.config.backend() != "tensorflow":
        raise ValueError(
            f"Keras computes with {keras.config.backend()}: set KERAS_BACKEND=tensorflow before it"
            " is imported"
        )


def check_compiled(model) -> None:
    """Raise NotImplementedError where Keras goes on without compiling, with no more than a warning.

    A layer may say that it can't be compiled (`supports_jit`).
    """
    if not model.jit_compile:
        raise NotImplementedError("Keras does not compile it: a layer of it has supports_jit=False")
