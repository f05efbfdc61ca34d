"""Draws charts with matplotlib: as SVG for the page, as PNG to be shown elsewhere.

The SVG has no colours of its own but the page's CSS variables, so that it is light or dark as the
page is. Its text is text.
"""

from __future__ import annotations

import io
import re
import warnings
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from specpipe.errors import RuntimeUnavailable
from specpipe.evaluate.report.charts import Chart, Series
from specpipe.machine.libraries import with_extras

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Chosen by eye, at the width that page.css gives a chart.
_WIDTH_IN, _HEIGHT_IN = 4.7, 3.2
_ROW_HEIGHT_IN = 2.2  # where there are several
_PNG_DPI = 220
_FONT_SIZE = 10.5
_MAX_NAME_LENGTH = 40

_SVG = "http://www.w3.org/2000/svg"
_XLINK = "http://www.w3.org/1999/xlink"


@dataclass(frozen=True)
class Palette:
    """Colours as matplotlib takes them: of text, of lines that guide, and of series."""

    ink: str
    guide: str
    paper: str
    series: tuple[str, ...]


PRINTED = Palette(
    ink="#1f2933",
    guide="#d5dbe1",
    paper="#ffffff",
    # After Okabe and Ito, who chose colours that colour-blind readers tell apart.
    series=("#6b7785", "#0072b2", "#d55e00", "#009e73", "#a0559a", "#b58900", "#3aa6dd", "#8c564b"),
)

_PLACEHOLDERS = Palette(
    ink="#010101",
    guide="#010102",
    paper="none",
    series=tuple(f"#0102{number:02x}" for number in range(len(PRINTED.series))),
)
"""Colours that stand for CSS variables in what matplotlib writes."""

_VARIABLES = {
    _PLACEHOLDERS.ink: "var(--ink)",
    _PLACEHOLDERS.guide: "var(--guide)",
    **{colour: f"var(--series-{n})" for n, colour in enumerate(_PLACEHOLDERS.series)},
}


def to_png(chart: Chart) -> bytes:
    """Returns a chart as a PNG in the colours of a light page."""
    with _drawn(chart, PRINTED, {}) as figure:
        written = io.BytesIO()
        figure.savefig(written, format="png", dpi=_PNG_DPI, metadata={"Software": None})
    return written.getvalue()


def to_svg(chart: Chart, *, name: str, title: str) -> str:
    """Returns a chart as an SVG element for an HTML page; `name` keeps ids of several apart."""
    with _drawn(chart, _PLACEHOLDERS, {"svg.fonttype": "none", "svg.hashsalt": name}) as figure:
        written = io.StringIO()
        figure.savefig(written, format="svg", transparent=True, metadata={"Date": None})
    return _for_page(written.getvalue(), name, title)


@contextmanager
def _drawn(chart: Chart, palette: Palette, settings: dict[str, Any]) -> Iterator[Figure]:
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as exc:
        raise RuntimeUnavailable(
            f"the figures of a report need 'matplotlib': {with_extras('evaluate')}"
        ) from exc
    parameters: Any = {**_rc(palette), **settings}
    with matplotlib.rc_context(parameters), warnings.catch_warnings():
        # A PNG shows a box for what the font lacks; the page's text has the reader's fonts.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        rows = chart.num_rows
        height = _HEIGHT_IN if len(chart.panels) == 1 else rows * _ROW_HEIGHT_IN + 0.5
        figure = Figure(figsize=(_WIDTH_IN, height), layout="constrained")
        _draw(figure, chart, palette)
        yield figure


def _rc(palette: Palette) -> dict[str, Any]:
    ink = ("text.color", "axes.labelcolor", "xtick.labelcolor", "ytick.labelcolor")
    guides = ("axes.edgecolor", "grid.color", "xtick.color", "ytick.color")
    return {
        **dict.fromkeys(ink, palette.ink),
        **dict.fromkeys(guides, palette.guide),
        "figure.facecolor": palette.paper,
        "axes.facecolor": palette.paper,
        "font.family": "DejaVu Sans",
        "font.size": _FONT_SIZE,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.linewidth": 0.8,
        "legend.frameon": False,
        "text.parse_math": False,  # a name with a dollar sign is no formula
    }


def _draw(figure: Figure, chart: Chart, palette: Palette) -> None:
    grid = figure.subplots(
        chart.num_rows, chart.num_columns, sharex=True, sharey=True, squeeze=False
    )
    places = list(grid.flat)
    handles: list[Any] = []
    for panel, axes in zip(chart.panels, places, strict=False):
        if chart.reference is not None:
            axes.axhline(chart.reference, color=palette.ink, linewidth=1.0, linestyle=(0, (4, 3)))
        drawn = [
            _draw_series(axes, series, palette, moved=moved, width=width)
            for series, moved, width in _places(panel.series)
        ]
        handles = handles or drawn
        axes.set_title(_drawable(panel.title), fontsize=_FONT_SIZE, loc="left")
    for place, axes in enumerate(places):
        if place >= len(chart.panels):
            axes.set_axis_off()
            continue
        _set_scale(axes, chart)  # now that all is drawn: limits are those of all panels
        if place + chart.num_columns >= len(chart.panels):  # nothing is below it
            axes.set_xlabel(chart.x.label)
            axes.tick_params(labelbottom=True)
    for axes in grid[:, 0]:
        axes.set_ylabel(chart.y.label)
    names = [series.name for series in chart.panels[0].series]
    if len(names) > 1:
        figure.legend(
            handles,
            [_drawable(name) for name in names],
            loc="outside lower center",
            ncols=2 if len(names) in (2, 4) else 3,
            handlelength=1.6,
            columnspacing=1.2,
        )


def _places(series: Sequence[Series]) -> list[tuple[Series, float, float]]:
    """Yields each series, what it is moved by along x, and its width: bars stand side by side."""
    bars = [s for s in series if s.style == "bars"]
    width = 0.8 / max(len(bars), 1)
    moved = {id(s): (n - (len(bars) - 1) / 2) * width for n, s in enumerate(bars)}
    return [(s, moved.get(id(s), 0.0), width) for s in series]


def _draw_series(
    axes: Axes, series: Series, palette: Palette, *, moved: float, width: float
) -> Any:
    colour = palette.series[series.colour % len(palette.series)]
    x = [value + moved for value in series.x]
    errors: Any = None
    if series.bounds:
        errors = (
            [y - low for y, (low, _) in zip(series.y, series.bounds, strict=True)],
            [high - y for y, (_, high) in zip(series.y, series.bounds, strict=True)],
        )
    if series.style == "bars":
        return axes.bar(
            x,
            series.y,
            width=0.92 * width,
            color=colour,
            yerr=errors,
            ecolor=palette.ink,
            error_kw={"elinewidth": 1.2, "capsize": 2.5},
        )
    line = {"line": "-", "dashed": (0, (4, 2)), "points": ""}[series.style]
    return axes.errorbar(
        x,
        series.y,
        yerr=errors,
        color=colour,
        linestyle=line or "none",
        linewidth=1.8,
        marker="o" if series.style != "dashed" else "",
        markersize=6.5 if series.style == "points" else 4,
        elinewidth=1.4,
        capsize=3,
        zorder=3,
    )


def _set_scale(axes: Axes, chart: Chart) -> None:
    for axis, of, set_scale, set_limits in (
        (chart.x, axes.xaxis, axes.set_xscale, axes.set_xlim),
        (chart.y, axes.yaxis, axes.set_yscale, axes.set_ylim),
    ):
        if axis.is_log:
            set_scale("log", base=2)
        if axis.ticks:
            labels = axis.tick_labels or tuple(f"{tick:g}" for tick in axis.ticks)
            of.set_ticks(axis.ticks, labels=[_drawable(label) for label in labels])
            of.set_ticks([], minor=True)
        if axis.low is not None or axis.high is not None:
            set_limits(axis.low, axis.high)
    axes.grid(visible=False, axis="x")
    axes.tick_params(length=0)


def _drawable(text: str) -> str:
    """Returns a name that matplotlib draws: without what XML cannot hold, not hidden for a _."""
    cleaned = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)
    if len(cleaned) > _MAX_NAME_LENGTH:
        cleaned = f"{cleaned[: _MAX_NAME_LENGTH - 1]}…"
    return f"\N{ZERO WIDTH SPACE}{cleaned}" if cleaned.startswith("_") else cleaned


def _for_page(svg: str, name: str, title: str) -> str:
    """Returns an SVG file as an element of a page: scalable, named, in the page's colours."""
    ET.register_namespace("", _SVG)
    ET.register_namespace("xlink", _XLINK)
    root = ET.fromstring(svg)
    for metadata in root.findall(f"{{{_SVG}}}metadata"):
        root.remove(metadata)
    used = set(re.findall(r"#([\w-]+)", " ".join(_references(root))))
    for element in root.iter():
        if element.get("id") not in used:
            element.attrib.pop("id", None)
        elif element.get("id"):
            element.set("id", f"{name}-{element.get('id')}")
        for key, value in element.attrib.items():
            if key != "id":
                element.set(key, _for_css(_renamed(value, name, used)))
        if element.tag == f"{{{_SVG}}}style":
            element.text = ""  # it would hold for the whole page
    for attribute in ("width", "height", "version"):
        root.attrib.pop(attribute, None)
    root.set("role", "img")
    root.set("aria-label", title)
    root.set("stroke-linejoin", "round")
    root.set("stroke-linecap", "butt")
    return ET.tostring(root, encoding="unicode")


def _references(root: ET.Element) -> Iterator[str]:
    for element in root.iter():
        for key, value in element.attrib.items():
            if key == f"{{{_XLINK}}}href" or "url(#" in value:
                yield value


def _renamed(value: str, name: str, used: set[str]) -> str:
    """Returns a value with the name of the figure before each id that it refers to."""
    return re.sub(
        r"#([\w-]+)", lambda match: f"#{name}-{match[1]}" if match[1] in used else match[0], value
    )


def _for_css(value: str) -> str:
    for colour, variable in _VARIABLES.items():
        value = value.replace(colour, variable)
    return re.sub(r"'DejaVu Sans'[^;\"]*", "var(--font)", value)
