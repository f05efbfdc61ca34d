"""Finding and starting Triton: what stops it from being ready, said in one sentence."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from specpipe.errors import ServerError
from specpipe.triton.server import server
from tests.toy_tokenizers import write_words


def test_a_model_that_does_not_load_is_one_sentence_with_the_reason(
    echo_repository: Callable[..., Path],
) -> None:
    folder = echo_repository()
    (folder / "preprocessing" / "1" / "model.py").write_text("import nothing_of_that_name\n")
    with (
        pytest.raises(ServerError, match="(?s)Triton did not start: .*nothing_of_that_name"),
        server.running(folder),
    ):
        pass


def test_a_first_request_that_fails_is_not_ready(echo_repository: Callable[..., Path]) -> None:
    folder = echo_repository(max_seq_len=1)
    with (
        pytest.raises(ServerError, match="the first request failed: the prompt has 1 tokens"),
        server.running(folder),
    ):
        pass


def test_a_server_is_ready_whatever_words_its_tokenizer_lacks(
    echo_repository: Callable[..., Path],
) -> None:
    folder = echo_repository()
    for tokenizer in folder.glob("*/1/tokenizer"):
        write_words(tokenizer)
    with server.running(folder) as running:
        assert running.version.repository == folder


def test_a_server_answers_probes_whatever_becomes_of_its_files(
    echo_repository: Callable[..., Path],
) -> None:
    folder = echo_repository()
    with server.running(folder) as running:
        (folder / "speculative" / "1" / "pair.json").unlink()
        running.probe()
