"""docs/upstream.md: every entry says where it is worked around; its program shows the fault.

The programs run in campaigns. One that fails tells that its fault is gone, and which workaround can
go.
"""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.workers import ROOT, environment

PAGE = (ROOT / "docs" / "upstream.md").read_text("utf-8")
FIELDS = ("Library", "Upstream", "Worked around in")
ENTRIES = dict(re.findall(r"^### (.+?)\n(.+?)(?=^##|\Z)", PAGE, re.MULTILINE | re.DOTALL))


def field(title: str, name: str) -> str:
    return re.search(rf"^- {name}: (.+)$", ENTRIES[title], re.MULTILINE)[1]


def program(title: str) -> str:
    (code,) = re.findall(r"^```python\n(.*?)^```$", ENTRIES[title], re.MULTILINE | re.DOTALL)
    return code


def test_there_are_entries():
    assert len(ENTRIES) >= 10


@pytest.mark.parametrize("title", ENTRIES)
def test_an_entry_says_library_and_workaround_and_has_a_program(title):
    assert all(field(title, name) for name in FIELDS)
    places = re.findall(r"`([\w/]+\.py)`", field(title, "Worked around in"))
    assert places
    assert all((ROOT / place).is_file() for place in places), places
    assert "assert" in program(title)


def test_the_workarounds_without_a_program_are_files():
    table = PAGE.partition("## Without a program")[2]
    places = re.findall(r"`([\w/]+\.py)`", table)
    assert places
    assert all((ROOT / place).is_file() for place in places), places


@pytest.mark.campaign
@pytest.mark.parametrize("title", ENTRIES)
def test_the_fault_is_still_there(title, tmp_path):
    path = tmp_path / "program.py"
    path.write_text(program(title), "utf-8")
    name = "pt" if "import torch" in program(title) else "tf"
    done = subprocess.run(
        [sys.executable, path],
        cwd=tmp_path,
        env=environment(name),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, (
        f"{title}: the fault is gone, or the program fails for another reason. If it is gone, "
        f"{field(title, 'Worked around in')} can go.\n{done.stderr[-2000:]}"
    )
