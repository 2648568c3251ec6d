"""Records judged as if their runs had been shorter, and by what their blocks scatter."""

import numpy as np
import pytest

from bench.record import Accuracy, encode
from bench.validation import command
from bench.validation.replay import (
    DESIGNS,
    FEWEST,
    Design,
    accuracy_noise_of,
    agreement,
    noise_of,
    ratios,
    scatter,
    works,
)
from tests import records
from tests.validation.sampled import record

DEFAULT = DESIGNS[0]


def test_runs_of_the_same_truth_agree_and_another_truth_does_not():
    def slower(variant, block, rounds):
        return [1.5 * s for s in rounds] if variant == "same" else rounds

    runs = [record(sd=0.02, seed=seed) for seed in range(6)]
    alike = agreement(runs, DEFAULT, "small")
    assert alike.within / alike.compared > 0.9
    assert 0.02 < alike.half_width < 0.10
    assert agreement(runs, DEFAULT, "large") is None
    odd = agreement([runs[0], record(sd=0.02, seed=9, change=slower)], DEFAULT, "small")
    # Of either framework "same" and "quick" to its baseline, and both twins: twins stay.
    assert (odd.compared, odd.within) == (7, 5)
    assert agreement(runs[:1], DEFAULT, "small") is None


def test_a_design_sees_its_own_blocks_alone():
    """Three blocks say that it is equal, eight that it is far slower."""

    def slower(variant, block, rounds):
        return [9 * s for s in rounds] if variant == "same" and block > 2 else rounds

    run = record(sd=0.0001, change=slower)
    short, whole = (
        next(
            ratio
            for (top, bottom), ratio in ratios(run, design, "small").items()
            if top.endswith("pt/same") and bottom.endswith("pt/base")
        )
        for design in (DEFAULT, DESIGNS[-1])
    )
    assert (short.n, short.verdict) == (FEWEST, "equivalent")
    assert whole.n == 8
    assert whole.ratio > 2


def test_the_weight_of_others_narrows_intervals():
    runs = [record(sd=0.02, seed=seed) for seed in range(4)]
    own = Design("", FEWEST, prior=0.0)
    widths = [agreement(runs, design, "small").half_width for design in (DEFAULT, own)]
    assert widths[0] < widths[1]


def test_what_stays_in_a_process_is_told_from_what_rounds_do():
    random = np.random.default_rng(5)

    def noisy(variant, block, rounds):
        return [s * np.exp(random.normal(0, 0.10)) for s in rounds]

    stays = scatter([record(sd=0.03, seed=seed) for seed in range(8)])
    assert stays.stays == pytest.approx(0.03 * 2**0.5, rel=0.35)
    assert max(stays.by_rounds.values()) < 1.1 * min(stays.by_rounds.values())
    assert stays.at(30) == pytest.approx(stays.stays, rel=0.05)
    both = scatter([record(sd=0.01, seed=seed, change=noisy) for seed in range(8)])
    assert both.stays < 0.6 * both.by_rounds[max(both.by_rounds)]
    assert both.by_rounds[3] > 1.3 * both.by_rounds[15]


@pytest.mark.parametrize(("blocks", "judged"), [(2, False), (3, True)])
def test_a_record_is_replayed_from_three_blocks_on(blocks, judged):
    assert bool(noise_of(record(blocks))) is judged
    assert bool(scatter([record(blocks)])) is judged


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


def test_replay_is_a_command(tmp_path, capsys):
    folders = [tmp_path / name for name in ("one", "two")]
    for seed, folder in enumerate(folders):
        folder.mkdir()
        (folder / "results.json").write_bytes(encode(record(seed=seed)))
    assert command.main(["replay", *map(str, folders)]) == 0
    shown = capsys.readouterr().out
    assert len([line for line in shown.splitlines() if line.startswith("small")]) == len(DESIGNS)
    assert "a block's ratio scatters by, with so many rounds, 3: " in shown
    assert command.main(["replay", str(folders[0])]) == 0
    assert "takes two records" in capsys.readouterr().out
    (tmp_path / "results.json").write_bytes(encode(record(blocks=2)))
    with pytest.raises(SystemExit):
        command.main(["replay", str(tmp_path)])
    assert "no comparison has 3 blocks" in capsys.readouterr().err
