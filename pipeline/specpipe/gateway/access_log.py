"""A line of JSON for each request that ended, without what was asked unless that is wanted."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Any

from specpipe.machine.callables import Log

_MOST_OF_BODY = 4096  # characters


class AccessLog:
    """Writes each request's line to `log`; `has_prompts`: with the beginning of its body."""

    def __init__(self, log: Log, *, has_prompts: bool = False) -> None:
        self._log, self._has_prompts = log, has_prompts

    def write(self, facts: Mapping[str, Any], body: bytes) -> None:
        line = {"time": datetime.now(timezone.utc).isoformat(timespec="milliseconds"), **facts}
        if self._has_prompts and body:
            line["body"] = body[: 4 * _MOST_OF_BODY].decode(errors="replace")[:_MOST_OF_BODY]
        self._log(json.dumps({name: value for name, value in line.items() if value is not None}))
