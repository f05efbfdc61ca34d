"""What the fake executor runs: the torch runtime on Hugging Face checkpoints."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from specpipe.runtimes.pair.engine_pair import EnginePair
from specpipe.runtimes.pair.pair import PairOptions
from specpipe.runtimes.torch.pair import load_pair
from tests.runtimes.torch.engines import build_engine


class Visible:
    """A detokenizer that gives every token a text of its own, so that each is streamed at once."""

    hidden_tokens: Mapping[int, str] = MappingProxyType({})
    prompt_text = ""

    def settle(self) -> str:
        return ""

    def append(self, token_ids: Sequence[int]) -> str:
        return "x" * len(token_ids)

    def flush(self) -> str:
        return ""


def options(**settings: Any) -> PairOptions:
    """The executor queues without limit and never gives up a request."""
    return PairOptions(
        adaptive=False, num_threads=1, max_queue_size=10**6, request_timeout_s=1e6, **settings
    )


def make_pair(target: Path, draft: Path | None, **settings: Any) -> EnginePair:
    """Converts and loads both; without a draft the target stands for it and never drafts."""
    limits = {name: settings[name] for name in ("max_batch_size", "max_seq_len", "max_num_tokens")}
    with tempfile.TemporaryDirectory() as work:
        folders = [
            build_engine(checkpoint, Path(work) / role, **limits)
            for role, checkpoint in (("draft", draft or target), ("target", target))
        ]
        return load_pair(*folders, options(**settings), lambda prompt, **_: Visible())
