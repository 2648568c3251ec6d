"""Non-finite guard: NaN and infinity stop a step before they reach the weights.

    guard = FiniteGuard(model)
    found = guard.apply(optimizer, gradients, x, y, loss)  # in the graph, as apply_gradients
    guard.check(x, y, *found)  # outside of it, in Python

What it changes: a step whose batch, loss or gradients hold NaN or infinity raises
FloatingPointError. The error says where they are and where to look. Weights and optimizer are as
before the step. BatchNorm's running statistics are not, since the forward pass has changed them:
take those from a checkpoint.

Its twin: `pt_impl/train_step/finite_guard.py`, which says where the frameworks differ.

When it helps and when it hurts: it helps if a run turns to NaN and nobody knows when. It costs one
pass over the gradients and one over the inputs. Loss scaling in float16 expects infinite gradients
and skips such steps itself. `recipes/nonfinite.py` finds the layer where NaN began, in a second
run.
- Check before clipping, which spreads non-finite values: pass the unclipped gradients, and those to
  apply as `clipped`.

Run it alone: `python -m tf_impl.train_step.finite_guard` compares it with the plain step, and puts
NaN into a batch.

Copy with it: `tf_impl/kit/calling.py`, `tf_impl/kit/checks/finite_guard.py`.
"""

import math
from collections.abc import Callable, Iterator

import tensorflow as tf

from tf_impl.kit.calling import add_own_losses, call
from tf_impl.kit.checks.finite_guard import check_finite_guard, check_optimizer

_DATA = "look at the data and its preprocessing (missing values, a division by zero)"
_LOSS = "look at the learning rate, the weights, and at log, exp and divisions before the loss"
_GRADIENT = "look for sqrt, norm, log or a division at 0 (tf.debugging.enable_check_numerics helps)"
_OVERFLOW = "each gradient is finite but their norm overflows: look at the scale of the loss"


class FiniteGuard:
    """Stops a step before values that are not finite reach the weights, and says where they are.

    `apply` takes the place of `optimizer.apply_gradients` in the graph; `check` looks, outside of
    it, at what `apply` returned.

    Args:
        model: whose gradients are looked at.

    Raises:
        ValueError: the model has no trainable variables.
    """

    def __init__(self, model: tf.keras.Model) -> None:
        check_finite_guard(model)
        self.variables, self.steps = model.trainable_variables, 0

    def apply(self, optimizer, gradients: list, x, y, loss, clipped: list | None = None) -> tuple:
        """Update the variables if all is finite, else count what is not.

        Args:
            optimizer: built already, which a branch of a graph could not do.
            gradients: of the loss, as they are.
            x, y, loss: the batch and its loss.
            clipped: what to apply in their place.

        Returns:
            Whether all is finite, and the number of values that are not, by suspect.
        """
        inputs = [tensor for _, tensor in _inputs(x, y)]
        suspects = [*inputs, loss, *reversed(gradients)]

        def update():
            applied = gradients if clipped is None else clipped
            optimizer.apply_gradients(zip(applied, self.variables, strict=True))
            return tf.zeros(len(suspects), tf.int64)

        def count():
            return tf.stack([_count_not_finite(tensor) for tensor in suspects])

        # A sum of squares is finite where all values are, and is one pass over them.
        squares = [tf.nn.l2_loss(_real(each)) for each in gradients if each is not None]
        finite = [tf.reduce_all(tf.math.is_finite(_real(each))) for each in [*inputs, loss]]
        finite = tf.reduce_all(finite + [tf.math.is_finite(each) for each in squares])
        return finite, tf.cond(finite, update, count)

    def check(self, x, y, finite, counts) -> None:
        """Raise where `apply` did not update. The one place that waits for the device.

        Raises:
            FloatingPointError: the number of the step, the first tensor that is not finite (an
                input, the loss, or the gradient nearest to the output), how many of its values, and
                where to look.
        """
        self.steps += 1
        if finite:
            return
        suspects = [(name, int(tf.size(tensor)), _DATA) for name, tensor in _inputs(x, y)]
        suspects.append(("the loss", 1, _LOSS))
        for variable in reversed(self.variables):  # gradients come from the output, the last ones
            name = getattr(variable, "path", variable.name)  # tf_keras has no path
            suspects.append((f"the gradient of {name}", math.prod(variable.shape), _GRADIENT))
        culprit = _OVERFLOW
        for (name, size, advice), bad in zip(suspects, counts.numpy(), strict=True):
            if bad:
                culprit = f"{bad} of {size} values of {name} are not finite: {advice}"
                break
        raise FloatingPointError(f"step {self.steps}: {culprit}")


def make_train_step(
    model: tf.keras.Model, optimizer: tf.keras.optimizers.Optimizer, loss_fn: Callable
) -> Callable:
    """Make the plain train step with the guard around its update.

    Args:
        model, optimizer: as ever; the model has its variables.
        loss_fn: `loss_fn(output, y)` returns a scalar.

    Returns:
        `step(x, y) -> loss`, a scalar on the device. x: a tensor or a structure of tensors, handed
        over as `fit` does: as one argument, but where the model's `call` needs several. It raises
        FloatingPointError as `FiniteGuard.check` does; weights and optimizer are as before then.

    Raises:
        ValueError: as `FiniteGuard`, or the optimizer scales the loss.
        NotImplementedError: a legacy optimizer.
    """
    guard = FiniteGuard(model)
    check_optimizer(optimizer)
    optimizer.build(model.trainable_variables)

    @tf.function(jit_compile=False)
    def train(x, y):
        with tf.GradientTape() as tape:
            loss = add_own_losses(loss_fn(call(model, x, training=True), y), model)
        gradients = tape.gradient(loss, guard.variables)
        return loss, *guard.apply(optimizer, gradients, x, y, loss)

    def step(x, y):
        loss, finite, counts = train(x, y)
        guard.check(x, y, finite, counts)
        return loss

    return step


def _count_not_finite(tensor) -> tf.Tensor:
    if tensor is None:
        return tf.constant(0, tf.int64)
    real = _real(tensor)
    bad = ~tf.math.is_finite(real)
    bad = tf.reduce_any(bad, 0) if tf.convert_to_tensor(tensor).dtype.is_complex else bad
    return tf.math.count_nonzero(bad)


def _real(tensor) -> tf.Tensor:
    """The sum of an embedding's slices; complex numbers as reals, the imaginary parts behind."""
    dense = tf.convert_to_tensor(tensor)
    if not dense.dtype.is_complex:
        return dense
    return tf.stack([tf.math.real(dense), tf.math.imag(dense)])


def _inputs(x, y) -> list[tuple]:
    """The floating-point and complex tensors of x and y, named as in "input x[0]"."""
    return [*_floating("input x", x), *_floating("input y", y)]


def _floating(name: str, tree) -> Iterator[tuple]:
    if isinstance(tree, dict | list | tuple):
        for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from _floating(f"{name}[{key!r}]", value)
    elif isinstance(tree, tf.SparseTensor | tf.RaggedTensor):
        yield from _floating(name, tree.values)
    elif hasattr(tree, "dtype"):
        dtype = tf.as_dtype(tree.dtype)
        if dtype.is_floating or dtype.is_complex:
            yield name, tf.convert_to_tensor(tree)


def main() -> None:
    """Print the plain step against the guarded one, and what it says of a batch with a NaN."""
    from tf_impl.kit import training
    from tf_impl.kit.demo import Demo

    demo = Demo("digits-cnn")
    steps = {
        "plain": training.make_train_step(*demo.build()),
        "guarded": make_train_step(*demo.build()),
    }
    for name, ms in demo.times(steps).items():
        print(f"{name:10}{ms:8.2f} ms a step")
    x, y = demo.batches[0]
    x = tf.tensor_scatter_nd_update(x, [[0, 0, 0, 0]], [math.nan])
    try:
        steps["guarded"](x, y)
    except FloatingPointError as error:
        print(error)


if __name__ == "__main__":
    main()
