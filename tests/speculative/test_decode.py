import numpy as np
import pytest

from specpipe.speculative.decode import decode
from specpipe.speculative.request import Chunk, Request, Sampling
from tests.speculative.table import (
    DRAFT_RULES,
    NoisyModel,
    ScriptedModel,
    TableModel,
    new_state,
    target_rule,
)


def run(request: Request, target: object, draft: object = None, **limits: int) -> list[Chunk]:
    return list(decode(new_state(request, **limits), target, draft))  # type: ignore[arg-type]


def ids(chunks: list[Chunk]) -> list[int]:
    return [i for chunk in chunks for i in chunk.token_ids]


def request(prompt_length: int = 3, **settings: object) -> Request:
    arguments: dict[str, object] = {
        "request_id": "r",
        "prompt_token_ids": tuple(range(4, 4 + prompt_length)),
        "max_tokens": 17,
        **settings,
    }
    return Request(**arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("draft_name", DRAFT_RULES)
@pytest.mark.parametrize("num_draft_tokens", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("prompt_length", [1, 7, 60])
@pytest.mark.parametrize("max_tokens", [1, 2, 17, 32])
def test_greedy_output_equals_target_only(
    draft_name: str, num_draft_tokens: int, prompt_length: int, max_tokens: int
) -> None:
    r = request(prompt_length, max_tokens=max_tokens, num_draft_tokens=num_draft_tokens)
    chunks = run(r, TableModel(target_rule), TableModel(DRAFT_RULES[draft_name]))
    expected = list(r.prompt_token_ids)
    for _ in range(max_tokens):
        expected.append(target_rule(expected))
    assert ids(chunks) == expected[prompt_length:]
    assert chunks[-1].finish_reason == "length"


@pytest.mark.parametrize(
    ("draft_name", "num_steps", "drafted", "accepted"),
    [("self", 5, 12, 12), ("wrong", 17, None, 0)],
)
def test_steps_and_counts_of_the_controls(
    draft_name: str, num_steps: int, drafted: int | None, accepted: int
) -> None:
    r = request(num_draft_tokens=3)
    statistics = run(r, TableModel(target_rule), TableModel(DRAFT_RULES[draft_name]))[-1].statistics
    assert statistics is not None
    assert statistics.num_steps == num_steps
    assert statistics.total_accepted_draft_tokens == accepted
    if drafted is not None:
        assert statistics.total_draft_tokens == drafted


@pytest.mark.parametrize("num_draft_tokens", [0, 1, 3, 8])
@pytest.mark.parametrize("blend", [0.0, 0.3, 3.0])
def test_seeded_output_does_not_depend_on_draft_or_draft_length(
    num_draft_tokens: int, blend: float
) -> None:
    sampling = Sampling(
        temperature=0.9,
        top_k=9,
        top_p=0.95,
        min_p=0.02,
        repetition_penalty=1.1,
        presence_penalty=0.2,
        frequency_penalty=0.1,
        min_tokens=6,
        bad_words=((4, 5), (7,)),
        seed=2**40 + 5,
        is_seeded=True,
    )
    r = request(
        sampling=sampling,
        num_draft_tokens=num_draft_tokens,
        max_tokens=40,
        end_token_ids=frozenset({3}),
    )
    target = NoisyModel(1)
    speculative = run(r, target, NoisyModel(2, blend=blend), vocab_size=12)
    alone = run(r, target, None, vocab_size=12)
    assert ids(speculative) == ids(alone)
    assert speculative[-1].finish_reason == alone[-1].finish_reason
    # The logits of the position and the warped ones differ, so do their log-probabilities.
    assert len(ids(alone)) >= 6


def test_a_draft_that_equals_the_target_is_always_accepted_when_seeded() -> None:
    sampling = Sampling(temperature=1.0, seed=3, is_seeded=True)
    r = request(sampling=sampling, num_draft_tokens=4, max_tokens=50)
    statistics = run(r, NoisyModel(1), NoisyModel(1), vocab_size=12)[-1].statistics
    assert statistics is not None and statistics.acceptance_rate == 1.0


def test_unseeded_output_has_the_distribution_of_the_target() -> None:
    """Pairs of tokens, so that what follows an accepted and what follows a rejected token both
    count.
    """
    target, draft = NoisyModel(1, vocab_size=4), NoisyModel(2, vocab_size=4, blend=1.0)
    sampling = {"temperature": 0.8, "top_p": 0.97}

    def counts(draft_model: NoisyModel | None, seeds: range) -> np.ndarray:
        table = np.zeros((4, 4))
        for seed in seeds:
            r = request(
                1,
                prompt_token_ids=(1,),
                max_tokens=2,
                num_draft_tokens=1,
                sampling=Sampling(**sampling, seed=seed),  # type: ignore[arg-type]
            )
            first, second = ids(run(r, target, draft_model, vocab_size=4))
            table[first, second] += 1
        return table

    num_draws = 2000
    speculative = counts(draft, range(num_draws)).ravel()
    alone = counts(None, range(num_draws, 2 * num_draws)).ravel()
    seen = speculative + alone > 0
    difference = (speculative - alone)[seen] ** 2 / (speculative + alone)[seen]
    assert difference.sum() < 50.0  # at most 15 degrees of freedom: p < 2e-5 beyond


def test_draft_that_returns_nothing_makes_a_plain_step() -> None:
    class SilentInRoundTwo(TableModel):
        def logits(self, token_ids: object, num_rows: int) -> np.ndarray:
            rows = super().logits(token_ids, num_rows)  # type: ignore[arg-type]
            return rows * np.nan if len(token_ids) == 7 else rows  # type: ignore[arg-type]

    target = TableModel(target_rule)
    chunks = run(request(num_draft_tokens=3), target, SilentInRoundTwo(target_rule))
    expected = ids(run(request(num_draft_tokens=0), TableModel(target_rule)))
    assert ids(chunks) == expected
    assert target.num_logits_asked == [4, 1, 4, 4, 4]


def test_end_id_and_what_follows_in_a_block_are_cut() -> None:
    target = ScriptedModel(3, [10, 11, 2, 20, 21])
    draft = ScriptedModel(3, [10, 11, 2, 20, 21])
    (chunk,) = run(request(num_draft_tokens=4, end_token_ids=frozenset({2})), target, draft)
    assert (chunk.text, chunk.token_ids, chunk.finish_reason) == ("w10 w11 ", (10, 11), "stop")
    statistics = chunk.statistics
    assert statistics is not None
    assert statistics.num_output_tokens == 2
    assert (statistics.total_draft_tokens, statistics.total_accepted_draft_tokens) == (3, 3)


def test_any_of_several_end_ids_ends() -> None:
    target = ScriptedModel(3, [10, 11, 3, 20, 21])
    (chunk,) = run(request(num_draft_tokens=4, end_token_ids=frozenset({2, 3})), target, target)
    assert (chunk.text, chunk.finish_reason) == ("w10 w11 ", "stop")


def test_cap_inside_a_block() -> None:
    target = TableModel(target_rule)
    chunks = run(request(num_draft_tokens=3, max_tokens=6), target, TableModel(target_rule))
    assert len(ids(chunks)) == 6
    assert chunks[-1].finish_reason == "length"
    assert target.num_logits_asked == [4, 2]


def test_draft_that_proposes_the_end_id_first() -> None:
    end_first = TableModel(lambda context: 2)
    r = request(num_draft_tokens=3, end_token_ids=frozenset({2}))
    assert ids(run(r, TableModel(target_rule), end_first)) == ids(run(r, TableModel(target_rule)))


def test_context_end_finishes_with_length() -> None:
    chunks = run(
        request(num_draft_tokens=4, max_tokens=9),
        TableModel(target_rule),
        TableModel(target_rule),
        max_seq_len=10,
    )
    assert len(ids(chunks)) == 7
    assert chunks[-1].finish_reason == "length"


def test_draft_with_a_shorter_context_drafts_less_then_nothing() -> None:
    target = TableModel(target_rule)
    chunks = run(request(num_draft_tokens=4), target, TableModel(target_rule), draft_max_seq_len=10)
    assert ids(chunks) == ids(run(request(num_draft_tokens=0), TableModel(target_rule)))
    # 3, 8 and 11 tokens are there: 4 drafts, then 3 (10 - 8 + 1), then none.
    assert target.num_logits_asked == [5, 4] + [1] * 8


def test_nan_of_the_target_behind_a_rejected_token_does_no_harm() -> None:
    class NanAfterWrong(TableModel):
        def logits(self, token_ids: object, num_rows: int) -> np.ndarray:
            rows = super().logits(token_ids, num_rows)  # type: ignore[arg-type]
            rows[1:] = np.nan
            return rows

    chunks = run(
        request(num_draft_tokens=3), NanAfterWrong(target_rule), TableModel(DRAFT_RULES["wrong"])
    )
    assert ids(chunks) == ids(run(request(), TableModel(target_rule)))


def test_nan_of_the_target_fails_the_request() -> None:
    class NanAtFive(TableModel):
        def logits(self, token_ids: object, num_rows: int) -> np.ndarray:
            rows = super().logits(token_ids, num_rows)  # type: ignore[arg-type]
            return rows * np.nan if len(token_ids) == 5 else rows  # type: ignore[arg-type]

    chunks = run(request(num_draft_tokens=0), NanAtFive(target_rule))
    assert len(ids(chunks)) == 2
    assert chunks[-1].finish_reason == "error"
    assert chunks[-1].error == "the target model returned NaN, or no token is allowed here"


def test_log_probs_are_those_of_the_raw_target_logits() -> None:
    sampling = Sampling(temperature=0.5, top_k=3, repetition_penalty=1.5, seed=1, is_seeded=True)
    r = request(
        sampling=sampling,
        return_log_probs=True,
        num_top_log_probs=2,
        return_prompt_log_probs=True,
        num_draft_tokens=2,
    )
    target = NoisyModel(1)
    chunks = run(r, target, NoisyModel(2, blend=0.2), vocab_size=12)
    text = [*r.prompt_token_ids, *ids(chunks)]
    found = [*chunks[0].prompt_log_probs, *(p for c in chunks for p in c.log_probs)]
    top = [*chunks[0].prompt_top_log_probs, *(t for c in chunks for t in c.top_log_probs)]
    assert len(found) == len(top) == len(text) - 1
    for at, (log_prob, likeliest) in enumerate(zip(found, top, strict=True), 1):
        row = target.logits(text[:at], 1)[0]
        log_probs = row - np.log(np.exp(row).sum())
        assert log_prob == pytest.approx(log_probs[text[at]], abs=1e-12)
        best = sorted(range(12), key=lambda i: -log_probs[i])[:2]
        assert [i for i, _ in likeliest] == best
        assert [p for _, p in likeliest] == pytest.approx(log_probs[best].tolist(), abs=1e-12)


def test_a_prompt_alone_is_scored_and_nothing_decoded() -> None:
    target = TableModel(target_rule)
    r = request(3, return_prompt_log_probs=True, max_tokens=0, echo=True)
    (chunk,) = run(r, target, TableModel(target_rule))
    assert target.num_logits_asked == [2]
    # Neither token is the one of the rule, whose score is 1 among 103 of 0: 0 - log(e + 103).
    assert chunk.prompt_log_probs == pytest.approx([-4.660781] * 2, abs=1e-5)
    assert (chunk.token_ids, chunk.log_probs, chunk.finish_reason) == ((), (), "length")
    assert chunk.statistics is not None
    assert (chunk.statistics.num_steps, chunk.statistics.draft_status) == (0, "too_short")
