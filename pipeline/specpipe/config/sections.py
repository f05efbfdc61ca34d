"""The YAML as frozen models, and `load_config`, the only door to it.

Keys that no model knows are refused, values are not converted (`"4"` is not 4), and every message
names file, line, key path, value and what was expected.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, Field, PrivateAttr, model_validator

from specpipe.checkpoints.formats import FORMATS
from specpipe.config import messages
from specpipe.config.engine import EngineConfig, TorchEngineConfig
from specpipe.config.limits import Limits
from specpipe.config.nightly import NightlyConfig
from specpipe.config.release import ReleaseConfig
from specpipe.errors import ConfigError
from specpipe.machine.artifacts import Artifacts
from specpipe.section import Section
from specpipe.speculative.adaptive import Schedule

_AWQ_SAMPLES = 32
"""As many as TensorRT-LLM's quantization script takes at most."""

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"


PathLike = TypeVar("PathLike", str, Path)


def _check_path(path: PathLike) -> PathLike:
    """Refuses what no file system can hold: a NUL, half of a surrogate pair."""
    if b"\0" in os.fsencode(path):
        raise ValueError("a path holds no NUL")
    return path


class CalibrationConfig(Section):
    """The texts that activations, and what quantization costs, are measured on."""

    data: Annotated[str, AfterValidator(_check_path)] = Field(default="builtin", min_length=1)
    """`builtin`, a small set of texts; or a file, relative to this one, of your own: .jsonl,
    .parquet, or .txt with a text on every line."""

    column: str | None = None
    """The column of a .jsonl or .parquet that has the texts, or lists of chat messages, which go
    through the chat template; none: `text` or `messages`, whichever is there."""

    num_samples: int = Field(default=128, ge=2)
    """Texts that are read; every eighth of them is held out, and the cost is measured on it."""

    max_seq_len: int = Field(default=512, ge=16)
    """Tokens that are read of each text, at most."""


class QuantizationConfig(Section):
    """What the weights of a checkpoint are quantized to."""

    format: Literal[
        "fp8", "fp8_pc_pt", "int8_sq", "int4_awq", "w4a8_awq", "int8_wo", "int4_wo", "nvfp4"
    ]
    """Format of the weights, and of activations where it has one, as NVIDIA's script names it."""

    kv_cache: Literal["fp8"] | None = None
    """Format of the KV cache; none: the model's dtype."""

    awq_block_size: int = Field(default=128, ge=16)
    """Weights that share a scale, for int4_awq and w4a8_awq; the number of inputs of every matrix
    is a multiple of it."""

    quantize_lm_head: bool = False
    """Whether the head is quantized too."""

    exclude: tuple[str, ...] = Field(default=(), strict=False)
    """Linears that stay plain, as patterns of their names in the unified checkpoint:
    `transformer.layers.0.*`, `*.mlp.proj`."""

    calibration: CalibrationConfig = CalibrationConfig()
    """The texts that activations are measured on; for AWQ 32 of them where it does not say: its
    search runs them again for every strength that it tries."""

    export: bool = False
    """Whether a Hugging Face folder of the quantized weights is written too, for vLLM and others;
    backend pytorch of TensorRT-LLM has it anyway."""

    @model_validator(mode="before")
    @classmethod
    def _limit_awq_samples(cls, data: Any) -> Any:
        if not (isinstance(data, dict) and data.get("format") in ("int4_awq", "w4a8_awq")):
            return data
        calibration = data.get("calibration", {})
        if not isinstance(calibration, dict):
            return data
        return {**data, "calibration": {"num_samples": _AWQ_SAMPLES, **calibration}}

    @property
    def needs_data(self) -> bool:
        """Whether anything is measured on the calibration texts before the weights are rounded."""
        return FORMATS[self.format].needs_data or self.kv_cache is not None


class QualityConfig(Section):
    """What quantization may cost, measured on the texts held out; a build that costs more fails."""

    measure: bool = True
    """Whether the cost is measured, for which both models run in both forms."""

    max_mean_kl: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """The greatest mean KL divergence D(plain ‖ quantized), in nats, of the next-token
    distributions of a model's two forms; none: any."""

    min_top1_agreement: float | None = Field(default=None, ge=0, le=1)
    """The least share of positions at which both forms of a model find the same token likeliest;
    none: any."""

    max_perplexity_ratio: float | None = Field(default=None, ge=1, allow_inf_nan=False)
    """The greatest ratio of a model's perplexity to that of its unquantized form; none: any."""

    min_acceptance_ratio: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    """The least ratio of the acceptance rate of the pair as configured to that of both models
    unquantized; none: any."""

    @property
    def has_limits(self) -> bool:
        """Whether there is anything that a build can fail by."""
        limits = self.model_dump(exclude={"measure"})
        return any(limit is not None for limit in limits.values())


class CheckpointConfig(Section):
    """One Hugging Face checkpoint, and how its weights are split."""

    checkpoint: Annotated[str, AfterValidator(_check_path)] = Field(min_length=1)
    """A folder, relative to this file, or the id of a model on the Hugging Face hub."""

    revision: str | None = None
    """Commit, tag or branch of a hub id; none: what `main` is when it is first resolved."""

    tp_size: int = Field(default=1, ge=1)
    """Ranks that share every layer (tensor parallelism)."""

    pp_size: int = Field(default=1, ge=1)
    """Groups of ranks that share the layers (pipeline parallelism)."""

    quantization: QuantizationConfig | None = None
    """What the weights are quantized to before the engine is built; none: not at all."""

    @property
    def world_size(self) -> int:
        """Ranks of the engine."""
        return self.tp_size * self.pp_size


class LoadLevel(Section):
    """What is drafted at a load and above it, up to the next level."""

    from_batch_size: int = Field(ge=1)
    """The least number of requests that decode at once for this level to hold."""

    num_draft_tokens: int = Field(ge=0, le=32)
    """The most draft tokens per step; 0: the target model alone."""


class SpeculationConfig(Section):
    """How the draft model speculates."""

    num_draft_tokens: int = Field(default=4, ge=0, le=32)
    """Draft tokens per step (K), at most; a request that names a number up to this is drafted with
    just that. 0: the target model alone."""

    adaptive: bool = True
    """Whether the K of a request that names none follows its own acceptance, so that a poor draft
    costs little."""

    schedule: tuple[LoadLevel, ...] = Field(default=(), strict=False)
    """The most tokens that the draft drafts by load, as `specpipe tune` measures it, for requests
    that name no number; none: num_draft_tokens at any load."""

    prompt_lookup: bool = False
    """Whether requests may copy draft tokens from their own texts instead of asking the draft
    model: it pays where texts repeat themselves or their prompt, as edits of code and answers from
    given documents do. Needs adaptive."""

    @property
    def limits(self) -> Schedule:
        """The schedule as the loop reads it."""
        return tuple((level.from_batch_size, level.num_draft_tokens) for level in self.schedule)

    @model_validator(mode="after")
    def _check_schedule(self) -> SpeculationConfig:
        previous = 0
        for index, level in enumerate(self.schedule):
            key = f"speculation.schedule.{index}"
            if level.from_batch_size <= previous:
                raise messages.broken_rule(
                    f"{key}.from_batch_size",
                    level.from_batch_size,
                    f"more than {previous}, the level before it",
                )
            if level.num_draft_tokens > self.num_draft_tokens:
                raise messages.broken_rule(
                    f"{key}.num_draft_tokens",
                    level.num_draft_tokens,
                    f"at most {self.num_draft_tokens}, which is speculation.num_draft_tokens",
                )
            previous = level.from_batch_size
        return self


class ServingConfig(Section):
    """What the server refuses or gives up."""

    max_queue_size: int = Field(default=128, ge=1)
    """Requests that may wait in the queue; one more is refused."""

    request_timeout_s: float = Field(default=600.0, gt=0, allow_inf_nan=False)
    """Seconds from arrival to the last token; then the request ends with what it has."""

    stream_interval_ms: float | None = Field(default=None, ge=0, le=10_000, allow_inf_nan=False)
    """Milliseconds between two responses of a streamed answer, at least; its first text and its end
    do not wait. 0: a response for each step; none: longer under load, up to 75 ms, so that sending
    takes an eighth of the time."""

    preprocessing_instances: int = Field(default=2, ge=1, le=64)
    """Processes that tokenize: with two, one long prompt keeps nobody waiting."""

    limits: Limits = Limits()
    """What is refused for its size before work is done on it."""

    @property
    def stream_interval_s(self) -> float | None:
        """`stream_interval_ms` in seconds."""
        return None if self.stream_interval_ms is None else self.stream_interval_ms / 1000


class PipelineConfig(Section):
    """One draft–target pair: where it comes from, what is built and how it is served."""

    name: str = Field(pattern=NAME_PATTERN)
    """Names the folder of the artifacts: letters, digits, `.`, `_` and `-`."""

    draft: CheckpointConfig
    """The small model, which proposes tokens."""

    target: CheckpointConfig
    """The large model, which verifies them and whose output is served."""

    speculation: SpeculationConfig = SpeculationConfig()
    """How the draft model speculates."""

    engine: EngineConfig = TorchEngineConfig()
    """What is built, and what it must hold at once."""

    quality: QualityConfig = QualityConfig()
    """What quantization may cost, and whether that is measured."""

    serving: ServingConfig = ServingConfig()
    """What the server refuses or gives up."""

    nightly: NightlyConfig = NightlyConfig()
    """What `specpipe nightly` measures, and when a run is not good."""

    release: ReleaseConfig = ReleaseConfig()
    """Where versions of the pair are published, and whose signatures are trusted."""

    output_dir: Annotated[Path, AfterValidator(_check_path)] = Field(
        default=Path("engines"), strict=False
    )
    """Folder, relative to this file, under which `<name>/` holds the artifacts."""

    _source: Path = PrivateAttr(default=Path("specpipe.yaml"))

    def model_post_init(self, context: Any, /) -> None:
        if isinstance(context, Path):
            self._source = context

    @model_validator(mode="after")
    def _check_num_tokens(self) -> PipelineConfig:
        num_tokens = self.speculation.num_draft_tokens + 1
        if self.engine.max_num_tokens < num_tokens:
            raise messages.broken_rule(
                "engine.max_num_tokens",
                self.engine.max_num_tokens,
                f"at least {num_tokens}, one more than speculation.num_draft_tokens",
            )
        return self

    @model_validator(mode="after")
    def _check_schedule(self) -> PipelineConfig:
        for index, level in enumerate(self.speculation.schedule):
            if level.from_batch_size > self.engine.max_batch_size:
                raise messages.broken_rule(
                    f"speculation.schedule.{index}.from_batch_size",
                    level.from_batch_size,
                    f"at most {self.engine.max_batch_size}, which is engine.max_batch_size",
                )
        return self

    @property
    def source(self) -> Path:
        """The YAML file; relative paths start at its folder."""
        return self._source

    @property
    def base_dir(self) -> Path:
        """The folder that relative paths start at."""
        return self._source.parent

    @property
    def artifacts_dir(self) -> Path:
        """The folder of everything that is built for this pair."""
        try:
            return (self.base_dir / self.output_dir / self.name).resolve()
        except (OSError, RuntimeError) as exc:  # a loop of links
            raise ConfigError(f"{self.source}: output_dir {self.output_dir}: {exc}") from exc

    @property
    def artifacts(self) -> Artifacts:
        """The paths in that folder."""
        return Artifacts(self.artifacts_dir)


@functools.cache
def json_schema() -> Mapping[str, Any]:
    """Returns the JSON Schema of the YAML, for editors; the docstrings are its descriptions."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **PipelineConfig.model_json_schema(),
    }
