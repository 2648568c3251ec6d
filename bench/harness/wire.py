"""Messages between the harness and its processes: JSON over an authenticated local connection.

It is JSON rather than pickle because each framework may run in another interpreter, and nothing
that arrives may be executed. The receiver states the type of a message.
"""

from __future__ import annotations

import os
from multiprocessing.connection import Client, Connection
from typing import Any, Generic, TypeVar

import msgspec
from msgspec import Struct

KEY = "TWINBENCH_KEY"
Message = TypeVar("Message")


class Gone(Exception):
    """The other process has ended."""


class Silent(Exception):
    """No answer came in time."""


class Foreign(Gone):
    """A message has another type than expected. The text says where."""


class Hello(Struct, frozen=True):
    """The first message of a process, with its name."""

    name: str
    pid: int


class Request(Struct, frozen=True):
    """An operation for a process, and its arguments."""

    op: str
    arguments: dict[str, Any] = {}


class Reply(Struct, Generic[Message], frozen=True, omit_defaults=True):
    """The answer to a request, or one line why there is none."""

    answer: Message | None = None
    error: str | None = None
    unsupported: str | None = None


def connect(address: str, name: str) -> Connection:
    """Connect to the harness at `address`, and send this process's name."""
    connection = Client(address, authkey=bytes.fromhex(os.environ[KEY]))
    send(connection, Hello(name, os.getpid()))
    return connection


def send(connection: Connection, message: Struct) -> None:
    """Send one message. Raises `Gone`, or TypeError if JSON has no such value."""
    encoded = msgspec.json.encode(message, enc_hook=_plain)
    try:
        connection.send_bytes(encoded)
    except OSError as error:
        raise Gone from error


def receive(connection: Connection, kind: type[Message], timeout: float | None = None) -> Message:
    """Wait at most `timeout` seconds for one message of a type.

    Raises `Gone`, `Silent` if none comes, or `Foreign` if it has another type.
    """
    try:
        if timeout is not None and not connection.poll(timeout):
            raise Silent
        encoded = connection.recv_bytes()
    except (EOFError, OSError) as error:
        raise Gone from error
    try:
        return msgspec.json.decode(encoded, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Foreign(str(error)) from None


def _plain(value: object) -> object:
    """NumPy's float64 is a float, and so are other subclasses of what JSON has."""
    for kind in (str, float, int):
        if isinstance(value, kind):
            return kind(value)
    raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")
