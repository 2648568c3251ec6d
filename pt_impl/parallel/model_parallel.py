"""Model parallel: one model in stages on several devices, a batch or micro-batches at a time.

What it changes: where layers are and what travels between them. A stage holds some layers in a row
with their gradients and the state of their optimizer; activations go to the next stage and their
gradients come back. In the plain layer split one stage works at a time. A pipeline cuts the batch
into micro-batches, so that stages work side by side: all forward, then all back (GPipe, Huang et
al., 2019), or back as soon as one can be (1F1B, Narayanan et al., 2019). Losses and weights are
those of one device with the whole batch.

Its twin: `tf_impl/parallel/model_parallel.py`.

Where the frameworks differ and why:
- PyTorch has a process a stage, which talks to the others through gloo or, on GPUs, NCCL.
  TensorFlow has one with a device a stage; on a CPU these share its memory, and nothing is sent.
- `torch.distributed.pipelining` traces the model (`torch.export`) and cuts the trace before a named
  module. A functional Keras model is a graph already; a stage is a copy of the layers in between.
- A schedule is a loop in each process here. There it is one graph, in which control dependencies
  say what must wait, and the executor runs what is ready.

When it helps and when it hurts: it helps where a model does not fit into one device; else one, or
data parallel, is faster. p stages and m micro-batches of even cost idle for (p-1)/(m+p-1) of the
time. BatchNorm sees a micro-batch at a time in a pipeline; dropout draws other masks.

Run it alone: `python -m pt_impl.parallel.model_parallel` prints one process against two.
"""

import gc
import importlib
import itertools
import os
import tempfile
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import numpy as np
import psutil
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe, SplitPoint, pipeline

from pt_impl.kit import data, models, runtime, training
from shared.datasets import batch_order, load
from shared.specs import TASKS
from shared.weights import init_weights

_SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
_PATIENCE = timedelta(minutes=5)  # with a message from another process


@dataclass(frozen=True)
class Trained:
    """What a run leaves.

    weights: the state of the whole model by PyTorch's own names, in its layouts. losses: of each
    step, the mean over its batch. ended: when each step was over, on the clock of `time.monotonic`.
    """

    weights: dict[str, np.ndarray]
    losses: list[float]
    ended: list[float]


def train_layer_split(
    build, dataset, *, cut: str, global_batch: int, steps: int, seed: int
) -> Trained:
    """Train with a whole batch going through the stages, one after another.

    It is a pipeline of one micro-batch: see `train_pipeline`.
    """
    given = {"global_batch": global_batch, "steps": steps, "seed": seed}
    return train_pipeline(build, dataset, cut=cut, micro_batches=1, **given)


def train_pipeline(
    build,
    dataset,
    *,
    cut: str,
    micro_batches: int,
    schedule: str = "gpipe",
    global_batch: int,
    steps: int,
    seed: int,
) -> Trained:
    """Train in stages, a process each, that work on micro-batches side by side.

    build: "module:function", importable from here, which each process calls with the same random
    seeds; it gives a model, its optimizer (without state yet), and a loss that is a mean over
    samples. dataset: arrays x and y, images NHWC; `steps` batches of `global_batch` samples are
    taken in the shared order of `seed`. cut: names of the modules that begin a stage, separated by
    commas. schedule: "gpipe", or "1f1b", in which a stage keeps the activations of no more
    micro-batches than there are stages. The processes share the caller's threads, use the loopback
    interface, and import the main module: call this below `if __name__ == "__main__":`.

    Raises, before a process is started, ValueError for names that are not there and numbers that do
    not fit, NotImplementedError for a model that can't be traced or uses a parameter twice. Where a
    process fails the others are ended, and torch.multiprocessing's ProcessException says why.
    """
    names = [name.strip() for name in cut.split(",")]
    stages = len(names) + 1
    if schedule not in _SCHEDULES:
        raise ValueError(f"schedule must be gpipe or 1f1b, not {schedule!r}")
    if micro_batches < 1 or global_batch % micro_batches:
        raise ValueError(f"{micro_batches} micro_batches do not divide a batch of {global_batch}")
    if schedule == "1f1b" and micro_batches < stages:
        raise ValueError(f"1f1b with {stages} stages needs {stages} micro_batches or more")
    x, y = dataset
    if steps < 1 or not 1 <= global_batch <= len(x) == len(y):
        raise ValueError(f"{steps} steps of {global_batch} from {len(x)} samples, {len(y)} labels")
    if runtime.device() == "cuda" and stages > torch.cuda.device_count():
        raise ValueError(f"{stages} stages need as many GPUs, not {torch.cuda.device_count()}")
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model, _, _ = _build(build)
    state = model.state_dict()
    size = global_batch // micro_batches
    _trace(model, names, data.to_device(x[:size], y[:size])[0])
    with tempfile.TemporaryDirectory(prefix="stages-") as folder:
        for part, array in zip("xy", dataset, strict=True):
            np.save(f"{folder}/train_{part}.npy", array)
        threads = max(1, torch.get_num_threads() // stages)
        given = (folder, stages, threads, build, names, schedule, size, global_batch, steps, seed)
        _start(given, stages)
        found = [torch.load(f"{folder}/{stage}.pt", weights_only=True) for stage in range(stages)]
    for stage in found:
        state |= {name: value for name, value in stage["weights"].items() if name in state}
    weights = {name: value.cpu().numpy() for name, value in state.items()}
    ended = [max(times) for times in zip(*(stage["ended"] for stage in found), strict=True)]
    return Trained(weights, found[-1]["losses"], ended)


def _build(build: str) -> tuple:
    module, _, name = str(build).partition(":")
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f'build must be "module:function", not {build!r}: {error}') from None
    return function()


def _trace(model: nn.Module, names: list[str], example: torch.Tensor):
    """Cut the model before the modules of these names, for micro-batches like `example`."""
    known = [name for name, _ in model.named_modules() if name]
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"cut: there is no module {unknown[0]!r}; there are {', '.join(known)}")
    every, own = (len(list(model.named_parameters(remove_duplicate=one))) for one in (False, True))
    if every != own:
        raise NotImplementedError("a parameter is used twice: pipelining would train copies of it")
    try:
        cuts = dict.fromkeys(names, SplitPoint.BEGINNING)
        pipe = pipeline(model, (example,), split_spec=cuts)
    except RuntimeError as error:
        reason = str(error.__cause__ or error).strip().splitlines()[0]
        raise NotImplementedError(f"torch.export can't trace the model: {reason}") from None
    if pipe.num_stages != len(names) + 1:
        raise ValueError(f"cut: {', '.join(names)} make {pipe.num_stages} stages in a forward pass")
    return pipe


def _start(given: tuple, processes: int) -> None:
    """Run the stages until all are done; one that fails, or an interruption, ends them all."""
    context = mp.spawn(_run_stage, given, nprocs=processes, join=False, daemon=True)
    try:
        while not context.join():
            pass
    finally:
        for process in context.processes:
            process.kill()
            process.join()


# In the process of a stage ------------------------------------------------------------------------


def _run_stage(
    index, folder, stages, threads, build, names, schedule, size, global_batch, steps, seed
) -> None:
    """Train one stage and write what is left of it."""
    runtime.configure(threads=threads, seed=seed)
    _join(index, stages, folder)
    x, y = load(Path(folder), "train")
    parts = _build(build)
    example, _ = data.to_device(x[:size], y[:size])
    module, step = _make_step(*parts, names, example, schedule, global_batch // size)
    del parts
    gc.collect()  # the layers of other stages
    epochs = (batch_order(len(x), global_batch, seed=seed, epoch=n) for n in itertools.count())
    losses, ended = [], []
    for rows in itertools.islice(itertools.chain.from_iterable(epochs), steps):
        losses.append(float(step(*data.to_device(x[rows], y[rows]))))
        ended.append(time.monotonic())
    dist.barrier()  # none writes or leaves while another still trains
    found = {"weights": module.state_dict(), "losses": losses, "ended": ended}
    torch.save(found, f"{folder}/{index}.pt")
    dist.destroy_process_group()


def _make_step(model, optimizer, loss_fn, names, example, schedule, micro_batches):
    """The stage of this process and `step(x, y) -> loss`, which is 0 but in the last stage."""
    originals = dict(model.named_parameters())
    stage = _trace(model, names, example).build_stage(dist.get_rank(), example.device)
    own = dict(stage.submod.named_parameters())
    kept = {id(originals[name]): parameter for name, parameter in own.items()}
    for group in optimizer.param_groups:
        group["params"] = [kept[id(p)] for p in group["params"] if id(p) in kept]
    schedule = _SCHEDULES[schedule](stage, micro_batches, loss_fn=loss_fn)

    def step(x, y):
        optimizer.zero_grad(set_to_none=True)
        losses = []
        inputs = (x,) if stage.is_first else ()
        schedule.step(*inputs, target=y if stage.is_last else None, losses=losses)
        optimizer.step()
        return sum(loss.detach() for loss in losses) / micro_batches

    return stage.submod, step


def _join(index: int, stages: int, folder: str) -> None:
    """Meet the other stages through a file, and talk over the loopback interface alone."""
    interfaces = psutil.net_if_addrs().items()
    local = [name for name, own in interfaces if any(each.address == "127.0.0.1" for each in own)]
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = local[0]
    backend = "gloo"
    if runtime.device() == "cuda":
        backend = "nccl"
        torch.cuda.set_device(index)
    method = f"file://{folder}/meeting"
    dist.init_process_group(backend, method, _PATIENCE, world_size=stages, rank=index)


def text_gpt_wide() -> tuple:
    """A transformer of ten million parameters, its optimizer and its loss: something to build."""
    task = TASKS["text-gpt-wide"]
    model = models.build(task.model, init_weights(task.model, seed=0))
    return model, training.make_optimizer(model, task.recipe), training.cross_entropy


def main() -> None:
    """Print steps of one process, then of two: a layer split and a pipeline."""
    x, build = np.random.default_rng(0).integers(0, 98, (80, 64)), f"{__spec__.name}:text_gpt_wide"
    step, alone = training.make_train_step(*text_gpt_wide()), Trained({}, [], [])
    for rows in batch_order(len(x), 8, seed=0, epoch=0):
        alone.losses.append(float(step(*data.to_device(x[rows], x[rows]))))
        alone.ended.append(time.monotonic())
    given = {"cut": "block1", "global_batch": 8, "steps": 10, "seed": 0}
    split = train_layer_split(build, (x, x), **given)
    piped = train_pipeline(build, (x, x), micro_batches=4, schedule="1f1b", **given)
    print("text-gpt-wide, batch 8: ms a step, last loss")
    for name, found in (("one process", alone), ("layer split", split), ("pipeline", piped)):
        print(f"{name:12}{1e3 * np.median(np.diff(found.ended)):8.1f}{found.losses[-1]:9.4f}")


if __name__ == "__main__":
    main()
