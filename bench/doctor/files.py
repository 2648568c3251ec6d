"""What a user's file defines and imports, without running it."""

from __future__ import annotations

import ast
import shlex
from pathlib import Path

from bench.record import FRAMEWORKS
from shared.user_model import KERAS, MAKERS, look, names

MODULES = {"torch": "pt", "torchvision": "pt", "tensorflow": "tf", "keras": "tf", "tf_keras": "tf"}


def read(path: Path) -> ast.Module:
    """The syntax tree of a file. Raises ValueError if it is not Python."""
    try:
        return ast.parse(path.read_text("utf-8"))
    except OSError as error:
        raise ValueError(f"{path} can't be read ({error.strerror})") from None
    except SyntaxError as error:
        raise ValueError(f"{path}:{error.lineno}: {error.msg}") from None
    except (ValueError, RecursionError, MemoryError) as error:  # no UTF-8, or nested too deep
        raise ValueError(f"{path} is not a Python file: {error or type(error).__name__}") from None


def check_make(path: Path) -> None:
    """Raise ValueError if a file has no `make`, without running it: it may train for hours."""
    defined = names(read(path).body)
    if defined & {"make", "*"}:
        return
    if defined & set(MAKERS.values()):
        raise ValueError(
            f"{path} is a file for twinbench try, which diagnoses it with: "
            f"twinbench try {shlex.quote(str(path))} --technique bottleneck"
        )
    raise ValueError(f"{path} has no function make() that returns (step, batches): write one")


def framework_of(path: Path, asked: str | None = None) -> str:
    """The framework that a file imports, or the one asked for if it imports both or none.

    Raises ValueError if that leaves it open, or if it imports only the other.
    """
    imported = {
        (alias.name if isinstance(node, ast.Import) else node.module or "").partition(".")[0]
        for node in ast.walk(read(path))
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for alias in node.names
    }
    frameworks = {MODULES[name] for name in imported if name in MODULES}
    if asked and (asked in frameworks or not frameworks):
        return asked
    if len(frameworks) != 1:
        what = "both torch and tensorflow" if frameworks else "neither torch nor tensorflow"
        raise ValueError(f"{path} imports {what}: choose with --framework")
    (framework,) = frameworks
    if asked:
        raise ValueError(f"{path} imports {FRAMEWORKS[framework]} only: leave out --framework")
    return framework


def sides_of(path: Path, asked: str | None = None) -> list[str]:
    """The frameworks of a file for `diagnose` or for `try`, or the one asked for.

    Raises ValueError if it is neither, or lacks the framework asked for.
    """
    if names(read(path).body) & {"make"}:
        return [framework_of(path, asked)]
    file = look(path)
    sides = [side for side in file.sides if file.maker(side) != KERAS]
    if not sides:
        raise ValueError(f"{path} has keras() only: twinbench try measures it on both backends")
    if asked and asked not in sides:
        raise ValueError(f"{path} has no {MAKERS[asked]}(): leave out --framework")
    return [asked] if asked else sides
