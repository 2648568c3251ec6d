"""`twinbench port` on the command line: one line for a mistake, an answer within 80 columns."""

from __future__ import annotations

import pytest

from bench.port import command
from bench.port.causes import CATALOGUE
from bench.port.report import Certificate, Match, Report


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("def pytorch(): pass\ndef batch(size=2, seed=0): pass\n", "needs both"),
        ("def pytorch(:\n", "fix this first"),
        ("x = 1\n", "has no pytorch(), tensorflow()"),
    ],
)
def test_a_mistake_is_one_line(tmp_path, capsys, text, words):
    file = tmp_path / "my model.py"
    file.write_text(text, encoding="utf-8")
    assert command.main([str(file)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line


def test_weights_are_never_written_over_a_file(tmp_path, capsys):
    file, kept = tmp_path / "model.py", tmp_path / "kept.py"
    file.write_text("def pytorch(): pass\ndef tensorflow(): pass\ndef batch(size=2): pass\n")
    kept.write_text("mine")
    assert command.main([str(file), "--write-weights", str(kept)]) == 2
    assert "exists: give another name" in capsys.readouterr().err
    assert kept.read_text() == "mine"


@pytest.mark.parametrize("key", CATALOGUE)
def test_an_answer_begins_with_the_first_difference_and_fits_a_terminal(key):
    cause, report = CATALOGUE[key], Report(equal=["the batch"])
    report.add("evaluation", ("b1.conv1", "b1_conv1"), 0.5, 1e-6, "all up to bn", key, ("", "7"))
    text = command.lines(report, "my_model.py")
    head = " ".join(text[:3])
    assert "outputs in evaluation mode at b1.conv1 / b1_conv1" in head
    assert cause.title.split()[0] in head
    assert max(map(len, text)) <= 80


def test_where_nothing_differs_the_certificate_and_the_match_are_shown():
    match = Match("fc", "dense", "order")
    done = Certificate(10, 1e-7, 1e-5, 1e-6, 1e-5)
    report = Report(matches=(match,), certificate=done, copied=True)
    text = "\n".join(command.lines(report, "m.py"))
    assert text.startswith("Nothing differs")
    assert "10 training steps" in text
    assert "dense (order)" in text
