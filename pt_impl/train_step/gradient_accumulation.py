"""Gradient accumulation: a large batch at the memory of a small one.

    accumulator = GradientAccumulator(model, micro_batches=4)
    for part_x, part_y, share in accumulator.split(x, y):  # where the one pass was
        (loss_fn(model(part_x), part_y) * share).backward()

What it changes: one step goes through its batch in parts, adds up their gradients and updates once.
Each part is weighted by its share of samples, so the sum is the gradient of the whole batch's mean
loss. Only one part's activations are in memory at a time. Three things differ from one large batch.
BatchNorm normalises each part by itself and updates its running statistics in each
(`accumulated_statistics.py` updates them once). Spectral norm iterates in each part. A loss that is
not a mean over samples differs, such as a mean over tokens without padding, or a contrastive loss.

Its twin: `tf_impl/train_step/gradient_accumulation.py`.

Where the frameworks differ and why:
- PyTorch: `.grad` is the accumulator, and Python runs the parts in order.
- TensorFlow: gradients are values, and a graph runs whatever is ready. So each part has to wait for
  the sums before it.
- PyTorch's DDP and FSDP2 exchange gradients in every backward pass. Here only the last part does,
  and FSDP2 holds whole gradients until then.
- Keras 3's `gradient_accumulation_steps=k` is different: each call of the optimizer gets one part,
  parts of any size count equally, and a schedule counts calls. It fails under MirroredStrategy
  (keras#20582).

When it helps and when it hurts: it helps if a batch does not fit into memory. If it fits,
accumulation saves no time: it is the same arithmetic in smaller operators. If you make the batch k
times larger, raise the learning rate: k times for SGD, after a warm-up (Goyal et al., 2017, section
2.1), the square root of k for Adam, with other betas and epsilon (Malladi et al., 2022).

Run it alone: `python -m pt_impl.train_step.gradient_accumulation` compares 32 samples per step,
128, and 4 x 32.

Copy with it: `pt_impl/kit/calling.py`, `pt_impl/kit/checks/gradient_accumulation.py`.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import reduce

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pt_impl.kit.calling import call, rows
from pt_impl.kit.checks.gradient_accumulation import check_gradient_accumulation, count_samples


class GradientAccumulator:
    """Cuts batches into parts, whose gradients add up in `.grad`.

    Args:
        model: a plain one, or one under DDP or FSDP2, whose gradients are then exchanged once, in
            the last part.
        micro_batches: how many parts; their sizes differ by one at most, so a batch need not be
            divisible. 1 is the whole batch.

    Raises:
        ValueError: micro_batches is below 1, or the model has no trainable parameters.
    """

    def __init__(self, model: nn.Module, *, micro_batches: int = 4) -> None:
        check_gradient_accumulation(model, micro_batches)
        self.micro_batches = micro_batches
        self.exchanging = [module for module in model.modules() if _exchanges(module)]

    def split(self, x, y) -> Iterator[tuple]:
        """Return the parts (x, y, share); multiply a part's mean loss by its share of the samples.

        x, y: tensors, or nested tuples, lists and mappings of them, samples along the first axis.
        What is no tensor goes to every part.

        Raises ValueError at once, while nothing has been changed: tensors that disagree on the
        number of samples, what cannot be cut, and fewer samples than parts.
        """
        if self.micro_batches == 1:
            return iter([(x, y, 1.0)])
        return self._parts(x, y, count_samples((x, y), self.micro_batches))

    def _parts(self, x, y, samples: int) -> Iterator[tuple]:
        for index in range(self.micro_batches):
            start = index * samples // self.micro_batches
            stop = (index + 1) * samples // self.micro_batches
            part_x, part_y = rows((x, y), start, stop)
            with nullcontext() if stop == samples else self._no_exchange():
                yield part_x, part_y, (stop - start) / samples

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
) -> Callable:
    """Make the train step that updates once from the whole batch, computed part by part.

    Args:
        model, optimizer: as ever; the model is put into training mode.
        loss_fn: `loss_fn(output, y)` returns the mean over the samples that it is given.
        micro_batches: as in `GradientAccumulator`.

    Returns:
        `step(x, y) -> loss`: a scalar on the device, the mean over the whole batch of this process.
        x: a tuple of the model's positional arguments, a mapping of its keywords, or its one
        argument.

    Raises:
        As `GradientAccumulator`; the step as its `split`.
    """
    accumulator = GradientAccumulator(model, micro_batches=micro_batches)
    model.train()

    def step(x, y):
        parts = accumulator.split(x, y)  # raises while there are gradients that would be lost
        optimizer.zero_grad(set_to_none=True)
        losses = []
        for part_x, part_y, share in parts:
            loss = loss_fn(call(model, part_x), part_y)
            if micro_batches > 1:
                loss = loss * share
            loss.backward()  # adds to .grad, and frees the activations
            losses.append(loss.detach())
        optimizer.step()
        return reduce(torch.add, losses)

    return step


def _exchanges(module: nn.Module) -> bool:
    is_replica = isinstance(module, DistributedDataParallel)
    return is_replica or hasattr(module, "set_requires_gradient_sync")  # of `fully_shard`


def main() -> None:
    """Print an epoch of the digits CNN with 32 samples a step, 128, and 4 x 32."""
    from pt_impl.kit.demo import Demo

    demo = Demo("digits-cnn")
    print("batch  parts  learning rate  ms a step  accuracy after an epoch")
    # Linear scaling: four times the samples a step, four times the rate.
    for batch, parts, rate in ((32, 1, 0.02), (128, 1, 0.08), (128, 4, 0.08)):
        model, optimizer, loss_fn = demo.build(learning_rate=rate)
        step = make_train_step(model, optimizer, loss_fn, micro_batches=parts)
        ms = demo.fit(step, batch_size=batch)
        print(f"{batch:5}{parts:7}{rate:15}{ms:11.2f}{demo.score(model):25.1f}")


if __name__ == "__main__":
    main()
