"""What gpu_load.py measures: every side under one load after the other, in turns."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TextIO

from benchmarks.load.arrivals import Arrivals
from benchmarks.load.chats import Chats
from benchmarks.load.closed_loop import Load
from benchmarks.load.loop import AnyLoad, Prompt
from benchmarks.load.processes import Child
from benchmarks.load.prompts import prompt_set
from benchmarks.load.reading import Readings
from benchmarks.load.sides import Point, depends_on_text, num_draft_tokens, pair_of, words_of
from specpipe.text.tokenizer import Tokenizer

Settings = Mapping[tuple[str, str], Child]
"""The process of each side's settings."""


class Run:
    """What was measured so far: in memory, and line by line in a file."""

    def __init__(self, out: TextIO | None) -> None:
        self.lines: list[dict[str, Any]] = []
        self._out = out
        self._start = time.monotonic()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._start

    def tell(self, what: str) -> None:
        print(f"{self.seconds:6.1f} s  {what}", file=sys.stderr, flush=True)

    def keep(self, line: dict[str, Any]) -> None:
        self.lines.append(line)
        if self._out is not None:
            print(json.dumps(line), file=self._out, flush=True)

    def capacity(self, side: str, setting: str, prompt_tokens: int) -> float | None:
        """The tokens a second of the last closed loop of most streams; None: there was none."""
        found = [
            (line["streams"], line["tokens_per_second"])
            for line in self.lines
            if (line.get("side"), line.get("setting")) == (side, setting)
            and line.get("prompt_tokens") == prompt_tokens
            and "tokens_per_second" in line
        ]
        return max(reversed(found), key=lambda one: one[0])[1] if found else None


class TimeIsOver(Exception):
    """No further point is to begin."""


class Turns:
    """One round of all points."""

    def __init__(
        self, arguments: argparse.Namespace, run: Run, by_setting: Settings, number: int
    ) -> None:
        self._arguments, self._run, self._number = arguments, run, number
        self._tokenizer = Tokenizer.load(arguments.target)
        self._by_setting = by_setting
        self._order = list(by_setting) if number % 2 == 0 else list(reversed(by_setting))

    def measure(self) -> None:
        """Measures all that is asked for; raises TimeIsOver."""
        arguments = self._arguments
        for length, streams in arguments.loads.items():
            for name in arguments.sets:
                self._closed_loops(name, length, streams)
        for share in arguments.poisson:
            self._arrivals(share)
        for chats in arguments.chats:
            self._chats(chats)
        if arguments.beside:
            self._readings()

    def _closed_loops(self, name: str, length: int, streams: Sequence[int]) -> None:
        arguments = self._arguments
        prompts = self._prompts(length, name=name)
        is_other = length != arguments.prompt_tokens
        most = max(arguments.streams)

        for number in streams:

            def is_asked(side: str, setting: str, number: int = number) -> bool:
                if _keeps_prompts(side, setting) or (is_other and not _is_usual(side, setting)):
                    return False
                if "half" in words_of(pair_of(setting)) and number != most:
                    return False
                return name == arguments.sets[0] or depends_on_text(setting)

            num_requests = max(arguments.requests * number, arguments.least)
            load = Load(number, num_requests, arguments.max_tokens, arguments.seconds)
            self._all(load, prompts, is_asked, set=name)

    def _arrivals(self, share: float) -> None:
        arguments = self._arguments
        length = next(iter(arguments.loads))
        prompts = self._prompts(length)

        def load(side: str, setting: str) -> AnyLoad | None:
            capacity = self._run.capacity(side, setting, length)
            if capacity is None:
                return None
            rate = share * capacity / arguments.max_tokens
            return Arrivals(rate, arguments.arrival_seconds, arguments.max_tokens)

        self._all(load, prompts, _is_usual, share=share)

    def _chats(self, chats: int) -> None:
        arguments = self._arguments
        beginning = self._prompts(arguments.system_tokens, number=1)
        prompts = [*beginning, *self._prompts(arguments.message_tokens)]
        load = Chats(chats, arguments.turns, arguments.chat_tokens)
        self._all(load, prompts, lambda *of: _is_usual(*of) or _keeps_prompts(*of))

    def _readings(self) -> None:
        arguments = self._arguments
        load = Readings(arguments.beside, arguments.beside_tokens, pause=arguments.pause)
        long = self._prompts(arguments.long_tokens, number=load.num_long)
        short = self._prompts(min(arguments.loads))
        self._all(load, [*long, *short], _is_usual, long_tokens=arguments.long_tokens)

    def _prompts(
        self, length: int, *, number: int | None = None, name: str | None = None
    ) -> list[list[int]]:
        arguments = self._arguments
        name = name or arguments.sets[0]
        return prompt_set(
            self._tokenizer, name, number=number or arguments.num_prompts, length=length
        )

    def _all(
        self,
        load: AnyLoad | Callable[[str, str], AnyLoad | None],
        prompts: Sequence[Prompt],
        is_asked: Callable[[str, str], bool],
        **place: Any,
    ) -> None:
        """Puts a load on each side in each setting that is asked."""
        for side, setting in self._order:
            child = self._by_setting[side, setting]
            of_side = load(side, setting) if callable(load) else load
            if of_side is None or not child.is_alive or not is_asked(side, setting):
                continue
            self._point(child, side, Point(setting, of_side, prompts), place)

    def _point(self, child: Child, side: str, point: Point, place: Mapping[str, Any]) -> None:
        arguments, run, load = self._arguments, self._run, point.load
        if run.seconds > arguments.until:
            raise TimeIsOver
        seconds = getattr(load, "seconds", 0.0)
        line = {
            "side": side,
            "setting": point.setting,
            "load": type(load).__name__,
            "set": arguments.sets[0],
            "prompt_tokens": len(point.prompts[0]),
            "max_tokens": load.max_tokens,
            "streams": load.streams,
            "round": self._number,
            **place,
            **child.measure(point, seconds + arguments.point_timeout),
        }
        run.keep(line)
        run.tell(f"{side} {point.setting}, {_what(line)}: {_found(line)}")


def _is_usual(side: str, setting: str) -> bool:
    """Whether what a service would run, and what that is without speculation."""
    if side == "vllm":
        return not _keeps_prompts(side, setting)
    return words_of(pair_of(setting)) <= {"parallel"} and not num_draft_tokens(setting)


def _keeps_prompts(side: str, setting: str) -> bool:
    return setting == "reuse" if side == "vllm" else "reuse" in words_of(pair_of(setting))


def _what(line: Mapping[str, Any]) -> str:
    names = ("load", "set", "prompt_tokens", "streams", "share")
    return " ".join(str(line[name]) for name in names if name in line)


def _found(line: Mapping[str, Any]) -> str:
    if fault := line.get("error") or line.get("failed"):
        return str(fault)
    if "tokens_per_second" in line:
        gave_way = line.get("num_preempted")
        note = f", {gave_way} gave way" if gave_way else ""
        return f"{line['tokens_per_second']:.0f} tokens/s{note}"
    shown = ("requests_per_second", "mean_first_token_ms", "first_token", "gap_meanwhile")
    return " ".join(f"{name} {line[name]}" for name in shown if name in line)
