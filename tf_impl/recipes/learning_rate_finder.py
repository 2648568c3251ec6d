"""Learning-rate finder: a range test, its curve, and the rate that it suggests.

    found = find_learning_rate(model, optimizer, step, batches)
    optimizer.learning_rate = found.suggestion

What it changes: nothing. It trains for some steps while the rate rises by the same factor in each,
looks at the losses, and puts everything back (Smith, 2017, "Cyclical Learning Rates for Training
Neural Networks", section 3.3). It suggests the rate at which the loss falls most steeply over the
logarithm of the rate, as fastai and Lightning do. That is below the rate of the lowest loss on
purpose: there the rate is about to be too large.

Its twin: `pt_impl/recipes/learning_rate_finder.py`, which says where the frameworks differ.

When it helps and when it hurts: it replaces a search over rates. It costs `steps` steps and a copy
of the weights. It knows only the first steps of a training with this optimizer, batch size and
weights. Run it again when they change. With momentum or Adam the loss reacts some steps late, so
the curve lies too far to the right: more steps help. Noise of small batches hides the slope: a
longer window helps.

Run it alone: `python -m tf_impl.recipes.learning_rate_finder` prints the curve and the rate.

Copy with it: `tf_impl/kit/checks/learning_rate_finder.py`, `tf_impl/kit/restoring.py`.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median

import tensorflow as tf

from tf_impl.kit.checks.learning_rate_finder import check_learning_rate_finder
from tf_impl.kit.restoring import restored

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
    check_learning_rate_finder(model, optimizer, lowest, highest, steps, window, divergence)
    holder = getattr(optimizer, "inner_optimizer", optimizer)  # of a LossScaleOptimizer
    if not getattr(optimizer, "built", False):
        optimizer.build(model.trainable_variables)

    def set_rate(rate: float) -> None:
        holder.learning_rate = rate

    rates = [lowest * (highest / lowest) ** (at / (steps - 1)) for at in range(steps)]
    with restored(model, optimizer):
        losses = _sweep(step, batches, rates, set_rate, window, divergence)
    rates = rates[: len(losses)]
    suggestion, smoothed = _suggest(rates, losses, window)
    return RangeTest(rates, losses, smoothed, suggestion)


def _sweep(step: Callable, batches: Iterable, rates: list[float], set_rate, window, divergence):
    """Train with one rate after the other until the loss diverges; return the losses."""
    losses, means = [], []  # means over half a window: a longer one would stop late
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
    """The rate of the steepest fall, and the smoothed losses.

    A running mean lags behind, and over rising rates the lag is a factor: nine steps of a hundred
    over six decades are 3.5 times the rate. So mean and slope are those of a centred window.
    """
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


def main() -> None:
    """Print the curve on handwritten digits, and the suggestion."""
    from tf_impl.kit import training
    from tf_impl.kit.demo import Demo

    demo = Demo("digits-cnn", batch_size=64)
    model, optimizer, loss_fn = demo.build()
    step = training.make_train_step(model, optimizer, loss_fn)
    found = find_learning_rate(model, optimizer, step, demo.batches, highest=10.0)
    print("    rate    loss  smoothed")
    curve = zip(found.rates, found.losses, found.smoothed, strict=True)
    for rate, loss, smoothed in list(curve)[::5]:
        print(f"{rate:8.2g}{loss:8.3f}{smoothed:10.3f}")
    print(f"suggestion: {found.suggestion:.2g}")


if __name__ == "__main__":
    main()
