"""Tensor parallel: parts of the same layers on two devices, and on two replicas of them."""

from __future__ import annotations

from bench.harness.plan import Technique, Work, Workload, warm
from bench.probes import model_parallel

PAIRS = "block*.up > block*.down"
SHARDS = 2

TECHNIQUE = Technique(
    family="parallel",
    name="tensor_parallel",
    effort="ordinary",
    title="Tensor parallel, and a hybrid of data and tensor parallel",
    remedies=("communication",),
    variants=(
        warm("one_device", "one device", role="baseline", program="one device"),
        warm("tensor_parallel", "layers split over two devices", replicas=1),
        warm("hybrid", "layers split, two replicas", "ordinary", replicas=2),
    ),
    workloads=(Workload("text-gpt-wide", "compute", timed=False),),
    differs_by_design=(
        "PyTorch's parts are processes, each with a share of the threads, which send through "
        "sockets. TensorFlow's are devices in one process, whose threads serve them all.",
        "TensorFlow's optimizer runs eagerly, one operation at a time; see the technique.",
        "PyTorch's hybrid shards all states over the replicas; TensorFlow's replicas hold all.",
    ),
    notes=(
        "Everything runs on the CPU: this shows that the work is the same and what it costs, not "
        "a speed-up. The hybrid has four processes or devices on the same cores. The row with "
        "one device has all threads, too.",
        f"Each case takes {model_parallel.STEPS} steps with the feed-forward layers of all blocks "
        "split. It is checked that losses and all weights equal those of one process within the "
        "parity bar.",
        "cores idle, memory and sent bytes are explained under model_parallel. reference bytes: "
        "what all processes send for ring all-reduces of the activations, two per block, without "
        "what the hybrid's replicas send.",
    ),
    probes=True,
)


def probe(impl, work: Work, batches) -> dict[str, dict]:
    """Throughput, idle cores, memory and bytes of a variant."""
    if not work.settings:
        return model_parallel.measure(impl, work, batches, None)
    make = f"{impl.__name__}.parallel.tensor_parallel:hybrid"
    settings = {"pairs": PAIRS, "shards": SHARDS}
    devices = {"replicas": work.settings["replicas"], "parts": SHARDS}
    spec = work.task.model
    # An all-reduce among n sends 2(n-1)/n of its size from each of them (Patarasuk and Yuan, 2009).
    activations = 4 * work.batch_size * spec.sequence_length * spec.width
    reference = 2 * spec.layers * 2 * (SHARDS - 1) * activations
    return model_parallel.measure(
        impl, work, batches, make, settings, devices, reference_bytes=reference
    )
