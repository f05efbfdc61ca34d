"""NVIDIA's load tool, where it is installed: on PATH, or where SPECPIPE_TEST_AIPERF says.

It needs libraries in other versions than ours, so it has an environment of its own: `make aiperf`
installs it, and `make test` uses it then.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

AIPERF = os.environ.get("SPECPIPE_TEST_AIPERF") or shutil.which("aiperf")

needs_aiperf = pytest.mark.skipif(AIPERF is None, reason="aiperf is not installed: make aiperf")


def aiperf_python() -> str:
    """The Python of aiperf's environment."""
    assert AIPERF is not None
    return str(Path(AIPERF).parent / "python")
