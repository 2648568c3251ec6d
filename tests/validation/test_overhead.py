"""Overhead is found where there is some, and a technique's row stands above the plain step."""

from __future__ import annotations

import json
from math import exp

import pytest

from bench.validation import new_processes, overhead

PLAIN = "gradient_clipping, batch 4: nothing to do ÷ plain step"


def test_a_step_that_works_longer_is_found(monkeypatch):
    """On a clock that only steps move, whose speed drifts."""
    now, speed = [0.0], [1.0]

    def lasting(seconds):
        def step():
            speed[0] *= 1.0001
            now[0] += seconds * speed[0]

        return step

    monkeypatch.setattr(overhead.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(overhead, "TURNS", 30)
    ratio = overhead._ratio(lasting(0.0011), lasting(0.001), lambda: None)
    assert ratio == pytest.approx(1.1, rel=1e-3)


@pytest.mark.parametrize("framework", ["pt", "tf"])
def test_what_does_nothing_stands_above_the_plain_step(framework):
    pairs = overhead.pairs(framework, "")
    assert len(pairs) > 6
    top, bottom = pairs[PLAIN]
    assert (top.variant.name, bottom.variant.name) == ("neutral", "plain")
    top, bottom = pairs["baseline, batch 4: plain step ÷ hand-written"]
    assert (top.variant.name, bottom.variant.name) == ("baseline", "hand_written")
    assert all(top.work == bottom.work for top, bottom in pairs.values())


@pytest.mark.parametrize(
    ("logs", "status", "ending"),
    [
        ((0.0, 0.001, -0.001), 0, ")"),
        ((0.0, 0.06, -0.06), 1, "not shown"),
        ((0.05, 0.051, 0.049), 1, "broken"),
    ],
)
def test_an_interval_beyond_what_is_promised_fails(
    monkeypatch, capsys, results_folder, logs, status, ending
):
    answers = iter([json.dumps({PLAIN: exp(value)}) for value in logs])
    monkeypatch.setattr(new_processes, "answer_of", lambda *_, **__: next(answers))
    assert overhead.report(["pt"], "", len(logs), results_folder) == status
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.startswith(f"pt {PLAIN}")
    assert line.endswith(ending)


def test_the_page_counts_what_is_kept():
    bounds = ((0.99, 1.01), (0.98, 1.03), (1.03, 1.05))
    rows = [
        {"framework": "pt", "pair": str(number), "ratio": 1.0, "ci": list(ci)}
        for number, ci in enumerate(bounds)
    ]
    page = overhead.page({"cpu": "a CPU", "threads": 2, "processes": 8, "rows": rows})
    assert "1 of 3 keep that, 1 can't be told, 1 break it" in " ".join(page.split())
