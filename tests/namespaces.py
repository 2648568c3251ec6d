"""What tests between hosts share: whether this machine permits any, and waiting."""

import time
from functools import cache

from bench.hosts import Hosts, Link, Refused


@cache
def refusal() -> str | None:
    """Why this machine makes no hosts; None where it does."""
    try:
        for link in (Link(), Link(bandwidth=1e6), Link(latency=1e-3)):
            Hosts(1, link, seconds=30).close()
    except Refused as error:
        return str(error)
    return None


def wait_until(condition, *, seconds=20.0, what="it"):
    """What `condition` returns once that is true; AssertionError where it is not in time."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, f"{what} did not happen within {seconds} s"
        time.sleep(0.02)
    return found
