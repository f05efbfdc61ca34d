"""`specpipe doctor --tensorrt-llm` on a made-up image: what agrees, and what is said to differ.

The help text is that of the stand-in for `trtllm-build`, which does not use specpipe's table.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from specpipe.cli.group import main
from specpipe.errors import RuntimeUnavailable
from specpipe.runtimes.tensorrt_llm import doctor
from specpipe.runtimes.tensorrt_llm.engines import contract
from specpipe.runtimes.tensorrt_llm.engines.doctor import (
    HelpFlag,
    flag_differences,
    parse_help,
    parse_template,
    template_differences,
)
from specpipe.runtimes.tensorrt_llm.llmapi.doctor import llm_api_differences
from tests.tensorrt_llm_stand_ins import fake_trtllm_build

HELP = """\
usage: trtllm-build [-h] [--checkpoint_dir CHECKPOINT_DIR]

options:
  -h, --help            show this help message and exit
  --checkpoint_dir CHECKPOINT_DIR
                        The directory path that contains the checkpoint. (default: None)
  --max_seq_len MAX_SEQ_LEN, --max_decoder_seq_len MAX_SEQ_LEN
                        The maximum total sequence length. (default: None)
  --workers WORKERS     The number of workers. (default: 1)

Plugin config arguments:
  --gemm_plugin {auto,float16,disable}
                        The GEMM plugin, which is a plugin that uses
                        NVIDIA's cuBLASLt. (default:
                        disable)
"""


def test_a_help_text_is_read_by_flag() -> None:
    length = HelpFlag(frozenset({"max_seq_len", "max_decoder_seq_len"}), None, "None")
    assert parse_help(HELP) == {
        "help": HelpFlag(frozenset({"help"}), None, None),
        "checkpoint_dir": HelpFlag(frozenset({"checkpoint_dir"}), None, "None"),
        "max_seq_len": length,
        "max_decoder_seq_len": length,
        "workers": HelpFlag(frozenset({"workers"}), None, "1"),
        "gemm_plugin": HelpFlag(
            frozenset({"gemm_plugin"}), ("auto", "float16", "disable"), "disable"
        ),
    }


def builder_help(change: Callable[[argparse.ArgumentParser], object] = lambda parser: None) -> str:
    """The stand-in's help, in the form that trtllm-build gives it."""
    parser = fake_trtllm_build.parser()
    change(parser)
    parser.formatter_class = argparse.ArgumentDefaultsHelpFormatter
    for action in parser._actions:
        action.help = action.help or "Some words."
    return parser.format_help()


def test_the_stand_in_has_the_flags_of_the_table() -> None:
    assert list(flag_differences(builder_help(), "1.2.1")) == []


def test_flags_that_differ() -> None:
    def change(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--new_plugin")
        for name, attribute, value in (
            ("workers", "default", 8),
            ("use_paged_context_fmha", "default", "disable"),
            ("kv_cache_type", "choices", ["paged", "vectorized"]),
            ("max_draft_len", "option_strings", ["--max_draft_tokens"]),
        ):
            action = next(a for a in parser._actions if f"--{name}" in a.option_strings)
            setattr(action, attribute, value)

    assert sorted(flag_differences(builder_help(change), "1.2.1")) == [
        "--kv_cache_type takes paged, vectorized; the table has continuous, disabled, paged",
        "--max_draft_len is in the table, but not here",
        "--max_draft_tokens is not in the table",
        "--new_plugin is not in the table",
        "--use_paged_context_fmha is disable by default; the table has enable",
        "--workers is 8 by default; the table has 1",
    ]


def template(**changes: Callable[[str], str]) -> str:
    """The contract as NVIDIA writes it down: placeholders, commas, comments."""
    logits = contract.LOGITS
    lines = [
        'name: "tensorrt_llm"',
        'backend: "${triton_backend}"',
        "max_batch_size: ${triton_max_batch_size}",
        "model_transaction_policy { decoupled: ${decoupled_mode} }",
        "dynamic_batching {",
        "  preferred_batch_size: [ ${triton_max_batch_size} ]",
        "  max_queue_delay_microseconds: ${max_queue_delay_microseconds}",
        "  default_queue_policy: { max_queue_size: ${max_queue_size} }",
        "}",
    ]
    for kind, tensors in (("input", contract.inputs("1.2.1")), ("output", contract.OUTPUTS)):
        entries = []
        for tensor in tensors:
            dtype = logits if tensor.dtype == logits else f"TYPE_{tensor.dtype}"
            entry = f'  {{\n    name: "{tensor.name}"\n    data_type: {dtype}\n'
            entry += f"    dims: [ {', '.join(map(str, tensor.dims))} ]\n"
            if kind == "input":
                entry += "    reshape: { shape: [ ] }\n" if tensor.is_scalar else ""
                entry += "    allow_ragged_batch: true\n" if tensor.is_ragged else ""
                entry += "    optional: true\n" if tensor.optional else ""
            entries.append(changes.get(tensor.name, str)(entry + "  }"))
        lines += [f"{kind} [", ",\n".join(filter(None, entries)), "]  # all of them"]
    for parameter in contract.PARAMETERS:
        if parameter.placeholder is None and parameter.use != "fixed":
            continue
        placeholder = parameter.placeholder
        value = f"${{{placeholder}}}" if placeholder else parameter.value
        entry = f'parameters: {{\n  key: "{parameter.key}"\n'
        entry += f'  value: {{\n    string_value: "{value}"\n  }}\n}}'
        lines.append(changes.get(parameter.key, str)(entry))
    return "\n".join(lines)


def test_a_template_s_placeholders_are_parsed() -> None:
    config = parse_template(template())
    assert config.max_batch_size == 1
    assert list(config.dynamic_batching.preferred_batch_size) == [1]
    assert config.model_transaction_policy.decoupled
    assert config.backend == "${triton_backend}"
    assert config.parameters["gpt_model_path"].string_value == "${engine_dir}"
    assert next(i for i in config.input if i.name == "draft_logits").data_type == 0


def test_the_contract_agrees_with_itself() -> None:
    assert list(template_differences(template(), "1.2.1")) == []


def test_a_template_of_old_names() -> None:
    assert sorted(template_differences(template(), "0.19.0")) == [
        "input min_length is in the contract, but not here",
        "input min_tokens is not in the contract",
        "input random_seed is in the contract, but not here",
        "input return_num_input_tokens is not in the contract",
        "input return_num_output_tokens is not in the contract",
        "input seed is not in the contract",
        "output num_input_tokens is not in the contract",
        "output num_output_tokens is not in the contract",
    ]


def test_tensors_and_parameters_that_differ() -> None:
    text = template(
        input_ids=lambda entry: entry.replace("allow_ragged_batch: true", ""),
        end_id=lambda entry: entry.replace("reshape: { shape: [ ] }", ""),
        seed=lambda entry: entry.replace("UINT64", "INT64"),
        streaming=lambda entry: "",
        sequence_length=lambda entry: entry.replace("[ -1 ]", "[ 1 ]"),
        pad_id=lambda entry: entry.replace("optional: true", ""),
        prompt_embedding_table=lambda entry: entry.replace("TYPE_FP16", "${any_type}"),
        num_nodes=lambda entry: entry.replace("num_nodes", "num_machines"),
        executor_worker_path=lambda entry: entry.replace("/opt/", "/usr/"),
    )
    assert sorted(template_differences(text, "1.2.1")) == [
        "input end_id: scalar is False; the contract has True",
        "input input_ids: ragged is False; the contract has True",
        "input pad_id: optional is False; the contract has True",
        "input seed: type is INT64; the contract has UINT64",
        "input streaming is in the contract, but not here",
        "output sequence_length: dims is [1]; the contract has [-1]",
        "parameter executor_worker_path is "
        "'/usr/tritonserver/backends/tensorrtllm/trtllmExecutorWorker'; the contract has "
        "'/opt/tritonserver/backends/tensorrtllm/trtllmExecutorWorker'",
        "parameter num_machines is not in the contract",
        "parameter num_nodes is in the contract, but not here",
    ]
    assert list(template_differences("input [", "1.2.1"))[0].startswith("it cannot be parsed: ")


LLM_ARGS = """\
class DecodingBaseConfig(StrictBaseModel):
    max_draft_len: Optional[int] = None
    speculative_model: Optional[str] = Field(alias="speculative_model_dir")

class DraftTargetDecodingConfig(DecodingBaseConfig):
    decoding_type: Literal["Draft_Target"] = "Draft_Target"
"""


def test_the_spelling_of_speculative_config() -> None:
    assert list(llm_api_differences(LLM_ARGS, "1.2.1")) == []
    assert list(llm_api_differences(LLM_ARGS, "1.1.0")) == [
        "it has no decoding type 'DraftTarget'",
        "DraftTargetDecodingConfig has no field speculative_model_dir",
    ]
    assert list(llm_api_differences("", "1.2.1")) == [
        "it has no decoding type 'Draft_Target'",
        "it has no class DraftTargetDecodingConfig",
    ]


LAUNCH = """
cmd = ['mpirun', '--allow-run-as-root', f'--model-repository={repo}', '--load-model=' + name]
cmd += ['--disable-auto-complete-config', '--model-control-mode=explicit']
cmd += [f'--backend-config=python,shm-region-prefix-name=prefix{i}_', '--enable-peer-access=false']
cmd += ['--pinned-memory-pool-byte-size=0', f'--cuda-memory-pool-byte-size={j}:0']
env['TRTLLM_ORCHESTRATOR'], env['TRTLLM_ORCHESTRATOR_SPAWN_PROCESSES'] = '1', '1'
"""


@pytest.fixture
def image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Makes this machine an image with TensorRT-LLM 1.2.1; returns its root."""
    files = {
        "app/all_models/inflight_batcher_llm/tensorrt_llm/config.pbtxt": template(),
        "app/scripts/launch_triton_server.py": LAUNCH,
        "backend/trtllmExecutorWorker": "",
        "backend/libtriton_tensorrtllm.so": "\0\1Streaming is only supported if model is deployed "
        "using decoupled mode.\0Draft tokens length (%d) exceeds maximum draft tokens length\0",
        "tensorrt_llm/llmapi/llm_args.py": LLM_ARGS,
        "bin/trtllm-build": f"#!{sys.executable}\nprint({builder_help()!r})\n",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "bin/trtllm-build").chmod(0o755)
    installed: dict[str, str] = {"tensorrt_llm": "1.2.1", "tensorrt": "10.14.1.48"}
    monkeypatch.setattr(doctor, "installed", installed.get)
    monkeypatch.setattr(doctor, "_package_dir", lambda: tmp_path / "tensorrt_llm")
    monkeypatch.setattr(doctor, "BACKEND_DIR", tmp_path / "backend")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("CUDA_VERSION", "13.1.0.036")
    return tmp_path


def run(image: Path, *options: str) -> Result:
    command = ["doctor", "--tensorrt-llm", "--app-dir", str(image / "app"), *options]
    return CliRunner().invoke(main, command)


def test_an_image_as_known(image: Path) -> None:
    result = run(image)
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.replace(str(image), "IMAGE").splitlines() == [
        "versions (installed packages): as known",
        "flags (trtllm-build --help): as known",
        "template of an engine's model (IMAGE/app/all_models/inflight_batcher_llm/tensorrt_llm/"
        "config.pbtxt): as known",
        "launch script (IMAGE/app/scripts/launch_triton_server.py): as known",
        "backend (IMAGE/backend): as known",
        "LLM API (IMAGE/tensorrt_llm/llmapi/llm_args.py): as known",
    ]


def test_an_image_that_differs(image: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VERSION", "13.0.2.006")
    monkeypatch.setattr(doctor, "installed", {"tensorrt_llm": "1.2.1"}.get)
    (image / "bin/trtllm-build").unlink()
    (image / "app/all_models/inflight_batcher_llm/tensorrt_llm/config.pbtxt").unlink()
    script = image / "app/scripts/launch_triton_server.py"
    script.write_text(LAUNCH.replace("--enable-peer-access=false", "--enable-peer-access=true"))
    (image / "backend/libtriton_tensorrtllm.so").write_text(
        "\0Draft tokens are not supported with decoupled mode\0_ZN5draft9decoupledEv\0"
    )
    (image / "backend/trtllmExecutorWorker").unlink()
    result = run(image, "--json")
    assert result.exit_code == 1
    assert result.stderr == (
        "Error: this is not what specpipe knows of TensorRT-LLM 1.2.1: versions, flags, template "
        "of an engine's model, launch script, backend\n"
    )
    found: dict[str, Any] = json.loads(result.stdout)
    assert found["release"] == "1.2.1"
    by_subject = {entry["subject"]: entry["differences"] for entry in found["comparisons"]}
    assert by_subject == {
        "versions": [
            "TensorRT is unknown, the table has 10.14.1.48",
            "CUDA is 13.0.2.006, the table has 13.1.0.036",
        ],
        "flags": [
            "it does not run: [Errno 2] No such file or directory: 'trtllm-build'",
        ],
        "template of an engine's model": ["it cannot be read: No such file or directory"],
        "launch script": ["it has no --enable-peer-access=false"],
        "backend": [
            f"{image}/backend/trtllmExecutorWorker is missing",
            "no library says 'Streaming is only supported if model is deployed using decoupled "
            "mode'",
            "a library may refuse draft tokens of a decoupled model: 'Draft tokens are not "
            "supported with decoupled mode'",
        ],
        "LLM API": [],
    }


def test_a_release_that_the_table_does_not_have(
    image: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = {"tensorrt_llm": "1.2.9", "tensorrt": "10.14.1.48"}
    monkeypatch.setattr(doctor, "installed", installed.get)
    result = run(image)
    assert result.exit_code == 1
    assert "  TensorRT-LLM 1.2.9 is not in the table, which has 1.2.1, 1.2.0, 1.1.0," in (
        result.stdout
    )


def test_where_there_is_no_image(tmp_path: Path) -> None:
    with pytest.raises(RuntimeUnavailable) as caught:
        doctor.compare_image(tmp_path / "app")
    assert str(caught.value) == (
        f"TensorRT-LLM is not installed here, and there is no {tmp_path}/app: run this inside "
        "NVIDIA's image, nvcr.io/nvidia/tritonserver:26.07-trtllm-python-py3"
    )
