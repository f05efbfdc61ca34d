"""A `BlsPair` over two stand-ins in this process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from specpipe.runtimes.pair.pair import DetokenizerFactory, PairOptions
from specpipe.runtimes.tensorrt_llm.engines.bls import BlsPair
from specpipe.runtimes.tensorrt_llm.engines.engine_calls import EngineModel
from specpipe.runtimes.tensorrt_llm.engines.engine_config import AcceptTest
from specpipe.speculative.request import RequestLimits
from tests.speculative.table import WordDetokenizer
from tests.tensorrt_llm_stand_ins.triton_backend.stand_in import EngineLimits, Scorer, StandInModel

MAX_SEQ_LEN = 500


def stand_ins(
    target: Scorer, draft: Scorer, *, draft_max_seq_len: int = MAX_SEQ_LEN, **scheduler: Any
) -> tuple[StandInModel, StandInModel]:
    """The models `draft` and `target`, for up to 8 draft tokens.

    scheduler  what it does with draft tokens, as EngineLimits has it
    """
    return (
        StandInModel("draft", draft, EngineLimits(draft_max_seq_len, gathers_logits=True)),
        StandInModel(
            "target",
            target,
            EngineLimits(MAX_SEQ_LEN, max_draft_len=8, is_decoupled=True, **scheduler),
        ),
    )


def make_bls_pair(
    draft: EngineModel,
    target: EngineModel,
    *,
    vocab_size: int = 104,
    draft_max_seq_len: int = MAX_SEQ_LEN,
    acceptance: AcceptTest = "exact",
    detokenizer: DetokenizerFactory = lambda prompt, **_: WordDetokenizer(),
    clock: Callable[[], float] | None = None,
    **options: Any,
) -> BlsPair:
    """The pair as `load_pair` makes it; options are those of PairOptions."""
    settings: dict[str, Any] = {
        "max_batch_size": 4,
        "max_seq_len": MAX_SEQ_LEN,
        "adaptive": False,
        **options,
    }
    made = PairOptions(**settings)
    return BlsPair(
        draft,
        target,
        made,
        RequestLimits(
            max_num_draft_tokens=made.num_draft_tokens,
            max_seq_len=made.max_seq_len,
            draft_max_seq_len=draft_max_seq_len - 1,
            vocab_size=vocab_size,
        ),
        detokenizer,
        acceptance=acceptance,
        **({"clock": clock} if clock else {}),
    )
