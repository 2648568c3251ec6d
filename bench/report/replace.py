"""Writing files so that no reader sees half of one."""

from __future__ import annotations

from pathlib import Path


def write_atomically(texts: dict[Path, str]) -> None:
    """Replace each file at once, so that no reader sees half of it. ValueError if it cannot be."""
    partials = {target: target.with_name(f".{target.name}.partial") for target in texts}
    try:
        for target, text in texts.items():
            partials[target].write_text(text, "utf-8", newline="\n")
        for target, partial in partials.items():
            partial.replace(target)
    except OSError as error:
        for partial in partials.values():
            partial.unlink(missing_ok=True)
        raise ValueError(f"{target}: cannot be written ({error.strerror})") from None
