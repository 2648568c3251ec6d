"""A separate network for processes: only the loopback, which nobody outside can reach.

For servers that listen on every interface and have no option for one. It is a network namespace of
Linux, which root may make, and elsewhere every user where the system permits user namespaces. No
program is needed for it. It lasts as long as a process is in it or somebody holds it open.

Beside its functions this file is the program that makes one and that enters one:
`python network_namespace.py make` · `python network_namespace.py enter NET USER COMMAND …`.
"""

from __future__ import annotations

import contextlib
import os
import struct
import subprocess
import sys
from collections.abc import Iterator

_NET, _USER = 0x40000000, 0x10000000  # CLONE_NEWNET, CLONE_NEWUSER
_FLAGS, _SET_FLAGS, _UP = 0x8913, 0x8914, 0x1  # SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP
_PYTHON = [sys.executable, "-I", "-S", os.path.abspath(__file__)]


class Refused(OSError):
    """Why this machine has no network namespace for us, in one line."""


class Network:
    """An open network: `command(words)` runs them in it, given `files` by Popen's `pass_fds`."""

    def __init__(self, net: int, user: int) -> None:
        self.files = (net, user)

    def command(self, words: list[str]) -> list[str]:
        """The command that enters the network and becomes `words`."""
        return [*_PYTHON, "enter", *map(str, self.files), *words]


@contextlib.contextmanager
def isolated_network() -> Iterator[Network]:
    """Make a network. Raises Refused where the system does not permit it."""
    maker = subprocess.Popen(
        [*_PYTHON, "make"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with contextlib.ExitStack() as opened:
        try:
            ready = maker.stdout.readline() == "ready\n"
            files = []
            for kind in ("net", "user") if ready else ():
                files.append(os.open(f"/proc/{maker.pid}/ns/{kind}", os.O_RDONLY))
                opened.callback(os.close, files[-1])
        except OSError as error:
            raise Refused(f"a network namespace can't be held open: {error}") from None
        finally:
            _, said = maker.communicate()  # it ends; the open files keep what it made
        if not ready:
            lines = said.strip().splitlines() or ["the process that makes it said nothing"]
            raise Refused(f"network namespaces are not permitted here: {lines[-1]}")
        yield Network(*files)


# The program ------------------------------------------------------------------------------------


def _make() -> None:
    """Be in a new network whose loopback is up, say so, and stay until the input ends."""
    if sys.platform != "linux":
        raise OSError("network namespaces are Linux's")
    user, group = os.getuid(), os.getgid()
    try:
        _unshare(_NET)
    except OSError:
        _unshare(_USER | _NET)
        for name, text in (
            ("setgroups", "deny"),
            ("uid_map", f"{user} {user} 1"),
            ("gid_map", f"{group} {group} 1"),
        ):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    _loopback_up()
    print("ready", flush=True)
    sys.stdin.read()


def _loopback_up() -> None:
    import fcntl
    import socket

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        asked = struct.pack("16sH14x", b"lo", 0)
        flags = struct.unpack("16sH14x", fcntl.ioctl(any_socket, _FLAGS, asked))[1]
        fcntl.ioctl(any_socket, _SET_FLAGS, struct.pack("16sH14x", b"lo", flags | _UP))


def _enter(net: int, user: int, command: list[str]) -> None:
    """Become `command` in a network; in its user namespace first, where it has one."""
    own = os.stat("/proc/self/ns/user")
    if (own.st_dev, own.st_ino) != (os.fstat(user).st_dev, os.fstat(user).st_ino):
        _call("setns", user, _USER)
    _call("setns", net, _NET)
    os.close(net)
    os.close(user)
    os.execvp(command[0], command)


def _unshare(flags: int) -> None:
    _call("unshare", flags)


def _call(name: str, *numbers: int) -> None:
    """A call of the C library. Raises OSError."""
    import ctypes

    if getattr(ctypes.CDLL(None, use_errno=True), name)(*numbers):
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


if __name__ == "__main__":
    try:
        if sys.argv[1] == "make":
            _make()
        else:
            _enter(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
    except OSError as error:
        sys.exit(f"{type(error).__name__}: {error.strerror or error}")
