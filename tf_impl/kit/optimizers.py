"""Keras optimizers for the parts of a model on several devices, and what can't be in parts.

It has no twin: groups of parameters say in PyTorch what decays.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import tensorflow as tf

_UNDECAYED = "_exclude_from_weight_decay"  # of an optimizer: variables; with more behind it, names


def copy_optimizer(optimizer, variables: list, originals: list | None = None):
    """An optimizer of the same settings, built for `variables`.

    Its configuration lacks which variables no weight decay takes (`exclude_from_weight_decay`).
    originals: those of the model that it was made for, in the same order, where names differ.
    Raises NotImplementedError where a variable is left out that is not among them.
    """
    if not hasattr(optimizer, "build"):
        raise NotImplementedError(
            "a legacy optimizer: take the one of its name in keras.optimizers"
        )
    copy = type(optimizer).from_config(_settings(optimizer))
    ours, theirs = (getattr(each, "inner_optimizer", each) for each in (optimizer, copy))
    told = {name: value for name, value in vars(ours).items() if name.startswith(_UNDECAYED)}
    if told:
        originals = variables if originals is None else originals
        known = {theirs._var_key(variable) for variable in originals}
        if not known.issuperset(told.get(_UNDECAYED) or ()):
            raise NotImplementedError(
                "exclude_from_weight_decay: variables of another model; give names (var_names)"
            )
        vars(theirs).update(told, _exclude_from_weight_decay_cache={})
        pairs = zip(variables, originals, strict=True)
        left_out = [own for own, original in pairs if not theirs._use_weight_decay(original)]
        theirs.exclude_from_weight_decay(var_list=left_out)
    copy.build(variables)
    return copy


def _settings(optimizer) -> dict:
    """Its configuration, with a schedule itself: one of the user's may have none."""
    rate = getattr(optimizer, "_learning_rate", None)
    if not isinstance(rate, tf.keras.optimizers.schedules.LearningRateSchedule):
        return optimizer.get_config()
    optimizer._learning_rate = 0.0
    try:
        return optimizer.get_config() | {"learning_rate": rate}
    finally:
        optimizer._learning_rate = rate


# What model parallelism refuses -------------------------------------------------------------------


def check_model_parallel(samples: int, stages: int, micro_batches: int, schedule: str) -> None:
    """Raise ValueError for a schedule that is not there, and numbers that don't fit."""
    if schedule not in ("gpipe", "1f1b"):
        raise ValueError(f"schedule must be gpipe or 1f1b, not {schedule!r}")
    if micro_batches < 1 or samples % micro_batches:
        raise ValueError(f"{micro_batches} micro_batches do not divide a batch of {samples}")
    if schedule == "1f1b" and micro_batches < stages:
        raise ValueError(f"1f1b with {stages} stages needs {stages} micro_batches or more")


def check_stage_optimizer(optimizer) -> None:
    """Raise NotImplementedError for one that looks at the gradients of all stages together."""
    if getattr(optimizer, "global_clipnorm", None):
        raise NotImplementedError("global_clipnorm: a stage would clip by the norm of its own part")
    if _scales(optimizer):
        raise NotImplementedError(
            "a scaled loss: a stage would look for overflow in its own part: train in bfloat16, "
            "which needs no scale"
        )


def check_cut(model, names: list[str], devices: int) -> None:
    """Raise ValueError for layers that begin no stage, NotImplementedError for other models."""
    if not getattr(model, "inputs", None) or not getattr(model, "outputs", None):
        raise NotImplementedError("only a functional or Sequential model is cut")
    known = [layer.name for layer in model.layers]
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"cut: there is no layer {unknown[0]!r}; there are {', '.join(known)}")
    if len(names) + 1 > devices:
        raise ValueError(f"{len(names) + 1} stages need as many devices, not {devices}")


@contextmanager
def cutting(names: list[str]) -> Iterator[None]:
    """Raise NotImplementedError where Keras makes no model of what lies between two layers."""
    try:
        yield
    except ValueError as error:
        reason = str(error).splitlines()[0]
        raise NotImplementedError(f"cut: {', '.join(names)} can't be: {reason}") from None


def check_parts(parts: list, names: list[str]) -> None:
    """Raise NotImplementedError for stages that share a weight."""
    owned = [key for part in parts for key in {id(weight) for weight in part.weights}]
    if len(set(owned)) < len(owned):
        raise NotImplementedError(f"cut: {', '.join(names)} can't be: stages share a weight")


# What tensor parallelism refuses ------------------------------------------------------------------


def check_keras() -> None:
    """Raise NotImplementedError in tf_keras."""
    if not hasattr(tf.keras, "StatelessScope"):
        raise NotImplementedError("tf_keras can't call a model without its variables: use Keras 3")


def check_dense(layer) -> None:
    """Raise NotImplementedError for a layer other than Dense."""
    if not isinstance(layer, tf.keras.layers.Dense):
        kind = type(layer).__name__
        raise NotImplementedError(f"pairs: {layer.name} is a {kind}, only Dense is split")


def check_tensor_parallel(model, optimizer) -> None:
    """Raise NotImplementedError for an optimizer or a weight that DTensor has no way to train."""
    for layer in model._flatten_layers():
        # A subclass with another `call` may give a dense gradient, as DTensor does.
        sparse = getattr(type(layer), "call", None) is tf.keras.layers.Embedding.call
        if sparse and not isinstance(optimizer, tf.keras.optimizers.SGD):
            raise NotImplementedError(
                f"on one device {type(optimizer).__name__} squares the sparse gradient of "
                f"{layer.name!r} otherwise: only SGD trains an Embedding in parts as there"
            )
    for variable in model.trainable_variables:
        if variable.constraint is not None:
            name = variable.path.removeprefix(f"{model.name}/")
            raise NotImplementedError(f"{name} has a constraint: variables of DTensor have none")
    if _scales(optimizer):
        raise NotImplementedError("a scaled loss: train in bfloat16, which needs no scale")
    if isinstance(optimizer, getattr(tf.keras.optimizers, "Muon", ())):
        raise NotImplementedError("Muon asks for the paths of variables: DTensor's have none")


def _scales(optimizer) -> bool:
    scales = isinstance(optimizer, tf.keras.mixed_precision.LossScaleOptimizer)
    return bool(scales or getattr(optimizer, "loss_scale_factor", None))


def stateless_call(model: tf.keras.Model, trained: list, state: list, given: tuple) -> tuple:
    """Return what `model.stateless_call(trained, state, ..., training=True)` does, and its losses.

    given: the positional and the named arguments of the call.

    What a layer assigns to its state and then reads is a constant to the gradient, as it is in a
    variable: Keras's own hands back the tensor that was assigned.
    """

    class Scope(tf.keras.StatelessScope):
        def add_update(self, update):
            variable, value = update
            super().add_update((variable, tf.stop_gradient(value)))

    own = [*model.trainable_variables, *model.non_trainable_variables]
    with Scope(list(zip(own, [*trained, *state], strict=True)), collect_losses=True) as scope:
        output = model(*given[0], **given[1], training=True)
        losses = model.losses
    changed = [scope.get_current_value(variable) for variable in model.non_trainable_variables]
    return output, changed, losses
