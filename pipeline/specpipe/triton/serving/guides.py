"""What the text of an answer must be, by the inputs of a request."""

from __future__ import annotations

from typing import get_args

from specpipe.errors import RequestError, show
from specpipe.speculative.guide import Guide, GuideType
from specpipe.text.tools.contract import ToolDialect
from specpipe.triton.serving.conversation import Conversation
from specpipe.triton.serving.inputs import Inputs

_TYPES = get_args(GuideType)


def read_guide(
    inputs: Inputs, conversation: Conversation | None, dialect: ToolDialect | None
) -> Guide | None:
    """Returns the guide of an answer: the one that was sent, or that of calls that it must make.

    Whether it can be followed is not looked at. dialect is how the model writes calls; None: that
    is unknown.
    """
    guide = _sent(inputs)
    if conversation is None or not conversation.called_tools:
        return guide
    if guide is not None:
        raise RequestError(
            "guided_decoding_guide_type and tool_choice both say what the answer must be: leave "
            "one out"
        )
    if dialect is None:
        raise RequestError(
            "tool_choice asks for a call, but how this model writes one is not known: send auto or "
            "none"
        )
    grammar = dialect.grammar(
        conversation.called_tools, is_parallel=conversation.calls_are_parallel
    )
    return Guide(type="lark", text=grammar)


def _sent(inputs: Inputs) -> Guide | None:
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
    return Guide(type=kind, text=text)
