"""Requests as clients send them, and what becomes of them in preprocessing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specpipe.config.limits import Limits
from specpipe.errors import RequestError
from specpipe.speculative.guide import Guide
from specpipe.text.chat_arguments import ChatArguments
from specpipe.text.tools.message_format import MessageFormat
from specpipe.text.tools.special_tokens import SpecialTokens
from specpipe.triton import serving
from specpipe.triton.secret import Signer
from specpipe.triton.serving.guides import CallFormat
from specpipe.triton.serving.requests import Generation, parse_request

DEFAULTS = ChatArguments()


UNKNOWN = MessageFormat(
    dialect=None, reasoning=None, special=SpecialTokens(()), needs_special_tokens=False
)


class Unchecked:
    """Takes every guide but those that say that they are bad."""

    def check(self, guide: Guide, field: str = "guided_decoding_guide") -> None:
        if guide.text.startswith("bad"):
            raise RequestError(f"{field}: {guide.text}")


class Words:
    """A tokenizer: each character is the token of its code point; id 2 ends."""

    end_token_ids = frozenset({2})
    guides = Unchecked()

    def encode(self, text: str) -> list[int]:
        return [1, *map(ord, text)]

    def encode_messages(
        self,
        messages: list[dict[str, Any]],
        arguments: ChatArguments = DEFAULTS,
        *,
        max_bytes: int | None = None,
    ) -> list[int]:
        """The tools before the messages, where there are any."""
        names = [tool["function"]["name"] for tool in arguments.tools]
        texts = [*names, *(message["content"] for message in messages)]
        return [1, *(ord(char) for text in texts for char in text)]

    def encode_fragment(self, text: str) -> list[int]:
        return [ord(char) for char in text]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return "".join(map(chr, token_ids))

    def is_used(self, token_id: int) -> bool:
        return token_id < 0x110000


LIMITS = Limits().resolved(max_seq_len=1024, longest_token_bytes=16, is_bytewise=True)
SIGNER = Signer("the secret of a start")


def parse(
    *,
    parameters: str = "",
    timeout_us: int = 0,
    calls: CallFormat = UNKNOWN,
    **inputs: Any,
) -> Generation:
    """What preprocessing does with inputs as Triton delivers them: shaped, strings as bytes."""
    tensors = {}
    for name, value in inputs.items():
        values = value if isinstance(value, list) else [value]
        encoded = [v.encode() if isinstance(v, str) else v for v in values]
        tensors[name] = serving.as_array(serving.input_tensor(name), encoded)
    return parse_request(
        tensors,
        Words(),
        limits=LIMITS,
        calls=calls,
        parameters=parameters,
        timeout_us=timeout_us,
    )
