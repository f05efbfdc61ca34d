"""A whole Triton repository, movable: hand-written models, their configs, engines and tokenizer.

ensemble/       config.pbtxt  1/
preprocessing/  config.pbtxt  1/model.py  1/tokenizer/  1/limits.json
speculative/    config.pbtxt  1/model.py  1/tokenizer/  1/limits.json  1/draft/  1/target/
                1/pair.json
postprocessing/ config.pbtxt  1/model.py
"""

from __future__ import annotations

import dataclasses
import gc
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specpipe.checkpoints.files import copy_file, is_there
from specpipe.config.limits import Limits, ServedLimits
from specpipe.errors import RepositoryError
from specpipe.machine.own_json import read_object, reason
from specpipe.progress import shown
from specpipe.runtimes import config_pbtxt
from specpipe.runtimes.pair.pair import DetokenizerFactory, Pair
from specpipe.runtimes.pair_file import PairFile
from specpipe.runtimes.repository_layout import PREPROCESSING, SPECULATIVE, VERSION
from specpipe.runtimes.runtime import load_runtime
from specpipe.speculative.guide import Guides
from specpipe.text.files import TOKENIZER_FILES
from specpipe.text.tokenizer import Tokenizer
from specpipe.triton import model_config
from specpipe.triton.load_progress import LoadProgress
from specpipe.triton.model_config import (
    CALLS_SUFFIX,
    DRAFT_ENGINE_DIR,
    LIMITS_FILE,
    PAIR_FILE,
    TARGET_ENGINE_DIR,
    TOKENIZER_DIR,
)


def write(
    out: Path,
    *,
    models: Path,
    draft_engine: Path,
    target_engine: Path,
    tokenizer: Path,
    pair: PairFile,
    limits: Limits | None = None,
    num_preprocessing: int = 1,
) -> None:
    """Writes the repository into `out`, an empty folder; `models` holds the hand-written models.

    limits are those of requests, None: the defaults. num_preprocessing is how many processes
    tokenize. The runtime adds the engines, and models of its own.
    """
    for config in model_config.model_configs(num_preprocessing=num_preprocessing):
        version = out / config.name / VERSION
        version.mkdir(parents=True)
        (out / config.name / "config.pbtxt").write_text(
            config_pbtxt.to_text(config), encoding="utf-8"
        )
        if config.backend == "python":
            shutil.copyfile(models / config.name / VERSION / "model.py", version / "model.py")
    served = _served_limits(tokenizer, limits or Limits(), pair.options.max_seq_len)
    for model in (PREPROCESSING, SPECULATIVE):
        folder = out / model / VERSION / "tokenizer"
        folder.mkdir()
        for name in TOKENIZER_FILES:
            if is_there(tokenizer / name):
                copy_file(tokenizer / name, folder / name)
        (out / model / VERSION / "limits.json").write_text(served, encoding="utf-8")
    speculative = out / SPECULATIVE / VERSION
    load_runtime(pair.runtime).write_models(
        out, draft_engine=draft_engine, target_engine=target_engine, options=pair.options
    )
    (speculative / "pair.json").write_text(pair.to_json(), encoding="utf-8")


def _served_limits(folder: Path, limits: Limits, max_seq_len: int) -> str:
    tokenizer = Tokenizer.load(folder, limits)
    served = limits.resolved(
        max_seq_len=max_seq_len,
        longest_token_bytes=tokenizer.longest_token_bytes,
        is_bytewise=tokenizer.is_bytewise,
    )
    return served.model_dump_json(indent=2) + "\n"


def parameter_path(arguments: Mapping[str, str], name: str) -> Path:
    """Returns a file or folder that a model's config names; `arguments` are those of `initialize`.

    It is relative to the version's folder, wherever the repository lies now.
    """
    config: dict[str, Any] = json.loads(arguments["model_config"])
    relative: str = config["parameters"][name]["string_value"]
    return Path(arguments["model_repository"], arguments["model_version"], relative)


def read_pair_file(arguments: Mapping[str, str]) -> PairFile:
    """Reads the `pair.json` that the `speculative` model's config names."""
    return PairFile.read(parameter_path(arguments, PAIR_FILE))


def load_pair(
    arguments: Mapping[str, str],
    pair: PairFile,
    detokenizer: DetokenizerFactory,
    guides: Guides | None = None,
) -> Pair:
    """Loads the engines of the `speculative` model with the runtime that `pair.json` names.

    Models that it calls are among the settings, under the names of the parameters.
    """
    parameters: dict[str, Any] = json.loads(arguments["model_config"])["parameters"]
    called = {
        key: value["string_value"]
        for key, value in parameters.items()
        if key.endswith(CALLS_SUFFIX)
    }
    settings = {**pair.options.runtime_settings, **called}
    with shown(LoadProgress()):
        loaded = load_runtime(pair.runtime).load_pair(
            parameter_path(arguments, DRAFT_ENGINE_DIR),
            parameter_path(arguments, TARGET_ENGINE_DIR),
            dataclasses.replace(pair.options, runtime_settings=settings),
            detokenizer,
            guides,
        )
    gc.freeze()  # it stays: to look for garbage among it would hold up all requests
    return loaded


def load_tokenizer(repository: Path) -> Tokenizer:
    """Loads the tokenizer of a repository, within the limits that the pair was built with."""
    version = repository / SPECULATIVE / VERSION
    return Tokenizer.load(version / "tokenizer", _parse_limits(version / "limits.json"))


def load_limits(repository: Path) -> ServedLimits:
    """Loads the limits that a repository was built with."""
    return _parse_limits(repository / PREPROCESSING / VERSION / "limits.json")


def read_limits(arguments: Mapping[str, str]) -> ServedLimits:
    """Reads the limits that a model's config names."""
    return _parse_limits(parameter_path(arguments, LIMITS_FILE))


def _parse_limits(path: Path) -> ServedLimits:
    try:
        return ServedLimits.model_validate(read_object(path))
    except (OSError, ValueError) as exc:
        raise RepositoryError(f"{path} cannot be read ({reason(exc)}): build again") from exc


def tokenizer_folder(arguments: Mapping[str, str]) -> Path:
    """Returns the folder of the tokenizer that a model's config names."""
    return parameter_path(arguments, TOKENIZER_DIR)
