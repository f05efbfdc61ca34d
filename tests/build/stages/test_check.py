from __future__ import annotations

from pathlib import Path

from specpipe.build.pairing import PairContract, check_pair
from specpipe.build.stages.check import Check
from tests.toy_tokenizers import write_words


def test_writes_the_contract(tmp_path: Path) -> None:
    draft, target = write_words(tmp_path / "draft"), write_words(tmp_path / "target", num_rows=320)
    out = tmp_path / "check"
    out.mkdir()
    Check(draft, target).run(out)
    assert [path.name for path in out.iterdir()] == ["pair.json"]
    assert PairContract.from_json((out / "pair.json").read_text()) == check_pair(draft, target)


def test_inputs_are_the_small_files_that_exist(tmp_path: Path) -> None:
    draft, target = write_words(tmp_path / "draft"), write_words(tmp_path / "target")
    (draft / "model.safetensors").write_bytes(b"")
    (target / "generation_config.json").write_text("{}")
    stage = Check(draft, target)
    assert stage.name == "check"
    assert stage.inputs().files == (
        draft / "tokenizer.json",
        draft / "tokenizer_config.json",
        draft / "config.json",
        target / "tokenizer.json",
        target / "tokenizer_config.json",
        target / "config.json",
        target / "generation_config.json",
    )
