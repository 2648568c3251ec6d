"""What structured pruning refuses: models without channels to take, and copies that go wrong."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from tf_impl.kit.channels import Channels, kind_of, makes_channels


class Group(NamedTuple):
    """Channels that go together: all that a layer makes, and those that others make of them."""

    name: str  # of the layer
    channels: list[int]  # their numbers
    runs: int  # into how many parts layers divide them, such as grouped convolutions


def check_structured_pruning(model: tf.keras.Model, share: float) -> None:
    """Raise ValueError for another share, no variables, pruning masks, and no layers to cut."""
    if not 0.0 <= share < 1.0:
        raise ValueError(f"share must be at least 0 and below 1, not {share!r}")
    if not model.built:
        raise ValueError("the model has no variables yet: call it once on an example input")
    for layer in model._flatten_layers():  # of tfmot, or a `call` over a mask, which no copy has
        if hasattr(layer, "pruning_obj") or hasattr(vars(layer).get("call"), "mask"):
            raise ValueError("the model has pruning masks: finalize it first")
    if not any(makes_channels(layer) for layer in model._flatten_layers()):
        raise ValueError("the model has no convolution or dense layer to take channels from")


def groups_to_cut(model: tf.keras.Model, channels: Channels) -> tuple[list[Group], dict[str, str]]:
    """Return the groups that may be cut, and the layers that stay whole: name -> why.

    Layers that make the model's outputs are in neither.
    """
    groups, whole, seen, made = [], {}, set(), {}
    for layer in filter(makes_channels, model._flatten_layers()):
        uses = channels.uses.get(layer)
        made[layer] = channels.numbers(uses[-1].channels) if uses else []
    # The widest first: what a narrower one makes may be a part of it.
    for layer, numbers in sorted(made.items(), key=lambda item: -len(item[1])):
        if not numbers:
            whole[layer.name] = channels.refused.get(layer, "it is within another layer")
        elif layer not in seen:
            seen |= {other for other in made if not set(numbers).isdisjoint(made[other])}
            runs = _runs(channels, numbers)
            reasons = [channels.stays[number] for number in numbers if number in channels.stays]
            if any(reasons):
                whole[layer.name] = next(filter(None, reasons))
            elif runs is None and not reasons:
                whole[layer.name] = "groups of channels do not fit together"
            elif not reasons:
                groups.append(Group(layer.name, numbers, runs))
    return groups, whole


def _runs(channels: Channels, numbers: list[int]) -> int | None:
    """Into how many equal runs grouped layers divide the channels; None if they do not."""
    runs = 1
    if len(set(numbers)) < len(numbers):
        return None
    for use in (use for uses in channels.uses.values() for use in uses if use.runs > 1):
        here = channels.numbers(use.channels)
        if not set(here).isdisjoint(numbers):
            if here != numbers or max(use.runs, runs) % min(use.runs, runs):
                return None
            runs = max(use.runs, runs)
    return runs


def check_groups(groups: list[Group], whole: dict[str, str]) -> None:
    """Raise NotImplementedError where no group of channels is left to cut."""
    if not groups:
        reason = in_words(whole) or "all of them are its outputs"
        raise NotImplementedError(f"no layer of the model can lose channels: {reason}")


def in_words(whole: dict[str, str]) -> str:
    """Return the first three layers that stay whole, with their reasons."""
    said = [f"{name!r}: {reason}" for name, reason in list(whole.items())[:3]]
    return "; ".join(said) + (f"; and {len(whole) - 3} more" if len(whole) > 3 else "")


def fault(smaller: tf.keras.Model, copy: tf.keras.Model, x, uses: list) -> str:
    """Return why the smaller model does not compute what the model does without the channels.

    "" where it does: that is the model in which no layer reads them, and in which they hold noise,
    so that whatever else depends on them shows.

    Args:
        copy: of the whole model; it is left as it is.
        uses: of each layer that both models have in this order, pairs of a use and of which of its
            channels are gone, as booleans.
    """
    found = _outputs(smaller, x)
    with _unread(copy, smaller, uses):
        wanted = _outputs(copy, x)
    for ours, theirs in zip(found, wanted, strict=True):
        same = ours.shape == theirs.shape
        off = np.linalg.norm(ours - theirs) if same else np.inf
        if not off <= 1e-4 * np.linalg.norm(theirs) + 1e-12:
            return "the smaller model computes something else: its channels can't be followed"
    return ""


def _outputs(model: tf.keras.Model, x) -> list[np.ndarray]:
    return [np.asarray(part, np.float64) for part in tf.nest.flatten(model(x, training=False))]


@contextmanager
def _unread(model: tf.keras.Model, smaller: tf.keras.Model, uses: list) -> Iterator[None]:
    """Until the context ends, no layer of the model reads the channels, and they hold noise."""
    random, before, patched = np.random.default_rng(0), [], []
    layers = zip(model._flatten_layers(), smaller._flatten_layers(), uses, strict=True)
    try:
        for layer, less, own in layers:
            if not any(gone.any() for _, gone in own):
                continue
            before.append((layer, layer.get_weights()))
            weights = layer.get_weights()
            for use, gone in own:
                if use.side != "both":
                    part = np.moveaxis(weights[use.weight], use.axis, 0)  # a view
                    gone = gone[: len(part)]  # of a grouped convolution: the same in each run
                    loud = 100 * (1 + np.abs(part).max()) * (use.side == "out")
                    part[gone] = random.normal(size=part[gone].shape) * loud
            layer.set_weights(weights)
            if kind_of(layer) in ("LayerNormalization", "GroupNormalization"):
                patched.append(layer)
                layer.call = partial(_normalize_rest, less, np.flatnonzero(~own[0][1]))
        yield
    finally:
        for layer in patched:
            del layer.call
        for layer, weights in before:
            layer.set_weights(weights)


def _normalize_rest(smaller, rest: np.ndarray, inputs, **_):
    """Of a norm over channels: what the smaller one makes of those that stay; the others give 0."""
    part = smaller(tf.gather(tf.convert_to_tensor(inputs), rest, axis=-1))
    return tf.matmul(part, tf.one_hot(rest, inputs.shape[-1], dtype=part.dtype))
