"""What rows, tasks and counts are called in plain words."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from bench.record import INFERENCE, Case
from shared.specs import TASKS, parameter_count

# What a task's model and data are called where people read of them.
PLAIN = {
    "digits-cnn": "small CNN on digits",
    "digits-few": "small CNN on few digits",
    "digits-resnet20": "ResNet-20 on digits",
    "digits-to-photos": "small CNN from digits to photos",
    "digits-student": "smaller CNN on digits",
    "digits-detection": "detector of digits",
    "text-gpt": "small GPT on text",
    "text-bert": "small BERT on text",
    "text-gpt-deep": "deep GPT on text",
    "text-gpt-dropout": "deep GPT with dropout on text",
    "text-gpt-wide": "wide GPT on text",
    "text-gpt-10m": "GPT on text",
    "text-bert-10m": "BERT on text",
    "text-gpt-base": "large GPT on text",
    "text-bert-base": "large BERT on text",
    "photos-resnet18": "ResNet-18 on 64-pixel photos",
    "photos-resnet50": "ResNet-50 on 224-pixel photos",
    "photos": "small CNN on photo files",
}

# What families of techniques are called.
FAMILY_TITLES = {
    "train_step": "Train step",
    "input": "Input pipelines",
    "parallel": "Several devices",
    "recipes": "Recipes",
    "adaptation": "Domain adaptation",
    "compression": "Smaller models",
    "deployment": "Deployment",
    "diagnosis": "Diagnosis",
}


def called(task: str) -> str:
    """A task in plain words; a user's own has its name."""
    return PLAIN.get(task, task)


def plainly(words: str) -> str:
    """A title that begins with a task's name, in plain words: small CNN on digits, prediction."""
    task, comma, rest = words.partition(", ")
    return f"{called(task)}{comma}{rest}".replace(INFERENCE, ", prediction")


def title(case: Case) -> str:
    """A variant in plain words: its own title, or what its name and its settings say."""
    words = case.variant.replace("_", " ")
    if case.title not in (None, "", words):
        return case.title
    stacked = [_setting(*each) for each in case.settings.items()]
    if case.variant[:2] in ("1_", "2_", "3_", "4_") and len(stacked) > 1 and all(stacked):
        return " + ".join(stacked)
    return words[2:] if words[:2] in ("0 ", "1 ", "2 ", "3 ", "4 ") else words


def _setting(name: str, value: Any) -> str | None:
    """A setting as a word; None for one that is no switch and no type."""
    if value is True:
        return name.replace("compiled", "compile")
    return {"bfloat16": "bf16", "float16": "fp16"}.get(value) if isinstance(value, str) else None


def name_of(case: Case, *, short: bool = False, others: int = 0) -> str:
    """channels_last + compile (stacking); tuned folder; dense (baseline of pruning and 9 more).

    `short`: without the technique, but where that is its name. `others`: of how many more
    techniques it is the baseline.
    """
    words, technique = title(case), case.technique.replace("_", " ")
    if case.role == "baseline" and not short:
        more = f" and {others} more" if others else ""
        return words if case.variant == "baseline" else f"{words} (baseline of {technique}{more})"
    if words in technique:
        return technique
    return words if short or technique in words else f"{words} ({technique})"


def parameters(tasks: Iterable[str]) -> list[int]:
    """How many parameters the models of these tasks have, the smallest first."""
    return sorted(parameter_count(TASKS[name].model) for name in tasks if name in TASKS)


def rounded(count: int) -> str:
    """12, 24 thousand, 10 million."""
    if count < 1e3:
        return str(count)
    size, word = (1e6, "million") if count >= 1e6 else (1e3, "thousand")
    return f"{float(f'{count / size:.2g}'):g} {word}"


def sizes(tasks: Iterable[str]) -> str:
    """10 million parameters; nothing of a task that is not known."""
    return ", ".join(f"{rounded(count)} parameters" for count in parameters(tasks))
