"""Learning-rate schedules: linear decay, cosine, one cycle, and reduction on a plateau.

    schedule = apply_cosine(optimizer, steps=epochs * len(batches), warmup=500)

What it changes: the learning rate, from step to step. The optimizer's rate is the highest rate of
each schedule. Linear decay and cosine may warm up. One cycle rises and falls. Reduction on a
plateau depends on a loss, not on the step. `scale_rate` computes the rate for another batch size.

Its twin: `pt_impl/recipes/schedules.py`, which says where the frameworks differ.

When it helps and when it hurts: a rate that falls to zero nearly always ends better than a constant
one, and allows a larger highest rate. Warm-up helps if the first steps would diverge: large rates,
large batches, Adam's first moments. A run that is stopped early misses its best steps. A plateau
can be detected only if the validation loss is less noisy than the expected improvement.

Run it alone: `python -m tf_impl.recipes.schedules` prints the rates.

Copy with it: `shared/schedules.py`, `tf_impl/kit/checks/schedules.py`.
"""

import math

import numpy as np
import tensorflow as tf

from shared.schedules import check_batch_sizes, check_one_cycle, check_schedule
from tf_impl.kit.checks import schedules as checks

Optimizer = tf.keras.optimizers.Optimizer


@tf.keras.utils.register_keras_serializable("recipes")
class LinearDecay(tf.keras.optimizers.schedules.LearningRateSchedule):
    """`rate` that warms up and falls in a straight line to `final` times itself."""

    def __init__(self, rate: float, steps: int, warmup: int = 0, final: float = 0.0) -> None:
        check_schedule(steps, warmup, final)
        self.rate, self.steps, self.warmup, self.final = rate, steps, warmup, final

    def __call__(self, step) -> tf.Tensor:
        """The rate of a step, float64."""
        step = tf.cast(step, tf.float64)
        progress = tf.clip_by_value((step - self.warmup) / (self.steps - self.warmup), 0.0, 1.0)
        warmed_up = tf.minimum((step + 1) / (self.warmup + 1), 1.0)
        return self.rate * warmed_up * (self.final + (1 - self.final) * self._left(progress))

    def _left(self, progress: tf.Tensor) -> tf.Tensor:
        return 1 - progress

    def get_config(self) -> dict:
        """What a saved optimizer is made of again."""
        names = ("rate", "steps", "warmup", "final")
        return {name: getattr(self, name) for name in names}


@tf.keras.utils.register_keras_serializable("recipes")
class Cosine(LinearDecay):
    """`rate` that warms up and falls along half a cosine to `final` times itself."""

    def _left(self, progress: tf.Tensor) -> tf.Tensor:
        return (1 + tf.cos(math.pi * progress)) / 2


@tf.keras.utils.register_keras_serializable("recipes")
class OneCycle(tf.keras.optimizers.schedules.LearningRateSchedule):
    """`rate` that is risen to from `initial` times itself and falls to `final` times itself."""

    def __init__(
        self,
        rate: float,
        steps: int,
        rising: float = 0.3,
        initial: float = 0.04,
        final: float = 4e-6,
    ) -> None:
        check_one_cycle(steps, rising, initial, final)
        self.rate, self.steps, self.rising = rate, steps, rising
        self.initial, self.final = initial, final

    def __call__(self, step) -> tf.Tensor:
        """The rate of a step, float64."""
        step = tf.cast(step, tf.float64)
        top, end = self.rising * self.steps - 1, self.steps - 1.0  # as PyTorch counts
        up = self._between(self.initial, 1.0, step / top)
        down = self._between(1.0, self.final, (step - top) / (end - top))
        return self.rate * tf.where(step <= top, up, down)

    @staticmethod
    def _between(start: float, end: float, progress: tf.Tensor) -> tf.Tensor:
        wave = (1 + tf.cos(math.pi * tf.clip_by_value(progress, 0.0, 1.0))) / 2
        return end + (start - end) * wave

    def get_config(self) -> dict:
        """What a saved optimizer is made of again."""
        names = ("rate", "steps", "rising", "initial", "final")
        return {name: getattr(self, name) for name in names}


class ReductionOnPlateau:
    """Reduces an optimizer's rate when a loss has stopped falling; see the function below."""

    def __init__(self, optimizer, factor, patience, threshold, cooldown, lowest) -> None:
        self.optimizer, self.factor, self.patience = optimizer, factor, patience
        self.threshold, self.cooldown, self.lowest = threshold, cooldown, lowest
        self.best, self.bad_losses, self.cooling = math.inf, 0, 0

    def step(self, loss: float) -> None:
        """Look at a new loss."""
        loss = float(loss)
        margin = self.threshold * abs(self.best) if math.isfinite(self.best) else 0.0
        if loss < self.best - margin:
            self.best, self.bad_losses = loss, 0
        else:
            self.bad_losses += 1
        if self.cooling > 0:
            self.cooling -= 1
            self.bad_losses = 0
        if self.bad_losses > self.patience:
            self._reduce()
            self.cooling, self.bad_losses = self.cooldown, 0

    def _reduce(self) -> None:
        rate = float(self.optimizer.learning_rate)
        reduced = max(rate * self.factor, self.lowest)
        if rate - reduced > 1e-8:  # less is not worth a change, as in PyTorch
            self.optimizer.learning_rate = reduced

    def state_dict(self) -> dict:
        """What it has seen: save it beside the optimizer, which holds the rate."""
        return {"best": self.best, "bad_losses": self.bad_losses, "cooling": self.cooling}

    def load_state_dict(self, state: dict) -> None:
        """Go on from what `state_dict` gave."""
        self.best, self.bad_losses = state["best"], state["bad_losses"]
        self.cooling = state["cooling"]


def apply_linear_decay(
    optimizer: Optimizer, *, steps: int, warmup: int = 0, final: float = 0.0
) -> LinearDecay:
    """Let the rate fall in a straight line, to `final` times the optimizer's own at step `steps`.

    It may warm up first: step t of the first `warmup` ones has (t + 1) / (warmup + 1) of the rate
    (Goyal et al., 2017, "Accurate, Large Minibatch SGD", section 2.2), so that no step is lost on a
    rate of zero. Call it before the first step is traced. Returns the schedule: `schedule(step)` is
    the rate of a step, which stays after the last one. Raises ValueError unless 0 <= warmup < steps
    and 0 <= final <= 1.
    """
    return _apply(optimizer, LinearDecay, steps=steps, warmup=warmup, final=final)


def apply_cosine(
    optimizer: Optimizer, *, steps: int, warmup: int = 0, final: float = 0.0
) -> Cosine:
    """Let the rate fall along half a cosine (Loshchilov and Hutter, 2017, "SGDR").

    Without restarts; all else is as in `apply_linear_decay`.
    """
    return _apply(optimizer, Cosine, steps=steps, warmup=warmup, final=final)


def apply_one_cycle(
    optimizer: Optimizer,
    *,
    steps: int,
    rising: float = 0.3,
    initial: float = 0.04,
    final: float = 4e-6,
) -> OneCycle:
    """Let the rate rise from `initial` times the optimizer's own to it, and fall to `final` times.

    Both by half a cosine (Smith and Topin, 2018, "Super-Convergence"), by the formula of PyTorch's
    `OneCycleLR`.

    rising: the share of the steps in which it rises. The last of `steps` steps has the lowest rate,
    which then stays. Before the first step is traced. Returns the schedule: `schedule(step)` is the
    rate of a step. Raises ValueError for settings out of range.
    """
    return _apply(optimizer, OneCycle, steps=steps, rising=rising, initial=initial, final=final)


def apply_reduction_on_plateau(
    optimizer: Optimizer,
    *,
    factor: float = 0.1,
    patience: int = 10,
    threshold: float = 1e-4,
    cooldown: int = 0,
    lowest: float = 0.0,
) -> ReductionOnPlateau:
    """Multiply the rate by `factor` when a loss has stopped falling.

    Returns an object: call `step(loss)` when there is a new loss, usually once an epoch. More than
    `patience` losses in a row that are not below the best by a relative `threshold` are a plateau;
    `cooldown` losses after a reduction are not counted; the rate stays above `lowest`. Raises
    ValueError for an optimizer whose rate is a schedule.
    """
    checks.check_factor(factor)
    checks.check_rate(_unwrapped(optimizer))
    return ReductionOnPlateau(optimizer, factor, patience, threshold, cooldown, lowest)


def current_rate(optimizer: Optimizer) -> float:
    """Return the rate of the optimizer's next step."""
    optimizer = _unwrapped(optimizer)
    held = optimizer._learning_rate  # `learning_rate` is the last step's in tf_keras
    schedule = isinstance(held, tf.keras.optimizers.schedules.LearningRateSchedule)
    # `iterations` counts updates where gradients are accumulated, and a schedule is asked by calls.
    return float(held(optimizer._iterations) if schedule else held)


def scale_rate(*, rate: float, batch_size: int, reference_batch_size: int) -> float:
    """Return the rate for `batch_size` where `rate` is right for `reference_batch_size`.

    The linear rule of Goyal et al. (2017): k times the batch, k times the rate.

    batch_size: of a whole update, so times the accumulated batches and the replicas. The rule holds
    up to some size that only a trial finds, and needs a warm-up.
    """
    check_batch_sizes(batch_size, reference_batch_size)
    return rate * batch_size / reference_batch_size


def _apply(optimizer: Optimizer, schedule: type, **settings):
    """Give the optimizer a schedule whose highest rate is its own."""
    optimizer = _unwrapped(optimizer)
    checks.check_rate(optimizer)
    # Keras holds a plain rate in float32: the shortest number that it can stand for was meant.
    made = schedule(float(str(np.float32(optimizer.learning_rate))), **settings)
    optimizer.learning_rate = made
    return made


def _unwrapped(optimizer: Optimizer) -> Optimizer:
    """The optimizer itself, where it is one that scales losses around another."""
    return getattr(optimizer, "inner_optimizer", optimizer)


def main() -> None:
    """Print the rates of ten steps by each schedule."""
    schedules = {
        "linear decay": LinearDecay(0.1, steps=10, warmup=2),
        "cosine": Cosine(0.1, steps=10, warmup=2),
        "one cycle": OneCycle(0.1, steps=10),
    }
    for name, schedule in schedules.items():
        print(f"{name:13}", " ".join(f"{float(schedule(step)):.4f}" for step in range(10)))


if __name__ == "__main__":
    main()
