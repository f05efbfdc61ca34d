"""Each fault of a command line ends in one sentence that names the flag."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

from specpipe.build.migrate.other_server import Wanted, from_command_line, from_options
from specpipe.cli.group import main
from specpipe.errors import ConfigError


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def fault_of(line: str | list[str], draft: str | None = "a/draft", **wanted: str) -> str:
    words = shlex.split(line) if isinstance(line, str) else line
    with pytest.raises(ConfigError) as caught:
        from_command_line(words, Wanted(draft=draft, **wanted))  # type: ignore[arg-type]
    assert not list(Path().glob("target.yaml"))
    return str(caught.value)


VLLM = "vllm serve a/target "
SGLANG = "sglang serve --model-path a/target "
TRTLLM = "trtllm-serve a/target "


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        (
            VLLM + "--max-modellen 2048 --tensor-parallel 2 --quack",
            "vLLM 0.33.0 does not take --max-modellen (is --max-model-len meant?), --quack",
        ),
        (
            VLLM + "--speculative-config.num_tokens 5",
            "vLLM 0.33.0 does not take --speculative-config.num_tokens",
        ),
        (
            SGLANG + "--context_length 8",
            "SGLang 0.5.10.post1 does not take --context_length (is --context-length meant?)",
        ),
        (
            TRTLLM + "--tp-size 8",
            "trtllm-serve of TensorRT-LLM 1.2 does not take --tp-size (is --tp_size meant?)",
        ),
        (
            SGLANG + "--pp 2",
            "--pp may mean several flags of SGLang: --pp-async-batch-depth, "
            "--pp-max-micro-batch-size, --pp-size",
        ),
        (VLLM + "--max-model-len", "--max-model-len of vLLM has no value"),
        (VLLM + "--max-model-len --seed 1", "--max-model-len of vLLM has no value"),
        (
            VLLM + "--max-num-seqs many",
            "--max-num-seqs is many: expected a whole number",
        ),
        (
            SGLANG + "--context-length 8K",
            "--context-length is 8K: expected a whole number, as 8192, 8k or 8Ki",
        ),
        (
            TRTLLM + "--free_gpu_memory_fraction most",
            "--free_gpu_memory_fraction is most: expected a number",
        ),
        (
            VLLM + "--dtype float8",
            "--dtype is float8: expected one of auto, half, float16, bfloat16, float, float32",
        ),
        (VLLM + "--enforce-eager=yes", "--enforce-eager takes no value, and has yes"),
        (
            VLLM + "--speculative-config {method:ngram}",
            "--speculative-config is {method:ngram}: expected a mapping, as a JSON object is",
        ),
        (
            VLLM + "--speculative-config 5",
            "--speculative-config is 5: expected a mapping, as a JSON object is",
        ),
        (
            VLLM + """--speculative-config '{"num_speculative_tokens": "5x"}'""",
            "--speculative-config.num_speculative_tokens is 5x: expected a whole number",
        ),
        (
            VLLM
            + """--speculative-config '{"num_speculative_tokens_per_batch_size": [[1, 4, 3], """
            + "[6, 9, 1]]}'",
            "--speculative-config.num_speculative_tokens_per_batch_size is [[1, 4, 3], [6, 9, 1]]: "
            "expected lists of first batch size, last and draft tokens, without gaps",
        ),
        (
            VLLM + "--spec-tokens 50",
            "a `vllm serve` command line cannot be migrated: --spec-tokens 50: "
            "speculation.num_draft_tokens is 50: expected a whole number from 0 to 32",
        ),
        (
            VLLM + "--max-model-len 1",
            "a `vllm serve` command line cannot be migrated: --max-model-len 1: "
            "engine.max_seq_len is 1: expected a whole number of at least 2",
        ),
        ("vllm bench latency", "vllm bench latency: expected a command line of"),
        ("ollama serve", "ollama serve: expected a command line of"),
        ("A=1", "nothing: expected a command line of"),
        (VLLM + "another", "another stands alone on the command line: expected one model"),
        (
            SGLANG + "another",
            "another stands alone on the command line: expected flags, the model after "
            "--model-path",
        ),
        ("vllm serve -tp 2", "the command line of vLLM names no model"),
        (
            TRTLLM + "--backend _autodeploy",
            "--backend _autodeploy: specpipe serves by TensorRT-LLM's backends pytorch and "
            "tensorrt; take --backend away for pytorch",
        ),
        (TRTLLM + "--backend cpp", "--backend is cpp: expected one of pytorch, tensorrt, trt"),
        (TRTLLM + "--config options.yaml", "options.yaml does not exist: expected a YAML file"),
    ],
)
def test_what_is_wrong_on_a_command_line_is_named(line: str, fault: str) -> None:
    assert fault_of(line).startswith(fault)


@pytest.mark.parametrize(
    "line",
    [
        VLLM + """--speculative-config '{"method": "eagle3", "model": "a/b"}'""",
        VLLM + "--spec-method mtp",
        VLLM + "--spec-method medusa",
        SGLANG + "--speculative-algorithm EAGLE --speculative-draft-model-path a/b",
        SGLANG + "--speculative-algorithm NEXTN",
    ],
)
def test_other_ways_to_draft_are_refused_by_name(line: str) -> None:
    fault = fault_of(line, draft=None)
    flag, _, reason = fault.partition(": ")
    assert flag.split()[-1] in line
    assert reason == (
        "specpipe runs pairs of two whole models, and this drafts otherwise; take its flags away "
        "and name a draft model with --draft"
    )


@pytest.mark.parametrize("kind", ["Eagle3", "MTP", "Medusa", "Lookahead"])
def test_other_ways_to_draft_are_refused_in_a_yaml(tmp_path: Path, kind: str) -> None:
    options = tmp_path / "options.yaml"
    options.write_text(f"speculative_config: {{decoding_type: {kind}, max_draft_len: 3}}\n")
    with pytest.raises(ConfigError) as caught:
        from_options(options, "a/target", Wanted())
    assert str(caught.value).startswith(
        f"speculative_config.decoding_type in options.yaml {kind}: specpipe runs pairs"
    )


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (
            "max_batchsize: 3\nkv_cache_config: {dtypes: auto}\n",
            "trtllm-serve of TensorRT-LLM 1.2 does not take max_batchsize (is max_batch_size "
            "meant?), kv_cache_config.dtypes (is dtype meant?)",
        ),
        ("max_batch_size: '3x'\n", "max_batch_size is 3x: expected a whole number"),
        ("max_batch_size: true\n", "max_batch_size is True: expected a whole number"),
        (
            "kv_cache_config: [1]\n",
            "kv_cache_config is [1]: expected a mapping, as a JSON object is",
        ),
        ("- 1\n", "options.yaml holds no settings: expected keys with values"),
        (
            "speculative_config: {speculative_model: a/b}\n",
            "speculative_config.speculative_model in options.yaml a/b is there without "
            "decoding_type, and trtllm-serve would not draft: add it",
        ),
    ],
)
def test_what_is_wrong_in_a_yaml_is_named(text: str, fault: str) -> None:
    Path("options.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        from_options(Path("options.yaml"), "a/target", Wanted(draft="a/draft"))
    assert str(caught.value) == fault


def test_a_pair_needs_a_draft() -> None:
    assert fault_of(VLLM, draft=None) == (
        "vLLM is told of no draft model, and specpipe runs pairs: name one with --draft"
    )
    assert fault_of(VLLM + "--spec-model a/b") == (
        "--draft is a/draft, and there is --spec-model a/b: leave --draft away"
    )
    assert fault_of(SGLANG + "--speculative-draft-model-path a/b", draft=None) == (
        "--speculative-draft-model-path a/b is there without --speculative-algorithm, and SGLang "
        "would not draft: add it"
    )


def test_a_release_of_tensorrt_llm_is_for_its_runtime() -> None:
    assert fault_of(VLLM, version="1.1.0") == (
        "--to has no effect with runtime torch: it is TensorRT-LLM's release"
    )
    assert fault_of(TRTLLM, version="0.1").startswith(
        "a `trtllm-serve` command line cannot be migrated: --to 0.1: "
        "engine.tensorrt_llm.version is '0.1': expected"
    )


HUGE = "x" * 100_000


@pytest.mark.parametrize(
    "words",
    [
        [HUGE],
        ["vllm", "serve", HUGE, HUGE],
        ["vllm", "serve", "a/b", f"--{HUGE}"],
        ["vllm", "serve", "a/b", f"--{HUGE}={HUGE}"],
        ["vllm", "serve", "a/b", "--max-num-seqs", HUGE],
        ["vllm", "serve", "a/b", "--max-num-seqs", "9" * 100_000],
        ["vllm", "serve", "a/b", "--max-model-len", "9" * 100_000 + "k"],
        ["vllm", "serve", "a/b", "--speculative-config", "[" * 100_000],
        ["vllm", "serve", "a/b", "--speculative-config", json.dumps({HUGE: 1})],
        ["vllm", "serve", "a/b", f"--speculative-config.{HUGE}", "1"],
        ["vllm", "serve", "a/b", f"--speculative-config.{'a.' * 5000}a", "1"],
        ["vllm", "serve", "a/b", "--spec-method", HUGE],
        ["vllm", "serve", "a/b", "--device", HUGE],
        ["vllm", "serve", "a\0b", "--spec-model", "c"],
        ["sglang", "serve", "--model-path", "a/b", "--modelopt-quant", "fp8", "--port"],
        ["trtllm-serve", "a/b", "--max_seq_len", HUGE],
    ],
    ids=range(16),
)
def test_huge_values_are_cut(words: list[str]) -> None:
    assert len(fault_of(words, draft=None)) < 700


def test_one_source_is_named() -> None:
    run = CliRunner().invoke
    for arguments, fault in (
        ([], "Give one of --config, --options, or a command line after --."),
        (
            ["--config", "a.yaml", "--", "vllm", "serve", "a/b"],
            "Give one of --config, --options, or a command line after --.",
        ),
        (["--options", "a.yaml"], "--options and --model belong together."),
        (["--model", "a/b", "--", "vllm"], "--options and --model belong together."),
        (
            ["--config", "a.yaml", "--runtime", "torch"],
            "--draft, --runtime and --name have no effect with --config.",
        ),
    ):
        result = run(main, ["migrate", *arguments])
        assert result.exit_code == 2
        assert fault in result.stderr
