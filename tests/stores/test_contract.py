"""What every place of versions does, on its real server."""

from __future__ import annotations

import base64
import hashlib
import logging
import tempfile
import threading
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from specpipe import progress
from specpipe.errors import StoreError
from specpipe.stores.store import Blob, NumberTaken, Promotion, Store, Transferred, VersionRecord
from tests.stores.servers import PLACES, SECRET, USERS, Place

_DIGEST = "d" * 64
# large: several parts of an upload, and more than what sockets hold when a server is killed
_SIZES = {"small": 5, "empty": 0, "large": 20 << 20}
_LIGHT = {"small": 5, "empty": 0, "other": 7}


@pytest.fixture(scope="module", params=PLACES)
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    # Not below pytest's folder, which is its user's alone: servers run as others.
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        place = PLACES[request.param](Path(folder))
        place.prepare(patch)
        place.start()
        try:
            yield place
        finally:
            place.kill()


@pytest.fixture
def store(place: Place) -> Store:
    return place.open(f"store-{uuid.uuid4().hex}", patience_s=20.0)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[Blob, Path]:
    """Files to publish, by content; one is large."""
    return _written(tmp_path_factory.mktemp("sources"), _SIZES)


@pytest.fixture(scope="module")
def light(tmp_path_factory: pytest.TempPathFactory) -> dict[Blob, Path]:
    """Files to publish, by content."""
    return _written(tmp_path_factory.mktemp("light"), _LIGHT)


def _written(folder: Path, sizes: dict[str, int]) -> dict[Blob, Path]:
    blobs = {}
    for number, (name, size) in enumerate(sizes.items()):
        path = folder / name
        path.write_bytes(bytes([number]) * size)
        blobs[_blob(path)] = path
    return blobs


def _name(store: Store) -> str:
    return store.url.rpartition("/")[2]


def _blob(path: Path) -> Blob:
    data = path.read_bytes()
    return Blob(hashlib.sha256(data).hexdigest(), len(data))


def _record(number: int, files: dict[str, Blob], pair: str = "pair") -> VersionRecord:
    return VersionRecord(
        pair=pair,
        number=number,
        digest=_DIGEST,
        files=files,
        requires={"compute_capability": "9.0", "libraries": {"torch": "2.13.0"}},
        published_at="2026-11-29T12:00:00+00:00",
    )


def test_version_comes_back_as_it_was_published(
    store: Store, sources: dict[Blob, Path], tmp_path: Path
) -> None:
    assert store.versions("pair") == []
    assert store.promotion("pair") is None
    assert store.missing(sources) == set(sources)
    total = sum(_SIZES.values())
    assert store.claim("pair") == 1
    assert store.upload(sources) == Transferred(3, total, 0)
    assert store.missing(sources) == set()
    assert store.upload(sources) == Transferred(0, 0, total)
    assert store.versions("pair") == []

    small, empty, large = sources
    files = {"a/small": small, "b/c/small": small, "empty": empty, "large": large}
    record = _record(1, files)
    store.commit(record)
    assert store.versions("pair") == [record]
    with pytest.raises(NumberTaken):
        store.commit(_record(1, {"other": small}))
    assert store.versions("pair") == [record]

    wanted = {tmp_path / "v" / name: blob for name, blob in files.items()}
    assert store.download(wanted) == Transferred(3, total, 0)
    assert {path: _blob(path) for path in wanted} == wanted
    assert sorted(p for p in (tmp_path / "v").rglob("*") if p.is_file()) == sorted(wanted)
    assert store.download(wanted) == Transferred(0, 0, total + small.size)

    for promotion in (
        Promotion(number=1, digest=_DIGEST, promoted_at="2026-11-29T12:00:00+00:00"),
        Promotion(number=2, digest=_DIGEST, promoted_at="2026-11-29T12:30:00+00:00", previous=1),
    ):
        store.promote("pair", promotion)
        assert store.promotion("pair") == promotion
    assert store.promotion("other") is None

    key = "e" * 64
    assert store.artifact(key) is None
    store.keep_artifact(key, files)
    assert store.artifact(key) == files


def test_two_publishers_never_have_one_number(
    place: Place, store: Store, light: dict[Blob, Path]
) -> None:
    small = min(light)
    store.upload({small: light[small]})
    barrier = threading.Barrier(3)

    def publish(publisher: int) -> list[int]:
        mine = place.open(_name(store), patience_s=20.0)
        barrier.wait()
        numbers = []
        while len(numbers) < 2:
            number = mine.claim("pair")
            try:
                mine.commit(_record(number, {f"of{publisher}": small}))
            except NumberTaken:
                continue
            numbers.append(number)
        return numbers

    with ThreadPoolExecutor(3) as pool:
        by_publisher = dict(enumerate(pool.map(publish, range(3))))
    numbers = sorted(number for numbers in by_publisher.values() for number in numbers)
    assert len(set(numbers)) == 6
    if store.claims_exclusively:
        assert numbers == list(range(1, 7))
    published = {record.number: [*record.files] for record in store.versions("pair")}
    assert published == {
        number: [f"of{publisher}"]
        for publisher, numbers in by_publisher.items()
        for number in numbers
    }


def test_version_that_is_removed_takes_only_what_no_other_has(
    store: Store, light: dict[Blob, Path], tmp_path: Path
) -> None:
    small, empty, other = light
    store.upload(light)
    for files in ({"small": small, "other": other}, {"small": small}, {"empty": empty}):
        store.commit(_record(store.claim("pair"), files))
    store.keep_artifact("f" * 64, {"empty": empty})

    assert store.remove("pair", [1, 3]) == other.size
    assert [record.number for record in store.versions("pair")] == [2]
    store.download({tmp_path / "small": small, tmp_path / "empty": empty})
    # A number that was given is never given again, so that what was signed by it means one thing.
    assert store.claim("pair") == 4


def test_version_without_all_its_files_is_not_published(
    store: Store, light: dict[Blob, Path], tmp_path: Path
) -> None:
    lost = Blob("a" * 64, 3)
    with pytest.raises(StoreError, match=f"blob {lost.sha256}"):
        store.commit(_record(store.claim("pair"), {"lost": lost}))
    assert store.versions("pair") == []
    with pytest.raises(StoreError, match=f"does not hold blob {lost.sha256}"):
        store.download({tmp_path / "lost": lost})
    changed = tmp_path / "changed"
    changed.write_bytes(b"abcd")
    with pytest.raises(StoreError, match="has changed since it was hashed"):
        store.upload({Blob("b" * 64, 4): changed})
    assert store.missing([Blob("b" * 64, 4)]) == {Blob("b" * 64, 4)}


def test_damaged_content_is_refused_by_name_and_replaced_by_the_next_upload(
    place: Place, store: Store, light: dict[Blob, Path], tmp_path: Path
) -> None:
    small, _, other = light
    store.upload(light)
    place.damage(_name(store), small)
    with pytest.raises(StoreError, match=f"blob {small.sha256} is damaged"):
        store.download({tmp_path / "small": small})
    assert list(tmp_path.iterdir()) == []
    if not place.replaces_damaged:
        return
    assert store.missing(light) == {small}
    assert store.upload(light) == Transferred(1, small.size, other.size)
    store.download({tmp_path / "small": small})


class _Killing:
    """Kills a server once so many bytes have gone, in whichever thread counts them."""

    def __init__(self, place: Place, after_bytes: int, *, restarts: bool = False) -> None:
        self._place, self._left, self._restarts = place, after_bytes, restarts
        self._lock = threading.Lock()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        yield

    @contextmanager
    def count(self, total: int | None, unit: progress.Unit) -> Iterator[progress.Count]:
        yield self

    def expect(self, total: int) -> None: ...

    def advance(self, amount: int = 1) -> None:
        with self._lock:
            before, self._left = self._left, self._left - max(amount, 0)
            if before > 0 >= self._left:
                self._place.kill()
                if self._restarts:
                    self._place.start()


@pytest.mark.parametrize(
    "place",
    [pytest.param("s3", marks=pytest.mark.slow), "ssh", "oci"],
    indirect=True,
)
def test_server_that_is_killed_in_the_middle_loses_nothing_and_shows_nothing_half(
    place: Place, sources: dict[Blob, Path], tmp_path: Path
) -> None:
    name = f"store-{uuid.uuid4().hex}"
    small, _, large = sources
    store = place.open(name, patience_s=0.5)
    first = _record(store.claim("pair"), {"small": small})
    store.upload({small: sources[small]})
    store.commit(first)

    number = store.claim("pair")
    with progress.shown(_Killing(place, 5 << 20)), pytest.raises(StoreError) as failed:
        store.upload(sources)
    assert str(failed.value).startswith(f"store {store.url}: ")
    place.start()
    assert store.versions("pair") == ([] if place.forgets else [first])
    assert large in store.missing(sources)
    store.upload(sources)
    store.commit(_record(number, {"large": large}))
    assert [record.number for record in store.versions("pair")][-1] == number

    path = tmp_path / "large"
    with progress.shown(_Killing(place, 1)), pytest.raises(StoreError):
        store.download({path: large})
    assert not path.exists()
    place.start()
    if place.forgets:
        store.upload(sources)
    resumed = store.download({path: large})
    assert resumed.num_files == 1
    assert 0 < resumed.num_bytes < large.size
    assert _blob(path) == large

    if not place.forgets:  # a call that has patience goes on by itself
        path.unlink()
        patient = place.open(name, patience_s=60.0)
        with progress.shown(_Killing(place, 1, restarts=True)):
            assert patient.download({path: large}) == Transferred(1, large.size, 0)
        assert _blob(path) == large


def test_credentials_are_in_no_log_message_or_document(
    place: Place,
    store: Store,
    light: dict[Blob, Path],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    small = next(iter(light))
    with caplog.at_level(logging.DEBUG):
        store.upload({small: light[small]})
        store.commit(_record(store.claim("pair"), {"small": small}))
        said = [str(store.versions("pair")), store.url]
        monkeypatch.setenv("ORAS_USER", "stranger")
        try:
            place.open(_name(store)).versions("pair")
        except StoreError as exc:
            said.append(str(exc))
            assert place.name == "oci"
            assert said[-1] == (
                f"store {store.url}: access is denied; see the credentials in the environment"
            )
    said.append(caplog.text)
    encoded = [base64.b64encode(f"{user}:{SECRET}".encode()).decode() for user in USERS]
    assert [secret for secret in (SECRET, *encoded) if secret in " ".join(said)] == []
