"""What native export refuses."""

from pathlib import Path

import tensorflow as tf


def check_compiled(model: tf.keras.Model) -> None:
    """Raise NotImplementedError for layers that look up or hash words: XLA has no such kernels."""
    table = tf.saved_model.experimental.TrackableResource
    words = tf.keras.layers.TextVectorization, tf.keras.layers.Hashing
    for layer in model._flatten_layers():
        if isinstance(layer, words) or any(isinstance(v, table) for v in vars(layer).values()):
            raise NotImplementedError(
                f"XLA has no kernel for what {layer.name!r} looks up or hashes: do it in the input"
                " pipeline"
            )


def check_native_export(model: tf.keras.Model, path, precision: str) -> None:
    """Refuse what a SavedModel cannot hold, and a place where it cannot be."""
    if precision not in ("float32", "bfloat16"):
        raise ValueError(f"unknown precision {precision!r}: float32 or bfloat16")
    if precision == "bfloat16":
        raise NotImplementedError("a SavedModel computes as its model does: cast that before")
    if not model.built:
        raise ValueError("the model has no variables yet: call it once on an example input")
    if hasattr(tf.keras, "StatelessScope"):  # tf_keras's states are variables as all others
        layers = model._flatten_layers()
        recurrent = [layer for layer in layers if isinstance(layer, tf.keras.layers.RNN)]
        if names := [layer.name for layer in recurrent if layer.stateful]:
            raise NotImplementedError(
                f"{', '.join(names)} would lose the state that it keeps from call to call: make the"
                " model with stateful=False"
            )
    if not Path(path).parent.is_dir():
        raise FileNotFoundError(f"no folder {Path(path).parent}")
    if Path(path).exists() and not Path(path, "saved_model.pb").is_file():
        raise FileExistsError(f"{path} is there and no SavedModel: name another folder")
