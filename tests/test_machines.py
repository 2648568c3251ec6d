"""`twinbench machines`: what is published of a record, which records are taken, and the page."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from bench import machines
from bench.analysis.machine_class import slug
from bench.analysis.reading import load
from bench.record import encode
from bench.report import readme
from bench.report.replace import write_atomically
from tests.records import find_case, whole_run, with_case

ROOT = Path(__file__).resolve().parents[1]
COMMAND = "pytest bench/ --benchmark-only"


def run_at(speed: float, **fields):
    """A whole run of a machine of so many FLOP/s."""
    run = whole_run()
    environment = run.environment.but(peak_flops={"float32": speed})
    return run.but(**({"command": COMMAND, "environment": environment} | fields))


def saved(record, folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "results.json").write_bytes(encode(record))
    return folder


@pytest.fixture
def docs(tmp_path, monkeypatch) -> Path:
    """A repository's docs with one machine, which README shows."""
    docs = tmp_path / "a clone" / "docs"
    monkeypatch.setattr(machines, "DOCS", docs)
    monkeypatch.setattr(machines, "FOLDER", docs / "machines")
    monkeypatch.setattr(machines, "PAGE", docs / "machines.md")
    monkeypatch.setattr(machines, "HEADLINE", docs / "results.json")
    monkeypatch.setattr(machines, "README", docs.parent / "README.md")
    for made_again in ("raw", "analyse"):  # of what nothing was measured nothing can be derived
        monkeypatch.setattr(machines, made_again, lambda record: record)
    docs.mkdir(parents=True)
    machines.README.write_text(f"# Title\n\n{readme.BEGIN}\n{readme.END}\n", "utf-8")
    assert machines.main(["add", str(saved(run_at(2e11), tmp_path / "first"))]) == 0
    return docs


def folders(docs: Path) -> list[str]:
    return sorted(path.parent.name for path in docs.glob("machines/*/results.json"))


def refused(capsys, *arguments: object) -> str:
    """The one line that says why."""
    capsys.readouterr()
    assert machines.main(list(map(str, arguments))) == 2
    out, err = capsys.readouterr()
    (said,) = err.splitlines()
    assert out == ""
    return said


# What is taken ------------------------------------------------------------------------------------


def test_a_machine_is_added_with_one_command_and_its_pages_are_made(docs, tmp_path):
    before = machines.README.read_text("utf-8")
    assert "on one other, of " not in before
    assert machines.main(["add", str(saved(run_at(4e11), tmp_path / "second"))]) == 0
    first, second = folders(docs)
    assert (docs / "results.json").resolve() == docs / "machines" / first / "results.json"
    assert second == slug(load(docs / "machines" / second).environment)
    page, text = (path.read_text("utf-8") for path in (machines.PAGE, machines.README))
    assert "400 GFLOP/s" in page
    assert "on one other, of " in text
    assert "| ✓ " in (docs / "answers.md").read_text("utf-8")
    assert machines.main(["page", "--check"]) == 0
    machines.PAGE.write_text("edited by hand", "utf-8")
    assert machines.main(["page", "--check"]) == 1


def test_a_class_that_is_there_is_replaced_only_when_that_is_asked_for(docs, tmp_path, capsys):
    """Its folder's name may be another then; what shows it follows."""
    (before,) = folders(docs)
    (docs / "gpu").mkdir()
    machines.point(docs / "gpu" / "results.json", docs / "machines" / before)
    path = saved(run_at(2.55e11, started="2026-12-24"), tmp_path / "again")
    said = refused(capsys, "add", path)
    assert said.endswith(f"docs/machines has this class ({before}); replace it by --replace")
    assert folders(docs) == [before]
    assert machines.main(["add", str(path), "--replace"]) == 0
    (after,) = folders(docs)
    assert after != before
    assert not (docs / "machines" / before).exists()
    assert load(docs).started == load(docs / "gpu").started == "2026-12-24"


def test_a_record_that_is_written_by_a_link_stays_in_its_folder(docs):
    """As `report docs --derive` does."""
    write_atomically({docs / "results.json": encode(run_at(2e11, started="2026-12-24")).decode()})
    assert (docs / "results.json").is_symlink()
    (name,) = folders(docs)
    assert load(docs / "machines" / name).started == "2026-12-24"


def test_another_machine_can_take_the_headline(docs, tmp_path, capsys):
    path = saved(run_at(4e11, started="2026-12-24"), tmp_path / "second")
    assert machines.main(["add", str(path), "--headline"]) == 0
    assert load(docs).started == "2026-12-24"
    assert len(folders(docs)) == 2
    capsys.readouterr()
    assert machines.main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.endswith("README's") for line in lines] == ["400 GFLOP/s" in x for x in lines]


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"finished": False, "ended": "minutes"}, "is not finished, ended by minutes"),
        ({"effort": "quick"}, "a run of effort quick; give one of effort default"),
        ({"command": f"{COMMAND} --technique=pruning"}, "a run with --technique"),
        ({"command": f"{COMMAND} -kpruning"}, "a run with -k"),
    ],
)
def test_what_is_no_whole_default_run_is_refused(docs, tmp_path, capsys, fields, why):
    path = saved(run_at(4e11, **fields), tmp_path / "part")
    assert why in refused(capsys, "add", path)
    assert len(folders(docs)) == 1
    assert machines.main(["add", str(path), "--partial"]) == 0
    assert len(folders(docs)) == 2


def test_a_run_of_a_user_s_model_and_what_is_no_record_are_refused(docs, tmp_path, capsys):
    run = run_at(4e11)
    run = run.but(environment=run.environment.but(model={"file": "mine.py", "sha256": "0"}))
    path = saved(run, tmp_path / "mine")
    assert "a user's model" in refused(capsys, "add", path, "--partial")
    (path / "results.json").write_text("{")
    assert "not JSON, or cut off before its end" in refused(capsys, "add", path)
    assert "no such record" in refused(capsys, "add", tmp_path / "nowhere")


# What is taken out --------------------------------------------------------------------------------

HOME = "/".join(("", "home", "alice"))  # in parts: a test of layout looks for such paths
TEXTS = {
    f"cannot open {HOME}/project x/data.npz": "cannot open .../project x/data.npz",
    f"{HOME}/venv/bin/python ended": ".../python ended",
    f"File '{HOME}/a.py', line 3": "File '.../a.py', line 3",
    f"started in {HOME}": "started in ...",
    f"file://{HOME}/x.npz is read": ".../x.npz is read",
    "~/runs/today/x.log": ".../x.log",
    "see https://example.org/a/b": "see https://example.org/a/b",
    r"C:\Users\alice\x.py": ".../x.py",
    "ssh alice@node12.cluster": "ssh NAME",
    "node12: killed by alice": "NAME: killed by NAME",
    "/proc/self/stat is missing": "/proc/self/stat is missing",
    "1.3x samples/s, PyTorch/TensorFlow, 3/4": "1.3x samples/s, PyTorch/TensorFlow, 3/4",
    "malice is no name": "malice is no name",
}


@pytest.mark.parametrize(("text", "left"), TEXTS.items())
def test_names_and_folders_are_taken_out_of_what_was_written(text, left):
    run = with_case(whole_run(), "digits-cnn-64/tf/bf16", reason=text, evidence={"seen": [text]})
    run = run.but(command=text, environment=run.environment.but(os=text))
    cleaned = machines.cleaned(run, {"alice", "node12"})
    case = find_case(cleaned, "digits-cnn-64/tf/bf16")
    every = (cleaned.command, cleaned.environment.os, case.reason, case.evidence["seen"][0])
    assert set(every) == {left}


def test_figures_and_rows_stay_as_they_are():
    run = whole_run()
    assert encode(machines.cleaned(run, {"pytorch", "alice"})) == encode(run)


def test_names_of_this_host_and_given_ones_are_taken_out(docs, tmp_path, monkeypatch):
    monkeypatch.setattr(machines.socket, "gethostname", lambda: "node12.cluster")
    monkeypatch.setattr(machines.getpass, "getuser", lambda: "alice")
    run = run_at(4e11, command=f"{COMMAND} --results node12-alice-bob")
    path = saved(run, tmp_path / "second")
    assert machines.main(["add", str(path), "--hide", "bob", "--headline"]) == 0
    assert load(docs).command == f"{COMMAND} --results NAME-NAME-NAME"


# What is published --------------------------------------------------------------------------------

PUBLISHED = sorted((ROOT / "docs" / "machines").glob("*/results.json"))


@pytest.mark.parametrize("path", PUBLISHED, ids=lambda path: path.parent.name)
def test_a_published_record_lies_in_the_folder_of_its_class_and_names_nobody(path):
    record = load(path)
    assert path.parent.name == slug(record.environment)
    texts = [*strings(json.loads(path.read_text("utf-8")))]
    assert [
        text for text in texts if machines.ABSOLUTE.sub(machines._last_part, text) != text
    ] == []
    assert not [text for text in texts if machines.ADDRESS.search(text)]


def strings(value):
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for one in value.values() if isinstance(value, dict) else value:
            yield from strings(one)


def test_readme_and_the_gpu_page_show_records_of_machines():
    for shown in ("docs/results.json", "docs/gpu/results.json"):
        assert (ROOT / shown).resolve() in PUBLISHED


def test_the_page_has_every_answer_and_every_machine():
    page = (ROOT / "docs" / "machines.md").read_text("utf-8")
    table = (ROOT / readme.ANSWERS).read_text("utf-8")
    named = re.findall(r"^\| \*\*([\w ]+)\*\*: (.*?)(?:, [\d.]+ \w+ parameters)? \|", table, re.M)
    assert len(named) > 20
    for aim, place in named:
        assert page.count(f"**{aim}: {place}**") == 1, (aim, place)
    kept = page.partition("## The machines")[2].partition("\n## ")[0]
    assert len(re.findall(r"^- \*\*", kept, re.M)) == len(PUBLISHED)
