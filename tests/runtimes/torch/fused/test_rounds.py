"""Rounds of several sequences against plain greedy decoding of each on the plain engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import pytest
import torch

from specpipe.runtimes.pair.engine_pair import EnginePair
from specpipe.runtimes.pair.pair import PairOptions
from specpipe.runtimes.pair.rounds import MOST_UNDER_WAY, Member, Reading, ReadingRoom
from specpipe.runtimes.pair.sampler import RoundResult
from specpipe.runtimes.pair.torch_sampler import TorchSampler
from specpipe.runtimes.torch.engine import TorchEngine
from specpipe.runtimes.torch.fused.engine import FusedEngine
from specpipe.runtimes.torch.fused.rounds import FusedRounds
from specpipe.speculative.lookup import PromptLookup
from specpipe.speculative.request import GREEDY, Request, Sampling
from tests.runtimes.torch.fused.test_prompt import cached
from tests.runtimes.torch.fused.toy import toy_config, toy_engines
from tests.speculative.table import WordDetokenizer

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::RuntimeWarning")

TEXTS = ([3, 60, 21, 7, 33, 12, 48], [5], list(range(20, 40)), [9, 9, 2])
MODEL = {"num_layers": 1, "num_heads": 2, "num_kv_heads": 1}


class Joined(NamedTuple):
    """A sequence that has joined rounds."""

    target: int
    draft: int
    text: list[int]


class Bench:
    """Rounds of a target and a draft of the same weights, and what the target alone answers."""

    def __init__(
        self,
        *,
        vocab_size: int = 64,
        max_batch_size: int = 4,
        max_draft_len: int = 3,
        short_prompt: int = 0,
        mask_token_id: int | None = None,
        **model: int,
    ) -> None:
        limits = {
            "max_batch_size": max_batch_size,
            "max_seq_len": 100,
            "max_draft_len": max_draft_len,
        }
        config = toy_config(**{**MODEL, **model})
        self.draft, self.plain_draft = toy_engines(config, seed=1, limits=limits)
        self.target, self.plain = toy_engines(
            config, seed=1, limits=limits, short_prompt=short_prompt
        )
        self.vocab_size = vocab_size
        self.rounds = FusedRounds(
            self.draft,
            self.target,
            num_draft_tokens=max_draft_len,
            vocab_size=vocab_size,
            unused=[],
            copies=True,
            mask_token_id=mask_token_id,
        )

    def join(
        self, text: Sequence[int], *, num_unread: int = 1, sampling: Sampling = GREEDY
    ) -> Joined:
        """Lets a text join, with a draft that lacks its last tokens."""
        target, draft = (
            engine.allocate(prompt_length=len(text), max_tokens=100)
            for engine in (self.target, self.draft)
        )
        for engine, sequence, num in ((self.target, target, 1), (self.draft, draft, num_unread)):
            if text[:-num]:
                engine.forward([(sequence, text[:-num])], [0])
        self.rounds.join(target, text, sampling)
        self.rounds.give_draft(target, draft)
        return Joined(target, draft, list(text))

    def leave(self, joined: Joined) -> None:
        self.rounds.leave(joined.target)
        self.target.free(joined.target)
        self.draft.free(joined.draft)

    def launch(self, *members: tuple[Joined, int], is_copied: Sequence[bool] = ()) -> None:
        copied = is_copied or [False] * len(members)
        self.rounds.launch(
            [Member(j.target, k, 100, c) for (j, k), c in zip(members, copied, strict=True)]
        )

    def take(self, *joined: Joined) -> list[RoundResult]:
        """Takes a round of these members into their texts."""
        results = self.rounds.take()
        for of, result in zip(joined, results, strict=True):
            of.text.extend(result.token_ids or [])
        return results

    def run(
        self, *members: tuple[Joined, int], is_copied: Sequence[bool] = ()
    ) -> list[RoundResult]:
        self.launch(*members, is_copied=is_copied)
        return self.take(*(joined for joined, _ in members))

    def greedy(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        """A prompt and what the target alone answers."""
        return greedy(self.plain, prompt, num_tokens, self.vocab_size)


def greedy(engine: TorchEngine, prompt: Sequence[int], num: int, vocab_size: int) -> list[int]:
    sequence = engine.allocate(prompt_length=len(prompt), max_tokens=100)
    text, feed = list(prompt), list(prompt)
    for _ in range(num):
        logits = engine.forward([(sequence, feed)], [1])
        feed = [int(logits[0, :vocab_size].argmax())]
        text += feed
    engine.free(sequence)
    return text


def disturb(draft: FusedEngine) -> None:
    """Lets some of the tokens of a target's own draft be right, and others not."""
    head = draft.decoder.weights.head.weight
    noise = torch.randn(head.shape, generator=torch.Generator().manual_seed(3)).to(head)
    with torch.inference_mode():
        head += 0.15 * noise


def num_emitted(results: Sequence[RoundResult]) -> list[int]:
    return [len(result.token_ids or []) for result in results]


def check(bench: Bench, joined: Joined, prompt: Sequence[int]) -> None:
    assert joined.text == bench.greedy(prompt, len(joined.text) - len(prompt))


def test_each_member_has_its_own_number_of_draft_tokens() -> None:
    bench = Bench()
    members = [bench.join(text) for text in TEXTS]
    results = bench.run(*zip(members, (3, 1, 0, 2), strict=True))
    assert [result.num_draft_tokens for result in results] == [3, 1, 0, 2]
    assert num_emitted(results) == [4, 2, 1, 3]  # the draft is the target
    for joined, prompt in zip(members, TEXTS, strict=True):
        check(bench, joined, prompt)


def test_rounds_with_another_draft_emit_what_the_target_alone_does() -> None:
    bench = Bench()
    disturb(bench.draft)
    first, second, third = (bench.join(text) for text in TEXTS[:3])
    accepted = []
    for lengths in ((3, 2, 1), (0, 3, 2), (2, 0, 3)):
        results = bench.run(*zip((first, second, third), lengths, strict=True))
        accepted += [(n - 1, k) for n, k in zip(num_emitted(results), lengths, strict=True)]
    for joined, prompt in zip((first, second, third), TEXTS[:3], strict=True):
        check(bench, joined, prompt)
    assert any(0 < a < k for a, k in accepted)


def test_members_come_and_go_while_rounds_are_under_way() -> None:
    """A slot is given on at once: what a round under way says of who had it is nobody's."""
    bench = Bench(max_batch_size=2)
    first, second = bench.join(TEXTS[0]), bench.join(TEXTS[1])
    bench.launch((first, 2), (second, 3))
    bench.launch((first, 1), (second, 0))
    bench.take(first, second)
    bench.leave(first)
    third = bench.join(TEXTS[3])
    bench.launch((second, 1), (third, 2))
    bench.take(first, second)
    bench.launch((third, 0))
    assert num_emitted(bench.take(second, third)) == [2, 3]
    bench.take(third)
    for joined, prompt in ((first, TEXTS[0]), (second, TEXTS[1]), (third, TEXTS[3])):
        check(bench, joined, prompt)


@pytest.mark.parametrize("num_rounds", [2, pytest.param(19, marks=pytest.mark.slow)])
def test_the_draft_catches_up_with_whom_it_lags_behind(num_rounds: int) -> None:
    """It knows as much as the target then: all of its tokens are accepted."""
    bench = Bench(max_draft_len=1, max_batch_size=3)
    members = [bench.join(text) for text in TEXTS[:3]]
    for number in range(num_rounds):
        bench.run(*((joined, 0) for joined in members[: 3 if number == 0 else 1]))
    bench.launch(*((joined, 0) for joined in members))
    bench.launch(*((joined, 1) for joined in members))
    bench.take(*members)
    assert num_emitted(bench.take(*members)) == [2, 2, 2]
    for joined, prompt in zip(members, TEXTS, strict=False):
        check(bench, joined, prompt)


def test_a_draft_may_be_given_while_rounds_are_under_way() -> None:
    bench = Bench(max_batch_size=2)
    text = TEXTS[0]
    target, draft = (
        engine.allocate(prompt_length=len(text), max_tokens=100)
        for engine in (bench.target, bench.draft)
    )
    bench.target.forward([(target, text[:-1])], [0])
    bench.rounds.join(target, text, GREEDY)
    joined = Joined(target, draft, list(text))
    bench.run((joined, 0))
    for _ in range(MOST_UNDER_WAY):
        bench.launch((joined, 0))
    bench.draft.forward([(draft, joined.text[:-2])], [0])
    bench.rounds.give_draft(target, draft)
    bench.take(joined)
    bench.launch((joined, 3))
    bench.take(joined)
    assert num_emitted(bench.take(joined)) == [4]
    check(bench, joined, text)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
def test_nothing_that_rounds_are_given_makes_the_host_wait() -> None:
    bench = Bench()
    for mode in ("default", "error"):  # at first kernels are compiled, and launches recorded
        torch.cuda.set_sync_debug_mode(mode)
        try:
            joined = [bench.join(text) for text in TEXTS[:2]]
            for _ in range(MOST_UNDER_WAY):
                bench.launch((joined[0], 2), (joined[1], 0))
        finally:
            torch.cuda.set_sync_debug_mode("default")
        for _ in range(MOST_UNDER_WAY):
            bench.take(*joined)
        for each, text in zip(joined, TEXTS, strict=False):
            check(bench, each, text)
            bench.leave(each)


def test_the_draft_may_lack_one_token_more_than_the_target() -> None:
    bench = Bench()
    with torch.inference_mode():
        for pool in (bench.draft.cache.keys[0], bench.draft.cache.values[0]):
            pool.fill_(torch.nan)
    joined = bench.join(TEXTS[0], num_unread=2)
    assert num_emitted(bench.run((joined, 2))) == [3]
    check(bench, joined, TEXTS[0])


def cached_alone(bench: Bench, prompt: list[int]) -> torch.Tensor:
    """What the target caches of a prompt, but for its last token, that it reads by itself."""
    alone = bench.target.allocate(prompt_length=len(prompt), max_tokens=100)
    bench.target.forward([(alone, prompt[:-1])], [0])
    wanted = cached(bench.target, alone)
    bench.target.free(alone)
    return wanted


def check_read(
    bench: Bench, other: Joined, read: int, prompt: list[int], wanted: torch.Tensor
) -> None:
    """Takes two rounds of a member, in which a prompt was read beside it; it is in the second."""
    bench.target.skip(read, len(prompt) - 1)
    assert torch.equal(cached(bench.target, read), wanted)
    bench.take(other)
    second = Joined(read, -1, list(prompt))
    bench.take(other, second)
    check(bench, other, TEXTS[0])
    check(bench, second, prompt)


def test_texts_are_read_beside_members() -> None:
    """To the same bits as alone, in whatever pieces. Who is read to the end begins at once."""
    heads = {"num_heads": 8, "num_kv_heads": 4}  # so many that attention takes blocks from a list
    bench = Bench(max_batch_size=2, max_draft_len=2, short_prompt=20, **heads)
    disturb(bench.draft)
    prompt = TEXTS[2]
    wanted = cached_alone(bench, prompt)
    longer = bench.target.allocate(prompt_length=len(prompt) + 1, max_tokens=100)
    assert not bench.rounds.can_read(longer)
    bench.target.free(longer)
    other = bench.join(TEXTS[0])
    read = bench.target.allocate(prompt_length=len(prompt), max_tokens=100)
    assert bench.rounds.can_read(read)
    bench.rounds.join(read, prompt, GREEDY)
    members = [Member(other.target, 2, 100)]
    assert bench.rounds.reading_rooms(members) == [ReadingRoom(n, 3) for n in (4, 9, 20, 41)]
    bench.rounds.launch(members, [Reading(read, 0, 4)])  # two pieces
    members = [Member(other.target, 0, 100), Member(read, 0, 100)]
    bench.rounds.launch(members, [Reading(read, 4, 15)])
    assert bench.target.decoder.lists_blocks(32, 1)
    check_read(bench, other, read, prompt, wanted)


def test_texts_are_read_beside_those_that_copy() -> None:
    """In places of two rows, as those have that copy much."""
    bench = Bench(max_batch_size=2, max_draft_len=6, short_prompt=20)
    prompt = TEXTS[2]
    wanted = cached_alone(bench, prompt)
    copies = bench.join(bench.greedy(TEXTS[0], 21))
    read = bench.target.allocate(prompt_length=len(prompt), max_tokens=100)
    bench.rounds.join(read, prompt, GREEDY)
    copying = Member(copies.target, 6, 100, is_copied=True)
    assert bench.rounds.reading_rooms([copying]) == [ReadingRoom(n, 2) for n in (4, 12, 28, 60)]
    bench.rounds.launch([copying], [Reading(read, 0, 5)])  # three pieces
    bench.rounds.launch([copying, Member(read, 0, 100)], [Reading(read, 5, 14)])
    check_read(bench, copies, read, prompt, wanted)


def test_what_places_of_two_rows_do_not_hold_leaves_room_for_nothing() -> None:
    """Five rows each are 255 of 256, three places each would be 153 of 128."""
    rounds = Bench(max_batch_size=51, max_draft_len=4).rounds
    members = [Member(sequence, 4, 100, is_copied=True) for sequence in range(51)]
    assert [room.num_tokens for room in rounds.reading_rooms(members)] == [0]
    assert [room.num_tokens for room in rounds.reading_rooms(members[:40])] == [16]


MASK = 60


class Parallel(Bench):
    """A bench with a parallel draft: so few tokens are in use that some of its own are right."""

    def __init__(self, **sizes: int) -> None:
        super().__init__(mask_token_id=MASK, vocab_size=3, **sizes)

    def num_right(self, text: Sequence[int], length: int) -> int:
        """How many of its draft tokens of a text that it reads as a whole stand."""
        tokens = [*text, *[MASK] * (length - 1)]
        sequence = self.plain_draft.allocate(prompt_length=len(tokens), max_tokens=100)
        logits = self.plain_draft.forward([(sequence, tokens)], [length])
        self.plain_draft.free(sequence)
        drafted = logits[:, : self.vocab_size].argmax(-1).tolist()
        following = self.greedy(text, length)[len(text) :]
        pairs = enumerate(zip(drafted, following, strict=True))
        return next((i for i, (token, right) in pairs if token != right), length)


def test_a_parallel_draft_gives_all_tokens_of_a_round_at_once() -> None:
    """As many stand as if it read each text as a whole, and masks; nothing that it has cached of
    masks stays, whatever members drafted, copied or left out before.
    """
    bench = Parallel(max_batch_size=3, max_draft_len=8)
    members = [bench.join(text) for text in TEXTS[:3]]
    most_right = 0
    for lengths, copied in (
        ((8, 8, 8), [False] * 3),
        ((1, 1, 1), [False] * 3),  # fewer than what some of the round before lack
        ((8, 8, 0), [False, True, False]),
        ((1,), [False]),  # likewise, but in a launch that has rows for them
        ((1, 4, 8), [False] * 3),
    ):
        before = [list(joined.text) for joined in members]
        wanted = [
            None if is_copied or not k else bench.num_right(text, k)
            for text, k, is_copied in zip(before, lengths, copied, strict=False)
        ]
        results = bench.run(*zip(members, lengths, strict=False), is_copied=copied)
        for num_right, num in zip(wanted, num_emitted(results), strict=True):
            assert num_right is None or num == num_right + 1
            most_right = max(most_right, num_right or 0)
    assert most_right >= 2
    for joined, prompt, text in zip(members, TEXTS, before, strict=False):
        check(bench, joined, prompt)
        bench.draft.skip(joined.draft, len(text) - bench.draft.length(joined.draft))
        found = cached(bench.draft, joined.draft)
        bench.leave(joined)
        fresh = bench.draft.allocate(prompt_length=len(text) + 1, max_tokens=100)
        bench.draft.forward([(fresh, text)], [0])
        assert torch.allclose(found, cached(bench.draft, fresh), atol=1e-5)


def num_right(text: Sequence[int], following: Sequence[int], num_tokens: int) -> int:
    """How many tokens that the host would copy are what follows."""
    pairs = zip(PromptLookup(text).copy(num_tokens), following, strict=False)
    return next((i for i, (copied, told) in enumerate(pairs) if copied != told), num_tokens)


def test_some_copy_what_others_draft() -> None:
    """Then the draft catches up with them."""
    bench = Bench(max_batch_size=2)
    whole = bench.greedy(TEXTS[0], 36)
    start = len(TEXTS[0]) + 21  # where some of it comes again
    copies, drafts = bench.join(whole[:start]), bench.join(TEXTS[2])
    for length in (3, 1):
        wanted = num_right(copies.text, whole[len(copies.text) :], length)
        results = bench.run((copies, length), (drafts, 2), is_copied=[True, False])
        assert num_emitted(results) == [wanted + 1, 3]
    wanted = num_right(copies.text, whole[len(copies.text) :], 3)
    assert num_emitted(bench.run((copies, 3), is_copied=[True])) == [wanted + 1]
    assert num_emitted(bench.run((copies, 2), (drafts, 2))) == [3, 3]
    assert copies.text == whole[: len(copies.text)]
    check(bench, drafts, TEXTS[2])


@pytest.mark.parametrize(
    "has_seed",
    [
        pytest.param(None, id="greedy"),
        pytest.param(True, id="seeded", marks=pytest.mark.slow),
        pytest.param(False, id="unseeded", marks=pytest.mark.slow),
    ],
)
def test_who_copies_much_has_several_places(has_seed: bool | None) -> None:
    """And is told what a round tells in which each has one: packed, rows are half as many."""
    sampling = GREEDY if has_seed is None else Sampling(temperature=0.4, seed=3, is_seeded=has_seed)
    length, told = 6, []
    for others in (0, length):
        bench = Bench(max_batch_size=3, max_draft_len=length)
        text = bench.greedy(TEXTS[0], 21)
        members = [bench.join(TEXTS[1]), *(bench.join(text, sampling=sampling) for _ in range(2))]
        lengths = (others, length, length - 3)
        sizes = bench.rounds.sizes
        assert sizes.copying(lengths) == ((8, 1) if not others else (3, length))
        results = bench.run(*zip(members, lengths, strict=True), is_copied=[True] * 3)
        assert [r.num_draft_tokens for r in results] == list(lengths)
        results += bench.run(*((joined, 0) for joined in members))
        told.append([(r.token_ids, r.num_draft_tokens) for r in (*results[1:3], *results[4:])])
        check(bench, members[0], TEXTS[1])
    assert told[0] == told[1]
    wanted = num_right(text, bench.greedy(text, length)[len(text) :], length)
    if has_seed is None:
        assert wanted >= 2
        assert [len(ids or []) for ids, _ in told[0][:2]] == [wanted + 1, min(wanted, 3) + 1]


def test_only_usable_tokens_are_emitted() -> None:
    bench = Bench(vocab_size=20)
    first, second = bench.join([3, 1, 2]), bench.join([7])
    bench.run((first, 2), (second, 0))
    bench.run((first, 0), (second, 1))
    for joined, prompt in ((first, [3, 1, 2]), (second, [7])):
        check(bench, joined, prompt)
        assert max(joined.text) < 20


def test_what_one_member_cannot_read_is_nothing_to_the_others() -> None:
    """With a draft token that it cannot read a whole round of a member is unusable."""
    bench = Bench()
    whole = bench.greedy(TEXTS[0], 3)
    second_token = whole[len(TEXTS[0]) + 1]
    others = [text for text in TEXTS[1:] if second_token not in bench.greedy(text, 6)]
    spoilt, other = bench.join(TEXTS[0]), bench.join(others[0])
    with torch.inference_mode():
        bench.target.decoder.weights.embedding[second_token] = torch.nan
    assert bench.run((spoilt, 3), (other, 2))[0] == RoundResult(None, 0)
    for length in (0, 0):
        bench.run((spoilt, length), (other, 0))
    assert bench.run((spoilt, 0), (other, 0))[0] == RoundResult(None, 0)
    assert spoilt.text == whole[:-1]
    check(bench, other, others[0])


def test_a_draft_without_a_usable_logit_costs_acceptance_only() -> None:
    bench = Bench()
    with torch.inference_mode():
        bench.draft.decoder.weights.norm.fill_(torch.nan)
    joined = bench.join(TEXTS[0])
    bench.run((joined, 2))
    check(bench, joined, TEXTS[0])


def test_what_is_dropped_leaves_no_trace_in_the_next_text() -> None:
    bench = Bench(max_batch_size=1)
    joined = bench.join(TEXTS[0])
    bench.launch((joined, 2))
    bench.launch((joined, 0))
    bench.rounds.drop()
    assert bench.rounds.num_under_way == 0
    bench.leave(joined)
    again = bench.join(TEXTS[0])
    bench.run((again, 2))
    check(bench, again, TEXTS[0])


def pair(*, has_rounds: bool) -> EnginePair:
    """A pair of fused engines, with two draft tokens for everybody."""
    bench = Bench(max_batch_size=3, max_draft_len=2)
    disturb(bench.draft)
    options = PairOptions(
        num_draft_tokens=2, adaptive=False, max_batch_size=3, max_seq_len=100, max_num_tokens=16
    )
    return EnginePair(
        bench.draft,
        bench.target,
        TorchSampler(64, []),
        options,
        lambda prompt, **_: WordDetokenizer(),
        rounds=bench.rounds if has_rounds else None,
    )


def answers(engines: EnginePair, asked: Sequence[Request]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {request.request_id: [] for request in asked}
    for request in asked:
        engines.submit(request)
    while engines.has_work():
        for chunk in engines.step():
            assert chunk.error is None
            found[chunk.request_id] += chunk.token_ids
    return found


@pytest.mark.slow  # test_bits.py compares such members with lone runs
def test_members_of_any_kind_are_told_what_single_steps_tell_each() -> None:
    kinds = {
        "greedy": GREEDY,
        "seeded": Sampling(temperature=0.9, top_p=0.8, seed=11, is_seeded=True),
        "unseeded": Sampling(temperature=0.9, top_k=20, seed=5),
    }
    asked = [
        Request(request_id=name, prompt_token_ids=tuple(text), max_tokens=6, sampling=sampling)
        for (name, sampling), text in zip(kinds.items(), TEXTS[::2] + TEXTS[3:], strict=True)
    ]
    step_by_step = pair(has_rounds=False)
    alone = {name: ids for one in asked for name, ids in answers(step_by_step, [one]).items()}
    assert all(len(ids) == 6 for ids in alone.values())
    assert answers(pair(has_rounds=True), asked) == alone
