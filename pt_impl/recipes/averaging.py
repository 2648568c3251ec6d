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

Its twin: `tf_impl/recipes/averaging.py`.

Where the frameworks differ and why:
- `torch.optim.swa_utils.AveragedModel` holds a copy of the model, which can be called. In Keras the
  optimizer keeps such averages (`use_ema=True`) and writes them over the model's weights for good
  (`finalize_variable_values`), or a callback of `fit` swaps them; it has no equal average and no
  `update_bn`. The twin holds variables.
- Both copy the weights at the first update. Neither corrects for it: for some 1 / (1 - decay) steps
  the average remembers where the training began.
- A module has a mode, and statistics are updated in training mode; Keras has it per call.

When it helps and when it hurts: an average costs a copy of the weights, a pass over them a step,
and nothing at inference. It gains most where the rate has not fallen: the average does what a
falling rate does, so together they gain little. With a decay of a memory longer than the training,
it is worse than the last weights. Early stopping saves time where a model overfits; where the
validation set is small it picks a lucky epoch, whose figure is better than the model: test on other
data.

Run it alone: `python -m pt_impl.recipes.averaging` prints accuracies with and without.

Copy with it: nothing.
"""

import copy
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.optim import swa_utils

HALVES = (torch.float16, torch.bfloat16)


def make_exponential_average(model: nn.Module, *, decay: float = 0.999) -> swa_utils.AveragedModel:
    """Return an average to be updated after every step: `average.update_parameters(model)`.

    average = decay average + (1 - decay) weights; buffers are the model's at the last update. Of a
    model with weights in half precision it is in float32. Raises ValueError unless 0 <= decay < 1,
    NotImplementedError for a model that Python cannot copy.
    """
    if not 0 <= decay < 1:
        raise ValueError(f"decay must be at least 0 and below 1, not {decay!r}")
    if _in_half(model):
        follow = swa_utils.get_ema_avg_fn(decay)

        def widening(average, weight, updates):  # a share of it would be rounded, too
            return follow(average, weight.to(average.dtype), updates)

        return _widened(_copied(model, avg_fn=widening))
    return _copied(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(decay))


def make_equal_average(model: nn.Module) -> swa_utils.AveragedModel:
    """Return the mean of the weights at all updates, usually one at the end of each epoch.

    Of a model with weights in half precision it is in float32. Raises NotImplementedError for a
    model that Python cannot copy.
    """
    if _in_half(model):
        return _widened(_copied(model, avg_fn=swa_utils.get_swa_avg_fn()))
    return _copied(model)


@contextmanager
def averaged(model: nn.Module, average: swa_utils.AveragedModel) -> Iterator[nn.Module]:
    """Give the model the average's weights while the context lasts, for an evaluation.

    Buffers, such as the statistics of BatchNorm, stay the model's. Raises ValueError where the
    average was never updated.
    """
    _check_updated(average)
    kept = [parameter.detach().clone() for parameter in model.parameters()]
    try:
        _write(model.parameters(), average.module.parameters())
        yield model
    finally:
        _write(model.parameters(), kept)


def apply_average(model: nn.Module, average: swa_utils.AveragedModel) -> None:
    """Give the model the average's weights for good. Raises as `averaged`."""
    _check_updated(average)
    _write(model.parameters(), average.module.parameters())


def update_statistics(model: nn.Module, batches: Iterable) -> None:
    """Make the running statistics of BatchNorm anew: their mean over `batches` of inputs x.

    x: as the model takes it: a tuple of its arguments, a dict of its keywords, or its one argument.
    Nothing else changes, nor do the statistics of a BatchNorm that no batch goes through or whose
    parameters are frozen; a model without BatchNorm does not run. Raises ValueError for no batch.
    The statistics stay where it raises, or a batch does.
    """
    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    norms = [norm for norm in norms if norm.track_running_stats]
    norms = [norm for norm in norms if not norm.affine or norm.weight.requires_grad]
    if not norms:
        return
    modes = {module: module.training for module in model.modules()}
    momenta = {norm: norm.momentum for norm in norms}
    before = {norm: [buffer.clone() for buffer in norm.buffers()] for norm in norms}
    seen, done = 0, False
    try:
        model.eval()  # dropout and the like stay off
        for norm in norms:
            norm.reset_running_stats()
            norm.momentum = None  # a mean over all batches, each with the same weight
            norm.train()
        with torch.no_grad():
            for x in batches:
                _call(model, x)
                seen += 1
        if not seen:
            raise ValueError("statistics need at least one batch")
        done = True
    finally:
        for norm, buffers in before.items():
            if not done or not norm.num_batches_tracked:  # no batch went through it
                _write(norm.buffers(), buffers)
        for module, mode in modes.items():
            if module.training != mode:
                module.train(mode)  # some do more in it, as LoRA does
        for norm, momentum in momenta.items():
            norm.momentum = momentum


class EarlyStopping:
    """Keeps the best weights of a training and says when to end it.

    patience: evaluations in a row that may be no better than the best by more than `min_delta`.
    higher_is_better: True for an accuracy, False for a loss. Parameters and all buffers are kept in
    memory, a copy of the model's. To resume, save `state_dict()` beside the model's.
    """

    _STATE = ("best", "best_evaluation", "evaluations", "_kept")

    def __init__(
        self,
        model: nn.Module,
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
        self._kept: dict[str, dict[str, Tensor]] | None = None

    def step(self, value: float) -> bool:
        """Look at a new figure; return whether to stop. NaN is never better."""
        value = float(value)
        better = not math.isnan(value) and (
            self.best is None or self.sign * (value - self.best) > self.min_delta
        )
        if better:
            self.best, self.best_evaluation = value, self.evaluations
            state = copy.deepcopy(self.model.state_dict())
            others = {n: b.clone() for n, b in self.model.named_buffers() if n not in state}
            self._kept = {"state": state, "others": others}
        self.evaluations += 1
        return self.evaluations - 1 - self.best_evaluation > self.patience

    def restore(self) -> float:
        """Give the model its best weights back; return the figure that they had.

        Raises ValueError where no figure was a number.
        """
        if self._kept is None or self.best is None:
            raise ValueError("there are no best weights: no figure was seen that is a number")
        self.model.load_state_dict(self._kept["state"])
        for name, buffer in self.model.named_buffers():
            if name in self._kept["others"]:  # of another shape, too: it may be a cache
                buffer.data = self._kept["others"][name].to(buffer.device, copy=True)
        return self.best

    def state_dict(self) -> dict:
        """All that a resumed training goes on from, the best weights too, for a checkpoint."""
        return {name: getattr(self, name) for name in self._STATE}

    def load_state_dict(self, state: dict) -> None:
        """Go on from what `state_dict` returned."""
        for name in self._STATE:
            setattr(self, name, state[name])


def make_averaging_step(step: Callable, model: nn.Module, average) -> Callable:
    """Return `step(x, y) -> loss` that updates the average after each step.

    It saves and resumes the scaler of a mixed-precision step as the given one does.
    """

    def averaging(x, y):
        loss = step(x, y)
        average.update_parameters(model)
        return loss

    for name in {"loss_scale", "state_dict", "load_state_dict"} & set(dir(step)):
        setattr(averaging, name, getattr(step, name))
    return averaging


def _in_half(model: nn.Module) -> bool:
    return any(parameter.dtype in HALVES for parameter in model.parameters())


def _copied(model: nn.Module, **settings) -> swa_utils.AveragedModel:
    try:
        return swa_utils.AveragedModel(model, **settings)
    except Exception as error:  # of the old `weight_norm`, or masked: a weight that is computed
        line = " ".join(str(error).split())
        raise NotImplementedError(f"Python cannot copy the model: {line}") from error


def _widened(average: swa_utils.AveragedModel) -> swa_utils.AveragedModel:
    """Put the copy into float32: in half precision a small share of a weight rounds to nothing."""
    for tensor in [*average.module.parameters(), *average.module.buffers()]:
        if tensor.dtype in HALVES:
            tensor.data = tensor.data.float()
    return average


def _check_updated(average: swa_utils.AveragedModel) -> None:
    if not int(average.n_averaged):
        raise ValueError("the average has seen no weights yet: call update_parameters(model)")


@torch.no_grad()
def _write(parameters: Iterable[Tensor], values: Iterable[Tensor]) -> None:
    for parameter, value in zip(parameters, values, strict=True):
        parameter.copy_(value)


def _call(model: nn.Module, x):
    if isinstance(x, dict):
        return model(**x)
    return model(*x) if isinstance(x, tuple) else model(x)


def main() -> None:
    """Print the accuracy of the last weights and of both averages, after three epochs."""
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
        test = data.to_device(*datasets.load(folder, "test"))
    model = models.build(task.model, init_weights(task.model, seed=0))
    optimizer = training.make_optimizer(model, task.recipe)
    ema, swa = make_exponential_average(model, decay=0.98), make_equal_average(model)
    plain = training.make_train_step(model, optimizer, training.cross_entropy)
    step = make_averaging_step(plain, model, ema)

    def accuracy() -> float:
        predict = training.make_predict(model)
        return training.evaluate(predict, *test, metric="accuracy", batch_size=256)

    print("epoch  last  exponential  equal")
    for epoch in range(3):
        training.fit(step, x, y, batch_size=64, epochs=1, seed=epoch)
        swa.update_parameters(model)
        found = [accuracy()]
        for average in (ema, swa):
            with averaged(model, average):
                statistics = {k: v.clone() for k, v in model.state_dict().items()}
                update_statistics(model, x.split(256))
                found.append(accuracy())
                model.load_state_dict(statistics)
        print(f"{epoch + 1:5}{found[0]:6.1f}{found[1]:13.1f}{found[2]:7.1f}")


if __name__ == "__main__":
    main()
