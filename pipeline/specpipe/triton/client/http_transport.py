"""Triton over HTTP: its extension `generate`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from http.client import HTTPResponse
from typing import Any
from urllib.parse import quote

from specpipe.errors import RequestError, ServerError, show
from specpipe.machine.event_stream import parse_data, read_events
from specpipe.machine.web import Address, asked, body_blocks
from specpipe.triton.client.transport import Responses, Served, plain

_MAX_REFUSAL_BYTES = 1 << 16  # more than any sentence of Triton: a guess


class HttpTransport:
    """Triton's `generate` and `generate_stream`, which serve both kinds of model."""

    def __init__(self, address: Address, model: str, timeout_s: float) -> None:
        self._url = f"http://{address}"
        self._model_url = f"{self._url}/v2/models/{quote(model)}"
        self._timeout_s = timeout_s

    def close(self) -> None:
        pass  # a connection for each request: closing it early is how HTTP cancels

    def ask_served(self) -> Served:
        with self._request("config") as response:
            config = self._parse(b"".join(body_blocks(response)))
        try:
            return Served(
                is_decoupled=bool(config.get("model_transaction_policy", {}).get("decoupled")),
                has_finish_reason=any(
                    output["name"] == "finish_reason" for output in config.get("output", [])
                ),
            )
        except (AttributeError, KeyError, TypeError) as exc:
            raise ServerError(f"{self._url} sent what is no model's configuration") from exc

    def infer(self, inputs: Mapping[str, Any], *, is_decoupled: bool) -> Responses:
        if not inputs["stream"]:
            with self._request("generate", inputs) as response:
                yield self._parse(b"".join(body_blocks(response)))
            return
        with self._request("generate_stream", inputs) as response:
            for data in read_events(response, self._url):
                yield self._parse(data)

    def _parse(self, data: str | bytes) -> dict[str, Any]:
        try:
            values = parse_data(data)
        except (ValueError, RecursionError):
            values = None
        if not isinstance(values, dict):
            text = data.decode(errors="replace") if isinstance(data, bytes) else data
            raise ServerError(f"{self._url} sent what is no response of Triton: '{show(text)}'")
        # Triton names the model in each response; `error` may be an output of it.
        if "model_name" not in values and "error" in values:
            raise RequestError(plain(str(values["error"])))
        return values

    @contextlib.contextmanager
    def _request(self, path: str, body: Mapping[str, Any] | None = None) -> Iterator[HTTPResponse]:
        url = f"{self._model_url}/{path}"
        with asked(url, body, server=self._url, timeout_s=self._timeout_s) as response:
            if response.status != 200:
                raise self._refusal(response.status, response.read(_MAX_REFUSAL_BYTES))
            yield response

    def _refusal(self, status: int, body: bytes) -> RequestError | ServerError:
        try:
            # The first response of a stream is an event, even when it is an error.
            message = plain(parse_data(body.removeprefix(b"data:"))["error"])
        except (ValueError, KeyError, TypeError, RecursionError):
            return ServerError(
                f"{self._url} answers {status}: {show(body.decode(errors='replace'))}"
            )
        # 400 is also what a request that failed while it ran comes to; HTTP says no more.
        return RequestError(message) if status in (400, 404) else ServerError(message)
