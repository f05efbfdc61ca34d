"""The shapes that an engine takes: its inputs and outputs, and the ranges of each profile.

B sequences in consecutive slots of the KV cache, N tokens of each, R rows whose logits are wanted,
S positions of a slot, L layers, H_kv key-value heads, D head size, V vocabulary.

| tensor | dtype | shape | |
|---|---|---|---|
| input_ids | int32 | [B, N] | padded on the right, with any id |
| position_ids | int32 | [B, N] | write_indices[b] + n |
| write_indices | int32 | [B] | the position at which a sequence's new tokens begin |
| key_value_lengths | int32 | [B] | write_indices + N, padding counted |
| logits_indices | int32 | [R] | rows b · N + n |
| key_cache.{i}, value_cache.{i} | engine's | [B, H_kv, S, D] | updated in place |
| logits | float32 | [R, V] | |

Padding needs no mask. A query sees keys up to its own position, so none sees the padding after it;
what padding leaves in the cache is overwritten by the tokens that come next at its positions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

_CAPACITY_MULTIPLE = 8
"""Keeps every slot of a KV cache aligned to 256 bytes: 8 positions of 16 channels of 2 bytes."""

INPUT_IDS, POSITION_IDS, WRITE_INDICES, KEY_VALUE_LENGTHS, LOGITS_INDICES, LOGITS = (
    "input_ids",
    "position_ids",
    "write_indices",
    "key_value_lengths",
    "logits_indices",
    "logits",
)


def cache_names(num_layers: int) -> Iterator[str]:
    """Yields the names of KV caches, layer by layer; those of their outputs end in `.out`."""
    for layer in range(num_layers):
        yield f"key_cache.{layer}"
        yield f"value_cache.{layer}"


def max_rows(max_draft_len: int, *, is_parallel: bool) -> int:
    """Returns the greatest N of a step that decodes or verifies.

    Verified are K draft tokens behind one that is known; a draft that proposes in one pass
    (is_parallel) reads up to K + 1 tokens that were accepted, and K - 1 masks.
    """
    return max(max_draft_len + 1, 2 * max_draft_len if is_parallel else 0)


def capacity(max_seq_len: int, max_draft_len: int, *, is_parallel: bool = False) -> int:
    """Returns S: a whole text, the rows of a step, and as many of padding."""
    needed = max_seq_len + 2 * max_rows(max_draft_len, is_parallel=is_parallel)
    return -(-needed // _CAPACITY_MULTIPLE) * _CAPACITY_MULTIPLE


Range = tuple[int, int, int]
"""Least, best and greatest size; an engine is fastest at the best one."""


@dataclass(frozen=True)
class Profile:
    """Ranges that an engine was built for together.

    batch   B      tokens  N      logits  R
    """

    name: str
    batch: Range
    tokens: Range
    logits: Range

    def shapes(
        self, *, num_layers: int, num_kv_heads: int, head_size: int, capacity: int
    ) -> dict[str, list[list[int]]]:
        """Returns least, best and greatest shape of each input by name."""
        sizes = list(zip(self.batch, self.tokens, self.logits, strict=True))
        per_token = [[b, n] for b, n, _ in sizes]
        per_sequence = [[b] for b, _, _ in sizes]
        shapes = {
            INPUT_IDS: per_token,
            POSITION_IDS: per_token,
            WRITE_INDICES: per_sequence,
            KEY_VALUE_LENGTHS: per_sequence,
            LOGITS_INDICES: [[r] for _, _, r in sizes],
        }
        cache = [[b, num_kv_heads, capacity, head_size] for b, _, _ in sizes]
        return shapes | dict.fromkeys(cache_names(num_layers), cache)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Profile:
        return cls(data["name"], *(tuple(data[key]) for key in ("batch", "tokens", "logits")))


def profiles(
    *,
    role: str,
    max_batch_size: int,
    max_draft_len: int,
    max_num_tokens: int,
    is_parallel: bool = False,
) -> tuple[Profile, Profile]:
    """Returns the profiles of an engine: `decode`, verification included, and `prefill`.

    Each takes its time to build, and decode and verification differ little: TensorRT for RTX
    compiles a kernel for the very shapes on the GPU anyway (docs/tensorrt.md). A prompt is read
    by itself, so prefill has a batch of 1 and no padding. Scored are K + 1 rows of a sequence at
    most. A draft that proposes in one pass is best where it has two tokens to read, as many rows as
    its target verifies.
    """
    scored, rows = max_draft_len + 1, max_rows(max_draft_len, is_parallel=is_parallel)
    best = 1 if role == "draft" and not is_parallel else scored
    chunk = max(max_num_tokens, rows)
    return (
        Profile(
            "decode", (1, 1, max_batch_size), (1, best, rows), (1, best, max_batch_size * scored)
        ),
        Profile("prefill", (1, 1, 1), (1, min(128, chunk), chunk), (1, 1, scored)),
    )
