"""Learning-rate finder: a range test, its curve, and the rate that it suggests.

What it changes: nothing. It trains for some steps while the rate rises, looks at the losses, and
puts everything back. That is the range test of Smith (2017, "Cyclical Learning Rates for Training
Neural Networks", section 3.3), who raises the rate in a straight line, here by the same factor each
step, as the rates of interest lie decades apart. Smith reads the rates off the curve. Here:

- the suggestion is the rate at which the smoothed loss falls most steeply over the logarithm of
  the rate, which the tuners of fastai ("steep") and Lightning take, too. It lies below the loss's
  lowest point on purpose: there the rate is about to be too large;
- a running mean lags behind the losses, and over rates that rise the lag is a factor: nine steps of
  a hundred over six decades are 3.5 times the rate. The mean and the slope are therefore taken
  within a window that is centred on the step;
- the loss has diverged where the mean over the last half window has risen above its lowest by more
  than `divergence` times the first one, or is no number. The test then stops.

Its twin: `pt_impl/recipes/learning_rate_finder.py`.

Where the frameworks differ and why:
- A Keras optimizer holds its schedule, and is refused. PyTorch's scheduler stands beside it.
- One rate. PyTorch's parameter groups may have several, whose ratios stay.
- Keras 3 layers hold the state of their random generators as variables of the model, which are put
  back, as is `tf.random`'s global generator; `tf_keras` layers draw from operators that nobody can
  set back: there a training with dropout goes on with other masks. PyTorch's generators are global.
- The state of a Keras optimizer is variables: one that was not built is built, with the state that
  it begins with. The rate changes in the variable that the traced step reads: nothing is traced
  anew. PyTorch's state is empty before the first step, and is again.
- With momentum the curves differ by a little: see `schedules.py`.

When it helps and when it hurts: it costs `steps` steps and a copy of the weights, and replaces a
search over rates that has to begin somewhere. It knows the first steps of a training alone: with a
warm-up a larger rate is borne, a long training may want a smaller one. The curve is that of this
optimizer, batch size, and these weights: find the rate anew when they change. With momentum or Adam
the loss reacts some steps late, so that the curve lies too far to the right: more steps help. Noise
of small batches hides the slope: a longer window helps.

Run it alone: `python -m tf_impl.recipes.learning_rate_finder` prints the curve and the suggestion.

Copy with it: nothing.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median

import tensorflow as tf

Optimizer = tf.keras.optimizers.Optimizer


@dataclass(frozen=True)
class RangeTest:
    """What a range test found: a rate, a loss and a smoothed loss of each step that was taken."""

    rates: list[float]
    losses: list[float]
    smoothed: list[float]
    suggestion: float


def find_learning_rate(
    model: tf.keras.Model,
    optimizer: Optimizer,
    step: Callable,
    batches: Iterable,
    *,
    lowest: float = 1e-6,
    highest: float = 1.0,
    steps: int = 100,
    window: int = 9,
    divergence: float = 2.0,
) -> RangeTest:
    """Train with rates from `lowest` to `highest`; put everything back; return what was found.

    step: `step(*batch) -> loss` trains the model with the optimizer. batches: begun again when they
    run out. window: losses, an odd number, over which the mean and the slope are taken. The losses
    of a diverged end are in the curve as far as they are numbers.
    All variables of model and optimizer, those that a Keras 3 optimizer trains beside the model's
    (of a loss) and the global generator come back bit for bit, also where a step fails; what else
    the step keeps (an average) does not.

    Raises ValueError for settings out of range, no batches, a schedule in the optimizer, a first
    loss that is no number, and where the loss never falls by more than its noise.
    """
    _check(lowest, highest, steps, window, divergence)
    if not model.built:
        raise ValueError("the model has no variables yet: call it once on an example input")
    holder = getattr(optimizer, "inner_optimizer", optimizer)  # of a LossScaleOptimizer
    held = getattr(holder, "_learning_rate", None)
    if isinstance(held, tf.keras.optimizers.schedules.LearningRateSchedule):
        raise ValueError("the optimizer's rate is a schedule: make one with a number")
    if not getattr(optimizer, "built", False):  # a LossScaleOptimizer would make another scale
        optimizer.build(model.trainable_variables)

    def set_rate(rate: float) -> None:
        holder.learning_rate = rate

    rates = [lowest * (highest / lowest) ** (at / (steps - 1)) for at in range(steps)]
    with _put_back(model, optimizer):
        losses = _sweep(step, batches, rates, set_rate, window, divergence)
    rates = rates[: len(losses)]
    suggestion, smoothed = _suggest(rates, losses, window)
    return RangeTest(rates, losses, smoothed, suggestion)


@contextmanager
def _put_back(model: tf.keras.Model, optimizer: Optimizer) -> Iterator[None]:
    """Give model, optimizer and generator back what they had, whatever happens."""
    holder = getattr(optimizer, "inner_optimizer", optimizer)
    trained = getattr(holder, "_trainable_variables", [])  # tf_keras keeps no list of them
    variables = [*_variables(model), *_variables(optimizer), *trained]
    variables = list({id(variable): variable for variable in variables}.values())
    variables.append(holder._learning_rate)  # tf_keras doesn't count it among the variables
    variables.append(tf.random.get_global_generator().state)
    kept = [tf.identity(variable) for variable in variables]
    try:
        yield
    finally:
        for variable, value in zip(variables, kept, strict=True):
            variable.assign(value)


def _variables(owner) -> list:
    """All variables of a model or an optimizer: a property in Keras 3, a method in tf_keras."""
    return list(owner.variables() if callable(owner.variables) else owner.variables)


def _sweep(step: Callable, batches: Iterable, rates: list[float], set_rate, window, divergence):
    """Train with one rate after the other until the loss diverges; return the losses."""
    losses, means = [], []
    last = (window + 1) // 2
    for rate, batch in zip(rates, _endless(batches), strict=False):
        set_rate(rate)
        loss = float(step(*batch))
        if not math.isfinite(loss):
            break
        losses.append(loss)
        means.append(fmean(losses[-last:]))
        if means[-1] - min(means) > divergence * abs(means[0]):
            break
    if not losses:
        raise ValueError(f"the first loss is no finite number, at a rate of {rates[0]}")
    return losses


def _endless(batches: Iterable) -> Iterator:
    """The batches, again and again."""
    while True:
        any_batch = False
        for batch in batches:
            any_batch = True
            yield batch
        if not any_batch:
            raise ValueError("there are no batches (or no more of an iterator: give a list)")


def _suggest(rates: list[float], losses: list[float], window: int) -> tuple[float, list[float]]:
    """The rate of the steepest fall, and the smoothed losses."""
    reach = window // 2
    near = [
        range(max(0, at - reach), min(len(losses), at + reach + 1)) for at in range(len(losses))
    ]
    smoothed = [fmean(losses[i] for i in steps) for steps in near]
    lowest = smoothed.index(min(smoothed))
    fallen = smoothed[0] - smoothed[lowest]
    # Half of the differences between neighbours are below 0.954 standard deviations of the noise; a
    # mean over a window has 1 / sqrt(window) of it. The lowest of many means lies some below.
    noise = median(abs(a - b) for a, b in pairwise(losses)) / 0.954 if lowest else 0.0
    if fallen <= 4 * noise / math.sqrt(window):
        raise ValueError(
            f"the loss never falls: {smoothed[0]:.4g} at a rate of {rates[0]:.3g}, at best "
            f"{smoothed[lowest]:.4g} at {rates[lowest]:.3g} with noise of {noise:.2g}; begin "
            "lower, take larger batches or more steps, or look for a fault in labels and loss"
        )
    slopes = [_slope(losses, near[at]) for at in range(lowest + 1)]
    return rates[slopes.index(min(slopes))], smoothed


def _slope(losses: list[float], steps: range) -> float:
    """The slope of the straight line through these losses, by least squares, in loss a step."""
    middle = fmean(steps)
    spread = sum((at - middle) ** 2 for at in steps)
    return sum((at - middle) * losses[at] for at in steps) / spread


def _check(lowest: float, highest: float, steps: int, window: int, divergence: float) -> None:
    if not 0 < lowest < highest or divergence <= 0:
        raise ValueError(
            "a range test needs 0 < lowest < highest and divergence above 0, "
            f"not {lowest}, {highest}, {divergence}"
        )
    if window < 3 or window % 2 == 0 or steps < 2 * window:
        raise ValueError(
            "a range test needs an odd window of 3 or more and steps of twice that or more, "
            f"not window={window}, steps={steps}"
        )


def main() -> None:
    """Print the curve on handwritten digits, and the suggestion."""
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
    model = models.build(task.model, init_weights(task.model, seed=0))
    optimizer = training.make_optimizer(model, task.recipe)
    step = training.make_train_step(model, optimizer, training.cross_entropy)
    batches = [(x[at : at + 64], y[at : at + 64]) for at in range(0, len(x) - 63, 64)]
    found = find_learning_rate(model, optimizer, step, batches, highest=10.0)
    print("    rate    loss  smoothed")
    curve = zip(found.rates, found.losses, found.smoothed, strict=True)
    for rate, loss, smoothed in list(curve)[::5]:
        print(f"{rate:8.2g}{loss:8.3f}{smoothed:10.3f}")
    print(f"suggestion: {found.suggestion:.2g}")


if __name__ == "__main__":
    main()
