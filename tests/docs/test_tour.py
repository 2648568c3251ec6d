"""The tour of docs/add_a_technique.md: its technique keeps the rules, runs and has a page."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from bench import docs
from tests.docs.clones import copy_to, elsewhere, run
from tests.docs.commands import BENCH, COMMANDS
from tests.docs.pages import ROOT, fences

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def tour(tmp_path_factory) -> Path:
    """A copy of this repository with the files of the tour as they stand there."""
    folder = tmp_path_factory.mktemp("tour") / "twinbench"
    copy_to(folder)
    text = (ROOT / "docs" / "add_a_technique.md").read_text("utf-8")
    files = dict(re.findall(r"^`([\w/]+\.py)`:\n\n```python\n(.*?)^```$", text, re.M | re.S))
    assert len(files) == len(fences("docs/add_a_technique.md", "python")) == 4
    for place, content in files.items():
        assert not (folder / place).exists()
        (folder / place).write_text(content)
    return folder


def test_the_tour_s_technique_keeps_the_rules_and_passes_its_tests(tour):
    text, *_ = [text for text in COMMANDS["tour"] if "tests/test_layout.py" in text]
    # Of the layout's tests those that look at this repository; the rest test the checks.
    done = run(f"{text} -q -k 'test_this_repository or label_smoothing'", tour)
    assert done.returncode == 0, done.stdout[-3000:]
    assert re.search(r"^\d\d passed", done.stdout.splitlines()[-1]), done.stdout


def test_a_rule_that_the_tour_broke_would_be_found(tour, tmp_path):
    path = tour / "tests" / "train_step" / "test_label_smoothing.py"
    shutil.move(path, tmp_path)
    try:
        done = run(".venv/bin/pytest tests/test_layout.py -q -k missing_places", tour)
    finally:
        shutil.move(tmp_path / path.name, path)
    assert done.returncode == 1
    assert "tests/train_step/test_label_smoothing.py is missing" in done.stdout


@pytest.mark.parametrize("side", ["pt", "tf"])
def test_the_tour_s_files_run_alone(tour, side):
    (text,) = [text for text in COMMANDS["tour"] if f"-m {side}_impl" in text]
    program, module = text.split(" -m ")
    assert program == ".venv/bin/python"
    (output,) = elsewhere(module, tour, "--run")
    plain, smoothed = (
        [float(x) for x in re.findall(rf"{name} (\S+)", output)] for name in ("plain", "smoothed")
    )
    assert plain == sorted(plain, reverse=True)  # as the page says
    assert smoothed[-1] > min(smoothed)


@pytest.mark.campaign
def test_the_tour_s_technique_is_measured(tour):
    """In one framework, which takes half of the time; its tests hold both to the same figures."""
    (text,) = [text for text in COMMANDS["tour"] if text.startswith(BENCH)]
    done = run(f"{text} --framework pt", tour)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    record = json.loads((tour / "results" / "latest" / "results.json").read_text("utf-8"))
    cases = {(c["framework"], c["variant"]): c for c in record["cases"]}
    assert {case["status"] for case in cases.values()} == {"OK"}
    assert cases.keys() == {("pt", "plain"), ("pt", "smoothed")}
    evidence = cases["pt", "smoothed"]["evidence"]
    assert evidence["first_loss"] != evidence["first_loss_of_plain_labels"]
    one, another = record["comparisons"]  # of small and of large batches
    assert one["numerator"] != another["numerator"]
    assert {(c["kind"], c["reason"]) for c in (one, another)} == {("baseline", None)}


def test_the_tour_s_page_is_made_and_the_others_are_the_same_whoever_makes_them(tour):
    """No order of a set, no date, no path of a machine. Those here are what the code gives."""
    (text,) = [text for text in COMMANDS["tour"] if text.endswith(" docs")]
    env = os.environ | {"PYTHONHASHSEED": "7", "TZ": "Asia/Tokyo", "LANG": "C"}
    subprocess.run(["sh", "-c", text], cwd=tour, env=env, stdout=subprocess.DEVNULL, check=True)
    made = texts(tour / "docs" / "techniques")
    page = made.pop("train_step/label_smoothing.md")
    assert "](../../../pt_impl/train_step/label_smoothing.py)" in page
    index = made["README.md"].splitlines(keepends=True)
    assert any("train_step/label_smoothing.md" in line for line in index)
    made["README.md"] = "".join(line for line in index if "label_smoothing" not in line)
    assert made == texts(docs.FOLDER)  # which tests/docs/test_made_pages.py holds to the code


def texts(folder: Path) -> dict[str, str]:
    return {
        path.relative_to(folder).as_posix(): path.read_text("utf-8") for path in folder.rglob("*.*")
    }
