from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specpipe.build.stages.export import Export, export
from specpipe.checkpoints.checkpoint import TensorInfo, open_checkpoint, read_safetensors_header
from specpipe.checkpoints.plain_weights import open_weights
from specpipe.checkpoints.unified_config import UnifiedConfig
from specpipe.errors import ConfigError
from specpipe.quantization import numbers
from specpipe.quantization.quantized_config import quantized_config, quantized_linears
from specpipe.quantization.scales import expected_scales
from tests.quantization.checkpoints import as_floats, scheme, write_scales
from tests.toy import ARCHITECTURES, Raw, read_tensor, write_tensors, write_toy_checkpoint

EXPORTED = ("fp8", "fp8_pc_pt", "int8_sq", "int4_awq", "w4a8_awq", "nvfp4")


def exported(folder: Path, format: str, family: str = "llama", **settings: Any) -> Path:
    """Writes a toy, its scales and its export below `folder`; returns the export."""
    overrides = settings.pop("overrides", {})
    checkpoint = write_toy_checkpoint(folder / "hf", family, **overrides)
    chosen = scheme(format, **settings)
    scales = write_scales(folder / "scales", checkpoint, chosen)
    (folder / "out").mkdir()
    export(checkpoint, scales, folder / "out", chosen)
    return folder / "out"


def held(folder: Path) -> dict[str, tuple[str, Tensor]]:
    """Returns dtype and numbers of every tensor."""
    tensors = open_checkpoint(folder, allow_quantized=True).tensors
    return {
        name: (info.dtype, as_floats(read_raw(info), info.dtype)) for name, info in tensors.items()
    }


def read_raw(info: TensorInfo) -> Raw:
    """Reads a tensor, or a single number."""
    return read_tensor(replace(info, shape=info.shape or (1,))).reshape(info.shape)


def test_names_and_shapes_of_a_layer(tmp_path: Path) -> None:
    """Of int4_awq: q, k and v, gate and up have their prequant in the norm before them."""
    tensors = held(exported(tmp_path, "int4_awq", kv_cache="fp8"))
    prefix = "model.layers.1."
    shapes = {
        name.removeprefix(prefix): (dtype, tuple(value.shape))
        for name, (dtype, value) in tensors.items()
        if name.startswith(prefix)
    }
    assert shapes == {
        "input_layernorm.weight": ("BF16", (32,)),
        "self_attn.q_proj.weight": ("U8", (16, 32)),
        "self_attn.q_proj.weight_scale": ("BF16", (32, 2)),
        "self_attn.k_proj.weight": ("U8", (8, 32)),
        "self_attn.k_proj.weight_scale": ("BF16", (16, 2)),
        "self_attn.k_proj.k_scale": ("F32", ()),
        "self_attn.v_proj.weight": ("U8", (8, 32)),
        "self_attn.v_proj.weight_scale": ("BF16", (16, 2)),
        "self_attn.v_proj.v_scale": ("F32", ()),
        "self_attn.o_proj.weight": ("U8", (16, 32)),
        "self_attn.o_proj.weight_scale": ("BF16", (32, 2)),
        "self_attn.o_proj.pre_quant_scale": ("BF16", (32,)),
        "post_attention_layernorm.weight": ("BF16", (32,)),
        "mlp.gate_proj.weight": ("U8", (32, 32)),
        "mlp.gate_proj.weight_scale": ("BF16", (64, 2)),
        "mlp.up_proj.weight": ("U8", (32, 32)),
        "mlp.up_proj.weight_scale": ("BF16", (64, 2)),
        "mlp.down_proj.weight": ("U8", (16, 64)),
        "mlp.down_proj.weight_scale": ("BF16", (32, 4)),
        "mlp.down_proj.pre_quant_scale": ("BF16", (64,)),
    }
    outside = {name for name in tensors if ".layers." not in name}
    assert outside == {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}


def test_configs_of_the_layout(tmp_path: Path) -> None:
    out = exported(tmp_path, "nvfp4", kv_cache="fp8", exclude=["*.1.mlp.*"])
    producer = {"name": "modelopt", "version": "0.47.0"}
    plain = [
        "lm_head",
        "model.embed_tokens",
        "model.layers.1.mlp.down_proj",
        "model.layers.1.mlp.gate_proj",
        "model.layers.1.mlp.up_proj",
    ]
    assert json.loads((out / "hf_quant_config.json").read_text()) == {
        "producer": producer,
        "quantization": {
            "quant_algo": "NVFP4",
            "kv_cache_quant_algo": "FP8",
            "group_size": 16,
            "exclude_modules": plain,
        },
    }
    config = json.loads((out / "config.json").read_text())
    numbers_ = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
    assert config.pop("quantization_config") == {
        "config_groups": {
            "group_0": {
                "input_activations": numbers_,
                "weights": numbers_,
                "targets": ["Linear"],
            }
        },
        "ignore": plain,
        "quant_algo": "NVFP4",
        "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
        "producer": producer,
        "quant_method": "modelopt",
    }
    assert config == json.loads((tmp_path / "hf" / "config.json").read_text())


def test_transformers_reads_the_config(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.from_pretrained(exported(tmp_path, "fp8"))
    assert config.hidden_size == 32
    assert config.quantization_config["quant_algo"] == "FP8"


def test_tokenizer_and_generation_config_go_along(tmp_path: Path) -> None:
    checkpoint = write_toy_checkpoint(tmp_path / "hf")
    copied = ["generation_config.json", "tokenizer.json", "chat_template.jinja"]
    copied.append("additional_chat_templates/tool_use.jinja")
    (checkpoint / "additional_chat_templates").mkdir()
    for name in (*copied, "README.md"):
        (checkpoint / name).write_text(name)
    stage = Export("draft", checkpoint, None, scheme("fp8_pc_pt"))
    assert stage.name == "draft/export"
    weights = ["config.json", "model.safetensors"]
    assert stage.inputs().files == tuple(checkpoint / name for name in (*weights, *copied))
    (tmp_path / "out").mkdir()
    stage.run(tmp_path / "out")
    for name in copied:
        assert (tmp_path / "out" / name).read_text() == name
    paths = {path for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert paths == {tmp_path / "out" / n for n in (*weights, *copied, "hf_quant_config.json")}


def test_large_weights_come_in_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = held(exported(tmp_path / "whole", "w4a8_awq", "phi3"))
    monkeypatch.setattr("specpipe.quantization.huggingface._SHARD_BYTES", 8000)
    monkeypatch.setattr("specpipe.quantization.huggingface.JOB_BYTES", 500)
    monkeypatch.setattr("specpipe.quantization.weights._CHUNK_BYTES", 1)
    out = exported(tmp_path / "shards", "w4a8_awq", "phi3")
    shards = sorted(path.name for path in out.glob("*.safetensors"))
    assert shards[0] == f"model-00001-of-{len(shards):05}.safetensors"
    assert len(shards) == 4
    parts = held(out)  # the index names them all
    assert parts.keys() == whole.keys()
    for name, (dtype, value) in whole.items():
        assert parts[name][0] == dtype
        assert torch.equal(parts[name][1], value), name
    index = json.loads((out / "model.safetensors.index.json").read_text())
    headers = open_checkpoint(out, allow_quantized=True).tensors.values()
    assert index["metadata"]["total_size"] == sum(info.num_bytes for info in headers)


def plain_state(folder: Path, format: str) -> dict[str, Tensor]:
    """Returns an export as Hugging Face's own model would have it: weights dequantized."""
    tensors = held(folder)
    content = "per_channel_scale" if format == "fp8_pc_pt" else "weights_scaling_factor"
    state: dict[str, Tensor] = {}
    for name, (_, value) in tensors.items():
        prefix = name.removesuffix("weight")
        if name.endswith(("_scale", "_scale_2")):
            continue
        if f"{prefix}weight_scale" not in tensors:
            state[name] = value
            continue
        scales = tensors[f"{prefix}weight_scale"][1]
        of_linear = {"quantized": value, content: scales.reshape(scales.shape or (1,))}
        if f"{prefix}weight_scale_2" in tensors:
            of_linear["weights_scaling_factor_2"] = tensors[f"{prefix}weight_scale_2"][1]
        weight = numbers.dequantize(format, of_linear)  # type: ignore[arg-type]
        prequant = tensors.get(f"{prefix}pre_quant_scale")
        state[name] = weight if prequant is None else weight * prequant[1]
    return state


def logits_of(folder: Path, state: Mapping[str, Tensor] | None = None) -> Tensor:
    """Returns what the plain model in `folder` computes, or would with other weights."""
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    if state is not None:
        is_tied = model.config.tie_word_embeddings
        missing, surplus = model.load_state_dict(state, strict=False)
        assert (missing, surplus) == (["lm_head.weight"] if is_tied else [], [])
    with torch.no_grad():
        logits: Tensor = model(torch.arange(64).reshape(2, 32) % 251 + 3).logits
    return logits


@pytest.mark.parametrize("family", ARCHITECTURES)
@pytest.mark.parametrize("format", EXPORTED)
def test_an_export_computes_what_the_plain_model_does(
    tmp_path: Path, family: str, format: str
) -> None:
    """Relative to the logits; 4 bits cost so small a random model a third of them."""
    out = exported(tmp_path, format, family, overrides={"dtype": "float32"})
    logits = logits_of(tmp_path / "hf")
    error = (logits_of(tmp_path / "hf", plain_state(out, format)) - logits).norm() / logits.norm()
    assert error < (0.1 if format.startswith(("fp8", "int8")) else 0.45)


@pytest.mark.parametrize("family", ARCHITECTURES)
@pytest.mark.parametrize("format", ["int4_awq", "w4a8_awq"])
def test_prequant_in_a_norm_is_prequant_of_its_linears(
    tmp_path: Path, family: str, format: str
) -> None:
    out = exported(tmp_path, format, family, overrides={"dtype": "float32"})
    state = plain_state(out, format)
    plain, scales = held(tmp_path / "hf"), held_scales(tmp_path / "scales")
    config = quantized_config(open_weights(tmp_path / "hf").config, scheme(format))
    apart = state | {name: value for name, (_, value) in plain.items() if "norm" in name}
    norm = "model.layers.1.input_layernorm.weight"
    assert not torch.equal(apart[norm], state[norm])
    for module, rule, layer in quantized_linears(config):
        if not module.endswith((".dense", ".proj")):
            for name in {part.source.format(n=layer) for part in rule.parts}:
                apart[name] = state[name] * scales[f"{module}.prequant"]
    fused, expected = logits_of(tmp_path / "hf", state), logits_of(tmp_path / "hf", apart)
    assert (fused - expected).norm() / expected.norm() < 1e-5


def held_scales(folder: Path) -> dict[str, Tensor]:
    header = read_safetensors_header(folder / "scales.safetensors")
    return {name: as_floats(read_tensor(info), "F32") for name, info in header.items()}


def test_a_quantized_head_is_no_longer_the_embedding(tmp_path: Path) -> None:
    out = exported(tmp_path, "fp8", "gemma2", quantize_lm_head=True)
    assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] is False
    tensors = held(out)
    assert tensors["lm_head.weight"][0] == "F8_E4M3"
    assert tensors["model.embed_tokens.weight"][0] == "BF16"
    excluded = json.loads((out / "hf_quant_config.json").read_text())["quantization"]
    assert excluded["exclude_modules"] == ["model.embed_tokens"]


def test_prequant_stays_where_the_norm_feeds_a_plain_linear_too(tmp_path: Path) -> None:
    tensors = held(exported(tmp_path, "int4_awq", exclude=["*.0.attention.qkv"]))
    norm = "model.layers.{}.input_layernorm.weight"
    plain = held(tmp_path / "hf")
    assert torch.equal(tensors[norm.format(0)][1], plain[norm.format(0)][1])
    assert not torch.equal(tensors[norm.format(1)][1], plain[norm.format(1)][1])


@pytest.mark.parametrize("format", ["int8_wo", "int4_wo"])
def test_formats_that_the_layout_lacks(tmp_path: Path, format: str) -> None:
    with pytest.raises(ConfigError) as caught:
        exported(tmp_path, format)
    assert str(caught.value) == (
        f"{format} has no Hugging Face layout, because TensorRT-LLM quantizes plain weights while "
        "it builds an engine; formats that have one: fp8, fp8_pc_pt, int8_sq, int4_awq, w4a8_awq, "
        "nvfp4"
    )
    assert not list((tmp_path / "out").iterdir())


def test_half_of_a_gated_mlp_cannot_be_excluded(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        exported(tmp_path, "fp8", exclude=["*.1.mlp.gate"])
    assert str(caught.value) == (
        "quantization.exclude names only one of transformer.layers.1.mlp.fc and "
        "transformer.layers.1.mlp.gate, which runtimes that read Hugging Face's layout join into "
        "one; exclude both or none"
    )


@contextmanager
def quiet() -> Iterator[None]:
    """ModelOpt and transformers warn of much that is none of our business."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def modelopt_export(
    folder: Path, format: str, family: str, overrides: Mapping[str, Any]
) -> tuple[Path, dict[str, Tensor]]:
    """Quantizes a toy with ModelOpt and exports it; returns the export and what was measured.

    q, k and v, gate and up are made alike for every format; ModelOpt leaves fp8 out.
    """
    transformers = pytest.importorskip("transformers")
    with quiet():
        mtq = pytest.importorskip("modelopt.torch.quantization")
        from modelopt.torch.export import export_hf_checkpoint
        from modelopt.torch.export.quant_utils import preprocess_linear_fusion
    checkpoint = write_toy_checkpoint(folder / "hf", family, **overrides)
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint)
    settings = {
        "fp8": "FP8_DEFAULT_CFG",
        "fp8_pc_pt": "FP8_PER_CHANNEL_PER_TOKEN_CFG",
        "int8_sq": "INT8_SMOOTHQUANT_CFG",
        "int4_awq": "INT4_AWQ_CFG",
        "w4a8_awq": "W4A8_AWQ_BETA_CFG",
        "nvfp4": "NVFP4_DEFAULT_CFG",
    }
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 250, (4, 64), generator=generator)
    with quiet():
        mtq.quantize(model, getattr(mtq, settings[format]), lambda model: model(ids))
        for layer in model.model.layers:
            if family != "phi3":
                attention, mlp = layer.self_attn, layer.mlp
                preprocess_linear_fusion([attention.q_proj, attention.k_proj, attention.v_proj])
                preprocess_linear_fusion([mlp.gate_proj, mlp.up_proj])
        config = quantized_config(open_weights(checkpoint).config, scheme(format, **_BLOCK))
        scales = dict(_measured(model, config))
        export_hf_checkpoint(model, dtype=torch.float32, export_dir=folder / "theirs")
    return folder / "theirs", scales


_BLOCK = {"awq_block_size": 128}


def _measured(model: Any, config: UnifiedConfig) -> Iterator[tuple[str, Tensor]]:
    sources = {
        module: rule.parts[0].source.format(n=layer).removesuffix(".weight")
        for module, rule, layer in quantized_linears(config)
    }
    read: dict[str, Callable[[Any], Tensor]] = {
        "input_amax": lambda linear: linear.input_quantizer.amax,
        "weight_amax": lambda linear: linear.weight_quantizer.amax,
        "weight_amax_2": lambda linear: linear.weight_quantizer[-1].amax,
        "prequant": lambda linear: linear.input_quantizer.pre_quant_scale,
    }
    for module, kind, _ in expected_scales(config):
        value = read[kind](model.get_submodule(sources[module]))
        yield f"{module}.{kind}", value.detach().float().reshape(-1).clone()


@pytest.mark.parametrize(
    ("format", "family"),
    [(format, "llama") for format in EXPORTED]
    + [("int4_awq", "qwen2"), ("int4_awq", "gemma2"), ("w4a8_awq", "qwen3"), ("nvfp4", "phi3")],
)
def test_an_export_is_modelopts_own(tmp_path: Path, format: str, family: str) -> None:
    """Same names, dtypes, shapes and scales; same numbers but for divisions in another order.

    In float32, where ModelOpt rounds no more than we do. It multiplies by 1 / prequant, for q, k
    and v by the old prequant and 1 / the mean too, where the original weight is divided once here:
    of a thousand numbers one may lie on the other side of a half-way point.
    """
    sizes = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "dtype": "float32"}
    theirs, scales = modelopt_export(tmp_path, format, family, sizes)
    folder = None
    if scales:
        folder = tmp_path / "scales"
        folder.mkdir()
        raw = {name: value.numpy().view("uint32") for name, value in scales.items()}
        write_tensors(folder / "scales.safetensors", raw, dtype="F32")
        (folder / "calibration.json").write_text(json.dumps({"format": format}))
    (tmp_path / "ours").mkdir()
    export(tmp_path / "hf", folder, tmp_path / "ours", scheme(format, **_BLOCK))

    expected, found = held(theirs), held(tmp_path / "ours")
    assert found.keys() == expected.keys()
    for name, (dtype, value) in expected.items():
        assert (found[name][0], found[name][1].shape) == (dtype, value.shape), name
        if dtype in ("U8", "I8", "F8_E4M3"):
            differing = (found[name][1] != value).float().mean()
            limit = 0.001 if "awq" in format or format == "int8_sq" else 0
            assert differing <= limit, name
        else:
            assert torch.allclose(found[name][1], value, rtol=1e-6, atol=1e-7), name
    for name in ("hf_quant_config.json", "config.json"):
        configs = [json.loads((f / name).read_text()) for f in (theirs, tmp_path / "ours")]
        key = "quantization_config" if name == "config.json" else "quantization"
        excluded = "ignore" if name == "config.json" else "exclude_modules"
        sections = [config[key] for config in configs]
        for section in sections:  # ModelOpt does not know Gemma's embedding as one
            section[excluded] = set(section[excluded]) - {"model.embed_tokens"}
        assert sections[0] == sections[1]
