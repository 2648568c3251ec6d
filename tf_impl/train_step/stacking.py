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

    x: a tensor, or a tuple of the model's positional arguments; y: a tensor or tuple; axis 0 of
    all their tensors is the batch. loss: float32 scalar, the mean over the batch if `loss_fn` is a
    mean. channels_last: nothing to do for an ordinary Keras model. compiled: by XLA, the whole
    step; the first step compiles. dtype: "float32" or "bfloat16" layers over float32 variables;
    `loss_fn` gets float32. micro_batches: parts of equal size that a batch is cut into; their
    gradients add up to that of the mean.

    Raises ValueError for an unknown dtype, a model without variables or with bfloat16 ones and
    fewer than one micro-batch; the step does for a batch that cannot be cut into equal parts.
    NotImplementedError for channels_last with channels_first layers, which cannot be switched once
    built, and for bfloat16 in tf_keras, which cannot switch a built model either.
    """
    policies = _check(model, channels_last, dtype, micro_batches)
    variables = model.trainable_variables

    def gradients_of(x, y):
        with tf.GradientTape() as tape:
            output = model(*x, training=True) if isinstance(x, tuple) else model(x, training=True)
            loss = loss_fn(_to_float32(output), y)
            loss = sum((tf.cast(term, loss.dtype) for term in model.losses), loss)
        return loss, tape.gradient(loss, variables)

    def accumulated(x, y):
        total, sums = 0.0, [tf.zeros(v.shape, v.dtype) for v in variables]
        # Written out part by part: XLA's CPU backend runs convolutions in a loop of the graph many
        # times slower. Each part waits for the sums before it, since parts that run side by side
        # would keep all their activations at the same time.
        for part in _parts(x, y, micro_batches):
            with tf.control_dependencies(sums):
                part_x, part_y = tf.nest.map_structure(tf.identity, part)
            loss, gradients = gradients_of(part_x, part_y)
            total += loss
            # A sparse gradient becomes dense; a variable that the loss does not reach has none.
            pairs = zip(sums, gradients, strict=True)
            sums = [s if g is None else s + tf.convert_to_tensor(g) for s, g in pairs]
        return total / micro_batches, [s / micro_batches for s in sums]

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
    size = (x[0] if isinstance(x, tuple) else x).shape[0]
    if size % count:
        raise ValueError(f"a batch of {size} cannot be cut into {count} parts of equal size")
    size //= count
    return [
        tf.nest.map_structure(lambda v, start=start: v[start : start + size], (x, y))
        for start in range(0, count * size, size)
    ]


def _to_float32(tree):
    """Cast the bfloat16 and float16 tensors of a tensor, tuple, list or dict to float32."""
    half = (tf.bfloat16, tf.float16)
    return tf.nest.map_structure(lambda v: tf.cast(v, tf.float32) if v.dtype in half else v, tree)


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
