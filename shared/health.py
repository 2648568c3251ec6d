"""Facts about a set-up that `twinbench doctor` judges: measured in a framework's own process.

`run` is the program that each framework's `kit/health.py` starts. It prints a line of JSON for each
group of facts, as soon as it has them: a caller that stops waiting keeps those before. Here is what
needs no framework: drawing batches, their shapes and padding, and what a row costs.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field, is_dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from shared import user_model
from shared.cgroups import usable_threads
from shared.profiles import in_order

MARK = "twinbench-doctor "  # what a line of facts begins with: a file may print others
MOST_BATCHES, MOST_DRAWING_S = 64, 2.5
FEWEST_SAMPLES = 8  # of a batch: with fewer, calls do not tell whether rows are fetched one by one
FEWEST_POSITIONS = 8  # of a sequence: in shorter rows an end of equal values is no padding
NO_TARGET = -100  # what both frameworks' users mark positions with that have no target
PRODUCT, PRODUCT_S = 512, 0.2  # rows and columns of a timed product, and for how long it is timed
# Of pools of two sizes. A turn lasts two periods of a quota (0.1 s), which stops a pool that has
# spent its share. Six ratios lie on both sides of their median, but for 3% of all times.
TURNS, TURN_S = 6, 0.2
# Calls that are timed: of short ones many, since other programs slow most of them.
FEWEST_TURNS, MOST_TURNS, MOST_TIMED_S = 3, 50, 1.5
NEW_SHAPES = 3  # whose first step is timed


@dataclass(frozen=True)
class Pools:
    """Threads by pool. `busy`: cores that a large product kept busy, where that was measured.

    `flops`: FLOP/s of that product. `gain`: between how many and how many times as many products a
    second a pool of the right size computed, in `TURNS` turns; None where no pool is resized.
    """

    threads: dict[str, int]
    busy: float | None = None
    flops: float | None = None
    gain: tuple[float, float] | None = None


@dataclass(frozen=True)
class Products:
    """The best FLOP/s of a large product, by dtype."""

    flops: dict[str, float]


@dataclass(frozen=True)
class Batches:
    """What a loader gives, and what it takes.

    `shapes`: of a batch's arrays without the axis of samples, and how many batches have them.
    `padding`: the share of positions that are padding; None where nothing looks like padding.
    `to_longest`: that share if all batches were padded to the longest. `draw_s`: seconds a batch;
    `copy_s`: seconds to copy one. `calls`: how often a batch calls `of`, the function that it calls
    most. `by_row`: whether it fetches rows one by one.
    """

    drawn: int
    samples: int
    shapes: dict[str, int]
    padding: float | None
    to_longest: float
    draw_s: float
    copy_s: float
    calls: int = 0
    of: str = ""
    by_row: bool = False
    workers: int = 0


@dataclass(frozen=True)
class NewShapes:
    """Seconds of the first step at a shape and of a later one, summed over some shapes."""

    count: int
    first_s: float
    again_s: float


@dataclass(frozen=True)
class Denormals:
    """Shares of float32 values that are denormal, and what they cost.

    `with_s`: seconds of `what` with denormal numbers; `without_s`: where they are flushed to zero,
    or with ordinary numbers. `what`: "step", or "product" where the framework flushes them itself.
    """

    weights: float
    outputs: float
    with_s: float
    without_s: float
    what: str


@dataclass(frozen=True)
class Mode:
    """A setting that makes steps slow: seconds with it and without it, None where not measured."""

    name: str
    with_s: float | None = None
    without_s: float | None = None


@dataclass(frozen=True)
class Predicting:
    """Keras's predict in a loop: seconds a call, those of the model itself in a graph."""

    samples: int
    predict_s: float
    direct_s: float


@dataclass(frozen=True)
class Facts:
    """All that is known of one framework's side; None or empty where it was not asked.

    `without_onednn_s`: seconds of a convolution with its gradients, where it is not oneDNN's.
    `set_by_file`: pools whose size the file changed. `keras`: the architecture of the file's Keras
    model as JSON. `skipped`: why a group is missing.
    """

    version: str = ""
    pools: Pools | None = None
    without_onednn_s: float | None = None
    set_by_file: Pools | None = None
    products: Products | None = None
    batches: Batches | None = None
    step_s: float | None = None
    new_shapes: NewShapes | None = None
    denormals: Denormals | None = None
    modes: tuple[Mode, ...] = ()
    predicting: Predicting | None = None
    keras: str = ""
    keras_backend: str = ""
    skipped: dict[str, str] = field(default_factory=dict)


@dataclass
class Subject:
    """A user's file at work: its models, a step, and what gives its batches, in order.

    `arguments`: what the step is given of a batch. `keras`: see `Facts`.
    """

    models: list[Any]
    step: Callable
    batches: Callable[[], Iterable]
    arguments: Callable = in_order
    keras: str = ""


# The program -------------------------------------------------------------------------------------


def run(kit: ModuleType, about: str | None) -> None:
    """Read the command line, and print a framework's facts: of the machine, and of a file."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("file", nargs="?", help="for `twinbench try` or `twinbench diagnose`")
    given = parser.parse_args()
    _say("version", kit.version())
    before = kit.pools()
    pools = _pools(kit, before)
    _say("pools", pools)
    _say("without_onednn_s", kit.without_onednn())
    try:
        if given.file:
            sys.path.insert(0, ".")  # of its imports
            tell_of_file(kit, os.path.abspath(given.file), before)
    finally:  # last, since a dtype that the processor lacks takes long
        bfloat16 = kit.product(dtype="bfloat16", size=PRODUCT, seconds=PRODUCT_S)
        _say("products", Products({"float32": pools.flops, "bfloat16": bfloat16}))


def _pools(kit: ModuleType, threads: dict[str, int]) -> Pools:
    """The pools, with what a product does in them, and in turns with pools of the right size."""
    cpu, start = time.process_time(), time.perf_counter()
    flops = kit.product(dtype="float32", size=PRODUCT, seconds=PRODUCT_S)
    busy = (time.process_time() - cpu) / (time.perf_counter() - start)
    if threads["intra-op"] == usable_threads():
        return Pools(threads, busy, flops)
    turns = [
        [
            kit.product_with(threads=count, size=PRODUCT, seconds=TURN_S)
            for count in (usable_threads(), threads["intra-op"])
        ]
        for _ in range(TURNS)
    ]
    if None in turns[0]:
        return Pools(threads, busy, flops)
    gains = [right / known for right, known in turns]
    return Pools(threads, busy, flops, (min(gains), max(gains)))


def tell_of_file(kit: ModuleType, path: str, before: dict[str, int]) -> None:
    """Print what is known of a file, group by group; what fails is said, and the rest goes on."""
    source = Path(path).read_text("utf-8", "replace")
    subject = kit.subject(user_model.load(path))
    after = kit.pools()
    if after != before:
        _say("set_by_file", _pools(kit, after))
    _say("keras", subject.keras)
    _say("keras_backend", os.environ.get("KERAS_BACKEND", ""))
    batches, by_shape = drawn(subject.batches(), kit.rows_by_python)
    _say("batches", batches)
    given = [subject.arguments(batch) for batch in by_shape]
    groups = {
        "denormals": lambda: kit.denormals(subject, given[0]),
        "modes": lambda: tuple(kit.modes(subject, given[0])),
        "predicting": lambda: kit.predicting(subject, given[0], predicts_in_a_loop(source)),
        "step_s": lambda: in_turns(lambda: subject.step(*given[0]))[0],
        "new_shapes": lambda: new_shapes(subject.step, given[1:]),
    }
    for name, group in groups.items():
        try:
            _say(name, group())
        except (Exception, SystemExit) as error:
            _say("skipped", {name: user_model.one_line(error)})


def _say(name: str, value: Any) -> None:
    """One line of facts."""
    told = [asdict(one) for one in value] if isinstance(value, tuple) else value
    told = asdict(told) if is_dataclass(told) else told
    print(f"{MARK}{json.dumps({name: told})}", flush=True)


def predicts_in_a_loop(source: str) -> bool:
    """Whether a text calls a method `predict` within a loop or a comprehension."""
    loops = (ast.For, ast.AsyncFor, ast.While, ast.ListComp, ast.SetComp, ast.DictComp)
    loops += (ast.GeneratorExp,)
    calls = (
        node.func
        for loop in ast.walk(ast.parse(source))
        if isinstance(loop, loops)
        for node in ast.walk(loop)
        if isinstance(node, ast.Call)
    )
    return any(isinstance(called, ast.Attribute) and called.attr == "predict" for called in calls)


def in_turns(*functions: Callable) -> list[float]:
    """The fewest seconds of a call of each, taken in turns after one call of each."""
    best, start = [float("inf")] * len(functions), time.perf_counter()
    for function in functions:
        function()
    for turn in range(MOST_TURNS):
        if turn >= FEWEST_TURNS and time.perf_counter() - start > MOST_TIMED_S:
            break
        for place, function in enumerate(functions):
            begun = time.perf_counter()
            function()
            best[place] = min(best[place], time.perf_counter() - begun)
    return best


# Batches -----------------------------------------------------------------------------------------


def batches_of(module: ModuleType, side: str) -> Callable[[], Iterable]:
    """What gives the batches of a file for `try`: its own loader, or those that it draws."""
    if hasattr(module, "batches"):
        return module.batches
    size, seed = user_model.usual_size(module), user_model.SEED
    places = range(user_model.BATCHES)
    return lambda: (user_model.given(module, size, seed + place, side) for place in places)


def drawn(loader: Iterable, rows_by_python: Callable) -> tuple[Batches, list]:
    """What batches are and what drawing them takes, for some seconds; a batch of each first shape.

    rows_by_python: (loader) -> the Python function that it calls for each row elsewhere, or "".
    Raises BadFile where there are none.
    """
    paddings, sizes, taken, shapes = [], [], [], []
    by_shape: dict[str, Any] = {}
    calls: Counter = Counter()
    iterator, start = iter(loader), time.perf_counter()
    while len(shapes) < MOST_BATCHES and time.perf_counter() - start < MOST_DRAWING_S:
        begun = time.perf_counter()
        batch, watched = _watched(iterator) if len(shapes) == 1 else (next(iterator, None), None)
        if batch is None:
            break
        if watched is None:
            taken.append(time.perf_counter() - begun)
        calls = calls if watched is None else watched
        arrays = list(map(np.asarray, user_model.leaves(user_model.arrays(batch))))
        shapes.append(" ".join(str(array.shape[1:]) for array in arrays))
        paddings.append(padding(batch))
        sizes.append(arrays[0].size / max(len(arrays[0]) if arrays[0].ndim else 1, 1))
        if len(by_shape) <= NEW_SHAPES:
            by_shape.setdefault(shapes[-1], batch)
    if not shapes:
        raise user_model.BadFile("there are no batches")
    first = list(
        map(np.asarray, user_model.leaves(user_model.arrays(next(iter(by_shape.values())))))
    )
    samples = len(first[0]) if first[0].ndim else 1
    (copy_s,) = in_turns(lambda: [array.copy() for array in first])
    (of, count), *_ = calls.most_common(1) or [("", 0)]
    elsewhere = rows_by_python(loader)
    padded = [share for share in paddings if share is not None]
    facts = Batches(
        drawn=len(shapes),
        samples=samples,
        shapes=dict(Counter(shapes)),
        padding=sum(padded) / len(shapes) if padded else None,
        to_longest=1 - float(np.mean(sizes)) / max(sizes),
        draw_s=float(np.median(taken[1:] or taken)),
        copy_s=copy_s,
        calls=count,
        of=elsewhere or of,
        by_row=samples >= FEWEST_SAMPLES and (count >= samples or bool(elsewhere)),
        workers=int(getattr(loader, "num_workers", 0) or 0),
    )
    return facts, list(by_shape.values())


def _watched(iterator: Iterator) -> tuple[Any, Counter]:
    """The next batch, and how often it called each function of this thread."""
    calls: Counter = Counter()

    def note(frame: Any, event: str, argument: Any) -> None:
        if event == "call":
            calls[frame.f_code.co_qualname] += 1
        elif event == "c_call":
            calls[getattr(argument, "__qualname__", "")] += 1

    sys.setprofile(note)
    try:
        batch = next(iterator, None)
    finally:
        sys.setprofile(None)
    return batch, calls


def new_shapes(step: Callable, given: list) -> NewShapes | None:
    """What the first step at a shape takes and a later one; None where there are no such shapes.

    given: a step's arguments at each of some shapes that it was not called with before.
    """
    if not given:
        return None

    def once() -> float:
        start = time.perf_counter()
        for arguments in given:
            step(*arguments)
        return time.perf_counter() - start

    return NewShapes(len(given), once(), min(once() for _ in range(2)))


def padding(batch: Any) -> float | None:
    """The share of a batch's positions that are padding; None where nothing looks like it.

    A mask says it, targets of -100 do, and rows that end (or begin) in one value that they have
    nowhere else: of integers (samples, positions), of frames (samples, positions, features).
    """
    for name, leaf in _named(batch):
        if "mask" in name.lower():
            mask = np.asarray(user_model.arrays(leaf))
            return float(1 - (mask != 0).mean())
    shares = []
    for leaf in user_model.leaves(batch):
        array = np.asarray(user_model.arrays(leaf))
        if array.ndim == 2 and array.dtype.kind in "iu":
            if (array == NO_TARGET).any():
                shares.append(float((array == NO_TARGET).mean()))
            shares += [_ends(array == _usual(array[:, end])) for end in (0, -1)]
        elif array.ndim == 3 and array.dtype.kind == "f":
            shares.append(_ends((array == 0).all(-1)))
    return max(shares, default=0.0) or None


def _named(tree: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of a structure with the names that dicts give them."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from _named(value, str(key))
    elif isinstance(tree, (tuple, list)):
        for value in tree:
            yield from _named(value, name)
    else:
        yield name, tree


def _usual(column: np.ndarray) -> int:
    """The most frequent value."""
    values, counts = np.unique(column, return_counts=True)
    return int(values[counts.argmax()])


def _ends(same: np.ndarray) -> float:
    """The share of positions in the ends of rows that hold a value which stands nowhere else.

    same: (samples, positions), where that value is. 0 where rows are short or few end in it.
    """
    if same.shape[1] < FEWEST_POSITIONS:
        return 0.0
    after = np.minimum.accumulate(same[:, ::-1], axis=1)[:, ::-1]
    before = np.minimum.accumulate(same, axis=1)
    ends = after if after.sum() >= before.sum() else before
    rows = (ends.sum(1) >= 2).mean()
    elsewhere = (same & ~ends).sum() / max((~ends).sum(), 1)
    return float(ends.mean()) if rows >= 0.25 and elsewhere < 0.01 else 0.0


def denormal_share(arrays: Iterable[np.ndarray]) -> float:
    """The share of float32 values that are denormal: not 0, and below 1.18e-38."""
    count = whole = 0
    for array in arrays:
        if array.dtype == np.float32:
            bits = np.ascontiguousarray(array).view(np.uint32)  # no arithmetic, which may flush
            count += int((((bits & 0x7F800000) == 0) & ((bits & 0x007FFFFF) != 0)).sum())
            whole += array.size
    return count / whole if whole else 0.0
