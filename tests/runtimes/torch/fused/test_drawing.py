"""Rounds made of given logits, against the sampler of rounds that are made step by step."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from specpipe.runtimes.pair.sampler import Drafted, RoundResult
from specpipe.runtimes.pair.torch_sampler import TorchSampler
from specpipe.runtimes.torch.fused.decoder import Decoder
from specpipe.runtimes.torch.fused.drawing import Drawing, Settings
from specpipe.runtimes.torch.fused.streams import Members, Streams
from specpipe.runtimes.torch.fused_sizes import RESULT
from specpipe.runtimes.torch.round_sizes import Form, form_of
from specpipe.speculative.request import GREEDY, Sampling
from tests.runtimes.torch.fused.toy import DEVICE, toy_config, toy_engines
from tests.speculative.table import new_state, request

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::RuntimeWarning")

UNUSED = [(5, 9)]
NUM_DRAFT = 2
NUM_STREAMS = 16

SETTINGS: list[dict[str, Any]] = [
    {},
    {"top_k": 5},
    {"top_p": 0.8},
    {"min_p": 0.1},
    {"top_k": 12, "top_p": 0.9, "min_p": 0.01},
]


@cache
def decoders(vocab_size: int) -> tuple[Decoder, Decoder]:
    """Of a draft and a target; only what they say of their scores is looked at."""
    shape = {"num_layers": 1, "num_heads": 1, "num_kv_heads": 1}
    draft, target = (toy_engines(toy_config(vocab_size=vocab_size, **shape))[0] for _ in range(2))
    return draft.decoder, target.decoder


class Part(NamedTuple):
    """Of one member in a round: its sampling, logits of draft [K, V] and target [K + 1, V].

    copied  the draft tokens, if they are copied: then only the number of the draft's rows counts
    """

    draft: Tensor
    target: Tensor
    sampling: Sampling
    copied: list[int] | None = None


class Made(NamedTuple):
    """What a round told of a member, and what it left behind the last token of its text."""

    token_ids: list[int] | None
    num_judged: int | None
    history: list[int]
    num_moved: int


def prompt_length(place: int) -> int:
    return 7 + 2 * place


@torch.inference_mode()
def make_round(
    parts: Sequence[Part | None], *, most: int = NUM_DRAFT, is_parallel: bool = False
) -> list[Made | None]:
    """A round of some members, by place; of nobody's place nothing is told."""
    vocab_size = next(part.target.shape[1] for part in parts if part is not None)
    by_draft, by_target = decoders(vocab_size)
    is_unused = torch.zeros(vocab_size, dtype=torch.uint8, device=DEVICE)
    for start, stop in UNUSED:
        is_unused[start:stop] = 1
    settings = Settings(NUM_STREAMS, DEVICE)
    streams = Streams(
        history=torch.zeros(NUM_STREAMS, 40, dtype=torch.int32, device=DEVICE),
        last=torch.zeros(NUM_STREAMS, dtype=torch.int32, device=DEVICE),
        draft_slots=torch.zeros(NUM_STREAMS, dtype=torch.int32, device=DEVICE),
    )
    form = Form.GREEDY
    numbers: list[tuple[int, int, int]] = []
    for place, part in enumerate(parts):
        stream = NUM_STREAMS - 1 - place
        if part is None:
            numbers.append((-1, most, 0))
            continue
        numbers.append((stream, len(part.draft), int(part.copied is not None)))
        settings.write(stream, part.sampling, vocab_size)
        form = max(form, form_of(part.sampling, vocab_size))
        length = prompt_length(place)
        streams.last[stream] = length - 1
        if part.copied is not None:
            copied = torch.tensor(part.copied, dtype=torch.int32)
            streams.history[stream, length : length + len(copied)] = copied
    of_places = torch.tensor(numbers, dtype=torch.int32, device=DEVICE).t().contiguous()
    members = Members(*of_places, most=most, is_parallel=is_parallel)
    drafts, targets = (
        Drawing(decoder, settings, streams, is_unused) for decoder in (by_draft, by_target)
    )
    result = torch.full((len(parts), RESULT), -1, dtype=torch.int32, device=DEVICE)
    for step in range(min(most, 1) if is_parallel else most):
        steps = range(most) if is_parallel else [step]
        drafted = [[_row(p.draft, i) if p and not p.copied else None for i in steps] for p in parts]
        rows = [row for of_place in drafted for row in of_place]
        score(by_draft, vocab_size, rows, drafts.first_out(members, step))
        drafts.draw_draft(members, form, step)
    rows = [_row(p.target, i) if p else None for p in parts for i in range(most + 1)]
    score(by_target, vocab_size, rows, 0)
    targets.draw(members, form)
    targets.accept(drafts, members, result)
    made: list[Made | None] = []
    for place, (part, (stream, *_)) in enumerate(zip(parts, numbers, strict=True)):
        num_emitted, num_judged, *token_ids = result[place].tolist()
        if part is None:
            assert num_emitted == -1
            made.append(None)
            continue
        length = prompt_length(place)
        made.append(
            Made(
                token_ids[:num_emitted] if num_emitted else None,
                num_judged if num_emitted else None,
                streams.history[stream, length : length + num_emitted].tolist(),
                int(streams.last[stream]) - (length - 1),
            )
        )
    return made


def _row(logits: Tensor, index: int) -> Tensor | None:
    return logits[index] if index < len(logits) else None


def score(
    by_model: Decoder, vocab_size: int, rows: Sequence[Tensor | None], first_out: int
) -> None:
    """Leaves what the head would: logits, and the best of two blocks of the tokens in use."""
    nobodys = torch.full((vocab_size,), torch.nan, device=DEVICE)
    logits = torch.stack([nobodys if row is None else row for row in rows])
    by_model.logits[first_out : first_out + len(logits)] = logits
    best, best_ids = by_model.bests(len(logits))
    best.fill_(-torch.inf)
    usable = logits.clone()
    for start, stop in UNUSED:
        usable[:, start:stop] = -torch.inf
    first = 0
    for block, part in enumerate(usable.chunk(min(2, len(best)), dim=1)):
        found = part.max(dim=-1)
        best[block, : len(logits)] = found.values
        best_ids[block, : len(logits)] = found.indices.int() + first
        first += part.shape[1]


def step_by_step(part: Part, place: int) -> RoundResult:
    state = new_state(
        request(prompt_length=prompt_length(place), sampling=part.sampling),
        vocab_size=part.target.shape[1],
    )
    sampler = TorchSampler(part.target.shape[1], UNUSED)
    if part.copied is None:
        drafted = Drafted(state)
        for row in part.draft:
            if not sampler.draft(row[None].clone(), [drafted])[0]:
                break
    else:
        drafted = Drafted(state, list(part.copied), is_copied=True)
    (outcome,) = sampler.verify(part.target[: len(drafted.token_ids) + 1].clone(), [drafted])
    return outcome


def some_logits(
    vocab_size: int, seed: int = 0, *, num_draft: int = NUM_DRAFT, has_ties: bool = False
) -> tuple[Tensor, Tensor]:
    """Of a draft and of a target that often agrees with it."""
    generator = torch.Generator().manual_seed(seed)
    target = 2.0 * torch.randn(num_draft + 1, vocab_size, generator=generator)
    draft = target[:num_draft] + torch.randn(num_draft, vocab_size, generator=generator)
    if has_ties:
        draft, target = draft.round(), target.round()
    return draft.to(DEVICE), target.to(DEVICE)


def check(*parts: Part | None, most: int = NUM_DRAFT, is_parallel: bool = False) -> list[Made]:
    """Makes a round; what comes of each member is what the sampler makes of it alone."""
    found = []
    round_made = make_round(parts, most=most, is_parallel=is_parallel)
    for place, (part, made) in enumerate(zip(parts, round_made, strict=True)):
        if part is None or made is None:
            continue
        wanted = step_by_step(part, place)
        wanted_ids = None if wanted.token_ids is None else list(wanted.token_ids)
        assert made.token_ids == wanted_ids, (place, part.sampling)
        assert made.history == (wanted_ids or [])
        assert made.num_moved == len(wanted_ids or [])
        if wanted_ids is not None:
            assert made.num_judged == wanted.num_draft_tokens
        found.append(made)
    return found


def part(
    sampling: Sampling,
    seed: int = 0,
    *,
    vocab_size: int = 64,
    num_draft: int = NUM_DRAFT,
    has_ties: bool = False,
    copies: bool = False,
) -> Part:
    draft, target = some_logits(vocab_size, seed, num_draft=num_draft, has_ties=has_ties)
    return Part(draft, target, sampling, draft.argmax(-1).tolist() if copies else None)


@pytest.mark.parametrize(
    ("is_seeded", "is_parallel"),
    [(True, False), (False, True), pytest.param(False, False, marks=pytest.mark.slow)],
)
def test_a_round_is_that_of_the_sampler(is_seeded: bool, is_parallel: bool) -> None:
    asked = [
        Sampling(temperature=0.9, seed=2**64 - 3, is_seeded=is_seeded, **settings)
        for settings in SETTINGS
    ]
    check(*map(part, asked), is_parallel=is_parallel)


def test_members_of_any_kind_share_a_round() -> None:
    """None of them changes what another gets, and each has its own number of draft tokens."""
    mixture = [
        part(GREEDY, 1),
        part(Sampling(temperature=0.9, seed=3, is_seeded=True, top_p=0.9), num_draft=1),
        None,
        part(Sampling(temperature=0.9, seed=4, top_k=5)),
        part(Sampling(temperature=2.0, seed=11), 5, num_draft=0),
    ]
    check(*mixture)
    check(part(GREEDY, 2, copies=True), *reversed(mixture[1:]), is_parallel=True)


def test_unseeded_members_judge_what_was_copied_by_the_targets_probability_of_it() -> None:
    """Some tokens stand, and some do not; one that is certain does, and one of no use does not."""
    draft, target = some_logits(64)
    certain = torch.full_like(target, -INF)
    certain[:, 3] = 1.0
    parts = [
        part(Sampling(temperature=1.0, seed=seed, top_p=0.9), seed, copies=True)
        for seed in (17, 18, 0)
    ]
    one = Sampling(temperature=1.0, seed=1)
    *made, same, unused = check(
        *parts, Part(draft, certain, one, [3, 3]), Part(draft, target, one, [6, 3])
    )
    assert {len(one.token_ids or []) for one in made} == {1, 2, 3}
    assert same.token_ids == [3, 3, 3]
    assert len(unused.token_ids or []) == 1


@pytest.mark.slow
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("has_ties", [True, False])
def test_rounds_are_those_of_the_sampler(settings: dict[str, Any], has_ties: bool) -> None:
    """Some accept all draft tokens, some the first one, some none."""
    numbers: dict[tuple[bool, bool], set[int]] = {}
    kinds = [(True, False), (False, False), (True, True), (False, True)]  # seeded; copied
    for seed in range(6):
        temperature = (0.3, 1.0, 4.0)[seed % 3]
        asked = [
            Sampling(temperature=temperature, seed=seed, is_seeded=is_seeded, **settings)
            for is_seeded, _ in kinds
        ]
        parts = [
            part(sampling, seed, has_ties=has_ties, copies=copies)
            for sampling, (_, copies) in zip(asked, kinds, strict=True)
        ]
        for kind, made in zip(kinds, check(*parts), strict=True):
            assert made.token_ids is not None
            numbers.setdefault(kind, set()).add(len(made.token_ids))
    assert all(len(found) >= 2 for found in numbers.values())
    assert set().union(*numbers.values()) == {1, 2, 3}


@pytest.mark.parametrize(
    ("settings", "num_draft"),
    [
        ({"top_k": 300, "top_p": 0.95}, 0),
        *(
            pytest.param(settings, 2, marks=pytest.mark.slow)
            for settings in (*SETTINGS, {"top_k": 2000}, {"top_p": 0.999})
        ),
    ],
    ids=str,
)
def test_a_vocabulary_of_several_blocks(settings: dict[str, Any], num_draft: int) -> None:
    """More tokens than the sampler sorts at first, and equal scores where they are cut."""
    for temperature in (5.0,) if num_draft == 0 else (0.3, 1.0, 5.0):
        sampling = Sampling(temperature=temperature, seed=5, **settings)
        one = part(sampling, vocab_size=1100, num_draft=num_draft, has_ties=True)
        check(one, most=num_draft)


def test_the_lower_of_equal_tokens_stay_at_a_cut() -> None:
    """Ids 3 and up are equal, but nobody draws 5 to 8: the first four stay, and are all drawn."""
    logits = torch.zeros(1, 64, device=DEVICE)
    logits[:, :3] = -1.0
    seen = set()
    asked = [Sampling(temperature=1.0, top_k=4, seed=seed) for seed in range(9)]
    for one in make_round([Part(logits[:0], logits, sampling) for sampling in asked], most=0):
        assert one is not None and one.token_ids is not None
        seen |= set(one.token_ids)
    assert seen == {3, 4, 9, 10}


NAN, INF = torch.nan, torch.inf

UNUSABLE = [
    (1, None, NAN, 1),
    (0, None, INF, 0),
    (None, 0, NAN, None),
    (None, 1, INF, 0),
    (None, 2, -INF, 1),
]
"""Rows of the draft and of the target, a value all over them, and what is judged before them."""


@pytest.mark.parametrize("is_parallel", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_what_comes_behind_an_unusable_row_does_not_count(is_parallel: bool) -> None:
    parts = []
    for place, (draft_row, target_row, value, _) in enumerate(UNUSABLE):
        is_seeded = place % 2 == 0
        spoilt = part(Sampling(temperature=1.0, seed=3, is_seeded=is_seeded, top_p=0.9))
        if draft_row is not None:
            spoilt.draft[draft_row] = value
        if target_row is not None:
            spoilt.target[target_row] = value
        parts.append(spoilt)
    made = check(*parts, is_parallel=is_parallel)
    assert [one.num_judged for one in made] == [num_judged for *_, num_judged in UNUSABLE]
    assert made[2].token_ids is None


def test_equal_rows_are_always_accepted_and_disjoint_ones_never() -> None:
    _, target = some_logits(64)
    other, half = target[:NUM_DRAFT].clone(), target.clone()
    other[:, :32], half[:, 32:] = -INF, -INF
    sampling = Sampling(temperature=1.0, seed=1)
    same, disjoint = check(Part(target[:NUM_DRAFT], target, sampling), Part(other, half, sampling))
    assert same.token_ids is not None and len(same.token_ids) == NUM_DRAFT + 1
    assert disjoint.token_ids is not None and len(disjoint.token_ids) == 1


def test_other_seeds_draw_other_tokens() -> None:
    parts = [part(Sampling(temperature=2.0, seed=s), num_draft=0) for s in range(6)]
    assert len({str(made) for made in make_round(parts, most=0)}) >= 4


@pytest.mark.slow
@pytest.mark.parametrize("model", ["7b", "0.5b"])
@pytest.mark.parametrize("capability", [80, 90])
def test_every_kernel_compiles(model: str, capability: int, tmp_path: Path) -> None:
    """In another process, as this one may interpret them; and nothing is read before the wait."""
    environment = {
        name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"
    } | {"TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "tests.runtimes.torch.fused.compile_sampling"]
    done = subprocess.run(
        [*command, model, str(capability)],
        env=environment,
        cwd=Path(__file__).parents[4],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert sorted(kernel["name"] for kernel in found) == [
        "accept_drawn", "accept_drawn", "draw", "draw", "narrow", "narrow", "peak", "peak",
        "propose_drawn", "recover", "recover",
    ]  # fmt: skip
    for kernel in found:
        assert kernel["num_waits"] == (1 if capability >= 90 else 0)
        assert kernel["early"] == [] or capability < 90
