"""Gradient accumulation: a large batch at the memory of a small one.

What it changes: one step goes through its batch in `micro_batches` parts, forward and backward one
after another, adds up their gradients and updates once. Each part counts by its share of samples,
so the sum is the gradient of the whole batch's mean loss, also where the parts differ in size. Only
one part's activations are alive at a time; variables, gradients and optimizer state stay.

What is not the same as in one large batch:
- BatchNorm normalises with the statistics of its part. That is another function of the batch, and
  with small parts a noisier one. GroupNorm and LayerNorm know no batch and stay exact.
- Its moving statistics get one update a part. `statistics_once` gives them one a step instead.
- Dropout draws anew for each part, as it does for each step.
- A loss that is not a mean over samples. Where padding is masked out, a mean over tokens is one
  over the tokens of a part, and those of a part with few weigh more: let `loss_fn` divide the sum
  by the samples instead. A contrastive loss sees only the pairs within a part.

Its twin: `pt_impl/train_step/gradient_accumulation.py`.

Where the frameworks differ and why:
- Gradients are values here, and the graph carries a copy of all of them from part to part. There
  `.grad` is the accumulator: `backward` adds to it. An embedding's gradient is slices, one a
  lookup: those of all parts are kept side by side, as in the plain step, since optimizers treat
  slices otherwise than their sum (Keras 3's Adam squares each apart).
- A graph may run whatever is ready, and no forward pass needs the part before: TensorFlow could run
  several at once and hold the activations of all. So each part waits for the sums before it. A part
  is a function of the graph, traced once for all parts of its size, and called for each; the tape
  is inside, so that a call keeps nothing when it has returned. PyTorch's parts run in order.
- Keras 3 has `gradient_accumulation_steps=k` in its optimizers. There each call is given one part
  and every k-th call updates, with the plain mean of k gradients, so parts that differ in size are
  not weighted; the sum is kept in variables between calls, a permanent copy of all parameters; a
  learning-rate schedule counts calls. It fails under MirroredStrategy (keras#20582). For `fit`,
  `AccumulatedTraining` is a mixin of a model class with the meaning of this file.
- Keras 3's moving variance is biased (divided by n), PyTorch's is not; each keeps its own rule.

When it helps and when it hurts: it helps where a batch does not fit into memory. Where it fits,
accumulation saves no time: the same arithmetic in smaller operators, whose fixed cost is paid
`micro_batches` times. If it makes the batch k times larger than before, the learning rate goes with
it: k times for SGD, after a warm-up (linear scaling, Goyal et al., 2017, "Accurate, Large Minibatch
SGD", section 2.1); for Adam the square root of k is usual (Malladi et al., 2022). Splitting a batch
that stays as large as it was changes no learning rate.

Run it alone: `python -m tf_impl.train_step.gradient_accumulation` prints 32 samples a step against
128 and against 4 x 32, each with its learning rate.

Copy with it: nothing.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import tensorflow as tf


class GradientAccumulator:
    """Computes the gradients of a batch part by part and adds them up, within one graph.

    What it does to a step of your own: what took gradients becomes a function of one part, which
    the accumulator calls for each:

        def gradients_of(x, y, share):
            with tf.GradientTape() as tape:
                loss = loss_fn(model(x, training=True), y) * share
            return loss, tape.gradient(loss, variables)

        @tf.function
        def step(x, y):
            loss, gradients = accumulator.run(gradients_of, x, y)
            optimizer.apply_gradients(zip(gradients, variables))

    Args:
        model: with its variables.
        micro_batches: how many parts; their sizes differ by one at most, so a batch need not be
            divisible. 1 is the whole batch.
        statistics_once: BatchNorm's moving statistics are updated once, with the mean and variance
            of all values that the layer saw in all parts (Chan et al., 1979). Equal to one large
            batch: the number of updates, hence the layer's momentum means the same; and the
            statistics of a first layer, whose input no BatchNorm has changed. Not equal: what
            training normalises with, which stays that of the part, and so the input of every later
            layer. Layers that are not trainable stay as they are. Of a layer that runs twice in a
            forward pass the second run counts. tf_keras's fused kernel gives unbiased variances,
            pooled as they are: too large by a relative 1/n for the n values of a part.

    Raises:
        ValueError: micro_batches is below 1 or no integer, or the model has no trainable variables.
        NotImplementedError: statistics_once with batch renormalisation, which trains on its moving
            statistics.
    """

    def __init__(
        self, model: tf.keras.Model, *, micro_batches: int = 4, statistics_once: bool = False
    ) -> None:
        if not isinstance(micro_batches, int) or micro_batches < 1:
            raise ValueError(
                f"micro_batches must be an integer of at least 1, not {micro_batches!r}"
            )
        if not model.built:
            raise ValueError("the model has no variables yet: call it once on an example input")
        if not model.trainable_variables:
            raise ValueError("the model has no trainable variables: there is no gradient to add")
        self.micro_batches = micro_batches
        self.norms = _batch_norms(model) if statistics_once else []

    def run(self, gradients_of: Callable, x, y) -> tuple:
        """Call `gradients_of` for each part; return the sums of losses and of gradients.

        Args:
            gradients_of: `gradients_of(x, y, share)` returns loss and gradients of a part. It
                multiplies the part's mean loss by `share`, its fraction of the samples: a number,
                or a float32 tensor where only the graph knows how many there are.
            x, y: tensors, or structures of tensors. Every tensor in them has the samples along its
                first axis; what is no tensor goes to every part.

        Raises:
            ValueError: before anything is changed, tensors that disagree on the number of samples
                and fewer samples than parts (drop such a batch, or make fewer parts):
                InvalidArgumentError where only the graph knows how many there are.
        """
        if self.micro_batches == 1 and not self.norms:
            return gradients_of(x, y, 1.0)

        # One function for all parts, not one graph a part. Not inlined, so that what a part keeps
        # for its gradients is gone when it returns.
        @tf.function(experimental_attributes={"_noinline": True})
        def one_part(tensors, share):
            with _own_statistics(self.norms):
                return gradients_of(*_with_tensors((x, y), tensors), share)

        samples, statistics = _samples(x, y, self.micro_batches), _Statistics(self.norms)
        loss, gradients = 0.0, None
        for index in range(self.micro_batches):
            start = index * samples // self.micro_batches
            stop = (index + 1) * samples // self.micro_batches
            share = (stop - start) / samples
            if tf.is_tensor(share):
                share = tf.cast(share, tf.float32)
            # Parts side by side would hold the activations of all.
            with tf.control_dependencies(_sums(gradients)):
                rows = [tensor[start:stop] for tensor in _tensors((x, y))]
            part_loss, part_gradients = one_part(rows, share)
            loss += part_loss
            gradients = _add(gradients, part_gradients)
            statistics.pool(start, stop)
        statistics.update_once()
        return loss, gradients


def make_train_step(
    model: tf.keras.Model,
    optimizer: tf.keras.optimizers.Optimizer,
    loss_fn: Callable,
    *,
    micro_batches: int = 4,
    statistics_once: bool = False,
) -> Callable:
    """Make the train step that updates once from the whole batch, computed part by part.

    Args:
        model, optimizer: as ever; the model has its variables.
        loss_fn: `loss_fn(output, y)` returns the mean over the samples that it is given.
        micro_batches, statistics_once: as in `GradientAccumulator`.

    Returns:
        `step(x, y) -> loss`: a float32 scalar on the device, the mean over the whole batch. x: a
        tensor or a structure of tensors, handed over as `fit` does: as one argument, but where the
        model's `call` needs several.

    Raises:
        As `GradientAccumulator`; the step as its `run`.
    """
    accumulator = GradientAccumulator(
        model, micro_batches=micro_batches, statistics_once=statistics_once
    )
    variables = model.trainable_variables

    def gradients_of(x, y, share):
        with tf.GradientTape() as tape:
            loss = _with_own_losses(loss_fn(_call(model, x, training=True), y), model)
            if micro_batches > 1:
                loss = _weighted(loss, share)
            scaled = _scaled(loss, optimizer)
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


def _sums(gradients: list | None) -> list[tf.Tensor]:
    """The tensors of all gradients so far, those of slices too."""
    known = [gradient for gradient in gradients or () if gradient is not None]
    return tf.nest.flatten(known, expand_composites=True)


def _add(sums: list | None, gradients: list) -> list:
    """The gradients of the parts so far with those of one more."""
    if sums is None:
        return gradients
    return [_sum(old, new) for old, new in zip(sums, gradients, strict=True)]


def _sum(old, new):
    """Add two gradients: None is none, and slices stay slices."""
    if old is None or new is None:
        return new if old is None else old
    if isinstance(new, tf.IndexedSlices):
        values = tf.concat([old.values, new.values], axis=0)
        indices = tf.concat([old.indices, new.indices], axis=0)
        return tf.IndexedSlices(values, indices, new.dense_shape)
    return old + new


def _call(model, x, training: bool):
    """Call `model` as `fit` does: x is one argument, but where `call` needs several."""
    inputs = inspect.signature(model.call).parameters.values()
    inputs = [p for p in inputs if p.name not in ("training", "mask") and p.kind != p.VAR_KEYWORD]
    if isinstance(x, dict) and len(inputs) > 1 and x.keys() <= {p.name for p in inputs}:
        return model(**x, training=training)
    needed = sum(2 if p.kind == p.VAR_POSITIONAL else p.default is p.empty for p in inputs)
    if isinstance(x, tuple | list) and needed > 1:
        return model(*x, training=training)
    return model(x, training=training)


def _with_own_losses(loss, model):
    """Add the model's own losses (of regularisers, of `add_loss`) as `fit` does, in float32."""
    loss = tf.cast(loss, tf.float32) if loss.dtype.size < 4 else loss
    return sum((tf.cast(term, loss.dtype) for term in model.losses), loss)


def _scaled(loss, optimizer):
    """The loss to take gradients of: Keras 3's LossScaleOptimizer divides them by its scale."""
    return optimizer.scale_loss(loss) if hasattr(optimizer, "scale_loss") else loss


def _samples(x, y, micro_batches: int):
    """The number of samples: an int where it is known while tracing, else a scalar tensor."""
    tensors = _tensors((x, y))
    if any(isinstance(tensor, tf.SparseTensor) for tensor in tensors):
        raise NotImplementedError("a SparseTensor is not cut into parts: give tf.sparse.to_dense")
    sizes = {leaf.shape[0] if leaf.shape.rank else "a scalar" for leaf in tensors}
    known = sizes - {None}
    if not sizes or len(known) > 1 or "a scalar" in known:
        got = ", ".join(sorted(map(str, sizes)))
        raise ValueError(f"the tensors of x and y need one first axis, the samples: got {got}")
    few = f"samples do not fill {micro_batches} micro-batches: drop this batch, or make fewer parts"
    if known:
        if min(known) < micro_batches:
            raise ValueError(f"{min(known)} {few}")
        return min(known)
    samples = tf.shape(tensors[0])[0]
    check = tf.debugging.assert_greater_equal(samples, micro_batches, few)
    # Every part is cut with this number, so none runs before the check.
    with tf.control_dependencies([check]):
        return tf.identity(samples)


def _tensors(tree) -> list:
    """The tensors of a tensor, tuple, list or dict."""
    return [leaf for leaf in tf.nest.flatten(tree) if tf.is_tensor(leaf)]


def _with_tensors(tree, tensors: list):
    """The structure again, with other tensors in the places of its own."""
    new = iter(tensors)
    return tf.nest.map_structure(lambda leaf: next(new) if tf.is_tensor(leaf) else leaf, tree)


def _batch_norms(model: tf.keras.Model) -> list:
    """The BatchNorm layers, those within custom layers too, which `model.layers` does not list."""
    kind = tf.keras.layers.BatchNormalization
    layers = [layer for layer in model._flatten_layers() if isinstance(layer, kind)]
    if any(layer.renorm for layer in layers):
        raise NotImplementedError("statistics_once: batch renormalisation trains on its statistics")
    return layers


def _statistics(norm) -> tuple:
    return norm.moving_mean, norm.moving_variance


@contextmanager
def _own_statistics(norms: list) -> Iterator[None]:
    """Let moving statistics be those of the part alone: a momentum of 0, while it is traced."""
    before = [norm.momentum for norm in norms]
    try:
        for norm in norms:
            norm.momentum = 0.0
        yield
    finally:
        for norm, momentum in zip(norms, before, strict=True):
            norm.momentum = momentum


class _Statistics:
    """The moving statistics of layers as they were, and what the layers have seen since."""

    def __init__(self, norms: list) -> None:
        self.norms = norms
        self.before = [[tf.identity(value) for value in _statistics(norm)] for norm in norms]
        self.seen = [[tf.zeros_like(value) for value in _statistics(norm)] for norm in norms]

    def pool(self, start, stop) -> None:
        """Pool those of `start` samples with those of the part up to `stop` (Chan et al.)."""
        for norm, seen in zip(self.norms, self.seen, strict=True):
            mean, variance = seen
            part_mean, part_variance = (tf.identity(value) for value in _statistics(norm))
            share = tf.cast(stop - start, mean.dtype) / tf.cast(stop, mean.dtype)
            difference = part_mean - mean
            between = tf.square(difference) * share * (1.0 - share)
            seen[0] = mean + difference * share
            seen[1] = variance + (part_variance - variance) * share + between

    def update_once(self) -> None:
        """Move the statistics by the layer's momentum, once for all parts."""
        for norm, before, seen in zip(self.norms, self.before, self.seen, strict=True):
            for statistic, old, new in zip(_statistics(norm), before, seen, strict=True):
                statistic.assign(old + (new - old) * (1.0 - norm.momentum))


def main() -> None:
    """Print 32 samples a step, 128, and 4 x 32 on the digits CNN: an epoch of each."""
    import statistics
    import tempfile
    import time
    from dataclasses import replace
    from pathlib import Path

    from shared import datasets
    from shared.specs import TASKS
    from shared.weights import init_weights
    from tf_impl.kit import data, models, runtime, training

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
