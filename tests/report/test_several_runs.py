"""`twinbench report` of several runs: one answer, or answers side by side."""

from __future__ import annotations

import re

from bench import compare
from bench.analysis.analyse import analyse
from bench.analysis.reading import load
from bench.record import encode
from bench.report import command
from tests.records import played_run, with_environment


def several(tmp_path, *environments):
    """Runs that are alike but for their machines, in folders whose names have a space."""
    folders = []
    for number, changes in enumerate(environments):
        run = analyse(
            played_run({("pt", "quick"): 0.5}, 3, seed=number, started=f"2026-01-0{number}")
        )
        folders.append(tmp_path / f"run {number}")
        folders[-1].mkdir()
        run = with_environment(run, **changes) if changes else run
        (folders[-1] / "results.json").write_bytes(encode(run))
    return [str(folder) for folder in folders]


def test_runs_of_one_class_are_pooled_and_kept(tmp_path, capsys):
    paths, folder = several(tmp_path, {}, {}), tmp_path / "all of them"
    assert command.main(paths) == 0
    assert "What to use" in capsys.readouterr().out
    assert command.main([*paths, "--write", str(folder), "--format", "markdown"]) == 0
    assert load(folder).pooled == ["2026-01-00", "2026-01-01"]
    assert (folder / "report.md").exists()
    assert compare.main([paths[0], str(folder)]) == 0
    assert command.main([*paths, "--write", str(folder)]) == 0  # once more
    for wrong, reason in (
        ([str(folder), "--derive"], "is pooled: derive its runs, and pool them again"),
        ([*paths, "--write", paths[0]], "holds a run: give another folder"),
        ([*paths, paths[0]], "a run is given twice"),
    ):
        capsys.readouterr()
        assert command.main(wrong) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert reason in line


def test_runs_of_several_classes_stand_side_by_side(tmp_path, capsys):
    quick = {"peak_flops": {"float32": 1e12}}
    paths = several(tmp_path, {}, {}, quick)
    assert command.main(paths) == 0
    said = capsys.readouterr().out
    assert said.startswith("Not pooled: the runs are of 2 classes of machine")
    assert max(map(len, said.splitlines())) <= 80
    assert re.search(r"^to +A +B$", said, re.M)
    assert "the new machine computes 7.6 times as much" in " ".join(said.split())
    assert command.main([*paths, "--format", "markdown"]) == 0
    assert "| to | A | B |" in capsys.readouterr().out
    assert command.main([*paths, "--write", str(tmp_path / "pooled")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "different classes of machine can't be pooled: the new machine computes" in line
    assert not (tmp_path / "pooled").exists()
