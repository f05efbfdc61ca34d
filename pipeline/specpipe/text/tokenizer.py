"""Text in and out: the checkpoint's own tokenizer, for serving, verification and benchmarks alike.

It needs neither transformers nor torch, and gives the ids that transformers gives, except that BOS
is never there twice, nor missing from a conversation whose model expects it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

import tokenizers

from specpipe.checkpoints.limits import FILE_LIMITS, FileLimits
from specpipe.errors import RequestError, show
from specpipe.text.chat_arguments import ChatArguments
from specpipe.text.detokenizer import BufferedDetokenizer, StreamingDetokenizer, streaming_steps
from specpipe.text.files import TokenizerParts, added_ends, is_library_fault, load_parts
from specpipe.text.guides.guides import Guides
from specpipe.text.spelling import speller

_DEFAULTS = ChatArguments()

_WITHOUT_PREFIX = {
    "Metaspace": ("prepend_scheme", "never"),
    "ByteLevel": ("add_prefix_space", False),
    "Prepend": ("prepend", ""),
}
"""What turns off the space that each of these parts of a tokenizer puts before a text."""


class Tokenizer:
    """One checkpoint's encoder, decoder and special ids; threads may share it.

    bos_token_id       the tokenizer's, else config.json's, else None; so eos_, pad_token_id
    end_token_ids      all that end a text: of config.json, generation_config.json, the tokenizer
    special_token_ids  those that decoding leaves out
    spare_token_ids    of these, those that neither begin nor end a text, as padding does not
    roles              where an id without a string may have its meaning from, by id
    chat_template      None when the checkpoint has none
    guides             what an answer may have to be
    """

    def __init__(self, parts: TokenizerParts, limits: FileLimits = FILE_LIMITS) -> None:
        self._backend = parts.backend
        self.bos_token_id = parts.bos_token_id
        self.eos_token_id = parts.eos_token_id
        self.pad_token_id = parts.pad_token_id
        self.end_token_ids = parts.end_token_ids
        self.chat_template = parts.chat_template
        self.roles = parts.roles
        added = self._backend.get_added_tokens_decoder()
        self._special_tokens = {i: token.content for i, token in added.items() if token.special}
        self.special_token_ids = frozenset(self._special_tokens)
        self.spare_token_ids = self.special_token_ids - {*self.end_token_ids, self.bos_token_id}
        self._adds_bos, _ = added_ends(self._backend, self.bos_token_id, self.eos_token_id)
        self._steps = streaming_steps(self._backend.decoder)
        self._pieces = {True: cache(self._find_piece), False: cache(self._backend.id_to_token)}
        self._spell = speller(self._backend.decoder)
        self.guides = Guides(self, limits)

    @classmethod
    def load(cls, folder: Path, limits: FileLimits = FILE_LIMITS) -> Tokenizer:
        """Reads the `TOKENIZER_FILES` of a checkpoint; CheckpointError names the file at fault."""
        return cls(load_parts(folder, limits), limits)

    def warm_up(self) -> None:
        """Starts what the first conversation would have to wait for."""
        if self.chat_template is not None:
            self.chat_template.warm_up()

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Encodes a prompt as the checkpoint's tokenizer does, with the special tokens it adds.

        A text that already begins with BOS, such as a rendered chat template, gets no second one.
        """
        token_ids = _encode(self._backend, text, add_special_tokens=add_special_tokens)
        if not add_special_tokens:
            return token_ids
        if self._adds_bos and token_ids[:2] == [self.bos_token_id] * 2:
            del token_ids[0]
        return token_ids

    def encode_messages(
        self,
        messages: list[dict[str, Any]],
        arguments: ChatArguments = _DEFAULTS,
        *,
        max_bytes: int | None = None,
    ) -> list[int]:
        """Encodes a conversation by the chat template, up to where the assistant's turn begins.

        Templates write their special tokens themselves; BOS is added if the tokenizer adds one to
        a prompt and the template did not. What the template made of the messages is refused when it
        has more than max_bytes.
        """
        if self.chat_template is None:
            raise RequestError(
                "messages: this model has no chat template; send text_input instead, or to the "
                "front door's /v1/completions a prompt"
            )
        rendered = self.chat_template.render(messages, arguments, max_bytes=max_bytes)
        token_ids = _encode(self._backend, rendered, add_special_tokens=False)
        if self._adds_bos and token_ids[:1] != [self.bos_token_id]:
            assert self.bos_token_id is not None  # what is added has an id
            token_ids.insert(0, self.bos_token_id)
        return token_ids

    def encode_fragment(self, text: str) -> list[int]:
        """Encodes text as it stands inside an output: no special tokens, no space put before it."""
        return _encode(self._fragment_backend, text, add_special_tokens=False)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Returns the whole text of these ids as the tokenizers library has it.

        transformers' `clean_up_tokenization_spaces`, which also removes spaces that the model
        wrote, is not applied.
        """
        return self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def detokenizer(
        self, prompt_token_ids: Sequence[int] = (), *, skip_special_tokens: bool = True
    ) -> StreamingDetokenizer | BufferedDetokenizer:
        """Returns a fresh detokenizer for one request's output.

        The text of an output goes on where the prompt's ends: what is joined is the decode of all
        ids less that of the prompt's. Without a prompt the output is a text of its own, whose first
        word a tokenizer may strip of its space.
        """
        hidden = self._special_tokens if skip_special_tokens else {}
        if self._steps is None:
            decode = partial(self.decode, skip_special_tokens=skip_special_tokens)
            return BufferedDetokenizer(decode, prompt_token_ids, hidden)
        piece = self._pieces[skip_special_tokens]
        return StreamingDetokenizer(piece, self._steps(), prompt_token_ids, hidden)

    def tokens(self) -> dict[int, str]:
        """Returns the string of every id that has one."""
        model = self._backend.get_vocab(with_added_tokens=False)
        added = self._backend.get_added_tokens_decoder()
        return {i: token for token, i in model.items()} | {i: t.content for i, t in added.items()}

    def token_bytes(self, token_id: int) -> bytes:
        """Returns the bytes that a token adds to a text which it does not begin.

        A special token has those of its string, which decoding leaves out; an id without a string,
        none. Unless `spells_tokens`, the bytes are those of the token decoded alone.
        """
        if token_id in self._special_tokens:
            return self._special_tokens[token_id].encode()
        piece = self._pieces[True](token_id)
        if piece is None:
            return b""
        if self._spell is None:
            return self._backend.decode([token_id]).encode()
        return self._spell(piece)

    @property
    def spells_tokens(self) -> bool:
        """Whether a text has the bytes of its tokens one after another, but for its first space."""
        return self._spell is not None

    @property
    def longest_token_bytes(self) -> int:
        """Bytes in UTF-8 of the longest token string, which no token's own text exceeds."""
        return max((len(token.encode()) for token in self.tokens().values()), default=1)

    @property
    def is_bytewise(self) -> bool:
        """Whether the tokens of a text have all its bytes: nothing is normalized or left out."""
        return self._backend.normalizer is None and isinstance(
            self._backend.decoder, tokenizers.decoders.ByteLevel
        )

    def is_used(self, token_id: int) -> bool:
        """Returns whether an id is used: it has a string, or a role in one of the files."""
        return token_id in self.roles or (
            0 <= token_id < 2**32 and self._backend.id_to_token(token_id) is not None
        )

    def _find_piece(self, token_id: int) -> str | None:
        if token_id in self.special_token_ids:
            return None
        return self._backend.id_to_token(token_id)

    @cached_property
    def _fragment_backend(self) -> tokenizers.Tokenizer:
        """The tokenizer less what puts a space before a text."""
        changed = {}
        for name in ("normalizer", "pre_tokenizer"):
            part = getattr(self._backend, name)
            state = None if part is None else json.loads(part.__getstate__())
            if (unprefixed := _without_prefix(state)) != state:
                part.__setstate__(json.dumps(unprefixed).encode())
                changed[name] = part
        if not changed:
            return self._backend
        backend = tokenizers.Tokenizer.from_str(self._backend.to_str())
        for name, part in changed.items():
            setattr(backend, name, part)
        return backend


def _encode(backend: tokenizers.Tokenizer, text: str, *, add_special_tokens: bool) -> list[int]:
    try:
        return backend.encode(text, add_special_tokens=add_special_tokens).ids
    except BaseException as exc:
        if not is_library_fault(exc):
            raise
        raise RequestError(f"the tokenizer cannot encode '{show(text)}': {show(exc)}") from exc


def _without_prefix(state: Any) -> Any:
    """Returns the description of a normalizer or pre-tokenizer with its prefix turned off."""
    if isinstance(state, list):
        return [_without_prefix(child) for child in state]
    if not isinstance(state, dict):
        return state
    state = {key: _without_prefix(value) for key, value in state.items()}
    if state.get("type") in _WITHOUT_PREFIX:
        key, value = _WITHOUT_PREFIX[state["type"]]
        state[key] = value
    return state
