"""Model parallel: layers on two devices, a batch or micro-batches at a time."""

from __future__ import annotations

from bench.harness.plan import Technique, Work, Workload, warm
from bench.probes import model_parallel

STAGES = 2
CUT = {"pt_impl": "block1", "tf_impl": "block1.ln0"}  # after a block of three

TECHNIQUE = Technique(
    family="parallel",
    name="model_parallel",
    effort="ordinary",
    title="Model parallel: layer split and pipelines",
    remedies=("communication",),
    variants=(
        warm("one_device", "one device", role="baseline", program="one device"),
        warm("pipeline", "pipeline of 4 micro-batches", micro_batches=4),
        warm("layer_split", "layers on two devices", "ordinary", micro_batches=1),
        warm(
            "pipeline_1f1b",
            "pipeline of 4, one forward one backward",
            "ordinary",
            micro_batches=4,
            schedule="1f1b",
        ),
        warm("pipeline_16", "pipeline of 16 micro-batches", "full", micro_batches=16),
    ),
    workloads=(Workload("text-gpt-wide", "compute", timed=False),),
    differs_by_design=(
        "PyTorch's stages are processes, each with a share of the threads, which send "
        "activations through sockets. TensorFlow's are devices in one process, whose threads "
        "serve them all.",
    ),
    notes=(
        "Everything runs on the CPU: this shows that the work is the same and what it costs. A "
        "speed-up would need one device per stage. The row with one device has all threads, too.",
        f"Each case takes {model_parallel.STEPS} steps of a model whose second stage has two of "
        "three blocks. It is checked that losses and all weights equal those of one process "
        "within the parity bar.",
        "cores idle: CPU time that the training processes did not use, as a share of what the "
        "cores could give between the end of the first step and that of the last: waiting for "
        "another stage or for messages, and serial work. bubble reference: (p-1)/(m+p-1) for p "
        "equal stages and m micro-batches.",
        "memory: peak resident memory in these steps, with imports, of the largest process and "
        "of all. sent bytes: what the processes wrote per step; reference bytes: activations at "
        "the cut and their gradients.",
    ),
    probes=True,
)


def probe(impl, work: Work, batches) -> dict[str, dict]:
    """Throughput, idle cores, memory and bytes of a variant."""
    if not work.settings:
        return model_parallel.measure(impl, work, batches, None)
    make = f"{impl.__name__}.parallel.model_parallel:pipeline"
    settings = {"cut": CUT[impl.__name__]} | work.settings
    spec, count = work.task.model, work.settings["micro_batches"]
    activations = 4 * work.batch_size * spec.sequence_length * spec.width
    return model_parallel.measure(
        impl,
        work,
        batches,
        make,
        settings,
        {"replicas": 1, "parts": STAGES},
        bubble_reference=100 * (STAGES - 1) / (count + STAGES - 1),
        reference_bytes=2 * (STAGES - 1) * activations,
    )
