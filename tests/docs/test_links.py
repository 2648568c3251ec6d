"""Links lead somewhere, and every page can be reached."""

from __future__ import annotations

import os
import re
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

from tests.docs.pages import ROOT, inline

pytestmark = pytest.mark.timeout(240)


def linking() -> list[str]:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    return sorted(path.relative_to(ROOT).as_posix() for path in pages)


@cache
def slugs(path: Path) -> set[str]:
    """The anchors that the usual hosts give to a page's headings."""
    tokens = MarkdownIt("commonmark").parse(path.read_text("utf-8"))
    titles = [
        "".join(child.content for child in after.children)
        for token, after in pairwise(tokens)
        if token.type == "heading_open"
    ]
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def links(page: str) -> list[str]:
    return [t.attrs["href"] for t in inline(page) if t.type == "link_open"]


@pytest.mark.parametrize("page", linking())
def test_links_lead_somewhere(page):
    for link in links(page):
        if link.startswith(("http://", "https://", "mailto:")):
            continue
        place, _, anchor = link.partition("#")
        target = (ROOT / page).parent / place if place else ROOT / page
        assert target.exists(), f"{page}: {link}"
        assert target.resolve().is_relative_to(ROOT), f"{page}: {link}"
        if anchor:
            assert anchor in slugs(target), f"{page}: {link}"


def test_every_page_can_be_reached_from_readme():
    """Reports and pages of techniques included."""
    seen, new = set(), {"README.md"}
    while new:
        seen |= new
        targets = {
            os.path.normpath(os.path.join(os.path.dirname(page), link.partition("#")[0]))
            for page in new
            for link in links(page)
            if link.partition("#")[0].endswith(".md") and "://" not in link
        }
        new = targets - seen
    assert set(linking()) <= seen
