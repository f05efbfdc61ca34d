"""How tests get at the package `tensorrt_llm` of this folder, and pairs over rules with it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from specpipe.runtimes.pair.pair import PairOptions
from specpipe.runtimes.tensorrt_llm.llmapi.llm_pair import LlmPair
from specpipe.speculative.request import Detokenizer
from tests.runtimes.table_engine import HasLogits, make_pair
from tests.speculative.table import WordDetokenizer
from tests.tensorrt_llm_stand_ins.llm_api_lines import VERSION_VARIABLE, VERSIONS

FOLDER = Path(__file__).parent


@contextmanager
def installed(version: str = VERSIONS["1.2"]) -> Iterator[ModuleType]:
    """Makes `import tensorrt_llm` find the fake of a release, and forgets it afterwards."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VERSION_VARIABLE, version)
        patch.syspath_prepend(str(FOLDER))
        import tensorrt_llm

        yield tensorrt_llm
    for name in [n for n in sys.modules if n.partition(".")[0] == "tensorrt_llm"]:
        del sys.modules[name]


def runtime_settings(**changes: Any) -> dict[str, Any]:
    return {
        "backend": "pytorch",
        "tensorrt_llm": "1.2.1",
        "acceptance": "exact",
        "target_gpu_ids": None,
        "draft_vocab_size": 104,
        "target_vocab_size": 104,
        **changes,
    }


@contextmanager
def table_pair(
    fake: ModuleType,
    tmp_path: Path,
    target: HasLogits,
    draft: HasLogits,
    *,
    num_draft_tokens: int = 4,
    settings: dict[str, Any] | None = None,
    speculative_config: dict[str, Any] | None = None,
    detokenizer: Callable[[Sequence[int]], Detokenizer] = lambda prompt, **_: WordDetokenizer(),
    **options: Any,
) -> Iterator[LlmPair]:
    """An LlmPair over a fake LLM whose models are rules."""
    limits = {"max_batch_size": 4, "max_seq_len": 500, **options}
    fake.engines.make_pair = lambda *folders, **arguments: make_pair(
        target,
        draft,
        adaptive=False,
        max_queue_size=10**6,
        **{**arguments, "max_batch_size": 64},
    )
    settings = settings or runtime_settings(tensorrt_llm=fake.__version__)
    speculative = fake.llmapi.DraftTargetDecodingConfig(
        max_draft_len=num_draft_tokens or 1,
        **{fake.llmapi.HERE.draft_names[0]: str(tmp_path)},
        **(speculative_config or {}),
    )
    llm = fake.LLM(
        tmp_path,
        max_batch_size=limits["max_batch_size"],
        max_seq_len=limits["max_seq_len"],
        max_num_tokens=64,
        enable_chunked_prefill=True,
        **({"speculative_config": speculative} if num_draft_tokens else {}),
    )
    pair = LlmPair(
        llm,
        fake.SamplingParams,
        PairOptions(
            num_draft_tokens=num_draft_tokens,
            runtime_settings=settings,
            **limits,
        ),
        detokenizer,
    )
    try:
        yield pair
    finally:
        pair.close()
