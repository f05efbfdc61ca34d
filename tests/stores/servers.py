"""The places that a store can be in, each with a real server on loopback that can be killed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from specpipe.stores.places import open_store
from specpipe.stores.store import Blob, Store


class Place:
    """Somewhere that holds a store; a folder needs no server.

    folder  where the server keeps what it has, and its settings
    """

    name = "folder"

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def url(self, store: str) -> str:
        """Returns the URL of a store of this place."""
        return str(self.folder / store)

    def open(self, store: str, **settings: Any) -> Store:
        """Opens a store of this place."""
        return open_store(self.url(store), self.folder, **settings)

    def start(self) -> None:
        """Starts the server, with what it had before."""

    def kill(self) -> None:
        """Kills the server at once."""

    def damage(self, store: str, blob: Blob) -> None:
        """Changes a byte of a content, behind the server's back."""
        path = self.folder / store / "blobs" / "sha256" / blob.sha256[:2] / blob.sha256
        path.write_bytes(b"\xff" + path.read_bytes()[1:])


class FolderPlace(Place):
    """A folder."""


PLACES: dict[str, type[Place]] = {"folder": FolderPlace}
