"""Planted leaks are counted, a leak where none was fails, and the page says what was found."""

from __future__ import annotations

import json

import pytest

from bench.validation import attacked, command, leaks, new_processes

RIGHT = [[size, "leak" if size > 0.25 else "steady"] for size in leaks.SIZES]
FALSE_ALARM = [[size, "leak"] for size in leaks.SIZES]


@pytest.fixture
def answer(monkeypatch):
    """What every new process answers."""

    def give(verdicts):
        text = json.dumps(verdicts)
        monkeypatch.setattr(new_processes, "answer_of", lambda *_, **__: text)

    return give


def test_a_step_keeps_so_much_with_every_round():
    step = leaks._keeping(lambda x, y: x + y, 0.3, kept := [])
    assert [step(1, 2) for _ in range(4)] == [3, 3, 3, 3]
    assert sum(array.nbytes for array in kept) == 4 * 300_000


@pytest.mark.parametrize(("verdicts", "status"), [(RIGHT, 0), (FALSE_ALARM, 1)])
def test_a_leak_where_there_is_none_fails(verdicts, status, answer, capsys, results_folder):
    answer(verdicts)
    assert leaks.report(["pt"], 2, results_folder) == status
    line = capsys.readouterr().out.splitlines()[-1]
    assert f"0: {2 * status}  0.1: {2 * status}  " in line
    assert line.endswith("0.3: 2  0.5: 2  1: 2")


def test_the_counts_are_kept_and_shown(answer, page, results_folder):
    answer(RIGHT)
    given = ["leaks", "--processes", "3", "--results", str(results_folder), "--publish"]
    assert command.main(given) == 0
    for framework in ("PyTorch", "TensorFlow"):
        assert f"| {framework} | 0 of 3 | 0 of 3 | 0 of 3 | 3 of 3 | 3 of 3 | 3 of 3 |" in page()


@pytest.mark.alone
@pytest.mark.campaign
@pytest.mark.parametrize("framework", ["pt", "tf"])
def test_a_megabyte_a_round_is_found(framework, page, results_folder):
    """Whole, in a process of its own."""
    assert leaks.report([framework], 1, results_folder, publish=True) == 0
    rows = json.loads(attacked.RECORD.read_text("utf-8"))["leaks"]["rows"]
    assert leaks.called_leaks(rows, framework, 1.0) == 1
    assert leaks.called_leaks(rows, framework, 0.0) == 0
