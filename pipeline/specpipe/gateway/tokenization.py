"""`/tokenize` and `/detokenize`, as vLLM has them."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from pydantic import Field, JsonValue, model_validator

from specpipe.gateway.chat_inputs import template_message
from specpipe.gateway.chat_schema import Message, Tool
from specpipe.gateway.errors import ApiError
from specpipe.gateway.models import ServedModel
from specpipe.gateway.parameters import Named, TokenId
from specpipe.text.chat_arguments import ChatArguments

_MOST_MESSAGES = 1024


class TokenizeRequest(Named):
    prompt: str | None = None
    """A text; this or `messages`."""
    messages: Annotated[list[Message], Field(min_length=1, max_length=_MOST_MESSAGES)] | None = None
    """A conversation, which the checkpoint's chat template renders."""
    add_special_tokens: bool | None = None
    """False: no BOS is added to `prompt`."""
    tools: list[Tool] | None = None
    """What the template is given besides `messages`, as in a chat; so the next three."""
    chat_template_kwargs: dict[str, JsonValue] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    return_token_strs: bool | None = None
    """Whether the tokens come as text, too."""

    @model_validator(mode="after")
    def _has_one_source(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("prompt or messages: exactly one is needed")
        return self


class DetokenizeRequest(Named):
    tokens: Annotated[list[TokenId], Field(max_length=1 << 20, fail_fast=True)]


async def tokenize(body: TokenizeRequest, served: ServedModel) -> dict[str, Any]:
    """Returns the token ids of a text or of a conversation."""
    if body.prompt is not None:
        adds = body.add_special_tokens is not False
        token_ids = await served.encode(body.prompt, add_special_tokens=adds)
    else:
        arguments = ChatArguments(
            tools=[tool.model_dump(exclude_none=True) for tool in body.tools or ()],
            variables=body.chat_template_kwargs or {},
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=bool(body.continue_final_message),
        )
        token_ids = await asyncio.to_thread(
            served.tokenizer.encode_messages,
            [template_message(message, served.limits) for message in body.messages or ()],
            arguments,
            max_bytes=served.limits.max_prompt_bytes,
        )
    texts = None
    if body.return_token_strs:
        texts = [served.tokens.written(token_id)[0] for token_id in token_ids]
    return {
        "count": len(token_ids),
        "max_model_len": served.limits.max_seq_len,
        "tokens": token_ids,
        "token_strs": texts,
    }


async def detokenize(body: DetokenizeRequest, served: ServedModel) -> dict[str, Any]:
    """Returns the text of token ids, special tokens left out."""
    for index, token_id in enumerate(body.tokens):
        if not served.tokenizer.is_used(token_id):
            message = f"tokens[{index}] is {token_id}, which is no token of this model"
            raise ApiError(message, param=f"tokens[{index}]")
    return {"prompt": await asyncio.to_thread(served.tokenizer.decode, body.tokens)}
