"""`specpipe draft train`, called as users call it."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from specpipe.cli.group import main
from tests.training.toy_pair import write_answers, write_pair


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--mask-token", "7"], "--mask-token has no effect without --parallel."),
        (
            ["--from-log-probs", "--on-policy", "0.5"],
            "--from-log-probs knows the target's answers alone: leave out --on-policy and "
            "--on-prompts.",
        ),
        (["--from", "x", "--shape", __file__], "--shape has random weights: leave out --from."),
        (["--parallel", "1"], "Invalid value for '--parallel': 1 is not in the range 2<=x<=64."),
        (
            ["--learning-rate", "nan"],
            "Invalid value for '--learning-rate': nan is no finite number.",
        ),
        (["--epochs", "inf"], "Invalid value for '--epochs': inf is no finite number."),
        (
            ["--seed", "4294967296"],
            "Invalid value for '--seed': 4294967296 is not in the range 0<=x<=4294967295.",
        ),
        (["--output", ""], "Invalid value for '--output': it is empty: give the name of a folder."),
        (
            ["--output", "a\udcff"],
            "Invalid value for '--output': a\\udcff is no UTF-8, which not every library can "
            "write.",
        ),
    ],
)
def test_options_that_contradict_are_a_usage_error(options: list[str], sentence: str) -> None:
    required = ["--config", "x.yaml", "--answers", "a", "--output", "o"]
    done = CliRunner().invoke(main, ["draft", "train", *required, *options])
    assert done.exit_code == 2
    assert done.stderr.splitlines()[-1] == f"Error: {sentence}"


def test_a_missing_library_is_named_with_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "accelerate" else find(name)
    )
    done = CliRunner().invoke(
        main, ["draft", "train", "--config", "x.yaml", "--answers", "a", "--output", "o"]
    )
    assert done.exit_code == 1
    assert done.stderr.startswith("Error: specpipe draft train needs 'accelerate': ")
    assert "[train]" in done.stderr


def test_a_draft_is_trained_and_passes_the_check_of_its_pair(tmp_path: Path) -> None:
    config = write_pair(tmp_path)
    answers = write_answers(tmp_path / "answers", config)
    output = tmp_path / "trained"
    arguments = ["--config", str(config), "--answers", str(answers), "--output", str(output)]
    options = ["--steps", "4", "--held-out-share", "0.2", "--device", "cpu", "--json"]
    done = CliRunner().invoke(main, ["draft", "train", *arguments, *options])
    assert done.exit_code == 0, done.stderr
    printed = json.loads(done.stdout)
    assert printed == json.loads((output / "training.json").read_text(encoding="utf-8"))
    assert printed["record"]["settings"]["num_draft_tokens"] == 3
    assert "40 answers: 32 to train on, 8 of 4 groups to measure on" in done.stderr
    checked = CliRunner().invoke(
        main, ["check", "--config", str(config), "--set", f"draft.checkpoint={output}"]
    )
    assert checked.exit_code == 0, checked.stderr
    assert checked.stdout.startswith("draft and target fit: 250 token ids in use")
