from specpipe.speculative.metrics import AcceptanceCounts


def test_acceptance_arithmetic() -> None:
    counts = AcceptanceCounts()
    for drafted, accepted in ((4, 4), (4, 1), (2, 0), (0, 0)):
        counts.record(num_draft_tokens=drafted, num_accepted_tokens=accepted)
    assert counts.num_draft_tokens == 10
    assert counts.num_accepted_tokens == 5
    assert counts.acceptance_rate == 0.5
    assert counts.histogram == {0: 1, 1: 1, 4: 1}
    assert counts.by_draft_length == {4: 2, 2: 1, 0: 1}
    assert counts.drafted_at == {1: 3, 2: 3, 3: 2, 4: 2}
    assert counts.accepted_at == {1: 2, 2: 1, 3: 1, 4: 1}


def test_nothing_drafted_has_no_rate() -> None:
    counts = AcceptanceCounts()
    counts.record(num_draft_tokens=0, num_accepted_tokens=0)
    assert counts.acceptance_rate is None
    assert counts.drafted_at == counts.accepted_at == counts.histogram == {}
    assert counts.by_draft_length == {0: 1}
