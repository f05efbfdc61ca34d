from __future__ import annotations

from pathlib import Path

import pytest

from specpipe.build.load import load_config
from specpipe.errors import ConfigError
from specpipe.evaluate.tune.yaml_edit import write_schedule

HEAD = """\
# A pair.
name: x
draft: {checkpoint: d}  # small
target: {checkpoint: t}
"""
LEVELS = """\
{indent}schedule:
{indent}  - {{from_batch_size: 1, num_draft_tokens: 4}}
{indent}  - {{from_batch_size: 3, num_draft_tokens: 2}}
"""
SCHEDULE = ((1, 4), (3, 2))


def written(tmp_path: Path, text: str) -> str:
    path = tmp_path / "x.yaml"
    path.write_text(text)
    path.chmod(0o640)
    write_schedule(path, SCHEDULE)
    assert load_config(path).speculation.limits == SCHEDULE
    assert [p.name for p in tmp_path.iterdir()] == ["x.yaml"]
    assert path.stat().st_mode & 0o777 == 0o640
    return path.read_text()


def test_a_new_section(tmp_path: Path) -> None:
    levels = LEVELS.format(indent="  ")
    assert written(tmp_path, HEAD) == f"{HEAD}speculation:\n{levels}"
    assert written(tmp_path, HEAD.rstrip("\n")) == f"{HEAD}speculation:\n{levels}"


def test_into_a_section_whose_comments_stay(tmp_path: Path) -> None:
    section = (
        "speculation:\n    num_draft_tokens: 4  # K\n    # more or less:\n    adaptive: true\n"
    )
    rest = "\n# What is built.\nengine:\n  runtime: torch\n"
    assert written(tmp_path, HEAD + section + rest) == (
        HEAD + section + LEVELS.format(indent="    ") + rest
    )


@pytest.mark.parametrize(
    "earlier",
    [
        "  schedule:\n    - {from_batch_size: 1, num_draft_tokens: 1}\n",
        "  schedule:\n  - from_batch_size: 1\n    num_draft_tokens: 1\n",
        "  schedule: [{from_batch_size: 1,\n      num_draft_tokens: 1}]\n",
        "  schedule: []\n",
    ],
)
def test_in_place_of_an_earlier_one(tmp_path: Path, earlier: str) -> None:
    before, after = "speculation:\n  num_draft_tokens: 8\n", "  # on\n  adaptive: true\n\n# end\n"
    assert written(tmp_path, HEAD + before + earlier + after) == (
        HEAD + before + LEVELS.format(indent="  ") + after
    )


def test_a_longer_draft_raises_num_draft_tokens(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(HEAD + "speculation:\n  num_draft_tokens: 4  # K\n")
    write_schedule(path, ((1, 6),))
    assert path.read_text() == HEAD + (
        "speculation:\n  num_draft_tokens: 6  # K\n"
        "  schedule:\n    - {from_batch_size: 1, num_draft_tokens: 6}\n"
    )
    path.write_text(HEAD)
    write_schedule(path, ((1, 6),))
    assert path.read_text() == HEAD + (
        "speculation:\n  num_draft_tokens: 6\n"
        "  schedule:\n    - {from_batch_size: 1, num_draft_tokens: 6}\n"
    )


def test_a_section_in_braces_or_of_nothing_becomes_one_of_lines(tmp_path: Path) -> None:
    levels, rest = LEVELS.format(indent="  "), "# end\n"
    in_braces = "speculation: {num_draft_tokens: 4,\n  adaptive: true}\n"
    assert written(tmp_path, HEAD + in_braces + rest) == (
        f"{HEAD}speculation:\n  num_draft_tokens: 4\n  adaptive: true\n{levels}{rest}"
    )
    assert written(tmp_path, HEAD + "speculation: {}\n" + rest) == (
        f"{HEAD}speculation:\n{levels}{rest}"
    )


def test_a_file_in_braces_is_left_to_the_user(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    text = "{name: x, draft: {checkpoint: d}, target: {checkpoint: t}}\n"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        write_schedule(path, SCHEDULE)
    assert str(caught.value) == (
        f"{path}: the schedule cannot be put into section speculation as it is written there; "
        "write it by hand:\nspeculation:\n" + LEVELS.format(indent="  ")
    )
    assert path.read_text() == text


LOOKUP = "speculation:\n  prompt_lookup: true\n"


def test_copying_stays_where_it_may(tmp_path: Path) -> None:
    assert written(tmp_path, HEAD + LOOKUP) == HEAD + LOOKUP + LEVELS.format(indent="  ")


def test_windows_lines_stay(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_bytes((HEAD + "engine:\n  runtime: torch\n").replace("\n", "\r\n").encode())
    write_schedule(path, SCHEDULE)
    assert path.read_bytes().startswith(HEAD.replace("\n", "\r\n").encode())
    assert path.read_bytes().count(b"\n") == path.read_bytes().count(b"\r\n")
    assert load_config(path).speculation.limits == SCHEDULE
