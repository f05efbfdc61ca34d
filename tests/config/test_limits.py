"""The limits of requests, and that no prompt which fits the context is too large for them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import models, normalizers, pre_tokenizers

from specpipe.config.limits import Limits
from specpipe.text.files import TokenizerParts
from specpipe.text.tokenizer import Tokenizer
from tests import toy_tokenizers

ROOT = Path(__file__).parents[2]


def tokenizer(backend: Backend) -> Tokenizer:
    return Tokenizer(TokenizerParts(backend, None, None, None, frozenset(), None))


def max_prompt_bytes(made: Tokenizer, max_seq_len: int) -> int:
    return (
        Limits()
        .resolved(
            max_seq_len=max_seq_len,
            longest_token_bytes=made.longest_token_bytes,
            is_bytewise=made.is_bytewise,
        )
        .max_prompt_bytes
    )


def test_defaults_follow_the_context_and_the_tokenizer() -> None:
    """The longest token of the quickstart pair, a run of spaces, has 82 bytes in its file."""
    made = Tokenizer.load(ROOT / "models" / "python-code" / "target")
    assert made.is_bytewise
    served = Limits().resolved(
        max_seq_len=1024, longest_token_bytes=made.longest_token_bytes, is_bytewise=True
    )
    assert served.max_prompt_bytes == 1024 * 82
    assert served.max_messages_bytes == 3 * 1024 * 82 + 65536
    assert max_prompt_bytes(made, 131072) == 2 << 20


def test_a_number_in_the_yaml_is_the_number() -> None:
    limits = Limits(max_prompt_bytes=5_000_000, max_words=3)
    served = limits.resolved(max_seq_len=16, longest_token_bytes=1, is_bytewise=True)
    assert (served.max_prompt_bytes, served.max_words, served.max_seq_len) == (5_000_000, 3, 16)


def decomposing() -> Backend:
    """Its tokens are composed letters: what is typed as three jamo is one token of 3 bytes."""
    backend = Backend(models.WordLevel({"한": 0, "a": 1, "é": 2}))
    backend.normalizer = normalizers.NFKC()
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return backend


@pytest.mark.parametrize(
    ("backend", "pieces"),
    [
        (toy_tokenizers.words(), ["w100 ", "<eos> "]),
        (toy_tokenizers.byte_level(merges=(("a", "b"), ("ab", "ab"))), ["abab", "é", " "]),
        (toy_tokenizers.space_mark(), [" learning", "é", "  "]),
        (decomposing(), ["\u1112\u1161\u11ab", "\U0001d41a", "ａ", "e\u0301"]),
    ],
    ids=["words", "byte_level", "space_mark", "normalized"],
)
@settings(max_examples=50)
@given(data=st.data())
def test_no_prompt_that_fits_is_too_large(
    backend: Backend, pieces: list[str], data: st.DataObject
) -> None:
    made = tokenizer(backend)
    text = "".join(data.draw(st.lists(st.sampled_from(pieces), min_size=1, max_size=40)))
    num_tokens = len(made.encode(text))
    assert len(text.encode()) <= max_prompt_bytes(made, num_tokens + 1)


def test_the_docs_have_every_limit_with_its_default() -> None:
    docs = (ROOT / "docs" / "limits.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `(\w+)` \| ([^|]+?) \| .+ \|$", docs, re.MULTILINE))
    assert rows.keys() == Limits.model_fields.keys()
    for name, value in Limits().model_dump().items():
        if value is not None:
            assert float(rows[name].replace(",", "")) == value, name
