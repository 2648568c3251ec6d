"""The part of the machine that a process may use, and its environment variables."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import floor, inf

import psutil

from bench.harness.processor import told
from shared import cgroups, onednn

# What each dtype's products need, by the beginning of the architecture's name: one of them.
NEEDS = {
    "bfloat16": {
        "x86": ("avx512_bf16", "amx_bf16"),
        "arm": ("bf16",),
    },
    "int8": {
        "x86": ("avx512_vnni", "avx_vnni", "amx_int8"),
        "arm": ("i8mm", "asimddp"),
    },
    "oneDNN in TensorFlow": {"x86": onednn.INSTRUCTIONS},
}
ARCHITECTURES = {"x86_64": "x86", "AMD64": "x86", "aarch64": "arm", "arm64": "arm"}


@dataclass(frozen=True)
class Host:
    """Cores, instructions and variables.

    `cores`, `physical`: logical and physical cores of the machine; `affinity`: logical cores that
    this process may run on; `quota`: how many it may fill. `flags`: instructions; None if the
    system does not list them.
    """

    cores: int
    physical: int
    affinity: int
    quota: float = inf
    flags: frozenset[str] | None = None
    architecture: str = "x86_64"
    variables: Mapping[str, str] = field(default_factory=dict)

    @property
    def usable(self) -> int:
        """Cores that threads can fill; at least 1."""
        return max(1, floor(min(self.affinity, self.quota)))

    @property
    def enough(self) -> int:
        """Threads that suffice: two threads of one core compute little more than one."""
        return min(self.usable, self.physical)

    def lacks(self, dtype: str) -> tuple[str, ...]:
        """The instructions for products of a dtype, if the processor has none of them."""
        names = NEEDS[dtype].get(ARCHITECTURES.get(self.architecture, ""), ())
        return () if self.flags is None or self.flags & set(names) else names

    def number(self, name: str) -> int | None:
        """The value of a variable such as 4 or 4,2 for threads; None if it is not set."""
        text = self.variables.get(name, "").partition(",")[0].strip()
        return int(text) if text.isdigit() and int(text) else None


def here() -> Host:
    """This machine and this process."""
    cores = os.cpu_count() or 1
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else cores
    return Host(
        cores=cores,
        physical=psutil.cpu_count(logical=False) or cores,
        affinity=affinity,
        quota=cgroups.cpu_quota(),
        flags=_flags(),
        architecture=platform.machine(),
        variables=dict(os.environ),
    )


def _flags() -> frozenset[str] | None:
    """The processor's instructions, where Linux lists them."""
    entries = told()
    names = entries.get("flags", entries.get("Features"))
    return None if names is None else frozenset(names.split())


def words(host: Host) -> str:
    """The usable cores, and what limits them."""
    if host.usable == host.cores:
        return f"{host.cores} cores"
    limits = []
    if host.affinity < host.cores:
        limits.append(f"affinity {host.affinity}")
    if host.quota < host.affinity:
        limits.append(f"quota {host.quota:g}")
    return f"{host.usable} of {host.cores} cores ({', '.join(limits)})"
