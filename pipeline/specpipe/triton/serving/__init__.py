"""The face that clients see: every tensor by name, and tensors turned into requests and back.

Names, types and shapes are those of the `ensemble` of NVIDIA's TensorRT-LLM templates from 0.20 on,
so clients and load tools written for it work unchanged. Added: `messages` and what belongs to them,
`input_ids`, `num_draft_tokens`, `min_p`, `priority`, `timeout_s`, and what OpenAI's API needs. An
input without effect here passes with its neutral value and is refused by name otherwise. Dims leave
out the batch dimension, which is always 1.

`stop_words` and `bad_words` are arrays (a JSON array in HTTP `generate`) or one string; each is a
word as it stands, commas and spaces included. An empty one is ignored, since NVIDIA's examples
send `"stop_words": ""`.

The models in a repository import this package, so that its names stay where they are.
"""

from specpipe.triton.serving.answers import (
    Answer,
    parse_statistics,
    read_cancel,
    read_chunk,
    write_cancel,
)
from specpipe.triton.serving.inputs import check_known, input_tensor
from specpipe.triton.serving.requests import Generation, parse_request
from specpipe.triton.serving.tensor_values import Tensors, as_array, check_values
from specpipe.triton.serving.tensors import (
    CANCEL,
    ENSEMBLE_INPUTS,
    ENSEMBLE_OUTPUTS,
    GENERATION_OUTPUTS,
    OUTPUT_IDS,
    POSTPROCESSING_INPUTS,
    POSTPROCESSING_OUTPUTS,
    PREPROCESSING_INPUTS,
    PREPROCESSING_OUTPUTS,
    PROMPT_TOKEN_IDS,
    REQUEST,
    SIGNATURE,
    SPECULATIVE_INPUTS,
    SPECULATIVE_OUTPUTS,
    STREAM_ID,
    TEXT,
    TEXT_OUTPUT,
)

__all__ = [
    "Answer",
    "CANCEL",
    "ENSEMBLE_INPUTS",
    "ENSEMBLE_OUTPUTS",
    "GENERATION_OUTPUTS",
    "Generation",
    "OUTPUT_IDS",
    "POSTPROCESSING_INPUTS",
    "POSTPROCESSING_OUTPUTS",
    "PREPROCESSING_INPUTS",
    "PREPROCESSING_OUTPUTS",
    "PROMPT_TOKEN_IDS",
    "REQUEST",
    "SIGNATURE",
    "SPECULATIVE_INPUTS",
    "SPECULATIVE_OUTPUTS",
    "STREAM_ID",
    "TEXT",
    "TEXT_OUTPUT",
    "Tensors",
    "as_array",
    "check_values",
    "input_tensor",
    "parse_request",
    "parse_statistics",
    "read_cancel",
    "read_chunk",
    "check_known",
    "write_cancel",
]
