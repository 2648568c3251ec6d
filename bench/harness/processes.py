"""Parents and workers as the harness sees them: started, asked, timed out, ended.

Every process here was started by this module, and is ended by its id. Nothing listens on a network:
connections are local (a Unix socket, or a named pipe on Windows) and authenticated.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import count
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

import psutil

from bench.harness import answers, machine, wire, worker
from bench.harness.keeping import TRAINED
from bench.harness.plan import FRAMEWORKS
from shared import scratch

ROOT = Path(__file__).resolve().parents[2]
MOST_OF_A_PATH = 90  # bytes of a folder with a socket in it
TIMED_OUT = "timeout: no answer to {} within {:g} s"
FORKS = sys.platform == "linux"  # elsewhere forking after an import is not safe


@dataclass(frozen=True)
class TimeLimits:
    """Timeouts in seconds, after which a request counts as hung."""

    start: float = 180
    request: float = 180
    sample: float = 60
    train: float = 900


class Failed(Exception):
    """A case failed in its worker; the message is the reason."""


class Unsupported(Exception):
    """The framework refuses the case; the message is its reason."""


class ParentFailed(Exception):
    """A parent could not import its framework or was stopped; the message is the reason."""


class ParentDied(ParentFailed):
    """A parent ended without an error message, or hung."""


@dataclass(frozen=True)
class ParentKey:
    """What distinguishes parents: everything that is fixed before the import."""

    framework: str
    flavour: str | None
    allocator: str
    arm: str
    threads: int
    environment: tuple[tuple[str, str], ...] = ()  # variables beside those that all have

    @property
    def modules(self) -> list[str]:
        """The modules that a parent imports; none of them starts a thread or uses a device."""
        framework = FRAMEWORKS[self.framework]
        kit = [f"{framework.package}.{name}" for name in worker.KIT]
        keras = {"keras3": ["keras"], "tf_keras": ["tf_keras"]}.get(self.flavour, [])
        return [framework.module, *framework.preload, *keras, *kit]

    @property
    def name(self) -> str:
        """A name for logs."""
        parts = (self.framework, self.flavour, self.allocator.replace(" ", "-"), self.arm)
        return "-".join(filter(None, (*parts, *map("".join, self.environment))))


class Peer:
    """A connected process that answers one request at a time."""

    def __init__(self, connection: Connection, pid: int) -> None:
        self.pid, self._connection = pid, connection
        self._turn = threading.Lock()  # two threads may ask one parent
        self._owes = False  # an answer that nobody waits for any more (Ctrl-C, a time-out)

    def ask(self, timeout: float, kind: type, op: str, **arguments: object) -> wire.Reply:
        """Send a request and wait for an answer of this type; raises exceptions of `wire`."""
        with self._turn:
            if self._owes:  # its next answer would be taken for this one's
                raise wire.Gone
            self._owes = True
            self.post(op, **arguments)
            reply = self.reply(timeout, kind)
            self._owes = False
            return reply

    def post(self, op: str, **arguments: object) -> None:
        """Send a request without waiting."""
        wire.send(self._connection, wire.Request(op, arguments))

    def reply(self, timeout: float, kind: type) -> wire.Reply:
        """Wait for the answer to the last request, of this type."""
        reply = wire.receive(self._connection, wire.Reply[kind], timeout)
        if reply == wire.Reply():
            raise wire.Foreign("it is empty")
        return reply

    def close(self) -> None:
        """Hang up; the process then ends."""
        self._connection.close()


class Worker:
    """The process of one case."""

    def __init__(self, key: ParentKey, peer: Peer, end) -> None:
        self.key, self.peer, self._end = key, peer, end
        self._ended: str | None = None

    def ask(self, timeout: float, op: str, **arguments: object) -> Any:
        """Send a request and wait for its answer, of the type in `answers.OF_OPERATION`.

        Raises `Failed` or `Unsupported` with the reason.
        """
        try:
            self.peer.post(op, **arguments)
        except wire.Gone:
            raise Failed(f"the worker {self.stop()} before {op}") from None
        try:
            reply = self.peer.reply(timeout, answers.OF_OPERATION[op])
        except wire.Foreign as error:
            self.stop(kill=True)
            raise Failed(f"the worker's answer to {op} can't be read: {error}") from None
        except wire.Gone:
            raise Failed(f"the worker {self.stop()} during {op}") from None
        except wire.Silent:
            self.stop(kill=True)
            raise Failed(TIMED_OUT.format(op, timeout)) from None
        if reply.error is not None:
            self.stop(kill=True)
            raise Failed(reply.error)
        if reply.unsupported is not None:
            self.stop(kill=True)
            raise Unsupported(reply.unsupported)
        return reply.answer

    def stop(self, kill: bool = False) -> str:
        """End the process, and say how it ended."""
        if self._ended is None:
            if kill:
                _kill(self.peer.pid)
            self.peer.close()
            self._ended = self._end()
        return self._ended


class Processes:
    """Starts parents and workers, and ends them all on exit. Logs go to `logs`."""

    def __init__(
        self,
        logs: Path,
        *,
        interpreters: dict[str, str] | None = None,
        limits: TimeLimits | None = None,
    ) -> None:
        # Absolute, since its processes work in a folder of their own.
        self.logs, self.limits = logs.resolve(), limits or TimeLimits()
        self.interpreters = interpreters or {}
        logs.mkdir(parents=True, exist_ok=True)
        key = secrets.token_bytes(32)
        self._key = key.hex()
        self._arrived: dict[str, Peer] = {}
        self._arrival = threading.Condition()
        self._numbers = count(1)
        self._parents: dict[ParentKey, tuple[subprocess.Popen, Peer]] = {}
        self._running: list[subprocess.Popen] = []
        self._closed = False
        self.first_compile_s: dict[str, float] = {}  # by framework, see `isolated_measurements`
        # What processes write beside their logs: gone with the run, however they ended. Among it
        # torch.compile's cache, so that no earlier run warms it.
        self._ending = contextlib.ExitStack()
        self.scratch = self._ending.enter_context(scratch.folder())
        # Named pipes of Windows have no folder.
        place = None if os.name == "nt" else str(self._short() / "listener")
        self._listener = self._ending.enter_context(Listener(place, authkey=key))
        self._revival = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    def _short(self) -> Path:
        """A folder whose path is short enough for a socket in it, which gets 100 characters."""
        if len(os.fsencode(self.scratch)) < MOST_OF_A_PATH:
            return self.scratch
        folder = tempfile.TemporaryDirectory(prefix="twinbench-", dir="/tmp")
        return Path(self._ending.enter_context(folder))

    @property
    def forks(self) -> bool:
        """Whether workers are forked here, or newly executed."""
        return FORKS

    def new_folder(self) -> str:
        """An empty folder that is deleted when the run ends."""
        return tempfile.mkdtemp(dir=self.scratch)

    @property
    def trained(self) -> Path:
        """The folder of the models that the run has trained for predictions, see `checks`."""
        return self.scratch / "trained"

    def compiled(self, framework: str) -> Path:
        """The folder of a compiler's cache on disk for workers of a framework, if it has one."""
        return self.scratch / f"compiled-{framework}"

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop_parents()
        for process in self._running:
            if process.poll() is None:
                _kill(process.pid)
                process.wait()
        self._closed = True
        self._ending.close()

    def _accept(self) -> None:
        while True:
            try:
                connection = self._listener.accept()
                hello = wire.receive(connection, wire.Hello, timeout=10)
            except (wire.Gone, wire.Silent, AuthenticationError, EOFError, OSError):
                if self._closed:
                    return
                continue  # a caller that died while it called
            with self._arrival:
                self._arrived[hello.name] = Peer(connection, hello.pid)
                self._arrival.notify_all()

    def _wait_for(self, name: str, alive, timeout: float) -> Peer:
        """The peer called `name` once it has connected; `wire.Gone` if its process ended first."""
        waited = 0.0
        with self._arrival:
            while name not in self._arrived:
                if waited >= timeout:
                    raise wire.Silent
                if not alive():
                    raise wire.Gone
                self._arrival.wait(0.1)
                waited += 0.1
            return self._arrived.pop(name)

    def _name(self, stem: str) -> str:
        return f"{next(self._numbers):04d}-{stem}"

    def _execute(self, program: str, name: str, key: ParentKey, arguments: list[str]):
        """Start `python -m program ADDRESS NAME ARGUMENTS` in a new session.

        Of its own, so that the terminal's Ctrl-C reaches the harness alone, which then ends it.
        """
        environment = machine.process_environment(
            threads=key.threads, flavour=key.flavour, allocator=key.allocator
        )
        environment |= {wire.KEY: self._key} | scratch.environment(self.scratch)
        environment |= {"TORCHINDUCTOR_CACHE_DIR": str(self.compiled(key.framework))}
        environment |= {TRAINED: str(self.trained)} | dict(key.environment)
        with open(self.logs / f"{name}.log", "ab") as log:
            process = subprocess.Popen(
                [
                    self.interpreters.get(key.framework, sys.executable),
                    *("-m", program, self._listener.address, name, *arguments),
                ],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._running = [p for p in self._running if p.returncode is None] + [process]
        return process

    # Parents --------------------------------------------------------------------------------

    def start_parents(self, keys: Iterable[ParentKey]) -> dict[ParentKey, ParentFailed]:
        """Start a new parent for each different key, in parallel; returns why each failed one did.

        A parent that dies is started once more. One whose import fails is not.
        """
        self.stop_parents()
        if not FORKS:
            return {}
        failures: dict[ParentKey, ParentFailed] = {}
        started = {key: self._begin_parent(key) for key in dict.fromkeys(keys)}
        for key, begun in started.items():
            try:
                try:
                    self._parents[key] = self._finish_parent(*begun)
                except ParentDied:
                    self._parents[key] = self._finish_parent(*self._begin_parent(key))
            except ParentFailed as error:
                failures[key] = error
        return failures

    def _begin_parent(self, key: ParentKey) -> tuple[str, subprocess.Popen]:
        name = self._name(f"parent-{key.name}")
        return name, self._execute("bench.harness.parent", name, key, key.modules)

    def _finish_parent(self, name: str, process: subprocess.Popen) -> tuple[subprocess.Popen, Peer]:
        try:
            peer = self._wait_for(name, lambda: process.poll() is None, self.limits.start)
            reply = peer.reply(self.limits.start, bool)
        except (wire.Gone, wire.Silent) as error:
            if isinstance(error, wire.Silent):
                _kill(process.pid)
            _end(process)
            how = (
                worker.ending(process.returncode)
                if isinstance(error, wire.Gone)
                else f"did not answer within {self.limits.start:g} s"
            )
            raise ParentDied(f"its parent {how} (see {name}.log)") from None
        if reply.error is not None:
            _end(process)
            raise ParentFailed(reply.error)
        return process, peer

    def _parent(self, key: ParentKey) -> Peer:
        with self._revival:
            if key not in self._parents:
                raise ParentFailed("its parent was stopped")
            return self._parents[key][1]

    def _revive(self, key: ParentKey, dead: Peer) -> None:
        """Start a parent once more after it died; `ParentFailed` if it can't be."""
        with self._revival:
            process, peer = self._parents.get(key, (None, None))
            if peer is not dead:  # another thread was first
                return
            _kill(process.pid)
            process.wait()
            self._parents[key] = self._finish_parent(*self._begin_parent(key))

    def stop_parents(self) -> None:
        """End all parents and what they forked."""
        for _, peer in self._parents.values():
            peer.close()  # a parent whose harness hangs up ends its workers and itself
        for process, _ in self._parents.values():
            _end(process)
        self._parents.clear()

    # Workers --------------------------------------------------------------------------------

    def fork(self, key: ParentKey, label: str) -> Worker:
        """A worker forked by its parent, or newly executed if forking is unsafe.

        A dead parent is started once more; `ParentFailed` if it dies again.
        """
        if not FORKS:
            return self.execute(key, label)
        parent = self._parent(key)
        try:
            return self._fork(key, parent, label)
        except (wire.Gone, wire.Silent):
            self._revive(key, parent)
        try:
            return self._fork(key, self._parent(key), label)
        except (wire.Gone, wire.Silent):
            raise ParentDied("its parent died twice while it forked") from None

    def _fork(self, key: ParentKey, parent: Peer, label: str) -> Worker:
        name = self._name(label)
        log = str(self.logs / f"{name}.log")
        forked = parent.ask(self.limits.start, int, "fork", name=name, log=log)
        if forked.error is not None:  # such as no more processes; the parent has ended
            raise ParentFailed(forked.error)
        pid = forked.answer

        def reap() -> str:
            try:
                ended = parent.ask(self.limits.start, str, "reap", pid=pid).answer
            except (wire.Gone, wire.Silent):
                ended = None
            return ended or "ended with its parent"

        return self._worker(key, name, pid, lambda: _lives(pid), reap)

    def execute(self, key: ParentKey, label: str) -> Worker:
        """A newly executed worker."""
        name = self._name(label)
        log = str(self.logs / f"{name}.log")
        process = self._execute("bench.harness.worker", name, key, [log])

        def reap() -> str:
            _end(process, patience=5)
            return worker.ending(process.returncode)

        return self._worker(key, name, process.pid, lambda: process.poll() is None, reap)

    def _worker(self, key: ParentKey, name: str, pid: int, alive, reap) -> Worker:
        """The worker called `name` once it has connected; `reap` ends it and says how it ended."""
        try:
            peer = self._wait_for(name, alive, self.limits.start)
        except wire.Gone:
            raise Failed(f"the worker {reap()} before it answered (see {name}.log)") from None
        except wire.Silent:
            _kill(pid)
            reap()
            raise Failed(f"timeout: no worker within {self.limits.start:g} s") from None
        return Worker(key, peer, reap)


def answer_of(module: str, framework: str, arguments: list[str], *, allocator: str) -> str:
    """The last line that `python -m module framework threads ...` prints, with the first flavour.

    Raises SystemExit with its last error line if it fails.
    """
    threads, flavour = machine.usable_threads(), FRAMEWORKS[framework].flavours[0]
    done = subprocess.run(
        [sys.executable, "-m", module, framework, str(threads), *arguments],
        cwd=ROOT,
        env=machine.process_environment(threads=threads, flavour=flavour, allocator=allocator),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise SystemExit(f"{framework}: {said[-1]}")
    return done.stdout.splitlines()[-1]


def _lives(pid: int) -> bool:
    """Whether a process runs; one that ended and waits for its parent does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _kill(pid: int) -> None:
    """Kill a process that leads its own group, with whatever it started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # the group is gone
        if os.name == "posix":
            os.killpg(pid, signal.SIGKILL)
        else:
            os.kill(pid, signal.SIGTERM)


def _end(process: subprocess.Popen, patience: float = 10) -> None:
    """Wait for a process that was told to end; kill it if it does not, and what it left."""
    try:
        process.wait(patience)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if os.name == "posix":
        _kill(process.pid)
