"""What the inputs of a request need of a tokenizer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from specpipe.errors import RequestError
from specpipe.speculative.guide import Guide
from specpipe.text.chat_arguments import ChatArguments


class GuideCheck(Protocol):
    """`specpipe.text.guides.guides.Guides` has it."""

    def check(self, guide: Guide, field: str = ...) -> None:
        """Raises RequestError, which begins with the field, for a guide that cannot be followed."""


class RequestTokenizer(Protocol):
    """What preprocessing needs of a tokenizer; `specpipe.text.tokenizer.Tokenizer` has it."""

    @property
    def end_token_ids(self) -> frozenset[int]: ...

    @property
    def guides(self) -> GuideCheck: ...

    def encode(self, text: str) -> list[int]: ...

    def encode_messages(
        self,
        messages: list[dict[str, Any]],
        arguments: ChatArguments = ...,
        *,
        max_bytes: int | None = None,
    ) -> list[int]: ...

    def encode_fragment(self, text: str) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...

    def is_used(self, token_id: int) -> bool: ...


def check_used(name: str, token_ids: Iterable[int], tokenizer: RequestTokenizer) -> None:
    """Raises RequestError for an id, of the input of that name, that is no token."""
    for token_id in dict.fromkeys(token_ids):
        if not tokenizer.is_used(token_id):
            raise RequestError(f"{name} has {token_id}, which is no token of this model")
