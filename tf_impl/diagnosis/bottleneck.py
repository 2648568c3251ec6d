"""Bottleneck: which resource limits a train step, with the evidence.

    print(find_bottleneck(step, batches))  # a verdict, and the lines that say why

What it changes: nothing. It profiles the step and names one of input, overhead, arithmetic, memory
bandwidth, memory size and communication. It decides by the shares of the step's time and by kinds
of operators. A step that spends its time in matrix products and convolutions is healthy: only
cheaper computation makes it faster. `twinbench diagnose` runs it, and adds the techniques that were
measured to help.

Its twin: `pt_impl/diagnosis/bottleneck.py`, which says where the frameworks differ.

When it helps and when it hurts: it says what to try first. The limits are in
`shared/bottlenecks.py`. A step near a limit has two bottlenecks, so look at all shares. The answer
holds for this machine and this batch size. It is wrong if one operator does everything, such as
your own fused kernel.

Run it alone: `python -m tf_impl.diagnosis.bottleneck digits-cnn` diagnoses a task of this suite, or
a file that has a function `make() -> (step, batches)`.

Copy with it: `shared/bottlenecks.py`, `shared/profiles.py`, `tf_impl/diagnosis/profiling.py`,
`tf_impl/kit/checks/profiling.py`, `tf_impl/kit/graph_products.py`.
"""

from collections.abc import Callable, Iterable

from shared.bottlenecks import Diagnosis, diagnose, memory_in_use, pages_from_disk
from tf_impl.diagnosis.profiling import profile_steps


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
    from shared import diagnosing

    def train_step(task, batch_size):  # not for a file: the kit imports more than it does
        from tf_impl.kit import examples

        return examples.train_step(task, batch_size)

    diagnosing.run(find_bottleneck, train_step, main.__doc__)


if __name__ == "__main__":
    main()
