"""oneDNN: the library for convolutions and more on a CPU, switched on or off.

    from pt_impl.train_step.onednn import with_onednn

    step = with_onednn(step, enabled=False)  # PyTorch has it on by itself

What it changes: which library computes. Results differ by rounding. On a GPU nothing changes.

Its twin: `tf_impl/train_step/onednn.py`.

Where the frameworks differ and why:
- PyTorch: oneDNN is on everywhere, and can be switched at any time. Without it convolutions become
  matrix products. On x86, float32 matrix products always use MKL.
- TensorFlow: oneDNN is on by default only on processors with AVX-512 VNNI or bfloat16, AVX-VNNI or
  AMX. Elsewhere, such as on AMD before Zen 4 or Intel before Cascade Lake, Eigen computes. An
  environment variable decides, when TensorFlow is imported.

When it helps and when it hurts: leave it on. Convolutions gain most. Switch it off only to compare,
or to find the cause of numerical differences.

Run it alone: `python -m pt_impl.train_step.onednn` compares steps with it and without.

Copy with it: `pt_impl/kit/checks/onednn.py`.
"""

from collections.abc import Callable
from functools import wraps

import torch

from pt_impl.kit.checks.onednn import check_onednn


def with_onednn(call: Callable, *, enabled: bool = True) -> Callable:
    """Return `call`, whose operators on the CPU are oneDNN's where it has them, or never.

    It switches `torch.backends.mkldnn.enabled` within each call and sets it back afterwards. A
    compiled graph keeps what it was compiled with, so wrap what you compile.

    Raises NotImplementedError where PyTorch was built without oneDNN.
    Source: `torch.backends.mkldnn`, docs.pytorch.org/docs/stable/backends.html.
    """
    check_onednn(enabled)

    @wraps(call)
    def switched(*args, **kwargs):
        before = torch.backends.mkldnn.enabled
        torch.backends.mkldnn.enabled = enabled
        try:
            return call(*args, **kwargs)
        finally:
            torch.backends.mkldnn.enabled = before

    return switched


def main() -> None:
    """Print steps of the digits CNN with oneDNN and without."""
    from pt_impl.kit import training
    from pt_impl.kit.demo import Demo

    demo = Demo("digits-cnn")
    steps = {
        name: with_onednn(training.make_train_step(*demo.build()), enabled=enabled)
        for name, enabled in (("with oneDNN", True), ("without", False))
    }
    for name, ms in demo.times(steps).items():
        print(f"{name:15}{ms:8.2f} ms a step")


if __name__ == "__main__":
    main()
