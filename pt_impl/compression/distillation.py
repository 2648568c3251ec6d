"""Knowledge distillation: a small student learns from a large trained teacher.

    with torch.no_grad():
        target = teacher(x)  # in evaluation mode
    output = student(x)
    soft = soft_loss(output, target, temperature=4.0)
    loss = alpha * soft + (1 - alpha) * loss_fn(output, y)

What it changes: the loss. The student learns from the labels and from the teacher's probabilities,
softened by a temperature T: T^2 KL(softmax(teacher / T) || softmax(student / T)) (Hinton, Vinyals
and Dean, 2015, section 2). T^2 keeps the size of the soft gradient the same for any T. The teacher
does not change. `make_train_step` runs it in every step. `make_stored_train_step` reads the logits
that `store_logits` has computed before.

Its twin: `tf_impl/compression/distillation.py`.

Where the frameworks differ and why:
- PyTorch: `F.kl_div` takes log-probabilities. By default it also divides by the number of classes.
- TensorFlow: Keras's `KLDivergence` takes probabilities and clips them to [1e-7, 1]. Some tutorials
  pass log-probabilities: they are all clipped to one value, and the gradient is zero. So the sum
  over log-probabilities is written out here.
- `keras.distillation.Distiller` clips, too, and leaves the teacher untrainable.
- PyTorch: the teacher's mode is set for its pass and restored. `inference_mode` does not work: its
  tensors can't be saved for a backward pass.

When it helps and when it hurts: it helps a student that must be small, most with few labels or none
(alpha 1). Without random augmentation the teacher's logits are the same in every epoch: store them.
With augmentation the teacher has to see the same images as the student (Beyer et al., 2021), which
costs its forward pass in every step. It hurts if the teacher is no better than the student, or far
better (Cho and Hariharan, 2019). Tune T and alpha.

Run it alone: `python -m pt_impl.compression.distillation` prints a student without a teacher, with
one in every step, and with stored logits.

Copy with it: `pt_impl/kit/calling.py`, `pt_impl/kit/checks/distillation.py`.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pt_impl.kit.calling import at_least_float32, call, concatenate, infer, logits, rows, tensors
from pt_impl.kit.checks.distillation import FirstBatch, check_distillation


def soft_loss(
    student_logits: Tensor, teacher_logits: Tensor, *, temperature: float, class_axis: int = -1
) -> Tensor:
    """Return T^2 KL(teacher || student) at temperature T, the mean over all positions: a scalar.

    Logits of one shape, classes along `class_axis`, and any float dtype; half-precision ones are
    cast to float32.
    """
    log_q, log_p = (
        F.log_softmax(at_least_float32(each) / temperature, dim=class_axis)
        for each in (student_logits, teacher_logits)
    )
    # Logarithms on both sides: a probability that underflows must not become an infinity.
    total = F.kl_div(log_q, log_p, reduction="sum", log_target=True)
    positions = log_q.numel() // log_q.shape[class_axis]
    return total * (temperature**2 / positions)


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
    """Make the train step that asks the teacher about each batch.

    Args:
        student, teacher: both give logits of one shape, as a tensor, as `.logits` or under
            "logits"; or several in a tuple, list or dict, whose soft losses are added up.
        optimizer: of the student, which is put into training mode.
        loss_fn: `loss_fn(output, y)` returns the mean over the batch.
        temperature: above 0.
        alpha: the teacher's share. 0 is the plain step, and no teacher runs; with 1, `loss_fn` is
            not called and y may be anything.
        class_axis: where logits have their classes; 1 for what convolutions give for each pixel.

    Returns:
        `step(x, y) -> loss`: the weighted sum, a scalar on the device. x: a tuple of the positional
        arguments of both models, a mapping of their keywords, or their one argument.

    Raises:
        ValueError: settings are out of range, or the student has no trainable parameters. In the
            first step, before anything is changed: the teacher knows other classes, logits have
            fewer than two classes, labels y show classes along another axis, or a model gives
            probabilities.
    """
    learn = make_stored_train_step(
        student, optimizer, loss_fn, temperature=temperature, alpha=alpha, class_axis=class_axis
    )

    def step(x, y):
        return learn(x, (y, logits(infer(teacher, x)) if alpha else None))

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
    check_distillation(student, temperature, alpha)
    first_batch = FirstBatch(student, class_axis)
    student.train()

    def soft(output, target):
        pairs = zip(tensors(logits(output)), tensors(target), strict=True)
        settings = {"temperature": temperature, "class_axis": class_axis}
        return sum(soft_loss(*pair, **settings) for pair in pairs)

    def step(x, y):
        labels, target = y[0], logits(y[1])
        if alpha > 0:
            first_batch.check(x, labels, target)
        optimizer.zero_grad(set_to_none=True)
        output = call(student, x)
        loss = alpha * soft(output, target) if alpha > 0 else 0.0
        if alpha < 1:
            loss = loss + (1 - alpha) * loss_fn(output, labels)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def store_logits(teacher: nn.Module, x, *, batch_size: int = 256) -> Tensor:
    """Return the teacher's logits for all samples of x, computed `batch_size` at a time.

    x: as in `make_train_step`, with the samples along the first axis of every tensor in it; what
    has no first axis, such as None for a mask, goes with every part. Several outputs are all
    stored, in their structure.
    """
    samples = max(len(tensor) for tensor in tensors(x) if tensor.ndim)
    starts = range(0, samples, batch_size)
    parts = [logits(infer(teacher, rows(x, start, start + batch_size))) for start in starts]
    return concatenate(parts)


def main() -> None:
    """Print the digits student alone, taught, and taught by stored logits, after two epochs."""
    from pt_impl.kit import models, training
    from pt_impl.kit.demo import Demo
    from shared import teacher as trained

    demo = Demo("digits-student")
    teacher = models.build(trained.TASK.model, trained.load().weights)
    x, y = demo.train
    ways = {
        "alone": (training.make_train_step, y),
        "taught": (lambda student, *rest: make_train_step(student, teacher, *rest), y),
        "stored": (make_stored_train_step, (y, store_logits(teacher, x))),
    }
    print("step      ms a step  accuracy after 2 epochs")
    for name, (make, labels) in ways.items():
        student, optimizer, loss_fn = demo.build()
        ms = demo.fit(make(student, optimizer, loss_fn), epochs=2, y=labels)
        print(f"{name:8}{ms:11.2f}{demo.score(student):24.1f}")


if __name__ == "__main__":
    main()
