"""Routes from a model to a runtime: prepared for a match, proven, and measured as deployed.

A route is a function of the technique that writes a file, and a loader that makes `predict(array)
-> array` from it; in place there is no file, and the framework predicts. A match times predictions
in a process that also holds the framework. New processes (`bench/probes/server.py`) measure the
rest: start, load, memory, latency, and samples/s by batch size and threads. In a short run one
process measures all but the start.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from functools import partial
from math import ceil
from pathlib import Path

import numpy as np

from bench.harness.examples import examples, zeros
from bench.harness.folders import written_once
from bench.harness.helpers import figure, not_timed
from bench.harness.machine import THREAD_VARIABLES, usable_threads
from bench.harness.plan import WARM, Prepared, Variant, Work, warm
from bench.harness.processes import ROOT
from bench.harness.sizes import artifact_bytes
from shared.provenance import provenance
from shared.user_model import arrays, first

BATCHES = [1, 2, 4, 8, 16, 32, 64]
THOROUGH = 7  # repetitions from which a run is not short: that has the largest batch alone
LATENCY_S, SHORT_LATENCY_S = 3.0, 1.0  # of slow predictions of one sample
LIMIT_S = 600  # after which a process counts as hung; ResNet-50 on one thread takes minutes
CHECKED = 256  # samples of the test split on which an export is held against its model
# How far an output may be from the model's, as a share of the model's largest, and how many classes
# must agree at least, by the precision of products and convolutions.
ALLOWED = {"float32": (1e-4, 0.999), "bfloat16": (5e-2, 0.95), "float16": (5e-2, 0.95)}
ALLOWED |= {"int8": (1e-1, 0.9)}
CALIBRATION = 256  # samples, the first of the training split, that int8 takes its ranges from
LIVE = 0.2  # scale of a residual branch that begins at 0
HALF_LOSSES = 5e-2  # relative: losses of predictions in bfloat16 against those of a twin
IN_PLACE = warm(
    "baseline", "the framework in place", role="baseline", program="plain", route="in place"
)


@dataclass(frozen=True)
class Route:
    """From a model to `predict`, by functions named "module:function".

    `load(path, threads=...) -> predict` of what `export` wrote to `file`; in place only
    `make(model) -> predict`. "{impl}" is replaced by the framework's package.
    """

    make: str | None = None
    export: str | None = None
    load: str | None = None
    file: str = ""


def row(name: str, title: str, route: str, effort: str = "full", **more) -> Variant:
    """A variant that predicts by a route; `more`: its fields, and settings besides the route."""
    settings = {"route": route} | more.pop("settings", {})
    return Variant(name, settings, effort=effort, measured=WARM, title=title, **more)


def prepare(impl, work: Work, route: Route) -> Prepared:
    """Predict by `route`, for a match. A missing package makes the row UNSUPPORTED."""
    work = live(work)
    model = _model(impl, work)
    optimizer = impl.kit.training.make_optimizer(model, work.task.recipe)
    if route.export is None:
        return Prepared(not_timed, _function(route.make, impl)(model), model, optimizer)
    return Prepared(
        *(not_timed, impl.kit.training.make_predict(model), model, optimizer),
        write=partial(_write, impl, work, route, model),
        read=partial(_read, impl, work, route),
    )


def _function(name: str, impl):
    module, _, function = name.format(impl=impl.__name__).partition(":")
    return getattr(importlib.import_module(module), function)


def _model(impl, work: Work):
    model = impl.kit.models.build(work.task.model, work.weights)
    impl.kit.runtime.to_evaluation(model)
    return model


def _write(impl, work: Work, route: Route, model, folder: Path) -> None:
    """The file that the route makes of the model, in a folder with what belongs to it."""
    example, _ = impl.kit.data.to_device(*_example(work))
    folder.mkdir()
    try:
        _function(route.export, impl)(
            model,
            example,
            folder / route.file,
            provenance(work.task, work.weights),
            dynamic_sequence=work.task.model.family == "gpt",
            **work.settings.get("export", {}),
        )
    except ModuleNotFoundError as error:
        raise NotImplementedError(str(error)) from error


def live(work: Work) -> Work:
    """The work with weights in which every layer counts.

    Residual branches begin with a scale of 0, which would hide any mistake in one.
    """
    weights = {
        name: np.full_like(value, LIVE) if name.endswith(".gamma") and not value.any() else value
        for name, value in work.weights.items()
    }
    return replace(work, weights=weights)


def _example(work: Work) -> tuple[np.ndarray, np.ndarray]:
    """Two samples of zeros of the task's shapes and dtypes to record with, or some to calibrate."""
    if _precision(work) == "int8":
        return examples(work, CALIBRATION)
    return examples(work, 2) if work.task.model.from_file else zeros(work, 2)


def _read(impl, work: Work, route: Route, folder: Path):
    """Predictions of resident batches: arrays in, as a runtime's user has."""
    try:
        load = _function(route.load, impl)
        settings = work.settings.get("load", {})
        loaded = load(folder / route.file, threads=usable_threads(), **settings)
    except ModuleNotFoundError as error:
        raise NotImplementedError(str(error)) from error
    known: dict[int, tuple] = {}

    def predict(x):
        if id(x) not in known:  # before anything is timed; x is kept, and its id with it
            known[id(x)] = x, arrays(x)
        return loaded(known[id(x)][1])

    predict.loaded = loaded
    return predict


def took_effect(impl, work: Work, prepared: Prepared, batch) -> tuple[dict, str | None]:
    """Check on real data that the route predicts like the model; the file lists its parts."""
    work = live(work)
    x, _ = impl.kit.data.to_device(*examples(work, CHECKED, "test"))
    plain = impl.kit.training.make_predict(prepared.model)
    expected, given = (
        np.float64(arrays(first(predict(x)))) for predict in (plain, prepared.predict)
    )
    apart = float(np.abs(given - expected).max() / np.abs(expected).max())
    agreeing = float(np.mean(given.argmax(-1) == expected.argmax(-1)))
    evidence = {"samples": len(given), "largest_difference": apart, "agreeing_classes": agreeing}
    loaded = getattr(prepared.predict, "loaded", None)
    precision = _precision(work)
    if loaded is None:
        evidence["operator_dtypes"] = impl.kit.runtime.operator_dtypes(
            lambda x, y: prepared.predict(x), *batch
        )
    else:
        integers = "int8, else " if precision == "int8" else ""
        evidence |= {"threads": loaded.threads, "computes_in": integers + loaded.precision}
        evidence["metadata"] = ", ".join(sorted(loaded.metadata))
        if loaded.metadata != provenance(work.task, work.weights):
            return evidence, "the file does not carry the metadata that it was given"
        if loaded.threads not in (None, usable_threads()):
            return evidence, f"it runs {loaded.threads} threads, not {usable_threads()}"
        precision = precision if precision != "float32" else loaded.precision
    largest, fewest = ALLOWED[precision]
    if not apart <= largest:  # nor where it is no number
        return evidence, f"its outputs differ by {apart:.1e} of the largest, allowed {largest:.0e}"
    if agreeing < fewest:
        return evidence, f"{agreeing:.1%} of the classes agree, not {fewest:.1%}"
    return evidence, None


def _precision(work: Work) -> str:
    """Of the file."""
    return work.settings.get("export", {}).get("precision", "float32")


# What only a separate process can tell -----------------------------------------------------------


def probe(impl, work: Work, route: Route) -> dict[str, dict]:
    """Start, load, memory, latency at batch 1; samples/s by batch size, on one and all threads.

    Each figure is the median over new processes, half as many as a probe has repetitions because
    starting a framework takes seconds. In a short run only the start is repeated, and the first
    process measures the rest on all threads, for the largest batch. Files are in the page cache.
    """
    if work.batch_size != 1:
        return {}  # it stands with batch 1
    work = live(work)
    folder = None
    if route.export:
        folder, _ = written_once(
            work.files, lambda path: _write(impl, work, route, _model(impl, work), path)
        )
    raw, _ = examples(work, BATCHES[-1], "test")
    if folder is None:
        weights, rows = work.folder / "weights.npz", raw
        np.savez(weights, **work.weights)
        load, arguments = "bench.probes.server:load_in_place", {"path": str(weights)}
        arguments |= {"package": impl.__name__, "task": work.task.name}
        arguments["make"] = route.make.format(impl=impl.__name__)
    else:
        rows = np.asarray(impl.kit.data.to_device(raw, raw)[0])
        load, arguments = route.load.format(impl=impl.__name__), dict(work.settings.get("load", {}))
        arguments |= {"path": str(folder / route.file)}
    np.save(work.folder / "rows.npy", rows)
    request = {"load": load, "arguments": arguments, "rows": str(work.folder / "rows.npy")}
    thorough, threads = work.repetitions >= THOROUGH, usable_threads()
    batches = BATCHES if thorough else BATCHES[-1:]
    longest_s = LATENCY_S if thorough else SHORT_LATENCY_S
    starts = ceil(work.repetitions / 2)
    whole = starts if thorough else 1
    served = [_serve(request, threads, batches, longest_s, work.folder) for _ in range(whole)]
    others = [_serve(request, threads, [], 0, work.folder) for _ in range(starts - whole)]
    sweeps = {threads: served}
    if thorough and threads > 1:
        sweeps[1] = [_serve(request, 1, batches, 0, work.folder) for _ in range(whole)]
    figures = {
        "start": figure("s", [one["start"] for one in served + others]),
        "load": figure("ms", [1e3 * one["load"] for one in served]),
        "memory": figure("bytes", [one["memory"] for one in served]),
    }
    for name in ("latency", "latency_p95", "latency_p99"):
        if None not in (times := [one[name] for one in served]):
            figures[name] = figure("ms", [1e3 * seconds for seconds in times])
    for threads, swept in sorted(sweeps.items()):
        for size in batches:
            rates = [one["rates"][str(size)] for one in swept]
            figures[f"rate_{threads}_threads_batch_{size}"] = figure("samples/s", rates)
    return figures | _sizes(folder)


def _serve(request: dict, threads: int, batches: list[int], longest_s: float, folder: Path) -> dict:
    """Ask a fresh process; `start` is the time from its creation to its first prediction."""
    answer, asked = folder / "answer.json", folder / "request.json"
    answer.unlink(missing_ok=True)
    whole = request | {"threads": threads, "batches": batches, "answer": str(answer)}
    whole["longest_s"] = longest_s
    asked.write_text(json.dumps(whole), encoding="utf-8")
    environment = os.environ | dict.fromkeys(THREAD_VARIABLES, str(threads))
    start = time.monotonic()  # one clock for all processes of the machine
    done = subprocess.run(
        [sys.executable, "-m", "bench.probes.server", str(asked)],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        timeout=LIMIT_S,
    )
    if done.returncode or not answer.is_file():
        said = [line for line in done.stderr.splitlines() if line.strip()]
        raise RuntimeError(f"a fresh process failed: {said[-1] if said else done.returncode}")
    served = json.loads(answer.read_text("utf-8"))
    if served["threads"] not in (None, threads):
        raise RuntimeError(f"{threads} threads were asked for, it runs {served['threads']}")
    return served | {"start": served["ready"] - start}


def _sizes(folder: Path | None) -> dict[str, dict]:
    """The artifact's size as it is and compressed, as the harness has it of a cold start."""
    sizes = artifact_bytes(folder)
    if sizes is None:
        return {}
    return {
        "artifact": figure("bytes", [sizes.bytes]),
        "compressed_artifact": figure("bytes", [sizes.compressed_bytes]),
    }
