"""What a training begins with: the pair's checkpoints, and whose weights are trained."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from specpipe.build.pairing import PairContract, check_pair
from specpipe.checkpoints import source
from specpipe.checkpoints.checkpoint import CONFIG_NAME, QUANTIZATION_KEYS, weights_among
from specpipe.checkpoints.family_config import unified_config
from specpipe.checkpoints.files import read_json
from specpipe.checkpoints.plain_weights import open_weights
from specpipe.config.sections import CheckpointConfig, PipelineConfig
from specpipe.errors import ConfigError
from specpipe.machine.manifest import record_file
from specpipe.roles import Role
from specpipe.stage import naming

_DEFAULT_LENGTH = 4096


@dataclass(frozen=True, kw_only=True)
class Start:
    """The pair, and what is trained.

    base     the config's draft, which the trained one is compared with
    trained  the checkpoint whose weights are trained; of `shape`, a config.json, they are random
    """

    base: source.Source
    target: source.Source
    trained: source.Source
    shape: Path | None
    contract: PairContract
    served_length: int | None

    @property
    def folder(self) -> Path:
        return self.trained.path

    def fitting_length(self, wanted: int | None) -> int:
        """Returns the tokens of a text that both models have positions for."""
        most = min(self.contract.draft_max_seq_len, self.contract.target_max_seq_len)
        if wanted is not None and wanted > most:
            raise ConfigError(
                f"--max-seq-len {wanted}: expected at most {most}, the pair's context"
            )
        return wanted or min(most, self.served_length or _DEFAULT_LENGTH)

    def to_json(self) -> dict[str, Any]:
        """Returns what the checkpoints are, by digest or by the hub's commit."""
        return {
            "base": _described(self.base),
            "start": _described(self.trained)
            if self.shape is None
            else {"name": str(self.shape), "sha256": {CONFIG_NAME: record_file(self.shape).sha256}},
            "target": _described(self.target),
        }


def find_start(config: PipelineConfig, checkpoint: str | None, shape: Path | None) -> Start:
    """Finds the checkpoints of a config, fetched where they are a hub's, and checks the pair.

    checkpoint  whose weights are trained, relative to here; None: the config's draft
    """
    base = _resolve(config, config.draft, "draft")
    target = _resolve(config, config.target, "target")
    trained = base
    if checkpoint is not None:
        trained = source.resolve(checkpoint, revision=None, base=Path(), role="draft")
    limits = config.serving.limits
    contract = check_pair(trained.path, target.path, limits)
    for side in {base.path, trained.path, target.path}:
        # transformers draws at random what a checkpoint lacks, and reads no layer too many.
        stored = read_json(side / CONFIG_NAME)
        if not any(stored.get(key) for key in QUANTIZATION_KEYS):
            open_weights(side, limits=limits)
    if shape is not None:
        with naming(str(shape)):
            unified = unified_config({"dtype": "float32", **read_json(shape)}, limits=limits)
        num_rows = unified.vocab_size
        if num_rows < contract.num_used_token_ids:
            raise ConfigError(
                f"{shape} has vocab_size {num_rows}, but the pair uses "
                f"{contract.num_used_token_ids} token ids: give each an embedding row"
            )
        contract = replace(
            contract,
            draft_vocab_size=num_rows,
            draft_max_seq_len=unified.max_position_embeddings,
        )
    return Start(
        base=base,
        target=target,
        trained=trained,
        shape=shape,
        contract=contract,
        served_length=config.engine.max_seq_len,
    )


def _resolve(config: PipelineConfig, checkpoint: CheckpointConfig, role: Role) -> source.Source:
    return source.resolve(
        checkpoint.checkpoint, revision=checkpoint.revision, base=config.base_dir, role=role
    )


def _described(checkpoint: source.Source) -> dict[str, Any]:
    if checkpoint.revision is not None:
        return {"name": checkpoint.name, "revision": checkpoint.revision}
    names = weights_among(path.name for path in checkpoint.path.glob("*.safetensors"))
    files = {name: checkpoint.path / name for name in (CONFIG_NAME, *names)}
    return {
        "name": checkpoint.name,
        "sha256": {name: record_file(path).sha256 for name, path in files.items()},
    }
