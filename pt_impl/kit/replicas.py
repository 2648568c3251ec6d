"""The processes of one run: how they start and meet, the loop of each, and its checkpoints.

What it holds: everything that replicas, stages and shards do together beside the step itself, for
any model with any inputs (arrays, tuples, dicts). `launch` starts processes on this machine; on
many, torchrun does: `torchrun … -m pt_impl.kit.replicas MAKE BUILD DATA --global-batch N --steps
N`.
Twin: `tf_impl/kit/replicas.py`.
Where the frameworks differ: each device has a process here. Processes meet in a
`torch.distributed` store whose address torchrun tells them, there in the cluster that `TF_CONFIG`
describes. Rank 0 reads and writes checkpoints here and tells the others, so that only its machine
needs the folder; there all read them.
"""

import io
import os
import pickle
import random
import socket
import sys
import time
import warnings
from argparse import Namespace
from dataclasses import replace
from datetime import timedelta
from importlib import import_module
from inspect import signature
from itertools import islice
from pathlib import Path
from time import perf_counter

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict as states
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves  # torch has no public one

from pt_impl.kit import runtime
from shared import parallel, scratch

_KEPT = 2  # checkpoints
# What torchrun would tell a run of one process, which does without: importing torch takes seconds.
_ALONE = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_WORLD_SIZE": "1",
    "MASTER_ADDR": parallel.LOOPBACK,
    "MASTER_PORT": "0",
    "TORCHELASTIC_USE_AGENT_STORE": "False",
}
_FULL = states.StateDictOptions(full_state_dict=True, cpu_offload=True)


def launch(
    make: str, build: str, dataset, run: parallel.Run, settings: dict | None = None
) -> parallel.Result:
    """Train on the devices of this machine, a process each, and return what they found.

    make: "module:function" of a technique, such as "pt_impl.parallel.data_parallel:processes". Each
    process calls `make(build, **settings)`, or `make(build, x, **settings)` with the inputs of a
    batch where it takes them, and gets a model, its optimizer and `step(x, y, samples) -> loss`:
    the losses of all processes add up to the mean over the global batch of `samples`. Which part of
    it is a process's own says the function `distribute` of the same module; without one, all.
    build: "module:function" that gives a model, its optimizer (without state yet) and
    `loss_fn(output, y)`, the mean over samples; importable here, called with the same seeds.
    dataset: (x, y), arrays or tensors, tuples or dicts of them, as the model takes them; or a
    folder with train_x and train_y, as `shared.parallel.save_samples` writes them.

    Nothing listens but on the loopback. Raises, before anything is started, ValueError for numbers
    and names that don't fit; NotImplementedError where a process refused and RuntimeError where one
    failed, with what it said: no process is left then.
    """
    settings, count = settings or {}, run.processes or run.replicas * run.parts
    _check_gpus(count)
    parallel.find(build)
    parallel.check_settings(make, settings)
    with (
        scratch.folder() as folder,
        parallel.training_folder(dataset) as data,
    ):
        parallel.check(data, run, settings)
        threads = parallel.threads_each(run.threads, count)
        out = folder / "result.npz"
        environment = parallel.environment(threads)
        command = [sys.executable, "-m"]
        if count == 1:
            environment |= _ALONE
        else:
            # A file to meet at: the store that torchrun would open listens on every interface.
            command += ["torch.distributed.run", "--nnodes=1", "--max-restarts=0"]
            command += [f"--nproc-per-node={count}", f"--local-addr={parallel.LOOPBACK}"]
            command += ["--rdzv-backend=c10d", "--rdzv-conf=store_type=file", "--rdzv-id=replicas"]
            command += [f"--rdzv-endpoint={folder}/rendezvous", "-m"]
            environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        command += [__spec__.name, f"--out={out}"]
        command += parallel.arguments(make, build, data, replace(run, threads=threads), settings)
        parallel.run([(command, environment)])
        return parallel.Result.load(out)


def train(options: Namespace) -> None:
    """Be one process of a run: `options` are those of `shared.parallel.options`.

    The first process writes the result to `options.out`. Raises what `parallel.check` does, OSError
    where a checkpoint can't be written, and RuntimeError where another process has ended.
    """
    parallel.end_with_launcher()
    make, build = parallel.find(options.make), parallel.find(options.build)
    world = int(os.environ.get("WORLD_SIZE", 1))
    options.replicas = options.replicas or world // options.parts
    parallel.check(options.data, options, options.settings)
    if options.parts > 1 and options.checkpoint:
        raise NotImplementedError("a checkpoint is of whole models: parts write none")
    imported = parallel.resident("VmRSS")
    local = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    threads = options.threads or parallel.threads_each(0, local)
    runtime.configure(threads=threads, seed=options.seed)
    join(timeout_s=options.timeout_s)
    x, y = parallel.load_training(options.data)
    example = {}
    if "x" in signature(make).parameters:
        example["x"] = _placed(parallel.take(x, slice(options.global_batch)))
    model, optimizer, step = make(build, **example, **options.settings)
    losses, seen, seconds, ended, crossed = _loop(model, optimizer, step, (x, y), options)
    # Before weights are gathered: a sharded model is whole then.
    memory = [_each(value) for value in (parallel.resident("VmHWM"), imported)]
    weights = _weights(model)
    if dist.get_rank() == 0 and options.out:
        result = parallel.Result(weights, losses, seen, seconds, ended, *memory, crossed)
        result.save(options.out)
    dist.barrier()  # nobody leaves while another still talks to it
    # Not where something went wrong: others would say first that this one is gone, and not why.
    dist.destroy_process_group()


def _seed(options: Namespace, number: int) -> None:
    """Seed what step `number` draws: replicas draw other dropout masks, a resumed run the same."""
    replica = dist.get_rank() // options.parts
    seed = int(np.random.SeedSequence((options.seed, replica, number)).generate_state(1)[0])
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def join(*, timeout_s: float = 300.0) -> None:
    """Meet the other processes where RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT say.

    Without these variables the run has one process. On GPUs each has the one of its
    LOCAL_RANK. Rank 0 listens on its MASTER_ADDR and on nothing else; where torchrun listens on
    every interface, a warning says how not to. Raises NotImplementedError where there are too few
    GPUs, and ValueError where its port is taken.
    """
    cuda, local = torch.cuda.is_available(), int(os.environ.get("LOCAL_RANK", 0))
    if cuda:
        _check_gpus(local + 1)
        torch.cuda.set_device(local)
    host = os.environ.get("MASTER_ADDR", parallel.LOOPBACK)
    port = int(os.environ.get("MASTER_PORT", 0))
    settings = {
        "backend": "nccl" if cuda else "gloo",
        "timeout": timedelta(seconds=timeout_s),
        "rank": int(os.environ.get("RANK", 0)),
        "world_size": int(os.environ.get("WORLD_SIZE", 1)),
    }
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        _warn_of_torchrun(settings["rank"], host, port)
        dist.init_process_group(**settings)  # torchrun has opened a store for all
        return
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


def _check_gpus(processes: int) -> None:
    """Raise NotImplementedError where there are GPUs, but not one a process."""
    found = torch.cuda.device_count()
    if torch.cuda.is_available() and processes > found:
        raise NotImplementedError(
            f"{processes} processes need a GPU each, and this machine has {found}: hide it"
            " (CUDA_VISIBLE_DEVICES=) to train on the CPU"
        )


def _warn_of_torchrun(rank: int, host: str, port: int) -> None:
    """Say so where torchrun's store, which has no option for it, can be reached by others."""
    if rank or not parallel.listens_everywhere(port):
        return
    if others := parallel.others_reach(host):
        warnings.warn(
            f"torchrun's store listens on port {port} of every interface, {', '.join(others)} among"
            " them: keep others off with a firewall, or start each process with RANK, WORLD_SIZE,"
            " MASTER_ADDR and MASTER_PORT in place of torchrun: that listens only on MASTER_ADDR",
            stacklevel=3,
        )


def _loop(model, optimizer, step, dataset: tuple, options: Namespace) -> tuple:
    """Train; return losses, how often each sample was seen, seconds a step, ends, and traffic."""
    x, y = dataset
    begin, losses = _resume(model, optimizer, options)
    fresh, seconds, ended, sent = [], [], [], 0
    seen = np.zeros(parallel.size(x), np.int64)
    order = {"global_batch": options.global_batch, "seed": options.seed, "begin": begin}
    stream = parallel.batches(len(seen), **order, whole=options.parts > 1)
    batches = (
        (rows, parallel.take(x, rows), parallel.take(y, rows))
        for rows in islice(stream, max(0, options.steps - begin))
    )
    distribute = getattr(import_module(options.make.partition(":")[0]), "distribute", _all)
    _seed(options, begin + 1)
    start = perf_counter()
    for number, (own, samples) in enumerate(distribute(model, batches), begin + 1):
        if len(seconds) == parallel.WARM_STEPS:
            dist.barrier()
            sent, start = parallel.loopback_sent(), perf_counter()
        rows, own_x, own_y = own
        fresh.append(step(_placed(own_x), _placed(own_y), samples))
        runtime.synchronize()
        seconds.append(perf_counter() - start)
        ended.append(time.monotonic())
        if options.parts == 1 or dist.get_rank() == 0:  # parts all see the same
            seen[rows] += 1
        every = options.save_every or options.steps
        if options.checkpoint and (number % every == 0 or number == options.steps):
            losses, fresh = np.concatenate([losses, _total(fresh)]), []
            _save(model, optimizer, options, number, losses)
        _seed(options, number + 1)
        start = perf_counter()
    dist.barrier()
    crossed = parallel.a_step(sent, len(seconds))
    losses = np.concatenate([losses, _total(fresh)])
    return losses, _total(seen), np.array(seconds), np.array(ended), crossed


def _all(model, batches):
    """The whole of each batch, and its size."""
    return ((batch, len(batch[0])) for batch in batches)


def _placed(samples):
    """Arrays as tensors on the device."""
    device = runtime.device()
    return parallel.mapped(lambda part: torch.tensor(np.asarray(part), device=device), samples)


def _total(values) -> np.ndarray:
    """Sum over all processes: of an array, or of a list of scalars on the device."""
    if isinstance(values, list):
        tensors = [torch.as_tensor(value, dtype=torch.float64) for value in values]
        values = torch.stack(tensors) if tensors else torch.zeros(0, dtype=torch.float64)
    tensor = torch.as_tensor(values).to(runtime.device(), copy=True)
    dist.all_reduce(tensor)
    return tensor.cpu().numpy()


def _each(value: int) -> np.ndarray:
    """The values of all processes."""
    values = np.zeros(dist.get_world_size(), np.int64)
    values[dist.get_rank()] = value
    return _total(values)


def _weights(model: nn.Module) -> dict[str, np.ndarray]:
    """On rank 0 the weights of the whole model, whether processes hold copies or parts of it."""
    state = {}
    for name, value in model.state_dict().items():
        if isinstance(value, torch.Tensor):  # and no extra state of a module
            whole = value.full_tensor() if isinstance(value, DTensor) else value
            whole = whole.detach().cpu()
            state[name] = (whole.float() if whole.dtype == torch.bfloat16 else whole).numpy()
    names = [None] * dist.get_world_size()
    dist.all_gather_object(names, list(state))
    before = set().union(*names[: dist.get_rank()])
    parts = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    missing = {name: value for name, value in state.items() if name not in before}
    dist.gather_object(missing, parts)
    return {name: value for part in parts or () for name, value in part.items()}


# Checkpoints ----------------------------------------------------------------------------------


def _save(model, optimizer, options: Namespace, number: int, losses: np.ndarray) -> None:
    """Write what a run needs to go on after step `number`; a file is there only when complete."""
    weights, moments = states.get_state_dict(model, optimizer, options=_FULL)
    if dist.get_rank() == 0:
        folder = options.checkpoint
        folder.mkdir(parents=True, exist_ok=True)
        state = {"model": weights, "optimizer": moments, "step": number}
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


def _resume(model, optimizer, options: Namespace) -> tuple[int, np.ndarray]:
    """Put the last checkpoint in place; return its step and losses, or 0 and none."""
    state, problem = {}, None
    if dist.get_rank() == 0 and options.checkpoint:
        try:
            state = _read(options)
        except ValueError as error:
            problem = str(error)
    checkpoint = [problem, state]
    dist.broadcast_object_list(checkpoint, src=0)
    problem, state = checkpoint
    if problem:
        raise ValueError(problem)
    if not state:
        return 0, np.zeros(0)
    states.set_model_state_dict(model, state["model"], options=_FULL)
    moments = [leaf for leaf in tree_leaves(state["optimizer"]) if isinstance(leaf, torch.Tensor)]
    if any(tensor.ndim for tensor in moments):
        states.set_optimizer_state_dict(model, optimizer, state["optimizer"], options=_FULL)
    else:  # such as plain SGD, of which upstream takes none back
        for group, kept in zip(
            optimizer.param_groups, state["optimizer"]["param_groups"], strict=True
        ):
            group.update({name: value for name, value in kept.items() if name != "params"})
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
        reason = str(error).splitlines()[0]
        raise ValueError(f"{path} is not a complete checkpoint: {reason}") from None
    parallel.check_identity(path, run, options)
    return state


def main() -> None:
    """Be one process of a run."""
    with parallel.one_line_errors():
        train(parallel.options(__spec__.name).parse_args())


if __name__ == "__main__":
    main()
