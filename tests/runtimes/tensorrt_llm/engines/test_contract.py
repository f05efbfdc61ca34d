"""The contract of the engine models, against what was read from NVIDIA's templates."""

from __future__ import annotations

import dataclasses

import pytest

from specpipe.config.tensorrt_llm_parameters import FIXED_PARAMETERS, TritonParameters
from specpipe.errors import RepositoryError
from specpipe.runtimes.tensorrt_llm.engines import contract
from specpipe.runtimes.tensorrt_llm.engines.contract import BackendTensor


def test_names_by_release() -> None:
    late = [tensor.name for tensor in contract.inputs("1.2.1")]
    early = [tensor.name for tensor in contract.inputs("0.19.0")]
    assert (len(late), len(early)) == (62, 60)
    assert set(late) - set(early) == {
        "min_tokens",
        "seed",
        "return_num_input_tokens",
        "return_num_output_tokens",
    }
    assert set(early) - set(late) == {"min_length", "random_seed"}
    assert early.index("min_length") == late.index("min_tokens") == 26
    assert [tensor.name for tensor in contract.inputs("0.20.0rc1")] == late


def test_outputs_by_release() -> None:
    assert len(contract.outputs("1.0.0")) == 21
    assert {t.name for t in contract.outputs("1.0.0")} - {
        t.name for t in contract.outputs("0.19.0")
    } == {"num_input_tokens", "num_output_tokens"}


@pytest.mark.parametrize(
    ("version", "name", "expected"),
    [
        ("1.2.1", "seed", "seed"),
        ("0.20.0", "min_tokens", "min_tokens"),
        ("0.19.0", "seed", "random_seed"),
        ("0.16.0", "min_tokens", "min_length"),
        ("0.19.0", "end_id", "end_id"),
    ],
)
def test_an_input_s_name(version: str, name: str, expected: str) -> None:
    assert contract.input_name(name, version) == expected


def test_required_inputs() -> None:
    required = [t.name for t in contract.inputs("1.2.1") if not t.optional]
    assert required == ["input_lengths", "request_output_len"]


@pytest.mark.parametrize(
    "expected",
    [
        BackendTensor("input_ids", "INT32", (-1,), is_ragged=True),
        BackendTensor("draft_input_ids", "INT32", (-1,), is_ragged=True),
        BackendTensor("draft_logits", "${logits_datatype}", (-1, -1), is_ragged=True),
        BackendTensor("stop_words_list", "INT32", (2, -1), is_ragged=True),
        BackendTensor("end_id", "INT32", (1,), is_scalar=True),
        BackendTensor("seed", "UINT64", (1,), is_scalar=True),
        BackendTensor("streaming", "BOOL", (1,), is_scalar=True),
        BackendTensor("mrope_position_deltas", "INT64", (1,)),
        BackendTensor("lora_config", "INT32", (-1, 3), is_ragged=True),
    ],
)
def test_an_input_as_the_template_has_it(expected: BackendTensor) -> None:
    found = {tensor.name: tensor for tensor in contract.inputs("1.2.1")}
    assert found[expected.name] == expected


def test_logits_types() -> None:
    assert contract.logits_type("float32") == "FP32"
    assert contract.logits_type("float16") == "FP16"
    with pytest.raises(RepositoryError) as caught:
        contract.logits_type("bfloat16")
    assert str(caught.value) == (
        "the engine gives its logits in bfloat16, which TensorRT-LLM's Triton backend does not "
        "know: build it with engine.tensorrt_llm.build.logits_dtype float32"
    )


def test_parameters_are_the_template_s() -> None:
    keys = [parameter.key for parameter in contract.PARAMETERS]
    assert len(keys) == len(set(keys)) == 46
    assert keys[:4] == [
        "max_beam_width",
        "FORCE_CPU_ONLY_INPUT_TENSORS",
        "gpt_model_type",
        "gpt_model_path",
    ]
    by_key = {parameter.key: parameter for parameter in contract.PARAMETERS}
    assert by_key["gpt_model_path"].placeholder == "engine_dir"
    assert by_key["gpt_model_type"].placeholder == "batching_strategy"
    assert by_key["encoder_model_path"].placeholder == "encoder_engine_dir"
    assert {key for key in keys if by_key[key].placeholder is None} == {
        "FORCE_CPU_ONLY_INPUT_TENSORS",
        "executor_worker_path",
        "recv_poll_period_ms",
    }


def test_the_keys_that_must_exist_are_written() -> None:
    assert contract.REQUIRED_KEYS == (
        "tokenizer_dir",
        "guided_decoding_backend",
        "xgrammar_tokenizer_info_path",
    )
    assert set(contract.REQUIRED_KEYS) <= {parameter.key for parameter in contract.PARAMETERS}


def test_every_parameter_is_a_setting_or_is_explained_as_none() -> None:
    settings = set(TritonParameters.model_fields)
    for parameter in contract.PARAMETERS:
        if parameter.use == "setting":
            assert parameter.key in settings, parameter.key
        elif parameter.key not in settings:
            assert parameter.key in FIXED_PARAMETERS, parameter.key
    assert not settings & set(FIXED_PARAMETERS)


def test_defaults_of_settings_are_the_backend_s_but_for_two() -> None:
    """Chunked context is on, since prompts may be longer than one forward takes."""
    defaults = TritonParameters().model_dump()
    differing = {
        parameter.key: (parameter.default, defaults[parameter.key])
        for parameter in contract.PARAMETERS
        if parameter.use == "setting"
        and parameter.default is not None
        and parameter.default != str(defaults[parameter.key]).lower()
    }
    assert differing == {"enable_chunked_context": ("false", True)}


def test_a_tensor_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        contract.OUTPUTS[0].name = "ids"  # type: ignore[misc]
