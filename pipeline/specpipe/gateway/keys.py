"""Who may come in, and how much of it: keys of clients, each with its limits.

A key is a long random text, of which the file has only the SHA-256: nothing slower is needed where
nothing can be guessed. Those of the environment have no limits.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from pydantic import Field, StringConstraints, ValidationError

from specpipe.config.document import read_yaml
from specpipe.errors import ConfigError, show, to_sentence
from specpipe.machine.callables import Clock, Log
from specpipe.section import Section

VARIABLE = "SPECPIPE_API_KEYS"
"""Keys in the environment, with commas or spaces between."""

_LEAST_CHARACTERS = 16
_LOOK_INTERVAL_S = 1.0


class ApiKey(Section):
    """One key, and what who has it may do."""

    name: Annotated[str, StringConstraints(pattern=r"^[\w.-]{1,64}$")]
    """What the log and the metrics call it."""

    sha256: Annotated[str, StringConstraints(pattern="^[0-9a-f]{64}$")]
    """SHA-256 of the key, as `printf %s KEY | sha256sum` prints it."""

    requests_per_minute: int | None = Field(default=None, ge=1)
    """Requests, all of which may come at once; the next ones as time goes on. Left out: any."""

    tokens_per_minute: int | None = Field(default=None, ge=1)
    """Tokens of prompts and answers. A request is taken while some are left, whatever it takes."""

    max_concurrent_requests: int | None = Field(default=None, ge=1)
    """Requests that may be under way at once."""

    max_body_bytes: int | None = Field(default=None, ge=1)
    """Bytes of a request."""


class _File(Section):
    keys: tuple[ApiKey, ...] = Field(min_length=1)


class Keys:
    """The keys of the environment and of a file, which is read again when it changes."""

    def __init__(
        self,
        path: Path | None,
        environment: Mapping[str, str],
        *,
        log: Log = lambda line: None,
        clock: Clock = time.monotonic,
    ) -> None:
        """Raises ConfigError for a file that is none, or a key that is too short."""
        self._path, self._log, self._clock = path, log, clock
        self._own = _of_environment(environment)
        self._stamp = _stamp(path)
        self._keys = self._own | _read(path)
        self._looked_s = clock()

    def add(self, name: str, key: str) -> None:
        """Lets one key more in, for as long as this process lives."""
        sha256 = _hash(key)
        self._own[sha256] = self._keys[sha256] = ApiKey(name=name, sha256=sha256)

    @property
    def are_needed(self) -> bool:
        """Whether a request without one of them is refused."""
        return bool(self._own) or self._path is not None

    def find(self, key: str) -> ApiKey | None:
        """Returns what belongs to a key; None where it is nobody's."""
        self._look()
        return self._keys.get(_hash(key))

    def _look(self) -> None:
        now = self._clock()
        if now - self._looked_s < _LOOK_INTERVAL_S:
            return
        self._looked_s = now
        if (stamp := _stamp(self._path)) == self._stamp:
            return
        self._stamp = stamp
        try:
            self._keys = self._own | _read(self._path)
        except ConfigError as exc:
            self._log(f"warning: the keys stay as they were: {to_sentence(exc)}")
        else:
            self._log(f"{self._path}: read again, {len(self._keys)} keys")


def _hash(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def _of_environment(environment: Mapping[str, str]) -> dict[str, ApiKey]:
    value = environment.get(VARIABLE, "")
    keys = value.replace(",", " ").split()
    if value.strip() and not keys:
        raise ConfigError(f"{VARIABLE} has no key between its commas: set one, or unset it")
    if any(len(key) < _LEAST_CHARACTERS for key in keys):
        raise ConfigError(
            f"{VARIABLE} has a key of less than {_LEAST_CHARACTERS} characters, which could be "
            "guessed: make one with `openssl rand -hex 32`"
        )
    hashes = map(_hash, keys)
    return {
        sha256: ApiKey(name=f"environment-{number}", sha256=sha256)
        for number, sha256 in enumerate(hashes, start=1)
    }


def _stamp(path: Path | None) -> tuple[int, ...]:
    try:
        stat = None if path is None else os.stat(path)
    except OSError:
        stat = None
    return () if stat is None else (stat.st_mtime_ns, stat.st_size, stat.st_ino)


def _read(path: Path | None) -> dict[str, ApiKey]:
    if path is None:
        return {}
    document = read_yaml(path)
    try:
        file = _File.model_validate(document.data, strict=False)
    except ValidationError as exc:
        error = exc.errors(include_url=False, include_input=False, include_context=False)[0]
        where = ".".join(map(str, error["loc"]))
        raise ConfigError(
            f"{path}:{document.line(error['loc'])}: {show(where)}: {show(error['msg'])}: see "
            "docs/openai.md"
        ) from exc
    keys: dict[str, ApiKey] = {}
    for number, key in enumerate(file.keys):
        if key.sha256 in keys or key.name in {other.name for other in keys.values()}:
            line = document.line(("keys", number))
            raise ConfigError(f"{path}:{line}: the key {show(key.name)} is there twice")
        keys[key.sha256] = key
    return keys
