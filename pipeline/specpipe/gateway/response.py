"""What all responses have in common: id, time, model, usage."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any

from fastapi import Request

from specpipe.gateway.parameters import Parameters
from specpipe.gateway.usage import Usage


class Head:
    """Begins every object of one response."""

    def __init__(self, request: Request, body: Parameters, *, kind: str, prefix: str, model: str):
        """kind  the `object` of a whole response; that of an event is a chat's `….chunk`"""
        drawn = request.scope.get("state", {}).get("request_id") or uuid.uuid4().hex
        options = body.stream_options
        self._has_usage = bool(options and options.include_usage)
        self._counts_on = bool(options and options.continuous_usage_stats)
        self._fields = {
            "id": f"{prefix}-{drawn}",
            "object": kind,
            "created": int(time.time()),
            "model": model,
        }
        self._event_fields = self._fields
        if kind == "chat.completion":
            self._event_fields = {**self._fields, "object": "chat.completion.chunk"}

    def event(self, choices: Sequence[dict[str, Any]], usage: Usage) -> dict[str, Any]:
        """Returns one event; OpenAI's have `usage` in each where it comes at the end."""
        event = {**self._event_fields, "choices": choices}
        if self._counts_on:
            event["usage"] = usage.to_json()
        elif self._has_usage:
            event["usage"] = None
        return event

    def last_events(self, usage: Usage) -> list[dict[str, Any]]:
        """Returns the event with the usage, where it is asked for."""
        if not self._has_usage:
            return []
        return [{**self._event_fields, "choices": [], **_counted(usage)}]

    def whole(self, choices: Sequence[dict[str, Any]], usage: Usage) -> dict[str, Any]:
        """Returns a whole response."""
        return {**self._fields, "choices": choices, **_counted(usage)}


def _counted(usage: Usage) -> dict[str, Any]:
    metrics = usage.metrics()
    counted = {"usage": usage.to_json()}
    return counted if metrics is None else {**counted, "metrics": metrics}
