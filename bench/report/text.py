"""Plain text that a terminal can show without harm, wrapped to its width."""

from __future__ import annotations

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

GAP = 2  # blanks between columns
CONSOLE = Console(width=1000, color_system=None, force_terminal=False, legacy_windows=False)


def plain(text: object) -> str:
    """One line of printable characters: white space becomes blanks, control characters \\x1b."""
    return printable(" ".join(str(text).split()))


def printable(text: str) -> str:
    """The text with all that is no printable character as \\x1b, line ends too."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def wrap(text: str, width: int) -> list[str]:
    """Lines of at most `width` cells; a word that is longer is broken. A newline stays one."""
    return [line.plain.rstrip() for line in Text(text).wrap(CONSOLE, width)] or [""]


def pad(text: str, width: int) -> str:
    """`text` filled up with blanks to `width` cells."""
    return text + " " * (width - cell_len(text))


def hanging(label: str, text: str, width: int, indent: int) -> list[str]:
    """`label`, then `text` wrapped in the column that begins at `indent`."""
    lines = wrap(text, width - indent)
    if cell_len(label) >= indent:
        return [*wrap(label, width), *(" " * indent + line for line in lines)]
    first, *rest = lines
    return [pad(label, indent) + first, *(" " * indent + line for line in rest)]
