"""What the system tells of the processor, from planted files of /proc and /sys."""

from __future__ import annotations

import pytest

from bench.harness.processor import (
    architecture,
    cores,
    hypervisor,
    instructions,
    processor,
    told,
)

AMD, INTEL = "AuthenticAMD", "GenuineIntel"
EPYC = """\
processor\t: 0
vendor_id\t: AuthenticAMD
cpu family\t: 25
model\t\t: 17
model name\t: AMD EPYC 9B14
stepping\t: 1
flags\t\t: fpu sse2 avx2 avx512f avx512_bf16 hypervisor

processor\t: 1
vendor_id\t: AuthenticAMD
model name\t: another
flags\t\t: fpu
"""
GRAVITON = """\
processor\t: 0
Features\t: fp asimd sve bf16 i8mm
CPU implementer\t: 0x41
CPU architecture: 8
CPU part\t: 0xd40
CPU revision\t: 1
"""


def plant(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("vendor", "family", "model", "stepping", "name"),
    [
        (AMD, 0x17, 0x01, 2, "Zen"),
        (AMD, 0x17, 0x31, 0, "Zen 2"),
        (AMD, 0x19, 0x01, 1, "Zen 3"),
        (AMD, 0x19, 0x11, 1, "Zen 4"),
        (AMD, 0x19, 0xA0, 1, "Zen 4"),
        (AMD, 0x1A, 0x02, 1, "Zen 5"),
        (INTEL, 6, 0x4F, 1, "Broadwell"),
        (INTEL, 6, 0x55, 4, "Skylake"),
        (INTEL, 6, 0x55, 7, "Cascade Lake"),
        (INTEL, 6, 0x6A, 6, "Ice Lake"),
        (INTEL, 6, 0x8F, 8, "Sapphire Rapids"),
        (INTEL, 6, 0xAD, 1, "Granite Rapids"),
    ],
)
def test_an_architecture_is_named_by_its_numbers(vendor, family, model, stepping, name):
    assert architecture(vendor, family, model, stepping) == name


@pytest.mark.parametrize(
    "numbers",
    [
        (AMD, 0x1F, 1, 0),
        (AMD, 0x17, 0xF0, 0),
        (INTEL, 6, 0xFF, 0),
        (INTEL, 6, 0x55, 9),
        (INTEL, 15, 0x8F, 0),
        ("another", 6, 0x8F, 0),
        (AMD, 0x19, None, None),
        (INTEL, 6, 0x55, None),
    ],
)
def test_what_no_table_has_stays_unknown(numbers):
    assert architecture(*numbers) is None


def test_an_x86_processor_is_read_from_cpuinfo_and_sysfs(tmp_path):
    caches = {"index0": ("1", "Data", "32K"), "index1": ("1", "Instruction", "64K")}
    caches |= {"index2": ("2", "Unified", "1024K"), "index3": ("3", "Unified", "32M")}
    files = {"proc/cpuinfo": EPYC}
    for index, values in caches.items():
        for name, value in zip(("level", "type", "size"), values, strict=True):
            files[f"sys/devices/system/cpu/cpu0/cache/{index}/{name}"] = f"{value}\n"
    root = plant(tmp_path, files)
    entries = told(root)
    found = processor(entries, root)
    assert entries["model name"] == "AMD EPYC 9B14"
    assert instructions(entries) == ["avx2", "avx512f", "avx512_bf16"]
    assert (found.vendor, found.family, found.model, found.stepping) == (AMD, 25, 17, 1)
    assert found.architecture == "Zen 4"
    assert found.caches == {"L1d": 32 << 10, "L1i": 64 << 10, "L2": 1 << 20, "L3": 32 << 20}


def test_an_arm_processor_is_read_from_its_implementer_and_part(tmp_path):
    entries = told(plant(tmp_path, {"proc/cpuinfo": GRAVITON}))
    found = processor(entries, tmp_path)
    assert (found.vendor, found.architecture) == ("ARM", "Neoverse V1")
    assert instructions(entries) == ["sve", "neon", "bf16", "i8mm"]
    unknown = processor(entries | {"CPU part": "0xfff"}, tmp_path)
    assert unknown.architecture is None


def test_a_system_that_tells_nothing_has_no_processor(tmp_path):
    assert told(tmp_path) == {}
    assert processor({}, tmp_path) is None
    assert hypervisor({}, tmp_path) is None
    assert cores([0, 1], tmp_path) is None


def test_unreadable_figures_are_left_out(tmp_path):
    cache = "sys/devices/system/cpu/cpu0/cache/index0"
    files = {f"{cache}/level": "x", f"{cache}/type": "Data", f"{cache}/size": "32K"}
    found = processor(
        {"vendor_id": AMD, "cpu family": "many", "model": "1"}, plant(tmp_path, files)
    )
    assert (found.family, found.model, found.architecture, found.caches) == (None, 1, None, {})


@pytest.mark.parametrize("name", ["core_cpus_list", "thread_siblings_list"])
@pytest.mark.parametrize(
    ("siblings", "used", "count"),
    [
        (["0-1", "0-1"], [0, 1], 1),
        (["0", "1"], [0, 1], 2),
        (["0,2", "1,3", "0,2", "1,3"], [0, 1, 2, 3], 2),
        (["0,2", "1,3", "0,2", "1,3"], [0, 2], 1),
    ],
)
def test_processors_of_one_core_count_once(tmp_path, name, siblings, used, count):
    place = "sys/devices/system/cpu/cpu{}/topology/" + name
    root = plant(tmp_path, {place.format(n): f"{text}\n" for n, text in enumerate(siblings)})
    assert cores(used, root) == count


@pytest.mark.parametrize(
    ("flags", "hints", "name"),
    [
        ("hypervisor", {}, "unknown"),
        ("hypervisor", {"sys/class/dmi/id/sys_vendor": "QEMU\n"}, "QEMU"),
        ("hypervisor", {"sys/class/dmi/id/sys_vendor": "Amazon EC2\n"}, "Amazon EC2"),
        ("hypervisor", {"sys/hypervisor/type": "xen\n"}, "Xen"),
        ("avx2", {"sys/class/dmi/id/sys_vendor": "Amazon EC2\n"}, None),
    ],
)
def test_a_hypervisor_is_told_by_a_flag_and_named_by_dmi(tmp_path, flags, hints, name):
    assert hypervisor({"flags": flags}, plant(tmp_path, hints)) == name


@pytest.mark.parametrize(("product", "name"), [("c7g.large", "Amazon EC2"), ("c7g.metal", None)])
def test_arm_has_no_flag_for_it(tmp_path, product, name):
    hints = {"sys_vendor": "Amazon EC2", "product_name": product}
    root = plant(tmp_path, {f"sys/class/dmi/id/{hint}": text for hint, text in hints.items()})
    assert hypervisor({"Features": "fp"}, root) == name
