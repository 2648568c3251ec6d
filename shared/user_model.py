"""A user's own model: the file that holds it, and what is prepared of it for a run.

The file is executed only in workers, and there a framework at a time. What a framework's check
has prepared lies in a folder a framework ("pt", "tf"): the batches, the initial weights, and what
`about.json` says of them. From these every row starts. Neither framework is imported here.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import inspect
import json
import linecache
import math
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.machinery import SourceFileLoader
from itertools import pairwise
from numbers import Integral
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from shared.profiles import in_order
from shared.specs import TASKS, DatasetSpec, FileSpec, Recipe, Task

MAKERS = {"pt": "pytorch", "tf": "tensorflow"}
KERAS = "keras"  # makes the model of a framework that the file has no other function for
FUNCTIONS = ("pytorch", "tensorflow", KERAS)
FUNCTIONS += ("batch", "batches", "copy_weights", "evaluate")
PACKAGES = ("shared", "bench", "pt_impl", "tf_impl")  # whose names a file's own can't have
USUAL_BATCH = 32  # where the file's `batch` has no default size
SOURCE = "source.py"  # the file as it was checked: it may be edited while it is measured
BATCHES = 10  # that are prepared: their losses are the certificate
SEED = 2026
PARTS = 4  # micro-batches
FEW = 4  # samples that show what a loss holds against what
# Where the file brings no optimizer.
RECIPE = Recipe(
    "adamw", learning_rate=1e-3, epochs=1, accuracy_batch_size=USUAL_BATCH, weight_decay=0.01
)


# Colours of a terminal, and what TensorFlow calls a function and an operator.
_NOISE = re.compile(r"\x1b\[[\d;]*m|\{\{function_node [^}]*\}\} |\[Op:\w+\] name: *$", re.M)


class BadFile(ValueError):
    """What is wrong with a user's file, in one line that says what to do."""


class NoFigure(BadFile):
    """Its `evaluate` failed, but no prediction that it asked for: the model may be sound."""


@dataclass(frozen=True)
class File:
    """A user's file as far as it can be known without executing it."""

    path: Path
    functions: frozenset[str]
    text: bytes = field(repr=False)

    @property
    def name(self) -> str:
        """What its task is called."""
        found = re.sub(r"[^A-Za-z0-9_.]+", "_", self.path.stem)
        return f"user_{found}" if found in TASKS else found

    @property
    def sides(self) -> list[str]:
        """The frameworks that it has a model for."""
        return [side for side in MAKERS if self.maker(side) in self.functions]

    @property
    def is_keras(self) -> bool:
        """Whether one Keras model is that of both frameworks."""
        return all(self.maker(side) == KERAS for side in self.sides)

    def maker(self, side: str) -> str:
        """The name of the function that makes a framework's model."""
        name = MAKERS[side]
        return KERAS if name not in self.functions and KERAS in self.functions else name

    def sha256(self) -> str:
        """Of its text."""
        return hashlib.sha256(self.text).hexdigest()


def look(path: str | Path) -> File:
    """Read a file without executing it. Raises BadFile where it cannot be what is asked for."""
    path = Path(path).resolve()
    try:
        text = path.read_bytes()
        tree = ast.parse(text, str(path))  # which knows marks of encodings
    except OSError as error:
        raise BadFile(f"{path} can't be read ({error.strerror}): give a Python file") from None
    except SyntaxError as error:
        if not error.lineno:  # of the whole: bytes that are no text
            raise BadFile(f"{path.name} is not a Python file ({error.msg})") from None
        raise BadFile(f"{path.name}:{error.lineno}: {error.msg}: fix this first") from None
    except (ValueError, RecursionError, MemoryError) as error:  # no text, or nested too deep
        raise BadFile(f"{path.name} is not a Python file ({error})") from None
    functions = frozenset(names(tree.body, path.parent)) & {*FUNCTIONS, "*"}
    if not any(isinstance(n, ast.FunctionDef) and n.name == KERAS for n in ast.walk(tree)):
        functions -= {KERAS}  # a file that imports Keras has the name, too
    has_model = functions & {*MAKERS.values(), KERAS}
    has_batch = functions & {"batch", "batches"}
    if "*" in functions and not (has_model and has_batch):
        raise BadFile(
            f"{path.name} imports * from a module: import pytorch, tensorflow and batch by name"
        )
    functions -= {"*"}
    if not has_model:
        raise BadFile(
            f"{path.name} has no pytorch(), tensorflow() or keras(): write one that returns "
            "(model, loss_fn); `twinbench try --example` writes an example"
        )
    if not has_batch:
        raise BadFile(
            f"{path.name} has no batch(size, seed) and no batches(): write one that returns "
            "training data"
        )
    return File(path, functions, text)


def names(body: list[ast.stmt], folder: Path | None = None) -> set[str]:
    """What a module defines at its top, under a condition too.

    `folder`: in which what it imports by * is looked for; what is not there is called "*".
    """
    defined = set()
    for node in body:
        if isinstance(node, ast.FunctionDef):
            defined.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            defined |= {alias.asname or alias.name for alias in node.names}
            if "*" in defined and folder:
                defined = defined - {"*"} | _all_names(folder, node.module or "")
        elif isinstance(node, ast.Assign):
            defined |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.If):
            defined |= names(node.body + node.orelse, folder)
        elif isinstance(node, ast.Try):
            handled = [each for handler in node.handlers for each in handler.body]
            defined |= names(node.body + handled + node.orelse + node.finalbody, folder)
    return defined


def _all_names(folder: Path, module: str) -> set[str]:
    """What a module beside a file defines that `import *` takes; "*" where there is none."""
    place = folder.joinpath(*module.split("."))
    for path in (place.with_suffix(".py"), place / "__init__.py"):
        with suppress(OSError, SyntaxError, ValueError, RecursionError, MemoryError):
            defined = names(ast.parse(path.read_bytes()).body)
            return {name for name in defined if not name.startswith("_")}
    return {"*"}


def maker_of(module: ModuleType, side: str) -> str:
    """The name of the function of an executed file that makes a framework's model."""
    name = MAKERS[side]
    has_keras = inspect.isfunction(getattr(module, KERAS, None))
    return KERAS if has_keras and not hasattr(module, name) else name


def function(module: ModuleType, *names: str) -> Callable:
    """The first of these functions that an executed file has.

    Raises BadFile where it has none, since the condition that one stands under does not hold here.
    """
    for name in names:
        if hasattr(module, name):
            return getattr(module, name)
    raise BadFile(
        f"{' or '.join(names)} is defined only under a condition that is false here: define it "
        "without one, or choose the other framework with --framework"
    )


def load_checked(path: str | Path, folder: Path, cwd: str) -> ModuleType:
    """Execute a user's file as it was when its check began, where its user started the run."""
    os.chdir(cwd)
    return load(path, (folder / SOURCE).read_bytes())


def load(path: str | Path, text: bytes | None = None) -> ModuleType:
    """Execute a user's file, or a `text` of it. Raises BadFile with the line at which it fails."""
    path = Path(path)
    text = path.read_bytes() if text is None else text
    name = path.stem if path.stem.isidentifier() and path.stem not in sys.modules else "user_file"
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))  # what lies beside it, it may import
    loader = SourceFileLoader(name, str(path))  # whatever its suffix is
    found = importlib.util.spec_from_file_location(name, path, loader=loader)
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module
    call("", path, _execute, text, path, module)
    return module


def _execute(text: bytes, path: Path, module: ModuleType) -> None:
    lines = importlib.util.decode_source(text).splitlines(keepends=True)
    linecache.cache[str(path)] = (len(text), None, lines, str(path))  # AutoGraph reads it there
    exec(compile(text, str(path), "exec", dont_inherit=True), vars(module))


def call(what: str, path: str | Path, function: Callable, *arguments: Any) -> Any:
    """Call what is in a user's file. Raises BadFile with the line of the file that failed.

    What the framework itself lacks for the model (NotImplementedError) is no fault of the file.
    """
    try:
        with _command_line(path):
            return function(*arguments)
    except BadFile:
        raise
    except (Exception, SystemExit) as error:
        inside = f" in {what}" if what else ""
        raise BadFile(f"{_place(error, path)}:{inside} {one_line(error)}{_hint(error)}") from error


@contextmanager
def _command_line(path: str | Path) -> Iterator[None]:
    """That of the file: a worker's own arguments are none of its."""
    before, sys.argv = sys.argv, [str(path)]
    try:
        yield
    finally:
        sys.argv = before


def placed(fault: BadFile, path: str | Path) -> BadFile:
    """A fault with the line of the file that its cause came through, if it has none yet."""
    cause, named = fault.__cause__, str(fault).startswith(f"{Path(path).name}:")
    return fault if cause is None or named else BadFile(f"{_place(cause, path)}: {fault}")


def _place(error: BaseException, path: str | Path) -> str:
    """The file's name and the last of its lines that an error came through, if any."""
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if _same(f, path)]
    return f"{Path(path).name}:{lines[-1]}" if lines else Path(path).name


def made(path: str | Path) -> tuple[Callable, Any]:
    """The step and its batches that `make()` of a file returns. Raises BadFile where it has none.

    What is no list is not looked into: its batches may be gone then.
    """
    return made_of(load(path))


def made_of(module: ModuleType) -> tuple[Callable, Any]:
    """The same of a file that was executed."""
    path = module.__file__
    name, make = Path(path).name, getattr(module, "make", None)
    if make is None:
        raise BadFile(f"{name} has no function make() that returns (step, batches): write one")
    returned = call("make", path, make)
    if not isinstance(returned, (tuple, list)) or len(returned) != 2 or not callable(returned[0]):
        raise BadFile(f"{name}: make() returns {_kind(returned)}, not (step, batches)")
    step, batches = returned
    expected = "return a list of tuples, one per step, such as [(x, y)]"
    if isinstance(batches, Mapping) or not hasattr(batches, "__iter__"):
        raise BadFile(f"{name}: make() returns {_kind(batches)} as its batches: {expected}")
    if isinstance(batches, (tuple, list)) and batches and (why := _refuses(step, batches[0])):
        raise BadFile(
            f"{name}: step does not accept its first batch ({why}): {expected}; a batch that is no "
            "tuple, such as a dict, is passed whole"
        )
    return step, batches


def _refuses(step: Callable, batch: Any) -> str | None:
    """Why a step does not take a batch, as far as its signature says."""
    try:
        inspect.signature(step).bind(*in_order(batch))
    except TypeError as error:
        return str(error)
    except ValueError:  # it has none
        return None
    return None


def with_made(path: str | Path, function: Callable) -> Any:
    """`function(step, batches)` of what `make()` of a file returns. Raises BadFile, too."""
    step, batches = made(path)
    return call("", path, function, step, batches)


def _hint(error: BaseException) -> str:
    """What to do where the file ends the program, can't be read, or finds the suite's package."""
    if isinstance(error, SystemExit):
        return " (it ends the program: arguments, which it has none of here, need defaults)"
    if isinstance(error, SyntaxError) and "encoding" in str(error):
        return " (save the file as UTF-8)"
    name = (getattr(error, "name", None) or "").partition(".")[0]
    if not isinstance(error, ImportError) or name not in PACKAGES:
        return ""
    return f" (the suite has a package {name!r}, too: give yours another name)"


def _same(frame: traceback.FrameSummary, path: str | Path) -> bool:
    return Path(frame.filename) == Path(path)


def one_line(error: BaseException) -> str:
    """An exception's type and the line of its message that says why."""
    words = [line.strip() for line in _NOISE.sub("", str(error)).splitlines() if line.strip()]
    if words[:1] == ["in user code:"]:  # AutoGraph's: its calls, each of two lines, come first
        calls = [place for place, line in enumerate(words) if line.startswith('File "')]
        words = words[max(calls, default=-1) + 2 :] or words
    if words[:1] == ["Graph execution error:"]:  # TensorFlow's own reason follows its calls
        words = [line for line in words if not line.startswith("[[")][-1:]
    elif words[1:] and "Exception encountered when calling" in words[0]:  # Keras's
        words = [f"{words[0].removesuffix('.')}: {words[1]}"]
    return f"{type(error).__name__}: {words[0]}" if words else type(error).__name__


# What a loss is given ----------------------------------------------------------------------------


def check_order(loss: Callable) -> None:
    """Raise BadFile where a loss's own names say that it takes the targets first."""
    try:
        names = list(inspect.signature(loss).parameters)
    except (TypeError, ValueError):  # it has none
        return
    if names[:1] == ["y_true"]:
        raise BadFile(
            "loss_fn takes y_true first, but is called as loss_fn(output, y): swap its arguments"
        )


def check_broadcast(loss: Callable, output: Any, y: Any) -> None:
    """Raise BadFile where a loss holds each sample's output against the targets of all.

    So it is where one of them has an axis of 1 more, and the loss is not the mean of its samples'
    but without that axis would be.
    """
    ours, theirs = (tuple(getattr(part, "shape", ())) for part in (output, y))
    if (axis := _axis_of_one(ours, theirs)) is not None:
        same = (output[(slice(None),) * axis + (0,)], y)
    elif (axis := _axis_of_one(theirs, ours)) is not None:
        same = (output, y[(slice(None),) * axis + (0,)])
    else:
        return
    size = min(ours[0], FEW)
    try:
        together, meant = (float(loss(a[:size], b[:size])) for a, b in ((output, y), same))
        single = [float(loss(output[n : n + 1], y[n : n + 1])) for n in range(size)]
    except Exception:  # a loss of this very shape, or batch
        return
    mean = sum(single) / size
    if math.isclose(meant, mean, rel_tol=1e-4) and not math.isclose(together, mean, rel_tol=1e-3):
        raise BadFile(
            f"loss_fn broadcasts every output against every target: the output has shape {ours}, y "
            f"has {theirs}; give both the same shape"
        )


def parts_apart(loss: Callable, output: Any, y: Any) -> float:
    """How far a batch's loss is from the mean of those of its micro-batches, relative to it.

    A mean over the samples is as far as rounding makes it; one over tokens, of which the parts have
    unequal numbers, is not. 0 where there is nothing to tell: of few samples, or a random loss.
    """
    size = sample_count(leaves(getattr(output, "logits", output)))
    if size < PARTS:
        return 0.0
    if hasattr(output, "logits"):
        output = Logits(output.logits)

    def of(begin: int, end: int) -> float:
        def cut(leaf: Any) -> Any:
            shape = tuple(getattr(leaf, "shape", ()))
            return leaf[begin:end] if shape[:1] == (size,) else leaf

        part = Logits(cut(output.logits)) if isinstance(output, Logits) else mapped(cut, output)
        return float(loss(part, mapped(cut, y)))

    whole, bounds = of(0, size), [size * part // PARTS for part in range(PARTS + 1)]
    if not math.isclose(whole, of(0, size), rel_tol=1e-6):
        return 0.0
    mean = sum(of(begin, end) * (end - begin) / size for begin, end in pairwise(bounds))
    apart = abs(mean - whole) / max(abs(whole), 1e-12)
    return apart if math.isfinite(apart) else 1.0


def _axis_of_one(longer: tuple, shorter: tuple) -> int | None:
    """The axis of 1 that one shape has more than another, if that is all; never the samples'."""
    axes = (n for n in range(1, len(longer)) if longer[n] == 1)
    return next((n for n in axes if longer[:n] + longer[n + 1 :] == shorter), None)


# Batches -----------------------------------------------------------------------------------------


def usual_size(module: ModuleType) -> int:
    """The size of a batch that the file means: the default of `batch`'s first argument."""
    made = getattr(module, "batch", None)
    if made is None:
        return USUAL_BATCH
    first = next(iter(inspect.signature(made).parameters.values()), None)
    if first is None:
        raise BadFile("batch has no arguments: write it as batch(size, seed)")
    if first.default is first.empty:
        return USUAL_BATCH
    if not isinstance(first.default, Integral) or first.default < 1:
        raise BadFile(
            f"batch has {first.name}={first.default!r}: its first argument is the batch size, such "
            f"as size={USUAL_BATCH}"
        )
    return int(first.default)


def takes_framework(module: ModuleType) -> bool:
    """Whether `batch` has a third argument, the framework that it is for."""
    return argument_count(module.batch) > 2


def argument_count(function: Callable) -> int:
    """How many arguments a function of the file has."""
    return len(inspect.signature(function).parameters)


def draw(module: ModuleType, size: int, seed: int, side: str) -> tuple:
    """A batch as NumPy arrays."""
    return pair(given(module, size, seed, side), "batch")


def given(module: ModuleType, size: int, seed: int, side: str) -> Any:
    """What `batch` returns. It may take a third argument: the framework's name."""
    asked = (size, seed, MAKERS[side]) if takes_framework(module) else (size, seed)
    return call("batch", module.__file__, module.batch, *asked)


def pair(returned: Any, what: str) -> tuple:
    """(x, y) as NumPy arrays in tuples, lists and dicts. Raises BadFile for anything else."""
    if not isinstance(returned, (tuple, list)) or len(returned) != 2:
        raise BadFile(
            f"{what} returns {_kind(returned)}, not (x, y): return the inputs and the targets"
        )
    return arrays(returned[0]), arrays(returned[1])


def keeps_structure(tree: Any) -> bool:
    """Whether `arrays` leaves a structure what it is: lists become tuples, numbers an array."""
    if isinstance(tree, dict):
        return all(isinstance(k, str) and keeps_structure(v) for k, v in tree.items())
    if isinstance(tree, tuple):
        return not all(map(np.isscalar, tree)) and all(map(keeps_structure, tree))
    return not isinstance(tree, (list, Mapping))


def _kind(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)}"
    return f"a {type(value).__name__}"


def arrays(tree: Any) -> Any:
    """A structure with NumPy arrays in place of tensors, of whatever framework, and numbers."""
    if isinstance(tree, Mapping):
        return {str(key): arrays(value) for key, value in tree.items()}
    if isinstance(tree, (tuple, list)) and not all(map(np.isscalar, tree)):
        return tuple(map(arrays, tree))
    if hasattr(tree, "detach"):
        tree = tree.detach().cpu()
    try:
        array = np.asarray(tree)
    except TypeError:
        raise BadFile(f"a batch has dtype {tree.dtype}, which NumPy lacks: use float32") from None
    if array.dtype.kind in "OSU":
        raise BadFile(f"a batch holds {_kind(tree)} of {array.dtype}: give arrays of numbers")
    return array


def read_by(function: Callable, weights_of: Callable) -> list:
    """The weights that a loss has at hand: in what it closes over, or is a method of.

    weights_of: of a value, the weights that it is or holds; None of what holds none by itself.
    """
    weights, left, seen = [], [function], set()
    while left:
        value = left.pop()
        if id(value) in seen or len(seen) > 1000:
            continue
        seen.add(id(value))
        if (held := weights_of(value)) is not None:
            weights += held
        elif inspect.isfunction(value):
            used = inspect.getclosurevars(value)
            left += [*used.nonlocals.values(), *used.globals.values()]
        elif inspect.ismethod(value):
            left += [value.__func__, value.__self__]
        elif isinstance(value, partial):
            left += [value.func, *value.args, *value.keywords.values()]
        elif isinstance(value, dict | list | tuple):
            left += value.values() if isinstance(value, dict) else value
        elif not inspect.ismodule(value) and not isinstance(value, type):
            left += getattr(value, "__dict__", {}).values()
    return weights


def leaves(tree: Any) -> list:
    """The arrays or tensors of a structure, in order."""
    if isinstance(tree, Mapping):
        return [leaf for value in tree.values() for leaf in leaves(value)]
    if isinstance(tree, (tuple, list)):
        return [leaf for value in tree for leaf in leaves(value)]
    return [tree]


def mapped(function: Callable, tree: Any) -> Any:
    """A structure with what `function` makes of each of its leaves."""
    if isinstance(tree, Mapping):
        return {key: mapped(function, value) for key, value in tree.items()}
    if isinstance(tree, (tuple, list)):
        return tuple(mapped(function, value) for value in tree)
    return function(tree)


def resized(tree: Any, whole: int, size: int) -> Any:
    """What belongs to `whole` samples for `size` of them: cut, or repeated as often as it takes.

    Samples are the first axis of an array, or a list's items, such as the boxes of each image.
    What has neither, such as weights of classes, stays as it is.
    """
    if _lists_samples(tree, whole):
        return tuple(tree[place % whole] for place in range(size))
    if isinstance(tree, (Mapping, tuple)):
        if isinstance(tree, Mapping):
            return {key: resized(value, whole, size) for key, value in tree.items()}
        return tuple(resized(value, whole, size) for value in tree)
    return np.resize(tree, (size, *tree.shape[1:])) if _has_samples(tree, whole) else tree


def shape_of(batch: Any) -> tuple:
    """The shapes of a batch's arrays or tensors."""
    return tuple(tuple(getattr(leaf, "shape", ())) for leaf in leaves(batch))


def dealt(batches: list, count: int) -> tuple[tuple, ...]:
    """Batches of several shapes in `count` parts of about equal size: what is large comes first."""
    parts: list[list] = [[] for _ in range(count)]
    for place, batch in enumerate(sorted(batches, key=_size, reverse=True)):
        row, column = divmod(place, count)
        parts[count - 1 - column if row % 2 else column].append(batch)
    return tuple(tuple(part) for part in parts if part)


def _size(batch: Any) -> int:
    """The numbers in a batch."""
    return sum(math.prod(shape) for shape in shape_of(batch))


def joined(trees: list, whole: int) -> Any:
    """What belongs to `whole` samples, of several batches, as one."""
    one = trees[0]
    if _lists_samples(one, whole):
        return tuple(item for tree in trees for item in tree)
    if isinstance(one, Mapping):
        return {key: joined([tree[key] for tree in trees], whole) for key in one}
    if isinstance(one, tuple):
        return tuple(joined(list(parts), whole) for parts in zip(*trees, strict=True))
    return np.concatenate(trees) if _has_samples(one, whole) else one


def _has_samples(array: np.ndarray, whole: int) -> bool:
    return array.ndim > 0 and len(array) == whole


def _lists_samples(tree: Any, whole: int) -> bool:
    """Whether it is a list as long as the batch, of items alike that are no batches themselves."""
    if not isinstance(tree, tuple) or len(tree) != whole:
        return False
    kinds = [[(leaf.ndim, leaf.dtype) for leaf in leaves(item)] for item in tree]
    alike = all(kind == kinds[0] for kind in kinds)
    return alike and not all(_has_samples(leaf, whole) for leaf in leaves(tree))


def first(tree: Any) -> Any:
    """The first array or tensor of what a model gives: of one with logits these."""
    if isinstance(tree, Mapping) and "logits" in tree:
        return tree["logits"]
    return leaves(getattr(tree, "logits", tree))[0]


@dataclass(frozen=True)
class Logits:
    """What is left of an output with `.logits` where it comes from a file: for the user's loss."""

    logits: Any

    def __getitem__(self, key: Any) -> Any:
        """As of an output of transformers: by its name or its place."""
        if key in ("logits", 0):
            return self.logits
        raise KeyError(key)


def check_size(x: Any, size: int, what: str) -> None:
    """The first axis of every input is the batch."""
    for array in leaves(x):
        if array.ndim and len(array) != size:
            raise BadFile(
                f"{what} returns an x of shape {array.shape}: its first axis must have the {size} "
                "samples of the batch"
            )


# What is prepared --------------------------------------------------------------------------------


def save_batches(folder: Path, batches: list[tuple]) -> None:
    """Write a side's batches."""
    folder.mkdir(parents=True, exist_ok=True)
    shape = _skeleton(batches[0])
    held = {
        f"{place}_{number}": leaf
        for place, batch in enumerate(batches)
        for number, leaf in enumerate(leaves(batch))
    }
    np.savez(folder / "batches.npz", **held)
    (folder / "batches.json").write_text(json.dumps(shape), encoding="utf-8")


def _skeleton(tree: Any) -> Any:
    if isinstance(tree, Mapping):
        return {"dict": [[key, _skeleton(value)] for key, value in tree.items()]}
    if isinstance(tree, (tuple, list)):
        return {"tuple": [_skeleton(value) for value in tree]}
    return None


def load_batches(folder: Path, size: int | None = None) -> list[tuple]:
    """A side's batches; the first `size` samples of each, where that is given."""
    shape = json.loads((folder / "batches.json").read_text("utf-8"))
    batches = []
    with np.load(folder / "batches.npz", allow_pickle=False) as held:
        for place in range(BATCHES):
            stream = iter(range(len(held.files)))
            batch = _filled(shape, lambda p=place, s=stream: held[f"{p}_{next(s)}"])
            if size:
                whole = sample_count(batch[0])
                batch = tuple(resized(part, whole, size) for part in batch)
            batches.append(batch)
    return batches


def sample_count(x: Any) -> int:
    """How many samples inputs have: the length of the first axis, see `check_size`."""
    return next((len(array) for array in leaves(x) if array.ndim), 1)


def samples(folder: Path, count: int) -> tuple:
    """x and y of the first `count` samples of a side's batches, as one batch.

    Where shapes vary, of those batches that have the shape of the first.
    """
    batches = load_batches(folder)
    batches = [batch for batch in batches if shape_of(batch) == shape_of(batches[0])]
    size = sample_count(batches[0][0])
    whole = size * len(batches)
    x, y = (joined(list(parts), size) for parts in zip(*batches, strict=True))
    return resized(x, whole, min(count, whole)), resized(y, whole, min(count, whole))


def _filled(shape: Any, take: Callable) -> Any:
    if shape is None:
        return take()
    if "dict" in shape:
        return {key: _filled(value, take) for key, value in shape["dict"]}
    return tuple(_filled(value, take) for value in shape["tuple"])


def save_weights(folder: Path, weights: dict[str, np.ndarray]) -> None:
    """Write a side's initial weights."""
    folder.mkdir(parents=True, exist_ok=True)
    # A name as "file" would be an argument of savez.
    np.savez(folder / "weights.npz", **{f"weights/{name}": v for name, v in weights.items()})


def load_weights(folder: Path) -> dict[str, np.ndarray]:
    """A side's initial weights. Never executes code (no pickle)."""
    with np.load(folder / "weights.npz", allow_pickle=False) as kept:
        return {name.removeprefix("weights/"): value for name, value in kept.items()}


def write_about(folder: Path, about: dict) -> None:
    """Write what is known of the file, last of all: with it the folder is whole."""
    (folder / "about.json").write_text(json.dumps(about), encoding="utf-8")


def about(folder: Path) -> dict:
    """What is known of the file: see `bench.user_model.prepare`, which writes it."""
    return json.loads((folder / "about.json").read_text("utf-8"))


def is_prepared(folder: str | Path | None) -> bool:
    """Whether a task's data is that of a user's file."""
    return folder is not None and (Path(folder) / "about.json").is_file()


def task(known: dict, side: str | None = None) -> Task:
    """The task of a file of which this is known; with the shapes of a side, where one is asked.

    In the place of shapes its main process has those of the first framework, which are counted.
    """
    of_side = known["sides"][side or next(iter(known["sides"]))]
    spec = FileSpec(
        known["path"],
        tuple((name, tuple(shape)) for name, shape in of_side["parameters"]),
        tuple((name, tuple(shape)) for name, shape in of_side["state"]),
    )
    return Task(
        name=known["name"],
        dataset=DatasetSpec(known["folder"], "file", BATCHES * known["batch_size"], 0),
        model=spec,
        recipe=replace(RECIPE, accuracy_batch_size=known["batch_size"]),
        small_batch=1,
        compute_batch=known["batch_size"],
        metric="accuracy",
        margin=known["margin"],
        parity=known["parity"],
        rounding=known["parity"],
        paired=known["paired"],
    )
