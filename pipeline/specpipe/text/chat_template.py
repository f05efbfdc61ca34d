"""A checkpoint's chat template: messages to one prompt, rendered by a process with limits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specpipe.checkpoints.limits import FILE_LIMITS, FileLimits
from specpipe.errors import CheckpointError, RequestError
from specpipe.text.chat_messages import (
    check_messages,
    for_template,
    has_parts,
    shows_parts,
    with_joined_parts,
)
from specpipe.text.chat_worker import ChatWorker, Rendered

_MAX_PROMPT_BYTES = 16 << 20  # 131,072 tokens of 128 bytes
_PLAIN = [{"role": "user", "content": "Hello"}]


class ChatTemplate:
    """One template; its process is started when first used."""

    def __init__(
        self,
        source: str,
        *,
        file: str,
        special_tokens: Mapping[str, str],
        limits: FileLimits = FILE_LIMITS,
    ) -> None:
        """special_tokens are the variables `bos_token`, `eos_token`, … that templates read."""
        num_bytes = len(source.encode(errors="surrogatepass"))
        fact = f"{file}: the chat template has {num_bytes} bytes"
        limits.check("max_chat_template_bytes", num_bytes, fact)
        self.source = source
        self._file = file
        self._worker = ChatWorker(
            {
                "source": source,
                "special_tokens": dict(special_tokens),
                "seconds": limits.chat_template_seconds,
                "memory_bytes": limits.chat_template_memory_bytes,
            }
        )

    def render(self, messages: list[dict[str, Any]], *, max_bytes: int | None = None) -> str:
        """Returns the conversation as a prompt that asks for the assistant's turn.

        A template that does not go through the parts of a content gets them joined to one text.
        max_bytes are those of the prompt, in UTF-8; none: 16 MiB.
        """
        messages = for_template(check_messages(messages))
        if has_parts(messages):
            try:
                prompt = self._render(messages, max_bytes)
            except RequestError:  # most often of adding a list to a text
                prompt = ""
            if shows_parts(messages, prompt):
                return prompt
            messages = with_joined_parts(messages)
        return self._render(messages, max_bytes)

    def _render(self, messages: list[dict[str, Any]], max_bytes: int | None) -> str:
        try:
            answer = self._worker.render(messages, max_bytes or _MAX_PROMPT_BYTES)
        except (TypeError, ValueError, RecursionError) as exc:  # of a caller, not of a client
            raise RequestError(f"messages cannot be written as JSON: {exc}") from exc
        if answer.prompt is None:
            raise RequestError(f"messages: {_fault(answer, 'them')}")
        return answer.prompt

    def check(self) -> None:
        """Raises CheckpointError when the template does not compile or render a plain question."""
        answer = self._worker.render(_PLAIN, _MAX_PROMPT_BYTES)
        if answer.prompt is None:
            raise CheckpointError(f"{self._file}: {_fault(answer, 'a plain question')}")

    def warm_up(self) -> None:
        """Compiles the template, so that the first conversation need not wait for that."""
        self._worker.start()


def _fault(answer: Rendered, messages: str) -> str:
    verbs = {
        "compile": "does not compile",
        "refusal": f"refuses {messages}",
        "limit": f"cannot render {messages}",
    }
    return f"the chat template {verbs[answer.kind]}: {answer.fault}"
