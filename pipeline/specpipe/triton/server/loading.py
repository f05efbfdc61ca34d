"""The models of one version in a Triton that runs: loaded, asked, pointed to, counted, unloaded."""

from __future__ import annotations

import contextlib
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from specpipe.errors import ServerError
from specpipe.machine.prometheus import parse_samples, total
from specpipe.runtimes.repository_layout import ENSEMBLE, PREPROCESSING, SPECULATIVE
from specpipe.triton import metrics
from specpipe.triton.server import served_models
from specpipe.triton.server.served_models import Version

if TYPE_CHECKING:
    from specpipe.triton.server.server import Server

_PENDING = "nv_inference_pending_request_count"  # Triton's own gauge, by model
_END_S = 30.0  # what a model's process takes at most to end: a guess
_POLL_S = 0.05
_REPORT_S = 0.5  # in which a model tells its count anew (loop.py)
_NUM_LOOKS = 2


def load(server: Server, version: Version) -> None:
    """Loads the inner models of a version, and sends a request through them.

    Raises ServerError with the reason; some may be loaded then.
    """
    served_models.write_inner(server.models_folder, version)
    names = list(version.names.values())
    with ThreadPoolExecutor(len(names)) as pool:
        for loading in [pool.submit(_load, server, name) for name in names]:
            loading.result()
    probe(server, version)


def probe(server: Server, version: Version) -> None:
    """Sends a request through the loaded models of a version, whatever is served."""
    name, folder = version.private_ensemble, server.models_folder
    served_models.write_ensemble(folder, version, name)
    try:
        _load(server, name)
        server.probe(name, version)
    finally:
        with contextlib.suppress(ServerError):
            server.control.unload(name)
        served_models.remove(folder, name)


def point_to(server: Server, version: Version) -> None:
    """Lets `ensemble` hand requests to the loaded models of a version."""
    served_models.write_ensemble(server.models_folder, version, ENSEMBLE)
    _load(server, ENSEMBLE)


def unload(server: Server, version: Version) -> None:
    """Unloads the inner models of a version, and waits until their processes are gone.

    Triton keeps a model until the last request that needs it has ended.
    """
    names = list(version.names.values())
    with contextlib.suppress(ServerError):  # of a server that ends
        for name in names:
            server.control.unload(name)
        served_models.remove(server.models_folder, *names)
        deadline = time.monotonic() + _END_S
        while server.processes_of(version).pids and time.monotonic() < deadline:
            time.sleep(_POLL_S)


def num_in_flight(server: Server, version: Version) -> int | None:
    """Returns how many requests a version has; None where that cannot be read."""
    page = server.read_metrics()
    if page is None:
        return None
    samples = parse_samples(page)
    waiting = total(samples, _PENDING, model=version.name(PREPROCESSING)) or 0.0
    taken = total(samples, metrics.IN_FLIGHT, model=version.name(SPECULATIVE)) or 0.0
    return int(waiting + taken)


class Idle:
    """Whether a version that gets no new requests has none left: it says so twice."""

    def __init__(self, server: Server, version: Version) -> None:
        self._server, self._version = server, version
        self._num_looks = 0
        self.num_left: int | None = None

    def look(self) -> bool:
        """Looks, and returns whether it is; waits for the time in which a model tells its count."""
        self.num_left = num_in_flight(self._server, self._version)
        self._num_looks = self._num_looks + 1 if self.num_left == 0 else 0
        if self._num_looks < _NUM_LOOKS:
            time.sleep(_REPORT_S)
        return self._num_looks == _NUM_LOOKS


def _load(server: Server, name: str) -> None:
    server.control.load(name, timeout_s=server.options.startup_timeout_s)
