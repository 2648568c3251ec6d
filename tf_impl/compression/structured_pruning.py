"""Structured pruning: remove whole channels, which gives a smaller dense model.

    model = remove_channels(model, x[:2], share=0.5)
    model.compile(tf.keras.optimizers.SGD(0.01), loss)  # a new optimizer; train the model on

What it changes: each convolution and dense layer loses the channels whose filters have the smallest
L1 norm (Li et al., 2017, section 3.1). Their normalisation and the weights of later layers that
read them go, too. Layers whose outputs are added, or filtered one by one, lose the same channels: a
dependency group (Fang et al., 2023). The result is an ordinary dense model. Removing a share s
leaves about (1 - s)^2 of the arithmetic and weights.

Its twin: `pt_impl/compression/structured_pruning.py`, which says where the frameworks differ.

When it helps and when it hurts: it makes a model faster on any hardware, in any runtime. It costs
more accuracy than pruning the same share of single weights. Training the small model from random
weights can be as good (Liu et al., 2019). Kernels gain little if the remaining channels no longer
fill vector registers: prefer multiples of 8 or 16.

Run it alone: `python -m tf_impl.compression.structured_pruning` prints sizes and times of smaller
models.

Copy with it: `tf_impl/kit/channels.py`, `tf_impl/kit/checks/structured_pruning.py`.
"""

import tempfile
import warnings
from inspect import isfunction

import numpy as np
import tensorflow as tf

from tf_impl.kit.channels import Channels, is_depthwise, makes_channels
from tf_impl.kit.checks.structured_pruning import (
    Group,
    check_groups,
    check_structured_pruning,
    fault,
    groups_to_cut,
    in_words,
)

# What a layer's configuration says of the channels that it makes.
_WIDTHS = ("units", "filters", "output_dim", "projection_dim")


def remove_channels(model: tf.keras.Model, x, *, share: float) -> tf.keras.Model:
    """Return a smaller copy of `model`: `share` of the channels of its layers are gone.

    Cut are convolutions and `Dense`, but those whose channels are the model's outputs. What else
    can't be followed from channel to channel stays whole, and a warning names it. `model` itself
    is left as it was (`Lambda` layers are shared); make a new optimizer for the copy.

    Args:
        model: functional or Sequential.
        x: example input, a structure as `fit` hands it over.
        share: at least 0 and below 1. Of n channels the round(n * (1 - share)) whose filters have
            the largest L1 norm stay, at least one, in their order; of equal ones the first. Norms
            of layers that make the same channels are added up. Where a convolution or
            `GroupNormalization` divides channels into groups, each loses those in the same places.

    Raises:
        ValueError: another share, a model without variables, one with pruning masks, and one
            without such layers.
        NotImplementedError, with the reason: a subclassed model, or no layer can be cut such that
            the copy's outputs are those of the model in which nothing reads what is gone.

    Source: Li et al., 2017, "Pruning Filters for Efficient ConvNets"; Fang et al., 2023, "DepGraph:
    Towards Any Structural Pruning".
    """
    check_structured_pruning(model, share)
    channels = Channels(model)
    groups, uncut = groups_to_cut(model, channels)
    removals = [(group, _weakest(channels, group, share)) for group in groups]
    smaller, left, faults = _remove(model, x, channels, removals)
    uncut |= faults
    check_groups(left, uncut)
    for group, weakest in left:
        if share and not weakest:
            size = len(group.channels) // group.runs
            uncut[group.name] = f"its groups of {size} channels lose none at this share"
    if uncut:
        warnings.warn(f"left whole: {in_words(uncut)}", stacklevel=2)
    return smaller


def _weakest(channels: Channels, group: Group, share: float) -> set[int]:
    """The channels of a group that go. Norms are summed in float64, so that twins agree."""
    norms = dict.fromkeys(group.channels, 0.0)
    for layer, uses in channels.uses.items():
        use = uses[-1 if makes_channels(layer) else 0]
        here = channels.numbers(use.channels)
        if (makes_channels(layer) or is_depthwise(layer)) and not norms.keys().isdisjoint(here):
            kernel = np.abs(np.asarray(layer.get_weights()[0], np.float64))
            sums = np.moveaxis(kernel, use.axis, 0).reshape(len(here), -1).sum(1)
            for number, norm in zip(here, sums, strict=True):
                if number in norms:
                    norms[number] += norm
    runs = np.array(group.channels).reshape(group.runs, -1)
    sums = np.array(list(norms.values())).reshape(group.runs, -1).sum(0)
    count = max(round(len(sums) * (1 - share)), 1)
    return set(runs[:, np.argsort(-sums, kind="stable")[count:]].ravel().tolist())


def _remove(model: tf.keras.Model, x, channels: Channels, removals: list) -> tuple:
    """Return a copy without channels, those of `removals` that it lost, and why it kept others."""
    smaller, why = _cut(model, x, channels, removals)
    if not why:
        return smaller, removals, {}
    uncut = _at_fault(model, x, channels, removals, why)
    left = [(group, weakest) for group, weakest in removals if group.name not in uncut]
    smaller, why = _cut(model, x, channels, left)
    if why:  # they are at fault only together
        return smaller, [], uncut | {group.name: why for group, _ in left}
    return smaller, left, uncut


def _at_fault(
    model: tf.keras.Model, x, channels: Channels, removals: list, why: str
) -> dict[str, str]:
    """Find by halves which groups are at fault by themselves, of several that are together."""
    if len(removals) == 1:
        return {removals[0][0].name: why}
    found = {}
    for half in (removals[: len(removals) // 2], removals[len(removals) // 2 :]):
        _, why = _cut(model, x, channels, half)
        if why:
            found |= _at_fault(model, x, channels, half, why)
    return found


def _cut(model: tf.keras.Model, x, channels: Channels, removals: list) -> tuple:
    """Return a copy without the channels, and what is wrong with it, if anything."""
    removed = set().union(*(weakest for _, weakest in removals))
    uses = [
        [(use, channels.gone(use.channels, removed)) for use in channels.uses.get(layer, ())]
        for layer in model._flatten_layers()
    ]
    try:
        copy = _clone(model, channels, set())
        why = fault(copy, model, x, [[] for _ in uses])
        if why or not removed:
            return copy, why and "Keras makes another model of its configuration"
        smaller = _clone(model, channels, removed)
        return smaller, fault(smaller, copy, x, uses)
    except Exception as error:  # whatever layers raise of their new shapes
        return model, f"Keras can't make the model anew: {' '.join(str(error).split())}"


def _clone(model: tf.keras.Model, channels: Channels, removed: set[int]) -> tf.keras.Model:
    """A clone whose layers have what is left of their weights, and all other state."""
    copies = {}

    def copy(layer):
        # Keras 3 hands over operators that are no layers, and cannot make a lambda anew.
        if not isinstance(layer, tf.keras.layers.Layer) or type(layer) is tf.keras.layers.Lambda:
            return layer
        if layer not in copies:
            config = layer.get_config() | _settings(layer, channels, removed)
            if "activation" in config and isfunction(getattr(layer, "activation", None)):
                config["activation"] = layer.activation  # others may have its name
            copies[layer] = layer.__class__.from_config(config)
        return copies[layer]

    smaller = tf.keras.models.clone_model(model, clone_function=copy)
    for layer, twin in copies.items():
        weights = layer.get_weights()
        for use in channels.uses.get(layer, ()):
            stays = ~channels.gone(use.channels, removed)
            if use.weight >= 0:
                stays = stays[: weights[use.weight].shape[use.axis]]  # the same in each run
                weights[use.weight] = np.compress(stays, weights[use.weight], axis=use.axis)
        twin.set_weights(weights)
        _copy_state(list(zip(layer._flatten_layers(), twin._flatten_layers(), strict=True)))
    return smaller


def _settings(layer, channels: Channels, removed: set[int]) -> dict:
    """What the configuration of a layer says of its channels."""
    config = layer.get_config()
    if layer in channels.shapes:
        left = int((~channels.gone(channels.shapes[layer], removed)).sum())
        *shape, last = config["target_shape"]
        return {"target_shape": (*shape, last if last == -1 else left)}
    uses = [use for use in channels.uses.get(layer, ()) if use.side != "in"]
    if not uses:
        return {}
    left = int((~channels.gone(uses[-1].channels, removed)).sum())
    if "value_dim" in config:  # attention; tf_keras would build with the shapes
        shapes = ("query_shape", "key_shape", "value_shape")
        return {"output_shape": (left,)} | {name: None for name in shapes if name in config}
    return {name: left for name in _WIDTHS if name in config}


def _copy_state(twins: list[tuple]) -> None:
    """Hand over what weights do not say, of layers and those in them."""
    for layer, twin in twins:
        twin.trainable = layer.trainable  # and of all inside, whose turn comes later
    for layer, twin in twins:
        for own, other in zip(layer.weights, twin.weights, strict=True):
            if other.trainable and not own.trainable:  # frozen by itself, in Keras 3
                other.trainable = False
        if layer.weights and hasattr(twin, "finalize_state"):
            twin.finalize_state()  # what preprocessing layers compute from their weights
        if hasattr(layer, "load_assets") and hasattr(layer, "get_vocabulary"):
            with tempfile.TemporaryDirectory() as folder:
                layer.save_assets(folder)
                twin.load_assets(folder)


def main() -> None:
    """Print the trained digits CNN with fewer and fewer channels, each trained on."""
    from tf_impl.kit import models, training
    from tf_impl.kit.demo import Demo

    demo = Demo("digits-cnn")
    recipe = demo.task.recipe
    trained, optimizer, loss_fn = demo.build()
    demo.fit(training.make_train_step(trained, optimizer, loss_fn), epochs=recipe.epochs)
    print("removed  parameters  ms a batch  accuracy")
    for share in (0.0, 0.5, 0.8, 0.9):
        model = remove_channels(trained, demo.test[0][:2], share=share)
        optimizer = training.make_optimizer(model, recipe)
        demo.fit(training.make_train_step(model, optimizer, loss_fn), epochs=recipe.epochs)
        predict = training.make_predict(model)
        ms = demo.times({"": lambda x, y, predict=predict: predict(x)})[""]
        print(f"{share:7.0%}{models.parameter_count(model):12}{ms:12.2f}{demo.score(model):10.1f}")


if __name__ == "__main__":
    main()
