"""docs/lines_of_code.md: the loops that it counts train alike, and its counts are theirs."""

import ast
import difflib
import re
from importlib import import_module

import pytest

from bench.harness.processes import ROOT

TECHNIQUES = {
    "bfloat16": "mixed_precision",
    "float16 with a scaler": "loss_scaling",
    "4 micro-batches": "gradient_accumulation",
    "clipping": "gradient_clipping",
}
FRAMEWORKS = ("pt", "tf")
TITLES = {"pt": "PyTorch", "tf": "TensorFlow"}


@pytest.mark.parametrize("technique", TECHNIQUES.values())
def test_by_hand_and_with_the_piece_train_to_the_same_weights(impl, framework, technique):
    loops = import_module(f"tests.train_step.loops_{framework}")
    ours, by_hand = (
        loops.train(getattr(loops, f"{technique}_{way}")) for way in ("with_piece", "by_hand")
    )
    assert ours == pytest.approx(by_hand, rel=1e-5, abs=1e-6)
    assert by_hand[0] != by_hand[2]  # it learns


def added(framework: str, name: str) -> int:
    """Lines of a loop that the plain one does not have, in any place and indented in any way."""
    text = (ROOT / "tests" / "train_step" / f"loops_{framework}.py").read_text()
    bodies = {
        node.name: [
            line.strip() for line in ast.get_source_segment(text, node).splitlines()[1:] if line
        ]
        for node in ast.parse(text).body
        if isinstance(node, ast.FunctionDef)
    }
    compared = difflib.ndiff(bodies["plain"], bodies[name])
    return sum(line.startswith("+ ") for line in compared)


def test_the_page_has_the_counts():
    page = (ROOT / "docs" / "lines_of_code.md").read_text("utf-8")
    rows = dict(re.findall(r"^\| (.+?) \| (\d+ \| \d+) \|", page, re.M))
    assert rows == {
        f"{title}: {told}": " | ".join(
            str(added(framework, f"{technique}_{way}")) for way in ("by_hand", "with_piece")
        )
        for framework, title in TITLES.items()
        for told, technique in TECHNIQUES.items()
    }
