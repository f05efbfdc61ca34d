from __future__ import annotations

import gc

import pytest
import torch

from specpipe.runtimes.pair.pair import LateWork
from specpipe.runtimes.torch.fused.graphs import Graphs, Recording, prepare
from specpipe.runtimes.torch.fused.lateness import Lateness, preparing


def test_on_a_cpu_nothing_is_prepared() -> None:
    made: list[str] = []
    graphs = Graphs(torch.device("cpu"))
    prepare([Recording(graphs, "a", lambda: made.append("a"))])
    assert made == []
    graphs.run("a", lambda: made.append("a"))
    assert made == ["a"]


@pytest.mark.gpu
def test_what_was_prepared_is_not_late_and_what_was_not_is_done_as_well() -> None:
    counts = torch.zeros(2, device="cuda")
    graphs = Graphs(counts.device)
    with preparing():
        prepare([Recording(graphs, "a", lambda: counts[0].add_(1))])
        late = Lateness()
    graphs.run("a", lambda: counts[0].add_(1))
    assert late() == LateWork()
    for _ in range(2):
        graphs.run("b", lambda: counts[1].add_(1))
    # Dry launches do what torch does by itself; then it ran once.
    assert counts.tolist() == [3, 2]
    assert late() == LateWork(num_recordings=1)


@pytest.mark.gpu
def test_garbage_is_not_collected_while_a_launch_is_recorded() -> None:
    """Graphs of an engine that is gone may be garbage then, and CUDA refuses to free them."""
    counts = torch.zeros(2, device="cuda")
    gone, graphs = Graphs(counts.device), Graphs(counts.device)
    gone.run("a", lambda: counts[0].add_(1))
    gone.itself = gone  # type: ignore[attr-defined]
    del gone

    def launch() -> None:
        counts[1].add_(1)
        for _ in range(100):  # each may begin a collection
            [[]].append([])

    usual = gc.get_threshold()
    gc.set_threshold(1)
    try:
        graphs.record("b", launch)
    finally:
        gc.set_threshold(*usual)
    graphs.run("b", launch)
    assert counts.tolist() == [2, 1]
