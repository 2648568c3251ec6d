"""oneDNN: the library for convolutions and more on a CPU, switched on or off.

    os.environ["TF_ENABLE_ONEDNN_OPTS"] = "1"  # before TensorFlow is imported
    from tf_impl.train_step.onednn import with_onednn

    step = with_onednn(step)  # raises where this process computes without it

What it changes: which library computes. Results differ by rounding. On a GPU nothing changes.

Its twin: `pt_impl/train_step/onednn.py`, which says where the frameworks differ.

When it helps and when it hurts: switch it on where TensorFlow leaves it off. Convolutions gain
most. Small steps may become slower, since each call of oneDNN has a cost: measure yours. Many
scripts set the variable to 0 to silence a line of the log, which switches the library off.
TF_CPP_MIN_LOG_LEVEL=1 silences the line.

Run it alone: `TF_ENABLE_ONEDNN_OPTS=1 python -m tf_impl.train_step.onednn` prints the time of a
step; with 0 the same without oneDNN.

Copy with it: `shared/onednn.py`, `tf_impl/kit/checks/onednn.py`.
"""

from collections.abc import Callable

from shared.onednn import is_default
from tf_impl.kit.checks.onednn import check_onednn, is_enabled


def with_onednn(call: Callable, *, enabled: bool = True) -> Callable:
    """Return `call`, after a check that its operators on the CPU are oneDNN's, or never.

    TensorFlow reads the variable once, so that a process can't switch: another one has to be
    started. Without the variable the processor decides (`is_default`).

    Raises ValueError, with the variable to set, where this process computes otherwise.
    Source: tensorflow/core/util/port.cc.
    """
    check_onednn(enabled)
    return call


def main() -> None:
    """Print the time of a step of the digits CNN in this process."""
    from tf_impl.kit import training
    from tf_impl.kit.demo import Demo

    here = "with oneDNN" if is_enabled() else "without"
    here += ", the default here" * (is_enabled() == is_default())
    demo = Demo("digits-cnn")
    for name, ms in demo.times({here: training.make_train_step(*demo.build())}).items():
        print(f"{name:30}{ms:8.2f} ms a step")


if __name__ == "__main__":
    main()
