"""Runs the rows that declare a program, for test_programs.py: `python -m tests.programs_worker pt`.

Its last line is JSON: by case, what it computes, or the error that it raised.
"""

import importlib
import json
import sys
import tempfile
import traceback
from dataclasses import replace
from functools import partial
from pathlib import Path

from bench.harness.plan import FRAMEWORKS, Case, Work
from bench.harness.run_plan import techniques
from bench.harness.selection import cases_of
from bench.harness.worker import Operations
from bench.probes import model_parallel, pipelines
from shared import datasets
from shared.specs import forward_flops
from shared.weights import checksum
from tests import workers
from tests.compression import quick

STEPS = 3
SEED = 7
AS_ROUNDED_8 = ("rounded_4", "rounded_2")  # but for the number of bits


def declared(framework: str, flavour: str | None) -> list[Case]:
    """The rows that share a program with another, each at the cheapest work where it does."""
    every = [
        case
        for technique in techniques().values()
        for case in cases_of(technique, f"bench.{technique.family}.bench_{technique.name}", "full")
        if (case.framework, case.flavour) == (framework, flavour) and case.variant.program
        if case.variant.program not in AS_ROUNDED_8
    ]
    found: dict[tuple, list[Case]] = {}
    for case in every:
        key = (case.work, case.variant.allocator, case.variant.program)
        found.setdefault(key, []).append(case)
    chosen: dict[str, Case] = {}
    seen = set()
    for same in sorted(found.values(), key=lambda same: _price(same[0])):
        rows = {(case.technique, case.variant.name, case.workload.mode): case for case in same}
        new = [case for row, case in rows.items() if row not in seen]
        if new and len(same) > 1:
            seen_too = [case for case in same if case not in new][: len(new) == 1]
            chosen |= {case.id: case for case in [*seen_too, *new]}
            seen |= rows.keys()
    return list(chosen.values())


def _price(case: Case) -> float:
    return forward_flops(case.task.model, case.workload.batch_size)


def run(case: Case, package: str, folder: Path) -> dict:
    """Losses of a few steps, weights before and after, and operators."""
    worker = Operations()
    worker._op_configure(package=package, threads=1, seed=SEED, imports=[])
    data = datasets.materialise(case.task.dataset, folder)
    before = worker._op_build(case.message(), str(data), weights_seed=SEED).weights_sha256
    worker.batches = worker.batches[:STEPS]
    losses = [worker._op_first_call().loss, *worker._op_next_steps().losses]
    after = checksum(worker.kit.models.export_weights(worker.prepared.model))
    operators = worker.kit.runtime.operator_dtypes(worker.call, *worker.batches[0])
    found = {"losses": losses, "weights": [before, after], "operators": operators}
    if case.framework == "pt" and case.workload.mode == "predict" and not worker.prepared.write:
        found["in_training"] = [m.training for m in worker.prepared.model.modules()]
    return found | {
        "program": [*case.work, case.variant.allocator, case.variant.program],
        "technique": case.technique,
    }


def probe(case: Case, package: str) -> dict:
    """What an untimed row's probe asks to be measured: by which function, of what."""
    bench = importlib.import_module(case.module)
    impl = workers.implementation(package[:2], "input.folder")
    impl.input.folder.parallel_loader = lambda *given, **named: ["parallel", *given, named]
    pipelines.measure = lambda impl, work, make, **named: {"loader": make(), **named}
    model_parallel.measure = lambda impl, work, batches, make: {"steps of": make}
    work = Work(case.task, case.variant.name, dict(case.variant.settings), case.work[1], {})
    asked = bench.probe(impl, replace(work, data="photos"), [])
    if asked.get("decoder") == "standard":  # as where none is named
        del asked["decoder"]
    program = [*case.work, case.variant.allocator, case.variant.program]
    return {"probe": asked, "program": program, "technique": case.technique}


def main(name: str) -> None:
    """Run them all on one side: pt, tf or tf_keras."""
    framework = "pt" if name == "pt" else "tf"
    flavour = {"pt": None, "tf": "keras3", "tf_keras": "tf_keras"}[name]
    found = {}
    if framework == "pt":
        quick.capture_patterns_once()
    with quick.without_code(), tempfile.TemporaryDirectory() as folder:
        for case in declared(framework, flavour):
            try:
                measure = partial(run, folder=Path(folder)) if case.workload.timed else probe
                found[case.id] = measure(case, FRAMEWORKS[framework].package)
            except Exception:
                found[case.id] = {"error": traceback.format_exc()}
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
