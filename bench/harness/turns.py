"""Which processes compute at the same time while they start: several lanes, or one with all cores.

Starting, importing, building and tracing use one thread, so lanes do them in parallel. Steps use
all cores, and the threads of an eager PyTorch step spin while they wait: beside any other process
they would take several times as long.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Turns:
    """Lets lanes work in parallel, or one lane work while the others wait.

    A lane that waits for all cores goes before the others.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._beside, self._waiting, self._taken = 0, 0, False

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Compute in parallel with other lanes."""
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
        """Compute while no other lane does."""
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
