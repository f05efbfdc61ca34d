from __future__ import annotations

from pathlib import Path

import pytest

from specpipe.checkpoints.family_config import unified_config
from specpipe.machine import memory
from specpipe.machine.memory import MemoryEstimate, available_bytes
from specpipe.runtimes.torch.graph_memory import graph_bytes
from specpipe.runtimes.torch.memory import estimate_memory
from tests.toy import toy_config

GIB_16_KB = "MemTotal:       32000000 kB\nMemFree:  1000 kB\nMemAvailable:   16000000 kB\n"


def estimate(
    dtype: str = "float32",
    *,
    is_tied: bool = False,
    max_seq_len: int = 100,
    max_num_tokens: int = 64,
    on_gpu: bool = False,
) -> MemoryEstimate:
    config = unified_config(toy_config(tie_word_embeddings=is_tied), tp_size=1, pp_size=1)
    return estimate_memory(
        config,
        dtype=dtype,
        max_batch_size=8,
        max_seq_len=max_seq_len,
        max_draft_len=3,
        max_num_tokens=max_num_tokens,
        on_gpu=on_gpu,
    )


def test_weights_and_kv_cache_are_counted_exactly() -> None:
    layer = 2 * 32 + 64 * 32 + 32 * 32 + 3 * 64 * 32
    assert estimate().weights_bytes == 4 * (2 * 256 * 32 + 2 * layer + 32)
    # layers, slots, positions, keys and values, KV heads, head size
    assert estimate().kv_cache_bytes == 4 * 2 * 8 * 104 * 2 * 2 * 8
    assert estimate("bfloat16").kv_cache_bytes == 2 * 2 * 8 * 104 * 2 * 2 * 8


def test_what_gemma2_has_beside_is_counted() -> None:
    config = unified_config(toy_config("gemma2"))
    limits = {"max_batch_size": 8, "max_seq_len": 100, "max_draft_len": 3, "max_num_tokens": 64}
    capped = estimate_memory(config, dtype="bfloat16", **limits)
    layer = 64 * 32 + 32 * 32 + 3 * 64 * 32
    assert capped.weights_bytes == 2 * (256 * 32 + 2 * layer) + 4 * (2 * 4 * 32 + 32)
    config = config.model_copy(update={"attn_logit_softcapping": None})
    plain = estimate_memory(config, dtype="bfloat16", **limits)
    # three float32 copies of the scores of 64 rows, 4 heads, 104 positions
    assert capped.workspace_bytes - plain.workspace_bytes == 3 * 4 * 64 * 4 * 104
    config = config.model_copy(update={"layer_types": None})
    # one mask less, of 64 rows, 2 query heads for each KV head, 104 positions
    alike = estimate_memory(config, dtype="bfloat16", **limits)
    assert plain.workspace_bytes - alike.workspace_bytes == 2 * 64 * 2 * 104


def test_a_tied_head_counts_once() -> None:
    assert estimate().weights_bytes - estimate(is_tied=True).weights_bytes == 4 * 256 * 32


@pytest.mark.parametrize(
    ("max_seq_len", "positions", "parts", "rows"), [(100, 128, 1, 128), (40_000, 40_064, 40, 1024)]
)
def test_what_fused_kernels_take_is_counted_on_a_gpu(
    max_seq_len: int, positions: int, parts: int, rows: int
) -> None:
    on_gpu = estimate("bfloat16", max_seq_len=max_seq_len, max_num_tokens=0, on_gpu=True)
    # positions of three rounds of 4 tokens beside the text, in pages of 64
    assert on_gpu.kv_cache_bytes == 2 * 2 * 8 * positions * 2 * 2 * 8
    # 32 rows: of 4 heads the parts of attention, 8 sums and a state of 2 each; and 256 logits
    fused = 4 * 128 * (4 * parts * 10 + 256)
    # of rows of prompts two hidden states, queries, keys and values, queries twice more, the MLP's
    fused += 2 * rows * (2 * 32 + (4 + 2 * 2) * 8 + 2 * 4 * 8 + 64)
    fused += graph_bytes(2, max_batch_size=8, max_draft_len=3, capacity=positions)
    # and the logits of a forward, of 64 tokens at least, twice
    assert on_gpu.workspace_bytes == fused + 4 * 2 * 64 * 256


def test_a_gpu_has_room_for_either_kind_of_engine() -> None:
    """One that the fused kernels do not run needs what the plain one does, which may be more."""
    on_gpu, plain = (
        estimate("bfloat16", max_num_tokens=100_000, on_gpu=on_gpu).workspace_bytes
        for on_gpu in (True, False)
    )
    assert on_gpu > plain  # by the room of masks, since texts have more positions


def test_estimate_reads_as_a_sentence() -> None:
    text = str(MemoryEstimate(5_480_000_000, 22_000_000, 1_500))
    assert text == "5.5 GB (5.5 GB weights, 22.0 MB KV cache, 1.5 kB workspace)"


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        ("max", 16_000_000 * 1024),
        ("3000000000", 2_000_000_000),
        ("500000000", 0),
        (None, 16384000000),
    ],
)
def test_a_container_limit_counts_where_it_is_lower(
    limit: str | None, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "meminfo").write_text(GIB_16_KB)
    if limit is not None:
        (tmp_path / "memory.max").write_text(limit + "\n")
        (tmp_path / "memory.current").write_text("1000000000\n")
    monkeypatch.setattr(memory, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    assert available_bytes() == expected


def test_memory_is_unknown_where_the_kernel_does_not_tell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "_MEMINFO", tmp_path / "missing")
    assert available_bytes() is None


def test_a_cpu_has_room_for_packed_copies() -> None:
    limits = {"max_batch_size": 1, "max_seq_len": 64, "max_draft_len": 1, "max_num_tokens": 1}
    sizes = {"hidden_size": 512, "head_dim": 64, "num_attention_heads": 8, "vocab_size": 1000}
    sizes |= {"num_key_value_heads": 2, "intermediate_size": 100, "num_hidden_layers": 3}
    config = unified_config(toy_config(**sizes))
    in_float32, in_bfloat16 = (
        estimate_memory(config, dtype=dtype, **limits).workspace_bytes
        for dtype in ("float32", "bfloat16")
    )
    # qkv, dense and the head; the MLP's matrices, of 102,400 and 51,200 numbers, are too small.
    copies = 4 * (3 * (512 * 768 + 512 * 512) + 512 * 1000)
    logits = 4 * 2 * 64 * 1000
    assert in_float32 - logits - copies == 2 * (in_bfloat16 - logits)
