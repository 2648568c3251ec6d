"""The tax is found where there is one, and a technique's row stands above the plain step."""

from __future__ import annotations

import time
from math import exp

import pytest

from bench.validation import command, overhead

PLAIN = "gradient_clipping, batch 4: nothing to do ÷ plain step"


def lasting(seconds: float):
    def step():
        until = time.perf_counter() + seconds
        while time.perf_counter() < until:
            pass

    return step


def test_a_step_that_works_longer_is_found(monkeypatch):
    monkeypatch.setattr(overhead, "TURNS", 30)
    found = overhead._ratio(lasting(0.0011), lasting(0.001), lambda: None)
    assert found == pytest.approx(1.1, abs=0.02)


@pytest.mark.parametrize("framework", ["pt", "tf"])
def test_what_does_nothing_stands_above_the_plain_step(framework):
    found = overhead.pairs(framework, "")
    assert len(found) > 6
    top, bottom = found[PLAIN]
    assert (top.variant.name, bottom.variant.name) == ("neutral", "plain")
    top, bottom = found["baseline, batch 4: plain step ÷ hand-written"]
    assert (top.variant.name, bottom.variant.name) == ("baseline", "hand_written")
    assert all(top.work == bottom.work for top, bottom in found.values())


@pytest.mark.parametrize(
    ("logs", "status", "said"),
    [
        ((0.0, 0.001, -0.001), 0, ""),
        ((0.0, 0.06, -0.06), 1, "not shown"),
        ((0.05, 0.051, 0.049), 1, "broken"),
    ],
)
def test_an_interval_beyond_what_is_promised_fails(
    monkeypatch, capsys, results_folder, logs, status, said
):
    ratios = iter(map(exp, logs))
    monkeypatch.setattr(overhead, "_in_new_process", lambda *arguments: {PLAIN: next(ratios)})
    assert overhead.report(["pt"], "", len(logs), results_folder) == status
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.startswith(f"pt {PLAIN}")
    assert line.endswith(said or ")")


@pytest.mark.parametrize(
    ("option", "said"),
    [("--only=none", "'none' is no technique"), ("--processes=1", "takes 2 or more")],
)
def test_bad_options_are_refused(capsys, option, said):
    with pytest.raises(SystemExit, match="2"):
        command.main(["tax", option])
    assert said in capsys.readouterr().err


def test_the_page_counts_what_is_kept():
    bounds = ((0.99, 1.01), (0.98, 1.03), (1.03, 1.05))
    rows = [
        {"framework": "pt", "pair": str(number), "ratio": 1.0, "ci": list(ci)}
        for number, ci in enumerate(bounds)
    ]
    page = overhead.page({"cpu": "a CPU", "threads": 2, "processes": 8, "rows": rows})
    assert "1 of 3 keep that, 1 can't be told, 1 break it" in " ".join(page.split())
