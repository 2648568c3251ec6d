"""Where NaN begins: the batch, and the first non-finite input, variable, layer or gradient.

    step = make_checked_step(step, model, loss_fn)  # raises FloatingPointError and says where
    print(find_nonfinite(model, loss_fn, x, y))  # or, of one batch that is at hand

What it changes: nothing. `find_nonfinite` runs one batch forward and back, and names what is NaN or
infinite first, in the order of cause: the inputs, the weights, the layers as they finish, the loss,
the gradients from the loss back. `make_checked_step` checks the loss and the weights after every
step. If a step ruined them, it restores the previous weights and finds the cause.

Its twin: `pt_impl/recipes/nonfinite.py`, which says where the frameworks differ.

When it helps and when it hurts: use it after a loss became NaN, in a second run. A checked step
copies all weights and waits for the device, so don't use it in every run.

Run it alone: `python -m tf_impl.recipes.nonfinite` prints a checked step's cost and its message.

Copy with it: `shared/findings.py`, `tf_impl/kit/calling.py`, `tf_impl/kit/values.py`.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count

import tensorflow as tf

from shared.findings import Report, leaves
from tf_impl.kit.calling import call, call_loss, unchanged
from tf_impl.kit.calling import layers as layers_of
from tf_impl.kit.values import nonfinite, values_of


def find_nonfinite(
    model: tf.keras.Model, loss: Callable, x, y, *, batch: int = 0, strict: bool = False
) -> Report:
    """Run one batch forward and back; if loss or gradients are not finite, name what is so first.

    The model runs as in training, eagerly; its variables are left as they were.

    Args:
        model, x: x is the one input, or the arguments of a `call` that takes several.
        loss: `loss(output, y)`, or one of Keras, with the labels first.
        batch: its number, for the report.
        strict: raise ValueError with the report, if anything was found.
    """
    state = [*leaves(x, "x"), *leaves(y, "y")]
    state += [(f"variable {_path(each)}", each) for each in model.variables]
    causes = [(name, nonfinite(values_of(leaf))) for name, leaf in state]
    with _watched(model) as layers, unchanged(model), tf.GradientTape() as tape:
        value = tf.reduce_mean(call_loss(loss, call(model, x, training=True), y))
    trained = model.trainable_variables
    gradients = tape.gradient(value, trained)
    value = float(value)
    ends = [("loss", "" if math.isfinite(value) else f"it is {value:g}")]
    for variable, gradient in reversed(list(zip(trained, gradients, strict=True))):
        dense = None if gradient is None else tf.convert_to_tensor(gradient).numpy()
        ends.append((f"gradient of {_path(variable)}", nonfinite(dense)))

    report = Report(f"batch {batch}")
    if any(text for _, text in ends):
        place, text = next(each for each in (*causes, *layers, *ends) if each[1])
        report.add("not finite", f"batch {batch}: {place}", text)
    if strict:
        report.raise_if_found()
    return report


@contextmanager
def _watched(model: tf.keras.Model) -> Iterator[list[tuple[str, str]]]:
    """Yield a list that gets (layer, what is wrong) of each output that is not finite."""
    found = []

    def looking(layer, call, *args, **kwargs):
        output = call(*args, **kwargs)
        for leaf in tf.nest.flatten(output):
            # Within a layer's own graph values are not known.
            if hasattr(leaf, "numpy") and (text := nonfinite(values_of(leaf))):
                found.append((f"output of layer {layer.name}", text))
        return output

    inner = [layer for layer in layers_of(model) if layer is not model]
    own = [(layer, vars(layer).get("call")) for layer in inner]  # what was set on the layer itself
    for layer in inner:
        layer.call = partial(looking, layer, layer.call)
    try:
        yield found
    finally:
        for layer, before in own:
            if before is None:
                del layer.call
            else:
                layer.call = before


def _path(variable) -> str:
    return getattr(variable, "path", variable.name)


def make_checked_step(step: Callable, model: tf.keras.Model, loss: Callable) -> Callable:
    """Return `step(x, y) -> loss` that raises FloatingPointError where NaN or infinity begins.

    The model then has the weights and other variables of before the step; the optimizer has not.

    Args:
        step: any `step(x, y)` that returns its loss. The optimizer and the scale of a
            mixed-precision step are passed on.
        model, loss: what the step trains; see `find_nonfinite`.
    """
    numbers = count()

    def checked(x, y):
        number = next(numbers)
        before = [tf.identity(variable) for variable in model.variables]
        value = step(x, y)
        seen = [value, *model.trainable_variables]
        if all(bool(tf.reduce_all(tf.math.is_finite(each))) for each in seen):
            return value
        for variable, kept in zip(model.variables, before, strict=True):
            variable.assign(kept)
        report = find_nonfinite(model, loss, x, y, batch=number)
        if not report.findings:
            text = "the step is not finite, but its loss and gradients are when run again"
            report.add("not finite", f"batch {number}: step", text)
        raise FloatingPointError(str(report.findings[0]))

    for name in {"loss_scale", "optimizer"} & set(dir(step)):
        setattr(checked, name, getattr(step, name))
    return checked


def main() -> None:
    """Print what a checked step costs, and what it says of a batch with NaN."""
    from tf_impl.kit import training
    from tf_impl.kit.demo import Demo

    demo = Demo("digits-cnn")
    model, optimizer, loss_fn = demo.build()
    step = training.make_train_step(model, optimizer, loss_fn)
    checked = make_checked_step(step, model, loss_fn)
    for name, ms in demo.times({"plain": step, "checked": checked}).items():
        print(f"{name:8}{ms:8.2f} ms a step")
    x, y = demo.batches[0]
    try:
        checked(x * math.nan, y)
    except FloatingPointError as error:
        print(error)


if __name__ == "__main__":
    main()
