"""Trials: train steps at one batch size, in a process that leaves nothing behind.

Twin: `tf_impl/kit/trials.py`.
Where the frameworks differ: in how the peak of a GPU's memory is read, and in what running out of
it raises.
"""

import sys

from shared.batch_sizes import Gpu, Trial, take_trial
from shared.batch_sizes import run_trial as run_in_program


def run_trial(make_trial: str, size: int, budget: int, seconds: float) -> Trial:
    """Try a batch size with PyTorch. Arguments, errors: as `shared/batch_sizes.py` has them."""
    return run_in_program(__file__, make_trial, size, budget, seconds)


def _main(arguments: list[str]) -> None:
    """Take a trial's steps, in its own process."""
    import torch
    import torch._dynamo  # which an optimizer's first step would import

    def is_out_of_memory(error: Exception) -> bool:
        kinds = MemoryError, torch.OutOfMemoryError
        return isinstance(error, kinds) or "CPUAllocator" in str(error).partition("\n")[0]

    gpu = None
    if torch.cuda.is_available():
        gpu = Gpu(torch.cuda.synchronize, torch.cuda.max_memory_allocated)
    take_trial(arguments, gpu, is_out_of_memory)


if __name__ == "__main__":
    _main(sys.argv[1:])
