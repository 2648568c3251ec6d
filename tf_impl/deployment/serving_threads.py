"""Threads and processes: pools of the size that the process may use, and instances side by side.

    size_pools()  # first of all: as many threads as the affinity and the quota allow
    best, *others = search(make, samples)  # measures some settings on this machine
    server = serve(make, samples[0], processes=best.setting.processes, threads=...)

What it changes: how many threads an operator is spread over, and how many predictions (or train
steps) are computed at once. Results are the same but for the order of additions.

Its twin: `pt_impl/deployment/serving_threads.py`.

Where the frameworks differ and why:
- All callers share the two pools of the process here. In PyTorch every thread that calls a model
  brings a team of OpenMP threads, so that callers multiply threads.
- Both pools are made once here, at the first operation, and keep their size; in PyTorch that of
  an operator's threads can be changed at any time.
- The pool between operators runs a graph's operators here, also those of one caller, so it gets a
  thread for each request at once. In PyTorch hardly anything uses it.
- As installed there is a thread for each logical core here, and for each physical one there. Both
  follow an affinity that is set before the import, and neither a quota.

When it helps and when it hurts: a pool that ignores a quota is throttled, all of its threads
together, so the quota's size helps wherever there is one. One sample of a small model is fastest on
one thread or few: operators end before threads have met. Many callers are served by an instance a
core, at the price of the model's memory in each. It hurts a large model: one instance on all cores
answers each caller sooner, and its caches hold one copy of the weights. So `search` measures it.

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
        bind: give each process processors of its own.

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
