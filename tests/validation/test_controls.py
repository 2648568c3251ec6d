"""Live controls: who plays, what is said of them, how a measurement ends and goes on."""

import json
import re
from math import log
from types import SimpleNamespace

import pytest

from bench.validation import command, controls, controls_page
from tests.validation.live import measurement


def test_the_planted_leave_when_decided_and_equal_work_stays():
    blocks = measurement()["matches"][0]["blocks"]
    assert set(blocks[2]) == set(blocks[0])
    assert "quick_0" in blocks[2]
    assert "quick_0" not in blocks[3]
    assert {f"same{n}" for n in range(controls.CONTROLS + 1)} <= set(blocks[-1])


def test_the_summary_counts_verdicts_and_tells_what_leaving_moved():
    summary = controls.summary(measurement())
    assert "pt quick: 2 slower; 3.0 blocks on average" in summary
    assert "pt small control  " in summary
    assert "pt slow10: 4 slower" in summary
    moved = [line for line in summary.splitlines() if "moved by" in line]
    assert moved[0].startswith("equal work: ratios of 16 pairs moved by")
    assert controls.summary({"matches": [{"framework": "pt", "blocks": []}]}) == ""


def test_a_change_when_others_leave_is_seen():
    def moved(measured):
        lines = controls.summary(measured).splitlines()
        line = next(line for line in lines if line.startswith("5% planted"))
        low, high = line.partition("(")[2].partition(")")[0].split("–")
        return float(low), float(high)

    low, high = moved(measurement(sd=0.03, left=0.0))
    assert low < 0 < high
    low, high = moved(measurement(sd=0.03, left=0.10))
    assert low > 3


def test_pairs_of_all_sides_and_workloads_are_played_in_turn():
    def in_turn(*given):
        matches = controls.new_measurement(*given)["matches"]
        return [(match["framework"], match["workload"]) for match in matches]

    assert in_turn(["pt", "tf_keras"], ["small", "text"], 12) == [
        *(("pt", "small"), ("pt", "text"), ("pt", "small")),
        *(("tf_keras", "small"), ("tf_keras", "text"), ("tf_keras", "small")),
    ]
    assert in_turn(["pt", "tf", "tf_keras"], ["small", "text"], 20)[5:] == [
        *(("tf", "small"), ("tf_keras", "small"), ("tf", "text"), ("tf_keras", "text")),
        ("tf", "small"),
    ]
    (kinds,) = {(c.framework, c.flavour, c.workload) for c in controls.contenders("tf", "text")}
    assert kinds == ("tf", "keras3", controls.WORKLOADS["text"])
    assert {c.flavour for c in controls.contenders("tf_keras")} == {"tf_keras"}


def test_a_planted_step_takes_its_share_longer_and_gives_the_same(monkeypatch):
    now, calls = [0.0], []

    def clock():
        now[0] += 0.001
        return now[0]

    def call(x, y):
        calls.append((x, y))
        now[0] += 2.0
        return x + y

    monkeypatch.setattr(controls.time, "perf_counter", clock)
    assert controls._slowed(call, 0.5)(1, 2) == 3
    assert calls == [(1, 2)]
    assert now[0] == pytest.approx(3.0, rel=0.01)


SIDES = {"PyTorch": 0, "TensorFlow": 1}

# The page -----------------------------------------------------------------------------------------


def test_the_page_counts_what_is_told_apart_and_what_is_found():
    page = controls_page.page(measurement())
    assert "Measured on A CPU, avx2, 2 cores." in page
    assert "| PyTorch | 10% longer, planted | 4 found of 4 | 4 slower | 1.1" in page
    # Of 16 pairs of equal work one is told apart by luck, as 5% of them may be.
    counts = [f"| {side} | equal work | {n} told apart of 8 |" for side, n in SIDES.items()]
    assert all(count in page for count in counts)
    assert "8 blocks, with looks at 3, 5, 8: told apart in 1 of 16 (0.2%–30.2%) pairs" in page
    assert "3 blocks, as by default: told apart in 0 of 16 (0.0%–20.6%) pairs" in page


def test_the_page_has_a_row_for_each_workload_and_side():
    measured = measurement()
    measured["matches"][0]["workload"] = "text"
    measured["matches"][2]["framework"] = "tf_keras"
    page = controls_page.page(measured)
    assert "| TensorFlow, tf_keras | 50% longer, planted | 1 found of 1 |" in page
    # Of equal work, 2%, 5%, 10% and half longer: at 2% a difference is found by luck.
    for row in (
        "small GPT on text, batch 2, train step | 0 of 4 | N of 2 | 2 of 2 | 2 of 2 | 1 of 1",
        "small CNN on digits, batch 4, train step | 1 of 12 | N of 6 | 6 of 6 | 6 of 6 | 3 of 3",
    ):
        assert re.search(re.escape(row).replace(r"N\ of", r"\d\ of"), page), row


def test_the_page_counts_equal_work_that_is_told_apart():
    measured = measurement()
    for match in measured["matches"][:2]:
        for block in match["blocks"]:
            block["same1"] += 0.3  # from the contenders on both sides of it
    assert "| PyTorch | equal work | 4 told apart of 8 |" in controls_page.page(measured)


def test_the_page_compares_the_workers_of_both_parents():
    """Of each kind of work, block by block; and says how often chance does as much."""
    row = r"\| PyTorch \| small CNN on digits, batch 4, train step \| (\S+) \((\S+)–(\S+)\) \| 8 \|"
    measured = measurement(sd=0.005)
    alike = controls_page.page(measured)
    for match in measured["matches"][:2]:
        for block in match["blocks"]:
            block["same1"] += log(1.1)
            block["same3"] += log(1.1)
    unlike = controls_page.page(measured)
    before, *interval_before = map(float, re.search(row, alike).groups())
    after, *interval_after = map(float, re.search(row, unlike).groups())
    assert interval_before[0] <= 1 <= interval_before[1]
    assert after / before == pytest.approx(1.1, abs=0.002)
    assert interval_after[0] > 1
    chance = "intervals leave 1 out; where parents are alike, so many or more do in"
    assert f"0 of 2 {chance} 100%" in alike
    assert f"1 of 2 {chance} 10%" in unlike


# Measuring ----------------------------------------------------------------------------------------


def play_without_workers(monkeypatch, seconds=0.0, fails=None, at=3):
    """Blocks are played at once; `fails` is raised by the block of this number."""
    now, count = [0.0], [0]

    def play(processes, match, number, threads, results):
        count[0] += 1
        now[0] += seconds
        if fails and count[0] == at:
            raise fails
        return dict.fromkeys(controls.staying(match["blocks"]), 0.0)

    monkeypatch.setattr(controls.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(controls, "_play", play)
    monkeypatch.setattr(controls, "_start_parents", lambda *_: None)


def block_counts(folder):
    measured = json.loads((folder / "latest" / "validation.json").read_text("utf-8"))
    return [len(match["blocks"]) for match in measured["matches"]]


def test_a_measurement_ends_in_time_and_goes_on(tmp_path, monkeypatch, capsys):
    play_without_workers(monkeypatch, seconds=60)
    options = ["--pairs", "4", "--results", str(tmp_path)]
    assert command.main(["measure", *options, "--minutes", "5"]) == 2
    assert block_counts(tmp_path) == [3, 2]  # a minute each: none is begun that would end later
    assert "goes on where it ended" in capsys.readouterr().err
    again = ["--resume", str(tmp_path / "latest"), "--results", str(tmp_path)]
    assert command.main(["measure", *again]) == 0
    assert block_counts(tmp_path) == [8, 8]
    assert "pt control: 4 equivalent; 8.0 blocks on average" in capsys.readouterr().out


@pytest.mark.parametrize(("at", "kept"), [(1, [0, 0]), (3, [1, 1])])
def test_an_interrupted_measurement_keeps_what_it_has(tmp_path, monkeypatch, capsys, at, kept):
    play_without_workers(monkeypatch, fails=KeyboardInterrupt(), at=at)
    assert command.main(["measure", "--pairs", "4", "--results", str(tmp_path)]) == 2
    assert block_counts(tmp_path) == kept
    assert "goes on where it ended" in capsys.readouterr().err


def test_how_to_go_on_can_be_pasted_whatever_the_folder(tmp_path, monkeypatch, capsys):
    play_without_workers(monkeypatch, fails=KeyboardInterrupt())
    folder = tmp_path / "my results"
    command.main(["measure", "--pairs", "4", "--results", str(folder)])
    printed = re.search(r"--resume '(.*)' goes on", capsys.readouterr().err)[1]
    assert printed.startswith(str(folder.resolve()))


def test_an_interrupted_measurement_knows_what_is_left():
    measured = measurement(blocks=2)
    measured["matches"][3]["blocks"].pop()
    left = controls._left(measured)
    assert left[0] == (1, "tf", [3])
    assert left[1] == (2, "pt", [0, 1])
    assert len(left) == 1 + 2 * 6


def test_who_fails_in_a_block_is_left_out_of_it_and_named(tmp_path, monkeypatch, capsys):
    """The others play on, and are compared; where nobody is left, the measurement ends."""
    failing = {"quick_0"}

    class PlayedMatch:
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

    monkeypatch.setattr(controls, "Match", PlayedMatch)
    match = {"framework": "pt", "workload": "small", "blocks": []}
    processes = SimpleNamespace(forks=False)
    for _ in range(4):
        match["blocks"].append(controls._play(processes, match, 0, 1, tmp_path))
    err = capsys.readouterr().err
    assert "/quick_0: not synchronised" in err
    assert "/slow2_0: there was no room for it" in err
    assert all(not {"quick_0", "slow2_0"} & set(block) for block in match["blocks"])
    summary = controls.summary({"matches": [match]})
    assert "/quick_0: not synchronised" in summary
    assert "pt control: 4 equivalent" in summary
    assert len(controls.noise_of({"matches": [match]})["pt"]) == 4 * controls.CONTROLS
    failing |= {case.variant.name for case in controls.contenders("pt")}
    with pytest.raises(SystemExit, match="not synchronised"):
        controls._play(processes, match, 0, 1, tmp_path)
