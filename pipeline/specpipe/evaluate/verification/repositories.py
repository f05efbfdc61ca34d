"""Repositories for verification: the artifact's own, changed in what a control asks for.

All but the small files are links to the artifact's own.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specpipe.errors import RuntimeUnavailable
from specpipe.roles import Role
from specpipe.runtimes.pair.pair import PairOptions
from specpipe.runtimes.pair_file import PairFile, read_pair
from specpipe.runtimes.repository_layout import SPECULATIVE, VERSION, link_folder
from specpipe.triton.repository.contents import write

if TYPE_CHECKING:
    from specpipe.config.sections import PipelineConfig

VOCAB_SIZE = "vocab_size"
"""A parameter of the draft that is always wrong: how many ids there are."""

_PAIR = Path(SPECULATIVE, VERSION, "pair.json")
_DRAFT: Role = "draft"
_WRONG_DRAFT = "from specpipe.evaluate.verification.wrong_draft import TritonPythonModel\n"


def as_asked(options: PairOptions) -> PairOptions:
    """Returns the options under which the draft drafts what a request asks for, whatever pays."""
    return dataclasses.replace(options, adaptive=False, schedule=(), prompt_lookup=False)


def write_as_asked(repository: Path, out: Path) -> Path:
    """Writes a repository like this one whose K is as asked, and drafted by the draft."""
    return write_with(repository, out, as_asked(read_pair(repository).options))


def write_with(repository: Path, out: Path, options: PairOptions) -> Path:
    """Writes a repository like this one, whose pair serves by other options."""
    link_folder(repository, out)
    _rewrite(out / _PAIR, PairFile(read_pair(repository).runtime, options).to_json())
    return out


def write_own_draft(repository: Path, out: Path) -> Path:
    """Writes a repository in which the target is its own draft.

    What the runtime's settings say of the draft is then what they say of the target.
    """
    pair = read_pair(repository)
    settings = pair.options.runtime_settings
    options = dataclasses.replace(
        as_asked(pair.options),
        runtime_settings={**settings, **_settings_of_target(settings)},
        parallel=None,  # the target knows no masks
    )
    return _write(repository, out, PairFile(pair.runtime, options), draft="target")


def write_wrong_draft(repository: Path, out: Path) -> Path:
    """Writes a repository whose draft is always wrong, for pairs that ask a Triton model `draft`.

    The engine stays where it is, and is not loaded.
    """
    if not (repository / _DRAFT / "config.pbtxt").is_file():
        raise RuntimeUnavailable(
            "its library drafts by itself, and takes no draft tokens from elsewhere"
        )
    from specpipe.runtimes.config_pbtxt import read_config, to_text

    write_as_asked(repository, out)
    described = repository / SPECULATIVE / VERSION / _DRAFT / "config.json"
    vocab_size = json.loads(described.read_bytes())["pretrained_config"]["vocab_size"]
    config = read_config(out / _DRAFT / "config.pbtxt")
    config.backend = "python"
    config.ClearField("parameters")
    config.parameters[VOCAB_SIZE].string_value = str(vocab_size)
    _rewrite(out / _DRAFT / "config.pbtxt", to_text(config))
    _rewrite(out / _DRAFT / VERSION / "model.py", _WRONG_DRAFT)
    return out


def write_without_draft(config: PipelineConfig, repository: Path, out: Path) -> Path:
    """Writes a repository with the target alone, for pairs that draft in every step."""
    from specpipe.build import planning

    alone = config.speculation.model_copy(
        update={"num_draft_tokens": 0, "adaptive": False, "schedule": (), "prompt_lookup": False}
    )
    package = planning.plan(config.model_copy(update={"speculation": alone}))[-1].stage
    settings = package.inputs().settings["runtime_settings"]
    pair = read_pair(repository)
    options = dataclasses.replace(
        as_asked(pair.options), num_draft_tokens=0, runtime_settings=settings
    )
    return _write(repository, out, PairFile(pair.runtime, options), draft="draft")


def _write(repository: Path, out: Path, pair: PairFile, *, draft: Role) -> Path:
    out.mkdir()
    write(
        out,
        models=repository,
        draft_engine=_engine(repository, draft),
        target_engine=_engine(repository, "target"),
        tokenizer=repository / SPECULATIVE / VERSION / "tokenizer",
        pair=pair,
    )
    return out


def _engine(repository: Path, role: Role) -> Path:
    """Returns the engine of one side: in a Triton model of its own, or in `speculative`."""
    of_model = sorted((repository / role / VERSION).glob("*/config.json"))
    return of_model[0].parent if of_model else repository / SPECULATIVE / VERSION / role


def _settings_of_target(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what a runtime's settings say of the target, under the names of the draft."""
    return {
        f"draft_{name.removeprefix('target_')}": value
        for name, value in settings.items()
        if name.startswith("target_") and f"draft_{name.removeprefix('target_')}" in settings
    }


def _rewrite(path: Path, text: str) -> None:
    """Puts a text where a link may be, whose file is the artifact's own."""
    path.unlink(missing_ok=True)
    path.write_text(text, encoding="utf-8")
