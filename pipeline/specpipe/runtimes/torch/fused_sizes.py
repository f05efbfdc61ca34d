"""What fused engines are sized by; importing this imports neither torch nor Triton."""

from __future__ import annotations

from specpipe.runtimes.pair.rounds import MOST_UNDER_WAY

ROWS = 16
"""Rows that the narrowest launch takes, and every one of a single stream."""

RESULT = 2 + ROWS
"""Numbers that a round tells of each place: scoring.move_on."""

WIDTHS = (16, 32, 64, 128, 256)
"""Rows that launches take at most, each kind by kernels of its own."""

_FEW_ROWS, _ROWS_BESIDE_FEW = 64, 128
"""Beside so few rows nobody reads more than those leave of so many: 256 take 1.55 times as long on
an H200 (7 B).
"""

ROW_COUNTS = (1, 2, 4, 8, *WIDTHS)
"""Rows of the forwards that are recorded; one of others is filled up with rows of nobody."""

SHORT_PROMPT = 128
"""Tokens of a prompt that is read by the kernels of decoding, beside what others decode. Which
kernels read a prompt must follow from its length alone: bits depend on it.
"""

PAGE = 64
"""Positions of a page of the KV cache."""

CHUNK = 128
"""Positions whose scores make one softmax."""

BLOCK = 8
"""Chunks that are joined before they join others: 1024 positions."""

MOST_CHUNKS = 32
"""Chunks that have programs of their own. More would be many programs of few bytes, and long to
join.
"""

PROMPT_WIDTHS = (128, 256, 512, 1024)
"""Rows of prompts that launches take at most; each is recorded."""


def width_of(num_rows: int) -> int:
    """Returns the width of a launch for so many rows, which the greatest holds."""
    return next(width for width in WIDTHS if width >= num_rows)


def most_rows(max_batch_size: int, max_draft_len: int) -> int:
    """Returns the width of an engine's greatest launch, which all sequences may need to verify, and
    in which some are read beside others.
    """
    num_rows = max_batch_size * (max_draft_len + 1)
    return WIDTHS[-1] if num_rows > _FEW_ROWS else _ROWS_BESIDE_FEW


def prompt_width_of(num_rows: int) -> int:
    """Returns the width of a launch for so many rows of prompts; the greatest may need several."""
    return next((width for width in PROMPT_WIDTHS if width >= num_rows), PROMPT_WIDTHS[-1])


def spare_positions(max_draft_len: int) -> int:
    """Returns how many positions a sequence has beyond its text: for all rounds under way."""
    return (max_draft_len + 1) * (1 + MOST_UNDER_WAY)


def pages_of(num_positions: int) -> int:
    """Returns how many pages hold so many positions."""
    return -(-num_positions // PAGE)


def pages_to_share(num_prompt: int, max_draft_len: int) -> int:
    """Returns how many first pages of a text hold what all texts that begin alike have there.

    num_prompt  tokens that the kernels of prompts read: what those of decoding compute is not the
                same. A draft that catches up with rounds reads some of the last ones again, with
                the latter
    """
    return max(num_prompt - spare_positions(max_draft_len), 0) // PAGE


def paged_capacity(max_seq_len: int, max_draft_len: int) -> int:
    """Returns the positions of the pages of a sequence of the full length."""
    return PAGE * pages_of(max_seq_len + spare_positions(max_draft_len))


def max_parts(capacity: int) -> int:
    """Returns how many parts attention over so many positions leaves to join: chunks or blocks."""
    chunks = -(-capacity // CHUNK)
    return max(min(chunks, MOST_CHUNKS), -(-chunks // BLOCK))


def power_of_2_above(size: int) -> int:
    """Returns the smallest power of 2 that is not below size; kernels count in those."""
    return 1 << (size - 1).bit_length()


def power_of_2_below(size: int) -> int:
    """Returns the largest power of 2 that is not above size."""
    return 1 << (size.bit_length() - 1)
