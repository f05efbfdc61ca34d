"""A pair's YAML from another server's command line, or from the YAML of trtllm-serve."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from specpipe.build.init import as_name
from specpipe.build.migrate import behaviour, reasons
from specpipe.build.migrate.carry import Settings, carry
from specpipe.build.migrate.flags import METHOD, NUM_VERIFIED, Flag
from specpipe.build.migrate.migration import Migration, check, write
from specpipe.build.migrate.server import Given, Server, expand_all, parse, refuse_unknown
from specpipe.build.migrate.sglang import SGLANG
from specpipe.build.migrate.trtllm_serve import TRTLLM_SERVE
from specpipe.build.migrate.vllm import VLLM
from specpipe.config.document import read_yaml
from specpipe.config.engine import ENGINE_SECTIONS
from specpipe.config.sections import PipelineConfig
from specpipe.errors import ConfigError, show
from specpipe.runtimes.runtime import load_runtime

PROGRAMS = {
    "trtllm-serve serve": TRTLLM_SERVE,
    "trtllm-serve": TRTLLM_SERVE,
    "vllm serve": VLLM,
    "python -m vllm.entrypoints.openai.api_server": VLLM,
    "sglang serve": SGLANG,
    "python -m sglang.launch_server": SGLANG,
}
"""What begins a command line, and whose it is."""

_BACKEND = "engine.tensorrt_llm.backend"

_ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=")
_HEEDED = ("CUDA_VISIBLE_DEVICES", "HF_TOKEN", "HF_HOME", "HF_ENDPOINT", "HF_HUB_OFFLINE")


@dataclass(frozen=True)
class Wanted:
    """What the user says beside the command line; none: what follows from it.

    runtime  what serves the pair
    version  the TensorRT-LLM to serve with
    draft    the draft's checkpoint, where the command line has none
    name     the pair's
    output   the file to write
    """

    runtime: str | None = None
    version: str | None = None
    draft: str | None = None
    name: str | None = None
    output: Path | None = None


def from_command_line(words: Sequence[str], wanted: Wanted) -> Migration:
    """Writes a YAML for what a server's command line starts.

    Raises ConfigError for a program, a flag or a value that is not known or cannot be migrated.
    """
    variables, words = _split_environment(words)
    program, server, rest = _find_server(words)
    alone, given = parse(server, rest)
    models = alone if server.takes_model else []
    if len(models) > 1 or (alone and not models):
        raise ConfigError(
            f"{show(alone[-1])} stands alone on the command line: expected "
            + ("one model" if server.takes_model else "flags, the model after --model-path")
        )
    given = _with_file(server, [Given(_MODEL, "the model", model) for model in models] + given)
    settings = carry(given)
    for variable in variables:
        settings.left[variable] = (
            "set it for specpipe, which heeds it, too"
            if variable in _HEEDED
            else f"it is a variable of {server.name}'s environment"
        )
    return _migrate(server, settings, f"a `{program}` command line", wanted)


def from_options(path: Path, model: str, wanted: Wanted) -> Migration:
    """Writes a YAML for a model and a file that `trtllm-serve` has its options from."""
    given = [Given(_MODEL, "--model", model), *_file(TRTLLM_SERVE, path)]
    return _migrate(TRTLLM_SERVE, carry(given), f"{show(path.name)} of `trtllm-serve`", wanted)


_MODEL = Flag(("model",), "text", "target.checkpoint")


def _split_environment(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Returns the names of the variables that stand in front, and the words after them."""
    rest = list(words[1:] if list(words[:1]) == ["env"] else words)
    names = []
    while rest and _ASSIGNMENT.match(rest[0]):
        names.append(show(rest.pop(0).partition("=")[0]))
    return names, rest


def _find_server(words: Sequence[str]) -> tuple[str, Server, Sequence[str]]:
    begins = [re.sub(r"^python[0-9.]*$", "python", Path(word).name) for word in words[:1]]
    begins += words[1:3]
    for count in (3, 2, 1):
        program = " ".join(begins[:count])
        if len(begins) >= count and program in PROGRAMS:
            return program, PROGRAMS[program], words[count:]
    found = show(" ".join(begins)) if begins else "nothing"
    raise ConfigError(f"{found}: expected a command line of {', '.join(PROGRAMS)}")


def _with_file(server: Server, given: list[Given]) -> list[Given]:
    """Puts what the command line's YAML holds among its flags, before or after them."""
    names = [one for one in given if server.file_flag in one.flag.names]
    if not names:
        return given
    rest = [one for one in given if server.file_flag not in one.flag.names]
    inside = _file(server, Path(names[-1].value))
    return [*rest, *inside] if server.file_wins else [*inside, *rest]


def _file(server: Server, path: Path) -> list[Given]:
    data = read_yaml(path, number_keys=True).data
    if not isinstance(data, (dict, type(None))):
        raise ConfigError(f"{path} holds no settings: expected keys with values")
    unknown: list[str] = []
    given = list(expand_all(server.file_keys or _as_keys(server.flags), data or {}, unknown))
    refuse_unknown(server.source, unknown)
    return [replace(one, name=f"{one.name} in {path.name}") for one in given]


def _as_keys(flags: Sequence[Flag]) -> tuple[Flag, ...]:
    """Returns flags as a YAML has them: without their dashes, and with either sign inside."""
    keys = []
    for flag in flags:
        bare = [name.lstrip("-") for name in flag.names if name.startswith("--")]
        both = dict.fromkeys([*bare, *(name.replace("-", "_") for name in bare)])
        keys.append(replace(flag, names=tuple(both)))
    return tuple(keys)


def _migrate(server: Server, settings: Settings, source: str, wanted: Wanted) -> Migration:
    runtime = wanted.runtime or server.runtime
    if wanted.version is not None and runtime != "tensorrt_llm":
        raise ConfigError(
            f"--to has no effect with runtime {runtime}: it is TensorRT-LLM's release"
        )
    _settle_models(server, settings, wanted)
    _settle_drafting(server, settings, runtime)
    _settle_runtime(settings, runtime, wanted.version)
    output = _settle_name(settings, wanted)
    for role in ("draft", "target"):
        key = f"{role}.checkpoint"
        settings.values[key] = _from_output(settings.values[key], output)
    data = _nested(settings.values, runtime)
    config = check(data, output, source, settings.names)
    told = dict(settings.sections())
    comment = f"Made from {source} by `specpipe migrate`."
    if settings.left:
        comment += f"\nNot carried: {', '.join(name.split()[0] for name in settings.left)}."
    write(yaml.safe_dump(data, sort_keys=False, allow_unicode=True), output, comment)
    told["behaviour"] = behaviour.SERVED_BY_TRITON + _behaviour(config)
    return Migration(output, told)


def _behaviour(config: PipelineConfig) -> tuple[str, ...]:
    engine = config.engine
    if load_runtime(engine.runtime).runs_own_loop:
        return behaviour.OWN_LOOP
    if engine.runtime == "tensorrt_llm" and engine.tensorrt_llm.backend == "pytorch":
        return behaviour.of_backend_pytorch(engine.tensorrt_llm.version)
    return ()


def _settle_models(server: Server, settings: Settings, wanted: Wanted) -> None:
    """Leaves a target, a draft and a method; raises ConfigError where one of them is not said."""
    values = settings.values
    if "target.checkpoint" not in values:
        raise ConfigError(f"the command line of {server.name} names no model")
    drafts = METHOD in values or "draft.checkpoint" in values
    if drafts and server.method_flag and METHOD not in values:
        raise ConfigError(
            f"{settings.names['draft.checkpoint']} is there without {server.method_flag}, and "
            f"{server.name} would not draft: add it"
        )
    if wanted.draft is not None:
        if "draft.checkpoint" in values:
            raise ConfigError(
                f"--draft is {show(wanted.draft)}, and there is "
                f"{settings.names['draft.checkpoint']}: leave --draft away"
            )
        settings.put("draft.checkpoint", wanted.draft, f"--draft {show(wanted.draft)}")
    if "draft.checkpoint" not in values:
        raise ConfigError(
            f"{server.name} is told of no draft model, and specpipe runs pairs: name one with "
            "--draft"
        )


def _settle_drafting(server: Server, settings: Settings, runtime: str) -> None:
    """Turns the method, and what is said of the draft in the target's terms, into settings."""
    values, names = settings.values, settings.names
    if METHOD in values:
        name = names[METHOD]
        if values[METHOD] == "draft_model":
            settings.same[name] = "a draft model proposes tokens"
        elif load_runtime(runtime).runs_own_loop:
            why = "which copies where a text repeats itself; else the draft model drafts"
            settings.put("speculation.prompt_lookup", True, name, why)
        else:
            settings.left[name] = f"runtime {runtime} has no prompt lookup: --runtime torch has"
        for of_method in (values, names, settings.notes):
            del of_method[METHOD]
    if NUM_VERIFIED in values:
        count, name = values[NUM_VERIFIED], names[NUM_VERIFIED]
        settings.leave(NUM_VERIFIED, "it is one more than what is drafted")
        if "speculation.num_draft_tokens" not in values:
            del settings.left[name]
            why = "since it counts the token before the draft, too"
            settings.put("speculation.num_draft_tokens", count - 1, name, why)
    for size in ("tp_size", "pp_size"):
        of_target, of_draft = f"target.{size}", f"draft.{size}"
        if values.get(of_target, 1) != 1 and of_draft not in values:
            why = f"since {server.name} splits the draft alike"
            settings.put(of_draft, values[of_target], names[of_target], why)


def _settle_runtime(settings: Settings, runtime: str, version: str | None) -> None:
    """Leaves out what the runtime has no setting for, and adds what it must be told."""
    values = settings.values
    known = ENGINE_SECTIONS[runtime].model_fields
    for key in [key for key in values if key.startswith("engine.")]:
        if key.split(".")[1] not in known:
            settings.leave(key, f"it has no effect with runtime {runtime}")
    if "target.quantization.format" not in values:
        settings.leave_out("target.quantization.kv_cache", reasons.FP8_CACHE)
    if runtime == "tensorrt_llm":
        values.setdefault(_BACKEND, "pytorch")
    if version is not None:
        settings.put("engine.tensorrt_llm.version", version, f"--to {show(version)}")


def _settle_name(settings: Settings, wanted: Wanted) -> Path:
    """Leaves a name, and returns the file to write."""
    values = settings.values
    if wanted.name is not None:
        settings.leave_out("name", "--name is there")
        settings.put("name", wanted.name, f"--name {show(wanted.name)}")
    elif "name" in values:
        first = values["name"][0] if isinstance(values["name"], list) else values["name"]
        values["name"] = as_name(str(first))
    else:
        values["name"] = as_name(Path(values["target.checkpoint"]).name)
    return wanted.output or Path(f"{values['name']}.yaml")


def _from_output(checkpoint: str, output: Path) -> str:
    """Returns a checkpoint as it is called in the YAML: folders are relative to that."""
    path = Path(checkpoint).expanduser()
    if path.is_absolute() or not os.path.isdir(path):  # False also for a name that no file can have
        return checkpoint
    return os.path.relpath(path, Path(os.path.abspath(output)).parent)


def _nested(values: dict[str, Any], runtime: str) -> dict[str, Any]:
    data: dict[str, Any] = {
        "name": values["name"],
        "draft": {"checkpoint": values["draft.checkpoint"]},
        "target": {"checkpoint": values["target.checkpoint"]},
        "speculation": {},
        "engine": {"runtime": runtime},
    }
    for key, value in values.items():
        *sections, last = key.split(".")
        section = data
        for name in sections:
            section = section.setdefault(name, {})
        section[last] = value
    return {key: value for key, value in data.items() if value != {}}
