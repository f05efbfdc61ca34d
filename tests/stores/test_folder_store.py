"""What a store refuses, removes and says; in a folder, where a test can write anything."""

from __future__ import annotations

import hashlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError
from s3fs.errors import translate_boto_error

from specpipe.errors import RuntimeUnavailable, StoreError
from specpipe.stores.patience import passes, words
from specpipe.stores.places import open_store
from specpipe.stores.records import below
from specpipe.stores.store import Blob, Promotion, Store, Transferred, VersionRecord

_TIME = "2026-11-29T12:00:00+00:00"
_HELLO = Blob(hashlib.sha256(b"hello").hexdigest(), 5)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store("store", tmp_path)


def _put(store: Store, tmp_path: Path, content: bytes = b"hello") -> Blob:
    blob = Blob(hashlib.sha256(content).hexdigest(), len(content))
    path = tmp_path / blob.sha256
    path.write_bytes(content)
    store.upload({blob: path})
    return blob


def _record(number: int, files: dict[str, Blob]) -> VersionRecord:
    return VersionRecord(
        pair="pair", number=number, digest="d" * 64, files=files, requires={}, published_at=_TIME
    )


def _age(folder: Path, seconds: float) -> None:
    for path in folder.rglob("*"):
        os.utime(path, (time.time() - seconds,) * 2)


def _document(**changes: Any) -> dict[str, Any]:
    return {
        "format": 1,
        "pair": "pair",
        "number": 1,
        "digest": "d" * 64,
        "files": {"a": {"sha256": _HELLO.sha256, "size": 5}},
        "requires": {},
        "published_at": _TIME,
        **changes,
    }


def _files(*names: str) -> dict[str, Any]:
    return {"files": {name: {"sha256": _HELLO.sha256, "size": 5} for name in names}}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (_files("../a"), "'../a' is no name of a file below a folder"),
        (_files("/etc/passwd"), "'/etc/passwd' is no name of a file below a folder"),
        (_files("a/../../b"), "'a/../../b' is no name of a file below a folder"),
        (_files("a//b"), "'a//b' is no name of a file below a folder"),
        (_files("a\\b"), "'a\\\\b' is no name of a file below a folder"),
        (_files("a\nb"), "'a\\\\nb' is no name of a file below a folder"),
        (_files(""), "'' is no name of a file below a folder"),
        (_files("a/" * 600 + "b"), "is no name of a file below a folder"),
        (_files("a", "a/b"), "'a' is both a file and a folder"),
        ({"number": 2}, "version 1 of pair is not what specpipe writes: it is version 2 of pair"),
        ({"pair": "other"}, "it is version 1 of other"),
        ({"format": 2}, "format: Input should be 1"),
        ({"digest": "D" * 64}, "digest: String should match pattern"),
        ({"files": {"a": {"sha256": "x", "size": 5}}}, "files.a.sha256: String should match"),
        ({"files": {"a": {"sha256": _HELLO.sha256, "size": -1}}}, "files.a.size: Input should be"),
        ({"published_at": "\x1b[2J"}, "published_at: String should match pattern"),
    ],
)
def test_hostile_record_is_refused_in_a_sentence(
    store: Store, tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    path = tmp_path / "store/pairs/pair/versions/000001.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(_document(**changes)))
    with pytest.raises(StoreError) as refused:
        store.versions("pair")
    assert said in str(refused.value)
    assert len(str(refused.value)) < 400


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 100_000, '{"format": 1}', "\0"])
def test_what_is_no_document_is_refused(store: Store, tmp_path: Path, text: str) -> None:
    for name in ("versions/000001.json", "promoted.json"):
        path = tmp_path / "store/pairs/pair" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    with pytest.raises(StoreError, match="version 1 of pair is not what specpipe writes"):
        store.versions("pair")
    with pytest.raises(StoreError, match="the promotion of pair is not what specpipe writes"):
        store.promotion("pair")


def test_document_beyond_all_bounds_is_not_read(store: Store, tmp_path: Path) -> None:
    path = tmp_path / "store/pairs/pair/promoted.json"
    path.parent.mkdir(parents=True)
    with path.open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(StoreError, match="has 1099511627776 bytes, expected at most 16777216"):
        store.promotion("pair")


@pytest.mark.parametrize("name", ["", ".", "../a", "a/b", "-a", "a" * 81, "ä"])
def test_name_that_leads_elsewhere_is_no_pair(store: Store, name: str) -> None:
    for call in (store.claim, store.versions, store.promotion):
        with pytest.raises(StoreError, match="cannot be published"):
            call(name)


def test_files_are_not_fetched_through_links(tmp_path: Path) -> None:
    folder, elsewhere = tmp_path / "version", tmp_path / "elsewhere"
    elsewhere.mkdir()
    folder.mkdir()
    (folder / "a").symlink_to(elsewhere)
    assert below(folder, {"b/c": _HELLO}) == {folder / "b/c": _HELLO}
    with pytest.raises(StoreError, match=f"{folder / 'a'} is a link"):
        below(folder, {"a/b": _HELLO})


def test_link_in_the_place_of_a_file_is_replaced_and_not_followed(
    store: Store, tmp_path: Path
) -> None:
    _put(store, tmp_path)
    other, path = tmp_path / "other", tmp_path / "fetched"
    other.write_bytes(b"other")
    path.symlink_to(other)
    store.download({path: _HELLO})
    assert (path.is_symlink(), path.read_bytes(), other.read_bytes()) == (False, b"hello", b"other")


def test_download_without_room_says_both_numbers_before_the_first_byte(
    store: Store, tmp_path: Path
) -> None:
    with pytest.raises(StoreError, match=r"B free, and 8796.1 GB are to be fetched"):
        store.download({tmp_path / "fetched" / "a": Blob("a" * 64, 1 << 43)})
    assert not (tmp_path / "fetched").exists()


def test_disk_that_is_full_in_the_middle_is_one_sentence_and_what_was_fetched_is_kept(
    store: Store, tmp_path: Path
) -> None:
    content = os.urandom(1 << 20) * 3
    blob, path = _put(store, tmp_path, content), tmp_path / "fetched"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        with pytest.raises(StoreError, match=f"fetching from store .*: {path}: File too large"):
            store.download({path: blob})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not path.exists()
    assert store.download({path: blob}) == Transferred(1, 2 << 20, 0)
    assert path.read_bytes() == content


def test_what_is_unfinished_and_wrong_is_fetched_again(store: Store, tmp_path: Path) -> None:
    _put(store, tmp_path)
    path = tmp_path / "fetched"
    partial = tmp_path / f".fetched.{_HELLO.sha256[:16]}.partial"
    for left in (b"xx", b"xxxxx", b"longer than it is"):
        partial.write_bytes(left)
        store.download({path: _HELLO})
        assert (path.read_bytes(), partial.exists()) == (b"hello", False)
        path.unlink()


def test_publish_that_goes_on_keeps_contents_from_being_removed(
    store: Store, tmp_path: Path
) -> None:
    blob = _put(store, tmp_path)
    store.commit(_record(store.claim("pair"), {"a": blob}))
    number = open_store("store", tmp_path).claim("another")
    assert store.upload({blob: tmp_path / blob.sha256}) == Transferred(0, 0, 5)

    assert store.remove("pair", [1]) == 0
    _age(tmp_path / "store/blobs", 1e6)
    assert store.clean("pair") == []
    store.commit(
        VersionRecord(**{**vars(_record(number, {"a": blob})), "pair": "another"})  # all is there
    )
    store.remove("another", [number])
    assert store.missing([blob]) == {blob}


def test_publish_waits_while_contents_are_removed(tmp_path: Path) -> None:
    store = open_store("store", tmp_path, patience_s=0.5)
    flag = tmp_path / "store/collecting/somebody"
    flag.parent.mkdir(parents=True)
    flag.write_text("")
    with pytest.raises(StoreError, match="contents are being removed"):
        store.claim("pair")
    _age(tmp_path / "store/collecting", 7200)  # whoever put it up was killed
    assert store.claim("pair") == 2


def test_what_interrupted_publishes_left_is_removed_when_it_is_a_day_old(
    store: Store, tmp_path: Path
) -> None:
    kept = _put(store, tmp_path, b"kept")
    store.commit(_record(store.claim("pair"), {"a": kept}))
    orphan = _put(store, tmp_path, b"orphan")
    store.claim("pair")
    staged = tmp_path / "store/staging/0123"
    staged.write_bytes(b"half")

    assert store.clean("pair") == []
    _age(tmp_path / "store", 23 * 3600)
    assert store.clean("pair") == []
    _age(tmp_path / "store", 25 * 3600)
    assert store.clean("pair") == [
        "version 2, which was claimed and not published",
        "1 file of no version, 0.0 MB",
        "1 unfinished write",
    ]
    assert store.missing([kept, orphan]) == {orphan}
    assert [record.number for record in store.versions("pair")] == [1]
    assert store.clean("pair") == []
    assert store.claim("pair") == 3


_KILLED = """
import os, signal, sys
from contextlib import contextmanager
from pathlib import Path
from specpipe import progress
from specpipe.stores.patience import passes, words
from specpipe.stores.places import open_store
from specpipe.stores.store import Blob

class Killing:
    @contextmanager
    def count(self, total, unit):
        yield self
    def advance(self, amount=1):
        os.kill(os.getpid(), signal.SIGKILL)

path, sha256 = Path(sys.argv[1]), sys.argv[2]
blob = Blob(sha256, path.stat().st_size)
with progress.shown(Killing()):
    store = open_store("store", Path(sys.argv[3]))
    if sys.argv[4] == "upload":
        store.upload({blob: path})
    else:
        store.download({Path(sys.argv[3], "fetched"): blob})
"""


def test_process_that_is_killed_leaves_nothing_half(store: Store, tmp_path: Path) -> None:
    content = os.urandom(1 << 20) * 9
    source = tmp_path / "source"
    source.write_bytes(content)
    blob = Blob(hashlib.sha256(content).hexdigest(), len(content))

    def kill_in(direction: str) -> None:
        command = [sys.executable, "-c", _KILLED, source, blob.sha256, tmp_path, direction]
        done = subprocess.run([*map(str, command)], timeout=60, check=False)
        assert done.returncode == -signal.SIGKILL

    kill_in("upload")
    assert store.missing([blob]) == {blob}
    assert [*(tmp_path / "store").rglob("*/sha256/*/*")] == []
    assert store.upload({blob: source}) == Transferred(1, len(content), 0)
    kill_in("download")
    assert not (tmp_path / "fetched").exists()
    assert store.download({tmp_path / "fetched": blob}) == Transferred(1, 1 << 20, 0)
    assert (tmp_path / "fetched").read_bytes() == content


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("s3://key:secret@bucket/x", "has a password or other settings in it"),
        ("s3://key@bucket/x", "has a password or other settings in it"),
        ("ssh://user:secret@host/x", "has a password or other settings in it"),
        ("oci://host/name?token=secret", "has a password or other settings in it"),
        ("s3://bucket/x#secret", "has a password or other settings in it"),
        ("ftp://host/x", "ftp:// is no kind of store"),
        ("https://host/x", "https:// is no kind of store"),
        ("s3:///x", "is no store"),
        ("ssh://host/../x", "is no store"),
        ("ssh://host:99999/x", "is none"),
        ("oci://host/UPPER", "has no name of a repository"),
        ("oci://host", "has no name of a repository"),
        ("a\0b", "is no folder"),
    ],
)
def test_url_that_names_no_store_is_refused(tmp_path: Path, url: str, said: str) -> None:
    with pytest.raises(StoreError) as refused:
        open_store(url, tmp_path)
    assert said in str(refused.value)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    ("url", "module", "extra"),
    [
        ("folder", "fsspec", "release"),
        ("s3://bucket/x", "s3fs", "s3"),
        ("gs://bucket/x", "gcsfs", "gcs"),
        ("ssh://host/x", "paramiko", "ssh"),
        ("oci://host/x", "oras", "release"),
    ],
)
def test_missing_library_is_named_with_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str, module: str, extra: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(RuntimeUnavailable, match=rf"needs '{module}': .*\[{extra}\]"):
        open_store(url, tmp_path)


@pytest.mark.parametrize(
    ("code", "status", "is_passing", "said"),
    [
        ("SlowDown", 503, True, "it answers 503"),
        ("InternalError", 500, True, "it answers 500"),
        ("ConditionalRequestConflict", 409, True, "it answers 409"),
        ("InvalidRequest", 400, False, "it answers 400"),
        ("AccessDenied", 403, False, "access is denied; see the credentials in the environment"),
    ],
)
def test_answers_of_s3_that_pass_are_told_from_others(
    code: str, status: int, is_passing: bool, said: str
) -> None:
    answer = {
        "Error": {"Code": code, "Message": "of AKIA0123, signed with a-secret"},
        "ResponseMetadata": {"HTTPStatusCode": status},
    }
    error = translate_boto_error(ClientError(answer, "PutObject"))
    assert (passes(error), words(error)) == (is_passing, said)


def test_server_that_is_not_there_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "an-id")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "a-secret")
    for url in ("s3://bucket/x", "ssh://me@127.0.0.1:9/x", "oci://127.0.0.1:9/x"):
        with pytest.raises(StoreError) as failed:
            open_store(url, tmp_path, patience_s=0.3).promotion("pair")
        assert str(failed.value).startswith(
            (
                f"store {url}: the connection is refused",
                f"store {url}: it does not answer, or the connection broke",
            )
        )


def test_server_that_says_nothing_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "an-id")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "a-secret")
    for constant in ("ANSWER_S", "CONNECT_S"):
        for module in ("buckets", "ssh", "registry"):
            monkeypatch.setattr(f"specpipe.stores.{module}.{constant}", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # its backlog takes connections
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{address}")
        for url in ("s3://bucket/x", f"ssh://me@{address}/x", f"oci://{address}/x"):
            with pytest.raises(StoreError, match=f"store {url}: it does not answer"):
                open_store(url, tmp_path, patience_s=0.2).promotion("pair")


def test_promotion_is_replaced_as_a_whole(store: Store, tmp_path: Path) -> None:
    store.promote("pair", Promotion(number=1, digest="d" * 64, promoted_at=_TIME))
    assert [path.name for path in (tmp_path / "store/pairs/pair").iterdir()] == ["promoted.json"]
    assert [*(tmp_path / "store/staging").iterdir()] == []
