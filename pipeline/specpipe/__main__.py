"""The command, also as `python -m specpipe`: signals wait until imports have made a handler."""

from __future__ import annotations

import signal

signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))

from typing import NoReturn  # noqa: E402

from specpipe.machine import signals  # noqa: E402


def main() -> NoReturn:
    """Runs the command line and ends the process."""
    signals.run(_command)


def _command() -> None:
    from specpipe.cli.group import main

    main(prog_name="specpipe")


if __name__ == "__main__":
    main()
