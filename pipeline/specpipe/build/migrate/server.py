"""Another server as its command line shows it: its flags, and how its parser takes them."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from specpipe.build.migrate.flags import Flag, by_name
from specpipe.errors import ConfigError, show

_MAX_LISTED = 5  # unknown flags that one message names, and flags that one word may mean


@dataclass(frozen=True)
class Given:
    """A flag as somebody gave it: its name as written, and its value, read."""

    flag: Flag
    name: str
    value: Any


@dataclass(frozen=True)
class Server:
    """One server.

    name             as messages have it
    release          whose flags these are
    runtime          what serves its pairs here, unless the user says otherwise
    flags            all flags of its command line; the model is the setting target.checkpoint
    method_flag      the flag without which it does not draft; none: a draft model is enough
    takes_model      whether the model may stand alone, without a flag
    file_flag        the first name of the flag whose value is a YAML with settings
    file_keys        the keys of that YAML; none: the flags, without their dashes
    file_wins        whether that YAML overrides the command line
    has_underscores  whether `_` and `-` are one in its flags
    has_negations    whether a switch `--x` has `--no-x`, and `--enable-x` has `--disable-x`
    has_prefixes     whether the beginning of a flag is enough where only one begins so
    """

    name: str
    release: str
    runtime: str
    flags: tuple[Flag, ...]
    method_flag: str = ""
    takes_model: bool = True
    file_flag: str = "--config"
    file_keys: tuple[Flag, ...] = ()
    file_wins: bool = False
    has_underscores: bool = False
    has_negations: bool = False
    has_prefixes: bool = True

    @cached_property
    def by_name(self) -> dict[str, Flag]:
        """The flags by each of their names."""
        return by_name(self.flags)

    @property
    def source(self) -> str:
        """The server and its release."""
        return f"{self.name} {self.release}"

    def flag(self, name: str) -> tuple[Flag, bool] | None:
        """Returns the flag that a name of the command line means, and whether it negates it."""
        found = self.by_name.get(name)
        if found is not None:
            return found, False
        if self.has_negations:
            for prefix, instead in _NEGATIONS:
                positive = self.by_name.get(instead + name.removeprefix(prefix))
                if name.startswith(prefix) and positive is not None and positive.kind == "switch":
                    return positive, True
        if self.has_prefixes and name.startswith("--") and len(name) > len("--"):
            begun = [full for full in self.by_name if full.startswith(name)]
            if len({id(self.by_name[full]) for full in begun}) == 1:
                return self.by_name[begun[0]], False
            if begun:
                meant = ", ".join(sorted(begun)[:_MAX_LISTED])
                raise ConfigError(f"{show(name)} may mean several flags of {self.name}: {meant}")
        return None


_NEGATIONS = (
    ("--no-", "--"),
    ("--disable-", "--enable-"),
    ("--enable-", "--disable-"),
    ("--no-enable-", "--enable-"),
    ("--no-disable-", "--disable-"),
)
"""vLLM 0.33.0, vllm/utils/argparse_utils.py, EnableDisableAction."""


def parse(server: Server, words: Sequence[str]) -> tuple[list[str], list[Given]]:
    """Returns the words that stand alone, and the flags in order, of a command line.

    Raises ConfigError for flags that the server has not, and for values that are missing or of
    another type.
    """
    alone: list[str] = []
    given: list[Given] = []
    unknown: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith("-") or word == "-":
            alone.append(word)
            continue
        name, equals, inline = word.partition("=")
        name = _spelled(server, name)
        if len(name) > 2 and name not in server.by_name and name[:2] in server.by_name:
            name, equals, inline = name[:2], "=", name[2:] + equals + inline  # -O3
        base, _, inside = name.partition(".")
        found = server.flag(base)
        if found is None or (inside and not found[0].keys):
            unknown.append(_perhaps(name, server.by_name))
            if not equals and rest and not rest[0].startswith("-"):
                rest.pop(0)
            continue
        flag, is_negated = found
        if flag.kind == "switch":
            if equals:
                raise ConfigError(f"{name} takes no value, and has {show(inline)}")
            value: Any = not is_negated
        elif flag.kind == "several":
            value = [inline] if equals else []
            while not equals and rest and not rest[0].startswith("-"):
                value.append(rest.pop(0))
        elif equals:
            value = inline
        elif flag.kind == "optional":
            value = rest.pop(0) if rest and not rest[0].startswith("-") else True
        elif rest and (not rest[0].startswith("-") or rest[0][1:2].isdigit()):
            value = rest.pop(0)
        else:
            raise ConfigError(f"{name} of {server.name} has no value")
        if inside:
            value = _nested(inside.split("."), value)
        given += expand(flag, base if inside else name, value, unknown)
    refuse_unknown(server.source, unknown)
    return alone, given


def _spelled(server: Server, name: str) -> str:
    if server.has_underscores and name.startswith("--"):
        base, dot, inside = name.partition(".")
        return base.replace("_", "-") + dot + inside
    return name


def _nested(keys: list[str], value: str) -> dict[str, Any]:
    """Returns what `--a.b value` stands for: a number, true or a mapping where it is JSON."""
    try:
        inmost = json.loads(value)
    except (ValueError, RecursionError):
        inmost = value
    *outer, last = keys
    found: dict[str, Any] = {last: inmost}
    for key in reversed(outer):
        found = {key: found}
    return found


def expand(flag: Flag, name: str, value: Any, unknown: list[str]) -> Iterator[Given]:
    """Yields a flag, or the flags inside its mapping; names of none go to `unknown`."""
    found = flag.read(value, name)
    if not flag.keys:
        yield Given(flag, name, found)
        return
    yield from expand_all(flag.keys, found, unknown, prefix=f"{name}.")


def expand_all(
    flags: tuple[Flag, ...], values: dict[str, Any], unknown: list[str], prefix: str = ""
) -> Iterator[Given]:
    """Yields the flags of a mapping, as a YAML or a JSON object has them."""
    known = by_name(flags)
    for key, value in values.items():
        flag = known.get(key)
        if flag is None:
            unknown.append(prefix + _perhaps(key, known))
        elif value is not None:
            yield from expand(flag, f"{prefix}{key}", value, unknown)


def _perhaps(name: str, known: Mapping[str, Flag]) -> str:
    close = difflib.get_close_matches(show(name), known, n=1)
    return show(name) + (f" (is {close[0]} meant?)" if close else "")


def refuse_unknown(source: str, unknown: Sequence[str]) -> None:
    """Raises ConfigError for what a server does not take."""
    if unknown:
        more = len(unknown) - _MAX_LISTED
        raise ConfigError(
            f"{source} does not take {', '.join(unknown[:_MAX_LISTED])}"
            + (f" and {more} more" if more > 0 else "")
        )
