"""Whether engines that say in their `config.json` what they were built for fit their pair."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specpipe.errors import RepositoryError
from specpipe.machine.own_json import read_object, reason

if TYPE_CHECKING:
    from specpipe.runtimes.pair.pair import PairOptions
    from specpipe.runtimes.repository_rule import ServedPair


def limit_faults(pair: ServedPair) -> Iterator[str]:
    """What `pair.json` promises, the engines were built for."""
    try:
        for role, engine in (("draft", pair.draft), ("target", pair.target)):
            built = _read_object(engine / "config.json", "build_config")
            for fault in _engine_faults(role, pair.options, built):
                yield f"{pair.model}: {fault}"
    except RepositoryError as exc:
        yield f"{pair.model}: {exc}"


def _read_object(path: Path, key: str) -> dict[str, Any]:
    try:
        found = read_object(path)[key]
        if not isinstance(found, dict):
            raise ValueError("it is no JSON object")
    except (OSError, ValueError, KeyError) as exc:
        raise RepositoryError(f"{path} has no '{key}' that can be read ({reason(exc)})") from exc
    return found


def _engine_faults(role: str, options: PairOptions, built: dict[str, Any]) -> Iterator[str]:
    limits = {"max_batch_size": "max_batch_size"}
    if role == "target":
        limits |= {"num_draft_tokens": "max_draft_len", "max_seq_len": "max_seq_len"}
    for name, limit in limits.items():
        wanted = getattr(options, name)
        if not isinstance(built.get(limit), int):
            yield f"the {role} engine's config.json names no {limit}: build it again"
        elif wanted > built[limit]:
            yield (
                f"{name} is {wanted}, but the {role} engine was built with {limit} "
                f"{built[limit]}: lower it, or build the engine with a higher one"
            )
