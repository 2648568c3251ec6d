"""Plain text in columns: what a terminal can show without harm, wrapped to its width."""

from __future__ import annotations

import re
import unicodedata

GAP = 2  # blanks between columns
SMALLEST_LABEL = 12  # the first column shrinks to this before any other does
LONGEST_WORD = 24  # a longer one is broken rather than that a column takes more


def plain(text: object) -> str:
    """One line of printable characters: white space becomes blanks, control characters \\x1b."""
    return printable(" ".join(str(text).split()))


def printable(text: str) -> str:
    """The text with all that is no printable character as \\x1b, line ends too."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def cells(text: str) -> int:
    """How many terminal cells `text` takes: East Asian wide characters take two, accents none."""
    if text.isascii():
        return len(text)
    return sum(
        0
        if unicodedata.category(c) == "Mn"
        else 2
        if unicodedata.east_asian_width(c) in "WF"
        else 1
        for c in text
    )


def wrap(text: str, width: int) -> list[str]:
    """Lines of at most `width` cells, broken at blanks, after - and /, or else after _ and –.

    A word that is too long even so is broken anywhere. A newline in `text` stays one.
    """
    return [line for part in text.split("\n") for line in _wrap_line(part, width)]


def _wrap_line(text: str, width: int) -> list[str]:
    lines = [""]
    for piece in _pieces(text, width):
        if cells(lines[-1] + piece) > width:
            lines.append("")
            piece = piece.lstrip()
        for character in piece:  # longer than a line: cut
            if cells(lines[-1] + character) > width:
                lines.append("")
            lines[-1] += character
    return [line.rstrip() for line in lines if line.strip()] or [""]


def _pieces(text: str, width: int) -> list[str]:
    """Parts after which a line may break; a word too long for one also breaks after _, then –.

    No break before a digit or a single letter: a minus sign stays with its number, samples/s whole.
    """
    pieces = re.findall(r" *(?:[^ \-/]|[\-/](?=\d|\w\b))*[\-/]*", text)
    for break_after in ("_", "–"):
        finer = rf"[^{break_after}]*{break_after}*"
        pieces = [
            part
            for piece in pieces
            for part in (re.findall(finer, piece) if cells(piece.strip()) > width else [piece])
        ]
    return pieces


def least_width(text: str) -> int:
    """Cells that hold `text` with no word broken but after - / and _."""
    return max(map(cells, re.findall(r"(?:[^\s\-/_]|[\-/](?=\d|\w\b))*[\-/_]*", text)))


def hanging(label: str, text: str, width: int, indent: int) -> list[str]:
    """`label`, then `text` wrapped in the column that begins at `indent`."""
    lines = wrap(text, width - indent)
    if cells(label) >= indent:
        return [*wrap(label, width), *(" " * indent + line for line in lines)]
    first, *rest = lines
    return [pad(label, indent) + first, *(" " * indent + line for line in rest)]


def pad(text: str, width: int, *, right: bool = False) -> str:
    """`text` filled up with blanks to `width` cells, on the left where it stands `right`."""
    blanks = " " * (width - cells(text))
    return blanks + text if right else text + blanks


def least_widths(rows: list[list[str]]) -> list[int]:
    """For each column, the cells that hold it with no word broken; `LONGEST_WORD` at most."""
    return [min(LONGEST_WORD, max(map(least_width, column))) for column in zip(*rows, strict=True)]


def column_widths(rows: list[list[str]], width: int) -> list[int]:
    """Widths that hold `rows` in `width` cells, gaps included: natural ones if they fit.

    Else the first column shrinks to `SMALLEST_LABEL`, then always the widest. Words are broken
    only where nothing else can shrink.
    """
    least = least_widths(rows)
    widths = [
        min(width, max(cells(line) for cell in column for line in cell.split("\n")))
        for column in zip(*rows, strict=True)
    ]
    least[0] = max(least[0], min(widths[0], SMALLEST_LABEL))
    while sum(widths) + GAP * (len(widths) - 1) > width and max(widths) > 2:
        loose = [n for n, each in enumerate(widths) if each > least[n]]
        shrinks = 0 if 0 in loose else max(loose or range(len(widths)), key=widths.__getitem__)
        widths[shrinks] -= 1
    return widths


def row_lines(row: list[str], widths: list[int], right: list[bool]) -> list[str]:
    """One row on as many lines as its longest cell needs."""
    wrapped = [wrap(cell, width) for cell, width in zip(row, widths, strict=True)]
    height = max(map(len, wrapped))
    columns = [
        [pad(line, width, right=flag) for line in cell + [""] * (height - len(cell))]
        for cell, width, flag in zip(wrapped, widths, right, strict=True)
    ]
    return [(" " * GAP).join(parts).rstrip() for parts in zip(*columns, strict=True)]
