"""What each key has used of its limits."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from specpipe.gateway.keys import ApiKey
from specpipe.machine.callables import Clock


@dataclass
class _Bucket:
    """A minute's worth, filled as time goes on; below 0 while more was taken than there was."""

    per_minute: int
    level: float
    filled_s: float

    def left(self, now: float) -> float:
        added = (now - self.filled_s) * self.per_minute / 60
        self.level = min(self.level + added, self.per_minute)
        self.filled_s = now
        return self.level

    def seconds_until(self, amount: float) -> float:
        return max(amount - self.level, 0.0) * 60 / self.per_minute


@dataclass(frozen=True)
class OverLimit:
    """A limit that a request would break; it would not after `retry_after_s`."""

    message: str
    retry_after_s: float


@dataclass
class Usage:
    """What one key has under way, and what is left of its minute."""

    key: ApiKey
    clock: Clock
    num_running: int = 0
    _requests: _Bucket | None = field(init=False, default=None)
    _tokens: _Bucket | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        now = self.clock()
        if (per_minute := self.key.requests_per_minute) is not None:
            self._requests = _Bucket(per_minute, per_minute, now)
        if (per_minute := self.key.tokens_per_minute) is not None:
            self._tokens = _Bucket(per_minute, per_minute, now)

    def begin(self) -> OverLimit | None:
        """Takes in that a request begins, unless a limit forbids it, which is returned."""
        now = self.clock()
        key = self.key
        most = key.max_concurrent_requests
        if most is not None and self.num_running >= most:
            return OverLimit(
                f"{most} requests of this key are under way (max_concurrent_requests)", 1.0
            )
        if (tokens := self._tokens) is not None and tokens.left(now) <= 0:
            return OverLimit(
                f"this key has used its {key.tokens_per_minute} tokens a minute "
                "(tokens_per_minute)",
                tokens.seconds_until(1),
            )
        if (requests := self._requests) is not None:
            if requests.left(now) < 1:
                return OverLimit(
                    f"this key has made its {key.requests_per_minute} requests a minute "
                    "(requests_per_minute)",
                    requests.seconds_until(1),
                )
            requests.level -= 1
        self.num_running += 1
        return None

    def end(self, num_tokens: int) -> None:
        """Takes in that a request ended, and the tokens of its prompt and answer."""
        self.num_running -= 1
        if self._tokens is not None:
            self._tokens.left(self.clock())
            self._tokens.level -= num_tokens


class Usages:
    """By key; one whose limits changed begins anew."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._by_name: dict[str, Usage] = {}

    def of(self, key: ApiKey) -> Usage:
        usage = self._by_name.get(key.name)
        if usage is None or usage.key != key:
            usage = self._by_name[key.name] = Usage(key, self._clock)
        return usage
