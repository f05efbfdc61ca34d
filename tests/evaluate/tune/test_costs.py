from __future__ import annotations

import pytest

from specpipe.errors import ServerError
from specpipe.evaluate.tune import costs
from specpipe.runtimes.pair.engine_pair import EnginePair
from tests.runtimes.table_engine import TableEngine, ids, make_pair, run
from tests.speculative.table import (
    TableModel,
    greedy_reference,
    half_rule,
    request,
    target_rule,
)


def test_few_draft_lengths_are_all_timed_and_many_evenly() -> None:
    assert costs.draft_lengths(1) == (0, 1)
    assert costs.draft_lengths(4) == (0, 1, 2, 3, 4)
    assert costs.draft_lengths(8) == tuple(range(9))
    assert costs.draft_lengths(32) == (0, 4, 8, 12, 16, 20, 24, 28, 32)


def test_every_load_and_length_is_timed_and_nothing_left_behind() -> None:
    pair = make_pair(TableModel(target_rule), TableModel(half_rule), num_draft_tokens=3)
    found = costs.measure(pair, [4, 5, 6], batch_sizes=(1, 4), max_draft_len=3, context=20)
    assert [load.batch_size for load in found] == [1, 4]
    for load in found:
        assert list(load.verify_s) == [0, 1, 2, 3]
        assert min(load.draft_s, *load.verify_s.values()) > 0
        assert min(load.plain_rest_s, load.drafting_rest_s) >= 0
    for engine in pair.engines.values():
        assert isinstance(engine, TableEngine) and engine.sequences == {}
    r = request()
    assert ids(run(pair, [r])["r"]) == greedy_reference(r)


def test_forwards_have_the_context_that_was_asked_for() -> None:
    pair = make_pair(TableModel(target_rule), TableModel(half_rule), num_draft_tokens=1)
    lengths = set()

    class Watched(TableEngine):
        def skip(self, sequence: int, num_tokens: int) -> None:
            lengths.add(num_tokens)
            super().skip(sequence, num_tokens)

    for engine in pair.engines.values():
        engine.__class__ = Watched
    costs.measure(pair, list(range(4, 60)), batch_sizes=(1,), max_draft_len=1, context=70)
    assert lengths == {70, 32}  # 32: the beginning of the prompt, for whole steps


def measured(pair: EnginePair) -> costs.LoadCosts:
    """Of two requests, by a clock that shows 20 s more at every look."""
    now = iter(range(0, 1_000_000, 20))
    (found,) = costs.measure(
        pair,
        [4, 5, 6],
        batch_sizes=(2,),
        max_draft_len=3,
        context=20,
        clock=lambda: float(next(now)),
    )
    return found


def test_the_rest_is_what_a_step_takes_beyond_its_forwards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Forwards take 2 s (draft) and 10 s + 1 s a token (target), and a step 20 s by its clock."""
    monkeypatch.setattr(
        costs,
        "time_forward",
        lambda engine, size, num_tokens, *, context: (
            10.0 + num_tokens
            if isinstance(engine.model, TableModel) and engine.model.rule is target_rule
            else 2.0
        ),
    )
    pair = make_pair(TableModel(target_rule), TableModel(half_rule), num_draft_tokens=3)
    found = measured(pair)
    assert found == costs.LoadCosts(
        batch_size=2,
        draft_s=2.0,
        verify_s={0: 11.0, 1: 12.0, 2: 13.0, 3: 14.0},
        plain_rest_s=9.0,  # 20 - 11
        drafting_rest_s=0.0,  # 20 - 3 · 2 - 14
    )


def test_a_draft_that_proposes_in_one_pass_is_timed_by_how_many_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A forward of the draft takes 1 s + 0.5 s a token, and a step 20 s."""
    monkeypatch.setattr(
        costs,
        "time_forward",
        lambda engine, size, num_tokens, *, context: (
            10.0 if engine.model.rule is target_rule else 1.0 + 0.5 * num_tokens
        ),
    )
    pair = make_pair(
        TableModel(target_rule), TableModel(half_rule), num_draft_tokens=3, mask_token_id=2
    )
    found = measured(pair)
    assert found.pass_s == {1: 2.0, 2: 2.5, 3: 3.0}  # of two to four tokens
    assert found.drafting_rest_s == 7.0  # 20 - 3 - 10
    assert costs.LoadCosts.from_json(found.to_json()) == found


def test_a_load_that_never_runs_together_is_refused() -> None:
    pair = make_pair(
        TableModel(target_rule), TableModel(half_rule), num_draft_tokens=3, max_batch_size=2
    )
    with pytest.raises(ServerError) as caught:
        costs.measure(pair, [4, 5, 6], batch_sizes=(4,), max_draft_len=3, context=20)
    assert str(caught.value) == (
        "4 requests never drafted 0 tokens together: lower --concurrency or --max-draft-len, or "
        "raise engine.max_seq_len"
    )
