from __future__ import annotations

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
