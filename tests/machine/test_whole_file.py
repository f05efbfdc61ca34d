"""Files that appear whole."""

from pathlib import Path

import pytest

from specpipe.machine.whole_file import written_whole


def test_the_new_file_takes_the_place_of_the_old_one_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "results" / "run.json"
    for text in ("old", "new"):
        with written_whole(path) as staged:
            staged.write_text(text)
            assert not path.exists() or path.read_text() == "old"
    assert [(file.name, file.read_text()) for file in path.parent.iterdir()] == [
        ("run.json", "new")
    ]


def test_a_failure_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text("old")
    with pytest.raises(OSError, match="disk"), written_whole(path) as staged:
        staged.write_text("half")
        raise OSError("the disk is full")
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("run.json", "old")]
