"""Figures of quantization's cost, against values worked out by hand and by the plainest code."""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, log
from pathlib import Path

import numpy as np
import pytest
import torch

from specpipe.build.quality.quality import (
    DivergenceSum,
    PairLimits,
    compare,
    cut_prompts,
    measure_acceptance,
    record,
)
from specpipe.build.quality.report import Divergence
from specpipe.checkpoints.parallel_draft import ParallelDraft
from specpipe.errors import EngineBuildError
from specpipe.speculative.decode import decode
from tests.runtimes.table_engine import TableEngine
from tests.speculative.table import (
    NoisyModel,
    TableModel,
    half_rule,
    new_state,
    request,
    target_rule,
    wrong_rule,
)


def logits(*rows: Sequence[float]) -> torch.Tensor:
    """Logits whose softmax are these probabilities, shifted by a constant that must not matter."""
    return torch.tensor(rows).log() + 3.0


def test_two_positions_by_hand() -> None:
    total = DivergenceSum()
    total.add(logits((0.5, 0.5), (0.8, 0.2)), logits((0.25, 0.75), (2 / 3, 1 / 3)), [0, 0])
    found = total.result()
    # The tokens have 1/2 and 4/5 in the plain form, 1/4 and 2/3 in the quantized one.
    assert found.plain_perplexity == pytest.approx((2 * 1.25) ** 0.5, rel=1e-6)
    assert found.perplexity == pytest.approx((4 * 1.5) ** 0.5, rel=1e-6)
    # 1/2 ln 2 + 1/2 ln 2/3 and 4/5 ln 6/5 + 1/5 ln 3/5; the other way round it is 0.0898.
    assert found.mean_kl == pytest.approx((0.14384104 + 0.04369212) / 2, rel=1e-6)
    assert (found.num_positions, found.top1_agreement) == (2, 0.5)  # 0 and 1, then 0 and 0


def test_perplexity_counts_tokens_and_not_texts() -> None:
    total = DivergenceSum()
    for num_rows, chance in ((3, 0.5), (1, 0.125)):
        rows = logits(*[(chance, 1 - chance)] * num_rows)
        total.add(rows, rows, [0] * num_rows)
    assert total.result().perplexity == pytest.approx(exp((3 * log(2) + log(8)) / 4))


def test_equal_forms_differ_by_exactly_nothing() -> None:
    total = DivergenceSum()
    rows = torch.randn(50, 1000, generator=torch.Generator().manual_seed(1)) * 20
    total.add(rows, rows.clone(), list(range(50)))
    found = total.result()
    assert (found.mean_kl, found.top1_agreement, found.perplexity_ratio) == (0.0, 1.0, 1.0)


def test_a_perplexity_beyond_floats_is_a_number() -> None:
    total = DivergenceSum()
    rows = torch.tensor([[0.0, 5000.0]])
    total.add(rows, rows, [0])
    assert total.result().perplexity == exp(700)


def in_one_go(
    plain: NoisyModel, quantized: NoisyModel, texts: Sequence[Sequence[int]]
) -> Divergence:
    """The definition, text by text in NumPy."""
    nlls, kls, agreements = [], [], []
    for text in texts:
        both = []
        for model in (plain, quantized):
            rows = np.asarray(model.logits(text, len(text))[:-1], np.float32).astype(np.float64)
            both.append(rows - np.log(np.exp(rows).sum(-1, keepdims=True)))
        p, q = both
        place = np.arange(len(text) - 1), list(text[1:])
        nlls += list(zip(-p[place], -q[place], strict=True))
        kls += list((np.exp(p) * (p - q)).sum(-1))
        agreements += list(p.argmax(-1) == q.argmax(-1))
    plain_nll, nll = np.mean(nlls, axis=0)
    return Divergence(
        len(kls), exp(plain_nll), exp(nll), float(np.mean(kls)), float(np.mean(agreements))
    )


def test_engines_are_compared_position_by_position(tmp_path: Path) -> None:
    plain, quantized = NoisyModel(1), NoisyModel(2, blend=0.5)
    generator = np.random.default_rng(0)
    # Texts shorter than a forward, as long as one, and longer; the least that predicts anything.
    texts = [generator.integers(0, 12, size).tolist() for size in (2, 17, 129, 300)]
    engine = TableEngine(plain)
    record(engine, texts, tmp_path / "logits")
    assert engine.sequences == {}
    found = compare(TableEngine(quantized), texts, tmp_path / "logits")
    expected = in_one_go(plain, quantized, texts)
    assert found.num_positions == expected.num_positions == 1 + 16 + 128 + 299
    assert found.top1_agreement == expected.top1_agreement
    assert 0.2 < found.top1_agreement < 0.9
    for name in ("plain_perplexity", "perplexity", "mean_kl"):
        assert getattr(found, name) == pytest.approx(getattr(expected, name), rel=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_logits_that_are_no_numbers_stop_the_build(bad: float, tmp_path: Path) -> None:
    class Broken(TableModel):
        def logits(self, token_ids: Sequence[int], num_rows: int) -> np.ndarray:
            rows = super().logits(token_ids, num_rows)
            rows[-1, 3] = bad
            return rows

    texts = [[5, 6, 7, 8]]
    record(TableEngine(TableModel(target_rule)), texts, tmp_path / "logits")
    with pytest.raises(EngineBuildError) as caught:
        compare(TableEngine(Broken(target_rule)), texts, tmp_path / "logits")
    assert str(caught.value) == (
        "the quantized model's logits are NaN or infinite on the texts held out; its weights, or "
        "the scales that it was quantized with, are no good"
    )


def test_prompts_are_quarters_of_the_texts() -> None:
    texts = [(1, 2), tuple(range(10)), tuple(range(400))]
    assert cut_prompts(texts) == [
        (1,),
        (0, 1),
        (0, 1, 2, 3, 4),
        (0, 1, 2, 3, 4, 5, 6),
        tuple(range(100)),
        tuple(range(72, 200)),
        tuple(range(172, 300)),
    ]


def accepted(draft: TableModel, prompts: Sequence[tuple[int, ...]], **limits: object) -> list[int]:
    """Steps, drafted and accepted tokens of a draft for the target over `target_rule`."""
    found = measure_acceptance(
        TableEngine(draft),
        TableEngine(TableModel(target_rule)),
        prompts,
        PairLimits(num_draft_tokens=4, **limits),  # type: ignore[arg-type]
    )
    return [
        sum(counts.num_steps for counts in found),
        sum(counts.num_draft_tokens for counts in found),
        sum(counts.num_accepted_tokens for counts in found),
    ]


def test_a_draft_that_is_the_target() -> None:
    # 32 tokens: 6 steps of 5, and one of 2, in which there is room for one drafted token.
    assert accepted(TableModel(target_rule), [(5, 6)]) == [7, 25, 25]
    assert accepted(TableModel(target_rule), [(5, 6), (9, 9, 9)]) == [14, 50, 50]


def test_a_draft_that_proposes_in_one_pass() -> None:
    """The rule knows no masks, so that but for its first token it is always wrong."""
    parallel = ParallelDraft(3)
    # 32 tokens, two a step: room for 4 in each of 14 steps, then for 3 and 1.
    assert accepted(TableModel(target_rule), [(5, 6)], parallel=parallel) == [16, 60, 16]


def test_a_draft_that_is_always_wrong() -> None:
    # A token each step; near the end there is room for 3, 2, 1 and no drafted tokens.
    assert accepted(TableModel(wrong_rule), [(5, 6)]) == [32, 28 * 4 + 6, 0]


def test_more_prompts_than_run_at_once() -> None:
    prompts = [(n, n + 1) for n in range(4, 25)]
    assert accepted(TableModel(target_rule), prompts) == [21 * 7, 21 * 25, 21 * 25]


def test_an_end_id_ends_an_answer() -> None:
    third = [5, 6]
    for _ in range(3):
        third.append(target_rule(third))
    assert accepted(TableModel(target_rule), [(5, 6)], end_token_ids=frozenset(third[-1:])) == [
        1,
        3,
        3,
    ]


def test_counts_are_those_of_the_plain_loop() -> None:
    prompts = [(5, 6), (4, 5, 6, 7, 8, 9, 10), (99,)]
    expected = []
    for number, prompt in enumerate(prompts):
        asked = request(str(number), prompt_token_ids=prompt, max_tokens=32)
        state = new_state(asked, max_num_draft_tokens=4, max_seq_len=500, draft_max_seq_len=500)
        for _ in decode(state, TableModel(target_rule), TableModel(half_rule)):
            pass
        counts = state.counts
        assert 0.2 < (counts.acceptance_rate or 0) < 0.8
        expected.append((counts.num_steps, counts.num_draft_tokens, counts.num_accepted_tokens))
    found = measure_acceptance(
        TableEngine(TableModel(half_rule)),
        TableEngine(TableModel(target_rule)),
        prompts,
        PairLimits(num_draft_tokens=4),
    )
    assert [(c.num_steps, c.num_draft_tokens, c.num_accepted_tokens) for c in found] == expected


def test_a_short_context_shortens_answers() -> None:
    (found,) = measure_acceptance(
        TableEngine(TableModel(target_rule), max_seq_len=20),
        TableEngine(TableModel(target_rule), max_seq_len=20),
        [(5, 6, 7, 8)],
        PairLimits(num_draft_tokens=4),
    )
    assert (found.num_steps, found.num_draft_tokens) == (4, 12)  # 16 tokens: 5, 5, 5 and 1
