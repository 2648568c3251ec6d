"""The rows of a default run: one or two of each technique, each with a name in plain words."""

from collections import Counter

import pytest

from bench.analysis.families import OF_LEARNING
from bench.harness import plan, selection
from bench.harness.run_plan import techniques
from shared.specs import TASKS, parameter_count

TECHNIQUES = techniques()
EACH = pytest.mark.parametrize("technique", TECHNIQUES.values(), ids=TECHNIQUES)
REALISTIC = {"photos-resnet18", "text-gpt-10m"}


def cases(effort, only=None):
    return [
        case
        for name, technique in TECHNIQUES.items()
        if only in (None, name)
        for case in selection.cases_of(technique, "module", effort)
    ]


def rows(found):
    """A row is both frameworks; controls are none of a technique's own."""
    return {(c.technique, c.work, c.variant.name) for c in found if c.variant.role != "control"}


def test_a_default_run_has_about_a_hundred_rows():
    found = cases("default")
    learned = {  # they cost seconds
        family: rows(case for case in found if case.family == family) for family in OF_LEARNING
    }
    assert 80 <= len(rows(found) - set().union(*learned.values())) <= 110
    assert len(learned["recipes"]) <= 30
    assert len(learned["adaptation"]) <= 7


@EACH
def test_a_default_run_answers_each_technique_s_question_in_both_frameworks(technique):
    every = cases("default", technique.name)
    found = [
        c for c in every if c.variant.role == "variant"
    ] or every  # or the baseline is looked at
    assert {case.framework for case in found} == set(plan.FRAMEWORKS)
    assert len({(c.variant.name, c.framework) for c in found}) <= 2 * 3


@pytest.mark.parametrize("effort", ["ordinary", "full"])
def test_what_is_neither_a_headline_s_variant_nor_at_its_work_is_asked_for(effort):
    for name in TECHNIQUES:
        every, default = cases(effort, name), cases("default", name)
        found = selection.one_by_one(every)
        assert {c.id for c in default} <= {c.id for c in found} <= {c.id for c in every}
        assert {c.variant.name for c in found} == {c.variant.name for c in every}
        assert {c.work for c in found} == {c.work for c in every}
        own, works = {c.variant.name for c in default}, {c.work for c in default}
        for case in (c for c in found if c.variant.role != "control"):
            assert case.variant.measured.tasks or case.variant.name in own or case.work in works


def test_of_a_model_of_ten_million_parameters_a_technique_by_name_shows_the_headline():
    found = selection.one_by_one(cases("ordinary", "compilation"))
    large = {(c.task.name, c.variant.name) for c in found if c.task.name in REALISTIC}
    assert large == {(name, row) for name in REALISTIC for row in ("baseline", "compiled")}


def test_asked_for_by_name_a_technique_shows_more():
    ordinary, default, full = (rows(cases(e)) for e in ("ordinary", "default", "full"))
    assert default < ordinary < full


@EACH
def test_every_variant_has_a_plain_title_of_its_own(technique):
    named = {
        (side, mode, variant.name, variant.title)
        for variant in technique.variants
        for side in variant.frameworks
        for mode in variant.measured.modes
    }
    assert all(title for *_, title in named)
    counts = Counter((side, mode, title) for side, mode, _, title in named)
    assert [title for title, times in counts.items() if times > 1] == []


def test_realistic_sizes_are_in_a_default_run_where_the_answer_depends_on_size():
    found = {c.technique for c in cases("default") if c.workload.task in REALISTIC}
    assert found >= {
        "mixed_precision",
        "compilation",
        "memory_format",
        "activation_checkpointing",
        "post_training_quantization",
        "export",
    }
    for name in REALISTIC:
        assert parameter_count(TASKS[name].model) == pytest.approx(11e6, rel=0.05)
