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
    max_json_bytes: int = Field(default=8 << 20, ge=1)
    """Bytes of one of its JSON files, but for tokenizer.json."""

    max_tokenizer_bytes: int = Field(default=64 << 20, ge=1)
    """Bytes of tokenizer.json."""

    max_vocab_size: int = Field(default=1 << 20, ge=1)
    """Embedding rows of a model, and ids of a tokenizer."""

    max_end_token_ids: int = Field(default=256, ge=1)
    """Ids under `eos_token_id`."""

    max_num_layers: int = Field(default=512, ge=1)
    """Layers of a model."""

    max_layer_size: int = Field(default=1 << 20, ge=1)
    """Any other size of a layer: of hidden states, of the MLP, heads, and channels of a head."""

    max_context_length: int = Field(default=1 << 27, ge=1)
    """Positions of a model, as its rope stretches them."""

    max_safetensors_header_bytes: int = Field(default=4 << 20, ge=1)
    """Bytes of the header of one safetensors file."""

    # Of a chat template, and of the process that renders it.
    max_chat_template_bytes: int = Field(default=1 << 20, ge=1)
    """Bytes of a chat template."""

    chat_template_seconds: float = Field(default=2.0, gt=0, allow_inf_nan=False)
    """CPU seconds for one conversation, or for compiling."""

    chat_template_memory_bytes: int = Field(default=256 << 20, ge=1 << 20)
    """Bytes of memory that it may use, beyond what it starts with."""


DEFAULT_LIMITS = Limits()
