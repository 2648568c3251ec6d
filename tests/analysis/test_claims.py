"""Claims: what a record says of each, by its intervals alone, and a ledger that has to be sound."""

from __future__ import annotations

import copy
import json
import tomllib
from pathlib import Path

import msgspec
import pytest
from rich.cells import cell_len

from bench import claims as command
from bench.analysis.analyse import analyse
from bench.analysis.claims import (
    FAILS,
    HOLDS,
    LEDGER,
    ON_LARGE,
    ON_SMALL,
    TOO_WIDE,
    UNDECIDED,
    UNMEASURED,
    UNTESTED,
    Claim,
    judge,
    load_ledger,
    read_ledger,
)
from bench.analysis.table import NO_ACCURACY, NOT_COMPARABLE, NOT_MEASURED, ONCE
from bench.harness.run_plan import techniques
from bench.record import DIFFERENT, encode
from bench.report.claims import counts, data, here, page, text
from tests.records import planted, played_run, whole_run, with_environment

DOCS = Path(__file__).parents[2] / "docs"

BF16 = {"technique": "mixed_precision", "variant": "bf16"}
FASTER = {"variants": ["bf16"], "figure": "time", "read": "gain", "at_least": 1.5}


def plain(rule: dict, technique: str = "mixed_precision") -> dict:
    """A claim as it stands in the ledger."""
    return {
        "id": "planted",
        "technique": technique,
        "frameworks": ["pt", "tf"],
        "source": {"title": "A page", "kind": "blog", "where": "nowhere", "year": 2020},
        "wording": "It is faster.",
        "quoted": True,
        "figure": "faster",
        "conditions": "none given",
        "rule": rule,
    }


def claim(rule: dict, technique: str = "mixed_precision", **fields) -> Claim:
    return msgspec.convert(plain(rule, technique) | fields, Claim)


def verdict(record, rule: dict, technique: str = "mixed_precision") -> tuple[str, str]:
    found = judge([record], [claim(rule, technique)])[0]
    return found.verdict, found.why


# Verdicts ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("time", "expected"),
    [
        ((0.5, 0.48, 0.52), (HOLDS, "")),
        ((0.9, 0.88, 0.92), (FAILS, "")),
        ((0.66, 0.6, 0.7), (UNDECIDED, TOO_WIDE)),
        ((0.5,), (UNDECIDED, ONCE)),
    ],
)
def test_a_row_is_judged_by_its_whole_interval(time, expected):
    assert verdict(planted(BF16 | {"time": time}), FASTER) == expected


@pytest.mark.parametrize(
    ("rows", "expected"), [("all", (FAILS, "")), ("any", (HOLDS, ""))], ids=["every", "some"]
)
def test_a_claim_of_every_row_falls_with_one_and_of_some_stands_with_one(rows, expected):
    record = planted(
        BF16 | {"time": (0.5, 0.48, 0.52)},
        BF16 | {"time": (0.9, 0.88, 0.92), "framework": "tf"},
    )
    assert verdict(record, FASTER | {"rows": rows}) == expected


def test_one_row_that_is_too_wide_leaves_a_claim_of_every_row_open():
    record = planted(
        BF16 | {"time": (0.5, 0.48, 0.52)}, BF16 | {"time": (0.66, 0.6, 0.7), "framework": "tf"}
    )
    assert verdict(record, FASTER) == (UNDECIDED, TOO_WIDE)


def test_a_row_that_did_not_run_speaks_against_nobody_and_its_reason_stands_alone():
    stopped = BF16 | {"framework": "tf", "status": "UNSUPPORTED", "reason": "no kernel"}
    record = planted(BF16 | {"time": (0.5, 0.48, 0.52)}, stopped)
    assert verdict(record, FASTER) == (HOLDS, "")
    assert verdict(planted(stopped), FASTER) == (UNMEASURED, "unsupported: no kernel")
    assert verdict(planted(stopped | {"status": "FAILED"}), FASTER) == (
        UNMEASURED,
        "failed: no kernel",
    )


def test_what_needs_a_gpu_is_open_on_a_cpu_and_judged_on_one_with_its_figure_shown_in_both():
    rule = FASTER | {"needs": "cuda"}
    row = BF16 | {"time": (0.5, 0.48, 0.52)}
    assert verdict(planted(row), rule) == (UNTESTED, "needs a GPU")
    assert judge([planted(row)], [claim(rule)])[0].shown.figure.value == 2.0
    assert verdict(planted(row, gpu={"name": "H200"}), rule) == (HOLDS, "")


def test_what_needs_amx_is_judged_where_the_cpu_has_it():
    rule = FASTER | {"needs": "amx"}
    row = BF16 | {"time": (0.5, 0.48, 0.52)}
    assert verdict(planted(row), rule) == (UNTESTED, "needs a CPU with AMX")
    assert verdict(planted(row, isa=("amx_bf16",)), rule) == (HOLDS, "")


def test_other_techniques_variants_tasks_and_modes_do_not_answer():
    record = planted(BF16 | {"time": (0.5, 0.48, 0.52)})
    others = ({"variants": ["fp16"]}, {"tasks": ["text-gpt"]}, {"mode": "predict"})
    for other in others:
        assert verdict(record, FASTER | other) == (UNMEASURED, NOT_MEASURED)
    assert verdict(record, FASTER, "compilation") == (UNMEASURED, NOT_MEASURED)
    one_sided = claim(FASTER, frameworks=["tf"])
    assert judge([record], [one_sided])[0].verdict == UNMEASURED


def test_accuracy_is_judged_by_points_and_open_where_it_was_not_measured():
    rule = {"variants": ["bf16"], "figure": "accuracy", "read": "difference", "at_least": -1}
    assert verdict(planted(BF16 | {"accuracy": (-0.2, -0.5, 0.1)}), rule) == (HOLDS, "")
    assert verdict(planted(BF16 | {"accuracy": (-3.0, -4.0, -2.0)}), rule) == (FAILS, "")
    assert verdict(planted(BF16), rule) == (UNMEASURED, NO_ACCURACY)


def test_the_size_of_a_file_is_exact_and_needs_no_interval():
    rule = {"variants": ["bf16"], "figure": "size", "read": "gain", "at_least": 3.5}
    assert verdict(planted(BF16 | {"size": 0.25}), rule) == (HOLDS, "")
    assert verdict(planted(BF16 | {"size": 0.3}), rule) == (FAILS, "")


def test_the_bounds_of_a_rule_are_within_it():
    rule = {"variants": ["bf16"], "figure": "size", "read": "gain"}
    exact = planted(BF16 | {"size": 0.25})
    assert verdict(exact, rule | {"at_least": 4, "at_most": 4}) == (HOLDS, "")
    assert verdict(exact, rule | {"at_least": 4.01, "at_most": 5}) == (FAILS, "")
    assert verdict(exact, rule | {"at_least": 3, "at_most": 3.99}) == (FAILS, "")


@pytest.mark.parametrize(
    ("bound", "times", "shown"),
    [
        ({"at_most": 0.8}, (0.9, 1.2), 1.2),  # the farthest from a claim that falls
        ({"at_least": 1.5}, (0.9, 1.2), 0.9),
        ({"at_most": 1.5}, (0.9, 1.2), 1.2),  # the nearest to falling where all hold
        ({"at_least": 0.5}, (0.9, 1.2), 0.9),
        ({"at_most": 1.5, "rows": "any"}, (0.9, 1.2), 0.9),  # where some have to, the best
        ({"at_least": 0.5, "rows": "any"}, (0.9, 1.2), 1.2),
    ],
)
def test_the_row_that_is_shown_decides(bound, times, shown):
    rule = {"variants": ["bf16"], "figure": "time", "read": "ratio"} | bound
    each = [
        BF16 | {"framework": side, "time": (ratio, ratio - 0.01, ratio + 0.01)}
        for side, ratio in zip(("pt", "tf"), times, strict=True)
    ]
    for rows in (each, each[::-1]):
        assert judge([planted(*rows)], [claim(rule)])[0].shown.figure.value == shown


def test_unlike_work_is_no_answer():
    record = planted(BF16 | {"time": (0.5, 0.48, 0.52)})
    unlike = [comparison.but(verdict=DIFFERENT) for comparison in record.comparisons]
    assert verdict(record.but(comparisons=unlike), FASTER) == (UNMEASURED, NOT_COMPARABLE)


def test_a_peak_of_one_process_has_the_scatter_of_those_that_the_run_repeated():
    rule = {"variants": ["bf16"], "figure": "memory", "read": "ratio", "at_most": 0.7}
    row = BF16 | {"memory": 0.5}
    assert verdict(planted(row), rule) == (UNDECIDED, ONCE)
    repeated = {"technique": "compilation", "variant": "compiled"}
    assert verdict(planted(row, repeated | {"peaks": [1.0, 1.01, 0.99]}), rule) == (HOLDS, "")
    noisy = planted(row, repeated | {"peaks": [1.0, 1.8, 0.6]})
    assert verdict(noisy, rule) == (UNDECIDED, TOO_WIDE)


def test_a_metric_is_read_against_the_baseline_or_as_it_is():
    row = BF16 | {"metrics": {"steps_to_target": ([50, 45, 55], [100, 90, 110])}}
    rule = {"variants": ["bf16"], "figure": "steps_to_target", "read": "ratio"}
    assert verdict(planted(row), rule | {"at_most": 0.62}) == (HOLDS, "")  # 55 / 90 = 0.611
    assert verdict(planted(row), rule | {"at_most": 0.6}) == (UNDECIDED, TOO_WIDE)
    assert verdict(planted(row), rule | {"read": "value", "at_least": 60}) == (FAILS, "")


def test_against_another_variant_of_the_technique():
    rows = (
        BF16 | {"metrics": {"samples_per_s": ([30, 29, 31], [10, 9, 11])}},
        BF16
        | {"variant": "bf16_fp32_head", "metrics": {"samples_per_s": ([20, 19, 21], [10, 9, 11])}},
    )
    rule = {"variants": ["bf16"], "figure": "samples_per_s", "read": "ratio", "at_least": 1.3}
    against = rule | {"against": "bf16_fp32_head", "at_most": 2}
    assert verdict(planted(*rows), against) == (HOLDS, "")  # 1.38 to 1.63
    assert verdict(planted(*rows), against | {"against": "fp16"}) == (UNMEASURED, NOT_MEASURED)


def test_times_of_two_variants_are_compared_as_they_were_played_side_by_side():
    """Of a run that was played: neither variant is the other's baseline."""
    times = {("pt", "quick"): 0.5, ("pt", "same"): 0.8, ("tf", "quick"): 0.5, ("tf", "same"): 0.8}
    run = analyse(played_run(times, blocks=5))
    rule = {"variants": ["same"], "figure": "time", "read": "ratio", "against": "quick"}
    asked = claim(rule | {"at_least": 1.55, "at_most": 1.65}, "made_up")  # 0.8 / 0.5
    found = judge([run], [asked])[0]
    assert found.verdict == HOLDS
    assert {row.figure.kind for row in found.rows} == {"interval"}


def test_accuracy_of_two_variants_is_paired_by_seed():
    seeds = {"bf16": [91.0, 93.1, 95.0, 97.1], "bf16_fp32_head": [90.0, 92.0, 94.0, 96.0]}
    rows = [
        BF16 | {"variant": name, "accuracy": (0.0, -9.0, 9.0), "seeds": values}
        for name, values in seeds.items()
    ]
    rule = {"variants": ["bf16"], "figure": "accuracy", "read": "difference", "at_least": 0.9}
    assert verdict(planted(*rows), rule) == (UNDECIDED, TOO_WIDE)
    assert verdict(planted(*rows), rule | {"against": "bf16_fp32_head"}) == (HOLDS, "")


def test_an_installed_twinbench_has_the_ledger():
    data_of = tomllib.loads((DOCS.parent / "pyproject.toml").read_text("utf-8"))
    assert LEDGER.name in data_of["tool"]["setuptools"]["package-data"][LEDGER.parent.name]


# By size -----------------------------------------------------------------------------------------

SMALL, LARGE = {"task": "digits-cnn"}, {"task": "photos-resnet18"}
QUICK, SLOW, WIDE = (0.5, 0.48, 0.52), (0.9, 0.88, 0.92), (0.66, 0.6, 0.7)


@pytest.mark.parametrize(
    ("small", "large", "expected"),
    [
        (SLOW, QUICK, (ON_LARGE, "")),
        (QUICK, SLOW, (ON_SMALL, "")),
        (QUICK, QUICK, (HOLDS, "")),
        (SLOW, SLOW, (FAILS, "")),
        (WIDE, QUICK, (UNDECIDED, TOO_WIDE)),
        (SLOW, WIDE, (FAILS, "")),
    ],
)
def test_a_claim_without_conditions_is_judged_for_large_and_small_models_apart(
    small, large, expected
):
    record = planted(BF16 | SMALL | {"time": small}, BF16 | LARGE | {"time": large})
    assert verdict(record, FASTER) == expected


def test_a_claim_that_names_conditions_or_a_task_has_one_verdict_of_all_its_rows():
    record = planted(BF16 | SMALL | {"time": SLOW}, BF16 | LARGE | {"time": QUICK})
    asked = claim(FASTER, conditions="a GPU with tensor cores")
    assert judge([record], [asked])[0].verdict == FAILS
    assert verdict(record, FASTER | {"tasks": ["photos-resnet18"]}) == (HOLDS, "")


def test_both_sizes_are_shown_where_the_size_decides():
    record = planted(BF16 | SMALL | {"time": SLOW}, BF16 | LARGE | {"time": QUICK})
    found = judge([record], [claim(FASTER)])
    words = here(found[0])
    assert words.index("2.000") < words.index("ResNet-18")
    assert words.index("1.111") < words.index("small CNN")
    assert words.endswith("1 of 2 rows hold")
    assert "1 hold on large models, not on small ones" in counts(found)


# Several records ---------------------------------------------------------------------------------


def test_a_second_record_adds_the_rows_that_the_first_does_not_have():
    holds, fails = (0.5, 0.48, 0.52), (0.9, 0.88, 0.92)
    first = planted(BF16 | {"time": holds})
    second = planted(BF16 | {"time": fails}, BF16 | {"time": fails, "framework": "tf"})
    alone, both, turned = (
        judge(records, [claim(FASTER)])[0]
        for records in ([first], [first, second], [second, first])
    )
    assert (alone.verdict, alone.held) == (HOLDS, (1, 1))
    assert (both.verdict, both.held) == (FAILS, (1, 2))  # PyTorch's row is the first record's
    assert (turned.verdict, turned.held) == (FAILS, (0, 2))


def test_a_row_without_its_figure_is_taken_from_the_next_record_that_has_it():
    first, second = planted(BF16), planted(BF16 | {"time": (0.5, 0.48, 0.52)})
    (found,) = judge([first, second], [claim(FASTER)])
    assert (found.verdict, len(found.rows)) == (HOLDS, 1)


def test_of_two_machines_the_one_that_has_what_a_claim_needs_judges_it():
    row = BF16 | {"time": (0.5, 0.48, 0.52)}
    other = row | {"framework": "tf", "time": (0.9, 0.88, 0.92)}
    (found,) = judge(
        [planted(other), planted(row, gpu={"name": "H200"})], [claim(FASTER | {"needs": "cuda"})]
    )
    assert (found.verdict, found.held) == (HOLDS, (1, 1))


def test_the_page_names_each_run_and_what_is_wrong_with_any():
    first, second = (planted(BF16 | {"time": (0.5, 0.48, 0.52)}) for _ in range(2))
    second = second.but(effort="quick", started="2031-01-01T00:00:00+00:00")
    made = page([first, second], judge([first, second], [claim(FASTER)]), "a b")
    assert first.started in made
    assert second.started in made
    assert made.count("PROVISIONAL") == 1
    assert "twinbench claims a b --write" in made


# The published ledger ----------------------------------------------------------------------------


def test_every_technique_has_a_claim_and_every_rule_names_rows_that_are_measured():
    suite, ledger = techniques(), load_ledger()
    assert len(ledger) >= 60
    promising = {name for name, each in suite.items() if each.family != "diagnosis"}
    assert {claim.technique for claim in ledger} == promising  # to diagnose promises no gain
    for each in ledger:
        technique, rule = suite[each.technique], each.rule
        sides: dict[str, set[str]] = {}
        for variant in technique.variants:
            sides.setdefault(variant.name, set()).update(variant.frameworks)
        for name in [*rule.variants, *([rule.against] if rule.against else [])]:
            assert name in sides, (each.id, name)
            assert sides[name] & set(each.frameworks), (each.id, name)
        for task in rule.tasks or []:
            assert task in {"photos-resnet50", *(w.task for w in technique.workloads)}, each.id


def test_every_source_can_be_found_and_no_claim_is_told_twice():
    ledger = load_ledger()
    for each in ledger:
        assert 1990 < each.source.year < 2100
        assert len(each.wording.split()) <= 40, each.id
    rules = [msgspec.json.encode([c.technique, c.frameworks, c.rule]) for c in ledger]
    assert len(set(rules)) == len(rules)


# A bad ledger ------------------------------------------------------------------------------------


def bad(change) -> str:
    claims = [plain(copy.deepcopy(FASTER))]
    change(claims)
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        read_ledger(json.dumps({"claims": claims}).encode())
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda c: c[0].pop("source"), "claims 0: object missing required field `source`"),
        (lambda c: c[0].update(techique="x"), "claims 0: object contains unknown field `techique`"),
        (lambda c: c[0].update(technique="magic"), "(planted): technique: 'magic' is unknown"),
        (lambda c: c[0].update(frameworks=["jax"]), "'jax' is unknown; choose from pt, tf"),
        (lambda c: c[0]["source"].update(year="1999"), "source: year: expected `int`, got `str`"),
        (lambda c: c[0]["source"].update(year=True), "source: year: expected `int`, got `bool`"),
        (lambda c: c[0].update(wording=""), "wording: expected `str` of length >= 1"),
        (lambda c: c[0]["rule"].update(atleast=2), "rule: object contains unknown field `atleast`"),
        (lambda c: c[0]["rule"].pop("at_least"), "give at_least, at_most or both"),
        (lambda c: c[0]["rule"].update(at_most=1), "at_least is above at_most"),
        (lambda c: c[0]["rule"].update(figure="speed"), "figure: 'speed' is unknown"),
        (lambda c: c[0]["rule"].update(read="difference"), "read: difference is only for accuracy"),
        (lambda c: c[0]["rule"].update(read="value"), "read: time needs a baseline"),
        (lambda c: c[0]["rule"].update(variants=[]), "variants: expected `array` of length >= 1"),
        (lambda c: c[0]["rule"].update(needs="tpu"), "'tpu' is unknown; choose from cuda, amx"),
        (lambda c: c.append(copy.deepcopy(c[0])), "claims 1 (planted): another claim has this id"),
        (lambda c: c.append("text"), "claims 1: expected `object`, got `str`"),
    ],
)
def test_a_bad_ledger_has_one_clear_line(change, words):
    assert words in bad(change)


def test_the_command_says_in_one_line_what_is_wrong(tmp_path, capsys):
    for text_of, words in (('{"claims": [', "not JSON"), ("[]", "not a list of claims")):
        path = tmp_path / "claims.json"
        path.write_text(text_of)
        assert command.main([str(DOCS / "avx2"), "--ledger", str(path)]) == 2
        assert words in capsys.readouterr().err
    assert command.main([str(tmp_path)]) == 2
    assert command.main([str(DOCS / "avx2"), "--technique", "magic"]) == 2
    assert "'magic' is unknown" in capsys.readouterr().err


# What is shown -----------------------------------------------------------------------------------


def shown() -> tuple[list, list]:
    record = planted(
        BF16 | {"time": (0.5, 0.48, 0.52)}, BF16 | {"time": (0.9, 0.88, 0.92), "framework": "tf"}
    )
    claims = [
        claim(FASTER | {"rows": "any"}, id="a"),
        claim(FASTER, id="b"),
        claim(FASTER | {"needs": "cuda"}, id="c"),
    ]
    return [record], judge([record], claims)


def test_the_terminal_has_counts_first_and_no_wide_line():
    records, found = shown()
    lines = text(records, found)
    assert lines[0].startswith("3 published claims: 1 hold here, 1 do not hold here, 1 can't be")
    assert all(cell_len(line) <= 80 for line in lines)
    body = " ".join(" ".join(lines).split())
    assert "2.000 (1.923–2.083) (PyTorch, bf16, small CNN on digits, batch 64); 1 of 2 rows" in body
    assert "1.111 (1.087–1.136) (TensorFlow, bf16, small CNN on digits, batch 64)" in body
    assert "needs a GPU; here" in body


@pytest.mark.parametrize("cpu", [None, "another one"])
def test_a_row_of_another_class_of_machine_says_so(cpu):
    of_pt, of_tf = (
        planted(BF16 | {"framework": side, "time": time})
        for side, time in (("pt", (0.5, 0.48, 0.52)), ("tf", (0.4, 0.39, 0.41)))
    )
    of_tf = with_environment(of_tf, cpu=cpu) if cpu else of_tf
    records = [of_pt, of_tf]
    (found,) = judge(records, [claim(FASTER)])
    named = {row.case.framework: row.machine for row in found.rows}
    assert named["pt"] == ""
    assert named["tf"].startswith("another one") == bool(cpu)
    machines = [row["machine"] for row in data(records, [found])["claims"][0]["rows"]]
    assert len(set(machines)) == (2 if cpu else 1)
    assert ("; on another one" in page(records, [found], "a b")) == (
        bool(cpu) and found.shown.case.framework == "tf"
    )


def test_json_has_every_row_with_its_bounds():
    records, found = shown()
    made = json.loads(json.dumps(data(records, found), allow_nan=False))
    counted = {verdict: count for verdict, count in made["counts"].items() if count}
    assert counted == {FAILS: 1, HOLDS: 1, UNTESTED: 1}
    rows = made["claims"][1]["rows"]
    assert [row["verdict"] for row in rows] == [FAILS, HOLDS]
    assert rows[1]["bounds"] == pytest.approx([1 / 0.52, 1 / 0.48])


def test_the_page_shows_each_claim_with_figure_source_and_machine():
    records, found = shown()
    made = page(records, found, "docs")
    assert counts(found) in made
    assert "Xeon Platinum 8488C" in made
    assert "## Does not hold here (1)" in made
    assert "1.111 (1.087–1.136)" in made
    assert "A page, 2020: nowhere" in made
    assert made == page(*shown(), "docs")


def test_a_new_record_changes_the_page(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(command, "PAGE", tmp_path / "claims.md")
    first, second = str(DOCS), tmp_path / "results.json"
    second.write_bytes(encode(whole_run()))
    assert command.main([first, "--check"]) == 1
    assert command.main([first, "--write"]) == 0
    assert command.main([first, "--check"]) == 0
    assert command.main([str(second), "--check"]) == 1
    capsys.readouterr()
