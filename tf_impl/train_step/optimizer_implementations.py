"""Optimizer implementations: TensorFlow's ways to run the same update, AdamW's.

    optimizer = fused_optimizer(model, learning_rate=1e-3)  # for `fit` or a loop with a tape

What it changes: how many kernels an update runs and how often it reads and writes memory. The
result stays. for_loop is Keras's AdamW: about twenty operations per variable, most of them a pass
over memory. fused does all but the decay in one kernel of TensorFlow. In compiled, XLA fuses the
operations of a variable into a few loops.

Its twin: `pt_impl/train_step/optimizer_implementations.py`, which says where the frameworks differ.

When it helps and when it hurts: fused helps if the update takes a good part of a step: many
parameters with little arithmetic each, small batches, many small tensors. It compiles nothing.
compiled helps in the same cases, but its compile time has to be repaid. Neither helps if most time
goes to the forward and backward pass.
- If the whole step is compiled already, nothing is left to gain.

Run it alone: `python -m tf_impl.train_step.optimizer_implementations` compares all on 10 million
weights.

Copy with it: `tf_impl/kit/checks/optimizer_implementations.py`.
"""

import math

import tensorflow as tf

from tf_impl.kit.checks.optimizer_implementations import (
    check_kernel,
    check_optimizer_implementations,
)


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
    check_optimizer_implementations(model, learning_rate, weight_decay, beta1, beta2, eps)
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

    `FusedAdamW` is all there is to copy.

    Args, Returns, Raises: as in `for_loop_optimizer`; NotImplementedError for variables that are
    not floating-point numbers, which the kernel refuses.
    """
    check_optimizer_implementations(model, learning_rate, weight_decay, beta1, beta2, eps)
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
        check_kernel(self, variables)
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
    check_optimizer_implementations(model, learning_rate, weight_decay, beta1, beta2, eps)
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


def _compile_update(optimizer: tf.keras.optimizers.AdamW, variables: list) -> None:
    """Have the optimizer's method that updates variables run as a program of XLA.

    One program for all variables, and another for each choice of some of them.
    """
    places = {id(variable): place for place, variable in enumerate(variables)}
    keras_3 = hasattr(optimizer, "apply")  # which its apply_gradients and LossScaleOptimizer call
    own_update = optimizer.apply if keras_3 else optimizer.apply_gradients

    @tf.function(jit_compile=True)
    def program(gradients, places):
        chosen = [variables[place] for place in places]
        if keras_3:
            own_update(gradients, chosen)
        else:
            own_update(zip(gradients, chosen, strict=True))

    def apply(grads, trainable_variables=None):
        chosen = variables if trainable_variables is None else trainable_variables
        if any(id(variable) not in places for variable in chosen):
            raise ValueError("the optimizer was made for other variables: make it for the model")
        program(list(grads), tuple(places[id(variable)] for variable in chosen))

    if keras_3:
        optimizer.apply = apply
    else:
        optimizer.apply_gradients = lambda grads_and_vars, **_: apply(
            *zip(*grads_and_vars, strict=True)
        )


def main() -> None:
    """Print all implementations on a transformer of 10 million weights."""
    from tf_impl.kit import models, training
    from tf_impl.kit.demo import Demo

    demo, updates = Demo("text-gpt-wide"), {}
    for make in (for_loop_optimizer, fused_optimizer, compiled_optimizer):
        model, *_ = demo.build()
        gradients = [tf.fill(variable.shape, 0.01) for variable in model.trainable_variables]
        update = training.make_update(model, make(model, learning_rate=1e-3), gradients)
        update()
        updates[make.__name__] = lambda x, y, update=update: update()
    print(f"AdamW, {models.parameter_count(model):,} weights")
    for name, ms in demo.times(updates, rounds=5).items():
        print(f"{name:20}{ms:8.2f} ms an update")


if __name__ == "__main__":
    main()
