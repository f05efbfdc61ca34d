"""What differs between specpipe's tables and the TensorRT-LLM of an image."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Difference:
    """One difference, with what to do about it.

    is_refused  whether something that specpipe writes would not be taken
    """

    text: str
    is_refused: bool = False


def refused(text: str) -> Difference:
    """A difference for which something that specpipe writes would not be taken."""
    return Difference(text, is_refused=True)


@dataclass(frozen=True)
class TableComparison:
    """One table against its original; no differences: they agree.

    subject   what was compared
    examined  where the original is
    """

    subject: str
    examined: str
    differences: tuple[Difference, ...]

    @property
    def is_refused(self) -> bool:
        """Whether something that specpipe writes would not be taken."""
        return any(difference.is_refused for difference in self.differences)
