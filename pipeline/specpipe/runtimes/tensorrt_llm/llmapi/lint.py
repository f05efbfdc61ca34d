"""Rules for a pair that TensorRT-LLM's LLM API runs: `model.yaml` and the checkpoints beside it.

Faults would show only when Triton loads the model, after minutes of reading weights; or never,
where it names a folder outside the repository.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specpipe.checkpoints.checkpoint import open_checkpoint
from specpipe.config.document import read_yaml
from specpipe.errors import SpecpipeError
from specpipe.runtimes.tensorrt_llm.llmapi.model_yaml import (
    DRAFT_FOLDER,
    MODEL_YAML,
    SPECULATIVE_CONFIG,
    TARGET_FOLDER,
)

if TYPE_CHECKING:
    from specpipe.runtimes.pair.pair import PairOptions
    from specpipe.runtimes.repository_rule import Repository, ServedPair

_CODE_SUFFIXES = {".py", ".so", ".bin", ".pt", ".pth", ".ckpt", ".pkl"}


def lint(repository: Repository, pair: ServedPair) -> Iterator[str]:
    """Yields the faults of `model.yaml` and of the checkpoints, by the model that has them."""
    path = pair.version / MODEL_YAML
    try:
        arguments = read_yaml(path).data
    except SpecpipeError as exc:
        yield f"{pair.model}: {exc}"
        return
    if not isinstance(arguments, dict):
        yield f"{pair.model}: {path} holds no mapping"
        return
    for fault in (*_limits(pair.options, arguments), *_checkpoints(pair.version, arguments)):
        yield f"{pair.model}: {fault}"


def _limits(options: PairOptions, arguments: dict[str, Any]) -> Iterator[str]:
    """What `pair.json` promises, TensorRT-LLM is started with."""
    drafting = arguments.get(SPECULATIVE_CONFIG) or {}
    for name, given in (
        ("max_batch_size", arguments.get("max_batch_size")),
        ("max_seq_len", arguments.get("max_seq_len")),
        ("num_draft_tokens", drafting.get("max_draft_len", 0)),
    ):
        wanted = getattr(options, name)
        if wanted != given:
            yield f"{MODEL_YAML} says {given} where pair.json has {name} {wanted}"


def _checkpoints(version: Path, arguments: dict[str, Any]) -> Iterator[str]:
    if arguments.get("model") != TARGET_FOLDER:
        yield f"{MODEL_YAML} has model {arguments.get('model')}, not {TARGET_FOLDER}"
    drafting = arguments.get(SPECULATIVE_CONFIG) or {}
    if drafting and DRAFT_FOLDER not in drafting.values():
        yield f"{MODEL_YAML} names another draft in {SPECULATIVE_CONFIG} than {DRAFT_FOLDER}"
    for folder in (version / DRAFT_FOLDER, version / TARGET_FOLDER):
        try:
            open_checkpoint(folder, allow_quantized=True)
        except SpecpipeError as exc:
            yield str(exc)
            continue
        for path in sorted(folder.iterdir()):
            if path.suffix.lower() in _CODE_SUFFIXES:
                yield f"{path} could run code when the checkpoint is loaded: delete it"
