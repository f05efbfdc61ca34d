"""The model behind the door, as its repository says."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from specpipe.config.limits import ServedLimits
from specpipe.errors import show
from specpipe.gateway.errors import not_found
from specpipe.gateway.tokens import Tokens
from specpipe.text import Tokenizer
from specpipe.text.tools.message_format import MessageFormat
from specpipe.triton import repository as repositories
from specpipe.triton.serving.request_sizes import check_bytes

_ENCODED_AT_ONCE_BYTES = 4096
"""Above it a text is encoded beside the event loop; below, that takes longer than encoding it."""


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """What the door knows of its model.

    names  by which clients may ask for it; the first one is its own
    """

    names: tuple[str, ...]
    tokenizer: Tokenizer
    limits: ServedLimits
    created: int = field(default_factory=lambda: int(time.time()))

    @cached_property
    def tokens(self) -> Tokens:
        return Tokens(self.tokenizer, self.tokenizer.special_token_ids)

    @cached_property
    def format(self) -> MessageFormat:
        """How the model writes calls and thoughts."""
        return MessageFormat.of(self.tokenizer)

    def new_call_id(self) -> str:
        """Returns a random id for a tool call, in the form that the chat template takes."""
        assert self.format.dialect is not None  # there was a call
        return self.format.dialect.new_call_id()

    @classmethod
    def load(cls, repository: Path, names: Sequence[str]) -> ServedModel:
        """Reads the tokenizer and the limits of a built repository."""
        served = cls(
            names=tuple(names),
            tokenizer=repositories.load_tokenizer(repository),
            limits=repositories.load_limits(repository),
        )
        assert served.format  # goes through the vocabulary: not while the first chat waits
        return served

    @property
    def name(self) -> str:
        return self.names[0]

    def check_name(self, name: str | None) -> None:
        """Raises ApiError for a model that is not here."""
        if name is not None and name not in self.names:
            raise not_found(
                f"the model '{show(name)}' does not exist here; it is '{self.name}'",
                code="model_not_found",
                param="model",
            )

    def to_json(self, name: str) -> dict[str, Any]:
        """Returns the object of `/v1/models`; `max_model_len` is vLLM's."""
        return {
            "id": name,
            "object": "model",
            "created": self.created,
            "owned_by": "specpipe",
            "root": self.name,
            "parent": None,
            "max_model_len": self.limits.max_seq_len,
        }

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Returns the token ids of a prompt; raises RequestError for one that is too long."""
        num_bytes = len(text.encode())
        check_bytes("prompt has", num_bytes, "max_prompt_bytes", self.limits)
        if num_bytes <= _ENCODED_AT_ONCE_BYTES:
            return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return await asyncio.to_thread(
            self.tokenizer.encode, text, add_special_tokens=add_special_tokens
        )
