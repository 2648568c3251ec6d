"""The documentation as a site with search: `python -m bench.docs.website FOLDER`.

The same Markdown as in the repository, README.md first, with the report and the records. A file of
code that a page links to becomes a page. Zensical builds it (`pip install -e '.[dev]'`), and a link
that leads nowhere is an error. The pages fetch nothing. Search needs a server, such as
`python -m http.server --bind 127.0.0.1 --directory FOLDER`. Nothing is published.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from bench.analysis.reading import load
from bench.report.names import FAMILY_TITLES
from bench.report.page import html as page_of_charts

ROOT = Path(__file__).resolve().parents[2]
LOOKS = ("website.css", "website.js")
PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs")
RECORDS = (
    "docs",
    "docs/recipes",
    "docs/by_name",
    "docs/gpu",
)  # of each the site has the page with charts
CHARTS = "charts.html"
COLOUR = re.compile(r"\x1b\[[\d;]*m")
LANGUAGES = {".py": "python", ".sh": "sh", ".yml": "yaml", ".yaml": "yaml", ".toml": "toml"}
LINK = re.compile(r"(?<=\]\()(?P<path>[^)#\s]+)(?P<anchor>#[^)\s]*)?(?=\))")


def configuration() -> str:
    """What Zensical reads, with the navigation."""
    environment = Environment(
        loader=PackageLoader("bench.docs", "."),
        autoescape=False,  # it is TOML
        lstrip_blocks=True,
        trim_blocks=True,
        undefined=StrictUndefined,
    )
    template = environment.get_template("zensical.toml.j2")
    return template.render(pages=_pages, families=FAMILY_TITLES)


def _pages(folder: str) -> str:
    """The pages of a folder of the repository as a list in TOML, README.md first."""
    there = (ROOT / folder).rglob("*.md")
    ordered = sorted(there, key=lambda page: (page.name != "README.md", page))
    return json.dumps([page.relative_to(ROOT).as_posix() for page in ordered])


def stage(folder: Path) -> None:
    """Copy the pages to `folder`, and make a page of each file of code that they link to."""
    folder.mkdir(parents=True)
    for name in LOOKS:
        shutil.copy(Path(__file__).with_name(name), folder)
    for name in PAGES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name)
        else:
            shutil.copy(ROOT / name, folder / name)
    for page in sorted(folder.rglob("*.md")):
        target = partial(_target, place=page.relative_to(folder).parent, folder=folder)
        text = LINK.sub(target, page.read_text("utf-8"))
        # GitHub reads Markdown within HTML; Python-Markdown, which Zensical uses, has to be told.
        page.write_text(text.replace("<details>", '<details markdown="1">'), "utf-8")
    for record in RECORDS:
        charts = folder / record / CHARTS
        charts.write_text(page_of_charts(load(charts.parent)), "utf-8")
        report = charts.with_name("report.md")
        title, _, rest = report.read_text("utf-8").partition("\n")
        report.write_text(f"{title}\n\n[The same with charts]({CHARTS})\n{rest}", "utf-8")


def build(folder: Path) -> None:
    """Build the site in `folder`, which must be empty or new. Raises ValueError with the reason."""
    if find_spec("zensical") is None:
        raise ValueError("the site needs Zensical: pip install -e '.[dev]'")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} is not an empty folder: name a new one")
    with tempfile.TemporaryDirectory() as scratch:
        project = Path(scratch)
        (project / "zensical.toml").write_text(configuration(), "utf-8")
        stage(project / "pages")
        command = [sys.executable, "-m", "zensical", "build", "--strict"]
        built = subprocess.run(command, cwd=project, capture_output=True, text=True, check=False)
        if built.returncode:
            printed = COLOUR.sub("", built.stdout + built.stderr).partition("\nTraceback")[0]
            raise ValueError(f"Zensical found faults:\n{printed}")
        shutil.copytree(project / "site", folder, dirs_exist_ok=True)


def _target(link: re.Match, place: Path, folder: Path) -> str:
    """Where a link leads in the site: to a page of the code where it leads to code."""
    path, anchor = link["path"], link["anchor"] or ""
    target = Path(os.path.normpath(place / path))
    source, copy = ROOT / target, folder / target
    if "://" in path or path.startswith("mailto:") or not source.exists():
        return link[0]
    if source.is_dir():
        files = [one.relative_to(source) for one in sorted(source.rglob("*")) if one.is_file()]
        if not (copy / "README.md").exists():
            lines = [f"# {target}", "", *(f"- [{one}]({one})" for one in files)]
            (copy / "README.md").write_text("\n".join(lines) + "\n", "utf-8")
        return f"{path.rstrip('/')}/README.md{anchor}"
    copy.parent.mkdir(parents=True, exist_ok=True)
    if source.suffix in LANGUAGES:
        copy.with_name(f"{copy.name}.md").write_text(_listing(source, target), "utf-8")
        return f"{path}.md{anchor}"
    if not copy.exists():
        shutil.copy(source, copy)
    return link[0]


def _listing(source: Path, target: Path) -> str:
    """The page of a file of code."""
    return f"# {target}\n\n````{LANGUAGES[source.suffix]}\n{source.read_text('utf-8')}````\n"


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit status (2: an error)."""
    parser = argparse.ArgumentParser(prog="python -m bench.docs.website", description=__doc__)
    parser.add_argument("folder", type=Path, help="where the site is written: new or empty")
    folder = parser.parse_args(arguments).folder
    try:
        build(folder)
    except ValueError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    print(folder / "index.html")
    return 0


if __name__ == "__main__":
    sys.exit(main())
