"""Signs the folder of a version, and says whether what is signed counts here."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from specpipe.errors import SignatureError, is_utf8, show
from specpipe.machine.own_json import reason
from specpipe.release import release_file
from specpipe.release.release_file import RELEASE_NAME, Release
from specpipe.release.trust import files, keys
from specpipe.release.trust.publishers import Publisher, Trust, TrustedKey
from specpipe.release.trust.signature import (
    Files,
    Signature,
    read_signature,
    write_signature,
)


@dataclass(frozen=True, kw_only=True)
class Verified:
    """A version that is what a trusted publisher signed.

    publisher     their name in the trust file
    key           the fingerprint of their key, SHA-256 of its PEM
    signature     SHA-256 of the model.sig
    published_at  when, in UTC, as the publisher says
    files         SHA-256 of each file by path, all but the signature
    """

    pair: str
    number: int
    published_at: str
    publisher: str
    key: str
    signature: str
    files: Files

    def __str__(self) -> str:
        return (
            f"version {self.number} of {self.pair}, published {self.published_at}, "
            f"{len(self.files)} files signed by {self.publisher} (key {self.key[:16]})"
        )


def sign(folder: Path, key: Path, passphrase: str | None) -> Path:
    """Writes `model.sig` over every file of a version's folder; returns its path.

    Raises SignatureError for a folder that is no version, one with links, and a key that is none.
    """
    keys.load_private_key(key, passphrase)  # before minutes of hashing
    present = files.digests(folder)
    _read_release(folder, present)
    for name in present:
        if not is_utf8(name):
            raise SignatureError(
                f"{folder}: {show(name)} is no name in UTF-8, which a signature needs: rename it"
            )
    return write_signature(folder, present, key, passphrase)


def verify(
    folder: Path,
    trust: Trust,
    *,
    expected_pair: str | None = None,
    expected_number: int | None = None,
    present: Files | None = None,
) -> Verified:
    """Returns who signed the folder of a version; raises SignatureError where that does not count.

    All of it counts, or nothing: signed by a key of the trust file that is not revoked, for a pair
    that its publisher may publish, before the key expired, and each file as it was signed. With
    a pair and a number, another one is refused: an older version in place of a newer one is signed
    as well.

    present  the digests of the files, where they are known and the folder holds only `release.json`
             and the signature: before a version is fetched. None: every file below it is hashed
    """
    if not folder.is_dir():
        raise SignatureError(f"{folder} is no folder: expected that of a version")
    signature = read_signature(folder)
    publisher, key = _find_key(signature, trust)
    signature.check(key.pem)
    _check_not_revoked(signature, publisher, key, trust)
    if present is None:
        present = files.digests(folder)
    if found := files.differences(signature.files, present):
        raise SignatureError(
            f"{folder} is not what {show(publisher.name)} signed: {files.listed(found)}: fetch the "
            "version again, and find out who changed it"
        )
    release = _read_release(folder, present)
    _check_release(folder, release, publisher, key, trust)
    for what, value, expected in (
        ("pair", release.pair, expected_pair),
        ("number", release.number, expected_number),
    ):
        if expected is not None and value != expected:
            raise SignatureError(
                f"{folder} is version {release.number} of {release.pair}, as its publisher signed, "
                f"and not {what} {expected}: one version was put in place of another; fetch it "
                "again, and find out who did"
            )
    return Verified(
        pair=release.pair,
        number=release.number,
        published_at=release.published_at,
        publisher=publisher.name,
        key=key.fingerprint,
        signature=signature.sha256,
        files=present,
    )


def kept_signature(folder: Path, trust: Trust, key: TrustedKey) -> str:
    """Returns the SHA-256 of the signature of a version that a key signed, for `still_trusted`."""
    verified = verify(folder, trust)
    if verified.key != key.fingerprint:
        raise SignatureError(
            f"{folder} is signed by another key ({verified.key[:16]}), so it stays good anyway: "
            "leave it out"
        )
    return verified.signature


def check_not_older(pair: str, number: int, known: int | None) -> None:
    """Raises SignatureError where a version is older than the one that was promoted here.

    What is older is signed as well, so whoever holds the store could bring back its faults. To go
    back is the operator's act, `specpipe rollback`, and does not come here.
    """
    if known is not None and number < known:
        raise SignatureError(
            f"version {number} of {pair} is older than version {known}, which was promoted on this "
            "machine: `specpipe rollback` goes back; if nobody asked for that, find out who set "
            "the store back"
        )


def _find_key(signature: Signature, trust: Trust) -> tuple[Publisher, TrustedKey]:
    found = trust.find(signature.key_fingerprint)
    if found is None:
        raise SignatureError(
            f"{signature.path.parent} is signed by a key that nobody in {trust.path} has "
            f"({show(signature.key_fingerprint[:16])}): take a version of a publisher who is "
            "trusted, or add theirs with `specpipe keys trust`"
        )
    return found


def _check_not_revoked(
    signature: Signature, publisher: Publisher, key: TrustedKey, trust: Trust
) -> None:
    if key.revoked is None or signature.sha256 in key.revoked.still_trusted:
        return
    raise SignatureError(
        f"{signature.path.parent} is signed by key {key.fingerprint[:16]} of "
        f"{show(publisher.name)}, revoked at {key.revoked.at:%Y-%m-%d} ({show(key.revoked.reason)}"
        "): take a version that is signed by another key; one that is known to be from before is "
        f"kept by the SHA-256 of its model.sig, {signature.sha256}, in `still_trusted` of "
        f"{trust.path}"
    )


def _check_release(
    folder: Path, release: Release, publisher: Publisher, key: TrustedKey, trust: Trust
) -> None:
    if not publisher.may_publish(release.pair):
        raise SignatureError(
            f"{folder} is a version of {release.pair}, which {show(publisher.name)} may not "
            f"publish: {trust.path} has {show(', '.join(publisher.pairs))} as their pairs"
        )
    if key.had_expired(datetime.fromisoformat(release.published_at)):
        raise SignatureError(
            f"{folder} was published {release.published_at} with key "
            f"{key.fingerprint[:16]} of {show(publisher.name)}, which had expired "
            f"{key.expires:%Y-%m-%d}: publish it with a newer key"
        )


def _read_release(folder: Path, present: Files) -> Release:
    """Reads what a version is out of the very bytes whose digest was signed."""
    path = folder / RELEASE_NAME
    if RELEASE_NAME not in present:
        raise SignatureError(f"{folder} is no version: it has no {RELEASE_NAME}")
    try:
        statement = release_file.read_statement(path)
        if hashlib.sha256(statement).hexdigest() != present[RELEASE_NAME]:
            raise ValueError("it was changed just now")
        return release_file.parse_release(statement)
    except (OSError, ValueError) as exc:
        raise SignatureError(
            f"{path} is not what `specpipe publish` writes ({reason(exc)}): publish it again"
        ) from exc
