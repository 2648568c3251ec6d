"""The site of the documentation has search, fetches nothing, and its links lead somewhere."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from bench.docs import website
from tests.docs.pages import parsed
from tests.docs.test_links import linking

pytestmark = pytest.mark.timeout(600)
LINK = re.compile(r'<(?P<tag>a|img|link|script)\b[^>]*?\b(?:href|src)="(?P<to>[^"#?]+)')
PART = re.compile(r"<(?P<end>/?)(?P<name>ul|ol|li|table)\b")
OPEN = {"bullet_list_open": "ul", "ordered_list_open": "ol", "list_item_open": "li"}
OPEN |= {"table_open": "table"}


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """All of it, but that pages of code have their first lines: their colours take most time."""
    folder, listing = tmp_path_factory.mktemp("site"), website._listing

    def beginning(source: Path, target: Path) -> str:
        *lines, end = listing(source, target).splitlines(keepends=True)
        return "".join([*lines[:20], end])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(website, "_listing", beginning)
        website.build(folder)
    return folder


def test_the_site_is_whole_and_asks_for_nothing_outside(site):
    pages = [page for page in site.rglob("*.html") if page.name != "404.html"]
    assert site / "index.html" in pages
    assert site / "docs/charts.html" in pages
    assert (site / "pt_impl/train_step/mixed_precision.py.html") in pages
    assert "mixed_precision" in (site / "search.json").read_text("utf-8")
    astray, outside = set(), set()
    for page in pages:
        for link in LINK.finditer(page.read_text("utf-8")):
            if "://" in link["to"]:
                outside |= {(page, link["to"])} if link["tag"] in ("img", "script") else set()
            elif not link["to"].startswith(("mailto:", "data:")):
                target = page.parent / link["to"]
                target = target / "index.html" if target.is_dir() else target
                astray |= set() if target.exists() else {(page, link["to"])}
    assert not astray
    assert not outside


def in_markdown(page: str) -> list[str]:
    """The lists, their items and the tables of a page as GitHub reads them, with their depth."""
    tokens = [token for token in parsed(page) if token.type in OPEN]
    return [f"{token.level} {OPEN[token.type]}" for token in tokens]


def in_html(page: Path) -> list[str]:
    """The same as the site shows them."""
    article = page.read_text("utf-8").partition("<article")[2].partition("</article>")[0]
    level, parts = 0, []
    for part in PART.finditer(article):
        if not part["end"]:
            parts.append(f"{level} {part['name']}")
        level += -1 if part["end"] else 1
    return parts


@pytest.mark.parametrize("page", linking())
def test_the_site_nests_lists_and_shows_tables_as_the_repository_does(site, page):
    """A nested bullet needs four spaces; a list and a table need a blank line before them."""
    name = "index.html" if page == "README.md" else f"{page.removesuffix('.md')}.html"
    name = re.sub(r"/README\.html$", "/index.html", name)
    assert in_html(site / name) == in_markdown(page)


@pytest.mark.parametrize("name", ["index", "docs/report", "docs/answers", "docs/priorities"])
def test_on_a_phone_no_table_scrolls_sideways(site, browser, name):
    tab = browser.new_page(viewport={"width": 390, "height": 844})
    tab.goto((site / f"{name}.html").as_uri())
    tab.evaluate("document.querySelectorAll('details').forEach((part) => { part.open = true; })")
    widths = tab.evaluate(
        """[...document.querySelectorAll(".md-typeset table:not([class])")]
            .map((table) => table.getBoundingClientRect().right)"""
    )
    tab.close()
    assert widths
    assert max(widths) <= 390


def paths(navigation: list | dict | str) -> list[str]:
    """What a part of the navigation leads to."""
    if isinstance(navigation, str):
        return [navigation]
    parts = navigation.values() if isinstance(navigation, dict) else navigation
    return [path for part in parts for path in paths(part)]


def test_every_page_is_in_one_group_of_the_navigation():
    navigation = tomllib.loads(website.configuration())["project"]["nav"]
    assert all(isinstance(group, dict) for group in navigation)
    listed = [path for path in paths(navigation) if path.endswith(".md")]
    written = [page for page in linking() if "/" in page or page in website.PAGES]
    assert sorted(listed) == sorted(written)


def test_a_link_that_leads_nowhere_is_an_error(tmp_path, monkeypatch):
    (tmp_path / "README.md").write_text("# A page\n\n[Another](other.md)\n", "utf-8")
    for name, value in (("ROOT", tmp_path), ("PAGES", ("README.md",)), ("RECORDS", ())):
        monkeypatch.setattr(website, name, value)
    with pytest.raises(ValueError, match=r"(?s)Zensical found faults.*other\.md"):
        website.build(tmp_path / "site")


def test_nothing_is_written_over(tmp_path, capsys):
    (tmp_path / "kept.txt").write_text("mine", "utf-8")
    assert website.main([str(tmp_path)]) == 2
    assert "is not an empty folder: name a new one" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["kept.txt"]
