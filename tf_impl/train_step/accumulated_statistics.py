"""Accumulated statistics: BatchNorm's moving statistics get one update per step, not per part.

    accumulator = GradientAccumulator(model, micro_batches=4)
    statistics = AccumulatedStatistics(model)
    # `gradients_of(x, y, share)` calls `statistics.pool(share)` after its forward pass.
    with statistics.one_update():
        loss, gradients = accumulator.run(gradients_of, x, y)

What it changes: when BatchNorm updates its running mean and variance. If a batch is computed in
parts (`gradient_accumulation.py`), it updates them in each part. Here they are updated once per
step, with the mean and variance of all parts together (Chan et al., 1979). So momentum has the same
meaning as with one large batch. Training does not change: each part is still normalised by its own
statistics.

Its twin: `pt_impl/train_step/accumulated_statistics.py`, which says where the frameworks differ.

When it helps and when it hurts: it helps if the momentum was chosen for the whole batch and the
parts are small. Without it, k updates per step forget the past k times as fast, and the variance of
few values is noisy. It costs some small operators per layer. TensorFlow also copies the layer's
statistics. GroupNorm and LayerNorm keep no statistics, so nothing changes for them.

Run it alone: `python -m tf_impl.train_step.accumulated_statistics` prints how far the statistics of
4 x 32 samples are from those of 128, with one update and with four.

Copy with it: `tf_impl/kit/calling.py`, `tf_impl/kit/checks/accumulated_statistics.py`,
`tf_impl/kit/checks/gradient_accumulation.py`, `tf_impl/train_step/gradient_accumulation.py`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import tensorflow as tf

from tf_impl.kit.calling import Retracing, add_own_losses, call, layers, scale_loss
from tf_impl.kit.checks.accumulated_statistics import check_accumulated_statistics
from tf_impl.train_step import gradient_accumulation
from tf_impl.train_step.gradient_accumulation import GradientAccumulator


class AccumulatedStatistics:
    """Updates moving statistics once with those of all parts that run inside a context.

    Layers that are not trainable stay as they are. Of a layer that runs twice in a forward pass the
    second run counts.

    Args:
        model: with its variables; BatchNormalization layers at any depth, or none.

    Raises:
        NotImplementedError: batch renormalisation, which trains on its moving statistics.
    """

    def __init__(self, model: tf.keras.Model) -> None:
        check_accumulated_statistics(model)
        kind = tf.keras.layers.BatchNormalization
        self.norms = [layer for layer in layers(model) if isinstance(layer, kind)]
        self.statistics = [
            value for norm in self.norms for value in (norm.moving_mean, norm.moving_variance)
        ]
        self.pooled = [
            tf.Variable(tf.zeros(value.shape, value.dtype), trainable=False)
            for value in self.statistics
        ]
        self.seen = tf.Variable(0.0, trainable=False)  # the share of the samples
        self.retracing = Retracing(model)  # a layer's own graph would keep its momentum

    @contextmanager
    def one_update(self) -> Iterator[None]:
        """Update at the end, by the layers' own momenta; within the step's tf.function."""
        momenta = [norm.momentum for norm in self.norms]
        before = [tf.identity(value) for value in self.statistics]
        for variable in (self.seen, *self.pooled):
            variable.assign(tf.zeros_like(variable))
        try:
            for norm in self.norms:  # as a part is traced: its statistics are those of this part
                norm.momentum = 0.0
            with self.retracing.new_graphs():
                yield
        finally:
            for norm, momentum in zip(self.norms, momenta, strict=True):
                norm.momentum = momentum
        of_statistics = [momentum for momentum in momenta for _ in range(2)]
        for value, old, new, momentum in zip(
            self.statistics, before, self.pooled, of_statistics, strict=True
        ):
            value.assign(old + (new - old) * (1.0 - momentum))

    def pool(self, share) -> None:
        """Add what the layers saw in a part; variances with what the means differ by.

        share: of the samples, a number or a float32 tensor.
        """
        seen = self.seen.assign_add(share)
        for index in range(0, len(self.pooled), 2):
            mean, variance = self.pooled[index : index + 2]
            part_mean, part_variance = map(tf.identity, self.statistics[index : index + 2])
            weight = tf.cast(share / seen, mean.dtype)
            difference = part_mean - mean
            between = tf.square(difference) * weight * (1.0 - weight)
            mean.assign_add(difference * weight)
            variance.assign_add((part_variance - variance) * weight + between)


def make_train_step(
    model: tf.keras.Model,
    optimizer: tf.keras.optimizers.Optimizer,
    loss_fn: Callable,
    *,
    micro_batches: int = 4,
) -> Callable:
    """Make the step of `gradient_accumulation.make_train_step` with one update of statistics.

    Args, Returns: as there. Raises: as there, and as `AccumulatedStatistics`.
    """
    accumulator = GradientAccumulator(model, micro_batches=micro_batches)
    statistics = AccumulatedStatistics(model)
    variables = model.trainable_variables

    def gradients_of(x, y, share):
        with tf.GradientTape() as tape:
            loss = add_own_losses(loss_fn(call(model, x, training=True), y), model)
            # tf.cast would round a number to float32.
            loss *= tf.cast(share, loss.dtype) if tf.is_tensor(share) else share
            scaled = scale_loss(loss, optimizer)
        statistics.pool(share)
        return loss, tape.gradient(scaled, variables)

    @tf.function(jit_compile=False)
    def step(x, y):
        with statistics.one_update():
            loss, gradients = accumulator.run(gradients_of, x, y)
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return loss

    return step


def main() -> None:
    """Print how far moving statistics are from those of one batch, once and a part at a time."""
    from tf_impl.kit.demo import Demo

    demo = Demo("digits-cnn", batch_size=128)
    accumulated, ways = gradient_accumulation.make_train_step, {}
    for name, make, parts in (
        ("one batch", accumulated, 1),
        ("an update a part", accumulated, 4),
        ("one update", make_train_step, 4),
    ):
        model, optimizer, loss_fn = demo.build()
        make(model, optimizer, loss_fn, micro_batches=parts)(*demo.batches[0])
        ways[name] = AccumulatedStatistics(model).norms[0].moving_variance
    print("after a step of 128: how far the first layer's variance is from that of one batch")
    for name, variance in ways.items():
        apart = tf.abs(variance / ways["one batch"] - 1)
        print(f"{name:18}{tf.reduce_max(apart):10.2e}")


if __name__ == "__main__":
    main()
