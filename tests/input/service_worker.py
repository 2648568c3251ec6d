"""Runs tf.data's service and what it makes in one process, and writes down what it found.

    python -m tests.input.service_worker GOOD_FOLDER BAD_FOLDER OUT

Its servers listen on every interface and know no other way: start it with `parallel.run`, out of
reach.
"""

import contextlib
import pickle
import sys
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path

import psutil
from tensorflow.data.experimental import service

from tests.input.pipelines import BATCH, RESUMED, SEED, taken
from tests.workers import raised
from tf_impl.input.tuned_folder import service_loader

load = partial(service_loader, batch_size=BATCH, seed=SEED)


@contextlib.contextmanager
def servers(workers: int) -> Iterator[str]:
    """The address of a dispatcher with so many workers, for as long as it is needed."""
    dispatcher = service.DispatchServer()
    address = dispatcher.target.partition("://")[2]
    config = service.WorkerConfig(dispatcher_address=address, heartbeat_interval_ms=100)
    serving = [service.WorkerServer(config) for _ in range(workers)]
    try:
        yield dispatcher.target
    finally:
        serving.clear()  # before the dispatcher ends: a worker may wait for that one's answer


def epochs(good: str) -> dict:
    """Two epochs with one worker and with two, and those after one that was left."""
    found = {}
    for count in (1, 2):
        with servers(count) as address:
            loader = load(good, service=address)
            found[f"{count} workers"] = [tuple(taken(loader)) for _ in range(2)]
    with servers(1) as address:
        found["resumed"] = tuple(taken(load(good, service=address, start_batch=RESUMED)))
        left = load(good, service=address)
        assert len([*islice(left, 1)]) == 1
        return found | {"after a break": tuple(taken(left))}


def refusals(good: str, bad: str) -> dict:
    """What is said where nobody answers, and of files that can't be read."""
    with servers(1) as address:
        found = {"damaged": raised(list, load(bad, service=address))}
    for name, address in (("nobody", "grpc://localhost:1"), ("no address", "localhost")):
        found[name] = raised(load, good, service=address)
    return found


if __name__ == "__main__":
    good, bad, out = sys.argv[1:]
    found = epochs(good) | refusals(good, bad) | {"interfaces": [*psutil.net_if_addrs()]}
    Path(out).write_bytes(pickle.dumps(found))
