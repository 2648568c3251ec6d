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

Its twin: `tf_impl/recipes/averaging.py`.

Where the frameworks differ and why:
- PyTorch: `torch.optim.swa_utils.AveragedModel` holds a copy of the model, which can be called.
- TensorFlow: a Keras optimizer keeps an exponential average (`use_ema=True`) and overwrites the
  weights with it. `SwapEMAWeights` swaps it in during the evaluations of `fit`. Keras has no equal
  average and no `update_bn`. The average here is separate from the optimizer, so any loop can use
  it.
- Both start with a copy of the weights at the first update, without bias correction.
- Keras 3 keeps a biased moving variance, PyTorch an unbiased one.

When it helps and when it hurts: it costs a copy of the weights, a pass over them per step, and
nothing at inference. It helps most if the learning rate does not fall. A falling rate has the same
effect, so together they gain little. If the average remembers more steps than the training has, it
is worse than the last weights.

Run it alone: `python -m pt_impl.recipes.averaging` prints accuracies with and without.

Copy with it: `pt_impl/kit/averages.py`, `pt_impl/kit/calling.py`.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from torch import nn
from torch.optim import swa_utils

from pt_impl.kit.averages import averaged_model, fresh_statistics, write
from pt_impl.kit.calling import call


def make_exponential_average(model: nn.Module, *, decay: float = 0.999) -> swa_utils.AveragedModel:
    """Return an average to be updated after every step: `average.update_parameters(model)`.

    average = decay average + (1 - decay) weights; buffers are the model's at the last update. Of a
    model with weights in half precision it is in float32. Raises ValueError unless 0 <= decay < 1,
    NotImplementedError for a model that Python cannot copy.
    """
    if not 0 <= decay < 1:
        raise ValueError(f"decay must be at least 0 and below 1, not {decay!r}")
    one, many = swa_utils.get_ema_avg_fn(decay), swa_utils.get_ema_multi_avg_fn(decay)
    return averaged_model(model, one, many)


def make_equal_average(model: nn.Module) -> swa_utils.AveragedModel:
    """Return the mean of the weights at all updates, usually one at the end of each epoch.

    Of a model with weights in half precision it is in float32. Raises NotImplementedError for a
    model that Python cannot copy.
    """
    return averaged_model(model, swa_utils.get_swa_avg_fn())


@contextmanager
def averaged(model: nn.Module, average: swa_utils.AveragedModel) -> Iterator[nn.Module]:
    """Give the model the average's weights while the context lasts, for an evaluation.

    Buffers, such as the statistics of BatchNorm, stay the model's. Raises ValueError where the
    average was never updated.
    """
    kept = [parameter.detach().clone() for parameter in model.parameters()]
    try:
        apply_average(model, average)
        yield model
    finally:
        write(model.parameters(), kept)


def apply_average(model: nn.Module, average: swa_utils.AveragedModel) -> None:
    """Give the model the average's weights for good. Raises as `averaged`."""
    if not int(average.n_averaged):
        raise ValueError("the average has seen no weights yet: call update_parameters(model)")
    write(model.parameters(), average.module.parameters())


def update_statistics(model: nn.Module, batches: Iterable) -> None:
    """Make the running statistics of BatchNorm anew: their mean over `batches` of inputs x.

    x: as the model takes it: a tuple of its arguments, a dict of its keywords, or its one argument.
    Nothing else changes, nor do the statistics of a BatchNorm that no batch goes through or whose
    parameters are frozen; a model without BatchNorm does not run. Raises ValueError for no batch.
    The statistics stay where it raises, or a batch does.
    """
    with fresh_statistics(model) as norms:
        seen = 0
        for x in batches if norms else ():
            call(model, x)
            seen += 1
        if norms and not seen:
            raise ValueError("statistics need at least one batch")


def make_averaging_step(
    step: Callable, model: nn.Module, average: swa_utils.AveragedModel
) -> Callable:
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


def main() -> None:
    """Print the accuracy of the last weights and of both averages, after three epochs."""
    from pt_impl.kit import training
    from pt_impl.kit.demo import Demo

    demo = Demo("digits-cnn")
    model, optimizer, loss_fn = demo.build()
    ema, swa = make_exponential_average(model, decay=0.98), make_equal_average(model)
    step = training.make_train_step(model, optimizer, loss_fn)
    step = make_averaging_step(step, model, ema)
    print("epoch  last  exponential  equal")
    for epoch in range(3):
        demo.fit(step)
        swa.update_parameters(model)
        found = [demo.score(model)]
        for average in (ema, swa):
            with averaged(model, average):
                statistics = {k: v.clone() for k, v in model.state_dict().items()}
                update_statistics(model, demo.train[0].split(256))
                found.append(demo.score(model))
                model.load_state_dict(statistics)
        print(f"{epoch + 1:5}{found[0]:6.1f}{found[1]:13.1f}{found[2]:7.1f}")


if __name__ == "__main__":
    main()
