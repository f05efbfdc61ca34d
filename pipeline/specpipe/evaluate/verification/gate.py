"""A gate on quality: a user's own prompts with expected answers, with speculation on and off.

A line of the file is a prompt as in prompts.py with exactly one of

    "exact": "4"                      the answer, spaces around it aside
    "regex": "(?i)paris"              is found in the answer
    "command": ["python", "grade.py"] gets the answer on its standard input and exits with 0
"""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from specpipe.errors import ConfigError
from specpipe.evaluate.endpoints.base import Endpoint, Question, TimedAnswer, ask
from specpipe.evaluate.prompts import Prompt, as_messages, digest, parse_prompt, read_json_lines

_COMMAND_TIMEOUT_S = 60.0  # after it an answer counts as wrong. A guess.

AnswerCheck = Callable[[str], bool]


@dataclass(frozen=True)
class CheckedPrompt:
    """A prompt, and whether an answer to it is right."""

    prompt: Prompt
    is_right: AnswerCheck


@dataclass(frozen=True, kw_only=True)
class Gate:
    """What a file of prompts and expected answers asks for."""

    source: str
    items: tuple[CheckedPrompt, ...]

    @property
    def digest(self) -> str:
        """SHA-256 over the prompts."""
        return digest([item.prompt for item in self.items])

    def as_chat(self) -> Gate:
        """Returns the same gate with each text as a user's message."""
        prompts = as_messages([item.prompt for item in self.items])
        items = [replace(i, prompt=p) for i, p in zip(self.items, prompts, strict=True)]
        return replace(self, items=tuple(items))


def load_gate(path: Path) -> Gate:
    """Reads a file; raises ConfigError, with the line and what was expected there."""
    items: list[CheckedPrompt] = []
    for where, line in read_json_lines(path):
        fields = dict(line)
        expected = {key: fields.pop(key) for key in _CHECKS if key in fields}
        if len(expected) != 1:
            raise ConfigError(f"{where}: expected exactly one of {', '.join(_CHECKS)}")
        ((kind, value),) = expected.items()
        prompt = parse_prompt(
            fields, where=where, name=f"{path.name}:{len(items) + 1}", kind=path.stem
        )
        items.append(CheckedPrompt(prompt, _CHECKS[kind](value, where)))
    if not items:
        raise ConfigError(f"{path} has no prompts")
    return Gate(source=str(path), items=tuple(items))


def _exact(value: Any, where: str) -> AnswerCheck:
    if not isinstance(value, str):
        raise ConfigError(f"{where}: exact is {value!r}: expected a text")
    return lambda answer: answer.strip() == value.strip()


def _regex(value: Any, where: str) -> AnswerCheck:
    try:
        pattern = re.compile(value)
    except (re.error, TypeError) as exc:
        raise ConfigError(f"{where}: regex is {value!r}: {exc}") from exc
    return lambda answer: pattern.search(answer) is not None


def _command(value: Any, where: str) -> AnswerCheck:
    words = shlex.split(value) if isinstance(value, str) else value
    if not words or not (isinstance(words, list) and all(isinstance(word, str) for word in words)):
        raise ConfigError(f'{where}: command is {value!r}: expected a list such as ["grep", "4"]')

    def is_right(answer: str) -> bool:
        try:
            finished = subprocess.run(
                words, input=answer.encode(), capture_output=True, timeout=_COMMAND_TIMEOUT_S
            )
        except subprocess.TimeoutExpired:
            return False
        except OSError as exc:
            raise ConfigError(f"{where}: command {words[0]} does not run: {exc}") from exc
        return finished.returncode == 0

    return is_right


_CHECKS: Mapping[str, Callable[[Any, str], AnswerCheck]] = {
    "exact": _exact,
    "regex": _regex,
    "command": _command,
}


@dataclass(frozen=True, kw_only=True)
class GateResult:
    """How many prompts were answered right.

    lost  names of those that the target alone answers right and the pair does not
    """

    source: str
    digest: str
    num_prompts: int
    num_right: int
    num_right_target_alone: int
    num_failed: int
    lost: tuple[str, ...]
    min_pass_rate: float | None = None

    @property
    def reason(self) -> str | None:
        """Why the gate is closed, as a sentence; None when it is open."""
        if self.num_failed:
            return f"{self.num_failed} of the gate's requests failed"
        if self.num_right < self.num_right_target_alone:
            return (
                f"with speculation {self.num_right} of {self.num_prompts} answers of the gate are "
                f"right, without it {self.num_right_target_alone}"
            )
        if self.min_pass_rate is not None and self.num_right < self.min_pass_rate * (
            self.num_prompts
        ):
            return (
                f"{self.num_right} of {self.num_prompts} answers of the gate are right, less than "
                f"the share of {self.min_pass_rate:g} that is asked for"
            )
        return None

    def to_json(self) -> dict[str, Any]:
        return {
            "source": self.source,
            "digest": self.digest,
            "verdict": "identical" if self.reason is None else "fault",
            "reason": self.reason,
            "num_prompts": self.num_prompts,
            "num_right": self.num_right,
            "num_right_target_alone": self.num_right_target_alone,
            "num_failed": self.num_failed,
            "lost": list(self.lost),
            "min_pass_rate": self.min_pass_rate,
        }


def ask_gate(
    gate: Gate,
    endpoint: Endpoint,
    *,
    encode: Callable[[Prompt], tuple[int, ...]],
    max_tokens: int,
    num_draft_tokens: int | None,
    at_once: int,
) -> list[TimedAnswer]:
    """Returns the greedy answers to all prompts.

    max_tokens is for prompts that do not say themselves.
    """
    questions = [
        Question(
            token_ids=encode(item.prompt),
            max_tokens=item.prompt.max_tokens or max_tokens,
            num_draft_tokens=num_draft_tokens,
            starts_text=item.prompt.messages is not None,
        )
        for item in gate.items
    ]
    return ask(endpoint, questions, at_once=at_once)


def judge_gate(
    gate: Gate,
    *,
    alone: Sequence[TimedAnswer],
    speculative: Sequence[TimedAnswer],
    min_pass_rate: float | None = None,
) -> GateResult:
    """Returns which answers are right, those of the target alone and those of the pair."""
    right_alone, right = _are_right(gate, alone), _are_right(gate, speculative)
    return GateResult(
        source=gate.source,
        digest=gate.digest,
        num_prompts=len(gate.items),
        num_right=sum(right),
        num_right_target_alone=sum(right_alone),
        num_failed=sum(not answer.is_complete for answer in (*alone, *speculative)),
        lost=tuple(
            item.prompt.name
            for item, was, now in zip(gate.items, right_alone, right, strict=True)
            if was and not now
        ),
        min_pass_rate=min_pass_rate,
    )


def _are_right(gate: Gate, answers: Sequence[TimedAnswer]) -> list[bool]:
    return [a.is_complete and i.is_right(a.text) for a, i in zip(answers, gate.items, strict=True)]
