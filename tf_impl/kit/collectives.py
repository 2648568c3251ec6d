"""Collectives: how long an all-reduce takes by itself.

What it holds: one all-reduce after another under MultiWorkerMirroredStrategy, each timed.
Twin: `pt_impl/kit/collectives.py`.
Where the frameworks differ: little. In both rings a part is sent once its receiver has asked for
it, so a step waits twice for the network's latency; gloo asks for the next part while one is on its
way. PyTorch finds its peers through MASTER_ADDR, MASTER_PORT, RANK and WORLD_SIZE, TensorFlow
through TF_CONFIG.
Run it alone, a process for each worker: `python -m tf_impl.kit.collectives --floats 1000 --repeats
5`
"""

import argparse
import json
from collections.abc import Callable, Iterable
from time import perf_counter

import tensorflow as tf

WARM_UP = 2  # untimed all-reduces of each size: connections, buffers, TCP's window
PATIENCE = 60.0  # seconds to wait for a worker that stops answering


def all_reduce_seconds(floats: Iterable[int], *, repeats: int = 9) -> dict[int, list[float]]:
    """Sum arrays of so many float32 over all workers; the seconds of each repetition, by size.

    Every worker calls it with the same arguments. They start together only once: what follows is
    kept in step by the all-reduces themselves. With CPU tensors, summed in a ring.

    Raises RuntimeError where a sum is wrong; tf.errors.OpError where a worker is missing.
    """
    communication = tf.distribute.experimental
    strategy = tf.distribute.MultiWorkerMirroredStrategy(
        communication_options=communication.CommunicationOptions(
            timeout_seconds=PATIENCE,
            implementation=communication.CommunicationImplementation.RING,
        )
    )

    def replica_total(values):
        values = tf.identity(values)  # on the replica's device, where the strategy sums it
        replica = tf.distribute.get_replica_context()
        return replica.all_reduce(tf.distribute.ReduceOp.SUM, values)

    @tf.function
    def total(values):
        return strategy.run(replica_total, args=(values,))

    workers = strategy.num_replicas_in_sync
    return {count: _repeat(total, workers, count, repeats) for count in floats}


def _repeat(total: Callable, workers: int, count: int, repeats: int) -> list[float]:
    values, seconds = tf.ones([count]), []
    for _ in range(WARM_UP + repeats):
        start = perf_counter()
        summed = total(values)
        seconds.append(perf_counter() - start)
    if not bool(tf.reduce_all(summed == workers)):
        raise RuntimeError(f"the sum of {count} float32 is wrong")
    return seconds[WARM_UP:]


def main(arguments: list[str] | None = None) -> None:
    """Print the seconds by number of floats as JSON, in every worker."""
    parser = argparse.ArgumentParser(prog="python -m tf_impl.kit.collectives")
    parser.add_argument("--floats", required=True, help="numbers of float32, comma-separated")
    parser.add_argument("--repeats", type=int, default=9)
    given = parser.parse_args(arguments)
    tf.config.threading.set_intra_op_parallelism_threads(1)
    print(json.dumps(all_reduce_seconds(map(int, given.floats.split(",")), repeats=given.repeats)))


if __name__ == "__main__":
    main()
