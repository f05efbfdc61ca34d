"""The bytes that a token adds to a text which it does not begin."""

from __future__ import annotations

import json
from collections.abc import Callable

from tokenizers import decoders

from specpipe.text.detokenizer import byte_level_bytes, fallback_byte, flatten, later_piece

Speller = Callable[[str], bytes]
"""Returns the bytes of a token's string."""


def speller(decoder: decoders.Decoder | None) -> Speller | None:
    """Returns what spells the tokens of a decoder; None where bytes depend on other tokens."""
    if decoder is None:
        return lambda piece: f" {piece}".encode()
    changes: list[Callable[[str], str]] = []
    encode: Speller | None = None
    is_fused = False  # what follows sees one text: it may only change the start of that
    for description in flatten(json.loads(decoder.__getstate__())):
        kind = description["type"]
        if is_fused or kind == "Fuse":
            if kind not in ("Fuse", "Strip") or description.get("stop", 0) > 0:
                return None
            is_fused = True
        elif kind == "ByteLevel":
            encode, is_fused = byte_level_bytes, True
        elif encode is not None:
            return None
        elif kind == "ByteFallback":
            encode = _fallback_bytes
        elif kind == "BPEDecoder" and description["suffix"]:
            changes.append(_without_suffix(description["suffix"]))
        elif kind in ("Metaspace", "WordPiece", "Replace") or (
            kind == "Strip" and description["stop"] == 0
        ):
            changes.append(later_piece(description))
        else:
            return None

    def spell(piece: str) -> bytes:
        for change in changes:
            piece = change(piece)
        return piece.encode() if encode is None else encode(piece)

    return spell


def _without_suffix(suffix: str) -> Callable[[str], str]:
    return lambda piece: piece.replace(suffix, " ")


def _fallback_bytes(piece: str) -> bytes:
    byte = fallback_byte(piece)
    return piece.encode() if byte is None else bytes([byte])
