"""Unseeded sampling over table models: the right rule passes, every biased one is flagged."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

pytest.importorskip("scipy")
torch = pytest.importorskip("torch")

from scipy import stats  # noqa: E402

from specpipe.errors import RequestError, ServerError  # noqa: E402
from specpipe.evaluate.endpoints.base import Piece, Usage  # noqa: E402
from specpipe.evaluate.verification.asking import Case  # noqa: E402
from specpipe.evaluate.verification.bins import END, MAX_NUM_BINS, OTHER, Beginning, Bins, make_bins  # noqa: E402
from specpipe.evaluate.verification.distribution import (  # noqa: E402
    FALSE_ALARM,
    SETTINGS,
    Finding,
    PlannedTest,
    Setting,
    _test,
    holm,
    make_plans,
    reason,
    run_tests,
    sample_size,
    skip_reason,
)
from specpipe.runtimes.pair import torch_sampler as torch_sampling  # noqa: E402
from specpipe.runtimes.pair.sampler import Drafted, RoundResult  # noqa: E402
from specpipe.speculative import noise  # noqa: E402
from specpipe.speculative.noise import Purpose  # noqa: E402
from specpipe.speculative.request import Sampling  # noqa: E402
from tests.evaluate.endpoints.scripted import Scripted  # noqa: E402
from tests.evaluate.verification.table import RememberingModel, TableScorer, endpoint  # noqa: E402

TARGET = RememberingModel(1, blend=0.5)
DRAFT = RememberingModel(2, blend=0.5)
CASES = [Case(name=f"p{i}", token_ids=(3, 4 + i, 5), max_tokens=8) for i in range(4)]
DISTANCE = 0.15


def run_all(**settings: Any) -> list[Finding]:
    """All tests of the table pair."""
    plans = make_plans(
        TableScorer(TARGET),
        CASES,
        distance=DISTANCE,
        max_num_draft_tokens=4,
        end_token_ids=frozenset({0}),
        **settings,
    )
    with endpoint(TARGET, DRAFT) as pair:
        return run_tests(plans, pair, at_once=4)


def flagged(tested: Sequence[Finding]) -> list[str]:
    return [test.plan.setting.name for test in tested if test.is_flagged]


def test_the_right_rule_passes() -> None:
    tested = run_all()
    assert len(tested) == 10
    assert flagged(tested) == []
    assert max(test.distance for test in tested) < DISTANCE
    assert all(reason(test) is None for test in tested)
    assert all(test.num_failed == 0 and test.target_p_value is None for test in tested)


def test_the_same_test_finds_the_same() -> None:
    settings = {"num_prompts": 1, "settings": [SETTING]}
    assert [t.to_json() for t in run_all(**settings)] == [t.to_json() for t in run_all(**settings)]


SETTING = Setting(name="T = 1", sampling=Sampling(temperature=1.0), num_draft_tokens=1)


def biased_verify(*, accepts_the_argmax: bool = False, draws_from_the_target: bool = False) -> Any:
    """The accept test of the torch runtime with a fault in it."""

    def verify(drafted: Drafted, choices: Any, first: int, end: int) -> RoundResult:
        accepted: list[int] = []
        pairs = zip(drafted.token_ids, drafted.probs.values(), strict=True)
        for index, (token_id, draft_probs) in enumerate(pairs, first):
            row = choices.rows[index]
            target_probs = choices.probs(index)
            accept = float(noise.uniform(row.sampling.seed, row.position, Purpose.ACCEPT, 1)[0])
            if accepts_the_argmax:
                is_accepted = token_id == int(target_probs.argmax())
            else:
                is_accepted = bool(accept * draft_probs[token_id] < target_probs[token_id])
            if is_accepted:
                accepted.append(token_id)
                continue
            residual = (target_probs - draft_probs).clamp_min(0.0)
            weights = target_probs if accepts_the_argmax or draws_from_the_target else residual
            accepted += torch_sampling._draw(weights.log()[None], [row], Purpose.RECOVERED)
            return RoundResult(accepted, num_draft_tokens=len(drafted.token_ids))
        bonus = choices.token_ids[first + len(accepted)]
        return RoundResult([*accepted, bonus], num_draft_tokens=len(drafted.token_ids))

    return verify


def test_the_stand_in_without_a_fault_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_sampling, "_verify", biased_verify())
    assert flagged(run_all(num_prompts=1)) == []


def test_greedy_accept_at_temperature_1_is_flagged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_sampling, "_verify", biased_verify(accepts_the_argmax=True))
    tested = run_all(num_prompts=1)
    assert len(flagged(tested)) == 5
    # Without a draft there is nothing to accept: the target alone is right.
    assert all((test.target_p_value or 0.0) > FALSE_ALARM for test in tested)
    first = reason(tested[0])
    assert first is not None
    assert first.startswith("sampling, T = 1, K = 1, p")
    assert "are not distributed as the target's" in first
    assert "neither" not in first


def test_a_residual_drawn_from_the_target_is_flagged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_sampling, "_verify", biased_verify(draws_from_the_target=True))
    assert flagged(run_all(num_prompts=1, settings=[SETTING])) == ["T = 1"]


def test_a_forgotten_draft_temperature_is_flagged(monkeypatch: pytest.MonkeyPatch) -> None:
    """The draft draws at the temperature, and the accept test takes its probabilities at 1."""
    draft = torch_sampling.TorchSampler.draft

    def forgetful(
        self: torch_sampling.TorchSampler, logits: torch.Tensor, drafted: Sequence[Drafted]
    ) -> list[bool]:
        probs = logits.double().softmax(dim=-1)
        found = draft(self, logits, drafted)
        for row, one in zip(probs, drafted, strict=True):
            one.probs[len(one.token_ids) - 1] = row
        return found

    monkeypatch.setattr(torch_sampling.TorchSampler, "draft", forgetful)
    settings = [setting for setting in SETTINGS if setting.num_draft_tokens == 2]
    assert [setting.name for setting in settings] == ["T = 1", "T = 0.6"]
    # At 1 there is nothing to forget.
    assert flagged(run_all(num_prompts=1, settings=settings)) == ["T = 0.6"]


def test_a_target_that_samples_otherwise_than_its_logits_is_told_from_a_wrong_rule() -> None:
    plans = make_plans(
        TableScorer(TARGET),
        CASES,
        distance=DISTANCE,
        max_num_draft_tokens=4,
        end_token_ids=frozenset({0}),
        settings=[SETTING],
    )
    with endpoint(RememberingModel(3, blend=0.5), DRAFT) as pair:
        tested = run_tests(plans, pair, at_once=4)
    assert all(test.is_flagged for test in tested)
    assert all(
        (reason(test) or "").endswith("neither are those without a draft") for test in tested
    )


def test_a_failed_request_is_no_sample_and_a_fault() -> None:
    """The pair drafts 8 tokens at most, so that 9 are refused."""
    setting = Setting(name="T = 1", sampling=Sampling(temperature=1.0), num_draft_tokens=9)
    plan = PlannedTest(
        case=CASES[0],
        setting=setting,
        bins=Bins(np.array([1.0]), {(OTHER,): 0}, frozenset({()})),
        num_samples=3,
        seed=0,
    )
    with endpoint(TARGET, DRAFT) as pair:
        (tested,) = run_tests([plan], pair, at_once=1)
    assert (tested.num_failed, tested.p_value) == (3, 1.0)
    assert reason(tested) == "sampling, T = 1, K = 9, p0: 3 requests failed"


@pytest.mark.parametrize(
    ("event", "said"),
    [
        (Piece(finish_reason="stop", usage=Usage(is_lossless=True)), None),
        (Piece(finish_reason="stop"), None),
        (
            Piece(finish_reason="stop", usage=Usage(is_lossless=False)),
            "the server says that it does not keep the target's distribution, as its config allows",
        ),
        (
            RequestError("temperature is 1.0: it samples from another distribution; leave it out"),
            "the server refuses it: temperature is 1.0: it samples from another distribution; leave"
            " it out",
        ),
        (ServerError("out of memory"), None),
    ],
)
def test_a_server_may_object_to_being_tested_and_does_not_by_failing(
    event: Piece | Exception, said: str | None
) -> None:
    plan = PlannedTest(
        case=CASES[0],
        setting=SETTING,
        bins=Bins(np.array([1.0]), {(OTHER,): 0}, frozenset({()})),
        num_samples=3,
        seed=0,
    )
    server = Scripted(lambda question: [(0.1, event)])
    assert skip_reason(plan, server) == said
    (question,) = server.asked
    assert (question.num_draft_tokens, question.sampling.temperature) == (None, 1.0)


def test_sample_size_follows_the_distance_and_the_number_of_tests() -> None:
    """By hand for one test: the chi-squared of 24 degrees that 0.001 exceeds is 51.18, and a
    non-centrality of 46.0 exceeds it with probability 0.9; 46.0 / (4 · 0.1^2) = 1150.
    """
    assert stats.chi2.isf(0.001, 24) == pytest.approx(51.18, abs=0.01)
    assert sample_size(0.1, 1) == pytest.approx(1150, abs=2)
    assert sample_size(0.05, 1) == pytest.approx(4 * sample_size(0.1, 1), abs=4)
    assert sample_size(0.1, 10) > sample_size(0.1, 1)


@pytest.mark.parametrize("num_bins", [5, MAX_NUM_BINS])
def test_the_power_is_what_is_promised_and_the_false_alarms_too(num_bins: int) -> None:
    """The least visible of all distributions at that distance: each probability a little off."""
    right = np.full(num_bins, 1.0 / num_bins)
    num_shifted = num_bins // 2
    wrong = right.copy()
    wrong[:num_shifted] += DISTANCE / num_shifted
    wrong[num_shifted : 2 * num_shifted] -= DISTANCE / num_shifted
    assert np.abs(wrong - right).sum() / 2 == pytest.approx(DISTANCE)
    bins = Bins(right, {(i,): i for i in range(num_bins)}, frozenset({()}))
    plan = PlannedTest(
        case=CASES[0], setting=SETTING, bins=bins, num_samples=sample_size(DISTANCE, 1), seed=0
    )
    generator = np.random.default_rng(7)

    def share_flagged(probs: np.ndarray, num_trials: int) -> float:
        rejected = 0
        for _ in range(num_trials):
            counts = generator.multinomial(plan.num_samples, probs)
            beginnings: Counter[Beginning] = Counter({(i,): int(c) for i, c in enumerate(counts)})
            rejected += _test(plan, beginnings).p_value <= FALSE_ALARM
        return rejected / num_trials

    assert share_flagged(wrong, 500) > 0.87  # 0.9 less two standard deviations
    assert share_flagged(right, 2000) <= 0.004


def test_holm_by_hand() -> None:
    """0.01 · 4 and 0.013 · 3 are below 0.05, 0.03 · 2 is not, and with it falls 0.04."""
    assert holm([0.04, 0.01, 0.03, 0.013], 0.05) == [False, True, False, True]
    assert holm([], 0.05) == []


PROBS: dict[Beginning, dict[int, float]] = {
    (): {7: 0.5, 8: 0.3, END: 0.15, 9: 0.05},
    (7,): {1: 0.9, 2: 0.1},
    (8,): {1: 0.98, END: 0.02},
}


def test_bins_by_hand() -> None:
    """With 200 samples a bin needs 10 / 200 = 0.05.

    7 1 has 0.45, 7 2 has 0.05, 8 1 has 0.294, END 0.15, and 9 of 0.05 opens nothing more here. Of
    8 END only 0.006 is left, and too little of anything to stand alone: it takes the smallest bin
    along.
    """
    bins = make_bins(
        lambda beginning: PROBS.get(beginning, {5: 1.0}), num_tokens=2, num_samples=200
    )
    assert sorted(bins.probs) == pytest.approx([0.05, 0.056, 0.15, 0.294, 0.45])
    assert bins.probs[bins.place((7, 1))] == pytest.approx(0.45)
    assert bins.probs[bins.place((END,))] == pytest.approx(0.15)
    assert bins.probs[bins.place((8, 1))] == pytest.approx(0.294)
    pooled = bins.place((8, END))
    assert bins.probs[pooled] == pytest.approx(0.056)
    # What the target never says, and what is rare, is pooled too.
    assert bins.place((8, 77)) == bins.place((33, 1)) == bins.place((7, 77)) == pooled


def test_there_are_no_more_bins_than_the_sample_size_allows_for() -> None:
    probs = dict.fromkeys(range(200), 1 / 200)
    bins = make_bins(lambda beginning: probs, num_tokens=1, num_samples=10_000)
    assert len(bins.probs) == MAX_NUM_BINS
    assert bins.probs[bins.place((150,))] + 24 / 200 == pytest.approx(1.0)


def test_the_edge_of_a_cut_is_far_from_rounding() -> None:
    """The cut of top-p lies in the middle of a token's probability."""
    plans = make_plans(
        TableScorer(TARGET),
        CASES,
        distance=DISTANCE,
        max_num_draft_tokens=4,
        end_token_ids=frozenset({0}),
        num_prompts=1,
    )
    plan = next(plan for plan in plans if plan.setting.sampling.top_p < 1.0)
    sampling = plan.setting.sampling
    logits = TARGET.logits(plan.case.token_ids, 1)[0]
    probs = -np.sort(-np.exp(logits / 0.8) / np.exp(logits / 0.8).sum())
    total = np.cumsum(probs)
    cut = int(np.argmax(total >= sampling.top_p))
    assert sampling.top_p == pytest.approx(total[cut] - probs[cut] / 2)
    assert total[cut - 1] < 0.9 <= total[cut]
