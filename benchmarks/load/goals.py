"""Rates of what gpu_load.py measured, and how they stand to vLLM's and to the goals."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.gpu.goals import Goal

Line = Mapping[str, Any]

OURS, VLLM = "ours", "vllm"
_LONG = 8_000
"""Prompts of which first tokens have a goal."""


@dataclass(frozen=True, order=True)
class Place:
    """Where points of all sets and rounds are one figure."""

    prompt_tokens: int
    side: str
    setting: str
    streams: int


class Rates:
    """Tokens a second by place: the mean over sets of the median over rounds."""

    def __init__(self, lines: Iterable[Line]) -> None:
        self.points = [line for line in lines if "tokens_per_second" in line]
        self._by_place: dict[Place, list[Line]] = {}
        for line in self.points:
            self._by_place.setdefault(place_of(line), []).append(line)

    def __contains__(self, place: Place) -> bool:
        return place in self._by_place

    def prompt_lengths(self) -> list[int]:
        return sorted({place.prompt_tokens for place in self._by_place})

    def streams(self, prompt_tokens: int) -> list[int]:
        return sorted({p.streams for p in self._by_place if p.prompt_tokens == prompt_tokens})

    def sides(self, prompt_tokens: int) -> list[tuple[str, str]]:
        """Sides with their settings, in the order in which they were first measured."""
        places = (p for p in self._by_place if p.prompt_tokens == prompt_tokens)
        return list(dict.fromkeys((p.side, p.setting) for p in places))

    def lines(self, place: Place) -> list[Line]:
        return self._by_place.get(place, [])

    def of_sets(self, place: Place) -> list[float]:
        """The median over rounds of each set."""
        by_set: dict[str, list[float]] = {}
        for line in self.lines(place):
            by_set.setdefault(line["set"], []).append(line["tokens_per_second"])
        return [statistics.median(rates) for rates in by_set.values()]

    def at(self, place: Place) -> float | None:
        rates = self.of_sets(place)
        return statistics.fmean(rates) if rates else None

    def best(
        self, prompt_tokens: int, side: str, names: Sequence[str], streams: int
    ) -> tuple[str, float] | None:
        """The fastest of settings whose names begin so, and its rate; None: there is none."""
        found = [
            (setting, rate)
            for of_side, setting in self.sides(prompt_tokens)
            if of_side == side and setting.startswith(tuple(names))
            if (rate := self.at(Place(prompt_tokens, side, setting, streams))) is not None
        ]
        return max(found, key=lambda one: one[1], default=None)


def place_of(line: Line) -> Place:
    return Place(line["prompt_tokens"], line["side"], line["setting"], line["streams"])


@dataclass(frozen=True)
class Ratio:
    """A setting of ours over the best of others; names are what theirs begin with.

    bounds  what it must not go below, by streams; for others it is only told
    """

    what: str
    setting: str
    side: str
    names: tuple[str, ...]
    bounds: Mapping[int, float]


_NO_DRAFT, _WITH_DRAFT, _COPIED = ("alone",), ("alone", "draft"), ("ngram",)
_ALL = (*_WITH_DRAFT, *_COPIED)
RATIOS = (
    Ratio("alone over vLLM alone", "alone", VLLM, _NO_DRAFT, {1: 1.2, 8: 1.15, 32: 1.1, 128: 1.0}),
    Ratio("alone over vLLM batch-invariant", "alone", VLLM, ("invariant",), {}),
    Ratio("adaptive over vLLM's best of all", "adaptive", VLLM, _ALL, {8: 1.7, 32: 1.4}),
    Ratio("adaptive over vLLM's best of alone and draft", "adaptive", VLLM, _WITH_DRAFT, {1: 2.1}),
    Ratio("with copies over vLLM's best n-gram", "lookup", VLLM, _COPIED, {1: 2.5}),
    Ratio("with copies over vLLM's best of all", "lookup", VLLM, _ALL, {}),
    Ratio("adaptive over alone", "adaptive", OURS, _NO_DRAFT, {128: 0.98}),
    Ratio(
        "adaptive over the best fixed K",
        "adaptive",
        OURS,
        ("alone", "k"),
        dict.fromkeys((1, 2, 4, 8, 16, 32, 64, 128), 0.95),
    ),
    Ratio("alone over alone through Triton", "alone", "triton", _NO_DRAFT, {}),
    Ratio("adaptive over adaptive through Triton", "adaptive", "triton", ("adaptive",), {}),
    Ratio(
        "a draft of noise over alone",
        "noise",
        OURS,
        ("noise-alone",),
        dict.fromkeys((1, 8, 32, 128), 0.98),
    ),
)


def ratio(rates: Rates, what: Ratio, prompt_tokens: int, streams: int) -> tuple[float, str] | None:
    """Returns a ratio, and what ours is over; None where either was not measured."""
    ours = rates.at(Place(prompt_tokens, OURS, what.setting, streams))
    best = rates.best(prompt_tokens, what.side, what.names, streams)
    if ours is None or best is None:
        return None
    return ours / best[1], best[0]


def goals(rates: Rates) -> list[Goal]:
    """Returns all goals, by the shortest prompts but for first tokens; some without a figure."""
    found = []
    shortest = min(rates.prompt_lengths(), default=0)
    for what in RATIOS:
        for streams, bound in what.bounds.items():
            told = ratio(rates, what, shortest, streams)
            figure, note = (None, "") if told is None else told
            name = f"{what.what} at {streams} stream{'s' if streams > 1 else ''}"
            found.append(Goal("load", name, figure, bound, note=note))
    late = [line["num_late"] for line in rates.points if line.get("num_late") is not None]
    num_late = sum(late) if late else None
    found.append(Goal("load", "compiled or recorded after ready", num_late, 0, is_ceiling=True))
    return [*found, _first_token_goal(rates)]


def _first_token_goal(rates: Rates) -> Goal:
    what = "first token of a long prompt over vLLM's"
    longest = max(rates.prompt_lengths(), default=0)
    ours, theirs = (
        median_of(rates.lines(Place(longest, side, "alone", 1)), "first_token", "p50_ms")
        for side in (OURS, VLLM)
    )
    if longest < _LONG or ours is None or theirs is None:
        return Goal("load", what, None, 1.25, is_ceiling=True)
    note = f"{longest:,} tokens, {ours:.0f} ms, {theirs:.0f} ms"
    return Goal("load", what, ours / theirs, 1.25, is_ceiling=True, note=note)


def median_of(lines: Iterable[Line], name: str, key: str) -> float | None:
    """The median over points of a percentile; None where none has it."""
    values = [line[name][key] for line in lines if line.get(name)]
    return statistics.median(values) if values else None
