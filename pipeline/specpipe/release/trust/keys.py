"""Key pairs of publishers: made here or by OpenSSL, in PEM, on a curve that the format knows."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

from specpipe.errors import SignatureError, show, to_sentence
from specpipe.machine.libraries import require_installed
from specpipe.machine.own_json import reason
from specpipe.machine.signals import deferred

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import (
        EllipticCurvePrivateKey,
        EllipticCurvePublicKey,
    )

PASSPHRASE_VARIABLE = "SPECPIPE_SIGNING_PASSPHRASE"
KEY_VARIABLE = "SPECPIPE_SIGNING_KEY"

# PKCS #8 as OpenSSL writes it derives its key in 2048 rounds, which are soon tried: the passphrase
# must make up for it.
_MIN_PASSPHRASE = 12
_MAX_PEM_BYTES = 1 << 14  # a key has some hundred
_CURVES = {"secp256r1": "P-256", "secp384r1": "P-384", "secp521r1": "P-521"}  # of model-signing
_KINDS = "an elliptic key (P-256, P-384 or P-521)"


def passphrase() -> str | None:
    """Returns the passphrase of the signing key, which only the environment tells."""
    return os.environ.get(PASSPHRASE_VARIABLE) or None


def require_libraries() -> None:
    """Raises RuntimeUnavailable where what signs and verifies is not installed."""
    require_installed("a signature", "cryptography", "model_signing", "OpenSSL", extra="release")


def make_key_pair(path: Path, phrase: str | None) -> str:
    """Writes a new private key, for its owner alone, and PATH.pub; returns the fingerprint."""
    if phrase is None:
        raise SignatureError(
            f"a signing key is kept under a passphrase: set {PASSPHRASE_VARIABLE} to one"
        )
    if len(phrase) < _MIN_PASSPHRASE:
        raise SignatureError(
            f"{PASSPHRASE_VARIABLE} has {len(phrase)} characters: expected {_MIN_PASSPHRASE} or "
            "more"
        )
    require_libraries()
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(phrase.encode()),
    )
    public = public_pem(key.public_key())
    public_path = path.with_name(f"{path.name}.pub")
    if os.path.lexists(public_path):
        raise SignatureError(f"{public_path} exists: name another file, keys are not replaced")
    with deferred():
        _write_new(path, private, 0o600)
        _write_new(public_path, public.encode(), 0o644)
    return fingerprint(public)


def _write_new(path: Path, data: bytes, mode: int) -> None:
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    except FileExistsError:
        raise SignatureError(f"{path} exists: name another file, keys are not replaced") from None
    except OSError as exc:
        raise SignatureError(f"no key can be written: {to_sentence(exc)}") from exc
    try:
        with open(descriptor, "wb") as file:
            file.write(data)
    except OSError as exc:
        path.unlink()
        raise SignatureError(f"{path} cannot be written: {to_sentence(exc)}") from exc


def load_private_key(path: Path, phrase: str | None) -> tuple[EllipticCurvePrivateKey, str | None]:
    """Reads a private key; returns it with its passphrase, None where it is kept under none."""
    require_libraries()
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    data = _read_pem(path, "the signing key")
    try:
        try:
            key = load_pem_private_key(data, None)
            phrase = None
        except TypeError:  # it is encrypted
            if phrase is None:
                raise SignatureError(
                    f"{path} is kept under a passphrase: set {PASSPHRASE_VARIABLE} to it"
                ) from None
            key = load_pem_private_key(data, phrase.encode())
    except (ValueError, UnsupportedAlgorithm) as exc:
        raise SignatureError(
            f"{path} cannot be read: it is no private key in PEM, or {PASSPHRASE_VARIABLE} is not "
            "its passphrase"
        ) from exc
    if not _is_known_curve(key):
        raise SignatureError(f"{path} is no key to sign with: expected {_KINDS}")
    return key, phrase  # type: ignore[return-value]


def read_public_key(path: Path) -> str:
    """Returns the public key of a file, in PEM as `public_pem` writes it."""
    return parse_public_key(_read_pem(path, "the public key").decode(errors="replace"), str(path))


def parse_public_key(text: str, where: str) -> str:
    """Returns a public key as `public_pem` writes it; `where` it stands begins the message."""
    require_libraries()
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    try:
        key = load_pem_public_key(text.encode())
    except (ValueError, UnsupportedAlgorithm) as exc:
        raise SignatureError(
            f"{where} is no public key in PEM: expected what `specpipe keys new` writes as PATH.pub"
        ) from exc
    if not _is_known_curve(key):
        raise SignatureError(f"{where} is a key of another kind: expected {_KINDS}")
    return public_pem(key)  # type: ignore[arg-type]


def public_pem(key: EllipticCurvePublicKey) -> str:
    """Writes a public key as PEM, the same bytes whatever it was read from."""
    from cryptography.hazmat.primitives import serialization

    return key.public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    ).decode()


def fingerprint(public: str) -> str:
    """Returns the SHA-256 of a public key in PEM: that of the file PATH.pub, and in a bundle."""
    return hashlib.sha256(public.encode()).hexdigest()


def _is_known_curve(key: object) -> bool:
    return getattr(getattr(key, "curve", None), "name", None) in _CURVES


def _read_pem(path: Path, what: str) -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_PEM_BYTES + 1)
    except (OSError, ValueError) as exc:
        raise SignatureError(f"{what} {show(path)} cannot be read: {reason(exc)}") from exc
    if len(data) > _MAX_PEM_BYTES:
        raise SignatureError(f"{path} has more than {_MAX_PEM_BYTES} bytes: expected a key in PEM")
    return data
