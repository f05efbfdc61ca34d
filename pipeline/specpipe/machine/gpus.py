"""GPUs to plan for: those of this machine, or one that is named."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass

from specpipe.errors import ConfigError


@dataclass(frozen=True)
class Gpu:
    """A GPU.

    memory_bytes  10^9 for each GB that it is sold with; its driver tells of a little more
    sm            compute capability, times 10; None: unknown
    """

    name: str
    memory_bytes: int
    sm: int | None

    def __str__(self) -> str:
        if self.sm is None:
            return self.name
        return f"{self.name} (compute capability {self.sm // 10}.{self.sm % 10})"


KNOWN_GPUS = tuple(
    Gpu(name, gigabytes * 10**9, sm)
    for name, gigabytes, sm in (
        ("A100 40 GB", 40, 80),
        ("A100 80 GB", 80, 80),
        ("H100", 80, 90),
        ("H200", 141, 90),
        ("B200", 180, 100),
        ("L4", 24, 89),
        ("L40S", 48, 89),
        ("RTX 4090", 24, 89),
        ("RTX 5090", 32, 120),
        ("RTX 6000 Ada", 48, 89),
        ("RTX PRO 6000", 96, 120),
    )
)
"""NVIDIA's data sheets; compute capabilities: developer.nvidia.com/cuda-gpus."""


def find_gpu(text: str) -> Gpu:
    """Returns the GPU of that name, or one of so many GB; refuses what is neither."""
    amount = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*(?:gb)?\s*", text, re.IGNORECASE)
    if amount is not None and 0 < float(amount[1]) < 1000:  # 4090 is a name
        return Gpu(f"{amount[1]} GB", int(float(amount[1]) * 10**9), None)
    wanted = _letters(text)
    found = [gpu for gpu in KNOWN_GPUS if _letters(gpu.name) == wanted]
    if not found and len(wanted) > 1:
        found = [gpu for gpu in KNOWN_GPUS if wanted in _letters(gpu.name)]
    if len(found) == 1:
        return found[0]
    if found:
        raise ConfigError(f"--gpu {text}: say which, {' or '.join(gpu.name for gpu in found)}")
    raise ConfigError(
        f"--gpu {text}: expected the memory in GB, as 24, or one of "
        + ", ".join(gpu.name for gpu in KNOWN_GPUS)
    )


def gpus_here() -> tuple[Gpu, ...]:
    """Returns this machine's GPUs as nvidia-smi tells them; none that share the host's memory."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return ()
    query = [
        command,
        "--query-gpu=name,compute_cap,memory.total",
        "--format=csv,noheader,nounits",
    ]
    try:
        printed = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return ()
    found = []
    for line in printed.stdout.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) == 3 and re.fullmatch(r"\d+\.\d", fields[1]) and fields[2].isdigit():
            sm = int(fields[1].replace(".", ""))
            found.append(Gpu(fields[0], int(fields[2]) * 2**20, sm))
    return tuple(found)


def _letters(name: str) -> str:
    letters = re.sub("[^a-z0-9]", "", name.lower())
    return letters.removeprefix("nvidia").removeprefix("geforce")
