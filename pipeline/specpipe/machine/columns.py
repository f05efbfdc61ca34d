"""Tables as plain text, for terminals and files alike.

Why not rich.table: a name with [brackets] or :colons: in it is markup to rich, and a line wider
than the terminal is wrapped; with both switched off it does no more than this.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence


def aligned(rows: Sequence[Sequence[str]], *, texts: Collection[int] = (0,)) -> list[str]:
    """Returns the lines of a table, its columns two spaces apart.

    texts  the columns that are written from the left; the others are numbers
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if column in texts else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
