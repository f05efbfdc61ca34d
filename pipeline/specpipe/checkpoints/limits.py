"""How much a file of a checkpoint may hold, before work is done on it."""

from __future__ import annotations

from pydantic import Field

from specpipe.errors import CheckpointError
from specpipe.section import Section


class FileLimits(Section):
    """What of a checkpoint is refused for its size, and what its chat template may use."""

    max_json_bytes: int = Field(default=8 << 20, ge=1)
    """Bytes of one JSON file of a checkpoint, but for tokenizer.json."""

    max_tokenizer_bytes: int = Field(default=64 << 20, ge=1)
    """Bytes of tokenizer.json."""

    max_vocab_size: int = Field(default=1 << 20, ge=1)
    """Embedding rows of a model, ids of a tokenizer, and tokens that are added to it."""

    max_end_token_ids: int = Field(default=256, ge=1)
    """Ids under `eos_token_id`."""

    max_num_layers: int = Field(default=512, ge=1, le=1 << 16)
    """Layers of a model."""

    max_layer_size: int = Field(default=1 << 20, ge=1)
    """Any other size of a layer: of hidden states, of the MLP, heads, and channels of a head."""

    max_context_length: int = Field(default=1 << 27, ge=1)
    """Positions of a model, before and after rope scaling."""

    max_safetensors_header_bytes: int = Field(default=4 << 20, ge=1)
    """Bytes of the header of one safetensors file."""

    max_chat_template_bytes: int = Field(default=1 << 20, ge=1)
    """Bytes of a chat template."""

    chat_template_seconds: float = Field(default=2.0, gt=0, allow_inf_nan=False)
    """CPU seconds for rendering one conversation, or for compiling the template."""

    chat_template_memory_bytes: int = Field(default=256 << 20, ge=1 << 20)
    """Bytes of memory that the process which renders may add to those that it starts with."""

    max_guide_bytes: int = Field(default=64 << 10, ge=1)
    """Bytes of a `guided_decoding_guide`."""

    guide_seconds: float = Field(default=2.0, gt=0, allow_inf_nan=False)
    """CPU seconds for compiling one guide, when it is checked."""

    guide_memory_bytes: int = Field(default=512 << 20, ge=1 << 20)
    """Bytes of memory that the process which checks guides may add to those it starts with."""

    def check(self, name: str, number: float, fact: str) -> None:
        """Raises CheckpointError for a number above the limit; `fact` begins the message."""
        most = getattr(self, name)
        if number > most:
            raise CheckpointError(f"{fact}, expected at most {most} (serving.limits.{name})")


FILE_LIMITS = FileLimits()
"""The defaults."""
