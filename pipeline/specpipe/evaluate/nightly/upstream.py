"""What two runs were made from and with, and what of it changed between them, in phrases."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from specpipe.build import lock, planning
from specpipe.build.lock import Lock
from specpipe.errors import show
from specpipe.evaluate import results
from specpipe.evaluate.prompts import PromptSet
from specpipe.machine import provenance
from specpipe.runtimes.plan import PairPlan

_MAX_NAMED = 5
_MAX_CHANGES = 30
_DIGITS = 12  # of a commit or a digest, as many as tell two apart


def made_from(
    pair: PairPlan, stages: planning.Plan, prompts: PromptSet, libraries: Sequence[str]
) -> dict[str, Any]:
    """Returns the lock of a pair here and now, and what else may move the figures of a run.

    A fetched checkpoint's weights are those that the hub names, so that this stands before a build
    that fails; the build checks them. All inputs are hashed, once for this and the verification.
    """
    machine = results.machine()
    return {
        **lock.describe(pair, stages),
        "libraries": provenance.library_versions(libraries),
        "machine": {"cpu": machine["cpu"], "cores": machine["num_cores"]},
        "prompts": prompts.digest,
    }


def changes(before: Lock, now: Lock) -> list[str]:
    """Returns a phrase for each thing that is not what it was, inputs first."""
    if not before or not now:
        return []
    lines = [
        *_checkpoints(_at(before, "checkpoints"), _at(now, "checkpoints")),
        *_digests("calibration data", _at(before, "calibration"), _at(now, "calibration")),
        *_digests("prompts", before.get("prompts"), now.get("prompts")),
        *_stages(_at(before, "stages"), _at(now, "stages")),
        *_values("", _versions(before), _versions(now)),
        *_values("GPU", _at(before, "gpus"), _at(now, "gpus")),
        *_values("machine", _at(before, "machine"), _at(now, "machine")),
    ]
    more = len(lines) - _MAX_CHANGES
    return [*lines[:_MAX_CHANGES], *([f"{more} more"] if more > 0 else [])]


def _at(facts: Any, key: str) -> Mapping[str, Any]:
    """Returns a mapping of what a file says, which may be anything."""
    value = facts.get(key) if isinstance(facts, Mapping) else None
    return value if isinstance(value, Mapping) else {}


def _versions(facts: Lock) -> dict[str, Any]:
    return {**_at(facts, "libraries"), **_at(facts, "versions")}


def _checkpoints(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    for role, used in now.items():
        was = before.get(role)
        parts = list(_values("", *({k: _value(c, k) for k in _NAMES} for c in (was, used))))
        files_before, files = ({**_at(c, "files"), **_at(c, "weights")} for c in (was, used))
        if named := _named(files_before, files):
            parts.append(named)
        if parts:
            yield f"{show(role)}: {'; '.join(parts)}"


_NAMES = ("source", "commit")


def _value(facts: Any, key: str) -> Any:
    return facts.get(key) if isinstance(facts, Mapping) else None


def _digests(what: str, before: Any, now: Any) -> Iterator[str]:
    if before == now:
        return
    named = ""
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        roles = [
            show(role) for role in sorted({*before, *now}) if before.get(role) != now.get(role)
        ]
        named = f" of {' and '.join(roles)}"
    yield f"{what}{named} changed"


def _stages(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    for stage, facts in now.items():
        if stage not in before:
            yield f"{show(stage)} is new"
            continue
        yield from _values(
            f"{show(stage)}:", _at(before[stage], "settings"), _at(facts, "settings")
        )
        yield from _values(f"{show(stage)}:", _at(before[stage], "tool"), _at(facts, "tool"))
        if named := _named(_at(before[stage], "files"), _at(facts, "files")):
            yield f"{show(stage)}: {named}"
    yield from (f"{show(stage)} is gone" for stage in before if stage not in now)


def _named(before: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """Returns the files that differ, by name."""
    names = [name for name in sorted({*before, *now}) if before.get(name) != now.get(name)]
    if not names:
        return None
    more = len(names) - _MAX_NAMED
    listed = ", ".join(show(name) for name in names[:_MAX_NAMED])
    return f"other {listed}{f' and {more} more files' if more > 0 else ''}"


def _values(what: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """Yields each value that differs, a nested one by its path."""
    for key in sorted({*before, *now}):
        was, value = before.get(key), now.get(key)
        if was == value or lock.UNKNOWN in (was, value):
            continue
        name = f"{what} {show(key)}".strip()
        if isinstance(was, Mapping) and isinstance(value, Mapping):
            yield from _values(name, was, value)
        else:
            yield f"{name} {_text(was)} → {_text(value)}"


def _text(value: Any) -> str:
    if value is None:
        return "none"
    text = show(value)
    is_digest = len(text) >= 40 and all(digit in "0123456789abcdef" for digit in text)
    return text[:_DIGITS] if is_digest else text
