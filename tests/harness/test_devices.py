"""Work of a GPU's size: the table of classes, the plan, and what the driver tells."""

import ctypes
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest

from bench.harness import devices
from bench.harness.plan import EFFORT, Workload
from bench.harness.run_plan import techniques
from bench.harness.selection import cases_of
from shared.specs import TASKS, kept_activations, lasting_values, train_step_flops
from tests.docs.commands import STEPS
from tests.harness import runs
from tests.harness.command_line import PLAIN, ROOT, in_one_process
from tests.harness.planted_gpu import H100

GIB = 2**30
# Memory and the best product in float32 without tensor cores, by their makers' data sheets.
KNOWN = {
    "H100 SXM": (79.2, 67e12),
    "H100 PCIe": (79.2, 51e12),
    "H200": (139.8, 67e12),
    "B200": (178.0, 75e12),
    "A100 40 GB": (39.4, 19.5e12),
    "A100 80 GB": (79.2, 19.5e12),
    "L40S": (44.4, 91.6e12),
    "RTX 4090": (23.9, 82.6e12),
    "RTX 3090": (23.7, 35.6e12),
    "V100": (15.8, 15.7e12),
    "RTX 4080": (15.7, 48.7e12),
}
REACHED = 0.6  # of that product by a step, as the estimate has it
LARGE = sorted(set(devices.LARGER.values()))


def gpu(memory, float32):
    return devices.Gpu("planted", int(memory * GIB), float32)


@pytest.mark.parametrize("task", LARGE)
@pytest.mark.parametrize("known", KNOWN.values(), ids=KNOWN)
def test_a_step_takes_20_to_200_ms_and_a_row_fits_beside_its_baseline(known, task):
    one, spec = gpu(*known), TASKS[task]
    batch = devices.class_of(one).batch_of(task)
    assert 0.02 <= train_step_flops(spec.model, batch) / (REACHED * one.float32) <= 0.2
    assert kept_activations(spec.model, batch) > lasting_values(spec)
    assert spec.dataset.train_size >= batch
    work = Workload(task, "compute", samples=batch)
    technique = replace(techniques()["mixed_precision"], workloads=(work,))
    cases = [case for case in cases_of(technique, "module", "quick") if case.framework == "pt"]
    assert one.holds(cases[:2])


def test_a_gpu_too_small_or_too_slow_keeps_the_tasks_of_a_cpu():
    technique = techniques()["mixed_precision"]
    for small in (gpu(15.0, 8e12), gpu(8.0, 40e12)):
        assert devices.class_of(small) is None
    assert devices.of_its_size(technique, None) is technique


def test_every_technique_keeps_its_rows_with_larger_models_in_the_place_of_small_ones():
    for technique in techniques().values():
        larger = devices.of_its_size(technique, devices.class_of(H100))
        names = [[variant.name for variant in one.variants] for one in (larger, technique)]
        assert names[0] == names[1]
        works = [(devices.LARGER.get(w.task, w.task), w.batch, w.mode) for w in technique.workloads]
        found = [(work.task, work.batch, work.mode) for work in larger.workloads]
        assert found == works
        asked = {task for variant in larger.variants for task in variant.measured.tasks}
        assert not (asked | {work.task for work in larger.workloads}) & devices.LARGER.keys()


def test_contenders_of_a_match_fit_into_the_gpu_s_memory():
    technique = devices.of_its_size(techniques()["mixed_precision"], devices.class_of(H100))
    cases = [c for c in cases_of(technique, "module", "default") if c.framework == "pt"]
    plan = replace(runs.plan_of(cases, EFFORT["default"], technique), gpu=gpu(40.0, 50e12))
    assert all(plan.gpu.holds(match) for match in plan.matches())
    assert len(plan.matches()) > len(replace(plan, gpu=None).matches())


def test_the_plan_for_one_h100_and_pytorch_stays_under_12_minutes(tmp_path):
    """By what the parts of a run took on an H100, as far as its record tells."""
    given = ["-p", "tests.harness.planted_gpu", *STEPS.split(), *PLAIN, "--framework=pt"]
    ((status, out, _),) = in_one_process([[*given, "--plan", f"--results={tmp_path}"]], ROOT)
    assert status == 0
    for work in ("photos-resnet50 (128)", "text-gpt-base (32)", "text-bert-base (32)"):
        assert work in " ".join(out.split())
    assert "10m" not in out
    total = re.search(r"^total +(?:(\d+) min )?(?:\d+ s)", out, re.MULTILINE)
    assert int(total[1] or 0) < 12, out


def planted_driver(monkeypatch, *, cores=16_896, clock=1_980, count=1):
    """NVIDIA's management library, as far as it is asked."""

    def handle(index, place):
        return 0 if index < count else 2

    def name(handle, text, size):
        text.value = b"NVIDIA H100 80GB HBM3"
        return 0

    def set_to(value, field="value"):
        def give(*arguments):
            setattr(arguments[-1]._obj, field, value)
            return 0

        return give

    library = SimpleNamespace(
        nvmlInit_v2=lambda: 0,
        nvmlDeviceGetHandleByIndex_v2=handle,
        nvmlDeviceGetName=name,
        nvmlDeviceGetMemoryInfo=set_to(85_017_493_504, "total"),
        nvmlDeviceGetNumGpuCores=set_to(cores),
        nvmlDeviceGetMaxClockInfo=set_to(clock),
    )
    monkeypatch.setattr(ctypes, "CDLL", lambda path: library)


def test_the_driver_tells_memory_and_speed(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    planted_driver(monkeypatch)
    one = devices.first_gpu()
    assert (one.name, one.memory_bytes) == (H100.name, H100.memory_bytes)
    assert one.float32 == pytest.approx(66.9e12, rel=0.001)


@pytest.mark.parametrize("visible", ["", "-1", "1", "MIG-0"])
def test_a_gpu_that_is_hidden_or_not_there_is_none(monkeypatch, visible):
    planted_driver(monkeypatch)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert devices.first_gpu() is None


@pytest.mark.parametrize(("answered", "is_used"), [("cuda", True), ("cpu", False)])
def test_a_gpu_counts_where_all_frameworks_of_the_run_compute_on_it(monkeypatch, answered, is_used):
    monkeypatch.setattr(devices, "first_gpu", lambda: H100)
    said = {"pt_impl": "cuda", "tf_impl": answered}
    monkeypatch.setattr(devices, "_device", lambda package, interpreter: said[package])
    assert (devices.used_gpu(["pt", "tf"], {}) is H100) is is_used
    assert devices.used_gpu(["pt"], {}) is H100


def test_a_framework_that_does_not_start_has_no_gpu():
    assert devices._device("no_such_package", None) == "cpu"
    assert devices._device("pt_impl", "/no/such/python") == "cpu"
