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

Its twin: `tf_impl/recipes/learning_rate_finder.py`.

Where the frameworks differ and why:
- A scheduler stands beside the optimizer, which shows it by `initial_lr` alone; one that the step
  moves itself is found by the rate that it writes. A Keras optimizer holds its schedule.
- Parameter groups may have rates of their own: the highest one is swept, and ratios stay. Keras has
  one rate.
- Random state is global here, and put back. Keras 3 layers hold theirs as variables, put back as
  well; `tf_keras` layers draw from operators that nobody can set back.
- Gradients, modes and the optimizer's state are as before: empty, if it was. A Keras optimizer that
  was not built is built.
- With momentum the curves differ by a little: see `schedules.py`.

When it helps and when it hurts: it costs `steps` steps and a copy of the weights, and replaces a
search over rates that has to begin somewhere. It knows the first steps of a training alone: with a
warm-up a larger rate is borne, a long training may want a smaller one. The curve is that of this
optimizer, batch size, and these weights: find the rate anew when they change. With momentum or Adam
the loss reacts some steps late, so that the curve lies too far to the right: more steps help. Noise
of small batches hides the slope: a longer window helps.

Run it alone: `python -m pt_impl.recipes.learning_rate_finder` prints the curve and the suggestion.

Copy with it: nothing.
"""

import copy
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


@dataclass(frozen=True)
class RangeTest:
    """What a range test found: a rate, a loss and a smoothed loss of each step that was taken."""

    rates: list[float]
    losses: list[float]
    smoothed: list[float]
    suggestion: float


def find_learning_rate(
    model: nn.Module,
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
    Parameters (those of a loss too, where the optimizer has them), buffers, gradients, modes, the
    optimizer and torch's random state come back bit for bit, also where a step fails; what else the
    step keeps (a loss scale, an average) does not.

    Raises ValueError for settings out of range, no batches, a scheduler at the optimizer, a first
    loss that is no number, and where the loss never falls by more than its noise.
    """
    _check(lowest, highest, steps, window, divergence)
    if any("initial_lr" in group for group in optimizer.param_groups):
        raise ValueError(
            "a scheduler stands at the optimizer: find the rate first, then make the scheduler"
        )
    first = [float(group["lr"]) for group in optimizer.param_groups]
    if max(first) <= 0:
        raise ValueError("the optimizer has no rate above 0, so its groups have no ratio")

    def set_rate(rate: float) -> None:
        for group, own in zip(optimizer.param_groups, first, strict=True):
            _write_rate(group, rate * own / max(first))

    rates = [lowest * (highest / lowest) ** (at / (steps - 1)) for at in range(steps)]
    with _put_back(model, optimizer):
        losses = _sweep(step, batches, rates, set_rate, window, divergence, optimizer)
    rates = rates[: len(losses)]
    suggestion, smoothed = _suggest(rates, losses, window)
    return RangeTest(rates, losses, smoothed, suggestion)


@contextmanager
def _put_back(model: nn.Module, optimizer: Optimizer) -> Iterator[None]:
    """Give model, optimizer and generators back what they had, whatever happens."""
    # A model may put another tensor in the place of a buffer.
    places = [(m, *each) for m in model.modules() for each in m.named_buffers(recurse=False)]
    trained = [p for group in optimizer.param_groups for p in group["params"]]
    parameters = list(dict.fromkeys([*model.parameters(), *trained]))
    tensors = [*parameters, *model.buffers()]
    kept = [tensor.detach().clone() for tensor in tensors]
    gradients = [_copy(parameter.grad) for parameter in parameters]
    modes = {module: module.training for module in model.modules()}
    states = {p: {k: _kept(v) for k, v in s.items()} for p, s in optimizer.state.items()}
    rates = [_kept(group["lr"]) for group in optimizer.param_groups]
    random, on_gpus = torch.get_rng_state(), torch.cuda.get_rng_state_all()
    try:
        yield
    finally:
        for module, mode in modes.items():  # first: some write their weights in it, as LoRA does
            if module.training != mode:
                module.train(mode)
        for module, name, buffer in places:
            setattr(module, name, buffer)
        for tensor, value in zip(tensors, kept, strict=True):
            _given_back(tensor, value)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        optimizer.state.clear()
        for parameter, state in states.items():
            optimizer.state[parameter] = {name: _given_back(*v) for name, v in state.items()}
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = _given_back(*rate)
        torch.set_rng_state(random)
        torch.cuda.set_rng_state_all(on_gpus)


def _copy(gradient: Tensor | None) -> Tensor | None:
    return None if gradient is None else gradient.clone()


def _kept(value) -> tuple:
    """A value and a copy of it."""
    return value, value.detach().clone() if isinstance(value, Tensor) else copy.deepcopy(value)


@torch.no_grad()
def _given_back(value, kept):
    """What was kept, in the same tensor if it is one: a captured step goes on reading that one."""
    return value.copy_(kept) if isinstance(value, Tensor) else kept


def _write_rate(group: dict, rate: float) -> None:
    if isinstance(group["lr"], Tensor):  # of a compiled or captured step: it reads this tensor
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate


def _sweep(
    step: Callable, batches: Iterable, rates: list[float], set_rate, window, divergence, optimizer
):
    """Train with one rate after the other until the loss diverges; return the losses."""
    losses, means = [], []
    last = (window + 1) // 2
    for rate, batch in zip(rates, _endless(batches), strict=False):
        set_rate(rate)
        loss = step(*batch)
        loss = loss.item() if isinstance(loss, Tensor) else float(loss)
        if not _has_rate(optimizer, rate):
            raise ValueError("the step sets the rate itself: leave its scheduler out")
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


def _has_rate(optimizer: Optimizer, rate: float) -> bool:
    found = max(float(group["lr"]) for group in optimizer.param_groups)
    return math.isclose(found, rate, rel_tol=1e-6)  # a tensor holds it in float32


def main() -> None:
    """Print the curve on handwritten digits, and the suggestion."""
    import tempfile
    from pathlib import Path

    from pt_impl.kit import data, models, training
    from shared import datasets
    from shared.specs import TASKS
    from shared.weights import init_weights

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
