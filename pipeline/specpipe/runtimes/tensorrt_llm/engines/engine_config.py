"""What `trtllm-build` wrote beside an engine, and whether a pair can run with it.

The builder switches off what it finds impossible with only a warning, so an engine that was built
need not be one that verifies draft tokens: that is read here, from `config.json`.

Source: TensorRT-LLM, builder.py (EngineConfig.to_dict, ConfigEncoder, build). BuildConfig became a
pydantic model late in 1.x; whether that changed how enums are written was not seen, so numbers and
names of the speculation mode are both read.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from specpipe.errors import EngineBuildError, EngineMismatch
from specpipe.roles import Role
from specpipe.runtimes.engine_description import ENGINE_CONFIG

FACTS_NAME = "specpipe.json"
"""What the engine was built with; serving compares it with what would run the engine."""

_MODES: Mapping[int | str, str] = {
    1: "none",
    2: "draft_tokens_external",
    4: "medusa",
    8: "lookahead_decoding",
    16: "explicit_draft_tokens",
    32: "eagle",
}
"""The bits of SpeculativeDecodingMode."""


@dataclass(frozen=True, kw_only=True)
class BuiltEngine:
    """The facts of an engine's config.json.

    max_seq_len       tokens of prompt and answer; the target's include max_draft_len
    num_rank_files    how many `rank{i}.engine` there are, counted from 0 without a gap
    """

    version: str
    architecture: str
    vocab_size: int
    logits_dtype: str
    quant_algo: str | None
    kv_cache_quant_algo: str | None
    tp_size: int
    pp_size: int
    world_size: int
    num_rank_files: int
    max_batch_size: int
    max_input_len: int
    max_seq_len: int
    max_num_tokens: int
    max_beam_width: int
    max_draft_len: int
    speculative_decoding_mode: str
    kv_cache_type: str
    tokens_per_block: int
    use_paged_context_fmha: bool
    gather_context_logits: bool
    gather_generation_logits: bool


def read_engine(folder: Path) -> BuiltEngine:
    """Reads an engine's config.json; raises EngineMismatch where it is none of TensorRT-LLM's."""
    path = folder / ENGINE_CONFIG
    try:
        config = json.loads(path.read_bytes())
        pretrained, build = config["pretrained_config"], config["build_config"]
        mapping, plugins = pretrained["mapping"], build["plugin_config"]
        quantization = pretrained.get("quantization") or {}
        return BuiltEngine(
            version=str(config["version"]),
            architecture=str(pretrained["architecture"]),
            vocab_size=int(pretrained["vocab_size"]),
            logits_dtype=str(pretrained["logits_dtype"]),
            quant_algo=quantization.get("quant_algo"),
            kv_cache_quant_algo=quantization.get("kv_cache_quant_algo"),
            tp_size=int(mapping["tp_size"]),
            pp_size=int(mapping["pp_size"]),
            world_size=int(mapping["world_size"]),
            num_rank_files=_num_rank_files(folder),
            max_batch_size=int(build["max_batch_size"]),
            max_input_len=int(build["max_input_len"]),
            max_seq_len=int(build["max_seq_len"]),
            max_num_tokens=int(build["max_num_tokens"]),
            max_beam_width=int(build["max_beam_width"]),
            max_draft_len=int(build["max_draft_len"]),
            speculative_decoding_mode=_mode(build["speculative_decoding_mode"]),
            kv_cache_type=str(build["kv_cache_type"]).rpartition(".")[2].upper(),
            tokens_per_block=int(plugins["tokens_per_block"]),
            use_paged_context_fmha=bool(plugins["use_paged_context_fmha"]),
            gather_context_logits=bool(build["gather_context_logits"]),
            gather_generation_logits=bool(build["gather_generation_logits"]),
        )
    except FileNotFoundError as exc:
        raise EngineMismatch(f"{folder} has no {ENGINE_CONFIG}: build the engine again") from exc
    except KeyError as exc:
        raise EngineMismatch(
            f"{path} has no {exc.args[0]}, so it is not that of a TensorRT-LLM engine: "
            "build the engine again"
        ) from exc
    except (ValueError, TypeError, AttributeError) as exc:
        raise EngineMismatch(f"{path} cannot be read ({exc}): build the engine again") from exc


def _mode(value: Any) -> str:
    """The bit, its name, or the enum as Python prints it."""
    if isinstance(value, int):
        return _MODES.get(value, str(value))
    return str(value).rpartition(".")[2].lower()


def _num_rank_files(folder: Path) -> int:
    rank = 0
    while (folder / f"rank{rank}.engine").is_file():
        rank += 1
    return rank


AcceptTest = Literal["exact", "logits"]


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What an engine was ordered with.

    max_seq_len       tokens of prompt and answer
    num_draft_tokens  that the target verifies at once; 0 for a draft
    """

    role: Role
    version: str
    world_size: int
    vocab_size: int
    quant_algo: str | None
    kv_cache_quant_algo: str | None
    max_batch_size: int
    max_seq_len: int
    num_draft_tokens: int
    logits_dtype: str
    acceptance: AcceptTest


def check_built(folder: Path, wanted: Wanted) -> BuiltEngine:
    """Returns the facts of a new engine; raises EngineBuildError with all that a pair cannot use.

    A line for each fault, with the setting to change.
    """
    try:
        engine = read_engine(folder)
    except EngineMismatch as exc:
        raise EngineBuildError(f"{wanted.role}: trtllm-build ended well, but {exc}") from exc
    faults = [*_order_faults(engine, wanted), *_role_faults(engine, wanted)]
    if faults:
        lines = "".join(f"\n  - {fault}" for fault in faults)
        raise EngineBuildError(
            f"{wanted.role}: trtllm-build ended well, but its engine cannot be used:{lines}"
        )
    return engine


def check_engines(
    draft: Path, target: Path, *, num_draft_tokens: int, acceptance: AcceptTest
) -> None:
    """Raises EngineMismatch, a line for each fault, when two engines cannot run as a pair.

    num_draft_tokens  what a request may ask for at most
    """
    engines = {"draft": read_engine(draft), "target": read_engine(target)}
    faults = [
        f"{role}: {fault}" for role, built in engines.items() for fault in _file_faults(built)
    ]
    faults += pair_faults(**engines, num_draft_tokens=num_draft_tokens, acceptance=acceptance)
    if faults:
        lines = "".join(f"\n  - {fault}" for fault in faults)
        raise EngineMismatch(f"the engines {draft} and {target} cannot run as a pair:{lines}")


def pair_faults(
    draft: BuiltEngine, target: BuiltEngine, *, num_draft_tokens: int, acceptance: AcceptTest
) -> Iterator[str]:
    """Yields what keeps two engines from running as a pair, whether their files are there or not.

    num_draft_tokens  what a request may ask for at most
    """
    for role, engine in (("draft", draft), ("target", target)):
        for fault in _drafting_faults(engine, acceptance):
            yield f"{role}: {fault}"
    for fault in _speculation_faults("draft", draft, 0):
        yield f"draft: {fault}"
    for fault in _speculation_faults("target", target, num_draft_tokens):
        yield f"target: {fault}"
    yield from _agreement_faults(draft, target, acceptance)


def _order_faults(engine: BuiltEngine, wanted: Wanted) -> Iterator[str]:
    role = wanted.role
    if engine.version != wanted.version:
        yield (
            f"it was built by TensorRT-LLM {engine.version}, not {wanted.version}: change "
            "engine.tensorrt_llm.version or engine.tensorrt_llm.image"
        )
    if engine.world_size != wanted.world_size:
        yield (
            f"it is for {engine.world_size} ranks, not {wanted.world_size}, {role}.tp_size times "
            f"{role}.pp_size"
        )
    if engine.vocab_size != wanted.vocab_size:
        yield f"its vocabulary has {engine.vocab_size} rows, its checkpoint's {wanted.vocab_size}"
    for name in ("quant_algo", "kv_cache_quant_algo"):
        if getattr(engine, name) != getattr(wanted, name):
            yield f"{name} is {getattr(engine, name)}, its checkpoint's {getattr(wanted, name)}"
    if engine.max_batch_size < wanted.max_batch_size:
        yield f"max_batch_size is {engine.max_batch_size}, not {wanted.max_batch_size}"
    if engine.max_seq_len < wanted.max_seq_len + wanted.num_draft_tokens:
        yield (
            f"max_seq_len is {engine.max_seq_len}, less than the {wanted.max_seq_len} tokens of a "
            f"request and {wanted.num_draft_tokens} draft tokens"
        )
    if engine.logits_dtype != wanted.logits_dtype:
        yield (
            f"its logits are {engine.logits_dtype}, not {wanted.logits_dtype}: see "
            "engine.tensorrt_llm.build.logits_dtype"
        )


def _role_faults(engine: BuiltEngine, wanted: Wanted) -> Iterator[str]:
    yield from _file_faults(engine)
    yield from _drafting_faults(engine, wanted.acceptance)
    yield from _speculation_faults(wanted.role, engine, wanted.num_draft_tokens)


def _file_faults(engine: BuiltEngine) -> Iterator[str]:
    if engine.num_rank_files != engine.world_size:
        yield (
            f"rank0.engine to rank{engine.world_size - 1}.engine should be there, but the first "
            f"{engine.num_rank_files} of {engine.world_size} are: build it again"
        )


def _drafting_faults(engine: BuiltEngine, acceptance: AcceptTest) -> Iterator[str]:
    """What both engines of a pair need, whatever their role."""
    if engine.kv_cache_type != "PAGED":
        yield (
            f"kv_cache_type is {engine.kv_cache_type}, but drafting needs PAGED: remove it from "
            "engine.tensorrt_llm.extra_build_args"
        )
    if not engine.use_paged_context_fmha:
        kv_cache = engine.kv_cache_quant_algo
        yield (
            "use_paged_context_fmha is off, which drafting needs: "
            + (
                f"the builder switches it off for a KV cache of {kv_cache} with weights of "
                f"{engine.quant_algo}: set quantization.kv_cache to null"
                if kv_cache
                else "remove what switches it off from engine.tensorrt_llm.extra_build_args"
            )
        )
    if engine.max_beam_width != 1:
        yield (
            f"max_beam_width is {engine.max_beam_width}, but drafting works with 1: remove it from "
            "engine.tensorrt_llm.extra_build_args"
        )
    if engine.gather_context_logits:
        yield (
            "gather_context_logits is on, which switches block reuse off: remove it from "
            "engine.tensorrt_llm.extra_build_args"
        )
    if acceptance == "logits" and not engine.gather_generation_logits:
        yield (
            "gather_generation_logits is off, but engine.tensorrt_llm.acceptance logits needs the "
            "logits: build it again"
        )


def _speculation_faults(role: Role, engine: BuiltEngine, num_draft_tokens: int) -> Iterator[str]:
    mode = engine.speculative_decoding_mode
    if role == "draft":
        if mode != "none":
            yield f"speculative_decoding_mode is {mode}, but a draft speculates by itself"
        return
    if mode != "draft_tokens_external" or engine.max_draft_len == 0:
        yield (
            f"it verifies no draft tokens (speculative_decoding_mode {mode}, max_draft_len "
            f"{engine.max_draft_len}): build it with speculation.num_draft_tokens of at least 1"
        )
    elif engine.max_draft_len < num_draft_tokens:
        yield (
            f"it verifies at most {engine.max_draft_len} draft tokens, but "
            f"speculation.num_draft_tokens is {num_draft_tokens}: lower that, or build it again"
        )


def _agreement_faults(
    draft: BuiltEngine, target: BuiltEngine, acceptance: AcceptTest
) -> Iterator[str]:
    if draft.version != target.version:
        yield (
            f"the draft was built by TensorRT-LLM {draft.version}, the target by "
            f"{target.version}: build them with one engine.tensorrt_llm.version"
        )
    if draft.logits_dtype != target.logits_dtype:
        yield (
            f"the draft's logits are {draft.logits_dtype}, the target's {target.logits_dtype}: "
            "build both with one engine.tensorrt_llm.build.logits_dtype"
        )
    if acceptance == "logits" and draft.vocab_size != target.vocab_size:
        yield (
            f"the draft's vocabulary has {draft.vocab_size} rows, the target's "
            f"{target.vocab_size}, but comparing logits needs equal ones: set "
            "engine.tensorrt_llm.acceptance to exact"
        )
