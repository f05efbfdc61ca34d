"""A report in a real browser: on a phone, on a desk, in the dark and on paper."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specpipe.evaluate.report.page import write_report
from tests.evaluate.report import browser, example

pytest.importorskip("matplotlib")

PHONE, DESK = 390, 1280

Measure = Callable[..., Any]


@pytest.fixture(scope="module")
def chromium() -> str:
    path = browser.find()
    if path is None:
        pytest.skip(f"no browser on PATH ({', '.join(browser.NAMES)}; Debian: chromium)")
    return path


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a long name wherever one can be, and words that no line has room for."""
    name = "a-name-without-any-space-in-it-" * 8 + "<script>alert(1)</script>"
    folder = example.write_all(tmp_path_factory.mktemp("engines") / "example", name=name)
    return write_report(folder).page


@pytest.fixture
def measure(chromium: str, page: Path, tmp_path: Path) -> Measure:
    def at(width: int, **settings: str) -> Any:
        return browser.measure(chromium, page, tmp_path, width=width, **settings)

    return at


@pytest.mark.parametrize("width", [PHONE, DESK])
def test_nothing_is_wider_than_the_screen_and_the_console_is_silent(
    measure: Measure, width: int
) -> None:
    found = measure(width)
    assert found["width"] == found["scrollWidth"] == width
    assert found["outside"] == []
    assert found["scrollable"]
    assert found["messages"] == []


def test_every_figure_is_drawn_with_units_caption_and_table(measure: Measure) -> None:
    found = measure(DESK)
    assert len(found["figures"]) == len(found["drawings"]) == 8
    assert all(height > 150 for _, _, height in found["drawings"])
    for figure in found["figures"]:
        assert sum(bool(re.search(r" \(.+\)$", label)) for label in figure["labels"]) >= 2
        assert len(figure["caption"]) > 80
        assert figure["rows"] > 0


def test_text_in_figures_can_be_read_on_a_phone(measure: Measure) -> None:
    """Heights of lines in CSS pixels: 9 and more are letters of 7 to 8."""
    found = measure(PHONE)
    assert all(right - left > 250 for left, right, _ in found["drawings"])
    assert min(found["texts"]) >= 9


def test_a_desk_has_figures_side_by_side_and_a_phone_below_each_other(measure: Measure) -> None:
    assert measure(DESK)["columns"] == 2
    assert measure(PHONE)["columns"] == 1


def test_the_page_is_dark_where_the_reader_wants_it(measure: Measure) -> None:
    assert measure(DESK)["background"] == "rgb(255, 255, 255)"
    dark = measure(DESK, blink_settings="preferredColorScheme=0")
    assert dark["background"] == "rgb(18, 23, 28)"


def test_it_prints_to_pdf_with_what_is_folded(chromium: str, page: Path, tmp_path: Path) -> None:
    def print_pages(html: Path) -> int:
        pdf = tmp_path / "page.pdf"
        browser.run(chromium, tmp_path, f"--print-to-pdf={pdf}", html.as_uri())
        content = pdf.read_bytes()
        assert content.startswith(b"%PDF-")
        return len(re.findall(rb"/Type\s*/Page\b", content))

    num_pages = print_pages(page)
    assert 4 < num_pages < 25
    without = tmp_path / "without.html"
    text = page.read_text(encoding="utf-8")
    without.write_text(re.sub(r"<details.*?</details>", "", text, flags=re.DOTALL))
    assert print_pages(without) < num_pages
