"""`specpipe migrate`: a config for TensorRT-LLM's engines, turned into one for its LLM API.

After 1.2 TensorRT-LLM has no engines any more (docs/source/legacy/tensorrt-backend-removal.md), so
backend `pytorch` is where a pair for backend `tensorrt` goes on.
"""

from __future__ import annotations

import copy
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from specpipe.build.load import load_config, validate
from specpipe.config.document import read_yaml, write_new
from specpipe.config.messages import explain, show
from specpipe.config.sections import PipelineConfig, json_schema
from specpipe.errors import ConfigError
from specpipe.runtimes.tensorrt_llm.formats import FORMATS_READ

_SUFFIX = "-pytorch"

_BUILD_SETTINGS = ("image", "build", "extra_build_args", "parameters", "draft_gpu_ids")

_BEHAVIOUR = (
    "No engine is built: the checkpoints go into the repository, quantized where the config says "
    "so, and TensorRT-LLM loads them when Triton starts, which takes longer than loading engines.",
    "Draft and target run on the same GPUs and are split alike.",
    "Every request drafts speculation.num_draft_tokens in each step: K neither adapts nor drops to "
    "0 under load, and num_draft_tokens in a request is refused unless it is that number.",
    "Greedy output stays that of the target alone. Sampled output with a draft is not lossless in "
    "TensorRT-LLM, so requests with a temperature are refused unless "
    "engine.tensorrt_llm.acceptance is logits.",
    "seed with a temperature, min_p, min_tokens, bad_words and repetition, presence and frequency "
    "penalties are refused by name; TensorRT-LLM would ignore them.",
    "return_log_probs works for greedy requests.",
    "total_draft_tokens and acceptance_rate are counted from the steps unless TensorRT-LLM's "
    "request metrics have them.",
)


@dataclass(frozen=True)
class Migration:
    """A config that was written, and what is to be known about it, as sentences."""

    output: Path
    settings: tuple[str, ...]
    behaviour: tuple[str, ...]


def migrate(path: Path, output: Path | None = None) -> Migration:
    """Writes a config for backend pytorch next to one for backend tensorrt; comments are lost.

    Raises ConfigError where there is nothing to migrate or the file is there already.
    """
    config = load_config(path)
    engine = config.engine
    if engine.runtime != "tensorrt_llm" or engine.tensorrt_llm.backend != "tensorrt":
        used = (
            f"runtime {engine.runtime}"
            if engine.runtime != "tensorrt_llm"
            else f"backend {engine.tensorrt_llm.backend}"
        )
        raise ConfigError(
            f"{path} is for {used}: expected engine.runtime tensorrt_llm with backend tensorrt, "
            "which is what migrates to backend pytorch"
        )
    output = output or path.with_name(f"{path.stem}{_SUFFIX}{path.suffix}")
    data: dict[str, Any] = copy.deepcopy(read_yaml(path).data)
    settings = list(_change(data, config, output))
    try:
        validate(data, output)
    except ValidationError as exc:
        schema = json_schema()
        faults = "; ".join(explain(error, schema) for error in exc.errors(include_url=False))
        raise ConfigError(f"{path} cannot be migrated: {faults}") from None
    text = f"# Made from {path.name} by `specpipe migrate`.\n"
    text += yaml.safe_dump(data, sort_keys=False, allow_unicode=True)
    write_new(output, text)
    return Migration(output, tuple(settings), _BEHAVIOUR)


def _change(data: dict[str, Any], config: PipelineConfig, output: Path) -> list[str]:
    """Changes the settings in place; returns a sentence for each change."""
    sentences = []

    def put(section: dict[str, Any], prefix: str, key: str, value: Any, why: str) -> None:
        before = f"was {show(section[key])}" if key in section else "was not given"
        sentences.append(f"{prefix}{key}: {show(value)}, {before}{why}")
        section[key] = value

    def drop(section: dict[str, Any], prefix: str, key: str, why: str) -> None:
        if key in section:
            del section[key]
            sentences.append(f"{prefix}{key}: left out{why}")

    put(data, "", "name", config.name + _SUFFIX, ", so that both can be built side by side")
    tensorrt_llm = data["engine"].setdefault("tensorrt_llm", {})
    prefix = "engine.tensorrt_llm."
    put(tensorrt_llm, prefix, "backend", "pytorch", "")
    for key in _BUILD_SETTINGS:
        drop(tensorrt_llm, prefix, key, ", since it has no effect with backend pytorch")
    for key in ("tp_size", "pp_size"):
        wanted = getattr(config.target, key)
        if getattr(config.draft, key) != wanted:
            why = ", as the target's: both models are split alike"
            put(data["draft"], "draft.", key, wanted, why)
    for role, checkpoint in (("draft", config.draft), ("target", config.target)):
        scheme = checkpoint.quantization
        if scheme is None:
            continue
        if scheme.format not in FORMATS_READ:
            why = (
                f", since backend pytorch does not read {scheme.format}: the {role} is served as "
                f"its checkpoint is; formats that it reads: {', '.join(FORMATS_READ)}"
            )
            drop(data[role], f"{role}.", "quantization", why)
        else:
            why = ", since backend pytorch serves the exported folder anyway"
            drop(data[role]["quantization"], f"{role}.quantization.", "export", why)
    if (data.get("speculation") or {}).get("adaptive"):
        put(data["speculation"], "speculation.", "adaptive", False, ", since K is fixed")
    drop(data.get("speculation") or {}, "speculation.", "schedule", ", since K is fixed")
    _move_paths(data, config, output)
    return sentences


def _move_paths(data: dict[str, Any], config: PipelineConfig, output: Path) -> None:
    """Keeps folders what they are for a file that lies elsewhere."""
    here = Path(os.path.abspath(output)).parent
    if here == Path(os.path.abspath(config.base_dir)):
        return
    for role in ("draft", "target"):
        checkpoint = Path(data[role]["checkpoint"]).expanduser()
        if not checkpoint.is_absolute() and (config.base_dir / checkpoint).is_dir():
            data[role]["checkpoint"] = os.path.relpath(config.base_dir / checkpoint, here)
    if not config.output_dir.is_absolute():
        data["output_dir"] = os.path.relpath(config.base_dir / config.output_dir, here)
