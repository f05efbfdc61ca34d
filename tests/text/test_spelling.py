from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders

from specpipe.text.spelling import speller
from specpipe.text.tokenizer import Tokenizer
from tests import toy_tokenizers

QUICKSTART = Path(__file__).parents[2] / "models" / "python-code" / "target"


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (toy_tokenizers.byte_level, 'a {"é": "😀"}\n'),
        (toy_tokenizers.space_mark, "foo  end é😀 fun\n bar"),
        (toy_tokenizers.words, "w4 w5 w249"),
        (toy_tokenizers.word_piece, "unbelievable do not"),
    ],
)
def test_a_text_has_the_bytes_of_its_tokens(
    tmp_path: Path, make: Callable[[], Backend], text: str
) -> None:
    tokenizer = Tokenizer.load(toy_tokenizers.write_tokenizer(tmp_path, make()))
    assert tokenizer.spells_tokens
    ids = tokenizer.encode_fragment(text)
    spelled = b"".join(map(tokenizer.token_bytes, ids)).decode()
    assert spelled.removeprefix(" ") == tokenizer.decode(ids)
    assert len(spelled) >= len(text)


def test_half_a_character_is_its_bytes_and_a_special_token_its_string() -> None:
    tokenizer = Tokenizer.load(QUICKSTART)
    ids = tokenizer.encode_fragment("é😀")
    assert b"".join(map(tokenizer.token_bytes, ids)) == "é😀".encode()
    assert [tokenizer.token_bytes(i) for i in sorted(tokenizer.special_token_ids)] == [
        tokenizer.tokens()[i].encode() for i in sorted(tokenizer.special_token_ids)
    ]
    assert tokenizer.token_bytes(2**20) == b""


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.CTC(),
        decoders.Sequence([decoders.Fuse(), decoders.Replace("ab", "c")]),
        decoders.Strip(" ", 0, 1),
    ],
)
def test_tokens_whose_bytes_depend_on_others_are_not_spelled(decoder: decoders.Decoder) -> None:
    assert speller(decoder) is None
