"""Mixed precision: 16-bit arithmetic over float32 master weights.

    precision = MixedPrecision(model)  # bfloat16
    with precision.policies():  # within the step's tf.function, around forward pass and gradients
        with tf.GradientTape() as tape:
            loss = loss_fn(to_float32(model(x, training=True)), y) + sum(model.losses)
        gradients = tape.gradient(loss, model.trainable_variables)

What it changes: convolutions and matrix products compute in bfloat16 or float16, and so do their
gradients. Weights, their gradients, the optimizer's state and the loss stay float32. bfloat16 has
float32's range and 8 significant bits. float16 holds 6e-8 to 65,504 only: smaller gradients become
zero, unless the loss is scaled (`loss_scaling.py`).
- Here the policies last for one trace. So any built model will do, and it is left unchanged. `fit`
  traces within `policies()`, too. The usual way is `keras.config.set_dtype_policy` before the model
  is built.

Its twin: `pt_impl/train_step/mixed_precision.py`, which says where the frameworks differ.

When it helps and when it hurts: it speeds up large convolutions and matrix products if the hardware
has units for the dtype. On GPUs: float16 since Volta, bfloat16 since Ampere. On CPUs: AVX512-BF16
and AMX. Activations kept in 16 bits take half the memory. It slows down small steps, by its casts,
and CPUs that emulate the dtype. Keep layers that add up small differences in float32 (`keep_fp32`).
- Keras casts the inputs of normalisation to float32 and back, which gains nothing.

Run it alone: `python -m tf_impl.train_step.mixed_precision` compares float32 with bfloat16.

Copy with it: `tf_impl/kit/calling.py`, `tf_impl/kit/checks/mixed_precision.py`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import tensorflow as tf

from tf_impl.kit.calling import Retracing, add_own_losses, call, layers, scale_loss, to_float32
from tf_impl.kit.checks.mixed_precision import check_mixed_precision


class MixedPrecision:
    """Dtype policies for a model's layers, which compute by them inside a context.

    Args:
        model: of float32 variables. It is left as it is.
        dtype: "bfloat16", "float16" or "float32", which changes nothing.
        keep_fp32: names of layers, comma-separated, that compute in float32 with all they contain.

    Raises:
        ValueError: an unknown dtype or layer, half-width variables, or a model without variables.
        NotImplementedError: Keras cannot switch the model, or the device cannot compute in `dtype`.
    """

    def __init__(
        self, model: tf.keras.Model, *, dtype: str = "bfloat16", keep_fp32: str = ""
    ) -> None:
        kept = {id(layer) for layer in check_mixed_precision(model, dtype, keep_fp32)}
        self.dtype, self.layer_policies = dtype, []
        if dtype == "float32":
            return
        half = f"mixed_{dtype}"
        for layer in layers(model):
            # Layers with an integer, float64 or quantized policy keep it, as under autocast.
            if layer.dtype_policy.name in ("float32", "mixed_bfloat16", "mixed_float16"):
                in_float32 = id(layer) in kept or _must_not_round(layer)
                self.layer_policies.append((layer, "float32" if in_float32 else half))
        self.retracing = Retracing(model)  # a layer's own graph would keep its first policy

    @contextmanager
    def policies(self) -> Iterator[None]:
        """Give each layer its policy until the context ends: for one trace, at no cost to the step.

        The layers look at their policy in every call, and a trace is the only call that a step
        makes. Take gradients inside, for recomputed layers, which run forward again.
        """
        if self.dtype == "float32":
            yield
            return
        before = [layer.dtype_policy for layer, _ in self.layer_policies]
        try:
            for layer, policy in self.layer_policies:
                layer.dtype_policy = policy
            with self.retracing.new_graphs():
                yield
        finally:
            for (layer, _), policy in zip(self.layer_policies, before, strict=True):
                layer.dtype_policy = policy


def make_train_step(
    model: tf.keras.Model,
    optimizer: tf.keras.optimizers.Optimizer,
    loss_fn: Callable,
    *,
    dtype: str = "bfloat16",
    keep_fp32: str = "",
) -> Callable:
    """Make the plain train step, computed in `dtype` over the model's float32 variables.

    Args:
        model, optimizer: as ever; the model has its variables.
        loss_fn: `loss_fn(output, y)` is given float32 output.
        dtype, keep_fp32: as in `MixedPrecision`.

    Returns:
        `step(x, y) -> loss`, a float32 scalar on the device. x: a tensor or a structure of tensors,
        handed over as `fit` does: as one argument, but where the model's `call` needs several.

    Raises:
        As `MixedPrecision`.
    """
    precision = MixedPrecision(model, dtype=dtype, keep_fp32=keep_fp32)
    variables = model.trainable_variables

    @tf.function(jit_compile=False)
    def step(x, y):
        with precision.policies():
            with tf.GradientTape() as tape:
                output = to_float32(call(model, x, training=True))
                loss = add_own_losses(loss_fn(output, y), model)
                scaled = scale_loss(loss, optimizer)
            gradients = tape.gradient(scaled, variables)
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return loss

    return step


def _must_not_round(layer) -> bool:
    """Whether it is for raw data, or writes weights.

    bfloat16 keeps 8 bits: the year 2026 would be 2024. Keras's own policy rounds it, and so does a
    Sequential, which casts what it gets. SpectralNormalization writes the kernel that it has
    normalised back, rounded in every step; the layer that it wraps may round.
    """
    kinds = tf.keras.layers
    if isinstance(layer, kinds.SpectralNormalization):
        return True
    raw = kinds.Normalization, kinds.Rescaling, kinds.Discretization
    raw += kinds.CategoryEncoding, kinds.Masking
    inside = layers(layer) if isinstance(layer, tf.keras.Sequential) else [layer]
    return any(isinstance(one, raw) for one in inside)


def main() -> None:
    """Print float32 against bfloat16 on the digits CNN, in interleaved samples."""
    from tf_impl.kit import runtime
    from tf_impl.kit.demo import Demo

    demo, steps = Demo("digits-cnn"), {}
    for dtype in ("float32", "bfloat16"):
        model, optimizer, loss_fn = demo.build()
        steps[dtype] = make_train_step(model, optimizer, loss_fn, dtype=dtype)
    print("dtype     ms a step  loss after it  ran in")
    for dtype, ms in demo.times(steps).items():
        loss = runtime.to_float(steps[dtype](*demo.batches[0]))
        ran = runtime.operator_dtypes(steps[dtype], *demo.batches[0])
        print(f"{dtype:10}{ms:9.2f}{loss:15.4f}  {ran}")


if __name__ == "__main__":
    main()
