"""Accumulated statistics: BatchNorm's running statistics get one update per step, not per part.

    accumulator = gradient_accumulation.GradientAccumulator(model, micro_batches=4)
    statistics = AccumulatedStatistics(model)
    with statistics.one_update():  # around the loop over the parts of a batch
        for part_x, part_y, share in accumulator.split(x, y):
            (loss_fn(model(part_x), part_y) * share).backward()

What it changes: when BatchNorm updates its running mean and variance. If a batch is computed in
parts (`gradient_accumulation.py`), it updates them in each part. Here they are updated once per
step, with the mean and variance of all parts together (Chan et al., 1979). So momentum has the same
meaning as with one large batch. Training does not change: each part is still normalised by its own
statistics.

Its twin: `tf_impl/train_step/accumulated_statistics.py`.

Where the frameworks differ and why:
- PyTorch: a hook on each layer sees the values.
- TensorFlow: one trace serves all parts. So the function of a part calls `pool` after its forward
  pass.
- PyTorch's running variance is unbiased (n - 1), Keras 3's is biased (n). Neither changes here.
- tf_keras: its fused kernel gives unbiased variances. Pooled, they are too large by 1/n for parts
  of n values.

When it helps and when it hurts: it helps if the momentum was chosen for the whole batch and the
parts are small. Without it, k updates per step forget the past k times as fast, and the variance of
few values is noisy. It costs some small operators per layer. TensorFlow also copies the layer's
statistics. GroupNorm and LayerNorm keep no statistics, so nothing changes for them.

Run it alone: `python -m pt_impl.train_step.accumulated_statistics` prints how far the statistics of
4 x 32 samples are from those of 128, with one update and with four.

Copy with it: `pt_impl/kit/calling.py`, `pt_impl/kit/checks/accumulated_statistics.py`,
`pt_impl/kit/checks/gradient_accumulation.py`, `pt_impl/train_step/gradient_accumulation.py`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from pt_impl.kit.checks.accumulated_statistics import check_accumulated_statistics
from pt_impl.train_step import gradient_accumulation


class AccumulatedStatistics:
    """Updates running statistics once with those of all that a model sees inside a context.

    Layers in evaluation mode stay as they are. A layer that runs twice in a forward pass gets one
    update of both.

    Args:
        model: with BatchNorm layers at any depth, or none.

    Raises:
        NotImplementedError: SyncBatchNorm.
    """

    def __init__(self, model: nn.Module) -> None:
        check_accumulated_statistics(model)
        kinds = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d
        norms = [module for module in model.modules() if isinstance(module, kinds)]
        self.norms = [norm for norm in norms if norm.track_running_stats]

    @contextmanager
    def one_update(self) -> Iterator[None]:
        """Pool what the layers see inside, and update at the end; after an error, not at all."""
        pools = [_Pool(norm) for norm in self.norms if norm.training]
        try:
            yield
        finally:
            for pool in pools:
                pool.restore()
        for pool in pools:
            pool.update()


class _Pool:
    """What one layer has seen: the number of values, their mean and their biased variance."""

    def __init__(self, norm: nn.Module) -> None:
        self.norm, self.momentum, self.buffer = norm, norm.momentum, norm.running_mean
        self.before = [buffer.clone() for buffer in _statistics(norm)]
        self.count, self.mean, self.variance = 0, 0.0, 0.0
        norm.momentum = 1.0  # its running statistics are then those of what it has just seen
        self.hook = norm.register_forward_hook(self.add)

    def add(self, norm: nn.Module, inputs: tuple, output: Tensor) -> None:
        """Pool what the layer has just seen; variances with what the means differ by."""
        if not (norm.training and norm.track_running_stats):
            return  # for this pass, as the model has it
        if norm.running_mean is not self.buffer:
            return  # a recomputed block runs again, on copies: its values have been counted
        count = output.numel() // norm.num_features
        share = count / (self.count + count)
        difference = norm.running_mean - self.mean
        more = norm.running_var * ((count - 1) / count) - self.variance
        self.mean = self.mean + difference * share
        between = difference.square() * (share * (1.0 - share))
        self.variance = self.variance + more * share + between
        self.count += count

    def restore(self) -> None:
        """Make the layer what it was."""
        self.hook.remove()
        self.norm.momentum = self.momentum
        for buffer, value in zip(_statistics(self.norm), self.before, strict=True):
            buffer.copy_(value)

    def update(self) -> None:
        """Move the layer's statistics once, by its momentum: None is a cumulative average."""
        if self.count == 0:
            return
        mean, variance, updates = _statistics(self.norm)
        updates.add_(1)
        share = 1.0 / float(updates) if self.momentum is None else self.momentum
        mean.lerp_(self.mean, share)
        variance.lerp_(self.variance * (self.count / (self.count - 1)), share)


def make_train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_fn: Callable,
    *,
    micro_batches: int = 4,
) -> Callable:
    """Make the step of `gradient_accumulation.make_train_step` with one update of statistics.

    Args, Returns: as there. Raises: as there, and as `AccumulatedStatistics`.
    """
    statistics = AccumulatedStatistics(model)
    accumulated = gradient_accumulation.make_train_step(
        model, optimizer, loss_fn, micro_batches=micro_batches
    )

    def step(x, y):
        with statistics.one_update():
            return accumulated(x, y)

    return step


def _statistics(norm: nn.Module) -> tuple[Tensor, Tensor, Tensor]:
    return norm.running_mean, norm.running_var, norm.num_batches_tracked


def main() -> None:
    """Print how far running statistics are from those of one batch, once and a part at a time."""
    from pt_impl.kit.demo import Demo

    demo = Demo("digits-cnn", batch_size=128)
    accumulated, ways = gradient_accumulation.make_train_step, {}
    for name, make, parts in (
        ("one batch", accumulated, 1),
        ("an update a part", accumulated, 4),
        ("one update", make_train_step, 4),
    ):
        model, optimizer, loss_fn = demo.build()
        make(model, optimizer, loss_fn, micro_batches=parts)(*demo.batches[0])
        ways[name] = AccumulatedStatistics(model).norms[0].running_var
    print("after a step of 128: how far the first layer's variance is from that of one batch")
    for name, variance in ways.items():
        print(f"{name:18}{(variance / ways['one batch'] - 1).abs().max():10.2e}")


if __name__ == "__main__":
    main()
