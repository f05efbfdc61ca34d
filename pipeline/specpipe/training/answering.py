"""Who answers for a collection: the built pair in this process, or a server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from specpipe.build.repositories import built_repository
from specpipe.checkpoints.licences import find_licences
from specpipe.config.sections import PipelineConfig
from specpipe.evaluate.endpoints import open_endpoint
from specpipe.evaluate.endpoints.base import Endpoint
from specpipe.evaluate.endpoints.in_process import InProcess
from specpipe.evaluate.endpoints.triton import Triton
from specpipe.evaluate.verification.record import repository_digest
from specpipe.machine.manifest import (
    MANIFEST_SUFFIX,
    parse_manifest,
    read_manifest,
    record_files,
)
from specpipe.runtimes.pair_file import read_pair
from specpipe.text.tokenizer import Tokenizer
from specpipe.triton.repository.contents import load_tokenizer

_STREAMS = 8
"""Questions that are open at a time where nobody says how many a server takes."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """What is known of the target before it is asked.

    answered_by  what a collection says of who answered
    licence      what its checkpoint says of its licence; None where there is none to be read
    tokenizer    the target's
    num_streams  questions to be open at a time
    max_seq_len  prompt and answer together; None: not known
    repository   the built pair; None: there is a server alone
    """

    answered_by: Mapping[str, Any]
    licence: Mapping[str, Any] | None
    tokenizer: Tokenizer
    num_streams: int = _STREAMS
    max_seq_len: int | None = None
    repository: Path | None = None


def built_target(config: PipelineConfig) -> Target:
    """Returns the target of a built pair, which this process would run."""
    repository = built_repository(config)
    recorded = read_manifest(repository)
    files = record_files(repository) if recorded is None else recorded.outputs
    engine = {n: file for n, file in files.items() if "target" in PurePosixPath(n).parts}
    options = read_pair(repository).options
    return Target(
        answered_by={
            "endpoint": InProcess.name,
            "pair": config.name,
            "target": config.target.checkpoint,
            "target_digest": repository_digest(engine),
        },
        licence=_licence(config),
        tokenizer=load_tokenizer(repository),
        num_streams=config.engine.max_batch_size,
        max_seq_len=options.max_seq_len,
        repository=repository,
    )


def served_target(
    url: str, model: str | None, *, tokenizer: Path | None, config: PipelineConfig | None
) -> Target:
    """Returns the target that a server runs; its tokenizer is the pair's where none is given."""
    answered_by = {"endpoint": url, "model": model}
    if config is None:
        assert tokenizer is not None
        loaded = Tokenizer.load(tokenizer)
        return Target(answered_by=answered_by, licence=None, tokenizer=loaded)
    built = built_target(config)
    return Target(
        answered_by={**answered_by, "target": config.target.checkpoint},
        licence=built.licence,
        tokenizer=built.tokenizer if tokenizer is None else Tokenizer.load(tokenizer),
        num_streams=built.num_streams,
        max_seq_len=built.max_seq_len,
    )


def open_target(
    target: Target, url: str | None, model: str | None, api_key: str | None
) -> Endpoint:
    """Returns what answers; the pair of a repository is loaded for that."""
    if url is not None:
        return open_endpoint(url, model=model, api_key=api_key)
    assert target.repository is not None
    return InProcess.load(target.repository)


def needs_text(endpoint: Endpoint) -> bool:
    """Returns whether prompts cannot be sent as token ids; a Triton is asked for its inputs."""
    return isinstance(endpoint, Triton) and not endpoint.takes_token_ids


def _checkpoint(config: PipelineConfig) -> Path:
    """Returns the folder of the target's checkpoint; that of a hub id is what was read of it."""
    folder = config.base_dir / Path(config.target.checkpoint).expanduser()
    if folder.is_dir():
        return folder
    manifests = config.artifacts.side("target").folder.glob(f"*{MANIFEST_SUFFIX}")
    read = (
        Path(record.path)
        for manifest in map(parse_manifest, sorted(manifests))
        if manifest is not None
        for record in manifest.inputs
    )
    return next(
        (
            path.parent
            for path in read
            if path.name == "config.json" and not path.is_relative_to(config.artifacts_dir)
        ),
        folder,
    )


def _licence(config: PipelineConfig) -> Mapping[str, Any]:
    """Returns what is known of the target's licence, as JSON."""
    found = find_licences("target", config.target.checkpoint, _checkpoint(config))
    return {
        "declared": list(found.declared),
        "name": found.name,
        "link": found.link,
        "files": list(found.files),
        "notes": list(found.notes),
    }
