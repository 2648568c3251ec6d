"""One training run on several replicas: what both frameworks' programs for it agree on.

The samples of each batch, the options of the program, the result that it writes, and how its
processes are started on one machine and ended together. Imports neither framework.

The order of an epoch is a permutation drawn from (seed, epoch), as in `datasets.batch_order`, cut
into global batches, of which the last may be smaller. Each replica takes one contiguous part of
each, so shards never share a sample, and whatever the number of replicas, a step sees the same
samples.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from inspect import signature
from itertools import count, islice
from pathlib import Path

import numpy as np
import psutil

from shared import network_namespace, scratch
from shared.cgroups import usable_threads

LOOPBACK = "127.0.0.1"
WARM_STEPS = 2  # at the start of a run, whose traffic does not count
_EVERY = ("0.0.0.0", "::")
_LOOKS = 10  # at a process that may be idle, in the time that it may wait
_IDLE = 0.02  # share of a core: heartbeats and the looks themselves take less
END_S = 10.0  # how long processes that were asked to end may take
_ERROR = "replica failed: "
_REFUSED = "NotImplementedError: "  # what follows is why
_LAUNCHER = "REPLICAS_LAUNCHER"  # the process that started a run, for those that it started
_LEAST = {
    **{"replicas": 1, "parts": 1, "global_batch": 1, "steps": 1, "seed": 0},
    **{"processes": 0, "threads": 0, "save_every": 0},
}


@dataclass(frozen=True)
class Result:
    """What a run gives back.

    weights: of the whole model, by the framework's own names and in its layouts. losses: (steps,),
    the mean over each global batch. seen: (samples,), how often each sample was trained on since
    the run was started, counted by the replicas themselves. step_s: seconds of each step of the
    first process, since it was started; ended: when each was over, on the clock of
    `time.monotonic`.
    peak_bytes, import_bytes: (processes,) resident memory of each process, at its peak and after
    the imports; 0 where the system does not tell. loopback_bytes: what crossed the loopback
    interface in a step, mean over the steps after the first two, of all processes together and
    headers included; 0 for fewer steps or where the system does not tell.
    """

    weights: dict[str, np.ndarray]
    losses: np.ndarray
    seen: np.ndarray
    step_s: np.ndarray
    ended: np.ndarray
    peak_bytes: np.ndarray
    import_bytes: np.ndarray
    loopback_bytes: float

    def save(self, path: Path) -> None:
        """Write it to `path` (.npz), which appears only when it is complete."""
        arrays = {name: value for name, value in vars(self).items() if name != "weights"}
        arrays |= {f"weights/{name}": value for name, value in self.weights.items()}
        partial = path.with_name(f".{path.name}.partial")
        with partial.open("wb") as file:
            np.savez(file, **arrays)
        partial.replace(path)

    @classmethod
    def load(cls, path: Path) -> Result:
        """Read what `save` wrote, without executing code of the file."""
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        weights = {
            name.removeprefix("weights/"): arrays.pop(name)
            for name in [name for name in arrays if name.startswith("weights/")]
        }
        return cls(weights, **arrays | {"loopback_bytes": float(arrays["loopback_bytes"])})


@dataclass(frozen=True)
class Run:
    """How a model trains on several devices, whatever they do in a step.

    replicas: of the model, which share each global batch. parts: devices that hold one replica
    together, as stages or shards. processes: 0 for as many as the framework has by itself.
    threads: of all devices together, 0 for all cores. checkpoint: a folder to save to every
    `save_every` steps and at the end (0: only at the end); a run goes on from the last one there.
    timeout_s: how long a process waits for others.
    """

    replicas: int
    global_batch: int
    steps: int
    parts: int = 1
    seed: int = 0
    processes: int = 0
    threads: int = 0
    checkpoint: str = ""
    save_every: int = 0
    timeout_s: float = 300.0


def distance(one: Result, other: Result) -> float:
    """The largest relative L2 distance of a weight tensor of two results."""
    return max(
        float(np.linalg.norm(weight - other.weights[name]) / (np.linalg.norm(weight) or 1.0))
        for name, weight in one.weights.items()
    )


# Samples --------------------------------------------------------------------------------------
# The inputs of a model, and its targets, are an array, or a tuple, list or dict of arrays.


def leaves(samples) -> list:
    """The arrays of which samples consist."""
    if isinstance(samples, dict):
        samples = list(samples.values())
    return [*samples] if isinstance(samples, (tuple, list)) else [samples]


def mapped(function: Callable, samples):
    """The same structure, of what the function makes of each array."""
    if isinstance(samples, dict):
        return {name: function(part) for name, part in samples.items()}
    if isinstance(samples, (tuple, list)):
        return tuple(function(part) for part in samples)
    return function(samples)


def size(samples) -> int:
    """How many samples there are."""
    return len(leaves(samples)[0])


def take(samples, rows):
    """Some of the samples: their numbers, or a slice."""
    return mapped(lambda part: part[rows], samples)


def save_samples(samples, path: Path) -> None:
    """Write an array to PATH.npy; those of a tuple or dict to the folder PATH, by place or name.

    Tensors are taken as arrays, from a GPU, too.
    """
    samples = mapped(lambda part: part.detach().cpu() if hasattr(part, "detach") else part, samples)
    if not isinstance(samples, (tuple, list, dict)):
        np.save(path.with_suffix(".npy"), samples)
        return
    path.mkdir()
    named = samples if isinstance(samples, dict) else dict(enumerate(samples))
    for name, part in named.items():
        np.save(path / f"{name}.npy", part)


def load_samples(path: Path):
    """What `save_samples` wrote, mapped read-only: a tuple where files are numbered, else a dict.

    Raises FileNotFoundError where there is nothing.
    """
    whole = path.with_suffix(".npy")
    if not path.is_dir():
        return np.load(whole, mmap_mode="r", allow_pickle=False)
    files = {file.stem: file for file in sorted(path.glob("*.npy"))}
    if not files:
        raise FileNotFoundError(f"neither {whole} nor arrays in {path}")
    arrays = {name: np.load(file, mmap_mode="r") for name, file in files.items()}
    if all(name.isdigit() for name in arrays):
        return tuple(arrays[name] for name in sorted(arrays, key=int))
    return arrays


def load_training(folder: object) -> tuple:
    """The inputs and the targets of the training split in a folder.

    Raises ValueError where their arrays differ in length.
    """
    x, y = (load_samples(Path(folder, f"train_{part}")) for part in "xy")
    if len({len(part) for part in [*leaves(x), *leaves(y)]}) > 1:
        raise ValueError(f"{folder} has {size(x)} samples and {size(y)} labels")
    return x, y


# Which samples --------------------------------------------------------------------------------


def batches(
    samples: int, *, global_batch: int, seed: int, begin: int = 0, whole: bool = False
) -> Iterator[np.ndarray]:
    """Yield the rows of each global batch from step `begin` on, epoch after epoch, without end.

    The last batch of an epoch holds what is left, or is left out where all have to be `whole`.
    """
    per_epoch = samples // global_batch if whole else -(-samples // global_batch)
    for epoch in count(begin // per_epoch):
        order = np.random.default_rng([seed, epoch]).permutation(samples)
        starts = range(0, per_epoch * global_batch, global_batch)
        parts = (order[start : start + global_batch] for start in starts)
        yield from islice(parts, begin % per_epoch if epoch == begin // per_epoch else 0, None)


# Settings -------------------------------------------------------------------------------------


def options(program: str) -> argparse.ArgumentParser:
    """The command line of the program that every process of a run executes."""
    parser = argparse.ArgumentParser(prog=f"python -m {program}")
    parser.add_argument("make", metavar="MAKE", help='"module:function" of a technique')
    parser.add_argument(
        "build", metavar="BUILD", help='"module:function" giving model, optimizer, loss function'
    )
    parser.add_argument("data", metavar="DATA", help="folder with train_x and train_y")
    parser.add_argument("--settings", type=json.loads, default={}, help="of the technique, as JSON")
    parser.add_argument("--global-batch", type=int, required=True, help="samples a step, in all")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--replicas", type=int, default=0, help="of the model; 0: all processes")
    parser.add_argument("--parts", type=int, default=1, help="devices that hold one replica")
    parser.add_argument("--processes", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="where the first process writes its result (.npz)")
    parser.add_argument("--threads", type=int, default=0, help="of this process; 0: its share")
    parser.add_argument("--timeout-s", type=float, default=300.0, help="of waiting for others")
    parser.add_argument("--checkpoint", type=Path, help="folder; a run goes on from what it holds")
    parser.add_argument("--save-every", type=int, default=0, help="steps; 0: only at the end")
    return parser


def arguments(make: str, build: str, data: object, run: Run, settings: dict) -> list[str]:
    """The command line that gives `options` these settings; "" is left out."""
    words = [make, build, str(data), f"--settings={json.dumps(settings)}"]
    for name, value in asdict(run).items():
        if value != "":
            words.append(f"--{name.replace('_', '-')}={value}")
    return words


def check(data: object, run: Run | argparse.Namespace, settings: dict) -> None:
    """Raise ValueError for numbers that no run on the samples of folder `data` can have."""
    for name, least in _LEAST.items():
        value = getattr(run, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ValueError(f"{name} must be an integer of at least {least}, not {value!r}")
    if not 0 < run.timeout_s < float("inf"):
        raise ValueError(f"timeout_s must be positive and have an end, not {run.timeout_s}")
    samples = size(load_training(data)[0])
    replicas, global_batch = run.replicas, run.global_batch
    if global_batch % replicas:
        near = max(replicas, global_batch // replicas * replicas)
        raise ValueError(
            f"a global batch of {global_batch} does not divide among {replicas} replicas: take"
            f" {near} or {near + replicas}"
        )
    if global_batch > samples:
        raise ValueError(f"a global batch of {global_batch} from {samples} samples")
    last = samples % global_batch or global_batch
    micro_batches = settings.get("micro_batches", 1)
    if run.parts > 1:
        return  # whose epochs end with the last whole batch
    # TensorFlow gives all replicas but the last one more than the mean, rounded up.
    if last - (replicas - 1) * -(-last // replicas) < micro_batches:
        raise ValueError(
            f"the last batch of an epoch has {last} samples, too few for {replicas} replicas with"
            f" {micro_batches} micro-batches each: take another global batch"
        )


@contextlib.contextmanager
def training_folder(dataset) -> Iterator[str]:
    """The folder of a dataset: its own, or one that holds the arrays or tensors of (x, y)."""
    if not isinstance(dataset, tuple):
        yield str(dataset)
        return
    with scratch.folder() as folder:
        for name, samples in zip("xy", dataset, strict=True):
            save_samples(samples, folder / f"train_{name}")
        yield str(folder)


def find(build: str) -> Callable:
    """Return the function that `build`, "module:function", names.

    Raises ValueError where there is none.
    """
    module, _, name = str(build).partition(":")
    if not module or not name:
        raise ValueError(f'build must be "module:function", not {build!r}')
    try:
        function = getattr(import_module(module), name, None)
    except ModuleNotFoundError as error:
        raise ValueError(f"build names {module}, which can't be imported: {error}") from None
    if not callable(function):
        raise ValueError(f"module {module} has no function {name!r}")
    return function


def check_settings(make: str, settings: dict) -> None:
    """Raise ValueError for a setting that the function `make` does not have, or lacks one."""
    known = {
        name: one
        for name, one in signature(find(make)).parameters.items()
        if one.kind is one.KEYWORD_ONLY
    }
    if unknown := sorted(settings.keys() - known.keys()):
        raise ValueError(
            f"{make} has no setting {unknown[0]!r}: {', '.join(known) or 'it has none'}"
        )
    needed = [name for name, one in known.items() if one.default is one.empty]
    if missing := [name for name in needed if name not in settings]:
        raise ValueError(f"{make} needs the setting {missing[0]!r}")


def identity(options: argparse.Namespace) -> dict[str, int | str]:
    """What a run has to share with the one whose checkpoint it goes on from."""
    return {name: getattr(options, name) for name in ("make", "build", "global_batch", "seed")}


def check_identity(path: object, saved: dict, options: argparse.Namespace) -> None:
    """Raise ValueError where a checkpoint is that of another run."""
    for name, value in identity(options).items():
        if saved.get(name) != value:
            raise ValueError(
                f"{path} is of another run: its {name} is {saved.get(name)!r}, not {value!r}"
            )


def threads_each(threads: int, replicas: int) -> int:
    """The threads of each of `replicas` that share `threads`, or all cores for 0; at least one."""
    if 0 < threads < replicas:
        raise ValueError(f"{replicas} replicas can't share {threads} threads: one each at least")
    return max(1, (threads or usable_threads()) // replicas)


# Network --------------------------------------------------------------------------------------


def loopback_interface() -> str:
    """The name of the interface that has 127.0.0.1, such as "lo"."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address == LOOPBACK for address in addresses):
            return name
    raise OSError(f"no network interface has the address {LOOPBACK}")


def others_reach(host: str) -> list[str]:
    """Interfaces of this machine beside the loopback and that which has the address of `host`.

    Whoever listens on every interface is reached through these by others than the run's hosts.
    """
    with contextlib.suppress(OSError):
        host = socket.gethostbyname(host)
    up = {name for name, found in psutil.net_if_stats().items() if found.isup}
    return [
        name
        for name, addresses in psutil.net_if_addrs().items()
        if name in up and not {LOOPBACK, host} & {each.address for each in addresses}
    ]


def listens_everywhere(port: int) -> bool:
    """Whether somebody on this machine listens on a port of every interface."""
    with contextlib.suppress(psutil.Error, OSError):
        found = psutil.net_connections(kind="tcp")
        listening = [one for one in found if one.status == psutil.CONN_LISTEN]
        return any(one.laddr.port == port and one.laddr.ip in _EVERY for one in listening)
    return False


def loopback_sent() -> int:
    """Bytes that crossed the loopback interface since the machine started; 0 if not told."""
    counters = psutil.net_io_counters(pernic=True)
    with contextlib.suppress(OSError):
        if (counter := counters.get(loopback_interface())) is not None:
            return counter.bytes_sent
    return 0


def a_step(before: int, steps: int) -> float:
    """Loopback bytes a step since the counter stood at `before`, after the first steps of a run."""
    after = loopback_sent()
    return (after - before) / (steps - WARM_STEPS) if after and steps > WARM_STEPS else 0.0


def free_ports(number: int) -> list[int]:
    """Ports of the loopback that nobody listens on; all are held at once, so all differ."""
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(socket.socket()) for _ in range(number)]
        for one in held:
            one.bind((LOOPBACK, 0))
        return [one.getsockname()[1] for one in held]


def checked_port(host: str, port: int) -> int:
    """The port; ValueError where another process of this machine listens on it."""
    if port:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    raise ValueError(f"port {port} of {host} is in use: take another") from None
    return port


# Memory ---------------------------------------------------------------------------------------


def resident(key: str) -> int:
    """VmRSS or VmHWM of this process in bytes; 0 where the system has no such figures."""
    status = Path("/proc/self/status")
    if not status.exists():
        return 0
    return int(status.read_text().split(f"{key}:")[1].split()[0]) * 1024


# Processes ------------------------------------------------------------------------------------


def run(
    commands: Sequence[tuple[list[str], dict[str, str]]], *, out_of_reach: bool = False
) -> None:
    """Run commands side by side, each with its environment, until all have ended well.

    out_of_reach: in a separate network, which has only the loopback; a warning says where the
    system does not permit it. What they write to the temporary folder goes with them.
    Where one fails, or this is interrupted, the others and all that they started are ended first.
    Raises RuntimeError with the line in which a process said what was wrong, NotImplementedError
    where it refused.
    """
    with scratch.folder() as folder, _network(out_of_reach) as network:
        logs = [folder / str(number) for number in range(len(commands))]
        common = {_LAUNCHER: str(os.getpid())} | scratch.environment(folder)
        started: list[subprocess.Popen] = []
        try:
            for (command, environment), path in zip(commands, logs, strict=True):
                with path.open("wb") as log:
                    # Its own group, so that what it starts can be ended with it.
                    started.append(
                        subprocess.Popen(
                            network.command(command) if network else command,
                            env=environment | common,
                            stdin=subprocess.DEVNULL,
                            stdout=log,
                            stderr=log,
                            start_new_session=True,
                            pass_fds=network.files if network else (),
                        )
                    )
            problem = _wait(started)
        finally:
            end(started)
        if problem:
            kind, _, words = (_said(logs) or problem).partition(_REFUSED)
            raise RuntimeError(kind) if kind else NotImplementedError(words)


@contextlib.contextmanager
def _network(wanted: bool) -> Iterator[network_namespace.Network | None]:
    """The network of a run's processes, where they need a separate one and can have it."""
    with contextlib.ExitStack() as stack:
        network = None
        if wanted and others_reach(LOOPBACK):
            try:
                network = stack.enter_context(network_namespace.isolated_network())
            except network_namespace.Refused as error:
                warnings.warn(
                    f"the processes of this run listen on every interface of this machine: {error};"
                    " keep others off with a firewall",
                    stacklevel=4,
                )
        yield network


def _wait(started: list[subprocess.Popen]) -> str | None:
    """Wait until all have ended well, or one has not; say what was wrong."""
    while running := [one for one in started if one.poll() is None]:
        if any(one.returncode for one in started):
            break
        with contextlib.suppress(subprocess.TimeoutExpired):
            running[0].wait(0.05)
    failed = [one.returncode for one in started if one.returncode]
    return f"a replica ended with status {failed[0]} and without a word" if failed else None


def end(started: Sequence[subprocess.Popen]) -> None:
    """End processes and all that they started: asked first, then killed."""
    alive = []
    for one in started:
        with contextlib.suppress(psutil.Error):
            alive += psutil.Process(one.pid).children(recursive=True)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(one.pid, signal.SIGTERM)
    deadline = time.monotonic() + END_S
    for one in started:
        with contextlib.suppress(subprocess.TimeoutExpired):
            one.wait(max(0.0, deadline - time.monotonic()))
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(one.pid, signal.SIGKILL)
        one.wait()
    for child in alive:
        with contextlib.suppress(psutil.Error):
            child.kill()


def end_with_launcher() -> None:
    """Let this process end when those that started it do, even if they are killed.

    That is the one that called `run`, and torchrun between. Nothing happens where the run was
    started by hand or by a cluster manager.
    """
    if not (number := os.environ.get(_LAUNCHER)):
        return

    def wait() -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            above = [psutil.Process(int(number)), psutil.Process(os.getppid())]
            while all(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in above):
                time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def end_when_idle(seconds: float) -> None:
    """Let this process end once it used no processor for so long: what it waits for hangs.

    For a framework whose exchanges wait without end. Time in which this process was stopped itself
    does not count.
    """

    def look() -> None:
        idle, used = 0, time.process_time()
        while idle < _LOOKS:
            time.sleep(seconds / _LOOKS)
            before, used = used, time.process_time()
            idle = idle + 1 if used - before < _IDLE * seconds / _LOOKS else 0
        with contextlib.suppress(OSError):
            said = f"{_ERROR}another process hangs: nothing to do for {seconds:g} s"
            print(said, file=sys.stderr, flush=True)
        os._exit(1)

    threading.Thread(target=look, daemon=True).start()


def _said(logs: list[Path]) -> str | None:
    """The line in which the first that failed said what was wrong, else the last line of any.

    The one that wrote its last before others did: these may have failed because it ended.
    """
    logs = sorted(logs, key=lambda log: log.stat().st_mtime_ns)
    lines = [line for log in logs for line in log.read_text(errors="replace").splitlines()]
    for line in lines:
        if _ERROR in line:
            return line.partition(_ERROR)[2].strip()
    return next((line.strip() for line in reversed(lines) if line.strip()), None)


def environment(threads: int) -> dict[str, str]:
    """The variables of a process that this one starts: its search path, threads, loopback only."""
    found = {k: v for k, v in os.environ.items() if k not in ("TF_CONFIG", "RANK", "WORLD_SIZE")}
    found["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
    names = ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS")
    found |= dict.fromkeys(names, str(threads))
    return found | {"GLOO_SOCKET_IFNAME": loopback_interface()}


@contextlib.contextmanager
def one_line_errors() -> Iterator[None]:
    """What goes wrong inside becomes one line, `replica failed: …`, and exit status 1."""
    try:
        yield
    except Exception as error:
        kind = "" if isinstance(error, (ValueError, OSError)) else f"{type(error).__name__}: "
        raise SystemExit(f"{_ERROR}{kind}{' '.join(str(error).split())[:600]}") from None
