"""How much of anything a client or a checkpoint may send, before work is done on it."""

from __future__ import annotations

from pydantic import Field

from specpipe.section import Section


class Limits(Section):
    """What is refused for its size, each with both numbers; docs/limits.md is the table."""

    # Of a request.
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

    # Of a checkpoint's files.
    max_safetensors_header_bytes: int = Field(default=16 << 20, ge=1)
    """Bytes of the header of one safetensors file."""

    max_num_layers: int = Field(default=512, ge=1)
    """Layers of a model."""

    max_vocab_size: int = Field(default=1 << 20, ge=1)
    """Embedding rows of a model, and ids of a tokenizer."""

    max_chat_template_bytes: int = Field(default=1 << 20, ge=1)
    """Bytes of a chat template."""
