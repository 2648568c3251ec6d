"""Charts: shapes stand where the figures say."""

from __future__ import annotations

from math import log

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from bench.analysis.questions import answers
from bench.analysis.reading import view
from bench.analysis.table import TIME
from bench.record import Metric, TaskFacts
from bench.report import bars, charts, graphs
from bench.report.content import build
from bench.report.curves import curves
from bench.report.lifetimes import lifetimes
from bench.report.page import blocks
from bench.report.svg_shapes import MOST_TICKS, Scale, letters, scale, spread_letters, tick_text
from bench.report.tradeoffs import on_front, tradeoffs
from tests.records import TASKS, small_run, whole_run, with_case, with_comparison

PT_BF16 = "digits-cnn-64/pt/bf16"
BF16 = ("digits-cnn-64/pt/bf16", "digits-cnn-64/pt/fp32")


def digits(run):
    return view(run, "mixed_precision", "digits-cnn")


def forest(run, task="digits-cnn"):
    return charts.forest(view(run, "mixed_precision", task))


def of(chart, kind, style=None):
    shapes = [shape for shape in chart.shapes if shape.kind == kind]
    return [shape for shape in shapes if style is None or style in shape.style.split()]


def mark(chart, words):
    (only,) = [m for m in of(chart, "mark") if m.tip.startswith(words)]
    return only


# Scales ------------------------------------------------------------------------------------------

finite = st.floats(-1e12, 1e12)
positive = st.floats(1e-9, 1e9)


@given(st.lists(finite, min_size=1, max_size=5))
def test_an_even_scale_holds_its_values_in_their_order(values):
    made = scale(values, 10, 90)
    places = [made(value) for value in sorted(values)]
    assert places == sorted(places)
    assert all(10 <= place <= 90 for place in places)
    assert len(made.ticks()) <= MOST_TICKS


@given(st.lists(positive, min_size=1, max_size=5))
def test_a_log_scale_holds_its_values_and_has_ticks(values):
    made = scale(values, 10, 90, log=True)
    assert all(10 <= made(value) <= 90 for value in values)
    ticks = made.ticks()
    assert ticks == sorted(ticks)
    assert len(ticks) <= MOST_TICKS
    assert all(9.99 <= made(tick) <= 90.01 for tick in ticks)


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (1, 10, [1, 2, 3, 5, 7, 10]),
        (1, 100, [1, 2, 5, 10, 20, 50, 100]),
        (1, 1e4, [1, 10, 100, 1e3, 1e4]),
        (1e-3, 1e5, [1e-3, 0.1, 10, 1e3, 1e5]),
        (1, 2.5, [1, 1.5, 2, 2.5]),  # less than three times: even ones
        (0, 12, [0, 2, 4, 6, 8, 10, 12]),
    ],
)
def test_ticks_are_round(low, high, ticks):
    assert Scale(low, high, 0, 1, log=low > 0).ticks() == pytest.approx(ticks)


def test_a_log_scale_gives_equal_room_to_equal_ratios():
    made = scale([0.25, 4], 0, 100, log=True)
    assert made(1) - made(0.5) == pytest.approx(made(2) - made(1), abs=0.02)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.95, "0.95"), (1500, "1,500"), (20_000, "20k"), (1e6, "1M"), (-0.5, "-0.5")],
)
def test_tick_text(value, text):
    assert tick_text(value) == text


# Forest plot -------------------------------------------------------------------------------------


def test_marks_stand_at_their_ratio_between_their_bounds():
    half = {"ratio": 0.5, "ci": (0.45, 0.56), "verdict": "faster"}
    chart = forest(with_comparison(small_run(), *BF16, **half))
    shown = mark(chart, "bf16: PyTorch ÷ own baseline 0.500 (0.450–0.560), faster")
    assert (shown.symbol, shown.open) == ("pt", False)
    (line,) = [
        each
        for each in of(chart, "line", "interval")
        if each.y1 == each.y2 == shown.y and each.x1 < shown.x < each.x2
    ]
    (one,) = of(chart, "line", "one")
    (band,) = of(chart, "box", "band")
    assert line.x2 < band.x < one.x1 < band.x + band.width
    assert band.x + band.width / 2 == pytest.approx(one.x1, abs=0.02)  # 1 / 1.03 to 1.03


@pytest.mark.parametrize(
    ("ci", "verdict", "open_"),
    [
        ((0.90, 0.97), "faster", False),
        ((0.90, 0.97), "faster, less accurate", False),
        ((1.031, 1.2), "slower, more accurate", False),
        ((0.90, 0.98), "faster, less accurate", True),
        ((0.90, 0.98), "slightly faster", True),
        ((0.99, 1.01), "equivalent", True),
        (None, None, True),
    ],
)
def test_a_mark_is_filled_where_a_difference_was_shown(ci, verdict, open_):
    run = with_comparison(small_run(), *BF16, ci=ci, verdict=verdict)
    assert mark(forest(run), "bf16: PyTorch ÷ own").open is open_


@pytest.mark.parametrize(
    ("ci", "verdict", "is_shown", "sides"),
    [((0.90, 0.98), "slightly faster", False, {None}), ((0.90, 0.96), "faster", True, {"pt"})],
)
def test_shown_is_the_same_in_charts_and_who_is_ahead(ci, verdict, is_shown, sides):
    run = whole_run()
    same = {"ratio": 0.94, "ci": ci, "verdict": verdict}
    run = run.but(comparisons=[comparison.but(**same) for comparison in run.comparisons])
    assert {shape.open for shape in of(forest(run), "mark")} == {not is_shown}
    assert (bars.chart(answers(run)) is not None) is is_shown
    assert {answer.ahead for answer in answers(run) if answer.goal.figure == TIME} == sides


def test_unlike_work_has_no_mark():
    chart = forest(whole_run(), "text-gpt")
    tips = [m.tip for m in of(chart, "mark")]
    assert any(tip.startswith("bf16: PyTorch ÷ TensorFlow") for tip in tips)
    assert not any(tip.startswith("as_installed: PyTorch ÷ TensorFlow") for tip in tips)


def test_every_ratio_of_the_table_has_its_mark_and_figure():
    run = whole_run()
    chart = forest(run)
    expected = [
        c for c in run.comparisons if c.task == "digits-cnn" and c.verdict != "not comparable"
    ]
    assert len(of(chart, "mark")) == len(expected)
    figures = sorted(label.text for label in of(chart, "label", "figure"))
    assert figures == sorted(f"{c.ratio:.3f}" for c in expected)
    assert f"{len(expected)} ratios from " in chart.description


def test_a_quick_run_has_marks_and_no_interval():
    chart = forest(whole_run("quick"))
    assert of(chart, "mark")
    assert not of(chart, "line", "interval")
    assert all(m.open for m in of(chart, "mark"))
    assert not any("filled" in words for _, words in chart.key)


def test_without_ratios_there_is_no_plot():
    assert forest(whole_run().but(comparisons=[])) is None
    assert charts.controls_forest([]) is None


# Memory ------------------------------------------------------------------------------------------


def test_bars_are_as_long_as_their_bytes_above_import():
    memory = {"import_bytes": 100, "build_bytes": 50_000_100, "first_step_peak_bytes": 90}
    memory |= {"steady_peak_bytes": 150_000_100}
    chart = charts.memory_bars(digits(with_case(whole_run(), PT_BF16, memory=memory)))
    (figures,) = [label for label in of(chart, "label") if label.text == "50.0 · 0 · 150"]
    bars = [bar for bar in of(chart, "box") if figures.y < bar.y < figures.y + 30]
    assert [bar.style.split()[-1] for bar in bars] == ["phase-0", "phase-1", "phase-2"]
    assert bars[2].width == pytest.approx(3 * bars[0].width, abs=0.05)
    assert bars[1].width == 0  # never below its imports


def test_a_case_without_memory_or_that_failed_has_no_bar():
    run = with_case(whole_run(), PT_BF16, memory=None)
    run = with_case(run, "digits-cnn-64/tf/bf16", status="FAILED")
    before, after = (len(of(charts.memory_bars(digits(r)), "box")) for r in (whole_run(), run))
    assert before - after == 6


# Accuracy and what it costs ----------------------------------------------------------------------


@given(st.lists(st.tuples(positive, finite), min_size=1, max_size=12), st.booleans())
def test_the_front_is_what_nothing_beats(points, more_is_better):
    sign = 1 if more_is_better else -1

    def at_least(one, other):
        return one[0] <= other[0] and sign * one[1] >= sign * other[1]

    front = on_front(points, more_is_better=more_is_better)
    assert any(front)
    best = [point for point, on in zip(points, front, strict=True) if on]
    for point, on in zip(points, front, strict=True):
        beaten = [other for other in best if at_least(other, point) and other != point]
        assert on != bool(beaten)


def test_points_on_the_front_are_filled_and_named():
    ((table, (chart,)),) = tradeoffs(digits(small_run()), TASKS["digits-cnn"])
    rows = {row[0]: row for row in table.rows[1:]}
    for shown in of(chart, "mark"):
        letter = shown.tip.split(":")[0]
        assert (rows[letter][-1] == "step time") == (not shown.open)
    assert {"step time", "no"} == {row[-1] for row in rows.values()}
    (fastest,) = [row for row in rows.values() if row[1:3] == ["bf16", "PyTorch"]]
    assert fastest[-1] == "step time"


def test_sizes_have_a_picture_of_their_own():
    run = small_run()
    for place, name in enumerate(("pt/fp32", "pt/bf16", "tf/fp32")):
        run = with_case(run, f"digits-cnn-64/{name}", artifact_bytes=1e6 * (1 + place))
    ((table, drawn),) = tradeoffs(digits(run), TASKS["digits-cnn"])
    assert [chart.title.split(",")[0] for chart in drawn] == [
        "Accuracy in % over step time [ms]",
        "Accuracy in % over size on disk [MB]",
    ]
    assert len(of(drawn[1], "mark")) == 3
    assert [row[4] for row in table.rows[1:4]] == ["1.00", "3.00", "2.00"]


def test_compressed_sizes_have_one_too():
    """Pruned files are as large as others until they are compressed."""
    run = small_run()
    for place, name in enumerate(("pt/fp32", "pt/bf16")):
        size = Metric(value=1e6 * (2 - place), unit="bytes")
        run = with_case(run, f"digits-cnn-64/{name}", metrics={"compressed_artifact": size})
    ((_, drawn),) = tradeoffs(digits(run), TASKS["digits-cnn"])
    assert drawn[-1].title.startswith("Accuracy in % over size compressed [MB]")
    assert len(of(drawn[-1], "mark")) == 2


def test_fewer_bits_stand_higher():
    up = {}
    for metric in ("accuracy", "bits_per_character", "mAP"):
        ((table, (chart,)),) = tradeoffs(digits(small_run()), TaskFacts(metric=metric))
        up[metric] = {m.tip[3:]: m.y for m in of(chart, "mark")}
    assert table.title.startswith("mAP against what it costs")
    assert chart.title.startswith("mAP@[.5:.95] in % over step time [ms]")
    assert up["mAP"] == up["accuracy"]
    best = ("fp32, PyTorch", "bf16, PyTorch")  # 97.3 and 97.2
    assert up["accuracy"][best[0]] < up["accuracy"][best[1]]
    assert up["bits_per_character"][best[0]] > up["bits_per_character"][best[1]]


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(0, 300)), max_size=12))
@example([(95.0, 0.0), (99.0, 0.0)])  # the second has its letter before its point
def test_no_letter_covers_another(places):
    named = [(x, y, letter) for (x, y), letter in zip(places, letters(len(places)), strict=True)]
    shown = spread_letters(named)
    assert sorted(label.text for label in shown) == sorted(letters(len(places)))
    for place, one in enumerate(shown):
        for other in shown[:place]:
            assert abs(one.x - other.x) > 1.9 or abs(one.y - other.y) > 11.9


# First calls -------------------------------------------------------------------------------------


def test_the_curve_goes_from_the_first_calls_to_the_steps():
    run = with_comparison(small_run(), *BF16, ratio=0.5, ci=(0.48, 0.52))
    slow_start = {"cold_first_calls_s": {"value": 18.5}, "break_even_steps": {"value": 350.0}}
    run = with_case(run, PT_BF16, metrics=slow_start)
    base = {"metrics": {"cold_first_calls_s": {"value": 1.0}}, "timing": {"median_s": 0.1}}
    (chart,) = lifetimes(digits(with_case(run, "digits-cnn-64/pt/fp32", **base)))
    (curve,), (one,) = of(chart, "curve"), of(chart, "line", "one")
    begin, end = curve.points[0][1], curve.points[-1][1]
    steps = 9_999 * 0.1
    expected = log(18.5) / -log((18.5 + 0.5 * steps) / (1 + steps))
    assert (one.y1 - begin) / (end - one.y1) == pytest.approx(expected, rel=0.01)
    (even,) = of(chart, "mark")
    assert even.y == one.y1
    width = curve.points[-1][0] - curve.points[0][0]
    assert even.x == pytest.approx(curve.points[0][0] + width * log(350) / log(10_000), abs=0.02)
    crossing = min(curve.points, key=lambda point: abs(point[1] - one.y1))
    assert even.x == pytest.approx(crossing[0], abs=width / 60)


def test_a_variant_that_is_never_repaid_has_no_break_even():
    never = {"break_even_steps": {"value": None}}
    (chart,) = lifetimes(digits(with_case(small_run(), PT_BF16, metrics=never)))
    assert not of(chart, "mark")
    assert "no break-even" in chart.description


# Curves of trainings ------------------------------------------------------------------------------


def with_curves(**change):
    run = small_run()
    points = [[0.001, 2.0], [0.01, 1.0], [0.1, 3.0]]
    told = {"x": "learning rate", "y": "loss", "log": True, "points": points, "mark": [0.01, 1.0]}
    for side in ("pt", "tf"):
        run = with_case(run, f"digits-cnn-64/{side}/bf16", evidence={"curve": told | change})
    return run


def test_a_curve_of_both_frameworks_stands_where_its_points_say():
    (chart,) = curves(digits(with_curves()))
    (pt,), (tf,) = (of(chart, "curve", side) for side in ("pt", "tf"))
    assert pt.points == tf.points
    (x0, y0), (x1, y1), (x2, y2) = pt.points
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.02)  # decades
    assert (y0 - y2) / (y1 - y0) == pytest.approx(1.0, rel=0.01)  # pixels go down
    assert {(m.x, m.y) for m in of(chart, "mark")} == {(x1, y1)}
    assert "loss over learning rate" in chart.title
    assert "at most 3" in chart.description


@pytest.mark.parametrize("points", [None, [], [[1, 2]], [[1, 2], [1, 3]], ["a", [None, 2]], "ab"])
def test_what_is_no_curve_is_not_drawn(points):
    assert curves(digits(with_curves(points=points))) == []


def test_a_mark_elsewhere_is_left_out():
    (chart,) = curves(digits(with_curves(mark=[9.0, 1.0])))
    assert not of(chart, "mark")


def test_the_points_of_a_curve_stand_in_its_chart_alone():
    assert graphs.without({"curve": {"points": [[1, 2]]}, "steps": 3}) == {"steps": 3}


# What stands beside what -------------------------------------------------------------------------


def test_every_chart_stands_beside_a_table_of_its_figures():
    run = small_run()
    (part,) = build(run).techniques
    made = blocks(digits(run), part.tasks[0].tables, TASKS["digits-cnn"])
    drawn = {block.table.title.split(" (")[0]: len(block.charts) for block in made}
    assert {title for title, count in drawn.items() if count} == {
        "Ratios of step time",
        "First call against faster steps",
        "Memory by phase, imports included [MB]",
        "Accuracy against what it costs",
    }
