"""docs/lines_of_code.md: the loops that it counts train alike, and its counts are theirs."""

import ast
import difflib
import re

import pytest

from bench.harness.processes import ROOT
from tests import workers

TECHNIQUES = {
    "bfloat16": "mixed_precision",
    "float16 with a scaler": "loss_scaling",
    "4 micro-batches": "gradient_accumulation",
    "clipping": "gradient_clipping",
}
FRAMEWORKS = {"pt": "PyTorch", "tf": "TensorFlow"}


@pytest.fixture(scope="module")
def trained():
    found = {}
    for framework in FRAMEWORKS:
        found |= workers.run(f"train_step.loops_{framework}", (framework,))
    return found


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("technique", TECHNIQUES.values())
def test_by_hand_and_with_the_piece_train_to_the_same_weights(trained, framework, technique):
    found = trained[framework]
    ours, by_hand = found[f"{technique}_with_piece"], found[f"{technique}_by_hand"]
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
        for framework, title in FRAMEWORKS.items()
        for told, technique in TECHNIQUES.items()
    }
