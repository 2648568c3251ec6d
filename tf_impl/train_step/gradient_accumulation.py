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
- Gradients are values here, and a loop in the graph carries a copy of all of them from part to
  part. There `.grad` is the accumulator: `backward` adds to it. An embedding's gradient is slices,
  one a lookup: those of all parts are kept side by side, as in the plain step, since optimizers
  treat slices otherwise than their sum (Keras 3's Adam squares each apart).
- A graph may run whatever is ready, and no forward pass needs the part before: TensorFlow could run
  several at once and hold the activations of all. `parallel_iterations=1` forbids it (a loop in
  Python would need control dependencies, and make the graph as many times larger). The tape is
  inside the loop, so the loop keeps nothing for a backward pass. PyTorch's parts run in order.
- Keras 3 has `gradient_accumulation_steps=k` in its optimizers. There each call is given one part
  and every k-th call updates, with the plain mean of k gradients, so parts that differ in size are
  not weighted; the sum is kept in variables between calls, a permanent copy of all parameters; a
  learning-rate schedule counts calls. It fails under MirroredStrategy (keras#20582).
- Keras 3's moving variance is biased (divided by n), PyTorch's is not; each keeps its own rule.

When it helps and when it hurts: it helps where a batch does not fit into memory. Where it fits,
accumulation saves no time: the same arithmetic in smaller operators, whose fixed cost is paid
`micro_batches` times. If it makes the batch k times larger than before, the learning rate goes with
it: k times for SGD, after a warm-up (linear scaling, Goyal et al., 2017, "Accurate, Large Minibatch
SGD", section 2.1); for Adam the square root of k is usual (Malladi et al., 2022). Splitting a batch
that stays as large as it was changes no learning rate.

Run it alone: `python -m tf_impl.train_step.gradient_accumulation` prints 32 samples a step against
128 and against 4 x 32, each with its learning rate.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import tensorflow as tf


def make_train_step(
    model: tf.keras.Model,
    optimizer: tf.keras.optimizers.Optimizer,
    loss_fn: Callable,
    *,
    micro_batches: int = 4,
    statistics_once: bool = False,
) -> Callable:
    """Return `step(x, y) -> loss`: one update from the whole batch, computed part by part.

    x: a tensor or a structure of tensors, handed over as `fit` does: as one argument, but where the
    model's `call` needs several. Every tensor in x and y has the samples along its first axis; what
    is no tensor goes to every part. `loss_fn(output, y)` returns the mean over the samples it is
    given. loss: float32 scalar on the device, the mean over the whole batch. micro_batches: how
    many parts; their sizes differ by one at most, so a batch need not be divisible. 1 is the plain
    step.

    statistics_once: BatchNorm's moving statistics are updated once a step, with the mean and
    variance of all values that the layer saw in all parts (Chan et al., 1979). Equal to one large
    batch: the number of updates, hence the layer's momentum means the same; and the statistics of
    a first layer, whose input no BatchNorm has changed. Not equal: what training normalises with,
    which stays that of the part, and so the input of every later layer. Layers that are not
    trainable stay as they are; without BatchNorm it changes nothing. Of a layer that runs twice in
    a forward pass the second run counts. tf_keras's fused kernel gives unbiased variances, pooled
    as they are: too large by a relative 1/n for the n values of a part.

    Raises ValueError for micro_batches below 1 or not an integer and for a model without trainable
    variables; `step` does, before anything is changed, for tensors that disagree on the number of
    samples and for fewer samples than parts (drop such a batch, or make a step with fewer parts):
    InvalidArgumentError where only the graph knows how many there are. NotImplementedError:
    statistics_once with batch renormalisation, which trains on its moving statistics.
    """
    _check(model, micro_batches)
    variables = model.trainable_variables
    norms = _batch_norms(model) if statistics_once else []

    @tf.function(jit_compile=False)
    def step(x, y):
        before = [tuple(map(tf.identity, _statistics(norm))) for norm in norms]
        parts = model, loss_fn, variables, norms, x, y, micro_batches
        loss, gradients, pooled = _accumulate(*parts)
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        for norm, old, new in zip(norms, before, pooled, strict=True):
            for statistic, was, seen in zip(_statistics(norm), old, new, strict=True):
                statistic.assign(was + (seen - was) * (1.0 - norm.momentum))
        return loss

    return step


def _accumulate(*given) -> tuple:
    """Run the parts one by one; return loss, gradients and what each BatchNorm has seen."""
    try:
        return _loop(*given, lookups=set())
    except _LookupsError as found:  # only the trace of a part knows: trace it anew
        return _loop(*given, lookups=found.args[0])


class _LookupsError(Exception):
    """The places of gradients that are slices, one a lookup (of embeddings)."""


def _loop(model, loss_fn, variables, norms, x, y, micro_batches: int, *, lookups: set) -> tuple:
    samples = _samples(x, y, micro_batches)
    unreached = set()

    def part(index, loss, gradients, pooled):
        start = index * samples // micro_batches
        stop = (index + 1) * samples // micro_batches
        inputs, labels = _rows((x, y), start, stop, samples, micro_batches)
        share = tf.cast(stop - start, tf.float32) / tf.cast(samples, tf.float32)
        with _own_statistics(norms):
            part_loss, added = _backward(model, loss_fn, variables, inputs, labels, share)
        unreached.update(place for place, gradient in enumerate(added) if gradient is None)
        found = {place for place, g in enumerate(added) if isinstance(g, tf.IndexedSlices)}
        if found != lookups:
            raise _LookupsError(found)
        gradients = [_add(index, *pair) for pair in zip(gradients, added, strict=True)]
        both = zip(pooled, norms, strict=True)
        pooled = [_pool(*seen, *_statistics(norm), start, stop) for seen, norm in both]
        return index + 1, loss + tf.cast(part_loss, loss.dtype), gradients, pooled

    empty = [
        _no_slices(variable, micro_batches)
        if place in lookups
        else tf.zeros(variable.shape, variable.dtype)
        for place, variable in enumerate(variables)
    ]
    unseen = [tuple(map(tf.zeros_like, _statistics(norm))) for norm in norms]
    _, loss, gradients, pooled = tf.while_loop(
        lambda index, *_: index < micro_batches,
        part,
        [tf.constant(0), tf.constant(0.0), empty, unseen],
        parallel_iterations=1,  # one part's activations at a time
    )
    for place in lookups:
        values, rows = gradients[place]
        shape = tf.constant(list(variables[place].shape), tf.int64)
        gradients[place] = tf.IndexedSlices(values.concat(), rows.concat(), shape)
    # What the loss does not reach has no gradient, which is not a gradient of zero.
    reached = [None if i in unreached else gradient for i, gradient in enumerate(gradients)]
    return loss, reached, pooled


def _no_slices(variable, parts: int) -> tuple:
    """Where the slices of each part are kept, as values and rows."""
    kept = {"size": parts, "infer_shape": False}  # the last part may have fewer
    shape = [None, *variable.shape[1:]]
    values = tf.TensorArray(variable.dtype, element_shape=shape, **kept)
    return values, tf.TensorArray(tf.int64, element_shape=[None], **kept)


def _add(index, old, new):
    """The gradients of the parts so far with those of one more."""
    if new is None:
        return old
    if isinstance(new, tf.IndexedSlices):
        values, rows = old
        indices = tf.cast(new.indices, tf.int64)
        return values.write(index, new.values), rows.write(index, indices)
    return old + new


def _backward(model, loss_fn, variables, x, y, share) -> tuple:
    """Loss and gradients of one part, times its share of the samples."""
    with tf.GradientTape() as tape:
        loss = _with_own_losses(loss_fn(_call(model, x, training=True), y), model)
        loss *= tf.cast(share, loss.dtype)
    return loss, tape.gradient(loss, variables)


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


def _check(model: tf.keras.Model, micro_batches: int) -> None:
    if not isinstance(micro_batches, int) or micro_batches < 1:
        raise ValueError(f"micro_batches must be an integer of at least 1, not {micro_batches!r}")
    if not model.built:
        raise ValueError("the model has no variables yet: call it once on an example input")
    if not model.trainable_variables:
        raise ValueError("the model has no trainable variables: there is no gradient to add up")


def _samples(x, y, micro_batches: int):
    """The number of samples: an int where it is known while tracing, else a scalar tensor."""
    tensors = [leaf for leaf in tf.nest.flatten((x, y)) if tf.is_tensor(leaf)]
    sizes = {leaf.shape[0] if leaf.shape.rank else "a scalar" for leaf in tensors}
    known = sizes - {None}
    if not sizes or len(known) > 1 or "a scalar" in known:
        found = ", ".join(sorted(map(str, sizes)))
        raise ValueError(f"the tensors of x and y need one first axis, the samples: got {found}")
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


def _rows(tree, start, stop, samples, micro_batches: int):
    """Cut rows out of each tensor of a tensor, tuple, list or dict."""
    # Where all parts are equally large, and that is known, they get a static shape.
    known = isinstance(samples, int) and samples % micro_batches == 0

    def cut(leaf):
        if not tf.is_tensor(leaf):
            return leaf
        rows = leaf[start:stop]
        if known:
            rows.set_shape([samples // micro_batches, *leaf.shape[1:]])
        return rows

    return tf.nest.map_structure(cut, tree)


def _batch_norms(model: tf.keras.Model) -> list:
    """The BatchNorm layers, those within custom layers too, which `model.layers` does not list."""
    kind = tf.keras.layers.BatchNormalization
    found = [layer for layer in model._flatten_layers() if isinstance(layer, kind)]
    if any(layer.renorm for layer in found):
        raise NotImplementedError("statistics_once: batch renormalisation trains on its statistics")
    return found


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


def _pool(mean, variance, part_mean, part_variance, start, stop) -> tuple:
    """Mean and variance of `stop` samples, from those of `start` and of the rest (Chan et al.)."""
    share = tf.cast(stop - start, mean.dtype) / tf.cast(stop, mean.dtype)
    difference = part_mean - mean
    between = tf.square(difference) * share * (1.0 - share)
    return mean + difference * share, variance + (part_variance - variance) * share + between


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
        taken = []
        for pair in data.epoch_batches(*train, batch_size=batch, seed=0, epoch=0):
            start = time.perf_counter()
            step(*pair)
            runtime.synchronize()
            taken.append((time.perf_counter() - start) * 1e3 * 128 / batch)
        ms, predict = statistics.median(taken), training.make_predict(model)
        accuracy = training.evaluate(predict, *test, metric="accuracy", batch_size=256)
        print(f"{batch:5}{parts:7}{rate:15}{ms:20.2f}{accuracy:25.1f}")


if __name__ == "__main__":
    main()
