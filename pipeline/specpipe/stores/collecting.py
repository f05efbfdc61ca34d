"""What is removed from a store, and when: never what a version has, or a publish may rely on.

- A record is removed before its contents, so that no version ever lacks one.
- Contents are removed only while no number is claimed that no version came of yet: a publish finds
  contents there, and does not send them again. What was claimed more than a day ago was
  interrupted, and counts no more. So that none begins unseen, a flag is put up before claims are
  looked at, and a publish looks for flags once it has claimed: of two, one sees the other.
- `remove` takes what only the removed versions had. `clean` also takes what nothing has: contents,
  claims and unfinished writes that are a day old.
- A number that was claimed is never given again.

All times are the store's own.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Collection, Iterator
from contextlib import contextmanager

from specpipe.errors import StoreError, plural
from specpipe.stores.catalogue import (
    BLOBS,
    FLAGS,
    Catalogue,
    blob_name,
    claim_name,
    now,
    removed_name,
    version_name,
)

STALE_S = 24 * 3600.0
"""Age from which what no version came of counts as left by an interrupted publish. A guess: a
publish that takes longer may have to be repeated."""

_LONGEST_S = 1800.0  # of removing contents under one flag
_POLL_S = 0.5


def remove(catalogue: Catalogue, pair: str, numbers: Collection[int], stale_s: float) -> int:
    """Removes versions and the contents that only they have; returns the bytes set free."""
    records = [catalogue.version(pair, number) for number in sorted(set(numbers))]
    found = [record for record in records if record is not None]
    for record in found:
        catalogue.replace(removed_name(pair, record.number), now().encode())
        catalogue.remove(version_name(pair, record.number))
        catalogue.remove(claim_name(pair, record.number))
    sizes = {blob.sha256: blob.size for record in found for blob in record.files.values()}
    with _collecting(catalogue, stale_s) as collecting:
        if collecting is None:
            return 0
        unreferred = {digest: sizes[digest] for digest in sizes.keys() - catalogue.referred()}
        collecting.discard(map(blob_name, unreferred))
        return sum(unreferred.values())


def clean(catalogue: Catalogue, pair: str, stale_s: float) -> list[str]:
    """Removes what interrupted publishes left; returns a phrase for each kind."""
    with _collecting(catalogue, stale_s) as collecting:
        phrases = []
        if collecting is not None:
            contents = {
                name: entry.size
                for name, entry in catalogue.entries(BLOBS).items()
                if collecting.is_stale(entry.modified)
            }
            for digest in catalogue.referred():
                contents.pop(blob_name(digest), None)
            leftovers = [
                name
                for name, entry in catalogue.patience(catalogue.objects.leftovers).items()
                if collecting.is_stale(entry.modified)
            ]
            collecting.discard([*contents, *leftovers])
            for claim in catalogue.open_claims():  # all of them are stale
                if claim.pair == pair:
                    catalogue.replace(removed_name(pair, claim.number), now().encode())
                    catalogue.remove(claim_name(pair, claim.number))
                    phrases.append(f"version {claim.number}, which was claimed and not published")
            if contents:
                amount = f"{sum(contents.values()) / 1e6:,.1f} MB"
                phrases.append(f"{plural(len(contents), 'file')} of no version, {amount}")
            if leftovers:
                phrases.append(plural(len(leftovers), "unfinished write"))
        return phrases


def wait(catalogue: Catalogue, claimed_at: float) -> None:
    """Waits until nobody removes contents; the claim that was made before keeps all others from it.

    claimed_at  when that was, by the store's clock
    """
    began = time.monotonic()
    while True:
        waited_s = time.monotonic() - began
        # Whoever put up one that is older was killed.
        oldest = claimed_at + waited_s - 2 * _LONGEST_S
        if not any(flag.modified > oldest for flag in catalogue.entries(FLAGS).values()):
            return
        if waited_s > catalogue.patience.seconds:
            raise StoreError(
                f"store {catalogue.patience.url}: contents are being removed since {waited_s:.0f} "
                "s: publish again when that is done, within the hour at most"
            )
        time.sleep(_POLL_S)


class _Collecting:
    """What is known while the flag is up."""

    def __init__(self, catalogue: Catalogue, store_time: float, stale_s: float) -> None:
        self._catalogue, self._store_time, self._stale_s = catalogue, store_time, stale_s
        self._began = time.monotonic()

    def is_stale(self, modified: float) -> bool:
        return self._store_time - modified >= self._stale_s

    def discard(self, names: Collection[str] | Iterator[str]) -> None:
        def remove(name: str) -> None:
            if time.monotonic() - self._began > _LONGEST_S:
                raise StoreError("removing contents takes too long: do it again")
            self._catalogue.remove(name)

        self._catalogue.in_threads(remove, list(names))


@contextmanager
def _collecting(catalogue: Catalogue, stale_s: float) -> Iterator[_Collecting | None]:
    """Puts up a flag for a `with` block; None where a publish is under way."""
    flag = f"{FLAGS}/{uuid.uuid4().hex}"
    catalogue.replace(flag, now().encode())
    try:
        entry = catalogue.entry(flag)
        collecting = _Collecting(
            catalogue, time.time() if entry is None else entry.modified, stale_s
        )
        claims = catalogue.open_claims()
        yield collecting if all(collecting.is_stale(claim.since) for claim in claims) else None
    finally:
        catalogue.remove(flag)
