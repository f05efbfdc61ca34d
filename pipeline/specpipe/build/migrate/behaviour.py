"""What is different behind TensorRT-LLM's backend pytorch, by its release, and behind specpipe.

Where the draft runs inside the target's engine (TensorRT-LLM, pull request 11758), what that
changes is in docs/source/features/speculative-decoding.md and, of the engine path's end, in
docs/source/legacy/tensorrt-backend-removal.md@c83651ab.
"""

from __future__ import annotations

from dataclasses import dataclass

from specpipe.runtimes.tensorrt_llm.llmapi.model_yaml import SPELLINGS, release_line


@dataclass(frozen=True)
class _Sentence:
    text: str
    holds_before: bool = True
    holds_since: bool = True


def _before(text: str) -> _Sentence:
    return _Sentence(text, holds_since=False)


def _since(text: str) -> _Sentence:
    return _Sentence(text, holds_before=False)


def is_one_engine(version: str) -> bool:
    """Whether a release's backend pytorch runs the draft inside the target's engine.

    False for a line that specpipe does not know.
    """
    row = SPELLINGS.get(release_line(version))
    return row is not None and row.is_one_engine


_SENTENCES = (
    _Sentence(
        "No engine is built: the checkpoints go into the repository, quantized where the config "
        "says so, and TensorRT-LLM loads them when Triton starts, which takes longer than loading "
        "engines."
    ),
    _Sentence("Draft and target run on the same GPUs and are split alike."),
    _since(
        "The target is of the families Llama or Qwen3: TensorRT-LLM drafts for no other. The "
        "draft's KV cache has the number format of the target's."
    ),
    _before(
        "Every request drafts speculation.num_draft_tokens in each step: K neither adapts nor "
        "drops to 0 under load, and num_draft_tokens in a request is refused unless it is that "
        "number."
    ),
    _since(
        "Every request drafts speculation.num_draft_tokens in each step, or what "
        "speculation.schedule says for the load: K does not adapt, and num_draft_tokens in a "
        "request is refused unless it is that number."
    ),
    _before(
        "Greedy output stays that of the target alone. Sampled output with a draft is not lossless "
        "in TensorRT-LLM, so requests with a temperature are refused unless "
        "engine.tensorrt_llm.acceptance is logits."
    ),
    _since(
        "Output stays that of the target alone, sampled output in its distribution, unless "
        "engine.tensorrt_llm.acceptance is logits."
    ),
    _before(
        "seed with a temperature, min_p, min_tokens, bad_words and repetition, presence and "
        "frequency penalties are refused by name; TensorRT-LLM would ignore them."
    ),
    _since(
        "seed with a temperature, min_p, min_tokens and bad_words are refused by name, and "
        "repetition, presence and frequency penalties unless engine.tensorrt_llm.enable_penalty is "
        "true; TensorRT-LLM would refuse or ignore them."
    ),
    _before("return_log_probs works for greedy requests."),
    _since("return_log_probs is refused: TensorRT-LLM has none with a draft."),
    _before(
        "total_draft_tokens and acceptance_rate are counted from the steps unless TensorRT-LLM's "
        "request metrics have them."
    ),
    _since("total_draft_tokens and acceptance_rate are those of TensorRT-LLM's request metrics."),
    _since(
        "There is no Triton image with this TensorRT-LLM: Triton goes into TensorRT-LLM's own "
        "image (docker/)."
    ),
)


def of_backend_pytorch(version: str) -> tuple[str, ...]:
    """Returns what a user of a release's backend pytorch should know, as sentences."""
    since = is_one_engine(version)
    return tuple(one.text for one in _SENTENCES if (one.holds_since if since else one.holds_before))


SERVED_BY_TRITON = (
    "Clients talk to Triton over HTTP or gRPC, to the model `ensemble` (docs/serving.md), and to "
    "no OpenAI endpoint.",
    "What was left to the other server's defaults has specpipe's, which are smaller: "
    "`specpipe schema` describes them all.",
)

OWN_LOOP = (
    "speculation.num_draft_tokens is the most that is drafted in a step: each request's number "
    "follows what is accepted of it, unless speculation.adaptive is false.",
    "Output is what the target alone would have produced, and sampled output has its distribution; "
    "`specpipe verify` proves it.",
)
"""Of the runtimes whose loop is specpipe's."""
