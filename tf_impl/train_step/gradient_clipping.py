"""Gradient clipping: no batch, however unusual, moves the weights far.

    clipper = GradientClipper(model, max_norm=1.0)
    gradients = tape.gradient(loss, model.trainable_variables)
    gradients = clipper.clip(gradients)  # before optimizer.apply_gradients

What it changes: all gradients are multiplied by min(1, max_norm / norm) before the update. The norm
is the L2 norm of all gradients as one vector (Pascanu et al., 2013, "On the difficulty of training
recurrent neural networks"). The step keeps its direction. `VariableClipper` clips each tensor by
its own norm, which changes the direction.

Its twin: `pt_impl/train_step/gradient_clipping.py`, which says where the frameworks differ.

When it helps and when it hurts: it helps if single batches give unusually large gradients:
recurrent networks, transformers early in training. Log `step.gradient_norm()` and set max_norm so
that few steps exceed it. If every step exceeds it, all steps have the same length, and max_norm
acts as a learning rate. It costs two passes over the gradients, whatever the batch. A NaN makes
every gradient NaN: `finite_guard.py` stops such steps.

Run it alone: `python -m tf_impl.train_step.gradient_clipping` compares the plain step with both.

Copy with it: `tf_impl/kit/calling.py`, `tf_impl/kit/checks/gradient_clipping.py`.
"""

import math
from collections.abc import Callable

import tensorflow as tf

from tf_impl.kit.calling import add_own_losses, call
from tf_impl.kit.checks.gradient_clipping import check_gradient_clipping, check_optimizer


class GradientClipper:
    """Clips all gradients by their global L2 norm: between `tape.gradient` and `apply_gradients`.

    Args:
        model: whose gradients are clipped.
        max_norm: the most that the norm may be after clipping; `math.inf` clips nothing.

    Raises:
        ValueError: max_norm is not above 0, or the model has no trainable variables.
    """

    def __init__(self, model: tf.keras.Model, *, max_norm: float = 1.0) -> None:
        check_gradient_clipping(model, max_norm)
        self.max_norm = max_norm

    def norm(self, gradients: list) -> tf.Tensor:
        """Return the L2 norm of all gradients as one vector, in the widest of their dtypes.

        None counts nothing.
        """
        tensors = [_real(gradient) for gradient in gradients if gradient is not None]
        dtypes = {tensor.dtype for tensor in tensors}
        if len(dtypes) < 2:
            return tf.linalg.global_norm(tensors)
        widest = max(dtypes, key=lambda dtype: dtype.size)
        norms = [tf.linalg.global_norm([t for t in tensors if t.dtype == d]) for d in dtypes]
        return tf.norm([tf.cast(norm, widest) for norm in norms])

    def clip(self, gradients: list, norm=None, scale=1.0) -> list:
        """Return the gradients scaled to `max_norm` at most.

        norm: what `norm(gradients)` returned, if known. scale: of gradients of a scaled loss, whose
        optimizer unscales them after this.
        """
        if self.max_norm == math.inf:
            return gradients
        if norm is None:
            norm = self.norm(gradients)
        clipped, _ = tf.clip_by_global_norm(gradients, self.max_norm * scale, use_norm=norm)
        return clipped  # an embedding's slices stay slices, each scaled


class VariableClipper:
    """Clips each variable's gradient by its own L2 norm, which Keras calls `clipnorm`.

    Args, Raises: as in `GradientClipper`.
    """

    def __init__(self, model: tf.keras.Model, *, max_norm: float = 1.0) -> None:
        check_gradient_clipping(model, max_norm)
        self.max_norm = max_norm

    def clip(self, gradients: list) -> list:
        """Return each gradient scaled to `max_norm` at most."""
        if self.max_norm == math.inf:
            return gradients
        return [gradient if gradient is None else self._clip(gradient) for gradient in gradients]

    def _clip(self, gradient):
        norm = tf.norm(_real(gradient))
        (clipped,), _ = tf.clip_by_global_norm([gradient], self.max_norm, use_norm=norm)
        return clipped


def make_train_step(
    model: tf.keras.Model,
    optimizer: tf.keras.optimizers.Optimizer,
    loss_fn: Callable,
    *,
    max_norm: float = 1.0,
    measure_norm: bool = False,
) -> Callable:
    """Make the plain train step with clipping by the global norm.

    Args:
        model, optimizer: as ever; the model has its variables.
        loss_fn: `loss_fn(output, y)` returns a scalar.
        max_norm: the most that the norm may be after clipping; `math.inf` does not clip.
        measure_norm: take the norm where nothing is clipped, too, for `step.gradient_norm()`.

    Returns:
        `step(x, y) -> loss`, a scalar on the device. x: a tensor or a structure of tensors, handed
        over as `fit` does: as one argument, but where the model's `call` needs several.
        `step.gradient_norm()` reads what the last step's norm was before clipping (NaN before the
        first), which waits for the device; it raises ValueError where no norm is taken.

    Raises:
        ValueError: as `GradientClipper`, or the optimizer scales the loss.
        NotImplementedError: a legacy optimizer.
    """
    clipper = GradientClipper(model, max_norm=max_norm)
    check_optimizer(optimizer)
    variables = model.trainable_variables
    optimizer.build(variables)  # or the step would be traced twice
    needs_norm = max_norm < math.inf or measure_norm
    last_norm = tf.Variable(math.nan, trainable=False)

    @tf.function(jit_compile=False)
    def step(x, y):
        loss, gradients = _gradients(model, loss_fn, variables, x, y)
        if needs_norm:
            norm = clipper.norm(gradients)
            last_norm.assign(tf.cast(norm, tf.float32))
            gradients = clipper.clip(gradients, norm)
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return loss

    def gradient_norm() -> float:
        if not needs_norm:
            raise ValueError("no norm is taken: ask for it with measure_norm=True")
        return float(last_norm)

    step.gradient_norm = gradient_norm
    return step


def make_per_variable_step(
    model: tf.keras.Model,
    optimizer: tf.keras.optimizers.Optimizer,
    loss_fn: Callable,
    *,
    max_norm: float = 1.0,
) -> Callable:
    """Make the plain train step with each variable's gradient clipped by its own L2 norm.

    Args, Returns, Raises: as in `make_train_step`, without `gradient_norm`.
    """
    clipper = VariableClipper(model, max_norm=max_norm)
    check_optimizer(optimizer)
    variables = model.trainable_variables
    optimizer.build(variables)

    @tf.function(jit_compile=False)
    def step(x, y):
        loss, gradients = _gradients(model, loss_fn, variables, x, y)
        optimizer.apply_gradients(zip(clipper.clip(gradients), variables, strict=True))
        return loss

    return step


def _gradients(model, loss_fn, variables: list, x, y) -> tuple:
    """Loss and gradients of a batch (None where the loss does not depend on a variable)."""
    with tf.GradientTape() as tape:
        loss = add_own_losses(loss_fn(call(model, x, training=True), y), model)
    return loss, tape.gradient(loss, variables)


def _real(gradient) -> tf.Tensor:
    """What has the gradient's norm: the sums of slices, and complex numbers as pairs of reals."""
    dense = tf.convert_to_tensor(gradient)
    if not dense.dtype.is_complex:
        return dense
    return tf.stack([tf.math.real(dense), tf.math.imag(dense)])


def main() -> None:
    """Print the plain step against clipping by all gradients' norm and by each one's."""
    from tf_impl.kit import training
    from tf_impl.kit.demo import Demo

    demo = Demo("digits-cnn")
    steps = {
        "plain": training.make_train_step(*demo.build()),
        "clipped": make_train_step(*demo.build()),
        "each clipped": make_per_variable_step(*demo.build()),
    }
    for name, ms in demo.times(steps).items():
        print(f"{name:14}{ms:8.2f} ms a step")
    print(f"norm of the last step's gradients: {steps['clipped'].gradient_norm():.3f}")


if __name__ == "__main__":
    main()
