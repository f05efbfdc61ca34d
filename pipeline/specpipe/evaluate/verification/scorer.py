"""The target's own logits: what ties, thresholds and distributions are judged by.

The scorer is the torch runtime on the target's unified checkpoint, plain or quantized, in the dtype
that the artifact's engine computes in, whatever runtime serves it. A torch engine of the artifact
is taken for that where its files are still those that were built.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

import numpy as np

from specpipe.build.pairing import PairContract
from specpipe.build.stages.convert import convert
from specpipe.checkpoints import source
from specpipe.checkpoints.unified_config import read_unified_config
from specpipe.checkpoints.unified_sections import Quantization
from specpipe.machine.artifacts import Artifacts
from specpipe.machine.manifest import compare_files, files_below, read_manifest, relinked
from specpipe.machine.signals import deferred
from specpipe.roles import Role
from specpipe.runtimes.engine_description import ENGINE_CONFIG
from specpipe.runtimes.repository_layout import SPECULATIVE, VERSION
from specpipe.runtimes.runtime import require_library
from specpipe.runtimes.torch.build import ENGINE_KIND, BuildTorchEngine
from specpipe.speculative.noise import Floats
from specpipe.stage import naming

if TYPE_CHECKING:
    from specpipe.config.sections import PipelineConfig
    from specpipe.runtimes.torch.engine import TorchEngine

Dtype = Literal["float32", "bfloat16", "float16"]

_MAX_NUM_TOKENS = 256
"""Tokens of one forward of a scorer: bounds the memory of its logits. A guess."""

_STEPS = {"fp8": "FP8", "fp8_per_token": "FP8", "int8": "INT8", "nvfp4": "FP4"}
"""The format that activations are rounded to, by the name that `FORMATS` has for it."""


@dataclass(frozen=True)
class ScoredText:
    """A prompt and the beginning of its output.

    max_tokens  what its request allowed the output; some models' positions depend on it
    """

    prompt: tuple[int, ...]
    output: tuple[int, ...]
    max_tokens: int


class Scorer(Protocol):
    """Computes the logits that a target alone has.

    rounding  what a quantized target rounds while it runs, as words; None: nothing
    """

    dtype: str
    rounding: str | None
    max_batch_size: int

    def read(self, texts: Sequence[ScoredText], block_size: int = 1) -> list[Floats]:
        """Returns logits [len(output) + 1, V] of each output token and the next one, for each text.

        A prompt is read by itself; then outputs are read together, up to max_batch_size of them, in
        blocks of that many tokens. An id that no tokenizer entry uses has -inf.
        """


def rows_of(scorer: Scorer, text: ScoredText) -> Floats:
    """Returns the logits [len(output) + 1, V] of a text that is read one token after another."""
    return scorer.read([text])[0]


class TorchScorer:
    """A scorer over one torch engine."""

    def __init__(
        self,
        engine: TorchEngine,
        *,
        dtype: str,
        rounding: str | None,
        unused: Sequence[tuple[int, int]],
    ) -> None:
        self.dtype, self.rounding = dtype, rounding
        self.max_batch_size = engine.max_batch_size
        self._engine = engine
        self._unused = unused

    def read(self, texts: Sequence[ScoredText], block_size: int = 1) -> list[Floats]:
        sequences: list[int] = []
        try:
            rows = []
            for text in texts:
                sequences.append(self._allocate(text))
                rows.append([self._read_prompt(sequences[-1], text.prompt)])
            for start in range(0, max(len(text.output) for text in texts), block_size):
                batch = [
                    (sequence, text.output[start : start + block_size], parts)
                    for sequence, text, parts in zip(sequences, texts, rows, strict=True)
                    if start < len(text.output)
                ]
                num_rows = [len(piece) for _, piece, _ in batch]
                logits = self._forward([(s, piece) for s, piece, _ in batch], num_rows)
                ends = np.cumsum(num_rows)[:-1]
                for (_, _, parts), part in zip(batch, np.split(logits, ends), strict=True):
                    parts.append(part)
        finally:
            for sequence in sequences:
                self._engine.free(sequence)
        return [np.concatenate(parts) for parts in rows]

    def _allocate(self, text: ScoredText) -> int:
        prompt_length = len(text.prompt)
        max_tokens = min(prompt_length + text.max_tokens, self._engine.max_seq_len)
        return self._engine.allocate(prompt_length=prompt_length, max_tokens=max_tokens)

    def _read_prompt(self, sequence: int, prompt: Sequence[int]) -> Floats:
        """Returns the logits [1, V] after the prompt."""
        last = (len(prompt) - 1) // _MAX_NUM_TOKENS * _MAX_NUM_TOKENS
        for start in range(0, last, _MAX_NUM_TOKENS):
            self._forward([(sequence, prompt[start : start + _MAX_NUM_TOKENS])], [0])
        return self._forward([(sequence, prompt[last:])], [1])

    def _forward(
        self, batch: Sequence[tuple[int, Sequence[int]]], num_logits: Sequence[int]
    ) -> Floats:
        logits = self._engine.forward(batch, num_logits)
        rows: Floats = logits.double().cpu().numpy().copy()
        for start, stop in self._unused:
            rows[:, start:stop] = -np.inf
        return rows


@contextmanager
def open_scorer(config: PipelineConfig, *, dtype: Dtype | None = None) -> Iterator[TorchScorer]:
    """Loads the target of a built pair; what has to be built for it is removed at the end."""
    with work_folder(config) as work:
        engine = torch_engine(config, "target", work, dtype=dtype)
        from specpipe.runtimes.torch.engine import TorchEngine

        yield TorchScorer(
            TorchEngine.load(engine),
            dtype=_engine_config(engine)["build_config"]["dtype"],
            rounding=engine_rounding(engine),
            unused=_contract(config).unused_token_ids,
        )


@contextmanager
def work_folder(config: PipelineConfig) -> Iterator[Path]:
    """Yields a folder next to the repository, whose files may be linked into it."""
    repository = config.artifacts.repository
    with deferred():
        work = Path(tempfile.mkdtemp(dir=repository.parent, prefix=".verify-"))
    try:
        yield work
    finally:
        with deferred(), relinked(files_below(repository).values()):
            shutil.rmtree(work, ignore_errors=True)


def engine_rounding(engine: Path) -> str | None:
    """Returns what a torch engine rounds while it runs, as words; None: nothing.

    It makes a whole step of its format of what differs in the last place, so that its logits move
    with the shape of a forward much more than its dtype says.
    """
    words = []
    described = _engine_config(engine)["pretrained_config"]["quantization"]
    quantization = Quantization.model_validate(described)
    if quantization.activations is not None:
        words.append(f"activations to {_STEPS[quantization.activations]}")
    if (kv_cache := quantization.kv_cache_quant_algo) is not None:
        words.append(f"its KV cache to {kv_cache}")
    return " and ".join(words) or None


def torch_engine(
    config: PipelineConfig,
    role: Role,
    work: Path,
    *,
    dtype: Dtype | None = None,
    num_draft_tokens: int = 0,
) -> Path:
    """Returns a torch engine of one side: the artifact's own, or one that is built below `work`.

    dtype None is what the artifact's engine computes in.
    """
    require_library("torch", "torch", extra="torch")
    built = config.artifacts.side(role).engine
    # One of an earlier build may lie there still, where the pair needs none by now.
    is_served = bool(_engine_config(_served(config, role)))
    own = _engine_config(built).get("build_config") if is_served else None
    if (
        own is not None
        and dtype in (None, own["dtype"])
        and own["max_draft_len"] >= num_draft_tokens
        and _is_as_built(built)
    ):
        return built
    out = Artifacts(work).side(role).engine
    out.mkdir(parents=True)
    checkpoint = _unified_checkpoint(config, role, work)
    engine = config.engine
    stage = BuildTorchEngine(
        role=role,
        checkpoint=checkpoint,
        max_batch_size=engine.max_batch_size,
        max_seq_len=_max_seq_len(config, role),
        max_draft_len=num_draft_tokens,
        max_num_tokens=_MAX_NUM_TOKENS,
        dtype=dtype or cast("Dtype", own["dtype"] if own else _stored_dtype(config, checkpoint)),
        device=engine.device,
    )
    with naming(f"the {role} cannot be scored by runtime 'torch'"):
        stage.run(out)
    return out


def _served(config: PipelineConfig, role: Role) -> Path:
    """What `speculative` has of one side: its engine, its description, or its checkpoint."""
    return config.artifacts.repository / SPECULATIVE / VERSION / role


def _engine_config(engine: Path) -> Mapping[str, Any]:
    """Returns the `config.json` of a torch engine; {} for one of another runtime, or none."""
    config = _read_json(engine / ENGINE_CONFIG)
    return config if config.get("runtime") == ENGINE_KIND else {}


def _read_json(path: Path) -> Mapping[str, Any]:
    """Returns a JSON object; {} where there is none."""
    with suppress(OSError, ValueError):
        data = json.loads(path.read_bytes())
        if isinstance(data, dict):
            return data
    return {}


def _is_as_built(engine: Path) -> bool:
    manifest = read_manifest(engine)
    if manifest is None:
        return False
    return not compare_files(engine, manifest.outputs, trust_times=False).differences


def _stored_dtype(config: PipelineConfig, checkpoint: Path) -> str:
    """Returns what an engine of another runtime computes in: as configured, else as stored."""
    if config.engine.dtype != "auto":
        return config.engine.dtype
    return read_unified_config(checkpoint).dtype


def _unified_checkpoint(config: PipelineConfig, role: Role, work: Path) -> Path:
    """The artifact's, else what is served in Hugging Face's layout, converted."""
    checkpoint = config.artifacts.side(role).checkpoint
    is_unified = "mapping" in _read_json(checkpoint / ENGINE_CONFIG)
    if is_unified and "architectures" not in _read_json(_served(config, role) / ENGINE_CONFIG):
        return checkpoint
    side = config.draft if role == "draft" else config.target
    if side.quantization is not None:
        folder = config.artifacts.side(role).huggingface
    else:
        folder = source.resolve(
            side.checkpoint, revision=side.revision, base=config.base_dir, role=role
        ).path
    out = Artifacts(work).side(role).checkpoint
    out.mkdir(parents=True)
    convert(folder, out)
    return out


def _max_seq_len(config: PipelineConfig, role: Role) -> int:
    """Returns the longest sequence that the pair serves, within the side's context."""
    from specpipe.runtimes.pair_file import read_pair

    limits = _contract(config)
    context = limits.draft_max_seq_len if role == "draft" else limits.target_max_seq_len
    served = read_pair(config.artifacts.repository).options.max_seq_len
    return min(served, context)


def _contract(config: PipelineConfig) -> PairContract:
    return PairContract.from_json(config.artifacts.contract.read_text(encoding="utf-8"))
