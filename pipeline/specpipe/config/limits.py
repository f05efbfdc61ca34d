"""How much of anything a client or a checkpoint may send, before work is done on it."""

from __future__ import annotations

from pydantic import Field

from specpipe.checkpoints.limits import FileLimits

_MOST_PROMPT_BYTES = 2 << 20
"""Of the default: tokenizing takes about a second for each MiB on one core (measured: BPE, Unigram
and WordPiece of tokenizers 0.23, linear in the text), and a body of 4 MB kills the HTTP server of
Triton 2.51.
"""

_MOST_SHRUNK_BY = 4
"""Bytes that become one at most, by character, where tokens do not spell out a text byte by byte:
NFKC turns the 4 bytes of a mathematical letter into ASCII, NFC the 9 bytes of three Hangul jamo
into 3, and word pieces leave out the space between two words.
"""

_MOST_ESCAPED_TO = 3
"""Bytes of JSON that one byte of text takes where all but ASCII is escaped, as Python does."""

_MESSAGE_FRAMES_BYTES = 64 << 10
"""What roles, brackets and names of `messages` may take by default."""


class Limits(FileLimits):
    """What is refused for its size, each with both numbers; docs/limits.md is the table."""

    max_prompt_bytes: int | None = Field(default=None, ge=1)
    """Bytes of a prompt in UTF-8, before it is tokenized; none: `engine.max_seq_len` times the
    longest token of the tokenizer (times 4 unless its tokens are bytes of the text, since others
    may be shorter than what they stand for), and 2 MiB at most."""

    max_messages_bytes: int | None = Field(default=None, ge=1)
    """Bytes of `messages`, which is JSON; none: three times those of a prompt, and 64 KiB more."""

    max_messages: int = Field(default=1024, ge=1)
    """Messages of one conversation."""

    max_json_depth: int = Field(default=32, ge=1, le=200)
    """How deep lists and objects may be nested in `messages`, and in every other input of JSON."""

    max_json_values: int = Field(default=65536, ge=1)
    """Values, lists and objects in such an input, those inside others included."""

    max_tools: int = Field(default=128, ge=1)
    """Functions in `tools`."""

    max_tools_bytes: int = Field(default=262144, ge=1)
    """Bytes of `tools`, and of `tool_choice`."""

    max_template_kwargs_bytes: int = Field(default=65536, ge=1)
    """Bytes of `chat_template_kwargs`."""

    max_logit_biases: int = Field(default=1024, ge=1)
    """Entries of `logit_bias_ids`."""

    max_words: int = Field(default=256, ge=1)
    """Entries of `stop_words`, of `bad_words`, of `embedding_bias_words`, of `stop_token_ids`."""

    max_word_bytes: int = Field(default=1024, ge=1)
    """Bytes of one entry of a list of words."""

    max_words_bytes: int = Field(default=16384, ge=1)
    """Bytes of all entries of one of these lists."""

    max_parameters_bytes: int = Field(default=65536, ge=1)
    """Bytes of a request's parameters: what HTTP `generate` makes of keys that are no inputs."""

    def resolved(
        self, *, max_seq_len: int, longest_token_bytes: int, is_bytewise: bool
    ) -> ServedLimits:
        """Returns the limits with every number there.

        is_bytewise says that the tokens of a text have all its bytes; see `Tokenizer`.
        """
        longest = longest_token_bytes * (1 if is_bytewise else _MOST_SHRUNK_BY)
        prompt = self.max_prompt_bytes or min(max_seq_len * longest, _MOST_PROMPT_BYTES)
        messages = self.max_messages_bytes or _MOST_ESCAPED_TO * prompt + _MESSAGE_FRAMES_BYTES
        sizes = {"max_prompt_bytes": prompt, "max_messages_bytes": messages}
        return ServedLimits(**{**self.model_dump(), **sizes}, max_seq_len=max_seq_len)


class ServedLimits(Limits):
    """The limits of one repository; packaging writes them beside each tokenizer."""

    max_prompt_bytes: int
    max_messages_bytes: int

    max_seq_len: int
    """Tokens of prompt and output together, `engine.max_seq_len`."""
