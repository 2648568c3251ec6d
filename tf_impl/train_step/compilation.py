"""Compilation: machine code for the whole train step, instead of one operator after another.

    step = compiled_train_step(model, optimizer, loss_fn)  # a whole step, or
    model.compile(..., jit_compile=True, steps_per_execution=10)  # with Keras's own loop, `fit`

What it changes: how operators run. In eager mode Python calls one kernel after another. A captured
graph runs without Python. A compiler also fuses neighbouring operators into one kernel, which saves
memory traffic. Results differ by rounding, since sums are taken in another order.
- From the same seeds, XLA (`jit_compile=True`) draws other dropout masks than a graph.

Its twin: `pt_impl/train_step/compilation.py`, which says where the frameworks differ.

When it helps and when it hurts: it speeds up elementwise work between matrix products:
normalisation, GELU, losses, updates. On a GPU it also helps with many small kernels. Convolutions
and matrix products gain little: libraries compute them either way. The first calls compile. That
time divided by the time saved per step is the break-even.
- On a CPU XLA uses its own convolutions, not oneDNN's, which can make a CNN slower.

Run it alone: `python -m tf_impl.train_step.compilation` compares eager with compiled steps.

Copy with it: `tf_impl/kit/calling.py`, `tf_impl/kit/checks/compilation.py`.
"""

import inspect
from collections.abc import Callable
from functools import partial

import tensorflow as tf

from tf_impl.kit.calling import add_own_losses, at_least_float32, call, scale_loss
from tf_impl.kit.checks import compilation as checks

Model, Optimizer = tf.keras.Model, tf.keras.optimizers.Optimizer


def compile_function(function: Callable) -> Callable:
    """Return the function as one program of XLA; its first call compiles, as does each new shape.

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
        ValueError: before anything is changed, a name that no layer has. NotImplementedError:
            before that, a layer that looks up or hashes words; when the model is traced, one that
            gives a Keras mask or adds a loss, which would not get out of its program.
    """
    layers = checks.check_blocks(model, blocks) if blocks.strip(" ,") else [model]
    checks.check_xla(*layers)
    for layer in layers:
        compiled = tf.function(partial(_called, layer, layer.call), jit_compile=True)
        signature = inspect.signature(layer.call)
        layer.call = partial(compiled)  # Keras would track the function itself
        layer.call.__signature__ = signature  # who calls it asks what it takes
    return model


def _called(layer, forward: Callable, /, *args, **kwargs):
    with checks.check_losses(layer):
        outputs = forward(*args, **kwargs)
    checks.check_masks(layer, outputs)
    return outputs


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
    checks.check_compilation(model)
    variables = model.trainable_variables

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = add_own_losses(loss_fn(call(model, x, training=True), y), model)
            scaled = scale_loss(loss, optimizer)
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

    Args, Returns, Raises: as in `eager_train_step`, and what `compile_function` says;
    NotImplementedError for a legacy optimizer of tf_keras, and a layer that looks up or hashes
    words.
    """
    step = eager_train_step(model, optimizer, loss_fn)
    checks.check_xla(model)
    checks.check_optimizer(optimizer)
    optimizer.build(model.trainable_variables)  # XLA makes no variables
    return compile_function(step)


def compiled_model_train_step(
    model: Model, optimizer: Optimizer, loss_fn: Callable, *, blocks: str = ""
) -> Callable:
    """Make the step with only the model as programs of XLA; loss and update stay in the graph.

    Args, Returns: as in `eager_train_step`; blocks as in `apply_compile`, "" compiles the model as
    a whole.

    Raises:
        As `apply_compile`; NotImplementedError, when the model is traced, for a loop, as in an LSTM
        that is not unrolled, whose steps the gradient cannot reach.
    """
    checks.check_compilation(model)
    variables = model.trainable_variables
    whole = not blocks.strip(" ,")
    if whole:
        checks.check_xla(model)
    else:
        apply_compile(model, blocks=blocks)

    @tf.function(jit_compile=whole)  # and with it its gradient
    def forward(x):
        # The gradient would be that of the inputs too, which a train step does not need.
        x = tf.nest.map_structure(tf.stop_gradient, x)
        return call(model, x, training=True), model.losses

    @tf.function(jit_compile=False)
    def step(x, y):
        with tf.GradientTape() as tape:
            output, own_losses = forward(x)
            loss = at_least_float32(loss_fn(output, y))
            loss = sum((tf.cast(term, loss.dtype) for term in own_losses), loss)
            scaled = scale_loss(loss, optimizer)
        gradients = tape.gradient(scaled, variables)
        checks.check_borders(tf.compat.v1.get_default_graph())
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return loss

    return step


def eager_predict(model: Model) -> Callable:
    """Make `predict(x) -> output` in evaluation mode, eager; x as in `eager_train_step`."""

    def predict(x):
        return call(model, x, training=False)

    return predict


def graph_predict(model: Model) -> Callable:
    """Predict with a `tf.function`; a smaller batch makes a graph for any size."""
    return tf.function(eager_predict(model), jit_compile=False, reduce_retracing=True)


def compiled_predict(model: Model, *, blocks: str = "") -> Callable:
    """Predict with a program of XLA for each shape; blocks as in `compiled_model_train_step`.

    Raises as `apply_compile`.
    """
    whole = not blocks.strip(" ,")
    if whole:
        checks.check_xla(model)
    else:
        apply_compile(model, blocks=blocks)
    return tf.function(eager_predict(model), jit_compile=whole, reduce_retracing=True)


def main() -> None:
    """Print eager against compiled steps on the digits CNN, and how long the first call takes."""
    import time

    from tf_impl.kit.demo import Demo

    demo, steps = Demo("digits-cnn"), {}
    for make in (eager_train_step, graph_train_step, compiled_train_step):
        steps[make.__name__] = step = make(*demo.build())
        start = time.perf_counter()
        step(*demo.batches[0])
        print(f"{make.__name__:26} first call {time.perf_counter() - start:6.2f} s")
    for name, ms in demo.times(steps).items():
        print(f"{name:26} then {ms:12.2f} ms a step")


if __name__ == "__main__":
    main()
