"""The tokens of all answers to one request."""

from __future__ import annotations

from typing import Any

from specpipe.triton.client.completion import Completion


class Usage:
    """Counts tokens as OpenAI does: a prompt once, however many answers it has.

    prompt_lengths  tokens of each prompt that the gateway has encoded itself; None: the server says
    """

    def __init__(self, *, num_choices: int, prompt_lengths: list[int | None]) -> None:
        self._num_choices = num_choices
        self._prompts = [length or 0 for length in prompt_lengths]
        self._seen: dict[int, int] = {}
        self._cached = [0] * len(prompt_lengths)
        self._accepted = self._rejected = 0
        self._num_drafted = 0
        self._histograms: list[tuple[int, ...]] = []

    def add(self, index: int, completion: Completion) -> None:
        """Takes in a chunk of the answer of that number."""
        statistics = completion.statistics
        if statistics is None:
            self._seen[index] = self._seen.get(index, 0) + len(completion.token_ids)
            return
        prompt = index // self._num_choices
        self._prompts[prompt] = statistics.num_input_tokens
        num_cached = statistics.num_cached_input_tokens
        if index % self._num_choices == 0:  # the others find what this one has read
            self._cached[prompt] = num_cached
        self._seen[index] = statistics.num_output_tokens
        self._accepted += statistics.accepted_prediction_tokens
        self._rejected += statistics.rejected_prediction_tokens
        self._num_drafted += statistics.total_draft_tokens
        self._histograms.append(statistics.acceptance_histogram or ())

    @property
    def counts(self) -> tuple[int, int]:
        """Tokens of prompts and of answers, so far."""
        return sum(self._prompts), sum(self._seen.values())

    def to_json(self) -> dict[str, Any]:
        """Returns OpenAI's object; before the end of an answer, what there is of it."""
        prompt, completion = self.counts
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(self._cached)},
            "completion_tokens_details": {
                "accepted_prediction_tokens": self._accepted,
                "rejected_prediction_tokens": self._rejected,
            },
        }

    def metrics(self) -> dict[str, Any] | None:
        """Returns what drafting came to, as vLLM has it beside the usage; aiperf and guidellm read
        it. None where nothing was drafted, and of several answers, as vLLM does.
        """
        histogram = self._histograms[0] if len(self._histograms) == 1 else ()
        num_steps = sum(histogram)
        if not num_steps or not self._num_drafted:
            return None
        num_accepted = sum(num * steps for num, steps in enumerate(histogram))
        return {
            "speculative_decoding": {
                "acceptance_histogram": list(histogram),
                "num_spec_steps": num_steps,
                "num_draft_tokens": self._num_drafted,
                "num_accepted_draft_tokens": num_accepted,
                "mean_acceptance_length": 1 + num_accepted / num_steps,
                "draft_acceptance_rate": num_accepted / self._num_drafted,
            }
        }
