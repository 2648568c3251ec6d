"""Every example of the documentation runs, and files can be copied as it says."""

from __future__ import annotations

import re
import shutil

import pytest

from bench import docs
from tests import workers
from tests.docs.clones import elsewhere
from tests.docs.pages import PAGES, ROOT, fences

pytestmark = pytest.mark.timeout(240)


def programs() -> dict[str, str]:
    """What the pages' Python is, put together: README's blocks, and those of one chapter."""
    blocks = zip(("PyTorch", "TensorFlow"), fences("README.md", "python"), strict=True)
    ends = "\nassert 0 < float(loss) < 20\n"
    examples = {f"README.md, {framework}": block + ends for framework, block in blocks}
    chapters = re.split(r"^## ", (ROOT / "docs" / "your_model.md").read_text("utf-8"), flags=re.M)
    for chapter in chapters:
        blocks = re.findall(r"^```python\n(.*?)^```$", chapter, re.M | re.S)
        if blocks:
            examples[f"your_model.md, {chapter.splitlines()[0]}"] = "\n".join(blocks)
    examples["diagnosis.md"] = "\n".join(fences("docs/diagnosis.md", "python"))
    return examples


def test_no_other_page_has_an_example_that_nobody_runs():
    having = {page for page in PAGES if fences(page, "python")}
    assert having == {
        "README.md",
        "docs/your_model.md",
        "docs/add_a_technique.md",
        "docs/diagnosis.md",
    }
    assert list(programs())[2:] == [
        "your_model.md, PyTorch",
        "your_model.md, TensorFlow",
        "diagnosis.md",
    ]


@pytest.mark.parametrize("name", programs())
def test_the_example_runs(name, tmp_path):
    path = tmp_path / "example.py"
    path.write_text(programs()[name])
    side = "tf" if "import tensorflow" in path.read_text() else "pt"
    workers.run("example_worker", (side,), lambda _: [path])


@pytest.mark.parametrize(
    ("path", "needs"),
    [
        ("tf_impl/train_step/gradient_clipping.py", ["tf_impl/kit/calling.py"]),
        ("pt_impl/train_step/stacking.py", ["pt_impl/train_step/mixed_precision.py"]),
        ("pt_impl/input/tuned_folder.py", ["shared/epochs.py", "shared/images.py"]),
    ],
)
def test_what_a_page_says_of_copying_holds(path, needs, tmp_path):
    """In a folder with these files alone it can be imported; without one of them it cannot."""
    needed = docs.needed(path)
    assert set(needs) <= set(needed)
    folders = {missing: tmp_path / str(number) for number, missing in enumerate(["", *needed])}
    for missing, folder in folders.items():
        for place in {path, *needed} - {missing}:
            (folder / place).parent.mkdir(exist_ok=True, parents=True)
            shutil.copy(ROOT / place, folder / place)
    whole, *errors = elsewhere(path.removesuffix(".py").replace("/", "."), *folders.values())
    assert whole == ""
    for missing, error in zip(needed, errors, strict=True):
        assert any(words in error for words in ("No module named", "cannot import name")), missing


def test_what_goes_with_a_file_is_what_a_function_of_it_imports_too():
    assert "shared/onnx_quantization.py" in docs.needed("pt_impl/deployment/export.py")
