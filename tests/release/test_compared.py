"""release/compared.py: which run a night is compared with, by the store or by this machine."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("fsspec")

from specpipe.build.load import load_config  # noqa: E402
from specpipe.config.sections import PipelineConfig  # noqa: E402
from specpipe.errors import StoreError  # noqa: E402
from specpipe.evaluate.nightly.run import PromotedRun  # noqa: E402
from specpipe.release.compared import find_promoted  # noqa: E402
from specpipe.release.release_file import (
    NIGHTLY_NAME,  # noqa: E402
    digest_of,  # noqa: E402
)
from specpipe.stores.places import open_store  # noqa: E402
from specpipe.stores.promoted import write_promotion  # noqa: E402
from specpipe.stores.store import Blob, Promotion, VersionRecord  # noqa: E402
from tests.evaluate.nightly.recorded import good_run  # noqa: E402

RUN = replace(good_run(), pair="code", repository="r" * 64)
TEXT = json.dumps({"format": 1, "kind": "nightly", **RUN.to_json()})


def promotion(number: int) -> Promotion:
    return Promotion(number=number, digest="d" * 64, promoted_at="2026-11-27T08:00:00+00:00")


def config(folder: Path, release: str = "{}") -> PipelineConfig:
    (folder / "x.yaml").write_text(
        "name: code\ndraft: {checkpoint: draft}\ntarget: {checkpoint: target}\n"
        f"release: {release}\n"
    )
    return load_config(folder / "x.yaml")


def publish(folder: Path, text: str | None) -> int:
    """A version with a run, or with none, straight into the store; returns its number."""
    store = open_store(str(folder / "store"), folder)
    number = store.claim("code")
    contents = {"pair.yaml": b"name: code\n", **({NIGHTLY_NAME: text.encode()} if text else {})}
    files = {}
    for name, data in contents.items():
        (folder / "upload").write_bytes(data)
        files[name] = Blob(hashlib.sha256(data).hexdigest(), len(data))
        store.upload({files[name]: folder / "upload"})
    store.commit(
        VersionRecord(
            pair="code",
            number=number,
            digest=digest_of(files),
            files=files,
            requires={},
            published_at="2026-11-27T02:30:00+00:00",
        )
    )
    return number


def test_this_machine_says_where_there_is_no_store(tmp_path: Path) -> None:
    pair = config(tmp_path)
    assert find_promoted(pair) is None
    path = pair.artifacts.versions / "7" / "results" / "nightly.json"
    path.parent.mkdir(parents=True)
    write_promotion(pair.artifacts.promoted, promotion(7))
    assert find_promoted(pair) == PromotedRun(7, None)
    path.write_text(TEXT)
    assert find_promoted(pair) == PromotedRun(7, RUN)


def test_a_store_says_so_for_all_machines(tmp_path: Path) -> None:
    """What this machine serves does not matter then, nor is anything of the version kept here."""
    pair = config(tmp_path, "{store: store}")
    first, second = publish(tmp_path, TEXT), publish(tmp_path, None)
    write_promotion(pair.artifacts.promoted, promotion(second))
    store = open_store(str(tmp_path / "store"), tmp_path)
    assert find_promoted(pair) is None
    for number, run in ((first, RUN), (second, None)):
        store.promote("code", promotion(number))
        assert find_promoted(pair) == PromotedRun(number, run)
    assert not pair.artifacts.versions.exists()

    store.promote("code", promotion(9))
    with pytest.raises(StoreError, match="has no version 9 of code, it has 1, 2"):
        find_promoted(pair)
    store.promote("code", promotion(publish(tmp_path, TEXT + (17 << 20) * " ")))
    with pytest.raises(StoreError, match=r"results/nightly\.json of version 3 of code has"):
        find_promoted(pair)
