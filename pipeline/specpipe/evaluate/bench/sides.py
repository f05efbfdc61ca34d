"""The sides of a benchmark: one server with and without speculation, or two servers."""

from __future__ import annotations

from dataclasses import replace
from urllib.parse import urlsplit

from specpipe.evaluate.bench.run import BenchSide
from specpipe.evaluate.endpoints import open_endpoint
from specpipe.machine.web import is_here

WITHOUT, WITH = "the target alone", "speculation"


def open_side(
    url: str, *, model: str | None, metrics_url: str | None, api_key: str | None = None
) -> BenchSide:
    """Returns the side that a URL names; nothing is asked yet. Its endpoint is to be closed."""
    return BenchSide(
        name=url,
        endpoint=open_endpoint(url, model=model, api_key=api_key),
        metrics_url=metrics_url,
        is_local=is_here(urlsplit(url).hostname or ""),
    )


def without_and_with(
    side: BenchSide, num_draft_tokens: int | None = None
) -> tuple[BenchSide, BenchSide]:
    """Returns a side as two, the baseline first: the target alone, and speculation.

    num_draft_tokens is for speculation; None: as the server was set up.
    """
    return (
        replace(side, name=WITHOUT, num_draft_tokens=0),
        replace(side, name=WITH, num_draft_tokens=num_draft_tokens),
    )


def named_apart(against: BenchSide, side: BenchSide) -> tuple[BenchSide, BenchSide]:
    """Returns both with names that differ, as those of two models of one server do not."""
    if against.name != side.name:
        return against, side
    return (
        replace(against, name=f"{against.name} (against)"),
        replace(side, name=f"{side.name} (url)"),
    )
