"""Learning-rate schedules: linear decay, cosine, one cycle, and reduction on a plateau.

    scheduler = apply_cosine(optimizer, steps=epochs * len(loader), warmup=500)
    ...
    scheduler.step()  # after each optimizer.step()

What it changes: the learning rate, from step to step. The optimizer's rate is the highest rate of
each schedule. Linear decay and cosine may warm up. One cycle rises and falls. Reduction on a
plateau depends on a loss, not on the step. `scale_rate` computes the rate for another batch size.

Its twin: `tf_impl/recipes/schedules.py`.

Where the frameworks differ and why:
- PyTorch: a scheduler is separate from the optimizer and sets its rate. To resume, make the
  schedule and load its `state_dict()`. Otherwise it takes the current rate for the highest.
- TensorFlow: the optimizer holds the schedule and asks it for the rate of its step count, and both
  are saved. If Keras accumulates k batches, each batch counts as a step.
- Momentum: PyTorch sums up gradients and multiplies the sum by the current rate. Keras sums up
  updates, each with the rate of its step. So the two drift apart under a schedule.
- PyTorch's `OneCycleLR` raises after its last step. Keras has no one-cycle schedule, and its
  `ReduceLROnPlateau` is a callback of `fit`. Those here work in any loop, and compute in float64.

When it helps and when it hurts: a rate that falls to zero nearly always ends better than a constant
one, and allows a larger highest rate. Warm-up helps if the first steps would diverge: large rates,
large batches, Adam's first moments. A run that is stopped early misses its best steps. A plateau
can be detected only if the validation loss is less noisy than the expected improvement.

Run it alone: `python -m pt_impl.recipes.schedules` prints the rates.

Copy with it: `pt_impl/kit/plateau.py`, `shared/schedules.py`.
"""

import math
from collections.abc import Callable

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, ReduceLROnPlateau

from pt_impl.kit.plateau import ReductionOnPlateau
from shared.schedules import check_batch_sizes, check_one_cycle, check_schedule


def apply_linear_decay(
    optimizer: Optimizer, *, steps: int, warmup: int = 0, final: float = 0.0
) -> LambdaLR:
    """Let the rate fall in a straight line, to `final` times the optimizer's own at step `steps`.

    It may warm up first: step t of the first `warmup` ones has (t + 1) / (warmup + 1) of the rate
    (Goyal et al., 2017, "Accurate, Large Minibatch SGD", section 2.2), so that no step is lost on a
    rate of zero. Returns the scheduler: call its `step()` after each of the optimizer's. The rate
    then stays. Raises ValueError unless 0 <= warmup < steps and 0 <= final <= 1.
    """
    check_schedule(steps, warmup, final)

    def factor(step: int) -> float:
        return _warmed_up(step, warmup) * (1 - (1 - final) * _progress(step, warmup, steps))

    return _scheduler(optimizer, factor)


def apply_cosine(
    optimizer: Optimizer, *, steps: int, warmup: int = 0, final: float = 0.0
) -> LambdaLR:
    """Let the rate fall along half a cosine (Loshchilov and Hutter, 2017, "SGDR").

    Without restarts; all else is as in `apply_linear_decay`.
    """
    check_schedule(steps, warmup, final)

    def factor(step: int) -> float:
        wave = (1 + math.cos(math.pi * _progress(step, warmup, steps))) / 2
        return _warmed_up(step, warmup) * (final + (1 - final) * wave)

    return _scheduler(optimizer, factor)


def apply_one_cycle(
    optimizer: Optimizer,
    *,
    steps: int,
    rising: float = 0.3,
    initial: float = 0.04,
    final: float = 4e-6,
) -> OneCycleLR:
    """Let the rate rise from `initial` times the optimizer's own to it, and fall to `final` times.

    Both by half a cosine (Smith and Topin, 2018, "Super-Convergence").

    rising: the share of the steps in which it rises. The last of `steps` steps has the lowest rate;
    the scheduler raises ValueError beyond it. The momentum stays. Returns the scheduler, whose
    `step()` follows each of the optimizer's. Raises ValueError for settings out of range.
    """
    check_one_cycle(steps, rising, initial, final)
    return OneCycleLR(
        optimizer,
        max_lr=[group["lr"] for group in optimizer.param_groups],
        total_steps=steps,
        pct_start=rising,
        anneal_strategy="cos",
        cycle_momentum=False,
        div_factor=1 / initial,
        final_div_factor=initial / final,
    )


def apply_reduction_on_plateau(
    optimizer: Optimizer,
    *,
    factor: float = 0.1,
    patience: int = 10,
    threshold: float = 1e-4,
    cooldown: int = 0,
    lowest: float = 0.0,
) -> ReduceLROnPlateau:
    """Multiply the rate by `factor` when a loss has stopped falling.

    Returns the scheduler: call `step(loss)` when there is a new loss, usually once an epoch. More
    than `patience` losses in a row that are not below the best by a relative `threshold` are a
    plateau; `cooldown` losses after a reduction are not counted; the rate stays above `lowest`.
    """
    return ReductionOnPlateau(
        optimizer,
        mode="min",
        factor=factor,
        patience=patience,
        threshold=threshold,
        threshold_mode="rel",
        cooldown=cooldown,
        min_lr=lowest,
    )


def current_rate(optimizer: Optimizer) -> float:
    """Return the rate of the optimizer's next step: that of its first parameters."""
    return float(optimizer.param_groups[0]["lr"])


def scale_rate(*, rate: float, batch_size: int, reference_batch_size: int) -> float:
    """Return the rate for `batch_size` where `rate` is right for `reference_batch_size`.

    The linear rule of Goyal et al. (2017): k times the batch, k times the rate.

    batch_size: of a whole update, so times the accumulated batches and the replicas. The rule holds
    up to some size that only a trial finds, and needs a warm-up.
    """
    check_batch_sizes(batch_size, reference_batch_size)
    return rate * batch_size / reference_batch_size


def _scheduler(optimizer: Optimizer, factor: Callable) -> LambdaLR:
    for group in optimizer.param_groups:
        # torch would start from the rate that an earlier schedule has left here.
        rate = group["lr"]
        group["initial_lr"] = rate.clone() if isinstance(rate, Tensor) else rate
    return LambdaLR(optimizer, factor)


def _warmed_up(step: int, warmup: int) -> float:
    return min(1.0, (step + 1) / (warmup + 1))


def _progress(step: int, warmup: int, steps: int) -> float:
    """From 0 at the end of the warm-up to 1 at the last step."""
    return min(1.0, max(0.0, (step - warmup) / (steps - warmup)))


def main() -> None:
    """Print the rates of ten steps by each schedule."""
    import torch

    schedules = {
        "linear decay": (apply_linear_decay, {"warmup": 2}),
        "cosine": (apply_cosine, {"warmup": 2}),
        "one cycle": (apply_one_cycle, {}),
    }
    for name, (apply, settings) in schedules.items():
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
        scheduler = apply(optimizer, steps=10, **settings)
        rates = []
        for _ in range(10):
            rates.append(scheduler.get_last_lr()[0])
            optimizer.step()
            if len(rates) < 10:
                scheduler.step()
        print(f"{name:13}", " ".join(f"{rate:.4f}" for rate in rates))


if __name__ == "__main__":
    main()
