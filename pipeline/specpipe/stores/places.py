"""Which store a URL names; credentials come from the environment, and stand in no URL."""

from __future__ import annotations

import importlib.util
import re
import urllib.parse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from specpipe.errors import RuntimeUnavailable, StoreError, show
from specpipe.machine.libraries import with_extras
from specpipe.stores.folder import Folder
from specpipe.stores.object_store import ObjectStore
from specpipe.stores.store import Store

_EXPECTED = (
    "a folder, s3://BUCKET/PATH, gs://BUCKET/PATH, ssh://USER@HOST[:PORT]/PATH or "
    "oci://HOST[:PORT]/NAME"
)
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")


def open_store(url: str, base_dir: Path, **settings: Any) -> Store:
    """Returns the store that a URL or a folder names; nothing is asked or made yet.

    base_dir  where a relative folder starts
    settings  `patience_s` and `stale_s` of the store, where they are not the usual ones

    Raises RuntimeUnavailable where a library is missing, StoreError for what names no store.
    """
    if not _SCHEME.match(url):
        _require("release", "fsspec")
        from fsspec.implementations.local import LocalFileSystem

        folder = base_dir / Path(url).expanduser()
        if "\0" in url or (folder.exists() and not folder.is_dir()):
            raise StoreError(f"{show(url)!r} is no folder: expected {_EXPECTED}")
        objects = Folder(LocalFileSystem(skip_instance_cache=True), str(folder.absolute()))
        return ObjectStore(str(folder), objects, **settings)
    return _remote(url, settings)


def _remote(url: str, settings: dict[str, Any]) -> Store:
    parts = _split(url)
    opener = _OPENERS.get(parts.scheme)
    if opener is None:
        raise StoreError(f"{show(parts.scheme)}:// is no kind of store: expected {_EXPECTED}")
    return opener(parts, settings)


def _split(url: str) -> urllib.parse.SplitResult:
    """Takes a URL apart; refuses one with a secret in it, without repeating it."""
    try:
        parts = urllib.parse.urlsplit(url)
        parts.port  # noqa: B018  beyond 65535 it is a ValueError
    except ValueError:
        raise StoreError(f"the URL of a store is none: expected {_EXPECTED}") from None
    has_user = parts.username is not None and parts.scheme != "ssh"
    if parts.password is not None or has_user or parts.query or parts.fragment:
        raise StoreError(
            f"the URL of a store ({show(parts.scheme)}://…) has a password or other settings in "
            "it: credentials come from the environment (docs/publish.md), and what else it has is "
            "unknown here"
        )
    if not parts.hostname or any(part in (".", "..") for part in parts.path.split("/")):
        raise StoreError(f"{show(url)!r} is no store: expected {_EXPECTED}")
    return parts


_OPENERS: dict[str, Callable[[urllib.parse.SplitResult, dict[str, Any]], Store]] = {}


def _require(extra: str, *modules: str) -> None:
    """Raises RuntimeUnavailable where a library is not there."""
    for module in modules:
        if importlib.util.find_spec(module) is None:
            raise RuntimeUnavailable(f"this store needs '{module}': {with_extras(extra)}")
