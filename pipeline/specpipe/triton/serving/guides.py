"""What the text of an answer must be, by the inputs of a request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, get_args

from specpipe.errors import RequestError, show
from specpipe.speculative.guide import Guide, GuideType
from specpipe.triton.serving.conversation import Conversation
from specpipe.triton.serving.inputs import Inputs
from specpipe.triton.serving.request_tokenizer import GuideCheck

_TYPES = get_args(GuideType)


class CallFormat(Protocol):
    """How a model writes calls of tools; `specpipe.text.tools.message_format.MessageFormat`."""

    def is_reasoning_after(self, prompt: str) -> bool: ...

    def after_thoughts(self, guide: Guide, prompt: str) -> Guide: ...

    def grammar(
        self,
        tools: Sequence[Mapping[str, Any]],
        *,
        is_parallel: bool,
        is_reasoning: bool = False,
    ) -> str: ...


def guide_of_turn(
    guide: Guide | None,
    conversation: Conversation,
    prompt: str,
    calls: CallFormat,
    guides: GuideCheck,
) -> Guide | None:
    """Returns the guide of the assistant's turn after a prompt, of which the end is enough.

    It is the one that was sent, after thoughts that the prompt opens, or that of calls that must be
    made. Raises RequestError where both are asked for, or where how calls are written is not known.
    """
    if not conversation.called_tools:
        return None if guide is None else calls.after_thoughts(guide, prompt)
    if guide is not None:
        raise RequestError(
            "guided_decoding_guide_type and tool_choice both say what the answer must be: leave "
            "one out"
        )
    grammar = calls.grammar(
        conversation.called_tools,
        is_parallel=conversation.calls_are_parallel,
        is_reasoning=calls.is_reasoning_after(prompt),
    )
    guide = Guide(type="lark", text=grammar)
    guides.check(guide, "tools")
    return guide


def read_guide(inputs: Inputs, guides: GuideCheck) -> Guide | None:
    """Returns the guide that was sent, None where there is none.

    Raises RequestError for one that cannot be followed.
    """
    kind, text = (inputs.one(f"guided_decoding_guide{suffix}", "") for suffix in ("_type", ""))
    if not kind:
        if text:
            raise RequestError(
                f"guided_decoding_guide was sent without its type: {', '.join(_TYPES)}"
            )
        return None
    if kind not in _TYPES:
        raise RequestError(
            f"guided_decoding_guide_type is '{show(kind)}'; it must be one of {', '.join(_TYPES)}"
        )
    if kind == "json" and text:
        raise RequestError(
            "guided_decoding_guide_type 'json' is any JSON and takes no guided_decoding_guide; "
            "'json_schema' does"
        )
    if kind != "json" and not text:
        raise RequestError(f"guided_decoding_guide_type '{kind}' needs a guided_decoding_guide")
    guide = Guide(type=kind, text=text)
    guides.check(guide)
    return guide
