"""Beside a GPU, rows whose file runs on a CPU alone are refused: their models lie on the GPU."""

import importlib

import pytest

import pt_impl
from bench.harness import helpers
from bench.harness.plan import Work
from bench.harness.user_model import KIT
from shared.specs import TASKS
from shared.weights import init_weights

FILES = (
    "compression.bench_post_training_quantization",
    "compression.bench_accuracy_aware_quantization",
    "compression.bench_quantization_aware_training",
    "compression.bench_weight_quantization",
    "compression.bench_combinations",
    "deployment.bench_export",
)


IN_PLACE = ("baseline", "tensorrt", "fp32_in_framework")  # run where the model is


def _rows(name: str) -> list[tuple[str, object]]:
    technique = importlib.import_module(f"bench.{name}").TECHNIQUE
    return [(name, variant) for variant in technique.variants if "pt" in variant.frameworks]


def _prepare(name: str, variant):
    task = TASKS["digits-cnn"]
    weights = init_weights(task.model, 0)
    work = Work(task, variant.name, variant.settings, 1, weights, mode="predict")
    return importlib.import_module(f"bench.{name}").prepare(pt_impl, work)


@pytest.mark.parametrize(
    ("name", "variant"),
    [row for name in FILES for row in _rows(name)],
    ids=lambda each: getattr(each, "name", each),
)
def test_a_file_for_a_cpu_is_refused_beside_a_gpu(monkeypatch, name, variant):
    for module in KIT:
        importlib.import_module(f"pt_impl.{module}")
    monkeypatch.setattr(helpers, "on_cpu", lambda device: False)
    if variant.name in IN_PLACE:
        assert _prepare(name, variant).predict
        return
    with pytest.raises(NotImplementedError, match="hide the GPU"):
        _prepare(name, variant)
