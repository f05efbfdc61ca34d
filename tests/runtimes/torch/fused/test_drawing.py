"""Rounds made of given logits, against the sampler of rounds that are made step by step."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from specpipe.runtimes.pair.sampler import Drafted, RoundResult
from specpipe.runtimes.pair.torch_sampler import TorchSampler
from specpipe.runtimes.torch.fused.decoder import Decoder
from specpipe.runtimes.torch.fused.drawing import Drawing, Settings, Text
from specpipe.runtimes.torch.fused_sizes import ROWS
from specpipe.speculative.noise import Purpose
from specpipe.speculative.request import Sampling
from tests.runtimes.torch.fused.toy import DEVICE, toy_config, toy_engines
from tests.speculative.table import new_state, request

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::RuntimeWarning")

FIRST = 3
UNUSED = [(5, 9)]
NUM_DRAFT = 3
PROMPT_LENGTH = 7

SETTINGS: list[dict[str, Any]] = [
    {},
    {"top_k": 5},
    {"top_p": 0.8},
    {"min_p": 0.1},
    {"top_k": 12, "top_p": 0.9, "min_p": 0.01},
]


@cache
def decoder(vocab_size: int) -> Decoder:
    """Only what it says of its scores is looked at."""
    shape = {"num_layers": 1, "num_heads": 1, "num_kv_heads": 1}
    engine, _ = toy_engines(toy_config(vocab_size=vocab_size, **shape))
    return engine.decoder


class Made(NamedTuple):
    """What a round told, and what it left behind the last token of its text."""

    token_ids: list[int] | None
    num_judged: int
    history: list[int]
    next_position: int


@torch.inference_mode()
def make_round(draft: Tensor, target: Tensor, sampling: Sampling) -> Made:
    """A round of draft tokens from logits [K, V], judged by logits [K + 1, V]."""
    num_draft, vocab_size = draft.shape
    by_model = decoder(vocab_size)
    is_unused = torch.zeros(vocab_size, dtype=torch.uint8, device=DEVICE)
    for start, stop in UNUSED:
        is_unused[start:stop] = 1
    settings = Settings(DEVICE)
    mode = settings.write(sampling, vocab_size)
    history = torch.zeros(32, dtype=torch.int32, device=DEVICE)
    last = PROMPT_LENGTH - 1
    positions = torch.arange(last - FIRST, last - FIRST + 16, dtype=torch.int32, device=DEVICE)
    result = torch.full((2 + ROWS,), -1, dtype=torch.int32, device=DEVICE)
    text = Text(history, positions, FIRST)
    drafts, targets = (
        Drawing(by_model, settings, text, is_unused, num_rows=num_rows)
        for num_rows in (max(num_draft, 1), num_draft + 1)
    )
    for index in range(num_draft):
        score(by_model, draft[index : index + 1])
        drafts.draw(mode, Purpose.DRAFT, first_row=index, num_rows=1)
        drafts.propose(index)
    score(by_model, target)
    targets.draw(mode, Purpose.RECOVERED, first_row=0, num_rows=num_draft + 1)
    targets.accept(drafts, mode, result, num_draft)
    num_emitted, num_judged, *token_ids = result.tolist()
    return Made(
        token_ids[:num_emitted] if num_emitted else None,
        num_judged,
        history[PROMPT_LENGTH : PROMPT_LENGTH + num_emitted].tolist(),
        int(positions[FIRST]),
    )


def score(by_model: Decoder, logits: Tensor) -> None:
    """Leaves what the head would: logits, and the best of two blocks of the tokens in use."""
    by_model.logits.fill_(torch.nan)
    by_model.best.fill_(-torch.inf)
    by_model.logits[: len(logits)] = logits
    usable = logits.clone()
    for start, stop in UNUSED:
        usable[:, start:stop] = -torch.inf
    for block, part in enumerate(usable.chunk(min(2, len(by_model.best)), dim=1)):
        by_model.best[block, : len(logits)] = part.max(dim=-1).values


def step_by_step(draft: Tensor, target: Tensor, sampling: Sampling) -> RoundResult:
    state = new_state(
        request(prompt_length=PROMPT_LENGTH, sampling=sampling), vocab_size=draft.shape[1]
    )
    drafted = Drafted(state)
    sampler = TorchSampler(draft.shape[1], UNUSED)
    for row in draft:
        if not sampler.draft(row[None].clone(), [drafted])[0]:
            break
    (outcome,) = sampler.verify(target[: len(drafted.token_ids) + 1].clone(), [drafted])
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


def check(draft: Tensor, target: Tensor, sampling: Sampling) -> Made:
    made, wanted = make_round(draft, target, sampling), step_by_step(draft, target, sampling)
    wanted_ids = None if wanted.token_ids is None else list(wanted.token_ids)
    assert made.token_ids == wanted_ids
    if wanted_ids is not None:
        assert made.num_judged == wanted.num_draft_tokens
        assert made.history == wanted_ids
        assert made.next_position == PROMPT_LENGTH - 1 + len(wanted_ids)
    return made


@pytest.mark.parametrize("is_seeded", [True, False], ids=["seeded", "unseeded"])
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_a_round_is_that_of_the_sampler(settings: dict[str, Any], is_seeded: bool) -> None:
    sampling = Sampling(temperature=0.9, seed=2**64 - 3, is_seeded=is_seeded, **settings)
    check(*some_logits(64), sampling)


@pytest.mark.slow
@pytest.mark.parametrize("is_seeded", [True, False], ids=["seeded", "unseeded"])
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("has_ties", [True, False])
def test_rounds_are_those_of_the_sampler(
    settings: dict[str, Any], is_seeded: bool, has_ties: bool
) -> None:
    """Some accept all draft tokens, some the first ones, some none."""
    numbers = set()
    for seed in range(12):
        sampling = Sampling(
            temperature=(0.3, 1.0, 4.0)[seed % 3], seed=seed, is_seeded=is_seeded, **settings
        )
        made = check(*some_logits(64, seed, has_ties=has_ties), sampling)
        assert made.token_ids is not None
        numbers.add(len(made.token_ids))
    assert len(numbers) >= 3
    assert check(*some_logits(64, num_draft=0), sampling).num_judged == 0


@pytest.mark.parametrize(
    ("settings", "num_draft"),
    [
        ({"top_k": 300, "top_p": 0.95}, 1),
        *(
            pytest.param(settings, 3, marks=pytest.mark.slow)
            for settings in (*SETTINGS, {"top_k": 2000}, {"top_p": 0.999})
        ),
    ],
    ids=str,
)
def test_a_vocabulary_of_several_blocks(settings: dict[str, Any], num_draft: int) -> None:
    """More tokens than the sampler sorts at first, and equal scores where they are cut."""
    for temperature in (5.0,) if num_draft == 1 else (0.3, 1.0, 5.0):
        sampling = Sampling(temperature=temperature, seed=5, **settings)
        check(*some_logits(1100, num_draft=num_draft, has_ties=True), sampling)


def test_the_lower_of_equal_tokens_stay_at_a_cut() -> None:
    """Ids 3 and up are equal, but nobody draws 5 to 8: the first four stay, and are all drawn."""
    logits = torch.zeros(1, 64, device=DEVICE)
    logits[:, :3] = -1.0
    seen = set()
    for seed in range(16):
        made = make_round(logits[:0], logits, Sampling(temperature=1.0, top_k=4, seed=seed))
        assert made.token_ids is not None
        seen.update(made.token_ids)
    assert seen == {3, 4, 9, 10}


NAN, INF = torch.nan, torch.inf


@pytest.mark.parametrize("is_seeded", [True, False], ids=["seeded", "unseeded"])
@pytest.mark.parametrize(
    ("draft_row", "target_row", "value", "num_judged"),
    [
        (1, None, NAN, 1),
        (0, None, INF, 0),
        (None, 0, NAN, None),
        (None, 1, INF, 0),
        (None, 2, -INF, 1),
    ],
)
def test_what_comes_behind_an_unusable_row_does_not_count(
    draft_row: int | None,
    target_row: int | None,
    value: float,
    num_judged: int | None,
    is_seeded: bool,
) -> None:
    draft, target = some_logits(64)
    if draft_row is not None:
        draft[draft_row] = value
    if target_row is not None:
        target[target_row] = value
    made = check(draft, target, Sampling(temperature=1.0, seed=3, is_seeded=is_seeded, top_p=0.9))
    assert made.token_ids is None if num_judged is None else made.num_judged == num_judged


def test_equal_rows_are_always_accepted_and_disjoint_ones_never() -> None:
    _, target = some_logits(64)
    other = target[:NUM_DRAFT].clone()
    other[:, :32], target[:, 32:] = -INF, -INF
    for seed in range(3):
        sampling = Sampling(temperature=1.0, seed=seed)
        same = check(target[:NUM_DRAFT], target, sampling)
        assert same.token_ids is not None and len(same.token_ids) == NUM_DRAFT + 1
        disjoint = check(other, target, sampling)
        assert disjoint.token_ids is not None and len(disjoint.token_ids) == 1


def test_other_seeds_draw_other_tokens() -> None:
    logits = some_logits(64)
    texts = {str(make_round(*logits, Sampling(temperature=2.0, seed=seed))) for seed in range(6)}
    assert len(texts) >= 4


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
        "accept_drawn", "accept_drawn", "draw", "draw", "draw", "narrow", "narrow", "narrow",
        "narrow", "propose_drawn", "recover", "weigh",
    ]  # fmt: skip
    for kernel in found:
        assert kernel["num_waits"] == (1 if capability >= 90 else 0)
        assert kernel["early"] == [] or capability < 90
