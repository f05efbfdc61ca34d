"""A flag of another server: the setting that it is here, or why it is none."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, Literal

from specpipe.errors import ConfigError, show

Kind = Literal[
    "text",
    "whole",
    "vllm size",
    "sglang size",
    "number",
    "switch",
    "several",
    "mapping",
    "ranges",
    "any",
    "optional",
]

METHOD = "method"
"""What drafts, where a setting's key stands: `draft_model` or `ngram`. It is no setting."""

NUM_VERIFIED = "verified"
"""Tokens that a step verifies, where a setting's key stands: of a chain, one more than drafted."""

DTYPES = {
    "auto": "auto",
    "half": "float16",
    "float16": "float16",
    "bfloat16": "bfloat16",
    "float": "float32",
    "float32": "float32",
}
"""Names of number formats, as vLLM and SGLang have them, and what they are here."""


@dataclass(frozen=True)
class Left:
    """A value that is not carried, and why."""

    why: str


@dataclass(frozen=True)
class Same:
    """A value that needs no setting, since it is what specpipe does anyway."""

    why: str = "as specpipe does by itself"


@dataclass(frozen=True)
class Refused:
    """A value that cannot be migrated at all, and why."""

    why: str


@dataclass(frozen=True)
class Put:
    """A value that belongs to another setting than the flag's."""

    setting: str
    value: Any


@dataclass(frozen=True)
class Flag:
    """One flag, or one key of a mapping, of another server.

    names    as its parser has them; the first is the one that is documented
    kind     what its value is
    setting  the setting that it becomes, with dots; none: it is not carried
    note     with a setting, what is different there; without one, why it is not carried
    values   what single values become, where that is not themselves
    closed   whether it takes no other values than these
    others   what every other value is, where that is one thing
    keys     the flags inside, of a mapping
    """

    names: tuple[str, ...]
    kind: Kind = "text"
    setting: str = ""
    note: str = ""
    values: Mapping[Any, Any] = field(default_factory=dict)
    closed: bool = False
    others: Left | Refused | None = None
    keys: tuple[Flag, ...] = ()

    def meaning(self, value: Any) -> Any:
        """Returns what a value becomes: itself, another, or why it is no setting."""
        if isinstance(value, Hashable) and value in self.values:
            return self.values[value]
        return value if self.others is None else self.others

    def read(self, value: Any, name: str) -> Any:
        """Returns a value of the flag's kind, from a word of a command line or from a file.

        Raises ConfigError, naming the flag as it was written.
        """
        if isinstance(value, Hashable) and value in self.values:
            return value
        reader = _READERS[self.kind]
        try:
            found = reader.read(value)
        except (ValueError, OverflowError, RecursionError):
            raise ConfigError(f"{name} is {show(value)}: expected {reader.expected}") from None
        if self.closed and found not in self.values:
            known = ", ".join(map(str, self.values))
            raise ConfigError(f"{name} is {show(value)}: expected one of {known}")
        return found


def left_out(
    why: str, *, values: str = "", switches: str = "", several: str = "", prefix: str = "--"
) -> tuple[Flag, ...]:
    """Returns flags that are not carried, all for one reason, by the form of their values.

    Names stand with spaces between; a `/` is before a further name of the same flag, which is
    short where it has one dash.
    """
    kinds: tuple[tuple[Kind, str], ...] = (
        ("any", values),
        ("switch", switches),
        ("several", several),
    )
    return tuple(
        Flag(
            tuple(name if name[0] == "-" else prefix + name for name in one.split("/")),
            kind,
            "",
            why,
        )
        for kind, names in kinds
        for one in names.split()
    )


def by_name(flags: tuple[Flag, ...]) -> dict[str, Flag]:
    """Returns the flags by each of their names."""
    return {name: flag for flag in flags for name in flag.names}


@dataclass(frozen=True)
class _Reader:
    expected: str
    read: Callable[[Any], Any]


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError
    return value


def _whole(value: Any) -> int:
    if isinstance(value, str) and re.fullmatch(r"[+-]?\d{1,18}", value, re.ASCII):
        return int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError
    return value


_VLLM_UNITS = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12} | {
    "K": 2**10,
    "M": 2**20,
    "G": 2**30,
    "T": 2**40,
}
"""vLLM 0.33.0, vllm/utils/argparse_utils.py, human_readable_int."""
_SGLANG_UNITS = {"k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12} | {
    "Ki": 2**10,
    "Mi": 2**20,
    "Gi": 2**30,
    "Ti": 2**40,
}
"""SGLang 0.5.10.post1, sglang/srt/utils/common.py, human_readable_int."""


def _sized(units: Mapping[str, int]) -> Callable[[Any], int]:
    def read(value: Any) -> int:
        if isinstance(value, str) and (
            found := re.fullmatch(r"(\d{1,12}(?:\.\d{1,12})?)([A-Za-z]i?)", value, re.ASCII)
        ):
            number, unit = found.groups()
            if unit not in units:
                raise ValueError
            return int(Decimal(number) * units[unit])
        return _whole(value)

    return read


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise ValueError
    return float(value)


def _switch(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError
    return value


def _several(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _mapping(value: Any) -> dict[str, Any]:
    found = json.loads(value) if isinstance(value, str) else value
    if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
        raise ValueError
    return found


def _ranges(value: Any) -> list[dict[str, int]]:
    """vLLM 0.33.0, vllm/config/speculative.py, num_speculative_tokens_per_batch_size."""
    levels, last = [], 0
    for one in value if isinstance(value, list) else [None]:
        if not isinstance(one, (list, tuple)) or len(one) != 3:
            raise ValueError
        start, end, num_draft_tokens = map(_whole, one)
        if start != last + 1 or end < start:
            raise ValueError
        levels.append({"from_batch_size": start, "num_draft_tokens": num_draft_tokens})
        last = end
    return levels


_READERS: dict[Kind, _Reader] = {
    "text": _Reader("text", _text),
    "whole": _Reader("a whole number", _whole),
    "vllm size": _Reader("a whole number, as 8192, 8k or 8K", _sized(_VLLM_UNITS)),
    "sglang size": _Reader("a whole number, as 8192, 8k or 8Ki", _sized(_SGLANG_UNITS)),
    "number": _Reader("a number", _number),
    "switch": _Reader("true or false", _switch),
    "several": _Reader("a list", _several),
    "mapping": _Reader("a mapping, as a JSON object is", _mapping),
    "ranges": _Reader("lists of first batch size, last and draft tokens, without gaps", _ranges),
    "optional": _Reader("a value, or none", lambda value: value),
    "any": _Reader("a value", lambda value: value),
}
