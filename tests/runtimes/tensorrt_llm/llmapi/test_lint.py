"""Each rule for `model.yaml`, on a repository that breaks it alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from specpipe.build.stages.package import models_folder
from specpipe.runtimes.pair.pair import PairOptions
from specpipe.runtimes.pair_file import PairFile
from specpipe.runtimes.runtime import load_runtime
from specpipe.triton import repository
from specpipe.triton.repository import lint
from tests.toy import write_toy_checkpoint

ROOT = Path(__file__).parents[4]
TOKENIZER = ROOT / "models" / "python-code" / "target"
ARGUMENTS: dict[str, Any] = {
    "model": "target",
    "max_batch_size": 8,
    "max_seq_len": 1024,
    "speculative_config": {
        "decoding_type": "Draft_Target",
        "max_draft_len": 4,
        "speculative_model": "draft",
    },
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    checkpoint = write_toy_checkpoint(tmp_path / "checkpoint")
    (tmp_path / "model_repo").mkdir()
    settings = {"backend": "pytorch", "tensorrt_llm": "1.2.1", "llm": ARGUMENTS}
    repository.write(
        tmp_path / "model_repo",
        models=models_folder(),
        draft_engine=checkpoint,
        target_engine=checkpoint,
        tokenizer=TOKENIZER,
        pair=PairFile("tensorrt_llm", PairOptions(runtime_settings=settings)),
    )
    return tmp_path / "model_repo"


def change(folder: Path, **changes: Any) -> None:
    path = folder / "speculative" / "1" / "model.yaml"
    path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), **changes}))


def test_what_packaging_writes_has_no_fault(folder: Path) -> None:
    assert lint.lint(folder) == []
    assert load_runtime("tensorrt_llm").name == "tensorrt_llm"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"max_batch_size": 4}, "model.yaml says 4 where pair.json has max_batch_size 8"),
        ({"max_seq_len": None}, "model.yaml says None where pair.json has max_seq_len 1024"),
        ({"model": "/elsewhere"}, "model.yaml has model /elsewhere, not target"),
        (
            {"speculative_config": {"max_draft_len": 4, "speculative_model": "org/draft"}},
            "model.yaml names another draft in speculative_config than draft",
        ),
        (
            {"speculative_config": {"max_draft_len": 3, "speculative_model": "draft"}},
            "model.yaml says 3 where pair.json has num_draft_tokens 4",
        ),
        (
            {"speculative_config": None},
            "model.yaml says 0 where pair.json has num_draft_tokens 4",
        ),
    ],
)
def test_arguments_that_do_not_fit(folder: Path, changes: dict[str, Any], expected: str) -> None:
    change(folder, **changes)
    assert lint.lint(folder) == [f"speculative: {expected}"]


def test_a_yaml_that_cannot_be_read(folder: Path) -> None:
    path = folder / "speculative" / "1" / "model.yaml"
    path.write_text("- a\n")
    assert lint.lint(folder) == [f"speculative: {path} holds no mapping"]
    path.write_text("a: [\n")
    (fault,) = lint.lint(folder)
    assert fault.startswith(f"speculative: {path}:")


def test_a_pair_file_that_cannot_be_read_is_one_fault(folder: Path) -> None:
    path = folder / "speculative" / "1" / "pair.json"
    path.write_text("[]")
    (fault,) = lint.lint(folder)
    assert fault.startswith(f"speculative: {path} cannot be read (")


def test_without_model_yaml_the_pair_is_still_the_llm_apis(folder: Path) -> None:
    path = folder / "speculative" / "1" / "model.yaml"
    path.unlink()
    (fault,) = lint.lint(folder)
    assert fault.startswith(f"speculative: {path}")


def test_a_checkpoint_without_weights(folder: Path) -> None:
    target = folder / "speculative" / "1" / "target"
    (target / "model.safetensors").unlink()
    assert lint.lint(folder) == [
        f"speculative: {target} has no *.safetensors file, the only kind of weights that "
        "specpipe reads"
    ]


def test_code_and_pickles_beside_the_weights(folder: Path) -> None:
    draft = folder / "speculative" / "1" / "draft"
    for name in ("modeling.py", "x.bin"):
        (draft / name).write_text("")
    assert lint.lint(folder) == [
        f"speculative: {draft / name} could run code when the checkpoint is loaded: delete it"
        for name in ("modeling.py", "x.bin")
    ]
