"""Checkpoints: bytes, seconds to save and to resume, whole, of weights alone, in half precision."""

from __future__ import annotations

import time

from bench.harness.helpers import figure, once, plain
from bench.harness.plan import Technique, Work, Workload, warm

TECHNIQUE = Technique(
    family="recipes",
    name="checkpoints",
    effort="ordinary",
    title="Checkpoints",
    variants=(
        warm("whole", "to resume from", role="baseline"),
        warm("weights", "weights alone", optimizer=False),
        warm("half_precision", "weights in float16", optimizer=False, half_precision=True),
    ),
    workloads=(
        Workload("text-gpt-wide", "single", timed=False),
        Workload("photos-resnet18", "small", effort="ordinary", timed=False),
    ),
    differs_by_design=(
        "PyTorch writes a file by torch.save. TensorFlow writes an archive of NumPy, because its "
        "checkpoints are several files, which can't be replaced atomically.",
    ),
    notes=(
        "Saved after one step, so that the optimizer has its state. Each file is flushed to the "
        "disk. Load time is that into an existing model. Training waits while it saves.",
        "Half precision is for deployment, or for the start of another training: the weights are "
        "rounded to 11 bits.",
    ),
    probes=True,
)


def probe(impl, work: Work, batches) -> dict[str, dict]:
    """Bytes of a checkpoint, seconds to write and to read it, and how far the weights are off."""
    checkpoints, prepared = impl.recipes.checkpoints, plain(impl, work)
    prepared.step(*impl.kit.data.resident_batches(batches[:1])[0])
    optimizer = prepared.optimizer if work.settings.get("optimizer", True) else None
    half = work.settings.get("half_precision", False)
    path, saves, loads = work.folder / "checkpoint", [], []
    before = impl.kit.models.export_weights(prepared.model)
    for _ in range(work.repetitions):
        start = time.perf_counter()
        size = checkpoints.save_checkpoint(path, prepared.model, optimizer, {}, half_precision=half)
        saved = time.perf_counter()
        checkpoints.load_checkpoint(path, prepared.model, optimizer)
        saves.append(saved - start)
        loads.append(time.perf_counter() - saved)
    after = impl.kit.models.export_weights(prepared.model)
    off = max(float(abs(after[name] - value).max()) for name, value in before.items())
    return {
        "checkpoint": once("bytes", size),
        "save": figure("s", saves),
        "load": figure("s", loads),
        "evidence": {"largest_rounding": off},
    }
