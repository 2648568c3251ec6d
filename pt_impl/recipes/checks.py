"""Checks of data and loss: faults that train without an error, found before they cost a run.

What it changes: nothing. Each check returns a report whose text is a few lines, or raises it.

- `check_data`: NaN and infinity, values beyond a range, labels that are no class, classes out of
  balance.
- `check_splits`: samples that are in two splits, byte by byte.
- `check_loss`: a model that gives probabilities to a loss over logits, or the reverse, and a loss
  over probabilities that loses its gradient where the model is confidently wrong.
- `gradient_by_margin`: what of the gradient is left, for any function of logits.
- `find_nonfinite`, `make_checked_step`: the batch and the first input, parameter, layer or gradient
  that is not finite.

Its twin: `tf_impl/recipes/checks.py`.

Where the frameworks differ and why:
- A label that is no class raises an IndexError here on a CPU and ends the process's CUDA context on
  a GPU; -100 is ignored in silence. TensorFlow raises on a CPU and gives a NaN loss on a GPU.
- `CrossEntropyLoss` takes logits alone. Who computes `log(softmax)` for `NLLLoss` gets gradients of
  NaN where a sample is wrong by 90 in logits, while its loss is still finite; `BCELoss` has no
  gradient left from 17 on. Keras's losses take probabilities unless told `from_logits=True`, and
  clip them at 1e-7: none is left from 17 on, unless they find the logits behind the softmax.
- Modules have hooks, which see each layer's output. A Keras layer has none: its `call` is wrapped.

When it helps and when it hurts: before the first training on new data, and after a loss that became
NaN. `check_data` and `check_splits` read the data once, `check_splits` keeps 16 bytes a sample.
`make_checked_step` copies all weights and waits for the device in every step: for the run that
failed, not for all. What it finds is a fault for sure (NaN, a label that is no class) or by your
limits (range, balance); near duplicates and wrong labels it cannot find.

Run it alone: `python -m pt_impl.recipes.checks` checks the digits, and prints each cost.

Copy with it: nothing.
"""

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

MARGINS = (1, 5, 10, 14, 15, 16, 17, 18, 20, 25, 30, 50, 80, 90, 100, 105, 120, 200)


@dataclass(frozen=True)
class Finding:
    """One fault: which check, where, and what."""

    check: str
    place: str
    text: str

    def __str__(self) -> str:
        return f"{self.check}: {self.place}: {self.text}"


@dataclass
class Report:
    """What was looked at and what was found; its text is a line for each."""

    looked_at: str
    findings: list[Finding] = field(default_factory=list)

    def __str__(self) -> str:
        if not self.findings:
            return f"{self.looked_at}: nothing found"
        return "\n".join(
            [f"{self.looked_at}: {len(self.findings)} found", *map(str, self.findings)]
        )

    def raise_if_found(self) -> None:
        """Raise ValueError with the report's text unless it is clean."""
        if self.findings:
            raise ValueError(str(self))


def check_data(
    data: Iterable,
    *,
    num_classes: int = 0,
    low: float = -math.inf,
    high: float = math.inf,
    imbalance: float = 10.0,
    ignore_label: int = -100,
    strict: bool = False,
) -> Report:
    """Look at all batches of `data` once.

    data: batches (x, y) or x, each a tensor, an array or a dict, tuple or list of them; a
    DataLoader, or a Dataset of samples. What is no pair, such as a dict or (x, y, weights), is x
    alone. num_classes: integer labels are 0 to num_classes - 1; of 0, only negative ones are
    faults. low, high: of the values of x. imbalance: how many times as many samples as the rarest
    class the most frequent one may have; counted where a sample has one label. strict: raise what
    is found. Raises ValueError for no batch, and for `num_classes` of batches without labels.
    """
    tally, counts, classes = _Tally(), [0, 0], {}
    for number, batch in enumerate(_batches(data)):
        x, y = _split(batch)
        leaves = [*_leaves(x, "x"), *_leaves(y, "y")]
        _check_labelled(leaves, num_classes)
        counts[0], counts[1] = number + 1, counts[1] + _length(leaves)
        for name, leaf in leaves:
            values = _tensor(leaf)
            if values is None or not values.numel():
                continue
            limits = (low, high) if name.startswith("x") else (-math.inf, math.inf)
            _check_values(tally, name, number, torch.atleast_1d(values), *limits)
            if name.startswith("y") and values.ndim:
                seen = _check_labels(tally, name, number, values, num_classes, ignore_label)
                for label, count in seen:
                    classes.setdefault(name, {}).setdefault(label, 0)
                    classes[name][label] += count
    if not counts[1]:
        raise ValueError("there is no batch to check")
    report = Report(f"{_many(counts[0], 'batch')}, {_many(counts[1], 'sample')}", tally.findings())
    for name, seen in classes.items():
        report.findings += _balance(name, seen, num_classes, imbalance)
    return _finished(report, strict)


def check_splits(first: Iterable, second: Iterable, *, strict: bool = False) -> Report:
    """Look for samples whose x is in both, the same in every byte; `data` as in `check_data`."""
    places: dict[bytes, int] = {}
    for number, digest in enumerate(_digests(first)):
        places.setdefault(digest, number)
    twice, total = [], 0
    for number, digest in enumerate(_digests(second)):
        total += 1
        if digest in places:
            twice.append((number, places[digest]))
    report = Report(f"{total} samples beside {len(places)} different ones")
    if twice:
        some = ", ".join(f"{one} is its {other}" for one, other in twice[:3])
        text = f"{_many(len(twice), 'sample')} of the second also in the first: {some}"
        report.findings.append(Finding("duplicate", "x", text + (", ..." if twice[3:] else "")))
    return _finished(report, strict)


def check_loss(model: nn.Module, loss: Callable, x, y, *, strict: bool = False) -> Report:
    """Compare what the model gives with what `loss(outputs, y)` takes, on one batch.

    loss: of the logits, or of the output that has them as `.logits` or under "logits". What it
    takes is told by its value where all classes are equally likely. A loss that is not a
    cross-entropy is not judged: the report says so. The model is left as it was.
    """
    outputs = _outputs(model, x)
    outputs, loss, y = _classes_last(outputs, _of_logits(loss, outputs, y), y)
    kind, takes = _form_of_loss(loss, outputs, y)
    report = Report(f"a batch of {len(outputs)}, whose loss takes {takes}")
    if takes == "neither logits nor probabilities":
        return _finished(report, strict)
    gives = _form_of_outputs(outputs, kind)
    if gives == "probabilities" and kind == "sigmoid":
        # Logits may be between 0 and 1 by chance; those of a thousandfold input are not.
        gives = _form_of_outputs(_outputs(model, _times(x, 1000.0)), kind)
    report.looked_at += f" and whose model gives {gives}"
    # The logarithm of a softmax is its own softmax's logarithm: a loss over logits takes both.
    if takes != gives and (takes, gives) != ("logits", "log-probabilities"):
        report.findings.append(Finding("form", "loss", _advice(takes, gives, kind, outputs)))
    elif takes == "probabilities":
        report.findings += _precision(loss, kind, outputs, y)
    if not torch.isfinite(outputs).all():
        report.findings.append(Finding("not finite", "the model's output", _first_bad(outputs)))
    return _finished(report, strict)


def gradient_by_margin(loss: Callable, *, num_classes: int = 10) -> dict[int, float]:
    """Return margin -> what of the right gradient is left, of 1, NaN where it is not finite.

    loss: `loss(logits, y)`, such as `lambda z, y: nll(z.softmax(-1).log(), y)`, for one sample that
    is wrong by the margin. num_classes: 1 for a sigmoid, whose labels are float.
    """
    found = {}
    for margin in MARGINS:
        z = torch.zeros(1, num_classes)
        z[0, -1] = margin
        label = torch.zeros(1, 1) if num_classes == 1 else torch.zeros(1, dtype=torch.int64)
        z.requires_grad_()
        (gradient,) = torch.autograd.grad(loss(z, label).mean(), z)
        norm = float(gradient.double().norm())
        found[margin] = norm / _right_gradient(margin, num_classes)
        if not math.isfinite(norm):
            found[margin] = math.nan
    return found


def find_nonfinite(
    model: nn.Module, loss: Callable, x, y, *, batch: int = 0, strict: bool = False
) -> Report:
    """Run one batch forward and back; if loss or gradients are not finite, name what is so first.

    In the order of cause: x, y, parameters and buffers, layers as they finish, the loss, gradients
    from the loss back. The model runs in its mode; weights, buffers, gradients and the random state
    are left as they were. batch: its number, for the report.
    """
    report = Report(f"batch {batch}")
    layers: list[tuple[str, str]] = []

    def look(name: str):
        def hook(module, inputs, output) -> None:
            for _, leaf in _leaves(output, ""):
                values = _tensor(leaf)
                if values is not None and not torch.isfinite(values).all():
                    layers.append((name, _first_bad(values)))

        return hook

    # With its place: a model may put another tensor there.
    buffers = [
        (module, name, buffer, buffer.clone())
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
    ]
    state = [*_leaves(x, "x"), *_leaves(y, "y")]
    state += [(f"parameter {name}", each) for name, each in model.named_parameters()]
    state += [(f"buffer {name}", each) for name, each in model.named_buffers()]
    hooks = [m.register_forward_hook(look(name or "model")) for name, m in model.named_modules()]
    trained = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    try:
        with torch.random.fork_rng(_cuda_devices(model)), torch.enable_grad():
            value = loss(_call(model, x), y).mean()
            wanted = [p for _, p in trained]
            gradients = torch.autograd.grad(value, wanted, allow_unused=True) if wanted else ()
    finally:
        for each in hooks:
            each.remove()
        for module, name, buffer, kept in buffers:
            buffer.data.copy_(kept)
            setattr(module, name, buffer)
    named = [(n, g) for (n, _), g in zip(trained, gradients, strict=True) if g is not None]
    bad = [(f"gradient of {name}", _first_bad(g)) for name, g in reversed(named)]
    bad = [(place, text) for place, text in bad if text]
    value = value.item()
    if not math.isfinite(value) or bad:
        causes = [(name, _first_bad(values)) for name, values in _numeric(state)]
        causes += [(f"output of layer {name}", text) for name, text in layers]
        causes += [("loss", "" if math.isfinite(value) else f"it is {value:g}"), *bad]
        place, text = next((place, text) for place, text in causes if text)
        report.findings.append(Finding("not finite", f"batch {batch}: {place}", text))
    return _finished(report, strict)


def make_checked_step(step: Callable, model: nn.Module, loss: Callable) -> Callable:
    """Return `step(x, y) -> loss` that raises FloatingPointError where NaN or infinity begins.

    The model then has the weights and buffers of before the step; the optimizer has not. The step
    copies all weights first, and waits for its loss. It saves and resumes the scaler of a
    mixed-precision step as the given one does.
    """
    numbers = iter(range(2**63))

    def checked(x, y):
        number = next(numbers)
        kept = [tensor.detach().clone() for tensor in _tensors(model)]
        value = step(x, y)
        figure = value.item() if isinstance(value, Tensor) else value
        if math.isfinite(figure) and all(torch.isfinite(p).all() for p in model.parameters()):
            return value
        with torch.no_grad():
            for tensor, before in zip(_tensors(model), kept, strict=True):
                tensor.copy_(before)
        report = find_nonfinite(model, loss, x, y, batch=number)
        if not report.findings:
            text = "the step is not finite, but its loss and gradients are when run again"
            report.findings.append(Finding("not finite", f"batch {number}: step", text))
        raise FloatingPointError(str(report.findings[0]))

    for name in {"loss_scale", "state_dict", "load_state_dict"} & set(dir(step)):
        setattr(checked, name, getattr(step, name))
    return checked


def _tensors(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]


class _Tally:
    """Faults by check and place: how many values, in how many samples, and the first."""

    def __init__(self) -> None:
        self.found: dict[tuple[str, str], list] = {}

    def add(self, check: str, name: str, number: int, bad: Tensor, what: str) -> None:
        """bad: a mask of the batch's shape; what: of the first batch in which it is."""
        values = int(bad.sum())
        if not values:
            return
        rows = bad.reshape(len(bad), -1).any(1)
        first = f"first in batch {number}, sample {int(rows.nonzero()[0])}"
        entry = self.found.setdefault((check, name), [0, 0, first, what])
        entry[0] += values
        entry[1] += int(rows.sum())

    def findings(self) -> list[Finding]:
        return [
            Finding(
                check,
                name,
                f"{_many(values, 'value')} in {_many(samples, 'sample')}, {first}{what}",
            )
            for (check, name), (values, samples, first, what) in self.found.items()
        ]


def _many(count: int, what: str) -> str:
    plural = what + ("es" if what.endswith("ch") else "s")
    return f"{count} {what if count == 1 else plural}"


def _check_labelled(leaves: list, num_classes: int) -> None:
    if num_classes and not any(name.startswith("y") for name, _ in leaves):
        raise ValueError("num_classes is given, but a batch has no labels: each must be (x, y)")


def _check_values(
    tally: _Tally, name: str, number: int, values: Tensor, low: float, high: float
) -> None:
    if values.dtype == torch.bool:
        return
    least, most = (edge.item() for edge in torch.aminmax(values))  # NaN where one is
    if low <= least and most <= high and math.isfinite(least) and math.isfinite(most):
        return
    if not values.is_floating_point():
        values = values.long()  # bytes would wrap what they are compared with
    tally.add("nan", name, number, values.isnan(), "")
    tally.add("infinity", name, number, values.isinf(), "")
    finite = values.isfinite()
    outside = finite & ((values < low) | (values > high))
    if outside.any():
        least, most = (edge.item() for edge in torch.aminmax(values[finite]))
        what = f": from {least:.4g} to {most:.4g}, not within {low:g} to {high:g}"
        tally.add("range", name, number, outside, what)


def _check_labels(
    tally: _Tally, name: str, number: int, values: Tensor, num_classes: int, ignore: int
) -> list[tuple[int, int]]:
    """Add what is no label; return (class, count) where each sample has one label."""
    one_each = values.ndim == 1 or (values.ndim == 2 and values.shape[1] == 1)
    if values.is_floating_point():
        if num_classes < 2 or values.ndim != 2 or values.shape[1] != num_classes:
            return []
        apart = ((values.sum(1) - 1).abs() > 1e-3) | (values < 0).any(1)
        tally.add("label", name, number, apart, ": they are not distributions over the classes")
        values, one_each = values[~apart].argmax(1), True
    elif values.dtype == torch.bool:
        return []
    values = values.long()  # bytes would wrap what they are compared with
    bad = values < 0
    if num_classes:
        bad |= values >= num_classes
    bad &= values != ignore
    if bad.any():
        some = ", ".join(str(each) for each in values[bad].unique()[:5].tolist())
        valid = f"0 to {num_classes - 1}" if num_classes else "0 or more"
        tally.add("label", name, number, bad, f": {some}, not {valid}")
    if not one_each:
        return []
    labels, counts = values[~bad & (values != ignore)].unique(return_counts=True)
    return list(zip(labels.tolist(), counts.tolist(), strict=True))


def _balance(name: str, seen: dict[int, int], num_classes: int, imbalance: float) -> list[Finding]:
    found = []
    absent = [str(label) for label in range(num_classes) if label not in seen]
    if absent:
        text = f"no sample of class {', '.join(absent[:5])}{', ...' if absent[5:] else ''}"
        found.append(Finding("balance", name, text))
    rare, frequent = min(seen, key=seen.get), max(seen, key=seen.get)
    if seen[frequent] > imbalance * seen[rare]:
        text = f"class {frequent} has {_many(seen[frequent], 'sample')}, class {rare} {seen[rare]}"
        found.append(Finding("balance", name, text))
    return found


def _digests(data: Iterable) -> Iterator[bytes]:
    """A hash of each sample's x, with its names, dtypes and shapes."""
    for batch in _batches(data):
        leaves = _leaves(_split(batch)[0], "x")
        rows = []
        for name, leaf in leaves:
            if _is_one(leaf):
                continue
            values = _tensor(leaf)
            if values is None:
                rows.append([f"{name} {text!r}".encode() for text in leaf])
                continue
            head = f"{name} {values.dtype} {tuple(values.shape[1:])} ".encode()
            size = math.prod(values.shape[1:])  # which reshape cannot tell of no sample
            flat = values.cpu().contiguous().reshape(len(values), size)
            flat = flat.view(torch.uint8).numpy()
            rows.append([head + row.tobytes() for row in flat])
        for parts in zip(*rows, strict=True):
            yield hashlib.blake2b(b"".join(parts), digest_size=16).digest()


def _classes_last(outputs: Tensor, loss: Callable, y) -> tuple[Tensor, Callable, object]:
    """All with the classes as the last axis, where labels say that they are the second's.

    Labels (n, ...), or a distribution over the classes for each. Where both could be, they are the
    last.
    """
    shape = tuple(outputs.shape)
    if not isinstance(y, Tensor) or len(shape) < 3:
        return outputs, loss, y
    if y.shape == shape and _sums_to_one(y, 1) and not _sums_to_one(y, -1):
        moved = outputs.movedim(1, -1), y.movedim(1, -1)
        return moved[0], lambda o, y: loss(o.movedim(-1, 1), y.movedim(-1, 1)), moved[1]
    if y.shape == shape[:-1] or y.shape != shape[:1] + shape[2:]:
        return outputs, loss, y
    return outputs.movedim(1, -1), lambda o, y: loss(o.movedim(-1, 1), y), y


class _Output(dict):
    """Logits, as an output has them."""

    @property
    def logits(self) -> Tensor:
        return self["logits"]


def _of_logits(loss: Callable, outputs: Tensor, y) -> Callable:
    """The loss of logits alone, also where it looks for them in the model's output."""
    try:
        with torch.no_grad():
            loss(outputs, y)
    except (AttributeError, IndexError):  # of `output.logits`, of `output["logits"]`
        return lambda logits, y: loss(_Output(logits=logits), y)
    return loss


def _sums_to_one(y: Tensor, axis: int) -> bool:
    return y.is_floating_point() and bool(((y.sum(axis) - 1).abs() < 1e-2).all())


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
    for kind, form, constant, count in cases:
        with torch.no_grad():
            value = loss(torch.full_like(outputs, constant), y).float().mean().item()
        fits = math.isclose(value, math.log(count), rel_tol=_rounding(outputs))
        if fits and (kind, form) == ("softmax", "logits"):
            fits = _ignores_a_shift(loss, outputs, y)
        if fits:
            return kind, form
    return "", "neither logits nor probabilities"


def _ignores_a_shift(loss: Callable, outputs: Tensor, y) -> bool:
    """A softmax does; a loss that divides probabilities by their sum does not."""
    row = torch.linspace(0.1, 0.9, outputs.shape[-1]).to(outputs).expand_as(outputs)
    with torch.no_grad():
        one, other = (loss(each, y).float().mean().item() for each in (row, row + 1))
    return math.isclose(one, other, rel_tol=_rounding(outputs))


def _rounding(outputs: Tensor) -> float:
    """How far apart losses may be that are the same."""
    return 1e-2 if outputs.dtype == torch.bfloat16 else 1e-3


def _form_of_outputs(outputs: Tensor, kind: str) -> str:
    outputs = outputs.float()
    unit = bool(((outputs >= 0) & (outputs <= 1)).all())
    if kind == "sigmoid":
        return "probabilities" if unit else "logits"
    if unit and bool(((outputs.sum(-1) - 1).abs() < 1e-2).all()):
        return "probabilities"
    negative = bool((outputs <= 0).all())
    if negative and bool(((outputs.exp().sum(-1) - 1).abs() < 1e-2).all()):
        return "log-probabilities"
    return "logits"


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


def _precision(loss: Callable, kind: str, outputs: Tensor, y) -> list[Finding]:
    """What is left of the gradient through the model's own softmax or sigmoid."""
    classes = outputs.shape[-1] if kind == "softmax" else 1
    likely = torch.softmax if kind == "softmax" else lambda z, dim: torch.sigmoid(z)
    one_hot = isinstance(y, Tensor) and y.is_floating_point() and kind == "softmax"

    def composed(z: Tensor, label: Tensor) -> Tensor:
        label = nn.functional.one_hot(label, classes).to(z.dtype) if one_hot else label
        if kind == "sigmoid":  # two samples of as many axes as theirs: losses squeeze some away
            z, label = _two_like(z, outputs), _two_like(label, y)
        return loss(likely(z, dim=-1), label)

    return _lost(gradient_by_margin(composed, num_classes=classes))


def _two_like(value: Tensor, other: Tensor) -> Tensor:
    return value.reshape([1] * other.ndim).expand(2, *[1] * (other.ndim - 1))


def _lost(shares: dict[int, float]) -> list[Finding]:
    for margin, share in shares.items():
        if not share > 0.5:
            left = "not finite" if math.isnan(share) else f"{share:.2g} of what is right"
            text = f"the gradient of a sample that is wrong by {margin} in logits is {left}"
            text += ": use a loss over logits"
            return [Finding("precision", "loss", text)]
    return []


def _right_gradient(margin: int, num_classes: int) -> float:
    """The norm of softmax(z) - onehot, or of sigmoid(z), in float64."""
    if num_classes == 1:
        return 1 / (1 + math.exp(-margin))
    z = np.zeros(num_classes)
    z[-1] = margin
    likely = np.exp(z - margin) / np.exp(z - margin).sum()
    likely[0] -= 1
    return float(np.linalg.norm(likely))


def _batches(data: Iterable) -> Iterator:
    """Batches of anything that has some; a dataset of samples is batched."""
    if isinstance(data, Dataset) and not isinstance(data, IterableDataset):
        data = DataLoader(data, batch_size=256)
    return iter(data)


def _split(batch) -> tuple:
    """(x, y) of a batch; a dict, or what is not a pair, is x alone."""
    if isinstance(batch, tuple | list) and len(batch) == 2:
        return tuple(batch)
    return batch, None


def _leaves(tree, name: str) -> list[tuple[str, object]]:
    """(name, leaf) of a structure; a list of numbers or strings is a leaf."""
    if tree is None:
        return []
    if isinstance(tree, Mapping):
        return [leaf for key in tree for leaf in _leaves(tree[key], f"{name}[{key!r}]")]
    if isinstance(tree, tuple | list) and not all(map(_is_one, tree)):
        return [leaf for at, each in enumerate(tree) for leaf in _leaves(each, f"{name}[{at}]")]
    return [(name, tree)]


def _is_one(value) -> bool:
    """Whether it is a number or a text: of one sample in a list, of the whole batch by itself."""
    return isinstance(value, int | float | str | bytes) or getattr(value, "ndim", None) == 0


def _tensor(leaf) -> Tensor | None:
    """The leaf as a tensor; None where it is text, which has no value to check."""
    if isinstance(leaf, tuple | list):
        leaf = [each.item() if isinstance(each, Tensor) else each for each in leaf]
    if not isinstance(leaf, Tensor):
        array = np.asarray(leaf)
        if array.dtype.kind in "SUOT":
            return None
        leaf = torch.as_tensor(array)
    if leaf.dtype in (torch.uint16, torch.uint32, torch.uint64):
        return leaf.long()  # torch compares none of these
    return torch.view_as_real(leaf.detach()) if leaf.is_complex() else leaf.detach()


def _numeric(leaves) -> list[tuple[str, Tensor]]:
    found = [(name, _tensor(leaf)) for name, leaf in leaves]
    return [(name, values) for name, values in found if values is not None]


def _length(leaves: list) -> int:
    """How many samples a batch has; raises where its parts disagree."""
    lengths = {name: len(leaf) for name, leaf in leaves if not _is_one(leaf)}
    if not lengths:
        raise ValueError("a batch is empty: neither x nor y has a tensor")
    if len(set(lengths.values())) > 1:
        raise ValueError(f"parts of a batch have different lengths: {lengths}")
    return next(iter(lengths.values()))


def _first_bad(values: Tensor) -> str:
    """How many values are NaN or infinite, "" for none."""
    nan, infinite = int(values.isnan().sum()), int(values.isinf().sum())
    parts = [f"{nan} NaN"] * bool(nan) + [f"{infinite} infinite"] * bool(infinite)
    return f"{' and '.join(parts)} of {values.numel()} values" if parts else ""


def _times(x, factor: float):
    if isinstance(x, Mapping):
        return {key: _times(value, factor) for key, value in x.items()}
    if isinstance(x, tuple):
        return tuple(_times(value, factor) for value in x)
    return x * factor if isinstance(x, Tensor) and x.is_floating_point() else x


def _outputs(model: nn.Module, x) -> Tensor:
    """The model's output in evaluation mode, one tensor; modes are left as found."""
    modes = {module: module.training for module in model.modules()}
    try:
        with torch.no_grad():
            outputs = _call(model.eval(), x)
    finally:
        for module, mode in modes.items():
            if module.training != mode:
                module.train(mode)  # some do more in it, as LoRA does
    outputs = outputs["logits"] if isinstance(outputs, dict) and "logits" in outputs else outputs
    outputs = getattr(outputs, "logits", outputs)
    if not isinstance(outputs, Tensor):
        raise ValueError(f"the model's output must be one tensor, not {type(outputs).__name__}")
    return outputs


def _call(model: nn.Module, x):
    if isinstance(x, Mapping):
        return model(**x)
    return model(*x) if isinstance(x, tuple) else model(x)


def _cuda_devices(model: nn.Module) -> list:
    return list({p.device for p in model.parameters() if p.device.type == "cuda"})


def _finished(report: Report, strict: bool) -> Report:
    if strict:
        report.raise_if_found()
    return report


def main() -> None:
    """Check the digits and their model, and print what each check costs beside an epoch."""
    import tempfile
    import time
    from pathlib import Path

    from pt_impl.kit import data, models, training
    from shared import datasets
    from shared.specs import TASKS
    from shared.weights import init_weights

    task = TASKS["digits-cnn"]
    with tempfile.TemporaryDirectory() as folder:
        folder = datasets.materialise(task.dataset, Path(folder))
        x, y = data.to_device(*datasets.load(folder, "train"))
        test = data.to_device(*datasets.load(folder, "test"))
    model = models.build(task.model, init_weights(task.model, seed=0))
    optimizer = training.make_optimizer(model, task.recipe)
    loss = training.cross_entropy
    step = training.make_train_step(model, optimizer, loss)
    checked = make_checked_step(step, model, loss)
    batches = list(zip(x.split(64), y.split(64), strict=True))

    def timed(name: str, work: Callable) -> None:
        start = time.perf_counter()
        found = work()
        seconds = time.perf_counter() - start
        print(f"{name:18}{1000 * seconds:8.1f} ms", found if isinstance(found, Report) else "")

    step(*batches[0])
    timed("an epoch", lambda: [step(*batch) for batch in batches])
    timed("the same, checked", lambda: [checked(*batch) for batch in batches])
    timed("check_data", lambda: check_data(batches, num_classes=10, low=-10, high=10))
    timed("check_splits", lambda: check_splits(batches, [test]))
    timed("check_loss", lambda: check_loss(model, loss, *batches[0]))
    timed("find_nonfinite", lambda: find_nonfinite(model, loss, *batches[0]))


if __name__ == "__main__":
    main()
