"""The first layer whose output differs, and the change of a call that explains it."""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import permutations
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bench.port import pytorch_side, scaling, tensorflow_side
from bench.port.alternatives import Change, Context, changes
from bench.port.pytorch_side import RECURRENT, Event, Patch, PyTorchSide
from bench.port.recurrent import FUNCTIONS, Settings
from bench.port.report import Report, Say
from bench.port.tensorflow_side import TensorFlowSide
from bench.port.values import (
    FLOOR,
    MOST,
    TIMES_ROUNDING,
    WITHOUT_ROUNDING,
    Entry,
    closest,
    numpy,
    varies,
)
from bench.port.weights import GATES, Pair, Transfer, Weights
from shared import user_model
from shared.user_model import BadFile

MOST_CHANGES, MOST_SECONDS = 60, 90.0  # of the processor
# Up to which a call may differ though outputs after it are equal; how much less its change leaves.
HIDDEN, CLEAR = 0.01, 5.0
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

    @property
    def equal(self) -> bool:
        """Whether the outputs are equal."""
        return self.size <= self.bound

    def bound_at(self, place: int) -> float:
        """The bound for a call; at least that of the calls before it."""
        return max(self.bounds[: place + 1], default=FLOOR)

    @cached_property
    def twins(self) -> list[Entry | None]:
        """By call, TensorFlow's tensor that equals its output."""
        return [self.match(event) for event in self.pt.events]

    def match(self, event: Event, out: Tensor | None = None, layer: str | None = None) -> Any:
        """TensorFlow's tensor that equals a call's output, or a changed one."""
        tensor = event.out if out is None else out
        return self.tf.index.match(numpy(tensor), self.bound_at(event.place), layer)


@dataclass
class Forward:
    """Searches for differences of outputs. Changes that explained one stay in force."""

    report: Report
    say: Say
    pt: PyTorchSide
    tf: TensorFlowSide
    weights: Weights
    taken: set[int] = field(default_factory=set)  # places of TensorFlow's tensors with an equal

    def search(self, step: str) -> Pass | None:
        """All differences in a mode; None if one has no known cause."""
        training, start, scaled = step == "training", time.process_time(), None
        theirs, bounds = self.tf.trace(training=training), self._bounds(training)
        context = self._context(training)
        both = self._compared(theirs, bounds, training)
        if not (both.equal or training):
            scaled = scaling.find(self.pt, self.tf, both.pt, theirs, self.weights)
            if scaled:
                self.pt.before = scaled.apply
                bounds = self._bounds(training)
                both = self._compared(theirs, bounds, training)
            if not both.equal and self._repair(both):
                theirs = self.tf.trace()
                both = self._compared(theirs, bounds, training)
        for _ in range(MOST_CHANGES):
            context.events = both.pt.events
            if not both.equal:
                self.say(f"the outputs differ by {both.size:.1e}: looking for the layer")
            event, change, before = self._cause(both, context)
            done = change is None or time.process_time() - start > MOST_SECONDS
            if done and not both.equal:
                break
            if scaled:  # what was changed or is equal now shows that the scaling is right
                words = (FLOOR, "the inputs", "preprocessing", scaled.words)
                self.report.add(step, scaled.layers, scaled.size, *words)
                scaled = None
            if done:
                return both
            places = self._change(event, change, both, context)
            self._note(step, both, event, change, before, places)
            both = self._compared(theirs, bounds, training)
        if scaled:
            self.pt.before = lambda x: x
            both = self._compared(theirs, bounds, training)
        self._unexplained(step, both)
        return None

    def _bounds(self, training: bool) -> list[float]:
        events = self.pt.trace(training=training).events
        sizes = self.pt.rounding(events, training=training)
        if sizes is None:
            return [WITHOUT_ROUNDING] * len(events)
        return [min(max(TIMES_ROUNDING * size, FLOOR), MOST) for size in sizes]

    def _compared(self, theirs: Any, bounds: list[float], training: bool) -> Pass:
        ours = self.pt.trace(training=training)
        both = Pass(ours, theirs, bounds)
        shapes = [[tuple(t.shape) for t in side.outputs] for side in (ours, theirs)]
        sizes = [[np.prod(shape, dtype=int) for shape in side] for side in shapes]
        if sizes[0] != sizes[1]:
            words = [", ".join(map(str, side)) for side in shapes]
            raise BadFile(
                f"outputs have different shapes: {words[0]} in PyTorch, {words[1]} in TensorFlow"
            )
        places = {id(event.out): event.place for event in ours.events}
        for a, b in zip(ours.outputs, theirs.outputs, strict=True):
            bound = both.bound_at(places.get(id(a), len(bounds) - 1))
            size = closest(numpy(a), numpy(b))
            if size / bound >= both.size / (both.bound or 1.0):
                both.size, both.bound = size, bound
        return both

    def _cause(self, both: Pass, context: Context) -> tuple:
        """The first call with a change that makes it equal to something in TensorFlow.

        Where outputs are equal, of calls that differ by so little that it is lost in later layers.
        """
        before, unequal, hidden = "", [], both.equal
        self.taken = set()
        for event in both.pt.events:
            if entry := both.twins[event.place]:
                self.taken.add(entry.place)
                before = before if unequal else event.layer or before
            else:
                unequal.append(event)
        for event in unequal:
            if hidden and not both.tf.index.match(numpy(event.out), HIDDEN):
                continue  # it differs by more, or is nowhere in TensorFlow
            for change in changes(event, context):
                out = _tried(change, event)
                if out is None or (hidden and not self._is_clear(event, out, both)):
                    continue
                if change.shown_later:
                    if self._shows(event, change, both, context):
                        return event, change, before
                elif varies(numpy(out)) and both.match(event, out):
                    return event, change, before
        if hidden:
            return None, None, before
        # What a reshape or a factor gives may equal another tensor; it shows where it is used.
        last = _first_of(unequal, both.pt.events)
        for event in reversed(both.pt.events[max(last - WINDOW, 0) : last + WINDOW]):
            for change in changes(event, context) if event.name in SHOWN_LATER else ():
                if _tried(change, event) is not None and self._shows(event, change, both, context):
                    return event, change, before
        return None, None, before

    def _is_clear(self, event: Event, out: Tensor, both: Pass) -> bool:
        """Whether a call differs by little, and its change leaves next to nothing of that."""
        entry = both.match(event, out)
        if entry is None:
            return False
        sizes = [closest(numpy(tensor), numpy(entry.tensor)) for tensor in (event.out, out)]
        return CLEAR * max(sizes[1], FLOOR) < sizes[0] < HIDDEN

    @contextmanager
    def _patched(self, patch: Patch, both: Pass) -> Any:
        """PyTorch's run with a patch, None where calls after it fail; it is taken off again."""
        self.pt.patches.append(patch)
        try:
            ours = self.pt.trace(training=both.pt.training)
        except Exception:  # of another shape than calls after it take
            ours = None
        finally:
            self.pt.patches.remove(patch)
        yield ours

    def _change(self, event: Event, change: Change, both: Pass, context: Context) -> int:
        """Have the change in force for all calls like it, or for this one; how many it was."""
        count: list[int] = []
        alike, single = _alike(event, change, context, count), _single(event, change)
        harmless = 0
        for patch in (alike, single):
            count.clear()
            with self._patched(patch, both) as ours:
                if ours is None:
                    continue
                pairs = zip(both.pt.events, ours.events, strict=False)
                if any(self._worse(*pair, both) for pair in pairs):
                    continue
                outputs = zip(ours.outputs, both.tf.outputs, strict=True)
                if all(closest(numpy(a), numpy(b)) <= both.bound for a, b in outputs):
                    self.pt.patches.append(patch)
                    return max(len(count), 1)
                harmless = len(count) if len(count) > 1 else harmless
        self.pt.patches.append(alike if harmless else single)
        return harmless or 1

    def _shows(self, event: Event, change: Change, both: Pass, context: Context) -> bool:
        """Whether calls after a changed one, or outputs, have their equal then and had none."""
        for patch in (_single(event, change), _alike(event, change, context, [])):
            with self._patched(patch, both) as ours:
                if ours is None:
                    continue
                first = event.place + 1
                pairs = zip(both.pt.events[first:], ours.events[first:], strict=False)
                pairs = list(pairs)[:WINDOW]
                if any(self._worse(old, new, both) for old, new in pairs):
                    continue
                for old, new in pairs:
                    entry = None if both.twins[old.place] else both.match(old, new.out)
                    if entry and entry.place not in self.taken and varies(numpy(new.out)):
                        return True
                outputs = zip(both.pt.outputs, ours.outputs, both.tf.outputs, strict=True)
                for old, new, theirs in outputs:
                    sizes = [closest(numpy(t), numpy(theirs)) for t in (old, new)]
                    if sizes[1] <= both.bound < sizes[0] and varies(numpy(new)):
                        return True
        return False

    def _worse(self, old: Event, new: Event, both: Pass) -> bool:
        """Whether a call had its equal and has none once something before it was changed."""
        same = both.twins[old.place] is None or torch.equal(old.out, new.out)
        return not same and not both.match(old, new.out)

    def _note(self, step, both: Pass, event: Event, change: Change, before, places: int) -> None:
        """Add a finding, or more places to one of the same cause."""
        out = _first(change.apply(_harmless(event)))
        bound = both.bound_at(event.place)
        entries: list[Entry] = list(both.tf.index.matches(numpy(out), bound))
        entry = entries[-1 if event.name in RESHAPES else 0] if entries else None
        size = closest(numpy(event.out), numpy(entry.tensor)) if entry else both.size
        layers = (self._layer(both, event), entry.layer if entry else "")
        values = (change.a, change.b)
        self.report.add(step, layers, size, bound, _before(before), change.key, values, places)

    def _layer(self, both: Pass, event: Event) -> str:
        """The layer of a call; of one that stands between layers the next."""

        def is_leaf(name: str) -> bool:
            module = self.pt.module(name) if name else None
            return module is not None and not any(True for _ in module.children())

        if event.layer and (is_leaf(event.layer) or "add" not in event.name):
            return event.layer
        later = (e.layer for e in both.pt.events[event.place + 1 :] if is_leaf(e.layer))
        return next(later, event.layer)

    def _unexplained(self, step: str, both: Pass) -> None:
        """Add the first pair of layers whose outputs differ, without a cause."""
        first = self._first_unequal(both)
        layers, before, size = ("", ""), "", both.size
        if first is not None:
            pair = self.weights.pairs[first]
            layers, event = pair.layers, self._event(both, pair)
            before = self.weights.pairs[first - 1].pt.name if first else ""
            size = both.tf.index.nearest(numpy(event.out), pair.tf.name)
            size = min(size, both.size) or both.size
            # A layer without weights may differ before it.
            begun = not before
            for other in both.pt.events[: event.place]:
                begun = begun or other.layer == before
                if begun and other.layer not in ("", before) and not both.twins[other.place]:
                    layers = (other.layer, layers[1])
                    break
        self.report.add(step, layers, size, both.bound, _before(before))

    def _event(self, both: Pass, pair: Pair) -> Event | None:
        """The call that takes a pair's weights."""
        names = [name for part in pair.pt.parts.values() for name in part]
        tensors = {id(self.weights.state[name]) for name in names}
        taking = (e for e in both.pt.events if any(id(t) in tensors for t in e.tensors()))
        return next(taking, None)

    def _context(self, training: bool) -> Context:
        context = Context(training=training)
        names = {"norm_epsilon": ("epsilon",), "negative_slope": ("negative_slope", "alpha")}
        layers = self.tf.layers()
        for key, attributes in names.items():
            values = [getattr(layer, name, None) for layer in layers for name in attributes]
            numbers = {float(v) for v in values if isinstance(v, (int, float)) and v}
            context.values[key] = tuple(numbers)
        context.recurrent = tuple(s for layer in layers for s in _settings(layer))
        leaves = enumerate(user_model.leaves(self.pt.x))
        places = [place for place, t in leaves if t.ndim == 2 and not t.is_floating_point()]
        context.tokens = tuple(partial(self.pt.input, place) for place in places)
        return context

    # Weights ---------------------------------------------------------------------------------

    def _repair(self, both: Pass) -> bool:
        """Copy weights that the file left different; False where there are none, or in vain."""
        arrays = self.weights.arrays()
        wrong = [pair for pair in self.weights.pairs if not self.weights.equal(pair, arrays)]
        if not wrong:
            return False
        before = [variable.numpy() for variable in self.tf.model.weights]
        first = self._first_unequal(both)
        notes = [(pair, *self._why(pair, arrays)) for pair in wrong]
        for pair in wrong:
            self.weights.copy(pair)
        after = self._compared(self.tf.trace(), both.bounds, False)
        moved = self._first_unequal(after)
        if after.size > after.bound and moved is not None and first is not None and moved <= first:
            for variable, value in zip(self.tf.model.weights, before, strict=True):
                variable.assign(value)
            return False
        for key in dict.fromkeys(key for _, key, *_ in notes):
            alike = [note for note in notes if note[1] == key]
            pair, _, words, size = alike[0]
            words = words or ", ".join(note[0].tf.name for note in alike[:3])
            told = ("nothing: weights are compared first", key, ("", words), len(alike))
            self.report.add("weights", pair.layers, size, 0.0, *told)
        return True

    def _first_unequal(self, both: Pass) -> int | None:
        """The place of the first pair whose layers give different outputs."""
        for place, pair in enumerate(self.weights.pairs):
            event = self._event(both, pair)
            if event is None or (event.name in RECURRENT and _is_inner(pair, self.weights.pairs)):
                continue
            if not both.match(event, layer=pair.tf.name):
                return place
        return None

    def _why(self, pair: Pair, arrays: dict) -> tuple[str, str, float]:
        """The cause of weights that differ, words for it, and by how much they do."""
        for transfer in pair.transfers:
            ours, theirs = transfer.convert(arrays), transfer.variable.numpy()
            if not _close(ours, theirs):
                size = float(np.linalg.norm(ours - theirs) / (np.linalg.norm(ours) or 1.0))
                return *self._reason(pair, transfer, ours, theirs, arrays), size
        return "initial_values", "", 0.0

    def _reason(self, pair: Pair, transfer: Transfer, ours, theirs, arrays) -> tuple[str, str]:
        raw = np.asarray(arrays[transfer.names[0]])
        gates = GATES.get(pair.pt.kind, 1)
        if gates > 1:
            parts = np.split(ours, gates, -1)
            for order in permutations(range(gates)):
                if _close(np.concatenate([parts[place] for place in order], -1), theirs):
                    return "recurrent_gates", f", which are now {order}"
        if gates > 1 and transfer.role == "bias":
            if gates == 4 and np.allclose(np.split(theirs - ours, 4, -1)[1], 1.0, atol=1e-6):
                return "forget_bias", ""
            single = (np.asarray(arrays[name]) for name in transfer.names)
            if any(_close(bias.reshape(theirs.shape[:1]), theirs) for bias in single):
                return "recurrent_bias", ""
        if ours.ndim > 1:
            made = [np.transpose(ours, axes) for axes in permutations(range(ours.ndim))]
            made += [np.flip(ours, axis) for axis in range(ours.ndim)]
            made += [raw.reshape(theirs.shape)] if raw.size == theirs.size else []
            if any(_close(array, theirs) for array in made):
                return "kernel_layout", f"{transfer.how} of {transfer.names[0]}"
        for other, candidate in self.weights.transfers():
            value = ours if candidate is transfer else candidate.convert(arrays)
            if value is not ours and value.std() > 0 and _close(value, theirs):
                return "swapped_weights", f"it holds {other.pt.name}'s {candidate.role}"
        return "initial_values", ""


def _close(ours: np.ndarray, theirs: np.ndarray) -> bool:
    return ours.shape == theirs.shape and np.allclose(ours, theirs, rtol=1e-6, atol=1e-8)


def _before(layer: str) -> str:
    return f"all up to {layer}" if layer else "the inputs"


def _is_inner(pair: Pair, pairs: list[Pair]) -> bool:
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
    equal = {id(event.out) for event in events} - {id(event.out) for event in unequal}
    made = (e for e in unequal if any(id(t) in equal for t in e.tensors()))
    return next(made, unequal[0]).place


def _first(result: Any) -> Any:
    return result[0] if isinstance(result, tuple) else result


def _tried(change: Change, event: Event) -> Tensor | None:
    """What a change gives; None where it cannot be made here."""
    try:
        with torch.no_grad():
            out = _first(change.apply(_harmless(event)))
    except Exception:  # of another shape than the change is for
        return None
    return out if isinstance(out, Tensor) and out.is_floating_point() else None


def _single(event: Event, change: Change) -> Patch:
    """The change of one call."""

    def patch(other: Event) -> Any:
        if other.is_again(event):
            return change.apply(other)
        return change.together(other) if change.together else None

    return patch


def _alike(event: Event, change: Change, context: Context, changed: list) -> Patch:
    """The change of all calls that have the same setting; they are counted."""

    def patch(other: Event) -> Any:
        if other.name != event.name:
            return None
        made = _harmless(other)
        made = replace(made, out=_first(made.function(*made.args, **made.kwargs)))
        alternatives = (c for c in changes(made, context) if c.key == change.key)
        if not any(c.alike == change.alike for c in alternatives):
            return None
        changed.append(other.place)
        return change.apply(other)

    return patch


def _harmless(event: Event) -> Event:
    """A call that may be made again: of BatchNorm with copies of its running statistics."""
    if event.name != "batch_norm":
        return event
    x, *kept = event.args[:3]
    copies = tuple(None if tensor is None else tensor.clone() for tensor in kept)
    return replace(event, args=(x, *copies, *event.args[3:]))


def _settings(layer: Any) -> tuple[Settings, ...]:
    kinds = {"LSTMCell": "lstm", "GRUCell": "gru", "SimpleRNNCell": "rnn"}
    kind = kinds.get(type(layer).__name__)
    names = [
        getattr(getattr(layer, name, None), "__name__", "sigmoid")
        for name in ("activation", "recurrent_activation")
    ]
    if kind is None or not all(name in FUNCTIONS for name in names):
        return ()
    return (Settings(kind, *names, bool(getattr(layer, "reset_after", True))),)
