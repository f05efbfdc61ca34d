"""Rates of what gpu_load.py measured, and how they stand to vLLM's and to the goals."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.gpu.goals import Goal

Line = Mapping[str, Any]

OURS, VLLM, TRITON = "ours", "vllm", "triton"
_LONG = 8_000
"""Prompts of which first tokens have a goal."""
_OPEN = ("Arrivals", "Chats", "Readings")
"""Loads of which no rate is told."""
_SHORT_GAP_MS = 100
"""Gaps up to here have no goal."""


@dataclass(frozen=True, order=True)
class Place:
    """Where points of all sets and rounds are one figure."""

    prompt_tokens: int
    side: str
    setting: str
    streams: int


class Rates:
    """Tokens a second by place: the mean over sets of the median over rounds.

    points  what has a rate
    others  what was measured under other loads
    """

    def __init__(self, lines: Iterable[Line]) -> None:
        lines = list(lines)
        self.points = [line for line in lines if "tokens_per_second" in line]
        self.others = [
            line
            for line in lines
            if line.get("load") in _OPEN and not {"error", "failed"} & {*line}
        ]
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
    """A setting of one side over the best of others; names are what theirs begin with.

    bounds  what it must not go below, by streams; for others it is only told
    """

    what: str
    setting: str
    side: str
    names: tuple[str, ...]
    bounds: Mapping[int, float]
    of: str = OURS


_NO_DRAFT, _WITH_DRAFT, _COPIED = ("alone",), ("alone", "draft"), ("ngram",)
_ALL = (*_WITH_DRAFT, *_COPIED)
_ALWAYS = dict.fromkeys((1, 2, 4, 8, 16, 32, 64, 128), 0.95)
_HALF = {32: 0.8, 128: 0.8}
_AT_LOAD = {32: 0.9, 128: 0.8}
RATIOS = (
    Ratio("alone over vLLM alone", "alone", VLLM, _NO_DRAFT, {1: 1.2, 8: 1.15, 32: 1.1, 128: 1.0}),
    Ratio("alone over vLLM batch-invariant", "alone", VLLM, ("invariant",), {}),
    Ratio("adaptive over vLLM's best of all", "adaptive", VLLM, _ALL, {8: 1.7, 32: 1.4}),
    Ratio("adaptive over vLLM's best of alone and draft", "adaptive", VLLM, _WITH_DRAFT, {1: 2.1}),
    Ratio("adaptive over vLLM's best n-gram", "adaptive", VLLM, _COPIED, {1: 2.5}),
    Ratio("adaptive over alone", "adaptive", OURS, _NO_DRAFT, {128: 0.98}),
    Ratio("adaptive over the best fixed K", "adaptive", OURS, ("alone", "k", "drafts-k"), _ALWAYS),
    Ratio(
        "no copies: over vLLM's best of alone and draft", "drafts-adaptive", VLLM, _WITH_DRAFT, {}
    ),
    Ratio(
        "no copies: adaptive over the best fixed K",
        "drafts-adaptive",
        OURS,
        ("alone", "drafts-alone", "drafts-k"),
        _ALWAYS,
    ),
    Ratio(
        "no copies: a parallel draft, adaptive, over the best with another",
        "parallel-drafts-adaptive",
        OURS,
        ("alone", "drafts-"),
        {},
    ),
    Ratio(
        "a draft of noise over alone",
        "noise-adaptive",
        OURS,
        ("alone", "noise-alone"),
        dict.fromkeys((1, 8, 32, 128), 0.98),
    ),
    Ratio("half the KV memory over all", "half-adaptive", OURS, ("adaptive",), _HALF),
    Ratio("alone through Triton over in process", "alone", OURS, ("alone",), _AT_LOAD, TRITON),
    Ratio("adaptive through Triton over in process", "adaptive", OURS, ("adaptive",), {}, TRITON),
)


def ratio(rates: Rates, what: Ratio, prompt_tokens: int, streams: int) -> tuple[float, str] | None:
    """Returns a ratio, and what it is over; None where either was not measured."""
    ours = rates.at(Place(prompt_tokens, what.of, what.setting, streams))
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
    return [*found, _first_token_goal(rates), *_triton_goals(rates), *_other_goals(rates)]


def _triton_goals(rates: Rates) -> Iterator[Goal]:
    """Gaps through Triton, which may be 100 ms or two rounds: two gaps in process."""
    length = min(rates.prompt_lengths(), default=0)
    for streams in _AT_LOAD:
        what = f"gap of chunks through Triton (99th percentile, ms) at {streams} streams"
        gap, a_round = (
            median_of(rates.lines(Place(length, side, "alone", streams)), "chunk_gap", key)
            for side, key in ((TRITON, "p99_ms"), (OURS, "p50_ms"))
        )
        bound = max(2 * (a_round or 0.0), _SHORT_GAP_MS)
        yield Goal("load", what, gap, bound, is_ceiling=True)


def _other_goals(rates: Rates) -> Iterator[Goal]:
    """First tokens of chats, and gaps of streams while a long prompt is read."""
    reused, anew = (_first_tokens(rates, name) for name in ("reuse-adaptive", "adaptive"))
    for chats in sorted(reused.keys() & anew.keys()):
        what = f"first token with reuse of prompts over without at {chats} chats"
        note = f"{reused[chats]:.1f} ms, {anew[chats]:.1f} ms"
        yield Goal("load", what, reused[chats] / anew[chats], 0.3, is_ceiling=True, note=note)
    for setting in ("alone", "adaptive"):
        lines = _others(rates, "Readings", setting)
        worst = median_of(lines, "gap_meanwhile", "p99_ms")
        usual = median_of(lines, "gap_otherwise", "p50_ms")
        figure = None if worst is None or usual is None else worst / usual
        note = "" if figure is None else f"{worst:.1f} ms, {usual:.1f} ms"
        what = f"{setting}: gaps while a long prompt is read, 99th percentile over usual ones"
        yield Goal("load", what, figure, 2.5, is_ceiling=True, note=note)


def _others(rates: Rates, load: str, setting: str) -> list[Line]:
    """What one of our settings came to under a load of which no rate is told."""
    place = (OURS, setting, load)
    return [x for x in rates.others if (x["side"], x["setting"], x["load"]) == place]


def _first_tokens(rates: Rates, setting: str) -> dict[int, float]:
    """By the number of chats, the mean over all turns in ms; the median over rounds."""
    by_chats: dict[int, list[float]] = {}
    for line in _others(rates, "Chats", setting):
        by_chats.setdefault(line["streams"], []).append(line["mean_first_token_ms"])
    return {chats: statistics.median(means) for chats, means in by_chats.items()}


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
