"""Stacking: the optimizations of a train step on top of one another, in the order that works.

What it changes: one step takes them all, each behind its own setting, and every setting at its
default gives the plain float32 step of one `tf.function`. The usual ladder: channels_last, then
XLA, then bfloat16 layers, then a fused optimizer, then accumulation over micro-batches.

Its twin: `pt_impl/train_step/stacking.py`.

Where the frameworks differ and why:
- channels_last is TensorFlow's default and changes nothing here; PyTorch converts the model.
- compiled: XLA compiles the whole step, micro-batches and update included, to one program; there
  the forward and backward pass and the update are compiled apart, and Python runs the rest.
- bfloat16: Keras decides per layer while the graph is traced, autocast per operator.
- fused: Keras has no such optimizer; XLA fuses the update with the rest of a compiled step.
- BatchNorm normalises each micro-batch by itself in both, so accumulation is another computation
  for a model that has it, and the same one for a model without.

When it helps and when it hurts: gains do not multiply. What is bound by memory (BatchNorm, ReLU)
gains from compilation or bfloat16, not from both in full; accumulation costs time and saves memory.
On a CPU XLA may lose to the oneDNN kernels that TensorFlow's graphs call, and it computes bfloat16
in float32 where it has no kernel for it. Add one rung at a time, measure, and leave out what does
not pay.

Run it alone: `python -m tf_impl.train_step.stacking` prints the ladder on the digits CNN.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import tensorflow as tf

_POLICIES = {"float32": "float32", "bfloat16": "mixed_bfloat16"}


def make_optimizer(
    model: tf.keras.Model, *, learning_rate: float, momentum: float = 0.9, fused: bool = False
) -> tf.keras.optimizers.Optimizer:
    """Make SGD with momentum over the variables of `model`: v = momentum v + g; w -= lr v.

    fused: refused with NotImplementedError, since Keras has no such optimizer. Raises ValueError
    for settings out of range.
    """
    if learning_rate < 0 or not 0 <= momentum < 1:
        raise ValueError("learning_rate must be at least 0 and momentum in [0, 1)")
    if fused:
        raise NotImplementedError(
            "Keras has no fused optimizer: in a compiled step XLA fuses the update already"
        )
    optimizer = tf.keras.optimizers.SGD(
        learning_rate=float(learning_rate), momentum=momentum, nesterov=False
    )
    # tf_keras compiles each variable's update on a GPU unless told not to; the step decides here.
    optimizer.jit_compile = False
    optimizer.build(model.trainable_variables)
    return optimizer


def make_train_step(
    model: tf.keras.Model,
    optimizer: tf.keras.optimizers.Optimizer,
    loss_fn: Callable,
    *,
    channels_last: bool = False,
    compiled: bool = False,
    dtype: str = "float32",
    micro_batches: int = 1,
) -> Callable:
    """Return `step(x, y) -> loss` with all that is asked for; the defaults are the plain step.

    x: a tensor or a structure of tensors, handed over as `fit` does: as one argument, but where the
    model's `call` needs several. y: a tensor or a structure; axis 0 of all tensors is the batch.
    loss: float32 scalar, the mean over the batch if `loss_fn` is a mean. channels_last: nothing to
    do for an ordinary Keras model. compiled: by XLA, the whole step; the first step compiles.
    dtype: "float32" or "bfloat16" layers over float32 variables; `loss_fn` gets float32.
    micro_batches: parts of equal size that a batch is cut into; their gradients add up to that of
    the mean.

    Raises ValueError for an unknown dtype, a model without variables or with bfloat16 ones and
    fewer than one micro-batch; the step does for a batch that cannot be cut into equal parts.
    NotImplementedError for channels_last with channels_first layers, which cannot be switched once
    built, and for bfloat16 in tf_keras, which cannot switch a built model either.
    """
    policies = _check(model, channels_last, dtype, micro_batches)
    variables = model.trainable_variables

    def gradients_of(x, y, share=1.0):
        with tf.GradientTape() as tape:
            output = _to_float32(_call(model, x, training=True))
            loss = share * _with_own_losses(loss_fn(output, y), model)
        return loss, tape.gradient(loss, variables)

    def accumulated(x, y):
        total, found = 0.0, []
        # Written out part by part: XLA's CPU backend runs convolutions in a loop of the graph many
        # times slower. Each part waits for the sums before it, since parts that run side by side
        # would keep all their activations at the same time.
        for part in _parts(x, y, micro_batches):
            sums = [g for g in found if g is not None]
            with tf.control_dependencies(tf.nest.flatten(sums, expand_composites=True)):
                part_x, part_y = tf.nest.map_structure(tf.identity, part)
            loss, gradients = gradients_of(part_x, part_y, 1.0 / micro_batches)
            total += loss
            found = list(map(_sum, found or len(variables) * [None], gradients))
        return total, found

    # Outermost, so that the update is in XLA's program too.
    @tf.function(jit_compile=compiled)
    def step(x, y):
        with _applied(policies):  # the layers look at their policy while they are traced
            loss, gradients = gradients_of(x, y) if micro_batches == 1 else accumulated(x, y)
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return loss

    return step


def _check(model: tf.keras.Model, channels_last: bool, dtype: str, micro_batches: int) -> list:
    """Check the settings against the model; return (layer, policy to trace it with)."""
    if dtype not in _POLICIES:
        raise ValueError(f"unknown dtype {dtype!r}: choose one of {', '.join(_POLICIES)}")
    if micro_batches < 1:
        raise ValueError(f"micro_batches must be at least 1, not {micro_batches}")
    if not model.built:
        raise ValueError("the model has no variables yet: call it once on an example input")
    layers = list(model._flatten_layers())  # those inside layers too
    formats = {layer.data_format for layer in layers if hasattr(layer, "data_format")}
    if channels_last and formats - {"channels_last"}:
        raise NotImplementedError("a built Keras layer keeps its data_format: build channels_last")
    if dtype == "float32":
        return []
    if type(model).dtype_policy.fset is None:
        raise NotImplementedError(
            "tf_keras cannot switch a built model: use Keras 3, or build the model after"
            f" tf_keras.mixed_precision.set_global_policy({_POLICIES[dtype]!r})"
        )
    for variable in model.trainable_variables:
        if variable.dtype in ("bfloat16", "float16"):
            raise ValueError(f"master weights are float32, but {variable.path} is {variable.dtype}")
    return [(layer, _POLICIES[dtype]) for layer in layers if layer.dtype_policy.name == "float32"]


@contextmanager
def _applied(policies: list) -> Iterator[None]:
    """Give each layer its policy until the context ends: for one trace, at no cost to the step."""
    before = [layer.dtype_policy for layer, _ in policies]
    try:
        for layer, policy in policies:
            layer.dtype_policy = policy
        yield
    finally:
        for (layer, _), policy in zip(policies, before, strict=True):
            layer.dtype_policy = policy


def _parts(x, y, count: int) -> list[tuple]:
    """(x, y) cut along the batch, whose size a trace knows, into `count` parts of equal size."""
    sizes = {leaf.shape[0] if leaf.shape.rank else None for leaf in tf.nest.flatten((x, y))}
    if len(sizes) > 1 or sizes & {None}:
        found = ", ".join("unknown" if size is None else str(size) for size in sizes)
        raise ValueError(f"the tensors of x and y need one batch size, known in the trace: {found}")
    size = sizes.pop()
    if size % count:
        raise ValueError(f"a batch of {size} cannot be cut into {count} parts of equal size")
    size //= count
    return [
        tf.nest.map_structure(lambda v, start=start: v[start : start + size], (x, y))
        for start in range(0, count * size, size)
    ]


def _sum(old, new):
    """Add gradients; None is none, and an embedding's slices stay slices, as in the plain step."""
    if old is None or new is None:
        return new if old is None else old
    if isinstance(new, tf.IndexedSlices):
        values = tf.concat([old.values, new.values], axis=0)
        indices = tf.concat([old.indices, new.indices], axis=0)
        return tf.IndexedSlices(values, indices, new.dense_shape)
    return old + new


def _to_float32(tree):
    """Cast the bfloat16 and float16 tensors of a tensor, tuple, list or dict to float32."""
    half = (tf.bfloat16, tf.float16)
    return tf.nest.map_structure(lambda v: tf.cast(v, tf.float32) if v.dtype in half else v, tree)


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


def main() -> None:
    """Print the ladder on the digits CNN, rung by rung, in interleaved samples."""
    import os
    import statistics
    import tempfile
    import time
    from pathlib import Path

    from shared import datasets
    from shared.specs import TASKS
    from shared.weights import init_weights
    from tf_impl.kit import data, models, runtime, training

    runtime.configure(threads=os.cpu_count() or 1, seed=0)
    task = TASKS["digits-cnn"]
    with tempfile.TemporaryDirectory() as folder:
        x, y = datasets.load(datasets.materialise(task.dataset, Path(folder)), "train")
        batches = datasets.first_batches(x, y, task.compute_batch, 10, seed=0)
    batches = data.resident_batches(batches)
    rungs, settings = {"baseline": {}}, {}
    for name, value in (
        ("channels_last", True),
        ("compiled", True),
        ("dtype", "bfloat16"),
        ("micro_batches", 2),
    ):
        settings = settings | {name: value}
        rungs[f"+ {name}"] = settings
    steps, losses, taken = {}, {}, {name: [] for name in rungs}
    for name, settings in rungs.items():
        model = models.build(task.model, init_weights(task.model, seed=0))
        optimizer = make_optimizer(model, learning_rate=task.recipe.learning_rate)
        steps[name] = make_train_step(model, optimizer, training.cross_entropy, **settings)
    for _ in range(20):
        for name, step in steps.items():
            start = time.perf_counter()
            for batch in batches:
                losses[name] = step(*batch)
            runtime.synchronize()
            taken[name].append((time.perf_counter() - start) / len(batches))
    print(f"digits-cnn, batch {task.compute_batch}: ms a step, ratio, loss after 200 steps")
    for name, times in taken.items():
        seconds, first = statistics.median(times), statistics.median(taken["baseline"])
        loss = runtime.to_float(losses[name])
        print(f"{name:16}{seconds * 1e3:8.2f}{seconds / first:7.2f}{loss:9.4f}")


if __name__ == "__main__":
    main()
