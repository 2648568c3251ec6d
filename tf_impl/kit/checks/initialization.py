"""What initialization refuses: unknown schemes, and kernels that are not there or are computed."""

import tensorflow as tf


def check_initialization(model: tf.keras.Model, scheme: str, gain: float, schemes: tuple) -> None:
    """Raise ValueError for settings out of range, and for a model without variables yet.

    Raises NotImplementedError for kernels that are computed from others (spectral norm, LoRA,
    integers).
    """
    if scheme not in schemes or gain <= 0 or (scheme == "default" and gain != 1):
        raise ValueError(
            f"scheme is one of {', '.join(schemes)} and gain above 0 (1 with default), "
            f"not {scheme!r} and {gain}"
        )
    if not model.built:
        raise ValueError("the model has no variables yet: call it once on an example input")
    for layer in model._flatten_layers(include_self=False):
        computed = isinstance(layer, tf.keras.layers.SpectralNormalization)
        changed = getattr(layer, "lora_enabled", False) or getattr(layer, "quantization_mode", None)
        if computed or changed:
            raise NotImplementedError(
                f"{layer.name}: its kernel is computed from others: initialize first, then wrap, "
                "adapt or quantize"
            )
