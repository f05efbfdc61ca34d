"""What benchmarks do as commands: name the machine, and say in a sentence what stops them."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from specpipe.errors import RuntimeUnavailable, SpecpipeError
from specpipe.machine import signals


def run_command(main: Callable[[], int | None]) -> NoReturn:
    """Ends the process with what `main` returns, or with a failure's sentence and status 1.

    Ctrl-C and SIGTERM end what it has started, too.
    """

    def command() -> None:
        code: object
        try:
            code = main()
        except SpecpipeError as exc:
            code = f"Error: {exc}"
        except SystemExit as exc:
            code = exc.code
        if isinstance(code, str):
            print(code, file=sys.stderr)
            code = 1
        sys.exit(code)

    signals.run(command)


def require_device(name: str, *, interprets: bool = False) -> None:
    """Raises RuntimeUnavailable where there is no such device.

    interprets  whether what runs is Triton's, which a CPU can only interpret
    """
    import torch

    is_cuda = torch.device(name).type == "cuda"
    if is_cuda and not torch.cuda.is_available():
        raise RuntimeUnavailable(f"--device {name}: torch {torch.__version__} finds no GPU here")
    if not is_cuda and interprets and os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeUnavailable(
            f"--device {name}: the fused kernels run on a GPU; to try them without one, slowly and "
            "in float32, set TRITON_INTERPRET=1"
        )


def cpu_name() -> str:
    """The processor's name where Linux tells it."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
