from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specpipe.build.stages.convert import Convert, convert
from specpipe.checkpoints.checkpoint import read_safetensors_header
from specpipe.checkpoints.unified import UnifiedCheckpoint, load_unified
from specpipe.errors import CheckpointError, ConfigError
from specpipe.stage import StageInputs
from tests.toy import (
    ARCHITECTURES,
    toy_config,
    toy_tensors,
    write_tensors,
    write_toy_checkpoint,
)


def converted(checkpoint: Path, out: Path, **mapping: int) -> UnifiedCheckpoint:
    out.mkdir()
    convert(checkpoint, out, **mapping)
    return load_unified(out)


def refusal(checkpoint: Path, out: Path) -> str:
    """Returns the message of a refused conversion, which must leave `out` empty."""
    out.mkdir(exist_ok=True)
    with pytest.raises(CheckpointError) as caught:
        convert(checkpoint, out)
    assert list(out.iterdir()) == []
    return str(caught.value).replace(str(checkpoint), "FOLDER")


def edit_config(folder: Path, **overrides: Any) -> None:
    config = json.loads((folder / "config.json").read_text()) | overrides
    config = {key: value for key, value in config.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(config))


def hf_tensors(unified: UnifiedCheckpoint) -> dict[str, np.ndarray[Any, Any]]:
    """Takes a unified checkpoint apart again, into the tensors of Hugging Face."""
    config = unified.config
    is_gemma, is_phi = (config.architecture.startswith(name) for name in ("Gemma2", "Phi3"))
    heads, kv_heads = config.query_size, config.key_size
    modules = {
        "transformer.vocab_embedding": "model.embed_tokens",
        "transformer.ln_f": "model.norm",
        "lm_head": "lm_head",
    }
    layer_modules = {
        "input_layernorm": "input_layernorm",
        "post_layernorm": "post_attention_layernorm",
        "attention.dense": "self_attn.o_proj",
        "attention.q_layernorm": "self_attn.q_norm",
        "attention.k_layernorm": "self_attn.k_norm",
        "mlp.fc": "mlp.gate_proj",
        "mlp.gate": "mlp.up_proj",
        "mlp.proj": "mlp.down_proj",
        "pre_feedforward_layernorm": "pre_feedforward_layernorm",
        "post_feedforward_layernorm": "post_feedforward_layernorm",
    }
    tensors: dict[str, np.ndarray[Any, Any]] = {}
    for name in unified.names():
        module, kind = name.rsplit(".", 1)
        data = unified.tensor(name).data
        if is_gemma and ("layernorm" in name or "ln_f" in name):
            # 1 + a small bfloat16 number is exact in float32.
            data = ((data.view(np.float32) - 1).view(np.uint32) >> 16).astype(np.uint16)
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if module in modules:
            tensors[f"{modules[module]}.{kind}"] = data
            continue
        layer, module = module.removeprefix("transformer.layers.").split(".", 1)
        prefix = f"model.layers.{layer}"
        if module == "attention.qkv" and is_phi:
            tensors[f"{prefix}.self_attn.qkv_proj.{kind}"] = data
        elif module == "mlp.fc" and is_phi:
            up, gate = np.split(data, 2)
            tensors[f"{prefix}.mlp.gate_up_proj.{kind}"] = np.concatenate([gate, up])
        elif module == "attention.qkv":
            q, k, v = np.split(data, [heads, heads + kv_heads])
            for letter, part in (("q", q), ("k", k), ("v", v)):
                tensors[f"{prefix}.self_attn.{letter}_proj.{kind}"] = part
        else:
            tensors[f"{prefix}.{layer_modules[module]}.{kind}"] = data
    return tensors


@pytest.mark.parametrize("family", ARCHITECTURES)
@pytest.mark.parametrize("tp_size", [1, 2, 4])
@pytest.mark.parametrize("pp_size", [1, 2, 4])
def test_merged_ranks_are_the_original(
    tmp_path: Path, family: str, tp_size: int, pp_size: int
) -> None:
    overrides: dict[str, Any] = {"vocab_size": 251, "num_hidden_layers": 5, "head_dim": 16}
    if family == "llama":
        overrides |= {"attention_bias": True, "mlp_bias": True}
    checkpoint = write_toy_checkpoint(tmp_path / "hf", family, num_shards=2, **overrides)
    unified = converted(checkpoint, tmp_path / "out", tp_size=tp_size, pp_size=pp_size)
    original = toy_tensors(toy_config(family, **overrides))
    merged = hf_tensors(unified)
    assert merged.keys() == original.keys()
    for name, array in original.items():
        assert np.array_equal(merged[name], array), name
    assert len(list((tmp_path / "out").glob("rank*.safetensors"))) == tp_size * pp_size


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_what_transformers_saves_is_converted(tmp_path: Path, family: str) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(**toy_config(family, architectures=...))
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "hf", max_shard_size="40KB")
    assert len(list((tmp_path / "hf").glob("model-*.safetensors"))) > 1
    merged = hf_tensors(converted(tmp_path / "hf", tmp_path / "out", tp_size=2, pp_size=2))
    state = model.state_dict()
    if model.config.tie_word_embeddings:
        del state["lm_head.weight"]
    assert merged.keys() == state.keys()
    for name, tensor in state.items():
        assert torch.equal(torch.from_numpy(merged[name]).view(torch.bfloat16), tensor), name


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("num_shards", [1, 2])
def test_tied_head_is_written(tmp_path: Path, tp_size: int, num_shards: int) -> None:
    checkpoint = write_toy_checkpoint(
        tmp_path / "hf", num_shards=num_shards, tie_word_embeddings=True
    )
    unified = converted(checkpoint, tmp_path / "out", tp_size=tp_size)
    embedding = toy_tensors(toy_config(tie_word_embeddings=True))["model.embed_tokens.weight"]
    assert np.array_equal(unified.tensor("lm_head.weight").data, embedding)
    assert np.array_equal(unified.tensor("transformer.vocab_embedding.weight").data, embedding)
    assert unified.config.tie_word_embeddings is True


def test_tied_head_that_is_stored_too_must_be_the_embedding(tmp_path: Path) -> None:
    checkpoint = write_toy_checkpoint(tmp_path / "hf", tie_word_embeddings=True)
    tensors = toy_tensors(toy_config(tie_word_embeddings=True))
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    path = checkpoint / "model.safetensors"
    path.unlink()
    write_tensors(path, tensors)
    assert "lm_head.weight" in converted(checkpoint, tmp_path / "same").names()

    tensors["lm_head.weight"][255, 31] ^= 1
    path.unlink()
    write_tensors(path, tensors)
    assert refusal(checkpoint, tmp_path / "out") == (
        "FOLDER: tie_word_embeddings is true in config.json, but lm_head.weight differs from "
        "model.embed_tokens.weight; set it to false if the head was trained, else delete the tensor"
    )


def test_head_is_never_tied_by_accident(tmp_path: Path) -> None:
    checkpoint = write_toy_checkpoint(tmp_path / "hf", tie_word_embeddings=True)
    edit_config(checkpoint, tie_word_embeddings=False)
    assert refusal(checkpoint, tmp_path / "out") == (
        "FOLDER has no lm_head.weight, but tie_word_embeddings is false in config.json; set it to "
        "true if the head is the embedding, else download the weights again"
    )


def test_missing_shard_stops_before_any_weight_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(info: object) -> None:
        raise AssertionError("a weight was read")

    monkeypatch.setattr("specpipe.checkpoints.plain_weights.read_blocks", read)
    checkpoint = write_toy_checkpoint(tmp_path / "hf", num_shards=2)
    (checkpoint / "model-00002-of-00002.safetensors").unlink()
    assert refusal(checkpoint, tmp_path / "out") == (
        "FOLDER lacks model-00002-of-00002.safetensors, which holds 11 of its 21 tensors; "
        "the download seems incomplete, run it again"
    )


@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_rope_scaling_is_carried(tmp_path: Path, key: str) -> None:
    numbers = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    checkpoint = write_toy_checkpoint(
        tmp_path / "hf",
        head_dim=16,
        rope_parameters=...,
        rope_theta=10000.0,
        rope_scaling={key: "llama3", **numbers},
    )
    config = converted(checkpoint, tmp_path / "out").config
    assert (config.rotary_base, config.head_size) == (10000.0, 16)
    assert config.rotary_scaling == {"rope_type": "llama3", **numbers}


def test_unknown_rope_scaling_is_refused(tmp_path: Path) -> None:
    checkpoint = write_toy_checkpoint(
        tmp_path / "hf", rope_parameters={"rope_type": "spiral", "rope_theta": 1e4, "factor": 8.0}
    )
    assert refusal(checkpoint, tmp_path / "out") == (
        "FOLDER: config.json: rope type 'spiral' is not supported; "
        "supported: default, linear, dynamic, llama3, yarn, longrope"
    )


def test_both_spellings_of_transformers_make_the_same_bytes(tmp_path: Path) -> None:
    new = write_toy_checkpoint(
        tmp_path / "new",
        rope_parameters={"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0},
    )
    old = write_toy_checkpoint(tmp_path / "old")
    edit_config(
        old,
        rope_parameters=...,
        rope_theta=500000.0,
        rope_scaling={"type": "linear", "factor": 2.0},
        dtype=...,
        torch_dtype="bfloat16",
        transformers_version="4.57.3",
    )
    for checkpoint in (new, old):
        converted(checkpoint, tmp_path / f"{checkpoint.name}-out", tp_size=2)
    for name in ("config.json", "rank0.safetensors", "rank1.safetensors"):
        ours, theirs = (tmp_path / f"{which}-out" / name for which in ("new", "old"))
        assert ours.read_bytes() == theirs.read_bytes(), name


def rewrite(folder: Path, dtype: str, values: np.ndarray[Any, Any]) -> None:
    """Stores the toy with another dtype; the last norm gets the given raw values first."""
    path = folder / "model.safetensors"
    raw = {name: array.astype(np.uint32) << 16 for name, array in toy_tensors(toy_config()).items()}
    if dtype == "F16":
        raw = {
            name: array.view(np.float32).astype(np.float16).view(np.uint16)
            for name, array in raw.items()
        }
    raw["model.norm.weight"][: len(values)] = values
    path.unlink()
    write_tensors(path, raw, dtype=dtype)


@pytest.mark.parametrize(
    ("stored", "wanted", "values", "expected"),
    [
        (
            "F32",
            "bfloat16",
            # below, at and above a tie with an even and an odd last place; the largest
            [0x3F807FFF, 0x3F808000, 0x3F808001, 0x3F818000, 0x7F7F7FFF],
            [0x3F80, 0x3F80, 0x3F81, 0x3F82, 0x7F7F],
        ),
        ("F32", "float16", [0x3F800000, 0x3F801000, 0x3F803000], [0x3C00, 0x3C00, 0x3C02]),
        ("F16", "float32", [0x3C00, 0x0001, 0xC500], [0x3F800000, 0x33800000, 0xC0A00000]),
        ("F16", "bfloat16", [0x3C00, 0x3C01, 0x3C0C], [0x3F80, 0x3F80, 0x3F82]),
    ],
)
def test_weights_take_the_dtype_of_the_config(
    tmp_path: Path, stored: str, wanted: str, values: list[int], expected: list[int]
) -> None:
    checkpoint = write_toy_checkpoint(tmp_path / "hf")
    edit_config(checkpoint, dtype=wanted)
    rewrite(checkpoint, stored, np.array(values))
    unified = converted(checkpoint, tmp_path / "out")
    norm = unified.tensor("transformer.ln_f.weight").data
    assert norm[: len(expected)].tolist() == expected
    assert unified.config.dtype == wanted


def test_config_without_dtype_takes_that_of_the_weights(tmp_path: Path) -> None:
    checkpoint = write_toy_checkpoint(tmp_path / "hf", dtype="float16")
    edit_config(checkpoint, dtype=...)
    assert converted(checkpoint, tmp_path / "out").config.dtype == "float16"


@pytest.mark.parametrize(
    ("stored", "wanted", "raw", "what"),
    [
        (
            "F32",
            "float16",
            0x47890000,
            "is 70144, but float16 holds 65504 at most; set dtype to bfloat16 in config.json",
        ),
        (
            "F32",
            "bfloat16",
            0xFF7FFFFF,
            "is -3.4028235e+38, but bfloat16 holds 3.3895314e+38 at most; set dtype to float32 in "
            "config.json",
        ),
        *(
            (
                stored,
                wanted,
                raw,
                f"is {value}, which no weight can be: the checkpoint is damaged; download it "
                "again, or use another one",
            )
            for stored, wanted, raw, value in [
                ("F32", "float32", 0x7F800000, "inf"),
                ("F32", "float32", 0xFFFFFFFF, "nan"),
                ("F32", "bfloat16", 0x7FFFFFFF, "nan"),
                ("F32", "float16", 0xFF800000, "-inf"),
                ("F16", "float16", 0x7C00, "inf"),
                ("F16", "float16", 0xFC01, "nan"),
                ("F16", "float32", 0xFC00, "-inf"),
            ]
        ),
    ],
)
def test_numbers_that_cannot_be_are_refused(
    tmp_path: Path, stored: str, wanted: str, raw: int, what: str
) -> None:
    checkpoint = write_toy_checkpoint(tmp_path / "hf")
    edit_config(checkpoint, dtype=wanted)
    rewrite(checkpoint, stored, np.array([0x3C00, raw]))
    (tmp_path / "out").mkdir()
    with pytest.raises(CheckpointError) as caught:
        convert(checkpoint, tmp_path / "out")
    assert str(caught.value) == f"{checkpoint / 'model.safetensors'}: model.norm.weight[1] {what}"


@pytest.mark.parametrize("value", [0x7F80, 0xFF80, 0x7FC0, 0xFFFF])
@pytest.mark.parametrize(("family", "name"), [("llama", "k_proj"), ("phi3", "qkv_proj")])
def test_the_place_in_a_tensor_is_named(tmp_path: Path, family: str, name: str, value: int) -> None:
    """Also where a tensor passes in several jobs, or is one of several that are fused."""
    checkpoint = write_toy_checkpoint(tmp_path / "hf", family)
    tensors = toy_tensors(toy_config(family))
    damaged = f"model.layers.1.self_attn.{name}.weight"
    last = tuple(size - 1 for size in tensors[damaged].shape)
    tensors[damaged][last] = value
    (checkpoint / "model.safetensors").unlink()
    write_tensors(checkpoint / "model.safetensors", tensors)
    (tmp_path / "out").mkdir()
    with pytest.raises(CheckpointError, match=r"which no weight can be") as caught:
        convert(checkpoint, tmp_path / "out", tp_size=2)
    assert f"model.safetensors: {damaged}{list(last)} is " in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            {"vocab_size": 257},
            "FOLDER: model.embed_tokens.weight has shape [256, 32], "
            "but config.json makes it [257, 32]",
        ),
        (
            {"num_hidden_layers": 3},
            "FOLDER lacks 9 tensors of its config.json: model.layers.2.input_layernorm.weight, "
            "model.layers.2.self_attn.q_proj.weight, model.layers.2.self_attn.k_proj.weight "
            "and 6 more",
        ),
        (
            {"num_hidden_layers": 500},
            "FOLDER has 21 tensors, too few for the 500 layers of its config.json",
        ),
        (
            {"num_hidden_layers": 1},
            "FOLDER holds 9 tensors for which LlamaForCausalLM with this config.json has no use: "
            "model.layers.1.input_layernorm.weight, model.layers.1.mlp.down_proj.weight, "
            "model.layers.1.mlp.gate_proj.weight and 6 more",
        ),
        (
            {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"},
            "FOLDER lacks 6 tensors of its config.json: model.layers.0.self_attn.q_proj.bias, "
            "model.layers.0.self_attn.k_proj.bias, model.layers.0.self_attn.v_proj.bias "
            "and 3 more",
        ),
        (
            {"quantization_config": {"quant_method": "bitsandbytes"}},
            "FOLDER is already quantized, and quant_method 'bitsandbytes' is not read "
            "(config.json); what is read: ModelOpt, compressed-tensors fp8, AWQ (gemm) and GPTQ; "
            "use the checkpoint that it was quantized from",
        ),
    ],
)
def test_weights_must_be_those_of_the_config(
    tmp_path: Path, overrides: dict[str, Any], message: str
) -> None:
    checkpoint = write_toy_checkpoint(tmp_path / "hf")
    edit_config(checkpoint, **overrides)
    assert refusal(checkpoint, tmp_path / "out") == message


def test_integer_weights_are_refused(tmp_path: Path) -> None:
    checkpoint = write_toy_checkpoint(tmp_path / "hf")
    path = checkpoint / "model.safetensors"
    path.unlink()
    write_tensors(path, toy_tensors(toy_config()), dtype="I16")
    assert refusal(checkpoint, tmp_path / "out") == (
        "FOLDER: model.embed_tokens.weight has dtype I16, which no plain checkpoint has; "
        "use the checkpoint that it was quantized from"
    )


def test_saved_rotary_buffers_are_left_out(tmp_path: Path) -> None:
    checkpoint = write_toy_checkpoint(tmp_path / "hf")
    tensors = toy_tensors(toy_config())
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(4, np.uint16)
    path = checkpoint / "model.safetensors"
    path.unlink()
    write_tensors(path, tensors)
    assert len(converted(checkpoint, tmp_path / "out").names()) == 17


def test_stage_names_its_inputs(tmp_path: Path) -> None:
    checkpoint = write_toy_checkpoint(tmp_path / "hf", num_shards=2)
    (checkpoint / "README.md").write_text("not an input")
    stage = Convert("draft", checkpoint, tp_size=2)
    assert stage.name == "draft/convert"
    assert stage.inputs() == StageInputs(
        files=(
            checkpoint / "config.json",
            checkpoint / "model.safetensors.index.json",
            checkpoint / "model-00001-of-00002.safetensors",
            checkpoint / "model-00002-of-00002.safetensors",
        ),
        settings={"tp_size": 2, "pp_size": 1},
    )


def test_stage_says_whose_checkpoint_it_is(tmp_path: Path) -> None:
    checkpoint = write_toy_checkpoint(tmp_path / "hf")
    with pytest.raises(ConfigError) as caught:
        Convert("target", checkpoint, pp_size=3).run(tmp_path)
    assert str(caught.value) == ("target: pp_size 3 cannot split 2 layers; possible: 1 to 2")


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_blocks_and_threads_do_not_show(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    checkpoint = write_toy_checkpoint(tmp_path / "hf", family, vocab_size=251)
    edit_config(checkpoint, dtype="float32")
    whole = converted(checkpoint, tmp_path / "whole", tp_size=4)
    tensors = {name: whole.tensor(name).data for name in whole.names()}
    monkeypatch.setattr(
        "specpipe.checkpoints.checkpoint._BLOCK_BYTES", 200
    )  # three rows of bfloat16
    monkeypatch.setattr("specpipe.checkpoints.unified.JOB_BYTES", 900)
    in_pieces = converted(checkpoint, tmp_path / "pieces", tp_size=4)
    for path in sorted((tmp_path / "whole").iterdir()):
        assert path.read_bytes() == (tmp_path / "pieces" / path.name).read_bytes(), path.name
    for name, data in tensors.items():
        assert np.array_equal(in_pieces.tensor(name).data, data), name
        assert in_pieces.holds(name, data)
        other = data.copy()
        other[-1, ...] ^= other.dtype.type(1)
        assert not in_pieces.holds(name, other), name


def test_conversion_repeats_bit_for_bit(tmp_path: Path) -> None:
    checkpoint = write_toy_checkpoint(tmp_path / "hf", "qwen3", num_shards=2)
    for out in (tmp_path / "a", tmp_path / "b"):
        converted(checkpoint, out, tp_size=2, pp_size=2)
    for path in sorted((tmp_path / "a").iterdir()):
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()
    assert read_safetensors_header(tmp_path / "a" / "rank0.safetensors")
