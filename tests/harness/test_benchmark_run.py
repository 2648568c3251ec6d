"""The command line, as its users run it: pytest in a process of its own, with the NumPy kit."""

import csv
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from bench.analysis.values import MOST_OTHERS
from bench.harness.plan import EFFORTS, FRAMEWORKS
from bench.harness.run_plan import techniques
from bench.report import tables
from shared.choices import unknown
from shared.specs import TASKS
from tests.harness.command_line import (
    PLAIN,
    PLUGINS,
    blocks,
    finish,
    in_one_process,
    interrupt,
)

ROOT = Path(__file__).resolve().parents[2]
DURATION = r"(?:\d+ h )?(?:\d+ min)? ?(?:\d+ s)?"
pytestmark = pytest.mark.timeout(240)


def samples(record):
    return {
        case.id: [
            sample
            for blocks in case.timing.step_s.values()
            for block in blocks.values()
            for sample in block
        ]
        for case in record.cases
        if case.status == "OK"
    }


@pytest.fixture(scope="module")
def whole(start, tmp_path_factory):
    """A default run with everything that pytest-benchmark can write."""
    folder = tmp_path_factory.mktemp("whole")
    process = start(
        "--benchmark-only",
        f"--benchmark-json={folder / 'benchmark.json'}",
        f"--benchmark-storage=file://{folder / 'storage'}",
        "--benchmark-save=first",
        f"--benchmark-histogram={folder / 'histogram'}",
    )
    found = finish(process)
    found.folder = folder
    return found


@pytest.fixture(scope="module")
def selected(run, whole):
    """A quiet quick run of one case, compared with the saved one."""
    return run(
        "-q",
        "--effort=quick",
        "--benchmark-only",
        "-k=pt and same",
        f"--benchmark-storage=file://{whole.folder / 'storage'}",
        "--benchmark-compare",
    )


# A whole run ------------------------------------------------------------------------------------


def test_the_plan_comes_first_then_progress(whole):
    lines = [line for line in whole.err.strip().splitlines() if not line.startswith("!!")]
    assert lines[0] == "faulty: good, same, raises_late, prints, refuses, control"
    assert "12 cases" in lines[1]
    steps = [line for line in lines if line.startswith("[")]
    told = " ".join(" ".join(lines[2 : lines.index(steps[0])]).split())
    assert re.fullmatch(
        rf"12 cases, 12 programs, timed in 1 group; 2 blocks of 5 rounds, 2 seeds; "
        rf"first table after about {DURATION}, all after about {DURATION}",
        told,
    )
    pattern = rf"\[([^]]*)\] .* · {DURATION} elapsed, about {DURATION} left"
    parts = [re.fullmatch(pattern, line)[1].partition(" ·")[0] for line in steps]
    assert list(dict.fromkeys(parts)) == [
        "start",
        "pass 1",
        "pass 2",
        "first calls and memory",
        "training, 2 seeds",
        "end",
    ]


def test_a_busy_machine_is_said_before_anything_is_measured(run):
    other = [
        sys.executable,
        "-c",
        "import time; end = time.monotonic() + 60\nwhile time.monotonic() < end: pass",
    ]
    burning = subprocess.Popen(other)
    try:
        planned = run("--benchmark-only", "--plan")
    finally:
        burning.kill()
        burning.wait()
    used = re.search(r"^!! Other programs use (\d+)% of this machine's cores", planned.out, re.M)
    assert 100 * MOST_OTHERS < int(used[1]) <= 100


def test_tables_and_paths_are_printed(whole):
    assert "benchmark 'faulty/digits-cnn-4': 8 tests" in whole.out  # pytest-benchmark's
    assert whole.out.index("benchmark 'faulty") < whole.out.index("\nWhat to use on ")  # and ours
    before, _, ours = whole.out.partition("\nWhat to use on ")
    hints = before[before.index("/results.json") :]
    *ours, last = ours.splitlines()  # which is pytest's
    assert re.search(r"\d+ passed", last)
    assert max(map(len, ours)) <= 80
    assert len(ours) <= tables.MOST_LINES
    assert "digits-cnn · Speed" not in whole.out  # the detail, which -v shows
    assert "twinbench choose" in hints
    written = [Path(line) for line in whole.out.splitlines() if re.fullmatch(r"/\S+\.\w+", line)]
    names = ["results.json", "report.md", "report.html", "tables.csv"]
    assert [path.name for path in written] == names
    texts = dict(zip(names, (path.read_text("utf-8") for path in written), strict=True))
    assert "Faults" in texts["report.md"]
    assert "Faults" in texts["report.html"]
    lines = csv.DictReader(texts["tables.csv"].splitlines())
    assert {line["id"] for line in lines} == {case.id for case in whole.record.cases}


def test_the_record_is_finished_and_latest(whole, results_folder):
    assert whole.record.finished is True
    assert whole.record.effort == "default"
    assert whole.record.command.startswith("python -m pytest -c ")
    assert "--benchmark-save=first" in whole.record.command
    blocks = {
        case.id: [len(block) for match in case.timing.step_s.values() for block in match.values()]
        for case in whole.record.cases
        if case.status == "OK"
    }
    assert len(blocks) == 8
    assert set(map(tuple, blocks.values())) == {(5, 5)}
    assert not list(results_folder.glob("*/*.partial"))


def test_a_failed_case_fails_the_run_with_its_reason(whole):
    assert whole.status == 1
    assert "2 failed, 8 passed, 2 skipped" in whole.out
    assert "FAILED: ValueError: step 41 is too much" in whole.out
    assert "SKIPPED [2]" in whole.out
    assert "UNSUPPORTED: upstream refuses this model" in whole.out
    assert "Traceback" not in whole.out + whole.err
    assert "Warning" not in whole.out


def test_what_workers_print_stays_out_of_the_terminal(whole):
    assert "a line on standard output" not in whole.out + whole.err
    assert "bytes on its descriptor" not in whole.out + whole.err


def test_the_samples_of_the_record_are_replayed_into_pytest_benchmark(whole):
    written = json.loads((whole.folder / "benchmark.json").read_text("utf-8"))
    replayed = {b["extra_info"]["case"]: b for b in written["benchmarks"]}
    measured = samples(whole.record)
    assert replayed.keys() == measured.keys()
    for case_id, benchmark in replayed.items():
        assert benchmark["stats"]["data"] == pytest.approx(measured[case_id], rel=1e-6)
        assert benchmark["stats"]["rounds"] == len(measured[case_id]) == 10
        assert benchmark["params"] == {"case": case_id}
        assert benchmark["group"] == "faulty/digits-cnn-4"
        assert benchmark["name"] == f"bench_faulty[{case_id.removeprefix('faulty/')}]"


def test_histograms_are_written(whole):
    (image,) = whole.folder.glob("histogram*.svg")
    text = image.read_text("utf-8")
    assert "<svg" in text
    assert "digits-cnn-4/pt/good" in text


def test_runs_can_be_saved_and_compared(whole, selected):
    assert len(list((whole.folder / "storage").rglob("0001_first.json"))) == 1
    compared = [line for line in selected.out.splitlines() if line.startswith("bench_faulty[")]
    assert len([line for line in compared if "(0001_first)" in line]) == 1
    assert len([line for line in compared if "(NOW)" in line]) == 1


# Selections -------------------------------------------------------------------------------------


def test_a_selection_is_measured_with_its_baseline_and_nothing_else(selected):
    assert selected.status == 0
    assert [case.id for case in selected.record.cases] == [
        "faulty/digits-cnn-4/pt/good",
        "faulty/digits-cnn-4/pt/same",
    ]
    (comparison,) = selected.record.comparisons
    assert comparison.kind == "baseline"
    assert "1 passed, 9 deselected" in selected.out  # the baseline is measured, not reported


def test_a_quick_run_says_that_it_is_one(selected):
    (comparison,) = selected.record.comparisons
    assert comparison.ratio > 0
    assert (comparison.ci, comparison.verdict) == (None, None)
    assert selected.record.effort == "quick"
    assert "PROVISIONAL: one block" in selected.out
    assert "What to use" in selected.out


def test_quiet_means_no_progress(selected):
    assert "elapsed" not in selected.err
    assert "blocks of" not in selected.err


NOTHING = {
    "--collect-only": (0, "12 tests collected"),
    "--benchmark-skip": (0, "12 skipped"),
    "--benchmark-disable": (0, "12 skipped"),
    "-k=no_such_case": (5, "-k 'no_such_case' matches no row of --effort default:\n--technique "),
}


def test_nothing_is_measured_where_nothing_was_asked_for_or_can_be(bench_file, tmp_path):
    """Nor where one of the files can't be collected."""
    (broken := tmp_path / "bench_broken.py").write_text("import no_such_module\n")
    ends = {**NOTHING, str(broken): (2, "No module named 'no_such_module'")}
    common = ["-c", str(ROOT / "pyproject.toml"), *PLUGINS, str(bench_file)]
    given = [[*common, f"--results={tmp_path / 'results'}", option] for option in ends]
    found = in_one_process(given, bench_file.parent)
    for (status, out, err), (expected, said) in zip(found, ends.values(), strict=True):
        assert (status, said in out) == (expected, True), out
        assert "elapsed" not in err
    assert not (tmp_path / "results").exists()


def test_the_benchmarks_of_this_project_are_collected(tmp_path):
    """The real files, by the command of the README; nothing imports a framework."""
    done = subprocess.run(
        [
            sys.executable,
            "-X",
            "importtime",
            "-m",
            "pytest",
            "bench/",
            "--collect-only",
            "-q",
            "-p",
            "no:hypothesispytest",
            "--effort=full",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    for name in techniques():
        assert f"bench_{name}[" in done.stdout
    imported = {line.rsplit("|", 1)[-1].strip() for line in done.stderr.splitlines()}
    assert "pytest" in imported
    assert not imported & {"torch", "tensorflow", "keras", "tf_keras"}


def test_a_mode_is_controlled_once_a_side_whatever_is_selected():
    common = ["bench/", *PLAIN, "--collect-only", "-q"]
    runs = in_one_process([common, [*common, "-k", "gradient_clipping"]], ROOT)
    assert [status for status, *_ in runs] == [0, 0]
    controls, alone = (re.findall(r"bench_(\w+)\[(\S+)/control\]", out) for _, out, _ in runs)
    every = [workload for _, workload in controls]
    sides = Counter(("predict" in workload, workload.rpartition("/")[2]) for workload in every)
    assert sides.keys() >= {(mode, side) for mode in (False, True) for side in ("pt", "tf")}
    assert set(sides.values()) == {1}
    assert alone == [("gradient_clipping", workload) for _, workload in alone]
    assert len(alone) == 2


def test_who_asks_for_a_variant_or_a_task_is_shown_all_that_it_has():
    """A technique by name has the headline's work, its other variants only at small models."""
    common = ["bench/", *PLAIN, "--collect-only", "-q", "--technique=compilation"]
    given = [
        [*common, option]
        for option in ("--effort=default", "--variant=eager", "--task=photos-resnet18")
    ]
    found = [
        set(re.findall(r"bench_compilation\[(\S+)/tf/(\w+)\]", out))
        for _, out, _ in in_one_process(given, ROOT)
    ]
    by_name, by_variant, by_task = found
    eager = {work for work, name in by_variant if name == "eager"}
    assert {work for work, name in by_name if name == "eager"} == {"digits-cnn-128"}
    assert eager > {work for work, _ in by_name}
    assert {name for _, name in by_task} == {name for _, name in by_name} - {"control"}
    assert {work for work, _ in by_task} == {"photos-resnet18-64"}


# Interruptions ----------------------------------------------------------------------------------


def test_ctrl_c_keeps_what_is_finished_and_says_where(start, tmp_path):
    found = interrupt(
        start,
        lambda record, logs: blocks(record) >= 2,
        "--blocks=500",
        results=tmp_path / "results",
    )
    assert found.status == 2
    assert found.record.finished is False
    assert {case.status for case in found.record.cases} == {"OK"}
    assert found.record.ended == "interrupted"
    assert 2 <= blocks(found.record) < 500
    (comparison,) = found.record.comparisons
    assert comparison.n == blocks(found.record)
    assert "The run is not finished; what was measured is kept.\n--resume" in found.out
    name = (tmp_path / "results" / "latest").resolve().name
    assert re.search(rf"interrupted: --resume \S*{name} goes on where it ended", found.out)
    for noise in ("KeyboardInterrupt", "Traceback", "traceback", "INTERNALERROR"):
        assert noise not in found.out + found.err
    for name in ("report.md", "report.html", "tables.csv"):
        assert (tmp_path / "results" / "latest" / name).exists()
    assert found.left == []


@pytest.mark.campaign
def test_minutes_end_a_run_in_time_with_what_it_has(start, whole):
    """What a pass takes is known from the run before. The machine must be quiet."""
    begun = time.monotonic()
    # A shell starts what runs in its background so.
    usual = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        run = start("--minutes=0.2", "--blocks=500", "--framework=pt", "--variant=same")
    finally:
        signal.signal(signal.SIGINT, usual)
    found = finish(run)
    assert time.monotonic() - begun < 0.2 * 60 + 20  # and the imports and tables
    assert found.status == 0, found.out + found.err
    assert (found.record.finished, found.record.ended) == (False, "minutes")
    assert 5 < found.record.seconds["total"] <= 0.2 * 60
    assert "the run ends after 12 s" in found.err
    assert "ENDED IN TIME" in found.out
    assert "--resume" in found.out
    (comparison,) = found.record.comparisons
    assert comparison.n == blocks(found.record) >= 2
    assert comparison.ci[0] < comparison.ratio < comparison.ci[1]


def test_ctrl_c_does_not_wait_for_training(start, tmp_path):
    """Nor is a case that was still training called failed."""

    def one_trains(record, logs):
        return sum("trains from" in log.read_text() for log in logs.glob("*-train-*.log")) >= 1

    found = interrupt(
        start,
        one_trains,
        "--blocks=1",
        results=tmp_path / "results",
        FAKE_FIT_S="3600",
    )
    assert found.status == 2
    assert found.record.finished is False
    for case in found.record.cases:
        assert (case.status, case.accuracy) == ("OK", None)
    assert "The run is not finished" in found.out
    assert found.left == []


# Bad input --------------------------------------------------------------------------------------

NAMES = {
    "technique": sorted(techniques()),
    "task": sorted(TASKS),
    "effort": EFFORTS,
    "framework": sorted(FRAMEWORKS),
}
# What else each refuses is drawn by tests/test_bad_input.py.
BAD = {
    **{f"--{name}=nope": [f"--{name}: {unknown('nope', known)}"] for name, known in NAMES.items()},
    "--variant=bf17": ["--variant: 'bf17' is unknown; similar are bf16"],
    "--technique=profilng": ["--technique: 'profilng' is unknown; similar are profiling"],
    "--effort=quick,full": ["--effort: 'quick,full' is unknown", *EFFORTS],
    "--framework=pt,jax": ["--framework: 'jax' is unknown; choose from pt, tf"],
    "--technique=": ["--technique: '' is unknown"],
    "--blocks=0": ["--blocks", "'0'", "1 or more"],
    "--blocks=²": ["--blocks", "'²'", "1 or more"],
    "--minutes=0": ["--minutes", "'0'", "such as 5"],
    "--memory-budget=much": ["--memory-budget", "'much'", "512MB"],
    "--pt-python=/no/such/python": ["--pt-python", "'/no/such/python'", "interpreter"],
    "--tf-python=true": ["--tf-python", "'true'", "interpreter"],
    "--tf-python=/": ["--tf-python", "'/'", "interpreter"],
    "--results={file}/below": ["--results", "/below", "can't be written", "folder"],
    "--technique=baseline --task=text-gpt": ["--technique baseline --task text-gpt", "leave"],
    "--variant=csr_80": ["--effort default leaves out --variant csr_80: give --effort full"],
    "--technique=averaging --effort=quick": ["leaves out --technique averaging: give --effort"],
}


@pytest.fixture(scope="module")
def refused(tmp_path_factory):
    """Every bad input on the real benchmarks: exit status, output, errors."""
    file = tmp_path_factory.mktemp("file") / "file"
    file.write_text("a file, which no folder can be in, whoever asks")
    common = ("bench/", *PLAIN)
    arguments = [[*common, *given.format(file=file).split(" ")] for given in BAD]
    for options in arguments:  # so that nothing is measured should one be accepted
        given = options[len(common)]
        options += [] if given.startswith("--results") else ["--collect-only"]
    return dict(zip(BAD, in_one_process(arguments, ROOT), strict=True))


@pytest.mark.parametrize("given", BAD)
def test_bad_input_is_one_clear_line_and_a_usage_error(refused, given):
    status, out, err = refused[given]
    assert status == pytest.ExitCode.USAGE_ERROR, out + err
    (line,) = err.strip().splitlines()
    assert line.startswith("ERROR: ")
    for word in BAD[given]:
        assert word in line
    for noise in ("Traceback", "INTERNALERROR", "elapsed"):
        assert noise not in out + err


def test_a_quick_run_names_what_takes_longer_only_where_nothing_was_named():
    options = [[], ["--technique=export"], ["-k", "export"]]
    common = ["bench/", *PLAIN, "--benchmark-only", "--plan", "--effort=quick"]
    for given, (status, out, err) in zip(
        options, in_one_process([common + given for given in options], ROOT), strict=True
    ):
        assert status == 0, err
        assert ("not in this run, but with" in out) == (not given), given


@pytest.mark.skipif(os.name != "posix", reason="a shell script")
def test_an_interpreter_is_found_by_its_command_and_ci_sees_no_progress(run, tmp_path):
    """And its framework's workers run under it."""
    used = tmp_path / "used"
    python = tmp_path / "my-python"
    python.write_text(f'#!/bin/sh\necho "$3" >> {used}\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    options = ("--tf-python=my-python", "--effort=quick", "--variant=good", "--blocks=2")
    found = run(*options, PATH=path, CI="true")
    assert found.status == 0, found.out
    assert "elapsed" not in found.err
    assert blocks(found.record) == 2  # as --blocks says
    assert {case.status for case in found.record.cases} == {"OK"}
    assert len(used.read_text().splitlines()) >= 3  # asked, described, parent
