"""How much an input of the ensemble may hold, checked before its values are read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from specpipe.config.limits import ServedLimits
from specpipe.errors import RequestError
from specpipe.speculative.request import check_prompt_length

if TYPE_CHECKING:
    from specpipe.triton.serving.tensors import TensorSpec

_MOST_BYTES = {
    "messages": "max_messages_bytes",
    "tools": "max_tools_bytes",
    "tool_choice": "max_tools_bytes",
    "chat_template_kwargs": "max_template_kwargs_bytes",
    "guided_decoding_guide": "max_guide_bytes",
}
_MOST_ENTRIES = {"logit_bias_ids": "max_logit_biases", "logit_bias_values": "max_logit_biases"}


def check_sizes(tensor: TensorSpec, array: np.ndarray[Any, Any], limits: ServedLimits) -> None:
    """Raises RequestError, with both numbers, for too many values or too many bytes of them.

    An input of many values is a list of words or numbers.
    """
    if tensor.dims == (1,):
        if array.size != 1:
            raise RequestError(f"{tensor.name} has {array.size} values: it takes one")
        if tensor.dtype == "STRING":
            limit = _MOST_BYTES.get(tensor.name, "max_prompt_bytes")
            check_bytes(f"{tensor.name} has", _num_bytes(array.item()), limit, limits)
        return
    if tensor.name == "input_ids":
        check_prompt_length(array.size, limits.max_seq_len)
        return
    limit = _MOST_ENTRIES.get(tensor.name, "max_words")
    most: int = getattr(limits, limit)
    if array.size > most:
        raise RequestError(
            f"{tensor.name} has {array.size} entries; it may have {most} (serving.limits.{limit})"
        )
    if tensor.dtype != "STRING":
        return
    sizes = [_num_bytes(value) for value in array.reshape(-1)]
    check_bytes(f"an entry of {tensor.name} has", max(sizes, default=0), "max_word_bytes", limits)
    check_bytes(f"{tensor.name} has", sum(sizes), "max_words_bytes", limits)


def check_bytes(subject: str, num_bytes: int, limit: str, limits: ServedLimits) -> None:
    """Refuses more bytes than the setting of that name allows; `subject` begins the sentence."""
    most: int = getattr(limits, limit)
    if num_bytes > most:
        raise RequestError(
            f"{subject} {num_bytes} bytes; at most {most} are taken (serving.limits.{limit})"
        )


def _num_bytes(value: bytes | str) -> int:
    return len(value if isinstance(value, bytes) else value.encode())
