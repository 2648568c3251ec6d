"""Reduced precision: predictions in 16-bit arithmetic, from float32 weights.

    predict = make_predict(model)  # bfloat16
    output = predict(x)  # in float32

What it changes: convolutions and matrix products of a prediction compute in bfloat16 or float16.
The weights stay float32 and are cast in every call. The output is float32. The model can still be
trained.
- Layers of `keep_fp32` compute in float32 from then on, also in other calls.

Its twin: `tf_impl/deployment/reduced_precision.py`.

Where the frameworks differ and why:
- PyTorch: autocast decides for each operator while it runs. TensorFlow: Keras decides for each
  layer while the graph is traced. Both do so in training, too (`train_step/mixed_precision.py`).
- Layers that must not round keep float32: in PyTorch because autocast does not cast their
  operators, in TensorFlow by their policy.

When it helps and when it hurts: it helps if the hardware computes in the dtype (CUDA, CPUs with
AVX512-BF16 or AMX) and batches are large. Single samples become slower, because of the casts, and
so do CPUs that emulate the dtype. A file for another runtime is faster still (`export.py`,
`native_export.py`).
- `model.to(torch.bfloat16)` casts the weights once and halves their memory, but rounds statistics
  and normalisation, too.

Run it alone: `python -m pt_impl.deployment.reduced_precision` compares float32 with bfloat16.

Copy with it: `pt_impl/kit/calling.py`, `pt_impl/kit/checks/mixed_precision.py`,
`pt_impl/train_step/mixed_precision.py`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from pt_impl.kit.calling import call, evaluating, to_float32
from pt_impl.train_step.mixed_precision import MixedPrecision


def make_predict(model: nn.Module, *, dtype: str = "bfloat16", keep_fp32: str = "") -> Callable:
    """Make `predict(x) -> output` in evaluation mode: computed in `dtype`, given as float32.

    Args:
        model: of float32 parameters; its modes are left as found.
        dtype: "bfloat16", "float16" or "float32", which changes nothing.
        keep_fp32: names of layers, comma-separated, that compute in float32 with all they contain.

    Returns:
        `predict(x)`. x: a tuple of the model's positional arguments, a mapping of its keywords, or
        its one argument.

    Raises:
        As `MixedPrecision`.
    """
    precision = MixedPrecision(model, dtype=dtype, keep_fp32=keep_fp32)

    def predict(x):
        # What a model keeps of a call, such as a mask, may be trained with later.
        without_gradients = torch.no_grad() if model.training else torch.inference_mode()
        with evaluating(model), _fast_path(dtype), without_gradients, precision.autocast():
            output = call(model, x)
        return to_float32(output)

    return predict


@contextmanager
def _fast_path(dtype: str) -> Iterator[None]:
    """Keep the fused kernel of TransformerEncoderLayer out, which knows no autocast of a CPU.

    It would compute in float32, and without calling the layers inside.
    """
    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(enabled and dtype == "float32")
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)


def main() -> None:
    """Print the time of float32 and bfloat16 on the digits CNN, and how far apart they are."""
    from pt_impl.kit.demo import Demo

    demo = Demo("digits-cnn")
    model, _, _ = demo.build()
    predicts = {dtype: make_predict(model, dtype=dtype) for dtype in ("float32", "bfloat16")}
    x = demo.batches[0][0]
    exact = predicts["float32"](x)
    print("dtype     ms a batch  largest difference")
    calls = {dtype: lambda x, y, run=run: run(x) for dtype, run in predicts.items()}
    for dtype, ms in demo.times(calls).items():
        apart = (predicts[dtype](x) - exact).abs().max()
        print(f"{dtype:10}{ms:10.2f}{apart:20.4f}")


if __name__ == "__main__":
    main()
