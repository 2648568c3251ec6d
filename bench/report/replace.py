"""Writing files so that no reader sees half of one."""

from __future__ import annotations

import sys
from pathlib import Path


def write_atomically(texts: dict[Path, str]) -> None:
    """Replace each file at once, so that no reader sees half of it. ValueError if it cannot be.

    Of a link the file that it names is replaced.
    """
    files = {target: target.resolve() for target in texts}
    partials = {target: file.with_name(f".{file.name}.partial") for target, file in files.items()}
    try:
        for target, text in texts.items():
            partials[target].write_text(text, "utf-8", newline="\n")
        for target, partial in partials.items():
            partial.replace(files[target])
    except OSError as error:
        for partial in partials.values():
            partial.unlink(missing_ok=True)
        raise ValueError(f"{target}: cannot be written ({error.strerror})") from None


def put(page: Path, made: str, given: str, *, check: bool) -> int:
    """Write a page that was `made` of what was `given`; to `check` it, tell whether it is that."""
    if check:
        same = page.exists() and page.read_text("utf-8") == made
        print(f"{page}: {'as' if same else 'not what'} {given} gives", file=sys.stderr)
        return 0 if same else 1
    write_atomically({page: made})
    print(page)
    return 0
