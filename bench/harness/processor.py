"""What the system tells about the processor: model, caches, cores, and the hypervisor.

`root`: of the file system, for tests. Unknown values are None.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from bench.record import Processor

ROOT = Path("/")
UNITS = defaultdict(lambda: 1, K=1 << 10, M=1 << 20)
# Flags of x86 and of ARM, and what a record calls them.
INSTRUCTIONS = {
    name: name for name in ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "sve")
}
INSTRUCTIONS |= {"asimd": "neon", "bf16": "bf16", "i8mm": "i8mm"}

# Models by vendor and family: the first and last number, and the name. AMD's as in Linux,
# arch/x86/kernel/cpu/amd.c; Intel's as in arch/x86/include/asm/intel-family.h.
ZEN = {
    0x17: (
        (0x00, 0x2F, "Zen"),
        (0x30, 0x4F, "Zen 2"),
        (0x50, 0x5F, "Zen"),
        (0x60, 0x7F, "Zen 2"),
        (0x90, 0x91, "Zen 2"),
        (0xA0, 0xAF, "Zen 2"),
    ),
    0x19: (
        (0x00, 0x0F, "Zen 3"),
        (0x10, 0x1F, "Zen 4"),
        (0x20, 0x5F, "Zen 3"),
        (0x60, 0xAF, "Zen 4"),
    ),
    0x1A: ((0x00, 0x2F, "Zen 5"), (0x40, 0x4F, "Zen 5"), (0x60, 0x7F, "Zen 5")),
}
INTEL = {
    "Sandy Bridge": (0x2A, 0x2D),
    "Ivy Bridge": (0x3A, 0x3E),
    "Haswell": (0x3C, 0x3F, 0x45, 0x46),
    "Broadwell": (0x3D, 0x47, 0x4F, 0x56),
    "Skylake": (0x4E, 0x5E),
    "Kaby Lake": (0x8E, 0x9E),
    "Comet Lake": (0xA5, 0xA6),
    "Ice Lake": (0x6A, 0x6C, 0x7D, 0x7E),
    "Tiger Lake": (0x8C, 0x8D),
    "Rocket Lake": (0xA7,),
    "Sapphire Rapids": (0x8F,),
    "Emerald Rapids": (0xCF,),
    "Granite Rapids": (0xAD, 0xAE),
    "Sierra Forest": (0xAF,),
    "Alder Lake": (0x97, 0x9A),
    "Raptor Lake": (0xB7, 0xBA, 0xBF),
    "Meteor Lake": (0xAA, 0xAC),
    "Arrow Lake": (0xC5, 0xC6),
    "Lunar Lake": (0xBD,),
}
SKYLAKE_SERVER = 0x55  # whose steppings are three architectures
STEPPINGS = ((0, 4, "Skylake"), (5, 7, "Cascade Lake"), (10, 11, "Cooper Lake"))
# Parts by implementer, as ARM's and others' manuals of the register MIDR_EL1 number them.
ARM = {
    0x41: {
        0xD08: "Cortex-A72",
        0xD0B: "Cortex-A76",
        0xD0C: "Neoverse N1",
        0xD40: "Neoverse V1",
        0xD49: "Neoverse N2",
        0xD4F: "Neoverse V2",
    },
    0x46: {0x001: "A64FX"},
    0x48: {0xD01: "TaiShan v110"},
    0xC0: {0xAC3: "Ampere-1", 0xAC4: "Ampere-1A"},
}
IMPLEMENTERS = {0x41: "ARM", 0x46: "Fujitsu", 0x48: "HiSilicon", 0x61: "Apple", 0xC0: "Ampere"}
# What DMI says of machines that are none.
HYPERVISORS = {
    "qemu": "QEMU",
    "kvm": "KVM",
    "amazon ec2": "Amazon EC2",
    "google compute engine": "Google Compute Engine",
    "vmware": "VMware",
    "virtualbox": "VirtualBox",
    "microsoft corporation": "Hyper-V",
    "xen": "Xen",
    "openstack": "OpenStack",
}


def told(root: Path = ROOT) -> dict[str, str]:
    """The entries of /proc/cpuinfo for the first processor."""
    with suppress(OSError):
        lines = (root / "proc/cpuinfo").read_text("utf-8", errors="replace").splitlines()
        entries = dict(line.split(":", 1) for line in reversed(lines) if ":" in line)
        return {key.strip(): value.strip() for key, value in entries.items()}
    return {}


def instructions(entries: dict[str, str]) -> list[str]:
    """The instruction sets that decide how fast matrix products are."""
    flags = f"{entries.get('flags', '')} {entries.get('Features', '')}".split()
    return [name for flag, name in INSTRUCTIONS.items() if flag in flags]


def processor(entries: dict[str, str], root: Path = ROOT) -> Processor | None:
    """The processor's model numbers, and the name of its architecture if a table has it."""
    caches = _caches(root / "sys/devices/system/cpu/cpu0/cache")
    if "CPU implementer" in entries:
        implementer, part = _number(entries, "CPU implementer"), _number(entries, "CPU part")
        return Processor(
            vendor=IMPLEMENTERS.get(implementer),
            family=_number(entries, "CPU architecture"),
            model=part,
            stepping=_number(entries, "CPU revision"),
            architecture=ARM.get(implementer, {}).get(part),
            caches=caches,
        )
    names = ("cpu family", "model", "stepping")
    family, model, stepping = (_number(entries, name) for name in names)
    vendor = entries.get("vendor_id")
    if not vendor and not caches:
        return None
    return Processor(
        vendor=vendor,
        family=family,
        model=model,
        stepping=stepping,
        architecture=architecture(vendor, family, model, stepping),
        caches=caches,
    )


def architecture(
    vendor: str | None, family: int | None, model: int | None, stepping: int | None
) -> str | None:
    """The name of an x86 architecture, such as "Zen 4"; None if no table has it."""
    if model is None:
        return None
    if vendor == "AuthenticAMD":
        return _within(ZEN.get(family, ()), model)
    if vendor == "GenuineIntel" and family == 6:
        if model == SKYLAKE_SERVER:
            return _within(STEPPINGS, -1 if stepping is None else stepping)
        return next((name for name, models in INTEL.items() if model in models), None)
    return None


def _within(ranges: Iterable[tuple[int, int, str]], number: int) -> str | None:
    return next((name for first, last, name in ranges if first <= number <= last), None)


def _number(entries: dict[str, str], name: str) -> int | None:
    with suppress(ValueError):
        return int(entries.get(name, ""), 0)
    return None


def _caches(folder: Path) -> dict[str, float]:
    """The bytes of each cache of a processor: L1d, L1i, L2, L3."""
    caches = {}
    for index in sorted(folder.glob("index*")):
        with suppress(OSError, ValueError):
            level, kind, size = ((index / n).read_text().strip() for n in ("level", "type", "size"))
            kind = {"Data": "d", "Instruction": "i"}.get(kind, "")
            caches[f"L{int(level)}{kind}"] = int(size.rstrip("KM")) * UNITS[size[-1:]]
    return caches


def cores(processors: Iterable[int], root: Path = ROOT) -> int | None:
    """How many cores these processors are on; in a virtual machine it may be wrong."""
    siblings = set()
    for number in processors:
        topology = root / f"sys/devices/system/cpu/cpu{number}/topology"
        names = ("core_cpus_list", "thread_siblings_list")  # of newer and older kernels
        try:
            path = next(topology / name for name in names if (topology / name).exists())
            siblings.add(path.read_text().strip())
        except (OSError, StopIteration):
            return None
    return len(siblings) or None


def hypervisor(entries: dict[str, str], root: Path = ROOT) -> str | None:
    """The hypervisor's name, "unknown" if it gives none; None on hardware."""
    hints = ["sys/hypervisor/type"]
    hints += [f"sys/class/dmi/id/{name}" for name in ("sys_vendor", "product_name", "bios_vendor")]
    texts = []
    for hint in hints:
        with suppress(OSError):
            texts.append((root / hint).read_text("utf-8", errors="replace").lower())
    text = " ".join(texts)
    known = next((name for hint, name in HYPERVISORS.items() if hint in text), None)
    if "flags" in entries:  # x86, which has one for it
        return known or "unknown" if "hypervisor" in entries["flags"].split() else None
    return None if "metal" in text else known
