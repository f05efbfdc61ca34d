"""Every tensor that enters or leaves a model, by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class TensorSpec:
    """One input or output of a Triton model; -1 in `dims` is any size."""

    name: str
    dtype: str
    dims: tuple[int, ...] = (1,)
    meaning: str = ""
    """One sentence for the reference."""

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        return np.dtype(_NUMPY_DTYPES[self.dtype])


@dataclass(frozen=True)
class Input(TensorSpec):
    """An input of the ensemble.

    `neutral` marks one that nothing here implements, and holds the values that ask for nothing:
    every element must be one of them, so an empty tensor passes.
    """

    neutral: tuple[Any, ...] | None = None


_NUMPY_DTYPES: dict[str, type[Any]] = {
    "STRING": np.object_,
    "BOOL": np.bool_,
    "INT32": np.int32,
    "INT64": np.int64,
    "UINT64": np.uint64,
    "FP16": np.float16,
    "FP32": np.float32,
}

ENSEMBLE_INPUTS: tuple[Input, ...] = (
    Input(
        "text_input",
        "STRING",
        meaning="The prompt; this, `input_ids` or `messages` is required.",
    ),
    Input("input_ids", "INT32", (-1,), meaning="The prompt as token ids, to which none is added."),
    Input(
        "messages",
        "STRING",
        meaning="A conversation as JSON, which the checkpoint's chat template renders.",
    ),
    Input(
        "tools",
        "STRING",
        meaning="Functions that the answer to `messages` may call: a JSON array in OpenAI's form.",
    ),
    Input(
        "tool_choice",
        "STRING",
        meaning="`none`: the template gets no tools; `auto`; `required`, or a function as OpenAI's "
        "JSON names one: the answer is a call.",
    ),
    Input(
        "parallel_tool_calls",
        "BOOL",
        meaning="Whether an answer that must be a call may be several; true unless given.",
    ),
    Input(
        "chat_template_kwargs",
        "STRING",
        meaning="More variables of the chat template, as a JSON object.",
    ),
    Input(
        "add_generation_prompt",
        "BOOL",
        meaning="Whether `messages` are followed by the beginning of an answer; true unless the "
        "last one is continued.",
    ),
    Input(
        "continue_final_message",
        "BOOL",
        meaning="Whether the answer goes on where the last of `messages` ends.",
    ),
    Input(
        "max_tokens",
        "INT32",
        meaning="The most tokens of the answer; required; 0 with `return_prompt_log_probs` alone.",
    ),
    Input(
        "num_draft_tokens",
        "INT32",
        meaning="Draft tokens in every step; 0: no speculation; left out: as many as pay.",
    ),
    Input("stream", "BOOL", meaning="Whether the answer comes in parts."),
    Input("temperature", "FP32", meaning="Divides the logits before sampling; 0: greedy."),
    Input(
        "top_k", "INT32", meaning="Sample from that many likeliest tokens; 0: from all, 1: greedy."
    ),
    Input(
        "top_p",
        "FP32",
        meaning="Sample from the likeliest tokens that hold this probability; 0 or 1: from all.",
    ),
    Input(
        "min_p",
        "FP32",
        meaning="Leave out tokens less likely than this part of the likeliest one's probability.",
    ),
    Input(
        "seed",
        "UINT64",
        meaning="Makes a sampled answer repeat; left out: a random one, see `seed_used`.",
    ),
    Input(
        "repetition_penalty",
        "FP32",
        meaning="Above 1, tokens of prompt and answer become less likely.",
    ),
    Input(
        "presence_penalty",
        "FP32",
        meaning="Is subtracted from the logits of tokens that the answer has.",
    ),
    Input(
        "frequency_penalty", "FP32", meaning="The same for each time that the answer has the token."
    ),
    Input("logit_bias_ids", "INT32", (-1,), meaning="Tokens that `logit_bias_values` are for."),
    Input(
        "logit_bias_values",
        "FP32",
        (-1,),
        meaning="What is added to the logit of each token, after penalties and before temperature.",
    ),
    Input(
        "embedding_bias_words",
        "STRING",
        (-1,),
        meaning="Texts that `embedding_bias_weights` are for.",
    ),
    Input(
        "embedding_bias_weights",
        "FP32",
        (-1,),
        meaning="The same for every token of a text; of several for one token the sum counts.",
    ),
    Input("min_tokens", "INT32", meaning="Tokens before which no end id is chosen."),
    Input(
        "bad_words",
        "STRING",
        (-1,),
        meaning="Texts whose tokens, also those after a space, are never chosen in a row.",
    ),
    Input(
        "stop_words", "STRING", (-1,), meaning="Texts that end the answer, and are not part of it."
    ),
    Input(
        "end_id",
        "INT32",
        meaning="A token that ends the answer, instead of the checkpoint's; -1: none does.",
    ),
    Input(
        "stop_token_ids",
        "INT32",
        (-1,),
        meaning="Tokens that end the answer besides, and are not part of it.",
    ),
    Input("ignore_eos", "BOOL", meaning="True: the checkpoint's end ids end no answer."),
    Input(
        "guided_decoding_guide_type",
        "STRING",
        meaning="What the answer must be: `json` (any JSON), `json_schema`, `regex`, "
        "`ebnf_grammar`, `choice`, `lark`.",
    ),
    Input(
        "guided_decoding_guide",
        "STRING",
        meaning="The schema, the expression, the grammar, or the choices as a JSON array of texts.",
    ),
    Input(
        "prediction",
        "STRING",
        meaning="A text that the answer may be much like; draft tokens are copied from it.",
    ),
    Input("pad_id", "INT32", meaning="Accepted, and without effect: an answer has no padding."),
    Input("priority", "INT32", meaning="Of requests that wait, a lower number goes first."),
    Input(
        "timeout_s",
        "FP32",
        meaning="Seconds after which the answer ends; shortens `serving.request_timeout_s`.",
    ),
    Input(
        "cache_salt",
        "STRING",
        meaning="What is cached of prompts is shared with requests of the same salt alone.",
    ),
    Input(
        "exclude_input_in_output", "BOOL", meaning="False: the text begins with the decoded prompt."
    ),
    Input(
        "return_log_probs",
        "BOOL",
        meaning="Whether `cum_log_probs` and `output_log_probs` are filled.",
    ),
    Input(
        "num_top_log_probs",
        "INT32",
        meaning="How many of the likeliest tokens come with each log probability, which are then "
        "sent, too.",
    ),
    Input(
        "return_prompt_log_probs",
        "BOOL",
        meaning="Whether `prompt_log_probs` is filled, and with `num_top_log_probs` its likeliest.",
    ),
    Input("return_token_ids", "BOOL", meaning="Whether `output_ids` is filled."),
    Input(
        "skip_special_tokens",
        "BOOL",
        meaning="False: special tokens are part of the text.",
    ),
    Input(
        "return_perf_metrics",
        "BOOL",
        meaning="Accepted, and without effect: counts are always sent.",
    ),
    Input(
        "return_num_input_tokens",
        "BOOL",
        meaning="Accepted, and without effect: the count is always sent.",
    ),
    Input(
        "return_num_output_tokens",
        "BOOL",
        meaning="Accepted, and without effect: the count is always sent.",
    ),
    Input("return_context_logits", "BOOL", neutral=(False,)),
    Input("return_generation_logits", "BOOL", neutral=(False,)),
    Input("num_return_sequences", "INT32", neutral=(1,)),
    Input("beam_width", "INT32", neutral=(1,)),
    Input("length_penalty", "FP32", neutral=(0.0, 1.0)),
    Input("decoder_text_input", "STRING", neutral=("",)),
    Input("prompt_embedding_table", "FP16", (-1, -1), neutral=()),
    Input("prompt_vocab_size", "INT32", neutral=(0,)),
    Input("prompt_table_extra_id", "UINT64", neutral=(0,)),
    Input("lora_task_id", "UINT64", neutral=(0,)),
    Input("lora_weights", "FP16", (-1, -1), neutral=()),
    Input("lora_config", "INT32", (-1, 3), neutral=()),
)

_NEVER_SENT = "Never sent; NVIDIA's ensemble has it."

TEXT_OUTPUT = TensorSpec("text_output", "STRING", (-1,), meaning="The text of this response.")

STATISTICS_OUTPUTS: tuple[TensorSpec, ...] = (
    TensorSpec(
        "finish_reason",
        "STRING",
        meaning="In the last response: `stop`, `length`, `cancelled` or `error`.",
    ),
    TensorSpec("error", "STRING", meaning="What failed, where `finish_reason` is `error`."),
    TensorSpec(
        "acceptance_rate",
        "FP32",
        meaning="Accepted draft tokens by verified ones; 0.0 where nothing was drafted.",
    ),
    TensorSpec("draft_status", "STRING", meaning="Why drafting was on or off at the end."),
    TensorSpec(
        "total_accepted_draft_tokens", "INT32", meaning="Draft tokens that the target accepted."
    ),
    TensorSpec("total_draft_tokens", "INT32", meaning="Draft tokens that the target verified."),
    TensorSpec(
        "accepted_prediction_tokens",
        "INT32",
        meaning="Accepted draft tokens that were copied from `prediction`.",
    ),
    TensorSpec(
        "rejected_prediction_tokens",
        "INT32",
        meaning="Draft tokens from `prediction` that the target did not accept.",
    ),
    TensorSpec(
        "acceptance_histogram",
        "INT32",
        (-1,),
        meaning="Steps with a draft token by how many were accepted: 0, 1, and so on.",
    ),
    TensorSpec("num_steps", "INT32", meaning="Draft-verify steps of the answer."),
    TensorSpec("num_input_tokens", "INT32", meaning="Tokens of the prompt."),
    TensorSpec("num_output_tokens", "INT32", meaning="Tokens of the answer."),
    TensorSpec(
        "num_cached_input_tokens",
        "INT32",
        meaning="Tokens of the prompt that were found cached, and not computed.",
    ),
    TensorSpec(
        "num_preemptions",
        "INT32",
        meaning="Times that the request gave way to others for want of memory.",
    ),
    TensorSpec("seed_used", "UINT64", meaning="The seed that the answer was drawn with."),
    TensorSpec(
        "is_lossless",
        "BOOL",
        meaning="False only where TensorRT-LLM's backend `pytorch` samples with a draft.",
    ),
)
"""In the last data response alone; `error` after a failure."""

UNFILLED_OUTPUTS: tuple[TensorSpec, ...] = (
    TensorSpec("context_logits", "FP32", (-1, -1), meaning=_NEVER_SENT),
    TensorSpec("generation_logits", "FP32", (-1, -1, -1), meaning=_NEVER_SENT),
    TensorSpec("kv_cache_alloc_new_blocks", "INT32", meaning=_NEVER_SENT),
    TensorSpec("kv_cache_reused_blocks", "INT32", meaning=_NEVER_SENT),
    TensorSpec("kv_cache_alloc_total_blocks", "INT32", meaning=_NEVER_SENT),
    TensorSpec("arrival_time_ns", "INT64", meaning=_NEVER_SENT),
    TensorSpec("first_scheduled_time_ns", "INT64", meaning=_NEVER_SENT),
    TensorSpec("first_token_time_ns", "INT64", meaning=_NEVER_SENT),
    TensorSpec("last_token_time_ns", "INT64", meaning=_NEVER_SENT),
)
"""Outputs of NVIDIA's ensemble that are never sent: a client may name them in its request."""

OUTPUT_IDS = TensorSpec(
    "output_ids", "INT32", (-1,), meaning="The token ids of this response, where asked for."
)

GENERATION_OUTPUTS: tuple[TensorSpec, ...] = (
    OUTPUT_IDS,
    TensorSpec("cum_log_probs", "FP32", (-1,), meaning="The sum of `output_log_probs`."),
    TensorSpec("output_log_probs", "FP32", (-1, -1), meaning="The log probability of each token."),
    TensorSpec(
        "output_top_log_prob_ids",
        "INT32",
        (-1, -1),
        meaning="For each token the likeliest ones, likeliest first.",
    ),
    TensorSpec(
        "output_top_log_probs", "FP32", (-1, -1), meaning="The log probability of each of them."
    ),
    TensorSpec(
        "prompt_log_probs",
        "FP32",
        (-1,),
        meaning="In the first response: of each token of the prompt but the first.",
    ),
    TensorSpec(
        "prompt_top_log_prob_ids", "INT32", (-1, -1), meaning="Likewise, the likeliest tokens."
    ),
    TensorSpec(
        "prompt_top_log_probs", "FP32", (-1, -1), meaning="The log probability of each of them."
    ),
    TensorSpec("batch_index", "INT32", meaning="Always 0: a response belongs to one request."),
    TensorSpec("sequence_index", "INT32", meaning="Always 0: a request has one answer."),
    *STATISTICS_OUTPUTS,
    *UNFILLED_OUTPUTS,
)

ENSEMBLE_OUTPUTS: tuple[TensorSpec, ...] = (TEXT_OUTPUT, *GENERATION_OUTPUTS)

# Between the models of the ensemble.
REQUEST = TensorSpec("request", "STRING")  # a Generation as JSON
PROMPT_TOKEN_IDS = TensorSpec("prompt_token_ids", "INT32", (-1,))
TEXT = TensorSpec("text", "STRING")  # one chunk's text
STREAM_ID = TensorSpec("stream_id", "STRING")  # names the request that a chunk belongs to
CANCEL = TensorSpec("cancel", "STRING")  # the stream id to cancel, in a request that has no other
SIGNATURE = TensorSpec("signature", "STRING")  # says that a model of the ensemble made the rest

PREPROCESSING_INPUTS: tuple[TensorSpec, ...] = ENSEMBLE_INPUTS
PREPROCESSING_OUTPUTS: tuple[TensorSpec, ...] = (REQUEST, PROMPT_TOKEN_IDS, SIGNATURE)
SPECULATIVE_INPUTS: tuple[TensorSpec, ...] = (REQUEST, PROMPT_TOKEN_IDS, CANCEL, SIGNATURE)
SPECULATIVE_OUTPUTS: tuple[TensorSpec, ...] = (TEXT, STREAM_ID, *GENERATION_OUTPUTS)
POSTPROCESSING_INPUTS: tuple[TensorSpec, ...] = (TEXT, STREAM_ID)
POSTPROCESSING_OUTPUTS: tuple[TensorSpec, ...] = (TEXT_OUTPUT,)

INPUTS_BY_NAME = {tensor.name: tensor for tensor in ENSEMBLE_INPUTS}

TENSORS_BY_NAME = {
    tensor.name: tensor
    for tensor in (*PREPROCESSING_OUTPUTS, *SPECULATIVE_OUTPUTS, *ENSEMBLE_OUTPUTS, CANCEL)
}
