"""Compilation: capture a train step or a model as graphs, and turn those into machine code.

What it changes: who runs the operators. Eager, Python asks for one kernel after the other; a
captured graph runs without Python (`tf.function`); a compiler fuses neighbouring operators into
kernels of its own, which saves trips to memory (XLA: `tf.function(jit_compile=True)`). Results
differ by rounding, since sums are taken in another order; and XLA draws other dropout masks than a
graph from the same seeds, with an algorithm of its own.

Its twin: `pt_impl/train_step/compilation.py`.

Where the frameworks differ and why:
- XLA makes one program of forward, loss, gradients and update. `torch.compile` makes at least three
  graphs of the same step, because it breaks at `loss.backward()` and around the update.
- What XLA cannot compile raises an error; what `torch.compile` cannot trace runs in Python, unless
  its `fullgraph_train_step` forbids it. `compile_optimizer` there is part of the step here.
- Another shape: XLA compiles for each shape; torch compiles again, then for any size of that axis.
- XLA has no modes (`mode`), by default no cache on disk, and needs no C++ compiler; torch has all
  three, and TorchScript, an old compiler (`traced_model`, `scripted_model`).
- Keras brings `fit`. With its default jit_compile="auto", Keras 3 does not use XLA on a machine
  that has only CPUs; on one with a GPU it does, where every layer supports it and no distribution
  strategy is used. tf_keras never does by itself. `steps_per_execution` runs that many batches in
  one graph, so that Python is asked once for all of them (`fit_loop`). PyTorch has no `fit`.

When it helps and when it hurts: it helps elementwise work between products (normalisation, GELU,
losses, updates) and, on a GPU, many small kernels. On a CPU XLA has convolutions of its own, not
oneDNN's, which can make a CNN slower. The first call compiles: that time over the time saved in
a step is the break-even.

Run it alone: `python -m tf_impl.train_step.compilation` prints eager against compiled steps.

Copy with it: nothing.
"""

import inspect
import time
from collections.abc import Callable
from fnmatch import fnmatchcase
from functools import partial
from operator import attrgetter

import tensorflow as tf

Model, Optimizer = tf.keras.Model, tf.keras.optimizers.Optimizer
_functions = attrgetter("library.function")  # of a GraphDef


def compile_function(function: Callable) -> Callable:
    """The function as one program of XLA; its first call compiles, and that of each new shape.

    What XLA cannot compile raises TensorFlow's own error then. Source: "Use XLA with tf.function",
    tensorflow.org/xla.
    """
    return tf.function(function, jit_compile=True)


def apply_compile(model: Model, *, blocks: str = "") -> Model:
    """Have the model, or layers of it, run as programs of XLA, forward and backward.

    Whoever calls them runs the program; what lies between them stays as it is.

    Args:
        model: changed in place.
        blocks: comma-separated names of layers at any depth, or patterns ("block*"): each is a
            program by itself. "" makes one of the model as a whole.

    Returns:
        The model.

    Raises:
        ValueError: before anything is changed, a name that no layer has. NotImplementedError: when
            the model is traced, a layer that gives a Keras mask or adds a loss, which would not get
            out of its program.
    """
    layers = _find_layers(model, blocks) if blocks.strip(" ,") else [model]
    for layer in layers:
        compiled = tf.function(partial(_checked, layer, layer.call), jit_compile=True)
        signature = inspect.signature(layer.call)
        layer.call = partial(compiled)  # Keras would track the function itself
        layer.call.__signature__ = signature  # who calls it asks what it takes
    return model


def eager_train_step(model: Model, optimizer: Optimizer, loss_fn: Callable) -> Callable:
    """Make the step as Python runs it: operator by operator, without `tf.function`.

    Args:
        model, optimizer: as ever; the model has its variables.
        loss_fn: `loss_fn(output, y)` returns a scalar.

    Returns:
        `step(x, y) -> loss`, on the device. x: a tensor or a structure of tensors, handed over as
        `fit` does: as one argument, but where the model's `call` needs several.

    Raises:
        ValueError: the model has no variables yet.
    """
    _check_built(model)
    variables = model.trainable_variables

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = _with_own_losses(loss_fn(_call(model, x, training=True), y), model.losses)
            scaled = _scaled(loss, optimizer)
        gradients = tape.gradient(scaled, variables)
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return loss

    return step


def graph_train_step(model: Model, optimizer: Optimizer, loss_fn: Callable) -> Callable:
    """Make the step as one `tf.function`, as TensorFlow is used: grappler's graph, no XLA.

    Source: "Better performance with tf.function", tensorflow.org/guide.

    Args, Returns, Raises: as in `eager_train_step`.
    """
    return tf.function(eager_train_step(model, optimizer, loss_fn), jit_compile=False)


def compiled_train_step(model: Model, optimizer: Optimizer, loss_fn: Callable) -> Callable:
    """Make the whole step as one program of XLA; the first call compiles.

    Args, Returns, Raises: as in `eager_train_step`, and what `compile_function` says.
    """
    step = eager_train_step(model, optimizer, loss_fn)
    if not hasattr(optimizer, "build"):
        raise NotImplementedError(
            "a legacy optimizer: take the one of its name in keras.optimizers"
        )
    if not getattr(optimizer, "built", False):  # XLA makes no variables
        optimizer.build(model.trainable_variables)
    return compile_function(step)


def compiled_model_train_step(
    model: Model, optimizer: Optimizer, loss_fn: Callable, *, blocks: str = ""
) -> Callable:
    """Make the step with the model alone as programs of XLA; loss and update stay in the graph.

    Args, Returns: as in `eager_train_step`; blocks as in `apply_compile`, "" compiles the model as
    a whole.

    Raises:
        As `apply_compile`; NotImplementedError, when the model is traced, for a loop, as in an LSTM
        that is not unrolled, whose steps the gradient cannot reach.
    """
    _check_built(model)
    variables = model.trainable_variables
    whole = not blocks.strip(" ,")
    if not whole:
        apply_compile(model, blocks=blocks)

    @tf.function(jit_compile=whole)  # and with it its gradient
    def forward(x):
        # The gradient would be that of the inputs too, which a train step does not need.
        x = tf.nest.map_structure(tf.stop_gradient, x)
        return _call(model, x, training=True), model.losses

    @tf.function(jit_compile=False)
    def step(x, y):
        with tf.GradientTape() as tape:
            output, losses = forward(x)
            loss = _with_own_losses(loss_fn(output, y), losses)
            scaled = _scaled(loss, optimizer)
        gradients = tape.gradient(scaled, variables)
        _refuse_lists_at_borders(tf.compat.v1.get_default_graph())
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return loss

    return step


def fit_loop(
    model: Model, optimizer: Optimizer, loss_fn: Callable, *, steps_per_execution: int = 1
) -> Callable:
    """Make a loop that trains through `model.fit`, and times it.

    Args:
        model, optimizer, loss_fn: as in `eager_train_step`. tf_keras hands labels (n,) to the loss
            as (n, 1).
        steps_per_execution: batches that one call of Keras's graph trains on; else its defaults.

    Returns:
        `loop(batches) -> (seconds, loss)`. batches: (x, y) of equal shapes, x as the model takes it
        in `fit`. The first call is left out of `seconds`, and with it what `fit` does once an
        epoch. So that only whole calls are timed, the batches are repeated to fill them, and
        `seconds` is scaled to len(batches) - 1 steps; a single batch is trained on once. loss: the
        mean over all batches, a float. `loop.calls()`: how many calls the last loop made.

    Raises:
        ValueError: fewer than one step a call. The loop: NotImplementedError in Keras 3 for several
        outputs with labels in another structure, of which `fit` makes a loss for each output.
    """
    if steps_per_execution < 1:
        raise ValueError(f"steps_per_execution must be at least 1, not {steps_per_execution}")

    class Loss(tf.keras.losses.Loss):
        """`loss_fn` as it is; Keras's own `__call__` would make labels floating-point numbers."""

        def __call__(self, y_true, y_pred, sample_weight=None):
            return loss_fn(y_pred, y_true)

    class Clock(tf.keras.callbacks.Callback):
        """Notes when each call has ended: Keras has read the loss on the host by then."""

        def on_train_batch_end(self, batch, logs=None):
            ends.append(time.perf_counter())

    model.compile(optimizer=optimizer, loss=Loss(), steps_per_execution=steps_per_execution)
    ends: list[float] = []

    def loop(batches):
        ends.clear()
        _refuse_other_labels(model, batches[0][1])
        timed_calls = -(-(len(batches) - 1) // steps_per_execution)
        steps = (1 + timed_calls) * steps_per_execution if timed_calls else 1
        stacked = tf.nest.map_structure(lambda *parts: tf.stack(parts), *batches)
        source = tf.data.Dataset.from_tensor_slices(stacked).repeat().take(steps)
        history = model.fit(source, shuffle=False, verbose=0, callbacks=[Clock()])
        each = (ends[-1] - ends[0]) / max(1, timed_calls * steps_per_execution)
        return each * (len(batches) - 1), history.history["loss"][0]

    loop.calls = lambda: len(ends)
    return loop


def _refuse_other_labels(model: Model, y) -> None:
    outputs = getattr(model, "output", None)
    kinds = [kind for kind in (dict, (list, tuple)) if isinstance(outputs, kind)]
    if hasattr(tf.keras, "StatelessScope") and kinds and not isinstance(y, kinds[0]):
        raise NotImplementedError(
            f"`fit` of Keras 3 has a loss for each of the model's {len(outputs)} outputs: give"
            " labels for each, or take a step (`graph_train_step`)"
        )


def eager_predict(model: Model) -> Callable:
    """Make `predict(x) -> output` in evaluation mode, eager; x as in `eager_train_step`."""

    def predict(x):
        return _call(model, x, training=False)

    return predict


def graph_predict(model: Model) -> Callable:
    """Predict with a `tf.function`; a smaller batch makes a graph for any size."""
    return tf.function(eager_predict(model), jit_compile=False, reduce_retracing=True)


def compiled_predict(model: Model, *, blocks: str = "") -> Callable:
    """Predict with a program of XLA for each shape; blocks as in `compiled_model_train_step`."""
    whole = not blocks.strip(" ,")
    if not whole:
        apply_compile(model, blocks=blocks)
    return tf.function(eager_predict(model), jit_compile=whole, reduce_retracing=True)


def _find_layers(model: Model, blocks: str) -> list:
    """The layers that `blocks` names, but for those inside another of them."""
    layers = list(dict.fromkeys(model._flatten_layers(include_self=False)))
    chosen = []
    for pattern in filter(None, map(str.strip, blocks.split(","))):
        own = [layer for layer in layers if fnmatchcase(layer.name, pattern)]
        if not own:
            known = ", ".join(layer.name for layer in layers)
            raise ValueError(f"blocks: the model has no layer {pattern!r}; it has {known}")
        chosen += own
    inside = {id(part) for one in chosen for part in one._flatten_layers(include_self=False)}
    return [layer for layer in dict.fromkeys(chosen) if id(layer) not in inside]


def _checked(layer, call, /, *args, **kwargs):
    """Call, and refuse what would be lost at the border of a program."""
    known = sum(len(part._losses) for part in layer._flatten_layers())
    outputs = call(*args, **kwargs)
    if sum(len(part._losses) for part in layer._flatten_layers()) > known:
        raise NotImplementedError(f"{layer.name!r} adds a loss, which XLA's program would keep")
    if any(getattr(v, "_keras_mask", None) is not None for v in tf.nest.flatten(outputs)):
        raise NotImplementedError(f"{layer.name!r} gives a mask, which XLA's program would keep")
    return outputs


def _refuse_lists_at_borders(graph: tf.Graph) -> None:
    """Refuse a forward program that hands a loop's list of values on to the backward program.

    XLA keeps such lists inside of a program only, and says so when the program first runs.
    """
    for function in _functions(graph.as_graph_def()):
        outputs = function.signature.output_arg
        if function.attr["_XlaMustCompile"].b and tf.variant in [arg.type for arg in outputs]:
            error = NotImplementedError(
                "the model has a loop (an LSTM or GRU that is not unrolled), and XLA cannot hand"
                " what it kept on to the backward program: compile the whole step, unroll it,"
                " or name other blocks"
            )
            error.ag_pass_through = True  # else AutoGraph wraps the line in a page of its own
            raise error


def _check_built(model: Model) -> None:
    if not model.built:
        raise ValueError("the model has no variables yet: call it once on an example input")


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


def _with_own_losses(loss, losses):
    """Add the model's own losses (of regularisers, of `add_loss`) as `fit` does, in float32."""
    loss = tf.cast(loss, tf.float32) if loss.dtype.size < 4 else loss
    return sum((tf.cast(term, loss.dtype) for term in losses), loss)


def _scaled(loss, optimizer):
    """The loss to take gradients of: Keras 3's LossScaleOptimizer divides them by its scale."""
    return optimizer.scale_loss(loss) if hasattr(optimizer, "scale_loss") else loss


def main() -> None:
    """Print eager against compiled steps on the digits CNN, in interleaved samples."""
    import os

    from shared.specs import TASKS
    from shared.weights import init_weights
    from tf_impl.kit import models, runtime, training

    runtime.configure(threads=os.cpu_count() or 1, seed=0)
    task, steps, times = TASKS["digits-cnn"], {}, {}
    x, y = tf.random.normal((128, 32, 32, 1)), tf.range(128, dtype=tf.int64) % 10
    for make in (eager_train_step, graph_train_step, compiled_train_step):
        model = models.build(task.model, init_weights(task.model, seed=0))
        optimizer = training.make_optimizer(model, task.recipe)
        steps[make.__name__] = make(model, optimizer, training.cross_entropy)
    for name, step in 100 * list(steps.items()):
        start = time.perf_counter()
        step(x, y)
        runtime.synchronize()
        times.setdefault(name, []).append(time.perf_counter() - start)
    for name, samples in times.items():
        print(f"{name:26} first {samples[0]:5.2f} s, then {1e3 * sorted(samples)[50]:6.2f} ms")


if __name__ == "__main__":
    main()
