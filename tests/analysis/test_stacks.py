"""Which rows are stacked: those that were shown to be faster, and nothing that rounds unasked."""

import pytest

from bench.analysis.ranking import works
from bench.analysis.stacks import stacked, winners
from tests.records import case, planted

FASTER, SLOWER = (0.6, 0.58, 0.62), (1.4, 1.35, 1.45)


def row(technique, variant, time=FASTER, **more):
    return {"technique": technique, "variant": variant, "time": time} | more


COMPILED = row("compilation", "compiled")
BF16 = row("mixed_precision", "bf16", changes_math=True)
FORMAT = row("memory_format", "channels_last")


def verdict(comparison):
    return comparison.but(verdict="faster" if comparison.ratio < 1 else "slower")


def record(*rows):
    """The planted ones call every interval a gain."""
    made = planted(*rows)
    return made.but(comparisons=list(map(verdict, made.comparisons)))


def stack(made, framework="pt", changes_math=False):
    return stacked(made, case(framework=framework, changes_math=changes_math))


def test_what_was_faster_is_stacked():
    made = record(COMPILED, BF16, FORMAT)
    exact = {"compiled": True, "memory_format": "channels_last"}
    assert stack(made) == (exact, None)
    assert stack(made, changes_math=True) == (exact | {"dtype": "bfloat16"}, None)


def test_what_was_slower_is_not():
    made = record(COMPILED, FORMAT, row("stacking", "fused", SLOWER))
    assert winners(made, "pt", "digits-cnn") == {
        "compiled": True,
        "memory_format": "channels_last",
    }


def test_each_framework_has_its_own():
    made = record(COMPILED, FORMAT, row("compilation", "compiled", SLOWER, framework="tf"))
    assert winners(made, "tf", "digits-cnn") == {}
    assert winners(made, "pt", "another") == {}


FUSED = row("stacking", "fused")


@pytest.mark.parametrize("task", ["text-gpt", "checked-cnn"])
def test_only_train_steps_of_the_framework_and_the_task_count(task):
    others = row("memory_format", "channels_last", task=task), COMPILED | {"mode": "predict"}
    made = record(row("compilation", "another", SLOWER), *others, FUSED | {"framework": "tf"})
    assert winners(made, "pt", "digits-cnn") == {}
    assert winners(made, "tf", "digits-cnn") == {"fused": True}
    assert winners(made, "pt", task) == {"memory_format": "channels_last"}


@pytest.mark.parametrize("kind", ["control", "framework"])
def test_only_what_beats_its_own_baseline_counts(kind):
    made = record(COMPILED, FUSED)
    first, second = made.comparisons
    made = made.but(comparisons=[first.but(kind=kind), second])
    assert winners(made, "pt", "digits-cnn") == {"fused": True}
    made = made.but(comparisons=[first.but(kind=kind), second.but(numerator="gone")])
    assert winners(made, "pt", "digits-cnn") == {}


@pytest.mark.parametrize(
    ("rows", "changes", "said"),
    [
        ((row("compilation", "compiled", SLOWER),), False, "nothing was faster"),
        ((COMPILED,), False, "only compiled was shown to be faster"),
        ((COMPILED, FORMAT), True, "nothing that rounds is faster"),
        ((COMPILED, BF16), False, "only compiled"),
    ],
)
def test_where_there_is_nothing_to_stack_it_says_why(rows, changes, said):
    settings, reason = stack(record(*rows), changes_math=changes)
    assert settings == {}
    assert said in reason


def test_one_block_has_nothing_to_stack():
    made = record(COMPILED, BF16)
    once = made.but(comparisons=[c.but(verdict=None) for c in made.comparisons])
    settings, reason = stack(once, changes_math=False)
    assert settings == {}
    assert reason.startswith("one block shows of nothing")


def test_models_that_are_no_twins_are_chosen_from_apart():
    made = planted(COMPILED, COMPILED | {"framework": "tf"})
    (one,) = works(made)
    assert one.title == "digits-cnn, batch 64, train step"
    task = made.tasks["digits-cnn"].but(paired=False)
    pt, tf = works(made.but(tasks=made.tasks | {"digits-cnn": task}))
    assert pt.title == "digits-cnn, batch 64, train step (PyTorch)"
    assert tf.title == "digits-cnn, batch 64, train step (TensorFlow)"
    assert {row.case.framework for row in tf.rows} == {"tf"}
