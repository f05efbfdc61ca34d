"""What is wrong with what requests were told, beside what each is told when it runs alone."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from benchmarks.bits.asked import Asked
from benchmarks.bits.crowd import Told
from specpipe.speculative.request import Request

_NAMES = {
    "token_ids": "token ids",
    "log_probs": "log-probabilities",
    "top_log_probs": "likeliest tokens",
    "prompt_log_probs": "log-probabilities of the prompt",
    "prompt_top_log_probs": "likeliest tokens of the prompt",
}
"""What is compared, by its name in a chunk, in this order."""


@dataclass(frozen=True)
class Fault:
    """What is wrong with one request.

    place  of the first token of the output that is wrong; None: it is none of them
    """

    request_id: str
    what: str
    place: int | None = None


def is_repeatable(request: Request) -> bool:
    """Returns whether a request has one right answer."""
    return request.sampling.is_greedy or request.sampling.is_seeded


def unsound(asked: Asked, told: Told, *, vocab_size: int) -> Fault | None:
    """Returns what no answer to a request may be, whatever was drawn."""
    request = asked.request
    found = next(filter(None, _unsound(asked, told, vocab_size)), None)
    return None if found is None else Fault(request.request_id, found)


def _unsound(asked: Asked, told: Told, vocab_size: int) -> Iterable[str | None]:
    request, ids, last = asked.request, told.token_ids, told.last
    if last is None or last.statistics is None:
        yield "it was never told to be over"
        return
    reason, statistics = last.finish_reason, last.statistics
    yield _if(sum(c.finish_reason is not None for c in told.chunks) > 1, "it ended more than once")
    yield _if(reason == "error", f"it failed: {last.error}")
    yield _if(reason == "cancelled" and asked.cancelled_after is None, "nobody cancelled it")
    can_stop = bool(request.end_token_ids or request.stop_strings or request.guide)
    yield _if(reason == "stop" and not can_stop, "nothing stops it, and it stopped")
    yield _if(
        reason == "length" and len(ids) != request.max_tokens,
        f"it has {len(ids)} tokens, and ended for having {request.max_tokens}",
    )
    yield _if(len(ids) > request.max_tokens, f"{len(ids)} tokens, at most {request.max_tokens}")
    yield _if(
        statistics.num_output_tokens != len(ids),
        f"{len(ids)} tokens were told, and {statistics.num_output_tokens} counted",
    )
    yield _if(any(not 0 <= i < vocab_size for i in ids), "it has an id that there is not")
    yield _if(
        request.num_draft_tokens == 0 and statistics.total_draft_tokens > 0,
        "it has draft tokens, and wanted none",
    )
    for name, is_asked, count in (
        ("log_probs", request.return_log_probs, len(ids)),
        ("top_log_probs", request.num_top_log_probs > 0, len(ids)),
    ):
        num_told = len(_all(told, name))
        yield _if(num_told != count * is_asked, f"{len(ids)} tokens have {num_told} {_NAMES[name]}")
    numbers = [p for c in told.chunks for p in (*c.log_probs, *c.prompt_log_probs)]
    yield _if(any(not math.isfinite(p) or p > 0.0 for p in numbers), "a log-probability is no such")


def _if(condition: bool, what: str) -> str | None:
    return what if condition else None


def different(
    asked: Asked, told: Told, expected: Told, *, tolerance: float | None = None
) -> Fault | None:
    """Returns where an answer parts from the one that is expected.

    That of a cancelled request is the beginning of it. Log-probabilities are equal bit for bit, or
    with a tolerance up to that.
    """
    request_id = asked.request.request_id
    is_cancelled = told.reason == "cancelled"
    for name, title in _NAMES.items():
        found, wanted = _all(told, name), _all(expected, name)
        if is_cancelled:
            wanted = wanted[: len(found)]
        if len(found) != len(wanted) and name != "token_ids":
            return Fault(request_id, f"{len(found)} {title}, expected {len(wanted)}")
        place = _first_different(found, wanted, tolerance)
        if place is not None:
            here, there = (str(x[place]) if place < len(x) else "the end" for x in (found, wanted))
            what = f"{title}: {here} at {place}, expected {there}"
            return Fault(request_id, what, None if name.startswith("prompt") else place)
    if is_cancelled:
        return None
    if _text(told) != _text(expected):
        return Fault(request_id, "the text is another one, of the same tokens")
    if told.reason != expected.reason:
        return Fault(request_id, f"it ended by {told.reason}, expected {expected.reason}")
    return None


def _all(told: Told, name: str) -> list[object]:
    return [item for chunk in told.chunks for item in getattr(chunk, name)]


def _text(told: Told) -> str:
    return "".join(chunk.text for chunk in told.chunks)


def _first_different(
    found: Sequence[object], wanted: Sequence[object], tolerance: float | None
) -> int | None:
    for place, (a, b) in enumerate(zip(found, wanted, strict=False)):
        if a != b and not (tolerance is not None and _are_near(a, b, tolerance)):
            return place
    return None if len(found) == len(wanted) else min(len(found), len(wanted))


def _are_near(a: object, b: object, tolerance: float) -> bool:
    """Returns whether two log-probabilities, or those of the likeliest tokens, nearly agree."""
    if isinstance(a, float) and isinstance(b, float):
        return abs(a - b) <= tolerance
    if isinstance(a, tuple) and isinstance(b, tuple) and len(a) == len(b):
        # The ids of two that are as likely may come in either order.
        return all(abs(p - q) <= tolerance for (_, p), (_, q) in zip(a, b, strict=True))
    return False
