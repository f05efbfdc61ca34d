"""The section `nightly` of the YAML: what a nightly run measures, and what it must not fall below.

A threshold named `…_ratio` is against the run of the promoted version, or where none is promoted
the last good run of the pair; the others hold by themselves.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from specpipe.config import messages
from specpipe.section import Section

Concurrency = Annotated[int, Field(ge=1, strict=True)]


class NightlyConfig(Section):
    """What a nightly run measures, and when it fails."""

    prompts: str = Field(default="code", min_length=1)
    """The prompts that are run: `chat`, `code`, `summarization`, or a .jsonl or .txt file, relative
    to this one."""

    num_prompts: int = Field(default=16, ge=2)
    """How many prompts are run, from the first on; the interval of a speed-up needs two."""

    max_tokens: int = Field(default=64, ge=1)
    """Tokens of an answer, at most."""

    concurrencies: tuple[Concurrency, ...] = Field(default=(1, 8), min_length=1, strict=False)
    """Numbers of streams that speed is measured with."""

    rounds: int = Field(default=3, ge=1)
    """How often each prompt is timed with speculation and without it, in turns."""

    sampling_distance: float | None = Field(default=None, gt=0, lt=1)
    """The total-variation distance that unseeded sampling is tested for, as `specpipe verify` does
    with 0.1; none: it is not tested, since that takes thousands of answers."""

    gate: str | None = Field(default=None, min_length=1)
    """A .jsonl of prompts with expected answers, relative to this file; none: no gate."""

    min_gate_pass_rate: float | None = Field(default=None, ge=0, le=1)
    """The least share of the gate's answers that must be right; none: no fewer are right than
    without speculation."""

    allow_ties: bool = True
    """Whether an answer may differ from the target's own by a numerical tie."""

    min_acceptance_ratio: float = Field(default=0.95, ge=0, le=1)
    """The least ratio of the acceptance rate to that of the compared run, over all prompts, at each
    position of a step, and for each kind of prompts; 0.95 is the floor of TensorRT-LLM's own tests
    (PR 17474). It is crossed where the whole interval of the ratio lies below. Without a promoted
    version each good run is the measure of the next one, so a decline in small steps passes:
    `min_acceptance_rate` stops it."""

    min_acceptance_rate: float | None = Field(default=None, ge=0, le=1)
    """The least share of drafted tokens that is accepted, in greedy answers at the full draft
    length; none: no floor."""

    min_speed_up: float | None = Field(default=0.9, gt=0, allow_inf_nan=False)
    """The least ratio of the rate with speculation to that without it, at each concurrency; none:
    no floor. So that a noisy machine raises no alarm, it is crossed where the whole 95 % interval
    lies below, in each of three measurements."""

    min_speed_up_ratio: float | None = Field(default=0.8, gt=0, le=1)
    """The least ratio of the speed-up to that of the compared run on the same machine; none: no
    floor. It is crossed where the upper end of the one interval divided by the lower end of the
    other lies below, in each of three measurements."""

    max_latency_ratio: float | None = Field(default=1.5, ge=1, allow_inf_nan=False)
    """The greatest ratio of a wait to that of the compared run on the same machine: the median and
    the 99th percentile of an answer's first token and of its later ones, at each concurrency; none:
    no limit. It is crossed where the lower end of the one interval divided by the upper end of the
    other lies above, in each of three measurements."""

    max_perplexity_ratio: float = Field(default=1.02, ge=1, allow_inf_nan=False)
    """The greatest ratio of what quantization does to a model's perplexity, against its plain form,
    to what it did in the compared run."""

    max_kl_ratio: float = Field(default=1.25, ge=1, allow_inf_nan=False)
    """The greatest ratio of a quantized model's mean KL to its plain form to that of the compared
    run."""

    min_top1_ratio: float = Field(default=0.99, ge=0, le=1)
    """The least ratio of how often a quantized model and its plain form find the same token
    likeliest to that of the compared run."""

    max_size_ratio: float = Field(default=1.1, ge=1, allow_inf_nan=False)
    """The greatest ratio of the bytes of an engine, or of the repository, to those of the compared
    run."""

    @model_validator(mode="after")
    def _check_gate(self) -> NightlyConfig:
        if self.min_gate_pass_rate is not None and self.gate is None:
            raise messages.broken_rule(
                "nightly.min_gate_pass_rate",
                self.min_gate_pass_rate,
                "nothing, as there is no nightly.gate",
            )
        return self
