from __future__ import annotations

import pytest

from specpipe.runtimes.pair.costs import CostTable, measure_costs
from specpipe.speculative.adaptive import DraftLength
from tests.runtimes.table_engine import TableEngine
from tests.speculative.table import TableModel, target_rule


def table() -> CostTable:
    return CostTable(4, draft={1: 1.0, 8: 2.4}, target={1: 4.0, 5: 6.0, 8: 6.0, 40: 14.0})


def test_costs_are_relative_to_a_plain_step_of_the_same_batch() -> None:
    at_one, at_eight = table().at(1), table().at(8)
    assert at_one.draft_step == 0.25
    assert at_one.verify == pytest.approx([0.0, 0.125, 0.25, 0.375, 0.5])
    assert at_eight.draft_step == pytest.approx(2.4 / 6.0)
    assert at_eight.verify == pytest.approx([n * (14.0 - 6.0) / (4 * 6.0) for n in range(5)])


def test_a_step_of_a_batch_is_as_long_as_its_longest_draft() -> None:
    costs = table()
    assert costs.step_seconds([0] * 8) == 6.0
    one, eight = costs.seconds("draft", 1), costs.seconds("draft", 8)
    assert costs.step_seconds([2, *[1] * 7]) == pytest.approx(
        costs.seconds("target", 24) + eight + one
    )


def test_times_between_measurements_are_interpolated() -> None:
    assert table().seconds("draft", 4) == pytest.approx(1.0 + 1.4 * 3 / 7)
    assert table().seconds("target", 100) == 14.0


def test_a_faster_step_counts_at_once() -> None:
    costs = table()
    costs.observe("draft", 1, 0.5)
    costs.observe("target", 5, 3.0)
    assert costs.seconds("draft", 1) == 0.5
    assert costs.seconds("target", 5) == 3.0


def test_what_slows_one_row_count_slows_all_nearly_as_much() -> None:
    costs = table()
    costs.observe("target", 5, 3.0)
    assert 2.0 < costs.seconds("target", 1) < 3.0
    assert costs.seconds("target", 40) / costs.seconds("target", 8) == pytest.approx(14.0 / 6.0)


def test_a_step_that_something_else_delayed_counts_little() -> None:
    costs = table()
    costs.observe("draft", 1, 100.0)
    assert costs.seconds("draft", 1) == pytest.approx(1.1)


def test_lasting_slowness_is_learned() -> None:
    costs = table()
    for _ in range(50):
        costs.observe("target", 1, 6.0)
    assert costs.seconds("target", 1) == pytest.approx(6.0, rel=0.02)


def test_a_step_between_two_measurements_moves_both_towards_it() -> None:
    costs = table()
    for _ in range(400):
        costs.observe("draft", 3, 5.0)
    assert costs.seconds("draft", 3) == pytest.approx(5.0, rel=0.05)


def test_a_draft_that_was_measured_on_a_busy_machine_gets_another_chance() -> None:
    costs = CostTable(4, draft={1: 8.0}, target={1: 4.0, 5: 4.4})
    assert DraftLength().choose(4, costs.at(1)) == 0
    num_steps = 0
    while DraftLength().choose(4, costs.at(1)) == 0:
        costs.favour_draft()
        num_steps += 1
        assert num_steps < 5000
    costs.observe("draft", 1, 0.8)
    assert DraftLength().choose(4, costs.at(1)) >= 2


def test_measuring_leaves_both_engines_empty() -> None:
    draft, target = TableEngine(TableModel(target_rule)), TableEngine(TableModel(target_rule))
    costs = measure_costs(draft, target, max_batch_size=4, num_draft_tokens=3)
    assert draft.sequences == target.sequences == {}
    assert {tuple(f) for f in target.forwards} == {(n,) * b for n in (1, 2, 4) for b in (1, 4)}
    assert {tuple(f) for f in draft.forwards} == {(1,), (1,) * 4}
    assert costs.at(1).draft_step > 0.0
