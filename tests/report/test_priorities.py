"""The page of which techniques gain: gains, accuracy, and costs in the order of the frameworks."""

from __future__ import annotations

from bench.analysis.questions import Cost, priorities
from bench.report.priorities import page
from tests.records import planted

HALF, QUICKER, SAME = (0.5, 0.48, 0.52), (0.8, 0.79, 0.81), (1.0, 0.98, 1.02)
AMP = {"technique": "mixed_precision", "variant": "bf16"}
LARGE = {"task": "text-gpt-10m"}
KEPT, LOST = {"accuracy": (0.1, -0.4, 0.6)}, (-3.0, -3.5, -2.5)
COSTS = {
    ("mixed_precision", "pt"): Cost(215, ("torchao",), 1, 27),
    ("mixed_precision", "tf"): Cost(202, (), 0, 27),
}


def test_a_line_has_the_best_row_of_each_size_and_the_costs_of_pytorch_first():
    run = planted(
        AMP | {"framework": "tf", "time": SAME},
        AMP | {"time": QUICKER} | KEPT,
        AMP | LARGE | {"time": HALF, "accuracy": LOST},
        {"technique": "pruning", "variant": "80", "time": SAME},
    )
    text = page(run, priorities(run, COSTS), "docs")
    (line,) = [line for line in text.splitlines() if line.startswith("| [mixed precision](")]
    assert line.split(" | ")[1:] == [
        r"GPT on text: 2.00x (1.92–2.08)\*; small CNN on digits: 1.25x (1.23–1.27); "
        "1 of 2 rows gain",
        "no gain shown (1 tried)",
        "first call 0.500 s; 215 / 202 lines; refuses 1 of 27 / 0 of 27 models; needs torchao |",
    ]
    assert "No gain shown with accuracy kept: pruning." in text
