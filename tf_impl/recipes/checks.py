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

Its twin: `pt_impl/recipes/checks.py`.

Where the frameworks differ and why:
- A label that is no class raises here on a CPU and gives a NaN loss on a GPU. PyTorch raises on a
  CPU, ends the process's CUDA context on a GPU, and ignores -100 in silence.
- Keras's losses take probabilities unless told `from_logits=True`, and clip them at 1e-7: of a
  sample that is wrong by 17 in logits no gradient is left. In a graph they look behind a softmax or
  sigmoid for its logits, and lose nothing, if nothing stands between: a cast, a reshape, a copy.
  PyTorch's `CrossEntropyLoss` takes logits alone; `log(softmax)` has gradients of NaN there from 90
  on, and `BCELoss` has none from 17 on.
- Keras's losses are called with the labels first: both orders are known here.
- A Keras layer has no hooks: its `call` is wrapped while the batch runs, eagerly. PyTorch's modules
  have hooks.

When it helps and when it hurts: before the first training on new data, and after a loss that became
NaN. `check_data` and `check_splits` read the data once, `check_splits` keeps 16 bytes a sample.
`make_checked_step` copies all weights and waits for the device in every step: for the run that
failed, not for all. What it finds is a fault for sure (NaN, a label that is no class) or by your
limits (range, balance); near duplicates and wrong labels it cannot find.

Run it alone: `python -m tf_impl.recipes.checks` checks the digits, and prints each cost.

Copy with it: nothing.
"""

import hashlib
import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import tensorflow as tf

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

    data: batches (x, y), (x, y, sample_weight) or x, each a tensor, an array or a dict, tuple or
    list of them; a `tf.data.Dataset` of batches, or a `keras.utils.PyDataset`. What is neither a
    pair nor three, such as a dict, is x alone. num_classes: integer labels are 0 to num_classes -
    1; of 0, only negative ones are faults. low, high: of the values of x. imbalance: how many times
    as many samples as the rarest class the most frequent one may have; counted where a sample has
    one label. strict: raise what is found. Raises ValueError for no batch, and for `num_classes` of
    batches without labels.
    """
    tally, counts, classes = _Tally(), [0, 0], {}
    for number, batch in enumerate(_batches(data)):
        leaves = _named(batch)
        _check_labelled(leaves, num_classes)
        counts[0], counts[1] = number + 1, counts[1] + _length(leaves)
        for name, leaf in leaves:
            values = _array(leaf)
            if values is None or not values.size:
                continue
            limits = (low, high) if name.startswith("x") else (-math.inf, math.inf)
            _check_values(tally, name, number, np.atleast_1d(values), *limits)
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


def check_loss(model: tf.keras.Model, loss: Callable, x, y, *, strict: bool = False) -> Report:
    """Compare what the model gives with what `loss(outputs, y)` takes, on one batch.

    loss: that, or one of Keras, with the labels first. What the loss takes is told by its value
    where all classes are equally likely. A loss that is not a cross-entropy is not judged: the
    report says so. The model is left as it was.
    """
    outputs = _outputs(model, x)
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
        report.findings += _precision(loss, kind, outputs, y, _logits_are_seen(model, x))
    if _first_bad(outputs.numpy()):
        place, text = "the model's output", _first_bad(outputs.numpy())
        report.findings.append(Finding("not finite", place, text))
    return _finished(report, strict)


def gradient_by_margin(loss: Callable, *, num_classes: int = 10) -> dict[int, float]:
    """Return margin -> what of the right gradient is left, of 1, NaN where it is not finite.

    loss: `loss(logits, y)`, such as `lambda z, y: cce(y, tf.nn.softmax(z))`, for one sample that is
    wrong by the margin; it runs in a graph, as in training. num_classes: 1 for a sigmoid, whose
    labels are float.
    """
    label = tf.zeros([1, 1]) if num_classes == 1 else tf.zeros([1], tf.int64)

    @tf.function(jit_compile=False)
    def gradient(z):
        with tf.GradientTape() as tape:
            tape.watch(z)
            value = tf.reduce_mean(_value(loss, z, label))
        return tape.gradient(value, z)

    found = {}
    for margin in MARGINS:
        z = tf.one_hot([num_classes - 1], num_classes, on_value=float(margin))
        norm = float(np.linalg.norm(gradient(z).numpy().astype(float)))
        found[margin] = norm / _right_gradient(margin, num_classes)
        if not math.isfinite(norm):
            found[margin] = math.nan
    return found


def find_nonfinite(
    model: tf.keras.Model, loss: Callable, x, y, *, batch: int = 0, strict: bool = False
) -> Report:
    """Run one batch forward and back; if loss or gradients are not finite, name what is so first.

    In the order of cause: x, y, variables, layers as they finish, the loss, gradients from the loss
    back. The model runs as in training, eagerly; its variables are left as they were. batch: its
    number, for the report.
    """
    report = Report(f"batch {batch}")
    layers: list[tuple[str, str]] = []
    state = [*_leaves(x, "x"), *_leaves(y, "y")]
    state += [(f"variable {_path(each)}", each) for each in model.variables]
    causes = [(name, _first_bad(values)) for name, values in _numeric(state)]
    # All: SpectralNormalization writes to its kernel.
    kept = [(v, tf.identity(v)) for v in model.variables]
    watched = _watch(model, layers)
    try:
        with tf.GradientTape() as tape:
            value = tf.reduce_mean(_value(loss, _call(model, x, training=True), y))
    finally:
        for layer, call in watched:
            if call is None:
                del layer.call
            else:
                layer.call = call
        for variable, before in kept:
            variable.assign(before)
    trained = model.trainable_variables
    pairs = zip(trained, tape.gradient(value, trained), strict=True)
    named = [(_path(v), tf.convert_to_tensor(g).numpy()) for v, g in pairs if g is not None]
    bad = [(f"gradient of {name}", _first_bad(g)) for name, g in reversed(named)]
    bad = [(place, text) for place, text in bad if text]
    value = float(value)
    if not math.isfinite(value) or bad:
        causes += [(f"output of layer {name}", text) for name, text in layers]
        causes += [("loss", "" if math.isfinite(value) else f"it is {value:g}"), *bad]
        place, text = next((place, text) for place, text in causes if text)
        report.findings.append(Finding("not finite", f"batch {batch}: {place}", text))
    return _finished(report, strict)


def make_checked_step(step: Callable, model: tf.keras.Model, loss: Callable) -> Callable:
    """Return `step(x, y) -> loss` that raises FloatingPointError where NaN or infinity begins.

    The model then has the weights and buffers of before the step; the optimizer has not. The step
    copies all weights first, and waits for its loss. It has the optimizer and the scale of a
    mixed-precision step as the given one has.
    """
    numbers = iter(range(2**63))

    def checked(x, y):
        number = next(numbers)
        kept = [tf.identity(variable) for variable in model.variables]
        value = step(x, y)
        seen = [value, *model.trainable_variables]
        if all(bool(tf.reduce_all(tf.math.is_finite(each))) for each in seen):
            return value
        for variable, before in zip(model.variables, kept, strict=True):
            variable.assign(before)
        report = find_nonfinite(model, loss, x, y, batch=number)
        if not report.findings:
            text = "the step is not finite, but its loss and gradients are when run again"
            report.findings.append(Finding("not finite", f"batch {number}: step", text))
        raise FloatingPointError(str(report.findings[0]))

    for name in {"loss_scale", "optimizer"} & set(dir(step)):
        setattr(checked, name, getattr(step, name))
    return checked


class _Tally:
    """Faults by check and place: how many values, in how many samples, and the first."""

    def __init__(self) -> None:
        self.found: dict[tuple[str, str], list] = {}

    def add(self, check: str, name: str, number: int, bad: np.ndarray, what: str) -> None:
        """bad: a mask of the batch's shape; what: of the first batch in which it is."""
        values = int(bad.sum())
        if not values:
            return
        rows = bad.reshape(len(bad), -1).any(1)
        first = f"first in batch {number}, sample {int(rows.argmax())}"
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
        raise ValueError(
            "num_classes is given, but a batch has no labels: each must be (x, y) or "
            "(x, y, sample_weight)"
        )


def _check_values(
    tally: _Tally, name: str, number: int, values: np.ndarray, low: float, high: float
) -> None:
    if values.dtype == bool:
        return
    least, most = float(values.min()), float(values.max())  # NaN where one is
    if low <= least and most <= high and math.isfinite(least) and math.isfinite(most):
        return
    tally.add("nan", name, number, np.isnan(values), "")
    tally.add("infinity", name, number, np.isinf(values), "")
    outside = np.isfinite(values) & ((values < low) | (values > high))
    if outside.any():
        finite = values[np.isfinite(values)]
        what = f": from {finite.min():.4g} to {finite.max():.4g}, not within {low:g} to {high:g}"
        tally.add("range", name, number, outside, what)


def _check_labels(
    tally: _Tally, name: str, number: int, values: np.ndarray, num_classes: int, ignore: int
) -> list[tuple[int, int]]:
    """Add what is no label; return (class, count) where each sample has one label."""
    one_each = values.ndim == 1 or (values.ndim == 2 and values.shape[1] == 1)
    if values.dtype == bool:
        return []
    if not np.issubdtype(values.dtype, np.integer):
        if num_classes < 2 or values.ndim != 2 or values.shape[1] != num_classes:
            return []
        apart = (np.abs(values.sum(1) - 1) > 1e-3) | (values < 0).any(1)
        tally.add("label", name, number, apart, ": they are not distributions over the classes")
        values, one_each = values[~apart].argmax(1), True
    bad = values < 0
    if num_classes:
        bad |= values >= num_classes
    bad &= values != ignore
    if bad.any():
        some = ", ".join(str(each) for each in np.unique(values[bad])[:5].tolist())
        valid = f"0 to {num_classes - 1}" if num_classes else "0 or more"
        tally.add("label", name, number, bad, f": {some}, not {valid}")
    if not one_each:
        return []
    labels, counts = np.unique(values[~bad & (values != ignore)], return_counts=True)
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
        rows = []
        for name, leaf in _named(batch):
            if not name.startswith("x") or _is_one(leaf):
                continue
            values = _array(leaf)
            if values is None:
                rows.append([f"{name} {text!r}".encode() for text in np.asarray(leaf).tolist()])
                continue
            head = f"{name} {values.dtype} {values.shape[1:]} ".encode()
            rows.append([head + row.tobytes() for row in values])
        for parts in zip(*rows, strict=True):
            yield hashlib.blake2b(b"".join(parts), digest_size=16).digest()


def _form_of_loss(loss: Callable, outputs: tf.Tensor, y) -> tuple[str, str]:
    """("softmax" | "sigmoid", what the loss takes), by its value at equal probabilities."""
    classes = outputs.shape[-1] if outputs.shape.rank > 1 else 1
    labels = np.asarray(y)
    many = not np.issubdtype(labels.dtype, np.integer) and labels.shape == tuple(outputs.shape)
    many = many and bool((np.abs(labels.sum(-1) - 1) > 1e-2).any())  # several labels a sample
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
        value = tf.reduce_mean(_value(loss, tf.ones_like(outputs) * constant, y)).numpy()
        fits = math.isclose(value, math.log(count), rel_tol=_rounding(outputs))
        if fits and (kind, form) == ("softmax", "logits"):
            fits = _ignores_a_shift(loss, outputs, y)
        if fits:
            return kind, form
    return "", "neither logits nor probabilities"


def _ignores_a_shift(loss: Callable, outputs: tf.Tensor, y) -> bool:
    """A softmax does; a loss that divides probabilities by their sum does not."""
    row = tf.cast(tf.linspace(0.1, 0.9, outputs.shape[-1]), outputs.dtype)
    row = tf.broadcast_to(row, tf.shape(outputs))
    one, other = (tf.reduce_mean(_value(loss, each, y)).numpy() for each in (row, row + 1))
    return math.isclose(one, other, rel_tol=_rounding(outputs))


def _rounding(outputs: tf.Tensor) -> float:
    """How far apart losses may be that are the same."""
    return 1e-2 if outputs.dtype == tf.bfloat16 else 1e-3


def _form_of_outputs(outputs: tf.Tensor, kind: str) -> str:
    values = tf.cast(outputs, tf.float32).numpy()
    unit = bool(((values >= 0) & (values <= 1)).all())
    if kind == "sigmoid":
        return "probabilities" if unit else "logits"
    if unit and bool((np.abs(values.sum(-1) - 1) < 1e-2).all()):
        return "probabilities"
    if bool((values <= 0).all()) and bool((np.abs(np.exp(values).sum(-1) - 1) < 1e-2).all()):
        return "log-probabilities"
    return "logits"


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


def _precision(loss: Callable, kind: str, outputs: tf.Tensor, y, seen: bool) -> list[Finding]:
    """What is left of the gradient through the model's own softmax or sigmoid."""
    classes = outputs.shape[-1] if kind == "softmax" else 1
    likely = tf.nn.softmax if kind == "softmax" else tf.nn.sigmoid
    one_hot = kind == "softmax" and not np.issubdtype(np.asarray(y).dtype, np.integer)

    def composed(z: tf.Tensor, label: tf.Tensor) -> tf.Tensor:
        label = tf.one_hot(label, classes) if one_hot else label
        if kind == "sigmoid":  # two samples of as many axes as theirs: losses squeeze some away
            z, label = _two_like(z, outputs), _two_like(label, y)
        given = likely(z) if seen else tf.identity(likely(z))
        return _value(loss, given, label)

    return _lost(gradient_by_margin(composed, num_classes=classes))


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
    """Batches of anything that has some."""
    if isinstance(data, tf.keras.utils.Sequence):  # in Keras 3 another name of PyDataset
        return (data[number] for number in range(len(data)))
    return iter(data)


def _named(batch) -> list[tuple[str, object]]:
    """(name, leaf) of a batch; a dict, or what is neither a pair nor three, is x alone."""
    parts = tuple(batch) if isinstance(batch, tuple | list) and len(batch) in (2, 3) else (batch,)
    names = ("x", "y", "sample_weight")
    return [leaf for name, part in zip(names, parts, strict=False) for leaf in _leaves(part, name)]


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


def _array(leaf) -> np.ndarray | None:
    """The leaf as an array; None where it is text, which has no value to check."""
    if isinstance(leaf, tf.RaggedTensor | tf.SparseTensor):
        raise NotImplementedError(
            f"{type(leaf).__name__}: make it dense first, or check its values"
        )
    array = np.asarray(leaf)
    if array.dtype.kind == "V" or array.dtype.name == "bfloat16":
        return array.astype(np.float32)
    return None if array.dtype.kind in "SUO" else array


def _numeric(leaves) -> list[tuple[str, np.ndarray]]:
    found = [(name, _array(leaf)) for name, leaf in leaves]
    return [(name, values) for name, values in found if values is not None]


def _length(leaves: list) -> int:
    """How many samples a batch has; raises where its parts disagree."""
    lengths = {name: len(leaf) for name, leaf in leaves if not _is_one(leaf)}
    if not lengths:
        raise ValueError("a batch is empty: neither x nor y has a tensor")
    if len(set(lengths.values())) > 1:
        raise ValueError(f"parts of a batch have different lengths: {lengths}")
    return next(iter(lengths.values()))


def _first_bad(values: np.ndarray) -> str:
    """How many values are NaN or infinite, "" for none."""
    nan, infinite = int(np.isnan(values).sum()), int(np.isinf(values).sum())
    parts = [f"{nan} NaN"] * bool(nan) + [f"{infinite} infinite"] * bool(infinite)
    return f"{' and '.join(parts)} of {values.size} values" if parts else ""


def _watch(model: tf.keras.Model, found: list) -> list[tuple]:
    """Let every layer tell an output that is not finite; return (layer, what `call` it had set)."""

    def looking(layer, call, *args, **kwargs):
        output = call(*args, **kwargs)
        for leaf in tf.nest.flatten(output):
            # Within a layer's own graph values are not known.
            if hasattr(leaf, "numpy") and (text := _first_bad(_array(leaf))):
                found.append((layer.name, text))
        return output

    watched = []
    for layer in model._flatten_layers(include_self=False):
        watched.append((layer, vars(layer).get("call")))
        layer.call = partial(looking, layer, layer.call)
    return watched


def _path(variable) -> str:
    return getattr(variable, "path", variable.name)


def _value(loss: Callable, outputs, y) -> tf.Tensor:
    """The loss; Keras's own take the labels first."""
    where = getattr(loss, "__module__", None) or ""
    keras_has_it = "keras" in where and ".losses" in where
    if keras_has_it or isinstance(loss, tf.keras.losses.Loss):
        return loss(y, outputs)
    return loss(outputs, y)


def _times(x, factor: float):
    """The floats of x times `factor`."""
    return tf.nest.map_structure(
        lambda leaf: leaf * factor if np.issubdtype(np.asarray(leaf).dtype, np.floating) else leaf,
        x,
    )


def _outputs(model: tf.keras.Model, x) -> tf.Tensor:
    """The model's output at inference, one tensor."""
    outputs = _call(model, x, training=False)
    outputs = outputs["logits"] if isinstance(outputs, Mapping) and "logits" in outputs else outputs
    if not tf.is_tensor(outputs):
        raise ValueError(f"the model's output must be one tensor, not {type(outputs).__name__}")
    return outputs


def _call(model: tf.keras.Model, x, training: bool):
    """Call `model` as `fit` does: x is one argument, but where `call` needs several."""
    inputs = inspect.signature(model.call).parameters.values()
    inputs = [p for p in inputs if p.name not in ("training", "mask") and p.kind != p.VAR_KEYWORD]
    if isinstance(x, dict) and len(inputs) > 1 and x.keys() <= {p.name for p in inputs}:
        return model(**x, training=training)
    needed = sum(2 if p.kind == p.VAR_POSITIONAL else p.default is p.empty for p in inputs)
    if isinstance(x, tuple | list) and needed > 1:
        return model(*x, training=training)
    return model(x, training=training)


def _finished(report: Report, strict: bool) -> Report:
    if strict:
        report.raise_if_found()
    return report


def main() -> None:
    """Check the digits and their model, and print what each check costs beside an epoch."""
    import tempfile
    import time
    from pathlib import Path

    from shared import datasets
    from shared.specs import TASKS
    from shared.weights import init_weights
    from tf_impl.kit import data, models, training

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
    batches = [(x[at : at + 64], y[at : at + 64]) for at in range(0, len(x), 64)]

    def timed(name: str, work: Callable) -> None:
        start = time.perf_counter()
        found = work()
        seconds = time.perf_counter() - start
        print(f"{name:18}{1000 * seconds:8.1f} ms", found if isinstance(found, Report) else "")

    step(*batches[0])  # traces the graph
    step(*batches[-1])
    timed("an epoch", lambda: [step(*batch) for batch in batches])
    timed("the same, checked", lambda: [checked(*batch) for batch in batches])
    timed("check_data", lambda: check_data(batches, num_classes=10, low=-10, high=10))
    timed("check_splits", lambda: check_splits(batches, [test]))
    timed("check_loss", lambda: check_loss(model, loss, *batches[0]))
    timed("find_nonfinite", lambda: find_nonfinite(model, loss, *batches[0]))


if __name__ == "__main__":
    main()
