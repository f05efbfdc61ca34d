"""`model.sig`: an OpenSSF Model Signing bundle, written and read through model-signing.

The bundle is a Sigstore one: a DSSE envelope around an in-toto statement that names each file with
its SHA-256 (github.com/sigstore/model-transparency, model_signing 1.1; DSSE v1.0.0). Everything in
it is a stranger's until the library has verified the signature.
"""

from __future__ import annotations

import base64
import hashlib
import os
import stat
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import AliasPath, BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

from specpipe.errors import SignatureError, show
from specpipe.machine.own_json import reason
from specpipe.machine.whole_file import written_whole
from specpipe.release.release_file import SIGNATURE_NAME
from specpipe.release.trust import keys

if TYPE_CHECKING:
    from model_signing import hashing

_MAX_BYTES = 8 << 20  # some 30,000 files; what it unfolds to in memory is a hundred times as much
_DAMAGED = "fetch the version again, or ask its publisher for a signature by specpipe"

Files = Mapping[str, str]  # SHA-256 in hexadecimal, by path below the folder, with "/"


class _Part(BaseModel):
    """What is read of a bundle; the library holds the rest against the format."""

    model_config = ConfigDict(frozen=True, strict=True, alias_generator=to_camel)


class _Envelope(_Part):
    payload: str
    payload_type: Literal["application/vnd.in-toto+json"]
    signatures: tuple[Any, ...] = Field(min_length=1, max_length=1)


class _Bundle(_Part):
    key_hint: str = Field(validation_alias=AliasPath("verificationMaterial", "publicKey", "hint"))
    dsse_envelope: _Envelope


class _Resource(_Part):
    name: str
    algorithm: Literal["sha256"]
    digest: str = Field(pattern="^[0-9a-f]{64}$")


class _Predicate(_Part):
    method: Literal["files"] = Field(validation_alias=AliasPath("serialization", "method"))
    resources: tuple[_Resource, ...]


class _Statement(_Part):
    predicate_type: Literal["https://model_signing/signature/v1.0"]
    predicate: _Predicate


@dataclass(frozen=True)
class Signature:
    """What a `model.sig` says: nothing of it counts before `check`.

    key_fingerprint  which key it says that it is by
    files            what it says that was signed
    sha256           SHA-256 of the file itself
    """

    path: Path
    key_fingerprint: str
    files: Files
    sha256: str
    data: bytes

    def check(self, public_key: str) -> None:
        """Raises SignatureError where the files are not signed by this key.

        The library reads the bundle again, and compares what it verified with `files`: two readers
        that took one bundle for two things would be noticed here.
        """
        keys.require_libraries()
        from cryptography.exceptions import InvalidSignature
        from model_signing import verifying

        with tempfile.TemporaryDirectory(prefix="specpipe-signature-") as scratch:
            key, bundle = Path(scratch, "key.pub"), Path(scratch, SIGNATURE_NAME)
            key.write_text(public_key)
            bundle.write_bytes(self.data)
            try:
                verifying.Config().use_elliptic_key_verifier(public_key=key).set_hashing_config(
                    _hashing_of(self.files)
                ).verify(self.path.parent, bundle)
            except InvalidSignature:
                raise SignatureError(
                    f"{self.path} says that key {self.key_fingerprint[:16]} signed it, which did "
                    f"not: {_DAMAGED}"
                ) from None
            # The library reads what a stranger wrote, and promises no kind of error.
            except Exception as exc:
                raise _malformed(self.path, show(reason(exc))) from exc


def read_signature(folder: Path) -> Signature:
    """Reads the signature of a folder; raises SignatureError where there is none, or no such."""
    path = folder / SIGNATURE_NAME
    data = _read(path)
    try:
        bundle = _Bundle.model_validate_json(data)
        statement = _Statement.model_validate_json(
            base64.b64decode(bundle.dsse_envelope.payload, validate=True)
        )
    except ValueError as exc:
        raise _malformed(path, reason(exc)) from exc
    resources = statement.predicate.resources
    files = {resource.name: resource.digest for resource in resources}
    if len(files) < len(resources):
        raise _malformed(path, "a file is in it twice")
    return Signature(path, bundle.key_hint, files, hashlib.sha256(data).hexdigest(), data)


def _read(path: Path) -> bytes:
    try:
        # Neither follows a link nor waits for a pipe.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise SignatureError(
            f"{path.parent} is not signed, it has no {SIGNATURE_NAME}: publish it with a key, or "
            f"`specpipe sign {path.parent} --key KEY`"
        ) from None
    except OSError as exc:
        raise _malformed(path, reason(exc)) from exc
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise _malformed(path, "it is no file")
        data = file.read(_MAX_BYTES + 1)
    if len(data) > _MAX_BYTES:
        raise _malformed(path, f"it has more than {_MAX_BYTES} bytes")
    return data


def write_signature(folder: Path, files: Files, key: Path, passphrase: str | None) -> Path:
    """Signs files by their digests with a private key, in place of an earlier signature."""
    path = folder / SIGNATURE_NAME
    _, passphrase = keys.load_private_key(key, passphrase)
    from model_signing import signing

    with written_whole(path) as staged:
        signing.Config().use_elliptic_key_signer(
            # Declared as text, which cryptography refuses (model-signing 1.1.1).
            private_key=key,
            password=passphrase and passphrase.encode(),  # type: ignore[arg-type]
        ).set_hashing_config(_hashing_of(files)).sign(folder, staged)
        if staged.stat().st_size > _MAX_BYTES:
            raise SignatureError(
                f"{folder} has {len(files)} files, whose signature is larger than {_MAX_BYTES} "
                "bytes: put fewer into a version"
            )
    return path


def _malformed(path: Path, why: str) -> SignatureError:
    return SignatureError(f"{path} is no signature that specpipe takes ({why}): {_DAMAGED}")


def _hashing_of(files: Files) -> hashing.Config:
    """Returns what tells the library the digests of files, so that it reads none itself.

    Its own reading leaves out what a bundle says to, and follows links where that says so.
    """
    from model_signing import hashing, manifest
    from model_signing._hashing.hashing import Digest

    class Known(hashing.Config):
        def hash(self, model_path: Any, *, files_to_hash: Any = None) -> manifest.Manifest:
            kind = {"method": "files", "hash_type": "sha256", "allow_symlinks": False}
            serialization = manifest.SerializationType.from_args(
                {**kind, "ignore_paths": [SIGNATURE_NAME]}
            )
            items = (
                serialization.new_item(name, Digest("sha256", bytes.fromhex(digest)))
                for name, digest in files.items()
            )
            return manifest.Manifest(Path(model_path).name, items, serialization)

    return Known()  # type: ignore[no-untyped-call]
