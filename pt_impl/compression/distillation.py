"""Knowledge distillation: a small student learns from a large teacher that is trained already.

What it changes: the loss. Beside the labels, the student follows the teacher's probabilities, both
softened by a temperature T (Hinton, Vinyals and Dean, 2015, "Distilling the Knowledge in a Neural
Network", section 2):

    alpha T^2 KL(softmax(teacher / T) || softmax(student / T)) + (1 - alpha) loss_fn

T^2 keeps the size of the soft gradient where T changes. The teacher runs in evaluation mode,
without gradients, and stays as it was. `make_train_step` runs it in every step,
`make_stored_train_step` reads what `store_logits` has computed before.

Its twin: `tf_impl/compression/distillation.py`.

Where the frameworks differ and why:
- `F.kl_div` takes log-probabilities, but divides by the classes too unless "batchmean" is asked
  for. Keras's `KLDivergence` takes probabilities and clips them: given the student's logarithms,
  its gradient is zero, however plausible the loss.
- A module has a mode, which is set for the teacher's pass and put back; Keras has it per call.
- The teacher's pass is under `no_grad` and not in `inference_mode`, whose tensors cannot be saved
  for the student's backward pass. There it stands outside the tape.
- Shapes show when a step runs, so the first step tries the student once in evaluation mode; a graph
  knows them while it is traced.

When it helps and when it hurts: it helps a student that must be small, most with few labels or none
(alpha 1). Each step costs a forward pass of the teacher, often many times the student's own step.
Without random augmentation the teacher says the same in every epoch: store it once. With it, the
teacher has to see just what the student sees (Beyer et al., 2021, "Knowledge distillation: A good
teacher is patient and consistent"). It hurts where the teacher is no better than the student, or so
far above it that the student cannot follow (Cho and Hariharan, 2019, "On the Efficacy of Knowledge
Distillation"). T and alpha have no values that are right everywhere.

Run it alone: `python -m pt_impl.compression.distillation` prints a student alone, with a teacher in
every step and with stored logits.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map, tree_structure  # torch has no public one


def soft_loss(
    student_logits: Tensor, teacher_logits: Tensor, *, temperature: float, class_axis: int = -1
) -> Tensor:
    """Return T^2 KL(teacher || student) at temperature T, the mean over all positions: a scalar.

    Logits of one shape, classes along `class_axis`, and any float dtype; half-width ones are cast
    to float32.
    """
    rows = (
        logits.movedim(class_axis, -1).reshape(-1, logits.shape[class_axis])
        for logits in (student_logits, teacher_logits)
    )
    log_q, log_p = (F.log_softmax(_at_least_float32(x) / temperature, dim=-1) for x in rows)
    # Logarithms on both sides: a probability that underflows must not become an infinity.
    return F.kl_div(log_q, log_p, reduction="batchmean", log_target=True) * temperature**2


def make_train_step(
    student: nn.Module,
    teacher: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_fn: Callable,
    *,
    temperature: float = 4.0,
    alpha: float = 0.9,
    class_axis: int = -1,
) -> Callable:
    """Return `step(x, y) -> loss`: one update of the student, with the teacher's logits for x.

    x: a tensor, a tuple of the positional arguments of both models or a dict of the named ones;
    anything else is handed over as it is. Both give logits of one shape, or an output that has them
    as `.logits` or under "logits", or several of them in a tuple, list or dict: their soft losses
    are added up; one of one class adds nothing. `loss_fn(output, y)` returns the mean over the
    batch. loss: scalar on the device, the weighted sum. temperature: above 0. alpha: the share of
    the teacher, 0 (the plain step, no teacher runs) to 1 (`loss_fn` is not called, y may be
    anything). class_axis: where logits have their classes; 1 for what convolutions give for each
    pixel.

    Raises ValueError for settings out of range and for a student without trainable parameters; the
    first step does, before anything is changed, where the teacher's logits have another shape (it
    knows other classes), where no output has two classes or one has no axis of classes, where
    labels y say that classes are along another axis, and where one of both gives probabilities:
    rows that sum to one.
    """
    learn = make_stored_train_step(
        student, optimizer, loss_fn, temperature=temperature, alpha=alpha, class_axis=class_axis
    )

    def step(x, y):
        return learn(x, (y, _logits(_infer(teacher, x)) if alpha else None))

    return step


def make_stored_train_step(
    student: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_fn: Callable,
    *,
    temperature: float = 4.0,
    alpha: float = 0.9,
    class_axis: int = -1,
) -> Callable:
    """Return `step(x, (y, teacher_logits)) -> loss`: `make_train_step` without the teacher.

    teacher_logits: the rows of `store_logits` that belong to x. All else is as there.
    """
    _check(student, temperature, alpha)
    student.train()
    fits = alpha == 0

    def step(x, y):
        nonlocal fits
        labels, target = y[0], _in_order(y[1])
        if not fits:  # in evaluation mode, so that BatchNorm has not moved if this raises
            _check_logits(_logits(_infer(student, x)), target, class_axis)
            _check_labels(target, labels, class_axis)
            fits = True
        optimizer.zero_grad(set_to_none=True)
        output = _call(student, x)
        if alpha == 0:
            loss = loss_fn(output, labels)
        else:
            pairs = zip(tree_leaves(_logits(output)), tree_leaves(target), strict=True)
            settings = {"temperature": temperature, "class_axis": class_axis}
            loss = alpha * sum(soft_loss(*pair, **settings) for pair in pairs)
            if alpha < 1:
                loss = loss + (1 - alpha) * loss_fn(output, labels)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def store_logits(teacher: nn.Module, x, *, batch_size: int = 256) -> Tensor:
    """Return the teacher's logits for all samples of x, computed `batch_size` at a time.

    x: as in `make_train_step`, with the samples along the first axis of every tensor in it; what
    is none, such as None for a mask, goes with every part. Of several outputs all are stored, in
    their structure.
    """
    parts = []
    for start in range(0, _samples(x), batch_size):
        rows = slice(start, start + batch_size)
        some = tree_map(lambda v, rows=rows: v[rows] if _has_samples(v) else v, x)
        parts.append(_logits(_infer(teacher, some)))
    return tree_map(lambda *rows: torch.cat(rows), *parts)


def _samples(x) -> int:
    return len(next(filter(_has_samples, tree_leaves(x))))


def _has_samples(value) -> bool:
    return len(getattr(value, "shape", ())) > 0


def _call(model: nn.Module, x):
    named = x if isinstance(x, dict) else {}
    return model(*(() if named else x if isinstance(x, tuple) else (x,)), **named)


def _logits(output):
    """What says classes: all of an output, or what it has under that name."""
    if isinstance(output, dict) and "logits" in output:
        return output["logits"]
    return _in_order(getattr(output, "logits", output))


def _in_order(tree):
    """A dict by its keys: both models, and labels, may have another order."""
    return (
        dict(sorted(tree.items(), key=lambda each: str(each[0])))
        if isinstance(tree, dict)
        else tree
    )


def _infer(model: nn.Module, x):
    """The output in evaluation mode, without gradients; each module gets its mode back."""
    modes = {module: module.training for module in model.modules()}
    try:
        if any(modes.values()):
            model.eval()
        with torch.no_grad():
            # It may change its inputs in place, such as `x.sub_(mean)`, and others read them, too.
            own = tree_map(lambda v: v.clone() if isinstance(v, Tensor) else v, x)
            return _call(model, own)
    finally:
        for module, mode in modes.items():
            if module.training != mode:
                module.train(mode)  # some do more in it, as LoRA does


def _at_least_float32(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _check(student: nn.Module, temperature: float, alpha: float) -> None:
    if not 0 < temperature < math.inf:
        raise ValueError(f"temperature must be above 0 and finite, not {temperature!r}")
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha must be between 0 and 1, not {alpha!r}")
    if not any(parameter.requires_grad for parameter in student.parameters()):
        raise ValueError("the student has no trainable parameters: there is nothing to teach")


def _check_labels(target, labels, class_axis: int) -> None:
    """Raise where labels, which lack the axis of the classes, say that it is another one.

    Of several outputs each has its own labels, in the same structure, or all have the same.
    """
    outputs = tree_leaves(target)
    labels = _in_order(labels)
    same = tree_structure(labels) == tree_structure(target)
    each = tree_leaves(labels) if same else [labels] * len(outputs)
    for logits, own in zip(outputs, each, strict=True):
        if not isinstance(own, Tensor):
            continue
        shape, found = list(logits.shape), list(own.shape)
        axes = [a for a in range(1, len(shape)) if shape[:a] + shape[a + 1 :] == found]
        if axes and class_axis % len(shape) not in axes:
            raise ValueError(
                f"labels of {found} and logits of {shape} have the classes along axis {axes[0]}, "
                f"not {class_axis}: say so by class_axis"
            )


def _check_logits(student, teacher, class_axis: int) -> None:
    """Raise unless both are logits of one shape, or as many of them in one structure."""
    pairs = tree_leaves(student), tree_leaves(teacher)
    same = tree_structure(student) == tree_structure(teacher)
    if not same or not all(_are_alike(*pair) for pair in zip(*pairs, strict=True)):
        ours, theirs = (
            list(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
            for logits in (student, teacher)
        )
        raise ValueError(
            "student and teacher must give logits of one shape, with the same classes: "
            f"the student gives {ours}, the teacher {theirs}"
        )
    _check_classes([list(logits.shape) for logits in pairs[1]], class_axis)
    for who, leaves in zip(("student", "teacher"), pairs, strict=True):
        if any(_are_probabilities(leaf.movedim(class_axis, -1)) for leaf in leaves):
            raise ValueError(
                f"the {who} gives probabilities (rows that sum to one), not logits: leave out its "
                "softmax, or take the logarithm"
            )


def _check_classes(shapes: list[list], class_axis: int) -> None:
    """Raise where softmax would be 1 everywhere, or be taken over the samples."""
    counts = [_classes(shape, class_axis) for shape in shapes]
    if min(counts) == 0 or max(counts) < 2:
        raise ValueError(
            f"logits of {shapes[counts.index(min(counts))]} have no two classes along axis "
            f"{class_axis}, so there is nothing to teach: of one logit z give two, 0 and z"
        )


def _classes(shape: list, class_axis: int) -> int:
    """How many there are; 0 where only samples have such an axis."""
    inside = len(shape) > 1 and -len(shape) < class_axis < len(shape)
    return shape[class_axis] if inside else 0


def _are_alike(ours, theirs) -> bool:
    tensors = isinstance(ours, Tensor) and isinstance(theirs, Tensor)
    return tensors and ours.ndim > 0 and ours.shape == theirs.shape


def _are_probabilities(output: Tensor) -> bool:
    """Whether no value is below zero and each row sums to one."""
    rows = output.detach().double()
    if rows.shape[-1] < 2 or not len(rows) or (rows < 0).any():
        return False
    return bool(((rows.sum(-1) - 1).abs() < 1e-2).all())


def main() -> None:
    """Print the digits student alone, taught, and taught by stored logits, after two epochs."""
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
    print("step      ms a step  accuracy after 2 epochs")
    for name in ("alone", "taught", "stored"):
        student = models.build(task.model, init_weights(task.model, seed=0))
        optimizer = training.make_optimizer(student, task.recipe)
        labels = y
        if name == "alone":
            step = training.make_train_step(student, optimizer, loss_fn)
        elif name == "taught":
            step = make_train_step(student, teacher, optimizer, loss_fn)
        else:
            labels = (y, store_logits(teacher, x))
            step = make_stored_train_step(student, optimizer, loss_fn)
        start = time.perf_counter()
        training.fit(step, x, labels, batch_size=64, epochs=2, seed=0)
        runtime.synchronize()
        ms = (time.perf_counter() - start) * 1e3 / (2 * (len(x) // 64))
        predict = training.make_predict(student)
        accuracy = training.evaluate(predict, *test, metric="accuracy", batch_size=256)
        print(f"{name:8}{ms:11.2f}{accuracy:24.1f}")


if __name__ == "__main__":
    main()
