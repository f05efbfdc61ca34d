"""The fields that completions and chats have in common, each with what comes of it.

A field that is `null`, or has the value that asks for nothing, always passes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    JsonValue,
    model_validator,
)
from pydantic_core import core_schema

from specpipe.speculative.request import MAX_SALT

T = TypeVar("T")

Effect = Literal["honoured", "accepted without effect", "refused"]

MOST_CHOICES = 128  # OpenAI's bound of `n`
_MOST_COUNT = 2**31 - 1  # the greatest INT32, in which the ensemble takes counts and ids
_MOST_WORDS, _MOST_ENTRIES = 256, 1024
_MOST_FIELDS = 256
_MOST_TOP = 20  # OpenAI's bound of `top_logprobs`

Count = Annotated[int, Field(ge=0, le=_MOST_COUNT)]
TokenId = Annotated[int, Field(ge=0, le=_MOST_COUNT)]
Top = Annotated[int, Field(ge=0, le=_MOST_TOP)]
Word = Annotated[str, Field(min_length=1)]


def _check_id(text: str) -> str:
    if int(text) > _MOST_COUNT:
        raise ValueError("a key must be a token id")
    return text


@dataclass(frozen=True)
class Marked:
    """Says of a field that it is not honoured."""

    effect: Effect


WithoutEffect = Annotated[T | None, Marked("accepted without effect")]
Text = WithoutEffect[str]


@dataclass(frozen=True)
class Refused(Marked):
    """Says of a field that it is refused, but for null and what is `neutral`."""

    effect: Effect = "refused"
    neutral: tuple[Any, ...] = ()
    advice: str = "leave it out"

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def _check(self, value: Any) -> Any:
        # True is 1 to Python.
        if value is not None and (type(value), value) not in [(type(n), n) for n in self.neutral]:
            raise ValueError(f"not supported: {self.advice}")
        return value


class Part(BaseModel):
    """An object of a request: fields that it does not know are refused, values not converted."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True
    )

    @model_validator(mode="before")
    @classmethod
    def _has_few_fields(cls, value: Any) -> Any:
        # Each one that is unknown becomes an error of its own.
        if isinstance(value, dict) and len(value) > _MOST_FIELDS:
            raise ValueError(f"{len(value)} fields are more than there are")
        return value


class StreamOptions(Part):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: WithoutEffect[bool] = None


class JsonSchema(Part):
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    schema_: Annotated[dict[str, JsonValue] | None, Field(alias="schema")] = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Part):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _has_its_schema(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema is needed with the type 'json_schema', and not without")
        return self


class StructuredOutputs(Part):
    json_: Annotated[dict[str, JsonValue] | str | None, Field(alias="json")] = None
    regex: str | None = None
    choice: Annotated[list[Word], Field(min_length=1, max_length=_MOST_ENTRIES)] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_fallback: WithoutEffect[bool] = None
    disable_any_whitespace: Annotated[JsonValue, Refused(neutral=(False,))] = None
    disable_additional_properties: Annotated[JsonValue, Refused(neutral=(False,))] = None
    whitespace_pattern: Annotated[JsonValue, Refused()] = None
    structural_tag: Annotated[JsonValue, Refused()] = None


class Named(Part):
    """The body of a request to a model."""

    model: str | None = None
    """The name of the model; left out: the one that is served."""


class Parameters(Named):
    """What both kinds of completion take."""

    stream: bool | None = None
    """Whether the answer comes in parts, as server-sent events."""
    stream_options: StreamOptions | None = None
    """`include_usage`: a last event with the usage; `continuous_usage_stats`: it in every event."""
    max_tokens: Count | None = None
    """The most tokens of the answer; left out: as many as fit."""
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] | None = None
    """Answers, of the seeds `seed`, `seed` + 1 and so on; without a seed of random ones."""
    best_of: Annotated[int, Field(ge=1, le=MOST_CHOICES)] | None = None
    """Refused unless it is `n`."""
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    """Makes a sampled answer repeat."""
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    """Divides the logits before sampling; 0: greedy; left out: 1."""
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    """Sample from the likeliest tokens that hold this probability; 0: greedy; left out: 1."""
    top_k: Annotated[int, Field(ge=-1, le=_MOST_COUNT)] | None = None
    """Sample from that many likeliest tokens; 0 or -1: from all."""
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    """Leave out tokens less likely than this part of the likeliest one's probability."""
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    """Is subtracted from the logits of tokens that the answer has."""
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    """The same for each time that the answer has the token."""
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    """Above 1, tokens of prompt and answer become less likely."""
    logit_bias: (
        Annotated[
            dict[
                Annotated[str, Field(pattern=r"^[0-9]{1,10}$"), AfterValidator(_check_id)],
                Annotated[float, Field(ge=-100, le=100)],
            ],
            Field(max_length=_MOST_ENTRIES),
        ]
        | None
    ) = None
    """By token id, what is added to the token's logit."""
    stop: Annotated[list[Word], Field(max_length=_MOST_WORDS)] | Word | None = None
    """Texts that end the answer, and are not part of it."""
    stop_token_ids: Annotated[list[TokenId], Field(max_length=_MOST_ENTRIES)] | None = None
    """Tokens that end the answer besides, and are not part of it."""
    ignore_eos: bool | None = None
    """True: the checkpoint's end tokens end no answer."""
    min_tokens: Count | None = None
    """Tokens before which nothing ends the answer."""
    bad_words: Annotated[list[Word], Field(max_length=_MOST_WORDS)] | None = None
    """Texts whose tokens, also those after a space, are never chosen in a row."""
    skip_special_tokens: bool | None = None
    """False: special tokens are part of the text; in a chat, calls and thoughts are, too."""
    response_format: ResponseFormat | None = None
    """`text`, `json_object`, or `json_schema` with a schema."""
    structured_outputs: StructuredOutputs | None = None
    """One of `json`, `regex`, `choice`, `grammar`, `json_object`."""
    guided_json: dict[str, JsonValue] | str | None = None
    """The JSON schema of the answer."""
    guided_regex: str | None = None
    """The regular expression of the answer."""
    guided_choice: Annotated[list[Word], Field(min_length=1, max_length=_MOST_ENTRIES)] | None = (
        None
    )
    """The texts of which the answer is one."""
    guided_grammar: str | None = None
    """The grammar of the answer: GBNF, where it has `::=`, else llguidance's Lark."""
    return_token_ids: bool | None = None
    """Whether each choice has `token_ids`."""
    return_tokens_as_token_ids: bool | None = None
    """Whether tokens are written as `token_id:7` in log probabilities."""
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    """Of requests that wait, a lower number goes first."""
    num_draft_tokens: Count | None = None
    """Draft tokens in every step; 0: no speculation; left out: as many as pay."""
    timeout_s: Annotated[float, Field(gt=0, le=86400)] | None = None
    """Seconds after which the request ends."""
    cache_salt: Annotated[str, Field(max_length=MAX_SALT)] | None = None
    """What is cached of prompts is shared with requests of the same salt alone."""
    prompt_cache_key: str | None = None
    """Requests of one key go to one server, where there are several."""
    user: str | None = None
    """The same, where there is neither a `prompt_cache_key` nor a header `X-Session-Id`."""

    safety_identifier: Text = None
    metadata: WithoutEffect[dict[str, JsonValue]] = None
    store: WithoutEffect[bool] = None
    service_tier: Text = None
    request_id: Text = None
    prompt_cache_options: WithoutEffect[dict[str, JsonValue]] = None
    prompt_cache_retention: Text = None
    spaces_between_special_tokens: WithoutEffect[bool] = None
    guided_decoding_backend: Text = None

    include_stop_str_in_output: Annotated[JsonValue, Refused(neutral=(False,))] = None
    use_beam_search: Annotated[JsonValue, Refused(neutral=(False,))] = None
    length_penalty: Annotated[
        JsonValue,
        Refused(
            neutral=(
                1,
                1.0,
            )
        ),
    ] = None
    allowed_token_ids: Annotated[JsonValue, Refused(neutral=([],))] = None
    truncate_prompt_tokens: Annotated[JsonValue, Refused()] = None
    guided_whitespace_pattern: Annotated[JsonValue, Refused()] = None
    logits_processors: Annotated[JsonValue, Refused(neutral=([],))] = None
    kv_transfer_params: Annotated[JsonValue, Refused()] = None
    vllm_xargs: Annotated[JsonValue, Refused()] = None
    thinking_token_budget: Annotated[JsonValue, Refused()] = None
    repetition_detection: Annotated[JsonValue, Refused()] = None

    @model_validator(mode="after")
    def _agrees(self) -> Parameters:
        if self.best_of not in (None, self.n or 1):
            raise ValueError(
                "best_of must be n, or left out: no answer is left out of the response"
            )
        return self

    @property
    def num_choices(self) -> int:
        """Answers to each prompt."""
        return self.n or 1

    @property
    def stops(self) -> list[str]:
        """The texts that end the answer."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []


def effect_of(field: Any) -> Effect:
    """Returns what comes of a field, of a model's `model_fields`."""
    marks = [mark for mark in field.metadata if isinstance(mark, Marked)]
    return marks[0].effect if marks else "honoured"
