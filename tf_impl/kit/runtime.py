"""Process and device: threads, seeds, synchronisation, memory, and what really ran.

What it holds: everything the harness asks of a framework that is neither model, data nor training.
Twin: `pt_impl/kit/runtime.py`.
Where the frameworks differ: evidence comes from the executed graph here, and from the profiler
there. Gradients are temporaries of the graph here, and live between steps there. TensorFlow flushes
denormal numbers to zero, PyTorch does not.
"""

import contextlib
import inspect
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter

import numpy as np
import tensorflow as tf
from tensorflow.compiler.xla import xla_data_pb2
from tensorflow.compiler.xla.service import hlo_pb2
from tensorflow.python.eager import context
from tensorflow.tsl.profiler.protobuf import xplane_pb2

from shared import cgroups
from tf_impl.kit.checks.onednn import is_enabled


def configure(*, threads: int, seed: int) -> dict[str, int]:
    """Set threads, seeds and float32 arithmetic; return the thread counts that were read back.

    Call it before any operation: TensorFlow makes its pools once a process. On a GPU float32 means
    float32, not TF32, and memory grows with need. Raises RuntimeError where TensorFlow runs already
    with other settings, or where Keras runs on another backend.
    """
    if getattr(tf.keras.backend, "backend", lambda: "tensorflow")() != "tensorflow":
        raise RuntimeError("Keras runs on another backend: set KERAS_BACKEND=tensorflow")
    threading = tf.config.threading
    threading.set_intra_op_parallelism_threads(threads)
    threading.set_inter_op_parallelism_threads(threads)
    tf.config.experimental.enable_tensor_float_32_execution(False)
    for gpu in tf.config.list_physical_devices("GPU"):
        tf.config.experimental.set_memory_growth(gpu, True)
    set_seed(seed)
    return _threads()


def _threads() -> dict[str, int]:
    threading = tf.config.threading
    return {
        "intra_op": threading.get_intra_op_parallelism_threads(),
        "inter_op": threading.get_inter_op_parallelism_threads(),
    }


def onednn() -> bool:
    """Whether operators on the CPU are oneDNN's, where it has them; else they are Eigen's."""
    return is_enabled()


@contextlib.contextmanager
def same_threads() -> Iterator[None]:
    """Threads are after it what they were before, whatever is set within.

    Raises RuntimeError where TensorFlow began to run with others.
    """
    before = _threads()
    try:
        yield
    finally:
        if _threads() != before:
            tf.config.threading.set_intra_op_parallelism_threads(before["intra_op"])
            tf.config.threading.set_inter_op_parallelism_threads(before["inter_op"])


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Operations compute on one processor within it: the pool keeps its threads.

    Raises NotImplementedError where the system binds no threads to processors.
    """
    with cgroups.one_processor():
        yield


def set_seed(seed: int) -> None:
    """Begin all random numbers anew: Python's, NumPy's and TensorFlow's. A layer has its own, such
    as those of its dropout, from when it is made."""
    tf.keras.utils.set_random_seed(seed)


def versions() -> dict[str, str]:
    """Versions of tensorflow, of the Keras flavour in use, and of CUDA in a CUDA build."""
    flavour = __import__(tf.keras.Model.__module__.split(".")[0])
    found = {"tensorflow": tf.__version__, flavour.__name__: flavour.__version__}
    build = tf.sysconfig.get_build_info()
    for key in ("cuda", "cudnn"):
        if version := build.get(f"{key}_version"):
            found[key] = str(version)
    return found


def device() -> str:
    """Where models and tensors go: "GPU:0" if there is one, else "CPU:0"."""
    return "GPU:0" if tf.config.list_physical_devices("GPU") else "CPU:0"


def device_info() -> dict[str, str]:
    """Name of the device; for a GPU also compute capability and the CUDA of the build."""
    gpus = tf.config.list_physical_devices("GPU")
    if not gpus:
        return {"name": "cpu"}
    details = tf.config.experimental.get_device_details(gpus[0])
    return {
        "name": details.get("device_name", "gpu"),
        "compute_capability": ".".join(map(str, details.get("compute_capability", ()))),
        "cuda": str(tf.sysconfig.get_build_info().get("cuda_version")),
    }


def synchronize() -> None:
    """Wait until the device has done all that was asked. On a CPU a call returns when done."""
    if tf.config.list_physical_devices("GPU"):
        tf.test.experimental.sync_devices()


def make_generator(*, seed: int) -> tf.random.Generator:
    """A generator of random numbers, which is a variable."""
    return tf.random.Generator.from_seed(seed)


def to_float(loss: tf.Tensor) -> float:
    """Read a scalar on the host, which waits for the device."""
    return float(loss)


def to_evaluation(model: tf.keras.Model) -> None:
    """Do nothing: Keras is told the mode in each call."""


# Memory -------------------------------------------------------------------------------------


def state_bytes(
    model: tf.keras.Model, optimizer: tf.keras.optimizers.Optimizer | None
) -> dict[str, int]:
    """Bytes of the trainable parameters, of their gradients, and of the optimizer's state.

    Gradients are temporaries, which need not all be alive at once: theirs is an upper bound.
    Without an optimizer the last two are 0: the model predicts.
    """
    parameters = sum(_bytes(variable) for variable in model.trainable_variables)
    if optimizer is None:
        return {"parameters": parameters, "gradients": 0, "optimizer": 0}
    state = sum(_bytes(variable) for variable in optimizer.variables)
    return {"parameters": parameters, "gradients": parameters, "optimizer": state}


def _bytes(variable) -> int:
    return int(np.prod(variable.shape)) * tf.as_dtype(variable.dtype).size


def reset_device_peak() -> None:
    """Start the device's peak anew. Does nothing on a CPU."""
    if tf.config.list_physical_devices("GPU"):
        tf.config.experimental.reset_memory_stats(device())


def device_peak() -> dict[str, int | None] | None:
    """Peak bytes since `reset_device_peak`; None on a CPU.

    TensorFlow does not tell how much its allocator has reserved: None.
    """
    if not tf.config.list_physical_devices("GPU"):
        return None
    return {"allocated": tf.config.experimental.get_memory_info(device())["peak"], "reserved": None}


# Evidence -----------------------------------------------------------------------------------

# Operators of a graph (Conv2DBackpropFilter, _FusedMatMul, _MklNativeConv2D), of optimized HLO
# (dot, convolution), and libraries that HLO calls (__cudnn$convForward, __onednn$matmul).
_KINDS = {
    "convolution": re.compile(r"Conv[23]D|DepthwiseConv|^convolution$|\$conv"),
    "matmul": re.compile(r"MatMul|Einsum|^dot$|\$(.*gemm|matmul|.*dot)|^__cublas"),
}


def operator_dtypes(step: Callable, x: tf.Tensor, y: tf.Tensor) -> dict[str, dict[str, int]]:
    """Count the convolutions and matrix products of one call by the dtype they really ran in.

    Returns for example {"convolution": {"float32": 8}, "matmul": {"bfloat16": 3}}: what stands in
    the graphs that the call executed, after grappler rewrote and placed them, and in the optimized
    HLO of the programs of XLA that it ran; forward and backward, by the dtype of the first input.
    An operator in a loop counts once.

    Calls the step three times, since the first call may trace, so it changes the weights.
    """
    step(x, y)
    counts = {}
    for found in (_graph_operators(step, x, y), _xla_operators(step, x, y)):
        for (kind, dtype), number in found.items():
            counts.setdefault(kind, {}).setdefault(dtype, 0)
            counts[kind][dtype] += number
    return counts


def _kind(operator: str) -> str | None:
    return next((kind for kind, pattern in _KINDS.items() if pattern.search(operator)), None)


def _graph_operators(step, x, y) -> Counter:
    """(kind, dtype) -> number, in the graphs of one call as they were instantiated."""
    runtime = context.context()
    # The runtime hands out a graph when it instantiates it, so the call has to do that again.
    runtime.clear_kernel_cache()
    runtime.enable_graph_collection()
    try:
        step(x, y)
        graphs = runtime.export_run_metadata().function_graphs
    finally:
        runtime.disable_graph_collection()
    found = Counter()
    for node in (n for graph in graphs for part in graph.partition_graphs for n in part.node):
        if kind := _kind(node.op):
            dtype = node.attr["T"].type or node.attr["Tinput"].type
            found[kind, tf.as_dtype(dtype).name] += 1
    return found


def _xla_operators(step, x, y) -> Counter:
    """(kind, dtype) -> number, in the optimized HLO of the programs that one call ran.

    The profiler says which programs ran, and holds the HLO of each.
    """
    options = tf.profiler.experimental.ProfilerOptions(device_tracer_level=0)
    with tempfile.TemporaryDirectory() as folder:
        with tf.profiler.experimental.Profile(folder, options=options):
            step(x, y)
        (path,) = Path(folder).rglob("*.xplane.pb")
        planes = xplane_pb2.XSpace.FromString(path.read_bytes()).planes
    programs, ran = {}, set()
    for plane in planes:
        if plane.name == "/host:metadata":
            programs = {key: entry.stats[0] for key, entry in plane.event_metadata.items()}
        ids = {key for key, entry in plane.stat_metadata.items() if entry.name == "program_id"}
        stats = (stat for line in plane.lines for event in line.events for stat in event.stats)
        ran |= {stat.int64_value or stat.uint64_value for stat in stats if stat.metadata_id in ids}
    found = Counter()
    for key in ran & programs.keys():
        found += _hlo_operators(hlo_pb2.HloProto.FromString(programs[key].bytes_value).hlo_module)
    return found


def _hlo_operators(module) -> Counter:
    """(kind, dtype) -> number, in an optimized HLO module."""
    instructions = [one for computation in module.computations for one in computation.instructions]
    dtypes = {one.id: one.shape.element_type for one in instructions}
    found = Counter()
    for one in instructions:
        if kind := _kind(one.custom_call_target or one.opcode):
            found[kind, _hlo_dtype(dtypes[one.operand_ids[0]])] += 1
    return found


def _hlo_dtype(number: int) -> str:
    """XLA's number of a dtype -> its name, such as "bfloat16" for BF16."""
    name = xla_data_pb2.PrimitiveType.Name(number).lower()
    return re.sub(r"^(b?)f(\d+)$", r"\1float\2", name)


def trace_count(step: Callable) -> int | None:
    """Count the graphs traced so far for `step`; None where it is eager.

    The graphs of a function that `step` closes over count as its own.
    """
    return trace_counter(step)()


def trace_counter(step: Callable) -> Callable[[], int | None]:
    """Return what counts as `trace_count` does; a call of it takes no time to speak of."""
    parts = (step, *_closed_over(step))
    traced = [part for part in parts if hasattr(part, "experimental_get_tracing_count")]
    if not traced:
        return lambda: None
    return lambda: sum(part.experimental_get_tracing_count() for part in traced)


def _closed_over(step: Callable) -> list:
    return list(inspect.getclosurevars(step).nonlocals.values()) if inspect.isfunction(step) else []


def matmul_flops(*, size: int, dtype: str, seconds: float) -> float:
    """Best FLOP/s of square products of `size` in `dtype`, seen in about `seconds`.

    Those of int8 add up in int32.
    """
    with tf.device(device()):
        a, b = (tf.cast(tf.random.normal((size, size)), dtype) for _ in range(2))
    given = {"output_type": tf.int32} if dtype == "int8" else {}
    product = tf.function(lambda a, b: tf.linalg.matmul(a, b, **given))
    product(a, b)
    synchronize()
    best = float("inf")
    deadline = perf_counter() + seconds
    while (start := perf_counter()) < deadline or best == float("inf"):
        product(a, b)
        synchronize()
        best = min(best, perf_counter() - start)
    return 2 * size**3 / best
