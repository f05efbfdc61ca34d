"""The target's own logits: what ties, thresholds and distributions are judged by.

The scorer is the torch runtime on the target's unified checkpoint, in the dtype that the artifact's
engine computes in, whatever runtime serves it. A torch engine of the artifact is taken for that
where its files are still those that were built.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

import numpy as np

from specpipe import source
from specpipe.errors import SpecpipeError
from specpipe.manifest import compare_files, read_manifest
from specpipe.pairing import PairContract
from specpipe.runtimes.base import require_library
from specpipe.runtimes.torch.build import CONFIG_NAME, ENGINE_KIND, BuildTorchEngine
from specpipe.stages.base import Role
from specpipe.stages.convert import convert
from specpipe.verification.verdict import Floats

if TYPE_CHECKING:
    from specpipe.config import PipelineConfig
    from specpipe.runtimes.torch.engine import TorchEngine

Dtype = Literal["float32", "bfloat16", "float16"]

_NUM_COMPETING = 100
"""Of the best tokens, whose logits are compared between block shapes: no other one can win."""

_QUANTILE = 0.999

_MAX_NUM_TOKENS = 256


@dataclass(frozen=True)
class Text:
    """A prompt and the beginning of its output.

    max_tokens  what its request allowed the output; some models' positions depend on it
    """

    prompt: tuple[int, ...]
    output: tuple[int, ...]
    max_tokens: int


class Scorer(Protocol):
    """Computes the logits that a target alone has."""

    dtype: str

    def rows(self, text: Text) -> Floats:
        """Logits [len(output) + 1, V] of each output token and the next one: the prompt is read in
        one pass, then one token after another.

        An id that no tokenizer entry uses has -inf.
        """

    def block_differences(self, texts: Sequence[Text], block_sizes: Sequence[int]) -> Floats:
        """How the distances of the best tokens' logits to the best one move when outputs are read
        otherwise than one token at a time: in blocks, and all texts together.

        Absolute values, flat.
        """


@dataclass(frozen=True)
class BlockDifference:
    """The 99.9th percentile of what logit differences move by, and over how many it was taken."""

    value: float
    num_compared: int


def measure_block_difference(
    scorer: Scorer, texts: Sequence[Text], block_sizes: Sequence[int]
) -> BlockDifference:
    """Measures it on some texts."""
    differences = scorer.block_differences([t for t in texts if t.output], block_sizes)
    if not differences.size:
        return BlockDifference(0.0, 0)
    return BlockDifference(
        float(np.quantile(differences, _QUANTILE, method="higher")), differences.size
    )


class TorchScorer:
    """A scorer over one torch engine."""

    def __init__(self, engine: TorchEngine, dtype: str, unused: Sequence[tuple[int, int]]) -> None:
        self.dtype = dtype
        self._engine = engine
        self._unused = unused

    def rows(self, text: Text) -> Floats:
        return self._read([text], block_size=1)[0]

    def block_differences(self, texts: Sequence[Text], block_sizes: Sequence[int]) -> Floats:
        differences = []
        plain = [self.rows(text) for text in texts]
        shapes = [(texts[i : i + 1], size, i) for size in block_sizes for i in range(len(texts))]
        at_once = self._engine.max_batch_size
        shapes += [(texts[i : i + at_once], 1, i) for i in range(0, len(texts), at_once)]
        for some, block_size, first in shapes:
            for index, rows in enumerate(self._read(some, block_size), first):
                differences.append(_moves(plain[index], rows))
        return np.concatenate(differences) if differences else np.empty(0)

    def _read(self, texts: Sequence[Text], block_size: int) -> list[Floats]:
        """Logits [len(output) + 1, V] of each text, read together and in blocks of that many
        tokens.
        """
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

    def _allocate(self, text: Text) -> int:
        prompt_length = len(text.prompt)
        max_tokens = min(prompt_length + text.max_tokens, self._engine.max_seq_len)
        return self._engine.allocate(prompt_length=prompt_length, max_tokens=max_tokens)

    def _read_prompt(self, sequence: int, prompt: Sequence[int]) -> Floats:
        """Logits [1, V] after the prompt."""
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


def _moves(plain: Floats, other: Floats) -> Floats:
    """Both [N, V]: how far the best tokens' distances to the best one are apart."""
    num_competing = min(_NUM_COMPETING, plain.shape[1])
    best = np.argpartition(-plain, num_competing - 1, axis=1)[:, :num_competing]
    first = plain.argmax(axis=1)[:, None]
    distances = [
        np.take_along_axis(rows, best, 1) - np.take_along_axis(rows, first, 1)
        for rows in (plain, other)
    ]
    moves = np.abs(distances[0] - distances[1])
    # The best token's distance to itself is no evidence.
    found: Floats = moves[np.isfinite(moves) & (best != first)]
    return found


@contextmanager
def open_scorer(config: PipelineConfig, *, dtype: Dtype | None = None) -> Iterator[TorchScorer]:
    """Loads the target of a built pair; what has to be built for it is removed at the end."""
    with tempfile.TemporaryDirectory(dir=config.artifacts_dir, prefix=".scorer-") as made:
        engine = torch_engine(config, "target", Path(made), dtype=dtype)
        from specpipe.runtimes.torch.engine import TorchEngine

        contract = config.artifacts_dir / "check" / "pair.json"
        unused = PairContract.from_json(contract.read_text(encoding="utf-8")).unused_token_ids
        yield TorchScorer(TorchEngine.load(engine), _engine_dtype(engine), unused)


def torch_engine(
    config: PipelineConfig,
    role: Role,
    made: Path,
    *,
    dtype: Dtype | None = None,
    num_draft_tokens: int = 0,
) -> Path:
    """Returns a torch engine of one side: the artifact's own, or one that is built below `made`.

    dtype None is what the artifact's engine computes in.
    """
    require_library("torch", "torch", extra="torch")
    built = config.artifacts_dir / role / "engine"
    own = _torch_build_config(built)
    if (
        own is not None
        and dtype in (None, own["dtype"])
        and own["max_draft_len"] >= num_draft_tokens
        and _is_as_built(built)
    ):
        return built
    out = made / role / "engine"
    out.mkdir(parents=True)
    checkpoint = _unified_checkpoint(config, role, made)
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
    try:
        stage.run(out)
    except SpecpipeError as exc:
        raise type(exc)(f"the {role} cannot be scored by runtime 'torch': {exc}") from exc
    return out


def _torch_build_config(engine: Path) -> Mapping[str, Any] | None:
    """What a torch engine was built with; None for an engine of another runtime, or none."""
    try:
        config = json.loads((engine / CONFIG_NAME).read_bytes())
    except (OSError, ValueError):
        return None
    if not isinstance(config, dict) or config.get("runtime") != ENGINE_KIND:
        return None
    found: Mapping[str, Any] = config["build_config"]
    return found


def _is_as_built(engine: Path) -> bool:
    manifest = read_manifest(engine)
    return (
        manifest is not None and not compare_files(engine, manifest.outputs, trust_times=False)[0]
    )


def _engine_dtype(engine: Path) -> str:
    config = _torch_build_config(engine)
    assert config is not None
    return str(config["dtype"])


def _stored_dtype(config: PipelineConfig, checkpoint: Path) -> str:
    """What an engine of another runtime computes in: as configured, else as stored."""
    if config.engine.dtype != "auto":
        return config.engine.dtype
    unified = json.loads((checkpoint / "config.json").read_bytes())
    return str(unified["dtype"])


def _unified_checkpoint(config: PipelineConfig, role: Role, made: Path) -> Path:
    """The artifact's, else one that is converted: a backend that reads checkpoints as they are has
    none.
    """
    checkpoint = config.artifacts_dir / role / "checkpoint"
    with suppress(OSError, ValueError):
        if "mapping" in json.loads((checkpoint / "config.json").read_bytes()):
            return checkpoint
    side = config.draft if role == "draft" else config.target
    found = source.resolve(side.checkpoint, revision=side.revision, base=config.base_dir, role=role)
    out = made / role / "checkpoint"
    out.mkdir(parents=True)
    convert(found.path, out)
    return out


def _max_seq_len(config: PipelineConfig, role: Role) -> int:
    """As the pair serves it, within the side's context."""
    from specpipe.triton.repository import read_pair

    contract = config.artifacts_dir / "check" / "pair.json"
    limits = PairContract.from_json(contract.read_text(encoding="utf-8"))
    context = limits.draft_max_seq_len if role == "draft" else limits.target_max_seq_len
    served = read_pair(config.artifacts_dir / "model_repo").options.max_seq_len
    return min(served, context)
