"""Messages between the harness and its processes: JSON over an authenticated local connection.

JSON and not pickle, because each framework may run under an interpreter of its own, and because
nothing that arrives is ever executed.
"""

from __future__ import annotations

import json
import os
from multiprocessing.connection import Client, Connection

KEY = "TWINBENCH_KEY"


class Gone(Exception):
    """The process at the other end ended."""


class Silent(Exception):
    """No answer came in time."""


def connect(address: str, name: str) -> Connection:
    """Open a connection to the harness at `address` and say who is calling."""
    connection = Client(address, authkey=bytes.fromhex(os.environ[KEY]))
    send(connection, {"name": name, "pid": os.getpid()})
    return connection


def send(connection: Connection, message: dict) -> None:
    """Send one message; `Gone` if nobody is there."""
    try:
        connection.send_bytes(json.dumps(message).encode())
    except OSError as error:
        raise Gone from error


def receive(connection: Connection, timeout: float | None = None) -> dict:
    """Wait for one message, at most `timeout` seconds; `Gone` or `Silent` if none comes."""
    try:
        if timeout is not None and not connection.poll(timeout):
            raise Silent
        return json.loads(connection.recv_bytes())
    except (EOFError, OSError) as error:
        raise Gone from error
