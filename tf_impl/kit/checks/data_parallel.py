"""What data parallelism refuses: what Keras would do before the replicas' gradients are summed."""

from glob import glob

import tensorflow as tf


def check_data_parallel(model) -> None:
    """Raise NotImplementedError for a model that is made already."""
    if isinstance(model, tf.keras.Model):
        raise NotImplementedError("variables are mirrored where they are made: give the function")


def check_optimizer(optimizer) -> None:
    """Raise NotImplementedError for one that clips or scales the loss, or is a legacy one."""
    if not hasattr(optimizer, "build"):
        raise NotImplementedError(
            "a legacy optimizer: take the one of its name in keras.optimizers"
        )
    if not hasattr(tf.keras, "StatelessScope"):  # Keras 3
        return
    for name in ("clipnorm", "global_clipnorm", "clipvalue", "gradient_accumulation_steps"):
        if getattr(optimizer, name, None):
            raise NotImplementedError(
                f"{name}: Keras 3 does this on each replica, before gradients are summed"
            )
    if optimizer.use_ema and optimizer.ema_overwrite_frequency:
        raise NotImplementedError(
            "ema_overwrite_frequency: Keras 3 overwrites only outside of replicas: let"
            " finalize_variable_values do it after training"
        )
    scales = isinstance(optimizer, tf.keras.mixed_precision.LossScaleOptimizer)
    if scales or getattr(optimizer, "loss_scale_factor", None):
        raise NotImplementedError(
            "a scaled loss: Keras 3 looks for overflow on each replica, before gradients "
            "are summed: train in bfloat16, which needs no scale"
        )


def check_compiled(model: tf.keras.Model) -> None:
    """Raise NotImplementedError for a layer that looks up or hashes words."""
    table = tf.saved_model.experimental.TrackableResource
    words = tf.keras.layers.TextVectorization, tf.keras.layers.Hashing
    for layer in model._flatten_layers():
        if isinstance(layer, words) or any(isinstance(v, table) for v in vars(layer).values()):
            raise NotImplementedError(
                f"XLA has no kernel for what {layer.name!r} looks up or hashes: do it in the input"
                " pipeline"
            )


def check_dense(gradients: list) -> None:
    """Raise NotImplementedError for sparse gradients, whose mean over replicas is no mean."""
    if any(isinstance(own, tf.IndexedSlices) for own in gradients):
        raise NotImplementedError("synchronise_each: sparse gradients would count several times")


def check_communication(communication: str, ways: dict) -> None:
    """Raise ValueError for a way to exchange gradients that is not there."""
    if communication not in ways:
        raise ValueError(f"unknown communication {communication!r}: {', '.join(ways)}")


def check_tpu() -> None:
    """Raise NotImplementedError where there is no TPU."""
    if not glob("/dev/accel*") + glob("/dev/vfio/[0-9]*"):
        raise NotImplementedError("TPUStrategy needs a TPU, and this machine has none")


def check_cores(found: int, replicas: int) -> None:
    """Raise ValueError where a TPU has another number of cores than there are replicas."""
    if found != replicas:
        raise ValueError(f"a TPU of {found} cores, not {replicas}")
