"""The class of a machine: which of its properties decide figures, and how two machines differ.

Machines of one class give the same answers. Older records lack some properties. An unknown property
is not shown, and does not make two machines differ.
"""

from __future__ import annotations

import re

from bench.analysis.values import MOST_OTHERS
from bench.record import Environment, Speed

# Speeds of one class differ by no more than this factor. Runs on eight machines of one kind
# differed by 1.08, the nearest other kind by 2.1.
SAME_SPEED = 1.3
# Processors that compute less together than this share of what so many cores would, share cores.
SHARED = 0.6
NUMBERS = ("no", "one", "two", "three", "four")
INSTRUCTIONS = {
    "amx_bf16": "AMX",
    "avx512f": "AVX-512",
    "avx2": "AVX2",
    "sve": "SVE",
    "neon": "NEON",
}
UNKNOWN = (None, "", [])
MEMORY_SHARE = 0.02  # of the memory's size: less is what the system keeps for itself


def words(environment: Environment) -> str:
    """The class in words: "AMD EPYC (Zen 4), two threads of one core, 201 GFLOP/s".

    With a GPU: "NVIDIA H100 80GB HBM3, 763 TFLOP/s in bfloat16".
    """
    return ", ".join([*_device(environment), *_speed(environment, digits=3)])


def slug(environment: Environment) -> str:
    """A folder's name for the class: "amd-epyc-zen-4-two-threads-of-one-core-200-gflops"."""
    text = ", ".join([*_device(environment), *_speed(environment, digits=1)]).replace("/s", "s")
    return re.sub(r"[^a-z0-9]+", "-", text.lower())[:100].strip("-") or "unknown"


def same_class(a: Environment, b: Environment) -> bool:
    """Whether both are machines of one class, as far as is known."""
    kinds = [(_kind(one), one.isa_limits, sharing(one)) for one in (a, b)]
    known = all(_agree(x, y) for x, y in zip(kinds[0][0], kinds[1][0], strict=True))
    shared = _agree(kinds[0][2], kinds[1][2])
    return known and shared and kinds[0][1] == kinds[1][1] and not _speeds_apart(a, b)


def differences(
    a: Environment, b: Environment, *, new: str = "the new machine", before: str = "before"
) -> list[str]:
    """How machine `b` differs from `a`, one sentence each, the most important first.

    `new`: what `b` is called. `before`: the word for `a`, after its figures.
    """
    devices = [_gpu(one) or "the CPU" for one in (a, b)]
    sentences = (
        [] if _agree(*devices) else [f"it computes on {devices[1]}, on {devices[0]} {before}"]
    )
    sentences += [
        f"{new} computes {_times(factor)}: {b_speed} in {dtype}, {a_speed} {before}"
        for dtype, factor, a_speed, b_speed in _speeds_apart(a, b)
    ]
    for what, a_has, b_has in (
        ("the processors used are", sharing(a), sharing(b)),
        ("the instructions are", _instructions(a, " with "), _instructions(b, " with ")),
        ("the instructions are limited by", _limits(a) or "nothing", _limits(b) or "nothing"),
        ("the processor is", _cpu(a), _cpu(b)),
        ("the architecture is", _architecture(a), _architecture(b)),
        ("the number of threads is", a.threads, b.threads),
        ("the number of processors is", a.logical_cores, b.logical_cores),
        ("the quota of cores is", a.quota, b.quota),
    ):
        if not _agree(a_has, b_has):
            by = "by " * what.endswith(" by")
            sentences.append(f"{what} {b_has}, {by}{a_has} {before}")
    if any(not _agree(old, b.allocator.get(name)) for name, old in a.allocator.items()):
        sentences.append("the allocator has other settings")
    if a.bandwidth and b.bandwidth and (factor := _factor(a.bandwidth.all, b.bandwidth.all)):
        sentences.append(f"the memory moves {_times(factor)}")
    sizes = [one.memory_bytes for one in (b, a)]
    if all(sizes) and abs(sizes[0] - sizes[1]) > MEMORY_SHARE * sizes[1]:
        has, had = (f"{size / 2**30:.3g} GiB" for size in sizes)
        sentences.append(f"it has {has} of memory, {had} {before}")
    for what, a_has, b_has in (
        ("the hypervisor is", a.hypervisor, b.hypervisor),
        ("the governor is", a.governor, b.governor),
        ("the build of the system is", a.os, b.os),
    ):
        if not _agree(a_has, b_has):
            sentences.append(f"{what} {b_has}, {a_has} {before}")
    return sentences


# What a class is made of ------------------------------------------------------------------------


def sharing(environment: Environment) -> str | None:
    """How the processors in use share cores: "two threads of one core", "two cores".

    By the system, if it reports shared cores. Else by measurement: processors are threads of one
    core if together they compute at most `SHARED` of what as many cores would, but run chains of
    dependent operations as fast. If they do neither, the machine gives them less time than it
    reports. Unknown if other programs used the cores meanwhile.
    """
    threads, cores = environment.threads, environment.cores
    if not threads or threads == 1:
        return None
    if cores and cores < threads:
        return f"{_count(threads)} threads of {_count(cores)} core{'s' * (cores > 1)}"
    computes, waits = gain(_best(environment.products)), gain(environment.chain)
    if computes is None or is_disturbed(environment):
        return None
    if computes > SHARED * threads:
        return f"{_count(threads)} cores"
    if waits is None:
        return f"{_count(threads)} processors as fast as {_count(round(computes))}"
    if waits > SHARED * threads:
        cores = max(1, round(threads / 2))
        return f"{_count(threads)} threads of {_count(cores)} core{'s' * (cores > 1)}"
    return f"{_count(threads)} processors with the time of {_count(round(computes))}"


def is_disturbed(environment: Environment) -> bool:
    """Whether other programs used too much of the cores while the machine was measured."""
    return (environment.disturbed or 0) > MOST_OTHERS


def gain(speed: Speed | None) -> float | None:
    """How many times as fast all threads are as one."""
    return speed.all / speed.one if speed and speed.one and speed.all else None


def product(environment: Environment, dtype: str) -> float | None:
    """The best product of a dtype by either framework, in FLOP/s."""
    return (environment.peak_flops or {}).get(dtype)


def changed_at_end(environment: Environment) -> str | None:
    """One line if the machine had another speed at the end of the run, else None."""
    start, end = (_best(p) for p in (environment.products, environment.products_at_end))
    if not (start and end and start.all and end.all) or is_disturbed(environment):
        return None
    if same_speed(start.all, end.all):
        return None
    share = f"{end.all / start.all:.0%} of that at the start"
    return f"MACHINE CHANGED: its best product in float32 was {share} when the run had ended."


def _best(products: dict[str, dict[str, Speed]]) -> Speed | None:
    """The float32 products of the library that is fastest on all threads."""
    every = [speeds["float32"] for speeds in products.values() if "float32" in speeds]
    return max(every, key=lambda speed: speed.all or 0, default=None)


def _device(environment: Environment) -> list[str]:
    if gpu := _gpu(environment):
        return [gpu]
    known = [_architecture(environment) or _instructions(environment), _limits(environment)]
    inside = "; ".join(filter(None, known))
    name = _cpu(environment) or "unknown processor"
    parts = [f"{name} ({inside})" if inside else name]
    return [*parts, *filter(None, [_used(environment), _by_quota(environment)])]


def _used(environment: Environment) -> str | None:
    """How many processors are used, and whether they share cores where that is known."""
    threads, there = environment.threads or environment.logical_cores, environment.logical_cores
    if threads is None:
        return None
    shared = sharing(environment)
    if there and threads < there:
        return f"{shared or threads} of {there} processors"
    return shared or f"{threads} processor{'s' * (threads > 1)}"


def _by_quota(environment: Environment) -> str | None:
    if environment.quota is None:
        return None
    return f"at most {environment.quota:.3g} core{'s' * (environment.quota != 1)} by quota"


def _speed(environment: Environment, digits: int) -> list[str]:
    dtype = "bfloat16" if environment.gpu else "float32"
    dtype = dtype if product(environment, dtype) else "float32"
    speed = product(environment, dtype)
    if speed is None:
        return []
    bound = "at least " if is_disturbed(environment) else ""
    return [bound + _flops(speed, digits) + (f" in {dtype}" if environment.gpu else "")]


def _flops(speed: float, digits: int = 3) -> str:
    """A speed in GFLOP/s or TFLOP/s, with so many significant digits."""
    speed = float(f"{speed:.{digits}g}")
    scale, unit = (1e12, "TFLOP/s") if speed >= 1e12 else (1e9, "GFLOP/s")
    return f"{speed / scale:.{max(digits, 3)}g} {unit}"


def _cpu(environment: Environment) -> str | None:
    """The processor's name without marks: "Intel Xeon", "AMD EPYC 7763"."""
    if not environment.cpu:
        return None
    name = re.sub(r"\((R|TM|r|tm)\)|\bCPU\b|\b\d+-Core\b|\bProcessor\b|@.*", " ", environment.cpu)
    return " ".join(name.split()) or None


def _architecture(environment: Environment) -> str | None:
    return environment.processor and environment.processor.architecture


def _instructions(environment: Environment, between: str = ", ") -> str | None:
    """The widest instructions, and whether there are some for bfloat16."""
    isa = environment.isa
    widest = next((words for name, words in INSTRUCTIONS.items() if name in isa), None)
    bfloat16 = "bfloat16" if any("bf16" in name for name in isa) else None
    return between.join(filter(None, (widest, bfloat16))) or None


def _limits(environment: Environment) -> str | None:
    return ", ".join(f"{k}={v}" for k, v in sorted(environment.isa_limits.items())) or None


def _gpu(environment: Environment) -> str | None:
    return str(environment.gpu.get("name")) if environment.gpu else None


def _kind(environment: Environment) -> tuple:
    """What must be the same in machines of one class where both know it."""
    processor = environment.processor
    numbers = (processor.vendor, processor.family, processor.model) if processor else None
    known = (_cpu(environment), _architecture(environment), sorted(environment.isa))
    return (*known, environment.threads, numbers, _gpu(environment) or "no GPU")


def _agree(old: object, new: object) -> bool:
    """Whether two facts are the same, as far as both are known."""
    return old in UNKNOWN or new in UNKNOWN or old == new


def same_speed(a: float, b: float) -> bool:
    """Whether two speeds belong to one class."""
    return max(a, b) <= SAME_SPEED * min(a, b)


def _factor(old: float | None, new: float | None) -> float | None:
    """The new speed over the old one, where they are not of one class."""
    return None if not old or not new or same_speed(old, new) else new / old


def _speeds_apart(a: Environment, b: Environment) -> list[tuple[str, float, str, str]]:
    """The dtypes in which the machines are not equally fast: by which factor, and both speeds."""
    if is_disturbed(a) or is_disturbed(b):
        return []
    apart = []
    for dtype in ("float32", "bfloat16"):
        old, new = product(a, dtype), product(b, dtype)
        if factor := _factor(old, new):
            new_speed, old_speed = _flops(new), _flops(old)
            if new_speed.split()[1] == old_speed.split()[1]:  # the unit stands there once
                old_speed = old_speed.split()[0]
            apart.append((dtype, factor, old_speed, new_speed))
    return apart


def _times(factor: float) -> str:
    if 0.45 < factor < 0.55:
        return "half as much"
    if 1.8 < factor < 2.2:
        return "twice as much"
    return f"{factor:.2g} times as much" if factor < 10 else f"{factor:.0f} times as much"


def _count(number: int) -> str:
    return NUMBERS[number] if number < len(NUMBERS) else str(number)
