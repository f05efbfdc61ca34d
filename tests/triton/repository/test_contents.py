"""The written repository: its tree, what it links, and that it can be moved."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from specpipe.runtimes.pair.pair import PairOptions
from specpipe.runtimes.pair_file import PairFile
from specpipe.triton import repository
from specpipe.triton.repository import lint


def arguments(folder: Path, model: str, **parameters: str) -> dict[str, str]:
    """What Triton hands to `initialize`."""
    config = {"parameters": {key: {"string_value": value} for key, value in parameters.items()}}
    return {
        "model_config": json.dumps(config),
        "model_repository": str(folder / model),
        "model_version": "1",
    }


def test_the_tree(echo_repository: Callable[..., Path]) -> None:
    folder = echo_repository()
    files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert {file for file in files if not file.startswith("plain")} == {
        "ensemble/config.pbtxt",
        "preprocessing/config.pbtxt",
        "preprocessing/1/limits.json",
        "preprocessing/1/model.py",
        "preprocessing/1/tokenizer/tokenizer.json",
        "preprocessing/1/tokenizer/tokenizer_config.json",
        "preprocessing/1/tokenizer/generation_config.json",
        "preprocessing/1/tokenizer/config.json",
        "speculative/config.pbtxt",
        "speculative/1/limits.json",
        "speculative/1/model.py",
        "speculative/1/pair.json",
        "speculative/1/draft/config.json",
        "speculative/1/target/config.json",
        "speculative/1/tokenizer/tokenizer.json",
        "speculative/1/tokenizer/tokenizer_config.json",
        "speculative/1/tokenizer/generation_config.json",
        "speculative/1/tokenizer/config.json",
        "postprocessing/config.pbtxt",
        "postprocessing/1/model.py",
    }
    assert (folder / "ensemble" / "1").is_dir()


def test_engines_are_linked_and_the_users_files_copied(
    echo_repository: Callable[..., Path],
) -> None:
    folder = echo_repository()
    version = folder / "speculative" / "1"
    engine = folder.parent / "model_repo-engine" / "config.json"
    assert (version / "target" / "config.json").samefile(engine)
    assert (version / "tokenizer" / "tokenizer.json").stat().st_nlink == 1


def test_everything_is_found_after_a_move(echo_repository: Callable[..., Path]) -> None:
    folder = echo_repository()
    moved = folder.rename(folder.parent / "elsewhere")
    assert lint.lint(moved) == []
    found = repository.parameter_path(
        arguments(moved, "speculative", pair_file="pair.json"), "pair_file"
    )
    assert found == moved / "speculative" / "1" / "pair.json"
    for path in moved.rglob("*.pbtxt"):
        assert str(folder) not in path.read_text()


def test_a_pair_file_round_trips(tmp_path: Path) -> None:
    pair = PairFile(
        "torch",
        PairOptions(
            num_draft_tokens=2,
            schedule=((1, 2), (4, 0)),
            prompt_lookup=True,
            max_seq_len=77,
            unused_token_ids=((250, 256), (300, 320)),
        ),
    )
    path = tmp_path / "pair.json"
    path.write_text(pair.to_json())
    assert PairFile.read(path) == pair


@pytest.mark.parametrize("setting", ["schedule", "prompt_lookup"])
def test_a_pair_file_from_before_there_was_a_setting(tmp_path: Path, setting: str) -> None:
    written = json.loads(PairFile("torch", PairOptions()).to_json())
    del written["options"][setting]
    path = tmp_path / "pair.json"
    path.write_text(json.dumps(written))
    assert PairFile.read(path) == PairFile("torch", PairOptions())
