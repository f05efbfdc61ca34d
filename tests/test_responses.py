"""benchmarks/responses.py: its pair without models, and the repository that serves it."""

from __future__ import annotations

from pathlib import Path

from benchmarks.load.tick_pair import TickPair
from benchmarks.responses import write_tick_repository
from specpipe.speculative.request import Chunk, Request
from specpipe.triton.repository import lint


def test_a_round_gives_each_request_a_token_until_it_has_all_or_is_cancelled() -> None:
    pair = TickPair(0.0, 0.0)
    for name, max_tokens in (("short", 2), ("gone", 9)):
        pair.submit(Request(request_id=name, prompt_token_ids=(1, 2), max_tokens=max_tokens))
    first = pair.step()
    pair.cancel("gone")
    ends = {chunk.request_id: chunk for chunk in pair.step()}
    assert [(chunk.request_id, chunk.token_ids) for chunk in first] == [
        ("short", (1,)),
        ("gone", (1,)),
    ]
    assert {name: end.finish_reason for name, end in ends.items()} == {
        "short": "length",
        "gone": "cancelled",
    }
    assert [counted(end) for end in ends.values()] == [2, 2]
    assert not pair.has_work()


def counted(end: Chunk) -> int:
    assert end.statistics is not None
    return end.statistics.num_output_tokens


def test_its_repository_has_no_fault(tmp_path: Path) -> None:
    found = lint.lint(write_tick_repository(tmp_path))
    assert found == []
