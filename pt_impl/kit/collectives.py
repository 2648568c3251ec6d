"""Collectives: how long an all-reduce takes by itself.

What it holds: one all-reduce after another over the default process group, each timed.
Twin: `tf_impl/kit/collectives.py`.
Where the frameworks differ: little. In both rings a part is sent once its receiver has asked for
it, so a step waits twice for the network's latency; gloo asks for the next part while one is on its
way. PyTorch finds its peers through MASTER_ADDR, MASTER_PORT, RANK and WORLD_SIZE, TensorFlow
through TF_CONFIG.
Run it alone, a process for each rank: `python -m pt_impl.kit.collectives --floats 1000 --repeats 5`
"""

import argparse
import json
from collections.abc import Iterable
from datetime import timedelta
from time import perf_counter

import torch
import torch.distributed as dist

WARM_UP = 2  # untimed all-reduces of each size: connections, buffers, TCP's window
PATIENCE = 60.0  # seconds to wait for a process that does not come, or stops answering


def all_reduce_seconds(floats: Iterable[int], *, repeats: int = 9) -> dict[int, list[float]]:
    """Sum arrays of so many float32 over all processes; the seconds of each repetition, by size.

    Every process calls it with the same arguments. They start together only once: what follows is
    kept in step by the all-reduces themselves. With CPU tensors and gloo, which sums in a ring.

    Raises RuntimeError where a process is missing or a sum is wrong.
    """
    dist.init_process_group("gloo", timeout=timedelta(seconds=PATIENCE))
    try:
        return {count: _repeat(count, repeats) for count in floats}
    finally:
        dist.destroy_process_group()


def _repeat(count: int, repeats: int) -> list[float]:
    values, seconds = torch.empty(count), []
    for _ in range(WARM_UP + repeats):
        values.fill_(1.0)
        start = perf_counter()
        dist.all_reduce(values)
        seconds.append(perf_counter() - start)
    if not bool((values == dist.get_world_size()).all()):
        raise RuntimeError(f"the sum of {count} float32 is wrong")
    return seconds[WARM_UP:]


def main(arguments: list[str] | None = None) -> None:
    """Print the seconds by number of floats as JSON, in every process."""
    parser = argparse.ArgumentParser(prog="python -m pt_impl.kit.collectives")
    parser.add_argument("--floats", required=True, help="numbers of float32, comma-separated")
    parser.add_argument("--repeats", type=int, default=9)
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    print(json.dumps(all_reduce_seconds(map(int, given.floats.split(",")), repeats=given.repeats)))


if __name__ == "__main__":
    main()
