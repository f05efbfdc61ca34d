"""The body of `/v1/chat/completions`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, model_validator

from specpipe.gateway.parameters import Count, Parameters, Part, Refused, Text, Top, WithoutEffect

_MOST_TOOLS = 128  # OpenAI's bound
_MOST_MESSAGES = 65536  # the ensemble takes fewer, and says how many
_FunctionName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:/-]{1,128}$")]
"""As `text/tools` has them: OpenAI's, and what servers of MCP put before a tool's name."""


class _Past(BaseModel):
    """A part of a call that was made; what clients add to it (`parsed_arguments`) is left out."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)


class CalledFunction(_Past):
    name: _FunctionName
    arguments: str | dict[str, JsonValue]


class CalledTool(_Past):
    id: str | None = None
    type: Literal["function"] | None = None
    index: int | None = None
    function: CalledFunction


class Message(BaseModel):
    """A message; keys of its own reach the template."""

    model_config = ConfigDict(frozen=True, extra="allow", strict=True)

    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: str | list[dict[str, JsonValue]] | None = None
    tool_calls: list[CalledTool] | None = None


class Function(Part):
    name: _FunctionName
    description: str | None = None
    parameters: dict[str, JsonValue] | None = None
    strict: bool | None = None


class Tool(Part):
    type: Literal["function"]
    function: Function


class FunctionName(Part):
    name: _FunctionName


class NamedTool(Part):
    type: Literal["function"]
    function: FunctionName


class PredictedText(Part):
    type: Literal["text"]
    text: str


class Prediction(Part):
    type: Literal["content"]
    content: str | list[PredictedText]

    @property
    def text(self) -> str:
        """All of it as one text."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


class ChatRequest(Parameters):
    messages: Annotated[
        list[Message], Field(min_length=1, max_length=_MOST_MESSAGES, fail_fast=True)
    ]
    """The conversation, which the checkpoint's chat template renders."""
    max_completion_tokens: Annotated[Count, Field(ge=1)] | None = None
    """`max_tokens` by its newer name."""
    logprobs: bool | None = None
    """Whether each token has its log probability."""
    top_logprobs: Top | None = None
    """How many of the likeliest tokens come with it."""
    tools: Annotated[list[Tool], Field(max_length=_MOST_TOOLS)] | None = None
    """Functions that the answer may call."""
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    """Whether it calls one: never, as it likes, always, or the one of that name."""
    parallel_tool_calls: bool | None = None
    """Whether an answer that must call may call several."""
    prediction: Prediction | None = None
    """A text that the answer may be much like; draft tokens are copied from it."""
    reasoning_effort: Annotated[str, Field(max_length=64)] | None = None
    """Reaches the template as `reasoning_effort`; `none` also as `enable_thinking` false."""
    include_reasoning: bool | None = None
    """False: thoughts are left out of the message."""
    chat_template_kwargs: dict[str, JsonValue] | None = None
    """More variables of the chat template, as `enable_thinking`."""
    add_generation_prompt: bool | None = None
    """Whether the conversation is followed by the beginning of an answer."""
    continue_final_message: bool | None = None
    """Whether the answer goes on where the last message ends."""

    verbosity: Text = None
    mm_processor_kwargs: WithoutEffect[dict[str, JsonValue]] = None

    audio: Annotated[JsonValue, Refused()] = None
    modalities: Annotated[
        JsonValue,
        Refused(
            neutral=(
                [],
                ["text"],
            ),
            advice="text is all that comes out",
        ),
    ] = None
    functions: Annotated[JsonValue, Refused(neutral=([],), advice="send `tools`")] = None
    function_call: Annotated[
        JsonValue,
        Refused(
            neutral=(
                "none",
                "auto",
            ),
            advice="send `tool_choice`",
        ),
    ] = None
    moderation: Annotated[JsonValue, Refused()] = None
    web_search_options: Annotated[JsonValue, Refused()] = None
    echo: Annotated[JsonValue, Refused(neutral=(False,))] = None
    prompt_logprobs: Annotated[JsonValue, Refused(advice="ask /v1/completions")] = None
    add_special_tokens: Annotated[
        JsonValue, Refused(neutral=(False,), advice="the template writes them")
    ] = None
    chat_template: Annotated[JsonValue, Refused(advice="the checkpoint's is used")] = None
    documents: Annotated[JsonValue, Refused(neutral=([],))] = None

    @model_validator(mode="after")
    def _is_one_thing(self) -> ChatRequest:
        given = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(given) > 1:
            raise ValueError("max_tokens and max_completion_tokens differ: send one of them")
        if self.max_tokens == 0:
            raise ValueError("max_tokens must be 1 or more in a chat")
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs to be true")
        is_named = isinstance(self.tool_choice, NamedTool)
        if (is_named or self.tool_choice == "required") and not self.tools:
            raise ValueError("tool_choice asks for a call, and there are no tools")
        if isinstance(self.tool_choice, NamedTool):
            name = self.tool_choice.function.name
            if all(tool.function.name != name for tool in self.tools or ()):
                raise ValueError("tool_choice names none of the tools")
        return self

    @property
    def calls_tools(self) -> bool:
        """Whether calls are looked for in the answer."""
        return bool(self.tools) and self.tool_choice != "none"

    @property
    def tool_list(self) -> list[dict[str, Any]]:
        """The tools as templates and parsers take them."""
        return [tool.model_dump(exclude_none=True) for tool in self.tools or ()]
