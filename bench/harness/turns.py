"""Who computes beside whom while processes begin: several lanes, or one with all cores to itself.

Starting, importing, building and tracing take one thread each, so that lanes do them beside each
other. Steps take all cores, and the threads of an eager step of PyTorch spin while they wait for
one another: beside another process, whatever that does, they take several times as long.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Turns:
    """What lanes do beside each other, and what a lane does with nobody beside it.

    Who waits for the cores is let in before anybody else begins.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._beside, self._waiting, self._taken = 0, 0, False

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Compute beside others that do the same."""
        with self._changed:
            self._changed.wait_for(lambda: not (self._waiting or self._taken))
            self._beside += 1
        try:
            yield
        finally:
            with self._changed:
                self._beside -= 1
                self._changed.notify_all()

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        """Compute with nobody beside."""
        with self._changed:
            self._waiting += 1
            self._changed.notify_all()
            try:
                self._changed.wait_for(lambda: not (self._beside or self._taken))
                self._taken = True
            finally:
                self._waiting -= 1
                self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._taken = False
                self._changed.notify_all()
