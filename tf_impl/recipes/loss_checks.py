"""Loss checks: whether a loss fits a model's output, and how much gradient is left.

    print(check_loss(model, loss_fn, x, y))  # on one batch, before the first training
    loss = tf.keras.losses.SparseCategoricalCrossentropy()  # of probabilities
    gradient_by_margin(lambda logits, y: loss(y, tf.nn.softmax(logits)))

What it changes: nothing. A loss for logits runs with probabilities, too, but after two softmaxes it
learns little, without an error. `check_loss` compares what the model returns (logits,
probabilities, log-probabilities) with what the loss expects. It finds out by the loss of equally
likely classes. `gradient_by_margin` shows how much gradient is left the more confidently a model is
wrong. A loss over probabilities loses it.

Its twin: `pt_impl/recipes/loss_checks.py`, which says where the frameworks differ.

When it helps and when it hurts: use it before the first training with a new loss or head. It needs
one batch. A loss that is not a cross-entropy is not judged, and the report says so.

Run it alone: `python -m tf_impl.recipes.loss_checks` prints gradients, and reports of two losses.

Copy with it: `shared/findings.py`, `tf_impl/kit/calling.py`, `tf_impl/kit/values.py`.
"""

import math
from collections.abc import Callable

import numpy as np
import tensorflow as tf

from shared.findings import Report
from tf_impl.kit.calling import call, call_loss, logits
from tf_impl.kit.values import nonfinite, values_of

MARGINS = (1, 5, 10, 14, 15, 16, 17, 18, 20, 25, 30, 50, 80, 90, 100, 105, 120, 200)


def check_loss(model: tf.keras.Model, loss: Callable, x, y, *, strict: bool = False) -> Report:
    """Compare what the model gives with what `loss(outputs, y)` takes, on one batch.

    Args:
        model, x: x is the one input, or the arguments of a `call` that takes several. The model
            runs at inference.
        loss: of the logits, or one of Keras, with the labels first.
        y: what the loss takes. Classes are the last axis of the outputs.
        strict: raise ValueError with the report, if anything was found.

    Raises:
        ValueError: the model's output is more than one tensor.
    """
    outputs = _outputs(model, x)
    kind, takes = _form_of_loss(loss, outputs, y)
    report = Report(f"a batch of {len(outputs)}, whose loss takes {takes}")
    if kind:
        gives = _form_of_outputs(outputs, kind)
        if gives == "probabilities" and kind == "sigmoid":
            # Logits may be between 0 and 1 by chance; those of a thousandfold input are not.
            gives = _form_of_outputs(_outputs(model, _scaled(x, 1000.0)), kind)
        report.looked_at += f" and whose model gives {gives}"
        # The logarithm of a softmax is its own softmax's logarithm: a loss over logits takes both.
        if takes != gives and (takes, gives) != ("logits", "log-probabilities"):
            report.add("form", "loss", _advice(takes, gives, kind, outputs))
        elif takes == "probabilities":
            text = _precision(loss, kind, outputs, y, _logits_are_seen(model, x))
            if text:
                report.add("precision", "loss", text)
        if text := nonfinite(values_of(outputs)):
            report.add("not finite", "the model's output", text)
    if strict:
        report.raise_if_found()
    return report


def gradient_by_margin(loss: Callable, *, num_classes: int = 10) -> dict[int, float]:
    """Return margin -> what of the right gradient is left, of 1, NaN where it is not finite.

    Args:
        loss: `loss(logits, y)`, for one sample that is wrong by the margin. It runs in a graph, as
            in training.
        num_classes: 1 for a sigmoid, whose labels are float.
    """
    label = tf.zeros([1, 1]) if num_classes == 1 else tf.zeros([1], tf.int64)

    @tf.function(jit_compile=False)
    def norm(function: Callable, z: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            tape.watch(z)
            value = tf.reduce_mean(call_loss(function, z, label))
        return tf.norm(tf.cast(tape.gradient(value, z), tf.float64))

    def right(z: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        if num_classes == 1:
            return tf.nn.sigmoid_cross_entropy_with_logits(tf.cast(y, z.dtype), z)
        return tf.nn.sparse_softmax_cross_entropy_with_logits(y, z)

    found = {}
    for margin in MARGINS:
        z = tf.one_hot([num_classes - 1], num_classes, on_value=float(margin))
        share = float(norm(loss, z)) / float(norm(right, tf.cast(z, tf.float64)))
        found[margin] = share if math.isfinite(share) else math.nan
    return found


def _form_of_loss(loss: Callable, outputs: tf.Tensor, y) -> tuple[str, str]:
    """("softmax" | "sigmoid", what the loss takes), by its value at equal probabilities."""
    classes = outputs.shape[-1] if outputs.shape.rank > 1 else 1
    labels = np.asarray(y)
    many = not np.issubdtype(labels.dtype, np.integer) and labels.shape == tuple(outputs.shape)
    many = many and not _sums_to_one(labels)  # several labels a sample
    cases = [("sigmoid", "logits", 0.0, 2), ("sigmoid", "probabilities", 0.5, 2)]
    if classes > 1 and not many:
        cases = [
            ("softmax", "logits", 0.0, classes),
            ("softmax", "probabilities", 1 / classes, classes),
            *cases,
            # The last: a loss over probabilities may refuse what is below 0.
            ("softmax", "log-probabilities", -math.log(classes), classes),
        ]
    for kind, form, constant, equally_likely in cases:
        value = _value(loss, tf.ones_like(outputs) * constant, y)
        fits = math.isclose(value, math.log(equally_likely), rel_tol=_rounding(outputs))
        if fits and (kind, form) == ("softmax", "logits"):
            fits = _ignores_a_shift(loss, outputs, y)
        if fits:
            return kind, form
    return "", "neither logits nor probabilities"


def _ignores_a_shift(loss: Callable, outputs: tf.Tensor, y) -> bool:
    """A softmax does; a loss that divides probabilities by their sum does not."""
    row = tf.cast(tf.linspace(0.1, 0.9, outputs.shape[-1]), outputs.dtype)
    row = tf.broadcast_to(row, tf.shape(outputs))
    one, other = (_value(loss, each, y) for each in (row, row + 1))
    return math.isclose(one, other, rel_tol=_rounding(outputs))


def _value(loss: Callable, outputs: tf.Tensor, y) -> float:
    return float(tf.reduce_mean(call_loss(loss, outputs, y)))


def _rounding(outputs: tf.Tensor) -> float:
    """How far apart losses may be that are the same."""
    return 1e-2 if outputs.dtype == tf.bfloat16 else 1e-3


def _form_of_outputs(outputs: tf.Tensor, kind: str) -> str:
    values = tf.cast(outputs, tf.float32).numpy()
    unit = bool(((values >= 0) & (values <= 1)).all())
    if kind == "sigmoid":
        return "probabilities" if unit else "logits"
    if unit and _sums_to_one(values):
        return "probabilities"
    if bool((values <= 0).all()) and _sums_to_one(np.exp(values)):
        return "log-probabilities"
    return "logits"


def _sums_to_one(values: np.ndarray) -> bool:
    return bool((np.abs(values.sum(-1) - 1) < 1e-2).all())


def _advice(takes: str, gives: str, kind: str, outputs: tf.Tensor) -> str:
    text = f"it takes {takes}, the model gives {gives}"
    if (takes, gives) == ("logits", "probabilities"):
        # The best that probabilities can be as logits: 1 for the right class, 0 for the others.
        classes = outputs.shape[-1] if kind == "softmax" else 2
        least = math.log(math.e + classes - 1) - 1
        which = "sample" if kind == "softmax" else "positive sample"
        return f"{text}: a {kind} twice; a {which}'s loss cannot fall below {least:.3g}"
    wanted = "a loss over logits" if gives == "logits" else f"a loss over {gives}"
    return f"{text}: use {wanted}"


def _precision(loss: Callable, kind: str, outputs: tf.Tensor, y, seen: bool) -> str:
    """Say where the gradient through the model's own softmax or sigmoid is lost, "" if nowhere."""
    classes = outputs.shape[-1] if kind == "softmax" else 1
    one_hot = not np.issubdtype(np.asarray(y).dtype, np.integer)

    def composed(z: tf.Tensor, label: tf.Tensor) -> tf.Tensor:
        if kind == "sigmoid":  # two samples of as many axes as theirs: losses squeeze some away
            likely, label = tf.nn.sigmoid(_two_like(z, outputs)), _two_like(label, y)
        else:
            label = tf.one_hot(label, classes) if one_hot else label
            likely = tf.nn.softmax(z)
        return call_loss(loss, likely if seen else tf.identity(likely), label)

    for margin, share in gradient_by_margin(composed, num_classes=classes).items():
        if not share > 0.5:
            left = "not finite" if math.isnan(share) else f"{share:.2g} of what is right"
            text = f"the gradient of a sample that is wrong by {margin} in logits is {left}"
            return f"{text}: use a loss over logits"
    return ""


def _two_like(value: tf.Tensor, other) -> tf.Tensor:
    return tf.repeat(tf.reshape(value, [1] * len(other.shape)), 2, axis=0)


def _logits_are_seen(model: tf.keras.Model, x) -> bool:
    """Whether Keras's losses, called in the model's graph, find the logits behind its output."""
    seen = []

    @tf.function(jit_compile=False)
    def trace(x):
        outputs = _outputs(model, x)
        behind = hasattr(outputs, "_keras_logits") or outputs.op.type in ("Softmax", "Sigmoid")
        seen.append(behind)
        return outputs

    trace(tf.nest.map_structure(tf.convert_to_tensor, x))
    return seen[0]


def _outputs(model: tf.keras.Model, x) -> tf.Tensor:
    """The model's output at inference, one tensor."""
    outputs = logits(call(model, x))
    if not tf.is_tensor(outputs):
        raise ValueError(f"the model's output must be one tensor, not {type(outputs).__name__}")
    return outputs


def _scaled(x, factor: float):
    """The floats of x times `factor`."""
    return tf.nest.map_structure(
        lambda leaf: leaf * factor if np.issubdtype(np.asarray(leaf).dtype, np.floating) else leaf,
        x,
    )


def main() -> None:
    """Print what is left of gradients, and reports of a loss over logits and one that is not."""
    from tf_impl.kit import training
    from tf_impl.kit.demo import Demo

    demo = Demo("digits-cnn")
    model = demo.build()[0]
    cross_entropy = tf.keras.losses.sparse_categorical_crossentropy

    def over_logits(logits, y):
        return cross_entropy(y, logits, from_logits=True)

    def over_probabilities(logits, y):
        return cross_entropy(y, tf.identity(tf.nn.softmax(logits)))

    print("wrong by   over logits   over probabilities")
    left = [gradient_by_margin(loss) for loss in (over_logits, over_probabilities)]
    for margin in (1, 10, 15, 17):
        print(f"{margin:8}{left[0][margin]:14.3f}{left[1][margin]:21.3f}")
    for loss in (over_logits, training.probability_cross_entropy):
        print(check_loss(model, loss, *demo.batches[0]))


if __name__ == "__main__":
    main()
