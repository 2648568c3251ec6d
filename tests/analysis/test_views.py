"""README, report, terminal, page, `choose`, `priorities`, `try` and `diagnose` say one thing.

Each published record is asked the same question by each of them. What the default run's record says
is worked out once more, from its JSON, without `bench.analysis`.
"""

from __future__ import annotations

import html
import json
import re
from dataclasses import replace
from functools import cache
from itertools import product
from math import exp, log
from pathlib import Path
from statistics import fmean

import pytest

from bench import choose, diagnose, user_answer, user_code
from bench import priorities as priorities_command
from bench.analysis import questions
from bench.analysis.questions import REMEDIES, answers, remedies
from bench.analysis.ranking import GOALS, Limits, rank, works
from bench.analysis.reading import load
from bench.analysis.table import GAINED, MEMORY, RATE, SIZE, TIME, Table
from bench.harness.run_plan import techniques
from bench.record import FRAMEWORKS, encode
from bench.report import advised, content, page, readme
from bench.report.answer import decision_table, full_name, gain_of, lines, ratio_of, text, why
from bench.report.formatting import number
from bench.report.names import called, name_of, rounded
from bench.report.priorities import ends
from bench.report.priorities import text as priorities_text
from bench.report.tables import markdown
from shared.specs import TASKS, parameter_count
from tests.analysis.test_ranking import GAIN, KEPT, LOST, MORE, SLOWER, asked, fast, leaves, row
from tests.records import planted, whole_run, with_case

DOCS = Path(__file__).parents[2] / "docs"
PUBLISHED = [DOCS, DOCS / "recipes", DOCS / "recipes" / "averaging.json", DOCS / "gpu"]
EACH = pytest.mark.parametrize("path", PUBLISHED, ids=lambda path: path.name)
ENOUGH = 10_000  # columns, and lines, so that nothing is wrapped or left out


@cache
def read(path):
    return load(path)


@cache
def works_of(path):
    return works(read(path))


@cache
def answers_of(path):
    return answers(read(path), works_of(path))


@pytest.fixture(autouse=True)
def ranked_once(monkeypatch):
    """Works of a published record are made once: nothing here changes them."""

    def known(run):
        same = [path for path in PUBLISHED if read(path) is run]
        return works_of(same[0]) if same else works(run)

    for module in (choose, content, questions, readme, user_answer):
        monkeypatch.setattr(module, "works", known)


def named(side):
    """What a view of one framework has to name: a row that gains, or none."""
    return None if side.best.is_baseline else name_of(side.best.case, short=True)


# One question, every view -------------------------------------------------------------------------


def cells_of(markdown_text):
    """(aim, place) -> what is said of PyTorch, of TensorFlow, and of who is ahead."""
    rows = {}
    for line in markdown_text.splitlines():
        found = re.match(r"\| \*\*([a-z ]+)\*\*: (.*?) \| (.*) \| (.*) \| (.*) \|$", line)
        if found:
            aim, place, *cells = found.groups()
            place = re.sub(r", [\d.]+( thousand| million)? parameters(, [\w-]+)?$", "", place)
            rows.setdefault((aim, place), cells)
    return rows


def check_cells(path, rows):
    for answer in answers_of(path):
        *sides, ahead = rows[answer.question.aim, advised.place_of(answer)]
        for framework, cell in zip(FRAMEWORKS, sides, strict=True):
            side = answer.sides.get(framework)
            cell = re.sub(r"[*\\\[]|\]\([^)]*\)", "", cell)
            if side is None:
                assert cell == "not measured"
            elif named(side):
                assert cell.startswith(named(side)), cell
            else:
                assert cell.startswith("no gain shown") or ", but " in cell, cell
        assert ahead.replace("*", "").startswith(FRAMEWORKS.get(answer.ahead, ("no d", "not c")))


@EACH
def test_the_answers_and_the_report_name_the_best_of_each_framework_and_who_is_ahead(path):
    run = read(path)
    check_cells(path, cells_of(readme.every_answer([run])))
    check_cells(path, cells_of(markdown(run)))


@EACH
def test_the_terminal_names_them_too(path):
    listed = answers_of(path)
    told, rest = advised.split(listed)
    shown = advised.lines(listed, ENOUGH, ENOUGH)[1:]
    for answer in told or [one for one in rest if one.main]:
        for framework, side in answer.sides.items():
            mark = framework.upper() + advised.MARKS[answer.ahead == framework]
            best = named(side)
            begin = f"{mark} {best}:"
            assert any(line.lstrip().startswith(begin) for line in shown) or not best


@EACH
def test_choose_and_the_page_name_the_better_of_both_bests(path, capsys):
    whole = html.unescape(re.sub(r"<[^>]+>", "", page.html(read(path))))
    for goal in GOALS.values():
        of_goal = [work for work in works_of(path) if goal in work.goals]
        if not of_goal:
            continue
        rankings = choose.advise(read(path), goal.name, Limits())
        assert len(rankings) == len(of_goal)
        for ranking in rankings:
            work = next(work for work in of_goal if work.title == ranking.work.title)
            sides = [rank(work, goal, framework=side) for side in work.frameworks]
            best = min((side.best for side in sides if side), key=ranking.aim.level)
            assert ranking.best.case is best.case
            _, *said = text([ranking], ENOUGH)
            (line,) = [each for each in said if each[2:7] in ("best ", "first")]
            assert line[11:].startswith(f"{full_name(ranking.best)}: ")
            assert line[11:] in whole
            others = [side.best for side in sides if side and side.best.case is not best.case]
            other = [each[11:] for each in said if each.startswith("  other")]
            assert len(other) == len(others)
            assert all(o.startswith(f"{full_name(b)}:") for o, b in zip(other, others, strict=True))


@EACH
def test_a_question_and_choose_rank_a_framework_alike(path):
    """The aim's side is `rank` of its goal at this work: there is no other engine."""
    by_title = {work.title: work for work in works_of(path)}
    for answer in answers_of(path):
        for framework, side in answer.sides.items():
            again = rank(by_title[side.work.title], GOALS[answer.goal.name], framework=framework)
            assert again.best.case is side.best.case


@EACH
def test_priorities_lists_every_best_row_with_the_same_figure(path):
    said = "\n".join(priorities_text(read(path), [], ENOUGH))
    for answer in answers_of(path):
        name = answer.goal.figure
        for framework, side in answer.sides.items():
            if not named(side) or side.aim.provisional:
                continue
            of = [leaf for leaf in leaves(read(path), name)
                  if (leaf.question, leaf.framework) == (answer.question, framework)
                  and leaf.large in (None, answer.work.large)]  # fmt: skip
            assert side.best.case.id in {each.case.id for leaf in of for each in leaf.rows}
            first = of[0].rows[0]
            if name != GAINED:
                assert gain_of(first.ratios[name], name) in said


@EACH
def test_try_s_answer_is_choose_s_and_its_code_that_of_the_best_row(path):
    run = read(path)
    rankings = user_answer._rankings(run)
    goals = [GOALS[aim] for aim in user_answer.AIMS]
    wanted = [rank(work, g) for work in works_of(path) for g in goals if g in work.goals]
    assert [text([each], 80) for each in rankings] == [text([each], 80) for each in wanted]
    for kind, side in product(("train", "predict"), FRAMEWORKS):
        of_kind = [r for r in rankings if r.work.kind == kind and r.goal.figure == TIME]
        sides = [rank(each.work, each.goal, framework=side) for each in of_kind]
        sides = [each for each in sides if each and named(each) and not each.aim.provisional]
        first = min(sides, key=lambda each: each.work.batch_size, default=None)
        best = [first.best.case] if first else []
        assert user_code.gaining(rankings, side, kind)[:1] == best


@EACH
def test_diagnose_names_rows_that_gain_in_the_ranking_with_the_same_figure(path):
    for bottleneck, framework in product(REMEDIES, FRAMEWORKS):
        goal, kinds = REMEDIES[bottleneck]
        gaining = {
            gained.case.id: (ranking, gained)
            for work in works_of(path)
            if work.kind in kinds and (ranking := rank(work, GOALS[goal], framework=framework))
            for gained in ranking.gaining
            if bottleneck in gained.case.remedies and not ranking.aim.provisional
        }
        found = remedies(read(path), framework, bottleneck)
        assert {one.row.case.id for one in found} <= gaining.keys()
        first = {one.work.title: one.row.case.id for one in reversed(found)}
        for ranking, gained in gaining.values():
            assert first[ranking.work.title] in gaining
            if gained is ranking.best and not ranking.alike:
                assert first[ranking.work.title] == gained.case.id
        for one in found:
            figure = gain_of(one.row.ratios[one.goal.figure], one.goal.figure)
            assert figure in diagnose.sentence(one)


def test_a_row_s_time_ratio_and_rate_are_printed_alike_everywhere():
    """In the tables of its technique, in those of decisions, by `choose` and by `priorities`."""
    run = read(DOCS)
    report = markdown(run)
    seen = dict.fromkeys((TIME, "ratio", RATE), 0)
    for work in works_of(DOCS):
        heads = [column.head for column in decision_table(work).columns]
        cells = {
            cells[0]: dict(zip(heads, cells, strict=True)) for cells in decision_table(work).rows
        }
        for each in work.rows:
            mine, case = cells[full_name(each)], each.case
            technique = report[report.index(f"\n## {run.techniques[case.technique].title}") :]
            technique = technique.partition("\n## ")[2].partition("\n## ")[0]
            for name, head in ((TIME, "time [ms]"), (RATE, "samples/s")):
                if name in each.figures and (name == TIME or TIME not in each.figures):
                    assert (
                        number(each.figures[name].value * (1e3 if name == TIME else 1))
                        == (re.match(r"[\d.,]*\d", mine[head])[0])
                    )
                    seen[name] += mine[head].partition(",")[0] in technique
            if TIME in each.ratios:
                ratio = ratio_of(each.ratios[TIME])
                assert mine["÷ own baseline"].split()[0] == ratio.split()[0]
                seen["ratio"] += ratio in technique
    assert seen[TIME] > 60
    assert seen["ratio"] > 40


# The published record, worked out from its JSON ---------------------------------------------------

RAW = json.loads((DOCS / "results.json").read_text("utf-8"))
BY_ID = {case["id"]: case for case in RAW["cases"]}
SIDES = [(answer, side) for answer in answers_of(DOCS) for side in answer.sides.values()]


def keeps_accuracy(case):
    """By the bound of the interval, or by the first losses.

    Where a case has neither, its variant at another workload may show it.
    """
    if case["role"] == "baseline":
        return True
    task = RAW["tasks"][case["task"]]
    same = ("technique", "variant", "framework", "flavour")
    kin = [c for c in RAW["cases"] if all(c.get(k) == case.get(k) for k in same)]
    for other in [case, *(c for c in kin if c["task"] == case["task"])]:
        if other["accuracy"] and other["accuracy"]["difference"]:
            low, high = other["accuracy"]["difference"]["ci"] or (-1e9, 1e9)
            worst = low if task["metric"] == "accuracy" else -high
            return worst >= -task["margin"]
    return any(_same_losses(other) for other in [case, *kin])


def _same_losses(case):
    pair = [(c["certificate"] or {}).get("losses") for c in (case, own_baseline(case))]
    bar = 1e-5  # what float32 rounds; bfloat16 was seen at 9e-5
    return None not in pair and all(
        abs(a - b) <= bar * abs(b)
        for a, b in zip(*pair, strict=False)  # of slow steps one may have fewer
    )


def own_baseline(case):
    keys = ("technique", "task", "batch_size", "mode", "framework", "flavour")
    bases = (c for c in RAW["cases"] if c["role"] == "baseline")
    return next(c for c in bases if all(c[k] == case[k] for k in keys))


def by_blocks(case):
    """Match and block -> the samples."""
    every = BY_ID[case.get("program") or case["id"]]["timing"]["step_s"]
    return {(m, b): samples for m, blocks in every.items() for b, samples in blocks.items()}


def fastest(samples):
    """The mean of the fastest third, of two at least."""
    return fmean(sorted(samples)[: max(2, round(len(samples) / 3))])


def time_ratio(one, other):
    """The geometric mean over joint blocks of the ratio of times; None where they share none."""
    ours, theirs = by_blocks(one), by_blocks(other)
    joint = [log(fastest(ours[k]) / fastest(theirs[k])) for k in ours.keys() & theirs.keys()]
    return exp(fmean(joint)) if joint else None


def raw_figure(case, name):
    if name == SIZE:
        return case["artifact_bytes"]
    if name == RATE:
        return case["metrics"]["samples_per_s"]["value"]
    return case["memory"]["above_import_bytes"]


def test_every_gain_is_that_of_the_raw_samples():
    seen = dict.fromkeys((TIME, SIZE, RATE, MEMORY, GAINED), 0)
    for answer, side in SIDES:
        name = answer.goal.figure
        for gaining in (*side.gaining, *side.tempting):
            case, ratio = BY_ID[gaining.case.id], gaining.ratios[name]
            base = own_baseline(case)
            if name == TIME:
                expected, wide = time_ratio(case, base), 0.05
            elif name == GAINED:
                seeds = [c["accuracy"]["per_seed"] for c in (case, base)]
                expected, wide = fmean(a - b for a, b in zip(*seeds, strict=False)), 1e-6
            else:
                expected, wide = raw_figure(case, name) / raw_figure(base, name), 1e-6
            if expected is not None:
                seen[name] += 1
                assert ratio.value == pytest.approx(expected, rel=wide), case["id"]
                assert ratio.low <= ratio.value <= ratio.high
    assert all(seen.values()), seen


def test_only_what_gains_and_keeps_accuracy_is_named():
    for answer, side in SIDES:
        name = answer.goal.figure
        for gaining in (side.best, *side.gaining):
            case, ratio = BY_ID[gaining.case.id], gaining.ratios.get(name)
            if not gaining.is_baseline:
                more = name in (GAINED, RATE, "largest_batch")
                bar = 0 if name == GAINED else 1.03 if more else 1 / 1.03
                assert ratio.low > bar if more else ratio.high < bar, case["id"]
            if answer.work.kind in ("train", "predict", "update"):
                assert keeps_accuracy(case), case["id"]
        assert not any(keeps_accuracy(BY_ID[each.case.id]) for each in side.tempting)


def test_nothing_that_gains_and_keeps_accuracy_is_better_than_what_is_named():
    """By the figures themselves: a better one was either not told apart or takes more to get."""
    for answer, side in SIDES:
        if answer.goal.figure != TIME or not named(side):
            continue
        chosen = BY_ID[side.best.case.id]
        keys = ("task", "batch_size", "mode", "framework")
        alike = {other.case.id for other in side.alike}
        for case in RAW["cases"]:
            rival = case["status"] == "OK" and case["role"] == "variant"
            rival = rival and all(case[k] == chosen[k] for k in keys) and case["timing"]["ci_s"]
            if rival and case["id"] not in alike and keeps_accuracy(case):
                assert case["timing"]["median_s"] >= chosen["timing"]["median_s"], case["id"]


def test_who_is_ahead_is_so_in_the_raw_samples():
    seen = 0
    for answer in answers_of(DOCS):
        if answer.goal.figure != TIME or not answer.between:
            continue
        pair = [BY_ID[side.best.case.id] for side in answer.sides.values()]
        if (ratio := time_ratio(*pair)) is None:
            continue
        seen += 1
        between = answer.between
        assert between.value == pytest.approx(ratio, rel=0.06)
        if answer.ahead is None:  # that a ratio is within 3% was not excluded
            assert not between.bounds or (between.low <= 1.03 and between.high >= 1 / 1.03)
        elif not 0.95 < ratio < 1.05:
            assert answer.ahead == ("pt" if ratio < 1 else "tf")
    assert seen > 5


@EACH
def test_brackets_hold_the_bounds_of_an_interval_and_nothing_else(path):
    table = Table(read(path))
    for work in works_of(path):
        for goal in work.goals:
            if found := rank(work, goal):
                for each in (found.best, *found.placed("equal", "worse", "next")):
                    figure, case = found.aim.figure(each), each.case
                    said = found.goal.unit + text([found], ENOUGH, every=True)[1]
                    if figure.kind == "interval":
                        pairs = [case.timing.ci_s, *(m.ci for m in case.metrics.values())]
                        pairs += [case.memory.above_import_ci] if case.memory else []
                        pairs += [case.accuracy.difference.ci] if goal.figure == GAINED else []
                        assert (figure.low, figure.high) in pairs
                    if goal.figure == SIZE:
                        assert not re.search(r" MB \(", said)
                    assert table.value(case, goal.figure)[0] or each.repeats or each.is_baseline


def test_for_few_steps_the_compiler_is_not_repaid():
    for steps in (1000, 100_000):
        totals = {
            case["id"]: first + (steps - 1) * case["timing"]["median_s"]
            for case in RAW["cases"]
            if (case["task"], case["batch_size"], case["mode"]) == ("digits-cnn", 128, "train")
            and case["status"] == "OK"
            and case["timing"]["median_s"]
            and (first := case["timing"]["cold_first_call_s"])
            and keeps_accuracy(case)
        }
        (found,) = [each for each in choose.advise(read(DOCS), "train-speed", Limits(steps=steps))
                    if each.work.title == "digits-cnn, batch 128, train step"]  # fmt: skip
        assert found.best.case.id == min(totals, key=totals.get)
        assert ("compiled" in found.best.case.variant) == (steps > 1000)


def test_large_and_small_models_and_single_samples_are_shown():
    shown = advised.split(answers_of(DOCS))[0]
    for aim in ("train faster", "predict faster", "train in less memory", "ship a smaller file"):
        large = [parameter_count(TASKS[each.work.task].model) >= 1e6
                 for each in shown if each.question.aim == aim]  # fmt: skip
        predicts = aim == "predict faster"  # of one sample, and of a batch
        assert large == ([True, True, False, False] if predicts else [True, False])
    places = {advised.place_of(each) for each in shown if each.question.aim == "predict faster"}
    assert {f"small CNN on digits, batch {size}" for size in (1, 128)} <= places


def test_of_two_rows_of_one_program_the_one_that_takes_less_is_named():
    """Rounding after training predicts as rounding in training does; each keeps its accuracy."""
    name = "quantization_aware_training"
    programs = {v.name: v.program for v in techniques()[name].variants}
    assert programs["qat_8"] == programs["ptq_8"] is not None
    run = read(DOCS)
    run = run.but(cases=[case for case in run.cases if case.technique == name])
    (answer,) = [each for each in answers(run) if each.question.aim == "predict faster"]
    for side in answer.sides.values():
        assert (side.best.case.variant, side.best.price) == ("ptq_8", "calibration")
        assert [each.case.variant for each in side.alike] == ["qat_8"]


# Words --------------------------------------------------------------------------------------------


def sentence(answer):
    return " ".join(advised.sentence(answer, answer.sides["pt"]))


def shown_lines(*asked):
    return " ".join(" ".join(advised.lines(list(asked), 80, 12)).split())


def test_what_keeps_accuracy_is_named_and_what_does_not_is_said():
    dear = row("mixed_precision", time=MORE, accuracy=LOST)
    answer = asked("train faster", row(time=GAIN), dear)
    ((_, cell, _, _),) = advised.brief([answer]).rows
    assert cell.startswith("changed: 1.67x (1.61–1.72)")
    assert "; changed: 2.00x (1.92–2.08), but accuracy -3.00 ± 0.50 points" in cell
    said = sentence(asked("train faster", dear))
    assert "2.00 times as fast (1.92–2.08)" in said
    assert ", but accuracy -3.00 ± 0.50 points" in said


def test_a_row_s_price_is_said_in_time_in_training_and_beside_a_cheaper_one():
    slow = row("activation_checkpointing", time=SLOWER, peaks=[0.5, 0.51, 0.5])
    said = sentence(asked("train in less memory", slow))
    assert "50% less memory (" in said
    assert "takes 1.20 times the time (1.10–1.30)" in said
    dear = row("pruning", time=MORE, accuracy=KEPT)
    said = sentence(asked("train faster", dear, row("memory_format", time=GAIN)))
    assert "takes 4 epochs of training" in said
    assert "easier to get: changed (memory format), 1.67x (1.61–1.72)" in said


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([row(time=(17.0, 16.0, 18.0))], "no gain shown (1 tried)"),
        ([row(time=SLOWER), row("memory_format", time=SLOWER)], "no gain shown (2 tried)"),
        ([row(time=(17.0,))], "no gain shown (1 tried, one block, no interval)"),
    ],
)
def test_where_nothing_gains_the_terminal_says_how_many_were_tried(rows, said):
    answer = asked("train faster", *rows)
    assert not answer.tells
    told = advised.lines([answer], ENOUGH, 12)
    assert told[0] == advised.NOTHING
    assert said in " ".join(told)
    assert "shown to gain" in advised.lines([], 80, 9)[0]


def test_a_larger_batch_has_words():
    finder = row("batch_size_finder", "bf16", metrics={"largest_batch": (210, 100)})
    assert "PT: bf16: 2.10x the largest batch, measured 2.00" in shown_lines(
        asked("train in less memory", finder)
    )
    less = finder | {"metrics": {"largest_batch": (80, 100)}}
    assert sentence(asked("train in less memory", less)).startswith("no gain shown (1 tried")


def test_who_is_ahead_says_where_plain_code_is_compared():
    """README compares plain code too: what differs from it has to say what it compares."""
    for answer in answers_of(DOCS):
        unnamed = [side for side in answer.sides.values() if not advised.named(side)]
        if answer.between and answer.between.bounds:
            parts = 1 + bool(answer.ahead) + bool(unnamed)
            words = [part for part in advised.ahead(answer) if part != advised.UNLIKE]
            assert len(words) == parts, answer.question.aim


def test_a_range_with_a_negative_end_is_told_from_a_dash():
    memory = asked("train in less memory", row("activation_checkpointing", peaks=[0.5, 0.51, 0.5]))
    wide = replace(memory.sides["pt"].best.ratios[MEMORY], value=0.98, low=0.87, high=1.10)
    assert advised.gained(wide, memory.goal, short=True) == "2% less (−10 to 13)"


def test_every_task_has_one_plain_name():
    names = [called(task) for task in TASKS]
    assert all(name != task for name, task in zip(names, TASKS, strict=True))
    assert len(set(names)) == len(names)
    assert called("my_model") == "my_model"


def test_the_terminal_s_lines_fit_each_aim_comes_before_any_twice_and_the_rest_is_counted():
    listed = answers_of(DOCS)
    told, _ = advised.split(listed)
    for width, room in product((60, 80, 100), (6, 12, 23, 60)):
        shown = advised.lines(listed, width, room)
        assert len(shown) <= room
        assert max(map(len, shown)) <= width
        more = re.findall(r"… and (\d+) more", shown[-1])
        aims = sum(re.match(r"[a-z ]{10,25}: ", line) is not None for line in shown)
        assert aims + sum(map(int, more)) == len(told)
    shown = advised.lines(listed, 80, 40)
    assert all(any(line.startswith(each.question.aim) for line in shown) for each in told)


def labelled(run, goal="train-speed", **limits):
    (found,) = choose.advise(run, goal, Limits(**limits))
    return found, dict(lines(found, every=True)), dict(lines(found))


def test_choose_labels_what_is_perhaps_better_what_is_left_out_and_why():
    lossy = row("pruning", "lossy", time=(0.4, 0.39, 0.41), accuracy=LOST)
    unknown = row("mixed_precision", "unknown", time=MORE, changes_math=True)
    found, every, brief = labelled(fast(row(time=GAIN), lossy, unknown))
    assert brief["best"].startswith("PyTorch changed (compilation): 6.00 ms (5.80–6.20); 1.67 ")
    assert "times as fast (1.61–1.72); same work; takes first call 0.500 s" in brief["best"]
    assert re.search("unknown.*; accuracy not measured; takes ", brief["perhaps"])
    assert every["left out"].endswith("accuracy -3.00 ± 0.50 points: loses accuracy")
    assert every["worse"].startswith("PyTorch base (baseline of ")
    assert re.search(
        r"lossy \(pruning\) has 4.00 ms .* but loses accuracy: .*; \d shown", why(found)
    )
    lacking = with_case(fast(row(time=GAIN)), "/changed", memory=None)
    (found,) = choose.advise(lacking, "memory", Limits())
    assert ("left out", "PyTorch changed (compilation): its figure was not measured") in lines(
        found, every=True
    )


def test_what_was_faster_in_one_block_says_so_and_why_it_is_not_named():
    once = row(time=(0.6,), changes_math=True)
    said = sentence(asked("train faster", once))
    assert "1.67 times as fast" in said
    assert "one block, no interval, but accuracy not measured" in said
    (found,) = choose.advise(fast(once), None, Limits())
    assert dict(lines(found))["perhaps"].startswith("PyTorch changed (compilation): 6.00 ms")


def test_one_block_gives_a_first_and_an_order_and_no_best(command):
    status, said = command(whole_run("quick"), "--goal", "train-speed", "--task", "digits-cnn")
    out = " ".join(said.out.split())
    assert status == 0
    assert "time of a train step (provisional: one block, no interval) first PyTorch fp32" in out
    assert "in order of one block's times" in out
    assert "best" not in out.replace("times the best", "")


def test_a_name_is_in_plain_words_with_its_technique_once():
    cases = {case.id: case for case in read(DOCS).cases}
    stacked = cases["stacking/digits-cnn-128/pt/2_compiled"]
    assert name_of(stacked) == "channels_last + compile (stacking)"
    assert name_of(cases["tuned_folder/photos-32/pt/tuned"]) == "tuned folder"
    dense = cases["pruning/digits-cnn-128/pt/dense"]
    assert name_of(dense, others=9) == "dense (baseline of pruning and 9 more)"
    assert name_of(dense, short=True) == "dense"
    counts = [rounded(count) for count in (12, 999, 24_310, 10_020_000)]
    assert counts == ["12", "999", "24 thousand", "10 million"]


def test_ends_of_the_path_have_figure_accuracy_and_what_did_not_gain():
    (leaf,) = leaves(planted(row("mixed_precision", "bf16", time=MORE, changes_math=True)))
    assert ends(leaf) == ["none advised: 1 with a gain, but not shown to keep accuracy"]
    (leaf,) = leaves(planted(row("mixed_precision", "bf16", time=MORE)))
    assert ends(leaf) == [
        "bf16 (mixed precision), small CNN on digits, batch 64: 2.00 times as "
        "fast (1.92–2.08); same work"
    ]
    finder = row("batch_size_finder", "bf16", metrics={"largest_batch": (200, 100)})
    (leaf,) = leaves(planted(finder), "largest_batch")
    assert ends(leaf)[0].endswith("2.00 times the largest batch, measured 1.90–2.10")


# Commands -----------------------------------------------------------------------------------------


@pytest.fixture
def command(tmp_path, capsys):
    def go(run, *options, of=choose):
        path = tmp_path / "results.json"
        path.write_bytes(encode(run))
        status = of.main([str(path), *options])
        return status, capsys.readouterr()

    return go


@pytest.mark.parametrize("options", [[], ["--all"], *(["--goal", goal] for goal in GOALS)])
def test_choose_holds_80_columns(capsys, options):
    assert choose.main([str(DOCS), *options]) in (0, 2)
    assert all(len(line) <= 80 for line in capsys.readouterr().out.splitlines())


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--goal", "size"], "no row of this run has a size on disk"),
        (["--goal", "throughput"], "no row of this run has samples per second"),
        (["--goal", "batch"], "no row of this run has a largest batch that fits"),
        (["--goal", "latency"], "it may have timed no predictions"),
        (["--goal", "memory", "--memory-budget", "1KB"], "within the limits"),
        (["--task", "nothing"], "'nothing' is unknown; choose from digits-cnn, text-gpt"),
    ],
)
def test_what_cannot_be_answered_is_one_clear_line(command, options, reason):
    status, said = command(whole_run(), *options)
    assert (status, said.out, said.err.count("\n")) == (2, "", 1)
    assert reason in said.err


@pytest.mark.parametrize(
    "options",
    [
        ["--goal", "memory", "--steps", "100"],
        ["--goal", "batch", "--memory-budget", "2GB"],  # which is the run's own
    ],
)
def test_a_goal_refuses_what_it_has_no_use_for(command, options):
    """What else is no option, tests/test_bad_input.py draws."""
    with pytest.raises(SystemExit) as stopped:
        command(whole_run(), *options)
    assert stopped.value.code == 2


def test_lines_of_code_and_packages_are_counted():
    source = (
        '"""Head."""\n\n# why\nimport os\n\n\ndef f(\n    x,\n):\n    """Doc."""\n    return x\n'
    )
    assert priorities_command.code_lines(source) == 5
    source = (
        "import os, torch\nimport torchao.quantization as q\n\ndef f():\n    from onnx import x\n"
        "    runtimes.openvino_package()\n    runtimes.package('tf2onnx.convert', 'tf2onnx')\n"
    )
    assert priorities_command.packages(source) == {"torchao", "onnx", "openvino", "tf2onnx"}


def test_every_technique_has_a_cost_and_refusals_are_counted_from_the_zoo():
    cells_of = {
        "a": {"status": "works"},
        "b": {"status": "refused"},
        "c": {"status": "works", "variants": {"x": {"status": "refused"}}},
    }
    costs = priorities_command.costs({"cells": {"pt": {"pruning": cells_of}}})
    assert {technique for technique, _ in costs} == techniques().keys()
    assert all(cost.lines > 20 for cost in costs.values())
    assert "torchao" in costs["quantization_aware_training", "pt"].packages
    assert (costs["pruning", "pt"].refused, costs["pruning", "pt"].models) == (2, 3)
    assert costs["pruning", "tf"].models is None


def test_priorities_prints_80_columns_and_checks_its_page(tmp_path, monkeypatch, capsys, command):
    monkeypatch.setattr(priorities_command, "PAGE", tmp_path / "priorities.md")
    assert priorities_command.main([str(DOCS)]) == 0
    assert all(len(line) <= 80 for line in capsys.readouterr().out.splitlines())
    for option, status in (("--check", 1), ("--write", 0), ("--check", 0)):
        assert priorities_command.main([str(DOCS), option]) == status
    assert command(whole_run(), "--check", of=priorities_command)[0] == 1
    models = tmp_path / "any_model.json"
    monkeypatch.setattr(priorities_command, "MODELS", models)
    for damaged in ("{", "[1]"):
        models.write_text(damaged)
        assert priorities_command.main([str(DOCS)]) == 2
        assert capsys.readouterr().err.count("\n") == 1
