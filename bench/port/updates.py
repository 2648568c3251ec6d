"""One update and several by the optimizers, of equal gradients; then training by both models."""

from __future__ import annotations

import copy
import time
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import tensorflow as tf
import torch

from bench.port import optimizers
from bench.port.causes import CATALOGUE
from bench.port.gradients import dense
from bench.port.optimizers import Settings
from bench.port.report import Certificate, Finding
from bench.port.values import distance
from shared.user_model import RECIPE

SCALES = (1.0, -0.5, 2.0, 1.0)  # of the gradients of several updates
BOUND, ROUNDING = 1e-4, 4e-7  # relative to an update; rounding relative to the weight
STEPS, LEAST_STEPS, MOST_SECONDS = 10, 3, 40.0
DRAWN, SCATTER, LEAST_LOSS = 1e-6, 5.0, 1e-5  # as `twinbench try` tells equal work
# Settings -> their cause, and how they are written on either side.
KEYS = {
    "kind": "optimizer_kind",
    "clip": "clipping",
    "rates": "learning_rate",
    "decays": "weight_decay",
    "decoupled": "decay_coupled",
    "betas": "optimizer_betas",
    "epsilon": "optimizer_epsilon",
    "momentum": "optimizer_momentum",
    "nesterov": "optimizer_momentum",
    "dampening": "optimizer_momentum",
    "amsgrad": "amsgrad",
    "corrected": "bias_correction",
    "accumulator": "accumulator",
}


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


def compare(outcome: Any, pt: Any, side: Any, weights: Any, grads: Any) -> Settings | None:
    """Add findings; Keras's settings, None where updates differ."""
    if grads is None:
        return None
    both = _both(pt, side, weights, grads)
    before = len(outcome.findings)
    for step, scales in (("update", SCALES[:1]), ("steps", SCALES)):
        ours, theirs = _pytorch(both, scales), _tensorflow(both, scales, slices=True)
        sizes = _sizes(both, ours, theirs)
        if max(sizes, default=0.0) <= 1.0:
            continue
        _explain(outcome, both, step, scales, ours, theirs, sizes)
        if len(outcome.findings) > before:
            return None
    outcome.equal.append(f"{len(SCALES)} updates by the optimizer")
    return optimizers.of_keras(side.optimizer, [t.variable for t in both.transfers]) or Settings(
        "", (), ()
    )


def _both(pt: Any, side: Any, weights: Any, grads: Any) -> Both:
    trained = {id(v) for v in side.model.trainable_variables}
    ours = {n for n, p in pt.model.named_parameters() if p.requires_grad}
    chosen = [
        (pair, t) for pair, t in weights.transfers()
        if id(t.variable) in trained and ours & set(t.names)
    ]  # fmt: skip
    arrays = [transfer.convert(grads.pt, gradient=True) for _, transfer in chosen]
    slices = {
        place: grads.tf[id(transfer.variable)]
        for place, (_, transfer) in enumerate(chosen)
        if isinstance(grads.tf[id(transfer.variable)], tf.IndexedSlices)
    }
    return Both(pt, side, [p for p, _ in chosen], [t for _, t in chosen], arrays, slices, grads.pt)


def _pytorch(both: Both, scales: tuple, *, single: bool = False) -> list[np.ndarray]:
    """The weights after updates. single: of the two biases of a recurrent layer one is trained."""
    parameters = dict(both.pt.model.named_parameters())
    before = {name: p.detach().clone() for name, p in parameters.items()}
    optimizer = both.pt.optimizer
    state = copy.deepcopy(optimizer.state_dict())
    left = {t.names[1] for t in both.transfers if t.how == "summed"} if single else set()
    for scale in scales:
        for name, parameter in parameters.items():
            trained = parameter.requires_grad and name in both.raw and name not in left
            parameter.grad = torch.from_numpy(both.raw[name] * scale) if trained else None
        given = {n: p.grad.clone() for n, p in parameters.items() if p.grad is not None}
        optimizer.step()
        both.clip = _clip_of(given, parameters) if scale == scales[0] else both.clip
    arrays = {n: t.detach().numpy() for n, t in both.pt.model.state_dict().items()}
    after = [t.convert(arrays).astype(np.float64) for t in both.transfers]
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(before[name])
            parameter.grad = None
    optimizer.load_state_dict(state)
    return after


def _clip_of(given: dict, parameters: dict) -> tuple[str, float]:
    """How a hook of the optimizer has clipped the gradients, by what it left of them."""
    after = {n: parameters[n].grad for n in given if parameters[n].grad is not None}
    changed = {n for n, g in after.items() if not torch.equal(g, given[n])}
    if not changed:
        return "", 0.0
    most = max(float(g.abs().max()) for g in after.values())
    if all(torch.allclose(given[n].clamp(-most, most), g) for n, g in after.items()):
        return "value", most
    return "norm", float(sum(g.double().square().sum() for g in after.values()) ** 0.5)


def _tensorflow(both: Both, scales: tuple, *, slices: bool) -> list[np.ndarray]:
    """The weights after updates. slices: hand over gradients as they come, not as arrays."""
    optimizer = both.tf.file_model.optimizer(both.tf.model, RECIPE)
    before = both.start()
    variables = [t.variable for t in both.transfers]
    for scale in scales:
        grads = [tf.constant(g.astype(np.float32) * scale) for g in both.grads]
        if slices:
            for place, given in both.slices.items():
                grads[place] = tf.IndexedSlices(
                    given.values * scale, given.indices, given.dense_shape
                )
        optimizer.apply_gradients(list(zip(grads, variables, strict=True)))
    after = both.start()
    for variable, value in zip(variables, before, strict=True):
        variable.assign(value)
    return after


def _sizes(both: Both, ours: list, theirs: list) -> list[float]:
    """By how many bounds the updates of each weight differ."""
    sizes = []
    for start, a, b in zip(both.start(), ours, theirs, strict=True):
        moved = max(np.linalg.norm(a - start), np.linalg.norm(b - start))
        if moved == 0:
            sizes.append(0.0)
            continue
        bound = max(BOUND, ROUNDING * np.linalg.norm(start) / moved)
        sizes.append(float(np.linalg.norm(a - b) / moved / bound))
    return sizes


def _explain(outcome, both: Both, step: str, scales, ours, theirs, sizes) -> None:
    def equal(a: list, b: list) -> bool:
        return max(_sizes(both, a, b), default=0.0) <= 1.0

    size = max(sizes) * BOUND
    if both.slices:
        plain = _tensorflow(both, scales, slices=False)
        left = _sizes(both, ours, plain)
        gone = [n for n in both.slices if sizes[n] > 1 and left[n] < 0.05 * sizes[n]]
        if gone:
            _add(outcome, step, both.pairs[gone[0]], size, "embedding_slices")
            if equal(ours, plain):
                return
        theirs = plain
    if any(t.how == "summed" for t in both.transfers):
        single = _pytorch(both, scales, single=True)
        _pytorch(both, scales)
        if max(_sizes(both, single, theirs)) < max(sizes) and not equal(single, ours):
            pair = next(
                p for p, t in zip(both.pairs, both.transfers, strict=True) if t.how == "summed"
            )
            _add(outcome, step, pair, size, "recurrent_bias")
            if equal(single, theirs):
                return
            ours = single
    names = [t.names[0] for t in both.transfers]
    parameters = dict(both.pt.model.named_parameters())
    a = optimizers.of_pytorch(both.pt.optimizer, names, parameters, both.clip)
    b = optimizers.of_keras(both.tf.optimizer, [t.variable for t in both.transfers])
    if a is None or b is None:
        _add(outcome, step, None, size, None)
        return
    counts = [sum(parameters[n].requires_grad for n in t.names if n in parameters)
              if t.how == "summed" else 1 for t in both.transfers]  # fmt: skip
    steps = [[g * scale for g in both.grads] for scale in scales]

    def emulated(settings: Settings) -> list:
        return optimizers.run(settings, both.start(), steps, counts)

    if not equal(emulated(b), theirs) and b.kind == "adam":
        b = replace(b, corrected=False)
    if not equal(emulated(b), theirs):
        _add(outcome, step, None, size, None)
        return
    if _is_near(a, b):
        a = replace(a, epsilon=b.epsilon)
    if equal(emulated(replace(a, epsilon_first=b.epsilon_first)), theirs):
        note = (
            "Keras adds epsilon before the correction for bias, PyTorch after it: no setting makes "
            f"all updates equal, and these differ by {size:.0e}"
        )
        if not any(known.startswith("Keras adds epsilon") for known in outcome.notes):
            outcome.notes.append(note)
        return
    causes = _causes(a, b, emulated, lambda settings: equal(emulated(settings), theirs))
    for names_of in causes or [None]:
        _add(outcome, step, None, size, names_of, a, b)


def _is_near(a: Settings, b: Settings) -> bool:
    """Whether an epsilon is among those that Keras's amounts to, from the first update to the last.

    Before the correction for bias it weighs as much as one that is larger by its root after it.
    """
    first = b.epsilon / (1 - b.betas[1]) ** 0.5 if b.kind == "adam" else b.epsilon
    return b.epsilon * 0.99 <= a.epsilon <= first * 1.01


def _causes(a: Settings, b: Settings, emulated: Any, equal: Any) -> list[str]:
    """The settings of `a` that have to be those of `b`, until the updates are equal."""
    differing = [name for name in KEYS if getattr(a, name) != getattr(b, name)]
    if not any(a.decays + b.decays):
        differing = [name for name in differing if name != "decoupled"]
    if a.kind == b.kind and "kind" not in differing:
        for name in differing:
            if equal(replace(a, epsilon_first=b.epsilon_first, **{name: getattr(b, name)})):
                return [name]
    needed = []
    for name in differing:
        one = replace(b, **{name: getattr(a, name)})
        if not equal(one) and not (name == "epsilon" and equal(replace(one, epsilon_first=False))):
            needed.append(name)
    return ["kind"] if "kind" in needed else needed


def _add(outcome, step: str, pair: Any, size: float, name: str | None, a=None, b=None) -> None:
    before = "outputs, the loss and gradients" if step == "update" else "one update"
    names = pair.layers if pair else ("", "")
    if name is None:
        outcome.findings.append(Finding(step, *names, size, BOUND, before))
        return
    key = KEYS.get(name, name)
    if name == "decays" and len(set(a.decays)) != len(set(b.decays)):
        key = "decay_excluded"
    cause = CATALOGUE[key]
    ours, theirs = _written(name, a, b)
    words = [text.format(a=ours[1], b=theirs[0]) for text in (cause.change_pt, cause.change_tf)]
    finding = Finding(step, *names, size, BOUND, before, key, True, *words, cause.why)
    if key not in [f.cause for f in outcome.findings if f.step == step]:
        outcome.findings.append(finding)


def _written(name: str, a: Settings | None, b: Settings | None) -> tuple:
    """A setting of both sides, as PyTorch and as Keras write it."""
    return tuple((_pytorch_words(name, s), _keras_words(name, s)) for s in (a, b))


def _pytorch_words(name: str, s: Settings | None) -> str:
    if s is None:
        return ""
    if name == "clip":
        how, bound = s.clip
        return {
            "": "no clipping",
            "norm": f"clip_grad_norm_(parameters, {bound:g})",
            "value": f"clip_grad_value_(parameters, {bound:g})",
            "variable": f"clip_grad_norm_([p], {bound:g}) for each p by itself",
        }[how]
    return _plain_words(name, s)


def _keras_words(name: str, s: Settings | None) -> str:
    if s is None:
        return ""
    if name == "clip":
        how, bound = s.clip
        names = {"norm": "global_clipnorm", "value": "clipvalue", "variable": "clipnorm"}
        return f"{names[how]}={bound:g}" if how else "no clipnorm, global_clipnorm or clipvalue"
    return _plain_words(name, s)


def _plain_words(name: str, s: Settings) -> str:
    value = getattr(s, name)
    if name in ("rates", "decays"):
        return ", ".join(f"{v:g}" for v in dict.fromkeys(value))
    if name == "kind":
        apart = value == "adam" and s.decoupled and any(s.decays)
        return optimizers.NAMES[value] + ("W" if apart else "")
    if name in ("epsilon",):
        return f"{value:g}"
    if name in ("amsgrad",):
        return str(value)
    if name == "corrected":
        return "Adam with corrected moments" if value else "Adam without the correction"
    if name == "betas":
        return f"betas={value}" if s.kind == "adam" else f"alpha (rho)={value[0]:g}"
    if name == "decoupled":
        return ", ".join(f"{v / 2:g}" for v in dict.fromkeys(s.decays))
    return f"{name}={value}"


# Training ----------------------------------------------------------------------------------------


def train(
    outcome: Any, pt: Any, side: Any, weights: Any, settings: Settings, batches: dict
) -> None:
    """Train both on the same batches; a certificate, or a finding where they part."""
    start = {name: t.detach().clone() for name, t in pt.model.state_dict().items()}
    theirs = [v.numpy() for v in side.model.weights]
    compared = [(p, t) for p, t in weights.transfers() if not t.role.startswith("moving")]
    one, ours = _train_pytorch(pt, settings, batches, STEPS)
    count = len(one)
    outcome.say(f"training both: {count} steps")
    other, keras_weights = _train_tensorflow(side, batches, count, compared)
    random = np.random.default_rng(0)
    with torch.no_grad():
        pt.model.load_state_dict(start)
        for parameter in pt.model.parameters():
            noise = torch.from_numpy(random.standard_normal(tuple(parameter.shape)))
            parameter.mul_((1 + DRAWN * noise).to(parameter.dtype))
    again, shifted = _train_pytorch(pt, settings, batches, count, seconds=np.inf)
    count = min(count, len(again))
    one, other, again = one[:count], other[:count], again[:count]
    pt.model.load_state_dict(start)
    for variable, value in zip(side.model.weights, theirs, strict=True):
        variable.assign(value)
    losses = np.abs(np.array(one) - other) / np.maximum(np.abs(one), 1e-8)
    scatter = np.abs(np.array(one) - again) / np.maximum(np.abs(one), 1e-8)
    bound = max(SCATTER * float(scatter.max()), LEAST_LOSS)
    apart, weight_bound = [], []
    for place, (_, transfer) in enumerate(compared):
        a, b = transfer.convert(ours), keras_weights[place]
        apart.append(distance(a, b))
        weight_bound.append(max(SCATTER * distance(a, transfer.convert(shifted)), LEAST_LOSS))
    ratios = [a / b for a, b in zip(apart, weight_bound, strict=True)]
    worst = int(np.argmax(ratios)) if ratios else 0
    if losses.max() <= bound and max(ratios, default=0.0) <= 1.0:
        outcome.certificate = Certificate(
            count, float(losses.max()), bound, apart[worst], weight_bound[worst]
        )
        return
    before = f"{int(np.argmax(losses > bound))} steps" if losses.max() > bound else "all losses"
    pair = compared[worst][0]
    names = ("", "") if losses.max() > bound else pair.layers
    size = float(losses.max()) if losses.max() > bound else apart[worst]
    limit = bound if losses.max() > bound else weight_bound[worst]
    outcome.findings.append(Finding("steps", *names, size, limit, before))


def _train_pytorch(
    pt: Any, settings: Settings, batches: dict, most: int, *, seconds: float = MOST_SECONDS / 3
) -> tuple[list, dict]:
    """Losses and weights afterwards; fewer steps where they take longer than some seconds."""
    losses, start = [], time.monotonic()
    optimizer = pt.optimizer
    state = copy.deepcopy(optimizer.state_dict())
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
        if time.monotonic() - start > seconds and len(losses) >= LEAST_STEPS:
            break
    arrays = {n: t.detach().numpy().copy() for n, t in pt.model.state_dict().items()}
    optimizer.load_state_dict(state)
    optimizer.zero_grad()
    return losses, arrays


def _train_tensorflow(side: Any, batches: dict, count: int, compared: list) -> tuple[list, list]:
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
    return losses, [transfer.variable.numpy() for _, transfer in compared]


__all__ = ["compare", "dense", "train"]
