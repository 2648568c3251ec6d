"""Tests that ran in a framework's process are reported as if they had run here."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.workers import ROOT

FILE = """
import os, sys
import pytest

FRAMEWORKS = ("pt", "tf")


def test_of_no_framework():
    assert not {"torch", "tensorflow"} & sys.modules.keys()


@pytest.mark.parametrize("number", [1, pytest.param(2, marks=pytest.mark.only("pt"))])
def test_number(impl, number):
    print(f"it says {number}")
    assert impl.__name__ == "tf_impl" or number == 1


def test_skipped(kit):
    pytest.skip("not here")


@pytest.mark.xfail(strict=True)
def test_expected(kit):
    assert not kit


@pytest.mark.only("tf")
def test_that_ends_its_process(kit):
    os._exit(3)


@pytest.mark.parametrize("value", [2.0, 2.1])
def test_agrees(agrees, flavour, value):
    agrees("same", {"losses": [value]}, 1e-2)
"""


@pytest.fixture
def file(tmp_path):
    file = tmp_path / "test_small.py"
    file.write_text(FILE)
    return file


def run(file, *options: str) -> tuple[dict[str, str], str]:
    """How tests ended, by name, and all that pytest said."""
    command = [sys.executable, "-m", "pytest", file, f"--rootdir={file.parent}", "-vrA"]
    command += ["-p", "tests.frameworks", "-p", "no:cacheprovider", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    ends = re.findall(r"^\S*test_small.py::(\S+) ([A-Z]+)", done.stdout, re.MULTILINE)
    return dict(ends), done.stdout + done.stderr


def test_reports_are_those_of_the_framework(file):
    ends, said = run(file, "-k", "not agrees")
    assert ends == {
        "test_of_no_framework": "PASSED",
        "test_number[pt-1]": "PASSED",
        "test_number[pt-2]": "FAILED",
        "test_skipped[pt]": "SKIPPED",
        "test_expected[pt]": "XFAIL",
        "test_number[tf-1]": "PASSED",
        "test_skipped[tf]": "SKIPPED",
        "test_expected[tf]": "XFAIL",
        "test_that_ends_its_process[tf]": "FAILED",
    }
    assert "it says 2" in said
    assert "not here" in said
    assert "the process of tf ended with 3 before this test's end" in said


def test_arrays_are_saved_by_pytorch_and_compared_with(file):
    ends, said = run(file, "-k", "agrees and 2.0", "--here", "pt")
    assert set(ends.values()) == {"FAILED"}
    assert "--save-arrays" in said
    ends, _ = run(file, "-k", "agrees and 2.0", "--save-arrays", "--here", "pt")
    assert ends == {"test_agrees[pt-2.0]": "PASSED"}
    ends, said = run(file, "-k", "agrees", "--here", "pt")
    assert ends == {"test_agrees[pt-2.0]": "PASSED", "test_agrees[pt-2.1]": "FAILED"}
    assert "same beyond 0.01: {'losses'" in said
