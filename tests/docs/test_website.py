"""The site of the documentation has search, fetches nothing, and its links lead somewhere."""

from __future__ import annotations

import re

import pytest

from bench.docs import website

pytestmark = pytest.mark.timeout(600)
LINK = re.compile(r'<(?P<tag>a|img|link|script)\b[^>]*?\b(?:href|src)="(?P<to>[^"#?]+)')


def test_the_site_is_whole_and_asks_for_nothing_outside(tmp_path):
    website.build(tmp_path)
    pages = [page for page in tmp_path.rglob("*.html") if page.name != "404.html"]
    assert tmp_path / "index.html" in pages
    assert tmp_path / "docs/charts.html" in pages
    assert (tmp_path / "pt_impl/train_step/mixed_precision.py.html") in pages
    assert "mixed_precision" in (tmp_path / "search.json").read_text("utf-8")
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
