"""The shape of a record: what must stand in it, and of which type, for a report to be made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bench.analysis.values import is_number

SCHEMA_VERSION = 3
MOST_LOOKS = 10
DEEPEST = 30  # levels of nesting; a run writes ten


@dataclass(frozen=True)
class Number:
    """A number above `above`, up to `most`, where they are given; or a whole one."""

    above: float | None = None
    most: float | None = None
    whole: bool = False

    def holds(self, value: Any) -> bool:
        """Whether `value` is such a number."""
        return (
            is_number(value)
            and (not self.whole or isinstance(value, int))
            and (self.above is None or value > self.above)
            and (self.most is None or value <= self.most)
        )

    def __str__(self) -> str:
        above = "" if self.above is None else f" above {self.above:g}"
        most = "" if self.most is None else f" up to {self.most:g}"
        return f"a {'whole ' if self.whole else ''}number{above}{most}"


@dataclass(frozen=True)
class Maybe:
    """The shape, null, or nothing."""

    shape: Any


@dataclass(frozen=True)
class Each:
    """A JSON object whose every value has the shape, whatever its name."""

    shape: Any


@dataclass(frozen=True)
class Pair:
    """A list of two."""

    shape: Any


FIGURE = Maybe(Number())
TIME = Number(above=0)
SAMPLE = Number(above=1e-10, most=1e5)  # seconds a step
RATIO = Number(above=0, most=1e9)
BOUNDS = Pair(Number(above=0))  # of two blocks that are far apart they are far out
TEXT = Maybe(str)
_INTERVAL = Maybe(Pair(Number()))
_DIFFERENCE = {"mean": FIGURE, "ci": _INTERVAL, "verdict": TEXT}
PRICE = {"epochs": Number(whole=True), "teacher": bool, "calibration": bool, "compiled": bool}
_MEMORY = ("import", "build", "first_step_peak", "steady_peak")
_MEMORY += ("parameters", "gradients", "optimizer", "rest")

# A dict is a JSON object with these fields (others are let be), a list a JSON list of one shape.
CASE = {
    "id": str,
    "technique": str,
    "framework": str,
    "variant": str,
    "role": str,
    "task": str,
    "batch_size": Number(whole=True),
    "status": str,
    "flavour": TEXT,
    "title": TEXT,
    "program": TEXT,
    "mode": TEXT,
    "reason": TEXT,
    "timing": Maybe(
        {
            "cold_first_call_s": Maybe(TIME),
            "warm_first_call_s": Maybe(TIME),
            "step_s": Maybe(Each(Each([SAMPLE]))),
            "median_s": Maybe(TIME),
            "ci_s": Maybe(Pair(TIME)),
        }
    ),
    "memory": Maybe(
        {f"{part}_bytes": FIGURE for part in _MEMORY} | {"device_peak": Maybe(Each(FIGURE))}
    ),
    "accuracy": Maybe(
        {
            "metric": TEXT,
            "per_seed": Maybe([FIGURE]),
            "mean": FIGURE,
            "ci": _INTERVAL,
            "difference": Maybe(_DIFFERENCE),
        }
    ),
    "price": Maybe(PRICE),
    "stacking": Maybe(dict),
    "remedies": Maybe([str]),
    "artifact_bytes": FIGURE,
    "metrics": Maybe(
        Each({"value": FIGURE, "unit": TEXT, "ci": Maybe(Pair(FIGURE)), "samples": Maybe([FIGURE])})
    ),
    "blocks": Maybe([{"block": Number(whole=True), "losses": [FIGURE]}]),
    "certificate": Maybe({"losses": [FIGURE], "weights_sha256": TEXT}),
}
COMPARISON = {
    "technique": str,
    "variant": str,
    "task": str,
    "batch_size": Number(whole=True),
    "kind": str,
    "numerator": str,
    "denominator": str,
    "mode": TEXT,
    "ratio": Maybe(RATIO),
    "ci": Maybe(BOUNDS),
    "sd": Maybe(Number(most=10)),
    "n": Maybe(Number(above=0, whole=True)),
    "freedom": Maybe(Number(above=0)),
    "look": Maybe(Number(above=0, whole=True)),
    "verdict": TEXT,
    "reason": TEXT,
}
CONTROL = {"framework": TEXT, "technique": TEXT, "task": TEXT, "verdict": TEXT}
CONTROL |= {"ratio": Maybe(RATIO), "ci": Maybe(BOUNDS)}
TECHNIQUE = {"title": TEXT, "differs_by_design": Maybe([str]), "notes": Maybe([str])}
RECORD = {
    "command": str,
    "effort": str,
    "started": str,
    "finished": bool,
    "ended": TEXT,
    "looks": Maybe([Number(above=1, most=1000, whole=True)]),
    "seed_looks": Maybe([Number(above=1, most=1000, whole=True)]),
    "environment": {
        "packages": Maybe(Each(Maybe(dict))),
        "first_compile_s": Maybe(Each(TIME)),
    },
    "noise_floor": {"controls": Maybe([CONTROL])},
    "techniques": Each(TECHNIQUE),
    "tasks": Each({"metric": TEXT, "margin": FIGURE, "parity": FIGURE}),
    "cases": list,
    "comparisons": list,
}


def check(results: Any) -> None:
    """Raise ValueError, with one line, unless a report can be made of `results`."""
    version = results.get("schema_version") if isinstance(results, dict) else None
    if type(version) is not int:
        raise ValueError("not a record of twinbench (no schema_version)")
    if version > SCHEMA_VERSION:
        raise ValueError(
            f"schema {version} is newer than {SCHEMA_VERSION}, the newest that "
            "this version reads: update twinbench"
        )
    if version < SCHEMA_VERSION:
        raise ValueError(
            f"schema {version} is older than {SCHEMA_VERSION}, the only one that this version "
            "reads: measure again"
        )
    _check_depth(results)
    check_shape(results, RECORD, "the record")
    for kind, shape in (("case", CASE), ("comparison", COMPARISON)):
        for number, entry in enumerate(results[f"{kind}s"]):
            check_shape(entry, shape, f"{kind} {number}")
    for name in ("looks", "seed_looks"):
        looks = results.get(name) or []
        if looks != sorted(set(looks)) or len(looks) > MOST_LOOKS:
            raise ValueError(f"the record: {name} are not {MOST_LOOKS} rising numbers at most")
    _check_rounds(results["cases"])


def _check_rounds(cases: list[dict]) -> None:
    """Contenders of a block play the same rounds; matches and blocks are numbered."""
    played: dict[tuple[str, str], int] = {}
    for number, case in enumerate(cases):
        for match, blocks in ((case.get("timing") or {}).get("step_s") or {}).items():
            for block, samples in blocks.items():
                if not match.isdecimal() or not block.isdecimal():
                    raise ValueError(f"case {number}: timing: step_s: {match}, {block}: no numbers")
                if samples and played.setdefault((match, block), len(samples)) != len(samples):
                    raise ValueError(
                        f"case {number}: timing: step_s: match {match}, block {block} has not as "
                        "many rounds as others"
                    )


def _check_depth(value: Any, depth: int = 0) -> None:
    if depth > DEEPEST:
        raise ValueError(f"nested more than {DEEPEST} levels deep")
    for inner in value.values() if isinstance(value, dict) else value:
        if isinstance(inner, dict | list):
            _check_depth(inner, depth + 1)


def check_shape(value: Any, shape: Any, what: str) -> None:
    """Raise ValueError, with one line, unless `value`, which is called `what`, has the shape."""
    if isinstance(shape, dict):
        _check_type(value, dict, what)
        _check_fields(value, shape, what)
    elif isinstance(shape, list | Pair):
        _check_type(value, list, what)
        if isinstance(shape, Pair) and len(value) != 2:
            raise ValueError(f"{what} is no pair")
        inner = shape.shape if isinstance(shape, Pair) else shape[0]
        for place, entry in enumerate(value):
            check_shape(entry, inner, f"{what} [{place}]")
    elif isinstance(shape, Each):
        _check_type(value, dict, what)
        for name, entry in value.items():
            check_shape(entry, shape.shape, f"{what} {name!r}")
    elif isinstance(shape, Maybe):
        if value is not None:
            check_shape(value, shape.shape, what)
    elif isinstance(shape, Number):
        if not shape.holds(value):
            raise ValueError(f"{what} is not {shape}")
    else:
        _check_type(value, shape, what)


def _check_fields(entry: dict, fields: dict[str, Any], what: str) -> None:
    for name, shape in fields.items():
        if name not in entry and not isinstance(shape, Maybe):
            raise ValueError(f"{what} has no {name}")
        check_shape(entry.get(name), shape, f"{what}: {name}")


_NAMES = {str: "text", bool: "yes or no", list: "list", dict: "JSON object"}


def _check_type(value: Any, kind: type, what: str) -> None:
    if not isinstance(value, kind):
        raise ValueError(f"{what} is no {_NAMES[kind]}")
