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
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SIDES = {"pt_impl": "tf_impl", "tf_impl": "pt_impl"}
FAMILIES = ("train_step", "input", "parallel", "recipes", "compression", "deployment")
FAMILIES += ("diagnosis", "adaptation")
# Whole programs that use techniques: nobody's row, nothing that is copied one by one.
LADDERS = "ladders"
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
        },
    },
    "kit/runtime.py": {
        "tf": {"first_compile": "XLA keeps nothing on disk about the machine"},
    },
}
# What they show is several techniques, which they import.
STACKS = {"combinations", "stacking", "bottleneck", "accumulated_statistics"}
STACKS |= {"loss_scaling", "reduced_precision"}
FRAMEWORKS = {"torch", "torchvision", "torchao", "tensorflow", "keras", "tf_keras"}
FORBIDDEN = {
    "shared": FRAMEWORKS | {"pt_impl", "tf_impl", "bench"},
    "pt_impl": {"tensorflow", "keras", "tf_keras", "tf_impl", "bench"},
    "tf_impl": {"torch", "torchvision", "torchao", "pt_impl", "bench"},
    "bench": FRAMEWORKS | set(SIDES),
}
MAY_IMPORT_A_KIT = "bench/harness/worker.py"
SECTIONS = (
    "What it changes:",
    "Its twin:",
    "Where the frameworks differ and why:",
    "When it helps and when it hurts:",
    "Run it alone:",
)
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


# Checks: each returns what is wrong in the tree below `root` --------------------------------------


@functools.cache
def parsed(source: str) -> ast.Module:
    """The tree of a file's text, which several checks look at."""
    return ast.parse(source)


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


def missing_places(root: Path) -> list[str]:
    places = [
        place
        for family, name in sorted(techniques(root))
        for place in (
            f"pt_impl/{family}/{name}.py",
            f"tf_impl/{family}/{name}.py",
            f"bench/{family}/bench_{name}.py",
            f"tests/{family}/test_{name}.py",
        )
    ]
    places += [f"{side}/kit/{name}.py" for side in SIDES for name in sorted(KIT)]
    places += [
        place.format(name)
        for name in sorted(stems(root, f"pt_impl/{LADDERS}") | stems(root, f"tf_impl/{LADDERS}"))
        for place in (
            "pt_impl/ladders/{}.py",
            "tf_impl/ladders/{}.py",
            "bench/ladders/{}.py",
            "tests/ladders/test_{}.py",
        )
    ]
    return [f"{place} is missing" for place in places if not (root / place).is_file()]


def stray_files(root: Path) -> list[str]:
    """Files of a side that are neither of a family nor of the kit; names that two families have."""
    found = []
    for side in SIDES:
        for path in sources(root, side):
            place = path.relative_to(root).as_posix()
            rooms = path.relative_to(root / side).parts[:-1]
            known = rooms in [(room,) for room in (*FAMILIES, LADDERS, "kit")]
            known |= rooms == ("kit", "checks")
            if not known and place != f"{side}/__init__.py":
                found.append(f"{place} is in no family and not in the kit")
    names = [name for _, name in techniques(root)]
    found += [f"{name} is in two families" for name in sorted(set(names)) if names.count(name) > 1]
    return found


def family_faults(root: Path) -> list[str]:
    """The head of a family says what is in it and which file to read first."""
    found = []
    for room in (*SIDES, "bench"):
        for family in FAMILIES:
            place = f"{room}/{family}/__init__.py"
            text = (root / place).read_text("utf-8") if (root / place).is_file() else ""
            if "first" not in text.rpartition("Read ")[2]:
                found.append(f"{place} does not say which file to read first")
    return found


def twins(root: Path) -> list[tuple[str, Path, Path]]:
    """(place in its side, PyTorch file, TensorFlow file) of all that both sides have."""
    found = []
    for room in (*FAMILIES, LADDERS, "kit"):
        for name in sorted(stems(root, f"pt_impl/{room}") & stems(root, f"tf_impl/{room}")):
            if room == "kit" and name not in KIT:
                continue
            place = f"{room}/{name}.py"
            found.append((place, root / "pt_impl" / place, root / "tf_impl" / place))
    return found


def public_functions(path: Path) -> dict[str, ast.FunctionDef]:
    return {
        node.name: node
        for node in parsed(path.read_text("utf-8")).body
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")
    }


def constructors(path: Path) -> dict[str, ast.FunctionDef]:
    """The `__init__` of each public class."""
    return {
        node.name: method
        for node in parsed(path.read_text("utf-8")).body
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
    found = list(zip(positional + named, defaults + given.kw_defaults, strict=True))
    found += [(("*", given.vararg), None)] if given.vararg else []
    found += [(("**", given.kwarg), None)] if given.kwarg else []
    return [
        (kind, argument.arg, ast.unparse(default) if default else "")
        for (kind, argument), default in found
    ]


def unsupported(root: Path, place: str) -> dict[str, dict[str, str]]:
    """What a benchmark file says its technique lacks: framework -> function -> why."""
    if root == ROOT and place in KIT_LACKS:  # a made-up tree has another kit
        return KIT_LACKS[place]
    family, name = place.split("/")
    path = root / "bench" / family / f"bench_{name}"
    for node in parsed(path.read_text("utf-8")).body if path.is_file() else ():
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "UNSUPPORTED":
            return ast.literal_eval(node.value)
    return {}


def without(functions: dict, name: str, lacking: dict[str, str]) -> list:
    """A function's signature but for the settings that the other side lacks."""
    return [one for one in signature(functions[name]) if f"{name}({one[1]})" not in lacking]


def mirror_faults(root: Path) -> list[str]:
    """Both sides have the same functions, but those that the benchmark says one of them lacks.

    Classes of one name have the same constructor.
    """
    found = []
    for place, *files in twins(root):
        pt, tf = map(public_functions, files)
        lacking = unsupported(root, place)
        for side, ours, theirs in (("pt", pt, tf), ("tf", tf, pt)):
            for name in sorted(lacking.get(side, {})):
                function = name.partition("(")[0]
                if function not in theirs or ("(" not in name and function in ours):
                    found.append(f"bench/{place}: {side} is said to lack {name}, and does not")
        for function in sorted((pt.keys() | tf.keys()) - EXEMPT):
            if function not in pt or function not in tf:
                side = "tf" if function in pt else "pt"
                if function not in lacking.get(side, {}):
                    found.append(f"{side}_impl/{place} has no {function}")
                continue
            ours = without(pt, function, lacking.get("tf", {}))
            theirs = without(tf, function, lacking.get("pt", {}))
            if ours != theirs:
                found.append(f"{place}: {function}: {ours} in pt_impl, {theirs} in tf_impl")
        pt, tf = map(constructors, files)
        for name in sorted(pt.keys() & tf.keys()):
            ours, theirs = signature(pt[name]), signature(tf[name])
            if ours != theirs:
                found.append(f"{place}: {name}: {ours} in pt_impl, {theirs} in tf_impl")
    return found


def setting_faults(root: Path) -> list[str]:
    """Settings: keyword-only, neutral types; nothing passes through **kwargs."""
    found = []
    for side in SIDES:
        for path in sources(root, side):
            for function in public_functions(path).values():
                place, given = (
                    f"{path.relative_to(root).as_posix()}: {function.name}",
                    function.args,
                )
                if given.kwarg:
                    found.append(f"{place} takes **{given.kwarg.arg}")
                for setting in given.kwonlyargs:
                    if annotation(setting) not in SETTING_TYPES:
                        found.append(f"{place}: {setting.arg} is {annotation(setting)}")
                in_kit = "kit" in path.parent.parts
                for argument in [] if in_kit else [*given.posonlyargs, *given.args]:
                    if annotation(argument) in SETTING_TYPES:
                        found.append(f"{place}: {argument.arg} is a setting, not keyword-only")
    return found


def annotation(argument: ast.arg) -> str:
    return ast.unparse(argument.annotation) if argument.annotation else "without a type"


def imported(path: Path) -> set[str]:
    """Dotted names of all that `path` imports, at any depth, by statement or by literal name."""
    rooms = path.parent.parts
    package = rooms[max(i for i, room in enumerate(rooms) if room in FORBIDDEN) :]
    return _imported(path.read_text("utf-8"), package)


@functools.cache
def _imported(source: str, package: tuple[str, ...]) -> set[str]:
    found = set()
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            here = package[: len(package) + 1 - node.level] if node.level else ()
            base = ".".join(filter(None, [*here, node.module]))
            found |= {f"{base}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = ast.unparse(node.func).rpartition(".")[2]
            if called in ("import_module", "__import__"):
                found.add(str(node.args[0].value))
    return found


def boundary_faults(root: Path) -> list[str]:
    found = []
    for package, forbidden in FORBIDDEN.items():
        for path in sources(root, package):
            place = path.relative_to(root).as_posix()
            if place == MAY_IMPORT_A_KIT:
                continue
            reached = {name.partition(".")[0] for name in imported(path)} & forbidden
            found += [f"{place} imports {name}" for name in sorted(reached)]
    return found


def coupling_faults(root: Path) -> list[str]:
    """No file of a side imports a technique of its side, but stacks of techniques and ladders."""
    found = []
    for side in SIDES:
        others = {
            f"{side}.{family}.{name}"
            for family in FAMILIES
            for name in stems(root, f"{side}/{family}")
        }
        for path in sources(root, side):
            if path.stem in STACKS or path.parent.name == LADDERS:
                continue
            names = imported(path)
            reached = {
                other for other in others for name in names if f"{name}.".startswith(f"{other}.")
            }
            place = path.relative_to(root).as_posix()
            found += [f"{place} imports {other}" for other in sorted(reached)]
    return found


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


def circles(root: Path) -> list[str]:
    """Modules that import one another, directly or through others."""
    found = []
    for package in FORBIDDEN:
        arrows = graph(root, package)
        for module in sorted(arrows):
            reached, new = set(), set(arrows[module])
            while new:
                reached |= new
                new = {other for each in new for other in arrows[each]} - reached
            if module in reached:
                found.append(f"{module} imports itself through others")
    return found


# What a part of bench may import of bench. Data flows one way: harness, record, analysis, report.
ARROWS = {
    "bench.analysis": (),
    "bench.report": ("bench.analysis",),
    "bench.harness": ("bench.analysis",),
    "bench.probes": ("bench.harness",),
    "bench.ladders": ("bench.harness", "bench.analysis", "bench.report"),
    "bench.network": ("bench.harness", "bench.analysis", "bench.report"),
    **{f"bench.{family}": ("bench.harness", "bench.probes") for family in FAMILIES},
}


def arrow_faults(root: Path) -> list[str]:
    """Imports that run back up."""
    found = []
    for module, others in sorted(graph(root, "bench").items()):
        part = next((p for p in ARROWS if f"{module}.".startswith(f"{p}.")), None)
        for other in sorted(others) if part else []:
            if not any(f"{other}.".startswith(f"{to}.") for to in (part, *ARROWS[part])):
                found.append(f"{module} imports {other}")
    return found


def technique_files(root: Path) -> list[Path]:
    found = (
        root / side / family / f"{name}.py"
        for side in SIDES
        for family, name in sorted(techniques(root))
    )
    return [path for path in found if path.is_file()]


def ladder_files(root: Path) -> list[Path]:
    return [path for side in SIDES for path in sorted((root / side / LADDERS).glob("[!_]*.py"))]


def needed(root: Path, place: str) -> list[str]:
    """The files that a file imports, but in its `main`, and those that these import, sorted."""
    found, new = {place}, [place]
    while new:
        names = _used((root / new.pop()).read_text("utf-8"))
        own = [name for name in sorted(names - found) if (root / name).is_file()]
        found.update(own)
        new += own
    return sorted(found - {place})


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
    text = ast.get_docstring(parsed(path.read_text("utf-8"))) or ""
    return re.findall(r"`([\w/]+\.py)`", text.partition("\nCopy with it:")[2])


def copying_faults(root: Path) -> list[str]:
    """The head of a file says what has to be copied with it: all of it, and nothing else."""
    found = []
    for path in technique_files(root):
        place = path.relative_to(root).as_posix()
        named, wanted = named_to_copy(path), needed(root, place)
        if named != wanted:
            found.append(
                f"{place} needs {', '.join(wanted) or 'nothing'}: say so at its head's end"
            )
        others = [name for name in wanted if name.split("/")[1] not in FAMILIES]
        if len(others) > MOST_FILES_TO_COPY and path.stem not in STACKS | NEEDS_MORE:
            found.append(f"{place} needs {len(others)} files of the kit: {', '.join(others)}")
    return found


def tier_faults(root: Path) -> list[str]:
    """A technique file holds the method; what makes it safe on any model stands in the kit."""
    found = []
    for path in technique_files(root):
        place, text = path.relative_to(root).as_posix(), path.read_text("utf-8")
        body = text.replace(ast.get_docstring(parsed(text), clean=False) or "", "", 1)
        found += [f"{place} {why}" for what, why in OF_THE_KIT.items() if re.search(what, body)]
        kit = [name for name in needed(root, place) if "/kit/" in name]
        if len(kit) > MOST_KIT_FILES and path.stem not in STACKS | NEEDS_MORE:
            found.append(f"{place} needs {len(kit)} files of the kit: {', '.join(kit)}")
        for name in kit:
            lines = (root / name).read_text("utf-8").count("\n")
            if lines > MOST_KIT_LINES:
                found.append(f"{place} needs {name}, which has {lines} lines")
    return found


def runtime_faults(root: Path) -> list[str]:
    """A runtime that only a part of a technique needs is imported there, not at the top."""
    found = []
    for path in technique_files(root):
        for node in parsed(path.read_text("utf-8")).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            place = path.relative_to(root).as_posix()
            found += [
                f"{place} imports {name} for whoever imports it"
                for name in names
                if name.partition(".")[0] in RUNTIMES
            ]
    return found


def docstring_faults(root: Path) -> list[str]:
    found = []
    for path in [*technique_files(root), *ladder_files(root)]:
        place = path.relative_to(root).as_posix()
        side, family = path.relative_to(root).parts[:2]
        text = ast.get_docstring(parsed(path.read_text("utf-8"))) or ""
        at = [f"\n{text}".find(f"\n{section}") for section in SECTIONS]
        if -1 in at:
            found.append(f"{place}: no section {SECTIONS[at.index(-1)]!r}")
        elif at != sorted(at):
            found.append(f"{place}: its sections are not in the order {SECTIONS}")
        twin, alone = f"{SIDES[side]}/{family}/{path.name}", f"{side}.{family}.{path.stem}"
        for words in (twin, f"python -m {alone}"):
            if words not in text:
                found.append(f"{place}: does not name {words}")
    return found


def size_faults(root: Path) -> list[str]:
    found = []
    for path in [*technique_files(root), *ladder_files(root)]:
        place, text = path.relative_to(root).as_posix(), path.read_text("utf-8")
        for node in ast.walk(parsed(text)):
            if isinstance(node, ast.FunctionDef):
                lines = node.end_lineno - node.lineno + 1
                if lines > MOST_LINES_A_FUNCTION:
                    found.append(f"{place}: {node.name} has {lines} lines")
    return found


def import_time_faults(root: Path) -> list[str]:
    """Importing a file of a side does nothing but define."""
    harmless = (
        ast.Import,
        ast.ImportFrom,
        ast.FunctionDef,
        ast.ClassDef,
        ast.Assign,
        ast.AnnAssign,
    )
    found = []
    for side in SIDES:
        for path in sources(root, side):
            for node in parsed(path.read_text("utf-8")).body:
                docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
                main = isinstance(node, ast.If) and "__main__" in ast.unparse(node.test)
                if not (isinstance(node, harmless) or docstring or main):
                    place = path.relative_to(root).as_posix()
                    found.append(f"{place}:{node.lineno} runs when imported")
    return found


def name_faults(root: Path) -> list[str]:
    """A file named as a module of the standard library would hide it from a copied script."""
    return [
        f"{path.relative_to(root).as_posix()} has the name of a standard module"
        for package in FORBIDDEN
        for path in sources(root, package)
        if path.stem in sys.stdlib_module_names
    ]


def path_faults(root: Path) -> list[str]:
    """Absolute paths of somebody's machine, in any file of text."""
    homes = re.compile("|".join(f"/{name}/" for name in ("work", "home", "root", "Users", "tmp")))
    found = []
    for path in text_files(root):
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
            before = homes.search(line)
            if before and not re.search(r"[\w.~>)\]}]$", line[: before.start()]):
                found.append(f"{path.relative_to(root).as_posix()}:{number}: {line.strip()[:60]}")
    return found


def faults_of_tests(root: Path) -> list[str]:
    """Tests import no framework, helpers are twins, and saved arrays are small."""
    found = []
    for path in sorted((root / "tests").glob("*/test_*.py")):
        place, text = path.relative_to(root).as_posix(), path.read_text("utf-8")
        if re.search(r"^FRAMEWORKS = ", text, re.MULTILINE):
            names = {name.partition(".")[0] for name in _imported(text, ("tests",))}
            found += [f"{place} imports {n}" for n in sorted(names & (FRAMEWORKS | set(SIDES)))]
    for path in sorted((root / "tests").glob("*/pt_*.py")):
        twin = path.with_name(path.name.replace("pt_", "tf_", 1))
        if not twin.is_file():
            continue
        pt, tf = public_functions(path), public_functions(twin)
        for name in sorted(pt.keys() & tf.keys()):
            if signature(pt[name]) != signature(tf[name]):
                found.append(f"{path.relative_to(root).as_posix()}: {name} differs from its twin")
    for path in sorted((root / "tests").glob("*/arrays/*.npz")):
        place = path.relative_to(root).as_posix()
        if path.stat().st_size > MOST_BYTES_OF_ARRAYS:
            found.append(f"{place} has {path.stat().st_size} bytes")
        if not (path.parent.parent / f"{path.stem}.py").is_file():
            found.append(f"{place} belongs to no test")
    return found


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
        missing_places,
        stray_files,
        family_faults,
        mirror_faults,
        setting_faults,
        boundary_faults,
        coupling_faults,
        circles,
        arrow_faults,
        docstring_faults,
        copying_faults,
        tier_faults,
        runtime_faults,
        size_faults,
        import_time_faults,
        name_faults,
        path_faults,
        faults_of_tests,
    )
}


@pytest.mark.parametrize("check", CHECKS)
def test_this_repository(check):
    assert CHECKS[check](ROOT) == []


# The checks themselves, on a made-up tree ---------------------------------------------------------

TECHNIQUE = '''\
"""Pruning.

What it changes: weights.

Its twin: `{twin}/compression/pruning.py`.

Where the frameworks differ and why: nowhere.

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
    rooms = ("shared", "bench/harness", "bench/report", "pt_impl/kit", "tf_impl/kit")
    for folder in rooms:
        (tmp_path / folder).mkdir(parents=True)
    for family in FAMILIES:
        (tmp_path / "tests" / family).mkdir(parents=True)
        for room in (*SIDES, "bench"):
            (tmp_path / room / family).mkdir()
            (tmp_path / room / family / "__init__.py").write_text('"""Read this first."""\n')
    for side, framework in (("pt_impl", "torch"), ("tf_impl", "tensorflow")):
        for name in KIT:
            (tmp_path / side / "kit" / f"{name}.py").write_text(f"import {framework}\n")
        text = TECHNIQUE.format(side=side, twin=SIDES[side], framework=framework)
        (tmp_path / side / "compression" / "pruning.py").write_text(text)
    measured = tmp_path / "bench" / "compression" / "bench_pruning.py"
    measured.write_text("import bench.harness.plan\n")
    (tmp_path / "bench" / "harness" / "plan.py").write_text("import shared.specs\n")
    (tmp_path / "bench" / "harness" / "worker.py").write_text("import torch\n")
    (tmp_path / "bench" / "report" / "page.py").write_text("import json\n")
    (tmp_path / "shared" / "specs.py").write_text("import numpy\n")
    (tmp_path / "tests" / "compression" / "test_pruning.py").write_text("")
    return tmp_path


def test_a_sound_tree_has_no_fault(tree):
    assert {name: check(tree) for name, check in CHECKS.items() if check(tree)} == {}


@pytest.mark.parametrize(
    "place",
    [
        "pt_impl/compression/pruning.py",
        "tf_impl/compression/pruning.py",
        "bench/compression/bench_pruning.py",
        "tests/compression/test_pruning.py",
        "tf_impl/kit/data.py",
    ],
)
def test_the_missing_place_is_named(tree, place):
    (tree / place).unlink()
    assert missing_places(tree) == [f"{place} is missing"]


def test_a_benchmark_of_nothing_is_named(tree):
    (tree / "bench" / "input" / "bench_gone.py").write_text("")
    assert missing_places(tree) == [
        f"{place} is missing"
        for place in ("pt_impl/input/gone.py", "tf_impl/input/gone.py", "tests/input/test_gone.py")
    ]


def test_a_file_in_no_family_is_named(tree):
    (tree / "pt_impl" / "gone.py").write_text("")
    assert stray_files(tree) == ["pt_impl/gone.py is in no family and not in the kit"]


def test_a_name_in_two_families_is_named(tree):
    (tree / "bench" / "input" / "bench_pruning.py").write_text("")
    assert stray_files(tree) == ["pruning is in two families"]


# check, file, old text, new text, part of what it must say
FAULTS = [
    (
        "copying_faults",
        "pt_impl/compression/pruning.py",
        "import torch",
        "import torch\nfrom shared.specs import TASKS",
        "needs pt_impl/kit/training.py, shared/specs.py",
    ),
    ("family_faults", "tf_impl/input/__init__.py", "Read this first", "Input", "tf_impl/input"),
    (
        "arrow_faults",
        "bench/harness/plan.py",
        "shared.specs",
        "bench.report.page",
        "bench.report.page",
    ),
    ("arrow_faults", "bench/report/page.py", "json", "bench.harness.plan", "bench.harness.plan"),
    ("arrow_faults", "bench/report/page.py", "json", "bench.compression", "bench.compression"),
    ("mirror_faults", "tf_impl/compression/pruning.py", "0.5", "0.9", "0.9"),
    ("mirror_faults", "tf_impl/compression/pruning.py", "begin_step", "start", "start"),
    ("mirror_faults", "tf_impl/compression/pruning.py", "*, final", "final", "positional"),
    (
        "mirror_faults",
        "tf_impl/compression/pruning.py",
        "def apply_pruning",
        "def prune",
        "no apply_pruning",
    ),
    ("mirror_faults", "pt_impl/compression/pruning.py", "= 0)", "= 0, **rest)", "rest"),
    (
        "mirror_faults",
        "bench/compression/bench_pruning.py",
        "import",
        "UNSUPPORTED = {'tf': {'apply_pruning': 'no'}}\nimport",
        "tf is said to lack apply_pruning, and does not",
    ),
    (
        "runtime_faults",
        "pt_impl/compression/pruning.py",
        "import torch",
        "import torch\nimport onnxruntime",
        "imports onnxruntime for whoever imports it",
    ),
    (
        "mirror_faults",
        "bench/compression/bench_pruning.py",
        "import",
        "UNSUPPORTED = {'tf': {'apply_pruning': 'no'}}\nimport",
        "tf is said to lack apply_pruning, and does not",
    ),
    (
        "runtime_faults",
        "pt_impl/compression/pruning.py",
        "import torch",
        "import torch\nimport onnxruntime",
        "imports onnxruntime for whoever imports it",
    ),
    ("setting_faults", "pt_impl/compression/pruning.py", "= 0)", "= 0, **rest)", "takes **rest"),
    (
        "setting_faults",
        "pt_impl/compression/pruning.py",
        "step: int",
        "step: torch.Tensor",
        "torch.Tensor",
    ),
    ("setting_faults", "pt_impl/compression/pruning.py", "step: int", "step", "without a type"),
    (
        "setting_faults",
        "pt_impl/compression/pruning.py",
        "(model, *",
        "(model, share: float, *",
        "keyword-only",
    ),
    (
        "boundary_faults",
        "pt_impl/compression/pruning.py",
        "import torch",
        "import tensorflow",
        "tensorflow",
    ),
    ("boundary_faults", "tf_impl/kit/data.py", "import", "from torch import", "imports torch"),
    ("boundary_faults", "tf_impl/kit/data.py", "import", "import pt_impl.kit.data,", "pt_impl"),
    ("boundary_faults", "pt_impl/kit/data.py", "import", "import bench.harness,", "bench"),
    ("boundary_faults", "shared/specs.py", "import", "import torch,", "shared/specs.py"),
    (
        "boundary_faults",
        "bench/compression/bench_pruning.py",
        "import",
        "import pt_impl.compression.pruning,",
        "pt_impl",
    ),
    (
        "boundary_faults",
        "bench/compression/bench_pruning.py",
        "import bench.harness.plan",
        "def f():\n    importlib.import_module('tensorflow')",
        "tensorflow",
    ),
    (
        "coupling_faults",
        "pt_impl/compression/pruning.py",
        "kit import training",
        "compression import pruning",
        "pt_impl.compression.pruning",
    ),
    (
        "coupling_faults",
        "tf_impl/kit/data.py",
        "import",
        "from ..compression.pruning import",
        "tf_impl.compression.pruning",
    ),
    (
        "docstring_faults",
        "pt_impl/compression/pruning.py",
        "Its twin:",
        "Twin:",
        "no section 'Its twin:'",
    ),
    (
        "docstring_faults",
        "pt_impl/compression/pruning.py",
        "`tf_impl/",
        "`tf/",
        "tf_impl/compression/pruning.py",
    ),
    (
        "docstring_faults",
        "pt_impl/compression/pruning.py",
        "python -m",
        "python",
        "python -m pt_impl.compression.pruning",
    ),
    (
        "docstring_faults",
        "pt_impl/compression/pruning.py",
        "What it changes: weights.\n",
        "Run it alone: so.\n\nWhat it changes: weights.\n",
        "order",
    ),
    (
        "size_faults",
        "pt_impl/compression/pruning.py",
        "    return",
        "    x = 1\n" * 60 + "    return",
        "62 lines",
    ),
    (
        "import_time_faults",
        "tf_impl/kit/data.py",
        "import",
        "print()\nimport",
        "tf_impl/kit/data.py:1",
    ),
    ("path_faults", "shared/specs.py", "import", "# see /ho" + "me/me/notes\nimport", "specs.py:1"),
]


@pytest.mark.parametrize(("check", "place", "old", "new", "said"), FAULTS)
def test_a_fault_is_found(tree, check, place, old, new, said):
    text = (tree / place).read_text()
    assert old in text
    (tree / place).write_text(text.replace(old, new))
    found = CHECKS[check](tree)
    assert found
    assert all(said in fault for fault in found[:1]), found


def test_a_circle_is_found(tree):
    (tree / "shared" / "specs.py").write_text("import shared.weights\n")
    (tree / "shared" / "weights.py").write_text("from shared.datasets import load\n")
    (tree / "shared" / "datasets.py").write_text("def load():\n    from shared import specs\n")
    assert circles(tree) == [
        f"shared.{name} imports itself through others" for name in ("datasets", "specs", "weights")
    ]


def test_what_a_test_file_must_not_have_is_named(tree):
    folder = tree / "tests" / "compression"
    (folder / "test_pruning.py").write_text('FRAMEWORKS = ("pt",)\nimport torch\n')
    (folder / "pt_pruning.py").write_text("def linear(width):\n    pass\n")
    (folder / "tf_pruning.py").write_text("def linear(units):\n    pass\n")
    (folder / "arrays").mkdir()
    (folder / "arrays" / "test_gone.npz").write_bytes(bytes(100_001))
    assert faults_of_tests(tree) == [
        "tests/compression/test_pruning.py imports torch",
        "tests/compression/pt_pruning.py: linear differs from its twin",
        "tests/compression/arrays/test_gone.npz has 100001 bytes",
        "tests/compression/arrays/test_gone.npz belongs to no test",
    ]


UNSUPPORTED = 'UNSUPPORTED = {"tf": {"%s": "no means"}}\n'


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        (
            "def apply_pruning",
            "def apply_more(model):\n    pass\n\n\ndef apply_pruning",
            "apply_more",
        ),
        (
            "begin_step: int = 0",
            "begin_step: int = 0, offload: bool = False",
            "apply_pruning(offload)",
        ),
    ],
)
def test_what_one_side_has_stands_in_the_benchmark(tree, old, new, named):
    technique = tree / "pt_impl" / "compression" / "pruning.py"
    technique.write_text(technique.read_text().replace(old, new))
    assert mirror_faults(tree)
    measured = tree / "bench" / "compression" / "bench_pruning.py"
    measured.write_text(UNSUPPORTED % "apply_pruning(of_another)")
    assert mirror_faults(tree)
    measured.write_text(UNSUPPORTED % named)
    assert mirror_faults(tree) == []


def test_classes_of_one_name_are_made_alike(tree):
    for side, setting in (("pt", "rate"), ("tf", "speed")):
        technique = tree / f"{side}_impl" / "compression" / "pruning.py"
        piece = f"\n\nclass Pruner:\n    def __init__(self, *, {setting}: float):\n        pass\n"
        technique.write_text(
            technique.read_text().replace("\n\nif __name__", piece + "\n\nif __name__")
        )
    (fault,) = mirror_faults(tree)
    assert "Pruner" in fault


def test_a_standard_name_is_found(tree):
    (tree / "pt_impl" / "kit" / "queue.py").write_text("")
    assert name_faults(tree) == ["pt_impl/kit/queue.py has the name of a standard module"]


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
    asked = table["dependencies"] + table["optional-dependencies"]["dev"]
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
    assert len(commands) == 2
    fake = tmp_path / "bin" / "python3"
    fake.parent.mkdir()
    fake.write_text("#!/bin/sh\nexit 7\n")
    fake.chmod(0o755)
    environment = {"PATH": f"{fake.parent}:{os.environ['PATH']}"}
    for command in commands:
        assert command.count("\n") == 1
        done = subprocess.run(["sh", "-c", command], cwd=tmp_path, env=environment, check=False)
        assert done.returncode == 7
