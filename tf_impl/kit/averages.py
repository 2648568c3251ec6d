"""Averages on any model: BatchNormalization's statistics made anew, with nothing else moved.

Twin: `pt_impl/kit/averages.py`.
Where the frameworks differ: Keras has the mode per call, so that dropout would run while statistics
are made: it is switched off, and what else draws at random is refused. A module has a mode.
"""

import itertools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import numpy as np
import tensorflow as tf

from tf_impl.kit.calling import call


@contextmanager
def fresh_statistics(model: tf.keras.Model) -> Iterator[list]:
    """Let moving statistics be the mean over the batches that are called inside, in training.

    Yields the layers that have such statistics and are trainable. Nothing else changes, and no
    statistics where the context raises. Dropout is off; `check_draws` looks for other draws.
    """
    kind = tf.keras.layers.BatchNormalization
    layers = list(model._flatten_layers(include_self=False))
    norms = [layer for layer in layers if isinstance(layer, kind) and layer.trainable]
    made = {id(v) for layer in norms for v in (layer.moving_mean, layer.moving_variance)}
    # All variables: SpectralNormalization writes to its kernel.
    kept = [(v, tf.identity(v)) for v in model.variables] if norms else []
    before = [(layer, layer.momentum, vars(layer).get("call")) for layer in norms]
    dropouts = _switch_off_dropout(layers) if norms else []
    done, graphs = False, tf.config.functions_run_eagerly()
    tf.config.run_functions_eagerly(True)  # a `tf.function` within would keep the first momentum
    try:
        yield norms
        done = True
    finally:
        tf.config.run_functions_eagerly(graphs)
        for layer, momentum, own in before:
            layer.momentum = momentum
            vars(layer).pop("call", None)
            if own:
                layer.call = own
        for layer, rate in dropouts:
            layer.rate = rate
        for variable, value in kept:
            if not done or id(variable) not in made:
                variable.assign(value)


def average_over_calls(norms: Iterable) -> None:
    """Let statistics be the mean over calls: a pass may have several of a layer that is shared."""
    for layer in norms:
        _count_calls(layer)


def check_draws(model: tf.keras.Model, x) -> None:
    """Raise NotImplementedError where two calls differ: augmentation, noise, recurrent dropout."""
    kept = [(v, tf.identity(v)) for v in model.variables]
    outputs = []
    for _ in range(2):
        outputs.append(tf.nest.flatten(call(model, x, training=True)))
        for variable, value in kept:
            if value.dtype.is_floating:  # all but seeds, by which a draw may differ
                variable.assign(value)
    for variable, value in kept:
        variable.assign(value)
    pairs = zip(*outputs, strict=True)
    if not all(np.allclose(*pair, rtol=1e-3, equal_nan=True) for pair in pairs):
        raise NotImplementedError(
            "a layer other than dropout draws at random while the model trains, which would be in "
            "the statistics: switch it off first"
        )


def _switch_off_dropout(layers: list) -> list[tuple]:
    """Set every dropout's rate to zero; return (layer, rate) of each."""
    kinds = tf.keras.layers.Dropout, tf.keras.layers.GaussianDropout, tf.keras.layers.AlphaDropout
    rates = [(layer, layer.rate) for layer in layers if isinstance(layer, kinds)]
    for layer, _ in rates:
        layer.rate = 0.0
    return rates


def _count_calls(layer) -> None:
    own, counted = layer.call, itertools.count()

    def counting(x, training=None, **others):
        if training:
            seen = next(counted)
            layer.momentum = seen / (seen + 1)
        return own(x, training=training, **others)

    layer.call = counting
