"""Rules for a pair that TensorRT-LLM's LLM API runs: `model.yaml` and the checkpoints beside it.

Faults would show only when Triton loads the model, after minutes of reading weights; or never,
where it names a folder outside the repository.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from specpipe.checkpoints.checkpoint import open_checkpoint
from specpipe.config.document import read_yaml
from specpipe.errors import SpecpipeError
from specpipe.runtimes.config_pbtxt import parameter
from specpipe.runtimes.pair_file import PairFile
from specpipe.runtimes.repository_layout import PAIR_FILE
from specpipe.runtimes.repository_rule import Repository, Rule
from specpipe.runtimes.tensorrt_llm.llmapi.model_yaml import (
    DRAFT_FOLDER,
    MODEL_YAML,
    SPECULATIVE_CONFIG,
    TARGET_FOLDER,
)

_CODE_SUFFIXES = {".py", ".so", ".bin", ".pt", ".pth", ".ckpt", ".pkl"}


def has_model_yaml(version: Path) -> bool:
    """Says whether a version folder holds such a pair, which has no engines."""
    return (version / MODEL_YAML).is_file()


def _model_yaml(repository: Repository) -> Iterator[str]:
    for name, config in repository.models.items():
        version, pair = repository.version_folder(name), parameter(config, PAIR_FILE)
        if pair is None or not has_model_yaml(version):
            continue
        try:
            arguments = read_yaml(version / MODEL_YAML).data
            options = asdict(PairFile.read(version / pair).options)
        except SpecpipeError as exc:
            yield f"{name}: {exc}"
            continue
        if not isinstance(arguments, dict):
            yield f"{name}: {version / MODEL_YAML} holds no mapping"
            continue
        for fault in (*_limits(options, arguments), *_checkpoints(version, arguments)):
            yield f"{name}: {fault}"


def _limits(options: dict[str, Any], arguments: dict[str, Any]) -> Iterator[str]:
    """What `pair.json` promises, TensorRT-LLM is started with."""
    drafting = arguments.get(SPECULATIVE_CONFIG) or {}
    for name, given in (
        ("max_batch_size", arguments.get("max_batch_size")),
        ("max_seq_len", arguments.get("max_seq_len")),
        ("num_draft_tokens", drafting.get("max_draft_len", 0)),
    ):
        if options.get(name) != given:
            yield f"{MODEL_YAML} says {given} where pair.json has {name} {options.get(name)}"


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


RULES: tuple[Rule, ...] = (_model_yaml,)
