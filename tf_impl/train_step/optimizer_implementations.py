"""Implementations of one optimizer rule: AdamW, the ways that TensorFlow has to run an update.

What it changes: how many kernels an update takes and how often it reads and writes memory; not the
result, but for ids that repeat in a batch (below). Keras writes AdamW as some twenty operations a
variable, most of them a pass over memory of their own (for_loop); a kernel of TensorFlow's does all
but the decay in one (fused); XLA fuses those of a variable to a few loops (compiled). Each function
returns an optimizer to use as any other: in `fit`, or with `apply_gradients` in a step of your own.

Its twin: `pt_impl/train_step/optimizer_implementations.py`.

Where the frameworks differ and why:
- Keras has one implementation, a loop over the variables inside a `tf.function`, and leaves fusion
  to the compiler; PyTorch brings three, as arguments of one optimizer, and can compile them too.
  Its `foreach_optimizer` has no counterpart. fused is `ResourceApplyAdam`, which TensorFlow kept
  from the optimizers before Keras 3: one variable at a time, where PyTorch's kernel takes them all,
  and after a decay of its own. For SGD (`fused_sgd` there) Keras does not use such a kernel.
- TensorFlow's executor runs the graph of the loop, and may run the updates of several variables at
  the same time; PyTorch runs the loop from Python.
- Keras adds its epsilon before the second moment is corrected for bias, PyTorch after: with
  epsilon = eps sqrt(1 - beta2) the first update is the same, and later ones differ by a relative
  eps / sqrt(v̂) at most. Keras also computes 1 - beta2^t in float32, PyTorch in float64: for a
  beta2 of 0.999 that moves the first updates by a relative 3e-5 at most. The kernel takes 1 - beta2
  in float32 too, so that this cancels.
- An embedding's gradient is slices here, one a lookup. Of an id that a batch holds twice, Keras 3
  adds up the squares of its slices for the second moment, and so do for_loop and compiled. fused
  squares their sum: the rule, as in PyTorch and tf_keras.

When it helps and when it hurts: compiled helps where the update is a visible share of a step: many
variables and little arithmetic for each. It needs its compile time back, and nothing is left to
gain where the whole step is compiled already. fused helps there too, and compiles nothing. None
helps a step that the forward and backward pass dominate.

Run it alone: `python -m tf_impl.train_step.optimizer_implementations` prints all on 10 million
weights.

Copy with it: nothing.
"""

import math

import tensorflow as tf


def for_loop_optimizer(
    model: tf.keras.Model,
    *,
    learning_rate: float,
    weight_decay: float = 0.01,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
) -> tf.keras.optimizers.AdamW:
    """AdamW that updates variable by variable, operation by operation: Keras's own.

    The rule: w -= lr weight_decay w, then w -= lr m̂ / (sqrt(v̂) + eps), with m̂ and v̂ the moments
    corrected for bias (Loshchilov and Hutter, 2019). But for ids that repeat in a batch: see above.

    Args:
        model: its trainable variables are updated.
        learning_rate, weight_decay: both at least 0.
        beta1, beta2: how much of the first and the second moment a step keeps, below 1.
        eps: added to the root of the second moment.

    Returns:
        The optimizer, with its variables.

    Raises:
        ValueError: a setting is out of range, or the model has no variables yet.
    """
    _check(model, learning_rate, weight_decay, beta1, beta2, eps)
    optimizer = tf.keras.optimizers.AdamW(
        learning_rate=float(learning_rate),
        weight_decay=weight_decay,
        beta_1=beta1,
        beta_2=beta2,
        epsilon=eps * math.sqrt(1.0 - beta2),
    )
    optimizer.jit_compile = False  # tf_keras would compile each variable's update on a GPU
    optimizer.build(model.trainable_variables)
    return optimizer


def fused_optimizer(
    model: tf.keras.Model,
    *,
    learning_rate: float,
    weight_decay: float = 0.01,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
) -> tf.keras.optimizers.AdamW:
    """AdamW that updates each variable with one kernel of TensorFlow's, after its decay.

    `FusedAdamW` alone is all there is to copy.

    Args, Returns, Raises: as in `for_loop_optimizer`; NotImplementedError for variables that are
    not floating-point numbers, which the kernel refuses.
    """
    _check(model, learning_rate, weight_decay, beta1, beta2, eps)
    optimizer = FusedAdamW(
        learning_rate=float(learning_rate),
        weight_decay=weight_decay,
        beta_1=beta1,
        beta_2=beta2,
        epsilon=eps * math.sqrt(1.0 - beta2),
    )
    optimizer.jit_compile = False
    optimizer.build(model.trainable_variables)
    return optimizer


class FusedAdamW(tf.keras.optimizers.AdamW):
    """Keras's AdamW with its update of a variable in one kernel; for `fit` and custom loops.

    Everything else is Keras's: arguments, decoupled decay, schedules, clipping, saving. An
    embedding's slices are summed first, which is the rule; Keras 3 squares each apart, so that its
    updates of ids that repeat in a batch are others.
    """

    def build(self, variables):
        """Make the moments; refuse what the kernel can't do before that."""
        if self.amsgrad:
            raise NotImplementedError("ResourceApplyAdam has no amsgrad: use Keras's AdamW")
        for variable in variables:
            if not tf.as_dtype(variable.dtype).is_floating:
                raise NotImplementedError(f"ResourceApplyAdam updates no {variable.dtype}")
        super().build(variables)

    def update_step(self, gradient, variable, learning_rate=None):
        """Read and write the variable and both moments once."""
        if learning_rate is None:  # tf_keras hands none over, Keras 3 does
            learning_rate = self.learning_rate
        dtype = variable.dtype
        step = tf.cast(tf.convert_to_tensor(self.iterations) + 1, dtype)
        place = self._place(variable)
        tf.raw_ops.ResourceApplyAdam(
            var=_handle(variable),
            m=_handle(self._momentums[place]),
            v=_handle(self._velocities[place]),
            beta1_power=tf.pow(tf.cast(self.beta_1, dtype), step),
            beta2_power=tf.pow(tf.cast(self.beta_2, dtype), step),
            lr=tf.cast(learning_rate, dtype),
            beta1=tf.cast(self.beta_1, dtype),
            beta2=tf.cast(self.beta_2, dtype),
            epsilon=tf.cast(self.epsilon, dtype),
            grad=tf.cast(tf.convert_to_tensor(gradient), dtype),
        )

    def _place(self, variable) -> int:
        """Where Keras keeps the moments of a variable, in either flavour."""
        if hasattr(self, "_get_variable_index"):
            return self._get_variable_index(variable)
        return self._index_dict[self._var_key(variable)]


def _handle(variable):
    """What a kernel gets for a variable, of TensorFlow or of Keras 3."""
    if isinstance(variable, tf.Variable):
        return variable.handle
    return variable.value.handle


def compiled_optimizer(
    model: tf.keras.Model,
    *,
    learning_rate: float,
    weight_decay: float = 0.01,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
) -> tf.keras.optimizers.AdamW:
    """AdamW whose update of all variables is one program of XLA; the first update compiles.

    The learning rate is a variable: another one needs no new program.

    Args, Returns, Raises: as in `for_loop_optimizer`.
    """
    _check(model, learning_rate, weight_decay, beta1, beta2, eps)
    optimizer = tf.keras.optimizers.AdamW(
        learning_rate=float(learning_rate),
        weight_decay=weight_decay,
        beta_1=beta1,
        beta_2=beta2,
        epsilon=eps * math.sqrt(1.0 - beta2),
    )
    optimizer.jit_compile = False  # the function around it is compiled as a whole
    optimizer.build(model.trainable_variables)
    _compile_update(optimizer, model.trainable_variables)
    return optimizer


def _compile_update(optimizer, variables: list) -> None:
    """Have the optimizer's method that updates variables run as a program of XLA.

    One program for all variables, and another for each choice of some of them.
    """
    places = {id(variable): place for place, variable in enumerate(variables)}

    def places_of(given) -> tuple[int, ...]:
        if any(id(variable) not in places for variable in given):
            raise ValueError("the optimizer was made for other variables: make it for the model")
        return tuple(places[id(variable)] for variable in given)

    if hasattr(optimizer, "apply"):  # Keras 3: its apply_gradients and LossScaleOptimizer call it
        keras_apply = optimizer.apply

        @tf.function(jit_compile=True)
        def program(gradients, places):
            keras_apply(gradients, [variables[place] for place in places])

        def apply(grads, trainable_variables=None):
            given = variables if trainable_variables is None else trainable_variables
            program(list(grads), places_of(given))

        optimizer.apply = apply
    else:
        keras_apply_gradients = optimizer.apply_gradients

        @tf.function(jit_compile=True)
        def program(gradients, places):
            own = [variables[place] for place in places]
            keras_apply_gradients(zip(gradients, own, strict=True))

        def apply_gradients(grads_and_vars, **kwargs):
            gradients, given = zip(*grads_and_vars, strict=True)
            program(list(gradients), places_of(given))

        optimizer.apply_gradients = apply_gradients


def _check(model, learning_rate, weight_decay, beta1, beta2, eps) -> None:
    if not model.built:
        raise ValueError("the model has no variables yet: call it once on an example input")
    if min(learning_rate, weight_decay, eps) < 0 or not (0 <= beta1 < 1 and 0 <= beta2 < 1):
        raise ValueError(
            "learning_rate, weight_decay and eps must be at least 0, beta1 and beta2 in [0, 1)"
        )


def main() -> None:
    """Print all implementations on a transformer of 10 million weights, in interleaved samples."""
    import os
    import statistics
    import time

    from shared.specs import TASKS
    from shared.weights import init_weights
    from tf_impl.kit import models, runtime, training

    runtime.configure(threads=os.cpu_count() or 1, seed=0)
    spec = TASKS["text-gpt-wide"].model
    updates, times = {}, {}
    for make in (for_loop_optimizer, fused_optimizer, compiled_optimizer):
        model = models.build(spec, init_weights(spec, seed=0))
        gradients = [tf.fill(v.shape, 0.01) for v in model.trainable_variables]
        name = make.__name__.removesuffix("_optimizer")
        optimizer = make(model, learning_rate=1e-3)
        updates[name], times[name] = training.make_update(model, optimizer, gradients), []
        updates[name]()
    for _ in range(20):
        for name, update in updates.items():
            start = time.perf_counter()
            for _ in range(5):
                update()
            runtime.synchronize()
            times[name].append((time.perf_counter() - start) / 5)
    print(f"AdamW, {models.parameter_count(model):,} weights: ms an update, ratio")
    baseline = statistics.median(times["for_loop"])
    for name, samples in times.items():
        seconds = statistics.median(samples)
        print(f"{name:9}{seconds * 1e3:8.2f}{seconds / baseline:7.2f}")


if __name__ == "__main__":
    main()
