"""Who is under load: sides, their settings, and what a process that measures one is told.

A setting is how a side makes its tokens. Those of one kind of process are measured in one:

ours    alone, k1, k2, …: so many draft tokens; adaptive
        lookup: adaptive, and may copy from the text
        noise-alone, noise: alone and adaptive with a draft whose weights are noise
vllm    alone; invariant: alone in its batch-invariant mode; draft-2: so many draft tokens of the
        draft; ngram-8: so many copied from the text; and by-load behind either (ngram-8-by-load):
        its number of draft tokens by batch size; a process each, as its engine has one setting
triton  as ours, of a server that runs already; lookup is as its pair was packaged
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from benchmarks.load.closed_loop import Answer, ClosedLoop, Load

SIDES = ("ours", "vllm", "triton")


@dataclass(frozen=True)
class Process:
    """What a process that measures one side is told when it starts; JSON-able.

    kind         what its settings have in common: "", "lookup", "noise"; of vLLM its setting
    draft        a checkpoint folder, as target
    sizes        what both are inflated to in GPU memory, draft first; empty: they are as they are
    positions    the most of an inflated one; 0: as the small one has them
    max_streams  the most at once
    max_length   the most tokens of a prompt and its answer
    most_drafted the most draft tokens that a request asks for, or that adaptive ones get
    options      what only this side knows of
    """

    side: str
    kind: str
    target: str
    draft: str
    sizes: tuple[str, ...] = ()
    positions: int = 0
    max_streams: int = 128
    max_length: int = 336
    most_drafted: int = 4
    dtype: str = "bfloat16"
    device: str = "cuda"
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.side} {self.kind}".rstrip()


@dataclass(frozen=True)
class Point:
    """One measurement: a setting under a load, with prompts that streams take in turn."""

    setting: str
    load: Load
    prompts: Sequence[Sequence[int]]

    @classmethod
    def from_json(cls, told: dict[str, Any]) -> Point:
        return cls(told["setting"], Load(**told["load"]), told["prompts"])

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def prompt(self, answer: Answer) -> Sequence[int]:
        return self.prompts[answer.number % len(self.prompts)]


@dataclass(frozen=True)
class Emitted:
    """Tokens that a step gave one answer."""

    number: int
    token_ids: Sequence[int]
    is_last: bool


@dataclass
class Counts:
    """Draft tokens of a loop, and those of them that were accepted.

    num_drafted  0 also where a side does not count them
    num_late     kernels that were compiled and graphs that were recorded meanwhile; None: not
                 counted
    """

    num_drafted: int = 0
    num_accepted: int = 0
    num_late: int | None = None


class Side(Protocol):
    """What a process measures."""

    about: dict[str, Any]
    """Versions and settings, as the report is to have them."""

    def run(self, point: Point, loop: ClosedLoop) -> Counts:
        """Runs a closed loop to its end; returns what there is to count of it."""


class Stepped(Protocol):
    """A side that is driven step by step."""

    def submit(self, answer: Answer, prompt: Sequence[int], setting: str) -> None:
        """Asks for an answer that no token ends."""

    def step(self) -> Iterable[Emitted]:
        """Waits for news of any answer."""


def drive(side: Stepped, point: Point, loop: ClosedLoop) -> None:
    """Keeps all streams of a side busy until there is nothing more to ask, and all has ended."""

    def ask() -> bool:
        answer = loop.ask()
        if answer is not None:
            side.submit(answer, point.prompt(answer), point.setting)
        return answer is not None

    num_busy = sum(ask() for _ in range(point.load.streams))
    while num_busy:
        for emitted in side.step():
            if emitted.token_ids:
                loop.take(emitted.number, len(emitted.token_ids), emitted.token_ids)
            if emitted.is_last and not ask():
                num_busy -= 1


def kind_of(side: str, setting: str) -> str:
    """Returns the kind of process that measures a setting; raises ValueError for an unknown one."""
    if side == "vllm":
        name, _, rest = setting.partition("-")
        number, _, by_load = rest.partition("-")
        if setting in ("alone", "invariant") or (
            name in ("draft", "ngram") and number.isdecimal() and by_load in ("", "by-load")
        ):
            return setting
    elif setting in ("alone", "adaptive") or (setting[:1] == "k" and setting[1:].isdecimal()):
        return ""
    elif setting == "lookup":
        return setting if side == "ours" else ""
    elif side == "ours" and setting in ("noise", "noise-alone"):
        return "noise"
    raise ValueError(f"{side} has no setting '{setting}'")


def num_draft_tokens(setting: str) -> int | None:
    """Returns how many draft tokens requests of ours ask for; None: as many as pay."""
    if setting.endswith("alone"):
        return 0
    return int(setting[1:]) if setting[0] == "k" else None


def depends_on_text(setting: str) -> bool:
    """Says whether texts change how fast a setting is."""
    return not setting.endswith("alone") and setting not in ("invariant", "noise")
