"""Process and device: threads, seeds, synchronisation, memory, and what really ran.

What it holds: everything the harness asks of a framework that is neither model, data nor training.
Twin: `tf_impl/kit/runtime.py`.
Where the frameworks differ: a CPU step runs synchronously here. Evidence comes from the profiler
here, and from the executed graph there. Gradients are state that lives between steps here, and
temporaries there.
"""

import contextlib
import ctypes
import inspect
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from time import perf_counter

import numpy as np
import torch
from torch import Tensor, nn


def configure(*, threads: int, seed: int) -> dict[str, int]:
    """Set threads, seeds and float32 arithmetic; return the thread counts that were read back.

    Call it before any operator: PyTorch sets the pool between operators once a process, later
    calls leave it, and the result says so. On a GPU float32 means float32, not TF32.
    """
    torch.set_num_threads(threads)
    if torch.get_num_interop_threads() != threads:
        with contextlib.suppress(RuntimeError):  # the pool runs already
            torch.set_num_interop_threads(threads)
    # The compiler still reads the older of the two flags, which fails where they disagree.
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.fp32_precision = "ieee"
    set_seed(seed)
    return {"intra_op": torch.get_num_threads(), "inter_op": torch.get_num_interop_threads()}


def onednn() -> bool:
    """Whether operators on the CPU are oneDNN's, where it has them: so it is by default."""
    return torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled


@contextlib.contextmanager
def same_threads() -> Iterator[None]:
    """Threads are after it what they were before, whatever is set within."""
    before = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Operators compute on one thread within it."""
    with same_threads():
        torch.set_num_threads(1)
        yield


def set_seed(seed: int) -> None:
    """Begin all random numbers anew: Python's, NumPy's and PyTorch's, such as dropout's."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def versions() -> dict[str, str]:
    """Versions of torch and, in a CUDA build, of what it was built with."""
    found = {"torch": torch.__version__}
    if torch.version.cuda is not None:
        found["cuda"] = torch.version.cuda
        if (cudnn := torch.backends.cudnn.version()) is not None:
            found["cudnn"] = str(cudnn)
    return found


def device() -> str:
    """Where models and tensors go: "cuda" if there is one, else "cpu"."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def device_info() -> dict[str, str]:
    """Name of the device; for a GPU also compute capability, memory and driver."""
    if device() == "cpu":
        return {"name": "cpu"}
    properties = torch.cuda.get_device_properties(0)
    return {
        "name": properties.name,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "memory_bytes": str(properties.total_memory),
        "cuda": str(torch.version.cuda),
        "driver": _driver_version(),
    }


def _driver_version() -> str:
    """The CUDA version that the driver supports, such as "13.2"; torch has no function for it."""
    version = ctypes.c_int()
    ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    return f"{version.value // 1000}.{version.value % 1000 // 10}"


def synchronize() -> None:
    """Wait until the device has done all that was asked. On a CPU every operator has returned."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def make_generator(*, seed: int) -> torch.Generator:
    """A generator of random numbers on the device."""
    return torch.Generator(device()).manual_seed(seed)


def to_float(loss: Tensor) -> float:
    """Read a scalar on the host, which waits for the device."""
    return loss.item()


def to_evaluation(model: nn.Module) -> None:
    """Put a model that is to predict from now on into evaluation mode, as one does once."""
    model.eval()


def first_compile() -> float:
    """Compile a program of one operator and run it; the seconds that this takes.

    With an empty cache on disk it is tried, too, which of the processor's instructions the C++
    compiler knows. The cache keeps the answer for all programs that follow.
    """
    x = torch.zeros(64, device=device())
    start = perf_counter()
    torch.compile(torch.sin)(x)
    synchronize()
    return perf_counter() - start


# Memory -------------------------------------------------------------------------------------


def state_bytes(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, int]:
    """Bytes of parameters, of their gradients as they are now, and of the optimizer's state.

    Without an optimizer the last two are 0: the model predicts.
    """
    parameters = list(model.parameters())
    entries = optimizer.state.values() if optimizer else ()
    state = (value for entry in entries for value in entry.values())
    return {
        "parameters": sum(p.nbytes for p in parameters),
        "gradients": sum(p.grad.nbytes for p in parameters if p.grad is not None),
        "optimizer": sum(value.nbytes for value in state if isinstance(value, Tensor)),
    }


def reset_device_peak() -> None:
    """Start the device's peak anew. Does nothing on a CPU."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def device_peak() -> dict[str, int] | None:
    """Peak bytes of the allocator since `reset_device_peak`; None on a CPU."""
    if not torch.cuda.is_available():
        return None
    return {
        "allocated": torch.cuda.max_memory_allocated(),
        "reserved": torch.cuda.max_memory_reserved(),
    }


# Evidence -----------------------------------------------------------------------------------

_CONVOLUTIONS = {
    "aten::convolution",
    "aten::convolution_backward",
    "mkldnn::_convolution_pointwise",
    "mkldnn::_convolution_pointwise_",
}
_MATMULS = {
    "aten::mm",
    "aten::addmm",
    "aten::bmm",
    "aten::baddbmm",
    "aten::_addmm_activation",
    "aten::_scaled_mm",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_flash_attention_backward",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_efficient_attention_backward",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_cudnn_attention_backward",
    "mkldnn::_linear_pointwise",
    "mkl::_mkl_linear",
}
_KINDS = dict.fromkeys(_CONVOLUTIONS, "convolution") | dict.fromkeys(_MATMULS, "matmul")


def operator_dtypes(step: Callable, x: Tensor, y: Tensor) -> dict[str, dict[str, int]]:
    """Count the convolutions and matrix products of one call by the dtype they really ran in.

    Returns for example {"convolution": {"float32": 6}, "matmul": {"bfloat16": 3}}. The profiler
    sees operators below autocast and below `torch.compile`, forward and backward, so the dtype is
    that of the kernel's input. A backward convolution and fused attention count as one operator
    each. Products that a compiler wrote itself (the templates of "max-autotune") call no operator
    and are not counted.

    Calls the step twice, since the first call may compile, so it changes the weights.
    """
    step(x, y)
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, record_shapes=True) as profile:
        step(x, y)
    counts = defaultdict(lambda: defaultdict(int))
    for event in _topmost(profile.profiler.kineto_results.experimental_event_tree()):
        counts[_KINDS[event.name]][_input_dtype(event)] += 1
    return {kind: dict(dtypes) for kind, dtypes in counts.items()}


def _topmost(events: Iterable) -> Iterable:
    """Yield the operators of interest, but none that another of them called."""
    for event in events:
        if event.name in _KINDS:
            yield event
        else:
            yield from _topmost(event.children)


def _input_dtype(event) -> str:
    """Dtype of an operator's first floating tensor, such as "bfloat16"."""
    inputs = event.typed[1].inputs
    dtypes = (value.dtype for value in inputs if hasattr(value, "dtype"))
    return str(next(dtypes)).removeprefix("torch.")


def trace_count(step: Callable) -> int | None:
    """Count the graphs that `torch.compile` made in this process; None where `step` is eager.

    A step counts as compiled where it, or something that it or its functions close over, came from
    `torch.compile` or is a module on which `compile()` was called.
    """
    return trace_counter(step)()


def trace_counter(step: Callable) -> Callable[[], int | None]:
    """Return what counts as `trace_count` does; a call of it takes no time to speak of."""
    if not any(_is_compiled(part) for part in (step, *_closed_over(step))):
        return lambda: None
    return lambda: torch._dynamo.utils.counters["stats"]["unique_graphs"]


def _closed_over(step: Callable) -> list:
    found, waiting = [], [step]
    while waiting:
        function = waiting.pop()
        if inspect.isfunction(function):
            inside = list(inspect.getclosurevars(function).nonlocals.values())
            waiting += [part for part in inside if not any(part is other for other in found)]
            found += inside
    return found


def _is_compiled(part) -> bool:
    marks = ("_torchdynamo_orig_callable", "_orig_mod", "_compiled_call_impl")
    return any(getattr(part, mark, None) is not None for mark in marks)


def matmul_flops(*, size: int, dtype: str, seconds: float) -> float:
    """Best FLOP/s of square products of `size` in `dtype`, seen in about `seconds`.

    Those of int8 are of unsigned and signed integers, as quantized layers compute them.
    """
    multiply = _int8_product(size) if dtype == "int8" else _product(size, dtype)
    multiply()
    synchronize()
    best = float("inf")
    deadline = perf_counter() + seconds
    while (start := perf_counter()) < deadline or best == float("inf"):
        multiply()
        synchronize()
        best = min(best, perf_counter() - start)
    return 2 * size**3 / best


def _product(size: int, dtype: str) -> Callable[[], object]:
    a, b = (torch.randn(size, size, device=device()).to(getattr(torch, dtype)) for _ in range(2))
    out = torch.mm(a, b)
    return lambda: torch.mm(a, b, out=out)


def _int8_product(size: int) -> Callable[[], object]:
    if device() != "cpu":
        a, b = (torch.ones(size, size, dtype=torch.int8, device=device()) for _ in range(2))
        return lambda: torch._int_mm(a, b)
    onednn, shape = torch.ops.onednn, (size, size)
    weights = onednn.qlinear_prepack(torch.ones(shape, dtype=torch.int8), list(shape))
    x, scales = torch.ones(shape, dtype=torch.uint8), torch.ones(size)
    zeros, plain = torch.zeros(size, dtype=torch.int64), (torch.float32, "none", [], "")
    return lambda: onednn.qlinear_pointwise(x, 1.0, 0, weights, scales, zeros, None, 1.0, 0, *plain)
