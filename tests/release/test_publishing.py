"""Publishing, listing, fetching, promoting and pruning over a folder, with no server running."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fsspec")

from click.testing import CliRunner, Result  # noqa: E402

from specpipe.build.load import load_config  # noqa: E402
from specpipe.cli.group import main  # noqa: E402
from specpipe.config.sections import PipelineConfig  # noqa: E402
from specpipe.errors import StoreError  # noqa: E402
from specpipe.machine import manifest as manifests  # noqa: E402
from specpipe.release import fetching, local, publishing  # noqa: E402
from specpipe.stores.object_store import ObjectStore  # noqa: E402
from specpipe.stores.places import open_store  # noqa: E402
from specpipe.stores.store import NumberTaken, Store, VersionRecord  # noqa: E402
from tests.release.built_pair import head, repository_digest, write_night  # noqa: E402


@pytest.fixture
def pair(built: PipelineConfig, tmp_path: Path) -> PipelineConfig:
    """A built and proved pair whose store is a folder."""
    return with_release(built, f"store: {tmp_path / 'store'}")


def with_release(config: PipelineConfig, *lines: str) -> PipelineConfig:
    path = config.source
    path.write_text(f"{path.read_text()}\nrelease:\n" + "".join(f"  {line}\n" for line in lines))
    return load_config(path)


def store_of(config: PipelineConfig) -> Store:
    assert config.release.store is not None
    return open_store(config.release.store, config.base_dir)


def run(config: PipelineConfig, *words: str) -> Result:
    return CliRunner().invoke(main, [*words, "--config", str(config.source)])


def done(config: PipelineConfig, *words: str) -> dict[str, Any]:
    result = run(config, *words, "--json")
    assert result.exit_code == 0, result.stderr
    data: dict[str, Any] = json.loads(result.stdout)
    return data


def refused(config: PipelineConfig, *words: str) -> str:
    result = run(config, *words)
    assert result.exit_code == 1, result.output
    return result.stderr.splitlines()[-1].removeprefix("Error: ")


def new_night(config: PipelineConfig, ratio: float) -> None:
    """A night of the same repository, so that the next version has other content."""
    write_night(config, ratio=ratio)


def elsewhere(config: PipelineConfig, folder: Path) -> PipelineConfig:
    """The same YAML on a machine that has built nothing."""
    folder.mkdir()
    shutil.copyfile(config.source, folder / "pair.yaml")
    return load_config(folder / "pair.yaml")


def test_publish_numbers_new_content_and_knows_the_old(pair: PipelineConfig) -> None:
    planned = done(pair, "publish", "--dry-run")
    assert planned["is_dry_run"] and planned["transferred"]["num_bytes_present"] == 0
    assert not store_of(pair).versions("pair")
    assert [path.name for path in pair.artifacts.versions.iterdir()] == [".publish.lock"]

    first = done(pair, "publish")
    assert (first["number"], first["is_new"], first["is_signed"]) == (1, True, False)
    assert first["digest"] == planned["digest"]
    (record,) = store_of(pair).versions("pair")
    assert (record.digest, record.requires["runtime"]) == (first["digest"], "torch")
    assert first["transferred"]["num_files"] == len(set(record.files.values()))
    assert local.local_numbers(pair.artifacts.versions) == []  # it is in the store

    again = run(pair, "publish")
    assert again.stdout == (
        f"version 1 of pair ({first['digest'][:12]}) in {pair.release.store} has this content "
        "already: nothing is published\n"
    )
    new_night(pair, 1.4)
    second = run(pair, "publish")
    old, new = store_of(pair).versions("pair")
    changed = {name for name, blob in new.files.items() if blob not in old.files.values()}
    assert changed >= {"release.json", "results/nightly.json", "results/nightly-bench.json"}
    assert not any(name.startswith("model_repo") for name in changed)
    said, amounts = second.stdout.splitlines()
    assert said == f"version 2 of pair ({new.digest[:12]}) published, not signed: " + str(
        pair.release.store
    )
    assert amounts.endswith(f" kB in {len(changed)} files; 25.8 MB were there")
    assert [record.number for record in store_of(pair).versions("pair")] == [1, 2]


def test_versions_here_share_no_file_and_are_hashed_again_only_where_touched(
    pair: PipelineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions = pair.artifacts.versions
    large = "model_repo/speculative/1/target/model.safetensors"
    for number, ratio in ((1, 1.3), (2, 1.4)):
        new_night(pair, ratio)
        done(pair, "publish")
        done(pair, "promote", str(number))
        assert (versions / str(number) / large).stat().st_nlink == 1

    def read(*_: object) -> str:
        raise AssertionError("hashed")

    with monkeypatch.context() as patched:
        patched.setattr(manifests, "_digest", read)
        for number in (1, 2):
            found = local.whole_version(versions, number, log=pytest.fail)
            assert found is not None and found.number == number
    (versions / "2" / "pair.yaml").write_text("name: other\n")
    said: list[str] = []
    assert local.whole_version(versions, 2, said.append) is None
    assert said[-1] == "version 2: pair.yaml changed: it is fetched again"


def bad_night(config: PipelineConfig, **values: Any) -> None:
    run = {**head("nightly"), "repository": repository_digest(config), **values}
    path = config.artifacts.result("nightly").with_suffix(".jsonl")
    with path.open("a") as file:
        file.write(json.dumps(run) + "\n")


REFUSALS: dict[str, tuple[Callable[[PipelineConfig], Any], str, bool]] = {
    "a bad night": (
        lambda pair: bad_night(pair, outcome="bad", reasons=["verification: wrong token"]),
        "the last nightly run of pair, of 2026-11-29T03:00:09+00:00, is bad (verification: wrong "
        "token): mend that, and run `specpipe nightly {yaml}` again",
        False,
    ),
    "an unfinished night": (
        lambda pair: bad_night(pair, outcome="unfinished", reasons=["disk full"]),
        "the last nightly run of pair, of 2026-11-29T03:00:09+00:00, is unfinished (disk full): "
        "mend that, and run `specpipe nightly {yaml}` again",
        False,
    ),
    "a night of another build": (
        lambda pair: bad_night(pair, outcome="good", repository="ab" * 32),
        "the last nightly run of pair, of 2026-11-29T03:00:09+00:00, was of another build: run "
        "`specpipe nightly {yaml}` again, or publish it as it is with --allow-unproved",
        True,
    ),
    "a night of an earlier specpipe": (
        lambda pair: bad_night(pair, outcome="good", repository=None),
        "the last nightly run of pair, of 2026-11-29T03:00:09+00:00, does not say of which build "
        "it was: run `specpipe nightly {yaml}` again, or publish it as it is with --allow-unproved",
        True,
    ),
    "nothing": (
        lambda pair: pair.artifacts.verification.unlink(),
        "pair was never verified: run `specpipe nightly {yaml}` first, or publish it as it is with "
        "--allow-unproved",
        True,
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_is_not_proved_is_not_published(name: str, pair: PipelineConfig) -> None:
    change, sentence, is_allowed = REFUSALS[name]
    change(pair)
    expected = sentence.format(yaml=pair.source)
    assert refused(pair, "publish") == refused(pair, "publish", "--dry-run") == expected
    assert not store_of(pair).versions("pair")
    allowed = run(pair, "publish", "--allow-unproved", "--dry-run")
    assert (allowed.exit_code == 0) is is_allowed
    warning = expected.replace(", or publish it as it is with --allow-unproved", "")
    assert (f"warning: {warning}; allowed by --allow-unproved" in allowed.stderr) is is_allowed


def test_a_changed_repository_is_not_published_whatever_is_allowed(pair: PipelineConfig) -> None:
    path = pair.artifacts.repository / "speculative" / "1" / "pair.json"
    text = path.read_text()
    path.unlink()
    path.write_text(text.replace("3", "2", 1))
    said = refused(pair, "publish", "--allow-unproved")
    assert said.startswith(
        f"{pair.artifacts.repository} is not what was built: file speculative/1/"
    )
    assert not store_of(pair).versions("pair")


def test_of_two_publishes_at_once_one_waits_and_finds_the_others_version(
    pair: PipelineConfig,
) -> None:
    said: list[str] = []

    def one(_: int) -> publishing.Published:
        return publishing.publish(pair, store_of(pair), None, log=said.append)

    with ThreadPoolExecutor(2) as pool:
        published = list(pool.map(one, range(2)))
    assert {found.number for found in published} == {1}
    assert sorted(found.is_new for found in published) == [False, True]
    assert said == ["another publish of this pair goes on, waiting"]


def test_an_interrupted_publish_leaves_the_old_version_and_the_next_one_cleans_up(
    pair: PipelineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = done(pair, "publish")
    new_night(pair, 1.4)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(ObjectStore, "commit", interrupt)
        assert run(pair, "publish").exit_code == 130
    assert [record.digest for record in store_of(pair).versions("pair")] == [first["digest"]]
    assert [path for path in pair.artifacts.versions.iterdir() if path.is_dir()] == []

    claim = Path(store_of(pair).url, "pairs", "pair", "claims", "000002")
    os.utime(claim, (0, 0))  # as if that was long ago
    second = run(pair, "publish")
    assert second.exit_code == 0 and "version 3 of pair (" in second.stdout
    assert second.stderr.startswith(f"{pair.release.store}: ")
    assert not claim.exists()


def test_a_number_that_another_one_took_is_told_and_the_next_is_claimed(
    pair: PipelineConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit, taken = ObjectStore.commit, []

    def lose_once(self: ObjectStore, record: VersionRecord) -> None:
        if not taken:
            taken.append(record.number)
            raise NumberTaken(f"store {self.url} has a version {record.number} of pair already")
        commit(self, record)

    monkeypatch.setattr(ObjectStore, "commit", lose_once)
    result = run(pair, "publish")
    assert result.exit_code == 0, result.stderr
    assert result.stderr.splitlines()[-1] == (
        f"store {pair.release.store} has a version 1 of pair already: claiming another number"
    )
    (record,) = store_of(pair).versions("pair")
    assert (taken, record.number) == ([1], 2)
    done(pair, "promote", "2")
    statement = json.loads((pair.artifacts.versions / "2" / "release.json").read_text())
    assert (statement["number"], statement["previous"]) == (2, None)


def test_versions_are_listed_promoted_and_pruned(pair: PipelineConfig, tmp_path: Path) -> None:
    assert run(pair, "versions").stdout == f"{pair.release.store} has no version of pair\n"
    assert refused(pair, "promote", "latest") == (
        f"{pair.release.store} has no version of pair: run `specpipe publish` first"
    )
    for ratio in (1.3, 1.4, 1.5, 1.6):
        new_night(pair, ratio)
        done(pair, "publish")
    assert refused(pair, "promote", "9") == (
        f"{pair.release.store} has no version 9 of pair, it has 1 to 4"
    )
    there = elsewhere(pair, tmp_path / "there")
    planned = done(there, "promote", "2", "--dry-run")
    assert (planned["is_dry_run"], planned["is_served"], planned["previous"]) == (True, False, None)
    assert planned["num_bytes"] > 25e6 and not local.local_numbers(there.artifacts.versions)

    result = run(there, "promote", "2")
    assert result.exit_code == 0, result.stderr
    assert result.stdout == (
        f"version 2 of pair ({planned['digest'][:12]}) is promoted; no server of it runs here: "
        "`specpipe serve --promoted` begins with it\n"
    )
    third = done(there, "promote", "3")  # all but what the night wrote is here
    assert third["previous"] == 2 and third["num_bytes"] < 1e5
    assert store_of(there).promotion("pair").number == 3  # type: ignore[union-attr]
    assert refused(there, "promote", "2").startswith(
        "version 2 of pair is older than version 3, which was promoted on this machine"
    )

    table = run(pair, "versions").stdout.splitlines()
    assert [line.split()[0] for line in table[1:5]] == ["4", "3", "2", "1"]
    assert table[2].split()[4:] == ["unsigned", "0.361", "1.50", *table[2].split()[7:]]
    assert table[2].endswith("MB  promoted")
    assert table[5].startswith("promoted in the store: version 3, since ")
    assert table[5].endswith(
        f"on this machine: none. `specpipe promote 3 --config {pair.source}` follows the store"
    )

    back = done(there, "rollback")
    assert (back["number"], back["previous"], back["num_bytes"]) == (2, None, 0)
    assert refused(there, "rollback").startswith("version 2 of pair has none before it: ")
    done(there, "promote", "3")
    done(there, "promote", "4")
    shown = run(there, "versions", "prune", "--keep", "1", "--dry-run").stdout.splitlines()
    assert shown == [
        f"would go from {pair.release.store}: version 1, 2 of pair",
        "would go from this machine: version 2 of pair",
        "kept: 3, 4",
    ]
    pruned = done(there, "versions", "prune", "--keep", "1")
    assert (pruned["numbers"], pruned["kept"]) == ([1, 2], [3, 4])
    assert pruned["freed_bytes"] > 0 and pruned["freed_here_bytes"] > 25e6
    assert local.local_numbers(there.artifacts.versions) == [3, 4]


def test_a_rollback_needs_no_store(pair: PipelineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    for ratio in (1.3, 1.4):
        new_night(pair, ratio)
        done(pair, "publish")
    for number in ("1", "2"):
        done(pair, "promote", number)

    def unreachable(self: ObjectStore, *_: object) -> None:
        raise StoreError(f"store {self.url} does not answer")

    for call in ("versions", "promotion", "promote", "download"):
        monkeypatch.setattr(ObjectStore, call, unreachable)
    assert refused(pair, "rollback") == (
        "version 1 of pair is promoted on this machine, but the store does not say so: store "
        f"{pair.release.store} does not answer; `specpipe promote 1 --older --config "
        f"{pair.source}` tells it, when it can be reached"
    )
    assert json.loads(pair.artifacts.promoted.read_text())["number"] == 1


def test_a_full_disk_of_the_publisher_is_told_with_its_place(
    pair: PipelineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        Path("/dev/full").write_text("a statement")

    with monkeypatch.context() as patch:
        patch.setattr(publishing, "assemble", full)
        assert refused(pair, "publish") == (
            f"no version of pair can be put together in {pair.artifacts.versions}: No space left "
            "on device; nothing was published"
        )
    assert done(pair, "publish")["number"] == 1


def test_a_full_disk_is_told_with_what_was_not_recorded_there(pair: PipelineConfig) -> None:
    done(pair, "publish")
    promoted = pair.artifacts.promoted
    promoted.with_name(f".{promoted.name}.{os.getpid()}").symlink_to("/dev/full")
    assert refused(pair, "promote", "1") == (
        f"version 1 of pair is promoted, but {promoted} does not say so: No space left on device; "
        f"`specpipe promote 1 --older --config {pair.source}` tells it, when it can be written"
    )
    assert not promoted.exists() and store_of(pair).promotion("pair") is None
    assert done(pair, "promote", "1")["number"] == 1
    assert promoted.exists()


def test_a_version_is_fetched_whole_or_gone_on_with(
    pair: PipelineConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done(pair, "publish")
    there = elsewhere(pair, tmp_path / "there")

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(fetching, "put_in_place", interrupt)
        assert run(there, "promote", "1").exit_code == 130
    assert local.local_numbers(there.artifacts.versions) == []
    assert not there.artifacts.promoted.exists()
    gone_on = done(there, "promote", "1")
    assert gone_on["num_bytes"] == 0 and local.local_numbers(there.artifacts.versions) == [1]

    damaged = there.artifacts.versions / "1" / "model_repo" / "ensemble" / "config.pbtxt"
    damaged.unlink()
    mended = run(there, "promote", "1")
    assert mended.exit_code == 0, mended.stderr
    assert "version 1: model_repo/ensemble/config.pbtxt is gone: it is fetched again" in (
        mended.stderr
    )
    assert damaged.is_file()


def test_what_is_not_for_this_machine_is_refused_before_it_is_fetched(
    pair: PipelineConfig, tmp_path: Path
) -> None:
    done(pair, "publish")
    path = Path(store_of(pair).url, "pairs", "pair", "versions", "000001.json")
    record = json.loads(path.read_text())
    record["requires"] = {
        "runtime": "tensorrt_llm",
        "libraries": {},
        "engines": {"target": {"compute_capabilities": ["9.0"]}},
    }
    path.write_text(json.dumps(record))
    there = elsewhere(pair, tmp_path / "there")
    said = refused(there, "promote", "1")
    assert said.startswith("version 1 of pair is not for this machine: its engines run on a GPU")
    assert said.endswith(": nothing was fetched")

    record["files"]["pair.yaml"]["sha256"] = "ab" * 32
    path.write_text(json.dumps(record))
    assert refused(there, "promote", "1").startswith(
        f"{pair.release.store}: the record of version 1 of pair does not match its digest"
    )
    record["files"]["../../x"] = record["files"].pop("pair.yaml")
    path.write_text(json.dumps(record))
    assert "'../../x' is no name of a file below a folder" in refused(there, "promote", "1")
    assert local.local_numbers(there.artifacts.versions) == []


def test_a_damaged_promotion_is_told(pair: PipelineConfig) -> None:
    done(pair, "publish")
    pair.artifacts.promoted.write_text("{")
    for words in (("promote", "1"), ("rollback",), ("versions",)):
        assert refused(pair, *words).startswith(
            f"{pair.artifacts.promoted} is not what `specpipe promote` writes ("
        )
