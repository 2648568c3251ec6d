"""The first layer whose output differs, and the change of a call that makes it go."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import permutations
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bench.port import pytorch_side, tensorflow_side
from bench.port.alternatives import Change, Context, changes
from bench.port.causes import CATALOGUE
from bench.port.pytorch_side import RECURRENT, Event, PyTorchSide
from bench.port.recurrent import FUNCTIONS, Settings
from bench.port.report import Finding
from bench.port.tensorflow_side import TensorFlowSide
from bench.port.values import (
    FLOOR,
    TIMES_ROUNDING,
    WITHOUT_ROUNDING,
    Index,
    closest,
    numpy,
    varies,
)
from bench.port.weights import Pair, Weights
from shared import user_model
from shared.user_model import BadFile

MOST_CHANGES, MOST_SECONDS = 60, 90.0  # of the processor
WINDOW = 12  # calls around one in which its effect shows
RESHAPES = ("flatten", "reshape", "view", "unflatten")
SHOWN_LATER = (*RESHAPES, "mul", "__mul__", "div", "__truediv__")


@dataclass
class Pass:
    """Both models run once on the batch, in one mode."""

    pt: pytorch_side.Trace
    tf: tensorflow_side.Trace
    bounds: list[float]
    size: float = 0.0  # of the outputs' difference
    bound: float = 0.0


@dataclass
class Forward:
    """Looks for differences of outputs. Changes of calls that were right stay in force."""

    pt: PyTorchSide
    tf: TensorFlowSide
    weights: Weights
    say: Callable[[str], None]
    findings: list[Finding] = field(default_factory=list)

    def search(self, step: str) -> Pass | None:
        """Look for all differences of a mode; None where one is left without a cause."""
        training, start = step == "training", time.process_time()
        theirs = self.tf.trace(training=training)
        bounds = self._bounds(training)
        context, repaired = self._context(training), False
        for _ in range(MOST_CHANGES):
            both = self._compared(theirs, bounds, training)
            if both.size <= both.bound:
                return both
            if not repaired and step == "evaluation" and (again := self._repaired(both)):
                theirs, repaired = again, True
                continue
            self.say(f"the outputs differ by {both.size:.1e}: looking for the layer")
            context.events = both.pt.events
            event, change, before = self._cause(both, context)
            if change is None or time.process_time() - start > MOST_SECONDS:
                self.findings.append(self._unexplained(step, both))
                return None
            places = self._change(event, change, both)
            self._note(step, both, event, change, before, places)
        self.findings.append(self._unexplained(step, both))
        return None

    def compare(self, training: bool) -> Pass:
        """Run both once more."""
        return self._compared(self.tf.trace(training=training), self._bounds(training), training)

    def _bounds(self, training: bool) -> list[float]:
        events = self.pt.trace(training=training).events
        sizes = self.pt.rounding(events, training=training)
        if sizes is None:
            return [WITHOUT_ROUNDING] * len(events)
        return [max(TIMES_ROUNDING * size, FLOOR) for size in sizes]

    def _compared(self, theirs: Any, bounds: list[float], training: bool) -> Pass:
        ours = self.pt.trace(training=training)
        both = Pass(ours, theirs, bounds)
        shapes = [tuple(map(tuple, (t.shape for t in side.outputs))) for side in (ours, theirs)]
        sizes = [np.prod(shape, dtype=int) for shape in shapes[0]]
        if sizes != [np.prod(shape, dtype=int) for shape in shapes[1]]:
            words = [", ".join(map(str, shape)) for shape in shapes]
            raise BadFile(
                f"the models are no twins: PyTorch's gives {words[0]}, TensorFlow's {words[1]}"
            )
        places = {id(event.out): event.place for event in ours.events}
        for a, b in zip(ours.outputs, theirs.outputs, strict=True):
            bound = self._bound(both, places.get(id(a), len(bounds) - 1))
            size = closest(numpy(a), numpy(b))
            if size / bound >= both.size / (both.bound or 1.0):
                both.size, both.bound = size, bound
        return both

    def _bound(self, both: Pass, place: int) -> float:
        """Of a call; never less than those before it have had."""
        return max(both.bounds[: place + 1], default=FLOOR) if both.bounds else FLOOR

    def _cause(self, both: Pass, context: Context) -> tuple:
        """The first call with a change that makes it equal to something in TensorFlow."""
        before, taken, unequal = "", set(), []
        for event in both.pt.events:
            entry = both.tf.index.match(numpy(event.out), self._bound(both, event.place))
            if entry:
                taken.add(entry.place)
                before = before if unequal else event.layer or before
            else:
                unequal.append(event)
        for event in unequal:
            bound = self._bound(both, event.place)
            for change in changes(event, context):
                out = _tried(change, event)
                if out is None:
                    continue
                if change.shown_later:
                    if self._shows(event, change, both, context, taken):
                        return event, change, before
                elif varies(numpy(out)) and both.tf.index.match(numpy(out), bound):
                    return event, change, before
        # What a reshape or a factor gives may equal another tensor; it shows where it is used.
        last = _first_of(unequal, both.pt.events)
        for event in reversed(both.pt.events[max(last - WINDOW, 0) : last + WINDOW]):
            for change in changes(event, context) if event.name in SHOWN_LATER else ():
                tried = _tried(change, event) is not None
                if tried and self._shows(event, change, both, context, taken):
                    return event, change, before
        return None, None, before

    def _change(self, event: Event, change: Change, both: Pass) -> int:
        """Have the change in force for all calls like it, or for this one; how many it was."""
        count = [0]
        context = self._context(both.pt.training)
        context.events = both.pt.events
        alike, single = _alike(event, change, context, count), _single(event, change)
        without_harm: list[int] = []
        for patch in (alike, single):
            self.pt.patches.append(patch)
            count[0] = 0
            try:
                ours = self.pt.trace(training=both.pt.training)
            except Exception:  # a call that is not alike after all
                self.pt.patches.remove(patch)
                continue
            if self._moved(both, ours):
                return max(count[0], 1)
            pairs = zip(both.pt.events, ours.events, strict=False)
            if count[0] > 1 and not any(self._worse(old, new, both) for old, new in pairs):
                without_harm.append(count[0])
            self.pt.patches.remove(patch)
        if without_harm:
            self.pt.patches.append(alike)
            return without_harm[0]
        self.pt.patches.append(_single(event, change))
        return 1

    def _shows(
        self, event: Event, change: Change, both: Pass, context: Context, taken: set
    ) -> bool:
        """Whether calls after a changed one, or outputs, have their equal then and had none."""
        for patch in (_single(event, change), _alike(event, change, context, [0])):
            self.pt.patches.append(patch)
            try:
                ours = self.pt.trace(training=both.pt.training)
            except Exception:  # of another shape than calls after it take
                continue
            finally:
                self.pt.patches.remove(patch)
            first = event.place + 1
            pairs = list(zip(both.pt.events[first:], ours.events[first:], strict=False))[:WINDOW]
            if any(self._worse(old, new, both) for old, new in pairs):
                continue
            for old, new in pairs:
                bound = self._bound(both, old.place)
                if both.tf.index.match(numpy(old.out), bound):
                    continue
                entry = both.tf.index.match(numpy(new.out), bound)
                if entry and entry.place not in taken and varies(numpy(new.out)):
                    return True
            for old, new, theirs in zip(
                both.pt.outputs, ours.outputs, both.tf.outputs, strict=True
            ):
                sizes = [closest(numpy(t), numpy(theirs)) for t in (old, new)]
                if sizes[1] <= both.bound < sizes[0] and varies(numpy(new)):
                    return True
        return False

    def _worse(self, old: Event, new: Event, both: Pass) -> bool:
        """Whether a call had its equal and has none once something before it was changed."""
        bound = self._bound(both, old.place)
        had = both.tf.index.match(numpy(old.out), bound)
        return bool(had) and not both.tf.index.match(numpy(new.out), bound)

    def _moved(self, both: Pass, ours: Any) -> bool:
        """Whether the outputs are equal now."""
        for a, b in zip(ours.outputs, both.tf.outputs, strict=True):
            if closest(numpy(a), numpy(b)) > both.bound:
                return False
        return True

    def _note(self, step, both, event, change, before, places) -> None:
        """Add a finding, or one more place to the last of the same cause."""
        cause = CATALOGUE[change.key]
        out = change.apply(_harmless(event))
        out = out[0] if isinstance(out, tuple) else out
        entries = list(both.tf.index.matches(numpy(out), self._bound(both, event.place)))
        entry = entries[-1 if event.name in RESHAPES else 0] if entries else None
        layer_tf = entry.layer if entry else ""
        last = self.findings[-1] if self.findings else None
        words = [text.format(a=change.a, b=change.b, pads=change.b, padding=change.a)
                 for text in (cause.change_pt, cause.change_tf)]  # fmt: skip
        if last and last.step == step and last.cause == cause.key and last.change_pt == words[0]:
            self.findings[-1] = replace(last, places=last.places + places)
            return
        size = closest(numpy(event.out), numpy(entry.tensor)) if entry else both.size
        self.findings.append(
            Finding(
                step, self._layer(both, event), layer_tf, size,
                self._bound(both, event.place), self._before(both, before), cause.key, True,
                *words, cause.why, places,
            )
        )  # fmt: skip

    def _layer(self, both: Pass, event: Event) -> str:
        """The layer of a call; of one that stands between layers the next."""
        module = self.pt.module(event.layer)
        inside = module is not None and any(True for _ in module.children())
        if event.layer and (not inside or "add" not in event.name):
            return event.layer
        for later in both.pt.events[event.place + 1 :]:
            module = self.pt.module(later.layer)
            if later.layer and module is not None and not any(True for _ in module.children()):
                return later.layer
        return event.layer

    def _before(self, both: Pass, layer: str) -> str:
        return f"all up to {layer}" if layer else "the inputs"

    def _unexplained(self, step: str, both: Pass) -> Finding:
        """The first pair of layers whose outputs differ, without a cause."""
        before = pt = tf = ""
        size = both.size
        for pair in self.weights.pairs:
            event = self._event(both, pair)
            if event is None or (event.name in RECURRENT and is_inner(pair, self.weights.pairs)):
                continue
            bound = self._bound(both, event.place)
            if both.tf.index.match(numpy(event.out), bound, pair.tf.name):
                before = pair.pt.name
                continue
            (pt, tf), inner = pair.layers, pair.tf.name
            size = min(size, both.tf.index.nearest(numpy(event.out), inner)) or size
            between = self._between(both, before, event)
            if between:
                pt = between
            break
        return Finding(step, pt, tf, size, both.bound, self._before(both, before))

    def _between(self, both: Pass, before: str, until: Event) -> str:
        """The first layer after `before` that has no equal, where it comes before `until`."""
        begun = not before
        for event in both.pt.events:
            if event.place >= until.place:
                return ""
            begun = begun or event.layer == before
            if not begun or event.layer in ("", before):
                continue
            if not both.tf.index.match(numpy(event.out), self._bound(both, event.place)):
                return event.layer
        return ""

    def _event(self, both: Pass, pair: Pair) -> Event | None:
        """The call that takes a pair's weights."""
        names = [name for part in pair.pt.parts.values() for name in part]
        tensors = {id(self.weights.state[name]) for name in names}
        for event in both.pt.events:
            if any(id(tensor) in tensors for tensor in event.tensors()):
                return event
        return None

    def _context(self, training: bool) -> Context:
        context = Context(training=training)
        layers = self.tf.layers()
        for layer in layers:
            for name in ("epsilon",):
                value = getattr(layer, name, None)
                context.epsilons += (float(value),) if isinstance(value, (int, float)) else ()
            for name in ("negative_slope", "alpha"):
                value = getattr(layer, name, None)
                context.slopes += (float(value),) if isinstance(value, (int, float)) else ()
            context.recurrent += _settings(layer)
        leaves = user_model.leaves(self.pt.x)
        context.tokens = tuple(t for t in leaves if t.ndim == 2 and not t.is_floating_point())
        return context

    # Weights ---------------------------------------------------------------------------------

    def _repaired(self, both: Pass) -> Any:
        """Copy weights that the file left different; TensorFlow's run after it, None if in vain."""
        arrays = self.weights.arrays()
        wrong = [pair for pair in self.weights.pairs if not self.weights.equal(pair, arrays)]
        if not wrong:
            return None
        before = [variable.numpy() for variable in self.tf.model.weights]
        first = self._first_unequal(both)
        notes = [(pair, *self._why(pair, arrays)) for pair in wrong]
        for pair in wrong:
            self.weights.copy(pair)
        theirs = self.tf.trace()
        after = self._compared(theirs, both.bounds, False)
        moved = self._first_unequal(after)
        if after.size > after.bound and moved is not None and first is not None and moved <= first:
            for variable, value in zip(self.tf.model.weights, before, strict=True):
                variable.assign(value)
            return None
        groups: dict[str, list] = {}
        for pair, key, words, size in notes:
            groups.setdefault(key, []).append((pair, words, size))
        for key, alike in groups.items():
            pair, words, size = alike[0]
            cause = CATALOGUE[key]
            names = ", ".join(entry[0].tf.name for entry in alike[:3])
            more = [
                text.format(a="", b=words or names) for text in (cause.change_pt, cause.change_tf)
            ]
            self.findings.append(
                Finding("weights", *pair.layers, size, 0.0, "nothing yet: weights "
                        "come first", key, True, *more, cause.why, len(alike))
            )  # fmt: skip
        return theirs

    def _first_unequal(self, both: Pass) -> int | None:
        for place, pair in enumerate(self.weights.pairs):
            event = self._event(both, pair)
            if event and event.name in RECURRENT and is_inner(pair, self.weights.pairs):
                continue
            if event and not both.tf.index.match(
                numpy(event.out), self._bound(both, event.place), pair.tf.name
            ):
                return place
        return None

    def _why(self, pair: Pair, arrays: dict) -> tuple[str, str, float]:
        """The cause of weights that differ, words for it, and by how much they do."""
        for transfer in pair.transfers:
            ours, theirs = transfer.convert(arrays), transfer.variable.numpy()
            size = closest(ours, theirs)
            if np.allclose(ours, theirs, rtol=1e-6, atol=1e-8):
                continue
            size = float(np.linalg.norm(ours - theirs) / (np.linalg.norm(ours) or 1.0))
            key, words = self._reason(pair, transfer, ours, theirs, arrays)
            return key, words, size
        return "initial_values", "", 0.0

    def _reason(self, pair: Pair, transfer: Any, ours, theirs, arrays) -> tuple[str, str]:
        def equal(a: np.ndarray) -> bool:
            return a.shape == theirs.shape and np.allclose(a, theirs, rtol=1e-6, atol=1e-8)

        gates = {"lstm": 4, "gru": 3}.get(pair.pt.kind)
        if gates:
            parts = np.split(ours, gates, -1)
            for order in permutations(range(gates)):
                if equal(np.concatenate([parts[place] for place in order], -1)):
                    return "recurrent_gates", f"now in the order {order} of them"
            if transfer.role == "bias":
                more = np.split(theirs - ours, gates, -1)
                if gates == 4 and np.allclose(more[1], 1.0, atol=1e-6):
                    return "forget_bias", ""
                for name in transfer.names:
                    if equal(np.asarray(arrays[name]).reshape(theirs.shape[:1])):
                        return "recurrent_bias", ""
        if ours.ndim > 1:
            raw = np.asarray(arrays[transfer.names[0]])
            turned = [np.transpose(ours, axes) for axes in permutations(range(ours.ndim))]
            flipped = [np.flip(ours, axis) for axis in range(ours.ndim)]
            if any(map(equal, [*turned, *flipped])) or (
                raw.size == theirs.size and equal(raw.reshape(theirs.shape))
            ):
                return "kernel_layout", f"{transfer.how} of {transfer.names[0]}"
        for other, candidate in self.weights.transfers():
            if candidate is transfer:
                continue
            value = candidate.convert(arrays)
            if equal(value) and value.std() > 0:
                return "swapped_weights", f"now {other.pt.name}'s {candidate.role}"
        return "initial_values", ""


def is_inner(pair: Pair, pairs: list[Pair]) -> bool:
    """Whether a recurrent layer is one of several in a module, and not the last."""
    module = pair.pt.name.rpartition("_l")[0]
    after = pairs[pairs.index(pair) + 1 :]
    return bool(module) and any(other.pt.name.startswith(f"{module}_l") for other in after)


def _first_of(unequal: list[Event], events: list[Event]) -> int:
    """The place of the first call that makes a difference of equal inputs.

    Masks, such as PyTorch makes of tokens, may be nowhere in TensorFlow, and are no difference.
    """
    if not unequal:
        return len(events)
    differs = {id(event.out) for event in unequal}
    equal = {id(event.out) for event in events} - differs
    made = (e for e in unequal if any(id(t) in equal for t in e.tensors()))
    return next(made, unequal[0]).place


def _tried(change: Change, event: Event) -> Tensor | None:
    """What a change gives; None where it cannot be made here."""
    try:
        with torch.no_grad():
            out = change.apply(_harmless(event))
    except Exception:  # of another shape than the change is for
        return None
    out = out[0] if isinstance(out, tuple) else out
    return out if isinstance(out, Tensor) and out.is_floating_point() else None


def _single(event: Event, change: Change) -> Callable[[Event], Any]:
    """The change of one call."""

    def patch(other: Event) -> Any:
        same = (other.place, other.name, other.layer) == (event.place, event.name, event.layer)
        if change.together and not same:
            return change.together(other)
        return change.apply(other) if same else None

    return patch


def _alike(
    event: Event, change: Change, context: Context, count: list[int]
) -> Callable[[Event], Any]:
    """The change of all calls that have the same setting; they are counted."""

    def patch(other: Event) -> Any:
        if other.name != event.name or not _like(change, other, context):
            return None
        count[0] += 1
        return change.apply(other)

    return patch


def _like(change: Change, other: Event, context: Context) -> bool:
    """Whether another call has the setting that was changed."""
    alternatives = [c for c in changes(_with_out(other), context) if c.key == change.key]
    return any(c.alike == change.alike for c in alternatives)


def _harmless(event: Event) -> Event:
    """A call that may be made again: of BatchNorm with copies of its running statistics."""
    if event.name != "batch_norm":
        return event
    x, *kept = event.args[:3]
    copies = tuple(None if tensor is None else tensor.clone() for tensor in kept)
    return replace(event, args=(x, *copies, *event.args[3:]))


def _with_out(event: Event) -> Event:
    event = _harmless(event)
    if event.out is None:
        result = event.function(*event.args, **event.kwargs)
        event.out = result[0] if isinstance(result, tuple) else result
    return event


def _settings(layer: Any) -> tuple[Settings, ...]:
    cell = type(layer).__name__
    kinds = {"LSTMCell": "lstm", "GRUCell": "gru", "SimpleRNNCell": "rnn"}
    if cell not in kinds:
        return ()
    names = [
        getattr(getattr(layer, n, None), "__name__", "")
        for n in ("activation", "recurrent_activation")
    ]
    names[1] = names[1] or "sigmoid"
    if not all(name in FUNCTIONS for name in names):
        return ()
    return (Settings(kinds[cell], *names, bool(getattr(layer, "reset_after", True))),)


__all__ = ["Forward", "Index", "Pass"]
