"""The pages that people wrote, and what stands in them."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from markdown_it import MarkdownIt

ROOT = Path(__file__).resolve().parents[2]

# Pages that people wrote. Reports and the pages of techniques are made, and tested as such.
PAGES = (
    "README.md",
    "CONTRIBUTING.md",
    *(
        f"docs/{name}.md"
        for name in (
            *("numbers", "add_a_technique", "your_model", "try", "port", "doctor", "diagnosis"),
            *("why", "gpu"),
            *("many_devices", "many_machines", "lines_of_code"),
            *("install", "options", "reading_tables", "choose", "ladders"),
        )
    ),
    "docs/across_hosts.md",
    "docs/ci.md",
)
MADE = {f"docs/{name}.md" for name in ("any_model", "claims", "priorities", "report", "try_models")}
MADE |= {f"docs/{name}.md" for name in ("attacked", "instructions", "machines", "overhead")}
MADE |= {"docs/validation.md", "docs/differences.md", "docs/reproducibility.md"}
MADE |= {"docs/answers.md"}
MADE |= {"docs/upstream.md"}  # which tests/test_upstream.py tests


@cache
def parsed(page: str) -> list:
    return MarkdownIt("commonmark").enable("table").parse((ROOT / page).read_text("utf-8"))


def fences(page: str, language: str) -> list[str]:
    tokens = parsed(page)
    return [t.content for t in tokens if t.type == "fence" and t.info.strip() == language]


def inline(page: str) -> list:
    return [child for token in parsed(page) for child in token.children or []]


BEGIN = (".venv/bin/", "python -m pt_impl", "python -m tf_impl", "pytest bench/")


def commands(page: str) -> list[str]:
    """The commands of a page: a line each in its blocks, and those in running text."""
    lines = [line for block in fences(page, "sh") for line in block.splitlines()]
    lines = [line for line in lines if line.strip() and not line.startswith("#")]
    words = [token.content for token in inline(page) if token.type == "code_inline"]
    return lines + [text for text in words if text.startswith(BEGIN) and " " in text]
