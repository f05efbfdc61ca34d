"""Versions to sign, and keys of publishers, for tests."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from specpipe import __version__
from specpipe.release.release_file import Release, content_digest
from specpipe.release.trust.keys import make_key_pair, read_public_key
from specpipe.release.trust.publishers import Trust
from specpipe.runtimes.requirements import Requirements

PASSPHRASE = "correct horse battery"
PAIR = "python-code"
FILES = {
    ".hidden": b"seen all the same",
    "attestations/bench.json": b"{}",
    "model_repo/speculative/1/model.py": b"print('drafts')\n",
    "model_repo/speculative/1/weights.safetensors": b"\0" * 4096,
    "model_repo/speculative/config.pbtxt": b'name: "speculative"\n',
}


def write_version(
    folder: Path,
    number: int = 7,
    *,
    pair: str = PAIR,
    published_at: str = "2026-11-29T12:00:00+00:00",
    files: Mapping[str, bytes] = FILES,
) -> Path:
    """Writes a folder as `publish` makes one, unsigned, with an empty one as Triton needs it."""
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    (folder / "model_repo" / "ensemble" / "1").mkdir(parents=True)
    Release(
        pair=pair,
        number=number,
        digest=content_digest(folder),
        requires=Requirements(runtime="torch", libraries={"torch": ""}),
        published_at=published_at,
        specpipe=__version__,
    ).write(folder)
    return folder


def new_key(path: Path) -> Path:
    """Makes a key pair under PASSPHRASE; the public key lies beside it, as PATH.pub."""
    path.parent.mkdir(parents=True, exist_ok=True)
    make_key_pair(path, PASSPHRASE)
    return path


def public_key(key: Path) -> str:
    return read_public_key(key.with_name(f"{key.name}.pub"))


def trusting(path: Path, **publishers: Path) -> Trust:
    """Writes a trust file with a key of each publisher."""
    trust = Trust(path, ())
    for name, key in publishers.items():
        trust = trust.with_key(public_key(key), name=name)
    trust.write()
    return trust
