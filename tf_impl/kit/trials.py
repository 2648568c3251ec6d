"""Trials: train steps at one batch size, in a process that leaves nothing behind.

Twin: `pt_impl/kit/trials.py`.
Where the frameworks differ: in how the peak of a GPU's memory is read, and in what running out of
it raises.
"""

import sys

from shared.batch_sizes import Gpu, Trial, take_trial
from shared.batch_sizes import run_trial as run_in_program


def run_trial(make_trial: str, size: int, budget: int, seconds: float) -> Trial:
    """Try a batch size with TensorFlow. Arguments, errors: as `shared/batch_sizes.py` has them."""
    return run_in_program(__file__, make_trial, size, budget, seconds)


def _main(arguments: list[str]) -> None:
    """Take a trial's steps, in its own process."""
    import tensorflow as tf

    def is_out_of_memory(error: Exception) -> bool:
        return isinstance(error, (MemoryError, tf.errors.ResourceExhaustedError))

    def peak() -> int:
        return tf.config.experimental.get_memory_info("GPU:0")["peak"]

    gpu = None
    if tf.config.list_physical_devices("GPU"):
        gpu = Gpu(tf.test.experimental.sync_devices, peak)
    take_trial(arguments, gpu, is_out_of_memory)


if __name__ == "__main__":
    _main(sys.argv[1:])
