"""A cold start in a forked worker finds what one in a freshly executed process does."""

import pytest

from bench.harness import isolated_measurements, memory, processes
from bench.harness.processes import Processes
from bench.harness.run_plan import techniques
from bench.harness.selection import cases_of
from shared import datasets
from shared.specs import TASKS

# Fresh processes of TensorFlow were seen to differ by 4.5 MB among themselves, of 61.
APART = 8e6  # bytes
pytestmark = [
    pytest.mark.campaign,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not memory.adopts_pages(), reason="workers are executed here"),
]


def measured(forks, folder, monkeypatch):
    """By framework, the cold start of the digits CNN's plain train step."""
    technique = techniques()["gradient_clipping"]
    every = cases_of(technique, "bench.train_step.bench_gradient_clipping", "quick")
    cases = [case for case in every if case.is_baseline]
    data = str(datasets.materialise(TASKS["digits-cnn"].dataset, folder))
    monkeypatch.setattr(processes, "FORKS", forks)
    found = {}
    with Processes(folder / f"logs-{forks}") as started:
        isolated_measurements.cold_starts(
            *(started, cases),
            imports={},
            data={"digits-cnn": data},
            threads=1,
            seed=7,
            done=lambda case, each: found.update({case.framework: each}),
        )
    return found


def test_a_forked_cold_start_agrees_with_a_fresh_one(tmp_path, monkeypatch):
    forked, fresh = (measured(forks, tmp_path, monkeypatch) for forks in (True, False))
    for framework in ("pt", "tf"):
        starts = forked[framework].answer, fresh[framework].answer
        assert starts[0].parts == starts[1].parts
        for phase in ("build_bytes", "first_step_peak_bytes", "steady_peak_bytes"):
            above = [start.memory[phase] - start.memory["import_bytes"] for start in starts]
            assert above[0] == pytest.approx(above[1], abs=APART), (framework, phase)
            assert above[1] > 3 * APART
