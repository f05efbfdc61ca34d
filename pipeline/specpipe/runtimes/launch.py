"""How the server of a repository is started."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

LaunchMode = Literal["auto", "leader", "orchestrator"]
"""How the ranks of engines come to be, where they are processes of their own: mpirun starts them
all (leader), or one server spawns those of each engine (orchestrator)."""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """How the server of a repository is started; the default is one `tritonserver`.

    world_size       servers that mpirun starts, one for each rank; all but the first load
                     `rank_models` only and answer nobody
    is_orchestrator  whether mpirun starts the only server, which spawns the ranks itself
    environment      variables added to the server's own
    arguments        arguments of `tritonserver` besides those that every runtime needs
    notes            what the log is to say about it, a sentence each
    """

    world_size: int = 1
    is_orchestrator: bool = False
    rank_models: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def starts_like(self, other: Launch) -> bool:
        """Returns whether both start a server in the same way, whatever the log says."""
        return replace(self, notes=()) == replace(other, notes=())

    @property
    def uses_mpi(self) -> bool:
        return self.world_size > 1 or self.is_orchestrator
