"""Many requests on fused kernels: each is told, bit for bit, what it is told alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.bits.asked import Asked, Material, ask
from benchmarks.bits.crowd import run_crowd
from benchmarks.bits.faults import different
from benchmarks.bits.pairs import MODELS, fused_pair, source_material
from benchmarks.bits.trial import LoneRuns, Outcome, try_pair
from specpipe.checkpoints.parallel_draft import ParallelDraft
from specpipe.runtimes.pair.pair import PairOptions
from specpipe.runtimes.pair.room import Room
from specpipe.runtimes.torch.fused.engine import FusedEngine
from specpipe.runtimes.torch.fused.rounds import FusedRounds
from specpipe.runtimes.torch.fused.weights import load_weights
from specpipe.runtimes.torch.fused_sizes import PAGE, SHORT_PROMPT
from specpipe.runtimes.torch.model_shape import ModelConfig
from specpipe.runtimes.torch.pair import fused_pair_of
from specpipe.speculative.request import Request
from specpipe.text.tokenizer import Tokenizer
from tests.runtimes.torch.fused.test_prompt import cached
from tests.runtimes.torch.fused.toy import DEVICE, toy_config, toy_spec, toy_weights
from tests.speculative.table import WordDetokenizer

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::RuntimeWarning")

TEXT = np.random.default_rng(3).integers(0, 64, 2_000).tolist()
ONE_LAYER = toy_config(num_layers=1, num_heads=2, num_kv_heads=1)
LARGER = toy_config(
    hidden_size=128, intermediate_size=256, num_layers=3, num_kv_heads=2, head_size=32
)
MANY = PairOptions(
    num_draft_tokens=8,
    prompt_lookup=True,
    max_batch_size=32,
    max_seq_len=664,
    max_num_tokens=256,
)
PARALLEL = ParallelDraft(mask_token_id=60)


def engine(
    config: ModelConfig,
    options: PairOptions,
    dtype: torch.dtype,
    *,
    short_prompt: int,
    noise: float = 0.0,
    num_pages: int | None = None,
) -> FusedEngine:
    weights = toy_weights(config, seed=1)
    head = weights["head.weight"]
    head += noise * torch.randn(head.shape, generator=torch.Generator().manual_seed(3)).to(head)
    spec = toy_spec(
        config,
        max_batch_size=options.max_batch_size,
        max_seq_len=options.max_seq_len,
        max_draft_len=options.num_draft_tokens,
    )
    if num_pages is not None:
        spec = replace(spec, kv_cache_tokens=PAGE * num_pages)
    rounded = {name: tensor.to(dtype) for name, tensor in weights.items()}
    with torch.inference_mode():
        return FusedEngine(
            replace(spec, dtype=dtype), load_weights(config, rounded.get), short_prompt=short_prompt
        )


def tried(
    config: ModelConfig,
    options: PairOptions,
    *,
    number: int,
    max_prompt_tokens: int,
    max_tokens: int,
    seed: int = 23,
    short_prompt: int = SHORT_PROMPT,
    dtype: torch.dtype = torch.float32,
) -> Outcome:
    """What comes of a target that is its own draft, but for a head that is disturbed."""
    material = Material(
        text=TEXT,
        num_questions=-(-number // 2),
        max_prompt_tokens=max_prompt_tokens,
        max_tokens=max_tokens,
        max_num_draft_tokens=options.num_draft_tokens,
        vocab_size=config.vocab_size,
        end_token_ids=frozenset({5}),
        stop_strings=("w17 ", "9 w2"),
    )
    pair = fused_pair_of(
        engine(config, options, dtype, short_prompt=short_prompt, noise=0.15),
        engine(config, options, dtype, short_prompt=short_prompt),
        options,
        lambda prompt, **_: WordDetokenizer(),
    )
    return try_pair(pair, ask(seed, number, material), vocab_size=config.vocab_size)


@pytest.mark.parametrize(
    ("number", "num_draft_tokens", "max_prompt_tokens", "seed", "parallel"),
    [
        (4, 2, 6, 7665, None),  # all three ways to draw, penalties and a prediction
        (4, 2, 6, 7665, PARALLEL),
        pytest.param(24, 4, 20, 23, None, marks=pytest.mark.slow),
        pytest.param(24, 8, 20, 23, PARALLEL, marks=pytest.mark.slow),
        # Some name more draft tokens than rounds have.
        pytest.param(12, 17, 20, 23, None, marks=pytest.mark.slow),
    ],
)
def test_requests_that_come_and_go_are_told_what_each_is_alone(
    number: int,
    num_draft_tokens: int,
    max_prompt_tokens: int,
    seed: int,
    parallel: ParallelDraft | None,
) -> None:
    options = PairOptions(
        num_draft_tokens=num_draft_tokens,
        adaptive=False,
        max_batch_size=3,
        max_seq_len=40,
        max_num_tokens=16,
        parallel=parallel,
    )
    outcome = tried(
        ONE_LAYER,
        options,
        number=number,
        max_prompt_tokens=max_prompt_tokens,
        max_tokens=number,
        seed=seed,
        short_prompt=max_prompt_tokens // 2,
    )
    assert outcome.is_right, outcome.report()
    counts = outcome.counts()
    assert counts["most at once"] >= 2
    assert counts["draft tokens"] > 0


def asked_of_little_memory() -> list[Asked]:
    """Three requests that need a third page, and have the first alike, and one that leaves rounds
    to them.
    """
    page_and_more = TEXT[:77]  # than what rounds may read again
    prompts = [(*page_and_more, *TEXT[start:][:42]) for start in (200, 300)]
    rows: list[tuple[int, int, dict[str, Any]]] = [
        (0, 0, {"num_draft_tokens": 1}),
        (1, 1, {"num_draft_tokens": 1}),
        (0, 1, {"num_draft_tokens": 3}),
        (4, 0, {"num_draft_tokens": 3, "return_log_probs": True, "max_tokens": 4}),
    ]
    return [
        Asked(
            Request(
                **{
                    "request_id": str(number),
                    "prompt_token_ids": prompts[prompt],
                    "max_tokens": 12,
                    **settings,
                }
            ),
            "of little memory",
            steps_after,
            cancelled_after=6 if number == 2 else None,
        )
        for number, (steps_after, prompt, settings) in enumerate(rows)
    ]


@pytest.mark.parametrize(
    ("target_pages", "reuses"),
    [
        (5, True),
        pytest.param(6, True, marks=pytest.mark.slow),  # then a draft loses its room in rounds
        pytest.param(5, False, marks=pytest.mark.slow),
    ],
)
def test_who_gives_way_is_told_what_it_is_alone(
    target_pages: int, reuses: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nothing that was read of masks, or by rounds, is in a page that others begin with.

    The draft is the target: the first of its draft tokens always stands.
    """
    lost: list[int] = []
    lose_draft = FusedRounds.lose_draft

    def counted(rounds: FusedRounds, target_sequence: int) -> None:
        lost.append(target_sequence)
        lose_draft(rounds, target_sequence)

    monkeypatch.setattr(FusedRounds, "lose_draft", counted)
    monkeypatch.setattr(Room, "AHEAD", 0)
    # Steps that follow from times would be others on a GPU, where memory then sufficed.
    monkeypatch.setattr(FusedRounds, "measure", lambda rounds: None)
    mask = PARALLEL.mask_token_id
    options = PairOptions(
        num_draft_tokens=3,
        adaptive=False,
        max_batch_size=3,
        max_seq_len=132,
        max_num_tokens=256,
        prefix_reuse=reuses,
        unused_token_ids=((mask, mask + 1),),
        parallel=PARALLEL,
    )
    config = toy_config(num_layers=1, num_heads=1, num_kv_heads=1)
    draft, target = (
        engine(config, options, torch.float32, short_prompt=20, num_pages=num_pages)
        for num_pages in (6, target_pages)
    )
    pair = fused_pair_of(draft, target, options, lambda prompt, **_: WordDetokenizer())
    asked, lone_runs = asked_of_little_memory(), LoneRuns(pair)
    crowd = run_crowd(pair, asked, max_waiting=len(asked))
    occupancy = pair.occupancy()
    assert all(use.num_tokens == 0 for use in occupancy.kv_caches.values())
    assert lost or occupancy.preempted.num_tokens > 0
    assert bool(lost) == (target_pages == 6)
    for one in (draft, target):
        found, wanted = (read_again(one, salt) for salt in ("", "another"))
        assert found[0] == PAGE * reuses and wanted[0] == 0
        assert torch.equal(found[1], wanted[1])
    num_reused = 0
    for each in asked:
        told = crowd.of(each.request.request_id)
        expected = lone_runs.of(each.request, is_cancelled=told.reason == "cancelled")
        assert different(each, told, expected) is None
        assert told.last is not None and told.last.statistics is not None
        assert told.last.statistics.acceptance_histogram is not None
        assert told.last.statistics.acceptance_histogram[0] == 0
        num_reused += told.last.statistics.num_cached_input_tokens
    assert (num_reused > 0) == reuses


def read_again(engine: FusedEngine, salt: str) -> tuple[int, torch.Tensor]:
    """How many tokens of the first prompt were cached, and its keys and values."""
    prompt = asked_of_little_memory()[0].request.prompt_token_ids
    sequence = engine.allocate(prompt_length=len(prompt), max_tokens=1)
    num_cached = engine.reuse(sequence, prompt, salt)
    assert engine.grow(sequence, len(prompt))
    engine.forward([(sequence, prompt[num_cached:-1])], [0])
    found = cached(engine, sequence)
    engine.free(sequence)
    return num_cached, found


@pytest.mark.gpu
@pytest.mark.parametrize("parallel", [None, PARALLEL])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_three_hundred_requests_of_a_toy(
    dtype: torch.dtype, parallel: ParallelDraft | None
) -> None:
    options = replace(MANY, parallel=parallel)
    outcome = tried(LARGER, options, number=300, max_prompt_tokens=600, max_tokens=64, dtype=dtype)
    assert outcome.is_right, outcome.report()
    assert outcome.counts()["most at once"] >= 16


@pytest.mark.gpu
@pytest.mark.parametrize("is_adaptive", [False, True])
def test_three_hundred_requests_of_the_small_pair(is_adaptive: bool) -> None:
    """And what of a pair only a tokenizer gives: guides, and texts that repeat themselves."""
    tokenizer = Tokenizer.load(MODELS / "target")
    options = replace(MANY, adaptive=is_adaptive, prompt_lookup=is_adaptive)
    pair = fused_pair(None, options, tokenizer, device=DEVICE, dtype=torch.bfloat16)
    material = source_material(
        tokenizer,
        num_questions=150,
        max_prompt_tokens=600,
        max_tokens=64,
        max_num_draft_tokens=options.num_draft_tokens,
    )
    outcome = try_pair(pair, ask(23, 300, material), vocab_size=material.vocab_size)
    assert outcome.is_right, outcome.report()
    assert outcome.counts()["most at once"] >= 16
