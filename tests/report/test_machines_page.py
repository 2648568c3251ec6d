"""The page of what holds on all machines: what it says first, what stands where, and on a phone."""

from __future__ import annotations

import shutil
from html import escape
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

from bench.analysis.across_machines import Machine, statements
from bench.report import machines
from tests.analysis.test_across_machines import LESS, WIDE_GAIN, pair
from tests.analysis.test_ranking import GAIN, NOTHING, fast, row
from tests.records import ENVIRONMENT

ROOT = Path(__file__).resolve().parents[2]
CHROMIUM = ("chromium", "chromium-browser", "google-chrome")


def machine(name, run, gflops=200, **environment):
    made = ENVIRONMENT.but(peak_flops={"float32": gflops * 1e9}, **environment)
    return Machine(name, run.but(environment=made))


def page(here, *there):
    """The page of these runs, README's first, each of a machine of another speed."""
    first, *more = (machine(str(place), run, 200 * 2**place) for place, run in
                    enumerate((here, *there)))  # fmt: skip
    return machines.page(first, more)


def sections(text):
    """Heading -> what stands below it."""
    return {part.partition("\n")[0]: part for part in text.split("\n## ")}


def gained(*time):
    return fast(row(time=time))


@pytest.mark.parametrize(
    ("there", "heading", "sign"),
    [
        (NOTHING, "What turns", "≠"),
        (WIDE_GAIN, "What can't be told", "?"),
        (LESS, "What holds by another amount", "±"),
        (GAIN, "What holds", "✓"),
    ],
)
def test_an_answer_stands_below_its_verdict_with_what_each_machine_says(there, heading, sign):
    part = sections(page(gained(*GAIN), gained(*there)))[heading]
    assert "**train faster: small CNN on digits, batch 64**" in part
    assert f"\n- {sign} PyTorch: changed" in part
    assert ": 1.67x (1.61–1.72) on 200 GFLOP/s; " in part
    assert " on 400 GFLOP/s\n" in part


def test_the_first_lines_say_how_many_hold_and_which_do_not():
    first = page(gained(*GAIN), gained(*NOTHING)).partition("\n## ")[0]
    assert "1 are reversed or gone" in first
    work = "train faster: small CNN on digits, batch 64"
    assert f"**Turns**: {work}. PyTorch's changed: 1.67x on 200" in first


def test_why_is_what_was_measured_of_both():
    """PyTorch takes three times as long there, TensorFlow as long: who is ahead turns."""
    text = page(pair(1.0, 2.0), pair(3.0, 2.0))
    why = "why: time on 400 GFLOP/s over time on 200 GFLOP/s: "
    assert f"{why}PyTorch's plain code 3.00, TensorFlow's plain code 1.00" in text
    same = page(pair(1.0, 2.0), pair(1.0, 2.0))
    assert "why: " not in same


def test_who_is_ahead_there_has_the_gain_of_whom_it_names():
    text = page(pair(1.0, 2.0), pair(2.0, 1.0))
    assert "- ≠ ahead: PyTorch, 2.00x" in text
    assert "; TensorFlow, 2.00x" in text
    assert "Ahead: PyTorch, 2.00x on 200 GFLOP/s; TensorFlow, 2.00x on 400 GFLOP/s" in text


def test_a_machine_without_an_interval_is_said_to_confirm_nothing():
    text = page(gained(*GAIN), gained(0.6), gained(*GAIN))
    once, twice = text.partition("## The machines")[2].split("- **")[2:4]
    assert "it confirms nothing" in once
    assert "it confirms nothing" not in twice
    assert "1.67x, no interval" in text


def test_machines_of_one_speed_are_told_apart_by_all_their_words():
    first, other = machine("a", gained(*GAIN)), machine("b", gained(*GAIN), cpu="AMD EPYC")
    text = machines.page(first, [other])
    assert "\n- **AMD EPYC (AMX, bfloat16), 2 of 4 processors, 200 GFLOP/s**" in text


def test_readme_counts_other_machines_and_what_holds_on_them():
    first, *more = (machine(str(n), gained(*GAIN), 100 * 2**n) for n in range(6))
    assert ": on 5 others, of 2 answers 1 hold" in machines.line(more, statements(first, more))
    (other, *_) = more
    assert ": on one other, of 2" in machines.line([other], statements(first, [other]))


def test_the_published_page_fits_a_phone(tmp_path):
    """At 390 pixels, unfolded: nothing is wider than the screen, and the summary is on it."""
    api = pytest.importorskip("playwright.sync_api", reason="needs the package playwright")
    path = next(filter(None, map(shutil.which, CHROMIUM)), None)
    if path is None:
        pytest.skip("needs Chromium")
    text = (ROOT / "docs" / "machines.md").read_text("utf-8")
    body = MarkdownIt("commonmark", {"html": True}).enable("table").render(text)
    file = tmp_path / "page.html"
    style = "body { font: 16px/1.5 sans-serif; margin: 16px } pre { overflow: auto }"
    file.write_text(f"<meta charset=utf-8><style>{escape(style)}</style>{body}", "utf-8")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        tab = browser.new_page(viewport={"width": 390, "height": 844})
        tab.goto(file.as_uri())
        tab.evaluate("document.querySelectorAll('details').forEach(part => part.open = true)")
        width = tab.evaluate("document.documentElement.scrollWidth")
        place = tab.evaluate("document.querySelector('h2').getBoundingClientRect().top")
        browser.close()
    assert width <= 390
    assert place < 844
