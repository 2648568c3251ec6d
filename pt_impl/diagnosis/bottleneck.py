"""Bottleneck: which resource limits a train step, with the evidence.

    print(find_bottleneck(step, batches))  # a verdict, and the lines that say why

What it changes: nothing. It profiles the step and names one of input, overhead, arithmetic, memory
bandwidth, memory size and communication. It decides by the shares of the step's time and by kinds
of operators. A step that spends its time in matrix products and convolutions is healthy: only
cheaper computation makes it faster. `twinbench diagnose` runs it, and adds the techniques that were
measured to help.

Its twin: `tf_impl/diagnosis/bottleneck.py`.

Where the frameworks differ and why:
- PyTorch: reading a value in a step (`.item()`) is an operator, `aten::_local_scalar_dense`.
- TensorFlow: Python code in a graph is an operator (`EagerPyFunc`). Reading a result after the
  graph shows as a gap.
- PyTorch dispatches small operators from Python, in a few microseconds each. A graph needs about
  one. So a tiny model has more overhead in PyTorch, unless the TensorFlow step has no
  `tf.function`.

When it helps and when it hurts: it says what to try first. The limits are in
`shared/bottlenecks.py`. A step near a limit has two bottlenecks, so look at all shares. The answer
holds for this machine and this batch size. It is wrong if one operator does everything, such as
your own fused kernel.

Run it alone: `python -m pt_impl.diagnosis.bottleneck digits-cnn` diagnoses a task of this suite, or
a file that has a function `make() -> (step, batches)`.

Copy with it: `pt_impl/diagnosis/profiling.py`, `pt_impl/kit/checks/profiling.py`,
`pt_impl/kit/recorded_products.py`, `shared/bottlenecks.py`, `shared/profiles.py`.
"""

from collections.abc import Callable, Iterable

from pt_impl.diagnosis.profiling import profile_steps
from shared.bottlenecks import Diagnosis, diagnose, memory_in_use, pages_from_disk


def find_bottleneck(
    step: Callable,
    batches: Iterable,
    *,
    steps: int = 20,
    warmup: int = 5,
    folder: str = "",
) -> Diagnosis:
    """Profile the step and name what holds it back. Arguments are those of `profile_steps`."""
    before = pages_from_disk()
    breakdown = profile_steps(step, batches, steps=steps, warmup=warmup, folder=folder)
    faults = (pages_from_disk() - before) / (2 * steps)
    return diagnose(breakdown, full=memory_in_use(), faults=faults)


def main() -> None:
    """Diagnose a task's train step, or that of a file; print it, or JSON for programs."""
    import os

    from shared import diagnosing

    def train_step(task, batch_size):  # not for a file: the kit imports more than it does
        from pt_impl.kit import examples

        return examples.train_step(task, batch_size)

    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or the profiler logs to the terminal
    diagnosing.run(find_bottleneck, train_step, main.__doc__)


if __name__ == "__main__":
    main()
