"""What matplotlib makes of a chart."""

from __future__ import annotations

import re
import struct

import pytest

from specpipe.evaluate.report.charts import Axis, Chart, Panel, Series, counted
from specpipe.evaluate.report.drawing import to_png, to_svg

pytest.importorskip("matplotlib")

CHART = Chart(
    x=Axis("concurrency", "streams", ticks=(1.0, 8.0), is_log=True),
    y=Axis("speed-up", "× target alone", low=0),
    panels=[Panel([Series("a", [1, 8], [1.5, 0.9], bounds=[(1.4, 1.6), (0.8, 1.0)], colour=1)])],
    reference=1.0,
)


def test_an_svg_has_the_colours_of_its_page_and_no_others() -> None:
    svg = to_svg(CHART, name="x", title="A & B")
    assert svg.startswith("<svg ") and 'role="img" aria-label="A &amp; B"' in svg
    assert set(re.findall(r"var\((--[\w-]+)\)", svg)) == {
        "--font",
        "--guide",
        "--ink",
        "--series-1",
    }
    assert re.findall(r"#[0-9a-f]{6}", svg) == []
    assert "concurrency (streams)" in svg and "speed-up (× target alone)" in svg


def test_the_same_chart_is_the_same_file() -> None:
    assert to_svg(CHART, name="x", title="t") == to_svg(CHART, name="x", title="t")
    assert to_png(CHART) == to_png(CHART)


def test_a_png_is_large_enough_for_a_dense_screen() -> None:
    width, height = struct.unpack(">II", to_png(CHART)[16:24])
    assert (width, height) == (1034, 704)  # 4.7 and 3.2 inches at 220 dots


def test_panels_share_a_legend_and_axes_that_hold_all_of_them() -> None:
    x = Axis("load", "streams", ticks=(1.0, 2.0))
    panels = [
        Panel([Series("a", [1], [n]), Series("b", [2], [0])], title=f"up to {n}") for n in (3, 4, 5)
    ]
    svg = to_svg(Chart(x=x, y=CHART.y, panels=panels), name="x", title="t")
    texts = re.findall(r"<text [^>]*>([^<]*)</text>", svg)
    assert [texts.count(f"up to {n}") for n in (3, 4, 5)] == [1, 1, 1]
    assert texts.count("a") == texts.count("b") == 1
    assert texts.count("speed-up (× target alone)") == 2  # of two rows
    assert texts.count("load (streams)") == 2  # below the third panel, and below the second
    assert texts.count("4") == 2  # a tick of each row, though the first panel ends at 3


def test_few_ticks_have_labels() -> None:
    assert counted(4) == (1, 2, 3, 4)
    assert counted(32) == (1, 5, 9, 13, 17, 21, 25, 29)
