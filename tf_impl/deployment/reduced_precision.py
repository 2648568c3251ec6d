"""Reduced precision: predictions in 16-bit arithmetic, from float32 weights.

    predict = make_predict(model)  # bfloat16
    output = predict(x)  # in float32

What it changes: convolutions and matrix products of a prediction compute in bfloat16 or float16.
The weights stay float32 and are cast in every call. The output is float32. The model can still be
trained.

Its twin: `pt_impl/deployment/reduced_precision.py`, which says where the frameworks differ.

When it helps and when it hurts: it helps if the hardware computes in the dtype (CUDA, CPUs with
AVX512-BF16 or AMX) and batches are large. Single samples become slower, because of the casts, and
so do CPUs that emulate the dtype. A file for another runtime is faster still (`export.py`,
`native_export.py`).
- A model built under the policy "bfloat16" needs half the memory for weights, but rounds statistics
  and normalisation, too.

Run it alone: `python -m tf_impl.deployment.reduced_precision` compares float32 with bfloat16.

Copy with it: `tf_impl/kit/calling.py`, `tf_impl/kit/checks/mixed_precision.py`,
`tf_impl/train_step/mixed_precision.py`.
"""

from collections.abc import Callable

import tensorflow as tf

from tf_impl.kit.calling import call, to_float32
from tf_impl.train_step.mixed_precision import MixedPrecision


def make_predict(
    model: tf.keras.Model, *, dtype: str = "bfloat16", keep_fp32: str = ""
) -> Callable:
    """Make `predict(x) -> output` in evaluation mode: computed in `dtype`, given as float32.

    Args:
        model: of float32 variables, which has them.
        dtype: "bfloat16", "float16" or "float32", which changes nothing.
        keep_fp32: names of layers, comma-separated, that compute in float32 with all they contain.

    Returns:
        `predict(x)`. x: a tensor or a structure of tensors, handed over as `fit` does: as one
        argument, but where the model's `call` needs several.

    Raises:
        As `MixedPrecision`.
    """
    precision = MixedPrecision(model, dtype=dtype, keep_fp32=keep_fp32)

    @tf.function(jit_compile=False, reduce_retracing=True)
    def predict(x):
        with precision.policies():
            output = call(model, x, training=False)
        return to_float32(output)

    return predict


def main() -> None:
    """Print the time of float32 and bfloat16 on the digits CNN, and how far apart they are."""
    from tf_impl.kit.demo import Demo

    demo = Demo("digits-cnn")
    model, _, _ = demo.build()
    predicts = {dtype: make_predict(model, dtype=dtype) for dtype in ("float32", "bfloat16")}
    x = demo.batches[0][0]
    exact = predicts["float32"](x)
    print("dtype     ms a batch  largest difference")
    calls = {dtype: lambda x, y, run=run: run(x) for dtype, run in predicts.items()}
    for dtype, ms in demo.times(calls).items():
        apart = tf.reduce_max(tf.abs(predicts[dtype](x) - exact))
        print(f"{dtype:10}{ms:10.2f}{apart:20.4f}")


if __name__ == "__main__":
    main()
