"""The door as a child of `specpipe serve`, which tells it in its environment what to do."""

from __future__ import annotations

import contextlib
import os
import sys

from specpipe.failures import sentence
from specpipe.gateway.run import run
from specpipe.gateway.settings import VARIABLE, GatewaySettings


def _log(line: str) -> None:
    with contextlib.suppress(OSError):  # a full disk, or a terminal that closed
        print(line, file=sys.stderr, flush=True)


def main() -> int:
    """Returns the exit code: 0 after a signal, 1 where the door cannot stand."""
    try:
        run(GatewaySettings.model_validate_json(os.environ[VARIABLE]), log=_log)
    except KeyboardInterrupt:
        return 130
    except Exception as exc:
        _log(f"the door: {sentence(exc)}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
