"""The planted faults fit the source as it is, and the command that plants them tells the truth.

Whether each is noticed says `twinbench validate mutations`, which takes minutes.
"""

import ast
import functools
from dataclasses import replace
from pathlib import Path

import pytest

from bench.validation import attacked, command, mutations
from bench.validation.mutations import BROKEN, KILLED, SURVIVED, Outcome
from tests.validation.faults import FAULTS, Fault

ROOT = Path(__file__).resolve().parents[2]


def test_there_are_forty_and_each_has_a_name_of_its_own():
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 40


@functools.cache
def dumped(text: str) -> str:
    """The program, whatever its layout."""
    return ast.dump(ast.parse(text))


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_has_its_place_and_is_sound_python(fault):
    assert mutations.misplaced([fault]) == []
    text = (ROOT / fault.file).read_text("utf-8")
    planted = text.replace(fault.old, fault.new)
    assert dumped(planted) != dumped(text)
    assert (ROOT / fault.tests[0]).is_file()


# The command, on a small tree -------------------------------------------------------------------

SOURCE = "def double(value):\n    return 2 * value\n"
TEST = """
from source import double

def test_double():
    assert double(3) == 6

def test_sign():
    assert double(-1) < 0
"""


def fault(name: str, new: str, *tests: str) -> Fault:
    return Fault(name, "source.py", "return 2 * value", new, tests or ("test_source.py",))


NOTICED = fault("three times", "return 3 * value")
NOT_NOTICED = fault("three times, with a test of the sign", "return 3 * value",
                    "test_source.py", "-k", "sign")  # fmt: skip
HANGS = fault("no end", "while True: pass")
NO_PYTHON = fault("no Python", "return 3 *", "test_source.py")


def small(folder: Path, patch: pytest.MonkeyPatch) -> Path:
    (folder / "source.py").write_text(SOURCE)
    (folder / "test_source.py").write_text(TEST)
    patch.setattr(mutations, "ROOT", folder)
    patch.setattr(mutations, "LIMIT_S", 20.0)
    # Each fault starts pytest twice, which else is mostly the imports of plugins.
    patch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    return folder


@pytest.fixture
def tree(tmp_path, monkeypatch) -> Path:
    return small(tmp_path, monkeypatch)


@pytest.fixture(scope="module")
def planted(tmp_path_factory) -> list[tuple[Fault, Outcome]]:
    """What three faults come to."""
    with pytest.MonkeyPatch.context() as patch:
        folder = small(tmp_path_factory.mktemp("tree"), patch)
        outcomes = list(mutations.plant([NOTICED, NOT_NOTICED, NO_PYTHON]))
        assert (folder / "source.py").read_text() == SOURCE  # the tree stays as it is
    return outcomes


@pytest.fixture
def known(planted, monkeypatch):
    """The command plants these faults, and what they come to is what `planted` found."""

    def know(*faults):
        monkeypatch.setattr(mutations, "known", lambda: faults)
        monkeypatch.setattr(mutations, "plant", lambda given, _: zip(given, outcomes, strict=False))

    outcomes = [outcome for _, outcome in planted]
    return know


def test_what_a_fault_comes_to_is_seen(planted):
    assert [(fault.name, outcome.status) for fault, outcome in planted] == [
        (NOTICED.name, KILLED),
        (NOT_NOTICED.name, SURVIVED),
        (NO_PYTHON.name, BROKEN),
    ]


def test_tests_that_do_not_end_have_noticed(tree, monkeypatch):
    monkeypatch.setattr(mutations, "LIMIT_S", 1.0)
    ((_, outcome),) = mutations.plant([HANGS])
    assert (outcome.status, outcome.how) == (KILLED, "its tests do not end")


def test_tests_that_fail_without_a_fault_tell_nothing(tree):
    (tree / "test_source.py").write_text("def test_nothing():\n    assert False\n")
    with pytest.raises(ValueError, match=r"test_source.py: fails without a fault \(test_source"):
        list(mutations.plant([NOTICED]))


def test_a_fault_without_its_place_is_named(tree):
    (tree / "source.py").write_text("")
    with pytest.raises(ValueError, match="three times: its text is not in its file"):
        list(mutations.plant([NOTICED]))


@pytest.mark.parametrize(("faults", "status"), [((NOTICED,), 0), ((NOTICED, NOT_NOTICED), 1)])
def test_the_exit_status_says_whether_all_were_noticed(known, page, capsys, faults, status):
    known(*faults)
    assert command.main(["mutations"]) == status
    printed = capsys.readouterr().out
    assert f"1 of {len(faults)} faults were noticed" in printed
    assert ("not noticed: three times, with" in printed) == (status == 1)
    with pytest.raises(FileNotFoundError):  # nothing is kept that nobody asked for
        page()


def test_the_outcomes_are_kept_and_shown(known, page, monkeypatch):
    known(NOTICED, NOT_NOTICED)
    command.main(["mutations", "--publish"])
    assert "1 of 2 were noticed" in page()
    assert "| source.py | three times; " in page()
    assert "with a test of the sign (not noticed) |" in page()
    drawn = [replace(NOTICED, name="line 2: 2 -> 3"), replace(NOT_NOTICED, name="2 < 3 -> 2 <= 3")]
    monkeypatch.setattr(mutations, "drawn", lambda *_: drawn)
    command.main(["mutations", "--drawn", "2", "--publish"])
    assert "1 of 2 were noticed" in page()
    assert "| bench/analysis | 1 of 2 | 50% (1%–99%) |" in page()
    assert "2 < 3 -> 2 <= 3" in attacked.RECORD.read_text("utf-8")


def test_a_run_whose_time_is_over_does_not_pass(tree, monkeypatch, capsys):
    monkeypatch.setattr(mutations, "known", lambda: (NOTICED,) * 3)
    assert command.main(["mutations", "--minutes", "0.01"]) == 2


def test_faults_are_drawn_from_operators_and_numbers():
    faults = mutations.drawn("bench/analysis", 12, seed=0)
    assert len({(fault.file, fault.name, fault.new) for fault in faults}) == 12
    few = mutations.drawn("bench/analysis", 3, seed=0)
    assert few == mutations.drawn("bench/analysis", 3, seed=0)
    assert few != mutations.drawn("bench/analysis", 3, seed=1)
    assert mutations.misplaced(faults) == []
    for fault in faults:
        assert dumped(fault.old) != dumped(fault.new)
        assert all((ROOT / path).exists() for path in fault.tests)
        names = [Path(test).name for test in fault.tests]
        # Where a file has tests of its own, they come first.
        assert f"test_{Path(fault.file).name}" not in names[1:]


@pytest.mark.parametrize(
    ("source", "now"),
    [
        ("a < b", "a <= b"),
        ("a is None", "a is not None"),
        ("a and b", "a or b"),
        ("a + b", "a - b"),
        ("x = 2.5", "x = 3.5"),
        ("x = 1e+100", "x = 2e+100"),
        ("x = True", "x = False"),
    ],
)
def test_what_is_drawn_is_another_program(tmp_path, monkeypatch, source, now):
    monkeypatch.setattr(mutations, "ROOT", tmp_path)
    (tmp_path / "source.py").write_text(source)
    assert mutations._drawn(tmp_path / "source.py", 0, ()).new == now
