"""The ladders of language model pre-training: a GPT and a BERT of about 10 million parameters.

On a GPU they are of base size, 85 million parameters, and see all sequences.

The GPT learns the next characters of a text, the BERT hidden ones; program and rungs are the same.

Fixed before anything was measured: mixed precision, the fused optimizer and replicas are judged by
the time of an iteration, checkpointing and accumulation by peak memory of all replicas together.
`rule.py` says when a technique hurts.

An epoch has few sequences, so that a run takes half a minute. Training ends long before the model
has learned all it could, and bits per character (of the BERT, per hidden one) show whether a
technique kept what was learned by then.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from bench.harness.plan import Work
from bench.harness.worker import RESIDENT_BATCHES
from bench.ladders import training
from bench.ladders.ladder import MIXED_PRECISION, UNNAMED, Ladder, Published, Rung
from shared import datasets
from shared.specs import TASKS

BATCH = 4  # sequences: two replicas with two micro-batches each
SEQUENCES, EPOCHS = 64, 2


def materialise(folder: Path, task: str) -> tuple[Path, dict]:
    """Write the task's texts."""
    small = task in (LADDER.task, MASKED.task)
    settings = {"sequences": SEQUENCES if small else 0, "epochs": EPOCHS}
    return datasets.materialise(TASKS[task].dataset, folder), settings


LADDER = Ladder(
    name="language_model",
    title="Language model: a GPT trained on characters",
    module=__name__,
    task="text-gpt-10m",
    gpu_task="text-gpt-base",
    materialise=materialise,
    about=f"On a CPU a run trains {EPOCHS} epochs of {SEQUENCES} sequences of characters, far from "
    "what the model could learn: its bits per character say whether a rung kept what was learned "
    "by then.",
    seconds=25.0,
    batch_size=BATCH,
    rungs=(
        MIXED_PRECISION,
        Rung("fused_optimizer", "fused optimizer", judged="iteration"),
        Rung("checkpointing", "checkpointing (every block)", judged="memory"),
        Rung("accumulation", "accumulation (2 micro-batches)", judged="memory"),
        Rung("data_parallel", "data parallel (2 replicas)", judged="iteration"),
    ),
    published=(
        # https://developer.nvidia.com/blog/nvidia-achieves-4x-speedup-on-bert-neural-network
        Published(
            "BERT, mixed precision, fused layer norm, larger batch, XLA: 4 times as fast",
            1 / 4,
            "iteration",
            "Xeon 2698v4 with one V100; NVIDIA Achieves 4X Speedup on BERT Neural Network, 2018",
        ),
        Published("BERT-base, an epoch: 12 → 3.2 h, score within 0.5%", 3.2 / 12, "epoch", UNNAMED),
        Published("BERT-base, memory: 22 → 14 GB", 14 / 22, "memory", UNNAMED),
    ),
)
MASKED = replace(
    LADDER,
    name="masked_language_model",
    title="Language model: a BERT trained on hidden characters",
    about=LADDER.about.replace("per character", "per hidden character"),
    task="text-bert-10m",
    gpu_task="text-bert-base",
)


def probe(impl, work: Work, batches: list) -> dict[str, dict]:
    """One training with `work.settings["rungs"]`."""
    settings, recipe, folder = work.settings, work.task.recipe, Path(work.data)
    batch_size = settings["batch_size"]
    batches = datasets.first_batches(
        *datasets.load(folder, "train"), batch_size, RESIDENT_BATCHES, seed=settings["seed"]
    )
    x, y = datasets.load(folder, "test")

    def make(build):
        return impl.ladders.language_model.Training(
            build,
            work.data,
            rungs=tuple(settings["rungs"]),
            sequences=settings["sequences"],
            batch_size=batch_size,
            learning_rate=recipe.learning_rate,
            weight_decay=recipe.weight_decay,
            beta2=recipe.beta2,
            seed=settings["seed"],
        )

    return training.measure(
        impl,
        work,
        batches,
        make,
        batch_size=batch_size,
        epochs=settings["epochs"],
        calibration=x[:1],
        test=(x, y),
    )
