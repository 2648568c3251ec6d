"""Runs tf.data's service and what it makes in one process, and writes what it found as JSON.

    python -m tests.input.service_worker GOOD_FOLDER BAD_FOLDER OUT

Its servers listen on every interface and know no other way: start it with `parallel.run`, out of
reach.
"""

import contextlib
import json
import sys
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path

import psutil
from tensorflow.data.experimental import service

from tests.input.folder_worker import message, taken
from tests.input.pipelines import BATCH, RESUMED, SEED
from tf_impl.input.tuned_folder import service_loader

GIVEN = {"batch_size": BATCH, "seed": SEED}


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
            loader = service_loader(good, service=address, **GIVEN)
            found[f"{count} workers"] = [taken(loader)[0] for _ in range(2)]
    with servers(1) as address:
        resumed = service_loader(good, service=address, start_batch=RESUMED, **GIVEN)
        found["resumed"] = taken(resumed)[0]
        left = service_loader(good, service=address, **GIVEN)
        assert len([*islice(left, 1)]) == 1
        return found | {"after a break": taken(left)[0]}


def refusals(good: str, bad: str) -> dict:
    """What is said where nobody answers, and of files that can't be read."""
    with servers(1) as address:
        found = {"damaged": message(partial(list, service_loader(bad, service=address, **GIVEN)))}
    for name, address in (("nobody", "grpc://localhost:1"), ("no address", "localhost")):
        found[name] = message(partial(service_loader, good, service=address, **GIVEN))
    return found


def main() -> None:
    """Write the JSON."""
    good, bad, out = sys.argv[1:]
    found = epochs(good) | refusals(good, bad) | {"interfaces": [*psutil.net_if_addrs()]}
    Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
