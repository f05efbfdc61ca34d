"""Which lines of Triton's log are of use to an operator.

Triton 2.51 writes some sixty lines at each start: what it loads, tables of its options, and on a
machine without a GPU errors about that, in several words.
"""

from __future__ import annotations

import re

# What Triton 2.51 says on a machine without a GPU, whatever happens.
WITHOUT_GPU = re.compile(
    r"CudaDriverHelper|NVML|DCGM|libcuda|nvml|CUDA driver version is insufficient|pinned"
)

_INFO = re.compile(r"I\d{4} \S+ \d+ (\S+):\d+\]")
_TABLE = re.compile(r"[+|].*[+|]$")
_SIGNAL = re.compile(r"Signal \(\d+\) received\.$")


def is_worth_showing(line: str, *, has_gpu: bool) -> bool:
    """Returns whether a line is no note or table of Triton's, nor an error about a missing GPU.

    All that the models write is worth it, also what they note by Triton's logger.
    """
    noted = _INFO.match(line)
    if noted is not None:
        return noted[1].endswith(".py")
    if not line.strip() or _TABLE.match(line) or _SIGNAL.match(line):
        return False
    return has_gpu or WITHOUT_GPU.search(line) is None
