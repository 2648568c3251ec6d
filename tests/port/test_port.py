"""`twinbench port` on pairs of models that are equal, and with one difference planted in them.

Each planted difference of `planted.py` is found at the layer and the step where it acts, with its
cause; equal pairs are certified, and nothing is named in them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.port.planted import PAIRS, PLANTED, TRIED, write
from tests.workers import ROOT

pytestmark = pytest.mark.timeout(900)
PROCESSES = 2
LIMIT_S = 800


def rows(planted) -> list:
    campaign = pytest.mark.campaign
    return [
        pytest.param(row, id=f"{row.pair}-{row.plant}", marks=[] if row in TRIED else campaign)
        for row in planted
    ]


@pytest.fixture(scope="module")
def reports(request, tmp_path_factory) -> dict[tuple[str, str], dict]:
    """(pair, plant) -> what `port` answers, of those that the selected tests ask for."""
    asked = {(pair, "") for pair in PAIRS}
    for item in request.session.items:
        if item.path == request.path and "planted" in getattr(item, "fixturenames", ()):
            asked.add(item.callspec.params["planted"][:2])
    folder = tmp_path_factory.mktemp("pairs")
    files = {}
    for pair, plant in sorted(asked):
        place = folder / (plant or "equal")
        place.mkdir(exist_ok=True)
        files[pair, plant] = str(write(place, pair, plant))
    paths = list(files.values())
    with ThreadPoolExecutor(PROCESSES) as pool:
        parts = pool.map(compared, [paths[number::PROCESSES] for number in range(PROCESSES)])
        answers = {path: answer for part in parts for path, answer in part.items()}
    return {asked: answers[path] for asked, path in files.items()}


def compared(paths: list[str]) -> dict[str, dict]:
    """Path -> the answer for it, from a process that compares all of them."""
    command = [sys.executable, "-m", "tests.port.port_worker", *paths]
    quiet = os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env=quiet, timeout=LIMIT_S, check=False
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("REPORT ")]
    assert len(lines) == len(paths), done.stderr[-3000:]
    answers = [json.loads(line.removeprefix("REPORT ")) for line in lines]
    return dict(zip(paths, answers, strict=True))


@pytest.mark.parametrize("pair", PAIRS)
def test_nothing_is_named_in_an_equal_pair_and_it_is_certified(reports, pair):
    report = reports[pair, ""]
    assert "error" not in report, report["error"]
    assert report["findings"] == []
    certificate = report["certificate"]
    assert certificate["steps"] > 2
    assert certificate["loss"] <= certificate["loss_bound"] < 1e-3
    assert certificate["weights"] <= certificate["weights_bound"]


@pytest.mark.parametrize("planted", rows(PLANTED))
def test_a_planted_difference_is_found_where_it_acts(reports, planted):
    report = reports[planted.pair, planted.plant]
    assert "error" not in report, report["error"]
    assert report["findings"], "nothing is named"
    first = report["findings"][0]
    assert (first["step"], first["cause"]) == (planted.step, planted.cause)
    assert planted.layer in (first["layer_pt"], first["layer_tf"])
    assert first["verified"] == (planted.cause != "float64")  # which is read from settings
    assert first["change_pt"]
    assert first["change_tf"]
    assert all(finding["cause"] for finding in report["findings"])  # those after it, too


def test_every_difference_was_planted_at_a_layer_of_the_model():
    """What the table names stands in the pair's file."""
    assert len(PLANTED) >= 40
    assert len(set(PLANTED)) == len(PLANTED)
    for row in PLANTED:
        text = (ROOT / "tests" / "port" / "models" / f"{row.pair}.py").read_text("utf-8")
        assert f'"{row.plant}"' in text
