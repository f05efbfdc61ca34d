"""The configs, compared as messages."""

from __future__ import annotations

from pathlib import Path

import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2 as pb

from specpipe.errors import RepositoryError
from specpipe.runtimes import config_pbtxt
from specpipe.triton import model_config, serving

CONFIGS = {config.name: config for config in model_config.model_configs()}


def test_postprocessing_is_written_as_triton_reads_it() -> None:
    expected = text_format.Parse(
        """
        name: "postprocessing"
        backend: "python"
        max_batch_size: 1
        input { name: "text" data_type: TYPE_STRING dims: 1 optional: true }
        input { name: "stream_id" data_type: TYPE_STRING dims: 1 optional: true }
        output { name: "text_output" data_type: TYPE_STRING dims: -1 }
        instance_group { count: 1 kind: KIND_CPU }
        parameters { key: "cancels" value { string_value: "speculative" } }
        model_transaction_policy { decoupled: false }
        """,
        pb.ModelConfig(),
    )
    assert CONFIGS["postprocessing"] == expected


def test_every_config_parses_back_to_the_same_message() -> None:
    assert list(CONFIGS) == ["ensemble", "preprocessing", "speculative", "postprocessing"]
    for config in CONFIGS.values():
        assert text_format.Parse(config_pbtxt.to_text(config), pb.ModelConfig()) == config


def test_the_ensemble_wires_three_steps() -> None:
    steps = CONFIGS["ensemble"].ensemble_scheduling.step
    handed_on = {name: f"_{name}" for name in ("request", "prompt_token_ids", "signature")}
    assert [step.model_name for step in steps] == ["preprocessing", "speculative", "postprocessing"]
    assert dict(steps[0].input_map) == {t.name: t.name for t in serving.ENSEMBLE_INPUTS}
    assert dict(steps[0].output_map) == handed_on
    assert dict(steps[1].input_map) == handed_on
    assert dict(steps[1].output_map) == {
        "text": "_text",
        "stream_id": "_stream_id",
        **{t.name: t.name for t in serving.GENERATION_OUTPUTS},
    }
    assert dict(steps[2].input_map) == {"text": "_text", "stream_id": "_stream_id"}
    assert dict(steps[2].output_map) == {"text_output": "text_output"}


def test_only_the_speculative_model_and_the_ensemble_are_decoupled() -> None:
    decoupled = {n for n, c in CONFIGS.items() if c.model_transaction_policy.decoupled}
    assert decoupled == {"ensemble", "speculative"}


def test_a_file_that_is_no_config_is_named(tmp_path: Path) -> None:
    path = tmp_path / "config.pbtxt"
    with pytest.raises(RepositoryError, match=f"^{path} cannot be read: No such file"):
        config_pbtxt.read_config(path)
    path.write_bytes(b"\xff")
    with pytest.raises(RepositoryError, match=f"^{path} is not a model configuration: "):
        config_pbtxt.read_config(path)
