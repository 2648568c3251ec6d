"""A chart as an SVG file of its own, for pages that cannot hold one: a light and a dark one."""

from __future__ import annotations

from functools import cache
from html import escape

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from bench.report.names import plainly
from bench.report.svg_shapes import Chart
from bench.report.text import plain, printable

WIDTH = 800  # pixels
# style -> colour: those of the page (`report.css.j2`)
SCHEMES = {
    "light": {
        "page": "#ffffff", "ink": "#1b1f24", "soft": "#565f6a", "rule": "#d5dae0",
        "band": "#e3e6ea", "pt": "#d55e00", "tf": "#0072b2", "both": "#008a63",
        "good": "#00624a", "bad": "#a33c00",
    },
    "dark": {
        "page": "#14171b", "ink": "#e7eaee", "soft": "#a5afba", "rule": "#39414a",
        "band": "#2c333b", "pt": "#e69f00", "tf": "#56b4e9", "both": "#2fbf96",
        "good": "#53d3a8", "bad": "#ffae70",
    },
}  # fmt: skip


@cache
def environment() -> Environment:
    """Everything of a record is escaped, its control characters shown, its lines joined."""
    made = Environment(
        loader=PackageLoader("bench.report", "."),
        autoescape=True,
        finalize=lambda value: value if isinstance(value, Markup | int | float) else plain(value),
        lstrip_blocks=True,
        trim_blocks=True,
        undefined=StrictUndefined,
    )
    made.filters["breakable"] = lambda text: Markup(escape(plain(text)).replace("_", "_<wbr>"))
    made.filters["plainly"] = plainly
    made.filters["as_lines"] = lambda text: Markup("\n").join(map(printable, text.splitlines()))
    return made


def standalone(chart: Chart, scheme: str | None = None, width: int = WIDTH) -> str:
    """The chart with its title, its key and its colours as the text of a file.

    Without a scheme its colours are the reader's.
    """
    schemes = {"": SCHEMES[scheme or "light"]}
    if scheme is None:
        schemes["dark"] = SCHEMES["dark"]
    places, x = [], 16
    for _, words in chart.key:
        places.append(x)
        x += 34 + 7 * len(words)
    template = environment().get_template("chart.svg.j2")
    return template.render(chart=chart, schemes=schemes, width=width, places=places)
