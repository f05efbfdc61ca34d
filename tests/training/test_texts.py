"""What is held out, what is nearly that, and what a step reads."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

from specpipe.errors import ConfigError
from specpipe.training.batches import Batches
from specpipe.training.collection import Answer
from specpipe.training.texts import SHARED_TOKENS, Parts, divide

OPTIONS = {"max_seq_len": 256, "share": 0.25, "most_held_out": 10**6}


def answer(
    group: int, prompt: Iterable[int], token_ids: Iterable[int] = (7, 8), temperature: float = 0.0
) -> Answer:
    return Answer(
        id=f"{group}",
        prompt_token_ids=tuple(map(int, prompt)),
        token_ids=tuple(map(int, token_ids)),
        finish_reason="length",
        sampling={"temperature": temperature},
        group=f"file{group}.py",
    )


def drawn(seed: int, count: int = 120) -> list[int]:
    return np.random.default_rng(seed).integers(0, 4096, size=count).tolist()


def groups(parts: Parts) -> tuple[set[str], set[str]]:
    return {t.group for t in parts.training}, {t.group for t in parts.held_out}


def test_groups_are_held_out_whole_and_stay_so_when_more_is_collected() -> None:
    answers = [answer(n // 3, drawn(n)) for n in range(60)]
    training, held_out = groups(divide(answers, **OPTIONS))
    assert len(held_out) == 5
    assert not training & held_out
    assert len(training) == 15
    more = [*answers, *(answer(n // 3, drawn(n)) for n in range(60, 72))]
    training_of_more, _ = groups(divide(more, **{**OPTIONS, "share": 5 / 24}))
    # A new group may take the place of one, which is trained on from then on, not the reverse.
    assert len(held_out & training_of_more) <= 4
    assert not (training - training_of_more) - {f"file{n}.py" for n in range(20, 24)}


def test_a_text_that_shares_a_stretch_with_a_held_out_one_is_not_trained_on() -> None:
    answers = [answer(n, drawn(n)) for n in range(40)]
    held_out = divide(answers, **OPTIONS).held_out
    stretch = held_out[0].token_ids[30 : 30 + SHARED_TOKENS]
    training = divide(answers, **OPTIONS).training
    place = next(n for n, a in enumerate(answers) if a.group == training[0].group)
    near = [*drawn(100, 40), *stretch, *drawn(101, 40)]
    almost = [*drawn(102, 40), *stretch[1:], *drawn(103, 40)]  # one token less
    answers[place : place + 1] = [
        answer(place, near),
        answer(place, drawn(104), near),
        answer(place, almost),
    ]
    parts = divide(answers, **OPTIONS)
    assert parts.num_near == 2
    kept = [t for t in parts.training if t.group == f"file{place}.py"]
    assert [t.token_ids[: len(almost)].tolist() for t in kept] == [almost]


def test_a_prompt_that_is_never_trained_on_is_left_out_however_short() -> None:
    answers = [answer(n, [5, n]) for n in range(40)]
    names = [t.prompt for t in divide(answers, **OPTIONS).training]
    parts = divide(answers, **OPTIONS, never=[[5, n] for n in range(40)][:20])
    assert parts.num_near == len(names) - len(parts.training) > 0
    assert all(t.token_ids[1] >= 20 for t in parts.training)


def test_what_is_measured_is_some_of_each_group_and_kind() -> None:
    answers = [answer(n % 8, drawn(n), temperature=n // 40) for n in range(80)]
    parts = divide(answers, max_seq_len=256, share=0.25, most_held_out=8)  # 4 answers of 2 tokens
    assert len({(t.group, t.is_greedy) for t in parts.held_out}) == len(parts.held_out) == 4
    assert not {t.group for t in parts.training} & {t.group for t in parts.held_out}


def test_a_prompt_that_fills_the_length_is_counted_and_a_longer_answer_is_cut() -> None:
    answers = [answer(n, drawn(n, 8 if n % 2 else 3), range(20)) for n in range(40)]
    parts = divide(answers, **{**OPTIONS, "max_seq_len": 8})
    assert parts.num_too_long == 20
    assert {len(t.token_ids) for t in parts.training} == {8}


def test_a_length_that_every_prompt_fills_is_refused() -> None:
    with pytest.raises(
        ConfigError, match="the prompts of all 4 answers fill 8 tokens: raise --max"
    ):
        divide([answer(n, drawn(n, 9)) for n in range(4)], **{**OPTIONS, "max_seq_len": 8})


@pytest.mark.parametrize("num_groups", [1, 2])
def test_too_few_groups_are_refused(num_groups: int) -> None:
    with pytest.raises(ConfigError, match="collect answers to prompts of more groups"):
        divide([answer(n, drawn(n)) for n in range(num_groups)], **OPTIONS)


def test_an_epoch_reads_each_text_once_and_no_batch_is_too_large() -> None:
    texts = divide([answer(n, drawn(n, 5 + n)) for n in range(60)], **OPTIONS).training
    batches = Batches(
        texts,
        num_steps=None,
        num_epochs=2.0,
        per_step=1,
        batch_tokens=128,
        seed=3,
        padding=0,
    )
    lengths = []
    epochs: list[list[bytes]] = [[], []]
    for number in range(len(batches)):
        batch = batches[number]
        assert batch.number == number
        lengths.append(batch.token_ids.numel())
        for row, end in zip(batch.token_ids, batch.ends, strict=True):
            epochs[2 * number // len(batches)].append(row[: end + 1].numpy().tobytes())
    expected = sorted(t.token_ids.tobytes() for t in texts)
    assert [sorted(epoch) for epoch in epochs] == [expected, expected]
    assert epochs[0] != epochs[1]
    assert max(lengths) <= 128


def test_each_row_of_a_step_counts_alike_whichever_of_its_batches_it_is_in() -> None:
    answers = [answer(n, drawn(n, 3 + n % 7), drawn(n, 2 + n)) for n in range(60)]
    texts = divide(answers, **OPTIONS).training
    batches = Batches(
        texts, num_steps=3, num_epochs=1.0, per_step=4, batch_tokens=256, seed=3, padding=0
    )
    generator = np.random.default_rng(0)
    for step in range(3):
        losses, means = [], []
        for number in range(4 * step, 4 * step + 4):
            batch = batches[number]
            rows = generator.uniform(size=int((batch.ends - batch.starts).sum()))
            losses += rows.tolist()
            means.append(batches.weight(number) * rows.mean())
        assert np.mean(means) == pytest.approx(np.mean(losses))


@pytest.mark.parametrize(
    ("size", "message"),
    [
        ({"per_step": 4}, "lower --batch-tokens or --accumulate"),
        ({"num_epochs": 1e300}, "than 2,000,000 batches: lower --steps, --epochs or --accumulate"),
        ({"num_steps": 10**18}, "than 2,000,000 batches"),
        ({"num_steps": 1, "per_step": 10**12}, "than 2,000,000 batches"),
    ],
)
def test_more_or_less_than_can_be_trained_on_is_refused(size: dict[str, Any], message: str) -> None:
    texts = divide([answer(n, drawn(n, 5)) for n in range(8)], **OPTIONS).training
    with pytest.raises(ConfigError, match=message):
        Batches(
            texts,
            **{"num_steps": None, "num_epochs": 1.0, "per_step": 1, **size},
            batch_tokens=4096,
            seed=0,
            padding=0,
        )
