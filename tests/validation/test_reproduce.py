"""Whether runs agree: planted runs, whose scatter is known, and those of the history."""

from __future__ import annotations

from itertools import chain
from math import exp

import numpy as np
import pytest

from bench.analysis import table, verdicts
from bench.analysis.analyse import analyse
from bench.analysis.table import TIME
from bench.record import encode
from bench.validation import command, reproduce, reproducibility
from bench.validation.reproduce import (
    LESS,
    MORE,
    NONE,
    UNTOLD,
    Change,
    Measured,
    agree,
    agreement,
)
from tests.history import needs_history
from tests.records import played_run, with_environment

ROWS = {"made_up": ("plain", *(f"row{number}" for number in range(12)))}


def runs(between, count=4, **fields):
    """Runs of 12 rows and two frameworks, whose log times have a deviation from run to run."""
    draw, made = np.random.default_rng(3), {}
    for number in range(count):
        times = {
            (side, row): exp(draw.normal(0, between))
            for side in ("pt", "tf")
            for row in ROWS["made_up"]
        }
        fields["started"] = f"2026-01-0{number + 1}"
        run = played_run(times, 5, ROWS, sd=0.01, seed=number, **fields)
        made[f"run{number}"] = analyse(run)
    return made


def measured(log=0.0, half=0.1, shows=LESS):
    return Measured(log, half, half, shows, (0.0, 4.0))


def test_ratios_agree_within_the_combined_intervals():
    assert agree(measured(0.0), measured(0.14))  # the root of 0.1² + 0.1²
    assert not agree(measured(0.0), measured(0.142))
    assert not agree(measured(0.142), measured(0.0))
    wide = Measured(0.3, 0.3, 0.0, UNTOLD, (0.0, 4.0))  # which reaches down to 0, and not up
    assert agree(wide, measured(0.0, 0.0))
    assert not agree(wide, measured(0.31, 0.0))


@pytest.mark.parametrize(
    ("one", "other", "what"),
    [
        (LESS, LESS, "same"),
        (UNTOLD, UNTOLD, "same"),
        (NONE, UNTOLD, "lost"),
        (MORE, UNTOLD, "lost"),
        (LESS, NONE, "otherwise"),
        (LESS, MORE, "opposite"),
    ],
)
def test_what_verdicts_did(one, other, what):
    pairs = [(measured(shows=one), measured(shows=other))]
    for both in (pairs, [pair[::-1] for pair in pairs]):
        counts = agreement(both)
        named = {name: getattr(counts, name) for name in ("same", "lost", "otherwise", "opposite")}
        assert named == {name: int(name == what) for name in named}


def test_runs_that_differ_by_their_noise_agree_and_others_do_not():
    alike, apart = (reproduce.reproduced(runs(sd), []) for sd in (0.0, 0.1))
    assert alike.whole.of.share > 0.93
    assert alike.deviations["time"] < 0.005
    assert apart.whole.of.share < 0.6
    assert alike.whole.of.ratios >= 6 * 36  # six pairs; twins, and both sides' 12 rows
    assert alike.whole.between == pytest.approx(alike.whole.within, rel=0.3)
    assert apart.whole.between == pytest.approx(0.1 * 2**0.5, rel=0.25)


def test_runs_of_another_class_are_compared_with_ours_and_counted_with_none():
    records = runs(0.0)
    speeds = {"float32": 1e10, "bfloat16": 1e10}
    records["run1"] = with_environment(records["run1"], peak_flops=speeds)
    made = reproduce.reproduced(records, [])
    assert [run.name for run in made.runs] == ["run0", "run2", "run3"]
    assert [run.name for run in made.others] == ["run1"]
    assert len(made.pairs) == len(made.apart) == 3
    assert "Against runs on another class" in reproducibility.headline(made)


def test_what_is_measured_in_another_way_is_not_compared_with_what_was():
    made = reproduce.reproduced(runs(0.0), [Change("steps", "run2", "abc", "Another step")])
    assert [(pair.a, pair.b) for pair in made.pairs] == [("run0", "run1"), ("run2", "run3")]
    for kind, run in (("step_peaks", "run9"), ("memory", "run1")):
        with pytest.raises(ValueError, match=f"--changed {kind}:{run}: give a kind of"):
            reproduce.reproduced(runs(0.0, 2), [Change(kind, run, "abc", "Another step")])


@pytest.mark.parametrize("stalled", [False, True])
def test_moments_give_the_planted_deviation_and_judge_the_other_half(stalled):
    """Times of both sides have 5% each; one run with other times does not decide."""
    records = runs(0.05, 8)
    if stalled:
        records["run5"] = runs(0.5, 6)["run5"]
    made = reproduce.reproduced(records, [])
    assert made.deviations["time"] == pytest.approx(0.05 * 2**0.5, rel=0.3)
    odd, even = made.halves
    assert odd.of == even.by == ["run0", "run2", "run4", "run6"]
    assert even.of == odd.by == ["run1", "run3", "run5", "run7"]
    [judged] = even.kinds
    assert (judged.kind, judged.ratios) == ("steps", 6 * 37)
    assert judged.agree / judged.ratios > 0.85
    assert (odd.kinds[0].agree / odd.kinds[0].ratios > 0.85) is not stalled


def test_the_command_prints_and_checks_and_refuses_what_is_no_run(tmp_path, monkeypatch, capsys):
    for name in ("RECORD", "PAGE"):
        monkeypatch.setattr(reproducibility, name, tmp_path / name.lower())
    paths = []
    for name, run in runs(0.0, 2).items():
        paths.append(str(tmp_path / f"{name}.json"))
        (tmp_path / f"{name}.json").write_bytes(encode(run))
    reproduced = ["reproduce", *paths]
    assert command.main(reproduced) == 0
    assert capsys.readouterr().out.startswith("2 runs on one class of machine, 1 pair of them")
    assert command.main([*reproduced, "--check"]) == 1
    assert command.main([*reproduced, "--publish"]) == 0
    assert command.main([*reproduced, "--check"]) == 0
    page = reproducibility.page(reproducibility.read())
    assert page == (tmp_path / "page").read_text("utf-8")
    for wrong, reason in (
        ([*paths, "nowhere"], "nowhere: neither a run nor a revision"),
        ([*paths, paths[0]], "two runs have the same name"),
        (paths[:1], "no two runs are on the same class"),
        ([*paths, "--changed", "steps:run1"], "--changed steps:run1: give KIND:RUN:COMMIT"),
    ):
        capsys.readouterr()
        with pytest.raises(SystemExit, match="2"):
            command.main(["reproduce", *wrong])
        assert reason in capsys.readouterr().err.splitlines()[-1]


def test_the_promised_share_agrees_where_the_page_does_not_say_that_fewer_do():
    made = reproducibility.read()
    promised = reproducibility.PROMISED
    assert made.whole.of.share >= promised
    assert sum(pair.of.opposite for pair in made.pairs) == 0
    below = {group.name for group in made.kinds if group.of.share < promised}
    assert below <= {"input pipelines", "replicas and other devices"}
    page = reproducibility.page(made)
    assert f"Fewer than 93% agree in: {', '.join(sorted(below))}." in page
    assert len(made.halves) == 2
    for kind in chain.from_iterable(half.kinds for half in made.halves):
        share, title = kind.agree / kind.ratios, reproduce.KINDS[kind.kind][0]
        assert share >= promised or f"- {title}: {share:.1%} of {kind.ratios} ratios" in page
        assert share >= promised or kind.kind not in ("step_peaks", "prediction_peaks")


def test_the_analysis_adds_what_the_published_runs_give():
    """No constant was chosen by how many ratios agree."""
    given = {name: round(sd, 3) for name, sd in reproducibility.read().deviations.items()}
    assert given == {TIME: verdicts.BETWEEN_RUNS, **table.BETWEEN_RUNS}


@needs_history
def test_a_record_that_is_a_link_is_read_as_what_it_links_to():
    """As it is since there are several machines."""
    name, record = reproduce.read("3b61492")
    assert (name, record.started) == ("3b61492", "2026-11-27T04:27:40+00:00")
    assert reproduce.of_revision("de5fbd6:nothing") is None


@needs_history
def test_the_published_result_is_what_the_runs_of_the_history_give():
    """Its own command makes it again."""
    words = reproducibility.command(reproducibility.read()).split()[2:]
    assert command.main([*words[:-1], "--check"]) == 0
