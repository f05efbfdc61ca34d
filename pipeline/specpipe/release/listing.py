"""`specpipe versions`: what is published of a pair, and what of it is on this machine."""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specpipe.errors import SignatureError
from specpipe.machine.columns import aligned
from specpipe.machine.memory import format_bytes
from specpipe.machine.own_json import read_object
from specpipe.release.local import local_numbers
from specpipe.release.release_file import NIGHTLY_NAME, SIGNATURE_NAME
from specpipe.release.serving_here import serving_here
from specpipe.release.signatures import MAX_BYTES, signed_statement, verify_record
from specpipe.release.trust.publishers import Trust
from specpipe.release.trust.serving import trust_of
from specpipe.stores.promoted import read_promotion
from specpipe.stores.records import below
from specpipe.stores.store import Blob, Promotion, Store, VersionRecord

if TYPE_CHECKING:
    from specpipe.config.sections import PipelineConfig


@dataclass(frozen=True, kw_only=True)
class ListedVersion:
    """A published version.

    signed_by   the trusted publisher who did; "unsigned", "nobody trusted", or "somebody" where the
                YAML names nobody to trust
    acceptance  share of drafted tokens that were accepted in its nightly run; None: not measured
    speed_up    that of the first concurrency of its nightly run
    marks       promoted (in the store), served, loaded, here
    """

    number: int
    digest: str
    published_at: str
    signed_by: str
    acceptance: float | None
    speed_up: float | None
    size_bytes: int
    marks: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Listing:
    """The versions of a pair in a store, newest first, and what is to be known of them."""

    pair: str
    store: str
    versions: tuple[ListedVersion, ...]
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def lines(self) -> list[str]:
        """Returns a table, and the notes below it."""
        if not self.versions:
            return [f"{self.store} has no version of {self.pair}"]
        rows = [("", "digest", "published", "signed by", "accepted", "speed-up", "size", "")]
        rows += [
            (
                str(version.number),
                version.digest[:12],
                version.published_at[:16].replace("T", " "),
                version.signed_by,
                "-" if version.acceptance is None else f"{version.acceptance:.3f}",
                "-" if version.speed_up is None else f"{version.speed_up:.2f}",
                format_bytes(version.size_bytes),
                ", ".join(version.marks),
            )
            for version in self.versions
        ]
        return [*aligned(rows, texts=(1, 2, 3, 7)), *self.notes]


def list_versions(config: PipelineConfig, store: Store) -> Listing:
    """Returns what is published; of each version only its small files are fetched."""
    records = sorted(store.versions(config.name), key=lambda record: -record.number)
    promotion = store.promotion(config.name)
    local = read_promotion(config.artifacts.promoted)
    trust = trust_of(config)
    serving = serving_here(config.artifacts_dir)
    marks: dict[str, Collection[int | None]] = {
        "promoted": () if promotion is None else (promotion.number,),
        "served": () if serving is None else (serving.number,),
        "loaded": () if serving is None or not serving.is_loaded else (serving.previous,),
        "here": local_numbers(config.artifacts.versions),
    }
    with tempfile.TemporaryDirectory(prefix="specpipe-versions-") as folder:
        folders = _fetch_small(store, records, Path(folder))
        runs = {record.number: _nightly(folders[record.number]) for record in records}
        versions = tuple(
            ListedVersion(
                number=record.number,
                digest=record.digest,
                published_at=record.published_at,
                signed_by=_signer(record, folders[record.number], trust),
                acceptance=_acceptance(runs[record.number]),
                speed_up=_speed_up(runs[record.number]),
                size_bytes=sum(blob.size for blob in record.files.values()),
                marks=tuple(mark for mark, numbers in marks.items() if record.number in numbers),
            )
            for record in records
        )
    return Listing(
        pair=config.name,
        store=store.url,
        versions=versions,
        notes=tuple(promotion_notes(promotion, local, config)),
    )


def promotion_notes(
    promotion: Promotion | None, local: Promotion | None, config: PipelineConfig
) -> list[str]:
    """Returns what to know where this machine and the store do not say the same."""
    if promotion is None or (local is not None and local.number == promotion.number):
        return []
    here = "none" if local is None else f"version {local.number}"
    older = " --older" if local is not None and promotion.number < local.number else ""
    return [
        f"promoted in the store: version {promotion.number}, since {promotion.promoted_at}; on "
        f"this machine: {here}. `specpipe promote {promotion.number}{older} --config "
        f"{config.source}` follows the store"
    ]


def _fetch_small(store: Store, records: Sequence[VersionRecord], folder: Path) -> dict[int, Path]:
    """Fetches what tells of each version, and is small; returns a folder for each."""
    wanted: dict[Path, Blob] = {}
    folders = {}
    for record in records:
        folders[record.number] = folder / str(record.number)
        small = signed_statement(record)
        nightly = record.files.get(NIGHTLY_NAME)
        if nightly is not None and nightly.size <= MAX_BYTES:
            small[NIGHTLY_NAME] = nightly
        wanted |= below(folders[record.number], small)
    store.download(wanted)
    return folders


def _nightly(folder: Path) -> dict[str, Any]:
    """Returns a version's nightly run; nothing where it has none that can be read."""
    try:
        return read_object(folder / NIGHTLY_NAME)
    except (OSError, ValueError):
        return {}


def _acceptance(run: Mapping[str, Any]) -> float | None:
    try:
        counts = run["acceptance"]
        return float(counts["num_accepted_tokens"]) / float(counts["num_draft_tokens"])
    except (TypeError, KeyError, ValueError, ZeroDivisionError):
        return None


def _speed_up(run: Mapping[str, Any]) -> float | None:
    try:
        return float(run["speed_ups"][0]["ratio"])
    except (TypeError, KeyError, ValueError, IndexError):
        return None


def _signer(record: VersionRecord, folder: Path, trust: Trust | None) -> str:
    """Returns who signed the files of a record, by their digests alone."""
    if SIGNATURE_NAME not in record.files:
        return "unsigned"
    if trust is None:
        return "somebody"
    try:
        return verify_record(record, folder, trust).publisher
    except SignatureError:
        return "nobody trusted"
