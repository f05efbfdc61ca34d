"""Sets of prompts: built-in ones and the user's own, at their own lengths, fixed or drawn ones.

A set is a JSON Lines file. A line is `{"prompt": "…"}` or `{"messages": [{"role": …}, …]}`, and may
have `name`, `kind` (for tables), `group` (what it was taken from) and `max_tokens` (for the
answer). In a text file each line that is not blank is a prompt.
"""

from __future__ import annotations

import hashlib
import importlib.resources
import itertools
import json
import os
import random
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from specpipe.checkpoints.files import quoted
from specpipe.errors import ConfigError, RequestError, is_utf8
from specpipe.machine.own_json import reason
from specpipe.text.chat_messages import check_messages

BUILT_IN = ("chat", "code", "summarization")
"""The sets that come with specpipe, by name; written for it."""

_SUFFIXES = (".jsonl", ".txt")
_KEYS = ("name", "kind", "group", "prompt", "messages", "max_tokens")
_MAX_NUM_TRIES = 8  # to cut a text to a length; a cut that is off by a token is good enough


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One prompt: exactly one of text and messages.

    name        unique in its set
    kind        what tables group by
    max_tokens  of its answer; None: what the evaluation says
    group       prompts of one group are trained on together or not at all; None: it is alone
    """

    name: str
    kind: str
    text: str | None = None
    messages: tuple[Mapping[str, Any], ...] | None = None
    max_tokens: int | None = None
    group: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Returns the fields that are set, by name."""
        return {key: value for key, value in asdict(self).items() if value is not None}


@dataclass(frozen=True)
class PromptSet:
    """Prompts and where they come from: a built-in set's name, or a file."""

    source: str
    prompts: tuple[Prompt, ...]

    @property
    def digest(self) -> str:
        """SHA-256 over everything that is asked, in its order."""
        return digest(self.prompts)


@dataclass(frozen=True)
class Lengths:
    """Numbers of tokens: one for all, or drawn evenly from a range, its ends included."""

    low: int
    high: int

    @classmethod
    def parse(cls, text: str) -> Lengths:
        """Reads `128` or `64-256`."""
        match = re.fullmatch(r"(\d{1,7})(?:-(\d{1,7}))?", text.strip(), re.ASCII)
        if match:
            low = int(match[1])
            high = int(match[2] or low)
            if 1 <= low <= high:
                return cls(low, high)
        raise ConfigError(
            f"{quoted(text)} is no length: expected tokens as in 128, or 64-256 to draw"
        )

    def draw(self, count: int, *, seed: int) -> list[int]:
        """Returns that many lengths; the same ones for the same seed."""
        generator = random.Random(seed)
        return [generator.randint(self.low, self.high) for _ in range(count)]

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low}-{self.high}"


class PromptTokenizer(Protocol):
    """What lengths need of a tokenizer; `specpipe.text.tokenizer.Tokenizer` has it."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, token_ids: Sequence[int]) -> str: ...


def load_prompts(source: str | Path, *, limit: int | None = None) -> PromptSet:
    """Returns a built-in set by its name, or that of a .jsonl or .txt file; up to `limit` prompts.

    Raises ConfigError with the file, the line, and what was expected there.
    """
    prompts = tuple(iterate_prompts(source, limit=limit))
    seen: set[str] = set()
    for prompt in prompts:
        if prompt.name in seen:
            raise ConfigError(f"{source}: two prompts are named {prompt.name!r}")
        seen.add(prompt.name)
    return PromptSet(str(source), prompts)


ReadFields = Callable[[Mapping[str, Any], str], Mapping[str, Any]]
"""Returns the keys of a prompt out of an object and where it stands."""


def iterate_prompts(
    source: str | Path, *, limit: int | None = None, read_fields: ReadFields | None = None
) -> Iterator[Prompt]:
    """Yields the prompts of a set as `load_prompts` has them, one at a time in memory; names may
    come twice.

    read_fields  for lines that have other keys, too; None: those are refused
    """
    path = Path(source)
    name, kind = (
        (f"{source}.jsonl", str(source))
        if _is_built_in(source)
        else (_as_text(path.name), _as_text(path.stem))
    )
    where = name if _is_built_in(source) else str(path)
    lines = _lines(prompts_path(source))
    parse = _texts if name.endswith(".txt") else partial(_objects, read_fields=read_fields)
    prompt = None
    for prompt in itertools.islice(parse(lines, name=name, kind=kind, where=where), limit):
        yield prompt
    if prompt is None:
        raise ConfigError(f"{where} has no prompts")


def prompts_path(source: str | Path) -> Path:
    """Returns the file of a set."""
    if not _is_built_in(source):
        return Path(source)
    return (
        Path(str(importlib.resources.files("specpipe.evaluate")))
        / "prompt_sets"
        / f"{source}.jsonl"
    )


def read_json_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields where each object of a JSON Lines file stands, and the object."""
    yield from _json_lines(_lines(path), str(path))


def parse_prompt(fields: Mapping[str, Any], *, where: str, name: str, kind: str) -> Prompt:
    """Returns the prompt of one line; `where` begins messages, `name` and `kind` are defaults."""
    for key in fields:
        if key not in _KEYS:
            raise ConfigError(f"{where}: unknown key {quoted(key)}: expected {', '.join(_KEYS)}")
    text, messages, max_tokens = (fields.get(k) for k in ("prompt", "messages", "max_tokens"))
    if (text is None) == (messages is None):
        raise ConfigError(f"{where}: expected either prompt or messages")
    if text is not None and not (isinstance(text, str) and text):
        raise ConfigError(f"{where}: prompt is {quoted(text)}: expected a text that is not empty")
    for key, value in fields.items():
        if not is_utf8(json.dumps(value, ensure_ascii=False)):
            raise ConfigError(f"{where}: {key} holds half of a character (a surrogate)")
    if messages is not None:
        try:
            check_messages(messages)
        except RequestError as exc:
            raise ConfigError(f"{where}: {exc}") from exc
    if max_tokens is not None and not (type(max_tokens) is int and max_tokens > 0):
        raise ConfigError(
            f"{where}: max_tokens is {quoted(max_tokens)}: expected a positive whole number"
        )
    for key in ("name", "kind", "group"):
        if not isinstance(fields.get(key, ""), str):
            raise ConfigError(f"{where}: {key} is {quoted(fields[key])}: expected a text")
    return Prompt(
        name=fields.get("name", name),
        kind=fields.get("kind", kind),
        text=text,
        messages=None if messages is None else tuple(messages),
        max_tokens=max_tokens,
        group=fields.get("group", fields.get("name")),
    )


def digest(prompts: Sequence[Prompt]) -> str:
    """Returns SHA-256 over all that is asked, in its order."""
    texts = [[p.text, p.messages, p.max_tokens] for p in prompts]
    return hashlib.sha256(json.dumps(texts, ensure_ascii=False).encode()).hexdigest()


def as_messages(prompts: Sequence[Prompt]) -> tuple[Prompt, ...]:
    """Returns the prompts with each text as a conversation: one message of a user."""
    return tuple(
        prompt
        if prompt.text is None
        else replace(prompt, text=None, messages=({"role": "user", "content": prompt.text},))
        for prompt in prompts
    )


def with_max_tokens(prompts: Sequence[Prompt], lengths: Lengths, *, seed: int) -> list[Prompt]:
    """Returns the prompts with other lengths of answers, whatever their file says."""
    drawn = lengths.draw(len(prompts), seed=seed)
    return [replace(p, max_tokens=n) for p, n in zip(prompts, drawn, strict=True)]


def with_lengths(
    prompts: Sequence[Prompt], lengths: Lengths, tokenizer: PromptTokenizer, *, seed: int
) -> list[Prompt]:
    """Returns the prompts with each text cut or lengthened to a number of tokens.

    A text that is too short goes on with the next ones of the set, and with itself in the end. The
    cut can miss the length by a token or two where the end of the text, cut off, is written with
    other tokens: what was really read is what the server reports.
    """
    texts = [prompt.text for prompt in prompts]
    if None in texts:
        name = prompts[texts.index(None)].name
        raise ConfigError(f"{name} has messages: only the length of a text can be changed")
    drawn = lengths.draw(len(prompts), seed=seed)
    resized = []
    for index, (prompt, num_tokens) in enumerate(zip(prompts, drawn, strict=True)):
        text = "".join(f"{following}\n\n" for following in [*texts[index:], *texts[:index]])
        while len(tokenizer.encode(text)) < num_tokens:
            text += text
        resized.append(replace(prompt, text=_cut(text, num_tokens, tokenizer)))
    return resized


def _cut(text: str, num_tokens: int, tokenizer: PromptTokenizer) -> str:
    """Returns a text cut to about that many tokens as the tokenizer will count them again."""
    token_ids = tokenizer.encode(text)
    num_kept = num_tokens
    closest = text
    for _ in range(_MAX_NUM_TRIES):
        cut = tokenizer.decode(token_ids[:num_kept])
        difference = num_tokens - len(tokenizer.encode(cut))
        if abs(difference) < abs(num_tokens - len(tokenizer.encode(closest))):
            closest = cut
        if difference == 0 or num_kept + difference < 1:
            break
        num_kept += difference
    return closest


def _is_built_in(source: str | Path) -> bool:
    return str(source) in BUILT_IN


def _lines(path: Path) -> Iterator[str]:
    """Yields the lines of a file without their ends."""
    if path.suffix not in _SUFFIXES:
        raise ConfigError(
            f"{path} is no set of prompts: expected one of {', '.join(BUILT_IN)}, or a .jsonl or "
            ".txt file"
        )
    try:
        if path.exists() and not path.is_file():
            raise ConfigError(f"{path} cannot be read: it is no regular file")
        # A mark of the byte order is no part of a text. JSON may hold U+2028 and the like inside a
        # string: a line ends at \n alone, or at \r\n.
        with path.open(encoding="utf-8-sig", newline="\n") as file:
            for line in file:
                yield line.removesuffix("\n").removesuffix("\r")
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"{path} cannot be read: {reason(exc)}") from exc


def _as_text(name: str) -> str:
    """Returns a file's name, of which what is no UTF-8 is replaced."""
    return os.fsencode(name).decode(errors="replace")


def _texts(lines: Iterable[str], *, name: str, kind: str, where: str) -> Iterator[Prompt]:
    for number, line in enumerate(lines, start=1):
        if line.strip():
            yield Prompt(name=f"{name}:{number}", kind=kind, text=line)


def _objects(
    lines: Iterable[str], *, name: str, kind: str, where: str, read_fields: ReadFields | None
) -> Iterator[Prompt]:
    for at, of_line in _json_lines(lines, where):
        fields = of_line if read_fields is None else read_fields(of_line, at)
        yield parse_prompt(fields, where=at, name=f"{name}{at.removeprefix(where)}", kind=kind)


def _json_lines(lines: Iterable[str], where: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for index, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError) as exc:
            raise ConfigError(f"{where}:{index}: not JSON: {exc}") from exc
        if not isinstance(fields, dict):
            raise ConfigError(f'{where}:{index}: expected an object such as {{"prompt": "…"}}')
        yield f"{where}:{index}", fields
