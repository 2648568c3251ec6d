"""Memory growth: whether a step's memory is steady, fills a cache, or leaks.

    print(watch_memory(step, batches))  # steady, cache or leak, and how much a round

What it changes: nothing. It runs steps in rounds, reads the resident memory after each round, and
judges the curve. If it rises to the end, it is a leak. If it rises and then stays, it is a cache.
For a leak it says how much it grows per round, which Python objects increase in number, and how
much memory the allocators can return.

Its twin: `pt_impl/diagnosis/memory_growth.py`, which says where the frameworks differ.

When it helps and when it hurts: it finds a leak of a megabyte per round in 50 rounds, long before
memory is full. If the leak is small, use many steps per round: it has to exceed a memory page or
two. A cache that fills for more rounds than are watched looks like a leak: watch more rounds. If
batches have several shapes, 12 rounds of batches are run three times. Memory that grows only with
new shapes is a cache. Counting all objects takes some milliseconds per round.

Run it alone: `python -m tf_impl.diagnosis.memory_growth` watches a step that leaks and one that
does not.

Copy with it: `shared/growth.py`, `shared/profiles.py`.
"""

from collections.abc import Callable, Iterable

import tensorflow as tf

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
    on_gpu = bool(tf.config.list_physical_devices("GPU"))

    def allocated() -> int:
        return tf.config.experimental.get_memory_info("GPU:0")["current"]

    return watch(
        step,
        batches,
        rounds=rounds,
        steps=steps,
        warmup=warmup,
        least=least,
        synchronize=tf.test.experimental.sync_devices if on_gpu else lambda: None,
        device=allocated if on_gpu else None,
    )


def main() -> None:
    """Watch a step that is traced anew for every number, and one that is not."""
    from tf_impl.kit import training
    from tf_impl.kit.demo import Demo

    demo = Demo("digits-cnn", batch_size=32)
    model, optimizer, loss_fn = demo.build()
    plain = training.make_train_step(model, optimizer, loss_fn)
    numbers = iter(range(1_000_000))

    @tf.function
    def traced(x, number):
        return model(x) * number

    def leaking(x, y):
        traced(x, next(numbers))  # a Python number is a constant of the graph

    print("plain:  ", watch_memory(plain, demo.batches))
    print("leaking:", watch_memory(leaking, demo.batches))


if __name__ == "__main__":
    main()
