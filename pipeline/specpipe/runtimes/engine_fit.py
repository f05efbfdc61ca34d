"""Whether engines that were built fit what is to run them, and the message where they do not."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

from specpipe.errors import EngineMismatch
from specpipe.runtimes.pair.pair import PairOptions


class HasLimits(Protocol):
    """An engine, or what its folder says of it."""

    @property
    def max_batch_size(self) -> int: ...

    @property
    def max_draft_len(self) -> int: ...


def check_limits(folder: Path, engine: HasLimits, options: PairOptions) -> None:
    """Raises EngineMismatch for an engine that is too small for what a pair is to serve."""
    for name, built, wanted in limits(engine, options):
        if built < wanted:
            raise EngineMismatch(
                f"{folder} was built for {name} {built}, the pair is to serve {wanted}; "
                "build it again"
            )


def limits(engine: HasLimits, options: PairOptions) -> Iterator[tuple[str, int, int]]:
    """Yields the name of each limit, what an engine was built for and what it is to serve."""
    yield "max_batch_size", engine.max_batch_size, options.max_batch_size
    yield "max_draft_len", engine.max_draft_len, options.num_draft_tokens


def installed(distribution: str) -> str | None:
    """The version of a distribution; None where it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def release(version: str) -> str:
    """A version without what says how it was packaged: 10.14.1.48 of 10.14.1.48.post1."""
    return re.sub(r"(\.post\d+|\+.*)$", "", version)


def mismatch(
    repository: Path, faults: Sequence[str], unknown: Sequence[str], rebuild: str
) -> EngineMismatch:
    """One message with all that differs, all that is unknown, and what to do."""
    parts = []
    if faults:
        parts.append(f"the engines of {repository} do not fit what would run them:")
        parts += [f"  {fault}" for fault in faults]
    if unknown:
        parts.append("also unknown:" if faults else f"facts about {repository} are unknown:")
        parts += [f"  {sentence}" for sentence in unknown]
    parts.append(f"build them again here: {rebuild}")
    if unknown and not faults:
        parts.append("or serve them as they are with --allow-unknown-engine-facts")
    return EngineMismatch("\n".join(parts))
