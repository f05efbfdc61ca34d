"""`specpipe inspect`: what is said of engines of every runtime, and of folders that are none."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from specpipe import __version__
from specpipe.build import cache
from specpipe.build.stages.convert import Convert
from specpipe.cli.group import main
from specpipe.runtimes.tensorrt.build import BuildTensorRTEngine, PlaceWeights
from specpipe.runtimes.tensorrt_llm.llmapi.collect import CollectCheckpoint
from specpipe.runtimes.torch.build import BuildTorchEngine
from tests.runtimes.tensorrt_llm.engines.folders import write_engine
from tests.toy import write_toy_checkpoint

LIMITS: dict[str, Any] = {
    "max_batch_size": 4,
    "max_seq_len": 64,
    "max_draft_len": 3,
    "max_num_tokens": 32,
}


def run(folder: Path, *options: str) -> Result:
    return CliRunner().invoke(main, ["inspect", str(folder), *options])


def lines(folder: Path, *options: str) -> list[str]:
    result = run(folder, *options)
    assert (result.exit_code, result.stderr) == (0, "")
    return [line for line in result.stdout.splitlines() if not line.startswith("  built ")]


def as_json(folder: Path) -> dict[str, Any]:
    result = run(folder, "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    (engine,) = json.loads(result.stdout)["engines"]
    return engine  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def unified(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inspect")
    cache.build(Convert("target", write_toy_checkpoint(folder / "toy")), folder / "checkpoint")
    return folder / "checkpoint"


@pytest.fixture
def torch_role(unified: Path, tmp_path: Path) -> Path:
    """The folder of a role whose engine is one of runtime torch."""
    pytest.importorskip("torch")
    stage = BuildTorchEngine(role="target", checkpoint=unified, device="cpu", **LIMITS)
    cache.build(stage, tmp_path / "pair/target/engine")
    return tmp_path / "pair/target"


@pytest.fixture(scope="module")
def tensorrt_role(unified: Path) -> Path:
    """The folder of a role with a plan and an engine beside whose plan the weights are."""
    pytest.importorskip("tensorrt_rtx")
    role = unified.parent / "rtx/target"
    stage = BuildTensorRTEngine(
        role="target",
        checkpoint=unified,
        dtype="auto",
        library="tensorrt_rtx",
        compute_capabilities=("8.9", "12.0"),
        weights="beside",
        weight_streaming=False,
        **LIMITS,
    )
    cache.build(stage, role / "plan")
    place = PlaceWeights(role="target", plan=role / "plan", checkpoint=unified)
    cache.build(place, role / "engine")
    return role


# Weights of the toy: 2 · 256 · 32 (embedding, head) + 2 · (64 · 32 + 32 · 32 + 3 · 64 · 32 + 64)
# (layers) + 32 = 34976. Its KV cache: 2 layers, keys and values, 2 heads of 8: 64 numbers a token.


def test_an_engine_of_runtime_torch(torch_role: Path) -> None:
    engine = torch_role / "engine"
    found = as_json(torch_role)
    assert found["memory"]["weights_bytes"] == 4 * 34976
    assert found["memory"]["kv_bytes_per_token"] == 4 * 64
    assert found["memory"]["kv_cache_bytes"] == 4 * (64 + 3 + 1) * 4 * 64
    assert found["files"] == {path.name: path.stat().st_size for path in engine.iterdir()}
    assert found["build"]["argv"] == sys.argv
    assert found["damage"] == []
    workspace = found["memory"]["workspace_bytes"] / 1000
    assert lines(torch_role) == [
        str(engine),
        "  runtime               torch",
        f"  versions              specpipe {__version__}",
        "  model                 LlamaForCausalLM, 2 layers, float32",
        "  limits                max_batch_size 4, max_seq_len 64, max_num_tokens 32,"
        " max_draft_len 3",
        "  settings              device cpu",
        "  files                 config.json 1.4 kB, model.safetensors 141.2 kB",
        "  memory                weights 139.9 kB",
        f"                        workspace {workspace:.1f} kB (estimated)",
        "                        KV cache 0.3 kB per token, 69.6 kB for 4 sequences",
        "  weights by precision  F32 15",
    ]
    assert run(engine).stdout == run(torch_role).stdout


def test_an_engine_of_runtime_tensorrt(tensorrt_role: Path) -> None:
    import tensorrt_rtx

    found = as_json(tensorrt_role)
    assert found["versions"] == {
        "specpipe": __version__,
        "tensorrt_rtx": tensorrt_rtx.__version__,
    }
    assert found["compute_capabilities"] == ["8.9", "12.0"]
    assert found["memory"]["weights_bytes"] == 2 * 34976
    assert found["memory"]["kv_bytes_per_token"] == 2 * 64
    assert found["memory"]["kv_cache_bytes"] == 4 * 72 * 2 * 64  # 64 + 2 · 4 positions of a slot
    assert found["inputs"][0] == {"name": "input_ids", "dtype": "int32", "shape": ["B", "N"]}
    caches = [f"{kind}_cache.{layer}" for layer in range(2) for kind in ("key", "value")]
    names = [tensor["name"] for tensor in found["inputs"]]
    assert [name for name in names if "cache" in name] == caches
    assert found["outputs"] == [
        {"name": f"{name}.out", "dtype": "bfloat16", "shape": ["B", 2, 72, 8]} for name in caches
    ] + [{"name": "logits", "dtype": "float32", "shape": ["R", 256]}]
    assert found["profiles"] == [
        {"name": "decode", "sizes": {"B": [1, 1, 4], "N": [1, 4, 4], "R": [1, 4, 16]}},
        {"name": "prefill", "sizes": {"B": [1, 1, 1], "N": [1, 32, 32], "R": [1, 1, 4]}},
    ]
    layers = found["layers"]
    assert (layers["kv_cache_update"], layers["attention_input"], layers["gather"]) == (4, 2, 3)
    assert sum(layers.values()) == sum(found["layer_precisions"].values())
    assert set(found["layer_precisions"]) == {"bfloat16", "float32", "int64"}


def test_tensors_of_all_layers_are_one_line(tensorrt_role: Path) -> None:
    shown = lines(tensorrt_role)
    start = next(number for number, line in enumerate(shown) if line.startswith("  inputs"))
    prefix = "transformer.layers.0…1"
    wanted = [
        ("input_ids", "int32", "[B, N]"),
        ("position_ids", "int32", "[B, N]"),
        ("write_indices", "int32", "[B]"),
        ("key_value_lengths", "int32", "[B]"),
        ("logits_indices", "int32", "[R]"),
        ("transformer.vocab_embedding.weight", "bfloat16", "[256, 32]"),
        (f"{prefix}.input_layernorm.weight", "bfloat16", "[1, 1, 32]"),
        (f"{prefix}.attention.qkv.weight", "bfloat16", "[1, 64, 32]"),
        ("key_cache.0…1", "bfloat16", "[B, 2, 72, 8]"),
        ("value_cache.0…1", "bfloat16", "[B, 2, 72, 8]"),
    ]
    found = [tuple(line[24:].split(None, 2)) for line in shown[start : start + len(wanted)]]
    assert sorted(found) == sorted(wanted)
    assert "  compute capabilities  8.9, 12.0" in shown
    assert (
        "  settings              library tensorrt_rtx, weights beside, weight_streaming false"
        in (shown)
    )
    assert (
        "  profiles              decode: B 1 to 4 (best 1), N 1 to 4 (best 4), R 1 to 16 (best 4)"
        in shown
    )


def test_the_most_frequent_kind_of_layer_is_named_first(tensorrt_role: Path) -> None:
    found = as_json(tensorrt_role)["layers"]
    text = " ".join(" ".join(lines(tensorrt_role)).split())
    named = text.partition(" layers elementwise ")[2].partition(" layers by precision ")[0]
    first, *others = named.split(", ")
    counts = [int(first), *(int(other.split()[1]) for other in others)]
    assert counts == sorted(found.values(), reverse=True)


def test_the_plan_alone_can_be_looked_at(tensorrt_role: Path) -> None:
    assert as_json(tensorrt_role / "plan")["files"].keys() == {"config.json", "rank0.engine"}


def test_an_engine_of_tensorrt_llm(tmp_path: Path) -> None:
    shape = {"num_hidden_layers": 2, "num_key_value_heads": 2, "head_size": 8}
    mapping = {"world_size": 4, "tp_size": 4, "pp_size": 1}
    quantization = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}
    engine = write_engine(
        tmp_path / "engine", "target", **shape, mapping=mapping, quantization=quantization
    )
    built_with = {"tensorrt": "10.14.1.48", "compute_capability": "9.0", "world_size": 4}
    (engine / "specpipe.json").write_text(json.dumps(built_with))
    assert " ".join(" ".join(lines(engine)).split()) == (
        f"{engine} runtime tensorrt_llm versions tensorrt_llm 1.2.1, tensorrt 10.14.1.48"
        " model LlamaForCausalLM, 2 layers, bfloat16"
        " quantization quant_algo FP8, kv_cache_quant_algo FP8"
        " compute capabilities 9.0"
        " limits max_batch_size 8, max_input_len 516, max_seq_len 516, max_num_tokens 8192,"
        " max_draft_len 4"
        " settings backend tensorrt, logits_dtype float32, world_size 4, tp_size 4, pp_size 1,"
        " speculative_decoding_mode draft_tokens_external, kv_cache_type PAGED,"
        " tokens_per_block 32, use_paged_context_fmha true, gather_context_logits false,"
        " gather_generation_logits false"
        " files config.json 0.7 kB, model.cache 0.0 kB, rank0.engine 0.0 kB, rank1.engine 0.0 kB,"
        " rank2.engine 0.0 kB, rank3.engine 0.0 kB, specpipe.json 0.1 kB"
        " memory KV cache 0.1 kB per token"
    )
    # Four ranks and two heads: each head is there twice.
    assert as_json(engine)["memory"]["kv_bytes_per_token"] == 2 * 64
    (engine / "rank3.engine").unlink()
    assert run(engine).stderr == (
        f"Error: {engine} is damaged: file rank3.engine is missing: build it again\n"
    )


def test_a_checkpoint_that_backend_pytorch_serves(tmp_path: Path) -> None:
    toy = write_toy_checkpoint(tmp_path / "toy", num_shards=2)
    quantization = {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}}
    (toy / "hf_quant_config.json").write_text(json.dumps(quantization))
    role = tmp_path / "pair/target"
    cache.build(CollectCheckpoint("target", toy), role / "checkpoint")
    found = as_json(role)
    assert (found["engine"], found["runtime"]) == (str(role / "checkpoint"), "tensorrt_llm")
    assert found["settings"] == {"backend": "pytorch"}
    assert found["quantization"] == quantization["quantization"]
    assert found["weight_precisions"] == {"BF16": 21}
    assert found["memory"]["weights_bytes"] == 2 * 34976
    assert found["memory"]["kv_bytes_per_token"] == 64
    version = tmp_path / "model_repo/speculative/1"
    (version / "target").mkdir(parents=True)
    for path in (role / "checkpoint").iterdir():
        os.link(path, version / "target" / path.name)
    (version / "model.yaml").write_text(
        "max_batch_size: 8\nmax_seq_len: 512\nspeculative_config: {max_draft_len: 4}\n"
    )
    limits = {"max_batch_size": 8, "max_seq_len": 512, "max_draft_len": 4}
    assert as_json(version / "target")["limits"] == limits


def test_a_pair_is_both_engines(torch_role: Path) -> None:
    pair = torch_role.parent
    result = run(pair)
    assert result.exit_code == 1
    assert result.stderr == (f"Error: {pair}/draft does not exist: run `specpipe build` first\n")
    (pair / "draft").mkdir()
    assert run(pair).stderr == f"Error: {no_engine(pair / 'draft')}\n"
    (pair / "draft").rmdir()
    os.rename(torch_role, pair / "draft")
    os.symlink(pair / "draft", torch_role)
    assert lines(pair) == lines(pair / "draft") + [""] + lines(torch_role)


def no_engine(folder: Path) -> str:
    return (
        f"{folder} is no engine and holds none: expected a folder that `specpipe build` made, as "
        "engines/NAME/target, or engines/NAME for both"
    )


def test_what_is_no_engine_is_refused(unified: Path, tmp_path: Path) -> None:
    for folder in (unified, unified.parent / "toy", tmp_path, unified / "config.json"):
        result = run(folder)
        assert (result.exit_code, result.stdout) == (1, "")
        assert result.stderr == f"Error: {no_engine(folder)}\n"
    assert run(tmp_path / "engine").stderr == (
        f"Error: {tmp_path}/engine does not exist: run `specpipe build` first\n"
    )


def change_a_byte(path: Path, *, keep_time: bool) -> None:
    status = path.stat()
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    if keep_time:
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def test_a_changed_byte_is_told(torch_role: Path) -> None:
    engine = torch_role / "engine"
    unverified = run(engine).stdout
    whole = run(engine, "--verify").stdout
    told = [line for line in whole.splitlines() if line not in unverified.splitlines()]
    assert len(told) == 1
    assert re.fullmatch(r"  verified +2 files hashed, \d+\.\d MB at \d+\.\d\d GB/s", told[0])
    change_a_byte(engine / "model.safetensors", keep_time=True)
    damage = "file model.safetensors is not what was built"
    error = f"Error: {engine} is damaged: {damage}: build it again\n"
    command = [sys.executable, "-c", "from specpipe.cli.group import main; main()", "inspect"]
    verified = subprocess.run([*command, str(engine), "--verify"], capture_output=True, text=True)
    assert (verified.returncode, verified.stderr) == (1, error)
    assert verified.stdout.splitlines()[-1] == f"  damaged               {damage}"
    (engine / "model.safetensors").touch()
    assert run(engine).stderr == error
    assert json.loads(run(engine, "--json").stdout)["engines"][0]["damage"] == [damage]


def test_a_config_that_cannot_be_read_is_told(torch_role: Path) -> None:
    engine = torch_role / "engine"
    (engine / "config.json").write_text("{")
    assert run(engine).stderr == (
        f"Error: {engine} is damaged: file config.json is not what was built: build it again\n"
    )


def test_what_an_engine_records_of_itself_goes_with_it(tensorrt_role: Path, tmp_path: Path) -> None:
    """A repository has the engine without the manifest beside it."""
    moved = tmp_path / "moved"
    moved.mkdir()
    for path in (tensorrt_role / "engine").iterdir():
        (moved / path.name).write_bytes(path.read_bytes())
    verified, original = lines(moved, "--verify")[1:], lines(tensorrt_role, "--verify")[1:]
    # It tells only of its largest file.
    assert verified.pop(37).startswith("  verified              1 file hashed, ")
    assert original.pop(37).startswith("  verified              3 files hashed, ")
    assert verified == original
    change_a_byte(moved / "rank0.engine", keep_time=False)
    assert run(moved).exit_code == 0
    assert run(moved, "--verify").stderr == (
        f"Error: {moved} is damaged: file rank0.engine is not what was built: build it again\n"
    )
    size = (moved / "rank0.engine").stat().st_size
    with (moved / "rank0.engine").open("ab") as file:
        file.truncate(size - 1)
    weights = moved / "rank0_managed_weights.safetensors"
    weights.unlink()
    assert run(moved).stderr == (
        f"Error: {moved} is damaged: file rank0.engine has {size - 1} bytes, built were {size}; "
        f"file {weights.name} is missing: build it again\n"
    )


def test_a_config_of_another_form_is_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"runtime": {"name": "tensorrt", "format": 0}}))
    assert run(tmp_path).stderr == (
        f"Error: {path} has no pretrained_config: build the engine again\n"
    )


def test_inspect_needs_no_library(torch_role: Path, tensorrt_role: Path) -> None:
    code = (
        "import sys; from specpipe.cli.group import main\n"
        "for folder in sys.argv[1:]: main(['inspect', folder], standalone_mode=False)\n"
        "print(sorted({'torch', 'tensorrt_rtx', 'tensorrt', 'tritonclient'} & set(sys.modules)))"
    )
    command = [sys.executable, "-c", code, str(torch_role), str(tensorrt_role)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
