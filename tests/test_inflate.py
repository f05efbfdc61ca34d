"""benchmarks/inflate.py: what is added costs time and memory, and changes nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from benchmarks.inflate import (
    SIZES,
    Size,
    inflated_config,
    inflated_tensors,
    main,
    num_parameters,
    write_inflated,
)
from specpipe.checkpoints.checkpoint import open_checkpoint
from specpipe.errors import CheckpointError, ConfigError
from specpipe.runtimes.torch.engine import TorchEngine
from tests.runtimes.torch.engines import load_engine
from tests.toy import toy_config, toy_shapes, write_toy_checkpoint

LARGE = Size(
    hidden_size=60, num_hidden_layers=4, num_key_value_heads=3, intermediate_size=80
)  # from 32, 2, 2, 64
PROMPT = [7, 191, 3, 88, 245, 19, 60, 154]
NUM_TOKENS = 12
TOLERANCE = 1e-4  # float32; the logits are about 1

CHECKPOINTS: dict[str, dict[str, Any]] = {
    "llama-tied": {"family": "llama", "tie_word_embeddings": True},
    "llama-biases": {"family": "llama", "attention_bias": True, "mlp_bias": True},
    "mistral-head-dim": {"family": "mistral", "head_dim": 20, "sliding_window": 6},
    "qwen2": {
        "family": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 6,
        "layer_types": ["full_attention", "sliding_attention"],
        "pard_token": 250,
    },
    "qwen3": {"family": "qwen3", "num_attention_heads": 6, "rms_norm_eps": 1e-5},
    "phi3": {"family": "phi3"},
}


@pytest.fixture(params=CHECKPOINTS)
def small(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A large epsilon, so that one which is not rescaled would be seen."""
    overrides = {"dtype": "float32", "rms_norm_eps": 1e-2} | CHECKPOINTS[request.param]
    return write_toy_checkpoint(tmp_path / "small", **overrides)


def test_logits_and_text_stay_those_of_the_small_model(small: Path, tmp_path: Path) -> None:
    large = tmp_path / "large"
    write_inflated(small, large, LARGE)
    masks = [open_checkpoint(folder).config.get("pard_token") for folder in (small, large)]
    assert masks[0] == masks[1]
    text = greedy(load_engine(small, tmp_path / "small-engine"))
    assert greedy(load_engine(large, tmp_path / "large-engine")) == text
    models = [AutoModelForCausalLM.from_pretrained(folder) for folder in (small, large)]
    with torch.inference_mode():
        expected, found = (model(torch.tensor([PROMPT + text])).logits[0] for model in models)
    assert expected.abs().max() > 0.5
    assert expected[len(PROMPT) - 1 : -1].argmax(-1).tolist() == text
    torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE)
    assert models[1].num_parameters() == num_parameters(models[1].config.to_dict())


def greedy(engine: TorchEngine) -> list[int]:
    sequence = engine.allocate(prompt_length=len(PROMPT), max_tokens=len(PROMPT) + NUM_TOKENS)
    token_ids: list[int] = []
    tokens = PROMPT
    for _ in range(NUM_TOKENS):
        tokens = [int(engine.forward([(sequence, tokens)], [1]).argmax())]
        token_ids += tokens
    return token_ids


ZERO, RANDOM = "zero", "random"
ADDED = {
    "self_attn.q_proj.weight": ((48, 60), (32, 32), RANDOM),
    "self_attn.q_proj.bias": ((48,), (32,), RANDOM),
    "self_attn.k_proj.weight": ((24, 60), (16, 32), RANDOM),
    "self_attn.k_proj.bias": ((24,), (16,), RANDOM),
    "self_attn.v_proj.weight": ((24, 60), (16, 32), RANDOM),
    "self_attn.v_proj.bias": ((24,), (16,), RANDOM),
    "self_attn.o_proj.weight": ((60, 48), (32, 32), ZERO),
    "self_attn.o_proj.bias": ((60,), (32,), ZERO),
    "mlp.gate_proj.weight": ((80, 60), (64, 32), RANDOM),
    "mlp.gate_proj.bias": ((80,), (64,), RANDOM),
    "mlp.up_proj.weight": ((80, 60), (64, 32), RANDOM),
    "mlp.up_proj.bias": ((80,), (64,), RANDOM),
    "mlp.down_proj.weight": ((60, 80), (32, 64), ZERO),
    "mlp.down_proj.bias": ((60,), (32,), ZERO),
}
"""Shape, the corner of it that is trained, and what the rest is."""


def inflated_ones(family: str = "llama", seed: int = 0, **overrides: Any) -> dict[str, Tensor]:
    """Inflates a toy whose weights are all 1."""
    config = toy_config(family, **overrides)
    ones = {name: torch.ones(shape) for name, shape in toy_shapes(config).items()}
    made = inflated_tensors(config, ones, LARGE, device="cpu", dtype=torch.float32, seed=seed)
    return dict(made)


def check_added(added: Tensor, kind: str, name: str, mean: float = 0.0) -> None:
    if kind == ZERO:
        assert added.count_nonzero() == 0, name
    else:
        assert added.count_nonzero() == added.numel(), name
        assert (added - mean).abs().max() < 0.1, name
        assert added.unique().numel() > 0.9 * added.numel(), name


def test_added_weights_that_read_are_random_and_those_that_write_are_zero() -> None:
    tensors = inflated_ones(attention_bias=True, mlp_bias=True)
    for layer in range(4):
        for name, (shape, corner, kind) in ADDED.items():
            tensor = tensors.pop(f"model.layers.{layer}.{name}")
            assert tensor.shape == shape, name
            is_added = torch.ones(shape, dtype=torch.bool)
            if layer < 2:
                is_added[tuple(slice(size) for size in corner)] = False
                assert (tensor[~is_added] == 1).all(), name
            check_added(tensor[is_added], kind, name)
        for name in ("input_layernorm.weight", "post_attention_layernorm.weight"):
            check_norm(tensors.pop(f"model.layers.{layer}.{name}"), 32 if layer < 2 else 0)
    check_norm(tensors.pop("model.norm.weight"), 32)
    for name, kind in (("model.embed_tokens.weight", ZERO), ("lm_head.weight", RANDOM)):
        tensor = tensors.pop(name)
        assert tensor.shape == (256, 60)
        assert (tensor[:, :32] == 1).all()
        check_added(tensor[:, 32:], kind, name)
    assert tensors == {}


def check_norm(weight: Tensor, num_trained: int) -> None:
    assert weight.shape == (60,)
    assert weight[:num_trained].tolist() == pytest.approx([0.730297] * num_trained)  # √(32 / 60)
    check_added(weight[num_trained:], RANDOM, "norm", mean=1.0)


def test_a_fused_tensor_is_inflated_part_by_part() -> None:
    tensors = inflated_ones("phi3")
    trained_rows = {
        "self_attn.qkv_proj": (96, [*range(32), *range(48, 64), *range(72, 88)]),
        "mlp.gate_up_proj": (160, [*range(64), *range(80, 144)]),
    }
    for name, (num_rows, rows) in trained_rows.items():
        tensor = tensors[f"model.layers.1.{name}.weight"]
        assert tensor.shape == (num_rows, 60)
        is_added = torch.ones(num_rows, 60, dtype=torch.bool)
        is_added[rows, :32] = False
        assert (tensor[~is_added] == 1).all()
        check_added(tensor[is_added], RANDOM, name)


def test_norms_of_heads_are_kept_as_they_are() -> None:
    tensors = inflated_ones("qwen3")
    assert tensors["model.layers.1.self_attn.q_norm.weight"].tolist() == [1.0] * 8
    check_added(tensors["model.layers.2.self_attn.q_norm.weight"], RANDOM, "q_norm", mean=1.0)


def test_the_seed_decides_what_is_added() -> None:
    first, again, other = (inflated_ones(seed=seed) for seed in (0, 0, 1))
    name = "model.layers.3.self_attn.q_proj.weight"
    assert torch.equal(first[name], again[name])
    assert not torch.equal(first[name], other[name])
    assert not torch.equal(first[name], first["model.layers.2.self_attn.q_proj.weight"])


def test_sizes_have_the_parameters_of_their_names() -> None:
    common = {"vocab_size": 4096, "head_dim": 64, "tie_word_embeddings": True}
    draft = toy_config(hidden_size=256, intermediate_size=704, **common)
    target = toy_config(
        hidden_size=512,
        num_hidden_layers=8,
        num_attention_heads=8,
        intermediate_size=1408,
        **common,
    )
    counts = {
        name: num_parameters(inflated_config(draft if name < "1" else target, size))
        for name, size in SIZES.items()
    }
    # 4096 · C + L · (C · (2 · H + 2 · H_kv) · 64 + 3 · C · I + 2 · C) + C
    assert counts == {
        "0.4b": 375_303_040,
        "0.5b": 494_978_048,
        "7b": 6_996_365_312,
        "32b": 32_066_114_560,
    }


def test_the_command_writes_a_whole_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = write_toy_checkpoint(tmp_path / "small", num_shards=2), tmp_path / "large"
    (source / "tokenizer.json").write_text("{}")
    arguments = [str(source), str(out), "--size", "60,4,3,80", "--positions", "4096"]
    main(arguments)
    assert capsys.readouterr().out == f"{out}: 0.00 B parameters\n"
    assert sorted(path.name for path in out.iterdir()) == [
        "config.json",
        "model-00001-of-00001.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
    ]
    assert json.loads((out / "config.json").read_text()) == toy_config(
        hidden_size=60,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=3,
        intermediate_size=80,
        max_position_embeddings=4096,
        rms_norm_eps=1e-5 * 32 / 60,
    )
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert str(caught.value) == (f"Error: {out} is there already; remove it or choose another name")


def test_shards_are_as_large_as_asked_for(tmp_path: Path) -> None:
    source = write_toy_checkpoint(tmp_path / "small")
    write_inflated(source, tmp_path / "large", LARGE, shard_bytes=40_000)
    sizes = [path.stat().st_size for path in sorted((tmp_path / "large").glob("*.safetensors"))]
    assert len(sizes) == 7
    assert max(sizes) < 40_000 + 4_000  # headers
    checkpoint = open_checkpoint(tmp_path / "large")
    assert sum(info.num_bytes for info in checkpoint.tensors.values()) == 2 * num_parameters(
        checkpoint.config
    )


def test_a_failure_leaves_no_folder(tmp_path: Path) -> None:
    source = write_toy_checkpoint(tmp_path / "small")
    config = toy_config(intermediate_size=66)
    (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError) as caught:
        write_inflated(source, tmp_path / "large", LARGE)
    assert str(caught.value) == (
        "model.layers.0.mlp.gate_proj.weight has shape (64, 32), config.json wants (66, 32)"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["small"]


@pytest.mark.parametrize(
    ("config", "size", "message"),
    [
        (
            toy_config(),
            Size(60, 1, 3, 80),
            "num_hidden_layers 1 is less than the checkpoint's 2: a model can be inflated, "
            "not shrunk",
        ),
        (
            toy_config(),
            Size(56, 4, 3, 80),
            "hidden_size 56 is not a multiple of 6 query heads (3 KV heads): transformers loads no "
            "such Llama",
        ),
        (
            toy_config("gemma2"),
            LARGE,
            "Gemma2ForCausalLM scales its embeddings by its hidden size and cannot be inflated",
        ),
    ],
)
def test_what_cannot_be_inflated_is_refused(
    config: dict[str, Any], size: Size, message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        inflated_config(config, size)
    assert str(caught.value) == message


def test_a_scaled_rope_keeps_its_positions() -> None:
    scaled = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
    with pytest.raises(ConfigError) as caught:
        inflated_config(toy_config(rope_parameters=scaled), LARGE, max_position_embeddings=4096)
    assert str(caught.value) == (
        "the checkpoint scales its rotary embedding by its number of positions; "
        "leave max_position_embeddings as it is"
    )
