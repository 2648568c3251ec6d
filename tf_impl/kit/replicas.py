"""The processes of one run: how they meet, the loop that each goes through, and checkpoints.

What it holds: everything that replicas, stages and shards do together beside the step itself, for
techniques whose model trains on several devices, with any inputs (arrays, tuples, dicts).
Twin: `pt_impl/kit/replicas.py`.
Where the frameworks differ: the processes are the cluster of `TF_CONFIG` and each opens its own
address there, on every interface of its host (TensorFlow's servers have no option for one), where
torchrun tells processes a store to meet in. A process may have several replicas here, one a device,
and stages and shards are devices of one process. All processes read checkpoints here, so the folder
has to be one that all of them see; there rank 0 tells the others.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from time import perf_counter

import numpy as np
import tensorflow as tf
from tensorflow.compiler.xla.tsl.protobuf.coordination_config_pb2 import CoordinatedJob
from tensorflow.python.eager import context

from shared import parallel
from tf_impl.kit import data, models, runtime

_KEPT = 2  # checkpoints


@dataclass(frozen=True)
class Replica:
    """What trains in a process.

    `distribute(dataset)` gives each replica its part of each global batch of a dataset.
    `step(x, y, samples) -> loss` takes these parts, and beside each sample the size of the global
    batch. The losses of all processes add up to the mean over the global batch.
    """

    model: tf.keras.Model
    optimizer: tf.keras.optimizers.Optimizer
    step: Callable
    distribute: Callable

    @property
    def strategy(self) -> tf.distribute.Strategy:
        """Where the model's variables are mirrored."""
        return self.model.distribute_strategy


@dataclass(frozen=True)
class Part:
    """What trains a model in parts.

    `step(x, y) -> loss` takes the whole batch. `weights()` returns all weights by Keras's paths.
    """

    step: Callable
    weights: Callable


def outputs(model: tf.keras.Model, x):
    """What the model gives for x in training.

    x is handed over as `fit` does, and unpacked only where `call` takes several arguments.
    """
    arguments, named = call_arguments(model, x)
    return model(*arguments, training=True, **named)


def call_arguments(model: tf.keras.Model, x) -> tuple[tuple, dict]:
    """The arguments by place and by name with which the model is called for x."""
    given = [
        argument
        for name, argument in signature(model.call).parameters.items()
        if name not in ("training", "mask") and argument.kind is not argument.VAR_KEYWORD
    ]
    needed = [argument for argument in given if argument.default is argument.empty]
    if isinstance(x, (tuple, list)) and len(needed) > 1:
        return tuple(x), {}
    if isinstance(x, dict) and len(given) > 1 and set(x) <= {argument.name for argument in given}:
        return (), x
    return (x,), {}


def launch(module: str, build: str, dataset, settings: dict, *, processes: int) -> parallel.Result:
    """Run `python -m module` in processes of this machine, a cluster, and return its result.

    settings: what `shared.parallel.options` gives, of all processes together.
    """
    each = {
        "threads": parallel.threads_each(settings["threads"], processes),
        "replicas": settings["replicas"] // processes,
    }
    with tempfile.TemporaryDirectory(prefix="replicas-") as folder:
        out = Path(folder, "result.npz")
        command = [sys.executable, "-m", module]
        command += parallel.arguments(build, dataset, settings | each | {"out": out})
        environment = parallel.environment(each["threads"])
        workers = [f"{parallel.LOOPBACK}:{port}" for port in parallel.free_ports(processes)]
        commands = [(command, environment)]
        if processes > 1:
            tasks = [{"type": "worker", "index": index} for index in range(processes)]
            configs = [json.dumps({"cluster": {"worker": workers}, "task": t}) for t in tasks]
            commands = [
                (command, environment | _own_gpu(index) | {"TF_CONFIG": config})
                for index, config in enumerate(configs)
            ]
        parallel.run(commands)
        return parallel.Result.load(out)


def _own_gpu(index: int) -> dict[str, str]:
    """The variable by which a process sees one GPU alone, where there are any."""
    if not tf.config.list_physical_devices("GPU"):
        return {}
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    return {"CUDA_VISIBLE_DEVICES": seen.split(",")[index] if seen else str(index)}


def train(variants: dict, options: Namespace) -> None:
    """Be one process of a run: `options` are those of `shared.parallel.options`.

    The first process writes the result to `options.out`. Raises what `parallel.check` does, OSError
    where a checkpoint can't be written, and TensorFlow's errors where another process has ended.
    """
    parallel.end_with_launcher()
    settings = vars(options)
    build = parallel.find(options.build)
    hosts, _ = _cluster()
    parallel.check(options.data, len(hosts) * options.replicas, settings)
    imported = parallel.resident("VmRSS")
    cpus = tf.config.list_physical_devices("CPU")
    if options.replicas > 1 and not tf.config.list_physical_devices("GPU"):
        logical = [tf.config.LogicalDeviceConfiguration()] * options.replicas
        tf.config.set_logical_device_configuration(cpus[0], logical)
    local = sum(host.partition(":")[0] == parallel.LOOPBACK for host in hosts)
    threads = options.threads or parallel.threads_each(0, max(1, local))
    runtime.configure(threads=threads, seed=options.seed)
    join(timeout_s=options.timeout_s)
    function = variants[options.variant]
    replica = function(build, **parallel.of(function, settings))
    done = _loop(replica, options)
    memory = [_each(replica.strategy, v) for v in (parallel.resident("VmHWM"), imported)]
    weights = _weights(replica.model)
    if _rank() == 0 and options.out:
        parallel.Result(weights, *done[:3], *memory, done[3]).save(options.out)
    _total(replica.strategy, np.zeros(1))  # nobody leaves while another still talks to it


def join(*, timeout_s: float = 300.0) -> None:
    """Wait for the other processes of `TF_CONFIG`, before a strategy is made.

    Without that variable the run has one process. Raises ValueError where it is malformed or the
    port of this process is taken, TimeoutError where a process does not come.
    """
    hosts, rank = _cluster()
    if len(hosts) == 1:
        return
    name, _, port = hosts[rank].rpartition(":")
    parallel.checked_port(name, int(port))
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
        raise ValueError(f"TF_CONFIG may have a chief and workers alone: {right}")
    bad = [h for h in hosts if not (isinstance(h, str) and h.rpartition(":")[2].isdigit())]
    if bad or len(set(hosts)) < len(hosts):
        raise ValueError(f"TF_CONFIG has an address without port, or one twice: {right}")
    if not 0 <= index < len(own):
        raise ValueError(f"TF_CONFIG has {len(own)} of type {kind}, and no index {index}: {right}")
    return hosts, hosts.index(own[index])


def _rank() -> int:
    return _cluster()[1]


def _loop(replica: Replica, options: Namespace) -> tuple:
    """Train; return losses, how often each sample was seen, seconds a step, loopback bytes."""
    x, y = parallel.load_training(options.data)
    strategy = replica.strategy
    begin, losses, save = _resume(replica, options)
    if len(set(begun := _each(strategy, begin).tolist())) > 1:
        raise ValueError(
            f"processes found checkpoints of other steps in {options.checkpoint} ({begun}): all of "
            "them have to see one folder"
        )
    fresh, seconds, sent = [], [], 0
    seen = np.zeros(parallel.size(x), np.int64)
    stream = parallel.batches(
        len(seen), global_batch=options.global_batch, seed=options.seed, begin=begin
    )
    batches = iter(replica.distribute(_dataset(x, y, stream)))
    for number in range(begin + 1, options.steps + 1):
        if len(seconds) == parallel.WARM_STEPS:
            _total(strategy, np.zeros(1))
            sent = parallel.loopback_sent()
        start = perf_counter()
        rows, samples, own_x, own_y = next(batches)
        fresh.append(replica.step(own_x, own_y, samples))
        runtime.synchronize()
        seconds.append(perf_counter() - start)
        for own in strategy.experimental_local_results(rows):
            seen[own.numpy()] += 1
        every = options.save_every or options.steps
        if options.checkpoint and (number % every == 0 or number == options.steps):
            losses, fresh = np.concatenate([losses, _total(strategy, fresh)]), []
            save(number, losses)
    _total(strategy, np.zeros(1))
    crossed = parallel.a_step(sent, len(seconds))
    losses = np.concatenate([losses, _total(strategy, fresh)])
    return losses, _total(strategy, seen), np.array(seconds), crossed


def _dataset(x, y, stream) -> tf.data.Dataset:
    """Global batches without end: rows, beside each the size of its batch, inputs and targets."""

    def batches():
        for rows in stream:
            yield (
                rows,
                np.full(len(rows), len(rows)),
                parallel.take(x, rows),
                parallel.take(y, rows),
            )

    numbers = tf.TensorSpec([None], tf.int64)
    kinds = [
        parallel.mapped(lambda part: tf.TensorSpec([None, *part.shape[1:]], part.dtype), samples)
        for samples in (x, y)
    ]
    found = tf.data.Dataset.from_generator(batches, output_signature=(numbers, numbers, *kinds))
    # Else all processes would have to agree in every step on whether there is another batch.
    return found.apply(tf.data.experimental.assert_cardinality(tf.data.INFINITE_CARDINALITY))


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


def _weights(model: tf.keras.Model) -> dict[str, np.ndarray]:
    """Canonical weights; Keras's paths where two layers share a canonical name."""
    weights = models.export_weights(model)
    if len(weights) == len(model.weights):
        return weights
    return {variable.path: np.array(variable) for variable in model.weights}


# Checkpoints ----------------------------------------------------------------------------------


def _resume(replica: Replica, options: Namespace) -> tuple[int, np.ndarray, Callable]:
    """Put the last checkpoint in place; return its step, its losses, and `save(step, losses)`.

    Variables are read by all processes together, so all of them save, but the others to a folder
    that is thrown away. Losses lie beside the checkpoint and are written before it; what counts as
    the last one is the file `checkpoint`, which TensorFlow replaces when the rest is complete.
    """
    folder = options.checkpoint
    if not folder:
        return 0, np.zeros(0), lambda step, losses: None
    checkpoint = tf.train.Checkpoint(model=replica.model, optimizer=replica.optimizer)
    latest, begin, losses = tf.train.latest_checkpoint(folder), 0, np.zeros(0)
    if latest:
        begin = int(latest.rpartition("-")[2])
        beside = folder / f"losses-{begin}.json"
        try:
            told = json.loads(beside.read_text())
            checkpoint.read(latest).assert_existing_objects_matched()
        except (OSError, ValueError, AssertionError, tf.errors.OpError) as error:
            reason = str(error).splitlines()[0]
            raise ValueError(f"{latest} is no whole checkpoint: {reason}") from None
        parallel.check_identity(latest, told["run"], options)
        losses = np.array(told["losses"])
    scratch = tempfile.TemporaryDirectory(prefix="replica-")
    place = folder if _rank() == 0 else Path(scratch.name)
    manager = tf.train.CheckpointManager(
        checkpoint, str(place), max_to_keep=_KEPT, checkpoint_name="step"
    )

    # Holds `scratch`, which else would be removed now, and made again for good.
    def save(step: int, losses: np.ndarray, _kept=scratch) -> None:
        place.mkdir(parents=True, exist_ok=True)
        told = {"run": parallel.identity(options), "losses": losses.tolist()}
        (place / f"losses-{step}.json").write_text(json.dumps(told))
        manager.save(checkpoint_number=step)
        kept = {path.rpartition("-")[2] for path in manager.checkpoints}
        for path in place.glob("losses-*.json"):
            if path.stem.rpartition("-")[2] not in kept:
                path.unlink()
        _total(replica.strategy, np.zeros(1))  # nobody goes on before it is there

    return begin, losses, save


# Parts of a model -----------------------------------------------------------------------------


def train_parts(
    build: str,
    dataset: tuple,
    make: Callable,
    *,
    parts: int,
    global_batch: int,
    steps: int,
    seed: int,
) -> parallel.Trained:
    """Train parts of one model, a device each, on `steps` batches in the shared order of `seed`.

    build: "module:function", importable from here, which gives a model, its optimizer (without
    state yet), and a loss that is a mean over samples. dataset: inputs and targets, arrays or
    tuples or dicts of them, images NHWC. `make(model, optimizer, loss_fn, x)`, x inputs of one
    batch, gives the `Part` of all devices. These are GPUs, or logical CPUs, which are made here if
    TensorFlow has not begun; else there must be enough.

    Raises, before anything is trained, ValueError for numbers that don't fit, and what `make` does.
    """
    parallel.check_training(dataset, steps=steps, global_batch=global_batch)
    _make_devices(parts)
    tf.keras.utils.set_random_seed(seed)
    model, optimizer, loss_fn = parallel.find(build)()
    x, y = dataset
    part = make(model, optimizer, loss_fn, _placed(x, slice(global_batch)))
    losses, ended = [], []
    order = {"global_batch": global_batch, "steps": steps, "seed": seed}
    for rows in parallel.full_batches(parallel.size(x), **order):
        losses.append(float(part.step(_placed(x, rows), _placed(y, rows))))
        ended.append(time.monotonic())
    return parallel.Trained(part.weights(), losses, ended)


def _placed(samples, rows):
    """Rows of samples on the device."""
    own = parallel.take(samples, rows)
    return parallel.mapped(lambda part: data.to_device(part, part[:0])[0], own)


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


# BatchNorm ------------------------------------------------------------------------------------


def synchronise_norms(model: tf.keras.Model) -> None:
    """Let BatchNorm layers normalise with the statistics of the global batch, in place."""
    for layer in model._flatten_layers():  # those within custom layers, too
        if isinstance(layer, tf.keras.layers.BatchNormalization):
            layer.synchronized = True
