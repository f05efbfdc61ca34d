from __future__ import annotations

import json
import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from specpipe.errors import EngineMismatch, RuntimeUnavailable
from specpipe.machine.memory import format_bytes
from specpipe.runtimes.torch import model
from specpipe.runtimes.torch.engine import TorchEngine, check_memory
from specpipe.runtimes.torch.packed import packed
from tests.runtimes.torch.engines import build_engine, load_engine
from tests.toy import (
    LLAMA3_SCALING,
    spelled_as_4_57,
    toy_config,
    write_toy_checkpoint,
)

NUM_POSITIONS = 301
TOLERANCE = 2e-4  # float32, relative to the largest logit
QUICKSTART = Path(__file__).parents[3] / "models" / "python-code"

LLAMA3 = {"rope_type": "llama3", "rope_theta": 10000.0, **LLAMA3_SCALING}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 8.0}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
}
YARN_IN_FULL = YARN | {"beta_fast": 8.0, "beta_slow": 0.5, "truncate": False}
YARN_MSCALE = YARN | {"mscale": 1.0, "mscale_all_dim": 0.6}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.3, 1.5],
    "long_factor": [1.0, 2.0, 4.0, 8.0],
}
PARTIAL = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}

CHECKPOINTS: dict[str, dict[str, Any]] = {
    "llama": {"family": "llama"},
    "llama-tied": {"family": "llama", "tie_word_embeddings": True},
    "llama-biases": {"family": "llama", "attention_bias": True, "mlp_bias": True},
    "llama-every-head-its-own": {"family": "llama", "num_key_value_heads": 4},
    "llama-one-kv-head": {"family": "llama", "num_key_value_heads": 1},
    "llama-rope-llama3": {"family": "llama", "head_dim": 16, "rope_parameters": LLAMA3},
    "llama-rope-linear": {"family": "llama", "rope_parameters": LINEAR},
    "llama-rope-dynamic": {
        "family": "llama",
        "rope_parameters": DYNAMIC,
        "max_position_embeddings": 64,
    },
    "mistral": {"family": "mistral"},
    "mistral-explicit-head-dim": {"family": "mistral", "head_dim": 20},
    "qwen2": {"family": "qwen2"},
    "qwen2-tied": {"family": "qwen2", "tie_word_embeddings": True},
    "qwen3": {"family": "qwen3"},
    "qwen3-explicit-head-dim": {"family": "qwen3", "head_dim": 16, "num_attention_heads": 6},
    "llama-rope-yarn": {"family": "llama", "head_dim": 16, "rope_parameters": YARN},
    "llama-rope-yarn-in-full": {"family": "llama", "head_dim": 16, "rope_parameters": YARN_IN_FULL},
    "qwen2-rope-yarn-mscale": {"family": "qwen2", "head_dim": 8, "rope_parameters": YARN_MSCALE},
    "mistral-window": {"family": "mistral", "sliding_window": 64},
    "mistral-window-of-one": {"family": "mistral", "sliding_window": 1},
    "qwen2-window": {
        "family": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 64,
        "max_window_layers": 1,
    },
    "qwen3-window": {
        "family": "qwen3",
        "use_sliding_window": True,
        "sliding_window": 64,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "phi3": {"family": "phi3"},
    "phi3-window": {"family": "phi3", "sliding_window": 64},
    "phi3-partial": {"family": "phi3", "num_attention_heads": 2, "rope_parameters": PARTIAL},
    "phi3-longrope": {
        "family": "phi3",
        "original_max_position_embeddings": 200,  # one text is longer, one as short
        "rope_parameters": LONGROPE,
    },
    "phi3-partial-longrope": {
        "family": "phi3",
        "num_attention_heads": 2,
        "head_dim": 16,
        "original_max_position_embeddings": 64,
        "rope_parameters": LONGROPE | {"partial_rotary_factor": 0.5},
    },
    "gemma2": {"family": "gemma2"},
    "gemma2-own-head": {"family": "gemma2", "tie_word_embeddings": False},
    "gemma2-biases": {"family": "gemma2", "attention_bias": True},
    "gemma2-uncapped": {
        "family": "gemma2",
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
    },
}


def write_checkpoint(folder: Path, family: str = "llama", **overrides: Any) -> Path:
    """Writes a toy in the spelling of the transformers that is installed."""
    write_toy_checkpoint(folder, family, **overrides)
    if transformers.__version__.startswith("4."):
        config = spelled_as_4_57(toy_config(family, **overrides))
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def tokens(seed: int, count: int = NUM_POSITIONS, vocab_size: int = 256) -> list[int]:
    return random.Random(seed).choices(range(vocab_size), k=count)


def reference(folder: Path, texts: Sequence[list[int]]) -> list[Tensor]:
    """Returns what transformers computes for each text, float32 [len(text), V]."""
    # eager: transformers 4.57 drops Gemma 2's caps otherwise
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.inference_mode():
        return [model(torch.tensor([text])).logits[0] for text in texts]


def difference(logits: Tensor, expected: Tensor) -> float:
    """The largest difference, relative to the largest logit; infinite for a NaN."""
    assert logits.shape == expected.shape
    largest = ((logits - expected).abs().max() / expected.abs().max()).item()
    return largest if largest == largest else float("inf")


def run(engine: TorchEngine, texts: Sequence[list[int]], chunks: Sequence[Sequence[int]]) -> Any:
    """Feeds each text in chunks of the given sizes, over and over; returns all logits of each.

    In each round every text that is not at its end gets one chunk, the last text first.
    """
    sequences = [engine.allocate(prompt_length=len(text), max_tokens=len(text)) for text in texts]
    logits: list[list[Tensor]] = [[] for _ in texts]
    step = 0
    while any(engine.length(s) < len(text) for s, text in zip(sequences, texts, strict=True)):
        batch, members = [], []
        for i in reversed(range(len(texts))):
            start = engine.length(sequences[i])
            chunk = texts[i][start : start + chunks[i][step % len(chunks[i])]]
            if chunk:
                batch.append((sequences[i], chunk))
                members.append(i)
        counts = [len(chunk) for _, chunk in batch]
        rows = engine.forward(batch, counts).split(counts)
        for i, part in zip(members, rows, strict=True):
            logits[i].append(part)
        step += 1
    for sequence in sequences:
        engine.free(sequence)
    return [torch.cat(parts) for parts in logits]


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_logits_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    settings = dict(CHECKPOINTS[name])
    folder = write_checkpoint(tmp_path / "hf", settings.pop("family"), **settings)
    engine = load_engine(folder, tmp_path)
    texts = [tokens(1), tokens(2, 97), tokens(3, 230)]
    expected = reference(folder, texts[:1])[0]
    each = [reference(folder, [text])[0] for text in texts]

    (whole,) = run(engine, texts[:1], [[NUM_POSITIONS]])
    assert difference(whole, expected) <= TOLERANCE
    (one_by_one,) = run(engine, texts[:1], [[1]])
    assert difference(one_by_one, expected) <= TOLERANCE
    together = run(engine, texts, [[1, 5, 40, 2], [7, 1], [1, 9, 3]])
    for logits, alone in zip(together, each, strict=True):
        assert difference(logits, alone) <= TOLERANCE


@pytest.mark.parametrize("role", ["draft", "target"])
def test_quickstart_logits_equal_those_of_transformers(role: str, tmp_path: Path) -> None:
    engine = load_engine(QUICKSTART / role, tmp_path)
    text = tokens(1, vocab_size=4096)
    (expected,) = reference(QUICKSTART / role, [text])
    (logits,) = run(engine, [text], [[100, 1, 5, 1, 9]])
    assert difference(logits, expected) <= TOLERANCE


def test_rope_scaling_shows_in_the_logits(tmp_path: Path) -> None:
    """The comparison above would notice dropped scaling: early tokens agree, late ones do not."""
    scaled = write_checkpoint(tmp_path / "scaled", head_dim=16, rope_parameters=LLAMA3)
    plain = write_checkpoint(tmp_path / "plain", head_dim=16)
    (logits,) = run(load_engine(plain, tmp_path), [tokens(1)], [[NUM_POSITIONS]])
    (expected,) = reference(scaled, [tokens(1)])
    assert difference(logits[:2], expected[:2]) < 0.02
    assert difference(logits[200:], expected[200:]) > 100 * TOLERANCE


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated")  # its old and common name
@pytest.mark.parametrize("prompt_length", [40, 100])
def test_dynamic_rope_follows_transformers_while_it_generates(
    prompt_length: int, tmp_path: Path
) -> None:
    folder = write_checkpoint(tmp_path / "hf", rope_parameters=DYNAMIC, max_position_embeddings=64)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    text = tokens(1, 200)
    with torch.inference_mode():
        output = model(torch.tensor([text[:prompt_length]]), use_cache=True)
        expected = [output.logits[0]]
        for token in text[prompt_length:]:
            output = model(torch.tensor([[token]]), past_key_values=output.past_key_values)
            expected.append(output.logits[0])
    engine = load_engine(folder, tmp_path)
    sequence = engine.allocate(prompt_length=prompt_length, max_tokens=200)
    chunks = [text[:33], text[33:prompt_length]]
    chunks += [text[start : start + 5] for start in range(prompt_length, 200, 5)]
    logits = [engine.forward([(sequence, chunk)], [len(chunk)]) for chunk in chunks]
    assert difference(torch.cat(logits), torch.cat(expected)) <= TOLERANCE


@pytest.mark.parametrize(
    ("prompt_length", "max_tokens", "num_tokens"),
    [
        (40, 64, 64),  # it never outgrows the original length
        (40, 200, 200),  # it does, and has the long factors from the start
        (100, 200, 200),
    ],
)
def test_longrope_takes_its_factors_by_what_a_sequence_may_grow_to(
    prompt_length: int, max_tokens: int, num_tokens: int, tmp_path: Path
) -> None:
    folder = write_checkpoint(
        tmp_path / "hf", "phi3", rope_parameters=LONGROPE, original_max_position_embeddings=64
    )
    text = tokens(1, num_tokens)
    (expected,) = reference(folder, [text])
    engine = load_engine(folder, tmp_path)
    sequence = engine.allocate(prompt_length=prompt_length, max_tokens=max_tokens)
    chunks = [text[:33], text[33:prompt_length]]
    chunks += [text[start : start + 5] for start in range(prompt_length, num_tokens, 5)]
    logits = [engine.forward([(sequence, chunk)], [len(chunk)]) for chunk in chunks]
    assert difference(torch.cat(logits), expected) <= TOLERANCE


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("mistral-window", {"sliding_window": None}),
        ("qwen2-window", {"layer_types": None}),
        ("qwen3-window", {"layer_types": ["full_attention", "sliding_attention"]}),
        ("phi3-partial", {"rotary_embedding_dim": 8}),
        ("phi3-longrope", {"rotary_scaling": None}),
        ("llama-rope-yarn", {"rotary_scaling": None}),
        ("gemma2", {"sliding_window": None}),
        ("gemma2", {"attn_logit_softcapping": None}),
        ("gemma2", {"final_logit_softcapping": None}),
        ("gemma2", {"query_pre_attn_scalar": 8.0}),
        ("gemma2", {"embedding_multiplier": 1.0}),
    ],
)
def test_each_feature_shows_in_the_logits(
    name: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    """The comparison with transformers would notice if one were dropped."""
    settings = dict(CHECKPOINTS[name])
    folder = write_checkpoint(tmp_path / "hf", settings.pop("family"), **settings)
    (expected,) = reference(folder, [tokens(1)])
    build_engine(folder, tmp_path)
    config = json.loads((tmp_path / "checkpoint" / "config.json").read_text())
    assert config.keys() >= changes.keys()
    (tmp_path / "checkpoint" / "config.json").write_text(json.dumps(config | changes))
    shutil.rmtree(tmp_path / "engine")
    (logits,) = run(load_engine(folder, tmp_path), [tokens(1)], [[NUM_POSITIONS]])
    assert difference(logits, expected) > 10 * TOLERANCE


def test_the_activation_shows_in_the_logits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No unified config of Gemma 2 has another one, so the engine computes another one here."""
    folder = write_checkpoint(tmp_path / "hf", "gemma2")
    (expected,) = reference(folder, [tokens(1)])
    activations = model._ACTIVATIONS
    monkeypatch.setitem(activations, "gelu_pytorch_tanh", activations["silu"])
    (logits,) = run(load_engine(folder, tmp_path), [tokens(1)], [[NUM_POSITIONS]])
    assert difference(logits, expected) > 10 * TOLERANCE


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An engine's folder; token 7 of this model is not a number."""
    work = tmp_path_factory.mktemp("toy")
    engine = build_engine(write_toy_checkpoint(work / "hf", dtype="float32"), work)
    # In the engine, since no checkpoint with such a weight is built.
    weights = load_file(engine / "model.safetensors")
    (name,) = (
        name for name, weight in weights.items() if weight.shape[0] == 256 and "embed" in name
    )
    weights[name][7] = torch.nan
    save_file(weights, engine / "model.safetensors")
    return engine


@pytest.fixture
def engine(toy: Path) -> TorchEngine:
    return TorchEngine.load(toy)


def test_only_the_last_logits_asked_for_come_back(engine: TorchEngine) -> None:
    first, second = (engine.allocate(prompt_length=9, max_tokens=20) for _ in range(2))
    everything = engine.forward([(first, [10, 11, 12]), (second, [20, 21])], [3, 2])
    for sequence in (first, second):
        engine.truncate(sequence, 0)
    some = engine.forward([(second, [20, 21]), (first, [10, 11, 12])], [0, 2])
    assert torch.allclose(some, everything[1:3], atol=1e-5)
    nothing = engine.forward([(first, [1]), (second, [2])], [0, 0])
    assert nothing.shape == (0, 256)
    assert [engine.length(first), engine.length(second)] == [4, 3]


def test_truncated_tokens_leave_no_trace(engine: TorchEngine) -> None:
    sequence = engine.allocate(prompt_length=9, max_tokens=20)
    engine.forward([(sequence, [10, 11, 12])], [0])
    expected = engine.forward([(sequence, [13])], [1])
    engine.truncate(sequence, 3)
    assert engine.length(sequence) == 3
    engine.forward([(sequence, [50, 51, 52, 53])], [0])
    engine.truncate(sequence, 3)
    assert torch.equal(engine.forward([(sequence, [13])], [1]), expected)


def test_a_nan_stays_in_its_sequence_and_ends_with_its_token(engine: TorchEngine) -> None:
    healthy, sick = (engine.allocate(prompt_length=9, max_tokens=20) for _ in range(2))
    logits = engine.forward([(healthy, [10, 11]), (sick, [12])], [2, 1])
    assert torch.isfinite(logits).all()
    logits = engine.forward([(healthy, [14]), (sick, [13, 7])], [1, 2])
    assert torch.isfinite(logits).all(dim=1).tolist() == [True, False, False]
    engine.truncate(sick, 1)
    logits = engine.forward([(healthy, [15, 16, 17, 18]), (sick, [13])], [4, 1])
    assert torch.isfinite(logits).all()
    engine.forward([(sick, [7])], [0])
    engine.free(sick)
    successor = engine.allocate(prompt_length=9, max_tokens=20)
    logits = engine.forward([(healthy, [14, 15, 16, 17]), (successor, [18])], [4, 1])
    assert torch.isfinite(logits).all()


def test_slots_limit_admission_and_come_back(engine: TorchEngine) -> None:
    assert engine.can_admit(320)
    assert not engine.can_admit(321)
    sequences = [engine.allocate(prompt_length=1, max_tokens=320) for _ in range(4)]
    assert not engine.can_admit(1)
    engine.free(sequences[1])
    assert engine.can_admit(1)
    assert engine.allocate(prompt_length=1, max_tokens=320) not in sequences


def test_sequences_with_a_gap_between_them_run_together(engine: TorchEngine) -> None:
    sequences = [engine.allocate(prompt_length=3, max_tokens=20) for _ in range(4)]
    alone = engine.forward([(sequences[0], [10, 11, 12])], [1])
    others = engine.forward([(sequences[3], [20, 21])], [1])
    for sequence in (sequences[0], sequences[3]):
        engine.truncate(sequence, 0)
    engine.free(sequences[1])
    batch = [(sequences[3], [20, 21]), (sequences[2], [5]), (sequences[0], [10, 11, 12])]
    logits = engine.forward(batch, [1, 1, 1])
    assert torch.allclose(logits[[0, 2]], torch.cat([others, alone]), atol=1e-5)


def test_more_tokens_than_the_cache_holds_are_refused(engine: TorchEngine) -> None:
    sequence = engine.allocate(prompt_length=9, max_tokens=320)
    engine.forward([(sequence, [1] * 320)], [0])
    engine.forward([(sequence, [1] * 9)], [0])  # draft tokens and one more have their own room
    with pytest.raises(ValueError, match="1 tokens after 329: expected 1 to 0"):
        engine.forward([(sequence, [1])], [0])


@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 0.03), ("float16", 0.005)])
@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
def test_half_precision_computes_the_same(
    family: str, dtype: str, tolerance: float, tmp_path: Path
) -> None:
    folder = write_toy_checkpoint(tmp_path / "hf", family)
    text = tokens(1, 60)
    (expected,) = reference(folder, [text])
    (logits,) = run(load_engine(folder, tmp_path, dtype=dtype), [text], [[40, 1, 5]])
    assert logits.dtype == torch.float32
    assert difference(logits, expected) <= tolerance


def test_a_foreign_or_damaged_engine_is_refused(toy: Path, tmp_path: Path) -> None:
    with pytest.raises(EngineMismatch, match=f"{tmp_path} is not an engine of runtime 'torch'"):
        TorchEngine.load(tmp_path)
    config = json.loads((toy / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes(b"short")
    with pytest.raises(EngineMismatch, match="cannot be read .*; build it again"):
        TorchEngine.load(tmp_path)
    del config["pretrained_config"]["head_size"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        EngineMismatch, match=r"\(head_size: Field required\): build the engine again"
    ):
        TorchEngine.load(tmp_path)
    config["runtime"]["format"] = 0
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(EngineMismatch, match="was built for {'name': 'torch', 'format': 0}"):
        TorchEngine.load(tmp_path)


def test_engines_that_do_not_fit_are_refused_with_the_numbers(
    toy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need = TorchEngine.load(toy).memory.total_bytes
    monkeypatch.setattr("specpipe.runtimes.torch.engine.available_bytes", lambda: 2 * need - 1)
    check_memory([toy])
    with pytest.raises(RuntimeUnavailable) as caught:
        check_memory([toy, toy])
    free = format_bytes(2 * need - 1)
    assert str(caught.value).startswith(f"{free} of memory are free: {toy} needs ")
    assert str(caught.value).endswith("lower engine.max_batch_size or engine.max_seq_len")


def test_a_packed_matrix_multiplies_each_row_alike_beside_any_others() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(512, 384, generator=generator)
    bias, x = torch.randn(384, generator=generator), torch.randn(17, 512, generator=generator)
    product = packed(weight, bias)
    assert product is not None
    expected = x.double() @ weight.double() + bias
    torch.testing.assert_close(product(x).double(), expected, rtol=0, atol=1e-4)
    for count in (2, 5, 9):
        assert product(x[:count]).equal(product(x)[:count])
    assert packed(weight[:64]) is None  # too small to gain
    assert packed(weight.bfloat16()) is None
