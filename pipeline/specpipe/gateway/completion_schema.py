"""The body of `/v1/completions`."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, JsonValue, model_validator

from specpipe.gateway.parameters import Parameters, Refused, TokenId, Top

MOST_PROMPTS = 256

_Ids = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
_Texts = Annotated[list[str], Field(min_length=1, max_length=MOST_PROMPTS, fail_fast=True)]
_IdLists = Annotated[list[_Ids], Field(min_length=1, max_length=MOST_PROMPTS, fail_fast=True)]


class CompletionRequest(Parameters):
    prompt: Annotated[str | _Ids | _Texts | _IdLists, Field(union_mode="left_to_right")]
    """A text, its token ids, or a list of either."""
    echo: bool | None = None
    """Whether the text begins with the prompt."""
    logprobs: Top | None = None
    """How many of the likeliest tokens come with the log probability of each."""
    prompt_logprobs: Top | None = None
    """The same of the prompt, as vLLM has it."""
    add_special_tokens: bool | None = None
    """False: the prompt gets no BOS."""
    suffix: Annotated[JsonValue, Refused(neutral=("",))] = None

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts one by one."""
        prompt: Any = self.prompt
        is_one = isinstance(prompt, str) or isinstance(prompt[0], int)
        return [prompt] if is_one else prompt

    @model_validator(mode="after")
    def _is_bounded(self) -> CompletionRequest:
        num_choices = len(self.prompts) * self.num_choices
        if num_choices > MOST_PROMPTS:
            raise ValueError(f"prompt and n ask for {num_choices} answers: {MOST_PROMPTS} at most")
        if self.stream and self.prompt_logprobs is not None:
            raise ValueError("prompt_logprobs comes with whole answers alone, not with stream")
        return self
