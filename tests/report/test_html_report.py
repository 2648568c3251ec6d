"""The page: it holds the figures of report.md, needs no network, runs nothing of a record."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import json
import re
import time
from functools import cache
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest

from bench import conftest as plugin
from bench.analysis.machine_class import words
from bench.analysis.questions import answers
from bench.analysis.reading import load
from bench.analysis.table import TIME
from bench.analysis.table import table as tidy
from bench.record import DIFFERENT, Record, decode, encode
from bench.report import advised, bars
from bench.report import tables as tables_module
from bench.report.csv_export import csv_text
from bench.report.files import FORMATS, OWN, write_reports
from bench.report.formatting import number
from bench.report.names import name_of
from bench.report.page import html
from bench.report.text import plain, printable
from tests import workers
from tests.records import find_case, find_comparison, small_run, whole_run, with_case
from tests.report.test_report import BF16, FP32, HOSTILE, TF_BF16, columns, markdown_tables, renamed

ROOT = Path(__file__).resolve().parents[2]
VOID = {"meta", "input", "line", "rect", "circle", "path", "polyline", "br", "wbr"}


# Reading a page ----------------------------------------------------------------------------------


class Element:
    def __init__(self, tag, attrs, parent):
        self.tag, self.attrs, self.parent = tag, dict(attrs), parent
        self.children: list[Element] = []
        self.pieces: list[str | Element] = []

    @property
    def text(self) -> str:
        return "".join(p if isinstance(p, str) else p.text for p in self.pieces)

    def all(self, *tags):
        for child in self.children:
            if child.tag in tags or not tags:
                yield child
            yield from child.all(*tags)

    def words(self) -> str:
        return " ".join(self.text.split())


class Reader(HTMLParser):
    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.root = self.here = Element("", {}, None)
        self.feed(text)
        self.close()
        assert self.here is self.root, f"<{self.here.tag}> is not closed"

    def handle_starttag(self, tag, attrs):
        made = Element(tag, attrs, self.here)
        self.here.children.append(made)
        self.here.pieces.append(made)
        if tag not in VOID:
            self.here = made

    def handle_startendtag(self, tag, attrs):
        made = Element(tag, attrs, self.here)
        self.here.children.append(made)
        self.here.pieces.append(made)

    def handle_endtag(self, tag):
        assert self.here.tag == tag, f"</{tag}> closes <{self.here.tag}>"
        self.here = self.here.parent

    def handle_data(self, data):
        self.here.pieces.append(data)


def read(run: Record) -> Element:
    return Reader(html(run)).root


def tables(root: Element) -> list[list[list[str]]]:
    """The text of every cell of every table's body."""
    return [
        [[cell.words() for cell in row.children] for row in table.all("tr")]
        for table in root.all("table")
    ]


@cache
def rendered(path: Path) -> tuple[str, float]:
    """The page of a published record, and the seconds of a core that it took."""
    run, begun = load(path), time.process_time()
    return html(run), time.process_time() - begun


@pytest.fixture(
    scope="module",
    params=sorted(page.with_name("results.json") for page in (ROOT / "docs").glob("**/report.md")),
    ids=lambda path: path.parent.name,
)
def place(request) -> Path:
    return request.param


@pytest.fixture(scope="module")
def published(place) -> Record:
    return load(place)


@pytest.fixture(scope="module")
def page(place) -> Element:
    return Reader(rendered(place)[0]).root


# What it holds -----------------------------------------------------------------------------------


def test_the_page_has_every_row_of_report_md(place, page):
    mine = tables(page)
    answer, *others = markdown_tables(place.with_name("report.md").read_text("utf-8"))
    every = {" ".join(row).replace(": ", " ") for table in mine for row in table}
    assert {" ".join(row).replace(": ", " ") for row in answer} <= every  # two tables of the page
    for theirs in others:
        rows = [row if any(row[1:]) else row[:1] for row in theirs[1:]]
        assert any(table[-len(rows) :] == rows for table in mine), rows


def test_sections_stand_in_their_order(published, page):
    assert [e.attrs["id"] for e in page.all("section")] == [
        "answer",
        "decisions",
        "techniques",
        "more",
    ]
    (section,) = [e for e in page.all("section") if e.attrs["id"] == "techniques"]
    heads = [h.words() for h in section.all("h3")]
    names = dict.fromkeys(case.technique for case in published.cases)
    assert sorted(heads) == sorted(published.techniques[name].title for name in names)


def test_everything_below_the_answer_is_folded(page):
    (answer,) = [e for e in page.all("section") if e.attrs["id"] == "answer"]
    for table in page.all("table"):
        above, folded = table.parent, False
        while above.parent:
            folded |= above.tag == "details" and "open" not in above.attrs
            above = above.parent
        assert folded or table in list(answer.all("table"))


def test_headings_skip_no_level_and_links_lead_somewhere(page):
    root = page
    levels = [int(h.tag[1]) for h in root.all("h1", "h2", "h3", "h4", "h5")]
    assert levels[0] == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))
    ids = [e.attrs["id"] for e in root.all() if "id" in e.attrs]
    assert len(ids) == len(set(ids))
    for link in root.all("a"):
        assert link.attrs["href"].removeprefix("#") in ids
    for part in root.all():
        for name in part.attrs.get("aria-labelledby", "").split():
            assert name in ids


def test_every_picture_has_a_title_a_description_and_a_table_beside_it(published, page):
    pictures = [svg for svg in page.all("svg") if svg.attrs.get("role") == "img"]
    trained = any(case.accuracy for case in published.cases)
    assert len(pictures) >= (5 if trained else 1)  # input pipelines have one of gains alone
    for svg in pictures:
        title, about = svg.attrs["aria-labelledby"].split()
        named = {e.attrs.get("id"): e for e in svg.all("title", "desc")}
        assert named[title].tag == "title"
        assert named[title].words()
        assert named[about].tag == "desc"
        assert named[about].words()
        pair = svg.parent.parent
        assert pair.attrs["class"] in ("pair", "first")
        assert list(pair.all("table"))


def test_table_heads_have_a_scope(page):
    for table in page.all("table"):
        assert table.attrs["aria-labelledby"]
        assert all(head.attrs.get("scope") and head.words() for head in table.all("th"))
        for row in next(table.all("tbody")).all("tr"):
            assert row.children[0].tag == "th"


def test_the_command_can_be_copied(published, page):
    assert published.command in [e.text for e in page.all("code")]


def test_problems_give_their_reason():
    run = with_case(whole_run(), FP32, reason="accuracy not measured: of a file")
    text = " ".join(
        e.words() for e in read(run).all("details") if "technique" in e.attrs.get("class", "")
    )
    assert "IN PART: PyTorch fp32accuracy not measured: of a file" in text
    assert "UNSUPPORTED: PyTorch fp16needs a CUDA GPU; none was found" in text
    assert "FAILED: TensorFlow compiledthe worker was killed by SIGKILL" in text


# The answer --------------------------------------------------------------------------------------


def answered(page: Element) -> str:
    (section,) = [e for e in page.all("section") if e.attrs["id"] == "answer"]
    return section.words()


def test_the_answer_names_what_gains_and_who_is_ahead(published, page):
    """Whose figures tests/analysis works out in another way."""
    text = answered(page)
    for answer in answers(published):
        assert f"{answer.question.aim} {advised.place_of(answer)}" in text
        for side in answer.sides.values():
            if row := advised.named(side):
                gain = advised.gained(row.ratios[answer.goal.figure], answer.goal)
                assert f"{name_of(row.case)} {gain}" in text
        assert " ".join(advised.ahead(answer)) in text


def test_one_sentence_says_what_was_measured(published, page):
    (said,) = [e.words() for e in page.all("p") if e.attrs.get("class") == "measured"]
    assert said.startswith(f"Measured on {words(published.environment)}")
    assert "parameters" in said


def test_a_quick_run_gives_an_order_and_no_best():
    text = answered(read(whole_run("quick")))
    assert "times as fast against “fp32”, one block, no interval" in text
    assert "not compared" in text


def test_the_chart_has_every_work_with_its_gain_in_both_frameworks(published, page):
    shown = bars.chosen(answers(published))
    drawn = [about.text for about in page.all("desc")]
    if not shown:
        assert not any(text.startswith(("Train ", "Predict ")) for text in drawn)
        return
    about = drawn[0]
    for one in shown:
        assert advised.place_of(one) in about
        for side in one.sides.values():
            if row := advised.tempting(side) or advised.named(side):
                times = number(row.ratios[TIME].turned().value)
                assert f"{name_of(row.case, short=True)}, {times} times as fast" in about


def test_a_bar_leads_to_its_rows(published, page):
    anchors = {each.attrs.get("id") for each in page.all("details")}
    if bars.chart(answers(published)) is None:
        return
    links = [each.attrs.get("href", "") for each in page.all("a")]
    techniques = [link[1:] for link in links if link.startswith("#technique-")]
    assert techniques
    assert set(techniques) <= anchors


def test_all_techniques_in_one_page_are_below_two_megabytes_and_quickly_made():
    text, took = rendered(ROOT / "docs" / "results.json")
    assert took < 5
    assert len(text.encode()) < 2_000_000


def test_the_answer_of_a_terminal_holds_its_lines_and_names_the_first_aims():
    for run, whole in ((whole_run(), True), (load(ROOT / "docs"), False)):
        lines = tables_module.answered(run, 80).splitlines()
        assert len(lines) <= tables_module.MOST_LINES
        assert max(map(columns, lines)) <= 80
        told, _ = advised.split(answers(run))
        aims = list(dict.fromkeys(answer.question.aim for answer in told))
        shown = [aim for aim in aims if any(line.startswith(aim) for line in lines)]
        assert shown == aims[: max(5, len(shown))]
        assert lines[-1].startswith("… and ") != whole


# It needs nothing and runs nothing ---------------------------------------------------------------


def test_the_page_allows_its_own_style_and_script_and_nothing_else(page):
    root = page
    (policy,) = [m for m in root.all("meta") if "http-equiv" in m.attrs]
    said = policy.attrs["content"]
    assert said.startswith("default-src 'none'; ")
    assert "unsafe" not in said
    for tag in ("style", "script"):
        (element,) = root.all(tag)
        digest = base64.b64encode(hashlib.sha256(element.text.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in said
    for element in root.all():
        assert not {"style", "src", "srcset", "action", "data"} & element.attrs.keys()
        assert not [name for name in element.attrs if name.startswith("on")]
        assert element.attrs.get("href", "#").startswith("#")


def shape(root: Element) -> list[tuple]:
    """Tags and the names of their attributes, in order, but for places where a name may break."""
    return [(each.tag, sorted(each.attrs)) for each in root.all() if each.tag != "wbr"]


@pytest.fixture(scope="module")
def usual() -> list[tuple]:
    """The shape of the page of a harmless name."""
    return shape(read(renamed("plain")))


@pytest.mark.parametrize("name", [h for h in HOSTILE if h], ids=range(len(HOSTILE) - 1))
def test_names_are_shown_literally_and_add_no_element(name, usual):
    text = html(renamed(name))
    root = Reader(text).root
    assert shape(root) == usual
    shown = plain(name)
    texts = [" ".join(e.text.split()) for e in root.all("h3", "h4", "dd", "th", "li", "dt")]
    assert texts.count(shown) >= 3
    text.encode()


KEPT = {"pt", "tf", "keras3", "tf_keras", "baseline", "framework", "control", "variant", "OK"}
KEPT |= {"default", "train", "accuracy", "bits_per_character", "UNSUPPORTED", "FAILED"}
KEPT |= {"NOT_APPLIED", "faster", "slower", "equivalent", "not comparable"}
FREE_NAMES = {"techniques", "tasks", "metrics", "evidence", "packages", "allocator", "peak_flops"}
FIXED = {
    "title",
    "notes",
    "differs_by_design",
    "value",
    "unit",
    "ci",
    "samples",
    "metric",
    "margin",
}
FIXED |= {"parity", "samples_per_s", "share_of_peak", "cold_first_calls_s", "break_even_steps"}
FIXED |= {"pt", "tf", "bench"}


def _poisoned(value, poison: str, free: bool = False):
    """JSON with `poison` after every text, and after every name that is free."""
    if isinstance(value, dict):
        return {
            key + (poison if free and key not in FIXED else ""): _poisoned(
                inner, poison, key in FREE_NAMES or (free and isinstance(inner, dict))
            )
            for key, inner in value.items()
        }
    if isinstance(value, list):
        return [_poisoned(inner, poison, free) for inner in value]
    return value + poison if isinstance(value, str) and value not in KEPT else value


def poisoned(run: Record, poison: str) -> Record:
    """The record with `poison` after every text, and after every name that is free."""
    return decode(json.dumps(_poisoned(json.loads(encode(run)), poison)))


POISONS = [
    "<script>window.__pwned = 1</script>",
    '"><img src=x onerror="window.__pwned = 1">',
    "' onmouseover='window.__pwned = 1' onfocus='window.__pwned = 1' autofocus tabindex='0",
    "</title></desc></svg><svg onload=window.__pwned=1>",
    "</pre></style></script><iframe srcdoc='<script>parent.__pwned = 1</script>'></iframe>",
    "]]><!--<base href=javascript:window.__pwned=1>--!><a href='javascript:window.__pwned=1'>x</a>",
    "\x00\x1b[2J\u202e{{ 7 * 7 }}{% raw %}${window.__pwned = 1}`",
]


@pytest.fixture(scope="module")
def harmless() -> tuple:
    """The shapes of the pages with a harmless text: in every text, and as the answer."""
    answered = Reader(html(small_run(), "plain")).root
    return shape(read(poisoned(small_run(), "plain"))), shape(answered)


@pytest.mark.parametrize("poison", POISONS, ids=range(len(POISONS)))
def test_poison_in_every_text_adds_no_element(poison, harmless):
    assert shape(read(poisoned(small_run(), poison))) == harmless[0]


@pytest.mark.parametrize("poison", POISONS, ids=range(len(POISONS)))
def test_the_answer_on_a_users_model_keeps_its_lines_and_adds_no_element(poison, harmless):
    code = f"{poison}\n    indented()"
    page = Reader(html(small_run(), code)).root
    (shown,) = [found for found in page.all("pre") if found.attrs.get("class") == "own"]
    assert shown.text == "\n".join(map(printable, code.splitlines()))
    assert not shown.children
    assert shape(page) == harmless[1]


def test_a_run_that_goes_on_shows_no_answer_of_before(tmp_path):
    (tmp_path / "results.json").write_bytes(encode(small_run()))
    (tmp_path / OWN).write_text("the answer of before")
    write_reports(tmp_path, ["html"])
    assert "the answer of before" in (tmp_path / FORMATS["html"]).read_text()
    settings = SimpleNamespace(amount=SimpleNamespace(first_pass_alone=True))
    plugin._show(SimpleNamespace(folder=tmp_path, settings=settings), None, small_run(), None)
    assert "the answer of before" not in (tmp_path / FORMATS["html"]).read_text()


# tables.csv --------------------------------------------------------------------------------------


def lines(run: Record) -> dict[tuple[str, str], dict[str, str]]:
    found = csv.DictReader(io.StringIO(csv_text(run)))
    return {(line["id"], line["figure"]): line for line in found}


def test_csv_has_a_line_for_each_figure_at_full_precision():
    run = whole_run()
    case, by_figure = find_case(run, BF16), lines(run)
    assert {row for row, _ in by_figure} == {case.id for case in run.cases}
    time = by_figure[case.id, "time"]
    assert float(time["value"]) == case.timing.median_s
    assert float(time["low"]) == case.timing.ci_s[0]
    assert (time["kind"], time["unit"], time["blocks"]) == ("interval", "s", "8")
    to_baseline, twins = (find_comparison(run, BF16, other) for other in (FP32, TF_BF16))
    assert float(time["to_baseline_ratio"]) == to_baseline.ratio
    assert time["to_baseline_verdict"] == to_baseline.verdict
    assert float(time["pytorch_to_tensorflow_ratio"]) == twins.ratio
    assert float(time["pytorch_to_tensorflow_high"]) == twins.ci[1]
    peak = by_figure[case.id, "memory_steady_peak"]
    assert peak["value"] == f"{case.memory.steady_peak_bytes:.0f}"
    assert float(by_figure[case.id, "gained"]["value"]) == case.accuracy.difference.mean
    assert float(by_figure[case.id, "share_of_peak"]["value"]) == 0.18
    assert by_figure[case.id, "samples_per_s"]["unit"] == "1/s"


def test_csv_leaves_out_what_the_tables_leave_out():
    run = with_case(whole_run(), BF16, status="FAILED", reason="died in block 5")
    by_figure = lines(run)
    row = find_case(run, BF16).id
    assert [figure for name, figure in by_figure if name == row] == [""]
    assert by_figure[row, ""]["reason"] == "died in block 5"
    assert by_figure[row, ""]["value"] == ""
    unlike = by_figure["mixed_precision/text-gpt-16/pt/as_installed", "time"]
    assert unlike["pytorch_to_tensorflow_ratio"] == ""
    assert unlike["pytorch_to_tensorflow_verdict"] == DIFFERENT


@pytest.mark.parametrize("name", ["=1+1", "+cmd|' /C calc'!A0", "-2+3", "@SUM(A1)", "\t=1", "\r=1"])
def test_no_text_of_csv_is_a_formula(name):
    for row in csv.reader(io.StringIO(csv_text(renamed(name)))):
        for cell in row:
            assert not cell.startswith(("=", "+", "@"))
            assert not cell.startswith("-") or float(cell) < 0
    shown = lines(renamed(name))["mixed_precision/text-gpt-16/tf/compiled", ""]
    assert shown["reason"].lstrip("'") == plain(name)


@pytest.mark.parametrize("name", HOSTILE, ids=range(len(HOSTILE)))
def test_csv_is_rectangular_whatever_the_names(name):
    text = csv_text(renamed(name))
    cells = list(csv.reader(io.StringIO(text)))
    assert {len(line) for line in cells} == {len(cells[0])}
    assert len(cells) == len(tidy(whole_run())) + 1 == text.count("\n")
    text.encode()


# In a browser ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """The report of a small record, and of the published one."""
    folder = tmp_path_factory.mktemp("page")
    for name in ("small", "all"):
        (folder / name).mkdir()
    (folder / "small" / "results.json").write_bytes(encode(small_run()))
    write_reports(folder / "small", ["html"])
    text, _ = rendered(ROOT / "docs" / "results.json")
    (folder / "all" / FORMATS["html"]).write_text(text, "utf-8")
    return folder


@pytest.fixture
def visit(browser, folder):
    """Open a page from disk and note what it asks for and complains of."""
    contexts = []

    def go(path="all", *, width=1280, height=900, unfolded=False, **settings):
        context = browser.new_context(viewport={"width": width, "height": height}, **settings)
        contexts.append(context)
        tab = context.new_page()
        tab.requests, tab.errors = [], []
        tab.on("request", lambda request: tab.requests.append(request.url))
        tab.on("console", lambda message: tab.errors.append(message.text))
        tab.on("pageerror", lambda error: tab.errors.append(str(error)))
        file = path if isinstance(path, Path) else folder / path / FORMATS["html"]
        tab.goto(file.as_uri())
        if unfolded:
            tab.evaluate("document.querySelectorAll('details').forEach((e) => { e.open = true; })")
        return tab

    yield go
    for context in contexts:
        context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", ["small", "all"])
def test_it_opens_from_disk_without_a_request_or_an_error(visit, scheme, name):
    tab = visit(name, color_scheme=scheme)
    tab.mouse.wheel(0, 20_000)
    assert [url for url in tab.requests if not url.endswith("/report.html")] == []
    assert len(tab.requests) == 1
    assert tab.errors == []
    back = tab.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", back))) < 200) == (scheme == "dark")


@pytest.mark.parametrize(("scheme", "width"), [("light", 390), ("dark", 1280)])
def test_axe_finds_no_violation(visit, scheme, width):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="needs axe-core")
    tab = visit("small", color_scheme=scheme, width=width)
    tab.evaluate("document.querySelectorAll('details').forEach((part) => { part.open = true; })")
    found = axe.Axe().run(tab)
    assert found.violations_count == 0, found.generate_report()


@pytest.mark.parametrize("script", [True, False])
def test_the_page_is_never_wider_than_the_screen(visit, script):
    tab = visit("all", width=1280, height=844, java_script_enabled=script)
    for width in (1280, 768, 390, 320):
        tab.set_viewport_size({"width": width, "height": 844})
        assert tab.evaluate("document.documentElement.scrollWidth") <= width
        assert tab.evaluate("document.documentElement.clientWidth") <= width


def test_without_script_all_is_there(visit):
    def shown(tab):
        return " ".join(tab.inner_text("main").split()).replace(" ", "")

    plain_page, live = (
        visit("small", java_script_enabled=False, unfolded=True),
        visit("small", unfolded=True),
    )
    assert shown(plain_page) == shown(live)
    assert plain_page.locator("#filter").is_hidden()
    assert live.locator("#filter").is_visible()


def column(tab, title: str, place: int) -> list[list[str]]:
    """The cells of a column, batch by batch, of the first table with this title."""
    return tab.evaluate(
        """([title, place]) => {
            const table = [...document.querySelectorAll(".technique table")]
                .find((each) => each.closest(".grid").textContent.trim().startsWith(title));
            return [...table.tBodies].map((body) => [...body.rows]
                .filter((row) => !row.classList.contains("heading"))
                .map((row) => row.cells[place].textContent.trim()));
        }""",
        [title, place],
    )


def leading(text: str) -> float:
    return float(text.replace(",", "").split()[0])


def test_a_click_on_a_head_sorts_by_number_within_each_batch(visit):
    tab = visit("small", unfolded=True)
    head = tab.locator(".technique table").first.locator("th[data-column='1'] button")
    before = column(tab, "Speed", 1)
    for way, reverse in (("ascending", False), ("descending", True)):
        head.click()
        assert tab.locator(f".technique table >> th[aria-sort={way}]").count() == 1
        for old, cells in zip(before, column(tab, "Speed", 1), strict=True):
            figures = [leading(cell) for cell in cells if cell[0].isdigit()]
            assert figures == sorted(figures, reverse=reverse)
            assert len(figures) > 2
            assert all(cell[0].isdigit() for cell in cells[: len(figures)])  # words come last
            assert sorted(cells) == sorted(old)
    tab.locator(".technique table").first.locator("th[data-column='0'] button").press("Enter")
    names = column(tab, "Speed", 0)
    assert all(each == sorted(each) for each in names)


def test_heads_show_that_they_sort(visit):
    head = visit("small").locator("#answer th button").first
    shown = head.evaluate("(e) => getComputedStyle(e, '::after').content")
    assert "↕" in shown


def test_the_filter_opens_and_scrolls_to_what_it_finds(visit):
    tab = visit("all")
    rows = ".filtered tbody tr:not(.heading)"
    assert tab.locator(f"{rows}:visible").count() == 0  # folded
    every = tab.locator(rows).count()
    tab.fill("#words", "bf16 pytorch")
    left = tab.locator(f"{rows}:visible").all_inner_texts()
    assert 0 < len(left) < every
    assert tab.inner_text("#count") == f"{len(left)} of {every} rows"
    found = tab.locator(f"{rows}:visible").first.bounding_box()
    assert 0 <= found["y"] <= 900 - found["height"]
    tab.fill("#words", "compilation XLA")
    left = tab.locator(f"{rows}:visible").all_inner_texts()
    assert left
    assert all("xla" in text.lower() for text in left)
    tab.fill("#words", "no such row")
    assert tab.locator(f"{rows}:visible").count() == 0
    assert tab.inner_text("#count") == f"0 of {every} rows"
    tab.fill("#words", "")
    assert tab.locator(f"{rows}:visible").count() == 0
    assert tab.inner_text("#count") == ""


@pytest.mark.parametrize(("width", "height"), [(1280, 900), (390, 844)])
def test_the_first_screen_has_the_sentence_the_chart_and_the_decisions(visit, width, height):
    tab = visit("all", width=width, height=height)
    whole = tab.locator("#answer figure > svg").first
    assert whole.bounding_box()["y"] + whole.bounding_box()["height"] <= height

    def box(selector):
        return tab.locator(selector).first.bounding_box()

    said, chart, row = (box(s) for s in (".measured", "#answer figure", "#answer tbody tr"))
    # The chart leaves no room for a table on a phone: it begins right below.
    on_screen = (said, chart, row) if width > 600 else (said, chart)
    assert row["y"] < 1.1 * height
    for part in on_screen:
        assert part["y"] >= 0
        assert part["y"] + part["height"] <= height
        assert part["x"] >= 0
        assert part["x"] + part["width"] <= width
    # Folded, the page of every technique is three screens at most; on a phone, where both
    # frameworks are below one another, four.
    screens = 3 if width > 600 else 4
    assert tab.evaluate("document.documentElement.scrollHeight") <= screens * height


def test_on_a_phone_no_table_scrolls_sideways_and_each_figure_has_its_head(visit):
    tab = visit("all", width=390, height=844, unfolded=True)
    wide, figures = tab.evaluate(
        """() => [
            [...document.querySelectorAll(".scroll")].filter((e) => e.scrollWidth > e.clientWidth)
                .map((e) => e.textContent.slice(0, 80)),
            [...document.querySelectorAll(".technique td")].filter((e) => e.textContent)
                .map((e) => getComputedStyle(e, "::before").content),
        ]"""
    )
    assert wide == []
    assert figures
    assert all(len(head) > len('": "') for head in figures)


@pytest.mark.parametrize("guarded", [True, False], ids=["policy", "no policy"])
def test_nothing_of_a_record_runs(visit, tmp_path, guarded):
    """Escaping alone keeps it out, and so would the policy alone."""
    some = POISONS[::3] if guarded else POISONS[1::3]
    for place, poison in enumerate(POISONS if workers.campaign() else some):
        file = tmp_path / f"{place}.html"
        file.write_text(html(poisoned(small_run(), poison)), "utf-8")
        tab = visit(file, bypass_csp=not guarded)
        tab.evaluate(
            """document.querySelectorAll("details").forEach((part) => { part.open = true; });
            for (const part of document.querySelectorAll("*")) {
                part.dispatchEvent(new MouseEvent("mouseover", { bubbles: true }));
            }"""
        )
        tab.fill("#words", poison)
        assert tab.evaluate("typeof window.__pwned") == "undefined"
        assert [url for url in tab.requests if not url.endswith(f"/{place}.html")] == []
        assert tab.errors == []
        if poison.isprintable():
            assert poison in tab.inner_text("#record pre.command")


def test_the_policy_stops_a_foreign_script(visit, tmp_path):
    """What the test before rests on: without escaping, the policy still holds."""
    file = tmp_path / "report.html"
    text = html(small_run()).replace("</main>", "<script>window.__pwned = 1</script></main>")
    file.write_text(text, "utf-8")
    tab = visit(file)
    assert tab.evaluate("typeof window.__pwned") == "undefined"
    assert any("Content Security Policy" in error for error in tab.errors)


def test_it_prints_on_a_sheet_all_but_the_navigation(visit):
    tab = visit("all")
    tab.emulate_media(media="print")
    assert tab.locator("nav").is_hidden()
    assert tab.locator("main table").first.is_visible()
    tab.set_viewport_size({"width": 703, "height": 1000})  # A4 within its margins
    assert tab.evaluate("document.documentElement.scrollWidth") <= 703
    ends = "[...document.querySelectorAll('table')].map((e) => e.getBoundingClientRect().right)"
    assert max(tab.evaluate(ends)) <= 703
