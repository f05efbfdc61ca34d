from __future__ import annotations

import pytest
import torch

from specpipe.runtimes.torch import graph_memory
from specpipe.runtimes.torch.fused import compilation
from specpipe.runtimes.torch.fused.rounds import FusedRounds
from specpipe.runtimes.torch.graph_memory import graph_bytes
from tests.runtimes.torch.fused.toy import toy_config, toy_engines


@pytest.mark.parametrize(("max_seq_len", "mask_token_id"), [(100, None), (5000, None), (5000, 60)])
def test_the_estimate_covers_all_launches_that_are_recorded(
    max_seq_len: int, mask_token_id: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted, not made. It takes both engines for drafts, so it may be a few times as much."""
    limits = {"max_batch_size": 6, "max_draft_len": 3, "max_seq_len": max_seq_len}
    config = toy_config(num_layers=2, num_heads=8, num_kv_heads=8)
    draft, target = (toy_engines(config, limits=limits)[0] for _ in range(2))
    rounds = FusedRounds(
        draft,
        target,
        num_draft_tokens=3,
        vocab_size=64,
        unused=[],
        copies=True,
        mask_token_id=mask_token_id,
    )
    made: list[object] = []
    monkeypatch.setattr(compilation, "launch", lambda *launched: made.append(launched))
    engines = (draft, target)
    recordings = [r for engine in engines for r in engine.recordings(max_seq_len)]
    with torch.inference_mode():
        for recording in [*recordings, *rounds.recordings()]:
            recording.launch()
    capacity = draft.capacity
    estimate = sum(
        graph_bytes(
            2, capacity=capacity, max_batch_size=6, max_draft_len=3, is_parallel=is_parallel
        )
        for is_parallel in (mask_token_id is not None, False)
    )
    estimated = (estimate - graph_memory._FIRST_BYTES) // graph_memory._LAUNCH_BYTES
    assert len(made) <= estimated <= 6 * len(made)


def test_graphs_of_7_and_04_billion_parameters_take_less_than_a_gigabyte() -> None:
    """For 128 streams with up to 8 draft tokens, of long texts as well."""
    limits = {"capacity": 16_384, "max_batch_size": 128, "max_draft_len": 8}
    assert 0.2e9 < graph_bytes(32, **limits) + graph_bytes(24, **limits) < 1e9
