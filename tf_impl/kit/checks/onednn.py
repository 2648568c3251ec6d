"""Whether TensorFlow computes with oneDNN in this process, and what is refused if not as asked."""

from tensorflow.python.util import _pywrap_util_port

from shared.onednn import VARIABLE


def is_enabled() -> bool:
    """Whether operators on the CPU are oneDNN's, where it has them; else they are Eigen's.

    The variable decides, read once as TensorFlow is imported; without it the processor does, see
    `shared.onednn.is_default`. There is no public way to ask.
    """
    return _pywrap_util_port.IsMklEnabled()


def check_onednn(enabled: bool) -> None:
    """Raise ValueError, with the variable to set, where this process computes otherwise."""
    if is_enabled() != enabled:
        without = "without" if enabled else "with"
        raise ValueError(
            f"TensorFlow computes {without} oneDNN in this process: set {VARIABLE}={enabled:d} "
            "before it is imported"
        )
