"""What half-width arithmetic refuses: models and devices that cannot compute in it."""

import tensorflow as tf

DTYPES = ("bfloat16", "float16", "float32")


def check_mixed_precision(model: tf.keras.Model, dtype: str, keep_fp32: str) -> list:
    """Check the settings against model and device; return the layers to keep in float32.

    Raises ValueError for an unknown dtype or layer, half-width variables and a model without any;
    NotImplementedError where Keras cannot switch the model, or the device cannot compute in it.
    """
    if dtype not in DTYPES:
        raise ValueError(f"unknown dtype {dtype!r}: choose one of {', '.join(DTYPES)}")
    if not model.built:
        raise ValueError("the model has no variables yet: call it once on an example input")
    kept = _find_layers(model, keep_fp32)
    if dtype == "float32":
        return kept
    if type(model).dtype_policy.fset is None:
        raise NotImplementedError(
            "tf_keras cannot switch a built model: use Keras 3, or build the model after"
            f" tf_keras.mixed_precision.set_global_policy({f'mixed_{dtype}'!r})"
        )
    for variable in model.trainable_variables:
        if variable.dtype in ("bfloat16", "float16"):
            raise ValueError(f"master weights are float32, but {variable.path} is {variable.dtype}")
    for gpu in tf.config.list_physical_devices("GPU"):
        details = tf.config.experimental.get_device_details(gpu)
        if dtype == "bfloat16" and details.get("compute_capability", (8, 0)) < (8, 0):
            raise NotImplementedError("this GPU has no bfloat16 arithmetic: choose float16")
    return kept


def _find_layers(model: tf.keras.Model, names: str) -> list:
    """Return the named layers, what they contain, and layers whose name goes on with a dot."""
    # `model.layers` ends at the first level: what custom layers contain is listed only here.
    layers = list(model._flatten_layers(include_self=False))
    found = []
    for name in filter(None, (part.strip() for part in names.split(","))):
        own = [layer for layer in layers if f"{layer.name}.".startswith(f"{name}.")]
        if not own:
            known = ", ".join(layer.name for layer in layers)
            raise ValueError(f"keep_fp32: the model has no layer {name!r}; it has {known}")
        found += [inside for layer in own for inside in layer._flatten_layers()]
    return found
