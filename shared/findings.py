"""What checks find: a report in a few lines, and the names of what they look at."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Finding:
    """One fault: which check, where, and what."""

    check: str
    place: str
    text: str

    def __str__(self) -> str:
        return f"{self.check}: {self.place}: {self.text}"


@dataclass
class Report:
    """What was looked at and what was found; its text is a line for each."""

    looked_at: str
    findings: list[Finding] = field(default_factory=list)

    def __str__(self) -> str:
        if not self.findings:
            return f"{self.looked_at}: nothing found"
        head = f"{self.looked_at}: {len(self.findings)} found"
        return "\n".join([head, *map(str, self.findings)])

    def add(self, check: str, place: str, text: str) -> None:
        """Add a fault."""
        self.findings.append(Finding(check, place, text))

    def raise_if_found(self) -> None:
        """Raise ValueError with the report's text unless it is clean."""
        if self.findings:
            raise ValueError(str(self))


def leaves(tree, name: str) -> list[tuple[str, object]]:
    """Return (name, leaf) of a structure; a list of numbers or strings is a leaf."""
    if tree is None:
        return []
    if isinstance(tree, Mapping):
        return [leaf for key in tree for leaf in leaves(tree[key], f"{name}[{key!r}]")]
    if isinstance(tree, tuple | list) and not all(map(is_one, tree)):
        return [leaf for at, each in enumerate(tree) for leaf in leaves(each, f"{name}[{at}]")]
    return [(name, tree)]


def is_one(value) -> bool:
    """Whether it is a number or a text: of one sample in a list, of the whole batch by itself."""
    return isinstance(value, int | float | str | bytes) or getattr(value, "ndim", None) == 0


def many(count: int, what: str) -> str:
    """Return a number of things, in words: "1 batch", "2 batches"."""
    plural = what + ("es" if what.endswith("ch") else "s")
    return f"{count} {what if count == 1 else plural}"
