"""Gradient accumulation: a large batch at the memory of a small one.

What it changes: one step goes through its batch in `micro_batches` parts, forward and backward one
after another, adds up their gradients and updates once. Each part counts by its share of samples,
so the sum is the gradient of the whole batch's mean loss, also where the parts differ in size. Only
one part's activations are alive at a time; parameters, gradients and optimizer state stay.

What is not the same as in one large batch:
- BatchNorm normalises with the statistics of its part. That is another function of the batch, and
  with small parts a noisier one. GroupNorm and LayerNorm know no batch and stay exact.
- Its running statistics get one update a part. `statistics_once` gives them one a step instead.
- Dropout draws anew for each part, as it does for each step.
- A loss that is not a mean over samples. Where padding is masked out, a mean over tokens is one
  over the tokens of a part, and those of a part with few weigh more: let `loss_fn` divide the sum
  by the samples instead. A contrastive loss sees only the pairs within a part.

Its twin: `tf_impl/train_step/gradient_accumulation.py`.

Where the frameworks differ and why:
- Here `.grad` is the accumulator: `backward` adds to it. There gradients are values, and the graph
  carries a copy of all of them from part to part.
- Here Python runs the parts in order. A graph may run whatever is ready, so there each part has to
  wait for the sums before it, or activations pile up.
- Keras has it built in (`gradient_accumulation_steps` of its optimizers), with another meaning: see
  the twin. PyTorch has nothing of the kind.
- The replicas of DistributedDataParallel exchange gradients in each backward pass, and so do the
  shards of `fully_shard`: here all parts but the last keep theirs. FSDP2 then holds gradients whole
  until the last part. There the loop is within the replica, and the exchange after it.
- PyTorch's running variance is unbiased (n - 1), that of Keras 3 is not; each keeps its own rule.

When it helps and when it hurts: it helps where a batch does not fit into memory. Where it fits,
accumulation saves no time: the same arithmetic in smaller operators, whose fixed cost is paid
`micro_batches` times. If it makes the batch k times larger than before, the learning rate goes with
it: k times for SGD, after a warm-up (linear scaling, Goyal et al., 2017, "Accurate, Large Minibatch
SGD", section 2.1); for Adam the square root of k is usual (Malladi et al., 2022). Splitting a batch
that stays as large as it was changes no learning rate.

Run it alone: `python -m pt_impl.train_step.gradient_accumulation` prints 32 samples a step against
128 and against 4 x 32, each with its learning rate.

Copy with it: nothing.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm  # the common base; torch's own tools use it too
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import PackedSequence


class GradientAccumulator:
    """Runs the forward and backward pass of a batch part by part, adding up in `.grad`.

    What it does to a plain loop: what stood between `zero_grad` and `step` becomes a function of
    one part, which the accumulator calls for each:

        def backward(x, y, share):
            loss = loss_fn(model(x), y) * share
            loss.backward()
            return loss.detach()

        optimizer.zero_grad()
        loss = accumulator.run(backward, x, y)
        optimizer.step()

    Args:
        model: a plain one, or one under DDP or FSDP2, whose gradients are then exchanged once, in
            the last part.
        micro_batches: how many parts; their sizes differ by one at most, so a batch need not be
            divisible. 1 is the whole batch.
        statistics_once: BatchNorm's running statistics are updated once, with the mean and variance
            of all values that the layer saw in all parts (Chan et al., 1979). Equal to one large
            batch: the number of updates, hence the layer's momentum means the same; and the
            statistics of a first layer, whose input no BatchNorm has changed. Not equal: what
            training normalises with, which stays that of the part, and so the input of every later
            layer. Layers in evaluation mode stay as they are. A layer that runs twice in a forward
            pass gets one update of both.

    Raises:
        ValueError: micro_batches is below 1 or no integer, or the model has no trainable
            parameters. NotImplementedError: statistics_once with SyncBatchNorm.
    """

    def __init__(
        self, model: nn.Module, *, micro_batches: int = 4, statistics_once: bool = False
    ) -> None:
        if not isinstance(micro_batches, int) or micro_batches < 1:
            raise ValueError(
                f"micro_batches must be an integer of at least 1, not {micro_batches!r}"
            )
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise ValueError("the model has no trainable parameters: there is no gradient to add")
        self.micro_batches = micro_batches
        self.norms = _norms(model) if statistics_once else []
        self.exchanging = [module for module in model.modules() if _exchanges(module)]

    def check(self, x, y) -> int | None:
        """Return the number of samples; None where the batch stays whole.

        Raises:
            ValueError: tensors that disagree on that number, objects that cannot be cut, and fewer
                samples than parts (drop such a batch, or make fewer parts).
        """
        if self.micro_batches == 1 and not self.norms:
            return None
        return _samples(x, y, self.micro_batches)

    def run(self, backward: Callable, x, y):
        """Call `backward` for each part; return the sum of what it returns.

        Args:
            backward: `backward(x, y, share)` runs forward and backward pass of a part. It
                multiplies the part's mean loss by `share`, its fraction of the samples, and returns
                that, detached.
            x, y: tensors, or nested tuples, lists and mappings. Every tensor in them has the
                samples along its first axis; None, numbers and strings go to every part.

        Raises:
            As `check`, before anything is changed.
        """
        samples, total = self.check(x, y), 0.0
        if samples is None:
            return backward(x, y, 1.0)
        with _one_update(self.norms):
            for index in range(self.micro_batches):
                start = index * samples // self.micro_batches
                stop = (index + 1) * samples // self.micro_batches
                part_x, part_y = _rows((x, y), start, stop)
                with nullcontext() if stop == samples else self._no_exchange():
                    total = total + backward(part_x, part_y, (stop - start) / samples)
        return total

    @contextmanager
    def _no_exchange(self) -> Iterator[None]:
        """Let replicas (DDP) and shards (FSDP2) keep their gradients to themselves inside."""
        with ExitStack() as stack:
            for module in self.exchanging:
                if isinstance(module, DistributedDataParallel):
                    stack.enter_context(module.no_sync())
                else:
                    module.set_requires_gradient_sync(False, recurse=False)
                    stack.callback(module.set_requires_gradient_sync, True, recurse=False)
            yield


def make_train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_fn: Callable,
    *,
    micro_batches: int = 4,
    statistics_once: bool = False,
) -> Callable:
    """Make the train step that updates once from the whole batch, computed part by part.

    Args:
        model, optimizer: as ever; the model is put into training mode.
        loss_fn: `loss_fn(output, y)` returns the mean over the samples that it is given.
        micro_batches, statistics_once: as in `GradientAccumulator`.

    Returns:
        `step(x, y) -> loss`: a scalar on the device, the mean over the whole batch of this process.
        x: a tuple of the model's positional arguments, a mapping of its keywords, or its one
        argument.

    Raises:
        As `GradientAccumulator`; the step as its `run`.
    """
    accumulator = GradientAccumulator(
        model, micro_batches=micro_batches, statistics_once=statistics_once
    )
    model.train()

    def backward(x, y, share):
        # A function of its own, so that a part's output is gone before the next part runs.
        loss = loss_fn(_call(model, x), y)
        if share != 1.0:
            loss = loss * share
        loss.backward()  # adds to .grad, and frees the activations
        return loss.detach()

    def step(x, y):
        accumulator.check(x, y)  # while there are gradients that an error would have dropped
        optimizer.zero_grad(set_to_none=True)
        loss = accumulator.run(backward, x, y)
        optimizer.step()
        return loss

    return step


def _exchanges(module: nn.Module) -> bool:
    is_replica = isinstance(module, DistributedDataParallel)
    return is_replica or hasattr(module, "set_requires_gradient_sync")  # of `fully_shard`


def _call(model: nn.Module, x):
    """Call the model as PyTorch's users do: a tuple is its arguments, a mapping its keywords."""
    if isinstance(x, Mapping):
        return model(**x)
    return model(*x) if isinstance(x, tuple) else model(x)


def _samples(x, y, micro_batches: int) -> int:
    """Return the number of samples, which all tensors must have along their first axis."""
    sizes = {tuple(leaf.shape[:1]) for leaf in _tensors((x, y))}
    if len(sizes) != 1 or () in sizes:
        got = ", ".join(str(size[0]) if size else "a scalar" for size in sorted(sizes))
        raise ValueError(f"the tensors of x and y need one first axis, the samples: got {got}")
    ((samples,),) = sizes
    if samples < micro_batches:
        raise ValueError(
            f"{samples} samples do not fill {micro_batches} micro-batches: drop this batch, or make"
            " fewer parts"
        )
    return samples


def _tensors(tree) -> Iterator[Tensor]:
    """The tensors of nested tuples, lists and mappings; ValueError for what cannot be cut."""
    if isinstance(tree, Tensor):
        if tree.is_nested or tree.layout != torch.strided:
            kind = "nested" if tree.is_nested else str(tree.layout).removeprefix("torch.")
            raise ValueError(f"x and y hold a {kind} tensor, which cannot be cut into parts")
        yield tree
    elif isinstance(tree, Mapping | tuple | list) and not isinstance(tree, PackedSequence):
        for part in tree.values() if isinstance(tree, Mapping) else tree:
            yield from _tensors(part)
    elif not isinstance(tree, int | float | str | None):
        raise ValueError(f"x and y hold a {type(tree).__name__}, which cannot be cut into parts")


def _rows(tree, start: int, stop: int):
    """Cut rows out of each tensor of nested tuples, lists and mappings."""
    if isinstance(tree, Tensor):
        return tree[start:stop]
    if isinstance(tree, Mapping):
        return {key: _rows(part, start, stop) for key, part in tree.items()}
    if isinstance(tree, tuple | list):
        parts = [_rows(part, start, stop) for part in tree]
        return type(tree)(*parts) if hasattr(tree, "_fields") else type(tree)(parts)
    return tree


def _norms(model: nn.Module) -> list[_BatchNorm]:
    """The layers with running statistics."""
    layers = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    if any(isinstance(layer, nn.SyncBatchNorm) for layer in layers):
        raise NotImplementedError(
            "statistics_once: SyncBatchNorm does not say how many values its replicas saw"
        )
    return [layer for layer in layers if layer.track_running_stats]


@contextmanager
def _one_update(norms: list[_BatchNorm]) -> Iterator[None]:
    """Update running statistics once, with those of all that the layers see inside the context.

    With a momentum of 1 a layer's running statistics are those of what it has just seen. They are
    pooled as they come, by the number of values: means by their shares, variances with what the
    means differ by (Chan et al., 1979). PyTorch's are unbiased, so the bias is put in and times
    out again.
    """
    norms = [norm for norm in norms if norm.training]
    before = [(norm.momentum, *(buffer.clone() for buffer in _statistics(norm))) for norm in norms]
    means, pooled = {norm: norm.running_mean for norm in norms}, {}

    def pool(norm, inputs, output):
        if not (norm.training and norm.track_running_stats):
            return  # for this pass, as the model has it
        if norm.running_mean is not means[norm]:
            return  # a recomputed block runs again, on copies: its values have been counted
        count = output.numel() // norm.num_features
        seen, mean, variance = pooled.get(norm, (0, 0.0, 0.0))
        share = count / (seen + count)
        difference = norm.running_mean - mean
        more = norm.running_var * ((count - 1) / count) - variance
        between = difference.square() * (share * (1.0 - share))
        pooled[norm] = seen + count, mean + difference * share, variance + more * share + between

    hooks = [norm.register_forward_hook(pool) for norm in norms]
    try:
        for norm in norms:
            norm.momentum = 1.0
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for norm, (momentum, *statistics) in zip(norms, before, strict=True):
            norm.momentum = momentum
            for buffer, value in zip(_statistics(norm), statistics, strict=True):
                buffer.copy_(value)
    for norm, (count, mean, variance) in pooled.items():
        norm.num_batches_tracked.add_(1)
        # None is PyTorch's cumulative average.
        share = 1.0 / float(norm.num_batches_tracked) if norm.momentum is None else norm.momentum
        norm.running_mean.lerp_(mean, share)
        norm.running_var.lerp_(variance * (count / (count - 1)), share)


def _statistics(norm: _BatchNorm) -> tuple[Tensor, Tensor, Tensor]:
    return norm.running_mean, norm.running_var, norm.num_batches_tracked


def main() -> None:
    """Print 32 samples a step, 128, and 4 x 32 on the digits CNN: an epoch of each."""
    import statistics
    import tempfile
    import time
    from dataclasses import replace
    from pathlib import Path

    from pt_impl.kit import data, models, runtime, training
    from shared import datasets
    from shared.specs import TASKS
    from shared.weights import init_weights

    task = TASKS["digits-cnn"]
    with tempfile.TemporaryDirectory() as folder:
        folder = datasets.materialise(task.dataset, Path(folder))
        train = data.to_device(*datasets.load(folder, "train"))
        test = data.to_device(*datasets.load(folder, "test"))
    print("batch  parts  learning rate  ms per 128 samples  accuracy after an epoch")
    # Linear scaling: four times the samples a step, four times the rate.
    for batch, parts, rate in ((32, 1, 0.02), (128, 1, 0.08), (128, 4, 0.08)):
        model = models.build(task.model, init_weights(task.model, seed=0))
        optimizer = training.make_optimizer(model, replace(task.recipe, learning_rate=rate))
        loss_fn = training.cross_entropy
        step = make_train_step(model, optimizer, loss_fn, micro_batches=parts)
        times = []
        for pair in data.epoch_batches(*train, batch_size=batch, seed=0, epoch=0):
            start = time.perf_counter()
            step(*pair)
            runtime.synchronize()
            times.append((time.perf_counter() - start) * 1e3 * 128 / batch)
        ms, predict = statistics.median(times), training.make_predict(model)
        accuracy = training.evaluate(predict, *test, metric="accuracy", batch_size=256)
        print(f"{batch:5}{parts:7}{rate:15}{ms:20.2f}{accuracy:25.1f}")


if __name__ == "__main__":
    main()
