"""How much of anything a client or a checkpoint may send, before work is done on it."""

from __future__ import annotations

from pydantic import Field

from specpipe.file_limits import FileLimits


class Limits(FileLimits):
    """What is refused for its size, each with both numbers; docs/limits.md is the table."""

    max_prompt_bytes: int | None = Field(default=None, ge=1)
    """Bytes of a prompt in UTF-8, before it is tokenized; none: `engine.max_seq_len` times the
    longest token of the tokenizer."""

    max_messages_bytes: int | None = Field(default=None, ge=1)
    """Bytes of `messages`, which is JSON; none: as many as a prompt may have, and 64 KiB more."""

    max_messages: int = Field(default=1024, ge=1)
    """Messages of one conversation."""

    max_json_depth: int = Field(default=32, ge=1)
    """How deep lists and objects may be nested in `messages`."""

    max_words: int = Field(default=256, ge=1)
    """Entries of `stop_words`, and of `bad_words`."""

    max_word_bytes: int = Field(default=1024, ge=1)
    """Bytes of one of those entries."""

    max_words_bytes: int = Field(default=16384, ge=1)
    """Bytes of all entries of `stop_words`, and of `bad_words`."""
