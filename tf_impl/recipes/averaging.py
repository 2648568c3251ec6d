"""Averaged weights and early stopping: what of a training is kept.

What it changes: not the training, but the weights that are used after it.

- An exponential average follows the weights with a memory of about 1 / (1 - decay) steps (Polyak
  and Juditsky, 1992; Tarvainen and Valpola, 2017, "Mean teachers", section 2).
- An equal average is that of SWA, taken once an epoch at the end of a training at a rate that does
  not fall (Izmailov et al., 2018, "Averaging Weights Leads to Wider Optima and Better
  Generalization"). The statistics of BatchNorm belong to no average: `update_statistics` makes them
  anew from data (section 3.2).
- Early stopping ends a training when a validation figure no longer gets better, and takes the best
  weights back, bit for bit.

Its twin: `pt_impl/recipes/averaging.py`.

Where the frameworks differ and why:
- A Keras optimizer keeps exponential averages itself (`use_ema=True`, `ema_momentum`) and writes
  them over the weights for good (`finalize_variable_values`); `SwapEMAWeights` swaps them around
  the evaluations of `fit`. There is no equal average, and nothing for BatchNorm. The average here
  stands apart from the optimizer, so that any loop and any optimizer can have it, and is swapped in
  and out. PyTorch's `AveragedModel` holds a copy of the model, which can be called.
- Both copy the weights at the first update. Neither corrects for it: for some 1 / (1 - decay) steps
  the average remembers where the training began.
- Keras keeps a biased running variance, PyTorch an unbiased one: statistics differ by n / (n - 1).
- `EarlyStopping` of Keras is a callback of `fit`. The one here is for any loop.
- To resume, `get_weights` and `set_weights` are an average's, `state_dict` and `load_state_dict`
  early stopping's: hand them over as a checkpoint's `state`. PyTorch's average has the latter.

When it helps and when it hurts: an average costs a copy of the weights, a pass over them a step,
and nothing at inference. It gains most where the rate has not fallen: the average does what a
falling rate does, so together they gain little. With a decay of a memory longer than the training,
it is worse than the last weights. Early stopping saves time where a model overfits; where the
validation set is small it picks a lucky epoch, whose figure is better than the model: test on other
data.

Run it alone: `python -m tf_impl.recipes.averaging` prints accuracies with and without.

Copy with it: nothing.
"""

import inspect
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import numpy as np
import tensorflow as tf


class AveragedWeights:
    """A running average of the variables that train when it is made; see the functions below."""

    def __init__(self, model: tf.keras.Model, share: Callable[[tf.Tensor], tf.Tensor]) -> None:
        if not model.built:
            raise ValueError("the model has no variables yet: call it once on an example input")
        # tf.Variable itself: Keras's own may be in a distribution's or a policy's disguise.
        self._averaged = list(model.trainable_variables)
        self.variables = [
            tf.Variable(_widened(variable), trainable=False) for variable in self._averaged
        ]
        self.n_averaged = tf.Variable(0, dtype=tf.int64, trainable=False)
        self._share = share

    def update_parameters(self, model: tf.keras.Model) -> None:
        """Take in the model's weights as they are."""
        self._update([_widened(variable) for variable in self.averaged_of(model)])

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
    _check_updated(average)
    variables = average.averaged_of(model)
    kept = [tf.identity(variable) for variable in variables]
    try:
        _write(variables, average.variables)
        yield model
    finally:
        _write(variables, kept)


def apply_average(model: tf.keras.Model, average: AveragedWeights) -> None:
    """Give the model the average's weights for good. Raises as `averaged`."""
    _check_updated(average)
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
    norms = [layer for layer in _layers(model) if _is_batch_normalization(layer)]
    norms = [layer for layer in norms if layer.trainable]
    if not norms:
        return
    made = {id(v) for layer in norms for v in (layer.moving_mean, layer.moving_variance)}
    # All: SpectralNormalization writes to its kernel.
    kept = [(v, tf.identity(v)) for v in model.variables]
    before = [(layer, layer.momentum, vars(layer).get("call")) for layer in norms]
    dropouts = _switch_off_dropout(model)
    seen, done, graphs = 0, False, tf.config.functions_run_eagerly()
    tf.config.run_functions_eagerly(True)  # a `tf.function` within would keep the first momentum
    try:
        for x in batches:
            if not seen:
                _refuse_draws(model, x)
                for layer in norms:
                    _count_calls(layer)
            _call(model, x, training=True)  # eagerly, too
            seen += 1
        if not seen:
            raise ValueError("statistics need at least one batch")
        done = True
    finally:
        tf.config.run_functions_eagerly(graphs)
        for layer, momentum, call in before:
            layer.momentum = momentum
            vars(layer).pop("call", None)
            if call:
                layer.call = call
        for layer, rate in dropouts:
            layer.rate = rate
        for variable, value in kept:
            if not done or id(variable) not in made:
                variable.assign(value)


class EarlyStopping:
    """Keeps the best weights of a training and says when to end it.

    patience: evaluations in a row that may be no better than the best by more than `min_delta`.
    higher_is_better: True for an accuracy, False for a loss. All variables are kept in memory, a
    copy of the model's. To resume, save `state_dict()` beside the model's.
    """

    _STATE = ("best", "best_evaluation", "evaluations", "_weights")

    def __init__(
        self,
        model: tf.keras.Model,
        *,
        patience: int = 3,
        min_delta: float = 0.0,
        higher_is_better: bool = False,
    ) -> None:
        if patience < 0 or min_delta < 0:
            raise ValueError(
                f"patience and min_delta must be 0 or more, not {patience}, {min_delta}"
            )
        self.model, self.patience, self.min_delta = model, patience, min_delta
        self.sign = 1 if higher_is_better else -1
        self.best: float | None = None
        self.best_evaluation = -1
        self.evaluations = 0
        self._weights: list[np.ndarray] | None = None

    def step(self, value: float) -> bool:
        """Look at a new figure; return whether to stop. NaN is never better."""
        value = float(value)
        better = not math.isnan(value) and (
            self.best is None or self.sign * (value - self.best) > self.min_delta
        )
        if better:
            self.best, self.best_evaluation = value, self.evaluations
            self._weights = [np.array(weight) for weight in self.model.get_weights()]
        self.evaluations += 1
        return self.evaluations - 1 - self.best_evaluation > self.patience

    def restore(self) -> float:
        """Give the model its best weights back; return the figure that they had.

        Raises ValueError where no figure was a number.
        """
        if self._weights is None or self.best is None:
            raise ValueError("there are no best weights: no figure was seen that is a number")
        self.model.set_weights(self._weights)
        return self.best

    def state_dict(self) -> dict:
        """All that a resumed training goes on from, the best weights too, for a checkpoint."""
        return {name: getattr(self, name) for name in self._STATE}

    def load_state_dict(self, state: dict) -> None:
        """Go on from what `state_dict` returned."""
        for name in self._STATE:
            setattr(self, name, state[name])


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


def _check_updated(average: AveragedWeights) -> None:
    if not int(average.n_averaged.numpy()):
        raise ValueError("the average has seen no weights yet: call update_parameters(model)")


def _widened(variable) -> tf.Tensor:
    """Its value, not in half precision: there a small share of a weight rounds to nothing."""
    value = tf.convert_to_tensor(variable)
    return tf.cast(value, tf.float32) if value.dtype in (tf.float16, tf.bfloat16) else value


def _write(variables, values) -> None:
    for variable, value in zip(variables, values, strict=True):
        variable.assign(tf.cast(value, variable.dtype))


def _layers(model: tf.keras.Model) -> list:
    """All layers within the model, however deep."""
    return list(model._flatten_layers(include_self=False))


def _is_batch_normalization(layer) -> bool:
    return isinstance(layer, tf.keras.layers.BatchNormalization)


def _switch_off_dropout(model: tf.keras.Model) -> list[tuple]:
    """Set every dropout's rate to zero; return (layer, rate) of each."""
    layers = tf.keras.layers
    kinds = layers.Dropout, layers.GaussianDropout, layers.AlphaDropout
    rates = [(layer, layer.rate) for layer in _layers(model) if isinstance(layer, kinds)]
    for layer, _ in rates:
        layer.rate = 0.0
    return rates


def _count_calls(layer) -> None:
    """Let its statistics be the mean over its calls: a pass may have several of a shared layer."""
    call, counted = layer.call, itertools.count()

    def counting(x, training=None, **others):
        if training:
            seen = next(counted)
            layer.momentum = seen / (seen + 1)
        return call(x, training=training, **others)

    layer.call = counting


def _refuse_draws(model: tf.keras.Model, x) -> None:
    """Raise where two calls differ: augmentation, noise, the dropout within a recurrent layer."""
    kept = [(v, tf.identity(v)) for v in model.variables]
    outputs = []
    for _ in range(2):
        outputs.append(tf.nest.flatten(_call(model, x, training=True)))
        for variable, value in kept:
            if value.dtype.is_floating:  # all but seeds, by which alone a draw may differ
                variable.assign(value)
    for variable, value in kept:
        variable.assign(value)
    pairs = zip(*outputs, strict=True)
    if not all(np.allclose(*pair, rtol=1e-3, equal_nan=True) for pair in pairs):
        raise NotImplementedError(
            "a layer other than dropout draws at random while the model trains, which would be in "
            "the statistics: switch it off first"
        )


def _call(model: tf.keras.Model, x, training: bool):
    """Call `model` as `fit` does: x is one argument, but where `call` needs several."""
    inputs = inspect.signature(model.call).parameters.values()
    inputs = [p for p in inputs if p.name not in ("training", "mask") and p.kind != p.VAR_KEYWORD]
    if isinstance(x, dict) and len(inputs) > 1 and x.keys() <= {p.name for p in inputs}:
        return model(**x, training=training)
    needed = sum(2 if p.kind == p.VAR_POSITIONAL else p.default is p.empty for p in inputs)
    if isinstance(x, tuple | list) and needed > 1:
        return model(*x, training=training)
    return model(x, training=training)


def main() -> None:
    """Print the accuracy of the last weights and of both averages, after three epochs."""
    import tempfile
    from pathlib import Path

    from shared import datasets
    from shared.specs import TASKS
    from shared.weights import init_weights
    from tf_impl.kit import data, models, training

    task = TASKS["digits-cnn"]
    with tempfile.TemporaryDirectory() as folder:
        folder = datasets.materialise(task.dataset, Path(folder))
        x, y = data.to_device(*datasets.load(folder, "train"))
        test = data.to_device(*datasets.load(folder, "test"))
    model = models.build(task.model, init_weights(task.model, seed=0))
    optimizer = training.make_optimizer(model, task.recipe)
    ema, swa = make_exponential_average(model, decay=0.98), make_equal_average(model)
    plain = training.make_train_step(model, optimizer, training.cross_entropy)
    step = make_averaging_step(plain, model, ema)
    predict = training.make_predict(model)

    def accuracy() -> float:
        return training.evaluate(predict, *test, metric="accuracy", batch_size=256)

    print("epoch  last  exponential  equal")
    for epoch in range(3):
        training.fit(step, x, y, batch_size=64, epochs=1, seed=epoch)
        swa.update_parameters(model)
        found = [accuracy()]
        for average in (ema, swa):
            with averaged(model, average):
                statistics = model.get_weights()
                update_statistics(model, [x[at : at + 256] for at in range(0, len(x), 256)])
                found.append(accuracy())
                model.set_weights(statistics)
        print(f"{epoch + 1:5}{found[0]:6.1f}{found[1]:13.1f}{found[2]:7.1f}")


if __name__ == "__main__":
    main()
