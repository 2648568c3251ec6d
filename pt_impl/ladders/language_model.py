"""Language model: pre-training of a GPT or a BERT, from characters on disk to a model in use.

What it changes: the program that a tutorial ends with (an eager float32 step and AdamW in its
default implementation, one process) gets one more technique at each rung, on top of those before:

1. mixed_precision: forward passes and predictions compute in bfloat16, over float32 weights.
2. fused_optimizer: one kernel updates all weights.
3. checkpointing: each transformer block is recomputed in the backward pass.
4. accumulation: a batch in two micro-batches.
5. data_parallel: processes with a share of the cores and of each batch; gradients are summed.

Its twin: `tf_impl/ladders/language_model.py`.

Where the frameworks differ and why:
- PyTorch: data_parallel starts processes, which train on their part of each batch.
- TensorFlow: data_parallel is one process with a device for each replica (MirroredStrategy). On a
  CPU these are logical devices, which have to be made before TensorFlow runs.
- PyTorch exchanges gradients after each micro-batch, TensorFlow once after the last.
- The fused kernel updates all weights at once in PyTorch and one variable at a time in TensorFlow.
- Predictions are eager in PyTorch and one graph in TensorFlow.

When it helps and when it hurts: see the files of the techniques, which this one imports. Replicas
on one CPU share its cores. They gain only if one process does not use all cores, and each needs a
copy of everything. Checkpointing and accumulation save memory and cost time.

Run it alone: `python -m pt_impl.ladders.language_model` trains a small GPT plain and with all
rungs; with `text-bert` after it, a small BERT.
"""

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from pt_impl.deployment.reduced_precision import make_predict
from pt_impl.parallel.data_parallel import apply_data_parallel
from pt_impl.recipes.checkpoints import save_checkpoint
from pt_impl.train_step.optimizer_implementations import for_loop_optimizer, fused_optimizer
from pt_impl.train_step.stacking import make_train_step, prepare_model
from shared.parallel import loopback_interface

RUNGS = ("mixed_precision", "fused_optimizer", "checkpointing", "accumulation", "data_parallel")


class Training:
    """A pre-training on a folder of character codes, with the rungs that are asked for.

    build: gives the model, whose logits are (n, t, vocabulary); with data_parallel it is sent to
    other processes, so that it is a function of a module or a `functools.partial` of one. folder:
    has train_x.npy and train_y.npy, int64 (rows, t). A label of -100 is none: a BERT has labels
    only where characters are hidden, in each row as many, since shares of a batch weigh alike.
    rungs: of `RUNGS`, in any order; none is the plain program. sequences: the first rows, which
    make an epoch; 0 are all. replicas: of data_parallel; a batch has to be a multiple of them.

    Raises ValueError for another rung and for such a batch, NotImplementedError for replicas on a
    GPU, RuntimeError where replicas can't begin, and as the techniques do.
    """

    def __init__(
        self,
        build: Callable,
        folder,
        *,
        rungs: tuple = (),
        sequences: int = 0,
        batch_size: int = 4,
        learning_rate: float = 1e-3,
        weight_decay: float = 0.01,
        beta2: float = 0.99,
        seed: int = 0,
        replicas: int = 2,
    ) -> None:
        if unknown := [rung for rung in rungs if rung not in RUNGS]:
            raise ValueError(f"rungs has {unknown[0]!r}; choose of {', '.join(RUNGS)}")
        self.rungs, self.batch_size, self.seed, self.epochs = rungs, batch_size, seed, 0
        self.x, self.y = (
            np.load(Path(folder) / f"train_{part}.npy", mmap_mode="r")[: sequences or None]
            for part in "xy"
        )
        settings = {"learning_rate": learning_rate, "weight_decay": weight_decay, "beta2": beta2}
        make = partial(_make, build, rungs, settings)
        self.others = None
        if "data_parallel" in rungs:
            if batch_size % replicas:
                raise ValueError(f"a batch of {batch_size} is no multiple of {replicas} replicas")
            self.others = _Replicas(make, replicas)
        try:
            self.model, step = make()
        except BaseException:
            if self.others:
                self.others.close(at_once=True)
            raise
        self.step = self.others.step(step) if self.others else step
        self.device = next(self.model.parameters()).device

    def epoch(self) -> Iterator[Tensor]:
        """Train for the next epoch; yields the loss of each step."""
        order = np.random.default_rng([self.seed, self.epochs]).permutation(len(self.x))
        self.epochs += 1
        for first in range(0, len(order) - self.batch_size + 1, self.batch_size):
            rows = np.sort(order[first : first + self.batch_size])
            batch = (torch.from_numpy(part[rows]).to(self.device) for part in (self.x, self.y))
            yield self.step(*batch)

    def finish(self, calibration: Tensor) -> Iterator[Tensor]:
        """Nothing follows the last epoch."""
        return iter(())

    def deploy(self, path, calibration: Tensor) -> Callable[[Tensor], Tensor]:
        """Write the weights to `path`; return `predict(x) -> logits`."""
        save_checkpoint(path, self.model, None, {})
        return make_predict(self.model, dtype=_dtype(self.rungs))

    def close(self) -> None:
        """End the other replicas."""
        if self.others:
            self.others.close()


def _dtype(rungs: tuple) -> str:
    return "bfloat16" if "mixed_precision" in rungs else "float32"


def _make(build: Callable, rungs: tuple, settings: dict) -> tuple[nn.Module, Callable]:
    """The model and the step of a replica, on its own share of a batch."""
    model = prepare_model(build(), recomputed="block*" if "checkpointing" in rungs else "")
    make_optimizer = fused_optimizer if "fused_optimizer" in rungs else for_loop_optimizer
    optimizer = make_optimizer(model, **settings)
    step = make_train_step(
        apply_data_parallel(model) if "data_parallel" in rungs else model,
        optimizer,
        _cross_entropy,
        dtype=_dtype(rungs),
        micro_batches=2 if "accumulation" in rungs else 1,
    )
    return model, step


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """The mean over all labels but those of -100, which `cross_entropy` leaves out."""
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten())


# Replicas -----------------------------------------------------------------------------------------


class _Replicas:
    """The other processes of a training: they are handed each batch and take their share of it."""

    def __init__(self, make: Callable, replicas: int) -> None:
        if torch.cuda.is_available():
            raise NotImplementedError("replicas here share a CPU; for GPUs there is torchrun")
        self.threads = torch.get_num_threads()
        each = max(1, self.threads // replicas)
        self.folder = tempfile.TemporaryDirectory(prefix="replicas-")
        # A file to meet at: a store would open a port.
        meeting = f"file://{self.folder.name}/meeting"
        processes = torch.multiprocessing.get_context("spawn")
        begun = processes.Semaphore(0)
        given = (replicas, meeting, each, make, begun)
        self.others = [
            processes.Process(target=_replica, args=(n, *given), daemon=True)
            for n in range(1, replicas)
        ]
        for other in self.others:
            other.start()
        try:
            self._wait_for(begun)
            torch.set_num_threads(each)
            _join(0, replicas, meeting)
        except BaseException:
            self._end()
            raise

    def _wait_for(self, begun) -> None:
        """Wait until all have begun: the meeting itself waits half an hour for one that ended."""
        for _ in self.others:
            while not begun.acquire(timeout=0.2):
                if all(other.is_alive() for other in self.others):
                    continue
                raise RuntimeError(
                    "a replica ended before it began: the script that trains has to be under "
                    "`if __name__ == '__main__':`, since each replica imports it"
                )

    def step(self, own: Callable) -> Callable:
        """Return `step(x, y) -> loss` of the whole batch, whose share here `own` takes."""

        def step(x, y):
            if len(x) % dist.get_world_size():
                raise ValueError(f"a batch of {len(x)} makes no equal shares for the replicas")
            _hand_out(torch.stack([x, y]))
            return _on_share(own, x, y)

        return step

    def close(self, *, at_once: bool = False) -> None:
        """End them all, whatever they do if `at_once`; one that is gone already is no fault."""
        if not at_once:
            with suppress(RuntimeError):
                _hand_out(torch.empty(0, 0, 0, dtype=torch.int64))
        dist.destroy_process_group()
        self._end(0 if at_once else 10)

    def _end(self, patience: float = 0) -> None:
        for other in self.others:
            other.join(patience)
            other.kill()
            other.join()
        torch.set_num_threads(self.threads)
        self.folder.cleanup()


def _join(replica: int, replicas: int, meeting: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = loopback_interface()  # else gloo listens on a network
    dist.init_process_group("gloo", init_method=meeting, rank=replica, world_size=replicas)


def _replica(
    replica: int, replicas: int, meeting: str, threads: int, make: Callable, begun
) -> None:
    """Be one of the other processes, until an empty batch comes."""
    begun.release()
    torch.set_num_threads(threads)
    _join(replica, replicas, meeting)
    _, step = make()
    while len(batch := _hand_out()):
        _on_share(step, *batch)
    dist.destroy_process_group()


def _hand_out(batch: Tensor | None = None) -> Tensor:
    """Send a batch to all replicas, or receive it: int64 (2, n, t), the inputs and the targets."""
    shape = torch.tensor(batch.shape if batch is not None else (0, 0, 0))
    dist.broadcast(shape, 0)
    batch = torch.empty(*shape.tolist(), dtype=torch.int64) if batch is None else batch
    if batch.numel():
        dist.broadcast(batch, 0)
    return batch


def _on_share(step: Callable, x: Tensor, y: Tensor) -> Tensor:
    """Train on this replica's share; the mean loss of all shares, which are equally large."""
    replicas, share = dist.get_world_size(), len(x) // dist.get_world_size()
    rows = slice(dist.get_rank() * share, (dist.get_rank() + 1) * share)
    loss = step(x[rows], y[rows]).clone()
    dist.all_reduce(loss)
    return loss / replicas


def main() -> None:
    """Print seconds an epoch and bits per character of a small model, plain and with all rungs."""
    import sys
    import time

    from pt_impl.kit import data, models, training
    from shared import datasets
    from shared.specs import TASKS
    from shared.weights import init_weights

    task = TASKS[sys.argv[1] if sys.argv[1:] else "text-gpt"]
    build = partial(models.build, task.model, init_weights(task.model, seed=0))
    with tempfile.TemporaryDirectory() as name:
        folder = datasets.materialise(task.dataset, Path(name))
        test = data.to_device(*datasets.load(folder, "test"))
        for rungs in ((), RUNGS):
            program = Training(build, folder, rungs=rungs, sequences=1024, batch_size=8)
            start = time.perf_counter()
            for _ in range(2):
                losses = [float(loss) for loss in program.epoch()]
            seconds = (time.perf_counter() - start) / 2
            predict = program.deploy(Path(name) / "deployed", test[0][:1])
            bits = training.evaluate(predict, *test, metric="bits_per_character", batch_size=64)
            said = f"{seconds:.1f} s an epoch, last loss {losses[-1]:.3f}, {bits:.2f} bits"
            print(f"{', '.join(rungs) or 'plain'}: {said} a character")
            program.close()


if __name__ == "__main__":
    main()
