"""What reads calls and thoughts out of the answers of a chat."""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from typing import Any

from specpipe.errors import RequestError
from specpipe.gateway.chat_schema import ChatRequest
from specpipe.gateway.models import ServedModel
from specpipe.text.chat_arguments import ChatArguments
from specpipe.text.tools.contract import MessageParser

_PLAIN = [{"role": "user", "content": "Hello"}]
_MOST_KEPT, _LONGEST_KEY = 64, 4096


class MessageParsers:
    """Makes the parsers of one model's answers."""

    def __init__(self, served: ServedModel) -> None:
        self._served = served
        self._opens_thoughts: OrderedDict[str, bool] = OrderedDict()

    def is_needed(self, body: ChatRequest) -> bool:
        """Returns whether an answer may be more than content."""
        if body.skip_special_tokens is False:
            return False
        written = self._served.format
        has_calls = body.calls_tools and written.dialect is not None
        return has_calls or written.reasoning is not None

    async def parsers(
        self, body: ChatRequest, kwargs: dict[str, Any]
    ) -> list[MessageParser | None]:
        """Returns a parser for each answer; kwargs are the variables of the chat template."""
        if not self.is_needed(body):
            return [None] * body.num_choices
        is_reasoning = await self._is_reasoning(body, kwargs)
        return [
            self._served.format.parser(
                body.tool_list if body.calls_tools else (),
                is_parallel=body.parallel_tool_calls is not False,
                is_reasoning=is_reasoning,
            )
            for _ in range(body.num_choices)
        ]

    async def _is_reasoning(self, body: ChatRequest, kwargs: dict[str, Any]) -> bool:
        """Returns whether the template opens the thoughts of the answer by itself.

        That follows from its variables alone, so that a plain question shows it.
        """
        written, template = self._served.format, self._served.tokenizer.chat_template
        is_begun = body.continue_final_message or body.add_generation_prompt is False
        if written.reasoning is None or template is None or is_begun:
            return False
        key = json.dumps(kwargs)
        if key not in self._opens_thoughts:
            try:
                arguments = ChatArguments(variables=kwargs)
                prompt = await asyncio.to_thread(template.render, _PLAIN, arguments)
            except RequestError:  # which the ensemble says of the whole conversation
                return False
            if len(key) > _LONGEST_KEY:
                return written.is_reasoning_after(prompt)
            self._opens_thoughts[key] = written.is_reasoning_after(prompt)
            if len(self._opens_thoughts) > _MOST_KEPT:
                self._opens_thoughts.popitem(last=False)
        return self._opens_thoughts[key]
