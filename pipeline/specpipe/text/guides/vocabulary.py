"""A vocabulary as llguidance takes it: the bytes of each token, and how a text is tokenized."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from llguidance import LLTokenizer, TokenizerWrapper

SPECIAL = b"\xff"
"""Begins the bytes of a special token, which no text spells (toktrie's marker)."""

_MOST_ENCODED = 1024
"""Bytes of a forced text whose tokens are the tokenizer's own. It is asked again for each token,
and only the first ones matter: behind them, long tokens are taken before short ones.
"""


class _Vocabulary:
    """What `TokenizerWrapper` wraps.

    A text that a grammar forces gets the tokens that the tokenizer would give it. Where these do
    not spell it (a normalizer, a special token's string), long tokens are taken before short ones.
    """

    bos_token_id = None

    def __init__(self, tokens: Sequence[bytes], encode: Callable[[str], list[int]] | None) -> None:
        self.tokens, self._encode = tokens, encode
        self.eos_token_id = len(tokens) - 1
        self.special_token_ids = [i for i, t in enumerate(tokens) if t.startswith(SPECIAL)]
        self.trie: LLTokenizer | None = None

    def __call__(self, text: bytes) -> list[int]:
        if self.trie is None:
            return []  # asked while it is wrapped
        head = b""
        token_ids: list[int] = []
        if self._encode is not None:
            part = text[:_MOST_ENCODED].decode(errors="ignore")
            head, token_ids = part.encode(), self._encode(part)
            if b"".join(self.tokens[i] for i in token_ids) != head:
                head, token_ids = b"", []
        return [*token_ids, *self.trie.greedy_tokenize(text[len(head) :].decode())]


def make_tokenizer(
    tokens: Sequence[bytes], encode: Callable[[str], list[int]] | None = None
) -> LLTokenizer:
    """Returns the tokenizer of a vocabulary whose last token is its end.

    `encode` gives a text inside an output its tokens; None: long tokens are taken before short
    ones.
    """
    vocabulary = _Vocabulary(tokens, encode)
    vocabulary.trie = LLTokenizer(TokenizerWrapper(vocabulary))
    return vocabulary.trie
