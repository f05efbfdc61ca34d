"""An OCI registry, by oras: contents by digest, and documents by tag.

A document is the config of a manifest, and the contents that it names are the manifest's layers, so
that a registry which collects garbage keeps them. Credentials are those of Docker's configuration
(`docker login`, DOCKER_CONFIG), or ORAS_USER and ORAS_PASS, as oras calls them.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
import urllib.parse
from collections.abc import Collection, Iterable, Iterator
from http.cookiejar import DefaultCookiePolicy
from typing import Annotated, Any, Literal

import oras.logger
import oras.provider
import requests
from pydantic import BaseModel, Field, ValidationError

from specpipe.errors import StoreError
from specpipe.stores.patience import ANSWER_S, CONNECT_S, Passing
from specpipe.stores.records import MAX_BYTES, MAX_FILES
from specpipe.stores.store import Blob

_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
_CONTENT = "application/octet-stream"
_MAX_MANIFEST_BYTES = 4 << 20  # what registries take: OCI distribution specification 1.1
_SETTLED_BYTES_PER_S = 20e6  # a registry answers once a content is in its place: a guess
_MAX_TAGS = 1_000_000
_PIECE_BYTES = 1 << 20


class _Descriptor(BaseModel):
    digest: Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}\z")]
    size: Annotated[int, Field(ge=0, le=MAX_BYTES)]


class _Manifest(BaseModel):
    schemaVersion: Literal[2]
    config: _Descriptor


class _Tags(BaseModel):
    tags: list[str] | None = None


class Registry:
    """Contents and documents of one repository of a registry.

    Over HTTPS; a registry of this machine is asked over HTTP, as docker does it.
    """

    def __init__(self, host: str, name: str) -> None:
        oras.logger.logger.set_level(logging.CRITICAL)  # what it logs is raised, too
        is_here = host.partition(":")[0] in ("localhost", "127.0.0.1")
        self._base = f"{'http' if is_here else 'https'}://{host}/v2/"
        self._oras = _Oras(host, insecure=is_here)
        self._container = self._oras.get_container(f"{host}/{name}")
        self._lock = threading.Lock()
        self._is_known = False

    def tags(self) -> list[str]:
        """Returns all tags."""
        tags: list[str] = []
        url = self._container.tags_url()
        while url:
            answer = self._ask("GET", url)
            if answer.status_code == 404:  # nothing was put into the repository yet
                return []
            _check(answer, 200)
            try:
                tags += _Tags.model_validate_json(answer.content).tags or []
            except ValidationError:
                raise StoreError("the registry's list of tags is none") from None
            following = answer.links.get("next", {}).get("url")
            url = following and urllib.parse.urljoin(answer.url, following)
            if len(tags) > _MAX_TAGS:
                raise StoreError(f"the repository has more than {_MAX_TAGS} tags")
        return tags

    def size(self, blob: Blob) -> int | None:
        """Returns the size of a content; None where it is not there."""
        answer = self._ask("HEAD", self._container.get_blob_url(f"sha256:{blob.sha256}"))
        if answer.status_code == 404:
            return None
        _check(answer, 200)
        return int(answer.headers.get("Content-Length", -1))

    def blocks(self, blob: Blob, start: int) -> Iterator[bytes]:
        """Yields a content from an offset on; raises FileNotFoundError where it is not there."""
        url = self._container.get_blob_url(f"sha256:{blob.sha256}")
        with self._ask("GET", url, headers={"Range": f"bytes={start}-"}, stream=True) as answer:
            _check(answer, 200, 206)
            skipped = 0 if answer.status_code == 206 else start
            for block in answer.iter_content(_PIECE_BYTES):
                yield block[skipped:]
                skipped = max(0, skipped - len(block))

    def put(self, blob: Blob, blocks: Iterable[bytes]) -> None:
        """Stores a content, which the registry holds against its digest before it is there."""
        answer = self._ask("POST", self._container.upload_blob_url())
        _check(answer, 202)
        location = self._oras._get_location(answer, self._container)
        url = requests.Request("PUT", location, params={"digest": f"sha256:{blob.sha256}"})
        body = _Body(blocks, blob.size) if blob.size else b"".join(blocks)
        # Not by `_ask`, which would send a body again that is spent: whoever may begin may end.
        answer = self._oras.session.put(
            str(url.prepare().url),
            data=body,
            headers={"Content-Type": _CONTENT, **self._oras.auth.get_auth_header()},
            timeout=(CONNECT_S, ANSWER_S + blob.size / _SETTLED_BYTES_PER_S),
        )
        _check(answer, 201, 204)

    def write(self, tag: str, data: bytes, kind: str, blobs: Collection[Blob] = ()) -> None:
        """Gives a document a tag, in place of the one that had it."""
        config = Blob(hashlib.sha256(data).hexdigest(), len(data))
        if self.size(config) != config.size:
            self.put(config, [data])
        described = _describe(config, f"application/vnd.specpipe.{kind}.v1+json")
        manifest = {
            "schemaVersion": 2,
            "mediaType": _MANIFEST,
            "config": described,
            "layers": [_describe(blob, _CONTENT) for blob in sorted(set(blobs))] or [described],
        }
        if len(blobs) > MAX_FILES:
            raise StoreError(f"{len(blobs)} files are too many for a manifest")
        answer = self._ask(
            "PUT",
            self._container.manifest_url(tag),
            headers={"Content-Type": _MANIFEST},
            json=manifest,
        )
        _check(answer, 201)

    def read(self, tag: str) -> bytes | None:
        """Returns the document of a tag; None where there is no such tag."""
        url = self._container.manifest_url(tag)
        with self._ask("GET", url, headers={"Accept": _MANIFEST}, stream=True) as answer:
            if answer.status_code == 404:
                return None
            _check(answer, 200)
            data = b""
            for piece in answer.iter_content(_PIECE_BYTES):
                data += piece
                if len(data) > _MAX_MANIFEST_BYTES:
                    raise StoreError(f"the manifest of tag {tag} is too large")
        try:
            config = _Manifest.model_validate_json(data).config
        except ValidationError:
            raise StoreError(f"the manifest of tag {tag} is not what specpipe writes") from None
        document = b"".join(self.blocks(Blob(config.digest[7:], config.size), 0))
        if f"sha256:{hashlib.sha256(document).hexdigest()}" != config.digest:
            raise StoreError(f"the document of tag {tag} is damaged")
        return document

    def remove(self, tag: str) -> None:
        """Removes the manifest of a tag, and with it all tags that it has."""
        url = self._container.manifest_url(tag)
        answer = self._ask("HEAD", url, headers={"Accept": _MANIFEST})
        if answer.status_code == 404:
            return
        _check(answer, 200)
        digest = answer.headers.get("Docker-Content-Digest", "")
        answer = self._ask("DELETE", self._container.manifest_url(digest))
        if answer.status_code == 405:
            raise StoreError(
                "the registry removes nothing: its operator must allow it "
                "(REGISTRY_STORAGE_DELETE_ENABLED=true of docker-registry)"
            )
        _check(answer, 202, 404)

    def _ask(self, method: str, url: str, **request: Any) -> Any:
        self._get_to_know()
        whole = url if url.startswith(("http://", "https://")) else f"{self._oras.prefix}://{url}"
        try:
            return self._oras.do_request(whole, method, **request)
        except ValueError as exc:
            if "authentication" in str(exc):
                raise PermissionError from exc
            raise

    def _get_to_know(self) -> None:
        """Finds out, once, how the registry wants to be told who asks."""
        with self._lock:
            if self._is_known:
                return
            answer = self._oras.session.get(self._base)
            is_basic = answer.headers.get("Www-Authenticate", "").lower().startswith("basic")
            if is_basic:
                self._oras.use("basic")
            auth = self._oras.auth
            auth.load_configs(self._container)
            if user := os.environ.get("ORAS_USER"):
                auth.set_basic_auth(user, os.environ.get("ORAS_PASS", ""))
            if is_basic:
                if not hasattr(auth, "_basic_auth"):
                    raise PermissionError
                # With each request: what is streamed cannot be sent a second time.
                self._oras.session.headers.update(auth.get_auth_header())
            self._is_known = True


class _Session(requests.Session):
    """Waits for no answer for ever."""

    def request(self, *arguments: Any, **settings: Any) -> Any:
        settings.setdefault("timeout", (CONNECT_S, ANSWER_S))
        return super().request(*arguments, **settings)


class _Oras(oras.provider.Registry):  # type: ignore[misc]
    """oras without its own attempts, which take two minutes and send a body that is spent."""

    do_request = oras.provider.Registry.do_request.__wrapped__

    def __init__(self, host: str, *, insecure: bool) -> None:
        super().__init__(host, insecure=insecure)
        self.session: requests.Session = _Session()
        # A registry that sees its cookie takes a client for a browser (oras, provider.py).
        self.session.cookies.set_policy(DefaultCookiePolicy(allowed_domains=[]))
        self.use("token")

    def use(self, backend: str) -> None:
        """Says how the registry is told who asks."""
        self.auth = oras.auth.get_auth_backend(
            backend, self.session, self.prefix == "http", tls_verify=self._tls_verify
        )


class _Body:
    """A request's body whose length is known."""

    def __init__(self, blocks: Iterable[bytes], size: int) -> None:
        self._blocks, self._size = blocks, size

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._blocks)


def _describe(blob: Blob, media_type: str) -> dict[str, Any]:
    return {"mediaType": media_type, "digest": f"sha256:{blob.sha256}", "size": blob.size}


def _check(answer: Any, *expected: int) -> None:
    """Raises what the rest of the package knows for a status that was not expected."""
    status = answer.status_code
    if status in expected:
        return
    if status == 404:
        raise FileNotFoundError
    if status in (401, 403):
        raise PermissionError
    if status == 429 or status >= 500:
        raise Passing(f"it answers {status}")
    raise StoreError(f"the registry answers {status} to {answer.request.method}")
