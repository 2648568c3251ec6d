"""The layout: four places a technique, mirrored signatures, boundaries, what files must say."""

from __future__ import annotations

import ast
import functools
import importlib
import os
import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from bench.harness import user_model

ROOT = Path(__file__).resolve().parent.parent
SIDES = {"pt_impl": "tf_impl", "tf_impl": "pt_impl"}
FAMILIES = ("train_step", "input", "parallel", "recipes", "compression", "deployment")
FAMILIES += ("diagnosis", "adaptation")
# Whole programs that use techniques: nobody's row, nothing that is copied one by one.
LADDERS = "ladders"
TECHNIQUE_PLACES = ("pt_impl/{}/{}.py", "tf_impl/{}/{}.py")
TECHNIQUE_PLACES += ("bench/{}/bench_{}.py", "tests/{}/test_{}.py")
LADDER_PLACES = ("pt_impl/ladders/{}.py", "tf_impl/ladders/{}.py")
LADDER_PLACES += ("bench/ladders/{}.py", "tests/ladders/test_{}.py")
# What drives the techniques, the same on both sides. What makes them safe on any model is each
# framework's own, and stands beside it in the kit.
KIT = {"models", "data", "training", "runtime", "replicas", "collectives"}
KIT |= {"detection", "examples", "integers", "operators", "user_model", "calling", "demo"}
EXEMPT: set[str] = set()  # of the mirror; starts empty and should stay so
# What the kit of one framework alone needs, in the form of a benchmark's UNSUPPORTED.
KIT_LACKS = {
    "kit/calling.py": {
        "pt": {
            "call(training)": "a module has a mode",
            "input_arguments": "inputs are handed over by their type, not by a signature",
            "add_own_losses": "modules have no losses of their own",
            "call_loss": "losses of PyTorch take the output first, as ours do",
            "scale_loss": "the scaler is no optimizer",
            "layers": "nn.Module.modules lists them",
        },
        "tf": {
            "evaluating": "a Keras model is told its mode in the call",
            "trains": "a Keras model has no mode",
        },
    },
    "kit/runtime.py": {
        "tf": {"first_compile": "XLA keeps nothing on disk about the machine"},
    },
}
# What they show is several techniques, which they import.
STACKS = {"combinations", "stacking", "bottleneck", "accumulated_statistics"}
STACKS |= {"loss_scaling", "reduced_precision", "accuracy_aware_quantization"}
FRAMEWORKS = {"torch", "torchvision", "torchao", "tensorflow", "keras", "tf_keras"}
FORBIDDEN = {
    "shared": FRAMEWORKS | {"pt_impl", "tf_impl", "bench"},
    "pt_impl": {"tensorflow", "keras", "tf_keras", "tf_impl", "bench"},
    "tf_impl": {"torch", "torchvision", "torchao", "pt_impl", "bench"},
    "bench": FRAMEWORKS | set(SIDES),
}
ON_PYTORCH = "keras_"  # begins the names of the files in which Keras computes with PyTorch
MAY_IMPORT_A_KIT = "bench/harness/worker.py"
MAY_IMPORT_BOTH = "bench/port/"  # compares the frameworks in one process
SECTIONS = (
    "What it changes:",
    "Its twin:",
    "When it helps and when it hurts:",
    "Run it alone:",
)
DIFFER = "Where the frameworks differ and why:"  # in the PyTorch file, for both
SETTING_TYPES = {"str", "int", "float", "bool", "tuple"}
MOST_LINES_A_FUNCTION = 60
MOST_BYTES_OF_ARRAYS = 100_000  # that one test file compares with
MOST_FILES_TO_COPY = 3  # with a technique, beside other techniques
MOST_KIT_FILES, MOST_KIT_LINES = 2, 200  # of these, and what one of them may have
# Three and four: repairs of torchao's PT2E, and what follows what in a model of Keras, are each
# another file than the checks.
NEEDS_MORE = {"quantization_aware_training"}
# What makes a technique safe on any model stands in the kit. Text of a technique file -> why not.
OF_THE_KIT = {
    r"raise NotImplementedError": "refuses something: that is for kit/checks",
    r"def _call\b": "calls models by convention: that is kit/calling.py's call",
    r"\.train\((mode|before|training|was_training)\)": "restores modes: that is for kit/calling.py",
    r"(?m)^\s*(from|import) (\w+\.)*_\w+": "imports a private module of a library",
    r"(?m)^\s*from (tensorflow\.python|(tf_)?keras\.src)": "imports a library's private module",
    r"(?m)^from \w[\w.]* import .*\b_[a-z]": "imports a private name",
}
RUNTIMES = {"onnx", "onnxruntime", "onnxscript", "tf2onnx", "openvino", "ai_edge_litert"}
# Names that say nothing, how many lines they may live, and where none lives longer.
VAGUE, MOST_LINES_OF_A_VAGUE_NAME = {"found", "own", "each", "said"}, 3
CLEAR = ("bench", "shared")


# Checks: each yields what is wrong in the tree below `root` ---------------------------------------


@functools.cache
def parsed(source: str) -> ast.Module:
    """The tree of a file's text, which several checks look at."""
    return ast.parse(source)


def tree_of(path: Path) -> ast.Module:
    return parsed(path.read_text("utf-8"))


def head_of(path: Path) -> str:
    return ast.get_docstring(tree_of(path)) or ""


def place_of(path: Path, root: Path) -> str:
    return path.relative_to(root).as_posix()


def sources(root: Path, package: str) -> list[Path]:
    return sorted((root / package).rglob("*.py"))


def stems(root: Path, folder: str) -> set[str]:
    return {path.stem for path in (root / folder).glob("*.py")} - {"__init__"}


def techniques(root: Path) -> set[tuple[str, str]]:
    """(family, name) of each technique that stands in one of the places but the tests."""
    return {
        (family, name)
        for family in FAMILIES
        for name in stems(root, f"pt_impl/{family}")
        | stems(root, f"tf_impl/{family}")
        | {path.stem.removeprefix("bench_") for path in (root / "bench" / family).glob("bench_*")}
    }


def missing_places(root: Path) -> Iterator[str]:
    """A technique, a file of the kit or a ladder that does not stand in all of its places."""
    places = [
        place.format(family, name)
        for family, name in sorted(techniques(root))
        for place in TECHNIQUE_PLACES
    ]
    places += [f"{side}/kit/{name}.py" for side in SIDES for name in sorted(KIT)]
    places += [
        place.format(name)
        for name in sorted(stems(root, f"pt_impl/{LADDERS}") | stems(root, f"tf_impl/{LADDERS}"))
        for place in LADDER_PLACES
    ]
    yield from (f"{place} is missing" for place in places if not (root / place).is_file())


def stray_files(root: Path) -> Iterator[str]:
    """Files of a side that are neither of a family nor of the kit; names that two families have."""
    rooms = {(), ("kit",), ("kit", "checks"), (LADDERS,), *((family,) for family in FAMILIES)}
    for side in SIDES:
        for path in sources(root, side):
            room = path.relative_to(root / side).parts[:-1]
            if room not in rooms or (not room and path.name != "__init__.py"):
                yield f"{place_of(path, root)} is in no family and not in the kit"
    families = Counter(name for _, name in techniques(root))
    yield from (f"{name} is in two families" for name, n in sorted(families.items()) if n > 1)


def family_faults(root: Path) -> Iterator[str]:
    """The head of a family says what is in it and which file to read first."""
    for room in (*SIDES, "bench"):
        for family in FAMILIES:
            path = root / room / family / "__init__.py"
            text = path.read_text("utf-8") if path.is_file() else ""
            if "first" not in text.rpartition("Read ")[2]:
                yield f"{place_of(path, root)} does not say which file to read first"


def twins(root: Path) -> Iterator[tuple[str, Path, Path]]:
    """(place in its side, PyTorch file, TensorFlow file) of all that both sides have."""
    for room in (*FAMILIES, LADDERS, "kit"):
        for name in sorted(stems(root, f"pt_impl/{room}") & stems(root, f"tf_impl/{room}")):
            if room != "kit" or name in KIT:
                place = f"{room}/{name}.py"
                yield place, root / "pt_impl" / place, root / "tf_impl" / place


def public_functions(path: Path) -> dict[str, ast.FunctionDef]:
    return {
        node.name: node
        for node in tree_of(path).body
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")
    }


def constructors(path: Path) -> dict[str, ast.FunctionDef]:
    """The `__init__` of each public class."""
    return {
        node.name: method
        for node in tree_of(path).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
        for method in node.body
        if isinstance(method, ast.FunctionDef) and method.name == "__init__"
    }


def signature(function: ast.FunctionDef) -> list[tuple[str, str, str]]:
    """(kind, name, default) of each parameter, in order."""
    given = function.args
    positional = [("positional only", a) for a in given.posonlyargs]
    positional += [("positional", a) for a in given.args]
    defaults = [None] * (len(positional) - len(given.defaults)) + given.defaults
    named = [("keyword only", a) for a in given.kwonlyargs]
    parameters = list(zip(positional + named, defaults + given.kw_defaults, strict=True))
    parameters += [(("*", given.vararg), None)] if given.vararg else []
    parameters += [(("**", given.kwarg), None)] if given.kwarg else []
    return [
        (kind, argument.arg, ast.unparse(default) if default else "")
        for (kind, argument), default in parameters
    ]


def unsupported(root: Path, place: str) -> dict[str, dict[str, str]]:
    """What a benchmark file says its technique lacks: framework -> function -> why."""
    if root == ROOT and place in KIT_LACKS:  # a made-up tree has another kit
        return KIT_LACKS[place]
    family, name = place.split("/")
    path = root / "bench" / family / f"bench_{name}"
    for node in tree_of(path).body if path.is_file() else ():
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "UNSUPPORTED":
            return ast.literal_eval(node.value)
    return {}


def mirror_faults(root: Path) -> Iterator[str]:
    """Both sides have the same functions, but those that the benchmark says one of them lacks.

    Classes of one name have the same constructor.
    """
    for place, *files in twins(root):
        lacking = unsupported(root, place)
        yield from wrongly_lacking(place, files, lacking)
        pt, tf = map(public_functions, files)
        for name in sorted((pt.keys() | tf.keys()) - EXEMPT):
            if name in pt and name in tf:
                without = [lacking.get("tf", {}), lacking.get("pt", {})]
                yield from different(place, name, pt[name], tf[name], without)
            else:
                side = "tf" if name in pt else "pt"
                if name not in lacking.get(side, {}):
                    yield f"{side}_impl/{place} has no {name}"
        pt, tf = map(constructors, files)
        for name in sorted(pt.keys() & tf.keys()):
            yield from different(place, name, pt[name], tf[name], [{}, {}])


def wrongly_lacking(place: str, files: list[Path], lacking: dict) -> Iterator[str]:
    """What a side is said to lack, and has, or the other lacks too."""
    pt, tf = map(public_functions, files)
    for side, ours, theirs in (("pt", pt, tf), ("tf", tf, pt)):
        for name in sorted(lacking.get(side, {})):
            function = name.partition("(")[0]
            if function not in theirs or ("(" not in name and function in ours):
                yield f"bench/{place}: {side} is said to lack {name}, and does not"


def different(place: str, name: str, pt, tf, without: list[dict[str, str]]) -> Iterator[str]:
    """Signatures that differ, but for the settings that the other side lacks."""
    ours, theirs = (
        [parameter for parameter in signature(node) if f"{name}({parameter[1]})" not in lacking]
        for node, lacking in zip((pt, tf), without, strict=True)
    )
    if ours != theirs:
        yield f"{place}: {name}: {ours} in pt_impl, {theirs} in tf_impl"


def setting_faults(root: Path) -> Iterator[str]:
    """Settings: keyword-only, neutral types; nothing passes through **kwargs."""
    for path in [path for side in SIDES for path in sources(root, side)]:
        in_kit = "kit" in path.parent.parts
        for function in public_functions(path).values():
            place, given = f"{place_of(path, root)}: {function.name}", function.args
            if given.kwarg:
                yield f"{place} takes **{given.kwarg.arg}"
            for setting in given.kwonlyargs:
                if annotation(setting) not in SETTING_TYPES:
                    yield f"{place}: {setting.arg} is {annotation(setting)}"
            for argument in [] if in_kit else [*given.posonlyargs, *given.args]:
                if annotation(argument) in SETTING_TYPES:
                    yield f"{place}: {argument.arg} is a setting, not keyword-only"


def annotation(argument: ast.arg) -> str:
    return ast.unparse(argument.annotation) if argument.annotation else "without a type"


def imported(path: Path) -> set[str]:
    """Dotted names of all that `path` imports, at any depth, by statement or by literal name."""
    rooms = path.parent.parts
    package = rooms[max(i for i, room in enumerate(rooms) if room in FORBIDDEN) :]
    return _imported(path.read_text("utf-8"), package)


@functools.cache
def _imported(source: str, package: tuple[str, ...]) -> set[str]:
    names = set()
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            here = package[: len(package) + 1 - node.level] if node.level else ()
            base = ".".join(filter(None, [*here, node.module]))
            names |= {f"{base}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = ast.unparse(node.func).rpartition(".")[2]
            if called in ("import_module", "__import__"):
                names.add(str(node.args[0].value))
    return names


def boundary_faults(root: Path) -> Iterator[str]:
    """Neither framework sees the other; what is shared, and the benchmarks, see none."""
    for package, forbidden in FORBIDDEN.items():
        for path in sources(root, package):
            place = place_of(path, root)
            if place != MAY_IMPORT_A_KIT and not place.startswith(MAY_IMPORT_BOTH):
                on_pytorch = {"keras"} if path.stem.startswith(ON_PYTORCH) else set()
                reached = {name.partition(".")[0] for name in imported(path)} & forbidden
                reached -= on_pytorch if package == "pt_impl" else set()
                yield from (f"{place} imports {name}" for name in sorted(reached))


def coupling_faults(root: Path) -> Iterator[str]:
    """No file of a side imports a technique of its side, but stacks of techniques and ladders."""
    for side in SIDES:
        others = {
            f"{side}.{family}.{name}"
            for family in FAMILIES
            for name in stems(root, f"{side}/{family}")
        }
        for path in sources(root, side):
            if path.stem not in STACKS and path.parent.name != LADDERS:
                names = {f"{name}." for name in imported(path)}
                for other in sorted(others):
                    if any(name.startswith(f"{other}.") for name in names):
                        yield f"{place_of(path, root)} imports {other}"


def graph(root: Path, *packages: str) -> dict[str, set[str]]:
    """Module -> the modules of these packages that it imports."""
    files = {
        ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): path
        for package in packages
        for path in sources(root, package)
    }
    return {
        module: {
            other
            for name in imported(path)
            for other in (name, name.rpartition(".")[0])
            if other in files and other != module
        }
        for module, path in files.items()
    }


def circles(root: Path) -> Iterator[str]:
    """Modules that import one another, directly or through others."""
    for package in FORBIDDEN:
        arrows = graph(root, package)
        for module in sorted(arrows):
            reached, new = set(), set(arrows[module])
            while new:
                reached |= new
                new = {other for one in new for other in arrows[one]} - reached
            if module in reached:
                yield f"{module} imports itself through others"


# What a part of bench may import of bench. Data flows one way: harness, record, analysis, report.
ARROWS = {
    "bench.record": (),
    "bench.analysis": ("bench.record",),
    "bench.report": ("bench.record", "bench.analysis"),
    "bench.harness": ("bench.record", "bench.analysis"),
    "bench.probes": ("bench.record", "bench.harness"),
    "bench.ladders": ("bench.record", "bench.harness", "bench.analysis", "bench.report"),
    **{f"bench.{family}": ("bench.harness", "bench.probes") for family in FAMILIES},
}
# What stands beside the product: nothing of it imports them.
BESIDE = ("bench.validation", "bench.network")
RUNS_ALL = "bench.__main__"


def arrow_faults(root: Path) -> Iterator[str]:
    """Imports that run back up, or from the product to what stands beside it."""
    for module, others in sorted(graph(root, "bench").items()):
        part = part_of(module, (*ARROWS, *BESIDE))
        for other in sorted(others - {"bench"}):
            if part in ARROWS:
                allowed = part_of(other, (part, *ARROWS[part])) is not None
            else:
                allowed = part_of(other, BESIDE) in (None, part)
            if not allowed and module != RUNS_ALL:
                yield f"{module} imports {other}"


def part_of(module: str, parts: Iterable[str]) -> str | None:
    return next((part for part in parts if f"{module}.".startswith(f"{part}.")), None)


def technique_files(root: Path) -> list[Path]:
    paths = (
        root / side / family / f"{name}.py"
        for side in SIDES
        for family, name in sorted(techniques(root))
    )
    return [path for path in paths if path.is_file()]


def method_files(root: Path) -> list[Path]:
    """Those of techniques and of ladders."""
    ladders = [path for side in SIDES for path in sorted((root / side / LADDERS).glob("[!_]*.py"))]
    return technique_files(root) + ladders


def needed(root: Path, place: str) -> list[str]:
    """The files that a file imports, but in its `main`, and those that these import, sorted."""
    known, new = {place}, [place]
    while new:
        names = sorted(_used((root / new.pop()).read_text("utf-8")) - known)
        files = [name for name in names if (root / name).is_file()]
        known.update(files)
        new += files
    return sorted(known - {place})


@functools.cache
def _used(source: str) -> set[str]:
    """The files that a file may import, but in its `main`."""
    return {
        name.replace(".", "/") + ".py"
        for part in parsed(source).body
        if getattr(part, "name", "") != "main"
        for node in ast.walk(part)
        if isinstance(node, ast.ImportFrom) and node.module
        for name in (node.module, *(f"{node.module}.{alias.name}" for alias in node.names))
    }


def named_to_copy(path: Path) -> list[str]:
    """The files that the head of a technique file says have to be copied with it."""
    return re.findall(r"`([\w/]+\.py)`", head_of(path).partition("\nCopy with it:")[2])


def copying_faults(root: Path) -> Iterator[str]:
    """The head of a file says what has to be copied with it: all of it, and nothing else."""
    for path in technique_files(root):
        place = place_of(path, root)
        wanted = needed(root, place)
        if named_to_copy(path) != wanted:
            yield f"{place} needs {', '.join(wanted) or 'nothing'}: say so at its head's end"
        others = [name for name in wanted if name.split("/")[1] not in FAMILIES]
        if len(others) > MOST_FILES_TO_COPY and path.stem not in STACKS | NEEDS_MORE:
            yield f"{place} needs {len(others)} files of the kit: {', '.join(others)}"


def tier_faults(root: Path) -> Iterator[str]:
    """A technique file holds the method; what makes it safe on any model stands in the kit."""
    for path in technique_files(root):
        place, text = place_of(path, root), path.read_text("utf-8")
        body = text.replace(ast.get_docstring(parsed(text), clean=False) or "", "", 1)
        yield from (f"{place} {why}" for what, why in OF_THE_KIT.items() if re.search(what, body))
        kit = [name for name in needed(root, place) if "/kit/" in name]
        if len(kit) > MOST_KIT_FILES and path.stem not in STACKS | NEEDS_MORE:
            yield f"{place} needs {len(kit)} files of the kit: {', '.join(kit)}"
        for name in kit:
            lines = (root / name).read_text("utf-8").count("\n")
            if lines > MOST_KIT_LINES:
                yield f"{place} needs {name}, which has {lines} lines"


def imported_at_the_top(path: Path) -> list[str]:
    """The modules that a file imports for whoever imports it."""
    names = []
    for node in tree_of(path).body:
        names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
    return names


def runtime_faults(root: Path) -> Iterator[str]:
    """A runtime that only a part of a technique needs is imported there, not at the top."""
    for path in technique_files(root):
        for name in imported_at_the_top(path):
            if name.partition(".")[0] in RUNTIMES:
                yield f"{place_of(path, root)} imports {name} for whoever imports it"


def docstring_faults(root: Path) -> Iterator[str]:
    """The head of a technique has all of its sections, in order, and names its twin.

    PyTorch's file says where the frameworks differ, once for both.
    """
    for path in method_files(root):
        place, text = place_of(path, root), head_of(path)
        side, family = path.relative_to(root).parts[:2]
        sections = [*SECTIONS[:2], DIFFER, *SECTIONS[2:]] if side == "pt_impl" else SECTIONS
        at = [f"\n{text}".find(f"\n{section}") for section in sections]
        if -1 in at:
            yield f"{place}: no section {sections[at.index(-1)]!r}"
        elif at != sorted(at):
            yield f"{place}: its sections are not in the order {sections}"
        if side == "tf_impl" and f"\n{DIFFER}" in text:
            yield f"{place}: {DIFFER!r} belongs into its twin, for both"
        twin, alone = f"{SIDES[side]}/{family}/{path.name}", f"{side}.{family}.{path.stem}"
        for words in (twin, f"python -m {alone}"):
            if words not in text:
                yield f"{place}: does not name {words}"


def size_faults(root: Path) -> Iterator[str]:
    """Functions of techniques that are too long."""
    for path in method_files(root):
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.FunctionDef):
                lines = node.end_lineno - node.lineno + 1
                if lines > MOST_LINES_A_FUNCTION:
                    yield f"{place_of(path, root)}: {node.name} has {lines} lines"


def import_time_faults(root: Path) -> Iterator[str]:
    """Importing a file of a side does nothing but define."""
    harmless = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef)
    harmless += (ast.Assign, ast.AnnAssign)
    for path in [path for side in SIDES for path in sources(root, side)]:
        for node in tree_of(path).body:
            docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            main = isinstance(node, ast.If) and "__main__" in ast.unparse(node.test)
            if not (isinstance(node, harmless) or docstring or main):
                yield f"{place_of(path, root)}:{node.lineno} runs when imported"


def name_faults(root: Path) -> Iterator[str]:
    """A file named as a module of the standard library would hide it from a copied script."""
    for path in [path for package in FORBIDDEN for path in sources(root, package)]:
        if path.stem in sys.stdlib_module_names:
            yield f"{place_of(path, root)} has the name of a standard module"


def vague_names(root: Path) -> Iterator[str]:
    """Variables that live long under a name that says nothing."""
    for path in [path for folder in CLEAR for path in sources(root, folder)]:
        nodes = list(ast.walk(tree_of(path)))
        there = {node.id for node in nodes if isinstance(node, ast.Name)} & VAGUE
        for scope in [node for node in nodes if isinstance(node, (*SCOPES, ast.Module))]:
            for name in sorted(there):
                for first, last in lives(scope, name):
                    if last - first + 1 > MOST_LINES_OF_A_VAGUE_NAME:
                        yield f"{place_of(path, root)}:{first}: {name} lives to line {last}"


SCOPES = (ast.FunctionDef, ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def lives(scope: ast.AST, name: str) -> list[tuple[int, int]]:
    """The lines from each place where a scope binds a name to the last use before the next one."""
    spans: list[tuple[int, int]] = []
    for line, _, binds in sorted(uses(scope, name)):
        if binds:
            spans.append((line, line))
        elif spans:
            spans[-1] = (spans[-1][0], line)
    return spans


def uses(scope: ast.AST, name: str) -> list[tuple[int, int, bool]]:
    """(line, column, whether it is bound there), but in inner scopes that bind it themselves."""
    places = []
    for node in ast.iter_child_nodes(scope):
        if isinstance(node, ast.arg) and node.arg == name:
            places.append((node.lineno, node.col_offset, True))
        elif isinstance(node, ast.Name) and node.id == name:
            places.append((node.lineno, node.col_offset, isinstance(node.ctx, ast.Store)))
        inner = uses(node, name)
        if not (isinstance(node, SCOPES) and any(binds for *_, binds in inner)):
            places += inner
    return places


def path_faults(root: Path) -> Iterator[str]:
    """Absolute paths of somebody's machine, in any file of text."""
    homes = re.compile("|".join(f"/{name}/" for name in ("work", "home", "root", "Users", "tmp")))
    for path in text_files(root):
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
            before = homes.search(line)
            if before and not re.search(r"[\w.~>)\]}]$", line[: before.start()]):
                yield f"{place_of(path, root)}:{number}: {line.strip()[:60]}"


def faults_of_tests(root: Path) -> Iterator[str]:
    """Importing tests imports no framework, helpers are twins, and saved arrays are small."""
    for path in sorted((root / "tests").glob("*/test_*.py")):
        if re.search(r"^FRAMEWORKS = ", path.read_text("utf-8"), re.MULTILINE):
            names = {name.partition(".")[0] for name in imported_at_the_top(path)}
            for name in sorted(names & (FRAMEWORKS | set(SIDES))):
                yield f"{place_of(path, root)} imports {name}"
    for path in sorted((root / "tests").glob("*/pt_*.py")):
        twin = path.with_name(path.name.replace("pt_", "tf_", 1))
        pt, tf = (public_functions(side) if twin.is_file() else {} for side in (path, twin))
        for name in sorted(pt.keys() & tf.keys()):
            if signature(pt[name]) != signature(tf[name]):
                yield f"{place_of(path, root)}: {name} differs from its twin"
    for path in sorted((root / "tests").glob("*/arrays/*.npz")):
        if path.stat().st_size > MOST_BYTES_OF_ARRAYS:
            yield f"{place_of(path, root)} has {path.stat().st_size} bytes"
        if not (path.parent.parent / f"{path.stem}.py").is_file():
            yield f"{place_of(path, root)} belongs to no test"


def text_files(root: Path) -> list[Path]:
    suffixes = {".py", ".md", ".toml", ".txt", ".yaml", ".j2"}
    return [
        path
        for folder in (".", ".ci", "docs", "shared", "pt_impl", "tf_impl", "bench", "tests")
        for path in sorted((root / folder).glob("*" if folder in (".", ".ci") else "**/*"))
        if path.is_file() and (path.suffix in suffixes or folder == ".ci")
    ]


CHECKS = {
    check.__name__: check
    for check in (
        *(missing_places, stray_files, family_faults, mirror_faults, setting_faults),
        *(boundary_faults, coupling_faults, circles, arrow_faults, docstring_faults),
        *(copying_faults, tier_faults, runtime_faults, size_faults, import_time_faults),
        *(name_faults, vague_names, path_faults, faults_of_tests),
    )
}


@pytest.mark.parametrize("check", CHECKS)
def test_this_repository(check):
    assert list(CHECKS[check](ROOT)) == []


# The checks themselves, on a made-up tree ---------------------------------------------------------

TECHNIQUE = '''\
"""Pruning.

What it changes: weights.

Its twin: `{twin}/compression/pruning.py`.
{differ}
When it helps and when it hurts: rarely.

Run it alone: `python -m {side}.compression.pruning`.

Copy with it: `{side}/kit/training.py`.
"""

import {framework}
from {side}.kit import training


def apply_pruning(model, *, final_sparsity: float = 0.5, begin_step: int = 0):
    return model


if __name__ == "__main__":
    apply_pruning(None)
'''


@pytest.fixture
def tree(tmp_path) -> Path:
    """A sound tree, with one technique."""
    files = {
        "bench/compression/bench_pruning.py": "import bench.harness.plan\n",
        "bench/harness/plan.py": "import shared.specs\n",
        "bench/harness/worker.py": "import torch\n",
        "bench/report/page.py": "import json\n",
        "bench/validation/command.py": "import bench.report.page\n",
        "shared/specs.py": "import numpy\n",
        "tests/compression/test_pruning.py": "",
    }
    for room in (*SIDES, "bench"):
        for family in FAMILIES:
            files[f"{room}/{family}/__init__.py"] = '"""Read this first."""\n'
    for side, framework in (("pt_impl", "torch"), ("tf_impl", "tensorflow")):
        files |= {f"{side}/kit/{name}.py": f"import {framework}\n" for name in KIT}
        differ = f"\n{DIFFER} nowhere.\n" if side == "pt_impl" else ""
        text = TECHNIQUE.format(side=side, twin=SIDES[side], framework=framework, differ=differ)
        files[f"{side}/compression/pruning.py"] = text
    for place, text in files.items():
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / place).write_text(text)
    return tmp_path


def faults_of(root: Path) -> list[str]:
    """What all checks find."""
    return [fault for check in CHECKS.values() for fault in check(root)]


def test_a_sound_tree_has_no_fault(tree):
    assert faults_of(tree) == []


PT, TF = "pt_impl/compression/pruning.py", "tf_impl/compression/pruning.py"
PT_KIT, TF_KIT = "pt_impl/kit/data.py", "tf_impl/kit/data.py"
MEASURED, TESTS = "bench/compression/bench_pruning.py", "tests/compression/test_pruning.py"
SPECS, PLAN, PAGE = "shared/specs.py", "bench/harness/plan.py", "bench/report/page.py"
LACKS = "UNSUPPORTED = {'tf': {'apply_pruning': 'no'}}\nimport"


@pytest.mark.parametrize("place", [PT, TF, MEASURED, TESTS, TF_KIT])
def test_the_missing_place_is_named(tree, place):
    (tree / place).unlink()
    assert list(missing_places(tree)) == [f"{place} is missing"]


def test_a_benchmark_of_nothing_is_named(tree):
    (tree / "bench" / "input" / "bench_gone.py").write_text("")
    assert list(missing_places(tree)) == [
        f"{place} is missing"
        for place in ("pt_impl/input/gone.py", "tf_impl/input/gone.py", "tests/input/test_gone.py")
    ]


# file, old text, new text, part of what is said of it
FAULTS = [
    (PT, "import torch", "import torch\nfrom shared import specs", f"kit/training.py, {SPECS}"),
    ("tf_impl/input/__init__.py", "Read this first", "Input", "tf_impl/input/__init__.py does not"),
    (PLAN, "shared.specs", "bench.report.page", "bench.harness.plan imports bench.report.page"),
    (PAGE, "json", "bench.harness.plan", "bench.report.page imports bench.harness.plan"),
    (PAGE, "json", "bench.compression", "bench.report.page imports bench.compression"),
    (PAGE, "json", "bench.validation.command", "page imports bench.validation.command"),
    (MEASURED, "bench.harness.plan", "bench.validation.command", "bench_pruning imports bench.val"),
    (TF, "0.5", "0.9", "0.9"),
    (TF, "begin_step", "start", "start"),
    (TF, "*, final", "final", "positional"),
    (TF, "def apply_pruning", "def prune", "no apply_pruning"),
    (PT, "= 0)", "= 0, **rest)", "'rest'"),
    (MEASURED, "import", LACKS, "tf is said to lack apply_pruning, and does not"),
    (PT, "import torch", "import torch\nimport onnxruntime", "imports onnxruntime for whoever"),
    (PT, "= 0)", "= 0, **rest)", "takes **rest"),
    (PT, "step: int", "step: torch.Tensor", "begin_step is torch.Tensor"),
    (PT, "step: int", "step", "without a type"),
    (PT, "(model, *", "(model, share: float, *", "keyword-only"),
    (PT, "import torch", "import tensorflow", "imports tensorflow"),
    (TF_KIT, "import", "from torch import", "imports torch"),
    (TF_KIT, "import", "import pt_impl.kit.data,", "imports pt_impl"),
    (PT_KIT, "import", "import bench.harness,", "imports bench"),
    (SPECS, "import", "import torch,", f"{SPECS} imports torch"),
    (MEASURED, "import", "import pt_impl.compression.pruning,", "imports pt_impl"),
    (MEASURED, "import bench.harness.plan", "import_module('tensorflow')", "imports tensorflow"),
    (PT, "kit import training", "compression import pruning", f"{PT} imports pt_impl.compression"),
    (TF_KIT, "import", "from ..compression.pruning import", "imports tf_impl.compression.pruning"),
    (PT, "Its twin:", "Twin:", "no section 'Its twin:'"),
    (PT, DIFFER, "Differences:", f"no section {DIFFER!r}"),
    (TF, "Run it", f"{DIFFER} here.\n\nRun it", f"{TF}: {DIFFER!r} belongs into its twin"),
    (PT, "`tf_impl/", "`tf/", f"does not name {TF}"),
    (PT, "python -m", "python", "python -m pt_impl.compression.pruning"),
    (PT, "What it changes: weights.\n", "Run it alone: so.\n\nWhat it changes: so.\n", "order"),
    (PT, "    return", "    x = 1\n" * 60 + "    return", "62 lines"),
    (TF_KIT, "import", "print()\nimport", "tf_impl/kit/data.py:1 runs when imported"),
    (SPECS, "import", "# see /ho" + "me/me/notes\nimport", "specs.py:1: # see"),
    (SPECS, "numpy", "numpy\nfound = 1\n\n\nprint(found)", "specs.py:2: found lives to line 5"),
    (SPECS, "numpy", "numpy\ndef f(each):\n    x = 1\n    y = 2\n    return each", "each lives"),
]


@pytest.mark.parametrize(("place", "old", "new", "fault"), FAULTS)
def test_a_fault_is_named(tree, place, old, new, fault):
    text = (tree / place).read_text()
    assert old in text
    (tree / place).write_text(text.replace(old, new))
    assert any(fault in named for named in faults_of(tree)), faults_of(tree)


@pytest.mark.parametrize(
    ("place", "fault"),
    [
        ("pt_impl/gone.py", "pt_impl/gone.py is in no family and not in the kit"),
        ("bench/input/bench_pruning.py", "pruning is in two families"),
        ("pt_impl/kit/queue.py", "pt_impl/kit/queue.py has the name of a standard module"),
    ],
)
def test_a_file_in_a_wrong_place_is_named(tree, place, fault):
    (tree / place).write_text("")
    assert fault in faults_of(tree)


def test_a_circle_is_found(tree):
    (tree / "shared" / "specs.py").write_text("import shared.weights\n")
    (tree / "shared" / "weights.py").write_text("from shared.datasets import load\n")
    (tree / "shared" / "datasets.py").write_text("def load():\n    from shared import specs\n")
    assert list(circles(tree)) == [
        f"shared.{name} imports itself through others" for name in ("datasets", "specs", "weights")
    ]


def test_a_vague_name_may_live_for_three_lines(tree):
    short = "found = 1\n\nprint(found)\nfound = 2\nprint([each for each in [found]])\n"
    (tree / SPECS).write_text(short)
    assert list(vague_names(tree)) == []


def test_what_a_test_file_must_not_have_is_named(tree):
    folder = tree / "tests" / "compression"
    (folder / "test_pruning.py").write_text('FRAMEWORKS = ("pt",)\nimport torch\n')
    (folder / "pt_pruning.py").write_text("def linear(width):\n    pass\n")
    (folder / "tf_pruning.py").write_text("def linear(units):\n    pass\n")
    (folder / "arrays").mkdir()
    (folder / "arrays" / "test_gone.npz").write_bytes(bytes(100_001))
    assert list(faults_of_tests(tree)) == [
        "tests/compression/test_pruning.py imports torch",
        "tests/compression/pt_pruning.py: linear differs from its twin",
        "tests/compression/arrays/test_gone.npz has 100001 bytes",
        "tests/compression/arrays/test_gone.npz belongs to no test",
    ]


UNSUPPORTED = 'UNSUPPORTED = {"tf": {"%s": "no means"}}\n'
MORE = "def apply_more(model):\n    pass\n\n\ndef apply_pruning"
OFFLOAD = "begin_step: int = 0, offload: bool = False"


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("def apply_pruning", MORE, "apply_more"),
        ("begin_step: int = 0", OFFLOAD, "apply_pruning(offload)"),
    ],
)
def test_what_one_side_has_stands_in_the_benchmark(tree, old, new, named):
    (tree / PT).write_text((tree / PT).read_text().replace(old, new))
    assert list(mirror_faults(tree))
    (tree / MEASURED).write_text(UNSUPPORTED % "apply_pruning(of_another)")
    assert list(mirror_faults(tree))
    (tree / MEASURED).write_text(UNSUPPORTED % named)
    assert list(mirror_faults(tree)) == []


def test_classes_of_one_name_are_made_alike(tree):
    for place, setting in ((PT, "rate"), (TF, "speed")):
        piece = f"\n\nclass Pruner:\n    def __init__(self, *, {setting}: float):\n        pass\n"
        text = (tree / place).read_text()
        (tree / place).write_text(text.replace("\n\nif __name__", piece + "\n\nif __name__"))
    (fault,) = mirror_faults(tree)
    assert "Pruner" in fault


# The project's files ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["bench", "shared"])
def test_the_imported_packages_are_ours(name):
    assert Path(importlib.import_module(name).__file__).resolve().is_relative_to(ROOT)


def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))


def test_packages_are_the_folders():
    listed = project()["tool"]["setuptools"]["packages"]
    folders = {
        path.parent.relative_to(ROOT).as_posix().replace("/", ".")
        for top in ("shared", "pt_impl", "tf_impl", "bench")
        for path in (ROOT / top).rglob("__init__.py")
    }
    assert sorted(listed) == sorted(folders)
    assert not [name for name in listed if name.startswith("tests")]


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    found = [line.partition("==") for line in lines if not line.startswith("#")]
    return {normal(name): version for name, _, version in found}


def test_constraints_are_exact_public_versions_of_all_that_is_asked_for():
    assert all(re.fullmatch(r"\d+(\.\d+)*", version) for version in pins().values()), pins()
    table = project()["project"]
    extras = table["optional-dependencies"]
    asked = [*table["dependencies"], *extras["torch"], *extras["tensorflow"], *extras["dev"]]
    asked.remove("twinbench[torch,tensorflow]")
    for requirement in asked:
        name, bound = re.fullmatch(r"([\w-]+)>=([\d.]+)", requirement).groups()
        assert parts(pins()[normal(name)]) >= parts(bound), requirement


def parts(version: str) -> list[int]:
    return list(map(int, version.split(".")))


def test_pre_commit_runs_the_ruff_of_the_constraints():
    text = (ROOT / ".pre-commit-config.yaml").read_text("utf-8")
    assert re.findall(r"rev: v(\S+)", text) == [pins()["ruff"]]


def readme_blocks(language: str) -> list[str]:
    text = (ROOT / "README.md").read_text("utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def test_ci_finds_the_command_of_the_readme():
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    pattern = re.search(r'grep -xE "(.*)" README', script.read_text("utf-8"))[1]
    lines = (ROOT / "README.md").read_text("utf-8").splitlines()
    (line,) = [line for line in lines if re.fullmatch(pattern, line)]
    assert f"{line}\n" in readme_blocks("sh")
    assert "-c constraints.txt" in line


def test_commands_of_the_readme_are_one_line_and_stop_at_the_first_failure(tmp_path):
    """A venv that can't be made, an installation that fails: nothing after it runs."""
    commands = [block for block in readme_blocks("sh") if block.startswith("python3 -m venv")]
    assert len(commands) == 3
    fake = tmp_path / "bin" / "python3"
    fake.parent.mkdir()
    fake.write_text("#!/bin/sh\nexit 7\n")
    fake.chmod(0o755)
    environment = {"PATH": f"{fake.parent}:{os.environ['PATH']}"}
    for command in commands:
        assert command.count("\n") == 1
        done = subprocess.run(["sh", "-c", command], cwd=tmp_path, env=environment, check=False)
        assert done.returncode == 7


def test_benchmarks_reach_by_attribute_only_what_every_worker_has_imported():
    """Another module of the kit is there only if something else has imported it: `kit_module`."""
    imported = {name.removeprefix("kit.") for name in user_model.KIT}
    files = {
        path.name: set(re.findall(r"\bimpl\.kit\.(\w+)", path.read_text("utf-8")))
        for path in (ROOT / "bench").glob("*/bench_*.py")
    }
    assert {name: more for name, used in files.items() if (more := used - imported)} == {}
