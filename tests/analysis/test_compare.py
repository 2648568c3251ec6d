"""Comparing runs: what is called a change, what is not, and what is said of the conditions."""

from __future__ import annotations

import copy
import json
from math import exp
from pathlib import Path

import numpy as np
import pytest
from scipy import stats as scipy_stats

from bench import compare
from bench.analysis.reading import DIFFERENT
from bench.analysis.verdicts import Ratio, compare_runs
from tests.report.test_report import record

DOCS = Path(__file__).parents[2] / "docs"
CASE = "mixed_precision/digits-cnn-64/pt/bf16"


@pytest.fixture
def old():
    return record()


@pytest.fixture
def new(old):
    """The same run once more: nothing changed."""
    return copy.deepcopy(old)


def case(run, name=CASE):
    return next(c for c in run["cases"] if c["id"] == name)


def own_ratio(run, name=CASE):
    """The comparison of a case with its own baseline."""
    return next(c for c in run["comparisons"] if c["numerator"] == name and c["kind"] == "baseline")


def titled(tables, start):
    (found,) = [table for table in tables if table.title.startswith(start)]
    return found


# The statistics ----------------------------------------------------------------------------------


def test_the_interval_is_welch_s():
    random = np.random.default_rng(0)
    first, second = random.normal(0.1, 0.02, 8), random.normal(0.0, 0.04, 12)
    runs = [Ratio(exp(v.mean()), None, v.std(ddof=1), len(v), None) for v in (first, second)]
    found = compare_runs(*runs)
    wanted = scipy_stats.ttest_ind(first, second, equal_var=False).confidence_interval(0.95)
    assert found.ratio == pytest.approx(exp(first.mean() - second.mean()))
    assert np.log(found.ci) == pytest.approx([wanted.low, wanted.high])


@pytest.mark.parametrize(
    ("ratio", "sd", "verdict"),
    [
        (1.10, 0.02, "slower"),
        (0.90, 0.02, "faster"),
        (1.00, 0.02, "equivalent"),
        (1.03, 0.02, "slightly slower"),
        (1.03, 0.04, "inconclusive"),
        (1.10, 0.07, "slower"),
    ],
)
def test_a_change_is_judged_like_a_ratio(ratio, sd, verdict):
    before = Ratio(0.5, None, 0.02, 8, None)
    assert compare_runs(Ratio(0.5 * ratio, None, sd, 8, None), before).verdict == verdict


def test_the_noise_of_either_run_counts():
    quiet, noisy = Ratio(1.0, None, 0.01, 8, None), Ratio(1.1, None, 0.07, 8, None)
    pairs = [(noisy, quiet), (quiet, noisy)]
    widths = [np.log(np.divide(*reversed(compare_runs(*pair).ci))) for pair in pairs]
    calm = compare_runs(quiet, Ratio(1.1, None, 0.01, 8, None)).ci
    assert widths[0] == pytest.approx(widths[1])
    assert widths[0] > 4 * np.log(calm[1] / calm[0])


def test_two_runs_of_the_same_are_seldom_told_apart():
    random, wrong = np.random.default_rng(1), 0
    for _ in range(2_000):
        drawn = random.normal(0.0, 0.024, (2, 8))
        runs = [Ratio(exp(v.mean()), None, v.std(ddof=1), 8, None) for v in drawn]
        wrong += compare_runs(*runs).verdict in ("faster", "slower")
    assert wrong <= 4  # beyond 3%, with an sd of 1.2% of the difference


def test_runs_without_any_scatter_are_judged_too():
    same = Ratio(1.0, None, 0.0, 8, None)
    assert compare_runs(same, same).verdict == "equivalent"


# Tables ------------------------------------------------------------------------------------------


def test_the_same_run_has_not_changed(old, new):
    (ratios,) = compare.tables(old, new)
    assert ratios.rows == [["none changed", "", "", "", ""]]
    assert "slower" not in ratios.title
    assert compare.conditions(old, new) == {}


def test_a_ratio_that_changed_is_shown_with_its_interval(old, new):
    own_ratio(new)["ratio"] *= 1.2
    ((what, before, after, moved, verdict),) = titled(compare.tables(old, new), "Ratios").rows
    assert what == "mixed_precision, digits-cnn 64: PyTorch bf16 ÷ fp32"
    assert float(after) == pytest.approx(1.2 * float(before), rel=2e-3)
    assert moved.startswith("1.200 (")
    assert verdict == "slower"


def test_all_shows_what_did_not_change(old, new):
    shown = titled(compare.tables(old, new, every=True), "Ratios").rows
    assert len(shown) == len(old["comparisons"])
    assert {row[4] for row in shown} == {"equivalent", "not comparable"}


def test_no_change_is_seen_between_unlike_work(old, new):
    own_ratio(new)["ratio"] *= 2
    own_ratio(old)["verdict"] = "not comparable"
    assert titled(compare.tables(old, new), "Ratios").rows[0][0] == "none changed"


def test_cases_that_ended_otherwise_are_named(old, new):
    case(new)["status"] = "FAILED"
    new["cases"] = [c for c in new["cases"] if c["variant"] != "as_installed"]
    gone = [c["id"] for c in old["cases"] if c["variant"] == "as_installed"]
    rows = titled(compare.tables(old, new), "Cases").rows
    assert rows == [[CASE, "OK", "FAILED"], [f"{len(gone)} cases", "OK", "not measured"]]
    rows = titled(compare.tables(old, new, every=True), "Cases").rows
    assert {row[0] for row in rows if row[2] == "not measured"} == set(gone)


def test_accuracy_is_paired_by_seed(old, new):
    trained = case(new)["accuracy"]
    trained["per_seed"] = [value - 2.0 for value in trained["per_seed"]]
    ((name, *_, apart, verdict),) = titled(compare.tables(old, new), "Accuracy").rows
    assert (name, verdict) == (CASE, "worse")
    assert apart.startswith("-2.00")


@pytest.mark.parametrize("lacking", ["metric", "margin"])
def test_accuracy_of_a_task_that_does_not_say_how_to_judge_it_is_left_out(old, new, lacking):
    case(new)["accuracy"]["per_seed"] = [0.0] * len(case(new)["accuracy"]["per_seed"])
    assert titled(compare.tables(old, new), "Accuracy").rows
    del new["tasks"][case(new)["task"]][lacking]
    assert not any(table.title.startswith("Accuracy") for table in compare.tables(old, new))


def test_what_diverged_in_a_run_has_no_accuracy_to_compare(old, new):
    case(new)["accuracy"]["per_seed"] = [None, *case(new)["accuracy"]["per_seed"][1:]]
    accuracies = titled(compare.tables(old, new, every=True), "Accuracy").rows
    assert accuracies
    assert CASE not in [row[0] for row in accuracies]


def test_a_run_that_trained_fewer_seeds_is_compared_by_those(old, new):
    """It ended at a look: its seeds are the first of the other's."""
    trained = case(new)["accuracy"]
    trained["per_seed"] = [value - 2.0 for value in trained["per_seed"]][:4]
    case(old)["accuracy"]["per_seed"][4:] = [0.0] * 4
    ((*_, apart, verdict),) = titled(compare.tables(old, new), "Accuracy").rows
    assert apart.startswith("-2.00")
    assert verdict == "worse"


@pytest.mark.parametrize("lacking", [("sd", "ci", "verdict"), ("ratio",), ("n",), ("verdict",)])
def test_a_ratio_of_one_block_is_left_out_and_the_rest_compared(old, new, lacking):
    own_ratio(new)["ratio"] *= 1.2
    last = next(c for c in new["comparisons"] if c["numerator"].endswith("pt/bf16_fp32_head"))
    for name in lacking:
        del last[name]
    (row,) = titled(compare.tables(old, new), "Ratios").rows
    assert row[4] == "slower"


def test_a_variance_that_is_shared_counts_with_its_degrees_of_freedom(old, new):
    """Three blocks tell more with the noise that others show."""
    own_ratio(new).update(ratio=own_ratio(old)["ratio"] * 1.07, n=3, sd=0.024)
    assert titled(compare.tables(old, new), "Ratios").rows[0][4] == "slightly slower"
    own_ratio(new)["freedom"] = 20.0
    assert titled(compare.tables(old, new), "Ratios").rows[0][4] == "slower"


@pytest.mark.parametrize(("share", "shown"), [(1.3, True), (1.05, False)])
def test_large_changes_of_memory_are_shown(old, new, share, shown):
    memory = case(new)["memory"]
    above = memory["steady_peak_bytes"] - memory["import_bytes"]
    memory["steady_peak_bytes"] = memory["import_bytes"] + int(share * above)
    found = [t.rows for t in compare.tables(old, new) if t.title.startswith("Peak memory")]
    assert bool(found) == shown
    if shown:
        assert [(row[0], row[3]) for row in found[0]] == [(CASE, "1.30")]


# Many runs ---------------------------------------------------------------------------------------

CPUS = ("one CPU", "another CPU", "a third CPU")


@pytest.fixture
def machines():
    """Runs of three CPUs, each with a choice of framework of its own; the last lacks a row."""
    runs = [record() for _ in CPUS]
    for cpu, factor, run in zip(CPUS, (1.0, 2.0, 0.5), runs, strict=True):
        run["environment"]["cpu"] = cpu
        for comparison in run["comparisons"]:
            comparison["ratio"] *= factor
    runs[-1]["comparisons"] = [c for c in runs[-1]["comparisons"] if c["variant"] != "as_installed"]
    return runs


def test_three_machines_stand_in_one_table_at_their_own_ratios(machines):
    """Against the records' JSON: each cell is that run's ratio of the pair that its line names."""
    *_, ratios = compare.many(machines, every=True)
    assert [column.head for column in ratios.columns] == ["ratio of", "A", "B", "C"]
    own = [own_ratio(run, "mixed_precision/digits-cnn-4/pt/bf16") for run in machines]
    what = "mixed_precision, digits-cnn 4: PyTorch bf16 ÷ fp32"
    (line,) = [row for row in ratios.rows if row[0] == what]
    for found, cell in zip(own, line[1:], strict=True):
        assert cell.startswith(f"{found['ratio']:.3f} (")


def test_a_ratio_that_a_run_does_not_have_is_a_dash(machines):
    *_, ratios = compare.many(machines, every=True)
    alone = [row for row in ratios.rows if "—" in row[1:]]
    assert alone
    assert all(sum(cell != "—" for cell in row[1:]) > 1 for row in ratios.rows)


def test_of_many_runs_those_ratios_are_shown_that_changed(old, new):
    third = copy.deepcopy(new)
    own_ratio(third)["ratio"] *= 1.2
    *_, ratios = compare.many([old, new, third])
    ((what, *cells),) = ratios.rows
    assert what == "mixed_precision, digits-cnn 64: PyTorch bf16 ÷ fp32"
    assert ["slower" in cell for cell in cells] == [False, False, True]


def test_the_table_of_many_runs_holds_80_columns(machines, tmp_path, capsys):
    paths = [tmp_path / f"{number}.json" for number in range(len(machines))]
    for path, run in zip(paths, machines, strict=True):
        path.write_text(json.dumps(run), "utf-8")
    assert compare.main([*map(str, paths), "--all"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0].startswith("A: a CPU, no GPU: one CPU")


@pytest.mark.parametrize("options", [[], ["--fail-if", "slower:5%"]])
def test_the_number_of_runs_is_checked(options, capsys):
    with pytest.raises(SystemExit) as stopped:
        compare.main([str(DOCS)] * (3 if options else 1) + options)
    assert stopped.value.code == 2
    assert "two runs" in capsys.readouterr().err


# Conditions --------------------------------------------------------------------------------------


def test_other_versions_and_machines_are_said_before_anything_else(old, new):
    new["environment"]["cpu"] = "another CPU"
    new["environment"]["packages"]["pt"]["torch"] = "9.9"
    own_ratio(new)["ratio"] *= 1.2
    text = compare.render(old, new, every=False, markdown=False)
    said = " ".join(text.split("Not the same in both runs")[0].split())
    assert "NOT THE SAME CONDITIONS" in said
    assert "(cpu, PyTorch: torch)" in said
    rows = titled(compare.tables(old, new), "Not the same").rows
    assert ["PyTorch: torch", old["environment"]["packages"]["pt"]["torch"], "9.9"] in rows


def test_an_unfinished_run_says_so(old, new):
    new["finished"] = False
    assert any("the new run was cut short" in said for said in compare.sentences(old, new))


# The command -------------------------------------------------------------------------------------


@pytest.fixture
def command(tmp_path, capsys):
    """Compare two records as the command line does."""

    def run(*runs, options=()):
        paths = []
        for number, found in enumerate(runs):
            paths.append(tmp_path / f"{number}.json")
            text = found if isinstance(found, str) else json.dumps(found)
            paths[-1].write_text(text, "utf-8")
        status = compare.main([*map(str, paths), *options])
        return status, capsys.readouterr()

    return run


def test_the_terminal_holds_80_columns(command, old, new):
    own_ratio(new)["ratio"] *= 1.2
    new["environment"]["cpu"] = "x" * 200
    status, said = command(old, new, options=["--all"])
    assert status == 0
    assert max(map(len, said.out.splitlines())) <= 80


def test_markdown_has_a_heading_for_each_table(command, old, new):
    own_ratio(new)["ratio"] *= 1.2
    status, said = command(old, new, options=["--format", "markdown"])
    assert status == 0
    assert said.out.startswith("# What changed\n")
    assert "\n## Ratios of step time: " in said.out


@pytest.mark.parametrize(
    ("factor", "limit", "status"),
    [(1.2, "slower:5%", 1), (1.2, "slower:18%", 0), (0.8, "slower:5%", 0), (1.0, "slower:0%", 0)],
)
def test_the_exit_status_for_a_user_s_own_checks(command, old, new, factor, limit, status):
    own_ratio(new)["ratio"] *= factor
    found, said = command(old, new, options=["--fail-if", limit])
    assert found == status
    assert ("slower by more than" in said.err) == bool(status)


def test_what_can_not_be_held_to_it_any_more_fails(command, old, new):
    """A check that leaves out what broke would pass."""
    case = next(case for case in new["cases"] if case["role"] == "variant")
    case.update(status="FAILED", reason="it fell over")
    own_ratio(new)["verdict"] = DIFFERENT
    found, said = command(old, new, options=["--fail-if", "slower:5%"])
    assert found == 1
    assert f"no longer measured: {case['id']}: FAILED: it fell over\n" in said.err
    assert said.err.count("no longer the same work: ") == 1
    assert command(new, new, options=["--fail-if", "slower:5%"])[0] == 0  # it never was


@pytest.mark.parametrize("again", [{"compiled": True}, {}])
def test_a_stack_of_other_winners_is_another_program(command, old, new, again):
    """What is stacked follows from what each run found faster; where too little was, nothing is."""
    case(old)["settings"] = {"compiled": True, "fused": True}
    case(new)["settings"] = again
    if again:
        own_ratio(new)["ratio"] *= 2
    else:
        case(new).update(status="UNSUPPORTED", reason="there is nothing to stack")
    found, said = command(old, new, options=["--fail-if", "slower:5%"])
    assert (found, said.err) == (0, "")
    rows = titled(compare.tables(old, new), "Cases").rows
    was = "OK, compiled yes, fused yes"
    assert rows == [[CASE, was, "OK, compiled yes"] if again else [CASE, "OK", "UNSUPPORTED"]]
    assert titled(compare.tables(old, new), "Ratios").rows[0][0] == "none changed"


def test_a_noisy_run_fails_nothing(command, old, new):
    own_ratio(new).update(ratio=own_ratio(old)["ratio"] * 2, sd=0.9)
    assert command(old, new, options=["--fail-if", "slower:5%"])[0] == 0


def test_runs_without_a_ratio_in_common_are_held_to_nothing(command, old, new):
    """Where all that was timed is refused in one of them, say: no check has passed."""
    new["comparisons"] = []
    found, said = command(old, new, options=["--fail-if", "slower:5%"])
    assert found == 2
    assert "no ratio of step time in common" in said.err
    assert command(old, new)[0] == 0  # what else there is can be compared


@pytest.mark.parametrize("limit", ["slower", "slower:5", "faster:5%", "slower:-5%"])
def test_a_limit_has_one_form(command, old, new, limit, capsys):
    with pytest.raises(SystemExit) as stopped:
        command(old, new, options=["--fail-if", limit])
    assert stopped.value.code == 2
    assert "is not of the form slower:5%" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: [record("quick"), record("quick")], "a run of one block has no noise"),
        (lambda: [record(), record() | {"cases": []}], "no case in common"),
        (lambda: [record(), "{}"], "not a record of twinbench"),
        (lambda: [record(), "{"], "not JSON, or cut off"),
    ],
)
def test_what_cannot_be_compared_is_one_clear_line(command, make, reason):
    status, said = command(*make())
    assert status == 2
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert reason in said.err
