"""The trust file: publishers, their keys, until when each is good, and which are revoked.

It is JSON, so that commands that change it have no comments to lose:

{"publishers": [{"name": "nightly-ci", "pairs": ["python-*"], "keys": [
  {"pem": "-----BEGIN PUBLIC KEY-----\\n…", "added": "2026-11-29T12:00:00Z",
   "expires": "2027-12-01T00:00:00Z",
   "revoked": {"at": "…", "reason": "…", "still_trusted": ["<SHA-256 of a model.sig>"]}}]}]}
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import AwareDatetime, Field, StringConstraints, ValidationError

from specpipe.errors import SignatureError, show
from specpipe.machine.own_json import read_object, reason
from specpipe.machine.whole_file import written_whole
from specpipe.release.trust import keys
from specpipe.section import Section

_MAX_BYTES = 1 << 20  # a key has some 300
_LEAST_OF_FINGERPRINT = 8  # digits that name a key

Text = Annotated[str, StringConstraints(min_length=1, max_length=200)]


class Revocation(Section):
    """Why nothing that a key signed is trusted any more."""

    at: AwareDatetime
    """When it was revoked; what was signed before is refused too, since a thief writes any date."""

    reason: Text
    """Why, for whoever is refused."""

    still_trusted: tuple[Annotated[str, Field(pattern="^[0-9a-f]{64}$")], ...] = ()
    """SHA-256 of each `model.sig` that is known to be from before, and stays good."""


class TrustedKey(Section):
    """One public key of a publisher."""

    pem: str
    """The public key."""

    added: AwareDatetime
    """When it was added to the file; decides nothing."""

    expires: AwareDatetime | None = None
    """From when on what it signs is refused; none: never."""

    revoked: Revocation | None = None
    """Why it is not trusted any more; none: it is."""

    @property
    def fingerprint(self) -> str:
        return keys.fingerprint(self.pem)

    def had_expired(self, at: datetime) -> bool:
        return self.expires is not None and at >= self.expires


class Publisher(Section):
    """Somebody who signs, with one key or several: the old and the new one, while keys change."""

    name: Text
    """What messages call them."""

    pairs: tuple[Text, ...] = ("*",)
    """The pairs that they may publish, by name; `*` and `?` stand for any letters, any letter."""

    keys: tuple[TrustedKey, ...] = Field(min_length=1)
    """Their public keys."""

    def may_publish(self, pair: str) -> bool:
        return any(fnmatchcase(pair, pattern) for pattern in self.pairs)


class _File(Section):
    publishers: tuple[Publisher, ...]


@dataclass(frozen=True)
class Trust:
    """The publishers of a trust file, and the file, for messages."""

    path: Path
    publishers: tuple[Publisher, ...]

    def all_keys(self) -> Iterator[tuple[Publisher, TrustedKey]]:
        for publisher in self.publishers:
            for key in publisher.keys:
                yield publisher, key

    def find(self, fingerprint: str) -> tuple[Publisher, TrustedKey] | None:
        """Returns a key and whose it is; None where it is nobody's."""
        return next(
            (found for found in self.all_keys() if found[1].fingerprint == fingerprint), None
        )

    def named(self, start: str) -> tuple[Publisher, TrustedKey]:
        """Returns the key whose fingerprint begins so; SignatureError where it is not just one."""
        found = [found for found in self.all_keys() if found[1].fingerprint.startswith(start)]
        if len(start) < _LEAST_OF_FINGERPRINT or len(found) != 1:
            raise SignatureError(
                f"{self.path} has {len(found)} keys whose fingerprint begins with {show(start)}: "
                f"give {_LEAST_OF_FINGERPRINT} or more digits of one that `specpipe keys list "
                f"--trust {self.path}` shows"
            )
        return found[0]

    def with_key(
        self, public: str, *, name: str, pairs: Sequence[str] = (), expires: datetime | None = None
    ) -> Trust:
        """Returns this with one more key of a publisher, who may be new.

        Without `pairs` a publisher who is known keeps theirs, and a new one may publish all.
        """
        key = _valid(TrustedKey, pem=public, added=_now(), expires=expires)
        if (found := self.find(key.fingerprint)) is not None:
            raise SignatureError(
                f"{self.path} has this key already, as one of {found[0].name}"
                + (", revoked" if found[1].revoked else "")
            )
        known = next((p for p in self.publishers if p.name == name), None)
        was = () if known is None else known.keys
        kept = ("*",) if known is None else known.pairs
        publisher = _valid(Publisher, name=name, pairs=tuple(pairs) or kept, keys=(*was, key))
        return self._replacing(known, publisher)

    def with_revoked(
        self, fingerprint: str, *, why: str, still_trusted: Sequence[str] = ()
    ) -> Trust:
        """Returns this with a key revoked; SignatureError where it was before."""
        revocation = _valid(Revocation, at=_now(), reason=why, still_trusted=tuple(still_trusted))
        publisher, key = self.named(fingerprint)
        if key.revoked is not None:
            raise SignatureError(
                f"{self.path}: key {key.fingerprint[:16]} of {publisher.name} was revoked at "
                f"{key.revoked.at:%Y-%m-%d} already: {show(key.revoked.reason)}"
            )
        revoked = key.model_copy(update={"revoked": revocation})
        now = tuple(revoked if k is key else k for k in publisher.keys)
        return self._replacing(publisher, publisher.model_copy(update={"keys": now}))

    def _replacing(self, old: Publisher | None, new: Publisher) -> Trust:
        others = self.publishers if old is not None else (*self.publishers, new)
        return Trust(self.path, tuple(new if p is old else p for p in others))

    def write(self) -> None:
        """Writes the file; whoever reads finds the old one or the new one."""
        text = _File(publishers=self.publishers).model_dump_json(exclude_none=True)
        with written_whole(self.path) as staged:
            staged.write_text(json.dumps(json.loads(text), indent=2) + "\n")


_Part = TypeVar("_Part", bound=Section)


def _valid(part: type[_Part], **values: Any) -> _Part:
    try:
        return part(**values)
    except ValidationError as exc:
        raise SignatureError(f"no trust file can hold that: {reason(exc)}") from exc


def _now() -> datetime:
    return datetime.now(timezone.utc).replace(microsecond=0)


def read_or_new(path: Path) -> Trust:
    """Reads a trust file; where there is none, nobody is trusted yet."""
    return read_trust(path) if os.path.lexists(path) else Trust(path, ())


def read_trust(path: Path) -> Trust:
    """Reads a trust file; raises SignatureError where it is none, or one key is in it twice."""
    try:
        publishers = _File.model_validate_json(
            json.dumps(read_object(path, max_bytes=_MAX_BYTES))
        ).publishers
    except FileNotFoundError:
        raise SignatureError(
            f"{path} does not exist: `specpipe keys trust KEY.pub --name PUBLISHER --trust {path}` "
            "writes it"
        ) from None
    except (OSError, ValueError) as exc:
        raise SignatureError(
            f"{path} is no file of trusted publishers ({reason(exc)}): see docs/trust.md"
        ) from exc
    trust = Trust(path, tuple(_normal(publisher, path) for publisher in publishers))
    names = Counter(publisher.name for publisher in trust.publishers)
    found = Counter(key.fingerprint for _, key in trust.all_keys())
    for what, count in (names + found).items():
        if count > 1:
            raise SignatureError(f"{path} has {show(what)} {count} times: expected it once")
    return trust


def _normal(publisher: Publisher, path: Path) -> Publisher:
    """Returns a publisher whose keys are written as those of signatures are."""
    written = tuple(
        key.model_copy(update={"pem": keys.parse_public_key(key.pem, _place(path, publisher, n))})
        for n, key in enumerate(publisher.keys, start=1)
    )
    return publisher.model_copy(update={"keys": written})


def _place(path: Path, publisher: Publisher, number: int) -> str:
    return f"{path}: key {number} of {show(publisher.name)}"
