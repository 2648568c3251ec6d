"""What tests of the attacks share."""

import pytest

from bench.validation import attacked


@pytest.fixture
def page(tmp_path, monkeypatch):
    """The attacks publish to a page of this test; its text, where lines are not broken."""
    monkeypatch.setattr(attacked, "RECORD", tmp_path / "attacked.json")
    monkeypatch.setattr(attacked, "PAGE", tmp_path / "attacked.md")
    return lambda: attacked.PAGE.read_text("utf-8").replace("\n", " ")
