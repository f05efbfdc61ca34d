"""`/v1/chat/completions`: answers as messages, whole or as deltas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from specpipe.gateway.chat_schema import ChatRequest
from specpipe.gateway.models import ServedModel
from specpipe.gateway.response import Head
from specpipe.gateway.tokens import chat_log_probs, entries
from specpipe.gateway.usage import Usage
from specpipe.text.tools.contract import MessageDelta, MessageParser, ToolCallDelta
from specpipe.triton.client.completion import Completion


class ChatWriter:
    """Writes answers as `chat.completion` objects, whole or as events."""

    def __init__(
        self,
        body: ChatRequest,
        served: ServedModel,
        head: Head,
        parsers: Sequence[MessageParser | None],
    ) -> None:
        """parsers  of the answers; None where the text is the content"""
        self._body, self._served, self._head = body, served, head
        self._choices = [_Choice(parser, served.new_call_id) for parser in parsers]
        self.usage = Usage(num_choices=len(parsers), prompt_lengths=[None])

    def events(self, index: int, completion: Completion) -> list[dict[str, Any]]:
        """Returns the event of a chunk, none for one that says nothing."""
        self.usage.add(index, completion)
        choice = self._choices[index]
        is_first = not choice.has_begun
        delta = self._delta(choice.add(completion), choice)
        if is_first:
            delta = {"role": "assistant", "content": "", **delta}
        if not (delta or completion.token_ids or completion.finish_reason):
            return []
        event = {"index": index, "delta": delta, **self._rest(choice, completion)}
        return [self._head.event([event], self.usage)]

    def last_events(self) -> list[dict[str, Any]]:
        """Returns the event with the usage, where it is asked for."""
        return self._head.last_events(self.usage)

    def whole(self, completions: Sequence[Completion]) -> dict[str, Any]:
        """Returns the response of answers that came in one piece each."""
        choices = []
        for index, completion in enumerate(completions):
            self.usage.add(index, completion)
            choice = self._choices[index]
            message = self._message(choice.add(completion), choice)
            choices.append({"index": index, "message": message, **self._rest(choice, completion)})
        return self._head.whole(choices, self.usage)

    def _rest(self, choice: _Choice, completion: Completion) -> dict[str, Any]:
        rest: dict[str, Any] = {"logprobs": None, "finish_reason": completion.finish_reason}
        if completion.finish_reason == "stop" and choice.call_ids:
            rest["finish_reason"] = "tool_calls"
        if self._body.logprobs:
            is_by_id = bool(self._body.return_tokens_as_token_ids)
            found = chat_log_probs(
                entries(completion, self._body.top_logprobs or 0),
                self._served.tokens,
                is_by_id=is_by_id,
            )
            rest["logprobs"] = {"content": found, "refusal": None}
        if self._body.return_token_ids:
            rest["token_ids"] = list(completion.token_ids)
        return rest

    def _delta(self, found: MessageDelta, choice: _Choice) -> dict[str, Any]:
        delta: dict[str, Any] = {}
        if found.content:
            delta["content"] = found.content
        if found.reasoning and self._body.include_reasoning is not False:
            delta["reasoning_content"] = found.reasoning
        if found.tool_calls:
            delta["tool_calls"] = [choice.call_delta(call) for call in found.tool_calls]
        return delta

    def _message(self, found: MessageDelta, choice: _Choice) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": found.content, "refusal": None}
        if found.reasoning and self._body.include_reasoning is not False:
            message["reasoning_content"] = found.reasoning
        if found.tool_calls:
            message["content"] = found.content or None
            message["tool_calls"] = [
                {
                    "id": choice.call_id(call.index),
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in found.tool_calls
            ]
        return message


class _Choice:
    """One answer on its way."""

    def __init__(self, parser: MessageParser | None, new_call_id: Callable[[], str]) -> None:
        self._parser, self._new_call_id = parser, new_call_id
        self.has_begun = False
        self.call_ids: dict[int, str] = {}

    def add(self, completion: Completion) -> MessageDelta:
        """Returns what a chunk adds to the message."""
        self.has_begun = True
        if self._parser is None:
            return MessageDelta(content=completion.text)
        delta = self._parser.feed(completion.text)
        if completion.finish_reason is not None:
            delta = MessageDelta.joined((delta, self._parser.end()))
        for call in delta.tool_calls:
            self.call_id(call.index)
        return delta

    def call_id(self, index: int) -> str:
        """Returns the id of a call, drawn when it is first seen."""
        if index not in self.call_ids:
            self.call_ids[index] = self._new_call_id()
        return self.call_ids[index]

    def call_delta(self, call: ToolCallDelta) -> dict[str, Any]:
        """Returns a piece of a call; its first one has id, type and name."""
        function: dict[str, Any] = {"arguments": call.arguments}
        if not call.name:
            return {"index": call.index, "function": function}
        return {
            "index": call.index,
            "id": self.call_id(call.index),
            "type": "function",
            "function": {"name": call.name, **function},
        }
