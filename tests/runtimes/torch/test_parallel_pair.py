"""A parallel draft from its checkpoint to answers: what comes out is the target's own."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from specpipe.build.pairing import check_pair
from specpipe.build.stages.convert import convert
from specpipe.runtimes.pair.engine_pair import EnginePair
from specpipe.runtimes.pair.pair import PairOptions
from specpipe.runtimes.torch.build import BuildTorchEngine
from specpipe.runtimes.torch.describe import describe
from specpipe.runtimes.torch.pair import load_pair
from specpipe.speculative.request import GREEDY, Request, Sampling
from tests import toy_tokenizers
from tests.runtimes.table_engine import ids, run
from tests.speculative.table import WordDetokenizer
from tests.toy import write_toy_checkpoint

MASK = 250
SEEDED = Sampling(temperature=0.9, top_k=40, repetition_penalty=1.1, seed=3, is_seeded=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Engines of a target, of a draft with the same weights, and of one with others."""
    folder = tmp_path_factory.mktemp("parallel")
    for name, seed in (("target", 1), ("self", 1), ("other", 2)):
        keys = {} if name == "target" else {"pard_token": MASK, "specpipe_num_draft_tokens": 8}
        checkpoint = write_toy_checkpoint(folder / name, seed=seed, dtype="float32", **keys)
        toy_tokenizers.write_tokenizer(checkpoint, toy_tokenizers.words())
        unified, engine = folder / f"{name}-unified", folder / f"{name}-engine"
        unified.mkdir()
        engine.mkdir()
        convert(checkpoint, unified)
        BuildTorchEngine(
            role="target" if name == "target" else "draft",
            checkpoint=unified,
            max_batch_size=4,
            max_seq_len=128,
            max_draft_len=8,
            max_num_tokens=64,
            device="cpu",
        ).run(engine)
    return folder


def load(folder: Path, draft: str, **options: object) -> EnginePair:
    contract = check_pair(folder / draft, folder / "target")
    settings: dict[str, object] = {"num_draft_tokens": 8, "adaptive": False, **options}
    return load_pair(
        folder / f"{draft}-engine",
        folder / "target-engine",
        PairOptions(
            max_batch_size=4,
            max_seq_len=128,
            max_num_tokens=64,
            unused_token_ids=contract.unused_token_ids,
            parallel=contract.parallel,
            **settings,  # type: ignore[arg-type]
        ),
        lambda prompt, **_: WordDetokenizer(),
    )


def requests(sampling: Sampling, num_draft_tokens: int | None) -> list[Request]:
    """Of one to 110 tokens, each as long as its context allows or 24."""
    return [
        Request(
            request_id=str(length),
            prompt_token_ids=tuple(4 + (7 * n + length) % 240 for n in range(length)),
            max_tokens=min(128 - length, 24),
            num_draft_tokens=num_draft_tokens,
            sampling=sampling,
        )
        for length in (1, 17, 64, 110)
    ]


def answers(
    pair: EnginePair, sampling: Sampling, num_draft_tokens: int | None
) -> dict[str, list[int]]:
    asked = requests(sampling, num_draft_tokens)
    return {name: ids(chunks) for name, chunks in run(pair, asked).items()}


@pytest.mark.parametrize(
    ("draft", "lengths"),
    [
        ("self", (8,)),
        ("other", (1, 4)),
        *(pytest.param(d, range(1, 9), marks=pytest.mark.slow) for d in ("self", "other")),
    ],
)
def test_answers_are_those_of_the_target_alone(
    folder: Path, draft: str, lengths: Sequence[int]
) -> None:
    pair = load(folder, draft)
    for sampling in (GREEDY, SEEDED):
        alone = answers(pair, sampling, 0)
        assert all(MASK not in answer for answer in alone.values())
        for num_draft_tokens in lengths:
            assert answers(pair, sampling, num_draft_tokens) == alone


def test_adaptive_answers_are_those_of_the_target_alone(folder: Path) -> None:
    alone = answers(load(folder, "self"), SEEDED, 0)
    assert answers(load(folder, "self", adaptive=True, prompt_lookup=True), SEEDED, None) == alone


def test_the_first_token_of_a_draft_with_the_targets_weights_always_stands(folder: Path) -> None:
    """What the draft cached of earlier masks would change it."""
    for chunks in run(load(folder, "self"), requests(GREEDY, 8)).values():
        statistics = chunks[-1].statistics
        assert statistics is not None and statistics.acceptance_histogram is not None
        assert statistics.acceptance_histogram[0] == 0
        assert sum(statistics.acceptance_histogram) > 5


def test_the_engine_and_its_description_say_how_it_drafts(folder: Path) -> None:
    config = json.loads((folder / "self-engine" / "config.json").read_text())
    assert config["pretrained_config"]["pard_token"] == MASK
    described = describe(folder / "self-engine")
    assert described is not None
    assert described.settings == {"device": "cpu", "mask_token_id": MASK, "num_draft_tokens": 8}
