"""Who is under load: sides, their settings, and what a process that measures one is told.

A setting is how a side makes its tokens:

ours    alone, k1, k2, …: so many draft tokens; adaptive: as many as pay, by the draft or copied
        from the text. Before it may stand how another pair than the usual one differs, in one word
        or several (drafts-k2, parallel-drafts-k8):
        drafts: copies nothing; noise: so too, and the weights of its draft are noise; half: has
        half the KV memory that the closed loop of most streams wants; reuse: keeps what it has
        read of prompts for others that begin alike; parallel: its draft is --parallel-draft, which
        proposes in one pass; fp8, awq: the target's linears are in FP8, or in INT4 as int4_awq
        stores them (rounded to nearest: gpu/tensors.py); fp8draft, awqdraft: so are the draft's
vllm    alone; invariant: alone in its batch-invariant mode; reuse: alone with prefix caching;
        draft-2: so many draft tokens of the draft; draft-parallel-8: of
        --parallel-draft, in one pass; ngram-8: so many copied from the text; and by-load behind
        any of them (ngram-8-by-load): its number of draft tokens by batch size
triton  as ours, of a server that runs already, with the pair that it has

Ours are measured in one process, whose pairs share the target's weights; each of vLLM's has one of
its own, as its engine has one setting.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Protocol

from benchmarks.load.arrivals import Arrivals
from benchmarks.load.chats import Chats
from benchmarks.load.closed_loop import Load
from benchmarks.load.loop import Answer, AnyLoad, Loop
from benchmarks.load.reading import Readings

SIDES = ("ours", "vllm", "triton")
FORMATS: dict[str, Literal["fp8", "int4_awq"]] = {"fp8": "fp8", "awq": "int4_awq"}
"""By the word that a setting has for it."""
_WORDS = {"drafts", "noise", "half", "reuse", "parallel"}.union(
    *({word, f"{word}draft"} for word in FORMATS)
)
_VLLM_DRAFTS = re.compile(r"(draft|draft-parallel|ngram)-([0-9]+)(-by-load)?")
_LOADS: dict[str, type[Any]] = {kind.__name__: kind for kind in (Load, Arrivals, Chats, Readings)}


@dataclass(frozen=True)
class Process:
    """What a process that measures one side is told when it starts; JSON-able.

    settings     that it is measured in; of vLLM one
    draft        a checkpoint folder, as target
    parallel     that of a draft that proposes in one pass; empty: there is none
    sizes        what both are inflated to in GPU memory, draft first; empty: they are as they are
    positions    the most of an inflated one; 0: as the small one has them
    loads        of each load how many are asked at once, and the tokens of the longest text; closed
                 loops of the usual prompts first
    most_drafted the most draft tokens that a request asks for, or that adaptive ones get
    options      what only this side knows of
    """

    side: str
    settings: Sequence[str]
    target: str
    draft: str
    parallel: str = ""
    sizes: Sequence[str] = ()
    positions: int = 0
    loads: Sequence[Sequence[int]] = ((128, 336),)
    most_drafted: int = 4
    dtype: str = "bfloat16"
    device: str = "cuda"
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def max_streams(self) -> int:
        return max(streams for streams, _ in self.loads)

    @property
    def max_length(self) -> int:
        return max(length for _, length in self.loads)

    @property
    def name(self) -> str:
        return f"{self.side} {self.settings[0]}" if self.side == "vllm" else self.side


@dataclass(frozen=True)
class Point:
    """One measurement: a setting under a load, with its prompts."""

    setting: str
    load: AnyLoad
    prompts: Sequence[Sequence[int]]

    @classmethod
    def from_json(cls, told: dict[str, Any]) -> Point:
        return cls(told["setting"], _LOADS[told["kind"]](**told["load"]), told["prompts"])

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "kind": type(self.load).__name__}


@dataclass(frozen=True)
class Emitted:
    """Tokens that a step gave one answer."""

    number: int
    token_ids: Sequence[int]
    is_last: bool


@dataclass
class Counts:
    """What happened in a loop; 0 also where a side does not count it.

    num_drafted    draft tokens
    num_accepted   those of them that were accepted
    num_cached     tokens of prompts that were not read, as others had begun alike
    num_preempted  times that a request gave way to others
    num_late       kernels that were compiled and graphs that were recorded meanwhile; None: not
                   counted
    """

    num_drafted: int = 0
    num_accepted: int = 0
    num_cached: int = 0
    num_preempted: int = 0
    num_late: int | None = None


class Side(Protocol):
    """What a process measures."""

    about: dict[str, Any]
    """Versions and settings, as the report is to have them."""

    def run(self, setting: str, loop: Loop) -> Counts:
        """Asks all that a loop says, to its end; returns what there is to count of it."""


class Stepped(Protocol):
    """A side that is driven step by step."""

    def submit(self, answer: Answer) -> None:
        """Asks for an answer that no token ends."""

    def step(self) -> Iterable[Emitted]:
        """Waits for news of any answer."""


def drive(side: Stepped, loop: Loop) -> None:
    """Asks all that a loop says, between the steps of a side, until all has ended."""
    num_busy = 0
    while True:
        while (answer := loop.ask()) is not None:
            side.submit(answer)
            num_busy += 1
        if num_busy:
            for emitted in side.step():
                if emitted.token_ids:
                    loop.take(emitted.number, len(emitted.token_ids), emitted.token_ids)
                num_busy -= emitted.is_last
        elif (pause := loop.pause()) is not None:
            time.sleep(pause)
        else:
            return


def check_setting(side: str, setting: str) -> None:
    """Raises ValueError for one that a side does not have."""
    if side == "vllm":
        is_known = setting in ("alone", *_ALONE) or vllm_drafts(setting) is not None
    else:
        pair, way = pair_of(setting), _way(setting)
        is_known = way in ("alone", "adaptive") or (way[:1] == "k" and way[1:].isdecimal())
        is_known &= words_of(pair) <= (_WORDS if side == "ours" else set())
    if not is_known:
        raise ValueError(f"{side} has no setting '{setting}'")


def pair_of(setting: str) -> str:
    """Returns which pair a setting of ours is of."""
    return setting.rpartition("-")[0]


def words_of(pair: str) -> set[str]:
    """Returns how a pair differs from the usual one."""
    return {*pair.split("-")} - {""}


def format_of(setting: str) -> str | None:
    """Returns the word for the format of the target in a setting of ours; None: it is plain."""
    return next((word for word in FORMATS if word in words_of(pair_of(setting))), None)


def is_parallel(setting: str) -> bool:
    """Says whether a setting of ours or vLLM's has the draft that proposes in one pass."""
    return "parallel" in setting.split("-")


def vllm_drafts(setting: str) -> tuple[str, int, bool] | None:
    """Returns what drafts in a setting of vLLM, how many tokens, and whether by batch size."""
    found = _VLLM_DRAFTS.fullmatch(setting)
    return None if found is None else (found[1], int(found[2]), found[3] is not None)


def _way(setting: str) -> str:
    return setting.rpartition("-")[2]


def num_draft_tokens(setting: str) -> int | None:
    """Returns how many draft tokens requests of ours ask for; None: as many as pay."""
    way = _way(setting)
    return {"alone": 0, "adaptive": None}[way] if way[0] == "a" else int(way[1:])


def depends_on_text(setting: str) -> bool:
    """Says whether texts change how fast a setting is."""
    return not setting.endswith("alone") and pair_of(setting) != "noise" and setting not in _ALONE


_ALONE = ("invariant", "reuse")
