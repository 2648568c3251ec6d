"""Feature distillation: a student's hidden layer follows one of a trained teacher.

What it changes: the loss. Beside the labels, the output of a layer of the student is drawn to that
of a layer of the teacher (FitNets: Romero et al., 2014, "Hints for Thin Deep Nets"):

    loss_fn + weight mean((regressor(student's features) - teacher's features)^2)

The student is thinner than the teacher, so a regressor, trained along with it, widens its features;
it is dropped afterwards. `attach_regressor` makes the model that gives both, `make_train_step` the
step. FitNets first trains the layers up to the student's on the features alone, then all of it on
logits (`distillation.py`); here labels and features are learned in one stage, as is usual today.
The teacher runs in evaluation mode, without gradients, and stays as it was.

Its twin: `tf_impl/compression/feature_distillation.py`.

Where the frameworks differ and why:
- A hook catches the output of any module while it runs, so any model will do. Keras finds layers in
  the graph of a functional or Sequential model; a subclassed one has none and is refused there.
- A hook that raises ends the teacher's pass behind its layer, and nothing that follows runs, but in
  the first step, which sees whether the layer runs once. There a Keras model of the layers up to
  the teacher's leaves out the others.
- A name stands for what the module returns. ReLU as a function has no name here, as a layer it has.
- Channels are second in images here and last there: a 1x1 convolution here, a dense layer there.

When it helps and when it hurts: it helps thin and deep students, which are hard to train from their
output alone, and tasks without logits (regression, embeddings). Each step costs the teacher's
pass, and features are too large to store for most data. It hurts where the layers do not
correspond: too deep a pair regularises the student away from its own solution (FitNets, section
2.2). The scale of features differs between models and layers, so `weight` needs a search.

Run it alone: `python -m pt_impl.compression.feature_distillation` prints a student alone and with
features.
"""

import math
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map  # torch has no public one

_CHANNELS_SECOND = (nn.Conv1d, nn.ConvTranspose1d, nn.BatchNorm1d)
_CHANNELS_LAST = (nn.Linear, nn.LayerNorm)  # not kinds of them, which may turn images
_IMAGES = (nn.Conv2d, nn.ConvTranspose2d, nn.BatchNorm2d, nn.GroupNorm)


class Taught(nn.Module):
    """A student with a regressor behind one of its modules: x -> (output, regressed features)."""

    def __init__(self, student: nn.Module, regressor: nn.Module, layer: str):
        super().__init__()
        self.student, self.regressor, self.layer = student, regressor, layer

    def forward(self, *x, **named):
        """Run the student once, and the regressor on what its layer gave."""
        output, features = _run(self.student, self.layer, named or x)
        return output, self.regressor(features)


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

    The student is shared, not copied, and stays as it is; the optimizer has to be made from the
    parameters of the model returned, since the regressor's are among them. The regressor is linear
    in the channels, the same at every position; NumPy draws its kernel from `seed`, the bias is 0.
    x: example input, as in `make_train_step`. Layers: names of modules (`named_modules`) that run
    once and give float tensors (n, channels), (n, t, channels), (n, channels, h, w), or
    (n, channels, t) where one is a 1-D convolution or BatchNorm, or (n, h, w, channels) where one
    gives what an `nn.Linear` or `nn.LayerNorm` in it gave, or a sum with it. The two must agree in
    all but the channels. Other features of four axes have to have their channels second.

    Raises ValueError for a layer that is not there or gives something else.
    """
    _check_layer(student, student_layer)
    _check_layer(teacher, teacher_layer)
    ours, theirs = _infer(student, student_layer, x), _infer(teacher, teacher_layer, x)
    kinds = student.get_submodule(student_layer), teacher.get_submodule(teacher_layer)
    second = ours.ndim == 3 and any(isinstance(kind, _CHANNELS_SECOND) for kind in kinds)
    last = ours.ndim != 4 or any(
        _ends_in_rows(*pair, x) for pair in ((student, student_layer), (teacher, teacher_layer))
    )
    axis = -1 if last and not second else 1
    wanted = list(theirs.shape)
    if ours.ndim == theirs.ndim:
        wanted[axis] = ours.shape[axis]
    if ours.ndim not in (2, 3, 4) or list(ours.shape) != wanted:
        raise ValueError(
            f"the student's {student_layer!r} gives {list(ours.shape)}, the teacher's "
            f"{teacher_layer!r} {list(theirs.shape)}: name layers that differ in channels alone, "
            f"axis {axis}"
        )
    inputs, outputs = ours.shape[axis], theirs.shape[axis]
    if axis == 1:
        regressor = (nn.Conv1d if second else nn.Conv2d)(inputs, outputs, 1)
    else:
        regressor = nn.Linear(inputs, outputs)
    kernel = np.random.default_rng(seed).normal(0.0, inputs**-0.5, (inputs, outputs))
    with torch.no_grad():
        regressor.weight.copy_(torch.from_numpy(kernel.T).reshape(regressor.weight.shape))
        regressor.bias.zero_()
    return Taught(student, regressor.to(ours), student_layer)


def make_train_step(
    taught: nn.Module,
    teacher: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_fn: Callable,
    *,
    teacher_layer: str,
    weight: float = 1.0,
) -> Callable:
    """Return `step(x, y) -> loss`: one update from the labels and the teacher's features.

    taught: what `attach_regressor` returned, with the same teacher and layer. x: a tensor, a tuple
    of the positional arguments of both models or a dict of the named ones; anything else is handed
    over as it is. `loss_fn(output, y)` gets the student's output. loss: scalar on the device, the
    weighted sum. weight: of the features; 0 runs no teacher.

    Raises ValueError for a weight below 0, for a student without trainable parameters and for an
    optimizer that lacks the regressor's.
    """
    if not 0 <= weight < math.inf:
        raise ValueError(f"weight must be at least 0 and finite, not {weight!r}")
    if not any(parameter.requires_grad for parameter in taught.student.parameters()):
        raise ValueError("the student has no trainable parameters: there is nothing to teach")
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if not held.issuperset(map(id, taught.regressor.parameters())):
        raise ValueError("the optimizer lacks the regressor: make it from taught.parameters()")
    _check_layer(teacher, teacher_layer)
    taught.train()
    seen = False  # that the layer runs once: later passes end there

    def step(x, y):
        nonlocal seen
        target = _infer(teacher, teacher_layer, x, end=seen) if weight else None
        seen = True
        optimizer.zero_grad(set_to_none=True)
        output, features = _call(taught, x)
        loss = loss_fn(output, y)
        if weight:
            loss = loss + weight * F.mse_loss(features, target)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def _check_layer(model: nn.Module, layer: str) -> None:
    modules = dict(model.named_modules())
    if layer not in modules:
        known = ", ".join(filter(None, modules))
        raise ValueError(f"the model has no layer {layer!r}; it has {known}")


def _call(model: nn.Module, x):
    if isinstance(x, dict):
        return model(**x)
    return model(*x) if isinstance(x, tuple) else model(x)


class _Reached(BaseException):
    """Ends a pass: no error, so that no model's own `except Exception` stops it on its way."""


def _infer(model: nn.Module, layer: str, x, *, end: bool = False) -> Tensor:
    """What the layer gives in evaluation mode, without gradients; modes are left as found.

    end: run nothing behind the layer.
    """
    modes = {module: module.training for module in model.modules()}
    try:
        if any(modes.values()):
            model.eval()
        with torch.no_grad():
            # It may change its inputs in place, such as `x.sub_(mean)`, and others read them, too.
            own = tree_map(lambda v: v.clone() if isinstance(v, Tensor) else v, x)
            return _run(model, layer, own, end=end)[1]
    finally:
        for module, mode in modes.items():
            if module.training != mode:
                module.train(mode)  # some do more in it, as LoRA does


def _ends_in_rows(model: nn.Module, layer: str, x) -> bool:
    """Whether the layer gives the very tensor of one within that works on the last axis.

    Or one of its shape, as a sum has, where none within that has channels second gives such.
    """
    named, given, found = model.get_submodule(layer), [], []
    kinds = (*_CHANNELS_LAST, *_IMAGES)
    within = [module for module in named.modules() if type(module) in kinds]
    hooks = [m.register_forward_hook(lambda m, _, y: given.append((m, y))) for m in within]

    def look(module, inputs, features):
        alike = [m for m, y in given if y.shape == features.shape]
        found.append(
            any(y is features and type(m) in _CHANNELS_LAST for m, y in given)
            or (bool(alike) and all(type(m) in _CHANNELS_LAST for m in alike))
        )

    hooks.append(named.register_forward_hook(look))
    try:
        _infer(model, layer, x)
    finally:
        for hook in hooks:
            hook.remove()
    return found[0]


def _run(model: nn.Module, layer: str, x, *, end: bool = False) -> tuple:
    """Run the model once; return its output, None if it ended, and that of its module `layer`."""
    caught, output = [], None

    def catch(module, inputs, given):
        # An operation in place behind the layer must not change what it gave.
        caught.append(given.clone() if isinstance(given, Tensor) and not end else given)
        if end:
            raise _Reached

    hook = model.get_submodule(layer).register_forward_hook(catch)
    try:
        output = _call(model, x)
    except _Reached:
        pass
    finally:
        hook.remove()
    if len(caught) != 1:
        raise ValueError(f"{layer!r} runs {len(caught)} times: it must give one tensor, once")
    if not isinstance(caught[0], Tensor):
        kind = type(caught[0]).__name__
        raise ValueError(f"{layer!r} gives a {kind}: it must give one tensor, once")
    return output, caught[0]


def main() -> None:
    """Print the digits student alone and with the teacher's features, after one epoch."""
    import tempfile
    import time
    from pathlib import Path

    from pt_impl.kit import data, models, runtime, training
    from shared import datasets
    from shared import teacher as trained
    from shared.specs import TASKS
    from shared.weights import init_weights

    task, loss_fn = TASKS["digits-student"], training.cross_entropy
    teacher = models.build(trained.TASK.model, trained.load().weights)
    with tempfile.TemporaryDirectory() as folder:
        folder = datasets.materialise(task.dataset, Path(folder))
        x, y = data.to_device(*datasets.load(folder, "train"))
        test = data.to_device(*datasets.load(folder, "test"))
    print("step      ms a step  accuracy after an epoch")
    for name in ("alone", "features"):
        student = models.build(task.model, init_weights(task.model, seed=0))
        if name == "alone":
            optimizer = training.make_optimizer(student, task.recipe)
            step = training.make_train_step(student, optimizer, loss_fn)
        else:
            # conv1 and stage2 both give 8 x 8 pixels.
            taught = attach_regressor(
                student, teacher, x[:1], student_layer="conv1", teacher_layer="stage2"
            )
            optimizer = training.make_optimizer(taught, task.recipe)
            step = make_train_step(taught, teacher, optimizer, loss_fn, teacher_layer="stage2")
        start = time.perf_counter()
        training.fit(step, x, y, batch_size=64, epochs=1, seed=0)
        runtime.synchronize()
        ms = (time.perf_counter() - start) * 1e3 / (len(x) // 64)
        predict = training.make_predict(student)
        accuracy = training.evaluate(predict, *test, metric="accuracy", batch_size=256)
        print(f"{name:8}{ms:11.2f}{accuracy:24.1f}")


if __name__ == "__main__":
    main()
