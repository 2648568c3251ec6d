"""Batch-size finder: the largest batch that trains within a memory budget.

    found = find_batch_size("my_training:make_step", budget_bytes=4 << 30)
    found.batch_size  # make_step(batch_size) returned a step without arguments

What it changes: nothing in the model. It tries batch sizes, each in a fresh process, so that no
trial affects the next. Memory grows almost linearly with the batch size. After two sizes that
differ enough, a line predicts the size that fills the budget, and a few more trials confirm it.

Its twin: `tf_impl/train_step/batch_size_finder.py`.

Where the frameworks differ and why:
- On a CPU both measure the peak of resident memory above the imports. PyTorch keeps gradients
  between steps. TensorFlow frees them within its graph, whose trace needs memory at any batch size.
- On a GPU both ask the framework's allocator (`torch.cuda.max_memory_allocated`,
  `tf.config.experimental.get_memory_info`). The allocator reserves more than is in use: leave a
  tenth of the device free.

When it helps and when it hurts: it helps if samples per second still rise with the batch size. Each
trial costs an import of the framework. It does not say whether so large a batch trains well.

Run it alone: `python -m pt_impl.train_step.batch_size_finder` tries the digits CNN with 256 MiB.

Copy with it: `pt_impl/kit/trials.py`, `shared/batch_sizes.py`.
"""

from pt_impl.kit.trials import run_trial
from shared.batch_sizes import LargestBatch, check_settings, find_largest


def find_batch_size(
    make_trial, *, budget_bytes: int, maximum: int = 65536, trial_seconds: float = 120.0
) -> LargestBatch:
    """Find the largest batch size whose train steps stay within `budget_bytes`.

    The size found was tried and fits. The next one, larger by a sample or at most 5%, was tried and
    does not, or it does not by the line through two sizes that were measured.

    Args:
        make_trial: "module:function", importable from here. A trial imports the module in a fresh
            process, calls function(batch_size), which returns a step without arguments, and takes a
            few steps. Its peak counts from after the imports, and holds model and optimizer too.
        maximum: the largest size of interest.
        trial_seconds: a trial that takes longer counts as not fitting.

    Raises:
        ValueError: a budget that batch size 1 exceeds or that the machine does not have, an unknown
            module or function and settings that are not positive.
        NotImplementedError: where a CPU's peak can't be read (other than Linux) and where the trial
            raises it.
        RuntimeError: where a trial fails otherwise, or the first takes too long.
    """
    check_settings(make_trial, budget_bytes, maximum, trial_seconds)

    def run(size: int):
        return run_trial(make_trial, size, budget_bytes, trial_seconds)

    return find_largest(run, budget_bytes, maximum)


def main() -> None:
    """Print the trials for the digits CNN in 256 MiB."""
    found = find_batch_size("pt_impl.kit.training:digits_cnn", budget_bytes=256 << 20)
    for trial in found.trials:
        print(f"{trial.batch_size:6}  {trial.outcome:12}  peak {trial.peak_bytes} bytes")
    print(f"largest: {found.batch_size}, limited by the {found.limit}")


if __name__ == "__main__":
    main()
