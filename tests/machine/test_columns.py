from __future__ import annotations

from specpipe.machine.columns import aligned


def test_texts_stand_left_and_numbers_right_whatever_they_hold() -> None:
    rows = [("side", "K", "note"), ("[red]x:smile:", "10", ""), ("y", "4", "wide " * 60)]
    assert aligned(rows, texts=(0, 2)) == [
        "side            K  note",
        "[red]x:smile:  10",
        "y               4  " + ("wide " * 60).rstrip(),
    ]
    assert aligned([]) == []
