"""Planted leaks are counted, a leak where none was fails, and the page says what was found."""

from __future__ import annotations

import json

import numpy as np
import pytest

import bench.validation.attacked
from bench.validation import attacked, command, leaks
from bench.validation.simulate import losses

FOUND = [[size, "leak" if size > 0.25 else "steady"] for size in leaks.SIZES]
FALSE_ALARM = [[size, "leak"] for size in leaks.SIZES]


def test_a_step_keeps_so_much_with_every_round():
    step = leaks._keeping(lambda x, y: x + y, 0.3, kept := [])
    assert [step(1, 2) for _ in range(4)] == [3, 3, 3, 3]
    assert sum(each.nbytes for each in kept) == 4 * 300_000


@pytest.mark.parametrize(("said", "status"), [(FOUND, 0), (FALSE_ALARM, 1)])
def test_a_leak_where_there_is_none_fails(said, status, monkeypatch, capsys, results_folder):
    monkeypatch.setattr(leaks, "_in_new_process", lambda *arguments: said)
    assert leaks.report(["pt"], 2, results_folder) == status
    line = capsys.readouterr().out.splitlines()[-1]
    assert f"0: {2 * status}  0.1: {2 * status}  " in line
    assert line.endswith("0.3: 2  0.5: 2  1: 2")


def test_what_was_found_is_kept_and_shown(monkeypatch, results_folder, tmp_path):
    monkeypatch.setattr(attacked, "RECORD", tmp_path / "attacked.json")
    monkeypatch.setattr(attacked, "PAGE", tmp_path / "attacked.md")
    monkeypatch.setattr(leaks, "_in_new_process", lambda *arguments: FOUND)
    given = ["leaks", "--processes", "3", "--results", str(results_folder), "--publish"]
    assert command.main(given) == 0
    attacked.keep("losses", {"rows": losses("digits-cnn", [0.5, -0.5], 4, 0, 100)} | SIMULATED)
    page = attacked.PAGE.read_text("utf-8")
    for framework in ("PyTorch", "TensorFlow"):
        assert f"| {framework} | 0 of 3 | 0 of 3 | 0 of 3 | 3 of 3 | 3 of 3 | 3 of 3 |" in page
    assert "| digits-cnn | 0.50 | 10 | 0.0% | 100.0% |" in page
    assert attacked.page(json.loads(attacked.RECORD.read_text("utf-8"))) == page


SIMULATED = {"seeds": 4, "runs": 100}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--processes", "0"], "1 or more"),
        (["--framework", "jax"], "no framework 'jax'"),
        (["--framework", "pt", "--publish"], "--publish is of both frameworks"),
    ],
)
def test_bad_options_are_one_line(options, said, capsys):
    with pytest.raises(SystemExit, match="2"):
        command.main(["leaks", *options])
    assert said in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.alone
@pytest.mark.campaign
@pytest.mark.parametrize("framework", ["pt", "tf"])
def test_a_megabyte_a_round_is_found(framework, monkeypatch, results_folder):
    """Whole, in a process of its own."""
    rows = []
    monkeypatch.setattr(bench.validation.attacked, "on_this_machine", dict)
    monkeypatch.setattr(
        bench.validation.attacked, "keep", lambda section, found: rows.extend(found["rows"])
    )
    assert leaks.report([framework], 1, results_folder, publish=True) == 0
    assert leaks.found(rows, framework, 1.0) == 1
    assert leaks.found(rows, framework, 0.0) == 0


def test_losses_are_shown_as_often_as_intervals_promise():
    """Of normal noise: what Student's t says."""
    noise = list(np.random.default_rng(0).normal(size=20_000))
    rows = {row["lost"]: row for row in losses("digits-cnn", noise, 4, seed=1)}
    assert all(row["covered"] == pytest.approx(0.95, abs=0.02) for row in rows.values())
    assert rows[0.0]["worse"] == pytest.approx(0.025, abs=0.01)
    assert rows[1.0]["kept"] == pytest.approx(0.025, abs=0.01)  # a loss of exactly the margin
    shown = [row["worse"] for row in rows.values()]
    assert shown == sorted(shown)
    assert rows[10.0]["worse"] > 0.99
