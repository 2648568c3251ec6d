"""Feature distillation: a student's hidden layer imitates one of a trained teacher.

    taught = attach_regressor(student, teacher, x, student_layer="conv1", teacher_layer="stage2")
    output, features = taught(x)
    loss = loss_fn(output, y) + weight * F.mse_loss(features, target)  # what the teacher's gives

What it changes: the loss. It also contains the distance between the output of a student's layer and
that of a teacher's layer (FitNets: Romero et al., 2014, "Hints for Thin Deep Nets"). The student is
thinner, so a regressor widens its features. It is trained, too, and dropped afterwards. FitNets
learns first features, then logits (`distillation.py`). Here labels and features are learned in one
stage, as is usual today. The teacher does not change.

Its twin: `tf_impl/compression/feature_distillation.py`.

Where the frameworks differ and why:
- PyTorch: a hook catches the output of any module. Functions such as `F.relu` have no name to
  choose. The hook stops the teacher after that layer, by raising.
- TensorFlow: layers are found in the graph of a functional or Sequential model, on its first level.
  A subclassed model has no graph and is refused. A model that ends at the teacher's layer skips the
  others.
- Channels are the second axis of images in PyTorch and the last in TensorFlow.
- `keras.distillation.FeatureDistillation` of Keras 3 has no regressor.

When it helps and when it hurts: it helps thin, deep students, which are hard to train from their
output only, and tasks without logits: regression, embeddings. Each step costs the teacher's pass,
since features are too large to store for most data. It hurts if the layers do not correspond:
layers that are too deep hold the student back (FitNets, section 2.2). The scale of features differs
between models and layers, so `weight` has to be tuned.

Run it alone: `python -m pt_impl.compression.feature_distillation` prints a student without and with
features.

Copy with it: `pt_impl/kit/calling.py`, `pt_impl/kit/checks/feature_distillation.py`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pt_impl.kit.calling import call, infer
from pt_impl.kit.checks.feature_distillation import (
    channel_axis,
    check_feature_distillation,
    check_layer,
    one_tensor,
)


class Taught(nn.Module):
    """A student with a regressor behind one of its modules: x -> (output, regressed features)."""

    def __init__(self, student: nn.Module, regressor: nn.Module, layer: str) -> None:
        super().__init__()
        self.student, self.regressor, self.layer = student, regressor, layer

    def forward(self, *x, **named):
        """Run the student once, and the regressor on what its layer gave."""
        with _caught(self.student, self.layer) as given:
            output = call(self.student, named or x)
        return output, self.regressor(one_tensor(given, self.layer))


def attach_regressor(
    student: nn.Module,
    teacher: nn.Module,
    x,
    *,
    student_layer: str,
    teacher_layer: str,
    seed: int = 0,
) -> nn.Module:
    """Return a model x -> (the student's output, its features as wide as the teacher's).

    The student is shared, not copied. Make the optimizer from the parameters of the model returned:
    the regressor's are among them.

    Args:
        x: example input, as in `make_train_step`.
        student_layer, teacher_layer: names of modules (`named_modules`) that run once and give
            features of one shape but for the channels: (n, channels), (n, t, channels),
            (n, channels, h, w), or (n, channels, t) of a 1-D convolution or BatchNorm, or
            (n, h, w, channels) of an `nn.Linear` or `nn.LayerNorm`.
        seed: NumPy draws the regressor's kernel from it. It is linear in the channels, the same at
            every position; its bias is 0.

    Raises:
        ValueError: a layer is not there, or gives something else.
    """
    for model, layer in ((student, student_layer), (teacher, teacher_layer)):
        check_layer(model, layer)
    ours, theirs = _features(student, student_layer, x), _features(teacher, teacher_layer, x)
    axis = channel_axis(ours, theirs, (student, student_layer), (teacher, teacher_layer), x)
    inputs, outputs = ours.shape[axis], theirs.shape[axis]
    if axis == -1:
        regressor = nn.Linear(inputs, outputs)
    else:
        regressor = (nn.Conv1d if ours.ndim == 3 else nn.Conv2d)(inputs, outputs, 1)
    kernel = np.random.default_rng(seed).normal(0.0, inputs**-0.5, (inputs, outputs))
    with torch.no_grad():
        regressor.weight.copy_(torch.from_numpy(kernel.T).reshape(regressor.weight.shape))
        regressor.bias.zero_()
    return Taught(student, regressor.to(ours), student_layer)  # its device and dtype


def make_train_step(
    taught: nn.Module,
    teacher: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_fn: Callable,
    *,
    teacher_layer: str,
    weight: float = 1.0,
) -> Callable:
    """Make the train step that learns from the labels and the teacher's features.

    Args:
        taught: what `attach_regressor` returned, with the same teacher and layer; it is put into
            training mode.
        optimizer: of `taught.parameters()`.
        loss_fn: `loss_fn(output, y)` gets the student's output.
        weight: of the features; 0 runs no teacher.

    Returns:
        `step(x, y) -> loss`: the weighted sum, a scalar on the device. x: a tuple of the positional
        arguments of both models, a mapping of their keywords, or their one argument.

    Raises:
        ValueError: the weight is below 0, the student has no trainable parameters, the teacher no
            such layer, or the optimizer lacks the regressor.
    """
    check_feature_distillation(taught, teacher, optimizer, teacher_layer, weight)
    taught.train()
    seen = False  # that the layer runs once: later passes end there

    def step(x, y):
        nonlocal seen
        target = _features(teacher, teacher_layer, x, end=seen) if weight else None
        seen = True
        optimizer.zero_grad(set_to_none=True)
        output, features = call(taught, x)
        loss = loss_fn(output, y)
        if weight:
            loss = loss + weight * F.mse_loss(features, target)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def _features(model: nn.Module, layer: str, x, *, end: bool = False) -> Tensor:
    """Return what the layer gives in evaluation mode. end: run nothing behind it."""
    with _caught(model, layer, end=end) as given, suppress(_Reached):
        infer(model, x)
    return one_tensor(given, layer)


class _Reached(BaseException):
    """Ends a pass: no error, so that no model's own `except Exception` stops it on its way."""


@contextmanager
def _caught(model: nn.Module, layer: str, *, end: bool = False) -> Iterator[list]:
    """Collect what a module of the model gives inside."""
    given = []

    def catch(module, inputs, output):
        # An operation in place behind the layer must not change what it gave.
        given.append(output.clone() if isinstance(output, Tensor) and not end else output)
        if end:
            raise _Reached

    hook = model.get_submodule(layer).register_forward_hook(catch)
    try:
        yield given
    finally:
        hook.remove()


def main() -> None:
    """Print the digits student alone and with the teacher's features, after one epoch."""
    from pt_impl.kit import models, training
    from pt_impl.kit.demo import Demo
    from shared import teacher as trained

    demo = Demo("digits-student")
    teacher, x = models.build(trained.TASK.model, trained.load().weights), demo.train[0][:1]
    layers = {"student_layer": "conv1", "teacher_layer": "stage2"}  # both give 8 x 8 pixels
    print("step      ms a step  accuracy after an epoch")
    for name in ("alone", "features"):
        student, optimizer, loss_fn = demo.build()
        if name == "alone":
            step = training.make_train_step(student, optimizer, loss_fn)
        else:
            taught = attach_regressor(student, teacher, x, **layers)
            optimizer = training.make_optimizer(taught, demo.task.recipe)
            step = make_train_step(taught, teacher, optimizer, loss_fn, teacher_layer="stage2")
        ms = demo.fit(step)
        print(f"{name:8}{ms:11.2f}{demo.score(student):24.1f}")


if __name__ == "__main__":
    main()
