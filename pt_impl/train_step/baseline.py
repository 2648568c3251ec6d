"""The baselines that the reference train step is held against.

What it changes: nothing. `make_hand_written_step` is the loop of PyTorch's own tutorials, with
PyTorch's own loss, so that the kit's `training.make_train_step` can be shown to cost nothing over
it.

Its twin: `tf_impl/train_step/baseline.py`.

Where the frameworks differ and why: PyTorch leaves the loop to its user and has no `fit`; Keras
brings one, which its twin times (`make_fit_loop`).

When it helps and when it hurts: it is the yardstick, and does neither.

Run it alone: `python -m pt_impl.train_step.baseline` prints the kit's step against the hand-written
one.

Copy with it: nothing.
"""

from collections.abc import Callable, Mapping

import torch
from torch import nn


def make_hand_written_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable:
    """Make step(x, y) -> loss as PyTorch's tutorials write it: eager, float32.

    x: a tuple of the model's positional arguments, a mapping of its keywords, or its one argument;
    y: int64 (n,). The output is the logits, (n, classes), or has them as `.logits`. For a model
    that gives anything else the first step raises ValueError, before anything is changed.
    Source: "Training with PyTorch", pytorch.org/tutorials.
    """
    loss_fn = nn.CrossEntropyLoss()
    model.train()
    fits = False

    def step(x, y):
        nonlocal fits
        if not fits:
            _check_output(model, loss_fn, x, y)
            fits = True
        optimizer.zero_grad()
        output = _call(model, x)
        loss = loss_fn(getattr(output, "logits", output), y)
        loss.backward()
        optimizer.step()
        return loss

    return step


def _call(model: nn.Module, x):
    """Call the model as PyTorch's users do: a tuple is its arguments, a mapping its keywords."""
    if isinstance(x, Mapping):
        return model(**x)
    return model(*x) if isinstance(x, tuple) else model(x)


def _check_output(model: nn.Module, loss_fn: nn.Module, x, y) -> None:
    """Raise unless the loss takes what the model gives: in evaluation mode, so nothing moves."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            output = _call(model, x)
    finally:
        for module, mode in modes.items():
            if module.training != mode:
                module.train(mode)  # some do more in it, as LoRA does
    try:
        loss_fn(getattr(output, "logits", output), y)
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(
            "the tutorials' step has one loss, cross-entropy of logits (n, classes): "
            f"it can't take what the model gives ({error})"
        ) from error


def main() -> None:
    """Print the kit's step against the hand-written one on the digits CNN, interleaved."""
    import statistics
    import tempfile
    import time
    from pathlib import Path

    from pt_impl.kit import data, models, runtime, training
    from shared import datasets
    from shared.specs import TASKS
    from shared.weights import init_weights

    task = TASKS["digits-cnn"]
    weights = init_weights(task.model, seed=0)
    with tempfile.TemporaryDirectory() as folder:
        x, y = datasets.load(datasets.materialise(task.dataset, Path(folder)), "train")
        batches = datasets.first_batches(x, y, task.small_batch, 10, seed=0)
    batches = data.resident_batches(batches)
    steps = {}
    for name in ("kit", "hand_written"):
        model = models.build(task.model, weights)
        optimizer = training.make_optimizer(model, task.recipe)
        if name == "kit":
            steps[name] = training.make_train_step(model, optimizer, training.cross_entropy)
        else:
            steps[name] = make_hand_written_step(model, optimizer)
    samples = {name: [] for name in steps}
    for _ in range(50):
        for name, step in steps.items():
            start = time.perf_counter()
            for batch in batches:
                step(*batch)
            runtime.synchronize()
            samples[name].append((time.perf_counter() - start) / len(batches))
    for name, times in samples.items():
        print(f"{name:14} {statistics.median(times[10:]) * 1e3:.3f} ms a step")


if __name__ == "__main__":
    main()
