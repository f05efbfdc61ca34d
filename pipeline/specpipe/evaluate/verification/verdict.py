"""What two streams of token ids say of each other: identical, a numerical tie, or a fault.

A forward over several tokens adds up in another order than one over a single token, so the last
digits of its logits differ. Where the two best tokens are closer than that, either may win, and
everything after it is another text. The target's own logits at the first difference distinguish
such a tie from a fault; what comes after it says nothing and is not counted.

V is the vocabulary size; positions count output tokens from 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, Protocol

import numpy as np

from specpipe.speculative.noise import Floats

Verdict = Literal["identical", "tie", "fault"]

_SEVERITY: tuple[Verdict, ...] = ("identical", "tie", "fault")


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """Returns the worst of some verdicts; of none it is "identical"."""
    return max(verdicts, key=_SEVERITY.index, default="identical")


@dataclass(frozen=True)
class Stream:
    """The output of one request.

    finish_reason  "stop" where an end id ended it, which is not among the token ids
    error          why there is no whole output
    """

    token_ids: tuple[int, ...]
    finish_reason: str | None = None
    error: str | None = None


class Choice(Protocol):
    """How the target chooses the token at one position."""

    @property
    def token_id(self) -> int:
        """The token that it chooses."""

    @property
    def magnitude(self) -> float:
        """The size of its largest logit, which the unit in the last place goes by."""

    def shortfall(self, token_ids: Collection[int]) -> float:
        """Returns what the best of these tokens lacks to be chosen, as a difference of two logits.

        0 for the token that is chosen, infinity for one that never is.
        """


@dataclass(frozen=True, eq=False)
class GreedyChoice:
    """The largest of the target's logits [V] wins."""

    logits: Floats

    @property
    def token_id(self) -> int:
        return int(self.logits.argmax())

    @property
    def magnitude(self) -> float:
        return float(abs(self.logits.max()))

    def shortfall(self, token_ids: Collection[int]) -> float:
        return float(self.logits.max() - self.logits[list(token_ids)].max())


@dataclass(frozen=True, kw_only=True)
class TieThreshold:
    """How large the margin of a tie may be.

    dtype             what the engine computes in
    block_difference  how much the target's logit differences move with the shape of a forward
    rounding          what a quantized target rounds while it runs, as words, which makes them move
    fixed             holds instead of all that
    """

    dtype: str
    block_difference: float = 0.0
    rounding: str | None = None
    fixed: float | None = None

    def at(self, magnitude: float) -> float:
        """Returns the threshold where the best logit is that large."""
        if self.fixed is not None:
            return self.fixed
        return max(unit_in_last_place(self.dtype, magnitude), self.block_difference)

    def __str__(self) -> str:
        if self.fixed is not None:
            return f"a margin of at most {self.fixed:g}"
        text = (
            f"a margin of at most one unit in the last place of {self.dtype}, or "
            f"{self.block_difference:.3g}: what 99.9 % of the target's own logit differences "
            "move by between block shapes"
        )
        if self.rounding is None:
            return text
        return f"{text} (it rounds {self.rounding}, so that a last digit becomes a whole step)"


def unit_in_last_place(dtype: str, magnitude: float) -> float:
    """Returns the step from a number of that size to the next larger one.

    bfloat16 has the exponents of float32 and 16 bits less of its fraction.
    """
    if dtype == "float16":
        return float(np.spacing(np.float16(magnitude)))
    step = float(np.spacing(np.float32(magnitude)))
    return step * 2.0**16 if dtype == "bfloat16" else step


@dataclass(frozen=True, kw_only=True)
class FirstDifference:
    """The first difference of two streams; an id is None where a stream ends there.

    margin   what the worse of both tokens lacks to be the target's choice, as a logit difference;
             None where no token was at stake, or the token can never be chosen
    in_ulps  the margin in units of the last place
    """

    position: int
    expected_id: int | None
    found_id: int | None
    margin: float | None = None
    in_ulps: float | None = None
    threshold: float | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        ids = [
            "an end" if token_id is None else str(token_id)
            for token_id in (self.expected_id, self.found_id)
        ]
        text = f"position {self.position}: {ids[1]} instead of {ids[0]}"
        if self.margin is None:
            return text
        return (
            f"{text}, margin {self.margin:.6g} = {self.in_ulps:.3g} units in the last place "
            f"(threshold {self.threshold:.3g})"
        )


@dataclass(frozen=True)
class StreamComparison:
    """The verdict over two streams, and what it rests on; reason is a sentence for a fault."""

    verdict: Verdict
    divergence: FirstDifference | None = None
    reason: str | None = None


IDENTICAL = StreamComparison("identical")


def compare(
    expected: Stream,
    other: Stream,
    choice_at: Callable[[int], Choice],
    threshold: TieThreshold,
    end_token_ids: Collection[int] = (),
) -> StreamComparison:
    """Compares the target's own stream with another one of the same request.

    choice_at gives the target's choice at a position, after the tokens that both streams have
    before it. It is called for the first difference only.
    """
    for stream in (expected, other):
        if stream.error is not None:
            return StreamComparison("fault", reason=f"a request failed: {stream.error}")
    position = _first_difference(expected.token_ids, other.token_ids)
    if position is None:
        if expected.finish_reason != other.finish_reason:
            reasons = f"{other.finish_reason} instead of {expected.finish_reason}"
            return StreamComparison("fault", reason=f"equal tokens end otherwise: {reasons}")
        return IDENTICAL
    ids = [_id_at(stream, position) for stream in (expected, other)]
    divergence = FirstDifference(position=position, expected_id=ids[0], found_id=ids[1])
    for stream, token_id in zip((expected, other), ids, strict=True):
        if token_id is None and not (stream.finish_reason == "stop" and end_token_ids):
            return StreamComparison(
                "fault", divergence, f"a stream just ends at position {position}, without an end id"
            )
    choice = choice_at(position)
    shortfalls = [choice.shortfall(end_token_ids if i is None else (i,)) for i in ids]
    return _judge(divergence, choice.magnitude, max(shortfalls), threshold)


def _judge(
    divergence: FirstDifference, magnitude: float, margin: float, threshold: TieThreshold
) -> StreamComparison:
    allowed = threshold.at(magnitude)
    if not math.isfinite(margin):
        return StreamComparison(
            "fault", divergence, f"{divergence}, a token that the target can never choose"
        )
    divergence = FirstDifference(
        position=divergence.position,
        expected_id=divergence.expected_id,
        found_id=divergence.found_id,
        margin=margin,
        in_ulps=margin / unit_in_last_place(threshold.dtype, magnitude),
        threshold=allowed,
    )
    if margin <= allowed:
        return StreamComparison("tie", divergence)
    return StreamComparison("fault", divergence, str(divergence))


def _first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    shared = min(len(one), len(other))
    for position in range(shared):
        if one[position] != other[position]:
            return position
    return None if len(one) == len(other) else shared


def _id_at(stream: Stream, position: int) -> int | None:
    return stream.token_ids[position] if position < len(stream.token_ids) else None
