"""Whatever answers a question, behind one protocol (base.py)."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from specpipe.errors import ServerError

if TYPE_CHECKING:
    from specpipe.evaluate.endpoints.base import Endpoint


def open_endpoint(
    url: str, *, model: str | None = None, api_key: str | None = None, timeout_s: float = 600.0
) -> Endpoint:
    """Returns the endpoint that a URL names by its scheme; nothing is asked yet."""
    try:
        scheme = urlsplit(url).scheme
    except ValueError:  # brackets around what is no IPv6 address
        scheme = ""
    if scheme in ("openai+http", "openai+https"):
        from specpipe.evaluate.endpoints.openai import OpenAI

        if model is None:
            raise ServerError(f"{url} needs the name of a model: --model NAME")
        return OpenAI(url, model=model, api_key=api_key, timeout_s=timeout_s)
    if scheme in ("http", "grpc"):
        from specpipe.evaluate.endpoints.triton import Triton

        return Triton(url, model=model or "ensemble", timeout_s=timeout_s)
    raise ServerError(
        f"{url[:80]!r} is no endpoint: expected http://HOST:PORT or grpc://HOST:PORT for Triton, "
        "openai+http://HOST:PORT for an OpenAI-compatible server"
    )


def takes_draft_length(endpoint: Endpoint) -> bool:
    """Returns whether a question may have a draft length; asks a Triton for its model's inputs."""
    from specpipe.evaluate.endpoints.openai import OpenAI
    from specpipe.evaluate.endpoints.triton import Triton

    if isinstance(endpoint, Triton):
        return not endpoint.is_nvidias
    return not isinstance(endpoint, OpenAI)
