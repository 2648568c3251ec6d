"""Gradient accumulation: a large batch at the memory of a small one.

    accumulator = GradientAccumulator(model, micro_batches=4)
    # `gradients_of(x, y, share)` takes the gradients of a part: of its mean loss times its share.
    loss, gradients = accumulator.run(gradients_of, x, y)  # within the step's tf.function

What it changes: one step goes through its batch in parts, adds up their gradients and updates once.
Each part is weighted by its share of samples, so the sum is the gradient of the whole batch's mean
loss. Only one part's activations are in memory at a time. Three things differ from one large batch.
BatchNorm normalises each part by itself and updates its running statistics in each
(`accumulated_statistics.py` updates them once). Spectral norm iterates in each part. A loss that is
not a mean over samples differs, such as a mean over tokens without padding, or a contrastive loss.
- For `fit` there is a mixin, `AccumulatedTraining`.

Its twin: `pt_impl/train_step/gradient_accumulation.py`, which says where the frameworks differ.

When it helps and when it hurts: it helps if a batch does not fit into memory. If it fits,
accumulation saves no time: it is the same arithmetic in smaller operators. If you make the batch k
times larger, raise the learning rate: k times for SGD, after a warm-up (Goyal et al., 2017, section
2.1), the square root of k for Adam, with other betas and epsilon (Malladi et al., 2022).

Run it alone: `python -m tf_impl.train_step.gradient_accumulation` compares 32 samples per step,
128, and 4 x 32.

Copy with it: `tf_impl/kit/calling.py`, `tf_impl/kit/checks/gradient_accumulation.py`.
"""

from collections.abc import Callable

import tensorflow as tf

from tf_impl.kit.calling import add_own_losses, call, rows, scale_loss, tensors
from tf_impl.kit.checks.gradient_accumulation import check_gradient_accumulation, count_samples


class GradientAccumulator:
    """Computes the gradients of a batch part by part and adds them up, within one graph.

    Args:
        model: with its variables.
        micro_batches: how many parts; their sizes differ by one at most, so a batch need not be
            divisible. 1 is the whole batch.

    Raises:
        ValueError: micro_batches is below 1, or the model has no trainable variables.
    """

    def __init__(self, model: tf.keras.Model, *, micro_batches: int = 4) -> None:
        check_gradient_accumulation(model, micro_batches)
        self.micro_batches = micro_batches

    def run(self, gradients_of: Callable, x, y) -> tuple:
        """Call `gradients_of` for each part; return the sums of losses and of gradients.

        Args:
            gradients_of: `gradients_of(x, y, share)` returns loss and gradients of a part. It
                multiplies the part's mean loss by `share`, its fraction of the samples: a number,
                or a float32 tensor where only the graph knows how many there are.
            x, y: tensors, or structures of tensors, samples along the first axis. What is no tensor
                goes to every part.

        Raises:
            ValueError: tensors that disagree on the number of samples, and fewer samples than
                parts: InvalidArgumentError where only the graph knows how many there are.
        """
        if self.micro_batches == 1:
            return gradients_of(x, y, 1.0)

        # Traced once for all parts of a size. Not inlined, and with the tape inside: what a part
        # keeps for its gradients is gone when the call returns.
        one_part = tf.function(gradients_of, experimental_attributes={"_noinline": True})
        samples = count_samples((x, y), self.micro_batches)
        loss, gradients = 0.0, None
        for index in range(self.micro_batches):
            start = index * samples // self.micro_batches
            stop = (index + 1) * samples // self.micro_batches
            share = (stop - start) / samples
            if tf.is_tensor(share):
                share = tf.cast(share, tf.float32)
            # Parts side by side would hold the activations of all.
            with tf.control_dependencies(tensors(gradients)):
                part_x, part_y = rows((x, y), start, stop)
            part_loss, part_gradients = one_part(part_x, part_y, share)
            loss += part_loss
            gradients = _add(gradients, part_gradients)
        return loss, gradients


def make_train_step(
    model: tf.keras.Model,
    optimizer: tf.keras.optimizers.Optimizer,
    loss_fn: Callable,
    *,
    micro_batches: int = 4,
) -> Callable:
    """Make the train step that updates once from the whole batch, computed part by part.

    Args:
        model, optimizer: as ever; the model has its variables.
        loss_fn: `loss_fn(output, y)` returns the mean over the samples that it is given.
        micro_batches: as in `GradientAccumulator`.

    Returns:
        `step(x, y) -> loss`: a float32 scalar on the device, the mean over the whole batch. x: a
        tensor or a structure of tensors, handed over as `fit` does: as one argument, but where the
        model's `call` needs several.

    Raises:
        As `GradientAccumulator`; the step as its `run`.
    """
    accumulator = GradientAccumulator(model, micro_batches=micro_batches)
    variables = model.trainable_variables

    def gradients_of(x, y, share):
        with tf.GradientTape() as tape:
            loss = add_own_losses(loss_fn(call(model, x, training=True), y), model)
            if micro_batches > 1:
                loss = _weighted(loss, share)
            scaled = scale_loss(loss, optimizer)
        return loss, tape.gradient(scaled, variables)

    @tf.function(jit_compile=False)
    def step(x, y):
        loss, gradients = accumulator.run(gradients_of, x, y)
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return loss

    return step


class AccumulatedTraining:
    """A mixin for `fit`: `class Net(AccumulatedTraining, keras.Model)`; Keras 3.

    Each batch that `fit` draws is one update, computed in `micro_batches` parts, with the compiled
    loss (`compute_loss`), sample weights and metrics.
    """

    micro_batches = 4

    def train_step(self, data):
        """One update from one batch, as Keras calls it."""
        x, y, sample_weight = tf.keras.utils.unpack_x_y_sample_weight(data)
        if not self.built:  # makes the variables, which the function of a part cannot
            self(x, training=False)
        accumulator = GradientAccumulator(self, micro_batches=self.micro_batches)

        def gradients_of(x, targets, share):
            y, sample_weight = targets
            with tf.GradientTape() as tape:
                output = self(x, training=True)
                loss = self.compute_loss(x, y, output, sample_weight, training=True)
                loss = _weighted(loss, share)
                scaled = self.optimizer.scale_loss(loss)
            self.compute_metrics(x, y, output, sample_weight)
            return loss, tape.gradient(scaled, self.trainable_variables)

        loss, gradients = accumulator.run(gradients_of, x, (y, sample_weight))
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        samples = tf.shape(next(each for each in tf.nest.flatten(x) if each is not None))[0]
        # Keras divides the loss of each replica by their number, since gradients are summed.
        replicas = tf.distribute.get_strategy().num_replicas_in_sync
        self._loss_tracker.update_state(loss * replicas, sample_weight=samples)
        return self.get_metrics_result()


def _weighted(loss, share):
    """The loss times a part's share, in its own precision: tf.cast would round a number."""
    return loss * (tf.cast(share, loss.dtype) if tf.is_tensor(share) else share)


def _add(sums: list | None, gradients: list) -> list:
    """The gradients of the parts so far with those of one more; None is no gradient."""
    if sums is None:
        return gradients
    pairs = zip(sums, gradients, strict=True)
    return [old if new is None else new if old is None else _sum(old, new) for old, new in pairs]


def _sum(old, new):
    """An embedding's gradient is slices, and stays so: optimizers treat their sum otherwise."""
    if not isinstance(new, tf.IndexedSlices):
        return old + new
    values = tf.concat([old.values, new.values], axis=0)
    indices = tf.concat([old.indices, new.indices], axis=0)
    return tf.IndexedSlices(values, indices, new.dense_shape)


def main() -> None:
    """Print an epoch of the digits CNN with 32 samples a step, 128, and 4 x 32."""
    from tf_impl.kit.demo import Demo

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
