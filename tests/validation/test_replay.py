"""Records judged as if their runs had ended early, or played fewer rounds."""

import numpy as np
import pytest

from bench.analysis.verdicts import Ratio
from bench.record import Accuracy, encode
from bench.validation import command
from bench.validation.replay import (
    FEWER,
    Replay,
    Told,
    _width,
    accuracy_noise_of,
    fewer,
    noise_of,
    replay,
    table,
    works,
)
from tests import records
from tests.validation.sampled import record


def test_a_clear_record_ends_at_the_first_look_and_agrees():
    designs = replay(record())
    assert designs.early.count == designs.early.agree == designs.early.decided[3] > 6
    assert designs.early.blocks == 3 * designs.early.count
    assert designs.fewer.agree == designs.fewer.count


def test_what_only_later_blocks_tell_is_contradicted():
    """Three blocks say that it is equal, eight that it is far slower."""

    def slower(variant, block, rounds):
        return [9 * s for s in rounds] if variant == "same" and block > 2 else rounds

    early = replay(record(sd=0.0001, change=slower)).early
    (contradicted,) = [name for name in early.contradicted if "pt/same ÷" in name]
    assert contradicted.endswith("equivalent, slower by all")
    assert early.agree < early.count


def test_fewer_rounds_are_the_first_of_each_block():
    samples = {"a": {0: {0: list(range(30)), 4: list(range(9))}}}
    assert fewer(samples) == {"a": {0: {0: list(range(FEWER)), 4: list(range(9))}}}

    def disturbed(variant, block, rounds):  # the last rounds of all blocks say something else
        return rounds + [s / 3 for s in rounds] if variant == "same" else rounds * 2

    designs = replay(record(change=disturbed))
    assert designs.fewer.agree < designs.fewer.count


def test_a_record_of_one_block_has_nothing_to_replay():
    assert replay(record(blocks=1)).early.count == 0


@pytest.mark.parametrize(("blocks", "judged"), [(4, False), (5, True)])
def test_a_record_is_replayed_from_its_second_look_on(blocks, judged):
    run = record(blocks)
    assert (replay(run).early.count > 0) is judged
    assert bool(noise_of(run)) is judged


def test_the_same_rounds_have_intervals_of_the_same_width():
    design = replay(record(blocks=5)).fewer
    assert design.widths == pytest.approx(design.count)


def test_the_noise_of_a_record_is_the_deviation_of_its_ratios():
    run = record(blocks=5)
    sides = {case.id: case.framework for case in run.cases}
    deviations = {}
    for c in run.comparisons:
        frameworks = dict.fromkeys((sides[c.numerator], sides[c.denominator]))
        deviations.setdefault(" ÷ ".join(frameworks), []).append(c.sd)
    noise = noise_of(run)
    assert noise.keys() == deviations.keys() == {"pt", "tf", "pt ÷ tf"}
    for name, values in noise.items():
        assert np.mean(np.square(values)) == pytest.approx(np.mean(np.square(deviations[name])))


def test_the_noise_of_accuracy_is_that_over_seeds_in_margins():
    """Of a row's differences with its baseline, whatever their mean is; of two nothing is known."""
    per_seed = {
        "base": [0.0, 0.0, 0.0, 0.0],
        "row": [1.0, 3.0, 2.0, 2.0],
        "two": [5.0, 9.0],
        "same": [0.0, 0.0, 0.0, 0.0],
        "diverged": [None, 1.0, 3.0, 2.0],
    }
    cases = [records.case(v, accuracy=Accuracy(per_seed=s)) for v, s in per_seed.items()]
    tasks = {"digits-cnn": records.TASKS["digits-cnn"].but(margin=0.5)}
    noise = accuracy_noise_of(records.record([*cases, records.case("untrained")], tasks=tasks))
    expected = [difference / 0.5 * (4 / 3) ** 0.5 for difference in (-1.0, 1.0, 0.0, 0.0)]
    assert noise["digits-cnn"] == pytest.approx(expected)


def test_controls_are_of_another_kin_than_what_is_compared_with_its_baseline():
    kin = {}
    for _, compared in works(record(blocks=3)):
        for comparison, pair in compared:
            kin.setdefault(comparison.kind, set()).add(pair.kin)
    assert kin.keys() == {"control", "baseline", "framework"}
    assert not kin["control"] & kin["baseline"]


# The table ----------------------------------------------------------------------------------------


def test_the_table_has_blocks_and_widths_for_each_ratio():
    designs = Replay(Told(blocks=15, count=4), Told(widths=5.0, count=4), Told(blocks=3, count=1))
    lines = table({"one": designs}).splitlines()
    rows = [line.split() for line in lines if line.startswith("one")]
    assert [row[1] for row in rows] == ["4", "4", "1"]
    assert (rows[0][6], rows[1][2], rows[2][6]) == ("3.8", "1.25", "3.0")
    nothing = table({"one": Replay()}).splitlines()
    assert sum(" 0.0 " in line for line in nothing) == 4


def test_a_width_is_what_the_bounds_are_apart():
    assert _width(Ratio(1.0, (0.4, 1.2), 0.1, 5, None)) == pytest.approx(2.0)


def test_the_table_adds_up_and_names_what_is_lost():
    designs = replay(record())
    designs.early.lost.append("a ÷ b: inconclusive, faster by all")
    lines = table({"one": designs, "two": designs}).splitlines()
    whole, one = (
        next(line for line in lines if line.startswith(name)).split()
        for name in ("together", "one")
    )
    assert int(whole[1]) == 2 * int(one[1]) == 2 * designs.early.count
    assert sum("lost: a ÷ b" in line for line in lines) == 2


def test_replay_is_a_command(tmp_path, capsys):
    (tmp_path / "results.json").write_bytes(encode(record()))
    assert command.main(["replay", str(tmp_path)]) == 0
    assert "together" in capsys.readouterr().out
