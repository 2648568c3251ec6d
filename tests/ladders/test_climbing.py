"""A climb with planted rungs: all of it, interrupted at any run, resumed, and what it says."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace

import pytest
from msgspec import to_builtins
from msgspec.structs import replace as replaced

from bench.harness import isolated_measurements, machine
from bench.harness.durations import USUAL_BYTES
from bench.harness.folders import alone
from bench.ladders import climbing, command, report, rule, training
from bench.ladders.record import Conditions, Run, load
from bench.record import encode
from bench.report.svg import standalone
from shared.specs import parameter_count
from shared.utilization import Gpu
from tests.conftest import LIMITS
from tests.ladders.planted import LADDER, SHORT, metrics

pytestmark = pytest.mark.timeout(300)
BLOCKS = 2


def begin(folder, frameworks=("pt", "tf"), blocks=BLOCKS):
    record = climbing.new_record(LADDER, frameworks=[*frameworks], blocks=blocks, command="test")
    folder.mkdir(exist_ok=True)
    return record


def climb(record, folder, results, ladder=LADDER, **settings):
    said = []
    given = {"say": said.append, "limits": LIMITS} | settings
    ended = climbing.Climb(ladder, record, folder, results / "data", **given).measure()
    return ended, said


@pytest.fixture(scope="module")
def whole(fakes_in_module, results_folder, tmp_path_factory):
    """A climb from the bottom to the top, and where it is."""
    folder = tmp_path_factory.mktemp("climb")
    record = begin(folder)
    ended, _ = climb(record, folder, results_folder)
    assert ended
    return record, folder


def by_place(runs):
    return {(*run.pair, run.rungs): (run.status, to_builtins(run.metrics)) for run in runs}


def killed(run):
    return run.but(status="FAILED", reason="probe: it was killed", metrics={})


def test_a_climb_leaves_out_what_hurts_and_writes_it_down(whole):
    record, folder = whole
    assert (folder / climbing.FILE).read_bytes() == encode(record) == encode(load(folder))
    assert record.finished
    steps = rule.climb(LADDER, record.runs, "pt", BLOCKS)
    states = {step.rung.name: step.state for step in steps}
    assert (states["quick"], states["slow"], states["broken"]) == ("kept", "left out", "failed")
    (reason,) = {s.reason for s in steps if s.state == "failed"}
    assert "it broke" in reason
    stages = list(dict.fromkeys(r.stage for r in record.runs))
    assert stages == [*(rung.name for rung in LADDER.rungs), rule.PARTS]


def test_pairs_stand_next_to_each_other_and_turn(whole):
    record, _ = whole
    order = [(r.block, r.framework, len(r.rungs)) for r in record.runs][:8]
    assert order == [
        (0, "pt", 0), (0, "pt", 1), (0, "tf", 0), (0, "tf", 1),
        (1, "tf", 1), (1, "tf", 0), (1, "pt", 1), (1, "pt", 0),
    ]  # fmt: skip


def test_programs_of_a_pair_take_turns_epoch_by_epoch(fakes_in_module, results_folder, tmp_path):
    """In the other direction each time, and those of the other framework after them."""

    def materialise(folder, task):
        arrays, settings = LADDER.materialise(folder, task)
        return arrays, settings | {"turns": str(tmp_path / "turns")}

    record = begin(tmp_path, blocks=1)
    ladder = replace(LADDER, rungs=LADDER.rungs[:1], materialise=materialise)
    climbing.Climb(
        ladder, record, tmp_path, results_folder / "data", say=print, limits=LIMITS
    ).measure()
    turns = (tmp_path / "turns").read_text().splitlines()
    pair = ["plain", "quick", "quick", "plain", "plain", "quick"]
    assert turns[: 2 * len(pair)] == pair * 2
    # In the end plain, the part alone (which is the stack and the top, too).
    assert turns[2 * len(pair) :] == pair * 2
    assert [run.status for run in record.runs] == ["OK"] * 8


def test_only_programs_that_fit_into_memory_are_alive_together(
    fakes_in_module, results_folder, tmp_path, monkeypatch
):
    """Each holds 1 GB beside what it has imported: of the four in the end two fit."""
    together = []

    def in_turns(processes, cases, **given):
        together.append([case.variant.name for case in cases])
        return real(processes, cases, **given)

    real = isolated_measurements.probes_in_turns
    monkeypatch.setattr(isolated_measurements, "probes_in_turns", in_turns)
    monkeypatch.setattr(machine, "free_memory", lambda: 2.6 * (10**9 + USUAL_BYTES))
    record = begin(tmp_path, frameworks=("pt",), blocks=1)
    rungs = tuple(rung for rung in LADDER.rungs if rung.name in ("quick", "last"))
    ladder = replace(LADDER, rungs=rungs)
    climbing.Climb(
        ladder, record, tmp_path, results_folder / "data", say=print, limits=LIMITS
    ).measure()
    assert max(map(len, together)) == 2
    ended = together[-2] + together[-1]
    assert sorted(ended) == ["last", "plain", "quick", "quick+last"]
    assert all(run.status == "OK" for run in record.runs)


@pytest.fixture(scope="module")
def failing(fakes_in_module, results_folder, tmp_path_factory):
    """A climb whose first rung diverges and whose last one fails late, and where it is."""
    folder = tmp_path_factory.mktemp("failing")
    record = begin(folder, frameworks=("pt",), blocks=1)
    quick = LADDER.rungs[0]
    diverging, late = (replace(quick, name=name, title=name) for name in ("diverging", "late"))
    ladder = replace(LADDER, rungs=(diverging, quick, late))
    climb(record, folder, results_folder, ladder)
    return ladder, record, folder


def test_a_program_that_fails_between_its_turns_leaves_the_others_theirs(failing):
    _, record, _ = failing
    failed = [run for run in record.runs if run.status == "FAILED"]
    assert [run.rungs for run in failed] == [("quick", "late")]
    assert "too late" in failed[0].reason
    beside = next(r for r in record.runs if r.stage == "late" and r.rungs == ("quick",))
    assert beside.status == "OK"
    assert beside.value("iteration") > 0


def test_a_program_whose_quality_is_no_number_has_failed_and_the_climb_goes_on(failing):
    ladder, record, folder = failing
    steps = rule.climb(ladder, load(folder).runs, "pt", 1)
    told = {step.rung.name: (step.state, step.reason) for step in steps}
    assert told.pop("late")[0] == "failed"
    assert told == {"diverging": ("failed", "its quality is no number"), "quick": ("kept", None)}
    assert "failed: diverging, late." in report.as_text(ladder, record)


def test_what_failed_in_the_end_is_said(whole):
    record, _ = whole
    run = next(r for r in record.runs if r.stage == rule.PARTS and r.rungs == ("quick",))
    runs = [killed(each) if each is run else each for each in record.runs]
    said = report.as_text(LADDER, replaced(record, runs=runs), 1000)
    assert "In the end PyTorch's quick: probe: it was killed." in said
    assert "In the end" not in report.as_text(LADDER, record, 1000)
    alone = [each.but(together=1) for each in record.runs]
    assert "ran after each other" in report.as_text(LADDER, replaced(record, runs=alone), 1000)


def test_frameworks_on_unlike_devices_are_not_compared(whole):
    record, _ = whole
    environment = record.environment.but(devices={"pt": "cuda:0", "tf": "cpu"})
    said = report.as_text(LADDER, replaced(record, environment=environment), 1000)
    assert "they are not compared" in said
    assert "PyTorch / TensorFlow, time" not in said


def test_a_climb_that_ends_before_it_begins_can_be_taken_up(results_folder, tmp_path, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(isolated_measurements, "describe", interrupt)
    record = begin(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        climb(record, tmp_path, results_folder)
    assert load(tmp_path).runs == []


def test_a_climb_that_was_interrupted_goes_on_to_the_same_end(
    whole, fakes_in_module, results_folder, tmp_path
):
    """In the middle of a pair, whose runs are then made together again; of two rungs.

    So are those of which one had failed.
    """
    record, number = begin(tmp_path), 7
    lines = []

    def say(line):
        lines.append(line)
        if sum(line.startswith("  ") for line in lines) == number:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        climb(record, tmp_path, results_folder, SHORT, say=say)
    left = load(tmp_path)
    assert len(left.runs) == number
    assert not left.finished
    left.runs[4] = killed(left.runs[4])
    left.resumed.append("now")
    ended, _ = climb(left, tmp_path, results_folder, SHORT)
    assert ended
    names = {rung.name for rung in SHORT.rungs}
    both = [[run for run in each.runs if run.stage in names] for each in (left, whole[0])]
    assert by_place(both[0]) == by_place(both[1])
    resumed, straight = ([(run.block, run.rungs) for run in runs] for runs in both)
    assert resumed == straight
    parts = [run for run in left.runs if run.stage == rule.PARTS]
    assert parts
    assert all(
        to_builtins(run.metrics) == to_builtins(metrics(run.rungs, run.block)) for run in parts
    )


def test_a_pair_that_failed_before_does_not_hide_one_that_was_cut_off(
    whole, fakes_in_module, results_folder, tmp_path
):
    record = begin(tmp_path)
    record.environment, record.task, record.resumed = whole[0].environment, whole[0].task, ["now"]
    record.runs = whole[0].runs[:7]
    record.runs[2] = killed(record.runs[2])
    ended, _ = climb(record, tmp_path, results_folder, replace(LADDER, rungs=LADDER.rungs[:1]))
    assert ended
    pairs = [run.together for run in record.runs if run.stage == "quick"]
    assert pairs == [2] * 8


def test_what_is_left_follows_the_plan_first_and_then_what_runs_took(tmp_path):
    record = begin(tmp_path)
    climbed = climbing.Climb(LADDER, record, tmp_path, tmp_path, say=print)
    # Two programs a rung, each part alone, plain, their stack and the top; TensorFlow has one less.
    planned = (2 * 7 + 6 + 3 + 2 * 6 + 5 + 3) * BLOCKS
    assert climbed.left_s() == planned * LADDER.seconds
    fields = {"stage": "", "block": 0, "framework": "pt", "rungs": (), "status": "OK"}
    fields |= {"reason": None, "metrics": {}, "evidence": None}
    record.runs = [Run(**fields, seconds=seconds) for seconds in (3.0, 5.0)]
    assert climbed.left_s() == (planned - 2) * 4.0
    record.runs *= planned
    assert climbed.left_s() == 0


def test_a_climb_ends_in_time(fakes_in_module, results_folder, tmp_path):
    record = begin(tmp_path, blocks=1)
    ended, _ = climb(record, tmp_path, results_folder, minutes=1e-6)
    assert not ended
    assert not load(tmp_path).finished


def test_a_climb_is_gone_on_with_by_one_process(tmp_path):
    record = begin(tmp_path, blocks=1)
    with alone(tmp_path), pytest.raises(ValueError, match="another process is still measuring it"):
        climb(record, tmp_path, tmp_path)
    with alone(tmp_path):  # it lets go
        pass


def test_a_climb_does_not_go_on_under_other_conditions(
    whole, fakes_in_module, results_folder, tmp_path
):
    shutil.copy(whole[1] / climbing.FILE, tmp_path)
    record = load(tmp_path)
    record.environment = record.environment.but(cpu="another")
    with pytest.raises(ValueError, match="since the run began: cpu was another"):
        climb(record, tmp_path, results_folder)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "not JSON"),
        ("{}", "not a record of a ladder: object missing required field `ladder`"),
        ('{"schema_version": 1, "ladder": "planted"}', "missing required field `command`"),
        ('{"schema_version": 1, "ladder": 1}', "ladder: expected `str`"),
        (None, "No such file"),
    ],
)
def test_a_damaged_record_is_refused_in_one_line(tmp_path, text, said):
    if text is not None:
        (tmp_path / climbing.FILE).write_text(text)
    with pytest.raises(ValueError, match=said) as caught:
        load(tmp_path)
    assert "\n" not in str(caught.value)


# What it says -------------------------------------------------------------------------------------


def test_tables_show_every_rung_with_the_rule_and_the_promise(whole):
    page = report.as_markdown(LADDER, whole[0]).replace("\\", "")
    assert page.startswith("# Planted\n\n![Planted](ladder.svg)")
    for words in ("hurts: left out (time of an iteration", "changes nothing (it takes care)"):
        assert words in page
    for words in ("it broke", "agree", "product: what the parts promise", "their stack gave"):
        assert words in page
    assert all(heads in page for heads in ("iteration ÷ plain", "memory ÷ plain"))
    for width in (80, 100):
        said = report.as_text(LADDER, whole[0], width)
        assert max(map(len, said.splitlines())) <= width
        assert all(rung.title in said for rung in LADDER.rungs)


def test_the_answer_comes_first_in_both_frameworks(whole):
    record, _ = whole
    ours, theirs, ahead, conditions, *_ = report.content(LADDER, record)
    # Of quick and of lean, which takes more time, two pairs settle no accuracy.
    takes = r"lean \(takes 1\.2\d times the time\)"
    settled = rf"use: wise, last; a gain, but accuracy not settled: quick, {takes}; leave out: "
    assert re.match(f"PyTorch: {settled}", ours)
    assert "failed: broken." in ours
    assert re.match(f"TensorFlow: {settled}", theirs)
    assert "careless" not in theirs  # it changes nothing there
    climbs = report.climbs_of(LADDER, record)
    for said, (framework, steps) in zip((ours, theirs), climbs.items(), strict=True):
        for figure in ("iteration", "memory", "latency"):
            top = rule.top_ratio(record.runs, framework, steps, figure)
            assert report.ratio(top.ratio, top.ci) in said
        assert "Its accuracy changed by " in said
    assert ahead.startswith(
        "PyTorch / TensorFlow, time of an iteration, run anew in the end: plain"
    )
    assert conditions.startswith("Planted, small CNN on digits, batch ")


def test_what_helps_is_not_advised_where_its_quality_is_not_settled(whole):
    record, _ = whole
    steps = report.climbs_of(LADDER, record)["pt"]
    (quick,) = [step for step in steps if step.rung.name == "quick"]
    assert quick.helps
    for low, said in ((-0.9, "use: quick"), (-1.1, "a gain, but accuracy not settled: quick")):
        step = replace(quick, quality=replace(quick.quality, low=low, high=2.0))
        assert report._answer(LADDER, record, "pt", [step]).startswith(f"PyTorch: {said}.")


def test_what_others_published_stands_beside_the_top_of_the_ladder(whole):
    record, _ = whole
    page = report.as_markdown(LADDER, record)
    (line,) = [line for line in page.splitlines() if "before → after" in line]
    steps = rule.climb(LADDER, record.runs, "pt", BLOCKS)
    top = rule.promises(record.runs, "pt", steps)["iteration"].top
    assert "a machine, a source" in line
    assert "0.500" in line
    assert report.ratio(top.ratio, top.ci) in line
    assert f"beside this climb on {record.environment.cpu}" in page
    assert "+2" in next(line for line in page.splitlines() if "| points" in line)


def test_a_gpu_is_named_beside_the_processor(whole):
    environment = Conditions(cpu="a processor", gpu={"name": "a GPU"})
    said = report.as_text(LADDER, replaced(whole[0], environment=environment))
    assert "beside this climb on a processor with a GPU" in said


def test_the_picture_has_both_frameworks_side_by_side(whole):
    chart = report.picture(LADDER, whole[0])
    marks = [shape for shape in chart.shapes if shape.kind == "mark"]
    assert {mark.symbol for mark in marks} == {"pt", "tf"}
    left_out = [mark for mark in marks if mark.open]
    assert left_out  # slow is shown, and told from what stays
    assert len(left_out) < len(marks)
    quick = [m for m in marks if m.tip == f"PyTorch: {report.number(ratio_of(whole, 'quick'))}"]
    slow = [m for m in marks if m.tip == f"PyTorch: {report.number(ratio_of(whole, 'slow'))}"]
    assert quick[0].x < slow[0].x  # faster stands left
    assert not quick[0].open
    assert slow[0].open
    assert standalone(chart).startswith("<svg")
    assert 'class="mark plain open"' in standalone(chart)  # as the key shows what does not stay
    labels = [shape.text for shape in chart.shapes if shape.kind == "label"]
    assert all(rung.title in labels for rung in LADDER.rungs if rung.name != "broken")


def ratio_of(whole, name):
    steps = {s.rung.name: s for s in rule.climb(LADDER, whole[0].runs, "pt", BLOCKS)}
    return steps[name].plain_by["iteration"].ratio


def test_a_record_without_runs_has_no_picture_and_says_so(tmp_path):
    record = begin(tmp_path)
    assert report.picture(LADDER, record) is None
    assert "Not finished" in report.as_text(LADDER, record)


@pytest.mark.parametrize("name", sorted(command.LADDERS.keys() - {"domain_adaptation"}))
def test_on_a_gpu_a_ladder_trains_a_model_of_the_size_that_gpus_train(name):
    ladder = command.find(name)
    assert climbing.at_task(ladder, ladder.task) == ladder
    large = climbing.at_task(ladder, ladder.gpu_task)
    assert parameter_count(large.spec.model) > 2e7
    case = large.case(("mixed_precision",), "pt", {"seed": 0})
    assert case.workload.task == ladder.gpu_task
    assert case.variant.settings["batch_size"] == large.batch == large.spec.compute_batch


def test_the_busiest_gpu_is_that_of_the_training():
    idle = Gpu("0 idle", 0.0, 0.0, 0.0, 1.0, 1, 1)
    busy = Gpu("1 busy", 0.9, 1.0, 0.05, 1.0, 1, 1)
    part = Gpu("2 part", None, None, None, 1.0, 1, 1)
    found = training._busiest((idle, busy, part))
    assert {name: figure["value"] for name, figure in found.items()} == {
        "device_utilisation": pytest.approx(90.0),
        "device_fluctuation": pytest.approx(5.0),
    }
    assert training._busiest((part,)) == {}


# Command line -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nothing"], "ladder 'nothing' is unknown; choose from image_classification"),
        ([], "give the name of a ladder"),
        (["image_classification", "--blocks", "0"], "--blocks"),
        (["image_classification", "--minutes", "0"], "--minutes"),
        (["image_classification", "--minutes", "nan"], "--minutes"),
        (["--resume", "nowhere"], "nowhere"),
        (["image_classification", "--write"], "--write needs --show FOLDER"),
    ],
)
def test_what_cannot_be_climbed_is_one_clear_line(capsys, monkeypatch, tmp_path, arguments, said):
    monkeypatch.chdir(tmp_path)
    assert command.main(arguments) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_the_command_climbs_shows_and_goes_on(
    fakes_in_module, monkeypatch, results_folder, tmp_path, capsys
):
    monkeypatch.setitem(command.LADDERS, "planted", "tests.ladders.planted:SHORT")
    given = ["planted", "--blocks", "1", "--framework", "pt", "--results", str(results_folder)]
    assert command.main([*given, "--minutes", "0.00001"]) == 0
    folder = results_folder / "ladders" / "latest"
    assert not load(folder).runs
    assert "goes on" in capsys.readouterr().err
    monkeypatch.chdir(tmp_path)  # it goes on from anywhere, with the data that it began with
    assert command.main(["--resume", str(folder)]) == 0
    record = load(folder)
    assert record.finished
    assert not [*tmp_path.iterdir()]
    assert all(run.status == "OK" for run in record.runs)
    assert len(record.resumed) == 1
    assert (folder / "ladder.svg").read_text().startswith("<svg")
    assert (folder / "ladder.md").exists()
    shown = capsys.readouterr().out
    assert command.main(["--show", str(folder)]) == 0
    assert capsys.readouterr().out == shown
    for name in ("ladder.md", "ladder.svg"):
        before = (folder / name).read_text("utf-8")
        (folder / name).write_text("old")
        assert command.main(["--show", str(folder), "--write"]) == 0
        assert (folder / name).read_text("utf-8") == before
