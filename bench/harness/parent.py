"""A parent process: it imports one framework once, and forks the workers of a block.


    python -m bench.harness.parent ADDRESS NAME MODULE...

Importing TensorFlow takes seconds, a fork 0.15 s. The standard library's forkserver is similar, but
is one per process, uses that process's interpreter and speaks pickle; a match needs new parents of
several interpreters at once. Forking is safe because nothing here touches a device or starts a
thread.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import threading
import time
import traceback
from multiprocessing.connection import Connection

from bench.harness import wire, worker
from shared.user_model import one_line


def main(address: str, name: str, modules: list[str]) -> None:
    """Import `modules` and report, then fork and reap until the harness hangs up."""
    connection = wire.connect(address, name)
    children: set[int] = set()
    try:
        for module in modules:
            importlib.import_module(module)
        if threading.active_count() > 1:
            raise RuntimeError(f"importing {', '.join(modules)} started a thread: no fork is safe")
        wire.send(connection, wire.Reply(True))  # it is ready
        while True:
            request = wire.receive(connection, wire.Request)
            if request.op == "fork":
                answer = _fork(connection, address, **request.arguments)
                children.add(answer)
            else:
                answer = _reap(**request.arguments)
                children.discard(request.arguments["pid"])
            wire.send(connection, wire.Reply(answer))
    except wire.Gone:
        pass
    except Exception as error:
        wire.send(connection, wire.Reply(error=one_line(error)))
    finally:
        for child in children:
            _reap(child, patience=0)


def _fork(connection: Connection, address: str, name: str, log: str) -> int:
    """The process id of a new worker called `name`."""
    child = os.fork()
    if child:
        os.setpgid(child, child)  # its own group, so that it ends with whatever it started
        return child
    status = 1
    try:
        connection.close()
        worker.run(address, name, log)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)  # what the parent does at its end is not the worker's to do


def _reap(pid: int, patience: float = 5.0) -> str:
    """How a worker ended, in words; after `patience` seconds it is killed."""
    deadline = time.monotonic() + patience
    ended = os.WEXITED | os.WNOHANG | os.WNOWAIT  # not reaped yet: its id is still its own
    while not os.waitid(os.P_PID, pid, ended) and time.monotonic() < deadline:
        time.sleep(0.01)
    os.killpg(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    return worker.ending(os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
