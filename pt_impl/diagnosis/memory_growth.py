"""Memory growth: whether a step's memory is steady, fills a cache, or leaks.

    print(watch_memory(step, batches))  # steady, cache or leak, and how much a round

What it changes: nothing. It runs steps in rounds, reads the resident memory after each round, and
judges the curve. If it rises to the end, it is a leak. If it rises and then stays, it is a cache.
For a leak it says how much it grows per round, which Python objects increase in number, and how
much memory the allocators can return.

Its twin: `tf_impl/diagnosis/memory_growth.py`.

Where the frameworks differ and why:
- PyTorch: usually losses leak that are kept. Each holds its graph with all activations
  (`losses += [loss]` instead of `loss.detach()`).
- TensorFlow: usually a function leaks that is traced again for every Python number it is called
  with. Each graph stays.
- On a GPU both allocators keep freed memory. So the memory in use counts
  (`torch.cuda.memory_allocated`, `get_memory_info`). PyTorch's cache can be emptied, TensorFlow's
  can't.

When it helps and when it hurts: it finds a leak of a megabyte per round in 50 rounds, long before
memory is full. If the leak is small, use many steps per round: it has to exceed a memory page or
two. A cache that fills for more rounds than are watched looks like a leak: watch more rounds. If
batches have several shapes, 12 rounds of batches are run three times. Memory that grows only with
new shapes is a cache. Counting all objects takes some milliseconds per round.

Run it alone: `python -m pt_impl.diagnosis.memory_growth` watches a step that leaks and one that
does not.

Copy with it: `shared/growth.py`, `shared/profiles.py`.
"""

from collections.abc import Callable, Iterable

import torch

from shared.growth import Growth, watch


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
    device = torch.cuda.memory_allocated if torch.cuda.is_available() else None
    return watch(
        step,
        batches,
        rounds=rounds,
        steps=steps,
        warmup=warmup,
        least=least,
        synchronize=torch.cuda.synchronize if device else lambda: None,
        device=device,
        release=torch.cuda.empty_cache,
    )


def main() -> None:
    """Watch a step that keeps its losses with their graphs, and one that does not."""
    from pt_impl.kit import training
    from pt_impl.kit.demo import Demo

    demo = Demo("digits-cnn", batch_size=32)
    model, optimizer, loss_fn = demo.build()
    plain = training.make_train_step(model, optimizer, loss_fn)
    kept = []

    def leaking(x, y):
        kept.append(loss_fn(model(x), y))

    print("plain:  ", watch_memory(plain, demo.batches))
    print("leaking:", watch_memory(leaking, demo.batches))


if __name__ == "__main__":
    main()
