"""Numbers: the finished network, interpreted, computes what the torch runtime does.

The torch runtime in turn computes what transformers does (tests/runtimes/torch/test_engine.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorrt_rtx as trt
import torch

from specpipe.checkpoints.family_config import unified_config
from specpipe.checkpoints.unified_config import UnifiedConfig
from specpipe.checkpoints.unified_sections import Quantization
from specpipe.errors import EngineBuildError
from specpipe.runtimes.tensorrt import network, shapes
from specpipe.runtimes.tensorrt.graph import Graph, kinds
from tests.runtimes.tensorrt.networks import (
    InterpretedDecoder,
    Network,
    SideBySide,
    build_network,
    make_toy,
    prefill_decode_verify,
)
from tests.runtimes.torch.engines import load_engine
from tests.toy import LLAMA3_SCALING, toy_config

TOLERANCE = 1e-5  # float32, relative to the largest logit
ROUNDED = {"float16": 4e-3, "bfloat16": 3e-2}  # either side rounds, and not at the same places
QUICKSTART = Path(__file__).parents[3] / "models" / "python-code"

LLAMA3 = {"rope_type": "llama3", "rope_theta": 10000.0, **LLAMA3_SCALING}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 8.0}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.3, 1.5],
    "long_factor": [1.0, 2.0, 4.0, 8.0],
    "original_max_position_embeddings": 320,
}

CHECKPOINTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-tied": {"tie_word_embeddings": True},
    "llama-biases": {"attention_bias": True, "mlp_bias": True},
    "llama-one-kv-head": {"num_key_value_heads": 1},
    "llama-no-grouping": {"num_key_value_heads": 4},
    "llama-llama3": {"rope_parameters": LLAMA3},
    "llama-linear": {"rope_parameters": LINEAR},
    "llama-yarn": {"rope_parameters": YARN},
    "llama-dynamic": {"rope_parameters": DYNAMIC},
    "llama-longrope": {"rope_parameters": LONGROPE},
    "mistral": {"family": "mistral"},
    "mistral-own-head-size": {"family": "mistral", "head_dim": 16},
    "mistral-wide-window": {"family": "mistral", "sliding_window": 320},
    "qwen2": {"family": "qwen2"},
    "qwen2-tied": {"family": "qwen2", "tie_word_embeddings": True},
    "qwen3": {"family": "qwen3"},
    "qwen3-own-head-size": {"family": "qwen3", "head_dim": 24},
}
"""`dynamic` and `longrope` stay within their original length, 512 and 320."""


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_logits_equal_those_of_the_torch_runtime(name: str, tmp_path: Path) -> None:
    checkpoint, engine = make_toy(tmp_path, **CHECKPOINTS[name])
    decoder = InterpretedDecoder(build_network(checkpoint))
    pair = SideBySide(decoder, engine, tolerance=TOLERANCE)
    prefill_decode_verify(pair, longest=200)  # llama3 and yarn begin after 64


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_the_arithmetic_does_not_depend_on_the_dtype(dtype: str, tmp_path: Path) -> None:
    checkpoint, engine = make_toy(tmp_path, dtype=dtype)
    decoder = InterpretedDecoder(build_network(checkpoint, dtype=dtype))
    prefill_decode_verify(SideBySide(decoder, engine, tolerance=TOLERANCE))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_rounded_logits_are_near_those_of_the_torch_runtime(
    family: str, dtype: str, tmp_path: Path
) -> None:
    checkpoint, engine = make_toy(tmp_path, family, dtype=dtype, torch_dtype=dtype)
    decoder = InterpretedDecoder(build_network(checkpoint, dtype=dtype), evaluated_in=None)
    prefill_decode_verify(SideBySide(decoder, engine, tolerance=ROUNDED[dtype]))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_norms_rotations_activations_and_logits_are_float32(dtype: str, tmp_path: Path) -> None:
    """What transformers computes in float32 is float32 in a half network too."""
    checkpoint, _ = make_toy(tmp_path, "qwen3", dtype=dtype)
    definition = build_network(checkpoint, dtype=dtype).definition
    half = {"float16": trt.DataType.HALF, "bfloat16": trt.DataType.BF16}[dtype]
    in_float32 = {"REDUCE", "UNARY", "ACTIVATION", "ROTARY_EMBEDDING"}
    in_half = {"MATRIX_MULTIPLY", "KV_CACHE_UPDATE", "ATTENTION_OUTPUT"}
    found: dict[str, set[Any]] = {}
    for layer in map(definition.get_layer, range(definition.num_layers)):
        found.setdefault(layer.type.name, set()).add(layer.get_output(0).dtype)
    assert {kind: found[kind] for kind in in_float32} == dict.fromkeys(
        in_float32, {trt.DataType.FLOAT}
    )
    assert {kind: found[kind] for kind in in_half} == dict.fromkeys(in_half, {half})
    (logits,) = (
        tensor
        for tensor in map(definition.get_output, range(definition.num_outputs))
        if tensor.name == shapes.LOGITS
    )
    assert logits.dtype == trt.DataType.FLOAT


@pytest.mark.parametrize("role", ["draft", "target"])
def test_quickstart_logits_equal_those_of_the_torch_runtime(role: str, tmp_path: Path) -> None:
    engine = load_engine(QUICKSTART / role, tmp_path, dtype="float32")
    decoder = InterpretedDecoder(build_network(tmp_path / "checkpoint"))
    prefill_decode_verify(SideBySide(decoder, engine, tolerance=TOLERANCE))


@pytest.mark.parametrize("overrides", [{}, {"tie_word_embeddings": True}])
def test_weights_that_are_inputs_change_no_bit(overrides: Any, tmp_path: Path) -> None:
    checkpoint, _ = make_toy(tmp_path, "qwen2", **overrides)
    inside = InterpretedDecoder(build_network(checkpoint))
    outside = build_network(checkpoint, weights_are_inputs=True)
    beside = InterpretedDecoder(outside)
    tokens = np.arange(12, dtype=np.int32).reshape(2, 6)
    start, rows = np.zeros(2, np.int32), np.arange(12, dtype=np.int32)
    expected = inside.run(1, tokens, start, rows)
    assert np.array_equal(beside.run(1, tokens, start, rows), expected)
    constants = kinds(outside.definition)[0]["constant"]
    assert constants == kinds(build_network(checkpoint).definition)[0]["constant"] - len(
        outside.weights
    )


def test_every_layer_has_a_name_that_says_where_it_is(tmp_path: Path) -> None:
    """The library logs an error for a name that is taken, and gives one of its own."""
    checkpoint, _ = make_toy(tmp_path)
    definition = build_network(checkpoint).definition
    names = [
        layer.name
        for layer in map(definition.get_layer, range(definition.num_layers))
        if not layer.type.name.startswith("ATTENTION")  # named as a whole
    ]
    assert len(set(names)) == len(names)
    assert [name for name in names if name.startswith("(Unnamed")] == []
    for part in ("embedding/gather", "layers.1/attention/qkv/matmul", "layers.0/mlp/sigmoid"):
        assert part in names


def test_only_the_rows_asked_for_are_scored(tmp_path: Path) -> None:
    checkpoint, _ = make_toy(tmp_path)
    tokens, start = np.arange(12, dtype=np.int32).reshape(2, 6), np.zeros(2, np.int32)
    every = np.arange(12, dtype=np.int32)
    decoder = InterpretedDecoder(build_network(checkpoint))
    expected = decoder.run(0, tokens, start, every)
    for rows in ([11], [5, 11], [7, 0, 7]):
        logits = decoder.run(0, tokens, start, np.array(rows, np.int32))
        # As many rows are multiplied at once, so their sums may differ in the last place.
        np.testing.assert_allclose(logits, expected[rows], rtol=1e-5, atol=1e-6)


def test_a_slot_holds_a_whole_text_drafts_and_padding(tmp_path: Path) -> None:
    """A sequence at its longest, drafts included, sits beside one that verifies."""
    limits: dict[str, Any] = {"max_seq_len": 32, "max_draft_len": 3}
    checkpoint, engine = make_toy(tmp_path, **limits)
    made = build_network(checkpoint, **limits)
    assert made.capacity == 40
    pair = SideBySide(InterpretedDecoder(made), engine, tolerance=TOLERANCE)
    for slot in (0, 1):
        pair.start(slot)
    pair.step({0: 32})
    pair.step({0: 4})
    pair.step({1: 6})
    pair.truncate(0, 32)
    pair.step({0: 1, 1: 4})


class SwappedGate(Graph):
    def weight(self, name: str, *, rank: int) -> Any:
        swapped = {".fc.": ".gate.", ".gate.": ".fc."}
        for part, other in swapped.items():
            if part in name:
                return super().weight(name.replace(part, other), rank=rank)
        return super().weight(name, rank=rank)


class Unscaled(Graph):
    def scalar(self, value: float, *, rank: int) -> Any:
        return super().scalar(1.0 if value == 8**-0.5 else value, rank=rank)


class NoEpsilon(Graph):
    def scalar(self, value: float, *, rank: int) -> Any:
        return super().scalar(0.0 if value == 1e-3 else value, rank=rank)


class KeysForQueries(Graph):
    def slice(self, x: Any, start: Sequence[int], size: Any) -> Any:
        swapped: dict[Any, Any] = {(0, 0, 0, 0): (0, 4, 0, 0), (0, 4, 0, 0): (0, 0, 0, 0)}
        return super().slice(x, swapped.get(tuple(start), start), size)


class NoBias(Graph):
    def has_weight(self, name: str) -> bool:
        return False


class OtherPairs(Graph):
    """Turns neighbouring channels together, as GPT-J's layout would want it."""

    def rotary_embedding(self, x: Any, cos: Any, sin: Any, position_ids: Any, size: int) -> Any:
        layer = self.network.add_rotary_embedding(x, cos, sin, True, size)
        layer.set_input(3, position_ids)
        return layer.get_output(0)


class ShiftedPositions(InterpretedDecoder):
    """Shifted in decode only: attention sees distances, and those of a whole text would stay."""

    def inputs(self, input_ids: Any, write_indices: Any, logits_indices: Any) -> Any:
        made = super().inputs(input_ids, write_indices, logits_indices)
        if input_ids.shape[1] == 1:
            made[shapes.POSITION_IDS] += 1
        return made


class LengthsWithoutPadding(InterpretedDecoder):
    def inputs(self, input_ids: Any, write_indices: Any, logits_indices: Any) -> Any:
        made = super().inputs(input_ids, write_indices, logits_indices)
        batch, num_tokens = input_ids.shape
        counts = np.bincount(logits_indices // num_tokens, minlength=batch)
        made[shapes.KEY_VALUE_LENGTHS] = torch.from_numpy((write_indices + counts).astype(np.int32))
        return made


class ShiftedWrites(InterpretedDecoder):
    def inputs(self, input_ids: Any, write_indices: Any, logits_indices: Any) -> Any:
        made = super().inputs(input_ids, write_indices, logits_indices)
        if input_ids.shape[1] == 1:
            made[shapes.WRITE_INDICES] += 1
        return made


def masked_otherwise(kind: Any) -> Callable[[Network], None]:
    def change(made: Network) -> None:
        for layer in map(made.definition.get_layer, range(made.definition.num_layers)):
            if layer.type == trt.LayerType.ATTENTION_OUTPUT:
                layer.__class__ = trt.IAttentionOutputLayer
                layer.attention.causal_kind = kind

    return change


MUTATIONS: dict[str, dict[str, Any]] = {
    "swapped gate": {"graph_class": SwappedGate},
    "missing scale": {"graph_class": Unscaled},
    "keys for queries": {"graph_class": KeysForQueries, "num_key_value_heads": 4},
    "dropped epsilon": {"graph_class": NoEpsilon, "rms_norm_eps": 1e-3},
    "dropped bias": {"graph_class": NoBias, "family": "qwen2"},
    "other pairs of channels": {"graph_class": OtherPairs},
    "shifted positions": {"decoder_class": ShiftedPositions},
    "shifted writes": {"decoder_class": ShiftedWrites},
    "lengths without padding": {"decoder_class": LengthsWithoutPadding},
    "upper left mask": {"change": masked_otherwise(trt.CausalMaskKind.UPPER_LEFT)},
    "no mask": {"change": masked_otherwise(trt.CausalMaskKind.NONE)},
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_wrong_network_is_found(name: str, tmp_path: Path) -> None:
    """By far: the bound is a hundred times that of the right one."""
    settings = dict(MUTATIONS[name])
    graph_class = settings.pop("graph_class", Graph)
    decoder_class = settings.pop("decoder_class", InterpretedDecoder)
    change = settings.pop("change", lambda made: None)
    checkpoint, engine = make_toy(tmp_path, **settings)

    right = InterpretedDecoder(build_network(checkpoint))
    prefill_decode_verify(SideBySide(right, engine, tolerance=TOLERANCE))

    made = build_network(checkpoint, graph_class=graph_class)
    change(made)
    pair = SideBySide(decoder_class(made), engine, tolerance=100 * TOLERANCE)
    with pytest.raises(AssertionError, match="logits differ by"):
        prefill_decode_verify(pair)


@pytest.mark.parametrize("scaling", [LLAMA3, LINEAR, YARN])
def test_a_dropped_rope_scaling_is_found(
    scaling: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint, engine = make_toy(tmp_path, rope_parameters=scaling)
    tables = network.rotary_tables
    monkeypatch.setattr(
        network,
        "rotary_tables",
        lambda config, capacity: tables(
            config.model_copy(update={"rotary_scaling": None}), capacity
        ),
    )
    pair = SideBySide(
        InterpretedDecoder(build_network(checkpoint)), engine, tolerance=100 * TOLERANCE
    )
    with pytest.raises(AssertionError, match="logits differ by"):
        prefill_decode_verify(pair)


def refusal(config: UnifiedConfig, *, max_seq_len: int = 320) -> str:
    with pytest.raises(EngineBuildError) as caught:
        network.check_supported("target", config, max_seq_len=max_seq_len)
    return str(caught.value)


@pytest.mark.parametrize("family", ["gemma2", "phi3"])
def test_other_families_are_refused_by_name(family: str) -> None:
    name = {"gemma2": "Gemma2ForCausalLM", "phi3": "Phi3ForCausalLM"}[family]
    assert refusal(unified_config(toy_config(family))) == (
        f"target: runtime 'tensorrt' does not build {name}; it builds LlamaForCausalLM, "
        "MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM; engine.runtime torch runs it"
    )


def test_a_quantized_kv_cache_is_refused() -> None:
    config = unified_config(toy_config()).quantized(Quantization(kv_cache_quant_algo="FP8"))
    assert refusal(config) == (
        "target: kv_cache_quant_algo FP8 is not supported by runtime 'tensorrt': the library's KV "
        "cache takes floating-point types only; engine.runtime torch and tensorrt_llm run it"
    )


def test_a_window_shorter_than_the_text_is_refused() -> None:
    config = unified_config(toy_config("mistral", sliding_window=64))
    assert refusal(config, max_seq_len=65) == (
        "target: its attention sees 64 tokens, and TensorRT's attention layer has no window; set "
        "engine.max_seq_len to at most 64, or engine.runtime torch"
    )
    network.check_supported("target", config, max_seq_len=64)


@pytest.mark.parametrize(
    ("scaling", "original"), [(DYNAMIC, 512), (LONGROPE, 320)], ids=["dynamic", "longrope"]
)
def test_a_rope_that_depends_on_the_length_is_refused_beyond_it(
    scaling: dict[str, Any], original: int
) -> None:
    config = unified_config(toy_config(rope_parameters=scaling))
    assert refusal(config, max_seq_len=original + 1) == (
        f"target: rope type '{scaling['rope_type']}' turns a text otherwise once it is longer than "
        f"{original} tokens, and an engine has one table of rotations; set engine.max_seq_len to "
        f"at most {original}, or engine.runtime torch"
    )
    network.check_supported("target", config, max_seq_len=original)
