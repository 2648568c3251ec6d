"""Averaged weights: use an exponential (EMA) or equal (SWA) average of weights after training.

    average = make_exponential_average(model, decay=0.999)
    average.update_parameters(model)  # after each step
    with averaged(model, average):  # for an evaluation
        update_statistics(model, batches)  # of a model with BatchNorm

What it changes: the weights that are used after training, not the training. An exponential average
remembers about 1 / (1 - decay) steps (Polyak and Juditsky, 1992; Tarvainen and Valpola, 2017, "Mean
teachers", section 2). An equal average (SWA) is taken once per epoch at the end of a training whose
learning rate does not fall (Izmailov et al., 2018, "Averaging Weights Leads to Wider Optima and
Better Generalization"). BatchNorm's statistics are not averaged: `update_statistics` computes them
again from data (section 3.2).

Its twin: `pt_impl/recipes/averaging.py`, which says where the frameworks differ.

When it helps and when it hurts: it costs a copy of the weights, a pass over them per step, and
nothing at inference. It helps most if the learning rate does not fall. A falling rate has the same
effect, so together they gain little. If the average remembers more steps than the training has, it
is worse than the last weights.

Run it alone: `python -m tf_impl.recipes.averaging` prints accuracies with and without.

Copy with it: `tf_impl/kit/averages.py`, `tf_impl/kit/calling.py`.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import numpy as np
import tensorflow as tf

from tf_impl.kit.averages import average_over_calls, check_draws, fresh_statistics
from tf_impl.kit.calling import at_least_float32, call


class AveragedWeights:
    """A running average of the variables that train when it is made; see the functions below."""

    def __init__(self, model: tf.keras.Model, share: Callable[[tf.Tensor], tf.Tensor]) -> None:
        if not model.built:
            raise ValueError("the model has no variables yet: call it once on an example input")
        self._averaged = list(model.trainable_variables)
        # tf.Variable itself: Keras's own may be in a distribution's or a policy's disguise.
        self.variables = [tf.Variable(_wide(v), trainable=False) for v in self._averaged]
        self.n_averaged = tf.Variable(0, dtype=tf.int64, trainable=False)
        self._share = share

    def update_parameters(self, model: tf.keras.Model) -> None:
        """Take in the model's weights as they are."""
        self._update([_wide(variable) for variable in self.averaged_of(model)])

    def averaged_of(self, model: tf.keras.Model) -> list:
        """The variables of `model`, or of another that is made alike, that this is the average of.

        Which of them train may have changed since.
        """
        own = {id(variable) for variable in model.weights}
        same = all(id(variable) in own for variable in self._averaged)
        return self._averaged if same else model.trainable_variables

    def get_weights(self) -> list[np.ndarray]:
        """All that it goes on from, for a checkpoint: the count of updates, and the average."""
        return [np.array(variable) for variable in (self.n_averaged, *self.variables)]

    def set_weights(self, weights: list[np.ndarray]) -> None:
        """Go on from what `get_weights` returned; ValueError where it is of another model."""
        own = [self.n_averaged, *self.variables]
        if [np.shape(each) for each in weights] != [tuple(each.shape) for each in own]:
            raise ValueError("these are weights of the average of another model")
        _write(own, weights)

    @tf.function(jit_compile=False)
    def _update(self, weights) -> None:
        new = tf.where(self.n_averaged == 0, tf.ones([], tf.float64), self._share(self.n_averaged))
        for average, weight in zip(self.variables, weights, strict=True):
            average.assign_add(tf.cast(new, average.dtype) * (weight - average))
        self.n_averaged.assign_add(1)


def make_exponential_average(model: tf.keras.Model, *, decay: float = 0.999) -> AveragedWeights:
    """Return an average to be updated after every step: `average.update_parameters(model)`.

    average = decay average + (1 - decay) weights, of the variables that train now; in float32 of
    those in half precision. Raises ValueError unless 0 <= decay < 1, and for a model without
    variables.
    """
    if not 0 <= decay < 1:
        raise ValueError(f"decay must be at least 0 and below 1, not {decay!r}")
    return AveragedWeights(model, lambda updates: tf.constant(1.0 - decay, tf.float64))


def make_equal_average(model: tf.keras.Model) -> AveragedWeights:
    """Return the mean of the weights at all updates, usually one at the end of each epoch.

    In float32 of those in half precision.
    """
    return AveragedWeights(model, lambda updates: 1.0 / tf.cast(updates + 1, tf.float64))


@contextmanager
def averaged(model: tf.keras.Model, average: AveragedWeights) -> Iterator[tf.keras.Model]:
    """Give the model the average's weights while the context lasts, for an evaluation.

    Other variables, such as the statistics of BatchNorm, stay the model's. Raises ValueError where
    the average was never updated.
    """
    variables = average.averaged_of(model)
    kept = [tf.identity(variable) for variable in variables]
    try:
        apply_average(model, average)
        yield model
    finally:
        _write(variables, kept)


def apply_average(model: tf.keras.Model, average: AveragedWeights) -> None:
    """Give the model the average's weights for good. Raises as `averaged`."""
    if not int(average.n_averaged.numpy()):
        raise ValueError("the average has seen no weights yet: call update_parameters(model)")
    _write(average.averaged_of(model), average.variables)


def update_statistics(model: tf.keras.Model, batches: Iterable) -> None:
    """Make the moving statistics of BatchNormalization anew: their mean over `batches` of inputs.

    An input: as the model takes it, a tuple or list of arguments where `call` takes several.
    Nothing else changes, nor do the statistics of a layer that is frozen (`trainable = False`); a
    model without BatchNormalization does not run. Raises ValueError for no batch, and
    NotImplementedError for a model in which something other than dropout draws at random while it
    trains: in Keras the mode is the whole call's. The statistics stay where it raises, or a batch
    does.
    """
    with fresh_statistics(model) as norms:
        seen = 0
        for x in batches if norms else ():
            if not seen:
                check_draws(model, x)
                average_over_calls(norms)
            call(model, x, training=True)
            seen += 1
        if norms and not seen:
            raise ValueError("statistics need at least one batch")


def make_averaging_step(step: Callable, model: tf.keras.Model, average) -> Callable:
    """Return `step(x, y) -> loss` that updates the average after each step.

    It has the optimizer and the scale of a mixed-precision step as the given one has.
    """

    @tf.function(jit_compile=False)
    def averaging(x, y):
        loss = step(x, y)
        average.update_parameters(model)
        return loss

    for name in {"loss_scale", "optimizer"} & set(dir(step)):
        setattr(averaging, name, getattr(step, name))
    return averaging


def _wide(variable) -> tf.Tensor:
    """Its value, not in half precision: there a small share of a weight rounds to nothing."""
    return at_least_float32(tf.convert_to_tensor(variable))


def _write(variables, values) -> None:
    for variable, value in zip(variables, values, strict=True):
        variable.assign(tf.cast(value, variable.dtype))


def main() -> None:
    """Print the accuracy of the last weights and of both averages, after three epochs."""
    from tf_impl.kit import training
    from tf_impl.kit.demo import Demo

    demo = Demo("digits-cnn")
    model, optimizer, loss_fn = demo.build()
    ema, swa = make_exponential_average(model, decay=0.98), make_equal_average(model)
    step = training.make_train_step(model, optimizer, loss_fn)
    step = make_averaging_step(step, model, ema)
    x = demo.train[0]
    print("epoch  last  exponential  equal")
    for epoch in range(3):
        demo.fit(step)
        swa.update_parameters(model)
        found = [demo.score(model)]
        for average in (ema, swa):
            with averaged(model, average):
                statistics = model.get_weights()
                update_statistics(model, [x[at : at + 256] for at in range(0, len(x), 256)])
                found.append(demo.score(model))
                model.set_weights(statistics)
        print(f"{epoch + 1:5}{found[0]:6.1f}{found[1]:13.1f}{found[2]:7.1f}")


if __name__ == "__main__":
    main()
