"""Threads and processes: thread pools of the right size, and several instances of a model.

    size_pools()  # first of all: as many threads as the affinity and the quota allow
    best, *others = search(make, samples)  # measures some settings on this machine
    server = serve(make, samples[0], processes=best.setting.processes, threads=...)

What it changes: how many threads compute an operator, and how many predictions (or train steps) run
at once. Results differ only by the order of additions.

Its twin: `pt_impl/deployment/serving_threads.py`, which says where the frameworks differ.

When it helps and when it hurts: with a container's quota it always helps, since all threads of too
large a pool are throttled together. One sample of a small model is fastest on one thread or few,
because synchronising threads takes longer than the operators. Many callers are served best by one
instance per core. Each instance holds the model in memory. A large model does better with one
instance on all cores. So `search` measures some settings.

Run it alone: `python -m tf_impl.deployment.serving_threads` searches with four convolutions.

Copy with it: `shared/cgroups.py`, `shared/serving.py`.
"""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import tensorflow as tf

from shared.cgroups import usable_threads
from shared.serving import Server, Setting, Tried
from shared.serving import search as search_settings


def size_pools(*, threads: int = 0, inter_op: int = 1) -> dict[str, int]:
    """Size both pools of this process; return what was read back.

    Args:
        threads: of one operator. 0: the cores that affinity and quota allow.
        inter_op: operators that run at once, of all callers together.

    Raises:
        ValueError where a number is negative, or `inter_op` is 0.
        RuntimeError where TensorFlow runs already with other pools.
    """
    if threads < 0 or inter_op < 1:
        raise ValueError(f"threads are 0 or more and inter_op 1 or more: {threads}, {inter_op}")
    tf.config.threading.set_intra_op_parallelism_threads(threads or usable_threads())
    tf.config.threading.set_inter_op_parallelism_threads(inter_op)
    return _pools()


def _pools() -> dict[str, int]:
    """As set: 0 is a thread for each core that the process sees."""
    return {
        "intra_op": tf.config.threading.get_intra_op_parallelism_threads(),
        "inter_op": tf.config.threading.get_inter_op_parallelism_threads(),
    }


def load(make: Callable[[], Callable], setting: Setting) -> Callable:
    """Return what `make()` makes, in this process: pools first. 0 threads leave them as installed.

    `predict.pools` is what was read back.
    """
    if setting.threads:
        pools = size_pools(threads=setting.threads, inter_op=setting.at_once)
    else:
        pools = _pools()
    call = make()

    def predict(x):
        return call(x)

    predict.pools = pools
    return predict


def serve(
    make: Callable[[], Callable],
    example: np.ndarray,
    *,
    processes: int = 1,
    at_once: int = 1,
    threads: int = 0,
    bind: bool = False,
) -> Server:
    """Start instances side by side; `server(x)` predicts in the one that is free.

    Args:
        make: `make() -> predict(x)` of arrays, in each process. A function of a module, or a
            partial of one, since it is sent to the process.
        example: a sample that each instance predicts before it counts as ready.
        at_once: requests in one process, which share its pools; as many operators may run at once.
        threads: of one operator. 0: the process's share of the cores that may be used.
        bind: give each process its own processors.

    Raises:
        RuntimeError where an instance fails, with its reason.
    """
    threads = threads or max(1, usable_threads() // processes)
    return Server(partial(load, make), Setting(processes, at_once, threads, bind), example)


def search(
    make: Callable[[], Callable],
    samples: Sequence[np.ndarray],
    *,
    callers: int = 8,
    seconds: float = 1.0,
    shared: bool = True,
) -> list[Tried]:
    """Start and measure settings that fill the usable cores; the most answers a second first.

    For the lowest latency of a single caller take `min(tried, key=lambda one: one.latency)`.

    Args:
        make: as in `serve`.
        samples: that callers send in turn.
        shared: also try several requests at once in one process; not for train steps.
    """
    load_made = partial(load, make)
    return search_settings(load_made, samples, callers=callers, seconds=seconds, shared=shared)


def make_example() -> Callable:
    """What an instance of `main` serves: four convolutions, of images (n, 64, 64, 3)."""
    layers = [tf.keras.layers.Conv2D(32, 3, activation="relu") for _ in range(4)]
    model = tf.keras.Sequential([tf.keras.Input((64, 64, 3)), *layers])
    run = tf.function(lambda x: model(x, training=False))
    return lambda x: run(tf.constant(x)).numpy()


def main() -> None:
    """Print the settings of a search in their order."""
    samples = list(np.random.default_rng(0).normal(size=(8, 1, 64, 64, 3)).astype(np.float32))
    print("ms of one caller   answers/s of eight   setting")
    for tried in search(make_example, samples):
        print(f"{tried.latency * 1e3:16.2f}{tried.rate:21.0f}   {tried.setting}")


if __name__ == "__main__":
    main()
