"""Launches that are recorded once as a CUDA graph, and then cost the host one call."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch


class Graphs:
    """What was recorded, by key. On a CPU each launch is simply made: that is for tests."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._pool = None if device.type != "cuda" else torch.cuda.graph_pool_handle()

    def run(self, key: Hashable, launch: Callable[[], None]) -> None:
        """Does what `launch` does, which must do the same for the same key every time."""
        if self._device.type != "cuda":
            launch()
            return
        graph = self._graphs.get(key)
        if graph is None:
            self._graphs[key] = self._record(launch)
        else:
            graph.replay()

    def _record(self, launch: Callable[[], None]) -> torch.cuda.CUDAGraph:
        launch()  # that compiles kernels, which a recording must not see, and does what was asked
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            launch()
        return graph
