"""Guides over a vocabulary of 128 tokens, each the character of its id; 4 ends a text."""

from __future__ import annotations

from specpipe.checkpoints.limits import FILE_LIMITS
from specpipe.text.guides.guides import Guides

VOCAB_SIZE = 128
END = 4


class Ascii:
    special_token_ids = frozenset({END})
    spells_tokens = True

    def tokens(self) -> dict[int, str]:
        return {i: chr(i) for i in range(VOCAB_SIZE)}

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id])

    def encode_fragment(self, text: str) -> list[int]:
        return list(text.encode())


ASCII = Guides(Ascii(), FILE_LIMITS)
