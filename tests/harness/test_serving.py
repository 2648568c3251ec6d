"""What fresh processes measure of a deployed model; what is read back, and what fails."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from bench.harness.plan import Prepared, Work
from bench.probes import server, serving
from shared import datasets
from shared.provenance import provenance
from shared.specs import TASKS, DatasetSpec
from tests.harness.fake_impl.kit.runtime import Clock

TASK = TASKS["digits-cnn"]
WEIGHTS = {"w": np.ones(2, np.float32)}


def load_slowly(path, *, threads, wait_s=0.0, grows=0):
    """A loader for the processes of these tests: predictions that wait, one thread too many."""
    kept = np.ones(grows)

    def predict(x):
        time.sleep(wait_s)
        return x.sum() + kept[:1].sum()

    predict.threads = threads + (path == "ignores threads")
    return predict


@pytest.fixture
def request_of(tmp_path):
    """A request to a fresh process that loads with `load_slowly`."""
    np.save(tmp_path / "rows.npy", np.ones((64, 3), np.float32))

    def make(path="file", **arguments):
        return {
            "load": f"{__name__}:load_slowly",
            "arguments": {"path": path} | arguments,
            "rows": str(tmp_path / "rows.npy"),
        }

    return make


def test_a_process_is_measured_from_its_creation(request_of, tmp_path):
    before = time.monotonic()
    found = serving._serve(request_of(wait_s=0.02), 1, [], 0.6, tmp_path)
    assert 0.02 < found["start"] < time.monotonic() - before
    assert 0.02 <= found["latency"] <= found["latency_p95"]
    assert found["latency_p99"] is None  # fewer than a thousand calls
    assert 0 <= found["load"] < found["start"]
    assert found["rates"] == {}


def test_a_process_without_latency_predicts_one_sample_and_measures_rates(request_of, tmp_path):
    found = serving._serve(request_of(wait_s=0.01), 1, [1], 0, tmp_path)
    assert set(found) == {"ready", "threads", "memory", "rates", "start"}


@pytest.fixture
def clock(monkeypatch):
    """It passes by sleeping alone."""
    found = Clock()
    monkeypatch.setattr(server, "time", found)
    return found


def test_slow_predictions_end_after_the_time_that_is_asked_for(clock):
    server.latency(lambda x: clock.sleep(0.02), None, 0.6)
    assert 0.6 < clock.now < 0.65


def test_memory_is_the_process_s_proportional_peak(request_of, tmp_path):
    small = serving._serve(request_of(), 1, [], 0, tmp_path)["memory"]
    large = serving._serve(request_of(grows=25_000_000), 1, [], 0, tmp_path)["memory"]
    assert 190e6 < large - small < 210e6  # 200 MB


@pytest.mark.parametrize("size", [1, 64])
def test_rates_are_samples_a_second_at_each_batch_size(clock, size):
    assert server.rate(lambda x: clock.sleep(0.01), None, size) == pytest.approx(100 * size)


def test_a_process_tells_a_rate_for_each_batch_size(request_of, tmp_path):
    rates = serving._serve(request_of(wait_s=0.01), 1, [1, 64], 0, tmp_path)["rates"]
    assert rates.keys() == {"1", "64"}
    assert 0 < rates["1"] <= 100
    assert 0 < rates["64"] <= 100 * 64


def test_a_percentile_of_a_hundred_takes_a_thousand_calls():
    found = server.latency(lambda x: None, None, 3.0)
    assert found["latency"] <= found["latency_p95"] <= found["latency_p99"]


def test_threads_that_are_not_those_asked_for_fail(request_of, tmp_path):
    with pytest.raises(RuntimeError, match="1 threads were asked for, it runs 2"):
        serving._serve(request_of("ignores threads"), 1, [], 0, tmp_path)


def test_a_process_that_fails_says_why(request_of, tmp_path):
    with pytest.raises(RuntimeError, match=r"a fresh process failed: TypeError: .*unknown"):
        serving._serve(request_of(unknown=1), 1, [], 0, tmp_path)


@pytest.fixture
def asked(monkeypatch, tmp_path):
    """What `probe` asks fresh processes for, and its figures, by the repetitions of a run."""
    spec = DatasetSpec("few", "digits", train_size=4, test_size=64)
    data = datasets.materialise(spec, tmp_path)
    monkeypatch.setattr(serving, "usable_threads", lambda: 2)
    times = dict.fromkeys(("latency", "latency_p95", "latency_p99", "load"), 0.001)

    def ask(repetitions):
        requests = []

        def serve(request, threads, batches, longest_s, folder):
            requests.append((threads, batches, longest_s))
            found = {"start": float(len(requests)), "memory": 1, "threads": threads}
            found["rates"] = {str(size): 100.0 * size for size in batches}
            return found | (times if longest_s else {})

        monkeypatch.setattr(serving, "_serve", serve)
        work = Work(TASK, "plain", {}, 1, WEIGHTS, "predict", data=str(data), folder=tmp_path)
        work = replace(work, repetitions=repetitions)
        found = serving.probe(SimpleNamespace(__name__="pt_impl"), work, serving.Route(make="m:f"))
        return requests, found

    return ask


def test_a_default_run_starts_twice_and_finds_the_rest_in_one_process(asked):
    requests, found = asked(3)
    assert requests == [(2, [64], 1.0), (2, [], 0)]
    assert found["start"]["samples"] == [1.0, 2.0]
    assert found["rate_2_threads_batch_64"]["samples"] == [6400.0]
    assert {len(found[name]["samples"]) for name in ("latency", "load", "memory")} == {1}
    assert not [name for name in found if name.startswith("rate_1_")]


def test_a_full_run_finds_all_in_four_processes_on_one_thread_and_on_all(asked):
    requests, found = asked(7)
    sizes = [1, 2, 4, 8, 16, 32, 64]
    assert requests == [(2, sizes, 3.0)] * 4 + [(1, sizes, 0)] * 4
    assert len([name for name in found if name.startswith("rate_")]) == 2 * len(sizes)
    assert {len(each["samples"]) for each in found.values()} == {4}


# The proof ----------------------------------------------------------------------------------------

LOGITS = np.array([[0.1, 2.0], [3.0, 2.9999]])


@pytest.fixture
def prove(tmp_path):
    """`took_effect` on a model that predicts LOGITS, and a file that predicts what is given."""
    spec = DatasetSpec("few", "digits", train_size=4, test_size=2)
    data = datasets.materialise(spec, tmp_path)
    model = object()
    impl = SimpleNamespace(
        kit=SimpleNamespace(
            data=SimpleNamespace(to_device=lambda x, y: (x, y)),
            training=SimpleNamespace(make_predict=lambda m: lambda x: LOGITS),
        )
    )

    def call(logits, *, precision="float32", threads=None, metadata=None, export=None):
        def predict(x):
            assert len(x) == 2  # real data, not the batch that is timed
            return np.array(logits)

        predict.loaded = SimpleNamespace(
            threads=threads,
            precision=precision,
            metadata=provenance(TASK, WEIGHTS) if metadata is None else metadata,
        )
        settings = {"export": export or {}}
        work = Work(TASK, "onnx", settings, 1, WEIGHTS, "predict", data=str(data))
        return serving.took_effect(impl, work, Prepared(None, predict, model, None), (None, None))

    return call


def test_a_faithful_export_is_proven_with_figures(prove):
    evidence, reason = prove(LOGITS + 3e-5)
    assert reason is None
    assert evidence["largest_difference"] == pytest.approx(1e-5, rel=1e-3)
    assert (evidence["samples"], evidence["agreeing_classes"]) == (2, 1.0)
    assert evidence["metadata"] == "class_names, made_by, task, version, weights_sha256"


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"logits": LOGITS + 6e-4}, "its outputs differ by 2.0e-04 of the largest, allowed 1e-04"),
        ({"logits": LOGITS * 1.06, "precision": "bfloat16"}, "its outputs differ by 6.0e-02"),
        ({"logits": LOGITS * np.nan}, "its outputs differ by nan"),
        ({"logits": LOGITS, "threads": 999}, "it runs 999 threads"),
        ({"logits": LOGITS, "metadata": {}}, "does not carry the metadata"),
    ],
)
def test_an_export_that_is_not_faithful_is_not_compared(prove, given, reason):
    evidence, said = prove(**given)
    assert reason in said
    assert "largest_difference" in evidence


def test_classes_that_differ_are_counted(prove):
    evidence, reason = prove([LOGITS[0], LOGITS[1][::-1]])
    assert evidence["agreeing_classes"] == 0.5
    assert reason == "50.0% of the classes agree, not 99.9%"


def test_half_precision_has_its_own_bar(prove):
    assert prove(LOGITS * 1.01, precision="bfloat16")[1] is None
    assert prove(LOGITS * 1.01, export={"precision": "float16"})[1] is None
    assert prove(LOGITS * 1.01)[1] is not None


def test_int8_has_its_own_bar_and_says_so(prove):
    evidence, reason = prove(LOGITS * 1.09, export={"precision": "int8"})
    assert reason is None
    assert evidence["computes_in"] == "int8, else float32"
    assert "allowed 1e-01" in prove(LOGITS * 1.11, export={"precision": "int8"})[1]


def test_int8_is_calibrated_with_samples_of_the_training_split(tmp_path):
    spec = DatasetSpec("few", "digits", train_size=7, test_size=2)
    data = datasets.materialise(spec, tmp_path)
    settings = {"export": {"precision": "int8"}}
    work = Work(TASK, "onnx_int8", settings, 1, WEIGHTS, "predict", data=str(data))
    x, y = serving._example(work)
    assert np.array_equal(x, datasets.load(data, "train")[0])
    assert len(y) == 7
    x, _ = serving._example(Work(TASK, "onnx", {}, 1, WEIGHTS, "predict", data=str(data)))
    assert x.shape == (2, 32, 32, 1)


def test_every_layer_counts_in_a_proof():
    weights = {"a.bn.gamma": np.zeros(3, np.float32), "b.bn.gamma": np.ones(3, np.float32)}
    weights |= {"a.bias": np.zeros(2, np.float32)}
    found = serving.live(Work(TASK, "onnx", {}, 1, weights)).weights
    assert found["a.bn.gamma"].tolist() == [np.float32(serving.LIVE)] * 3
    assert np.array_equal(found["b.bn.gamma"], weights["b.bn.gamma"])
    assert np.array_equal(found["a.bias"], weights["a.bias"])
    assert not weights["a.bn.gamma"].any()  # those that were given are left


def test_the_probe_stands_with_batch_one_alone():
    work = Work(TASK, "onnx", {}, 128, WEIGHTS, "predict")
    assert serving.probe(None, work, serving.Route()) == {}


def test_provenance_names_weights_and_classes():
    about = provenance(TASK, WEIGHTS)
    other = provenance(TASK, {"w": 2 * WEIGHTS["w"]})
    assert about["weights_sha256"] != other["weights_sha256"]
    assert json.loads(about["class_names"])[3] == "3"
    assert all(isinstance(value, str) for value in about.values())
