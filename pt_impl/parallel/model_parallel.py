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
Its functions are called in each of several processes: `pt_impl/kit/replicas.py` starts them.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe, SplitPoint
from torch.distributed.pipelining import pipeline as cut_pipeline
from torch.utils._pytree import tree_leaves, tree_map  # there is no public one

_SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}


def apply_model_parallel(model, x, *, cut: str):
    """Cut the model into stages, of which the process of each rank takes one; return that.

    The parameters of `stage.submod` have the names that they have in the model.

    Args:
        x: inputs of one micro-batch.
        cut: names of the modules that begin a stage, separated by commas.

    Raises ValueError for names that are not there, NotImplementedError for a model that can't be
    traced or uses a parameter twice.
    """
    return _trace(model, x, cut).build_stage(dist.get_rank(), tree_leaves(x)[0].device)


def make_train_step(model, optimizer, loss_fn, *, micro_batches: int = 1, schedule: str = "gpipe"):
    """Make `step(x, y, samples) -> loss` of a stage: 0 but in the last, which alone sees the loss.

    All processes take the same batches, of `micro_batches` times the samples that
    `apply_model_parallel` was given.

    Args:
        model: what `apply_model_parallel` returned.
        optimizer: that of its parameters.
        schedule: "gpipe", or "1f1b", in which a stage keeps the activations of no more
            micro-batches than there are stages.
    """

    targets = None

    def loss_of(output, rows):
        y = tree_map(lambda whole: whole[rows[0] : rows[-1] + 1], targets)
        return loss_fn(getattr(output, "logits", output), y)

    run = _SCHEDULES[schedule](model, micro_batches, loss_fn=loss_of)

    def step(x, y, samples):
        nonlocal targets
        optimizer.zero_grad(set_to_none=True)
        losses, targets = [], y
        arguments, named = _arguments(x) if model.is_first else ((), {})
        # Upstream cuts one tensor alone: the numbers of the samples, for any structure of labels.
        rows = torch.arange(len(tree_leaves(y)[0])) if model.is_last else None
        run.step(*arguments, **named, target=rows, losses=losses)
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
    stages, samples = len(cut.split(",")) + 1, len(tree_leaves(x)[0])
    if schedule not in _SCHEDULES:
        raise ValueError(f"schedule must be gpipe or 1f1b, not {schedule!r}")
    if micro_batches < 1 or samples % micro_batches:
        raise ValueError(f"{micro_batches} micro_batches do not divide a batch of {samples}")
    if schedule == "1f1b" and micro_batches < stages:
        raise ValueError(f"1f1b with {stages} stages needs {stages} micro_batches or more")
    model, optimizer, loss_fn = build()
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = [[names.get(id(own)) for own in g["params"]] for g in optimizer.param_groups]
    if any(None in group for group in groups):
        raise NotImplementedError(
            "the optimizer has parameters that the model has not, such as a loss's own: make them"
            " the model's"
        )
    micro_batch = tree_map(lambda whole: whole[: samples // micro_batches], x)
    model.train()  # the trace keeps it
    stage = apply_model_parallel(model, micro_batch, cut=cut)
    kept = dict(stage.submod.named_parameters())  # copies, unknown to the optimizer yet
    for group, own in zip(optimizer.param_groups, groups, strict=True):
        group["params"] = [kept[name] for name in own if name in kept]
    step = make_train_step(
        stage, optimizer, loss_fn, micro_batches=micro_batches, schedule=schedule
    )
    return stage.submod, optimizer, step


def _arguments(x) -> tuple[tuple, dict]:
    """A tuple as positional arguments, a dict as named ones."""
    if isinstance(x, dict):
        return (), x
    return (x if isinstance(x, tuple) else (x,)), {}


def _trace(model: nn.Module, x, cut: str):
    """Cut a trace of the model, for micro-batches like x, before the modules that are named."""
    names = [name.strip() for name in cut.split(",")]
    known = [name for name, _ in model.named_modules() if name]
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"cut: there is no module {unknown[0]!r}; there are {', '.join(known)}")
    if len(list(model.named_parameters(remove_duplicate=False))) > len(list(model.parameters())):
        raise NotImplementedError("a parameter is used twice: pipelining would train copies of it")
    arguments, named = _arguments(x)
    try:
        cuts = dict.fromkeys(names, SplitPoint.BEGINNING)
        pipe = cut_pipeline(model, arguments, named, split_spec=cuts)
    except Exception as error:  # whatever in the model it does not know
        reason = str(error.__cause__ or error).strip().splitlines()[0]
        raise NotImplementedError(f"torch.export can't trace the model: {reason}") from None
    if pipe.num_stages != len(names) + 1:
        raise ValueError(f"cut: {', '.join(names)} make {pipe.num_stages} stages in a forward pass")
    _order_inputs(pipe)
    return pipe


def _order_inputs(pipe) -> None:
    """Let the first stage take inputs in the model's order: a trace has them as they are used."""
    whole, first = pipe.split_gm.graph, pipe.get_stage_module(0)
    call = next(node for node in whole.nodes if node.op == "call_module")
    given = [node for node in whole.nodes if node.op == "placeholder"]
    taken = [node for node in first.graph.nodes if node.op == "placeholder"]
    pairs = sorted(zip(call.args, taken, strict=True), key=lambda pair: given.index(pair[0]))
    rest = next(node for node in first.graph.nodes if node.op != "placeholder")
    for _, node in pairs:
        rest.prepend(node)
    call.args = tuple(argument for argument, _ in pairs)
    first.recompile()


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
