"""The processes of one run: how they meet, the loop that each goes through, and checkpoints.

What it holds: everything that replicas, stages and shards do together beside the step itself, for
techniques whose model trains on several devices, with any inputs (arrays, tuples, dicts).
Twin: `tf_impl/kit/replicas.py`.
Where the frameworks differ: a device has a process of its own here. Replicas meet in a
`torch.distributed` store whose address torchrun tells them, there in the cluster that `TF_CONFIG`
describes. Rank 0 reads and writes checkpoints here and tells the others, so that only its machine
needs the folder; there all read them.
"""

import gc
import io
import os
import pickle
import socket
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import islice
from pathlib import Path
from time import perf_counter

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as states
from torch.nn.modules.batchnorm import _BatchNorm  # the common base; torch's own tools use it too

from pt_impl.kit import data, models, runtime
from shared import parallel

_KEPT = 2  # checkpoints
_PATIENCE = timedelta(minutes=5)  # with a message from another part
_FULL = states.StateDictOptions(full_state_dict=True, cpu_offload=True)


@dataclass(frozen=True)
class Replica:
    """What trains in a process.

    `step(x, y, samples) -> loss` takes this replica's shard of a global batch of `samples`. The
    losses of all replicas add up to the mean over the global batch.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    step: Callable


@dataclass(frozen=True)
class Part:
    """What trains a part of a model in a process.

    `step(x, y) -> loss` takes the whole batch. `weights()` returns those of this part by their
    names in the whole model; all processes call it together.
    """

    step: Callable
    weights: Callable


def outputs(model: nn.Module, x) -> Tensor:
    """What the model gives for x; its logits where the output has `.logits`."""
    arguments, named = call_arguments(model, x)
    found = model(*arguments, **named)
    return getattr(found, "logits", found)


def call_arguments(model: nn.Module, x) -> tuple[tuple, dict]:
    """The arguments by place and by name with which the model is called: a tuple's, or a dict's."""
    if isinstance(x, dict):
        return (), x
    return (tuple(x) if isinstance(x, (tuple, list)) else (x,)), {}


def launch(module: str, build: str, dataset, settings: dict, *, processes: int) -> parallel.Result:
    """Run `python -m module` in processes of this machine by torchrun, and return its result.

    settings: what `shared.parallel.options` gives, of all processes together. Nothing
    listens but on the loopback.
    """
    each = {
        "threads": parallel.threads_each(settings["threads"], processes),
        "replicas": settings["replicas"] // processes,
    }
    with tempfile.TemporaryDirectory(prefix="replicas-") as folder:
        out = Path(folder, "result.npz")
        # A file to meet at, since the store that torchrun would open listens on every interface.
        meet = ("c10d", "--rdzv-conf=store_type=file", f"--rdzv-endpoint={folder}/rendezvous")
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1", "--max-restarts=0"]
        command += [f"--nproc-per-node={processes}", f"--local-addr={parallel.LOOPBACK}"]
        command += ["--rdzv-backend", *meet, "--rdzv-id=replicas", "-m", module]
        command += parallel.arguments(build, dataset, settings | each | {"out": out})
        environment = parallel.environment(each["threads"])
        parallel.run([(command, environment | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"})])
        return parallel.Result.load(out)


def train(variants: dict, options: Namespace) -> None:
    """Be one process of a run: `options` are those of `shared.parallel.options`.

    The first process writes the result to `options.out`. Raises what `parallel.check` does, OSError
    where a checkpoint can't be written, and RuntimeError where another process has ended.
    """
    parallel.end_with_launcher()
    settings = vars(options)
    build = parallel.find(options.build)
    world = int(os.environ.get("WORLD_SIZE", 1))
    parallel.check(options.data, world * options.replicas if world == 1 else world, settings)
    imported = parallel.resident("VmRSS")
    local = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    threads = options.threads or parallel.threads_each(0, local)
    runtime.configure(threads=threads, seed=options.seed)
    join(timeout_s=options.timeout_s)
    try:
        function = variants[options.variant]
        replica = function(build, **parallel.of(function, settings))
        if rank := dist.get_rank():
            torch.manual_seed(options.seed + rank)  # replicas draw other dropout masks
        done = _loop(replica, options)
        # Before weights are gathered: a sharded model is whole then.
        memory = [_each(value) for value in (parallel.resident("VmHWM"), imported)]
        weights = _weights(build, replica)
        if dist.get_rank() == 0 and options.out:
            parallel.Result(weights, *done[:3], *memory, done[3]).save(options.out)
        dist.barrier()  # nobody leaves while another still talks to it
    finally:
        dist.destroy_process_group()


def join(*, timeout_s: float = 300.0) -> None:
    """Meet the other processes where RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT say.

    Without these variables the run has one process. Rank 0 listens on its MASTER_ADDR and on
    nothing else. Raises ValueError where its port is taken.
    """
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    settings = {
        "backend": "nccl" if cuda else "gloo",
        "timeout": timedelta(seconds=timeout_s),
        "rank": int(os.environ.get("RANK", 0)),
        "world_size": int(os.environ.get("WORLD_SIZE", 1)),
    }
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        dist.init_process_group(**settings)  # torchrun has opened a store for all
        return
    host = os.environ.get("MASTER_ADDR", parallel.LOOPBACK)
    port = int(os.environ.get("MASTER_PORT", 0))
    socket_number = None
    if settings["rank"] == 0:
        # A store that opens its own socket listens on every interface.
        listener = socket.create_server((host, parallel.checked_port(host, port)))
        port = listener.getsockname()[1]
        socket_number = listener.detach()
    store = dist.TCPStore(
        host,
        port,
        settings["world_size"],
        is_master=settings["rank"] == 0,
        timeout=settings["timeout"],
        master_listen_fd=socket_number,
    )
    dist.init_process_group(**settings, store=store)


def _loop(replica: Replica, options: Namespace) -> tuple:
    """Train; return losses, how often each sample was seen, seconds a step, loopback bytes."""
    x, y = parallel.load_training(options.data)
    rank, world = dist.get_rank(), dist.get_world_size()
    begin, losses = _resume(replica, options)
    fresh, seconds, sent = [], [], 0
    seen = np.zeros(parallel.size(x), np.int64)
    stream = parallel.batches(
        len(seen), global_batch=options.global_batch, seed=options.seed, begin=begin
    )
    for number, rows in enumerate(islice(stream, max(0, options.steps - begin)), begin + 1):
        if len(seconds) == parallel.WARM_STEPS:
            dist.barrier()
            sent = parallel.loopback_sent()
        start = perf_counter()
        own = parallel.shard(rows, replicas=world, replica=rank)
        fresh.append(replica.step(_placed(x, own), _placed(y, own), len(rows)))
        runtime.synchronize()
        seconds.append(perf_counter() - start)
        seen[own] += 1
        every = options.save_every or options.steps
        if options.checkpoint and (number % every == 0 or number == options.steps):
            losses, fresh = np.concatenate([losses, _total(fresh)]), []
            _save(replica, options, number, losses)
    dist.barrier()
    crossed = parallel.a_step(sent, len(seconds))
    losses = np.concatenate([losses, _total(fresh)])
    return losses, _total(seen), np.array(seconds), crossed


def _placed(samples, rows):
    """Rows of samples on the device, in PyTorch's layout."""
    own = parallel.take(samples, rows)
    return parallel.mapped(lambda part: data.to_device(part, part[:0])[0], own)


def _total(values) -> np.ndarray:
    """Sum over all processes: of an array, or of a list of scalars on the device."""
    if isinstance(values, list):
        values = torch.stack(values).double() if values else torch.zeros(0, dtype=torch.float64)
    tensor = torch.as_tensor(values).to(runtime.device(), copy=True)
    dist.all_reduce(tensor)
    return tensor.cpu().numpy()


def _each(value: int) -> np.ndarray:
    """The values of all processes."""
    values = np.zeros(dist.get_world_size(), np.int64)
    values[dist.get_rank()] = value
    return _total(values)


def _weights(build: Callable, replica: Replica) -> dict[str, np.ndarray]:
    """Canonical weights on rank 0; names of the state dict where the kit knows no canonical ones.

    By way of a plain copy of the model: the one that trained may be in parts.
    """
    state = states.get_model_state_dict(replica.model, options=_FULL)
    if dist.get_rank():
        return {}
    plain = build()[0]
    plain.load_state_dict(state)
    known = sum(parameter.numel() for parameter in models.named_parameters(plain).values())
    if known == models.parameter_count(plain):
        return models.export_weights(plain)
    return {name: tensor.cpu().numpy() for name, tensor in state.items()}


# Checkpoints ----------------------------------------------------------------------------------


def _save(replica: Replica, options: Namespace, number: int, losses: np.ndarray) -> None:
    """Write what a run needs to go on after step `number`; a file is there only when complete."""
    model, optimizer = states.get_state_dict(replica.model, replica.optimizer, options=_FULL)
    if dist.get_rank() == 0:
        folder = options.checkpoint
        folder.mkdir(parents=True, exist_ok=True)
        state = {"model": model, "optimizer": optimizer, "step": number}
        state |= {"losses": torch.from_numpy(losses), "run": parallel.identity(options)}
        _write(state, folder / f"step-{number:08}.pt")
        for old in sorted(folder.glob("step-*.pt"))[:-_KEPT]:
            old.unlink()
    dist.barrier()


def _write(state: dict, path: Path) -> None:
    """Write a file that is there only when complete. Raises OSError, which names it.

    From memory, because torch.save says no more of a full disk than "unexpected pos".
    """
    buffer, partial_file = io.BytesIO(), path.with_name("partial")
    torch.save(state, buffer)
    try:
        partial_file.write_bytes(buffer.getbuffer())
        partial_file.replace(path)
    except OSError as error:
        partial_file.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from None


def _resume(replica: Replica, options: Namespace) -> tuple[int, np.ndarray]:
    """Put the last checkpoint in place; return its step and losses, or 0 and none."""
    state, problem = {}, None
    if dist.get_rank() == 0 and options.checkpoint:
        try:
            state = _read(options)
        except ValueError as error:
            problem = str(error)
    told = [problem, state]
    dist.broadcast_object_list(told, src=0)
    problem, state = told
    if problem:
        raise ValueError(problem)
    if not state:
        return 0, np.zeros(0)
    states.set_state_dict(
        replica.model,
        replica.optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
        options=_FULL,
    )
    return state["step"], state["losses"].numpy()


def _read(options: Namespace) -> dict:
    """The newest checkpoint, read without executing code of it; {} where there is none."""
    path = max(options.checkpoint.glob("step-*.pt"), default=None)
    if path is None:
        return {}
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        run, _ = state["run"], state["step"]
    except (pickle.UnpicklingError, RuntimeError, KeyError, EOFError) as error:
        raise ValueError(f"{path} is no whole checkpoint: {str(error).splitlines()[0]}") from None
    parallel.check_identity(path, run, options)
    return state


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
    """Train parts of one model, a process each, on `steps` batches in the shared order of `seed`.

    build: "module:function", importable from here, which each process calls with the same random
    seeds; it gives a model, its optimizer (without state yet), and a loss that is a mean over
    samples. dataset: inputs and targets, arrays or tuples or dicts of them, images NHWC.
    `make(model, optimizer, loss_fn, x)`, which can be pickled, gives the `Part` of the process that
    calls it; before any is started, `make.check(model, x)` is called. x: inputs of one batch. The
    processes share the caller's threads, use the loopback interface, and import the main module:
    call this below `if __name__ == "__main__":`.

    Raises ValueError for numbers that don't fit, and what `make.check` does. Where a process fails
    the others are ended, and torch.multiprocessing's ProcessException says why.
    """
    parallel.check_training(dataset, steps=steps, global_batch=global_batch)
    if runtime.device() == "cuda" and parts > torch.cuda.device_count():
        raise ValueError(f"{parts} parts need as many GPUs, not {torch.cuda.device_count()}")
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model, _, _ = parallel.find(build)()
    make.check(model, _placed(dataset[0], slice(global_batch)))
    state = model.state_dict()
    with tempfile.TemporaryDirectory(prefix="parts-") as folder:
        for name, samples in zip("xy", dataset, strict=True):
            parallel.save_samples(samples, Path(folder, f"train_{name}"))
        threads = max(1, torch.get_num_threads() // parts)
        _run((folder, parts, threads, build, make, global_batch, steps, seed), parts)
        found = [torch.load(f"{folder}/{part}.pt", weights_only=True) for part in range(parts)]
    for part in found:
        state |= {name: value for name, value in part["weights"].items() if name in state}
    weights = {name: value.cpu().numpy() for name, value in state.items()}
    ended = [max(times) for times in zip(*(part["ended"] for part in found), strict=True)]
    return parallel.Trained(weights, found[-1]["losses"], ended)


def _run(given: tuple, processes: int) -> None:
    """Run the parts until all are done; one that fails, or an interruption, ends them all."""
    context = mp.spawn(_train_part, given, nprocs=processes, join=False, daemon=True)
    try:
        while not context.join():
            pass
    finally:
        for process in context.processes:
            process.kill()
            process.join()


def _train_part(rank, folder, parts, threads, build, make, global_batch, steps, seed) -> None:
    """Train one part, in its process, and write what it leaves."""
    runtime.configure(threads=threads, seed=seed)
    _meet(rank, parts, folder)
    x, y = parallel.load_training(folder)
    part = make(*parallel.find(build)(), _placed(x, slice(global_batch)))
    gc.collect()  # what other parts hold
    losses, ended = [], []
    order = {"global_batch": global_batch, "steps": steps, "seed": seed}
    for rows in parallel.full_batches(parallel.size(x), **order):
        losses.append(float(part.step(_placed(x, rows), _placed(y, rows))))
        ended.append(time.monotonic())
    found = {"weights": part.weights(), "losses": losses, "ended": ended}
    torch.save(found, f"{folder}/{rank}.pt")
    dist.barrier()  # none leaves while another still trains
    dist.destroy_process_group()


def _meet(rank: int, parts: int, folder: str) -> None:
    """Meet the others through a file, and talk over the loopback interface alone."""
    local = parallel.loopback_interface()
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = local
    backend = "gloo"
    if runtime.device() == "cuda":
        backend = "nccl"
        torch.cuda.set_device(rank)
    method = f"file://{folder}/meeting"
    dist.init_process_group(backend, method, _PATIENCE, world_size=parts, rank=rank)


# BatchNorm ------------------------------------------------------------------------------------


def synchronise_norms(model: nn.Module) -> None:
    """Let BatchNorm layers normalise with the statistics of the global batch, in place."""
    if torch.cuda.is_available():
        nn.SyncBatchNorm.convert_sync_batchnorm(model)
        return
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            module.forward = partial(_normalise, module, module.forward)  # the type stays


class _Sum(torch.autograd.Function):
    """The sum over all replicas; a gradient is the sum of what all of them hand back."""

    @staticmethod
    def forward(ctx, tensor: Tensor) -> Tensor:
        tensor = tensor.clone()
        dist.all_reduce(tensor)
        return tensor

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return _Sum.apply(gradient)


def _normalise(norm: _BatchNorm, local: Callable, x: Tensor) -> Tensor:
    """Do what nn.SyncBatchNorm does, which upstream has for GPUs alone.

    The mean first and then the variance around it: two exchanges, but no difference of two large
    numbers.
    """
    if not (norm.training and norm.track_running_stats):
        return local(x)
    axes, shape = [0, *range(2, x.ndim)], [1, -1] + [1] * (x.ndim - 2)
    sums = _Sum.apply(torch.cat([x.sum(axes), x.new_tensor([x.numel() / x.shape[1]])]))
    count = sums[-1].detach()
    mean = sums[:-1] / count
    centred = x - mean.view(shape)
    variance = _Sum.apply(centred.square().sum(axes)) / count
    with torch.no_grad():
        norm.num_batches_tracked.add_(1)
        # None is PyTorch's cumulative average.
        share = 1.0 / float(norm.num_batches_tracked) if norm.momentum is None else norm.momentum
        norm.running_mean.lerp_(mean, share)
        norm.running_var.lerp_(variance * (count / (count - 1)), share)
    y = centred * (variance + norm.eps).rsqrt().view(shape)
    return y * norm.weight.view(shape) + norm.bias.view(shape) if norm.affine else y
