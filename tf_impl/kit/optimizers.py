"""A Keras optimizer made anew for other variables.

It has no twin: groups of parameters say in PyTorch what decays.
"""

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
    """Its configuration, with a schedule itself: one of the user's may have none of its own."""
    rate = getattr(optimizer, "_learning_rate", None)
    if not isinstance(rate, tf.keras.optimizers.schedules.LearningRateSchedule):
        return optimizer.get_config()
    optimizer._learning_rate = 0.0
    try:
        return optimizer.get_config() | {"learning_rate": rate}
    finally:
        optimizer._learning_rate = rate
