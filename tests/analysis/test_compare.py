"""Comparing runs: what is called a change, what is not, and what is said of the conditions."""

from __future__ import annotations

from math import exp
from pathlib import Path

import numpy as np
import pytest
from scipy import stats as scipy_stats

from bench import compare
from bench.analysis.verdicts import BETWEEN_FREEDOM, Ratio, compare_runs
from bench.record import DIFFERENT, TaskFacts, encode
from bench.report.side_by_side import machine_lines
from tests.history import needs_history, published
from tests.records import find_case, find_comparison, whole_run, with_case, with_comparison

DOCS = Path(__file__).parents[2] / "docs"
CASE = "mixed_precision/digits-cnn-64/pt/bf16"


BASE = "mixed_precision/digits-cnn-64/pt/fp32"


@pytest.fixture(scope="module")
def old():
    return whole_run()


@pytest.fixture(scope="module")
def new(old):
    """The same run once more: nothing changed."""
    return old


def case(run):
    return find_case(run, CASE)


def ratio(run):
    """The ratio of the case to its baseline."""
    return find_comparison(run, CASE, BASE).ratio


def moved(run, factor=1.0, **changes):
    """The run with another ratio of the case to its baseline."""
    return with_comparison(run, CASE, BASE, **{"ratio": factor * ratio(run)} | changes)


def trained(run, change):
    """The run with other metrics of the case, seed by seed."""
    accuracy = case(run).accuracy
    return with_case(run, CASE, accuracy=accuracy.but(per_seed=change(accuracy.per_seed)))


def two_points_less(seeds):
    return [value - 2.0 for value in seeds]


def titled(tables, start):
    (found,) = [table for table in tables if table.title.startswith(start)]
    return found


# The statistics ----------------------------------------------------------------------------------


def test_the_interval_is_welch_s():
    random = np.random.default_rng(0)
    first, second = random.normal(0.1, 0.02, 8), random.normal(0.0, 0.04, 12)
    runs = [Ratio(exp(v.mean()), None, v.std(ddof=1), len(v), None) for v in (first, second)]
    found = compare_runs(*runs, between=0.0)
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
    assert compare_runs(Ratio(0.5 * ratio, None, sd, 8, None), before, 0.0).verdict == verdict


def test_what_runs_scatter_by_counts_twice():
    """Two runs that saw no noise at all differ by that of either."""
    quiet = Ratio(1.0, None, 0.0, 8, None)
    half = scipy_stats.t.ppf(0.975, BETWEEN_FREEDOM) * 0.05 * 2**0.5
    assert np.log(compare_runs(quiet, quiet, 0.05).ci) == pytest.approx([-half, half])


def test_the_noise_of_either_run_counts():
    quiet, noisy = Ratio(1.0, None, 0.01, 8, None), Ratio(1.1, None, 0.07, 8, None)
    pairs = [(noisy, quiet), (quiet, noisy)]
    widths = [np.log(np.divide(*reversed(compare_runs(*pair, 0.0).ci))) for pair in pairs]
    calm = compare_runs(quiet, Ratio(1.1, None, 0.01, 8, None), 0.0).ci
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
    tables = compare.tables(old, moved(new, 1.2))
    ((what, before, after, change, verdict),) = titled(tables, "Ratios").rows
    assert what == "mixed_precision, digits-cnn 64: PyTorch bf16 ÷ fp32"
    assert float(after) == pytest.approx(1.2 * float(before), rel=2e-3)
    assert change.startswith("1.200 (")
    assert verdict == "slower"


def test_all_shows_what_did_not_change(old, new):
    shown = titled(compare.tables(old, new, every=True), "Ratios").rows
    assert len(shown) == len(old.comparisons)
    assert {row[4] for row in shown} == {"inconclusive", "not comparable"}


def test_no_change_is_seen_between_unlike_work(old, new):
    tables = compare.tables(moved(old, verdict=DIFFERENT), moved(new, 2))
    assert titled(tables, "Ratios").rows[0][0] == "none changed"


def test_cases_that_ended_otherwise_are_named(old, new):
    new = with_case(new, CASE, status="FAILED")
    new = new.but(cases=[c for c in new.cases if c.variant != "as_installed"])
    gone = [c.id for c in old.cases if c.variant == "as_installed"]
    rows = titled(compare.tables(old, new), "Cases").rows
    assert rows == [[CASE, "OK", "FAILED"], [f"{len(gone)} cases", "OK", "not measured"]]
    rows = titled(compare.tables(old, new, every=True), "Cases").rows
    assert {row[0] for row in rows if row[2] == "not measured"} == set(gone)


def test_accuracy_is_paired_by_seed(old, new):
    tables = compare.tables(old, trained(new, two_points_less))
    ((name, *_, change, verdict),) = titled(tables, "Accuracy").rows
    assert (name, verdict) == (CASE, "worse")
    assert change.startswith("-2.00")


@pytest.mark.parametrize("lacking", ["metric", "margin"])
def test_accuracy_of_a_task_that_does_not_say_how_to_judge_it_is_left_out(old, new, lacking):
    new = trained(new, lambda seeds: [0.0] * len(seeds))
    assert titled(compare.tables(old, new), "Accuracy").rows
    silent = new.but(
        tasks=new.tasks | {"digits-cnn": new.tasks["digits-cnn"].but(**{lacking: None})}
    )
    assert not any(t.title.startswith("Accuracy") for t in compare.tables(old, silent))
    unknown = new.but(tasks={"text-gpt": TaskFacts()})
    assert not any(t.title.startswith("Accuracy") for t in compare.tables(old, unknown))


def test_what_diverged_in_a_run_has_no_accuracy_to_compare(old, new):
    diverged = trained(new, lambda seeds: [None, *seeds[1:]])
    accuracies = titled(compare.tables(old, diverged, every=True), "Accuracy").rows
    assert accuracies
    assert CASE not in [row[0] for row in accuracies]


def test_a_run_that_trained_fewer_seeds_is_compared_by_those(old, new):
    """It ended at a look: its seeds are the first of the other's."""
    new = trained(new, lambda seeds: two_points_less(seeds)[:4])
    old = trained(old, lambda seeds: [*seeds[:4], *[0.0] * 4])
    ((*_, change, verdict),) = titled(compare.tables(old, new), "Accuracy").rows
    assert change.startswith("-2.00")
    assert verdict == "worse"


@pytest.mark.parametrize("lacking", [("sd", "ci", "verdict"), ("ratio",), ("n",), ("verdict",)])
def test_a_ratio_of_one_block_is_left_out_and_the_rest_compared(old, new, lacking):
    pair = "digits-cnn-64/pt/bf16_fp32_head", "digits-cnn-64/pt/fp32"
    new = with_comparison(moved(new, 1.2), *pair, **dict.fromkeys(lacking))
    (row,) = titled(compare.tables(old, new), "Ratios").rows
    assert row[4] == "slower"


def test_a_variance_that_is_shared_counts_with_its_degrees_of_freedom(old, new):
    """Three blocks tell more with the noise that others show."""
    three = moved(new, 1.08, n=3, sd=0.024)
    assert titled(compare.tables(old, three), "Ratios").rows[0][4] == "slightly slower"
    assert titled(compare.tables(old, moved(three, freedom=20.0)), "Ratios").rows[0][4] == "slower"


@pytest.mark.parametrize(("share", "shown"), [(1.3, True), (1.05, False)])
def test_large_changes_of_memory_are_shown(old, new, share, shown):
    memory = case(new).memory
    peak = memory.import_bytes + int(share * memory.above_import)
    new = with_case(new, CASE, memory=memory.but(steady_peak_bytes=peak))
    tables = [t.rows for t in compare.tables(old, new) if t.title.startswith("Peak memory")]
    assert bool(tables) == shown
    if shown:
        assert [(row[0], row[3]) for row in tables[0]] == [(CASE, "1.30")]


# Many runs ---------------------------------------------------------------------------------------

CPUS = ("one CPU", "another CPU", "a third CPU")


@pytest.fixture
def machines(old):
    """Runs of three CPUs, each with a choice of framework of its own; the last lacks a row."""
    runs = [
        old.but(
            environment=old.environment.but(cpu=cpu),
            comparisons=[c.but(ratio=factor * c.ratio) for c in old.comparisons],
        )
        for cpu, factor in zip(CPUS, (1.0, 2.0, 0.5), strict=True)
    ]
    fewer = [c for c in runs[-1].comparisons if c.variant != "as_installed"]
    return [*runs[:-1], runs[-1].but(comparisons=fewer)]


def test_three_machines_stand_in_one_table_at_their_own_ratios(machines):
    """Each cell is that run's ratio of the pair that its line names."""
    *_, ratios = compare.many(machines, every=True)
    assert [column.head for column in ratios.columns] == ["ratio of", "A", "B", "C"]
    what = "mixed_precision, digits-cnn 64: PyTorch bf16 ÷ fp32"
    (line,) = [row for row in ratios.rows if row[0] == what]
    for run, cell in zip(machines, line[1:], strict=True):
        assert cell.startswith(f"{ratio(run):.3f} (")


def test_a_ratio_that_a_run_does_not_have_is_a_dash(machines):
    *_, ratios = compare.many(machines, every=True)
    alone = [row for row in ratios.rows if "—" in row[1:]]
    assert alone
    assert all(sum(cell != "—" for cell in row[1:]) > 1 for row in ratios.rows)


def test_of_many_runs_those_ratios_are_shown_that_changed(old, new):
    *_, ratios = compare.many([old, new, moved(new, 1.2)])
    ((what, *cells),) = ratios.rows
    assert what == "mixed_precision, digits-cnn 64: PyTorch bf16 ÷ fp32"
    assert ["slower" in cell for cell in cells] == [False, False, True]


def test_the_table_of_many_runs_holds_80_columns(machines, command):
    status, said = command(*machines, options=["--all"])
    assert status == 0
    lines = said.out.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0].startswith("B against A: the processor is another, one before")


@pytest.mark.parametrize("options", [[], ["--fail-if", "slower:5%"]])
def test_the_number_of_runs_is_checked(options, capsys):
    with pytest.raises(SystemExit) as stopped:
        compare.main([str(DOCS)] * (3 if options else 1) + options)
    assert stopped.value.code == 2
    assert "two runs" in capsys.readouterr().err


# Conditions --------------------------------------------------------------------------------------


def speeds(float32, **others):
    return {"peak_flops": {"float32": float32 * 1e9, "bfloat16": 2e9 * float32}} | others


def said_of(old, new):
    text = compare.render(old, new, every=False, markdown=False)
    return " ".join(text.split("old: ")[0].split())


def test_how_the_machines_differ_is_said_first_and_the_build_of_the_system_last(old, new):
    old = old.but(environment=old.environment.but(**speeds(400)))
    new = moved(new, 1.2).but(environment=old.environment.but(**speeds(200, os="Linux-7")))
    said = said_of(old, new)
    assert said.startswith("The new machine computes half as much: 200 GFLOP/s in float32, 400")
    assert f"the build of the system is Linux-7, {old.environment.os} before." in said
    assert "NOT THE SAME CONDITIONS" in compare.render(old, new, every=False, markdown=False)


def test_runs_of_one_class_are_said_to_be_and_another_system_is_no_other_class(old, new):
    assert said_of(old, new).startswith("Machines of one class: Intel Xeon Platinum 8488C")
    new = new.but(environment=new.environment.but(os="Linux-7"))
    said = said_of(old, new)
    assert said.startswith("Machines of one class: Intel Xeon Platinum 8488C")
    assert said.endswith(f"The build of the system is Linux-7, {old.environment.os} before.")


@needs_history
def test_the_published_run_computes_twice_as_much_as_that_before_it():
    """Nothing else was said of these two but the size of their memory and their systems."""
    old, new = map(published, ("8b784fd", "de5fbd6"))
    assert said_of(old, new).startswith("The new machine computes twice as much: 418 GFLOP/s")


def test_of_many_runs_that_of_another_class_is_named_first(old):
    slow = old.but(environment=old.environment.but(**speeds(30)))
    os = old.but(environment=old.environment.but(os="Linux-7"))
    first, second, *_ = machine_lines({"A": old, "B": os, "C": slow})
    assert first.startswith("C against A: the new machine computes 0.23 times as much")
    assert second.startswith("B against A: the build of the system is Linux-7")


def test_other_versions_are_said_before_the_ratios(old, new):
    packages = new.environment.packages | {"pt": {"torch": "9.9"}}
    new = moved(new, 1.2).but(environment=new.environment.but(packages=packages))
    text = compare.render(old, new, every=False, markdown=False)
    said = " ".join(text.split("Not the same in both runs")[0].split())
    assert "comes from what differs (PyTorch: torch)" in said.replace("may come", "comes")
    rows = titled(compare.tables(old, new), "Not the same").rows
    assert ["PyTorch: torch", old.environment.packages["pt"]["torch"], "9.9"] in rows


def test_an_unfinished_run_says_so(old, new):
    said = compare.sentences(old, new.but(finished=False))
    assert any("the new run was cut short" in line for line in said)


# The command -------------------------------------------------------------------------------------


@pytest.fixture
def command(tmp_path, capsys):
    """Compare two records as the command line does."""

    def run(*runs, options=()):
        paths = []
        for number, found in enumerate(runs):
            paths.append(tmp_path / f"{number}.json")
            paths[-1].write_bytes(found if isinstance(found, bytes) else encode(found))
        status = compare.main([*map(str, paths), *options])
        return status, capsys.readouterr()

    return run


def test_the_terminal_holds_80_columns(command, old, new):
    new = moved(new, 1.2).but(environment=new.environment.but(cpu="x" * 200))
    status, said = command(old, new, options=["--all"])
    assert status == 0
    assert max(map(len, said.out.splitlines())) <= 80


def test_markdown_has_a_heading_for_each_table(command, old, new):
    status, said = command(old, moved(new, 1.2), options=["--format", "markdown"])
    assert status == 0
    assert said.out.startswith("# What changed\n")
    assert "\n## Ratios of step time: " in said.out


FAIL_IF = ["--fail-if", "slower:5%"]


@pytest.mark.parametrize(
    ("factor", "limit", "status"),
    [(1.2, "slower:5%", 1), (1.2, "slower:18%", 0), (0.8, "slower:5%", 0), (1.0, "slower:0%", 0)],
)
def test_the_exit_status_for_a_user_s_own_checks(command, old, new, factor, limit, status):
    ended, said = command(old, moved(new, factor), options=["--fail-if", limit])
    assert ended == status
    assert ("slower by more than" in said.err) == bool(status)


def test_what_can_not_be_held_to_it_any_more_fails(command, old, new):
    """A check that leaves out what broke would pass."""
    row = next(case for case in new.cases if case.role == "variant")
    new = with_case(moved(new, verdict=DIFFERENT), row.id, status="FAILED", reason="it fell over")
    status, said = command(old, new, options=FAIL_IF)
    assert status == 1
    assert f"no longer measured: {row.id}: FAILED: it fell over\n" in said.err
    assert said.err.count("no longer the same work: ") == 1
    assert command(new, new, options=FAIL_IF)[0] == 0  # it never was


@pytest.mark.parametrize("again", [{"compiled": True}, {}])
def test_a_stack_of_other_winners_is_another_program(command, old, new, again):
    """What is stacked follows from what each run found faster; where too little was, nothing is."""
    old = with_case(old, CASE, settings={"compiled": True, "fused": True})
    new = with_case(moved(new, 2) if again else new, CASE, settings=again)
    if not again:
        new = with_case(new, CASE, status="UNSUPPORTED", reason="there is nothing to stack")
    status, said = command(old, new, options=FAIL_IF)
    assert (status, said.err) == (0, "")
    rows = titled(compare.tables(old, new), "Cases").rows
    before = "OK, compiled yes, fused yes"
    assert rows == [[CASE, before, "OK, compiled yes"] if again else [CASE, "OK", "UNSUPPORTED"]]
    assert titled(compare.tables(old, new), "Ratios").rows[0][0] == "none changed"


def test_a_noisy_run_fails_nothing(command, old, new):
    assert command(old, moved(new, 2, sd=0.9), options=FAIL_IF)[0] == 0


def test_runs_without_a_ratio_in_common_are_held_to_nothing(command, old, new):
    """Where all that was timed is refused in one of them, say: no check has passed."""
    new = new.but(comparisons=[])
    status, said = command(old, new, options=FAIL_IF)
    assert status == 2
    assert "no ratio of step times in common" in said.err
    assert command(old, new)[0] == 0  # what else there is can be compared


@pytest.mark.parametrize("limit", ["slower", "slower:5", "faster:5%", "slower:-5%"])
def test_a_limit_has_one_form(command, old, new, limit, capsys):
    with pytest.raises(SystemExit) as stopped:
        command(old, new, options=["--fail-if", limit])
    assert stopped.value.code == 2
    assert "give a limit such as slower:5%" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: [whole_run("quick"), whole_run("quick")], "a run of one block has no noise"),
        (lambda: [whole_run(), whole_run().but(cases=[])], "no row in common"),
        (lambda: [whole_run(), b"{}"], "not a record of twinbench"),
        (lambda: [whole_run(), b"{"], "not JSON, or cut off"),
    ],
)
def test_what_cannot_be_compared_is_one_clear_line(command, make, reason):
    status, said = command(*make())
    assert status == 2
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert reason in said.err
