"""Bottleneck: which resource holds a train step back, with its evidence.

What it changes: nothing. It profiles the step and names one of input, overhead, arithmetic, memory
bandwidth, memory size and communication, from the shares of the step's time and what operators do
in it. A step whose time goes to products and convolutions is healthy: a cheaper computation is all
that is left. `twinbench diagnose` runs it, and adds the techniques that were measured to help.

Its twin: `pt_impl/diagnosis/bottleneck.py`.

Where the frameworks differ and why:
- Python in a graph is an operator (`EagerPyFunc`), what reads a result after the graph is a gap. In
  PyTorch a value that a step reads (`.item()`) is an operator of its own.
- A graph's small operators cost about a microsecond each beside themselves, where PyTorch
  dispatches them from Python: a tiny model has less overhead here. A step without `tf.function` has
  more.

When it helps and when it hurts: it says what to try first. The shares and limits stand in
`shared/bottlenecks.py`; a step near a limit has two bottlenecks, so look at all shares. It says
what holds this machine back, with this batch: another batch size has another bottleneck. It is as
wrong as its names where one operator does everything, such as a fused kernel of the user's own.

Run it alone: `python -m tf_impl.diagnosis.bottleneck digits-cnn` diagnoses a task of this suite, or
a file that has a function `make() -> (step, batches)`.

Copy with it: `shared/bottlenecks.py`, `shared/profiles.py`, `tf_impl/diagnosis/profiling.py`.
"""

from collections.abc import Callable, Iterable
from functools import partial

import psutil

from shared.bottlenecks import Diagnosis, diagnose, memory_in_use
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
    before = _pages_from_disk()
    breakdown = profile_steps(step, batches, steps=steps, warmup=warmup, folder=folder)
    faults = (_pages_from_disk() - before) / (2 * steps)
    return diagnose(breakdown, full=memory_in_use(), faults=faults)


def _pages_from_disk() -> int:
    """Pages that were swapped out and had to be read again, of the whole machine."""
    return psutil.swap_memory().sin // 4096


def main() -> None:
    """Diagnose a task's train step, or that of a file; print it, or JSON for programs."""
    import argparse
    import json
    import os
    import sys

    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("what", nargs="?", default="digits-cnn", help="a task, or a file.py")
    parser.add_argument("--batch-size", type=int, help="of a task; default: its compute batch")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--folder", default="", help="where the profiler's files go")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    find = partial(find_bottleneck, steps=given.steps, folder=given.folder)
    if given.what.endswith(".py"):
        from shared import own_model

        sys.path.insert(0, ".")  # of its own imports
        try:
            found = own_model.with_made(os.path.abspath(given.what), find)
        except own_model.BadFile as error:
            sys.exit(str(error))
    else:  # not for a file: the kit would settle the flavour of Keras before it
        from tf_impl.kit import examples

        found = find(*examples.train_step(given.what, given.batch_size))
    print(json.dumps(found.as_json()) if given.json else f"{found}\n\n{found.breakdown}")


if __name__ == "__main__":
    main()
