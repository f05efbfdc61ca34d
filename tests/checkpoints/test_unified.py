from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from specpipe.build.stages.convert import convert
from specpipe.checkpoints.checkpoint import raw_dtype, read_safetensors_header
from specpipe.checkpoints.family_config import unified_config
from specpipe.checkpoints.formats import OFFERED
from specpipe.checkpoints.rules import Part
from specpipe.checkpoints.unified import load_unified, write_unified
from specpipe.checkpoints.unified_layout import part_shape, stored_dtype, unified_tensors
from specpipe.config.sections import QuantizationConfig
from specpipe.errors import CheckpointError, SpecpipeError
from specpipe.machine import memory
from specpipe.quantization.quantized_config import quantized_config
from tests.toy import read_tensor, toy_config, toy_tensors, write_toy_checkpoint

Raw = npt.NDArray[Any]


def write(
    out: Path, *, tp_size: int = 1, pp_size: int = 1, family: str = "llama", **overrides: Any
) -> dict[str, Raw]:
    """Writes the unified checkpoint of a toy into a new folder; returns the toy's tensors."""
    hf_config = toy_config(family, **overrides)
    tensors = toy_tensors(hf_config)

    def read(part: Part, layer: int | None, start: int, stop: int) -> Iterator[Raw]:
        for row in range(start, stop, 3):  # some blocks lie across two ranks
            yield tensors[part.source.format(n=layer)][row : min(row + 3, stop)]

    out.mkdir()
    write_unified(out, unified_config(hf_config, tp_size=tp_size, pp_size=pp_size), read)
    return tensors


def rank(out: Path, index: int) -> Mapping[str, Raw]:
    header = read_safetensors_header(out / f"rank{index}.safetensors")
    return {name: read_tensor(info) for name, info in header.items()}


def test_tensors_of_one_rank(tmp_path: Path) -> None:
    write(tmp_path / "out")
    layer = {
        "input_layernorm.weight": (32,),
        "attention.qkv.weight": (64, 32),
        "attention.dense.weight": (32, 32),
        "post_layernorm.weight": (32,),
        "mlp.fc.weight": (64, 32),
        "mlp.gate.weight": (64, 32),
        "mlp.proj.weight": (32, 64),
    }
    expected = {"transformer.vocab_embedding.weight": (256, 32)}
    for n in (0, 1):
        expected |= {f"transformer.layers.{n}.{name}": shape for name, shape in layer.items()}
    expected |= {"transformer.ln_f.weight": (32,), "lm_head.weight": (256, 32)}
    assert {name: array.shape for name, array in rank(tmp_path / "out", 0).items()} == expected
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "config.json",
        "rank0.safetensors",
    ]


def test_fc_is_the_activated_branch(tmp_path: Path) -> None:
    hf = write(tmp_path / "out")
    tensors = rank(tmp_path / "out", 0)
    prefix = "model.layers.1.mlp"
    assert np.array_equal(
        tensors["transformer.layers.1.mlp.fc.weight"], hf[f"{prefix}.gate_proj.weight"]
    )
    assert np.array_equal(
        tensors["transformer.layers.1.mlp.gate.weight"], hf[f"{prefix}.up_proj.weight"]
    )


def test_tensor_parallel_pieces(tmp_path: Path) -> None:
    hf = write(tmp_path / "out", tp_size=2, family="qwen2")
    attention, mlp = "model.layers.0.self_attn", "model.layers.0.mlp"
    for tp_rank in (0, 1):
        tensors = rank(tmp_path / "out", tp_rank)
        q, kv = slice(16 * tp_rank, 16 * tp_rank + 16), slice(8 * tp_rank, 8 * tp_rank + 8)
        for kind in ("weight", "bias"):
            qkv = [
                hf[f"{attention}.q_proj.{kind}"][q],
                hf[f"{attention}.k_proj.{kind}"][kv],
                hf[f"{attention}.v_proj.{kind}"][kv],
            ]
            merged = tensors[f"transformer.layers.0.attention.qkv.{kind}"]
            assert np.array_equal(merged, np.concatenate(qkv))
        columns = slice(32 * tp_rank, 32 * tp_rank + 32)
        expected = {
            "transformer.vocab_embedding.weight": hf["model.embed_tokens.weight"],
            "transformer.layers.0.input_layernorm.weight": hf[
                "model.layers.0.input_layernorm.weight"
            ],
            "transformer.layers.0.attention.dense.weight": hf[f"{attention}.o_proj.weight"][:, q],
            "transformer.layers.0.mlp.fc.weight": hf[f"{mlp}.gate_proj.weight"][columns],
            "transformer.layers.0.mlp.gate.weight": hf[f"{mlp}.up_proj.weight"][columns],
            "transformer.layers.0.mlp.proj.weight": hf[f"{mlp}.down_proj.weight"][:, columns],
            "lm_head.weight": hf["lm_head.weight"][128 * tp_rank : 128 * tp_rank + 128],
        }
        for name, array in expected.items():
            assert np.array_equal(tensors[name], array), name


def test_tensor_parallel_pieces_of_fused_tensors(tmp_path: Path) -> None:
    """Phi-3: each rank holds its rows of up_proj, then those of gate_proj, under `mlp.fc`."""
    checkpoint = write_toy_checkpoint(tmp_path / "hf", "phi3")
    (tmp_path / "out").mkdir()
    convert(checkpoint, tmp_path / "out", tp_size=2)
    hf = toy_tensors(toy_config("phi3"))
    qkv, gate_up = (
        hf[f"model.layers.1.{name}.weight"] for name in ("self_attn.qkv_proj", "mlp.gate_up_proj")
    )
    for tp_rank in (0, 1):
        tensors = rank(tmp_path / "out", tp_rank)
        q, kv, inter = 16 * tp_rank, 8 * tp_rank, 32 * tp_rank
        expected = [qkv[q : q + 16], qkv[32 + kv : 40 + kv], qkv[48 + kv : 56 + kv]]
        merged = tensors["transformer.layers.1.attention.qkv.weight"]
        assert np.array_equal(merged, np.concatenate(expected))
        expected = [gate_up[64 + inter : 96 + inter], gate_up[inter : 32 + inter]]
        merged = tensors["transformer.layers.1.mlp.fc.weight"]
        assert np.array_equal(merged, np.concatenate(expected))
        assert "transformer.layers.1.mlp.gate.weight" not in tensors


def test_norms_and_embedding_of_gemma2(tmp_path: Path) -> None:
    """Norms are 1 + w in float32; the embedding is split where there are several ranks."""
    checkpoint = write_toy_checkpoint(tmp_path / "hf", "gemma2", vocab_size=251)
    (tmp_path / "out").mkdir()
    convert(checkpoint, tmp_path / "out", tp_size=2)
    hf = toy_tensors(toy_config("gemma2", vocab_size=251))
    embedding = hf["model.embed_tokens.weight"]
    for tp_rank in (0, 1):
        tensors = rank(tmp_path / "out", tp_rank)
        for name, source in {
            "layers.1.post_layernorm": "layers.1.post_attention_layernorm",
            "layers.0.post_feedforward_layernorm": "layers.0.post_feedforward_layernorm",
            "ln_f": "norm",
        }.items():
            stored = tensors[f"transformer.{name}.weight"]
            weight = (hf[f"model.{source}.weight"].astype(np.uint32) << 16).view(np.float32)
            assert stored.dtype == np.uint32
            assert np.array_equal(stored.view(np.float32), 1 + weight)
        held = tensors["transformer.vocab_embedding.weight"]
        assert held.shape == (126, 32)
        assert np.array_equal(held[: 126 - tp_rank], embedding[126 * tp_rank : 126 + 126 * tp_rank])
        assert np.array_equal(held, tensors["lm_head.weight"])


def test_bias_of_a_column_split_is_whole_on_every_rank(tmp_path: Path) -> None:
    hf = write(tmp_path / "out", tp_size=2, attention_bias=True, mlp_bias=True)
    for tp_rank in (0, 1):
        tensors = rank(tmp_path / "out", tp_rank)
        dense = hf["model.layers.1.self_attn.o_proj.bias"]
        proj = hf["model.layers.1.mlp.down_proj.bias"]
        fc = hf["model.layers.1.mlp.gate_proj.bias"][32 * tp_rank : 32 * tp_rank + 32]
        assert np.array_equal(tensors["transformer.layers.1.attention.dense.bias"], dense)
        assert np.array_equal(tensors["transformer.layers.1.mlp.proj.bias"], proj)
        assert np.array_equal(tensors["transformer.layers.1.mlp.fc.bias"], fc)


@pytest.mark.parametrize(
    ("num_kv_heads", "heads"), [(1, [0, 0, 0, 0]), (2, [0, 0, 1, 1]), (4, [0, 1, 2, 3])]
)
def test_ranks_share_kv_heads(tmp_path: Path, num_kv_heads: int, heads: list[int]) -> None:
    hf = write(tmp_path / "out", tp_size=4, num_key_value_heads=num_kv_heads)
    for tp_rank, head in enumerate(heads):
        qkv = rank(tmp_path / "out", tp_rank)["transformer.layers.0.attention.qkv.weight"]
        key = hf["model.layers.0.self_attn.k_proj.weight"][8 * head : 8 * head + 8]
        value = hf["model.layers.0.self_attn.v_proj.weight"][8 * head : 8 * head + 8]
        assert np.array_equal(qkv[8:], np.concatenate([key, value]))


def test_odd_vocabulary_is_padded_with_zeros(tmp_path: Path) -> None:
    hf = write(tmp_path / "out", tp_size=4, vocab_size=250)
    heads = [rank(tmp_path / "out", tp_rank)["lm_head.weight"] for tp_rank in range(4)]
    assert [head.shape for head in heads] == [(63, 32)] * 4
    assert np.array_equal(np.concatenate(heads)[:250], hf["lm_head.weight"])
    assert not heads[3][61:].any()
    assert heads[3][60].any()
    loaded = load_unified(tmp_path / "out")
    assert loaded.config.vocab_size == 250
    assert np.array_equal(loaded.tensor("lm_head.weight").data, hf["lm_head.weight"])


def test_vocabulary_smaller_than_its_padding(tmp_path: Path) -> None:
    hf = write(tmp_path / "out", tp_size=4, vocab_size=5)  # 2 rows a rank: 2, 2, 1, 0
    loaded = load_unified(tmp_path / "out")
    assert np.array_equal(loaded.tensor("lm_head.weight").data, hf["lm_head.weight"])


def test_pipeline_stages_count_their_own_layers(tmp_path: Path) -> None:
    hf = write(tmp_path / "out", pp_size=2, tp_size=2, num_hidden_layers=3)
    layers: list[set[str]] = []
    outside: list[set[str]] = []
    for index in range(4):
        names = set(rank(tmp_path / "out", index))
        layers.append({name.split(".")[2] for name in names if ".layers." in name})
        outside.append({name for name in names if ".layers." not in name})
    assert layers == [{"0", "1"}, {"0", "1"}, {"0"}, {"0"}]
    first, last = (
        {"transformer.vocab_embedding.weight"},
        {"transformer.ln_f.weight", "lm_head.weight"},
    )
    assert outside == [first, first, last, last]
    norm = rank(tmp_path / "out", 3)["transformer.layers.0.post_layernorm.weight"]
    assert np.array_equal(norm, hf["model.layers.2.post_attention_layernorm.weight"])
    merged = load_unified(tmp_path / "out").tensor("transformer.layers.2.post_layernorm.weight")
    assert np.array_equal(merged.data, norm)


def test_what_is_read_is_owned(tmp_path: Path) -> None:
    write(tmp_path / "out")
    loaded = load_unified(tmp_path / "out")
    tensor = loaded.tensor("transformer.ln_f.weight")
    assert (tensor.dtype, tensor.data.dtype) == ("BF16", np.uint16)
    tensor.data[:] = 0
    assert loaded.tensor("transformer.ln_f.weight").data.all()


def damage(out: Path, index: int, name: str) -> None:
    """Flips the last bit of one tensor of one rank."""
    path = out / f"rank{index}.safetensors"
    info = read_safetensors_header(path)[name]
    with path.open("r+b") as file:
        file.seek(info.offset + info.num_bytes - 1)
        last = file.read(1)[0]
        file.seek(info.offset + info.num_bytes - 1)
        file.write(bytes([last ^ 1]))


@pytest.mark.parametrize(
    ("index", "name"),
    [
        (1, "transformer.layers.0.input_layernorm.weight"),  # replicated
        (3, "transformer.layers.0.attention.qkv.weight"),  # its value head is shared with rank 2
        (3, "lm_head.weight"),  # ends with padding
        (2, "transformer.vocab_embedding.weight"),
    ],
)
def test_ranks_that_disagree_are_found(tmp_path: Path, index: int, name: str) -> None:
    write(tmp_path / "out", tp_size=4, vocab_size=250)
    damage(tmp_path / "out", index, name)
    with pytest.raises(CheckpointError) as caught:
        load_unified(tmp_path / "out").tensor(name)
    assert str(caught.value) == (
        f"{tmp_path / 'out'}: the ranks disagree about {name}; convert again"
    )


def test_missing_rank_is_named(tmp_path: Path) -> None:
    write(tmp_path / "out", tp_size=2)
    (tmp_path / "out" / "rank1.safetensors").unlink()
    with pytest.raises(CheckpointError) as caught:
        load_unified(tmp_path / "out")
    assert str(caught.value) == (
        f"{tmp_path / 'out'} lacks rank1.safetensors, one of its 2 ranks; convert again"
    )


def test_rank_of_another_conversion_is_found(tmp_path: Path) -> None:
    write(tmp_path / "out", tp_size=2)
    write(tmp_path / "other")
    (tmp_path / "other" / "rank0.safetensors").replace(tmp_path / "out" / "rank1.safetensors")
    with pytest.raises(CheckpointError) as caught:
        load_unified(tmp_path / "out")
    assert str(caught.value) == (
        f"{tmp_path / 'out' / 'rank1.safetensors'} does not fit its config.json: lm_head.weight is "
        "('BF16', (256, 32)), expected ('BF16', (128, 32)); convert again"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "OUT has no config.json; convert again"),
        ("[]", "OUT/config.json cannot be read: expected a JSON object"),
        (
            json.dumps(toy_config()),
            "OUT/config.json is not that of a unified checkpoint of a supported family",
        ),
    ],
)
def test_other_folders_are_refused(tmp_path: Path, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError) as caught:
        load_unified(tmp_path)
    assert str(caught.value).replace(str(tmp_path), "OUT") == message


def test_full_disk_is_refused_before_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Usage:
        free = 40_000

    monkeypatch.setattr(memory.shutil, "disk_usage", lambda path: Usage())
    with pytest.raises(SpecpipeError) as caught:
        write(tmp_path / "out")
    assert str(caught.value) == (
        f"{tmp_path / 'out'} has 40.0 kB free, and 70.0 kB are needed for the unified checkpoint: "
        "make room"
    )
    assert list((tmp_path / "out").iterdir()) == []


def write_quantized(out: Path, format: str, *, tp_size: int, pp_size: int = 1) -> dict[str, Raw]:
    """Writes a toy of random bits, quantized as its config says; returns them by whole tensors."""
    plain = unified_config(toy_config(head_dim=16), tp_size=tp_size, pp_size=pp_size)
    scheme = QuantizationConfig.model_validate(
        {"format": format, "awq_block_size": 16, "kv_cache": "fp8", "quantize_lm_head": True}
    )
    config = quantized_config(plain, scheme)
    parts: dict[tuple[Part, int | None], Raw] = {}
    whole: dict[str, Raw] = {}
    for tensor in unified_tensors(config):
        dtype = raw_dtype(stored_dtype(config, tensor.rule))
        for part in tensor.rule.parts:
            generator = np.random.default_rng(len(parts))
            shape = part_shape(config, part)
            bits = generator.integers(0, np.iinfo(dtype).max, shape, dtype, endpoint=True)
            parts[part, tensor.layer] = bits
        merged = [parts[part, tensor.layer] for part in tensor.rule.parts]
        whole[tensor.name] = np.concatenate(merged)

    def read(part: Part, layer: int | None, start: int, stop: int) -> Iterator[Raw]:
        for row in range(start, stop, 3):
            yield parts[part, layer][row : min(row + 3, stop)]

    out.mkdir()
    write_unified(out, config, read)
    return whole


@pytest.mark.parametrize("format", OFFERED)
@pytest.mark.parametrize(("tp_size", "pp_size"), [(1, 1), (2, 1), (1, 2), (4, 2)])
def test_quantized_tensors_are_merged_again(
    tmp_path: Path, format: str, tp_size: int, pp_size: int
) -> None:
    whole = write_quantized(tmp_path / "out", format, tp_size=tp_size, pp_size=pp_size)
    loaded = load_unified(tmp_path / "out")
    assert loaded.names() == list(whole)
    for name, bits in whole.items():
        assert loaded.shape(name) == bits.shape
        assert np.array_equal(loaded.tensor(name).data, bits), name
    scale = "transformer.layers.1.attention.kv_cache_scaling_factor"
    assert loaded.tensor(scale).dtype == "F32"


def test_quantized_pieces_of_a_rank(tmp_path: Path) -> None:
    """A packed row holds two outputs; blocks of inputs go with their columns."""
    whole = write_quantized(tmp_path / "out", "int4_awq", tp_size=2)
    prefix = "transformer.layers.1."
    for tp_rank in (0, 1):
        tensors = rank(tmp_path / "out", tp_rank)
        fc = whole[f"{prefix}mlp.fc.weight"]
        assert np.array_equal(
            tensors[f"{prefix}mlp.fc.weight"], fc[16 * tp_rank : 16 * tp_rank + 16]
        )
        scales = whole[f"{prefix}attention.dense.weights_scaling_factor"]
        assert scales.shape == (32, 4)
        assert np.array_equal(
            tensors[f"{prefix}attention.dense.weights_scaling_factor"],
            scales[:, 2 * tp_rank : 2 * tp_rank + 2],
        )
        prequant = whole[f"{prefix}attention.dense.prequant_scaling_factor"]
        assert np.array_equal(
            tensors[f"{prefix}attention.dense.prequant_scaling_factor"],
            prequant[32 * tp_rank : 32 * tp_rank + 32],
        )
        qkv = f"{prefix}attention.qkv.prequant_scaling_factor"
        assert np.array_equal(tensors[qkv], whole[qkv])


@pytest.mark.parametrize(
    "name",
    [
        "transformer.layers.0.attention.qkv.activation_scaling_factor",
        "transformer.layers.0.attention.dense.weights_scaling_factor_2",
        "transformer.layers.0.mlp.fc.prequant_scaling_factor",
        "transformer.layers.1.attention.kv_cache_scaling_factor",
    ],
)
def test_ranks_that_disagree_about_a_scale_are_found(tmp_path: Path, name: str) -> None:
    write_quantized(tmp_path / "out", "w4a8_awq", tp_size=2)
    damage(tmp_path / "out", 1, name)
    with pytest.raises(CheckpointError) as caught:
        load_unified(tmp_path / "out").tensor(name)
    assert str(caught.value) == (
        f"{tmp_path / 'out'}: the ranks disagree about {name}; convert again"
    )


def test_rank_of_another_format_is_found(tmp_path: Path) -> None:
    write_quantized(tmp_path / "out", "fp8", tp_size=2)
    write_quantized(tmp_path / "other", "fp8_pc_pt", tp_size=2)
    (tmp_path / "other" / "rank1.safetensors").replace(tmp_path / "out" / "rank1.safetensors")
    with pytest.raises(CheckpointError) as caught:
        load_unified(tmp_path / "out")
    assert str(caught.value) == (
        f"{tmp_path / 'out' / 'rank1.safetensors'} does not fit its config.json: "
        "lm_head.activation_scaling_factor is missing, expected ('F32', (1,)); convert again"
    )
