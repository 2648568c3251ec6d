"""The fastest matrix products of a framework: what its library gets out of the machine."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from types import ModuleType

from bench.record import Speed

SECONDS = 0.3  # of a dtype on one thread, and again on all
SMALLEST, LARGEST = 256, 1024  # sizes of products on a CPU
ON_GPU = 8192
MOST_S = 0.1  # that one may take: where a dtype is emulated, large ones would take seconds


def best_products(runtime: ModuleType, dtypes: Iterable[str], *, on_cpu: bool) -> dict[str, Speed]:
    """FLOP/s of the fastest square products of each dtype, by the runtime of a kit.

    `on_cpu`: whether it computes there; a GPU has no figure for one thread. A dtype that the
    framework refuses is left out, except float32.
    """
    best = {}
    for dtype in dtypes:
        try:
            best[dtype] = (_on_cpu if on_cpu else _on_gpu)(runtime, dtype)
        except Exception:
            if dtype == "float32":
                raise
    return best


def _on_gpu(runtime: ModuleType, dtype: str) -> Speed:
    return Speed(all=runtime.matmul_flops(size=ON_GPU, dtype=dtype, seconds=SECONDS))


def _on_cpu(runtime: ModuleType, dtype: str) -> Speed:
    size = SMALLEST
    while size < LARGEST and _took(runtime, dtype, size) * 2**3 <= MOST_S:
        size *= 2
    together, one = runtime.matmul_flops(size=size, dtype=dtype, seconds=SECONDS), None
    with suppress(NotImplementedError), runtime.one_thread():
        one = runtime.matmul_flops(size=size, dtype=dtype, seconds=SECONDS)
    return Speed(one=one, all=together)


def _took(runtime: ModuleType, dtype: str, size: int) -> float:
    """Seconds of one product."""
    return 2 * size**3 / runtime.matmul_flops(size=size, dtype=dtype, seconds=0)
