"""Families of techniques: the folders of their benchmark files."""

from __future__ import annotations

from functools import cache
from pathlib import Path

FAMILIES = ("train_step", "input", "parallel", "recipes", "compression", "deployment")
FAMILIES += ("diagnosis", "adaptation")
OF_LEARNING = ("recipes", "adaptation")  # what changes what is learned
OF_TRAINING = ("input", "parallel")  # what leaves what is trained as it is
FORMER = {"checks": "recipes"}  # what is a technique no more, and in published records is one


@cache
def families() -> dict[str, str]:
    """Technique -> family; of records, those that are gone."""
    folder = Path(__file__).parents[1]
    return FORMER | {
        path.stem.removeprefix("bench_"): path.parent.name for path in folder.glob("*/bench_*.py")
    }


def family_of(technique: str) -> str:
    """The family of a technique; the first family if the technique is unknown."""
    return families().get(technique, FAMILIES[0])
