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

Copy with it: `pt_impl/kit/data.py`, `pt_impl/kit/models.py`, `pt_impl/kit/replicas.py`,
`pt_impl/kit/runtime.py`, `pt_impl/kit/training.py`, `shared/atomic.py`, `shared/datasets.py`,
`shared/parallel.py`, `shared/photos.py`, `shared/specs.py`, `shared/weights.py`.
"""

import time
from dataclasses import dataclass

import numpy as np
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe, SplitPoint, pipeline

from pt_impl.kit import data, models, training
from pt_impl.kit.replicas import Part, call_arguments, train_parts
from shared import parallel
from shared.datasets import batch_order
from shared.specs import TASKS
from shared.weights import init_weights

_SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}


def apply_model_parallel(model, x, *, cut: str):
    """Cut the model into stages, of which the process of each rank takes one; return that.

    x: inputs of one micro-batch. cut: names of the modules that begin a stage, separated by commas.
    The parameters of `stage.submod` have the names that they have in the model.

    Raises ValueError for names that are not there, NotImplementedError for a model that can't be
    traced or uses a parameter twice.
    """
    return _trace(model, x, cut).build_stage(dist.get_rank(), parallel.leaves(x)[0].device)


def make_train_step(model, optimizer, loss_fn, *, micro_batches: int = 1, schedule: str = "gpipe"):
    """Make `step(x, y) -> loss` of a stage: 0 but in the last, which alone sees the loss.

    model: what `apply_model_parallel` returned. optimizer: that of its parameters. All processes
    take the same batches, of `micro_batches` times the samples that it was given.
    """

    def loss_of(output, y):
        return loss_fn(getattr(output, "logits", output), y)

    schedule = _SCHEDULES[schedule](model, micro_batches, loss_fn=loss_of)

    def step(x, y):
        optimizer.zero_grad(set_to_none=True)
        losses = []
        own, named = call_arguments(model, x) if model.is_first else ((), {})
        schedule.step(*own, **named, target=y if model.is_last else None, losses=losses)
        optimizer.step()
        return sum(loss.detach() for loss in losses) / micro_batches

    return step


def train_layer_split(
    build, dataset, *, cut: str, global_batch: int, steps: int, seed: int
) -> parallel.Trained:
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
) -> parallel.Trained:
    """Train in stages, a process each, that work on micro-batches side by side.

    build, dataset and what they must be: see `train_parts` of `pt_impl/kit/replicas.py`. cut: as in
    `apply_model_parallel`. schedule: "gpipe", or "1f1b", in which a stage keeps the activations of
    no more micro-batches than there are stages.

    Raises, before a process is started, ValueError for names that are not there and numbers that do
    not fit, NotImplementedError for a model that can't be cut. Where a process fails the others are
    ended, and torch.multiprocessing's ProcessException says why.
    """
    stages = len(cut.split(",")) + 1
    parallel.check_pipeline(stages, micro_batches, schedule, global_batch)
    return train_parts(
        build,
        dataset,
        _Stages(cut, micro_batches, schedule),
        parts=stages,
        global_batch=global_batch,
        steps=steps,
        seed=seed,
    )


@dataclass(frozen=True)
class _Stages:
    """What makes the stage that a process trains."""

    cut: str
    micro_batches: int
    schedule: str

    def check(self, model: nn.Module, x) -> None:
        """Raise what keeps the model from being cut."""
        _trace(model, self._micro_batch(x), self.cut)

    def __call__(self, model: nn.Module, optimizer, loss_fn, x) -> Part:
        """The stage of this process."""
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        groups = [[names[id(own)] for own in g["params"]] for g in optimizer.param_groups]
        stage = apply_model_parallel(model, self._micro_batch(x), cut=self.cut)
        kept = dict(stage.submod.named_parameters())  # copies, unknown to the optimizer yet
        for group, own in zip(optimizer.param_groups, groups, strict=True):
            group["params"] = [kept[name] for name in own if name in kept]
        settings = {"micro_batches": self.micro_batches, "schedule": self.schedule}
        return Part(make_train_step(stage, optimizer, loss_fn, **settings), stage.submod.state_dict)

    def _micro_batch(self, x):
        return parallel.take(x, slice(parallel.size(x) // self.micro_batches))


def _trace(model: nn.Module, x, cut: str):
    """Cut a trace of the model, for micro-batches like x, before the modules that are named."""
    names = [name.strip() for name in cut.split(",")]
    known = [name for name, _ in model.named_modules() if name]
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"cut: there is no module {unknown[0]!r}; there are {', '.join(known)}")
    every, own = (len(list(model.named_parameters(remove_duplicate=one))) for one in (False, True))
    if every != own:
        raise NotImplementedError("a parameter is used twice: pipelining would train copies of it")
    example, named = call_arguments(model, x)
    try:
        cuts = dict.fromkeys(names, SplitPoint.BEGINNING)
        pipe = pipeline(model, example, named, split_spec=cuts)
    except Exception as error:  # whatever in the model it does not know
        reason = str(error.__cause__ or error).strip().splitlines()[0]
        raise NotImplementedError(f"torch.export can't trace the model: {reason}") from None
    if pipe.num_stages != len(names) + 1:
        raise ValueError(f"cut: {', '.join(names)} make {pipe.num_stages} stages in a forward pass")
    return pipe


def text_gpt_wide() -> tuple:
    """A transformer of ten million parameters, its optimizer and its loss: something to build."""
    task = TASKS["text-gpt-wide"]
    model = models.build(task.model, init_weights(task.model, seed=0))
    return model, training.make_optimizer(model, task.recipe), training.cross_entropy


def main() -> None:
    """Print steps of one process, then of two: a layer split and a pipeline."""
    x, build = np.random.default_rng(0).integers(0, 98, (80, 64)), f"{__spec__.name}:text_gpt_wide"
    step, alone = training.make_train_step(*text_gpt_wide()), parallel.Trained({}, [], [])
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
