"""Model parallelism: one model in stages on several devices, by batch or by micro-batches.

    stage = apply_model_parallel(model, micro_batch_x, cut="block1")  # in a process a stage
    step = make_train_step(stage, optimizer_of_stage, loss_fn, micro_batches=4, schedule="1f1b")
    loss = step(x, y, samples)

What it changes: which device holds which layers. A stage holds some layers and their optimizer.
Activations go to the next stage, and their gradients come back. In a plain split one stage works at
a time. A pipeline cuts the batch into micro-batches, so that stages work at the same time: first
all forward passes, then all backward passes (GPipe, Huang et al., 2019), or each backward pass as
soon as it can start (1F1B, Narayanan et al., 2019). Losses and weights are those of one device with
the whole batch.

Its twin: `tf_impl/parallel/model_parallel.py`.

Where the frameworks differ and why:
- PyTorch has one process per stage. TensorFlow has one process with a device per stage; on a CPU
  they share memory, so nothing is sent.
- PyTorch: `torch.distributed.pipelining` traces the model and cuts the trace. TensorFlow: a
  functional Keras model is a graph, and a stage is a copy of its layers, made below `tf.device`.
- A schedule is a loop in each process in PyTorch. In TensorFlow it is one graph with control
  dependencies.

When it helps and when it hurts: it helps if a model does not fit into one device. Otherwise one
device, or data parallelism, is faster. With p stages and m micro-batches of equal cost, a stage is
idle for (p-1)/(m+p-1) of the time. In a pipeline BatchNorm sees one micro-batch at a time. Dropout
draws other masks.

Run it alone: `python -m pt_impl.parallel.model_parallel` prints one process against two.
Its functions are called in each of several processes: `pt_impl/kit/replicas.py` starts them.

Copy with it: `pt_impl/kit/calling.py`, `pt_impl/kit/checks/model_parallel.py`.
"""

import torch
import torch.distributed as dist
from torch.distributed import pipelining
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe, SplitPoint

from pt_impl.kit.calling import call_arguments, rows, tensors
from pt_impl.kit.checks.model_parallel import (
    check_cut,
    check_model_parallel,
    check_optimizer,
    check_stages,
    order_inputs,
    tracing,
)

SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}


def apply_model_parallel(model, x, *, cut: str):
    """Cut the model into stages, of which the process of each rank takes one; return that.

    The parameters of `stage.submod` have the names that they have in the model.

    Args:
        x: inputs of one micro-batch.
        cut: names of the modules that begin a stage, separated by commas.

    Raises ValueError for names that are not there, NotImplementedError for a model that can't be
    traced or uses a parameter twice.
    """
    names = [name.strip() for name in cut.split(",")]
    check_cut(model, names)
    arguments, named = call_arguments(model, x)
    cuts = dict.fromkeys(names, SplitPoint.BEGINNING)
    with tracing():
        pipe = pipelining.pipeline(model, arguments, named, split_spec=cuts)
    check_stages(pipe, names)
    order_inputs(pipe)
    return pipe.build_stage(dist.get_rank(), tensors(x)[0].device)


def make_train_step(model, optimizer, loss_fn, *, micro_batches: int = 1, schedule: str = "gpipe"):
    """Make `step(x, y, samples) -> loss` of a stage: 0 but in the last, which sees the loss.

    All processes take the same batches, of `micro_batches` times the samples that
    `apply_model_parallel` was given.

    Args:
        model: what `apply_model_parallel` returned.
        optimizer: that of its parameters.
        schedule: "gpipe", or "1f1b", in which a stage keeps the activations of no more
            micro-batches than there are stages.
    """

    targets = None

    def loss_of(output, numbers):
        y = rows(targets, int(numbers[0]), int(numbers[-1]) + 1)
        return loss_fn(getattr(output, "logits", output), y)

    run = SCHEDULES[schedule](model, micro_batches, loss_fn=loss_of)

    def step(x, y, samples):
        nonlocal targets
        optimizer.zero_grad(set_to_none=True)
        losses, targets = [], y
        arguments, named = call_arguments(model, x) if model.is_first else ((), {})
        # A schedule cuts only one tensor: the numbers of the samples, for any structure of labels.
        numbers = torch.arange(len(tensors(y)[0])) if model.is_last else None
        run.step(*arguments, **named, target=numbers, losses=losses)
        optimizer.step()
        return sum(loss.detach() for loss in losses) / micro_batches

    return step


# Variants: each is called in every process, and returns its stage, its optimizer and step --------


def layer_split(build, x, *, cut: str) -> tuple:
    """A whole batch goes through the stages, one after another: a pipeline of one micro-batch."""
    return pipeline(build, x, cut=cut, micro_batches=1)


def pipeline(build, x, *, cut: str, micro_batches: int, schedule: str = "gpipe") -> tuple:
    """Stages that work on micro-batches side by side, as many as there are processes.

    x: inputs of one batch. cut, schedule: as in `apply_model_parallel` and `make_train_step`.

    Raises ValueError for names that are not there and numbers that don't fit, NotImplementedError
    for a model that can't be cut.
    """
    samples = len(tensors(x)[0])
    check_model_parallel(samples, len(cut.split(",")) + 1, micro_batches, schedule)
    model, optimizer, loss_fn = build()
    groups = check_optimizer(model, optimizer)
    model.train()  # the trace keeps it
    stage = apply_model_parallel(model, rows(x, 0, samples // micro_batches), cut=cut)
    kept = dict(stage.submod.named_parameters())  # copies, unknown to the optimizer yet
    for group, names in zip(optimizer.param_groups, groups, strict=True):
        group["params"] = [kept[name] for name in names if name in kept]
    settings = {"micro_batches": micro_batches, "schedule": schedule}
    return stage.submod, optimizer, make_train_step(stage, optimizer, loss_fn, **settings)


def main() -> None:
    """Print steps of one process, then of two: a layer split and a pipeline."""
    from statistics import median

    from pt_impl.kit import replicas
    from shared.parallel import Run

    codes, here = torch.randint(98, (80, 64)), __spec__.name
    build, piped = "pt_impl.kit.examples:text_gpt_wide", {"micro_batches": 4, "schedule": "1f1b"}
    print("text-gpt-wide, batch 8: ms a step, last loss")
    for name, make, parts, settings in (
        ("one process", "pt_impl.parallel.data_parallel:processes", 1, {}),
        ("layer split", f"{here}:layer_split", 2, {"cut": "block1"}),
        ("pipeline", f"{here}:pipeline", 2, {"cut": "block1"} | piped),
    ):
        run = Run(replicas=1, parts=parts, global_batch=8, steps=10)
        result = replicas.launch(make, build, (codes, codes), run, settings)
        print(f"{name:12}{1e3 * median(result.step_s):8.1f}{result.losses[-1]:9.4f}")


if __name__ == "__main__":
    main()
