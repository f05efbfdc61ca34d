"""Launches that are recorded once as a CUDA graph, and then cost the host one call."""

from __future__ import annotations

import gc
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch

from specpipe.progress import count
from specpipe.runtimes.torch.fused.compilation import Launch, compile_kernels
from specpipe.runtimes.torch.fused.lateness import note_recording


class Graphs:
    """What was recorded, by key. On a CPU each launch is simply made: that is for tests."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._pool = None if device.type != "cuda" else torch.cuda.graph_pool_handle()

    def run(self, key: Hashable, launch: Launch) -> None:
        """Does what `launch` does, which must do the same for the same key every time.

        What was not recorded before is now, and whoever asked for it waits.
        """
        if self.device.type != "cuda":
            launch()
            return
        graph = self._graphs.get(key)
        if graph is not None:
            graph.replay()
            return
        launch()  # that compiles kernels, which a recording must not see, and does what was asked
        self.record(key, launch)
        note_recording(key)

    def record(self, key: Hashable, launch: Launch) -> None:
        """Records a launch, and does not make it; its kernels must be compiled."""
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        with (
            _no_garbage_collection(),
            torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"),
        ):
            launch()
        self._graphs[key] = graph


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """To free another graph ends a recording with an error."""
    is_usual = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if is_usual:
            gc.enable()


class Recording(NamedTuple):
    """What may be asked for of `Graphs.run`.

    launch  does no harm before there are requests: its rows are nobody's then
    """

    graphs: Graphs
    key: Hashable
    launch: Launch


@torch.inference_mode()
def prepare(recordings: Sequence[Recording]) -> None:
    """Compiles and records launches before anybody asks for one; on a CPU there is nothing to do.

    Each runs once: on its first run the driver puts it on the GPU.
    """
    recordings = [each for each in recordings if each.graphs.device.type == "cuda"]
    if not recordings:
        return
    compile_kernels(each.launch for each in recordings)
    with count(len(recordings), "graphs") as counter:
        for graphs, key, launch in recordings:
            graphs.record(key, launch)
            graphs.run(key, launch)
            counter.advance()
