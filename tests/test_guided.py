"""Guided answers of the quickstart pair: what each must be, and the same for every draft length."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from specpipe.build.stages.convert import convert
from specpipe.runtimes.pair.pair import Pair, PairOptions
from specpipe.runtimes.runtime import load_runtime
from specpipe.runtimes.torch.build import BuildTorchEngine
from specpipe.speculative.guide import Guide
from specpipe.speculative.request import GREEDY, Chunk, Request, Sampling
from specpipe.text.tokenizer import Tokenizer
from tests import guided

pytest.importorskip("torch")

CHECKPOINTS = Path(__file__).parents[1] / "models" / "python-code"
SEEDED = Sampling(temperature=0.8, top_p=0.95, seed=11, is_seeded=True)
SAMPLINGS = {"greedy": GREEDY, "seeded": SEEDED}
DRAFT_LENGTHS = (0, 1, 4, 8)
PROMPT = "def person():\n    return "


@dataclasses.dataclass(frozen=True)
class Answer:
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(CHECKPOINTS / "target")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Pair:
    folder = tmp_path_factory.mktemp("guided")
    for role in ("draft", "target"):
        checkpoint, engine = folder / role / "checkpoint", folder / role / "engine"
        checkpoint.mkdir(parents=True)
        engine.mkdir()
        convert(CHECKPOINTS / role, checkpoint)
        BuildTorchEngine(
            role=role,  # type: ignore[arg-type]
            checkpoint=checkpoint,
            max_batch_size=8,
            max_seq_len=1024,
            max_draft_len=8,
            max_num_tokens=256,
            dtype="float32",
            device="cpu",
        ).run(engine)
    return load_runtime("torch").load_pair(
        folder / "draft" / "engine",
        folder / "target" / "engine",
        PairOptions(num_draft_tokens=8, adaptive=False, max_queue_size=1000),
        tokenizer.detokenizer,
        tokenizer.guides,
    )


def answers(
    pair: Pair,
    tokenizer: Tokenizer,
    guides: Mapping[str, Guide],
    asked: Sequence[tuple[str, int]],
    *,
    max_tokens: int = 96,
    at_once: int = 8,
) -> dict[tuple[str, str, int], Answer]:
    """What each guide gives, for samplings by name and draft lengths."""
    requests = []
    for index, (name, guide) in enumerate(guides.items()):
        for sampling_name, num_draft_tokens in asked:
            sampling = SAMPLINGS[sampling_name]
            if not sampling.is_greedy:
                sampling = dataclasses.replace(sampling, seed=sampling.seed + index)
            requests.append(
                Request(
                    request_id=json.dumps([name, sampling_name, num_draft_tokens]),
                    prompt_token_ids=tuple(tokenizer.encode(PROMPT)),
                    max_tokens=max_tokens,
                    num_draft_tokens=num_draft_tokens,
                    sampling=sampling,
                    end_token_ids=tokenizer.end_token_ids,
                    guide=guide,
                )
            )
    chunks: dict[str, list[Chunk]] = {r.request_id: [] for r in requests}
    for first in range(0, len(requests), at_once):
        for request in requests[first : first + at_once]:
            pair.submit(request)
        while pair.has_work():
            for chunk in pair.step():
                chunks[chunk.request_id].append(chunk)
    return {
        tuple(json.loads(name)): Answer(
            "".join(c.text for c in found),
            tuple(i for c in found for i in c.token_ids),
            found[-1].finish_reason,
        )
        for name, found in chunks.items()
    }


def check(guides: Mapping[str, Guide], found: Mapping[tuple[str, str, int], Answer]) -> None:
    num_ended = 0
    for (name, sampling_name, num_draft_tokens), answer in found.items():
        assert answer == found[name, sampling_name, 0], (name, sampling_name, num_draft_tokens)
        is_ended = answer.finish_reason == "stop"
        assert is_ended or answer.finish_reason == "length"
        guided.check(name, guides[name], answer.text, is_ended=is_ended)
        num_ended += is_ended
    assert num_ended >= 0.8 * len(found)


MATRIX = [(name, length) for name in SAMPLINGS for length in DRAFT_LENGTHS]


def test_guided_answers_of_eight_streams(pair: Pair, tokenizer: Tokenizer) -> None:
    """Of all guides, draft lengths and samplings beside one another."""
    check(guided.GUIDES, answers(pair, tokenizer, guided.GUIDES, MATRIX))


@pytest.mark.parametrize(
    "lengths", [(0, 4), pytest.param(DRAFT_LENGTHS, marks=pytest.mark.slow)], ids=str
)
def test_guided_answers_of_one_stream(
    pair: Pair, tokenizer: Tokenizer, lengths: Sequence[int]
) -> None:
    asked = [(name, length) for name in SAMPLINGS for length in lengths]
    check(guided.GUIDES, answers(pair, tokenizer, guided.GUIDES, asked, at_once=1))


def test_a_cut_answer_begins_as_one_that_its_guide_allows(pair: Pair, tokenizer: Tokenizer) -> None:
    asked = [("greedy", 0), ("greedy", 8)]
    found = answers(pair, tokenizer, guided.GUIDES, asked, max_tokens=5)
    for (name, _, _), answer in found.items():
        assert answer == found[name, "greedy", 0]
        guided.check(
            name, guided.GUIDES[name], answer.text, is_ended=answer.finish_reason == "stop"
        )
    assert {a.finish_reason for a in found.values()} == {"stop", "length"}


@pytest.mark.slow
@pytest.mark.parametrize("at_once", [1, 8])
def test_a_hundred_guides(pair: Pair, tokenizer: Tokenizer, at_once: int) -> None:
    guides = guided.many()
    assert len(guides) == 100
    check(guides, answers(pair, tokenizer, guides, MATRIX, at_once=at_once))
