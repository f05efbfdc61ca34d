"""Unseeded sampling: are the first tokens of an answer distributed as the target's own?

Each test asks one prompt very often and compares how often each beginning of an answer came with
its probability under the target's own logits, by Pearson's chi-squared test. Its sample size is
such that a distribution at a stated total-variation distance is flagged with a stated power,
whatever it looks like: a distribution q at distance d from p has

    sum (q - p)^2 / p  >=  (sum |q - p|)^2  =  4 d^2        (Cauchy-Schwarz)

so that N samples give the test a non-centrality of at least 4 N d^2. Distances are those over the
bins of the test (bins.py): what is rare in a sample is pooled. All tests together
raise a false alarm with a probability of at most FALSE_ALARM (Holm 1979, "A simple sequentially
rejective multiple test procedure").

V is the vocabulary size.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from specpipe.evaluate.endpoints.base import Endpoint, Question, ask
from specpipe.evaluate.verification.asking import Case
from specpipe.evaluate.verification.bins import END, MAX_NUM_BINS, Beginning, Bins, make_bins
from specpipe.evaluate.verification.scorer import ScoredText, Scorer, rows_of
from specpipe.progress import counted
from specpipe.speculative.noise import Floats
from specpipe.speculative.request import Sampling
from specpipe.speculative.warp import softmax, warp

FALSE_ALARM = 0.001
"""The probability that all tests together flag a right distribution: once in 1000 verifications."""

POWER = 0.9
"""The probability that a test flags a distribution at the stated distance, as is usual."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How a test samples.

    num_draft_tokens  per step; num_tokens of the answer are compared. A step drafts at most one
                      less than what is left of an answer, so one token more is asked for
    """

    name: str
    sampling: Sampling
    num_draft_tokens: int
    num_tokens: int = 1


SETTINGS = (
    Setting(name="T = 1", sampling=Sampling(temperature=1.0), num_draft_tokens=1, num_tokens=2),
    Setting(name="T = 1", sampling=Sampling(temperature=1.0), num_draft_tokens=2, num_tokens=2),
    Setting(name="T = 0.6", sampling=Sampling(temperature=0.6), num_draft_tokens=2, num_tokens=2),
    Setting(
        name="T = 0.8, top-p", sampling=Sampling(temperature=0.8, top_p=0.9), num_draft_tokens=1
    ),
    Setting(
        name="T = 1.5, top-k", sampling=Sampling(temperature=1.5, top_k=20), num_draft_tokens=1
    ),
)
"""A second token after one draft token is the bonus token, or drawn by a step of its own."""


def sample_size(distance: float, num_tests: int) -> int:
    """Returns how many samples flag any distribution at that total-variation distance with POWER.

    For the first test of Holm's procedure, which has the smallest level, and for MAX_NUM_BINS bins;
    fewer bins make the power larger.
    """
    from scipy import optimize, stats

    freedom = MAX_NUM_BINS - 1
    critical = stats.chi2.isf(FALSE_ALARM / num_tests, freedom)
    needed = optimize.brentq(
        lambda noncentrality: stats.ncx2.sf(critical, freedom, noncentrality) - POWER, 1e-3, 1e4
    )
    return int(np.ceil(needed / (4.0 * distance**2)))


def holm(p_values: Sequence[float], level: float = FALSE_ALARM) -> list[bool]:
    """Returns which hypotheses are rejected, at a level for all of them together."""
    rejected = [False] * len(p_values)
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        if p_values[index] > level / (len(p_values) - rank):
            break
        rejected[index] = True
    return rejected


@dataclass(frozen=True, kw_only=True)
class PlannedTest:
    """A test that is to be made: what is asked, how often, and what is expected."""

    case: Case
    setting: Setting
    bins: Bins
    num_samples: int
    seed: int

    @property
    def name(self) -> str:
        return f"{self.setting.name}, K = {self.setting.num_draft_tokens}, {self.case.name}"


def make_plans(
    scorer: Scorer,
    cases: Sequence[Case],
    *,
    distance: float,
    max_num_draft_tokens: int,
    end_token_ids: frozenset[int],
    num_prompts: int = 2,
    prompt_length: int = 16,
    settings: Sequence[Setting] = SETTINGS,
    seed: int = 0,
) -> list[PlannedTest]:
    """Plans all tests, on the beginnings of those prompts that the target is least sure after.

    Where it is sure, a wrong distribution would not show.
    """
    settings = [s for s in settings if s.num_draft_tokens <= max_num_draft_tokens]
    short = [dataclasses.replace(case, token_ids=case.token_ids[:prompt_length]) for case in cases]
    logits = {case.name: rows_of(scorer, _text(case, ()))[-1] for case in short}
    open_ones = sorted(short, key=lambda case: -_entropy(softmax(logits[case.name])))[:num_prompts]
    num_samples = sample_size(distance, len(open_ones) * len(settings))
    plans: list[PlannedTest] = []
    for case in open_ones:
        for setting in settings:
            sampling = _with_clear_cut(setting.sampling, logits[case.name])
            chosen = dataclasses.replace(setting, sampling=sampling)
            plans.append(
                PlannedTest(
                    case=case,
                    setting=chosen,
                    bins=make_bins(
                        _next_probs(scorer, case, sampling, end_token_ids),
                        num_tokens=setting.num_tokens,
                        num_samples=num_samples,
                    ),
                    num_samples=num_samples,
                    seed=seed + len(plans) * 1_000_000,
                )
            )
    return plans


def _text(case: Case, output: Beginning) -> ScoredText:
    return ScoredText(case.token_ids, output, case.max_tokens)


def _entropy(probs: Floats) -> float:
    return float(-(probs * np.log(np.maximum(probs, 1e-300))).sum())


def _with_clear_cut(sampling: Sampling, logits: Floats) -> Sampling:
    """Moves the edge of top-k or top-p to where rounding cannot carry a token across.

    For top-k this is the widest gap near it; for top-p the middle of the token that it cuts.
    """
    if sampling.top_k > 1:
        ranked = -np.sort(-logits)
        near = np.arange(max(sampling.top_k // 2, 2), min(2 * sampling.top_k, len(logits) - 1))
        top_k = int(near[np.argmax(ranked[near - 1] - ranked[near])])
        return dataclasses.replace(sampling, top_k=top_k)
    if sampling.top_p < 1.0:
        ranked = -np.sort(-softmax(logits / sampling.temperature))
        total = np.cumsum(ranked)
        cut = int(np.argmax(total >= sampling.top_p))
        return dataclasses.replace(sampling, top_p=float(total[cut] - ranked[cut] / 2))
    return sampling


def _next_probs(
    scorer: Scorer, case: Case, sampling: Sampling, end_token_ids: frozenset[int]
) -> Callable[[Beginning], dict[int, float]]:
    def next_probs(beginning: Beginning) -> dict[int, float]:
        scores = warp(
            rows_of(scorer, _text(case, beginning))[-1],
            sampling,
            prompt=case.token_ids,
            output=beginning,
            end_token_ids=end_token_ids,
        )
        probs = softmax(scores)
        by_token_id = {int(i): float(probs[i]) for i in np.flatnonzero(probs)}
        end = sum(by_token_id.pop(i, 0.0) for i in end_token_ids)
        return {**by_token_id, END: end} if end else by_token_id

    return next_probs


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What a test found.

    distance         total-variation distance of the sample over the bins; chance makes it positive
    target_p_value   the same test of the target without a draft, made where the first one flags
    """

    plan: PlannedTest
    statistic: float
    p_value: float
    distance: float
    num_failed: int
    is_flagged: bool = False
    target_p_value: float | None = None

    def to_json(self) -> dict[str, Any]:
        sampling = self.plan.setting.sampling
        return {
            "test": self.plan.name,
            "prompt": self.plan.case.name,
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "num_draft_tokens": self.plan.setting.num_draft_tokens,
            "num_tokens": self.plan.setting.num_tokens,
            "num_samples": self.plan.num_samples,
            "num_failed": self.num_failed,
            "num_bins": len(self.plan.bins.probs),
            "statistic": self.statistic,
            "p_value": self.p_value,
            "distance": self.distance,
            "is_flagged": self.is_flagged,
            "target_p_value": self.target_p_value,
        }


def reason(tested: Finding) -> str | None:
    """Returns, as a sentence, why a test fails; None when it passes."""
    if tested.num_failed:
        return f"sampling, {tested.plan.name}: {tested.num_failed} requests failed"
    if not tested.is_flagged:
        return None
    text = (
        f"sampling, {tested.plan.name}: {tested.plan.num_samples} answers are not distributed as "
        f"the target's (distance {tested.distance:.3f}, p = {tested.p_value:.1e})"
    )
    assert tested.target_p_value is not None
    if tested.target_p_value <= FALSE_ALARM:
        return f"{text}, and neither are those without a draft"
    return text


def skip_reason(plan: PlannedTest, endpoint: Endpoint) -> str | None:
    """Returns, in a server's words, why its sampled answers are not to be tested; None: they are.

    It may refuse to sample, and it may say of an answer that it is otherwise distributed. It is
    asked with the draft length that it has by itself, which no server refuses.
    """
    question = dataclasses.replace(_question(plan, 0, 0), num_draft_tokens=None)
    (answer,) = ask(endpoint, [question])
    if answer.usage is not None and answer.usage.is_lossless is False:
        return (
            "the server says that it does not keep the target's distribution, as its config allows"
        )
    if any(f"{name} is " in (answer.error or "") for name in ("temperature", "top_p", "top_k")):
        return f"the server refuses it: {answer.error}"
    return None


def run_tests(plans: Sequence[PlannedTest], endpoint: Endpoint, *, at_once: int) -> list[Finding]:
    """Makes all tests; where one flags, the target alone is tested as well."""
    tested = [_run(plan, endpoint, at_once) for plan in counted(plans, len(plans), "tests")]
    flagged = holm([test.p_value for test in tested])
    return [
        dataclasses.replace(
            test,
            is_flagged=True,
            target_p_value=_run(plan, endpoint, at_once, num_draft_tokens=0).p_value,
        )
        if is_flagged
        else test
        for plan, test, is_flagged in zip(plans, tested, flagged, strict=True)
    ]


def _run(
    plan: PlannedTest, endpoint: Endpoint, at_once: int, *, num_draft_tokens: int | None = None
) -> Finding:
    setting = plan.setting
    if num_draft_tokens is None:
        num_draft_tokens = setting.num_draft_tokens
    questions = [_question(plan, index, num_draft_tokens) for index in range(plan.num_samples)]
    answers = ask(endpoint, questions, at_once=at_once)
    beginnings: Counter[Beginning] = Counter()
    for answer in answers:
        token_ids = answer.token_ids
        if not answer.is_complete or token_ids is None:
            continue
        is_short = len(token_ids) < setting.num_tokens
        beginnings[(*token_ids, END) if is_short else token_ids[: setting.num_tokens]] += 1
    return _test(plan, beginnings)


def _question(plan: PlannedTest, index: int, num_draft_tokens: int) -> Question:
    """Returns a question that counts as unseeded; its seed makes the test repeatable."""
    return Question(
        token_ids=plan.case.token_ids,
        max_tokens=plan.setting.num_tokens + 1,
        num_draft_tokens=num_draft_tokens,
        sampling=dataclasses.replace(plan.setting.sampling, seed=plan.seed + index),
    )


def _test(plan: PlannedTest, beginnings: Counter[Beginning]) -> Finding:
    from scipy import stats

    counts = np.zeros(len(plan.bins.probs))
    for beginning, count in beginnings.items():
        counts[plan.bins.place(beginning)] += count
    num_complete = int(counts.sum())
    statistic, p_value = 0.0, 1.0
    if len(counts) > 1 and num_complete:
        statistic, p_value = stats.chisquare(counts, plan.bins.probs * num_complete)
    observed = counts / max(num_complete, 1)
    return Finding(
        plan=plan,
        statistic=float(statistic),
        p_value=float(p_value),
        distance=float(np.abs(observed - plan.bins.probs).sum() / 2),
        num_failed=plan.num_samples - num_complete,
    )
