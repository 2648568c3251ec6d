"""An Ethernet switch that delivers every frame after a latency.

`bench.network.hosts` runs it inside a network namespace: `python bench/network/switch.py SECONDS
NAME NAME ...` makes a TAP device for each name, prints "ready", and forwards frames until it is
killed. The kernel's netem would do the same, but many kernels lack it.
"""

from __future__ import annotations

import fcntl
import os
import select
import struct
import sys
import time
from collections import deque
from contextlib import suppress

TUNSETIFF = 0x400454CA  # <linux/if_tun.h>
IFF_TAP, IFF_NO_PI = 0x0002, 0x1000
LARGEST_FRAME = 1 << 16


def plug(name: str) -> int:
    """Make a TAP device, and return its descriptor; closing that removes the device."""
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TAP | IFF_NO_PI))
    return device


class Switch:
    """Frames between devices, all with the same delay: first in, first out."""

    def __init__(self, devices: list[int], latency: float):
        self.devices = devices
        self.latency = latency
        self.behind: dict[bytes, int] = {}  # Ethernet address -> device
        self.waiting: deque[tuple[float, int, bytes]] = deque()  # when due, source, frame

    def turn(self) -> None:
        """Wait for a frame to arrive or to become due, and move it."""
        left = max(0.0, self.waiting[0][0] - time.monotonic()) if self.waiting else None
        ready, _, _ = select.select(self.devices, [], [], left)
        due = time.monotonic() + self.latency
        for device in ready:
            self._take(device, due)
        while self.waiting and self.waiting[0][0] <= time.monotonic():
            _, source, frame = self.waiting.popleft()
            self._deliver(source, frame)

    def _take(self, device: int, due: float) -> None:
        """All frames that lie ready at a device."""
        while True:
            try:
                frame = os.read(device, LARGEST_FRAME)
            except BlockingIOError:
                return
            self.behind[frame[6:12]] = device
            self.waiting.append((due, device, frame))

    def _deliver(self, source: int, frame: bytes) -> None:
        """To where its address was seen, or else everywhere."""
        known = self.behind.get(frame[:6])
        for device in self.devices if known is None else [known]:
            if device != source:
                with suppress(OSError):  # that host's interface is down: the frame is lost
                    os.write(device, frame)


def main(arguments: list[str]) -> None:
    """Forward until killed."""
    latency, *names = arguments
    switch = Switch([plug(name) for name in names], float(latency))
    print("ready", flush=True)
    while True:
        switch.turn()


if __name__ == "__main__":
    main(sys.argv[1:])
