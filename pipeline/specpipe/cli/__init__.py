"""The command `specpipe`, a verb a file."""

from specpipe.cli.group import main

__all__ = ["main"]
