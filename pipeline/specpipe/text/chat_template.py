"""A checkpoint's chat template: messages to one prompt, rendered by a process with limits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specpipe.checkpoints.limits import FILE_LIMITS, FileLimits
from specpipe.errors import CheckpointError, RequestError
from specpipe.text.chat_arguments import ChatArguments, until_mark, with_mark
from specpipe.text.chat_messages import (
    Messages,
    check_messages,
    for_template,
    has_parts,
    shows_parts,
    with_joined_parts,
    with_marked_parts,
)
from specpipe.text.worker import Answer, Worker

_MAX_PROMPT_BYTES = 16 << 20  # 131,072 tokens of 128 bytes
_PLAIN = [{"role": "user", "content": "Hello"}]
_DEFAULTS = ChatArguments()
_WITH_TOOL = ChatArguments(
    tools=[
        {
            "type": "function",
            "function": {
                "name": "greet",
                "description": "Greets.",
                "parameters": {"type": "object", "properties": {"name": {"type": "string"}}},
            },
        }
    ]
)


class ChatTemplate:
    """One template; its process is started when first used."""

    def __init__(
        self,
        source: str,
        *,
        file: str,
        special_tokens: Mapping[str, str],
        limits: FileLimits = FILE_LIMITS,
        with_tools: ChatTemplate | None = None,
    ) -> None:
        """special_tokens are the variables `bos_token`, `eos_token`, … that templates read.

        with_tools is rendered instead where there are tools; None: this one is, then too.
        """
        num_bytes = len(source.encode(errors="surrogatepass"))
        fact = f"{file}: the chat template has {num_bytes} bytes"
        limits.check("max_chat_template_bytes", num_bytes, fact)
        self.source = source
        self.with_tools = with_tools
        self._file = file
        self._worker = Worker(
            "specpipe.text.chat_renderer",
            {
                "limits": "chat_template",
                "source": source,
                "special_tokens": dict(special_tokens),
                "seconds": limits.chat_template_seconds,
                "memory_bytes": limits.chat_template_memory_bytes,
            },
        )

    def render(
        self,
        messages: list[dict[str, Any]],
        arguments: ChatArguments = _DEFAULTS,
        *,
        max_bytes: int | None = None,
    ) -> str:
        """Returns the conversation as a prompt, which asks for the assistant's turn by default.

        A template that does not go through the parts of a content gets them joined to one text.
        max_bytes are those of the prompt, in UTF-8; none: 16 MiB.
        """
        if arguments.tools and self.with_tools is not None:
            return self.with_tools.render(messages, arguments, max_bytes=max_bytes)
        messages = for_template(check_messages(messages))
        if not arguments.continue_final_message:
            return self._render_parts(messages, arguments, max_bytes)
        if "content" not in self.source:
            raise RequestError(
                "continue_final_message is true, but the chat template reads no content"
            )
        prompt = self._render_parts(with_mark(messages), arguments, max_bytes)
        return until_mark(prompt, messages)

    def _render_parts(
        self, messages: Messages, arguments: ChatArguments, max_bytes: int | None
    ) -> str:
        if has_parts(messages) and not self._shows_parts(messages, arguments, max_bytes):
            messages = with_joined_parts(messages)
        return self._render(messages, arguments, max_bytes)

    def _shows_parts(
        self, messages: Messages, arguments: ChatArguments, max_bytes: int | None
    ) -> bool:
        """Returns whether the template goes through the parts of these messages.

        It is told by marks: a short text may stand in the prompt of another message, too.
        """
        marked = with_marked_parts(messages)
        try:
            return shows_parts(marked, self._render(marked, arguments, max_bytes))
        except RequestError:  # most often of adding a list to a text
            return False

    def _render(self, messages: Messages, arguments: ChatArguments, max_bytes: int | None) -> str:
        try:
            answer = self._ask(messages, arguments, max_bytes)
        except (TypeError, ValueError, RecursionError) as exc:  # of a caller, not of a client
            raise RequestError(f"messages cannot be written as JSON: {exc}") from exc
        if answer.result is None:
            raise RequestError(f"messages: {_fault(answer, 'them')}")
        prompt: str = answer.result
        return prompt

    def _ask(
        self,
        messages: Messages,
        arguments: ChatArguments = _DEFAULTS,
        max_bytes: int | None = None,
    ) -> Answer:
        return self._worker.ask(
            {
                "variables": arguments.for_template(messages),
                "max_bytes": max_bytes or _MAX_PROMPT_BYTES,
            }
        )

    def check(self, *, has_tools: bool = False) -> None:
        """Raises CheckpointError when the template does not compile or render a plain question.

        has_tools  whether one comes with the question
        """
        answer = self._ask(_PLAIN, _WITH_TOOL if has_tools else _DEFAULTS)
        if answer.result is None:
            raise CheckpointError(f"{self._file}: {_fault(answer, 'a plain question')}")

    def warm_up(self) -> None:
        """Compiles the template, so that the first conversation need not wait for that."""
        self._worker.start()


def _fault(answer: Answer, messages: str) -> str:
    verbs = {
        "setup": "does not compile",
        "refusal": f"refuses {messages}",
        "limit": f"cannot render {messages}",
    }
    return f"the chat template {verbs[answer.kind]}: {answer.fault}"
