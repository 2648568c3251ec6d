"""Gradient clipping, and a guard that stops before values that are not finite reach the weights.

What it changes: between gradients and update, all gradients are multiplied by
min(1, max_norm / norm), where norm is the L2 norm of all of them as one vector (Pascanu et al.,
2013, "On the difficulty of training recurrent neural networks"). The step keeps its direction.
`make_per_variable_step` clips each tensor by its own norm, which bends it; `make_scaled_step` clips
under loss scaling. With `check_finite` a step stops where an input, the loss or a gradient holds
NaN or infinity, and says which, before any weight changes. BatchNorm's moving statistics change in
the forward pass: take them from a checkpoint then.

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
  after), so scaled gradients are clipped at max_norm times the scale. `GradScaler` has `unscale_`.
- An embedding's gradient is slices here, one a lookup. Their norm is not the gradient's where a
  row was looked up twice (`global_norm` and Keras's clipping take it), so the norm is that of their
  sums. The slices themselves are scaled and stay slices, as the optimizer gets them unclipped.

When it helps and when it hurts: it helps where single batches give gradients far above the usual
(recurrent networks, transformers early on). Log `step.gradient_norm()` and set max_norm where few
steps are above: a bound that always binds fixes the length of every step and takes the learning
rate's part (less so for Adam). It costs two passes over the gradients, whatever the batch; the
guard costs one, one over the inputs, and the flag.

Run it alone: `python -m tf_impl.train_step.gradient_clipping` prints the plain step against both.
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


def make_train_step(
    model: tf.keras.Model,
    optimizer: tf.keras.optimizers.Optimizer,
    loss_fn: Callable,
    *,
    max_norm: float = 1.0,
    check_finite: bool = False,
) -> Callable:
    """Return `step(x, y) -> loss` that clips the gradients by their global L2 norm.

    x: a tensor or a structure of tensors, handed over as `fit` does: as one argument, but where the
    model's `call` needs several. loss: scalar on the device. max_norm: the most that the norm may
    be after clipping; `math.inf` only measures. `step.gradient_norm()` reads what it was before
    (NaN before the first step), which waits for the device. check_finite: the guard, clipping or
    not.

    Raises ValueError for a max_norm that is not above 0, a model without trainable variables and an
    optimizer that scales the loss. With check_finite `step` raises FloatingPointError: the number
    of its call, the first tensor that is not finite (an input, the loss, or the gradient nearest to
    the output), how many values, and where to look. Weights and optimizer are as before then.
    """
    variables = _variables(model, optimizer, max_norm)
    last_norm = tf.Variable(math.nan, trainable=False)

    @tf.function(jit_compile=False)
    def train(x, y):
        loss, gradients = _gradients(model, loss_fn, variables, x, y)
        norm = tf.linalg.global_norm(list(map(_dense, gradients)))
        last_norm.assign(tf.cast(norm, tf.float32))
        clipped = gradients
        if max_norm < math.inf:
            clipped, _ = tf.clip_by_global_norm(gradients, max_norm, use_norm=norm)
        if check_finite:
            return _apply_if_finite(optimizer, variables, clipped, x, y, loss, gradients, norm)
        optimizer.apply_gradients(zip(clipped, variables, strict=True))
        return loss

    step = _stopping(train, variables) if check_finite else train
    step.gradient_norm = lambda: float(last_norm)
    return step


def make_per_variable_step(
    model: tf.keras.Model,
    optimizer: tf.keras.optimizers.Optimizer,
    loss_fn: Callable,
    *,
    max_norm: float = 1.0,
) -> Callable:
    """Return `step(x, y) -> loss` that clips each variable's gradient by its own L2 norm.

    What Keras calls `clipnorm`. Arguments and errors as in `make_train_step`; no `gradient_norm`.
    """
    variables = _variables(model, optimizer, max_norm)

    @tf.function(jit_compile=False)
    def step(x, y):
        loss, gradients = _gradients(model, loss_fn, variables, x, y)
        if max_norm < math.inf:
            gradients = [_clipped(gradient, max_norm) for gradient in gradients]
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return loss

    return step


def make_scaled_step(
    model: tf.keras.Model,
    optimizer: tf.keras.optimizers.Optimizer,
    loss_fn: Callable,
    *,
    max_norm: float = 1.0,
    initial_scale: float = 65536.0,
) -> Callable:
    """Return `step(x, y) -> loss` that clips by the global norm under loss scaling.

    The gradients of the scaled loss are `scale` times too large; max_norm bounds the unscaled ones.
    The arithmetic is the model's own: for float16 build it under the policy "mixed_float16". A step
    whose gradients are not finite changes no weight and halves the scale (2,000 good ones double
    it), which is part of the method: there is no guard here. `step.loss_scale()` reads the scale;
    `step.optimizer` holds it in its variables: save it to resume.
    All else as in `make_train_step`. Raises ValueError for what that refuses and for a scale that
    is not above 0; NotImplementedError with tf_keras.
    """
    variables = _variables(model, optimizer, max_norm)
    if not initial_scale > 0:
        raise ValueError(f"initial_scale must be above 0, not {initial_scale!r}")
    if not hasattr(tf.keras.optimizers, "LossScaleOptimizer"):
        raise NotImplementedError("tf_keras scales a loss by other methods: use Keras 3")
    scaling = tf.keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=initial_scale)
    scaling.build(variables)  # or the trace would take the first scale for a constant

    @tf.function(jit_compile=False)
    def step(x, y):
        loss, gradients = _gradients(model, loss_fn, variables, x, y, scaling.scale_loss)
        if max_norm < math.inf:
            # The same as clipping at max_norm after unscaling, which only apply_gradients does.
            bound = max_norm * tf.convert_to_tensor(scaling.dynamic_scale)
            norm = tf.linalg.global_norm(list(map(_dense, gradients)))
            gradients, _ = tf.clip_by_global_norm(gradients, bound, use_norm=norm)
        scaling.apply_gradients(zip(gradients, variables, strict=True))
        return loss

    step.loss_scale = lambda: float(scaling.dynamic_scale)
    step.optimizer = scaling
    return step


def _variables(model, optimizer, max_norm: float) -> list:
    """Check model, optimizer and setting; return the trainable variables."""
    if not isinstance(max_norm, Real) or not max_norm > 0:
        raise ValueError(f"max_norm must be above 0 (inf does not clip), not {max_norm!r}")
    if not (model.built and model.trainable_variables):
        raise ValueError("the model has no trainable variables (a new one: call it on an example)")
    if hasattr(optimizer, "inner_optimizer"):
        raise ValueError("pass the optimizer itself: make_scaled_step wraps it to scale the loss")
    if not getattr(optimizer, "built", False):
        optimizer.build(model.trainable_variables)  # a branch of the graph could not
    return model.trainable_variables


def _gradients(model, loss_fn, variables, x, y, scale=tf.identity) -> tuple:
    """Loss, and the gradients of the scaled loss (None where it does not depend on one)."""
    with tf.GradientTape() as tape:
        loss = _with_own_losses(loss_fn(_call(model, x, training=True), y), model)
        objective = scale(loss)
    return loss, tape.gradient(objective, variables)


def _dense(gradient):
    """The sum of an embedding's slices; any other gradient, and None, as it is."""
    is_slices = isinstance(gradient, tf.IndexedSlices)
    return tf.convert_to_tensor(gradient) if is_slices else gradient


def _clipped(gradient, max_norm: float):
    """One gradient, scaled to an L2 norm of `max_norm` at most."""
    if gradient is None:
        return None
    (clipped,), _ = tf.clip_by_global_norm([gradient], max_norm, tf.norm(_dense(gradient)))
    return clipped


def _apply_if_finite(optimizer, variables, clipped, x, y, loss, gradients, norm) -> tuple:
    """Update, or count what is not finite; return loss, whether all is finite, and the counts."""
    inputs = [tensor for _, tensor in _inputs(x, y)]
    suspects = [*inputs, loss, *reversed(gradients)]

    def apply():
        optimizer.apply_gradients(zip(clipped, variables, strict=True))
        return tf.zeros(len(suspects), tf.int64)

    def count():
        known = [0.0 if tensor is None else _dense(tensor) for tensor in suspects]
        bad = [~tf.math.is_finite(tensor) for tensor in known]
        return tf.stack([tf.math.count_nonzero(values) for values in bad])

    # The norm stands for all gradients: it is finite only where they are.
    flags = [tf.reduce_all(tf.math.is_finite(tensor)) for tensor in [*inputs, loss, norm]]
    finite = tf.reduce_all(flags)
    return loss, finite, tf.cond(finite, apply, count)


def _stopping(train: Callable, variables: list) -> Callable:
    """The step that raises where `train` did not update, for the first tensor that is to blame."""
    calls = 0
    gradients = [
        (f"the gradient of {getattr(v, 'path', v.name)}", math.prod(v.shape), _GRADIENT)
        for v in reversed(variables)  # gradients come from the output, where the last ones are
    ]

    def step(x, y):
        nonlocal calls
        calls += 1
        loss, finite, counts = train(x, y)
        if finite:  # the one place that waits for the device
            return loss
        tensors = [(name, int(tf.size(tensor)), _DATA) for name, tensor in _inputs(x, y)]
        tensors += [("the loss", 1, _LOSS), *gradients]
        blamed = (
            f"{bad} of {size} values of {name} are not finite: {advice}"
            for (name, size, advice), bad in zip(tensors, counts.numpy(), strict=True)
            if bad
        )
        raise FloatingPointError(f"step {calls}: {next(blamed, _OVERFLOW)}")

    return step


def _inputs(x, y) -> list[tuple]:
    """The floating-point tensors of x and y with their names, such as "input x[0]"."""
    return [*_floating("input x", x), *_floating("input y", y)]


def _floating(name: str, tree) -> Iterator[tuple]:
    if isinstance(tree, dict | list | tuple):
        for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from _floating(f"{name}[{key!r}]", value)
    elif hasattr(tree, "dtype") and tf.as_dtype(tree.dtype).is_floating:
        yield name, tree


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
    steps, taken = {}, {name: [] for name in rows}
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
            taken[name].append((time.perf_counter() - start) * 1e3)
    for name, times in taken.items():
        print(f"{name:14}{statistics.median(times):8.2f} ms a step")


if __name__ == "__main__":
    main()
