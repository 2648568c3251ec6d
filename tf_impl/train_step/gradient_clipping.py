"""Gradient clipping, and a guard that stops before values that are not finite reach the weights.

What it changes: between gradients and update, all gradients are multiplied by
min(1, max_norm / norm), where norm is the L2 norm of all of them as one vector (Pascanu et al.,
2013, "On the difficulty of training recurrent neural networks"). The step keeps its direction.
`VariableClipper` clips each tensor by its own norm, which bends it. `FiniteGuard` stops a step
where an input, the loss or a gradient holds NaN or infinity, and says which, before any weight
changes. BatchNorm's moving statistics change in the forward pass: take them from a checkpoint then.

Its twin: `pt_impl/train_step/gradient_clipping.py`.

Where the frameworks differ and why:
- `tf.clip_by_global_norm` is Keras's `global_clipnorm` and PyTorch's `clip_grad_norm_` over all
  parameters, but for 1e-6 that PyTorch adds to the norm. Keras's `clipnorm` is per variable.
- Clipping spreads what is not finite: a NaN makes every gradient NaN; an infinite norm makes every
  other gradient NaN here and 0 there (max_norm / inf). So the guard looks before.
- In `fit`, clipping is an argument of the optimizer (`global_clipnorm`, `clipnorm`), and the guard
  `callbacks.TerminateOnNaN`, which looks at the loss after the weights have changed.
- The guard is a branch of the graph: update, or count what is not finite. Python reads one flag a
  step, as the twin does, which waits for a GPU; so Python calls the step, not a tf.function.
- Keras's LossScaleOptimizer unscales within `apply` (where its inner optimizer's own clipping comes
  after), so scaled gradients are clipped at max_norm * `scale`. `GradScaler` has `unscale_`.
- An embedding's gradient is slices here, one a lookup. Their norm is not the gradient's where a
  row was looked up twice (`global_norm` and Keras's clipping take it), so the norm is that of their
  sums. The slices themselves are scaled and stay slices, as the optimizer gets them unclipped.

When it helps and when it hurts: it helps where single batches give gradients far above the usual
(recurrent networks, transformers early on). Log `step.gradient_norm()` and set max_norm where few
steps are above: a bound that always binds fixes the length of every step and takes the learning
rate's part (less so for Adam). It costs two passes over the gradients, whatever the batch; the
guard costs one, one over the inputs, and the flag. Where nothing is clipped, guarded or measured,
no norm is taken.

Run it alone: `python -m tf_impl.train_step.gradient_clipping` prints the plain step against both.

Copy with it: nothing.
"""

import inspect
import math
from collections.abc import Callable, Iterator
from numbers import Real

import tensorflow as tf

_DATA = "look at the data and its preprocessing (missing values, a division by zero)"
_LOSS = "look at the learning rate, the weights, and at log, exp and divisions before the loss"
_GRADIENT = "look for sqrt, norm, log or a division at 0 (tf.debugging.enable_check_numerics helps)"
_OVERFLOW = "each gradient is finite but their norm overflows: look at the scale of the loss"


class GradientClipper:
    """Clips all gradients by their global L2 norm: between `tape.gradient` and `apply_gradients`.

    Args:
        model: whose gradients are clipped.
        max_norm: the most that the norm may be after clipping; `math.inf` clips nothing.

    Raises:
        ValueError: max_norm is not above 0, or the model has no trainable variables.
    """

    def __init__(self, model: tf.keras.Model, *, max_norm: float = 1.0) -> None:
        _check(model, max_norm)
        self.max_norm = max_norm

    def norm(self, gradients: list) -> tf.Tensor:
        """The L2 norm of all gradients as one vector, in the widest of their dtypes.

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
        return clipped


class VariableClipper:
    """Clips each variable's gradient by its own L2 norm, which Keras calls `clipnorm`.

    Args, Raises: as in `GradientClipper`.
    """

    def __init__(self, model: tf.keras.Model, *, max_norm: float = 1.0) -> None:
        _check(model, max_norm)
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


class FiniteGuard:
    """Stops a step before values that are not finite reach the weights, and says where they are.

    `apply` stands in the graph, where `optimizer.apply_gradients` stood; `check` looks, outside of
    it, at what `apply` returned.

    Args:
        model: whose gradients are looked at.
    """

    def __init__(self, model: tf.keras.Model) -> None:
        self.variables, self.steps = model.trainable_variables, 0

    def apply(self, optimizer, clipped: list, x, y, loss, gradients: list, norm) -> tuple:
        """Update the variables if all is finite, else count what is not.

        Args:
            optimizer: built already, which a branch of a graph could not do.
            clipped: the gradients to apply.
            x, y, loss: the batch and its loss.
            gradients, norm: before clipping; the norm is finite where all gradients are.

        Returns:
            Whether all is finite, and the number of values that are not, by suspect.
        """
        inputs = [tensor for _, tensor in _inputs(x, y)]
        suspects = [*inputs, loss, *reversed(gradients)]

        def update():
            optimizer.apply_gradients(zip(clipped, self.variables, strict=True))
            return tf.zeros(len(suspects), tf.int64)

        def count():
            return tf.stack([_count_not_finite(tensor) for tensor in suspects])

        flags = [tf.reduce_all(_is_finite(tensor)) for tensor in [*inputs, loss, norm]]
        finite = tf.reduce_all(flags)
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
    model: tf.keras.Model,
    optimizer: tf.keras.optimizers.Optimizer,
    loss_fn: Callable,
    *,
    max_norm: float = 1.0,
    check_finite: bool = False,
    measure_norm: bool = False,
) -> Callable:
    """Make the plain train step with clipping by the global norm and the guard.

    Args:
        model, optimizer: as ever; the model has its variables.
        loss_fn: `loss_fn(output, y)` returns a scalar.
        max_norm: the most that the norm may be after clipping; `math.inf` does not clip.
        check_finite: whether a `FiniteGuard` looks at each step.
        measure_norm: take the norm also where neither needs it, for `step.gradient_norm()`.

    Returns:
        `step(x, y) -> loss`, a scalar on the device. x: a tensor or a structure of tensors, handed
        over as `fit` does: as one argument, but where the model's `call` needs several.
        `step.gradient_norm()` reads what the last step's norm was before clipping (NaN before the
        first), which waits for the device; it raises ValueError where no norm is taken.

    Raises:
        ValueError: as `GradientClipper`, or the optimizer scales the loss. The step:
            FloatingPointError, as `FiniteGuard.check`; weights and optimizer are as before then.
    """
    clipper, guard = GradientClipper(model, max_norm=max_norm), FiniteGuard(model)
    variables = model.trainable_variables
    _prepare(optimizer, variables)
    needs_norm = max_norm < math.inf or check_finite or measure_norm
    last_norm = tf.Variable(math.nan, trainable=False)

    @tf.function(jit_compile=False)
    def train(x, y):
        loss, gradients = _gradients(model, loss_fn, variables, x, y)
        norm = None
        if needs_norm:
            norm = clipper.norm(gradients)
            last_norm.assign(tf.cast(norm, tf.float32))
        clipped = clipper.clip(gradients, norm)
        if check_finite:
            return loss, *guard.apply(optimizer, clipped, x, y, loss, gradients, norm)
        optimizer.apply_gradients(zip(clipped, variables, strict=True))
        return loss

    def guarded_step(x, y):
        loss, finite, counts = train(x, y)
        guard.check(x, y, finite, counts)
        return loss

    def gradient_norm() -> float:
        if not needs_norm:
            raise ValueError("no norm is taken: ask for it with measure_norm=True")
        return float(last_norm)

    step = guarded_step if check_finite else train
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

    Args, Returns, Raises: as in `make_train_step`; no guard and no `gradient_norm`.
    """
    clipper = VariableClipper(model, max_norm=max_norm)
    variables = model.trainable_variables
    _prepare(optimizer, variables)

    @tf.function(jit_compile=False)
    def step(x, y):
        loss, gradients = _gradients(model, loss_fn, variables, x, y)
        optimizer.apply_gradients(zip(clipper.clip(gradients), variables, strict=True))
        return loss

    return step


def _check(model, max_norm: float) -> None:
    if not isinstance(max_norm, Real) or not max_norm > 0:
        raise ValueError(f"max_norm must be above 0 (inf does not clip), not {max_norm!r}")
    if not (model.built and model.trainable_variables):
        raise ValueError("the model has no trainable variables (a new one: call it on an example)")


def _prepare(optimizer, variables: list) -> None:
    """Build the optimizer, which a branch of the graph could not; refuse one that unscales."""
    # Keras 3's loss_scale_factor unscales as well.
    if hasattr(optimizer, "inner_optimizer") or getattr(optimizer, "loss_scale_factor", None):
        raise ValueError(
            "pass the optimizer itself, without loss_scale_factor: this step scales no loss"
        )
    if not hasattr(optimizer, "build"):
        raise NotImplementedError(
            "a legacy optimizer: take the one of its name in keras.optimizers"
        )
    if not getattr(optimizer, "built", False):
        optimizer.build(variables)


def _gradients(model, loss_fn, variables: list, x, y) -> tuple:
    """Loss and gradients of a batch (None where the loss does not depend on a variable)."""
    with tf.GradientTape() as tape:
        loss = _with_own_losses(loss_fn(_call(model, x, training=True), y), model)
    return loss, tape.gradient(loss, variables)


def _dense(gradient):
    """The sum of an embedding's slices; any other gradient, and None, as it is."""
    is_slices = isinstance(gradient, tf.IndexedSlices)
    return tf.convert_to_tensor(gradient) if is_slices else gradient


def _real(gradient):
    """What has the gradient's norm: of complex numbers, real and imaginary parts side by side."""
    dense = _dense(gradient)
    if not dense.dtype.is_complex:
        return dense
    return tf.stack([tf.math.real(dense), tf.math.imag(dense)])


def _count_not_finite(tensor) -> tf.Tensor:
    if tensor is None:
        return tf.constant(0, tf.int64)
    return tf.math.count_nonzero(~_is_finite(_dense(tensor)))


def _is_finite(tensor) -> tf.Tensor:
    if tensor.dtype.is_complex:
        return tf.math.is_finite(tf.math.real(tensor)) & tf.math.is_finite(tf.math.imag(tensor))
    return tf.math.is_finite(tensor)


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


def _call(model, x, training: bool):
    """Call `model` as `fit` does: x is one argument, but where `call` needs several."""
    inputs = inspect.signature(model.call).parameters.values()
    inputs = [p for p in inputs if p.name not in ("training", "mask") and p.kind != p.VAR_KEYWORD]
    if isinstance(x, dict) and len(inputs) > 1 and x.keys() <= {p.name for p in inputs}:
        return model(**x, training=training)
    needed = sum(2 if p.kind == p.VAR_POSITIONAL else p.default is p.empty for p in inputs)
    if isinstance(x, tuple | list) and needed > 1:
        return model(*x, training=training)
    return model(x, training=training)


def _with_own_losses(loss, model):
    """Add the model's own losses (of regularisers, of `add_loss`) as `fit` does, in float32."""
    loss = tf.cast(loss, tf.float32) if loss.dtype.size < 4 else loss
    return sum((tf.cast(term, loss.dtype) for term in model.losses), loss)


def main() -> None:
    """Print the plain step against clipping and the guard on the digits CNN, interleaved."""
    import statistics
    import time

    from shared.specs import TASKS
    from shared.weights import init_weights
    from tf_impl.kit import models, runtime, training

    task = TASKS["digits-cnn"]
    batch = tf.random.normal((128, 32, 32, 1)), tf.zeros(128, tf.int64)
    rows = {"plain": {}, "clip": {}, "clip and guard": {"check_finite": True}}
    steps, times = {}, {name: [] for name in rows}
    for name, settings in rows.items():
        model = models.build(task.model, init_weights(task.model, seed=0))
        optimizer = training.make_optimizer(model, task.recipe)
        make = training.make_train_step if name == "plain" else make_train_step
        steps[name] = make(model, optimizer, training.cross_entropy, **settings)
    for _ in range(200):
        for name, step in steps.items():
            start = time.perf_counter()
            step(*batch)
            runtime.synchronize()
            times[name].append((time.perf_counter() - start) * 1e3)
    for name, samples in times.items():
        print(f"{name:14}{statistics.median(samples):8.2f} ms a step")


if __name__ == "__main__":
    main()
