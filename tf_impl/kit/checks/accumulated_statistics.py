"""What one update of BatchNorm's statistics a step refuses."""

import tensorflow as tf


def check_accumulated_statistics(model: tf.keras.Model) -> None:
    """Raise NotImplementedError for layers that train on their moving statistics."""
    kind = tf.keras.layers.BatchNormalization
    # `model.layers` ends at the first level: what custom layers contain is listed only here.
    norms = [layer for layer in model._flatten_layers() if isinstance(layer, kind)]
    if any(norm.renorm for norm in norms):
        raise NotImplementedError(
            "accumulated statistics: batch renormalisation trains on its statistics"
        )
