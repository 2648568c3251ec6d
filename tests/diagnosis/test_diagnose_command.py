"""What `twinbench diagnose` says of a busy machine, of a prediction, and of slow products."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

from bench import diagnose as command
from bench.analysis.questions import remedies
from bench.analysis.reading import load
from bench.harness import machine
from bench.record import Attempt
from shared.bottlenecks import diagnose
from shared.profiles import Breakdown, Operator
from tests.workers import ROOT

PRODUCT = Operator("aten::addmm", 10, 0.9, 0.9)
GIVEN = SimpleNamespace(what="digits-cnn")


def breakdown(*operators, **parts) -> Breakdown:
    """A breakdown of a step of one second."""
    seconds = dict.fromkeys(("waiting", "transfer", "forward", "backward", "optimizer"), 0.0)
    seconds |= dict.fromkeys(("communication", "overhead", "idle"), 0.0) | parts
    return Breakdown(1.0, 1.05, 1.05, **seconds, operators=operators, gaps=(), memory=())


@pytest.fixture
def told(monkeypatch):
    """`told(breakdown, others)`: what is said of it beside other programs."""

    def tell(made: Breakdown, others: float | None, given=GIVEN, framework="pt") -> dict:
        watch = SimpleNamespace(stop=lambda: Attempt(others=others))
        monkeypatch.setattr(machine, "Watch", lambda: watch)
        answer = json.loads(json.dumps(diagnose(made, full=0.5, faults=0).as_json()))
        monkeypatch.setattr(command, "diagnosed", lambda framework, given: answer)
        return command.watched(framework, given)

    return tell


def said(diagnosis: dict, framework: str = "pt") -> str:
    records = {"docs": load(ROOT / "docs")}
    return " ".join(" ".join(command.text(framework, diagnosis, records)).split())


STEP = breakdown(PRODUCT, overhead=0.6, forward=0.3, backward=0.1)


@pytest.mark.parametrize(
    "made", [STEP, breakdown(PRODUCT, forward=0.5, backward=0.5), breakdown(waiting=0.6)]
)
def test_beside_other_programs_nobody_can_tell(told, made):
    diagnosis = told(made, 0.62)
    text = said(diagnosis)
    assert text.startswith("PyTorch: bottleneck unknown: other programs used 62% of the")
    assert "healthy" not in text
    assert "bottleneck:" not in text
    assert "what helped" not in text
    assert not command.can_tell(diagnosis)
    assert len(diagnosis["evidence"]) == 1
    assert command.known({"docs": load(ROOT / "docs")}, "pt", diagnosis) == []


@pytest.mark.parametrize(("others", "warned"), [(0.12, True), (0.01, False), (None, False)])
def test_a_little_beside_it_is_warned_of_in_the_words_of_try(told, others, warned):
    text = said(told(STEP, others))
    assert text.startswith("PyTorch: bottleneck: overhead")
    assert ("!! Other programs use 12% of this machine's cores: stop them" in text) == warned
    assert "what helped against overhead (docs):" in text


PREDICTS = "import tensorflow as tf\ndef make():\n    return (lambda a: m.predict(a)), [(x,)]\n"
CALLS = "import tensorflow as tf\ndef make():\n    return (lambda a: m(a, training=False)), []\n"
TRAINS = "import tensorflow as tf\ndef make():\n    return jitted(tf.GradientTape), []\n"


@pytest.mark.parametrize(
    ("source", "parts", "predicts"),
    [
        (PREDICTS, {}, True),
        (CALLS, {}, True),
        (TRAINS, {}, False),
        (CALLS, {"backward": 0.1}, False),
    ],
)
def test_a_prediction_has_no_remedy_of_a_train_step(told, tmp_path, source, parts, predicts):
    path = tmp_path / "model.py"
    path.write_text(source)
    made = breakdown(PRODUCT, overhead=0.6, forward=0.3, **parts)
    diagnosis = told(made, 0.0, SimpleNamespace(what=str(path)), "tf")
    records = {"docs": load(ROOT / "docs")}
    kinds = {one.work.kind for one in command.known(records, "tf", diagnosis)}
    assert diagnosis["predicts"] is predicts
    assert kinds <= ({"predict"} if predicts else {"train", "update"})
    assert ("predict of Keras builds a dataset" in said(diagnosis, "tf")) == (source is PREDICTS)


def test_remedies_of_a_prediction_are_rows_of_predictions():
    record = load(ROOT / "docs")
    for framework in ("pt", "tf"):
        found = remedies(record, framework, "overhead", of_prediction=True)
        assert {one.work.kind for one in found} <= {"predict"}
        assert {one.goal.name for one in found} <= {"latency"}


@pytest.mark.parametrize(("of_peak", "healthy"), [(0.5, True), (0.01, False), (None, True)])
def test_products_far_below_the_peak_are_not_healthy(of_peak, healthy):
    """As of denormal numbers."""
    product = replace(PRODUCT, of_peak=of_peak)
    diagnosis = diagnose(breakdown(product, forward=0.9, overhead=0.1), full=0.5, faults=0)
    assert diagnosis.bottleneck == "arithmetic"
    assert diagnosis.healthy is healthy
    assert ("torch.set_flush_denormal(True)" in diagnosis.evidence[-1]) is not healthy
