"""The command lines are those of the servers' own documentation; each test says of which page."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from specpipe.build.load import load_config
from specpipe.build.migrate.migration import Migration
from specpipe.build.migrate.other_server import Wanted, from_command_line, from_options
from specpipe.cli.group import main
from tests.toy import write_toy_checkpoint
from tests.toy_tokenizers import words, write_tokenizer


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def migrated(line: str, **wanted: Any) -> Migration:
    return from_command_line(shlex.split(line), Wanted(**wanted))


def data_of(migration: Migration) -> Any:
    load_config(migration.output)
    return yaml.safe_load(migration.output.read_text())


def test_vllm_with_a_draft_model() -> None:
    """docs.vllm.ai, features/speculative_decoding/draft_model (v0.25.0)."""
    migration = migrated(
        "vllm serve Qwen/Qwen3-4B-Thinking-2507 --host 0.0.0.0 --port 8000 --seed 42 -tp 1 "
        "--max-model-len 2048 --gpu-memory-utilization 0.8 --speculative-config "
        """'{"model": "Qwen/Qwen3-0.6B", "num_speculative_tokens": 5, "method": "draft_model"}'"""
    )
    assert migration.output == Path("Qwen3-4B-Thinking-2507.yaml")
    assert data_of(migration) == {
        "name": "Qwen3-4B-Thinking-2507",
        "draft": {"checkpoint": "Qwen/Qwen3-0.6B"},
        "target": {"checkpoint": "Qwen/Qwen3-4B-Thinking-2507", "tp_size": 1},
        "speculation": {"num_draft_tokens": 5},
        "engine": {"runtime": "torch", "max_seq_len": 2048},
    }
    assert migration.output.read_text().splitlines()[:2] == [
        "# Made from a `vllm serve` command line by `specpipe migrate`.",
        "# Not carried: --host, --port, --seed, --gpu-memory-utilization.",
    ]
    assert migration.sections["carried"] == (
        "the model Qwen/Qwen3-4B-Thinking-2507: target.checkpoint: Qwen/Qwen3-4B-Thinking-2507",
        "-tp 1: target.tp_size: 1",
        "--max-model-len 2048: engine.max_seq_len: 2048",
        "--speculative-config.model Qwen/Qwen3-0.6B: draft.checkpoint: Qwen/Qwen3-0.6B",
        "--speculative-config.num_speculative_tokens 5: speculation.num_draft_tokens: 5",
        "--speculative-config.method draft_model: a draft model proposes tokens",
    )
    assert migration.sections["mapped"] == ()
    assert [line.partition(":")[0] for line in migration.sections["not carried"]] == [
        "--host, --port",
        "--seed",
        "--gpu-memory-utilization",
    ]


def test_a_draft_of_vllm_that_proposes_in_one_pass() -> None:
    """docs.vllm.ai, features/speculative_decoding/parallel_draft_model."""
    migration = migrated(
        "vllm serve Qwen/Qwen3-4B --host 0.0.0.0 --port 8000 --seed 42 -tp 1 --max-model-len 2048 "
        "--gpu-memory-utilization 0.8 --speculative-config '{"
        '"model": "amd/PARD-Qwen3-0.6B", "num_speculative_tokens": 12, "method": "draft_model", '
        '"parallel_drafting": true}\''
    )
    data = data_of(migration)
    assert data["draft"] == {"checkpoint": "amd/PARD-Qwen3-0.6B"}
    assert data["speculation"] == {"num_draft_tokens": 12}
    (told,) = (line for line in migration.sections["carried"] if "parallel_drafting" in line)
    assert told.endswith("where its config.json has pard_token, and with that mask")


def test_vllm_of_before_speculative_config() -> None:
    """docs.vllm.ai, v0.6.3.post1, models/spec_decode: underscores, and flags that are gone."""
    migration = migrated(
        "python -m vllm.entrypoints.openai.api_server --host 0.0.0.0 --port 8000 "
        "--model facebook/opt-6.7b --seed 42 -tp 1 --speculative_model facebook/opt-125m "
        "--use-v2-block-manager --num_speculative_tokens 5 --gpu_memory_utilization 0.8"
    )
    data = data_of(migration)
    assert data["draft"] == {"checkpoint": "facebook/opt-125m"}
    assert data["target"] == {"checkpoint": "facebook/opt-6.7b", "tp_size": 1}
    assert data["speculation"] == {"num_draft_tokens": 5}


@pytest.mark.parametrize(
    "speculation",
    [
        """--speculative-config '{"method": "ngram", "num_speculative_tokens": 5, """
        """"prompt_lookup_max": 4}'""",
        "--speculative-config.method ngram --speculative-config.num_speculative_tokens=5",
        "-sc.method=ngram -sc.num_speculative_tokens 5",
        "--spec-method ngram --spec-tokens 5",
        "--speculative-model [ngram] --num-speculative-tokens 5",
    ],
)
def test_ngrams_of_vllm_are_prompt_lookup(speculation: str) -> None:
    """docs.vllm.ai, features/speculative_decoding/n_gram; it has no draft, and a pair does."""
    migration = migrated(f"vllm serve Qwen/Qwen3-8B {speculation}", draft="Qwen/Qwen3-0.6B")
    data = data_of(migration)
    assert data["draft"] == {"checkpoint": "Qwen/Qwen3-0.6B"}
    assert data["speculation"] == {"num_draft_tokens": 5, "prompt_lookup": True}
    (mapped,) = migration.sections["mapped"]
    assert mapped.endswith(
        "speculation.prompt_lookup: true, which copies where a text repeats itself; else the draft "
        "model drafts"
    )


def test_what_else_vllm_is_told() -> None:
    migration = migrated(
        "CUDA_VISIBLE_DEVICES=0,1 VLLM_LOGGING_LEVEL=DEBUG /opt/bin/vllm serve a/target "
        "--revision main --dtype half --tensor-parallel-size=2 --max-model-len 32K "
        "--max-num-seqs 64 --max-num-batched-tokens 4k --max-num-queued-reqs 200 --no-enable-lora "
        "--kv-cache-dtype fp8 --quantization awq --served-model-name 'My model' other -O3 "
        "--api-key s3cret --enable-prefix-caching --disable-log-stats --speculative-config "
        """'{"model": "a/draft", "revision": "v1", "num_speculative_tokens": 6,"""
        """ "num_speculative_tokens_per_batch_size": [[1, 8, 6], [9, 64, 2]],"""
        """ "rejection_sample_method": "block"}'"""
    )
    assert data_of(migration) == {
        "name": "My-model",
        "draft": {"checkpoint": "a/draft", "revision": "v1", "tp_size": 2},
        "target": {"checkpoint": "a/target", "revision": "main", "tp_size": 2},
        "speculation": {
            "num_draft_tokens": 6,
            "schedule": [
                {"from_batch_size": 1, "num_draft_tokens": 6},
                {"from_batch_size": 9, "num_draft_tokens": 2},
            ],
        },
        "engine": {
            "runtime": "torch",
            "dtype": "float16",
            "max_seq_len": 32768,
            "max_batch_size": 64,
            "max_num_tokens": 4000,
        },
        "serving": {"max_queue_size": 200},
    }
    left = "\n".join(migration.sections["not carried"])
    for name in (
        "--no-enable-lora",
        "--kv-cache-dtype fp8",
        "--quantization",
        "--speculative-config.rejection_sample_method",
        "CUDA_VISIBLE_DEVICES: set it for specpipe, which heeds it, too",
        "VLLM_LOGGING_LEVEL: it is a variable of vLLM's environment",
    ):
        assert name in left
    assert "s3cret" not in f"{migration}{migration.output.read_text()}"
    assert migration.sections["mapped"] == (
        "--served-model-name ['My model', 'other']: name: My-model, which names the folder of the "
        "artifacts; the model in Triton is `ensemble`",
        "--tensor-parallel-size 2: draft.tp_size: 2, since vLLM splits the draft alike",
    )


@pytest.mark.parametrize(
    ("flags", "engine"),
    [
        ("--max-model-len auto", {}),
        ("--max-model-len -1", {}),
        ("--max-model-len 2K --max-model-len 1k", {"max_seq_len": 1000}),
        ("--max-model-len 25.6k", {"max_seq_len": 25600}),
        ("--dtype half --dtype auto", {"dtype": "auto"}),
        ("--enforce-eager --no-enforce-eager --disable-chunked-prefill -q awq -qawq", {}),
        ("--hf-token --hf-token abc --max-model-len=64", {"max_seq_len": 64}),
    ],
)
def test_forms_that_the_parser_of_vllm_takes(flags: str, engine: dict[str, Any]) -> None:
    migration = migrated(f"vllm serve a/target {flags}", draft="a/draft")
    assert data_of(migration)["engine"] == {"runtime": "torch", **engine}


def test_the_yaml_of_vllm_is_below_its_command_line(tmp_path: Path) -> None:
    """vLLM 0.33.0, vllm/utils/argparse_utils.py, load_config_file."""
    (tmp_path / "vllm.yaml").write_text(
        "max-model-len: 4096\nmax_num_seqs: 16\nenforce-eager: true\n"
        "speculative-config: {model: a/draft, num_speculative_tokens: 3}\n"
    )
    data = data_of(migrated("vllm serve a/target --config vllm.yaml --max-model-len 2048"))
    assert data["engine"] == {"runtime": "torch", "max_seq_len": 2048, "max_batch_size": 16}
    assert data["draft"] == {"checkpoint": "a/draft"}


def test_sglang_with_a_draft_model() -> None:
    """SGLang, docs/advanced_features/speculative_decoding.md@067ad4d3, SpecV2 with STANDALONE."""
    migration = migrated(
        "SGLANG_ENABLE_SPEC_V2=True python3 -m sglang.launch_server "
        "--model Qwen/Qwen2.5-7B-Instruct --speculative-algorithm STANDALONE "
        "--speculative-draft-model-path Qwen/Qwen2.5-1.5B-Instruct --speculative-num-steps 4 "
        "--speculative-eagle-topk 1 --speculative-num-draft-tokens 5 --mem-fraction-static 0.7 "
        "--cuda-graph-max-bs 8 --log-level warning"
    )
    assert data_of(migration) == {
        "name": "Qwen2.5-7B-Instruct",
        "draft": {"checkpoint": "Qwen/Qwen2.5-1.5B-Instruct"},
        "target": {"checkpoint": "Qwen/Qwen2.5-7B-Instruct"},
        "speculation": {"num_draft_tokens": 4},
        "engine": {"runtime": "torch"},
    }
    assert "--speculative-eagle-topk 1: a draft is a chain" in migration.sections["carried"]
    assert (
        "--speculative-num-draft-tokens 5: it is one more than what is drafted"
        in migration.sections["not carried"]
    )


def test_a_tree_of_sglang_is_a_chain() -> None:
    """The same page, STANDALONE with two candidates a step."""
    migration = migrated(
        "python3 -m sglang.launch_server --model Qwen/Qwen2.5-7B-Instruct "
        "--speculative-algorithm STANDALONE "
        "--speculative-draft-model-path Qwen/Qwen2.5-1.5B-Instruct --speculative-num-steps 4 "
        "--speculative-eagle-topk 2 --speculative-num-draft-tokens 7 --mem-fraction-static 0.7"
    )
    assert data_of(migration)["speculation"] == {"num_draft_tokens": 4}
    assert (
        "--speculative-eagle-topk 2: a draft is a chain, and no tree"
        in migration.sections["not carried"]
    )


def test_what_else_sglang_is_told() -> None:
    """`--tp` is the beginning of `--tp-size`, as its own pages write it."""
    migration = migrated(
        "sglang serve --model-path a/target --tp 2 --context-length 8k --max-running-requests 32 "
        "--max-queued-requests 99 --chunked-prefill-size 2048 --dtype bfloat16 --device cuda "
        "--modelopt-quant fp8 --kv-cache-dtype fp8_e4m3 --random-seed 1 "
        "--speculative-algorithm NGRAM --speculative-num-draft-tokens 8 "
        "--bucket-time-to-first-token 0.1 1 10 --trust-remote-code",
        draft="a/draft",
    )
    assert data_of(migration) == {
        "name": "target",
        "draft": {"checkpoint": "a/draft", "tp_size": 2},
        "target": {
            "checkpoint": "a/target",
            "tp_size": 2,
            "quantization": {"format": "fp8", "kv_cache": "fp8"},
        },
        "speculation": {"num_draft_tokens": 7, "prompt_lookup": True},
        "engine": {
            "runtime": "torch",
            "dtype": "bfloat16",
            "device": "cuda",
            "max_seq_len": 8000,
            "max_batch_size": 32,
            "max_num_tokens": 2048,
        },
        "serving": {"max_queue_size": 99},
    }


def test_an_fp8_cache_without_quantized_weights_is_not_carried() -> None:
    migration = migrated(
        "sglang serve --model-path a/target --kv-cache-dtype fp8_e4m3", draft="a/draft"
    )
    assert data_of(migration)["target"] == {"checkpoint": "a/target"}
    assert migration.sections["not carried"] == (
        "--kv-cache-dtype fp8_e4m3: specpipe has an FP8 KV cache together with quantized weights "
        "only: target.quantization {format, kv_cache: fp8}",
    )


TRTLLM_OPTIONS = """\
speculative_config:
  decoding_type: DraftTarget
  max_draft_len: 4
  speculative_model: meta-llama/Llama-3.2-1B-Instruct
  draft_len_schedule: {4: 4, 16: 2}
kv_cache_config:
  free_gpu_memory_fraction: 0.8
  enable_block_reuse: false
cuda_graph_config: {enable_padding: true}
disable_overlap_scheduler: true
max_batch_size: 32
"""
"""TensorRT-LLM, docs/source/features/speculative-decoding.md@04c8822c: the keys of its examples."""


def test_trtllm_serve_with_its_options(tmp_path: Path) -> None:
    """The YAML overrides the command line: tensorrt_llm/commands/serve.py@00209af1."""
    (tmp_path / "options.yaml").write_text(TRTLLM_OPTIONS)
    migration = migrated(
        "trtllm-serve serve meta-llama/Llama-3.1-70B-Instruct --backend pytorch --tp_size 4 "
        "--max_batch_size 64 --max_num_tokens 4096 --max_seq_len 8192 "
        "--kv_cache_free_gpu_memory_fraction 0.95 --extra_llm_api_options options.yaml --port 8000"
    )
    assert data_of(migration) == {
        "name": "Llama-3.1-70B-Instruct",
        "draft": {"checkpoint": "meta-llama/Llama-3.2-1B-Instruct", "tp_size": 4},
        "target": {"checkpoint": "meta-llama/Llama-3.1-70B-Instruct", "tp_size": 4},
        "speculation": {"num_draft_tokens": 4},
        "engine": {
            "runtime": "tensorrt_llm",
            "max_batch_size": 32,
            "max_num_tokens": 4096,
            "max_seq_len": 8192,
            "tensorrt_llm": {
                "backend": "pytorch",
                "kv_cache_free_gpu_mem_fraction": 0.8,
                "enable_block_reuse": False,
            },
        },
    }
    assert (
        "max_batch_size in options.yaml 32: engine.max_batch_size: 32"
        in migration.sections["carried"]
    )
    assert "No engine is built" in "\n".join(migration.sections["behaviour"])


def test_options_of_trtllm_serve_alone(tmp_path: Path) -> None:
    (tmp_path / "options.yaml").write_text(TRTLLM_OPTIONS)
    migration = from_options(
        tmp_path / "options.yaml",
        "meta-llama/Llama-3.1-8B-Instruct",
        Wanted(name="llama", version="1.1.0", output=tmp_path / "pair.yaml"),
    )
    data = data_of(migration)
    assert data["name"] == "llama"
    assert data["target"] == {"checkpoint": "meta-llama/Llama-3.1-8B-Instruct"}
    assert data["engine"]["tensorrt_llm"] == {
        "backend": "pytorch",
        "kv_cache_free_gpu_mem_fraction": 0.8,
        "enable_block_reuse": False,
        "version": "1.1.0",
    }
    comment = migration.output.read_text().splitlines()[0]
    assert comment == "# Made from options.yaml of `trtllm-serve` by `specpipe migrate`."


def test_options_of_1_4(tmp_path: Path) -> None:
    options = tmp_path / "options.yaml"
    options.write_text(
        TRTLLM_OPTIONS.replace("max_draft_len: 4", "max_draft_len: 4\n  enable_penalty: true")
    )
    wanted = Wanted(version="1.4.0rc4", output=tmp_path / "pair.yaml")
    migration = from_options(options, "meta-llama/Llama-3.1-8B-Instruct", wanted)
    assert data_of(migration)["engine"]["tensorrt_llm"] == {
        "backend": "pytorch",
        "version": "1.4.0rc4",
        "enable_penalty": True,
        "enable_block_reuse": False,
        "kv_cache_free_gpu_mem_fraction": 0.8,
    }
    assert "return_log_probs is refused" in "\n".join(migration.sections["behaviour"])


def test_a_draft_of_trtllm_serve_that_proposes_in_one_pass(tmp_path: Path) -> None:
    """llm-api/reference/PARDDecodingConfig.html of 1.4.0rc4."""
    options = tmp_path / "options.yaml"
    options.write_text(
        "speculative_config:\n  decoding_type: PARD\n  max_draft_len: 8\n"
        "  speculative_model: a/draft\n  mask_token_id: 128255\n"
    )
    migration = from_options(options, "a/target", Wanted(version="1.4.0rc4"))
    data = data_of(migration)
    assert data["draft"] == {"checkpoint": "a/draft"}
    assert data["speculation"] == {"num_draft_tokens": 8}
    (left,) = migration.sections["not carried"]
    assert left.startswith("speculative_config.mask_token_id in options.yaml: ")


def test_another_runtime_leaves_out_what_it_has_no_setting_for(tmp_path: Path) -> None:
    (tmp_path / "options.yaml").write_text(TRTLLM_OPTIONS)
    line = "trtllm-serve a/target --config options.yaml"
    migration = migrated(line, runtime="torch")
    assert data_of(migration)["engine"] == {"runtime": "torch", "max_batch_size": 32}
    assert (
        "kv_cache_config.free_gpu_memory_fraction in options.yaml 0.8, "
        "kv_cache_config.enable_block_reuse in options.yaml: it has no effect with runtime torch"
        in migration.sections["not carried"]
    )
    other = migrated(
        "vllm serve a/target --dtype float16 --spec-method ngram",
        draft="a/draft",
        runtime="tensorrt_llm",
        output=tmp_path / "b.yaml",
    )
    assert data_of(other)["engine"] == {
        "runtime": "tensorrt_llm",
        "tensorrt_llm": {"backend": "pytorch"},
    }
    assert other.sections["not carried"] == (
        "--spec-method ngram: runtime tensorrt_llm has no prompt lookup: --runtime torch has",
        "--dtype float16: it has no effect with runtime tensorrt_llm",
    )


def test_a_pair_of_folders_passes_check(tmp_path: Path) -> None:
    for role in ("draft", "target"):
        folder = write_toy_checkpoint(tmp_path / "models" / role)
        write_tokenizer(folder, words(), bos_token="<bos>", eos_token="<eos>", pad_token="<pad>")
    (tmp_path / "configs").mkdir()
    line = "vllm serve models/target --spec-model ./models/draft --max-model-len 64 --device cpu"
    runner = CliRunner()
    written = runner.invoke(
        main, ["migrate", "--output", "configs/toy.yaml", "--", *shlex.split(line)]
    )
    assert written.exit_code == 0, written.output
    assert written.stdout.splitlines()[:3] == [
        "configs/toy.yaml",
        "carried:",
        "  the model models/target: target.checkpoint: ../models/target",
    ]
    data = yaml.safe_load((tmp_path / "configs" / "toy.yaml").read_text())
    assert data["draft"] == {"checkpoint": "../models/draft"}
    checked = runner.invoke(main, ["check", "--config", "configs/toy.yaml"])
    assert checked.exit_code == 0, checked.output
