"""`specpipe doctor --tensorrt-llm` on a made-up image: what agrees, and what is said to differ.

The help text is that of the stand-in for `trtllm-build`, which does not use specpipe's table.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from specpipe.build import doctor as build_doctor
from specpipe.build.quickstart import packaged_settings
from specpipe.cli.group import main
from specpipe.errors import RuntimeUnavailable, ServerError
from specpipe.runtimes.tensorrt_llm import doctor
from specpipe.runtimes.tensorrt_llm.differences import Difference
from specpipe.runtimes.tensorrt_llm.engines import contract
from specpipe.runtimes.tensorrt_llm.engines.doctor import (
    TEMPLATE,
    HelpFlag,
    flag_differences,
    parse_help,
    parse_template,
    template_differences,
)
from specpipe.runtimes.tensorrt_llm.llmapi import doctor as llmapi
from specpipe.runtimes.tensorrt_llm.llmapi.doctor import llm_api_differences
from specpipe.runtimes.tensorrt_llm.llmapi.llm_pair import LlmPair
from specpipe.speculative.request import Request, Sampling
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


def told(differences: Iterable[Difference]) -> list[str]:
    """The differences, sorted, each with whether something is refused."""
    return sorted(f"{'refused' if d.is_refused else 'note'}: {d.text}" for d in differences)


def test_the_stand_in_has_the_flags_of_the_table() -> None:
    assert told(flag_differences(builder_help(), "1.2.1")) == []


def test_flags_that_differ() -> None:
    def change(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--new_plugin")
        for name, attribute, value in (
            ("workers", "default", 8),
            ("max_lora_rank", "default", 8),
            ("use_paged_context_fmha", "default", "disable"),
            ("kv_cache_type", "choices", ["paged", "vectorized"]),
            ("nccl_plugin", "choices", ["float16", "bfloat16"]),
            ("max_draft_len", "option_strings", ["--max_draft_tokens"]),
            ("visualize_network", "option_strings", ["--visualize"]),
        ):
            action = next(a for a in parser._actions if f"--{name}" in a.option_strings)
            setattr(action, attribute, value)

    assert told(flag_differences(builder_help(change), "1.2.1")) == [
        "note: --kv_cache_type takes paged, vectorized; the table has continuous, disabled, paged: "
        "keep to what it takes",
        "note: --max_draft_tokens is not in the table: its default holds, nothing to do",
        "note: --max_lora_rank is 8 by default; the table has 64: it is left to that",
        "note: --new_plugin is not in the table: its default holds, nothing to do",
        "note: --use_paged_context_fmha is disable by default; the table has enable: specpipe "
        "writes it, nothing to do",
        "note: --visualize is not in the table: its default holds, nothing to do",
        "note: --visualize_network is in the table, but not here: it is not written",
        "note: --workers is 8 by default; the table has 1: specpipe writes it, nothing to do",
        "refused: --max_draft_len is in the table, but not here, and specpipe writes it: build and "
        "serve in the image of a release that has it",
        "refused: --nccl_plugin takes bfloat16, float16; the table has auto, bfloat16, disable, "
        "float16, float32, int32, and specpipe writes auto: set engine.tensorrt_llm.build."
        "nccl_plugin to one that it takes",
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


ELSEWHERE = "build and serve in the image of a release that is known"


def test_the_contract_agrees_with_itself() -> None:
    assert told(template_differences(template(), "1.2.1")) == []


def test_a_template_of_old_names() -> None:
    unsent = "is not in the contract: nobody sends it, nothing to do"
    assert told(template_differences(template(), "0.19.0")) == [
        f"note: input min_tokens {unsent}",
        f"note: input return_num_input_tokens {unsent}",
        f"note: input return_num_output_tokens {unsent}",
        f"note: input seed {unsent}",
        f"note: output num_input_tokens {unsent}",
        f"note: output num_output_tokens {unsent}",
        f"refused: input min_length is in the contract, but not here: {ELSEWHERE}",
        f"refused: input random_seed is in the contract, but not here: {ELSEWHERE}",
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
    assert told(template_differences(text, "1.2.1")) == [
        "note: parameter executor_worker_path is "
        "'/usr/tritonserver/backends/tensorrtllm/trtllmExecutorWorker'; the contract has "
        "'/opt/tritonserver/backends/tensorrtllm/trtllmExecutorWorker': look whether what is "
        "written still means the same",
        "note: parameter num_machines is not in the contract: its default holds",
        "note: parameter num_nodes is in the contract, but not here: what is written for it may "
        "have no effect",
        f"refused: input end_id: scalar is False; the contract has True: {ELSEWHERE}",
        f"refused: input input_ids: ragged is False; the contract has True: {ELSEWHERE}",
        f"refused: input pad_id: optional is False; the contract has True: {ELSEWHERE}",
        f"refused: input seed: type is INT64; the contract has UINT64: {ELSEWHERE}",
        f"refused: input streaming is in the contract, but not here: {ELSEWHERE}",
        f"refused: output sequence_length: dims is [1]; the contract has [-1]: {ELSEWHERE}",
    ]
    (unparsed,) = told(template_differences("input [", "1.2.1"))
    assert unparsed.startswith("refused: it cannot be parsed: ")


LLM_ARGS = """\
from typing import Any, Optional
from pydantic import BaseModel, ConfigDict, Field

class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")

class DraftTargetDecodingConfig(Strict):
    max_draft_len: int
    speculative_model: Optional[str] = None

class KvCacheConfig(Strict):
    free_gpu_memory_fraction: Optional[float] = None

class TorchLlmArgs(Strict):
    model: str
    backend: str
    pipeline_parallel_size: int = 1
    max_batch_size: int = 1
    max_seq_len: int = 1
    max_num_tokens: int = 1
    enable_chunked_prefill: bool = False
    disable_overlap_scheduler: bool = False
    kv_cache_config: Optional[KvCacheConfig] = None
    speculative: Any = Field(None, alias="speculative_config")
"""

TENSORRT_LLM = """\
from dataclasses import dataclass
from typing import Any, Optional

class LLM:
    def __init__(self, model, skip_tokenizer_init=False, tensor_parallel_size=1, **kwargs):
        raise AssertionError("nothing is loaded")

@dataclass(kw_only=True)
class SamplingParams:
    max_tokens: int = 32
    end_id: Optional[int] = None
    pad_id: Optional[int] = None
    ignore_eos: bool = False
    stop_token_ids: Optional[list] = None
    detokenize: bool = True
    return_perf_metrics: bool = False
    logprobs: Optional[int] = None
    temperature: Optional[float] = None
    top_k: Optional[int] = None
    top_p: Optional[float] = None
"""

PACKAGE = {
    "__init__.py": TENSORRT_LLM,
    "llmapi/__init__.py": "from .llm_args import DraftTargetDecodingConfig, KvCacheConfig\n",
    "llmapi/llm_args.py": LLM_ARGS,
}


def api_differences(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *changes: tuple[str, str]
) -> list[str]:
    """Those of a package with changes to its text, and of what is written for 1.2.1."""
    for name, text in PACKAGE.items():
        for old, new in changes:
            text = text.replace(old, new)
        path = folder / "tensorrt_llm" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    return told(llm_api_differences(doctor._llm_arguments("1.2.1", packaged_settings)))


def test_an_llm_api_that_takes_all_that_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert api_differences(tmp_path, monkeypatch) == []


def test_an_llm_api_of_other_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = api_differences(
        tmp_path,
        monkeypatch,
        ("speculative_model:", "draft_model:"),
        ("free_gpu_memory_fraction: Optional[float]", "free_gpu_memory_fraction: Optional[bool]"),
        ("    logprobs: Optional[int] = None\n", ""),
        ("max_num_tokens", "token_budget"),
    )
    assert [line.partition(":")[0] for line in found] == ["refused"] * 4
    assert all(
        line.endswith(": backend pytorch needs the image of a release that is known")
        for line in found
    )
    for line, words in zip(
        found,
        (
            "DraftTargetDecodingConfig: ValidationError: 1 validation error for "
            "DraftTargetDecodingConfig speculative_model Extra inputs are not permitted",
            "KvCacheConfig: ValidationError: 1 validation error",
            "LLM: it has no argument max_num_tokens",
            "SamplingParams: TypeError: SamplingParams.__init__() got an unexpected keyword "
            "argument 'logprobs'",
        ),
        strict=True,
    ):
        assert words in line


def test_an_llm_api_that_cannot_be_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = "raise ImportError('libcuda.so.1: no such file')\nclass LLM:"
    assert api_differences(tmp_path, monkeypatch, ("class LLM:", failing)) == [
        "refused: it cannot be imported: ImportError: libcuda.so.1: no such file: start the "
        "container with `--gpus all`, or take NVIDIA's image as it is"
    ]


def test_an_llm_api_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llmapi, "_TIMEOUT_S", 1)
    hanging = "import time; time.sleep(600)\nclass LLM:"
    assert api_differences(tmp_path, monkeypatch, ("class LLM:", hanging)) == [
        "refused: it was not imported within 1 s: try again, with a GPU free"
    ]


def test_requests_say_nothing_else_than_what_is_compared() -> None:
    pair = SimpleNamespace(_limits=SimpleNamespace(max_seq_len=100), _sampling_params=dict)
    request = Request(
        request_id="0",
        prompt_token_ids=(1,),
        max_tokens=4,
        sampling=Sampling(temperature=0.5, top_k=5, top_p=0.9),
        return_log_probs=True,
    )
    written = LlmPair._new_sampling_params(pair, request)  # type: ignore[arg-type]
    assert written.keys() == llmapi.SAMPLING.keys()


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
        **{f"tensorrt_llm/{name}": text for name, text in PACKAGE.items()},
        "bin/trtllm-build": f"#!{sys.executable}\nprint({builder_help()!r})\n",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "bin/trtllm-build").chmod(0o755)
    installed: dict[str, str] = {"tensorrt_llm": "1.2.1", "tensorrt": "10.14.1.48"}
    monkeypatch.setattr(doctor, "installed", installed.get)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(doctor, "_numpy_differences", lambda: ())  # pip takes seconds
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
    *lines, stub = result.stdout.replace(str(image), "IMAGE").splitlines()
    assert lines == [
        "versions (installed packages, for backend tensorrt and backend pytorch): as known",
        "flags (trtllm-build --help): as known",
        "template of an engine's model (IMAGE/app/all_models/inflight_batcher_llm/tensorrt_llm/"
        "config.pbtxt): as known",
        "launch script (IMAGE/app/scripts/launch_triton_server.py): as known",
        "backend (IMAGE/backend): as known",
        "LLM API (the installed package): as known",
    ]
    here = f"here are {platform.python_version()} and {np.__version__}): as known"
    assert stub.startswith("Triton's Python models (") and stub.endswith(here)


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

    def too_old() -> str:
        raise ServerError("tritonserver needs NumPy 1")

    monkeypatch.setattr(build_doctor, "describe_stub", too_old)
    result = run(image, "--json")
    assert result.exit_code == 1
    assert result.stderr == (
        "Error: what specpipe writes for TensorRT-LLM 1.2.1 would be refused here: flags, template "
        "of an engine's model, backend, Triton's Python models\n"
    )
    found: dict[str, Any] = json.loads(result.stdout)
    assert found["release"] == "1.2.1"
    built_here = "engines run only where they were built, so build them here"
    image_of_nvidia = "take NVIDIA's Triton image, or backend pytorch"
    assert {
        entry["subject"]: told(Difference(**one) for one in entry["differences"])
        for entry in found["comparisons"]
    } == {
        "versions": [
            f"note: CUDA is 13.0.2.006, the table has 13.1.0.036: {built_here}",
            f"note: TensorRT is unknown, the table has 10.14.1.48: {built_here}",
        ],
        "flags": [
            "refused: it does not run: [Errno 2] No such file or directory: 'trtllm-build': "
            f"{image_of_nvidia}",
        ],
        "template of an engine's model": [
            f"refused: it cannot be read: No such file or directory: {image_of_nvidia}"
        ],
        "launch script": [
            "note: it has no --enable-peer-access=false, and `specpipe serve` says it: look "
            "whether a pair of several ranks starts"
        ],
        "backend": [
            "note: no library says 'Streaming is only supported if model is deployed using "
            "decoupled mode': look whether a stream comes in parts",
            f"refused: {image}/backend/trtllmExecutorWorker is missing, which engines of several "
            "ranks need: serve in NVIDIA's Triton image",
            "refused: a library may refuse draft tokens of a decoupled model: 'Draft tokens are "
            f"not supported with decoupled mode': {ELSEWHERE}",
        ],
        "LLM API": [],
        "Triton's Python models": ["refused: tritonserver needs NumPy 1"],
    }


def test_notes_alone_are_no_failure(image: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VERSION", "13.0.2.006")
    result = run(image)
    assert (result.exit_code, result.stderr) == (0, "")
    assert "backend pytorch): differs\n  note: CUDA is 13.0.2.006, the table has" in result.stdout


def test_a_release_that_the_table_does_not_have(
    image: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = {"tensorrt_llm": "1.2.9", "tensorrt": "10.14.1.48"}
    monkeypatch.setattr(doctor, "installed", installed.get)
    result = run(image)
    assert result.exit_code == 1
    assert result.stderr == (
        "Error: what specpipe writes for TensorRT-LLM 1.2.9 would be refused here: versions\n"
    )
    for backend in ("tensorrt", "pytorch"):
        assert (
            f"  refused: TensorRT-LLM 1.2.9 is not known for backend {backend}: --set "
            "engine.tensorrt_llm.version=1.2.9: engine.tensorrt_llm.version is '1.2.9'"
        ) in result.stdout


def test_an_image_without_engines(image: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As TensorRT-LLM's own, into which Triton was copied."""
    (image / "bin/trtllm-build").unlink()
    monkeypatch.setattr(doctor, "BACKEND_DIR", image / "nowhere")
    (image / "app" / TEMPLATE).unlink()
    result = run(image)
    assert result.exit_code == 0, result.output
    assert [line.partition(" (")[0] for line in result.stdout.splitlines()] == [
        "versions",
        "LLM API",
        "Triton's Python models",
    ]


@pytest.mark.parametrize(
    ("line", "differences"),
    [
        (
            "tensorrt-llm 1.2.1 has requirement numpy<2, but you have numpy 2.3.5.",
            [
                "refused: tensorrt-llm 1.2.1 has requirement numpy<2, but you have numpy 2.3.5: "
                "install the NumPy that it asks for"
            ],
        ),
        ("tensorrt-llm 1.2.1 has requirement torch==2.9, but you have torch 2.8.", []),
        ("numba 0.6 has requirement numpy<2, but you have numpy 2.3.5.", []),
    ],
)
def test_the_numpy_that_tensorrt_llm_asks_for(
    monkeypatch: pytest.MonkeyPatch, line: str, differences: list[str]
) -> None:
    checked = SimpleNamespace(stdout=f"{line}\n")
    monkeypatch.setattr(doctor.subprocess, "run", lambda *_, **__: checked)
    assert told(doctor._numpy_differences()) == differences


def test_pip_knows_nothing_against_numpy_here() -> None:
    assert told(doctor._numpy_differences()) == []


def test_where_there_is_no_image(tmp_path: Path) -> None:
    with pytest.raises(RuntimeUnavailable) as caught:
        doctor.compare_image(tmp_path / "app", packaged_settings)
    assert str(caught.value) == (
        f"TensorRT-LLM is not installed here, and there is no {tmp_path}/app: run this inside "
        "NVIDIA's image, nvcr.io/nvidia/tritonserver:26.07-trtllm-python-py3"
    )
