"""Memory growth: whether a step's memory stays, fills a cache, or leaks.

What it changes: nothing. It takes steps round by round, reads the resident memory after each, and
judges the line: one that rises to the end is a leak, one that rose and then stays a cache that is
not given back. It says how much a leak takes with each round, which Python objects are ever more,
and what the allocators give back when they are asked to.

Its twin: `tf_impl/diagnosis/memory_growth.py`.

Where the frameworks differ and why:
- Kept losses are the usual leak here: each holds its graph with all activations (`losses += [loss]`
  in place of `loss.detach()`). In TensorFlow it is a function that is traced anew for every Python
  number it is called with.
- On a GPU torch's allocator keeps what tensors gave back: what counts there is what is allocated
  (`torch.cuda.memory_allocated`), and the cache is emptied when asked to give back.

When it helps and when it hurts: it finds a leak of a megabyte a round in 50 rounds, long before the
machine is full. A round has to be long enough for its leak to show above a page or two, so let a
round have many steps where the leak is small. What fills for more rounds than are watched (a cache
of shapes, say) looks like a leak: watch more rounds. Counting all objects takes some milliseconds
a round.

Run it alone: `python -m pt_impl.diagnosis.memory_growth` watches a step that leaks and one that
does not.

Copy with it: `shared/growth.py`, `shared/profiles.py`.
"""

from collections.abc import Callable, Iterable

import torch

from shared.growth import Growth, watch
from shared.profiles import endless, in_order


def watch_memory(
    step: Callable,
    batches: Iterable,
    *,
    rounds: int = 50,
    steps: int = 1,
    warmup: int = 5,
    least: float = 0.25,
) -> Growth:
    """Take `rounds` rounds of `steps` steps; return what became of the memory.

    step: `step(*batch)`. batches: begun again when they run out. warmup: rounds before, in which
    pools and optimizers take what they keep. least: megabytes a round that are a leak.
    Raises ValueError for no batches and settings out of range.
    """
    if steps < 1:
        raise ValueError(f"growth needs 1 step a round, not {steps}")
    batches = endless(batches)

    def work() -> None:
        for _ in range(steps):
            step(*in_order(next(batches)))
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    device = torch.cuda.memory_allocated if torch.cuda.is_available() else None
    release = torch.cuda.empty_cache
    return watch(work, rounds=rounds, warmup=warmup, least=least, device=device, release=release)


def main() -> None:
    """Watch a step that keeps its losses with their graphs, and one that does not."""
    import numpy as np

    from pt_impl.kit import data, models, training
    from shared.specs import TASKS

    task, random = TASKS["digits-cnn"], np.random.default_rng(0)
    model = models.build(task.model)
    images = random.normal(size=(32, *task.model.input_shape)).astype(np.float32)
    batch = data.to_device(images, random.integers(0, 10, 32))
    optimizer = training.make_optimizer(model, task.recipe)
    plain = training.make_train_step(model, optimizer, training.cross_entropy)
    kept = []

    def leaking(x, y):
        kept.append(training.cross_entropy(model(x), y))

    print("plain:  ", watch_memory(plain, [batch]))
    print("leaking:", watch_memory(leaking, [batch]))


if __name__ == "__main__":
    main()
