"""Whether both engines fit on the GPUs together, and what else would.

Nothing here asks which runtime it is: every runtime says what the ranks of an engine take on which
GPU, for any batch, length and format.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from specpipe.checkpoints.formats import AWQ_BLOCK_SIZES, FORMATS, OFFERED
from specpipe.config.sections import PipelineConfig, QuantizationConfig
from specpipe.errors import ConfigError, SpecpipeError
from specpipe.machine.gpus import Gpu, capability_of
from specpipe.machine.memory import MemoryEstimate, format_bytes
from specpipe.quantization.quantized_config import quantized_config
from specpipe.roles import Role
from specpipe.runtimes.setting_faults import setting_faults

if TYPE_CHECKING:
    from specpipe.runtimes.plan import PairPlan, Side
    from specpipe.runtimes.runtime import Runtime

USABLE = 0.95
"""The usable share of a GPU's memory; the driver and gaps take the rest. A guess."""

_MAX_BATCH_SIZE = 4096
"""No larger one is tried: one that fits says \"at least\"."""
_MIN_LENGTH = 1024
_TO_CHANGE: tuple[tuple[Role, ...], ...] = (("target",), ("draft",), ("draft", "target"))


@dataclass(frozen=True)
class GpuPlan:
    """What stands on one GPU: by role, what a rank of its engine takes."""

    number: int
    gpu: Gpu
    engines: Mapping[Role, MemoryEstimate]

    @property
    def needed_bytes(self) -> int:
        return sum(engine.total_bytes for engine in self.engines.values())

    @property
    def usable_bytes(self) -> int:
        return int(USABLE * self.gpu.memory_bytes)

    @property
    def fits(self) -> bool:
        return self.needed_bytes <= self.usable_bytes


@dataclass(frozen=True)
class Change:
    """Another quantization with which the pair would fit."""

    roles: tuple[Role, ...]
    format: str
    kv_cache: str | None


@dataclass(frozen=True)
class MemoryPlan:
    """How a pair fits on GPUs.

    largest  requests at once and tokens of each, the most that fit, length by length; no more
             than 4096 requests are tried
    changes  where the pair as configured does not fit: what would
    """

    max_batch_size: int
    max_seq_len: int
    gpus: tuple[GpuPlan, ...]
    largest: tuple[tuple[int, int], ...]
    changes: tuple[Change, ...]

    @property
    def fits(self) -> bool:
        return all(plan.fits for plan in self.gpus)

    def to_json(self) -> dict[str, Any]:
        return {
            "max_batch_size": self.max_batch_size,
            "max_seq_len": self.max_seq_len,
            "fits": self.fits,
            "gpus": [
                {
                    "number": plan.number,
                    "name": plan.gpu.name,
                    "memory_bytes": plan.gpu.memory_bytes,
                    "sm": plan.gpu.sm,
                    "usable_bytes": plan.usable_bytes,
                    "needed_bytes": plan.needed_bytes,
                    "engines": {r: dataclasses.asdict(e) for r, e in plan.engines.items()},
                }
                for plan in self.gpus
            ],
            "largest": [
                {
                    "max_batch_size": batch,
                    "max_seq_len": length,
                    "is_largest": batch < _MAX_BATCH_SIZE,
                }
                for batch, length in self.largest
            ],
            "changes": [dataclasses.asdict(change) for change in self.changes],
        }


def plan_memory(
    config: PipelineConfig, pair: PairPlan, runtime: Runtime, gpus: Sequence[Gpu]
) -> MemoryPlan | None:
    """Returns how a pair fits on GPUs, in the config's numbering; the first stands for any other.

    None where the pair does not run on GPUs at all.
    """
    engines = _by_gpu(pair, runtime, gpus)
    if not engines:
        return None
    plans = tuple(GpuPlan(n, _gpu(gpus, n), engines[n]) for n in sorted(engines))
    memory_plan = MemoryPlan(
        max_batch_size=pair.engine.max_batch_size,
        max_seq_len=pair.max_seq_len,
        gpus=plans,
        largest=tuple(_largest(pair, runtime, gpus)),
        changes=(),
    )
    if memory_plan.fits:
        return memory_plan
    return dataclasses.replace(memory_plan, changes=tuple(_changes(config, pair, runtime, gpus)))


def lines(plan: MemoryPlan) -> Iterator[str]:
    """Yields a plan as lines for people; GPUs that hold the same share one."""
    yield f"{plan.max_batch_size} × {plan.max_seq_len} tokens (batch × length):"
    alike: dict[str, list[int]] = {}
    for on_gpu in plan.gpus:
        engines = "; ".join(f"{role} {engine}" for role, engine in on_gpu.engines.items())
        verdict = "fits" if on_gpu.fits else "does not fit"
        text = (
            f"{on_gpu.gpu}: {engines}; together {format_bytes(on_gpu.needed_bytes)} of "
            f"{format_bytes(on_gpu.usable_bytes)} usable, {verdict}"
        )
        alike.setdefault(text, []).append(on_gpu.number)
    for text, numbers in alike.items():
        yield f"  GPU {_listed(list(map(str, numbers)), 'and')}, {text}"
    largest = ", ".join(
        f"{'at least ' if batch >= _MAX_BATCH_SIZE else ''}{batch} × {length}"
        for batch, length in plan.largest
    )
    yield f"largest batch × length that fits: {largest or 'none'}"
    if plan.changes:
        yield f"would fit: {'; '.join(_named(plan.changes, plan.gpus[0].gpu))}"
    elif not plan.fits:
        yield "no format of the checkpoints would make it fit"


def _named(changes: Sequence[Change], gpu: Gpu) -> Iterator[str]:
    """Yields changes by roles, with what a format needs where the GPU is not known."""
    grouped: dict[tuple[tuple[Role, ...], str | None], list[str]] = defaultdict(list)
    for change in changes:
        min_sm = FORMATS[change.format].min_sm
        needs = f" (from {capability_of(min_sm)})" if gpu.sm is None else ""
        grouped[change.roles, change.kv_cache].append(change.format + needs)
    for (roles, kv_cache), formats in grouped.items():
        with_cache = f" with kv_cache {kv_cache}" if kv_cache else ""
        yield f"{_listed(roles, 'and')} in {_listed(formats, 'or')}{with_cache}"


def _listed(words: Sequence[str], last: str) -> str:
    """Returns "a", "a and b" or "a, b and c"."""
    *before, final = words
    return f"{', '.join(before)} {last} {final}" if before else final


def _by_gpu(
    pair: PairPlan, runtime: Runtime, gpus: Sequence[Gpu]
) -> dict[int, dict[Role, MemoryEstimate]]:
    engines: dict[int, dict[Role, MemoryEstimate]] = defaultdict(dict)
    for side in (pair.draft, pair.target):
        for number, engine in runtime.memory_by_gpu(pair, side, gpus[0].sm).items():
            engines[number][side.role] = engine
    return engines


def _gpu(gpus: Sequence[Gpu], number: int) -> Gpu:
    return gpus[number] if number < len(gpus) else gpus[0]


def _fits(pair: PairPlan, runtime: Runtime, gpus: Sequence[Gpu]) -> bool:
    """Returns whether a pair fits; False, too, where the runtime refuses its fixed KV cache."""
    try:
        engines = _by_gpu(pair, runtime, gpus)
    except SpecpipeError:
        return False
    return all(GpuPlan(n, _gpu(gpus, n), on_gpu).fits for n, on_gpu in engines.items())


def _largest(pair: PairPlan, runtime: Runtime, gpus: Sequence[Gpu]) -> Iterator[tuple[int, int]]:
    """Yields the largest batch for the configured length and for powers of two, ascending.

    It is that of the GPUs, whatever memory KV caches were given.
    """
    if pair.engine.kv_cache_memory is not None:
        engine = pair.engine.model_copy(update={"kv_cache_memory": None})
        pair = dataclasses.replace(pair, engine=engine)
    lengths = {pair.max_seq_len}
    length = _MIN_LENGTH
    while length <= pair.target.context_length:
        lengths.add(length)
        length *= 2
    for length in sorted(lengths):
        batch = _largest_batch(dataclasses.replace(pair, max_seq_len=length), runtime, gpus)
        if batch == 0:
            return
        yield batch, length


def _largest_batch(pair: PairPlan, runtime: Runtime, gpus: Sequence[Gpu]) -> int:
    """Returns the most requests at once, up to 4096; 0 where not even one fits."""

    def fits(batch: int) -> bool:
        engine = pair.engine.model_copy(update={"max_batch_size": batch})
        return _fits(dataclasses.replace(pair, engine=engine), runtime, gpus)

    fitting, failing = 0, 1
    while failing <= _MAX_BATCH_SIZE and fits(failing):
        fitting, failing = failing, 2 * failing
    while failing - fitting > 1 and failing <= _MAX_BATCH_SIZE:
        middle = (fitting + failing) // 2
        fitting, failing = (middle, failing) if fits(middle) else (fitting, middle)
    return fitting


def _changes(
    config: PipelineConfig, pair: PairPlan, runtime: Runtime, gpus: Sequence[Gpu]
) -> Iterator[Change]:
    """Yields the formats of the smallest change that helps: of one checkpoint before both, and with
    the KV cache only where weights alone are not enough."""
    for roles in _TO_CHANGE:
        for kv_cache in (None, "fp8"):
            changes = [
                change
                for name in OFFERED
                if (kv_cache is None or FORMATS[name].fp8_kv_cache)
                and (gpus[0].sm is None or FORMATS[name].runs_on(gpus[0].sm))
                and _would_fit(config, pair, runtime, gpus, change := Change(roles, name, kv_cache))
            ]
            if changes:
                yield from changes
                return


def _would_fit(
    config: PipelineConfig,
    pair: PairPlan,
    runtime: Runtime,
    gpus: Sequence[Gpu],
    change: Change,
) -> bool:
    for role in change.roles:
        side = pair.draft if role == "draft" else pair.target
        scheme = _scheme(side, change)
        if scheme is None:
            return False
        checkpoint = side.checkpoint.model_copy(update={"quantization": scheme})
        config = config.model_copy(update={role: checkpoint})
        unified = quantized_config(side.unified, scheme)
        changed = dataclasses.replace(side, checkpoint=checkpoint, unified=unified)
        if role == "draft":
            pair = dataclasses.replace(pair, draft=changed)
        else:
            pair = dataclasses.replace(pair, target=changed)
    return not list(setting_faults(config)) and _fits(pair, runtime, gpus)


def _scheme(side: Side, change: Change) -> QuantizationConfig | None:
    """Returns the change as a setting, with the largest blocks that divide the model, if any do."""
    configured = side.checkpoint.quantization
    settings = {} if configured is None else configured.model_dump(exclude_unset=True)
    settings |= {"format": change.format, "kv_cache": change.kv_cache}
    settings.pop("awq_block_size", None)
    blocks: list[dict[str, Any]] = [{}]
    if FORMATS[change.format].block_size == "set":
        blocks = [{"awq_block_size": size} for size in AWQ_BLOCK_SIZES]
    for block in blocks:
        scheme = QuantizationConfig.model_validate({**settings, **block})
        try:
            quantized_config(side.unified, scheme)
        except ConfigError:
            continue
        return scheme
    return None
