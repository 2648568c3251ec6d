"""The baselines: plain train steps, with which the kit's plain step is compared.

    step = make_hand_written_step(model, optimizer)

What it changes: nothing. `make_hand_written_step` is the loop of PyTorch's tutorials, with
PyTorch's own loss. It shows that the kit's `training.make_train_step` is as fast.

Its twin: `tf_impl/train_step/baseline.py`.

Where the frameworks differ and why:
- PyTorch leaves the loop to the user.
- Keras has `fit`, which reads a tf.data pipeline, keeps metrics and calls callbacks after each
  batch. `make_fit_loop` times it.

When it helps and when it hurts: it is what other steps are compared with.

Run it alone: `python -m pt_impl.train_step.baseline` compares the kit's step with the hand-written
one.

Copy with it: `pt_impl/kit/calling.py`, `pt_impl/kit/checks/baseline.py`.
"""

from collections.abc import Callable

import torch
from torch import nn

from pt_impl.kit.calling import call
from pt_impl.kit.checks.baseline import check_baseline


def make_hand_written_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable:
    """Make step(x, y) -> loss as PyTorch's tutorials write it: eager, float32.

    x: a tuple of the model's positional arguments, a mapping of its keywords, or its one argument;
    y: int64 (n,). The output is the logits, (n, classes), or has them as `.logits`. For a model
    that gives anything else the first step raises ValueError, before anything is changed.
    Source: "Training with PyTorch", pytorch.org/tutorials.
    """
    loss_fn = nn.CrossEntropyLoss()
    model.train()
    checked = False

    def step(x, y):
        nonlocal checked
        if not checked:
            check_baseline(model, loss_fn, x, y)
            checked = True
        optimizer.zero_grad()
        output = call(model, x)
        loss = loss_fn(getattr(output, "logits", output), y)
        loss.backward()
        optimizer.step()
        return loss

    return step


def main() -> None:
    """Print the kit's step against the hand-written one on the digits CNN."""
    from pt_impl.kit import training
    from pt_impl.kit.demo import Demo

    demo = Demo("digits-cnn", batch_size=4)
    model, optimizer, loss_fn = demo.build()
    steps = {"kit": training.make_train_step(model, optimizer, loss_fn)}
    model, optimizer, _ = demo.build()
    steps["hand-written"] = make_hand_written_step(model, optimizer)
    for name, ms in demo.times(steps, rounds=50).items():
        print(f"{name:14}{ms:8.3f} ms a step")


if __name__ == "__main__":
    main()
