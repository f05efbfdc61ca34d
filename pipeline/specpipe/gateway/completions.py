"""`/v1/completions`: what is asked of the ensemble, and what comes back of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specpipe.gateway.completion_schema import CompletionRequest
from specpipe.gateway.inputs import Ask, common_inputs, needs_token_ids
from specpipe.gateway.models import ServedModel
from specpipe.gateway.response import Head
from specpipe.gateway.tokens import CompletionLogProbs, entries, prompt_entries, vllm_log_probs
from specpipe.gateway.usage import Usage
from specpipe.triton.client.completion import Completion


async def completion_asks(body: CompletionRequest, served: ServedModel) -> list[Ask]:
    """Returns the answers that a body asks for: `n` of its first prompt, `n` of the second …

    A prompt is encoded here where its tokens are part of the response.
    """
    inputs = common_inputs(body, max_tokens=served.limits.max_seq_len)
    if body.echo:
        inputs["exclude_input_in_output"] = False
    tops = [top for top in (body.logprobs, body.prompt_logprobs) if top is not None]
    if tops:
        inputs |= {"return_log_probs": True, "num_top_log_probs": max(tops)}
        inputs["return_token_ids"] = True
    returns_prompt = body.prompt_logprobs is not None or bool(body.echo and tops)
    # Nothing but the prompt is computed of a request for no tokens.
    if returns_prompt or body.max_tokens == 0:
        inputs["return_prompt_log_probs"] = True
    is_encoded = returns_prompt or needs_token_ids(body) or body.add_special_tokens is False
    asks = []
    for prompt in body.prompts:
        token_ids: Sequence[int] | None = None
        if not isinstance(prompt, str):
            token_ids = prompt
        elif is_encoded:
            adds = body.add_special_tokens is not False
            token_ids = await served.encode(prompt, add_special_tokens=adds)
        source = {"text_input": prompt} if token_ids is None else {"input_ids": list(token_ids)}
        ask = Ask(
            inputs={**inputs, **source},
            prompt_token_ids=None if token_ids is None else tuple(token_ids),
        )
        asks += [ask.seeded(index) for index in range(body.num_choices)]
    return asks


_NOTHING = Completion(text="")


class CompletionWriter:
    """Writes answers as `text_completion` objects, whole or as events."""

    def __init__(
        self, body: CompletionRequest, asks: Sequence[Ask], served: ServedModel, head: Head
    ) -> None:
        self._body, self._asks, self._served, self._head = body, asks, served, head
        self._has_begun = [False] * len(asks)
        self._log_probs: list[CompletionLogProbs | None] = [None] * len(asks)
        if body.logprobs is not None:
            is_by_id = bool(body.return_tokens_as_token_ids)
            shows_special = body.skip_special_tokens is False
            self._log_probs = [
                CompletionLogProbs(served.tokens, is_by_id=is_by_id, shows_special=shows_special)
                for _ in asks
            ]
        prompts = asks[:: body.num_choices]
        self.usage = Usage(
            num_choices=body.num_choices,
            prompt_lengths=[
                None if a.prompt_token_ids is None else len(a.prompt_token_ids) for a in prompts
            ],
        )

    def events(self, index: int, completion: Completion) -> list[dict[str, Any]]:
        """Returns the event of a chunk, none for one that says nothing."""
        self.usage.add(index, completion)
        if completion == _NOTHING:
            return []
        return [self._head.event([self._choice(index, completion)], self.usage)]

    def last_events(self) -> list[dict[str, Any]]:
        """Returns the event with the usage, where it is asked for."""
        return self._head.last_events(self.usage)

    def whole(self, completions: Sequence[Completion]) -> dict[str, Any]:
        """Returns the response of answers that came in one piece each."""
        for index, completion in enumerate(completions):
            self.usage.add(index, completion)
        choices = [self._choice(index, found) for index, found in enumerate(completions)]
        return self._head.whole(choices, self.usage)

    def _choice(self, index: int, completion: Completion) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": index,
            "text": completion.text,
            "logprobs": None,
            "finish_reason": completion.finish_reason,
        }
        body, prompt_token_ids = self._body, self._asks[index].prompt_token_ids or ()
        is_first, self._has_begun[index] = not self._has_begun[index], True
        log_probs = self._log_probs[index]
        if log_probs is not None and body.logprobs is not None:
            found = entries(completion, body.logprobs)
            if is_first and body.echo:
                found = prompt_entries(completion, prompt_token_ids, body.logprobs) + found
            choice["logprobs"] = log_probs.write(found)
        if body.prompt_logprobs is not None:
            found = prompt_entries(completion, prompt_token_ids, body.prompt_logprobs)
            choice["prompt_logprobs"] = vllm_log_probs(found, self._served.tokens)
        if body.return_token_ids:
            choice["token_ids"] = list(completion.token_ids)
            if is_first:
                choice["prompt_token_ids"] = list(prompt_token_ids)
        return choice
