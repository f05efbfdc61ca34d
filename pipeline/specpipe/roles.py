"""The two roles of a pair."""

from __future__ import annotations

from typing import Literal

Role = Literal["draft", "target"]

ROLES: tuple[Role, Role] = ("draft", "target")
