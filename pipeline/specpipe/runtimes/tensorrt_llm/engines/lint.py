"""Rules for models of the backend `tensorrtllm`: what it ignores without a word, or loads wrongly.

Where the backend's behaviour was read: specpipe.runtimes.tensorrt_llm.engines.contract. Worth
knowing here:

(1) a parameter with a mistyped key, or a value that does not parse, counts as not given;
(2) a KV cache for less than one sequence shortens max_seq_len;
(3) logits of another type than config.pbtxt says fail when they are first asked for;
(4) inputs that another release names otherwise are ignored, as `min_length` is from 0.20 on.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tritonclient.grpc import model_config_pb2 as pb

from specpipe.errors import EngineMismatch, RepositoryError
from specpipe.machine.own_json import read_object
from specpipe.runtimes.config_pbtxt import parameter
from specpipe.runtimes.engine_description import ENGINE_CONFIG
from specpipe.runtimes.engine_limits import limit_faults
from specpipe.runtimes.pair.pair import PairOptions
from specpipe.runtimes.repository_rule import Repository, ServedPair
from specpipe.runtimes.tensorrt_llm.engines import contract
from specpipe.runtimes.tensorrt_llm.engines.engine_config import (
    BuiltEngine,
    pair_faults,
    read_engine,
)

_KNOWN = {known.key: known for known in contract.PARAMETERS}

_PARSERS: dict[str, Callable[[str], Any]] = {
    "bool": contract.BOOLEANS.__getitem__,
    "int": int,
    "float": float,
    "ints": lambda text: [int(number) for number in text.split(",")],
}

_NEEDED = {
    "max_beam_width": ("1", "draft tokens are verified for one beam"),
    "exclude_input_in_output": ("false", "callers count on the prompt where they ask for it"),
    "enable_kv_cache_reuse": ("true", "each step of a pair reads the text again"),
    "kv_cache_onboard_blocks": ("true", "an engine with paged context FMHA does not load else"),
    "decoding_mode": (contract.DECODING_MODE, "another ignores settings of requests"),
    "cross_kv_cache_fraction": ("", "a decoder-only engine does not load else"),
    "sink_token_length": ("", "StreamingLLM is not supported"),
    "encoder_model_path": ("", "the pair has no encoder"),
}
"""The value that a pair works with, and why; an empty one is the default, which will do."""

_MODEL_TYPES = ("inflight_fused_batching", "inflight_batching")


def lint(repository: Repository, pair: ServedPair) -> Iterator[str]:
    """Yields the faults of a repository of engines, by the models that have them."""
    yield from limit_faults(pair)
    for rule in (parameters, engine_files, engine_limits, engine_tensors):
        yield from rule(repository)
    yield from pair_of_engines(repository, pair)


@dataclass(frozen=True)
class _EngineModel:
    """A model of the backend, with what its engine was built from and as."""

    config: pb.ModelConfig
    engine: Path
    built: BuiltEngine
    pretrained: Mapping[str, Any]

    @property
    def name(self) -> str:
        return str(self.config.name)

    def number(self, key: str) -> int | None:
        """A parameter as a number; None where it is not given or, which is said elsewhere, none."""
        text = parameter(self.config, key) or ""
        return int(text) if text.isdecimal() else None


def _configs(repository: Repository) -> Iterator[pb.ModelConfig]:
    for config in repository.models.values():
        if config.backend == contract.BACKEND:
            yield config


def _engines(repository: Repository) -> Iterator[_EngineModel]:
    """Yields the models whose engine can be read; the others are told of by `engine_files`."""
    for config in _configs(repository):
        engine = repository.folder / (parameter(config, "gpt_model_path") or "")
        try:
            built = read_engine(engine)
        except EngineMismatch:
            continue
        facts = read_object(engine / ENGINE_CONFIG)
        yield _EngineModel(config, engine, built, facts["pretrained_config"])


def parameters(repository: Repository) -> Iterator[str]:
    """(1), and values that do not go with drafting."""
    for config in _configs(repository):
        for key in contract.REQUIRED_KEYS:
            if key not in config.parameters:
                yield f"{config.name}: parameter {key} is missing; the backend needs it, if empty"
        for key in sorted(config.parameters):
            value = parameter(config, key) or ""
            yield from (f"{config.name}: {fault}" for fault in _value_faults(key, value))
        model_type = parameter(config, "gpt_model_type")
        if model_type not in _MODEL_TYPES:
            yield (
                f"{config.name}: gpt_model_type is '{model_type or ''}'; it must be "
                f"'{_MODEL_TYPES[0]}'"
            )


def _value_faults(key: str, value: str) -> Iterator[str]:
    known = _KNOWN.get(key)
    if known is None:
        close = difflib.get_close_matches(key, _KNOWN, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        yield f"the backend knows no parameter {key}{hint}"
        return
    if not value:
        return
    if known.kind in _PARSERS:
        try:
            parsed = _PARSERS[known.kind](value)
        except (KeyError, ValueError):
            yield f"{key} is '{value}', which the backend does not read as {_KINDS[known.kind]}"
            return
        value = str(parsed).lower() if known.kind == "bool" else value
    elif known.choices and value not in known.choices:
        yield f"{key} is '{value}'; it must be one of {', '.join(known.choices)}"
        return
    if key in _NEEDED and value != _NEEDED[key][0]:
        needed, reason = _NEEDED[key]
        yield f"{key} is {value}; it must be {needed or 'empty'}, since {reason}"


_KINDS = {"bool": "true or false", "int": "a number", "float": "a number", "ints": "numbers"}


def engine_files(repository: Repository) -> Iterator[str]:
    """The engine is in the repository, and whole: a file for every rank, a GPU for every rank."""
    for config in _configs(repository):
        path = parameter(config, "gpt_model_path") or ""
        relative = Path(path)
        if not path:
            yield f"{config.name}: gpt_model_path is empty; it must name the engine's folder"
        elif relative.is_absolute() or ".." in relative.parts:
            yield f"{config.name}: gpt_model_path '{path}' leads out of the repository"
        else:
            try:
                read_engine(repository.folder / relative)
            except EngineMismatch as exc:
                yield f"{config.name}: {exc}"
    for model in _engines(repository):
        world_size = model.built.world_size
        expected = {f"rank{rank}.engine" for rank in range(world_size)}
        found = {path.name for path in model.engine.glob("rank*.engine")}
        for name in sorted(expected - found):
            yield f"{model.name}: {model.engine / name} is missing"
        for name in sorted(found - expected):
            yield (
                f"{model.name}: {model.engine / name} belongs to no rank; the engine was built for "
                f"{world_size}"
            )
        gpu_ids = parameter(model.config, "gpu_device_ids")
        if gpu_ids and len(gpu_ids.split(",")) != world_size:
            yield (
                f"{model.name}: gpu_device_ids is {gpu_ids}; the engine has {world_size} "
                f"rank{'s' if world_size > 1 else ''}, each of which needs one"
            )


def engine_limits(repository: Repository) -> Iterator[str]:
    """(2), and what the engine's `config.json` says otherwise than its model's config.pbtxt."""
    for model in _engines(repository):
        yield from (f"{model.name}: {fault}" for fault in _limit_faults(model))


def _limit_faults(model: _EngineModel) -> Iterator[str]:
    batch_size, built = model.config.max_batch_size, model.built
    max_seq_len = built.max_seq_len
    if not 1 <= batch_size <= built.max_batch_size:
        yield (
            f"max_batch_size is {batch_size}; it must be 1 to {built.max_batch_size}, which the "
            "engine was built with"
        )
    num_instances = sum(group.count for group in model.config.instance_group)
    if num_instances != 1:
        yield f"instance_group has {num_instances} instances; each would load the engine again"
    tokens = model.number("max_tokens_in_paged_kv_cache")
    if tokens is not None and tokens < max_seq_len:
        yield (
            f"max_tokens_in_paged_kv_cache is {tokens}, less than the {max_seq_len} tokens of one "
            "sequence, which the backend would shorten"
        )
    windows = parameter(model.config, "max_attention_window_size") or ""
    short = [window for window in windows.split(",") if window.isdecimal()]
    if any(int(window) < max_seq_len for window in short):
        yield (
            f"max_attention_window_size is {windows}, less than max_seq_len {max_seq_len}: the KV "
            "cache is not reused past a window; build the engine for shorter sequences"
        )
    window = model.pretrained.get("sliding_window")
    if window is not None and window < max_seq_len:
        yield (
            f"the checkpoint has a sliding window of {window} tokens, but the engine was built "
            f"with max_seq_len {max_seq_len}, and would attend past it; lower engine.max_seq_len"
        )
    is_chunked = contract.BOOLEANS.get(parameter(model.config, "enable_chunked_context") or "")
    if not is_chunked and built.max_num_tokens < max_seq_len:
        yield (
            f"enable_chunked_context is not true, so prompts longer than max_num_tokens "
            f"{built.max_num_tokens} would not run"
        )


def engine_tensors(repository: Repository) -> Iterator[str]:
    """(3) and (4): names and types are those of the release that built the engine."""
    for model in _engines(repository):
        version = model.built.version
        try:
            logits = contract.logits_type(model.built.logits_dtype)
        except RepositoryError as exc:
            yield f"{model.name}: {exc}"
            continue
        for kind, declared, expected in (
            ("input", model.config.input, contract.inputs(version)),
            ("output", model.config.output, contract.outputs(version)),
        ):
            found = {tensor.name: tensor for tensor in declared}
            known = {tensor.name: tensor for tensor in expected}
            for name in sorted(found.keys() - known.keys()):
                yield f"{model.name}: TensorRT-LLM {version} has no {kind} '{name}'"
            for name in sorted(known.keys() - found.keys()):
                yield f"{model.name}: the {kind} '{name}' of TensorRT-LLM {version} is missing"
            for name in sorted(known.keys() & found.keys()):
                dtype = known[name].dtype
                is_logits = dtype == contract.LOGITS
                needed = f"TYPE_{logits if is_logits else dtype}"
                declared_type = pb.DataType.Name(found[name].data_type)
                if declared_type != needed:
                    who = "the engine's logits are" if is_logits else "the backend takes"
                    yield (f"{model.name}: {kind} '{name}' is {declared_type}, but {who} {needed}")


def pair_of_engines(repository: Repository, pair: ServedPair) -> Iterator[str]:
    """What draft and target must be, each and together, and what calls them."""
    engines = {model.name: model for model in _engines(repository)}
    if contract.TARGET not in engines:
        return
    yield from (f"{pair.model}: {fault}" for fault in _pair_faults(pair.options, engines))
    for role, key in contract.MODEL_NAMES.items():
        named = parameter(repository.models[pair.model], key)
        if named not in (None, role):  # None: older releases wrote it without
            yield f"{pair.model}: its {key} is '{named}', expected '{role}'"
    target, caller = engines[contract.TARGET].config, repository.models[pair.model]
    if target.model_transaction_policy.decoupled and not caller.model_transaction_policy.decoupled:
        yield (
            f"{pair.model}: model_transaction_policy.decoupled is false, but it calls "
            f"{contract.TARGET}, where it is true"
        )


def _pair_faults(options: PairOptions, engines: Mapping[str, _EngineModel]) -> Iterator[str]:
    draft, target = engines.get(contract.DRAFT), engines[contract.TARGET]
    if draft is None:
        yield f"it calls the model {contract.DRAFT}, which is not there or has no engine"
        return
    yield from pair_faults(
        draft.built,
        target.built,
        num_draft_tokens=options.num_draft_tokens,
        acceptance=options.runtime_settings["acceptance"],
    )
    for model in (draft, target):
        if model.config.max_batch_size < options.max_batch_size:
            yield (
                f"max_batch_size is {options.max_batch_size}, but the model {model.name} takes "
                f"{model.config.max_batch_size}"
            )
    if draft.config.model_transaction_policy.decoupled:
        yield f"model_transaction_policy.decoupled of {draft.name} is true; its answers come whole"
    length, wanted = draft.built.max_seq_len, options.max_seq_len
    context = draft.pretrained.get("max_position_embeddings") or length
    if length < min(wanted, context):
        yield (
            f"max_seq_len is {wanted}, but the draft engine was built with max_seq_len {length}, "
            "so the draft would stop drafting there; build it with a higher one"
        )
