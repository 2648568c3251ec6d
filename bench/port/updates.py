"""One update and several by the optimizers, of equal gradients; then training by both models."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf
import torch

from bench.port import optimizers
from bench.port.causes import OPTIMIZERS
from bench.port.gradients import SCATTER
from bench.port.optimizers import Settings
from bench.port.report import Certificate, Report
from bench.port.tensorflow_side import kept
from bench.port.values import distance
from shared.user_model import RECIPE

SCALES = (1.0, -0.5, 2.0, 1.0)  # of the gradients of several updates
BOUND, ROUNDING = 1e-4, 4e-7  # relative to an update; rounding relative to the weight
STEPS, LEAST_STEPS, MOST_SECONDS = 10, 3, 15.0  # of the processor
LEAST_LOSS = 1e-5  # as `twinbench try` tells equal work
CAUSES = {name: key for key, cause in reversed(OPTIMIZERS.items()) for name in cause.settings}


@dataclass
class Both:
    """The optimizers of both sides, and what they work on: an array for each of Keras's weights."""

    pt: Any
    tf: Any
    pairs: list
    transfers: list
    grads: list[np.ndarray]
    slices: dict[int, Any]  # place -> TensorFlow's gradient where it is no array
    raw: dict[str, np.ndarray]
    clip: tuple[str, float] = ("", 0.0)

    def start(self) -> list[np.ndarray]:
        """The weights before."""
        return [t.variable.numpy().astype(np.float64) for t in self.transfers]

    def sizes(self, ours: list, theirs: list) -> list[float]:
        """By how many bounds the updates of each weight differ."""
        sizes = []
        for start, a, b in zip(self.start(), ours, theirs, strict=True):
            moved = max(np.linalg.norm(a - start), np.linalg.norm(b - start), 1e-30)
            bound = max(BOUND, ROUNDING * np.linalg.norm(start) / moved)
            sizes.append(float(np.linalg.norm(a - b) / moved / bound))
        return sizes

    def equal(self, ours: list, theirs: list) -> bool:
        """Whether the updates are."""
        return max(self.sizes(ours, theirs), default=0.0) <= 1.0


def compare(report: Report, pt: Any, side: Any, weights: Any, grads: Any) -> Settings | None:
    """Add findings; Keras's settings, None where updates differ."""
    if grads is None:
        return None
    both = _both(pt, side, weights, grads)
    for step, scales in (("update", SCALES[:1]), ("steps", SCALES)):
        ours, theirs = _pytorch(both, scales), _tensorflow(both, scales, slices=True)
        if not both.equal(ours, theirs):
            _explain(report, both, step, scales, ours, theirs)
            if report.has(step):
                return None
    report.equal.append(f"{len(SCALES)} updates by the optimizer")
    settings = optimizers.of_keras(side.optimizer, [t.variable for t in both.transfers])
    return settings or Settings("", (), ())


def _both(pt: Any, side: Any, weights: Any, grads: Any) -> Both:
    trained = {id(v) for v in side.model.trainable_variables}
    ours = {n for n, p in pt.model.named_parameters() if p.requires_grad}
    pairs, transfers = [], []
    for pair, transfer in weights.transfers():
        if id(transfer.variable) in trained and ours & set(transfer.names):
            pairs.append(pair)
            transfers.append(transfer)
    arrays = [transfer.convert(grads.pt, gradient=True) for transfer in transfers]
    given = {place: grads.tf[id(transfer.variable)] for place, transfer in enumerate(transfers)}
    slices = {place: g for place, g in given.items() if isinstance(g, tf.IndexedSlices)}
    return Both(pt, side, pairs, transfers, arrays, slices, grads.pt)


def _pytorch(both: Both, scales: tuple, *, single: bool = False) -> list[np.ndarray]:
    """The weights after updates. single: of the two biases of a recurrent layer one is trained."""
    parameters = dict(both.pt.model.named_parameters())
    left = {t.names[1] for t in both.transfers if t.joined} if single else set()
    with both.pt.training():
        for scale in scales:
            for name, parameter in parameters.items():
                trained = parameter.requires_grad and name in both.raw and name not in left
                parameter.grad = torch.from_numpy(both.raw[name] * scale) if trained else None
            given = {n: p.grad.clone() for n, p in parameters.items() if p.grad is not None}
            both.pt.optimizer.step()
            both.clip = _clip_of(given, parameters) if scale == scales[0] else both.clip
        arrays = {n: t.detach().numpy() for n, t in both.pt.model.state_dict().items()}
        return [t.convert(arrays).astype(np.float64) for t in both.transfers]


def _clip_of(given: dict, parameters: dict) -> tuple[str, float]:
    """How a hook of the optimizer has clipped the gradients, by what it left of them."""
    after = {n: parameters[n].grad for n in given if parameters[n].grad is not None}
    if all(torch.equal(g, given[n]) for n, g in after.items()):
        return "", 0.0
    most = max(float(g.abs().max()) for g in after.values())
    if all(torch.allclose(given[n].clamp(-most, most), g) for n, g in after.items()):
        return "value", most
    return "norm", float(sum(g.double().square().sum() for g in after.values()) ** 0.5)


def _tensorflow(both: Both, scales: tuple, *, slices: bool) -> list[np.ndarray]:
    """The weights after updates. slices: hand over gradients as they come, not as arrays."""
    optimizer = both.tf.file_model.optimizer(both.tf.model, RECIPE)
    variables = [t.variable for t in both.transfers]
    with kept(variables):
        for scale in scales:
            grads: list = [tf.constant(g.astype(np.float32) * scale) for g in both.grads]
            for place, g in both.slices.items() if slices else ():
                grads[place] = tf.IndexedSlices(g.values * scale, g.indices, g.dense_shape)
            optimizer.apply_gradients(list(zip(grads, variables, strict=True)))
        return both.start()


def _explain(report: Report, both: Both, step: str, scales: tuple, ours, theirs) -> None:
    """Add the causes of updates that differ: of gradients' form, then of the settings."""
    before = "outputs, the loss and gradients" if step == "update" else "one update"
    sizes = both.sizes(ours, theirs)
    size = max(sizes) * BOUND
    add = partial(report.add, step, size=size, bound=BOUND, before=before)
    if both.slices:
        theirs = _tensorflow(both, scales, slices=False)
        left = both.sizes(ours, theirs)
        gone = [n for n in both.slices if sizes[n] > 1 and left[n] < 0.05 * sizes[n]]
        if gone:
            add(both.pairs[gone[0]].layers, key="embedding_slices")
    parameters = dict(both.pt.model.named_parameters())
    summed = [
        pair for pair, transfer in zip(both.pairs, both.transfers, strict=True)
        if transfer.joined and all(parameters[name].requires_grad for name in transfer.names)
    ]  # fmt: skip
    if summed:
        single = _pytorch(both, scales, single=True)
        _pytorch(both, scales)
        if max(both.sizes(single, theirs)) < max(sizes) and not both.equal(single, ours):
            add(summed[0].layers, key="recurrent_bias")
            ours = single
    if both.equal(ours, theirs):
        return
    causes = _settings(report, both, scales, theirs, size)
    for key, values in causes:
        add(("", ""), key=key, values=values)


def _settings(report: Report, both: Both, scales: tuple, theirs: list, size: float) -> list[tuple]:
    """The causes that are settings of the optimizer with their values; (None, ...) for no cause."""
    names = [t.names[0] for t in both.transfers]
    parameters = dict(both.pt.model.named_parameters())
    a = optimizers.of_pytorch(both.pt.optimizer, names, parameters, both.clip)
    b = optimizers.of_keras(both.tf.optimizer, [t.variable for t in both.transfers])
    unknown = [(None, ("", ""))]
    if a is None or b is None:
        return unknown
    counts = [sum(parameters[n].requires_grad for n in t.names if n in parameters)
              if t.joined else 1 for t in both.transfers]  # fmt: skip
    steps = [[g * scale for g in both.grads] for scale in scales]

    def explains(settings: Settings) -> bool:
        return both.equal(optimizers.run(settings, both.start(), steps, counts), theirs)

    if not explains(b) and b.kind == "adam":
        b = replace(b, corrected=False)
    if not explains(b):
        return unknown
    if _is_near(a, b):
        a = replace(a, epsilon=b.epsilon)
    if explains(replace(a, epsilon_first=b.epsilon_first)):
        if not any(known.startswith("Keras adds epsilon") for known in report.notes):
            report.notes.append(
                "Keras adds epsilon before the correction for bias, PyTorch after it: no setting "
                f"makes all updates equal, and these differ by {size:.0e}"
            )
        return []
    causes = []
    for name in _needed(a, b, explains):
        key = CAUSES[name]
        if name == "decays" and len(set(a.decays)) != len(set(b.decays)):
            key = "decay_excluded"
        causes.append((key, (a.written(name, keras=True), b.written(name, keras=False))))
    return causes or unknown


def _is_near(a: Settings, b: Settings) -> bool:
    """Whether an epsilon is among those that Keras's amounts to, from the first update to the last.

    Before the correction for bias it weighs as much as one that is larger by its root after it.
    """
    first = b.epsilon / (1 - b.betas[1]) ** 0.5 if b.kind == "adam" else b.epsilon
    return b.epsilon * 0.99 <= a.epsilon <= first * 1.01


def _needed(a: Settings, b: Settings, explains: Any) -> list[str]:
    """The settings of `a` that have to be those of `b`, until the updates are equal."""
    differing = [name for name in CAUSES if getattr(a, name) != getattr(b, name)]
    if not any(a.decays + b.decays):
        differing = [name for name in differing if name != "decoupled"]
    if a.kind == b.kind:
        for name in differing:
            if explains(replace(a, epsilon_first=b.epsilon_first, **{name: getattr(b, name)})):
                return [name]
    needed = []
    for name in differing:
        one = replace(b, **{name: getattr(a, name)})
        late = name == "epsilon" and explains(replace(one, epsilon_first=False))
        if not late and not explains(one):
            needed.append(name)
    return ["kind"] if "kind" in needed else needed


# Training ----------------------------------------------------------------------------------------


def train(report: Report, pt: Any, side: Any, weights: Any, settings: Settings, batches) -> None:
    """Train both on the same batches; a certificate, or a finding where they part."""
    compared = [(p, t) for p, t in weights.transfers() if not t.role.startswith("moving")]
    before = {name: array.copy() for name, array in weights.arrays().items()}
    one, ours = _train_pytorch(pt, settings, batches, STEPS, MOST_SECONDS)
    with pt.shaken():
        again, shifted = _train_pytorch(pt, settings, batches, len(one), np.inf)
    with kept(side.model.weights):
        other = _train_tensorflow(side, batches, len(one))
        theirs = [transfer.variable.numpy() for _, transfer in compared]
    scale = np.maximum(np.abs(one), 1e-8)
    losses, scatter = (np.abs(np.array(one) - run) / scale for run in (other, again))
    size, bound = float(losses.max()), max(SCATTER * float(scatter.max()), LEAST_LOSS)
    if size > bound:
        words = f"{int(np.argmax(losses > bound))} steps"
        return report.add("steps", ("", ""), size, bound, words)
    apart = []  # the difference of each weight, its bound, and the pair
    for (pair, transfer), b in zip(compared, theirs, strict=True):
        a = transfer.convert(ours)
        scattered, moved = (distance(a, transfer.convert(run)) for run in (shifted, before))
        limit = max(SCATTER * scattered, BOUND * moved, LEAST_LOSS)
        apart.append((distance(a, b), limit, pair))
    worst, limit, pair = max(apart, key=lambda entry: entry[0] / entry[1])
    if worst > limit:
        return report.add("steps", pair.layers, worst, limit, "all losses")
    report.certificate = Certificate(len(one), size, bound, worst, limit)
    return None


def _train_pytorch(
    pt: Any, settings: Settings, batches: dict, most: int, seconds: float
) -> tuple[list, dict]:
    """Losses and weights afterwards; fewer steps where they take more of the processor."""
    losses, start, optimizer = [], time.process_time(), pt.optimizer
    with pt.training():
        for number in range(most):
            x, y = pt.kit.to_device(*batches["pytorch"](number))
            with pt.calls(training=True):
                output = pt.call(x)
            loss = pt.loss(output, y)
            optimizer.zero_grad()
            loss.backward()
            if settings.kind == "adam":  # where Keras adds it
                for group in optimizer.param_groups:
                    group["eps"] = settings.epsilon / (1 - settings.betas[1] ** (number + 1)) ** 0.5
            optimizer.step()
            losses.append(loss.item())
            if time.process_time() - start > seconds and len(losses) >= LEAST_STEPS:
                break
        arrays = {n: t.detach().numpy().copy() for n, t in pt.model.state_dict().items()}
    return losses, arrays


def _train_tensorflow(side: Any, batches: dict, count: int) -> list[float]:
    """Losses of so many steps."""
    optimizer = side.file_model.optimizer(side.model, RECIPE)
    losses = []
    with side.without_dropout():
        for number in range(count):
            x, y = side.kit.to_device(*batches["tensorflow"](number))
            with tf.GradientTape() as tape:
                loss = side.loss(side.call(x, training=True), y)
                whole = loss + tf.cast(side.penalty(), loss.dtype)
            variables = side.model.trainable_variables
            grads = tape.gradient(whole, variables)
            pairs = [(g, v) for g, v in zip(grads, variables, strict=True) if g is not None]
            optimizer.apply_gradients(pairs)
            losses.append(float(whole))
    return losses
