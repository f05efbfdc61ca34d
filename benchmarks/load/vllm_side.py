"""vLLM by its engine's own steps, in one setting: requests come and go as ours do.

Its engine core is a process of its own, as it comes; text is not made of its tokens.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from typing import Any

from benchmarks.load.loop import Answer, Loop
from benchmarks.load.sides import Counts, Emitted, Process, drive, vllm_drafts
from benchmarks.peers import VLLM_ENVIRONMENT

_KV_CACHE_BYTES = 12 << 30
_SCHEDULE = [[1, 8, 8], [9, 16, 4], [17, 32, 2], [33, 4096, 0]]
"""Draft tokens by batch size, of which a setting has no more than its own number."""


class VLLM:
    """An engine of vLLM."""

    def __init__(self, process: Process) -> None:
        os.environ.update(VLLM_ENVIRONMENT)
        (setting,) = process.settings
        self._has_cache, self._num_runs = setting == "reuse", 0
        # Several may start at once.
        os.environ["VLLM_CACHE_ROOT"] = f"{tempfile.gettempdir()}/specpipe-vllm-{setting}"
        if setting == "invariant":
            os.environ["VLLM_BATCH_INVARIANT"] = "1"
        import vllm

        options = engine_options(process)
        self._engine = vllm.LLM(process.target, **options).llm_engine
        self._sampling = vllm.SamplingParams
        self._is_delta = vllm.sampling_params.RequestOutputKind.DELTA
        self.about = {"vllm": vllm.__version__, "options": options}

    def run(self, setting: str, loop: Loop) -> Counts:
        self._num_runs += 1
        drive(self, loop)
        num_tokens = sum(answer.max_tokens for answer in loop.answers)
        # Each step of an answer is one output; its counters would take the engine's time.
        return Counts(num_accepted=num_tokens - sum(len(answer.times) for answer in loop.answers))

    def submit(self, answer: Answer) -> None:
        sampling = self._sampling(
            temperature=0.0,
            max_tokens=answer.max_tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=self._is_delta,
        )
        request: dict[str, Any] = {"prompt_token_ids": list(answer.prompt)}
        if self._has_cache:  # which begins with what no earlier run has read
            request["cache_salt"] = str(self._num_runs)
        self._engine.add_request(str(answer.number), request, sampling)

    def step(self) -> Iterator[Emitted]:
        for output in self._engine.step():
            yield Emitted(
                int(output.request_id), output.outputs[0].token_ids, is_last=output.finished
            )


def engine_options(process: Process) -> dict[str, Any]:
    """Returns the arguments of `vllm.LLM`, what the process was told among them.

    Its KV cache has a size of its own, so that others may take memory while it starts.
    """
    (setting,) = process.settings
    drafter, most, is_by_load = vllm_drafts(setting) or ("", 0, False)
    options: dict[str, Any] = {
        "dtype": process.dtype,
        # It stops drafting where a draft might go beyond.
        "max_model_len": process.max_length + 2 * most + 16,
        "max_num_seqs": process.max_streams,
        "gpu_memory_utilization": 0.1,  # what must be free
        "kv_cache_memory_bytes": _KV_CACHE_BYTES,
        # Prompts come again and again.
        "enable_prefix_caching": setting == "reuse",
    }
    if most:
        of_drafter: dict[str, dict[str, Any]] = {
            "draft": {"method": "draft_model", "model": process.draft},
            "draft-parallel": {
                "method": "draft_model",
                "model": process.parallel,
                "parallel_drafting": True,
            },
            "ngram": {"method": "ngram", "prompt_lookup_max": 4, "prompt_lookup_min": 2},
        }
        options["speculative_config"] = {**of_drafter[drafter], "num_speculative_tokens": most}
        if is_by_load:
            schedule = [[first, last, min(k, most)] for first, last, k in _SCHEDULE]
            options["speculative_config"]["num_speculative_tokens_per_batch_size"] = schedule
    return {**options, **process.options}
