"""The processes of one run: how they start and meet, the loop of each, and its checkpoints.

What it holds: everything that replicas, stages and shards do together beside the step itself, for
any model with any inputs (arrays, tuples, dicts). `launch` starts processes on this machine; on
many, start one on each: `TF_CONFIG=… python -m tf_impl.kit.replicas MAKE BUILD DATA --global-batch
N --steps N`.
Twin: `pt_impl/kit/replicas.py`.
Where the frameworks differ: the processes are the cluster of `TF_CONFIG` and each opens its own
address there, on every interface of its host (TensorFlow's servers have no option for one), where
torchrun tells processes a store to meet in. Exchanges have no end here where a peer hangs, so each
process ends itself when it had nothing to do for too long. A process may have several replicas
here, one a device, and stages and shards are devices of one process. All processes read checkpoints
here, so the folder has to be one that all of them see; there rank 0 tells the others.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import tempfile
import time
import warnings
from argparse import Namespace
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from importlib import import_module
from inspect import signature
from pathlib import Path
from time import perf_counter

import numpy as np
import tensorflow as tf
from tensorflow.compiler.xla.tsl.protobuf.coordination_config_pb2 import CoordinatedJob
from tensorflow.python.eager import context

from shared import parallel, scratch
from tf_impl.kit import runtime

_KEPT = 2  # checkpoints


def launch(
    make: str, build: str, dataset, run: parallel.Run, settings: dict | None = None
) -> parallel.Result:
    """Train on the devices of this machine, and return what the processes found.

    make: "module:function" of a technique, such as "tf_impl.parallel.data_parallel:processes". Each
    process calls `make(build, **settings)`, or `make(build, x, **settings)` with the inputs of a
    batch where it takes them, and gets a model, its optimizer and `step(x, y, samples) -> loss`:
    the losses of all processes add up to the mean over the global batch. What `step` takes are
    elements of `distribute(model, dataset)` of the same module; without one whole batches, and the
    number of their samples. build: "module:function" that gives a model, its optimizer and
    `loss_fn(output, y)`, the mean over samples; importable here, called with the same seeds.
    dataset: (x, y), arrays or tensors, tuples or dicts of them, as `fit` takes them; or a folder
    with train_x and train_y, as `shared.parallel.save_samples` writes them.

    TensorFlow's servers listen on every interface, so several processes are in a separate
    network, which has only the loopback: what `build` needs of another has to be here before. Where
    the system permits none, a warning says so. Stages and shards, and replicas of a run with one
    process, are GPUs or logical devices of the CPU.

    Raises, before anything is started, ValueError for numbers and names that don't fit;
    NotImplementedError where a process refused and RuntimeError where one failed, with what it
    said: no process is left then.
    """
    settings, count = settings or {}, run.processes or (run.replicas if run.parts == 1 else 1)
    parallel.find(build)
    parallel.check_settings(make, settings)
    with (
        scratch.folder() as folder,
        parallel.training_folder(dataset) as data,
    ):
        parallel.check(data, run, settings)
        threads = parallel.threads_each(run.threads, count)
        out = folder / "result.npz"
        command = [sys.executable, "-m", __spec__.name, f"--out={out}"]
        command += parallel.arguments(make, build, data, replace(run, threads=threads), settings)
        environment = parallel.environment(threads) | {"TF_USE_LEGACY_KERAS": _legacy_keras()}
        commands = [(command, environment | own) for own in _places(count)]
        parallel.run(commands, out_of_reach=count > 1)
        return parallel.Result.load(out)


def _legacy_keras() -> str:
    """The Keras of this process, whatever the variable says by now: importing tfmot sets it."""
    return "0" if hasattr(tf.keras, "StatelessScope") else "1"


def _places(count: int) -> list[dict[str, str]]:
    """The variables that tell each of so many processes of this machine which one it is."""
    if count == 1:
        return [{}]
    workers = [f"{parallel.LOOPBACK}:{port}" for port in parallel.free_ports(count)]
    tasks = [{"type": "worker", "index": index} for index in range(count)]
    configs = [json.dumps({"cluster": {"worker": workers}, "task": task}) for task in tasks]
    return [{"TF_CONFIG": config} | _own_gpu(index) for index, config in enumerate(configs)]


def _own_gpu(index: int) -> dict[str, str]:
    """The variable by which a process sees only one GPU, where there are any."""
    if not tf.config.list_physical_devices("GPU"):
        return {}
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    return {"CUDA_VISIBLE_DEVICES": seen.split(",")[index] if seen else str(index)}


def train(options: Namespace) -> None:
    """Be one process of a run: `options` are those of `shared.parallel.options`.

    The first process writes the result to `options.out`. Raises what `parallel.check` does, OSError
    where a checkpoint can't be written, and TensorFlow's errors where another process has ended.
    """
    parallel.end_with_launcher()
    make, build = parallel.find(options.make), parallel.find(options.build)
    hosts, rank = _cluster()
    options.replicas = options.replicas or len(hosts)
    parallel.check(options.data, options, options.settings)
    if options.parts > 1 and options.checkpoint:
        raise NotImplementedError("a checkpoint is of whole models: parts write none")
    imported = parallel.resident("VmRSS")
    local = sum(host.partition(":")[0] == parallel.LOOPBACK for host in hosts)
    threads = options.threads or parallel.threads_each(0, max(1, local))
    runtime.configure(threads=threads, seed=options.seed)
    devices = options.replicas * options.parts // len(hosts)
    if devices > 1:
        _make_devices(devices)
    join(timeout_s=options.timeout_s)
    if len(hosts) > 1:
        parallel.end_when_idle(options.timeout_s)
    x, y = parallel.load_training(options.data)
    example = {}
    if "x" in signature(make).parameters:
        example["x"] = _placed(parallel.take(x, slice(options.global_batch)))
    model, optimizer, step = make(build, **example, **options.settings)
    losses, seen, seconds, ended, crossed = _loop(model, optimizer, step, (x, y), options)
    strategy = getattr(model, "distribute_strategy", tf.distribute.get_strategy())
    memory = [_each(strategy, value) for value in (parallel.resident("VmHWM"), imported)]
    weights = _weights(model)  # statistics that are averaged where they are read need all processes
    if rank == 0 and options.out:
        result = parallel.Result(weights, losses, seen, seconds, ended, *memory, crossed)
        result.save(options.out)
    _total(strategy, np.zeros(1))  # nobody leaves while another still talks to it


def join(*, timeout_s: float = 300.0) -> None:
    """Wait for the other processes of `TF_CONFIG`, before a strategy is made.

    Without that variable the run has one process. Raises ValueError where it is malformed or the
    port of this process is taken, TimeoutError where a process does not come. Warns where others
    than the hosts of the run can reach TensorFlow's server.
    """
    hosts, rank = _cluster()
    if len(hosts) == 1:
        return
    name, _, port = hosts[rank].rpartition(":")
    parallel.checked_port(name, int(port))
    if others := parallel.others_reach(name):
        warnings.warn(
            f"TensorFlow's server listens on port {port} of every interface, {', '.join(others)}"
            " among them: keep others off with a firewall",
            stacklevel=2,
        )
    jobs = json.loads(os.environ["TF_CONFIG"])["cluster"]
    context.context().configure_coordination_service(
        service_type="standalone",
        service_leader=f"/job:{'chief' if 'chief' in jobs else 'worker'}/replica:0/task:0",
        cluster_register_timeout_in_ms=int(1000 * timeout_s),
        shutdown_barrier_timeout_in_ms=int(1000 * timeout_s),
        coordinated_jobs=[
            CoordinatedJob(name=job, num_tasks=len(jobs[job]))
            for job in ("chief", "worker")
            if job in jobs
        ],
    )
    _meet(hosts, rank, timeout_s)


def _meet(hosts: list[str], rank: int, timeout_s: float) -> None:
    """Return when all processes have come. Raises TimeoutError where one does not.

    They meet at the address of the first, before TensorFlow listens there: it would wait an hour
    for one that does not come, whatever the coordination service is told.
    """
    name, _, port = hosts[0].rpartition(":")
    deadline = time.monotonic() + timeout_s
    if rank == 0:
        _receive(hosts, _listener(name, int(port)), deadline, timeout_s)
        return
    while (left := deadline - time.monotonic()) > 0:
        with suppress(OSError), socket.create_connection((name, int(port)), left) as first:
            first.sendall(rank.to_bytes(4))
            first.settimeout(max(0.01, deadline - time.monotonic()))
            if first.recv(1):
                return
        time.sleep(0.05)  # it does not listen yet, or has just been started anew
    raise TimeoutError(f"{hosts[0]}, or another process, did not come within {timeout_s:g} s")


def _receive(hosts: list[str], server: socket.socket, deadline: float, timeout_s: float) -> None:
    """Wait for all others and tell them to go on."""
    missing, peers = set(range(1, len(hosts))), []
    with ExitStack() as open_sockets:
        open_sockets.enter_context(server)
        while missing:
            server.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                peers.append(open_sockets.enter_context(server.accept()[0]))
                peers[-1].settimeout(1.0)
                missing.discard(int.from_bytes(peers[-1].recv(4)))
            except TimeoutError:
                if time.monotonic() >= deadline:
                    absent = ", ".join(hosts[number] for number in sorted(missing))
                    raise TimeoutError(f"{absent} did not come within {timeout_s:g} s") from None
        server.close()
        for peer in peers:
            with suppress(OSError):  # one that came twice
                peer.sendall(b".")


def _listener(name: str, port: int) -> socket.socket:
    # A name may be that of a service, or of the loopback on its own host (as Debian has it), where
    # nobody else could come. TensorFlow listens everywhere, too.
    return socket.create_server((name if name == parallel.LOOPBACK else "", port))


def _cluster() -> tuple[list[str], int]:
    """Return the addresses of all processes, and which of them this is, from `TF_CONFIG`.

    Raises ValueError, which says what would be right, where the variable is malformed.
    """
    text = os.environ.get("TF_CONFIG")
    if not text:
        return [f"{parallel.LOOPBACK}:0"], 0
    right = (
        'it should be like {"cluster": {"worker": ["HOST:PORT", "HOST:PORT"]},'
        ' "task": {"type": "worker", "index": 0}}'
    )
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ValueError(f"TF_CONFIG is not JSON ({error}): {right}") from None
    try:
        jobs, kind = found["cluster"], found["task"]["type"]
        index = int(found["task"]["index"])
        hosts = [host for job in ("chief", "worker") for host in jobs.get(job, [])]
        own = jobs[kind]
    except (KeyError, TypeError, ValueError, AttributeError):
        raise ValueError(f"TF_CONFIG lacks a cluster or a task: {right}") from None
    if kind not in ("chief", "worker") or set(jobs) - {"chief", "worker"}:
        raise ValueError(f"TF_CONFIG may have only a chief and workers: {right}")
    bad = [h for h in hosts if not (isinstance(h, str) and h.rpartition(":")[2].isdigit())]
    if bad or len(set(hosts)) < len(hosts):
        raise ValueError(f"TF_CONFIG has an address without port, or one twice: {right}")
    if not 0 <= index < len(own):
        raise ValueError(f"TF_CONFIG has {len(own)} of type {kind}, and no index {index}: {right}")
    return hosts, hosts.index(own[index])


def _rank() -> int:
    return _cluster()[1]


def _loop(model, optimizer, step, dataset: tuple, options: Namespace) -> tuple:
    """Train; return losses, how often each sample was seen, seconds a step, ends, and traffic."""
    x, y = dataset
    strategy = getattr(model, "distribute_strategy", tf.distribute.get_strategy())
    begin, losses, save = _resume(model, optimizer, strategy, options)
    begins = _each(strategy, begin).tolist()
    if len(set(begins)) > 1:
        raise ValueError(
            f"processes found checkpoints of other steps in {options.checkpoint} ({begins}): all "
            "of them have to see one folder"
        )
    fresh, seconds, ended, sent = [], [], [], 0
    seen = np.zeros(parallel.size(x), np.int64)
    order = {"global_batch": options.global_batch, "seed": options.seed, "begin": begin}
    stream = parallel.batches(len(seen), **order, whole=options.parts > 1)
    distribute = getattr(import_module(options.make.partition(":")[0]), "distribute", _all)
    batches = iter(distribute(model, _dataset(x, y, stream)))
    for number in range(begin + 1, options.steps + 1):
        if len(seconds) == parallel.WARM_STEPS:
            _total(strategy, np.zeros(1))
            sent = parallel.loopback_sent()
        start = perf_counter()
        (rows, own_x, own_y), samples = next(batches)
        fresh.append(step(own_x, own_y, samples))
        runtime.synchronize()
        seconds.append(perf_counter() - start)
        ended.append(time.monotonic())
        for own in strategy.experimental_local_results(rows):
            seen[own.numpy()] += 1
        every = options.save_every or options.steps
        if options.checkpoint and (number % every == 0 or number == options.steps):
            losses, fresh = np.concatenate([losses, _total(strategy, fresh)]), []
            save(number, losses)
    _total(strategy, np.zeros(1))
    crossed = parallel.a_step(sent, len(seconds))
    losses = np.concatenate([losses, _total(strategy, fresh)])
    return losses, _total(strategy, seen), np.array(seconds), np.array(ended), crossed


def _dataset(x, y, stream) -> tf.data.Dataset:
    """Global batches without end: the rows, the inputs and the targets of each."""

    def batches():
        for rows in stream:
            yield rows, parallel.take(x, rows), parallel.take(y, rows)

    kinds = [
        parallel.mapped(lambda part: tf.TensorSpec([None, *part.shape[1:]], part.dtype), samples)
        for samples in (x, y)
    ]
    rows = tf.TensorSpec([None], tf.int64)
    found = tf.data.Dataset.from_generator(batches, output_signature=(rows, *kinds))
    # Else all processes would have to agree in every step on whether there is another batch.
    return found.apply(tf.data.experimental.assert_cardinality(tf.data.INFINITE_CARDINALITY))


def _all(model, dataset):
    """The whole of each batch, and its size."""
    return dataset.map(lambda *batch: (batch, tf.shape(batch[0])[0]))


def _placed(samples):
    """Arrays as tensors on the device."""
    with tf.device(runtime.device()):
        return parallel.mapped(tf.constant, samples)


def _total(strategy, values) -> np.ndarray:
    """Sum over all processes: of an array, or of a list of scalars."""
    array = np.array(values, dtype=None if isinstance(values, np.ndarray) else np.float64)
    processes = len(_cluster()[0])
    if processes == 1 or not array.size:
        return array
    local = strategy.num_replicas_in_sync // processes

    def value(replica):
        first = replica.replica_id_in_sync_group % local == 0
        return tf.constant(array if first else np.zeros_like(array))

    spread = strategy.experimental_distribute_values_from_function(value)
    return strategy.reduce(tf.distribute.ReduceOp.SUM, spread, axis=None).numpy()


def _each(strategy, value: int) -> np.ndarray:
    """The values of all processes."""
    values = np.zeros(len(_cluster()[0]), np.int64)
    values[_rank()] = value
    return _total(strategy, values)


def _weights(model) -> dict[str, np.ndarray]:
    """All weights by their paths in the model; parts of one say them by `arrays()`."""
    if isinstance(model, tf.keras.Model):
        return {_path(model, weight): np.array(weight) for weight in model.weights}
    parts = model if isinstance(model, list) else [model]
    return {name: array for part in parts for name, array in part.arrays().items()}


def _path(model, weight) -> str:
    return getattr(weight, "path", weight.name).removeprefix(f"{model.name}/")


def _make_devices(count: int) -> None:
    """Have so many GPUs or logical CPUs, which can only be made at the start."""
    kind = "GPU" if tf.config.list_physical_devices("GPU") else "CPU"
    cpu = tf.config.list_physical_devices("CPU")[0]
    if kind == "CPU" and not tf.config.get_logical_device_configuration(cpu):
        with suppress(RuntimeError):  # TensorFlow has begun
            logical = [tf.config.LogicalDeviceConfiguration()] * count
            tf.config.set_logical_device_configuration(cpu, logical)
    found = len(tf.config.list_logical_devices(kind))
    if found < count:
        raise ValueError(f"{count} parts need {count} devices, TensorFlow began with {found}")


# Checkpoints ----------------------------------------------------------------------------------


def _seeds(model) -> list[tf.Variable]:
    """What Keras 3's dropout and the like draw by, which is none of a model's weights."""
    weights = {id(weight) for weight in model.weights}
    return [variable.value for variable in model.variables if id(variable) not in weights]


def _resume(model, optimizer, strategy, options: Namespace) -> tuple[int, np.ndarray, Callable]:
    """Put the last checkpoint in place; return its step, its losses, and `save(step, losses)`.

    Variables are read by all processes together, so all of them save, but the others to a folder
    that is thrown away. Losses lie beside the checkpoint and are written before it; what counts as
    the last one is the file `checkpoint`, which TensorFlow replaces when the rest is complete.
    """
    folder = options.checkpoint
    if not folder:
        return 0, np.zeros(0), lambda step, losses: None
    checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer, seeds=_seeds(model))
    latest, begin, losses = tf.train.latest_checkpoint(folder), 0, np.zeros(0)
    if latest:
        begin = int(latest.rpartition("-")[2])
        beside = folder / f"losses-{begin}.json"
        try:
            written = json.loads(beside.read_text())
            checkpoint.read(latest).assert_existing_objects_matched()
        except (OSError, ValueError, AssertionError, tf.errors.OpError) as error:
            reason = str(error).splitlines()[0]
            raise ValueError(f"{latest} is not a complete checkpoint: {reason}") from None
        parallel.check_identity(latest, written["run"], options)
        losses = np.array(written["losses"])
    scratch = tempfile.TemporaryDirectory(prefix="replica-")
    place = folder if _rank() == 0 else Path(scratch.name)
    manager = tf.train.CheckpointManager(
        checkpoint, str(place), max_to_keep=_KEPT, checkpoint_name="step"
    )

    # Holds `scratch`, which else would be removed now, and made again for good.
    def save(step: int, losses: np.ndarray, _kept=scratch) -> None:
        place.mkdir(parents=True, exist_ok=True)
        state = {"run": parallel.identity(options), "losses": losses.tolist()}
        (place / f"losses-{step}.json").write_text(json.dumps(state))
        manager.save(checkpoint_number=step)
        kept = {path.rpartition("-")[2] for path in manager.checkpoints}
        for path in place.glob("losses-*.json"):
            if path.stem.rpartition("-")[2] not in kept:
                path.unlink()
        _total(strategy, np.zeros(1))  # nobody goes on before it is there

    return begin, losses, save


def main() -> None:
    """Be one process of a run."""
    try:
        with parallel.one_line_errors():
            train(parallel.options(__spec__.name).parse_args())
    except SystemExit as error:
        if not isinstance(error.code, str):  # a usage error, which is said
            raise
        print(error.code, file=sys.stderr, flush=True)
        # TensorFlow's own end would wait for a coordinator that may be out of reach.
        os._exit(1)


if __name__ == "__main__":
    main()
