"""Packaging: the contract's ids, the linter's word, and what makes it stale."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from specpipe.build.pairing import PairContract
from specpipe.build.stages.package import Package, models_folder
from specpipe.config.limits import Limits
from specpipe.errors import RepositoryError
from specpipe.runtimes.config_pbtxt import read_config
from specpipe.runtimes.pair.pair import PairOptions
from tests import toy_tokenizers

CONTRACT = PairContract(
    num_used_token_ids=250,
    draft_vocab_size=256,
    target_vocab_size=320,
    unused_token_ids=((250, 320),),
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
    end_token_ids=(2,),
    draft_max_seq_len=1024,
    target_max_seq_len=1024,
)


@pytest.fixture
def package(tmp_path: Path) -> Package:
    """Two engines that are nothing but their limits, and a tokenizer."""
    build_config = {"max_batch_size": 8, "max_seq_len": 1024, "max_draft_len": 4}
    for role in ("draft", "target"):
        (tmp_path / role).mkdir()
        text = json.dumps({"build_config": build_config})
        (tmp_path / role / "config.json").write_text(text)
    (tmp_path / "checkpoint").mkdir()
    toy_tokenizers.words().save(str(tmp_path / "checkpoint" / "tokenizer.json"))
    (tmp_path / "checkpoint" / "model.safetensors").write_text("weights")
    (tmp_path / "pair.json").write_text(CONTRACT.to_json())
    return Package(
        contract=tmp_path / "pair.json",
        draft_engine=tmp_path / "draft",
        target_engine=tmp_path / "target",
        tokenizer=tmp_path / "checkpoint",
        runtime="torch",
        options=PairOptions(num_draft_tokens=4),
    )


def test_the_pair_file_has_the_options_and_the_contracts_unused_ids(
    package: Package, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    package.run(out)
    assert json.loads((out / "speculative" / "1" / "pair.json").read_text()) == {
        "runtime": "torch",
        "options": {
            "num_draft_tokens": 4,
            "adaptive": True,
            "schedule": [],
            "prompt_lookup": False,
            "prefix_reuse": True,
            "max_batch_size": 8,
            "max_seq_len": 1024,
            "max_num_tokens": 256,
            "max_queue_size": 128,
            "request_timeout_s": 600.0,
            "stream_interval_s": None,
            "num_threads": None,
            "unused_token_ids": [[250, 320]],
            "parallel": None,
            "runtime_settings": {},
        },
    }


def test_limits_of_requests_go_to_preprocessing_and_make_it_stale(
    package: Package, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    limited = replace(package, limits=Limits(max_words=3), num_preprocessing=5)
    limited.run(out)
    written = json.loads((out / "preprocessing" / "1" / "limits.json").read_text())
    assert (written["max_words"], written["max_seq_len"]) == (3, 1024)
    assert written["max_prompt_bytes"] == 1024 * len("<turn>") * 4
    config = read_config(out / "preprocessing" / "config.pbtxt")
    assert config.instance_group[0].count == 5
    before, after = package.inputs().settings, limited.inputs().settings
    assert {key for key in after if after[key] != before[key]} == {
        "limits",
        "preprocessing_instances",
    }


def test_more_draft_tokens_than_the_target_was_built_for_are_refused(
    package: Package, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    asking = replace(package, options=PairOptions(num_draft_tokens=8))
    with pytest.raises(RepositoryError, match="num_draft_tokens is 8, but the target engine was"):
        asking.run(out)


def test_inputs_are_small_files_engines_and_models(package: Package, tmp_path: Path) -> None:
    inputs = package.inputs()
    assert inputs.files == (
        tmp_path / "pair.json",
        tmp_path / "draft",
        tmp_path / "target",
        tmp_path / "checkpoint" / "tokenizer.json",
        models_folder(),
    )
    assert inputs.settings["runtime"] == "torch"
    assert inputs.settings["num_draft_tokens"] == 4
    assert "unused_token_ids" not in inputs.settings
