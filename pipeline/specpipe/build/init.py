"""`specpipe init`: a commented YAML for a pair, written only when the pair fits."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import yaml

from specpipe.build.pairing import PairContract, check_pair
from specpipe.build.planning import DEFAULT_MAX_SEQ_LEN, check_architecture, check_weights
from specpipe.checkpoints import source
from specpipe.checkpoints.source import Source
from specpipe.config.document import write_new
from specpipe.config.sections import NAME_PATTERN, SpeculationConfig
from specpipe.errors import ConfigError
from specpipe.roles import Role

_TEMPLATE = """\
# A draft-target pair for specpipe; `specpipe schema` describes every setting.
# Paths are relative to this file. What is commented out has its default.
name: {name}

# Proposes tokens.
draft:
{draft}
# Verifies them; the output is what this model alone would have produced.
target:
{target}
speculation:
  # Draft tokens per step (K); a request may ask for fewer. 0: the target model alone.
  num_draft_tokens: {num_draft_tokens}
  # Each request's K follows its own acceptance, so that a poor draft costs little.
  # adaptive: true
  # Requests copy draft tokens from their own texts where these repeat themselves.
  # prompt_lookup: false

engine:
  # The library that builds and runs the engines.
  runtime: torch
  # Requests that run at once; more wait in the queue.
  max_batch_size: 8
  # Tokens of prompt and answer together; the target's context is {context}.
  max_seq_len: {max_seq_len}
  # Tokens of all requests that one forward takes; longer prompts are prefilled in chunks.
  # max_num_tokens: 256
  # auto: float32 on a CPU, the checkpoint's own on a GPU.
  # dtype: auto
  # auto: the GPU where there is one.
  # device: auto

# serving:
#   Requests that may wait; one more is refused.
#   max_queue_size: 128
#   Seconds from arrival to the last token.
#   request_timeout_s: 600

# Where the artifacts go, under a folder of the pair's name.
# output_dir: engines
"""


def write_config(
    draft: str, target: str, *, output: Path | None = None, name: str | None = None
) -> Path:
    """Checks a pair by its small files and writes a YAML for it; returns the file.

    `draft` and `target` are folders, relative to the working directory, or hub ids; hub ids are
    written with the commit that they stand for now.
    """
    if name is not None and not re.fullmatch(NAME_PATTERN, name):
        raise ConfigError(
            f"--name {name}: expected letters, digits, '.', '_' and '-', a letter or digit first"
        )
    sources = {
        role: source.resolve(checkpoint, revision=None, base=Path.cwd(), role=role, weights=False)
        for role, checkpoint in _by_role(draft, target).items()
    }
    for role, resolved in sources.items():
        if resolved.revision is None:
            check_weights(role, resolved.path)
        check_architecture(role, resolved.path)
    contract = check_pair(sources["draft"].path, sources["target"].path)
    name = name or _name(sources["target"])
    path = output or Path(f"{name}.yaml")
    folder = Path(os.path.abspath(path)).parent
    text = _TEMPLATE.format(
        name=_scalar(name),
        num_draft_tokens=_num_draft_tokens(contract),
        draft=_checkpoint(sources["draft"], folder),
        target=_checkpoint(sources["target"], folder),
        context=contract.target_max_seq_len,
        max_seq_len=min(contract.target_max_seq_len, DEFAULT_MAX_SEQ_LEN),
    )
    write_new(path, text)
    return path


def _num_draft_tokens(contract: PairContract) -> int:
    """Returns the default, or what a draft was trained to propose in one pass."""
    trained = None if contract.parallel is None else contract.parallel.num_draft_tokens
    return SpeculationConfig().num_draft_tokens if trained is None else trained


def _by_role(draft: str, target: str) -> dict[Role, str]:
    return {"draft": draft, "target": target}


def _name(target: Source) -> str:
    """Returns the name of the target's repository or folder, or of the folder around `target/`."""
    folder = target.path.parent if target.path.name == "target" else target.path
    name = folder.name if target.revision is None else target.name.rpartition("/")[2]
    return as_name(name)


def as_name(text: str) -> str:
    """Returns a text as the name of a pair, without the characters that a name cannot have."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).lstrip("._-") or "pair"


def _checkpoint(resolved: Source, folder: Path) -> str:
    if resolved.revision is not None:
        return f"  checkpoint: {_scalar(resolved.name)}\n  revision: {_scalar(resolved.revision)}\n"
    return f"  checkpoint: {_scalar(os.path.relpath(resolved.path, folder))}\n"


def _scalar(text: str) -> str:
    """Returns text as YAML, in quotes where it would not come back as it is."""
    try:
        is_plain = yaml.safe_load(f"k: {text}") == {"k": text} and text.isprintable()
    except yaml.YAMLError:
        is_plain = False
    return text if is_plain else json.dumps(text)
