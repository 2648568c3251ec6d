"""What holds a step back, from where its time and its memory go.

- input: it waits for data, or for data on its way to the device
- communication: it waits for other processes
- overhead: the framework's and Python's work between operators, operators too small to pay for
  being called, and sleep
- memory bandwidth: operators that move values and hardly compute: updates, normalisation, tables
- memory size: the machine's memory is nearly full, or pages come from disk
- arithmetic: products and convolutions; where nothing else takes its share, the step is healthy
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from shared.profiles import COMPUTING, Breakdown

INPUT, OVERHEAD, ARITHMETIC = "input", "overhead", "arithmetic"
BANDWIDTH, SIZE, COMMUNICATION = "memory bandwidth", "memory size", "communication"
BOTTLENECKS = (INPUT, OVERHEAD, ARITHMETIC, BANDWIDTH, SIZE, COMMUNICATION)
# The share of a step from which each holds it back. A healthy step has a third of its time in what
# moves values, so that a bandwidth has to have more than half.
LIMITS = {INPUT: 0.25, COMMUNICATION: 0.25, OVERHEAD: 0.4, BANDWIDTH: 0.5}
SLOW = 0.05  # of the peak: products that are slower are not as they should be
FULL = 0.9  # of the machine's memory
# Of a container's own control group, in either version of Linux's.
GROUP_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)
SMALL = 20e-6  # seconds: an operator that takes less was hardly worth its call
_COMPUTES = re.compile(
    # Linear layers, not the interpolations of images.
    r"conv(?!ert)|matmul|(^|[:_])(b|add|badd)?b?mm($|_)|gemm|(?<!bi)(?<!tri)linear|einsum|attention"
    r"|dot|lstm|gru|fft",
    re.IGNORECASE,
)
_READS = re.compile(r"_local_scalar_dense|^(Eager)?PyFunc|^NumpyFunction", re.IGNORECASE)


@dataclass(frozen=True)
class Diagnosis:
    """What holds a step back, whether that is as it should be, and why it is said.

    `shares`: of the step, by what holds it back; the share of the memory for its size.
    """

    bottleneck: str
    healthy: bool
    shares: dict[str, float]
    evidence: tuple[str, ...]
    breakdown: Breakdown

    def __str__(self) -> str:
        """The verdict, then its evidence."""
        said = "healthy: bound by its arithmetic" if self.healthy else self.bottleneck
        return "\n".join([said, *(f"  {line}" for line in self.evidence)])

    def as_json(self) -> dict:
        """All of it but what allocations did over time."""
        breakdown = asdict(self.breakdown) | {"memory": [], "cost": self.breakdown.profiler_cost}
        breakdown["operators"] = breakdown["operators"][:10]
        return asdict(self) | {"breakdown": breakdown}


def diagnose(breakdown: Breakdown, *, full: float, faults: float) -> Diagnosis:
    """Name what holds a step back. full: of the memory; faults: pages from disk a step."""
    shares = _shares(breakdown) | {SIZE: full}
    over = {name: shares[name] / limit for name, limit in LIMITS.items()}
    bottleneck = max(over, key=over.__getitem__)
    if over[bottleneck] < 1:
        bottleneck = ARITHMETIC
    if full > FULL or faults >= 10:
        bottleneck = SIZE
    evidence = _evidence(breakdown, bottleneck, shares)
    if bottleneck == SIZE:
        evidence.insert(
            0, f"{full:.0%} of the memory is in use, {faults:.0f} pages a step from disk"
        )
    slow = bottleneck == ARITHMETIC and _of_peak(breakdown) < SLOW
    if slow:
        evidence.append(
            f"products run at {_of_peak(breakdown):.1%} of the peak: they are small, grouped, or "
            "(in PyTorch) of denormal numbers (below 1e-38): try torch.set_flush_denormal(True)"
        )
    healthy = bottleneck == ARITHMETIC and not slow
    return Diagnosis(bottleneck, healthy, shares, tuple(evidence), breakdown)


def _of_peak(breakdown: Breakdown) -> float:
    """How fast products run, over the machine's peak; 1 where no product is known."""
    known = [one for one in breakdown.operators if one.of_peak is not None]
    seconds = sum(one.seconds for one in known)
    return sum(one.of_peak * one.seconds for one in known) / seconds if seconds else 1.0


def memory_in_use() -> float:
    """The share of the memory that this process may have which is in use: of its group, if any."""
    whole = psutil.virtual_memory()
    shares = [1 - whole.available / whole.total]
    for limit in GROUP_LIMITS:
        text = limit.read_text().strip() if limit.is_file() else "max"
        if text != "max":
            shares.append(psutil.Process().memory_info().rss / int(text))
    return max(shares)


def pages_from_disk() -> int:
    """Pages that were swapped out and had to be read again, of the whole machine."""
    return psutil.swap_memory().sin // 4096


def _shares(breakdown: Breakdown) -> dict[str, float]:
    """The share of the step that each takes."""
    computing = breakdown.share(*COMPUTING)
    small = sum(o.share for o in breakdown.operators if o.seconds < SMALL * o.calls)
    large = [o for o in breakdown.operators if o.seconds >= SMALL * o.calls]
    products = sum(o.share for o in large if _COMPUTES.search(o.name))
    return {
        INPUT: breakdown.share("waiting", "transfer"),
        COMMUNICATION: breakdown.share("communication"),
        OVERHEAD: breakdown.share("overhead", "idle") + small * computing,
        ARITHMETIC: products * computing,
        BANDWIDTH: max(0.0, 1 - small - products) * computing,  # rounding can be below 0
    }


def _evidence(breakdown: Breakdown, bottleneck: str, shares: dict[str, float]) -> list[str]:
    """Lines that say why."""
    others = sorted(LIMITS, key=shares.get, reverse=True)
    by_share = ", ".join(f"{name} {shares[name]:.0%}" for name in [ARITHMETIC, *others])
    lines = [f"of {breakdown.step * 1e3:.3g} ms a step: {by_share}"]
    if bottleneck == OVERHEAD:
        calls = sum(one.calls for one in breakdown.operators)
        small = sum(o.calls for o in breakdown.operators if o.seconds < SMALL * o.calls)
        lines.append(f"{calls:.0f} operators a step, {small:.0f} below {SMALL * 1e6:.0f} µs")
        for seconds, before, after in breakdown.gaps[:1]:
            lines.append(
                f"longest time without an operator: {seconds * 1e3:.2g} ms, "
                f"between {before} and {after}"
            )
        reads = [(o.calls, o.name) for o in breakdown.operators if _READS.search(o.name)]
        lines += [f"values read by Python: {calls:.1f} a step ({name})" for calls, name in reads]
    else:
        for one in breakdown.operators[:3]:
            of_peak = "" if one.of_peak is None else f", at {one.of_peak:.0%} of the peak"
            lines.append(
                f"{one.name}: {one.seconds * 1e3:.3g} ms in {one.calls:.0f} calls, "
                f"{one.share:.0%} of all operators{of_peak}"
            )
    return lines
