"""Which store a URL names; credentials come from the environment, and stand in no URL."""

from __future__ import annotations

import re
import urllib.parse
from pathlib import Path
from typing import Any

from specpipe.errors import StoreError, show
from specpipe.machine.libraries import require_installed
from specpipe.stores.folder import Folder
from specpipe.stores.object_store import ObjectStore
from specpipe.stores.objects import Objects
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
        require_installed("this store", "fsspec", extra="release")
        from fsspec.implementations.local import LocalFileSystem

        folder = base_dir / Path(url).expanduser()
        if "\0" in url or (folder.exists() and not folder.is_dir()):
            raise StoreError(f"{show(url)!r} is no folder: expected {_EXPECTED}")
        objects = Folder(LocalFileSystem(skip_instance_cache=True), str(folder.absolute()))
        return ObjectStore(str(folder), objects, **settings)
    return _remote(url, settings)


def _remote(url: str, settings: dict[str, Any]) -> Store:
    parts = _split(url)
    bucket, path = parts.netloc, parts.path.strip("/")
    objects: Objects
    if parts.scheme == "s3":
        require_installed("this store", "s3fs", extra="s3")
        from specpipe.stores.buckets import s3

        objects = s3(bucket, path)
    elif parts.scheme == "gs":
        require_installed("this store", "gcsfs", extra="gcs")
        from specpipe.stores.buckets import gcs

        objects = gcs(bucket, path)
    elif parts.scheme == "ssh":
        require_installed("this store", "fsspec", "paramiko", extra="ssh")
        from specpipe.stores.ssh import Sftp, Ssh

        assert parts.hostname is not None
        objects = Ssh(Sftp(parts.hostname, parts.username, parts.port), f"/{path}")
    elif parts.scheme == "oci":
        return _oci(url.rstrip("/"), parts.netloc, path, settings)
    else:
        raise StoreError(f"{show(parts.scheme)}:// is no kind of store: expected {_EXPECTED}")
    return ObjectStore(url.rstrip("/"), objects, **settings)


def _oci(url: str, host: str, name: str, settings: dict[str, Any]) -> Store:
    # OCI distribution specification 1.1, "Pulling manifests"
    part = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
    if not re.fullmatch(rf"{part}(?:/{part})*", name):
        raise StoreError(f"{show(url)!r} has no name of a repository, as registries allow them")
    require_installed("this store", "oras", extra="release")
    from specpipe.stores.oci import OciStore
    from specpipe.stores.registry import Registry

    settings.pop("stale_s", None)  # a registry collects its own garbage
    return OciStore(url, Registry(host, name), **settings)


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
