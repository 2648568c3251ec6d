"""The code that an answer prints: the best train step and the best prediction of a user's model.

It is made from bench/templates, and run as printed before it is shown.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import subprocess
import sys
from functools import cache
from keyword import iskeyword
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from bench.analysis.ranking import PREDICT, TRAIN, Ranking, rank
from bench.analysis.table import TIME, Row
from bench.deployment import bench_export, bench_native_export
from bench.harness import machine
from bench.harness.processes import ROOT
from bench.harness.run_plan import techniques
from bench.record import FRAMEWORKS, Case
from bench.report.names import title
from bench.report.text import hanging
from bench.user_task import UserModel
from shared.user_model import KERAS, MAKERS, RECIPE

WIDTH = 80
FILES = {TRAIN: "use", PREDICT: "predict"}  # how their names begin
UNTRIED = ["", "No code: it was not tried, since you interrupted; --resume tries it."]
WORDS = {TRAIN: "its best train step", PREDICT: "its best prediction"}
ROUTES = {"export": bench_export.ROUTES, "native_export": bench_native_export.ROUTES}
RUN_S = 300  # after which code counts as hung


def shown(folder: Path, rankings: list[Ranking], model: UserModel) -> list[str]:
    """The code of each framework's best train step and prediction, unless plain code is best."""
    lines = []
    for side in model.sides:
        for kind in (TRAIN, PREDICT):
            rows, framework = gaining(rankings, side, kind), FRAMEWORKS[side]
            path = folder / f"{FILES[kind]}_{MAKERS[side]}.py"
            texts = [(row, code) for row in rows if (code := _code(model, kind, row, path.name))]
            row, code = texts[0] if texts else (None, "")
            words = WORDS[kind]
            if rows and rows[0] is not row:
                lines += ["", *_by_its_file(rows[0], framework, words)]
                words = row and title(row)
            if row:
                path.write_text(code, encoding="utf-8")
                try:
                    error = run(path, model, side)
                except KeyboardInterrupt:
                    path.unlink()
                    return lines + UNTRIED
                lines += ["", *_printed(path, framework, error, words)]
    return lines


def files(folder: Path) -> list[Path]:
    """The files with an answer's code."""
    return [path for name in FILES.values() for path in folder.glob(f"{name}_*.py")]


def gaining(rankings: list[Ranking], side: str, kind: str) -> list[Case]:
    """The cases of a framework's train steps or predictions that gain, the best first.

    Predictions of one sample are preferred. One block shows no gain.
    """
    timed = [r for r in rankings if r.work.kind == kind and r.goal.figure == TIME]
    for ranking in sorted(timed, key=lambda ranking: ranking.work.batch_size):
        of_side = rank(ranking.work, ranking.goal, framework=side)
        rows: list[Row] = of_side.gaining if of_side and not of_side.aim.provisional else []
        if rows:
            first = [row for row in rows if row is of_side.best]
            return [row.case for row in (*first, *(r for r in rows if r is not of_side.best))]
    return []


def run(path: Path, model: UserModel, side: str) -> str | None:
    """Run printed code; returns the last line of its error, or None."""
    environment = os.environ | machine.TUNED_ALLOCATOR | {"TF_CPP_MIN_LOG_LEVEL": "3"}
    try:
        done = subprocess.run(
            [model.interpreters.get(side, sys.executable), str(path)],
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            env=environment,
            timeout=RUN_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"it took longer than {RUN_S} s"
    if done.returncode == 0:
        return None
    return (done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"])[-1]


def _printed(path: Path, framework: str, error: str | None, words: str) -> list[str]:
    """Code that ran, or why it did not."""
    if error:
        path.unlink()
        return hanging("", f"{framework}: the code of {words} did not run: {error}", WIDTH, 2)
    return [f"{framework}: the code of {words} ({path.name})", "", *path.read_text().splitlines()]


def _by_its_file(case: Case, framework: str, words: str) -> list[str]:
    """Where the code of a row lies that no few lines can show."""
    family = techniques()[case.technique].family
    said = hanging("", f"{framework}: {words} is {title(case)}; how to get it:", WIDTH, 2)
    return [*said, f"    {case.framework}_impl/{family}/{case.technique}.py"]


# Templates ----------------------------------------------------------------------------------------


def _code(model: UserModel, kind: str, case: Case, name: str) -> str | None:
    """The code of a row, as a file of this name; None where no few lines can show it.

    A Keras model on PyTorch has none: what it needs to be told its mode is in the kit.
    """
    if case.framework == "pt" and model.file.maker("pt") == KERAS:
        return None
    return (train_code if kind == TRAIN else predict_code)(model, case, name)


def train_code(model: UserModel, case: Case, name: str) -> str | None:
    """Code that applies a stack of techniques to the user's model."""
    settings = case.settings if case.technique == "stacking" else case.stacking
    if settings is None:
        return None
    of_model = ("memory_format", "recomputed")
    made = {name: settings[name] for name in of_model if name in settings}
    side = model.about["sides"][case.framework]
    return _rendered(
        "train",
        model,
        case,
        name,
        trains=True,
        made=_arguments(made),
        settings=_arguments(
            {k: v for k, v in settings.items() if k not in ("fused", "recomputed")}
        ),
        fused=settings.get("fused", False),
        has_optimizer=side["has_optimizer"],
        targets_first=side["targets_first"],
        rate=RECIPE.learning_rate,
        decay=RECIPE.weight_decay,
    )


def predict_code(model: UserModel, case: Case, name: str) -> str | None:
    """Code that exports the user's model and predicts."""
    if case.technique == "compilation":
        return _rendered("predict", model, case, name)
    route = ROUTES.get(case.technique, {}).get(case.settings.get("route"))
    if route is None or route.export is None:
        return None
    named = (each.format(impl=f"{case.framework}_impl") for each in (route.export, route.load))
    export, load = (each.split(":") for each in named)  # a module, and its function
    threads = machine.usable_threads()
    more = {"route": route, "export": export, "load": load, "threads": threads}
    return _rendered("predict", model, case, name, **more)


def _rendered(template: str, model: UserModel, case: Case, name: str, **more: Any) -> str:
    side, path = case.framework, model.file.path
    about, batches = model.about["sides"][side], "batch" not in model.file.functions
    values = {
        "trains": False,
        "route": None,
        "allocator": allocator(),
        "name": name,
        "side": side,
        "maker": model.file.maker(side),
        "places": repr([str(ROOT), str(path.parent)]),
        "importable": _importable(path),
        "file": path,
        "path": repr(str(path)),
        "drawn": "batches" if batches else "batch",
        "batches": batches,
        "pairs": not about["as_given"],
        "size": model.about["batch_size"],
        "named": f', "{MAKERS[side]}"' if about["named"] else "",
    }
    return _templates().get_template(f"{template}_{side}.py.j2").render(values | more)


@cache
def _templates() -> Environment:
    return Environment(
        loader=PackageLoader("bench", "templates"),
        autoescape=False,  # it is code
        keep_trailing_newline=True,
        lstrip_blocks=True,
        trim_blocks=True,
        undefined=StrictUndefined,
    )


def allocator() -> list[str]:
    """How to start a program with the rows' allocator settings; nothing if they do not apply."""
    if platform.libc_ver()[0] != "glibc":
        return []
    return [f"{variable}={value}" for variable, value in machine.TUNED_ALLOCATOR.items()]


def _arguments(settings: dict) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in settings.items())


def _importable(path: Path) -> bool:
    """Whether a file's name can stand in an import, and means no other module there."""
    if path.suffix != ".py" or not path.stem.isidentifier() or iskeyword(path.stem):
        return False
    known = importlib.util.find_spec(path.stem)
    return known is None or known.origin == str(path)
