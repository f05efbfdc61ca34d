"""Which files say what the licence of a checkpoint is, and hostile ones among them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from specpipe.checkpoints.licences import Licences, find_licences
from specpipe.errors import CheckpointError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "checkpoint").mkdir()
    return tmp_path / "checkpoint"


def find(folder: Path) -> Licences:
    return find_licences("draft", "org/name", folder)


def test_files_are_found_by_name_and_the_card_by_what_it_declares(folder: Path) -> None:
    names = ["LICENSE", "license.txt", "NOTICE", "Use_Policy.md", "COPYING.LESSER", "LICENCE.md"]
    for name in (*names, "config.json", "model.safetensors"):
        (folder / name).write_text("text")
    (folder / "LICENSES").mkdir()
    card = "---\r\nlicense: other\r\nlicense_name: llama3.1\r\nlicense_link: LICENSE\r\n---\r\n"
    (folder / "README.md").write_text(card, newline="")
    assert find(folder) == Licences(
        files={name: folder / name for name in [*sorted(names), "README.md"]},
        declared=("other",),
        name="llama3.1",
        link="LICENSE",
    )


def test_a_checkpoint_without_any_is_noted(folder: Path) -> None:
    what = "no licence file found in the draft's checkpoint org/name"
    assert find(folder).notes == (what,)
    (folder / "README.md").write_text("---\nlicense:\n- mit\n- apache-2.0\n---\n")
    found = find(folder)
    assert found.declared == ("mit", "apache-2.0")
    assert found.notes == (f"{what}; its README.md says mit, apache-2.0",)
    assert find(folder / "gone").notes == (
        "no licence file found: the draft's checkpoint org/name is no longer where it was built "
        "from",
    )


def test_a_card_as_long_as_a_book_is_left_out_and_noted(folder: Path) -> None:
    (folder / "LICENSE").write_text("text")
    (folder / "README.md").write_text("---\nlicense: mit\n---\n" + "x" * (1 << 20))
    found = find(folder)
    assert (found.declared, list(found.files)) == (("mit",), ["LICENSE"])
    assert found.notes == (
        "README.md of the draft's checkpoint org/name has more than 1048576 bytes and is left out",
    )


@pytest.mark.parametrize(
    "card",
    [
        "# no front matter\nlicense: mit\n",
        "---\nlicense: mit\n",
        "---\nlicense: [mit\n---\n",
        "---\nlicense: {a: b}\n---\n",
        f"---\nlicense: {'x' * 201}\n---\n",
        '---\nlicense: "a\\nb"\n---\n',
        f"---\nlicense: {'[' * 20_000}\n---\n",
        "---\ntags: &a [x]\nlicense: *a\n---\n",
        b"---\nlicense: \xff\xfe\x00\n---\n",
    ],
)
def test_a_card_that_says_nothing_usable_declares_nothing(folder: Path, card: str | bytes) -> None:
    (folder / "README.md").write_bytes(card if isinstance(card, bytes) else card.encode())
    assert find(folder).declared == () and find(folder).files == {}


def test_what_is_no_plain_file_of_the_checkpoint_is_refused(folder: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("a secret")
    licence = folder / "LICENSE"
    licence.symlink_to(secret)
    with pytest.raises(CheckpointError, match="is a link to .*, which is outside the checkpoint"):
        find(folder)
    licence.unlink()
    licence.symlink_to(folder / "gone")
    with pytest.raises(CheckpointError, match="LICENSE does not exist"):
        find(folder)
    licence.unlink()
    os.mkfifo(licence)
    with pytest.raises(CheckpointError, match="LICENSE is a pipe, not a file"):
        find(folder)
    licence.unlink()
    licence.write_bytes(b"x" * ((1 << 20) + 1))
    with pytest.raises(CheckpointError, match="LICENSE has more than 1048576 bytes"):
        find(folder)
    licence.unlink()
    for number in range(33):
        (folder / f"LICENSE.{number}").write_text("")
    with pytest.raises(CheckpointError, match="has 33 licence files, expected at most 32"):
        find(folder)


def test_the_snapshot_of_a_hub_s_cache_is_read_through_its_links(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--org--name" / "snapshots" / ("a" * 40)
    blobs = tmp_path / "models--org--name" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    (blobs / "123").write_text("MIT")
    (snapshot / "LICENSE").symlink_to("../../blobs/123")
    assert list(find(snapshot).files) == ["LICENSE"]
