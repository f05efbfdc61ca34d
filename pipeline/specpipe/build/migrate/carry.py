"""What the flags of another server become: settings, and a sentence about each flag."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from specpipe.build.migrate.flags import Left, Put, Refused, Same
from specpipe.build.migrate.server import Given
from specpipe.errors import ConfigError, show


@dataclass
class Settings:
    """Settings by their keys, with dots, and the flag that each is from; the last one counts.

    values  the settings
    names   the flags of those that are from one, as they were written
    notes   what is different in a setting
    same    flags that need no setting, and why
    left    flags that are not carried, and why
    """

    values: dict[str, Any] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    same: dict[str, str] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)

    def put(self, key: str, value: Any, name: str, note: str = "") -> None:
        """Sets a setting, from a flag as it was written with its value."""
        self.values[key], self.names[key], self.notes[key] = value, name, note

    def leave(self, key: str, why: str) -> None:
        """Takes a setting away again, since it cannot be one here."""
        self.values.pop(key)
        self.notes.pop(key)
        self.left[self.names.pop(key)] = why

    def leave_out(self, key: str, why: str) -> None:
        """Does the same where the setting is there."""
        if key in self.values:
            self.leave(key, why)

    def sections(self) -> dict[str, tuple[str, ...]]:
        """Returns what is told: each flag that is carried, mapped, or not carried."""
        told = {
            key: f"{name}: {key}: {_shown(self.values[key])}" for key, name in self.names.items()
        }
        carried = [told[key] for key in told if not self.notes[key]]
        carried += [f"{name}: {why}" for name, why in self.same.items()]
        mapped = [f"{told[key]}, {self.notes[key]}" for key in told if self.notes[key]]
        by_reason: dict[str, list[str]] = {}
        for name, why in self.left.items():
            by_reason.setdefault(why, []).append(name)
        left = [f"{', '.join(names)}: {why}" for why, names in by_reason.items()]
        return {"carried": tuple(carried), "mapped": tuple(mapped), "not carried": tuple(left)}


def carry(given: Iterable[Given]) -> Settings:
    """Returns the settings that flags become, in order; raises ConfigError for what cannot be.

    The values of flags that are not carried are not repeated: one may be a key or a token.
    """
    settings = Settings()
    for one in {id(one.flag): one for one in given}.values():  # the last of each counts
        flag, value = one.flag, one.value
        meant = flag.meaning(value)
        told = one.name if flag.kind == "switch" else f"{one.name} {show(value)}"
        if isinstance(meant, Refused):
            raise ConfigError(f"{told}: {meant.why}")
        if isinstance(meant, Left):
            settings.left[told] = meant.why
        elif isinstance(meant, Same):
            settings.same[told] = meant.why
        elif isinstance(meant, Put):
            settings.put(meant.setting, meant.value, told, flag.note)
        elif flag.setting:
            settings.put(flag.setting, meant, told, flag.note)
        else:
            settings.left[one.name] = flag.note
    return settings


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else show(value)
