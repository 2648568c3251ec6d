"""The ranking, and the questions that are filters of it, of records whose answers are known."""

from __future__ import annotations

import pytest

from bench.analysis.questions import Cost, answers, path, priorities, remedies
from bench.analysis.ranking import GOALS, Limits, beaten, rank, works
from bench.analysis.table import BATCH, GAINED, MEMORY, RATE, STEPS, TIME, Figure
from bench.record import Certificate, Metric
from tests import records
from tests.records import find_case, planted, whole_run, with_case

GAIN, MORE, SLOWER = (0.6, 0.58, 0.62), (0.5, 0.48, 0.52), (1.2, 1.1, 1.3)
NOTHING = (1.0, 0.98, 1.02)
LOST, KEPT = (-3.0, -3.5, -2.5), (0.1, -0.4, 0.6)
SIZES = {"ms": 1e-3, "s": 1, "MB": 1e6, "samples/s": 1, "samples": 1, "points": 1, "steps": 1}


def row(technique="compilation", variant="changed", **effects):
    return {"technique": technique, "variant": variant} | effects


def fast(*rows, **fields):
    """A planted record whose rows take as much time as their ratios say."""
    run = planted(*rows, **fields)
    for each in run.comparisons:
        low, high = each.ci or (0.99 * each.ratio, 1.01 * each.ratio)
        timing = find_case(run, each.numerator).timing.but(
            median_s=0.01 * each.ratio, ci_s=(0.01 * low, 0.01 * high)
        )
        run = with_case(run, each.numerator, timing=timing)
    return run


def ranked(run, goal="train-speed", framework=None, **limits):
    (work,) = works(run)
    return rank(work, GOALS[goal], Limits(**limits), framework)


def name(row):
    return row and (row.case.technique, row.case.variant)


def variants(rows):
    return [row.case.variant for row in rows]


def reasons(found):
    """Why rows are left out, but for those whose accuracy or figure was not measured."""
    return [other.reason for other in found.others if other.place == "refused"]


# Pieces of work -----------------------------------------------------------------------------------


def test_a_unit_is_of_its_size():
    assert {goal.unit: goal.size for goal in GOALS.values()} == SIZES
    assert all(goal.size == SIZES[goal.unit] for goal in GOALS.values())


@pytest.mark.parametrize(
    ("given", "title", "goal"),
    [
        ({}, "digits-cnn, batch 64, train step", "memory"),
        ({"mode": "predict"}, "digits-cnn, batch 64, prediction", "memory"),
        ({"time": GAIN}, "digits-cnn, batch 64, train step", "train-speed"),
        ({"time": GAIN, "mode": "predict"}, "digits-cnn, batch 64, prediction", "latency"),
        ({"technique": "optimizer_implementations", "time": GAIN},
         "digits-cnn, batch 64, optimizer's update", "train-speed"),
        ({"technique": "shards", "metrics": {RATE: (2, 1)}},
         "digits-cnn, batch 64, input pipeline", "throughput"),
        ({"technique": "data_parallel", "metrics": {RATE: (2, 1)}},
         "digits-cnn, batch 64, several devices", "throughput"),
        ({"technique": "batch_size_finder", "metrics": {BATCH: (200, 100)}},
         "digits-cnn, train step", "batch"),
    ],
)  # fmt: skip
def test_rows_are_of_a_kind_of_work_with_its_main_goal(given, title, goal):
    (work,) = works(planted(row(**given)))
    assert (work.title, work.goals[0].name) == (title, goal)


def test_baselines_tell_what_is_the_same_work_whatever_their_variants_compute():
    run = planted(row(time=GAIN), row("mixed_precision", time=GAIN))
    for number, technique in enumerate(("compilation", "mixed_precision")):
        proof = Certificate(losses=[7.0 + number], weights_sha256=str(number))
        run = with_case(run, f"{technique}/digits-cnn-64/pt/changed", certificate=proof)
    (work,) = works(run)
    assert {each.case.technique for each in work.rows} == {"compilation", "mixed_precision"}
    other = Certificate(losses=[9.0], weights_sha256="ab")
    run = with_case(run, "mixed_precision/digits-cnn-64/pt/base", certificate=other)
    assert [work.apart for work in works(run)] == ["", "mixed_precision"]


@pytest.mark.parametrize(
    ("verdict", "paired", "apart"),
    [
        ("faster", True, [""]),
        ("not comparable", True, ["PyTorch", "TensorFlow"]),
        ("faster", False, ["PyTorch", "TensorFlow"]),
    ],
)
def test_frameworks_whose_models_are_no_twins_are_not_put_into_one_order(verdict, paired, apart):
    run = planted(row(time=GAIN), row(time=GAIN, framework="tf"))
    pair = [find_case(run, f"{side}/base") for side in ("pt", "tf")]
    between = records.comparison(*pair, 0.8, 0.7, 0.9, kind="framework", verdict=verdict)
    facts = run.tasks["digits-cnn"].but(paired=paired)
    run = run.but(comparisons=[*run.comparisons, between], tasks={"digits-cnn": facts})
    assert sorted(work.apart for work in works(run)) == apart
    (answer,) = [each for each in answers(run) if each.goal.figure == TIME]
    assert list(answer.sides) == ["pt", "tf"]
    assert (answer.between is None) == (len(apart) > 1)


def test_one_program_of_several_techniques_is_one_row():
    run = fast(row(time=GAIN), row("stacking", time=GAIN))
    first = find_case(run, "compilation/digits-cnn-64/pt/changed").id
    run = with_case(run, "stacking/digits-cnn-64/pt/changed", program=first)
    (work,) = works(run)
    (merged,) = [each for each in work.rows if not each.is_baseline and each.repeats]
    assert {member.case.technique for member in merged.members} == {"compilation", "stacking"}
    ranking = rank(work, GOALS["train-speed"])
    assert name(ranking.best)[1] == "changed"
    assert ranking.alike == []


def test_a_control_and_a_bound_take_no_part():
    run = planted(row(time=GAIN), row(variant="again", role="control", time=GAIN),
                  row(variant="labels", role="bound", time=MORE))  # fmt: skip
    (work,) = works(run)
    assert set(variants(work.rows)) == {"changed", "base"}


# The best -----------------------------------------------------------------------------------------


def test_the_row_that_gains_is_best_and_the_plain_one_where_none_does():
    ranking = ranked(fast(row(time=GAIN), row("memory_format", time=SLOWER)))
    assert name(ranking.best) == ("compilation", "changed")
    assert variants(ranking.gaining) == ["changed"]
    assert [name(each) for each in ranking.placed("worse") if not each.is_baseline] == [
        *[("memory_format", "changed")]
    ]
    for time in ((0.98, 0.9, 1.06), (0.98, 0.975, 0.985), SLOWER):
        assert ranked(fast(row(time=time))).best.is_baseline


def test_a_change_that_is_slower_than_another_technique_s_plain_code_gains_nothing():
    run = fast(row(time=GAIN), row("memory_format", time=NOTHING))
    quick = find_case(run, "memory_format/digits-cnn-64/pt/base")
    run = with_case(run, quick.id, timing=quick.timing.but(median_s=0.005, ci_s=(0.0049, 0.0051)))
    ranking = ranked(run)
    assert name(ranking.best) == ("memory_format", "base")
    assert ranking.gaining == []


@pytest.mark.parametrize(
    ("bounds", "named"),
    [((0.99, 1.11), "memory_format"), ((1.01, 1.09), "compilation"), ((1.06, 1.16), "compilation")],
)
def test_what_takes_less_is_named_only_where_it_is_not_told_from_the_best(bounds, named):
    """Nor where the difference may be one that does not count."""
    run = fast(row(time=MORE), row("memory_format", time=(0.55, 0.53, 0.57)))
    dear = with_case(run, "compilation/digits-cnn-64/pt/changed", settings={"compiled": True})
    pair = [find_case(dear, f"{technique}/digits-cnn-64/pt/changed")
            for technique in ("memory_format", "compilation")]  # fmt: skip
    between = records.comparison(*pair, 1.1, *bounds)
    ranking = ranked(dear.but(comparisons=[*dear.comparisons, between]))
    assert ranking.best.case.technique == named
    alike = [each.case.technique for each in ranking.alike]
    assert alike == (["compilation"] if named == "memory_format" else [])


@pytest.mark.parametrize(("share", "worse"), [(1.029, False), (1.031, True)])
def test_within_what_counts_as_no_difference_nothing_is_shown_to_be_worse(share, worse):
    ranking = ranked(planted(row(size=share)), "size")
    assert (variants(ranking.placed("equal")), variants(ranking.placed("worse"))) == (
        ([], ["changed"]) if worse else (["changed"], [])
    )


@pytest.mark.parametrize(
    ("first", "expected"),
    [
        # The scatter of what was repeated is also that of what was measured once.
        ([0.8, 0.801], ("changed", [], ["other", "base"], [])),
        ([0.9, 1.0], ("base", ["changed", "other"], [], [])),
        ([0.9], ("base", [], [], ["changed", "other"])),  # nothing was repeated
    ],
)
def test_a_peak_measured_once_is_told_apart_by_the_scatter_of_the_run(first, expected):
    ranking = ranked(planted(row(peaks=first), row(variant="other", memory=0.98)), "memory")
    groups = map(ranking.placed, ("equal", "worse", "next"))
    assert (ranking.best.case.variant, *map(variants, groups)) == expected


def test_over_both_frameworks_the_best_is_the_better_of_both():
    run = fast(row(time=GAIN), row(time=MORE, framework="tf"))
    sides = {side: ranked(run, framework=side).best for side in ("pt", "tf")}
    assert {side: best.case.framework for side, best in sides.items()} == {"pt": "pt", "tf": "tf"}
    assert ranked(run).best is not sides["pt"]
    assert ranked(run).best.case is sides["tf"].case


# What keeps to the limits -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"accuracy": LOST}, "loses accuracy"),
        ({"accuracy": (0.0, -3.0, 3.0)}, "was not shown to keep accuracy"),
        ({"changes_math": True}, None),  # unknown
        ({"changes_math": True, "changes_weights": True},
         "is another model, which was trained nowhere"),
        ({"accuracy": KEPT}, "keeps"),
    ],
)  # fmt: skip
def test_accuracy_is_kept_by_the_bound_of_its_interval(given, reason):
    ranking = ranked(fast(row(time=GAIN, **given)))
    if reason == "keeps":
        assert ranking.best.case.variant == "changed"
        return
    assert ranking.best.is_baseline
    assert reasons(ranking) == ([reason] if reason else [])
    assert variants(ranking.placed("unknown")) == ([] if reason else ["changed"])
    untrained = given.get("changes_weights", False)
    assert variants(ranking.tempting) == ([] if untrained else ["changed"])


def test_an_allowed_drop_takes_the_margin_s_place():
    run = fast(row(time=GAIN, accuracy=(-0.7, -0.8, -0.6)))
    strict, lax = (ranked(run, accuracy_drop=points) for points in (0.5, 0.9))
    assert variants(strict.placed("refused")) == ["changed"]
    assert lax.best.case.variant == "changed"


def test_a_memory_budget_leaves_out_and_names_the_peak():
    ranking = ranked(fast(row(time=GAIN, memory=11.24)), memory=500e6)
    assert [(o.row.case.variant, o.reason) for o in ranking.others if o.place == "refused"] == [
        *[("changed", "takes 1,124 MB")]
    ]
    lacking = with_case(fast(row(time=GAIN)), "/changed", memory=None)
    assert reasons(ranked(lacking, memory=500e6)) == [*["its memory was not measured"]]
    assert ranked(lacking, "memory").placed("lacking")[0].case.variant == "changed"
    assert ranked(lacking, memory=1.0) is None


def test_a_row_that_does_other_work_than_its_baseline_is_no_candidate():
    run = fast(row(time=GAIN))
    (compared,) = run.comparisons
    ranking = ranked(run.but(comparisons=[compared.but(verdict="not comparable")]))
    assert ranking.best.is_baseline
    assert reasons(ranking) == ["it was not shown to do its baseline's work"]


def test_what_would_be_better_but_loses_accuracy_tempts_beside_the_best():
    ranking = ranked(fast(row(time=GAIN), row("mixed_precision", time=MORE, accuracy=LOST)))
    assert name(ranking.best) == ("compilation", "changed")
    assert [name(each) for each in ranking.tempting] == [("mixed_precision", "changed")]
    less = ranked(fast(row(time=MORE), row("mixed_precision", time=GAIN, accuracy=LOST)))
    assert less.tempting == []


# What takes least ---------------------------------------------------------------------------------

DEAR = row("pruning", time=MORE, peaks=[0.5, 0.51])


@pytest.mark.parametrize(
    ("goal", "given", "expected"),
    [
        ("train-speed", {"time": GAIN}, True),
        ("train-speed", {"time": SLOWER, "peaks": [0.6, 0.61]}, False),
        ("memory", {"time": SLOWER, "peaks": [0.6, 0.61]}, True),
        ("memory", {"time": GAIN, "peaks": [1.2, 1.3]}, False),
        ("memory", {"time": GAIN, "peaks": [0.9, 1.0]}, False),  # not shown to be less
        ("memory", {"time": GAIN, "peaks": [0.8, 0.805]}, True),
    ],
)
def test_the_cheapest_gains_in_the_figure_that_is_asked_for(goal, given, expected):
    ranking = ranked(fast(DEAR, row("memory_format", **given)), goal)
    assert name(ranking.best) == ("pruning", "changed")
    assert name(ranking.cheapest) == (("memory_format", "changed") if expected else None)


def test_nothing_is_cheaper_than_what_takes_nothing_nor_than_plain_code():
    free = row("memory_format", time=(0.4, 0.38, 0.42))
    assert ranked(fast(DEAR, free)).cheapest is None
    assert ranked(fast(row(time=SLOWER))).cheapest is None


# A number of steps --------------------------------------------------------------------------------


def after(steps, first, *, samples=None):
    """The ranking over so many steps of a row of 6 ms and its baseline of 10 ms."""
    run = fast(row(time=GAIN))
    for end, seconds in (("/changed", first), ("/base", 0.5)):
        timing = find_case(run, end).timing.but(cold_first_call_s=seconds)
        calls = Metric(value=seconds, samples=samples and [seconds * each for each in samples])
        run = with_case(run, end, timing=timing, metrics={"cold_first_calls_s": calls})
    return ranked(run, steps=steps)


def test_steps_take_their_first_call_and_all_others():
    few, many = (after(steps, 4.5, samples=[0.98, 1.02]) for steps in (101, 10_001))
    assert few.best.is_baseline
    assert few.aim.figure(few.best).value == pytest.approx(0.5 + 100 * 0.01)
    assert many.best.case.variant == "changed"
    assert many.aim.figure(many.best).value == pytest.approx(4.5 + 10_000 * 0.006)
    gain = many.aim.gain(many.best)
    assert gain.value == pytest.approx(64.5 / 100.5)
    assert 0.60 < gain.low < gain.value < gain.high < 0.68


def test_first_calls_measured_once_decide_nothing_unless_they_are_little():
    assert after(101, 0.1).aim.figure(after(101, 0.1).best).kind == "once"
    assert [variants(after(101, 0.1).placed("next")), after(101, 0.1).best.is_baseline] == [
        ["changed"],
        True,
    ]
    assert after(1_000_001, 0.1).best.case.variant == "changed"


# One block ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("control", "time", "named"),
    [
        (None, 0.99, False),
        (None, 0.96, True),
        (1.12, 0.9, False),
        (0.89, 0.9, False),
        (1.12, 0.88, True),
    ],
)
def test_one_block_names_nothing_that_its_own_control_shows_of_no_difference(control, time, named):
    run = fast(row(time=(time,)))
    if control:
        again = run.comparisons[0].but(kind="control", ratio=control, ci=None)
        run = run.but(comparisons=[*run.comparisons, again])
    ranking = ranked(run)
    assert ranking.aim.provisional
    assert (not ranking.best.is_baseline) == named


def test_one_block_puts_all_others_in_order_and_beats_none():
    run = whole_run("quick")
    for work in works(run):
        ranking = rank(work, GOALS["train-speed"])
        assert ranking.aim.provisional
        assert (ranking.placed("equal", "worse"), beaten(work)) == ([], {})


# Recipes, and what is beaten ----------------------------------------------------------------------


def trained(*gains, task="digits-cnn", metric="accuracy"):
    """A record of what was only trained: (variant, points gained, low, high)."""
    rows = [row("regularization", variant, accuracy=points, task=task)
            for variant, *points in gains]  # fmt: skip
    run = planted(*rows)
    for case in run.cases:
        of = case.accuracy.but(mean=90.0, metric=metric) if case.accuracy else None
        run = with_case(run, case.id, memory=None, certificate=None, accuracy=of)
    return run


def test_a_recipe_is_chosen_by_what_it_gains_over_its_own_baseline():
    ranking = ranked(trained(("decay", 2.0, 1.0, 3.0), ("smoothing", -3.0, -4.0, -2.0)), "accuracy")
    assert ranking.work.kind == "recipe"
    assert ranking.best.case.variant == "decay"
    assert (variants(ranking.placed("worse")), reasons(ranking)) == (["base", "smoothing"], [])
    ranking = ranked(trained(("smoothing", 0.3, -0.1, 0.7)), "accuracy")
    assert ranking.best.is_baseline  # where no recipe gains, the plain training


@pytest.mark.parametrize(
    ("metric", "title", "unit"),
    [
        ("accuracy", "points of accuracy gained over the plain training", "points"),
        ("mAP", "points of mAP gained over the plain training", "points"),
        ("bits_per_character", "bits per character saved against the plain training", "bits saved"),
    ],
)
def test_what_is_gained_has_the_words_of_its_metric(metric, title, unit):
    ranking = ranked(trained(("decay", 2.0, 1.0, 3.0), metric=metric), "accuracy")
    assert (ranking.goal.title, ranking.goal.unit) == (title, unit)
    bits = metric == "bits_per_character"  # of which less is better
    assert ranking.best.is_baseline == bits


def test_what_loses_some_accuracy_beats_nothing_that_loses_none():
    careless = {"accuracy": (-0.5, -0.8, -0.2), "changes_math": True}  # within the margin
    run = fast(
        row(variant="careless", time=GAIN, **careless),
        row(variant="exact", time=(0.8, 0.7, 0.9)),
        row(variant="slow", time=(3.0, 2.9, 3.1)),
    )
    (work,) = works(run)
    by = {ends.rsplit("/", 1)[1]: other.case.variant for ends, other in beaten(work).items()}
    assert by == {"base": "exact", "slow": "exact"}


def test_what_takes_more_memory_beats_nothing():
    (work,) = works(fast(row(time=GAIN, memory=2.0)))
    assert beaten(work) == {}


# GPUs ---------------------------------------------------------------------------------------------


def test_of_a_gpu_memory_is_what_its_allocator_counts():
    run = fast(row(time=GAIN))
    for end, size in (("/base", 4e9), ("/changed", 2e9)):
        peak = {"allocated": size, "reserved": 2 * size}
        run = with_case(run, end, memory=find_case(run, end).memory.but(device_peak=peak))
    ranking = ranked(run, "memory", memory=3e9)
    assert ranking.aim.figure(ranking.best) == Figure(2e9, 2e9, 2e9, "exact")
    assert reasons(ranking) == ["takes 4,000 MB"]
    assert ranking.goal.title == "peak memory of the GPU"
    host = find_case(run, "/changed").memory.but(device_peak=None)
    ranking = ranked(with_case(run, "/changed", memory=host), "memory")
    assert (ranking.best.case.variant, variants(ranking.placed("lacking"))) == ("base", ["changed"])


# Questions ----------------------------------------------------------------------------------------


def asked(aim, *rows):
    (found,) = [each for each in answers(fast(*rows)) if each.question.aim == aim]
    return found


def test_which_framework_is_ahead_is_the_comparison_of_both_bests():
    run = fast(row(time=GAIN), row(time=MORE, framework="tf"))
    pair = [find_case(run, f"{side}/changed") for side in ("pt", "tf")]
    for ratio, bounds, ahead in (
        (1.2, (1.1, 1.3), "tf"),
        (0.8, (0.7, 0.9), "pt"),
        (1.02, (0.98, 1.06), None),
    ):
        between = records.comparison(*pair, ratio, *bounds, kind="framework")
        changed = run.but(comparisons=[*run.comparisons, between])
        (answer,) = [each for each in answers(changed) if each.goal.figure == TIME]
        assert (answer.ahead, answer.between.value) == (ahead, ratio)
        assert answer.seen_from("tf").value == pytest.approx(1 / ratio)


def test_of_rates_the_larger_one_is_ahead():
    rates = [{RATE: ([20, 19, 21], [10, 9, 11])}, {RATE: ([30, 29, 31], [10, 9, 11])}]
    sides = zip(("pt", "tf"), rates, strict=True)
    found = asked("feed data faster", *(row("shards", framework=f, metrics=m) for f, m in sides))
    assert found.ahead == "tf"


def test_memory_is_asked_for_first_and_then_the_largest_batch():
    finder = row("batch_size_finder", metrics={BATCH: (210, 100)}, memory=0.5)
    found = [
        each for each in answers(planted(finder)) if each.question.aim == "train in less memory"
    ]
    assert [each.goal.figure for each in found] == [BATCH]
    assert found[0].sides["pt"].best.case.variant == "changed"


def test_accuracy_is_asked_for_each_kind_of_work_of_a_task():
    run = planted(row("distillation", time=SLOWER, accuracy=(3.0, 2.5, 3.5)),
                  row("regularization", accuracy=(2.0, 1.5, 2.5)))  # fmt: skip
    trained = find_case(run, "regularization/digits-cnn-64/pt/changed")
    run = with_case(run, trained.id, accuracy=trained.accuracy.but(mean=92.0))
    asked_for = [each for each in answers(run) if each.goal.figure == GAINED]
    assert sorted(each.work.kind for each in asked_for) == ["recipe", "train"]
    assert [each.main for each in asked_for] == [True, False]


def test_an_update_alone_is_no_train_step():
    update = row("optimizer_implementations", time=GAIN)
    assert [each.question.aim for each in answers(planted(update))] == ["faster optimizer step"]


# The path and the matrix --------------------------------------------------------------------------


def leaves(run, figure=TIME):
    return [leaf for _, ends in path(run) for leaf in ends if leaf.goal.figure == figure]


@pytest.mark.parametrize(
    ("given", "figure", "counts"),
    [
        ({"time": MORE, "changes_math": True}, TIME, (0, 0, 1)),
        ({"time": (1.5, 1.4, 1.6), "changes_math": True}, TIME, (1, 0, 0)),
        ({"time": NOTHING, "changes_math": True}, TIME, (1, 0, 0)),
        ({"time": (0.5,)}, TIME, (0, 1, 0)),
        ({"time": NOTHING}, TIME, (1, 0, 0)),
        ({"accuracy": (1.0,)}, GAINED, (0, 0, 1)),
        ({"accuracy": (0.0,)}, GAINED, (0, 1, 0)),
        ({"accuracy": (-1.0,)}, GAINED, (0, 1, 0)),
        ({"accuracy": (0.2, -0.1, 0.5)}, GAINED, (1, 0, 0)),
        ({"memory": 0.5}, MEMORY, (0, 1, 0)),
    ],
)
def test_a_leaf_counts_what_does_not_gain(given, figure, counts):
    (leaf,) = leaves(planted(row(**given)), figure)
    assert leaf.rows == []
    assert (leaf.unproven, leaf.once, leaf.refused) == counts


def test_the_path_orders_by_the_bound_not_by_the_lucky_mean_and_tells_sizes_apart():
    lucky = {"time": (0.45, 0.30, 0.66), "task": "photos-resnet18"}
    run = planted(row(time=NOTHING), row("mixed_precision", time=MORE, task="photos-resnet18"),
                  row(**lucky))  # fmt: skip
    small, large = leaves(run)
    assert [each.case.technique for each in large.rows] == ["mixed_precision", "compilation"]
    assert (small.large, small.rows, small.unproven) == (False, [], 1)
    gains = {"lucky": (2.0, 0.2, 3.8), "sure": (1.0, 0.5, 1.5), "least": (0.3, 0.1, 0.5)}
    (leaf,) = leaves(planted(*(row(variant=v, accuracy=g) for v, g in gains.items())), GAINED)
    assert variants(leaf.rows) == ["sure", "lucky", "least"]
    assert {leaf.large for leaf in leaves(planted(row(time=GAIN, task="my_model")))} == {None}


def test_a_row_answers_questions_of_its_own_framework_and_work():
    rates = {"metrics": {RATE: ([20, 19, 21], [10, 9, 11])}}
    run = planted(
        row(time=GAIN),
        row(variant="fp16", time=GAIN, framework="tf"),
        row("export", "exported", time=GAIN, mode="predict"),
        row("shards", "sharded", **rates),
        row("data_parallel", "two", framework="tf", **rates),
        row("optimizer_implementations", "fused", time=GAIN),
        row("schedules", "cosine", metrics={STEPS: ([5, 4, 6], [10, 9, 11])}, accuracy=KEPT),
    )
    cosine = find_case(run, "/cosine")
    run = with_case(run, cosine.id, accuracy=cosine.accuracy.but(mean=90.0))
    answered = {
        (question.words, leaf.framework, gaining.case.variant)
        for question, ends in path(run)
        for leaf in ends
        for gaining in leaf.rows
    }
    assert answered == {
        ("Is a train step too slow?", "pt", "changed"),
        ("Is a train step too slow?", "tf", "fp16"),
        ("Is a prediction too slow?", "pt", "exported"),
        ("Does training wait for its data?", "pt", "sharded"),
        ("Is one device too slow, or too small?", "tf", "two"),
        ("Is the optimizer's update too slow?", "pt", "fused"),
        ("Does it not converge, or not well enough?", "pt", "cosine"),
    }


def test_the_matrix_begins_with_what_pays_in_the_largest_share_of_its_rows():
    paid = {"memory_format": "010", "pruning": "00", "compilation": "11", "mixed_precision": "1101"}
    run = planted(
        *(
            row(technique, f"{place}", time=GAIN if pays == "1" else NOTHING)
            for technique, rows in paid.items()
            for place, pays in enumerate(rows)
        ),
        row("mixed_precision", "large", task="photos-resnet18", time=MORE, accuracy=LOST),
    )
    costs = {("pruning", "pt"): Cost(120, ("torchao",), 2, 20)}
    lines = {each.technique: each for each in priorities(run, costs)}
    assert list(lines) == ["compilation", "mixed_precision", "memory_format", "pruning"]
    mixed = lines["mixed_precision"]
    assert (mixed.paid, len(mixed.rows)) == (3, 5)
    assert lines["pruning"].cost.lines == 120
    assert set(mixed.first_calls) == {0.5}


# Remedies -----------------------------------------------------------------------------------------


def left(run, bottleneck="overhead", framework="pt"):
    return [(one.row.case.technique, round(one.gain.value, 6))
            for one in remedies(run, framework, bottleneck)]  # fmt: skip


def test_the_best_row_of_each_technique_that_addresses_a_bottleneck():
    run = fast(
        row(time=(0.9, 0.88, 0.92)),
        row(variant="better", time=GAIN),
        row("optimizer_implementations", time=MORE),
        row("memory_format", time=(0.1, 0.09, 0.11)),  # no remedy for this bottleneck
        row("stacking", time=(0.7, 0.68, 0.72)),
        row("mixed_precision", time=MORE, accuracy=LOST),
    )
    expected = [("optimizer_implementations", 0.5), ("compilation", 0.6), ("stacking", 0.7)]
    assert left(run) == expected
    assert remedies(run, "pt", "overhead")[0].work.title.endswith("optimizer's update")
    assert left(run, framework="tf") == []
    assert left(fast(row(time=(0.9,)))) == left(fast(row(time=NOTHING))) == []


def test_a_program_that_several_techniques_have_is_a_remedy_of_each():
    run = fast(row(time=GAIN), row("stacking", time=GAIN))
    first = find_case(run, "compilation/digits-cnn-64/pt/changed").id
    run = with_case(run, "stacking/digits-cnn-64/pt/changed", program=first)
    assert sorted(left(run)) == [("compilation", 0.6), ("stacking", 0.6)]


def test_memory_is_less_by_more_than_processes_scatter_and_rates_by_their_ranges():
    for most, gained in ((0.801, True), (1.0, False), (1.2, False)):
        remedied = left(planted(row("stacking", peaks=[0.8, most])), "memory size")
        assert [technique for technique, _ in remedied] == ["stacking"] * gained
    rates = {RATE: ([200.0, 190.0, 210.0], [100.0, 95.0, 105.0])}
    devices = planted(row("data_parallel", metrics=rates))
    assert left(devices, "communication") == [("data_parallel", 2.0)]
    once = planted(row("data_parallel", metrics={RATE: (200.0, 100.0)}))
    assert left(once, "communication") == []


def test_less_than_its_own_baseline_is_no_remedy_where_another_plain_row_takes_less():
    run = planted(*(row(name, peaks=[0.5, 0.5]) for name in ("stacking", "mixed_precision")))
    base = find_case(run, "mixed_precision/digits-cnn-64/pt/base")
    run = with_case(run, base.id, memory=records.memory(0.4e8))
    assert left(run, "memory size") == []


def test_points_without_an_interval_show_nothing():
    assert ranked(trained(("decay", 2.0)), "accuracy").best.is_baseline
