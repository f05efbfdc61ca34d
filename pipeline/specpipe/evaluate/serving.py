"""A pair served for as long as it is asked."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from specpipe.runtimes.pair_file import read_pair
from specpipe.runtimes.runtime import load_runtime
from specpipe.triton.server.server import Server, running


@contextmanager
def served(repository: Path) -> Iterator[Server]:
    """Serves a repository for the time of a `with` block, on free ports; yields the server.

    Raises EngineMismatch where its engines do not fit this machine, and ServerError where the
    server does not come up.
    """
    launch = load_runtime(read_pair(repository).runtime).launch(repository)
    with running(repository, launch=launch) as server:
        yield server
