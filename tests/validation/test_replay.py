"""Records judged as if their runs had ended early; what was measured live; the commands."""

import json
import re
from math import log
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from tests.analysis.test_early_stopping import measured

import bench.validation.attacked
import bench.validation.simulate
from bench.analysis.analyse import analyse
from bench.analysis.verdicts import Ratio
from bench.docs import validation
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

TIMES = {("pt", "quick"): 0.5, ("tf", "quick"): 0.6}


def changed(record, technique, change):
    """The record with other samples: `change` is given a case's variant and a block's samples."""
    for case in record["cases"]:
        for blocks in case["timing"]["step_s"].values():
            for number, own in blocks.items():
                blocks[number] = change(case["variant"], int(number), own)
    return record


def test_a_clear_record_ends_at_the_first_look_and_agrees():
    found = replay(analyse(measured(TIMES, blocks=8, looks=None)))
    assert found.early.count == found.early.agree == found.early.decided[3] > 6
    assert found.early.blocks == 3 * found.early.count
    assert found.fewer.agree == found.fewer.count


def test_what_only_later_blocks_tell_is_contradicted():
    """Three blocks say that it is equal, eight that it is far slower."""

    def slower(variant, block, own):
        return [each * 9 if variant == "same" and block > 2 else each for each in own]

    given = measured(TIMES, blocks=8, looks=None, sd=0.0001)
    found = replay(analyse(changed(given, "made_up", slower)))
    own = [name for name in found.early.contradicted if "pt/same ÷" in name]
    assert len(own) == 1
    assert own[0].endswith("equivalent, slower by all")
    assert found.early.agree < found.early.count


def test_fewer_rounds_are_the_first_of_each_block():
    samples = {"a": {0: {0: list(range(30)), 4: list(range(9))}}}
    assert fewer(samples) == {"a": {0: {0: list(range(FEWER)), 4: list(range(9))}}}

    def disturbed(variant, block, own):  # the last rounds of all blocks say something else
        return own[:15] + [each / 3 for each in own] if variant == "same" else own * 2

    found = replay(analyse(changed(measured(TIMES, blocks=8, looks=None), "made_up", disturbed)))
    assert found.fewer.agree < found.fewer.count


def test_a_record_of_one_block_has_nothing_to_replay():
    assert replay(analyse(measured(TIMES, blocks=1, looks=None))).early.count == 0


@pytest.mark.parametrize(("blocks", "judged"), [(4, False), (5, True)])
def test_a_record_is_replayed_from_its_second_look_on(blocks, judged):
    run = analyse(measured(TIMES, blocks=blocks, looks=None))
    assert (replay(run).early.count > 0) is judged
    assert bool(noise_of(run)) is judged


def test_the_same_rounds_have_intervals_of_the_same_width():
    def short(variant, block, own):
        return own[:FEWER]

    whole = measured(TIMES, blocks=5, looks=None)
    found = replay(analyse(changed(whole, "made_up", short))).fewer
    assert found.widths == pytest.approx(found.count)


def test_the_noise_of_a_record_is_the_deviation_of_its_ratios():
    run = analyse(measured(TIMES, blocks=5, looks=None))
    sides = {case["id"]: case["framework"] for case in run["cases"]}
    deviations = {}
    for c in run["comparisons"]:
        frameworks = dict.fromkeys(sides[c[role]] for role in ("numerator", "denominator"))
        deviations.setdefault(" ÷ ".join(frameworks), []).append(c["sd"])
    found = noise_of(run)
    assert found.keys() == deviations.keys() == {"pt", "tf", "pt ÷ tf"}
    for name, noise in found.items():
        assert np.mean(np.square(noise)) == pytest.approx(np.mean(np.square(deviations[name])))


def test_the_table_has_blocks_and_widths_for_each_ratio():
    given = Replay(Told(blocks=15, count=4), Told(widths=5.0, count=4), Told(blocks=3, count=1))
    rows = [line.split() for line in table({"one": given}).splitlines() if line.startswith("one")]
    assert [line[1] for line in rows] == ["4", "4", "1"]
    assert (rows[0][6], rows[1][2], rows[2][6]) == ("3.8", "1.25", "3.0")
    nothing = table({"one": Replay()}).splitlines()
    assert sum(" 0.0 " in line for line in nothing) == 4


def test_a_width_is_what_the_bounds_are_apart():
    assert _width(Ratio(1.0, (0.4, 1.2), 0.1, 5, None)) == pytest.approx(2.0)


def test_controls_are_of_another_kin_than_what_is_compared_with_its_baseline():
    kin = {}
    for _, asked in works(analyse(measured(TIMES, blocks=3, looks=None))):
        for comparison, pair in asked:
            kin.setdefault(comparison["kind"], set()).add(pair.kin)
    assert kin.keys() == {"control", "baseline", "framework"}
    assert not kin["control"] & kin["baseline"]


def test_the_table_adds_up_and_names_what_is_lost():
    found = replay(analyse(measured(TIMES, blocks=8, looks=None)))
    found.early.lost.append("a ÷ b: inconclusive, faster by all")
    lines = table({"one": found, "two": found}).splitlines()
    whole = next(line for line in lines if line.startswith("together")).split()
    one = next(line for line in lines if line.startswith("one")).split()
    assert int(whole[1]) == 2 * int(one[1]) == 2 * found.early.count
    assert sum("lost: a ÷ b" in line for line in lines) == 2


# What `measure` finds ----------------------------------------------------------------------------


def live(blocks=8, sd=0.02, shift=0.0, left=0.0, seed=0):
    """A validation.json of two matches a framework; `left`: what leaving does to the planted."""
    random, matches = np.random.default_rng(seed), []
    for framework in ("pt", "pt", "tf", "tf"):
        played = []
        for _ in range(blocks):
            names = command.staying(played)
            alone = left if played and len(names) < len(played[0]) else 0.0
            planted = {n: log(1 + command.PLANTED.get(n.partition("_")[0], 0)) for n in names}
            played.append(
                {
                    n: planted[n] * (1 + shift)
                    + (alone if planted[n] else 0.0)
                    + random.normal(0, sd / 2**0.5)
                    for n in sorted(names)
                }
            )
        matches.append({"framework": framework, "workload": "small", "blocks": played})
    return {"matches": matches}


def test_the_planted_leave_when_decided_and_equal_work_stays():
    blocks = live()["matches"][0]["blocks"]
    assert set(blocks[2]) == set(blocks[0])
    assert "quick_0" in blocks[2]
    assert "quick_0" not in blocks[3]
    assert {f"same{n}" for n in range(command.CONTROLS + 1)} <= set(blocks[-1])


def test_the_summary_counts_verdicts_and_tells_what_leaving_moved():
    said = command.summary(live())
    assert "pt quick: 2 slower; 3.0 blocks on average" in said
    assert "pt small control  " in said
    assert "pt slow10: 4 slower" in said
    moved = [line for line in said.splitlines() if "moved by" in line]
    assert moved[0].startswith("equal work: ratios of 16 pairs moved by")
    assert command.summary({"matches": [{"framework": "pt", "blocks": []}]}) == ""


def test_its_page_counts_what_is_told_apart_and_what_is_found():
    found = live() | {"environment": {"cpu": "A CPU", "isa": ["avx2"], "threads": 2}}
    said = validation.page(found)
    assert "Measured on A CPU, avx2, 2 cores." in said
    assert "| PyTorch | 10% longer, planted | 4 found of 4 | 4 slower | 1.1" in said
    assert said.count("| equal work | 0 told apart of 8 |") == 2
    for looks in ("8 blocks, with looks at 3, 5, 8", "5 blocks, with looks at 3, 5, as by default"):
        assert f"runs of at most {looks}: told apart in 0 of 16 (0.0%–20.6%) pairs" in said
    found["matches"][0]["workload"] = "text"
    found["matches"][2]["framework"] = "tf_keras"
    said = validation.page(found)
    assert "| TensorFlow, tf_keras | 50% longer, planted | 1 found of 1 |" in said
    # Of equal work, 2%, 5%, 10% and half longer: at 2% a difference is found by luck.
    for row in (
        "text-gpt, batch 2, train step | 0 of 4 | N of 2 | 2 of 2 | 2 of 2 | 1 of 1",
        "digits-cnn, batch 4, train step | 0 of 12 | N of 6 | 6 of 6 | 6 of 6 | 3 of 3",
    ):
        assert re.search(re.escape(row).replace("N", r"\d"), said), row
    found = live() | {"environment": {"cpu": "A CPU", "isa": ["avx2"], "threads": 2}}
    for match in found["matches"][:2]:
        for block in match["blocks"]:
            block["same1"] += 0.3  # from the contenders on both sides of it
    assert "| PyTorch | equal work | 4 told apart of 8 |" in validation.page(found)


def test_its_page_compares_the_workers_of_both_parents():
    """Of each kind of work, block by block; and says how often chance does as much."""
    found = live(sd=0.005) | {"environment": {"cpu": "A CPU", "isa": ["avx2"], "threads": 2}}
    alike = validation.page(found)
    for match in found["matches"][:2]:
        for block in match["blocks"]:
            block["same1"] += log(1.1)
            block["same3"] += log(1.1)
    said = validation.page(found)
    row = r"\| PyTorch \| digits-cnn, batch 4, train step \| (\S+) \((\S+)–(\S+)\) \| 8 \|"
    (before, *around), (after, *apart) = (re.search(row, each).groups() for each in (alike, said))
    assert float(around[0]) <= 1 <= float(around[1])
    assert float(after) / float(before) == pytest.approx(1.1, abs=0.002)
    assert float(apart[0]) > 1
    assert (
        "0 of 2 intervals leave 1 out; where parents are alike, so many or more do in 100%" in alike
    )
    assert (
        "1 of 2 intervals leave 1 out; where parents are alike, so many or more do in 10%" in said
    )


def test_pairs_of_all_sides_and_workloads_are_played_in_turn():
    found = command._begun(["pt", "tf_keras"], ["small", "text"], 12)
    assert [(m["framework"], m["workload"]) for m in found["matches"]] == [
        ("pt", "small"), ("pt", "text"), ("pt", "small"),
        ("tf_keras", "small"), ("tf_keras", "text"), ("tf_keras", "small"),
    ]  # fmt: skip
    found = command._begun(["pt", "tf", "tf_keras"], ["small", "text"], 20)
    assert [(m["framework"], m["workload"]) for m in found["matches"]][5:] == [
        ("tf", "small"), ("tf_keras", "small"), ("tf", "text"), ("tf_keras", "text"),
        ("tf", "small"),
    ]  # fmt: skip
    (kinds,) = {(c.framework, c.flavour, c.workload) for c in command.contenders("tf", "text")}
    assert kinds == ("tf", "keras3", command.WORKLOADS["text"])
    assert {c.flavour for c in command.contenders("tf_keras")} == {"tf_keras"}


def test_a_planted_step_takes_its_share_longer_and_gives_the_same(monkeypatch):
    now, calls = [0.0], []

    def clock():
        now[0] += 0.001
        return now[0]

    def call(x, y):
        calls.append((x, y))
        now[0] += 2.0
        return x + y

    monkeypatch.setattr(command.time, "perf_counter", clock)
    assert command._longer(call, 0.5)(1, 2) == 3
    assert calls == [(1, 2)]
    assert now[0] == pytest.approx(3.0, rel=0.01)


def test_a_change_when_others_leave_is_seen():
    def moved(found):
        line = next(x for x in command.summary(found).splitlines() if x.startswith("5% planted"))
        low, high = line.partition("(")[2].partition(")")[0].split("–")
        return float(low), float(high)

    low, high = moved(live(sd=0.03, left=0.0))
    assert low < 0 < high
    low, high = moved(live(sd=0.03, left=0.10))
    assert low > 3


def test_an_interrupted_measurement_knows_what_is_left():
    found = live(blocks=2)
    found["matches"][3]["blocks"].pop()
    left = command._left(found)
    assert left[0] == (1, "tf", [3])
    assert left[1] == (2, "pt", [0, 1])
    assert len(left) == 1 + 2 * 6


@pytest.fixture
def file(tmp_path):
    def write(found):
        path = tmp_path / "validation.json"
        path.write_text(json.dumps(found), "utf-8")
        return str(path)

    return write


def test_simulate_prints_coverage_for_each_framework(file, capsys, monkeypatch):
    monkeypatch.setattr(bench.validation.simulate.simulate, "__defaults__", (40,))
    assert command.main(["simulate", file(live())]) == 0
    said = capsys.readouterr().out
    assert said.count("intervals cover the truth in") == 2
    assert "true ratio 1.050:" in said


def test_simulate_takes_the_noise_of_a_record(file, capsys, monkeypatch):
    """Its deviation is that between blocks, whatever the ratios are."""
    monkeypatch.setattr(bench.validation.simulate.simulate, "__defaults__", (40,))
    given = analyse(measured(TIMES, blocks=8, looks=None, sd=0.02)) | RUN
    noise = noise_of(given)
    assert set(noise) == {"pt", "tf", "pt ÷ tf"}
    assert all(abs(np.mean(own)) < 1e-12 for own in noise.values())
    assert np.std(noise["pt ÷ tf"]) == pytest.approx(0.02 * 2**0.5, rel=0.3)
    assert command.main(["simulate", file(given)]) == 0
    said = capsys.readouterr().out
    assert "pt ÷ tf: noise sd" in said
    assert 'wrong: at 1 "faster" or "slower" 0.0%; at the margin "slower"' in said


def test_the_noise_of_accuracy_is_that_over_seeds_in_margins():
    """Of a row's differences with its baseline, whatever their mean is; of two nothing is known."""
    many = [[1.0, 3.0, 2.0, 2.0], [0.0, 0.0, 0.0, 0.0]]
    given = {"tasks": {"digits-cnn": {"margin": 0.5}}, "cases": []}
    for variant, role, values in (
        ("base", "baseline", many[1]),
        ("row", "variant", many[0]),
        ("two", "variant", [5.0, 9.0]),
        ("same", "variant", many[1]),
        ("diverged", "variant", [None, 1.0, 3.0, 2.0]),
    ):
        one = {"id": variant, "variant": variant, "role": role, "technique": "made_up"}
        one |= {"framework": "pt", "flavour": None, "task": "digits-cnn", "batch_size": 4}
        given["cases"].append(one | {"mode": "train", "accuracy": {"per_seed": values}})
    found = accuracy_noise_of(given)["digits-cnn"]
    assert found == pytest.approx([each / 0.5 * (4 / 3) ** 0.5 for each in (-1.0, 1.0, 0.0, 0.0)])


def test_simulate_publishes_what_it_found_of_a_record(file, monkeypatch, tmp_path):
    monkeypatch.setattr(bench.validation.simulate.simulate, "__defaults__", (40,))
    monkeypatch.setattr(bench.validation.attacked, "RECORD", tmp_path / "attacked.json")
    monkeypatch.setattr(bench.validation.attacked, "PAGE", tmp_path / "attacked.md")
    given = file(analyse(measured(TIMES, blocks=8, looks=None, sd=0.02)) | RUN)
    with pytest.raises(SystemExit, match="2"):  # since it is not the published one
        command.main(["simulate", given, "--publish"])
    monkeypatch.setattr(bench.validation.attacked, "PUBLISHED", Path(given).resolve())
    assert command.main(["simulate", given, "--publish"]) == 0
    page = bench.validation.attacked.PAGE.read_text("utf-8")
    assert "| PyTorch ÷ TensorFlow | 1.50 | 100.0% | 0.0% | 0.0% |" in page


@pytest.mark.parametrize("found", [[], {}, {"matches": [{}]}, {"matches": []}, live(blocks=0)])
def test_simulate_refuses_what_is_no_validation(file, found, capsys):
    with pytest.raises(SystemExit) as stopped:
        command.main(["simulate", file(found)])
    assert stopped.value.code == 2
    assert "validation.json" in capsys.readouterr().err


def test_replay_is_a_command(tmp_path, capsys):
    (tmp_path / "results.json").write_text(
        json.dumps(analyse(measured(TIMES, blocks=8, looks=None)) | RUN), "utf-8"
    )
    assert command.main(["replay", str(tmp_path)]) == 0
    assert "together" in capsys.readouterr().out
    with pytest.raises(SystemExit) as stopped:
        command.main(["replay", str(tmp_path / "nothing")])
    assert stopped.value.code == 2


RUN = {"effort": "default", "environment": {"packages": {}}}


def test_measure_goes_on_with_no_damaged_file(tmp_path, monkeypatch, capsys):
    """What else is no option, tests/test_bad_input.py draws."""
    monkeypatch.chdir(tmp_path)
    cut = '{"matches": [{"framework": "pt", "workload": "small"}'
    (tmp_path / "validation.json").write_text(cut)
    with pytest.raises(SystemExit) as stopped:
        command.main(["measure", "--resume", "."])
    assert stopped.value.code == 2
    assert "holds a damaged validation.json" in capsys.readouterr().err


def played_without_workers(monkeypatch, seconds=0.0, fails=None, at=3):
    """`measure` plays at once; `fails` is raised by the block of this number."""
    now, count = [0.0], [0]

    def play(processes, match, number, threads, results):
        count[0] += 1
        now[0] += seconds
        if fails and count[0] == at:
            raise fails
        return dict.fromkeys(command.staying(match["blocks"]), 0.0)

    monkeypatch.setattr(command.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(command, "_play", play)
    monkeypatch.setattr(command, "_start_parents", lambda *_: None)
    monkeypatch.setattr(command.machine, "describe", lambda threads: {})


def test_who_fails_in_a_block_is_left_out_of_it_and_named(tmp_path, monkeypatch, capsys):
    """The others play on, and are compared; where nobody is left, the measurement ends."""
    failing = {"quick_0"}

    class Played:
        def __init__(self, processes, cases, **_):
            self.cases = cases

        def play(self, rounds):
            return {
                case.id: SimpleNamespace(
                    status="FAILED" if case.variant.name in failing else "OK",
                    reason="not synchronised",
                    samples=[1.0] * rounds,
                )
                for case in self.cases
                if case.variant.name != "slow2_0"  # there was no room for it
            }

    monkeypatch.setattr(command, "Match", Played)
    match = {"framework": "pt", "workload": "small", "blocks": []}
    processes = SimpleNamespace(forks=False)
    for _ in range(4):
        match["blocks"].append(command._play(processes, match, 0, 1, tmp_path))
    said = capsys.readouterr().err
    assert "/quick_0: not synchronised" in said
    assert "/slow2_0: there was no room for it" in said
    assert all(not {"quick_0", "slow2_0"} & set(block) for block in match["blocks"])
    found = {"matches": [match]}
    assert "/quick_0: not synchronised" in command.summary(found)
    assert "pt control: 4 equivalent" in command.summary(found)
    assert len(command.noise_of(found)["pt"]) == 4 * command.CONTROLS
    failing |= {each.variant.name for each in command.contenders("pt")}
    with pytest.raises(SystemExit, match="not synchronised"):
        command._play(processes, match, 0, 1, tmp_path)


def counts(folder):
    found = json.loads((folder / "latest" / "validation.json").read_text("utf-8"))
    return [len(match["blocks"]) for match in found["matches"]]


def test_measure_ends_in_time_and_goes_on(tmp_path, monkeypatch, capsys):
    played_without_workers(monkeypatch, seconds=60)
    options = ["--pairs", "4", "--results", str(tmp_path)]
    assert command.main(["measure", *options, "--minutes", "5"]) == 2
    assert counts(tmp_path) == [3, 2]  # a minute each, and none is begun that would end later
    said = capsys.readouterr()
    assert "goes on where it ended" in said.err
    again = ["--resume", str(tmp_path / "latest"), "--results", str(tmp_path)]
    assert command.main(["measure", *again]) == 0
    assert counts(tmp_path) == [8, 8]
    assert "pt control: 4 equivalent; 8.0 blocks on average" in capsys.readouterr().out


@pytest.mark.parametrize(("at", "kept"), [(1, [0, 0]), (3, [1, 1])])
def test_an_interrupted_measurement_keeps_what_it_has(tmp_path, monkeypatch, capsys, at, kept):
    played_without_workers(monkeypatch, fails=KeyboardInterrupt(), at=at)
    assert command.main(["measure", "--pairs", "4", "--results", str(tmp_path)]) == 2
    assert counts(tmp_path) == kept
    assert "goes on where it ended" in capsys.readouterr().err
