"""Loss scaling: gradients that float16 can hold.

    scaler = LossScaler(model)
    optimizer = scaler.wrap(optimizer)  # whose update unscales, and skips what overflows
    scaled = scaler.scale(loss)  # within the tape: the loss to take gradients of

What it changes: the loss is multiplied by a scale before gradients are taken, and gradients are
divided by it before the update. float16 holds 6e-8 to 65,504 only, and a gradient is often smaller.
A step whose gradients overflow changes no weight and halves the scale. After many good steps the
scale doubles (Micikevicius et al., 2018, section 3.2). The scale is a power of two, so it adds no
rounding.

Its twin: `pt_impl/train_step/loss_scaling.py`, which says where the frameworks differ.

When it helps and when it hurts: training in float16 needs it: on GPUs without bfloat16 (Volta,
Turing), or for float16's three extra bits. With bfloat16 and float32 it only costs a pass over all
gradients. Most CPUs emulate float16, which is for tests only.
- Clip gradients at the bound times `scaler.gradient_scale()`: they are scaled until the update.

Run it alone: `python -m tf_impl.train_step.loss_scaling` shows how too large a scale falls.

Copy with it: `tf_impl/kit/calling.py`, `tf_impl/kit/checks/loss_scaling.py`,
`tf_impl/kit/checks/mixed_precision.py`, `tf_impl/train_step/mixed_precision.py`.
"""

from collections.abc import Callable

import tensorflow as tf

from tf_impl.kit.calling import add_own_losses, call, to_float32
from tf_impl.kit.checks.loss_scaling import check_loss_scaling, check_optimizer
from tf_impl.train_step.mixed_precision import MixedPrecision


class LossScaler:
    """A scaled loss, and Keras's `LossScaleOptimizer` for the update, which holds the scale.

    Args:
        model: with its variables.
        initial_scale: the loss is multiplied by a scale that starts here.
        growth_interval: the scale doubles after so many good steps in a row.
        enabled: False passes loss and optimizer through, for a step in which float16 is a setting.

    Raises:
        ValueError: a scale that is not positive, an interval below 1, a model without variables.
    """

    def __init__(
        self,
        model: tf.keras.Model,
        *,
        initial_scale: float = 65536.0,
        growth_interval: int = 2000,
        enabled: bool = True,
    ) -> None:
        check_loss_scaling(model, initial_scale, growth_interval)
        self.variables, self.enabled = model.trainable_variables, enabled
        self.initial_scale, self.growth_interval = initial_scale, growth_interval
        self.optimizer = None

    def wrap(self, optimizer: tf.keras.optimizers.Optimizer) -> tf.keras.optimizers.Optimizer:
        """Return the optimizer to use, built: one that unscales, and skips what overflows.

        It has the scale and its count of good steps in its variables: save it to resume. Raises
        ValueError for an optimizer that scales the loss already, and for a second one;
        NotImplementedError in tf_keras, whose optimizer does not unscale by itself.
        """
        check_optimizer(optimizer, enabled=self.enabled, has_one=self.optimizer is not None)
        if not self.enabled:
            return optimizer
        # By itself, or Keras leaves some of its variables (Nadam's, Adafactor's) uncounted.
        optimizer.build(self.variables)
        self.optimizer = tf.keras.optimizers.LossScaleOptimizer(
            optimizer,
            initial_scale=self.initial_scale,
            dynamic_growth_steps=self.growth_interval,
        )
        # Before the trace, which would take the scale of an unbuilt optimizer for a constant.
        self.optimizer.build(self.variables)
        return self.optimizer

    def scale(self, loss: tf.Tensor) -> tf.Tensor:
        """Return the loss to take gradients of."""
        return self.optimizer.scale_loss(loss) if self.enabled else loss

    def gradient_scale(self) -> tf.Tensor | float:
        """Return how many times too large gradients are: a scalar of the graph, or 1."""
        return tf.convert_to_tensor(self.optimizer.dynamic_scale) if self.enabled else 1.0

    def loss_scale(self) -> float:
        """Read the scale; 1.0 where it is not enabled."""
        return float(self.gradient_scale())


def make_train_step(
    model: tf.keras.Model,
    optimizer: tf.keras.optimizers.Optimizer,
    loss_fn: Callable,
    *,
    dtype: str = "float16",
    keep_fp32: str = "",
    initial_scale: float = 65536.0,
    growth_interval: int = 2000,
) -> Callable:
    """Make the train step in float16 with a scaled loss, over the model's float32 variables.

    Args:
        model, optimizer: as ever; the model has its variables.
        loss_fn: `loss_fn(output, y)` is given float32 output.
        dtype, keep_fp32: as in `MixedPrecision`; in float32 scaling changes no result.
        initial_scale, growth_interval: as in `LossScaler`.

    Returns:
        `step(x, y) -> loss`, a float32 scalar on the device, not scaled. x: a tensor or a structure
        of tensors, handed over as `fit` does: as one argument, but where the model's `call` needs
        several. `step.loss_scale()` reads the scale; `step.optimizer` is what updates the
        variables, with the scale among its own: save it to resume.

    Raises:
        As `LossScaler`, `LossScaler.wrap` and `MixedPrecision`.
    """
    scaler = LossScaler(model, initial_scale=initial_scale, growth_interval=growth_interval)
    precision = MixedPrecision(model, dtype=dtype, keep_fp32=keep_fp32)
    optimizer, variables = scaler.wrap(optimizer), model.trainable_variables

    @tf.function(jit_compile=False)
    def step(x, y):
        with precision.policies():
            with tf.GradientTape() as tape:
                output = to_float32(call(model, x, training=True))
                loss = add_own_losses(loss_fn(output, y), model)
                scaled = scaler.scale(loss)
            gradients = tape.gradient(scaled, variables)
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return loss

    step.loss_scale, step.optimizer = scaler.loss_scale, optimizer
    return step


def main() -> None:
    """Print loss and scale of the digits CNN in float16, from a scale that overflows at first."""
    from tf_impl.kit import runtime
    from tf_impl.kit.demo import Demo

    demo = Demo("digits-cnn", batch_size=32)
    model, optimizer, loss_fn = demo.build()
    step = make_train_step(model, optimizer, loss_fn, initial_scale=2.0**28, growth_interval=3)
    print("step   loss     scale after it")
    for number, batch in enumerate(demo.batches):
        loss = runtime.to_float(step(*batch))
        print(f"{number:4}{loss:8.4f}{step.loss_scale():15.0f}")


if __name__ == "__main__":
    main()
