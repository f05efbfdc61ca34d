"""Token ids to text a few at a time, equal to decoding them all at once.

A tokenizer's decoder is a chain of small steps over token strings ("pieces"). Each that can work
piece by piece stands here as a `_Step`; together they form a `StreamingDetokenizer`. Where one can
change text that is long past (a regular expression over the whole text, CTC), nothing is final
before the end, and `BufferedDetokenizer` decodes once, there.

Why not DecodeStream of `tokenizers` (0.23): it returns text that later tokens change. With Llama
2's decoder <0x41> <0xC3> is two replacement characters, of which it makes "A"; at the next piece
it raises "Invalid prefix encountered", and a model may sample any bytes. What is held back where
a text ends, as half a character, it never gives.
"""

from __future__ import annotations

import codecs
import copy
import json
import os.path
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Protocol

from tokenizers import decoders

PieceOf = Callable[[int], "str | None"]
"""The string of a token id; None where decoding skips it: a special token, or no token at all."""

_NO_TOKENS: Mapping[int, str] = MappingProxyType({})

_ANCHOR = "a"  # stands before a piece to show what the piece is decoded to when it is not the first

_BYTE_PIECE = re.compile("<0x([0-9A-Fa-f]{2})>")

_CACHED_PIECES = 1 << 18  # all of Gemma's 256,000, the largest vocabulary of a supported family
_CACHED_RESULTS = 1 << 16  # of one decoder, which has two such caches: a guess


class _Detokenizer:
    """One request's output as text, which goes on where the text of its prompt ends.

    The joined results of every `append` and of the final `flush` are the one-shot decode of prompt
    and output, less that of the prompt, however the ids were split. Where the output changes the
    end of the prompt's text (it completes a character that was cut in two), it is less what both
    texts begin with, and `prompt_text` is no more than that.

    hidden_tokens  the special tokens, which decoding leaves out, by id
    prompt_text    what the prompt is decoded to; may still lose its end to the first text of the
                   output
    """

    def __init__(self, hidden_tokens: Mapping[int, str]) -> None:
        self.hidden_tokens = hidden_tokens
        self.prompt_text = ""
        self._announced = ""  # text that was returned, though the decoder still holds it back
        self._is_prompts = True  # whose text that is

    def append(self, token_ids: Sequence[int]) -> str:
        """Returns the text that became final with these tokens; may be ""."""
        text = self._decode(token_ids)
        if not self._announced:
            return text
        num_announced = _num_shared(text, self._announced)
        if num_announced == len(text):
            self._announced = self._announced[num_announced:]
        else:
            self._take_back(num_announced)
            self._announced = ""
        return text[num_announced:]

    def settle(self) -> str:
        """Returns the text that is held back, as it would be if the output ended here.

        The output may go on; a later token that would have changed this text no longer does.
        """
        pending = self._decode_pending()
        num_announced = _num_shared(pending, self._announced)
        self._take_back(num_announced)
        self._announced = pending
        if num_announced < len(pending):
            self._is_prompts = False
        return pending[num_announced:]

    def flush(self) -> str:
        """Returns what is left at the end."""
        return self.settle()

    def _begin(self, prompt_token_ids: Sequence[int]) -> None:
        self.prompt_text = self._decode(prompt_token_ids)
        self._announced = self._decode_pending()
        self.prompt_text += self._announced

    def _take_back(self, num_kept: int) -> None:
        """Cuts announced text that will not come off the prompt's text, if it belonged to that."""
        if self._is_prompts:
            num_lost = len(self._announced) - num_kept
            self.prompt_text = self.prompt_text[: len(self.prompt_text) - num_lost]

    def _decode(self, token_ids: Sequence[int]) -> str:
        """Returns the text that became final with these tokens."""
        raise NotImplementedError

    def _decode_pending(self) -> str:
        """Returns the text that is held back, as it would be if nothing followed."""
        raise NotImplementedError


def _num_shared(text: str, other: str) -> int:
    """Returns how many characters two texts begin with alike."""
    return len(os.path.commonprefix((text, other)))


class StreamingDetokenizer(_Detokenizer):
    """Decodes an output as it comes; work per token is bounded by the token's length.

    Text is returned as soon as no later token can change it: an incomplete character waits for its
    last byte, and a run of byte pieces (byte fallback) for its end, since one bad byte turns all of
    a run into replacement characters.
    """

    def __init__(
        self,
        piece: PieceOf,
        steps: Sequence[_Step],
        prompt_token_ids: Sequence[int] = (),
        hidden_tokens: Mapping[int, str] = _NO_TOKENS,
    ) -> None:
        super().__init__(hidden_tokens)
        self._piece = piece
        self._steps = steps
        if prompt_token_ids:
            self._begin(prompt_token_ids)

    def _decode(self, token_ids: Sequence[int]) -> str:
        pieces: Iterable[str] = [
            piece for token_id in token_ids if (piece := self._piece(token_id)) is not None
        ]
        for step in self._steps:
            pieces = step.push(pieces)
        return "".join(pieces)

    def _decode_pending(self) -> str:
        pieces: list[str] = []
        for step in map(copy.copy, self._steps):
            pieces = [*step.push(pieces), *step.finish()]
        return "".join(pieces)


class BufferedDetokenizer(_Detokenizer):
    """Keeps all ids until `flush`: for decoders whose text may depend on any later token."""

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        prompt_token_ids: Sequence[int] = (),
        hidden_tokens: Mapping[int, str] = _NO_TOKENS,
    ) -> None:
        super().__init__(hidden_tokens)
        self._decode_all = decode
        self._token_ids: list[int] = []
        if prompt_token_ids:
            self._begin(prompt_token_ids)

    def _decode(self, token_ids: Sequence[int]) -> str:
        self._token_ids += token_ids
        return ""

    def _decode_pending(self) -> str:
        return self._decode_all(self._token_ids)


def streaming_steps(decoder: decoders.Decoder | None) -> Callable[[], list[_Step]] | None:
    """Returns a factory of steps that do what `decoder` does; None where that cannot stream."""
    if decoder is None:
        return lambda: [_Spaced()]
    factories: list[Callable[[], _Step]] = []
    is_fused = False  # all pieces so far are one text, which later steps see in fragments
    for description in flatten(json.loads(decoder.__getstate__())):
        kind = description["type"]
        factory = (_fused_step if is_fused else _piece_step)(kind, description)
        if factory is None:
            return None
        factories.append(factory)
        is_fused = is_fused or kind in ("Fuse", "ByteLevel")
    return lambda: [factory() for factory in factories]


def flatten(description: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the decoders of a description, in order, without the sequences around them."""
    if description["type"] != "Sequence":
        return [description]
    return [leaf for child in description["decoders"] for leaf in flatten(child)]


def _piece_step(kind: str, description: dict[str, Any]) -> Callable[[], _Step] | None:
    """Returns a step over separate pieces; None where there is none that can stream."""
    if kind == "ByteLevel":
        return _ByteLevel
    if kind == "ByteFallback":
        return _ByteFallback
    if kind == "Fuse":
        return _Unchanged
    if kind == "BPEDecoder" and description["suffix"]:
        return lambda: _WordSuffix(description["suffix"])
    if kind == "Strip" and description["stop"] > 0:
        return None  # the library fails on a piece of nothing but stripped characters
    if kind in ("Metaspace", "WordPiece", "Replace", "Strip"):
        single = _library_decoder(description)
        first = lru_cache(maxsize=_CACHED_RESULTS)(lambda piece: single.decode([piece]))
        later = lru_cache(maxsize=_CACHED_RESULTS)(later_piece(description))
        return lambda: _EachPiece(first, later)
    return None


def later_piece(description: dict[str, Any]) -> Callable[[str], str]:
    """Returns what a decoder that works piece by piece makes of a piece that is not the first."""
    decoder = _library_decoder(description)
    anchor_length = len(decoder.decode([_ANCHOR]))
    return lambda piece: decoder.decode([_ANCHOR, piece])[anchor_length:]


def _fused_step(kind: str, description: dict[str, Any]) -> Callable[[], _Step] | None:
    """Returns a step over one text that arrives in fragments; None where none can stream."""
    if kind == "Fuse":
        return _Unchanged
    if kind == "Strip" and description["stop"] == 0:
        return lambda: _StripStart(description["content"], description["start"])
    if kind == "Replace" and description["pattern"].get("String"):
        return lambda: _ReplaceText(description["pattern"]["String"], description["content"])
    return None


def _library_decoder(description: dict[str, Any]) -> decoders.Decoder:
    decoder = decoders.Fuse()
    decoder.__setstate__(json.dumps(description).encode())
    return decoder


class _Step(Protocol):
    """What it holds back is no object that changes, so that a copy of it goes its own way."""

    def push(self, pieces: Iterable[str]) -> Iterable[str]:
        """Returns what no later piece can change; a long prompt comes as one call."""

    def finish(self) -> Iterable[str]:
        """Returns what is held back."""


class _Unchanged:
    def push(self, pieces: Iterable[str]) -> Iterable[str]:
        return pieces

    def finish(self) -> Iterable[str]:
        return ()


class _Spaced(_Unchanged):
    """No decoder at all: the library joins the pieces with spaces."""

    def __init__(self) -> None:
        self._is_first = True

    def push(self, pieces: Iterable[str]) -> Iterable[str]:
        spaced = [f" {piece}" for piece in pieces]
        if spaced and self._is_first:
            spaced[0] = spaced[0][1:]
            self._is_first = False
        return spaced


class _EachPiece(_Unchanged):
    """A step whose result for a piece depends only on the piece and on whether it is the first."""

    def __init__(self, first: Callable[[str], str], later: Callable[[str], str]) -> None:
        self._first = first
        self._later = later
        self._is_first = True

    def push(self, pieces: Iterable[str]) -> Iterable[str]:
        first, later = [], list(pieces)
        if later and self._is_first:
            first = [self._first(later.pop(0))]
            self._is_first = False
        return [*first, *map(self._later, later)]


class _ByteLevel:
    """GPT-2's alphabet: a printable character for each byte; all pieces' bytes are one text."""

    def __init__(self) -> None:
        self._rest = b""  # a character's beginning

    def push(self, pieces: Iterable[str]) -> Iterable[str]:
        data = b"".join([byte_level_bytes(piece) for piece in pieces])
        if self._rest:
            data = self._rest + data
        text, num_read = codecs.utf_8_decode(data, "replace", False)
        self._rest = data[num_read:]
        return (text,)

    def finish(self) -> Iterable[str]:
        rest, self._rest = self._rest, b""
        return (rest.decode(errors="replace"),)


@lru_cache(maxsize=_CACHED_PIECES)
def byte_level_bytes(piece: str) -> bytes:
    """Returns the bytes of a piece in GPT-2's alphabet."""
    try:
        return bytes(_BYTE_OF_CHARACTER[character] for character in piece)
    except KeyError:  # an added token is kept as it is written
        return piece.encode()


def _byte_of_character() -> dict[str, int]:
    """Returns GPT-2's table: printable Latin-1 is itself, other bytes are U+0100 and on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(0x100 + index): byte for index, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_of_character()


class _ByteFallback:
    """Pieces such as <0xE2> are bytes. A run of them is a text if all of it is valid UTF-8; else
    each of its bytes becomes a replacement character."""

    def __init__(self) -> None:
        self._run = b""

    def push(self, pieces: Iterable[str]) -> Iterable[str]:
        for piece in pieces:
            byte = fallback_byte(piece)
            if byte is None:
                yield from self.finish()
                yield piece
            else:
                self._run += bytes((byte,))

    def finish(self) -> Iterable[str]:
        if not self._run:
            return ()
        run, self._run = self._run, b""
        try:
            return (run.decode(),)
        except UnicodeDecodeError:
            return ("\ufffd",) * len(run)


@lru_cache(maxsize=_CACHED_PIECES)
def fallback_byte(piece: str) -> int | None:
    """Returns the byte of a piece such as <0xE2>; None for any other."""
    match = _BYTE_PIECE.fullmatch(piece)
    return int(match[1], 16) if match else None


class _WordSuffix:
    """A mark such as </w> at a word's end is a space, but nothing in the last piece of all."""

    def __init__(self, suffix: str) -> None:
        self._suffix = suffix
        self._last: str | None = None

    def push(self, pieces: Iterable[str]) -> Iterable[str]:
        for piece in pieces:
            if self._last is not None:
                yield self._last.replace(self._suffix, " ")
            self._last = piece

    def finish(self) -> Iterable[str]:
        return () if self._last is None else (self._last.replace(self._suffix, ""),)


class _StripStart(_Unchanged):
    """Removes up to `count` characters `content` from the start of the text."""

    def __init__(self, content: str, count: int) -> None:
        self._content = content
        self._count = count

    def push(self, pieces: Iterable[str]) -> Iterable[str]:
        if not self._count:
            return pieces
        text = "".join(pieces)
        while self._count and text:
            if not text.startswith(self._content):
                self._count = 0
                break
            text = text[len(self._content) :]
            self._count -= 1
        return (text,)


class _ReplaceText:
    """Replaces every `pattern` in a text, also where it is spread over fragments."""

    def __init__(self, pattern: str, content: str) -> None:
        self._pattern = pattern
        self._content = content
        self._rest = ""

    def push(self, pieces: Iterable[str]) -> Iterable[str]:
        *parts, tail = "".join([self._rest, *pieces]).split(self._pattern)
        num_kept = next(
            length
            for length in range(min(len(self._pattern) - 1, len(tail)), -1, -1)
            if self._pattern.startswith(tail[len(tail) - length :])
        )
        self._rest = tail[len(tail) - num_kept :]
        return (self._content.join([*parts, tail[: len(tail) - num_kept]]),)

    def finish(self) -> Iterable[str]:
        return (self._rest,)
