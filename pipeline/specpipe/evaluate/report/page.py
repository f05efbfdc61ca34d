"""Writes a report: one HTML file that needs nothing else, and its figures as PNG files."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

import jinja2
from markupsafe import Markup

from specpipe import __version__
from specpipe.errors import RepositoryError, to_sentence
from specpipe.evaluate.report import drawing
from specpipe.evaluate.report.artifact import read_artifact
from specpipe.evaluate.report.blocks import Page
from specpipe.evaluate.report.sections import make_page
from specpipe.machine.artifacts import Artifacts
from specpipe.machine.whole_file import written_whole

PAGE_NAME = "report.html"

_HERE = Path(__file__).parent
_SLUGS = (
    "acceptance",
    "speed-up",
    "ratio",
    "throughput",
    "first-token",
    "output-token",
    "gap",
    "quantized-acceptance",
)
"""The names of all figures that a report can have: those of an earlier one are removed."""


_NO_TEXT = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff]")
"""What a name may hold and HTML may not: control characters, and halves of characters."""


_WITHIN_FIGURES = re.compile(r"(?<=\d) (?=[%×])|(?<=\bK) (?==)|(?<=\bK =) ")


@dataclass(frozen=True)
class Written:
    """The files of a report."""

    page: Path
    figures: tuple[Path, ...]


def write_report(
    artifacts_dir: Path, output: Path | None = None, *, made_at: datetime | None = None
) -> Written:
    """Writes a report on an artifact, into its folder `report` unless another one is given.

    Raises RepositoryError where there is no built pair or a result is damaged.
    """
    artifact = read_artifact(artifacts_dir)
    with _naming(artifacts_dir):
        page = make_page(artifact, made_at or datetime.now(timezone.utc))
        html = render(page)
        pictures = {f"{figure.slug}.png": drawing.to_png(figure.chart) for figure in page.figures}
    folder = Artifacts(artifacts_dir).report if output is None else output
    for name, content in {**pictures, PAGE_NAME: html.encode()}.items():
        with written_whole(folder / name) as staged:
            staged.write_bytes(content)
    for slug in _SLUGS:
        if f"{slug}.png" not in pictures:
            (folder / f"{slug}.png").unlink(missing_ok=True)
    return Written(folder / PAGE_NAME, tuple(folder / name for name in pictures))


def render(page: Page) -> str:
    """Returns the page as HTML. Everything is escaped but the SVG of our own charts."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_HERE),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["unbroken"] = _unbroken
    environment.filters["with_code"] = _with_code
    drawings = {
        figure.slug: Markup(drawing.to_svg(figure.chart, name=figure.slug, title=figure.title))
        for figure in page.figures
    }
    style = Markup((_HERE / "page.css").read_text(encoding="utf-8"))
    html = environment.get_template("page.html.j2").render(
        page=page, drawings=drawings, style=style, version=__version__
    )
    return _NO_TEXT.sub("\N{REPLACEMENT CHARACTER}", html)


def _unbroken(text: str) -> str:
    """Returns a sentence in which no line ends within 95 %, 2 × or K = 4."""
    return _WITHIN_FIGURES.sub("\N{NO-BREAK SPACE}", text)


def _with_code(text: str) -> Markup:
    """Returns a sentence in HTML, in which commands stand between backticks."""
    words = text.split("`")
    parts = [Markup("<code>{}</code>" if n % 2 else "{}").format(w) for n, w in enumerate(words)]
    return Markup("").join(parts)


@contextmanager
def _naming(artifacts_dir: Path) -> Iterator[None]:
    try:
        yield
    except (
        LookupError,
        TypeError,
        ValueError,
        ArithmeticError,
        AttributeError,
        StopIteration,
    ) as exc:
        raise RepositoryError(
            f"a result in {artifacts_dir} is not what this version of specpipe writes "
            f"({type(exc).__name__}: {to_sentence(exc)}): run verify, tune and bench again"
        ) from exc
