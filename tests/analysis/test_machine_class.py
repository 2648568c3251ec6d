"""Which machines are of one class, how a class is called, and what sets two apart."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bench.analysis.machine_class import changed_at_end, differences, same_class, slug, words
from bench.analysis.reading import load
from bench.analysis.values import MOST_OTHERS
from bench.record import Environment, Processor, Speed

DOCS = Path(__file__).resolve().parents[2] / "docs"
EPYC = Environment(
    cpu="AMD EPYC",
    isa=["avx2", "avx512f", "avx512_vnni", "avx512_bf16"],
    logical_cores=2,
    threads=2,
    peak_flops={"float32": 2.01e11, "bfloat16": 4.3e11},
    os="Linux-6.1-v1",
)
ZEN4 = Processor(vendor="AuthenticAMD", family=25, model=17, architecture="Zen 4")


def measured(computes, waits, **fields):
    """A machine whose two threads compute and wait so many times as fast as one."""
    best = Speed(one=2.01e11 / computes, all=2.01e11)
    chain = waits and Speed(one=1e9, all=waits * 1e9)
    fields = {"processor": ZEN4, "products": {"pt": {"float32": best}}, "chain": chain} | fields
    return EPYC.but(**fields)


@pytest.mark.parametrize(
    ("computes", "waits", "called"),
    [
        (1.02, 1.9, "two threads of one core"),
        (1.95, 2.0, "two cores"),
        (1.0, 1.05, "two processors with the time of one"),
        (1.0, None, "two processors as fast as one"),
    ],
)
def test_it_is_measured_whether_processors_share_a_core(computes, waits, called):
    machine = measured(computes, waits)
    assert words(machine) == f"AMD EPYC (Zen 4), {called}, 201 GFLOP/s"
    # The system of a virtual machine may take threads for cores, and is not asked then.
    assert words(machine.but(cores=2)) == words(machine)


def test_what_the_system_says_of_shared_cores_needs_no_measurement():
    assert words(EPYC.but(cores=1, processor=ZEN4)) == (
        "AMD EPYC (Zen 4), two threads of one core, 201 GFLOP/s"
    )
    assert "64 threads of 32 cores" in words(EPYC.but(threads=64, logical_cores=64, cores=32))


def test_what_was_not_measured_is_left_out():
    assert words(EPYC) == "AMD EPYC (AVX-512, bfloat16), 2 processors, 201 GFLOP/s"
    assert words(EPYC.but(peak_flops=None, threads=None, logical_cores=None)) == (
        "AMD EPYC (AVX-512, bfloat16)"
    )
    assert words(Environment()) == "unknown processor"


def test_a_run_on_a_part_of_the_machine_says_so():
    assert "1 of 2 processors, " in words(EPYC.but(threads=1))
    assert "2 of 8 processors, at most 2.5 cores by quota" in words(
        EPYC.but(logical_cores=8, quota=2.5)
    )
    assert not same_class(EPYC, EPYC.but(threads=1))


@pytest.mark.parametrize(
    ("told", "called"),
    [
        ("AMD EPYC 7763 64-Core Processor", "AMD EPYC 7763"),
        ("Intel(R) Xeon(R) CPU @ 2.20GHz", "Intel Xeon"),
        ("Intel(R) Core(TM) i7-8550U CPU @ 1.80GHz", "Intel Core i7-8550U"),
        ("Apple M2", "Apple M2"),
    ],
)
def test_a_processor_is_called_by_its_name_alone(told, called):
    assert words(Environment(cpu=told)) == called


def test_what_was_measured_beside_other_programs_is_a_bound_and_sets_nothing_apart():
    slow = measured(1.0, 1.0).but(
        products={}, peak_flops={"float32": 1e10}, disturbed=2 * MOST_OTHERS
    )
    assert words(slow) == "AMD EPYC (Zen 4), 2 processors, at least 10 GFLOP/s"
    assert same_class(slow, measured(1.9, 2.0))
    assert differences(measured(1.9, 2.0), slow) == []


def test_a_gpu_comes_first():
    gpu = EPYC.but(
        gpu={"name": "NVIDIA H100 80GB HBM3"}, peak_flops={"float32": 5e13, "bfloat16": 7.63e14}
    )
    assert words(gpu) == "NVIDIA H100 80GB HBM3, 763 TFLOP/s in bfloat16"
    assert not same_class(EPYC, gpu)
    assert differences(EPYC, gpu)[0] == "it computes on NVIDIA H100 80GB HBM3, on the CPU before"


def test_runs_of_one_class_share_a_folder_whose_name_is_safe():
    speeds = [1.89e11, 1.96e11, 2.05e11]
    names = {slug(EPYC.but(peak_flops={"float32": speed})) for speed in speeds}
    assert names == {"amd-epyc-avx-512-bfloat16-2-processors-200-gflops"}
    hostile = slug(Environment(cpu="../../<b>" + "x" * 300))
    assert re.fullmatch(r"[a-z0-9-]{1,100}", hostile)


def test_a_machine_of_twice_the_speed_is_another_and_that_is_said_first():
    fast = EPYC.but(peak_flops={"float32": 4.18e11, "bfloat16": 9.81e11}, os="Linux-6.1-v2")
    assert not same_class(fast, EPYC)
    said = differences(fast, EPYC)
    assert said[0] == "the new machine computes half as much: 201 GFLOP/s in float32, 418 before"
    assert said[-1] == "the build of the system is Linux-6.1-v1, Linux-6.1-v2 before"
    assert differences(EPYC, fast)[0].startswith("the new machine computes twice as much: 418")


def test_a_slightly_slower_run_is_of_the_same_class():
    slower = EPYC.but(peak_flops={"float32": 1.89e11, "bfloat16": 4.2e11}, memory_bytes=25.1e9)
    assert same_class(EPYC.but(memory_bytes=25.2e9), slower)
    assert differences(EPYC.but(memory_bytes=25.2e9), slower) == []


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"isa": ["avx2"]}, "the instructions are AVX2, AVX-512 with bfloat16 before"),
        ({"cpu": "Intel Xeon"}, "the processor is Intel Xeon, AMD EPYC before"),
        ({"threads": 1}, "the number of threads is 1, 2 before"),
        (
            {"isa_limits": {"ONEDNN_MAX_CPU_ISA": "AVX2"}},
            "the instructions are limited by ONEDNN_MAX_CPU_ISA=AVX2, by nothing before",
        ),
    ],
)
def test_what_decides_a_figure_decides_the_class(change, sentence):
    assert not same_class(EPYC, EPYC.but(**change))
    assert differences(EPYC, EPYC.but(**change)) == [sentence]


def test_shared_cores_set_two_machines_apart_where_both_were_measured():
    shared, two = measured(1.0, 2.0), measured(1.9, 2.0)
    assert not same_class(shared, two)
    assert differences(two, shared) == [
        "the processors used are two threads of one core, two cores before"
    ]
    assert same_class(shared, EPYC)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"memory_bytes": 64 << 30}, "it has 64 GiB of memory, 32 GiB before"),
        ({"bandwidth": Speed(all=5e9)}, "the memory moves half as much"),
        ({"governor": "powersave"}, "the governor is powersave, performance before"),
        ({"allocator": {"pt": False}}, "the allocator has other settings"),
    ],
)
def test_other_differences_are_said_and_leave_the_class(change, sentence):
    before = {"memory_bytes": 32 << 30, "bandwidth": Speed(all=1e10), "governor": "performance"}
    old = EPYC.but(**before, allocator={"pt": True, "tf": True})
    assert differences(old, old.but(**change)) == [sentence]
    assert same_class(old, old.but(**change))


def test_products_at_the_end_are_compared_with_those_at_the_start():
    speeds = {"start": 2e11, "steady": 1.6e11, "slow": 1e11}
    products = {name: {"pt": {"float32": Speed(all=speed)}} for name, speed in speeds.items()}
    begun = EPYC.but(products=products["start"])
    assert changed_at_end(begun) is None  # of before, or ended early
    assert changed_at_end(begun.but(products_at_end=products["steady"])) is None
    changed = begun.but(products_at_end=products["slow"])
    assert changed_at_end(changed) == (
        "MACHINE CHANGED: its best product in float32 was 50% of that at the start when the run "
        "had ended."
    )
    assert changed_at_end(changed.but(disturbed=0.5)) is None  # the start is not known


def test_published_records_have_a_class():
    """They were made before processors were told from threads."""
    assert words(load(DOCS / "results.json").environment).startswith("AMD EPYC")
    gpu = load(DOCS / "gpu" / "results.json").environment
    assert words(gpu) == "NVIDIA H100 80GB HBM3, 763 TFLOP/s in bfloat16"
