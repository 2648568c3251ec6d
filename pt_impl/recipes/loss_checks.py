"""Loss checks: whether a loss fits a model's output, and how much gradient is left.

    print(check_loss(model, loss_fn, x, y))  # on one batch, before the first training
    gradient_by_margin(lambda logits, y: F.nll_loss(logits.softmax(-1).log(), y))

What it changes: nothing. A loss for logits runs with probabilities, too, but after two softmaxes it
learns little, without an error. `check_loss` compares what the model returns (logits,
probabilities, log-probabilities) with what the loss expects. It finds out by the loss of equally
likely classes. `gradient_by_margin` shows how much gradient is left the more confidently a model is
wrong. A loss over probabilities loses it.

Its twin: `tf_impl/recipes/loss_checks.py`.

Where the frameworks differ and why:
- PyTorch: `CrossEntropyLoss` takes only logits. `log(softmax)` for `NLLLoss` gives NaN gradients if
  a sample is wrong by 90 in logits, while the loss is still finite. From 17 on, `BCELoss` has no
  gradient left.
- TensorFlow: Keras's losses take probabilities unless `from_logits=True`, and clip them at 1e-7.
  From 17 on, no gradient is left. In a graph they find the logits before a softmax or sigmoid and
  lose nothing, unless a cast, a reshape or a copy is in between.
- Classes may be the second axis in PyTorch. They are the last in TensorFlow.
- Keras's losses take the labels first. Both orders work here.

When it helps and when it hurts: use it before the first training with a new loss or head. It needs
one batch. A loss that is not a cross-entropy is not judged, and the report says so.

Run it alone: `python -m pt_impl.recipes.loss_checks` prints gradients, and reports of two losses.

Copy with it: `pt_impl/kit/calling.py`, `pt_impl/kit/values.py`, `shared/findings.py`.
"""

import math
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pt_impl.kit import calling
from pt_impl.kit.values import nonfinite
from shared.findings import Report

MARGINS = (1, 5, 10, 14, 15, 16, 17, 18, 20, 25, 30, 50, 80, 90, 100, 105, 120, 200)


def check_loss(model: nn.Module, loss: Callable, x, y, *, strict: bool = False) -> Report:
    """Compare what the model gives with what `loss(outputs, y)` takes, on one batch.

    Args:
        model, x: a tuple is the model's arguments, a mapping its keywords, all else its one input.
            The model runs in evaluation mode, and is left as it was.
        loss: of the logits, or of the output that has them as `.logits` or under "logits".
        y: what the loss takes. Classes are the last axis of the outputs, or the second one where
            the labels say so.
        strict: raise ValueError with the report, if anything was found.

    Raises:
        ValueError: the model's output is more than one tensor, or the loss reads more of it than
            its logits.
    """
    outputs = _outputs(model, x)
    outputs, loss, y = _classes_last(outputs, _of_logits(loss, outputs, y), y)
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
        elif takes == "probabilities" and (text := _precision(loss, kind, outputs, y)):
            report.add("precision", "loss", text)
        if text := nonfinite(outputs):
            report.add("not finite", "the model's output", text)
    if strict:
        report.raise_if_found()
    return report


def gradient_by_margin(loss: Callable, *, num_classes: int = 10) -> dict[int, float]:
    """Return margin -> what of the right gradient is left, of 1, NaN where it is not finite.

    Args:
        loss: `loss(logits, y)`, for one sample that is wrong by the margin.
        num_classes: 1 for a sigmoid, whose labels are float.
    """
    label = torch.zeros(1, 1) if num_classes == 1 else torch.zeros(1, dtype=torch.int64)

    def norm(function: Callable, z: Tensor) -> float:
        z.requires_grad_()
        (gradient,) = torch.autograd.grad(function(z, label).mean(), z)
        return float(gradient.double().norm())

    def right(z: Tensor, y: Tensor) -> Tensor:
        if num_classes == 1:
            return F.binary_cross_entropy_with_logits(z, y.double())
        return F.cross_entropy(z, y)

    found = {}
    for margin in MARGINS:
        z = torch.zeros(1, num_classes)
        z[0, -1] = margin
        share = norm(loss, z) / norm(right, z.detach().double())
        found[margin] = share if math.isfinite(share) else math.nan
    return found


def _form_of_loss(loss: Callable, outputs: Tensor, y) -> tuple[str, str]:
    """("softmax" | "sigmoid", what the loss takes), by its value at equal probabilities."""
    classes = outputs.shape[-1] if outputs.ndim > 1 else 1
    many = isinstance(y, Tensor) and y.is_floating_point() and y.shape == outputs.shape
    many = many and not _sums_to_one(y, -1)  # several labels a sample
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
        value = _value(loss, torch.full_like(outputs, constant), y)
        fits = math.isclose(value, math.log(equally_likely), rel_tol=_rounding(outputs))
        if fits and (kind, form) == ("softmax", "logits"):
            fits = _ignores_a_shift(loss, outputs, y)
        if fits:
            return kind, form
    return "", "neither logits nor probabilities"


def _ignores_a_shift(loss: Callable, outputs: Tensor, y) -> bool:
    """A softmax does; a loss that divides probabilities by their sum does not."""
    row = torch.linspace(0.1, 0.9, outputs.shape[-1]).to(outputs).expand_as(outputs)
    return math.isclose(_value(loss, row, y), _value(loss, row + 1, y), rel_tol=_rounding(outputs))


@torch.no_grad()
def _value(loss: Callable, outputs: Tensor, y) -> float:
    return loss(outputs, y).float().mean().item()


def _rounding(outputs: Tensor) -> float:
    """How far apart losses may be that are the same."""
    return 1e-2 if outputs.dtype == torch.bfloat16 else 1e-3


def _form_of_outputs(outputs: Tensor, kind: str) -> str:
    outputs = outputs.float()
    unit = bool(((outputs >= 0) & (outputs <= 1)).all())
    if kind == "sigmoid":
        return "probabilities" if unit else "logits"
    if unit and _sums_to_one(outputs, -1):
        return "probabilities"
    if bool((outputs <= 0).all()) and _sums_to_one(outputs.exp(), -1):
        return "log-probabilities"
    return "logits"


def _sums_to_one(values: Tensor, axis: int) -> bool:
    return values.is_floating_point() and bool(((values.sum(axis) - 1).abs() < 1e-2).all())


def _advice(takes: str, gives: str, kind: str, outputs: Tensor) -> str:
    text = f"it takes {takes}, the model gives {gives}"
    if (takes, gives) == ("logits", "probabilities"):
        # The best that probabilities can be as logits: 1 for the right class, 0 for the others.
        classes = outputs.shape[-1] if kind == "softmax" else 2
        least = math.log(math.e + classes - 1) - 1
        which = "sample" if kind == "softmax" else "positive sample"
        return f"{text}: a {kind} twice; a {which}'s loss cannot fall below {least:.3g}"
    wanted = "a loss over logits" if gives == "logits" else f"a loss over {gives}"
    return f"{text}: use {wanted}"


def _precision(loss: Callable, kind: str, outputs: Tensor, y) -> str:
    """Say where the gradient through the model's own softmax or sigmoid is lost, "" if nowhere."""
    classes = outputs.shape[-1] if kind == "softmax" else 1
    one_hot = isinstance(y, Tensor) and y.is_floating_point()

    def composed(z: Tensor, label: Tensor) -> Tensor:
        if kind == "sigmoid":  # two samples of as many axes as theirs: losses squeeze some away
            return loss(_two_like(z, outputs).sigmoid(), _two_like(label, y))
        label = F.one_hot(label, classes).to(z.dtype) if one_hot else label
        return loss(z.softmax(-1), label)

    for margin, share in gradient_by_margin(composed, num_classes=classes).items():
        if not share > 0.5:
            left = "not finite" if math.isnan(share) else f"{share:.2g} of what is right"
            text = f"the gradient of a sample that is wrong by {margin} in logits is {left}"
            return f"{text}: use a loss over logits"
    return ""


def _two_like(value: Tensor, other: Tensor) -> Tensor:
    return value.reshape([1] * other.ndim).expand(2, *[1] * (other.ndim - 1))


def _classes_last(outputs: Tensor, loss: Callable, y) -> tuple[Tensor, Callable, object]:
    """All with the classes as the last axis, where labels say that they are the second's.

    Labels (n, ...), or a distribution over the classes for each. Where both could be, they are the
    last.
    """
    if not isinstance(y, Tensor) or outputs.ndim < 3:
        return outputs, loss, y
    if y.shape == outputs.shape and _sums_to_one(y, 1) and not _sums_to_one(y, -1):
        moved = outputs.movedim(1, -1), y.movedim(1, -1)
        return moved[0], lambda o, y: loss(o.movedim(-1, 1), y.movedim(-1, 1)), moved[1]
    if y.shape == outputs.shape[:-1] or y.shape != outputs.shape[:1] + outputs.shape[2:]:
        return outputs, loss, y
    return outputs.movedim(1, -1), lambda o, y: loss(o.movedim(-1, 1), y), y


class _Output(dict):
    """Logits, as an output has them."""

    @property
    def logits(self) -> Tensor:
        return self["logits"]


def _of_logits(loss: Callable, outputs: Tensor, y) -> Callable:
    """The loss of the logits, also where it looks for them in the model's output."""
    try:
        with torch.no_grad():
            loss(outputs, y)
    except (AttributeError, LookupError, TypeError):  # of `output.logits`, of `output["logits"]`
        pass
    else:
        return loss
    try:
        with torch.no_grad():
            loss(_Output(logits=outputs), y)
    except (AttributeError, LookupError) as error:
        raise ValueError(
            "the loss reads more of the model's output than logits, such as a loss that"
            " the model computes: give one of logits"
        ) from error
    return lambda logits, y: loss(_Output(logits=logits), y)


def _outputs(model: nn.Module, x) -> Tensor:
    """The model's output in evaluation mode, one tensor."""
    outputs = calling.logits(calling.infer(model, x))
    if not isinstance(outputs, Tensor):
        raise ValueError(f"the model's output must be one tensor, not {type(outputs).__name__}")
    return outputs


def _scaled(x, factor: float):
    x = dict(x) if isinstance(x, Mapping) else x
    return calling.map_tensors(lambda t: t * factor if t.is_floating_point() else t, x)


def main() -> None:
    """Print what is left of gradients, and reports of a loss over logits and one that is not."""
    from pt_impl.kit import training
    from pt_impl.kit.demo import Demo

    demo = Demo("digits-cnn")
    model = demo.build()[0]

    def over_probabilities(logits, y):
        return F.nll_loss(logits.softmax(-1).log(), y)

    print("wrong by   over logits   over probabilities")
    left = [gradient_by_margin(loss) for loss in (F.cross_entropy, over_probabilities)]
    for margin in (1, 50, 80, 90):
        print(f"{margin:8}{left[0][margin]:14.3f}{left[1][margin]:21.3f}")
    for loss in (F.cross_entropy, training.probability_cross_entropy):
        print(check_loss(model, loss, *demo.batches[0]))


if __name__ == "__main__":
    main()
