"""Train the teacher of the distillation benchmarks, and write its weights.

    twinbench teacher [PATH]

The teacher is digits-resnet20, trained in PyTorch on one thread from a fixed
seed: by the task's recipe, then at a tenth of the learning rate. It prints the
accuracy and the time.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from bench.harness.matches import configured, parent_key
from bench.harness.plan import Case, Variant, Workload
from bench.harness.processes import Failed, Processes
from bench.report.parsers import described
from bench.train_step import bench_baseline
from shared import datasets, scratch, teacher

SEED = 2026
# (learning rate, epochs). A constant rate leaves a model that still moves by large steps, whose
# accuracy hangs on the last of them; a teacher should have settled.
STAGES = ((0.05, 6), (0.005, 2))
LIMIT_S = 3_600


def train(path: Path) -> float:
    """Train, write `path`, and return the accuracy in percent. Raises `Failed` with the reason."""
    baseline = Variant("step", role="baseline")
    workload = Workload(teacher.TASK.name, "compute")
    case = Case("train_step", "baseline", bench_baseline.__name__, "pt", None, baseline, workload)
    with scratch.folder() as folder:
        data = datasets.materialise(teacher.TASK.dataset, folder / "data")
        with Processes(folder / "logs") as processes:
            started = processes.execute(parent_key(case, threads=1), "teacher")
            with configured(started, processes.limits, SEED) as worker:
                answer = worker.ask(
                    LIMIT_S,
                    "teach",
                    case=case.message(),
                    data=str(data),
                    seed=SEED,
                    stages=STAGES,
                    path=str(path.resolve()),
                )
    return answer.value


def main(arguments: list[str] | None = None) -> int:
    """Train it, write it and print its accuracy; return the exit status (2: an error)."""
    parser = described("twinbench teacher", __doc__)
    parser.add_argument(
        "path",
        type=Path,
        nargs="?",
        default=teacher.PATH,
        help="file to write (default: shared/teacher.npz)",
    )
    given, start = parser.parse_args(arguments), time.monotonic()
    try:
        accuracy = train(given.path)
    except Failed as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    print(f"{given.path}: {accuracy:.2f}% after {time.monotonic() - start:.0f} s")
    return 0
