"""Rounds against plain greedy decoding, one token after the other on the plain engine.

Those of sampled requests are compared with single steps on the same engines.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch

from specpipe.runtimes.pair.engine_pair import EnginePair
from specpipe.runtimes.pair.pair import PairOptions
from specpipe.runtimes.pair.sampler import RoundResult
from specpipe.runtimes.pair.torch_sampler import TorchSampler
from specpipe.runtimes.torch.engine import TorchEngine
from specpipe.runtimes.torch.fused.engine import FusedEngine
from specpipe.runtimes.torch.fused.old_rounds import OldRounds
from specpipe.runtimes.torch.model_shape import ModelConfig
from specpipe.speculative.lookup import PromptLookup
from specpipe.speculative.request import GREEDY, Chunk, Request, Sampling
from tests.runtimes.table_engine import ids
from tests.runtimes.torch.fused.test_drawing import SETTINGS
from tests.runtimes.torch.fused.toy import DEVICE, toy_config, toy_engines
from tests.speculative.table import WordDetokenizer

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::RuntimeWarning")

PROMPT = [3, 60, 21, 7, 33, 12, 48]
TARGET = {"num_layers": 1, "num_heads": 2, "num_kv_heads": 1}
DRAFT = {"num_layers": 1, "num_heads": 1, "num_kv_heads": 1}


class Stream(NamedTuple):
    """Rounds of one sequence, which have begun, and the plain engine that tells what is right."""

    rounds: OldRounds
    draft: FusedEngine
    target: FusedEngine
    plain: TorchEngine
    draft_sequence: int
    target_sequence: int


def stream(
    draft: ModelConfig,
    target: ModelConfig,
    *,
    seeds: tuple[int, int] = (1, 1),
    vocab_size: int = 64,
    limits: dict[str, int] | None = None,
    draft_limits: dict[str, int] | None = None,
) -> Stream:
    """Seeds of the draft's weights and the target's; the same model and seed is its own draft."""
    draft_engine, _ = toy_engines(draft, seed=seeds[0], limits=draft_limits)
    target_engine, plain = toy_engines(target, seed=seeds[1], limits=limits)
    rounds = OldRounds(
        draft_engine, target_engine, num_draft_tokens=4, vocab_size=vocab_size, unused=[]
    )
    sequences = [
        engine.allocate(prompt_length=len(PROMPT), max_tokens=min(engine.max_seq_len, 120))
        for engine in (draft_engine, target_engine)
    ]
    begun = Stream(rounds, draft_engine, target_engine, plain, *sequences)
    begin(begun, PROMPT)
    return begun


def begin(on: Stream, text: Sequence[int], *, sampling: Sampling = GREEDY) -> None:
    for engine, sequence in (
        (on.draft, on.draft_sequence),
        (on.target, on.target_sequence),
    ):
        engine.truncate(sequence, 0)
        engine.forward([(sequence, text[:-1])], [0])
    on.rounds.begin(
        text,
        target_sequence=on.target_sequence,
        draft_sequence=on.draft_sequence,
        sampling=sampling,
    )


def own_draft() -> Stream:
    return stream(toy_config(**TARGET), toy_config(**TARGET))


def run(on: Stream, lengths: Sequence[int], *, is_copied: bool = False) -> list[RoundResult]:
    found = []
    for num_draft_tokens in lengths:
        on.rounds.launch(num_draft_tokens, num_positions=100, is_copied=is_copied)
        found.append(on.rounds.take())
    return found


def emitted(found: Sequence[RoundResult]) -> list[int]:
    return [token_id for verified in found for token_id in verified.token_ids or []]


def greedy(on: Stream, num_tokens: int, *, vocab_size: int = 64) -> list[int]:
    """What the target alone answers."""
    sequence = on.plain.allocate(prompt_length=len(PROMPT), max_tokens=100)
    text, feed = [], PROMPT
    for _ in range(num_tokens):
        logits = on.plain.forward([(sequence, feed)], [1])
        feed = [int(logits[0, :vocab_size].argmax())]
        text += feed
    on.plain.free(sequence)
    return text


def disturb(draft: FusedEngine) -> None:
    """Lets some of the tokens of a target's own draft be right, and others not."""
    head = draft.decoder.weights.head.weight
    noise = torch.randn(head.shape, generator=torch.Generator().manual_seed(3)).to(head)
    with torch.inference_mode():
        head += 0.15 * noise


def test_a_target_that_drafts_for_itself_accepts_everything() -> None:
    on = own_draft()
    found = run(on, [2, 3, 0, 1])
    assert [len(verified.token_ids or []) for verified in found] == [3, 4, 1, 2]
    assert [verified.num_draft_tokens for verified in found] == [2, 3, 0, 1]
    assert emitted(found) == greedy(on, 10)


@pytest.mark.parametrize(
    "lengths", [[4, 0, 1, 2], pytest.param([3, 3, 0, 0, 2, 4, 1, 3, 4, 4], marks=pytest.mark.slow)]
)
def test_rounds_with_another_draft_emit_what_the_target_alone_does(lengths: list[int]) -> None:
    on = own_draft()
    disturb(on.draft)
    found = run(on, lengths)
    text = emitted(found)
    assert text == greedy(on, len(text))
    accepted = [len(verified.token_ids or []) - 1 for verified in found]
    assert any(0 < a < k for a, k in zip(accepted, lengths, strict=True))


@pytest.mark.parametrize(
    "num_rounds", [1, 5, *(pytest.param(n, marks=pytest.mark.slow) for n in (15, 17, 40))]
)
def test_the_draft_catches_up_after_rounds_without_it(num_rounds: int) -> None:
    """It knows as much as the target then: all of its tokens are accepted."""
    on = own_draft()
    found = run(on, [*[0] * num_rounds, 3])
    assert emitted(found) == greedy(on, num_rounds + 4)
    assert len(found[-1].token_ids or []) == 4


def num_right(text: Sequence[int], following: Sequence[int], num_tokens: int) -> int:
    """How many tokens that the host would copy are what follows."""
    pairs = zip(PromptLookup(text).copy(num_tokens), following, strict=False)
    return next((i for i, (copied, told) in enumerate(pairs) if copied != told), num_tokens)


def test_copied_tokens_are_judged_as_those_of_the_draft_are() -> None:
    on = own_draft()
    answer = greedy(on, 36)
    text = [*PROMPT, *answer]
    start = len(PROMPT) + 21  # where some of it comes again
    begin(on, text[:start])
    accepted = []
    for num_tokens, is_copied in ((4, True), (1, True), (2, False), (3, True), (0, False)):
        wanted = num_right(text[:start], text[start:], num_tokens) if is_copied else num_tokens
        (verified,) = run(on, [num_tokens], is_copied=is_copied)
        assert verified == RoundResult(text[start : start + wanted + 1], num_tokens)
        start += wanted + 1
        accepted.append(wanted)
    assert 0 < accepted[0] < 4


@pytest.mark.parametrize("num_rounds", [3, pytest.param(21, marks=pytest.mark.slow)])
def test_the_draft_catches_up_after_rounds_that_copied(num_rounds: int) -> None:
    on = own_draft()
    found = [*run(on, [4] * num_rounds, is_copied=True), *run(on, [3])]
    assert emitted(found) == greedy(on, len(emitted(found)))
    assert len(found[-1].token_ids or []) == 4


def test_a_seeded_text_is_the_same_with_copied_tokens() -> None:
    on = own_draft()
    sampling = Sampling(temperature=0.2, seed=5, is_seeded=True)
    texts = []
    for lengths, is_copied in (([0] * 8, False), ([2] * 8, True)):
        begin(on, [*PROMPT, *PROMPT], sampling=sampling)
        texts.append(emitted(run(on, lengths, is_copied=is_copied)))
    assert texts[1][:8] == texts[0]


def test_a_draft_without_a_usable_logit_does_not_spoil_what_is_copied() -> None:
    on = own_draft()
    with torch.inference_mode():
        on.draft.decoder.weights.norm.fill_(torch.nan)
    sampling = Sampling(temperature=0.2, seed=5, is_seeded=True)
    begin(on, PROMPT, sampling=sampling)
    (drafted,) = run(on, [2])
    assert drafted.num_draft_tokens == 0
    (copied,) = run(on, [2], is_copied=True)
    assert copied.num_draft_tokens == 2


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # no layers, where there is a GPU
@pytest.mark.parametrize("holds_all", [True, False])
def test_the_draft_reads_no_further_than_it_has_room(holds_all: bool) -> None:
    """It would else catch up before positions reach back no further."""
    config = toy_config(**TARGET)
    on = stream(
        config,
        config,
        limits={"max_seq_len": 130},
        draft_limits={"max_seq_len": 130 if holds_all else 30},
    )
    positions = []
    on.draft.decoder.layers = lambda rows: positions.append(rows.positions)  # type: ignore
    for length in range(len(PROMPT), 108):
        on.rounds.launch(0, num_positions=length + 1)
        on.rounds.take()
    assert bool(positions) == holds_all


def test_two_rounds_are_under_way_at_once() -> None:
    on = own_draft()
    found = []
    on.rounds.launch(2, num_positions=100)
    for num_draft_tokens in (0, 1):
        on.rounds.launch(num_draft_tokens, num_positions=100)
        assert on.rounds.num_under_way == 2
        found.append(on.rounds.take())
    found.append(on.rounds.take())
    assert on.rounds.num_under_way == 0
    assert [len(verified.token_ids or []) for verified in found] == [3, 1, 2]
    assert emitted(found) == greedy(on, 6)


def test_what_is_dropped_leaves_no_trace_in_the_next_text() -> None:
    on = own_draft()
    wanted = greedy(on, 3)
    on.rounds.launch(2, num_positions=100)
    on.rounds.launch(0, num_positions=100)
    on.rounds.drop()
    assert on.rounds.num_under_way == 0
    on.rounds.begin(PROMPT, target_sequence=on.target_sequence, draft_sequence=on.draft_sequence)
    assert emitted(run(on, [2])) == wanted


def test_the_draft_may_lack_one_token_more_than_the_target() -> None:
    on = own_draft()
    on.draft.truncate(on.draft_sequence, 0)
    with torch.inference_mode():
        for pool in (on.draft.cache.keys[0], on.draft.cache.values[0]):
            pool.fill_(torch.nan)
    on.draft.forward([(on.draft_sequence, PROMPT[:-2])], [0])
    (verified,) = run(on, [2])
    assert verified == RoundResult(greedy(on, 3), 2)


def test_only_usable_tokens_are_emitted() -> None:
    on = stream(toy_config(**TARGET), toy_config(**TARGET), vocab_size=20)
    found = run(on, [2, 0, 0])
    assert emitted(found) == greedy(on, 5, vocab_size=20)
    assert max(emitted(found)) < 20 <= max(greedy(on, 5))


def test_a_target_without_a_usable_logit_emits_nothing() -> None:
    on = own_draft()
    with torch.inference_mode():
        on.target.decoder.weights.norm.fill_(torch.nan)
    assert run(on, [2, 0]) == [RoundResult(None, 0), RoundResult(None, 0)]


def test_a_draft_without_a_usable_logit_costs_acceptance_only() -> None:
    target = toy_config(**TARGET)
    on = stream(target, target, seeds=(2, 1))
    with torch.inference_mode():
        on.draft.decoder.weights.norm.fill_(torch.nan)
    text = emitted(run(on, [2, 1]))
    assert text == greedy(on, len(text))


def test_a_draft_token_that_the_target_cannot_read_shows_without_it() -> None:
    """With it the whole round is unusable: 0 times the NaN of its values is NaN."""
    on = own_draft()
    first, second, _ = greedy(on, 3)
    with torch.inference_mode():
        on.target.decoder.weights.embedding[second] = torch.nan
    assert run(on, [3, 0, 0, 0]) == [
        RoundResult(None, 0),
        RoundResult([first], 0),
        RoundResult([second], 0),
        RoundResult(None, 0),
    ]


def pair(num_draft_tokens: int, *, has_rounds: bool) -> tuple[EnginePair, list[int]]:
    """A pair of fused engines, and the draft lengths of its rounds."""
    draft, _ = toy_engines(toy_config(**TARGET), seed=1)
    target, _ = toy_engines(toy_config(**TARGET), seed=1)
    disturb(draft)
    unused = [(5, 9)]
    lengths: list[int] = []

    class Recorded(OldRounds):
        def launch(
            self, num_draft_tokens: int, *, num_positions: int, is_copied: bool = False
        ) -> None:
            lengths.append(num_draft_tokens)
            super().launch(num_draft_tokens, num_positions=num_positions, is_copied=is_copied)

    rounds = None
    if has_rounds:
        rounds = Recorded(
            draft, target, num_draft_tokens=num_draft_tokens, vocab_size=64, unused=unused
        )
    options = PairOptions(
        num_draft_tokens=num_draft_tokens,
        adaptive=False,
        max_batch_size=3,
        max_seq_len=100,
        max_num_tokens=16,
    )
    sampler = TorchSampler(64, unused)
    engines = EnginePair(
        draft, target, sampler, options, lambda prompt, **_: WordDetokenizer(), rounds=rounds
    )
    return engines, lengths


def answer(engines: EnginePair, asked: Request, *, joined_at: int | None = None) -> list[Chunk]:
    """What a request gets, beside which another runs for a while from a step on."""
    engines.submit(asked)
    chunks: list[Chunk] = []
    for step in range(100):
        if step == joined_at:
            engines.submit(Request(request_id="other", prompt_token_ids=(1, 2), max_tokens=2))
        chunks += [chunk for chunk in engines.step() if chunk.request_id == asked.request_id]
        if not engines.has_work():
            break
    return chunks


@pytest.mark.parametrize(
    ("num_draft_tokens", "settings", "is_seeded"),
    [
        (2, SETTINGS[-1], False),
        *(
            pytest.param(num_draft_tokens, settings, is_seeded, marks=pytest.mark.slow)
            for num_draft_tokens in (0, 1, 4)
            for settings in (SETTINGS if DEVICE.type == "cuda" else SETTINGS[::4])
            for is_seeded in (True, False)
        ),
    ],
)
def test_a_sampled_text_is_that_of_single_steps(
    num_draft_tokens: int, settings: dict[str, Any], is_seeded: bool
) -> None:
    is_short = num_draft_tokens == 2
    sampling = Sampling(temperature=0.9, seed=11, is_seeded=is_seeded, **settings)
    asked = Request(
        request_id="r",
        prompt_token_ids=tuple(PROMPT),
        max_tokens=7 if is_short else 16,
        sampling=sampling,
    )
    in_rounds, lengths = pair(num_draft_tokens, has_rounds=True)
    step_by_step, _ = pair(num_draft_tokens, has_rounds=False)
    expected = answer(step_by_step, asked)
    found = answer(in_rounds, asked, joined_at=None if is_short else 2)
    assert num_draft_tokens in lengths
    assert len(ids(expected)) == asked.max_tokens
    assert ids(found) == ids(expected)
    assert found[-1].statistics == expected[-1].statistics
