"""A config for TensorRT-LLM's engines, turned into one for its LLM API.

After 1.2 TensorRT-LLM has no engines any more (docs/source/legacy/tensorrt-backend-removal.md), so
backend `pytorch` is where a pair for backend `tensorrt` goes on.
"""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

from specpipe.build.load import load_config
from specpipe.build.migrate import behaviour
from specpipe.build.migrate.migration import Migration, check, write
from specpipe.config.document import read_yaml
from specpipe.config.messages import show
from specpipe.config.rewriting import rewritten
from specpipe.config.sections import PipelineConfig
from specpipe.errors import ConfigError
from specpipe.runtimes.tensorrt_llm.formats import FORMATS_READ

_SUFFIX = "-pytorch"

_BUILD_SETTINGS = ("image", "build", "extra_build_args", "parameters", "draft_gpu_ids")


def from_engines(path: Path, output: Path | None = None, version: str | None = None) -> Migration:
    """Writes a config for backend pytorch next to one for backend tensorrt, comments and all.

    `version` is the TensorRT-LLM to serve with; none: the one that the config has. Raises
    ConfigError where there is nothing to migrate or the file is there already.
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
    served = version or engine.tensorrt_llm.version
    is_one_engine = behaviour.is_one_engine(served)
    settings = tuple(change(data, config, output, version, is_one_engine=is_one_engine))
    names = {} if version is None else {"engine.tensorrt_llm.version": f"--to {show(version)}"}
    check(data, output, str(path), names)
    text = rewritten(path.read_bytes().decode(), data, origin=str(path))
    write(text, output, f"Made from {path.name} by `specpipe migrate`.")
    told = behaviour.of_backend_pytorch(served)
    return Migration(output, {"settings": settings, "behaviour": told})


def change(
    data: dict[str, Any],
    config: PipelineConfig,
    output: Path,
    version: str | None = None,
    *,
    is_one_engine: bool = False,
) -> list[str]:
    """Changes the settings in place; returns a sentence for each change.

    `is_one_engine` says that the draft runs inside the target's engine with the new `version`.
    """
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
    if version is not None:
        put(tensorrt_llm, prefix, "version", version, ", as --to says")
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
    draft, target = config.draft.quantization, config.target.quantization
    is_read = "quantization" in data["draft"]  # a format that is not read is gone by now
    if is_one_engine and is_read and draft and target and draft.kv_cache != target.kv_cache:
        why = ", as the target's: both models share its format"
        put(data["draft"]["quantization"], "draft.quantization.", "kv_cache", target.kv_cache, why)
    if (data.get("speculation") or {}).get("adaptive"):
        put(data["speculation"], "speculation.", "adaptive", False, ", since K is fixed")
    if not is_one_engine:
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
