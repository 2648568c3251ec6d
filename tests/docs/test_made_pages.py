"""Pages that are made say what their records, or the code, do."""

from __future__ import annotations

import ast
import json
import re
from functools import cache
from importlib import import_module

import msgspec
import pytest
from markdown_it import MarkdownIt

from bench import docs, machines
from bench.docs import command, differences, instructions, tried
from bench.harness.run_plan import techniques
from bench.ladders import climbing
from bench.ladders import command as ladders
from bench.ladders import record as climbs
from bench.network import command as network
from bench.port.causes import CATALOGUE, GROUPS
from bench.record import DIFFERENT
from bench.validation import attacked, controls_page, overhead, reproducibility
from shared.specs import TASKS
from tests.docs.commands import PROJECTED
from tests.docs.pages import ROOT
from tests.port import public_pairs

pytestmark = pytest.mark.timeout(240)
CLIMBED = sorted(path.parent for path in ROOT.glob("docs/ladders/*/ladder.json"))
pages = cache(docs.pages)


@pytest.mark.parametrize("folder", CLIMBED, ids=lambda folder: folder.name)
def test_a_published_climb_is_what_its_record_gives(folder, tmp_path):
    """Make it again with `twinbench ladder --show docs/ladders/NAME --write`."""
    record = climbs.load(folder)
    assert record.finished
    assert record.ladder == folder.name
    ladder = climbing.at_task(ladders.find(folder.name), record.task)
    ladders.write(ladder, record, tmp_path)
    for name in ("ladder.md", "ladder.svg"):
        assert (folder / name).read_text("utf-8") == (tmp_path / name).read_text("utf-8"), name


def test_the_projection_is_what_its_records_give(monkeypatch):
    """Of this repository, whose page no test writes. Make it again with its last command."""
    monkeypatch.chdir(ROOT)
    words = PROJECTED.partition(" network ")[2].split(" ")
    assert network.main([*words, "--page", "docs/across_hosts.md", "--check"]) == 0


def test_the_page_of_machines_is_what_their_records_give():
    """Make it again with: twinbench machines page."""
    assert machines.main(["page", "--check"]) == 0


def test_the_page_of_tried_models_has_each_of_them():
    record = tried.read()
    assert set(record.models) == {path.name for path in tried.MODELS.glob("*.py")}
    assert set(record.by_hand) == {name for name, *_ in tried.COMPARED}


SURE = (0.85, (0.83, 0.87), "faster")


@pytest.mark.parametrize(
    ("rows", "best"),
    [
        ([(0.8, (0.6, 1.07), "inconclusive"), SURE], "1 0.850 (0.830–0.870)"),
        (
            [(0.5, (0.4, 0.6), DIFFERENT), (0.85, (0.83, 0.98), "slightly faster")],
            "the plain one",
        ),
        ([(0.5, None, DIFFERENT), (0.85, None, None)], "1 0.850, one block"),
        ([(0.5, None, None), SURE], "1 0.850 (0.830–0.870)"),
        ([(1.2, None, None)], "the plain one"),
        ([], "not measured"),
    ],
)
def test_of_tried_rows_the_best_is_one_that_was_shown_to_be(rows, best):
    failed = tried.Row("x", "failed", "train", 16, "FAILED", "PyTorch")
    measured = [
        tried.Row("x", str(place), "train", 16, "OK", "PyTorch", None, *row)
        for place, row in enumerate(rows)
    ]
    assert tried._best([failed, *measured], "train", None) == f"PyTorch: {best}"


def as_json(maker) -> dict:
    return json.loads(maker.RECORD.read_text("utf-8"))


def levels() -> instructions.Levels:
    return msgspec.json.decode(instructions.RECORD.read_bytes(), type=instructions.Levels)


@pytest.mark.parametrize(
    ("maker", "read"),
    [
        (attacked, as_json),
        (controls_page, as_json),
        (overhead, as_json),
        (tried, lambda _: tried.read()),
        (reproducibility, lambda _: reproducibility.read()),
        (instructions, lambda _: levels()),
    ],
    ids=lambda part: getattr(part, "__name__", ""),
)
def test_a_page_of_measurements_says_what_its_record_does(maker, read):
    assert maker.PAGE.read_text("utf-8") == maker.page(read(maker))


def test_the_fixed_numbers_are_those_of_the_code():
    text = (ROOT / "docs" / "numbers.md").read_text("utf-8")
    table = text.partition("<!-- constants -->")[2].partition("<!-- constants end -->")[0]
    rows = re.findall(r"^\| .* \| (\S+) \| `([\w.]+)\.(\w+)` \|$", table, re.M)
    assert len(rows) == len(table.strip().splitlines()) - 2
    for value, module, name in rows:
        assert str(getattr(import_module(module), name)) == value, f"{module}.{name}"


def test_the_pages_of_techniques_are_what_the_code_gives(monkeypatch):
    """Make them again with: twinbench docs."""
    monkeypatch.setattr(docs, "pages", pages)  # made once
    assert docs.differing(docs.FOLDER) == []


def test_the_page_of_differences_is_what_the_code_gives(tmp_path, monkeypatch, capsys):
    """Make it again with: python -m bench.docs.differences."""
    assert differences.main(["--check"]) == 0
    monkeypatch.setattr(differences, "PAGE", tmp_path / "differences.md")
    assert differences.main(["--check"]) == 1
    assert "make it again with" in capsys.readouterr().err
    assert differences.main([]) == 0
    assert differences.main(["--check"]) == 0


def test_the_part_on_public_pairs_is_what_their_record_gives():
    """Make it again with: python -m tests.port.public_pairs --page."""
    assert public_pairs.main(["--check"]) == 0
    assert public_pairs.read().pairs


def test_each_cause_of_a_port_is_explained_once():
    """A key that two groups had would lose one of its causes."""
    assert sum(map(len, GROUPS.values())) == len(CATALOGUE)


def test_a_page_that_is_old_missing_or_of_nothing_is_found(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(docs, "pages", pages)  # made once
    monkeypatch.setattr(command, "FOLDER", tmp_path / "techniques")
    assert command.main(["--check"]) == 1
    assert "pruning.md" in capsys.readouterr().err
    assert not (tmp_path / "techniques").exists()
    assert command.main([]) == 0
    assert command.main(["--check"]) == 0
    capsys.readouterr()
    (tmp_path / "techniques" / "compression" / "pruning.md").write_text("edited by hand")
    (tmp_path / "techniques" / "gone.md").write_text("of a technique that was removed")
    assert command.main(["--check"]) == 1
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith(
        "docs/techniques: not what the code gives: compression/pruning.md, gone.md; make"
    )
    assert command.main([]) == 0
    assert command.main(["--check"]) == 0
    assert not (tmp_path / "techniques" / "gone.md").exists()


@pytest.mark.parametrize("name", techniques())
def test_a_page_shows_what_both_docstrings_say(name):
    """As it is rendered, and once: no word of a docstring becomes markup."""
    tokens = (
        MarkdownIt("commonmark")
        .enable("table")
        .parse(pages()[f"{techniques()[name].family}/{name}.md"])
    )
    paths = [f"{side}/{techniques()[name].family}/{name}.py" for side in ("pt_impl", "tf_impl")]
    sources = [(ROOT / path).read_text("utf-8") for path in paths]
    shown = letters("".join(child.content for t in tokens for child in (t.children or [t])))
    for source in sources:
        docstring = ast.get_docstring(ast.parse(source))
        for part in re.split(rf"^(?:{'|'.join(docs.SECTIONS)}):\s", docstring, flags=re.M)[1:]:
            if part.startswith(("`pt_impl/", "`tf_impl/")):  # its twin, which is linked
                continue
            for item in re.split(r"\n(?=- )|\n\n", part.strip()):
                wanted = letters(item.replace("python -m", ".venv/bin/python -m"))
                assert wanted in shown
                assert len(wanted) < 60 or shown.count(wanted) == 1, item


def letters(text: str) -> str:
    """A text without what rendering may change: white space, marks of code and of lists, case."""
    return re.sub(r"^\d+\. |[`\s\-]", "", text, flags=re.M).lower()


@pytest.mark.parametrize("name", techniques())
def test_the_lines_to_add_import_what_the_technique_brings(name):
    """Every function and class of the repository that they use, from the file that defines it."""
    page = pages()[f"{techniques()[name].family}/{name}.md"].partition("\n## ")[0]
    for code in re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S):
        tree = ast.parse(code)
        froms = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
        ours = [node for node in froms if node.module.startswith(("pt_impl.", "tf_impl."))]
        assert f"{techniques()[name].family}.{name}" in ours[-1].module
        for node in ours:
            place = ROOT / node.module.replace(".", "/")
            files = {path.stem for path in place.glob("*.py")}
            source = place.with_suffix(".py")
            text = source.read_text("utf-8") if source.is_file() else ""
            defined = {getattr(part, "name", "") for part in ast.parse(text).body}
            assert {alias.name for alias in node.names} <= files | defined


def test_the_lines_of_mixed_precision_can_be_pasted():
    page = pages()["train_step/mixed_precision.md"]
    assert "from pt_impl.kit.calling import to_float32\n" in page
    assert "from pt_impl.train_step.mixed_precision import MixedPrecision\n" in page
    assert "import tensorflow as tf\n" in page


@pytest.mark.parametrize("name", techniques())
def test_what_it_gains_names_a_row_once_and_a_task_in_plain_words(name):
    page = pages()[f"{techniques()[name].family}/{name}.md"]
    table = page.partition("| work | PyTorch | TensorFlow |")[2].partition("\n\n")[0]
    for line in table.strip().splitlines()[1:]:
        work, *sides = line.strip("| ").split(" | ")
        assert work.partition(",")[0] not in TASKS
        for side in sides:
            rows = [one.partition(": ")[0] for one in side.split("<br>")]
            assert len(set(rows)) == len(rows)


def test_a_chart_names_rows_in_plain_words_and_each_runtime():
    chart = pages()["compression/post_training_quantization.svg"]
    assert "int8, TorchInductor / LiteRT" in chart
    assert "static_int8" not in chart


def test_the_page_of_compilation_says_after_how_many_steps_it_is_repaid():
    page = (ROOT / "docs/techniques/train_step/compilation.md").read_text("utf-8")
    assert "| break-even [steps] (interval) |" in page


def test_a_page_lists_the_variants_and_tasks_of_the_benchmark():
    page = pages()["train_step/compilation.md"]
    assert "| baseline (the baseline) | — | yes | Keras 3 | default |" in page
    assert "| compiled | — | yes, needs a C++ compiler | Keras 3 | default |" in page
    assert "| eager | — | — | Keras 3 | ordinary |" in page
    assert "| max\\_autotune |" in page or "| max_autotune |" in page
    assert "`mode='max-autotune'` | yes, needs a C++ compiler | — | full |" in page
    assert (
        "| small CNN on digits (digits-cnn) | 128 (compute) | predictions | — | ordinary |" in page
    )
    assert "tf_keras" in pages()["compression/pruning.md"].partition("What is measured</sum")[2]


def test_a_page_says_which_framework_alone_has_a_function():
    """In PyTorch's words, and in no others."""
    page = pages()["deployment/native_export.md"]
    _, rest = page.split("- `export_torchscript(", 1)
    function = rest.partition("\n- ")[0]
    assert "PyTorch: Legacy: " in function
    assert "TensorFlow: " not in function
