"""The rows of a default run: one or two of each technique, each with a name in plain words."""

from collections import Counter

import pytest

from bench.harness import plan, selection
from bench.harness.run_plan import techniques
from shared.specs import (
    TASKS,
    kept_activations,
    lasting_values,
    parameter_count,
    train_step_flops,
)
from tests.docs.commands import BY_NAME, RECIPES

TECHNIQUES = techniques()
EACH = pytest.mark.parametrize("technique", TECHNIQUES.values(), ids=TECHNIQUES)
OTHERS = {
    "folder",
    "in_memory",
    "mapped_arrays",
    "tuned_folder",
    "data_parallel",
    "pruning",
    "quantization_aware_training",
    "distillation",
}
REALISTIC = ("photos-resnet18", "text-gpt-10m", "text-bert-10m")
SIZED = {  # the answer depends on size
    "baseline",
    "mixed_precision",
    "compilation",
    "memory_format",
    "activation_checkpointing",
    "optimizer_implementations",
    "gradient_accumulation",
    "gradient_clipping",
    "post_training_quantization",
    "export",
}


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


def unasked(effort):
    return {name for name, each in TECHNIQUES.items() if selection.comes_unasked(each, effort)}


def test_a_default_run_has_what_everybody_asks_for_and_the_rest_comes_by_name():
    assert unasked("default") >= SIZED | OTHERS
    assert unasked("quick") == unasked("default") < unasked("ordinary") == set(TECHNIQUES)
    measured = [case for name in unasked("default") for case in cases("default", name)]
    assert 115 <= sum(case.variant.role != "control" for case in measured) <= 140


def test_what_comes_by_name_stands_in_the_commands_of_its_records():
    asked = {case.technique for name in unasked("default") for case in cases("default", name)}
    assert {*BY_NAME, *RECIPES} == set(TECHNIQUES) - asked


@EACH
def test_a_headline_answers_each_technique_s_question_in_both_frameworks(technique):
    every = cases("default", technique.name) or cases("ordinary", technique.name)
    challengers = [case for case in every if case.variant.role == "variant"]
    asked = challengers or every  # or the baseline is looked at
    assert {case.framework for case in asked} == set(plan.FRAMEWORKS)
    if technique.name in unasked("default") and cases("default", technique.name):
        assert len({(case.variant.name, case.framework) for case in asked}) <= 2 * 3


@pytest.mark.parametrize("effort", ["ordinary", "full"])
def test_what_is_neither_a_headline_s_variant_nor_at_its_work_is_asked_for(effort):
    for name in TECHNIQUES:
        every, default = cases(effort, name), cases("default", name)
        found = selection.one_by_one(every)
        assert {c.id for c in default} <= {c.id for c in found} <= {c.id for c in every}
        assert {c.variant.name for c in found} == {c.variant.name for c in every}
        assert {c.work for c in found} == {c.work for c in every}
        for case in (c for c in found if c.variant.role != "control"):
            named = case.variant.measured.tasks or case.variant.effort == "default"
            assert named or not case.task.blocks, case.id


def test_of_a_model_of_ten_million_parameters_a_technique_by_name_shows_the_headline():
    found = selection.one_by_one(cases("ordinary", "compilation"))
    large = {(c.task.name, c.variant.name) for c in found if c.task.name in REALISTIC}
    assert large == {(name, row) for name in REALISTIC for row in ("baseline", "compiled")}


def test_by_name_in_a_default_run_a_technique_leaves_out_the_headline_s_further_work():
    usual = selection.one_by_one(cases("ordinary", "compilation"))
    default = cases("default", "compilation")
    shown = selection.at_first_work(usual)
    assert {c.id for c in default} < {c.id for c in shown} < {c.id for c in usual}
    assert {c.work for c in shown} == {c.work for c in default}
    assert {c.variant.name for c in shown} == {c.variant.name for c in usual}


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


def is_realistic(workload: plan.Workload) -> bool:
    """Whether a piece of work is of the size of real models.

    It has ten million parameters. A train step keeps more of its batch than what stays between
    steps, so that what is saved of activations can be seen.
    """
    task = TASKS[workload.task]
    if parameter_count(task.model) < 10e6:
        return False
    kept = kept_activations(task.model, workload.batch_size)
    return workload.mode == "predict" or kept > lasting_values(task)


def test_work_of_realistic_size_is_in_a_default_run_where_the_answer_depends_on_size():
    for name in SIZED - {"optimizer_implementations"}:
        works = {case.workload for case in cases("default", name)}
        assert any(map(is_realistic, works)), name
    (update,) = {case.task for case in cases("default", "optimizer_implementations")}
    assert parameter_count(update.model) == pytest.approx(10e6, rel=0.06)  # its work is an update


def test_the_small_model_is_left_where_overhead_or_training_decides():
    small = {
        (case.technique, case.workload)
        for name in SIZED
        for case in cases("default", name)
        if case.task.name == "digits-cnn"
    }
    for name, workload in small:
        overhead = workload.batch in ("single", "small") or TECHNIQUES[name].cold_starts > 1
        assert overhead or workload.accuracy, (name, workload)


@pytest.mark.parametrize("task", [TASKS[name] for name in REALISTIC], ids=lambda task: task.name)
def test_the_batch_is_the_smallest_power_of_two_whose_activations_outweigh_what_stays(task):
    assert parameter_count(task.model) == pytest.approx(11e6, rel=0.05)
    batch, lasting = task.compute_batch, lasting_values(task)
    assert kept_activations(task.model, batch) > lasting
    assert kept_activations(task.model, batch // 2) < lasting
    # Of a class whose best product is 200 GFLOP/s, three quarters.
    assert 0.1 <= train_step_flops(task.model, batch) / 150e9 <= 0.5
