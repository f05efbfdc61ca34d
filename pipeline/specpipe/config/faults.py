"""A fault in the settings, as a sentence in the making."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Fault:
    """A setting that cannot stay: its key, its value and what is expected of it."""

    key: str
    value: Any
    expected: str


def without_effect(key: str, value: Any, where: str) -> Fault:
    """The fault of a setting that nobody reads."""
    return Fault(key, value, f"nothing here, since it has no effect with {where}")
