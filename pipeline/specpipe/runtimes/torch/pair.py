"""Two torch engines as a pair."""

from __future__ import annotations

import importlib.util
import logging
import os
import shutil
import sysconfig
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch

from specpipe.checkpoints.formats import FORMATS
from specpipe.errors import RuntimeUnavailable
from specpipe.runtimes.engine_fit import check_limits
from specpipe.runtimes.pair.costs import measure_costs
from specpipe.runtimes.pair.engine import Engine
from specpipe.runtimes.pair.engine_pair import EnginePair
from specpipe.runtimes.pair.pair import DetokenizerFactory, LateWork, PairOptions
from specpipe.runtimes.pair.rounds import Rounds
from specpipe.runtimes.pair.torch_sampler import TorchSampler
from specpipe.runtimes.torch.engine import TorchEngine, TorchEngineSpec, check_memory
from specpipe.runtimes.torch.round_sizes import MAX_DRAFT_TOKENS, beyond_rounds
from specpipe.speculative.guide import Guides

if TYPE_CHECKING:
    from specpipe.runtimes.torch.fused.engine import FusedEngine

Kernels = Literal["auto", "fused", "plain"]

_TOKEN_BYTES = 8  # of an id, at most, where the host hands a text to the GPU

_LEAST_PINNED = 1 << 15  # what a launch of prompts takes, and more
_BRIEF_S = 0.3  # of timing single steps beside rounds: a guess

_LOGGER = logging.getLogger(__name__)

_MIN_CAPABILITY, _MIN_FP8_CAPABILITY = (8, 0), (8, 9)  # Ampere; Ada


def load_pair(
    draft: Path,
    target: Path,
    options: PairOptions,
    detokenizer: DetokenizerFactory,
    guides: Guides | None = None,
) -> EnginePair:
    """Loads both engines and measures what their steps cost, unless drafting is fixed or off."""
    check_memory([draft, target])
    # A core to spare: a thread that waits for one which Triton displaced makes each step many
    # times slower.
    num_threads = options.num_threads or max(len(os.sched_getaffinity(0)) - 1, 1)
    reason = unfused((draft, target), options.runtime_settings.get("kernels", "auto"))
    if reason is None:
        return _fused_pair(draft, target, options, detokenizer, guides)
    if any(TorchEngineSpec.read(f).kv_cache_tokens is not None for f in (draft, target)):
        raise RuntimeUnavailable(
            f"engine.kv_cache_memory needs the fused kernels, but {reason}; leave it out and build "
            "again"
        )
    engines = [TorchEngine.load(folder, num_threads=num_threads) for folder in (draft, target)]
    for engine, folder in zip(engines, (draft, target), strict=True):
        check_limits(folder, engine, options)
    draft_engine, target_engine = engines
    return pair_of(draft_engine, target_engine, options, detokenizer, guides=guides)


def unfused(folders: Sequence[Path], kernels: Kernels) -> str | None:
    """Returns why engines do not run on the fused kernels; None: they do.

    Raises RuntimeUnavailable where `kernels` asks for those and they cannot.
    """
    if kernels == "plain":
        return "engine.kernels is plain"
    reason = next(filter(None, map(_unfused, folders)), None)
    if reason is not None and kernels == "fused":
        raise RuntimeUnavailable(
            f"engine.kernels is fused, but {reason}; set it to auto, which then takes torch's own"
        )
    return reason


def _unfused(folder: Path) -> str | None:
    spec = TorchEngineSpec.read(folder)
    if spec.device.type != "cuda":
        return f"{folder} was built for a CPU"
    if importlib.util.find_spec("triton") is None:
        return "'triton' is not installed"
    if (reason := _cannot_compile()) is not None:
        return reason
    reason = _too_old(torch.cuda.get_device_capability(), spec.model.formats.values())
    if reason is not None:
        return reason
    if spec.dtype == torch.float16:
        return f"{folder} computes in float16, whose range their norms can leave"
    if spec.has_fp8_kv_cache:
        return f"{folder} has a KV cache in FP8"
    from specpipe.runtimes.torch.fused.load import reading
    from specpipe.runtimes.torch.fused.weights import unsupported

    with reading(folder) as read_tensor:
        reason = unsupported(spec.model, read_tensor)
    return None if reason is None else f"they do not run {folder}: {reason}"


def _too_old(capability: tuple[int, int], formats: Iterable[str]) -> str | None:
    """Returns what a GPU lacks for the kernels, with linears in these formats."""
    if capability < _MIN_CAPABILITY:
        return "the GPU is older than Ampere (compute capability 8.0)"
    rounds_to_fp8 = any((FORMATS[name].activations or "").startswith("fp8") for name in formats)
    if rounds_to_fp8 and capability < _MIN_FP8_CAPABILITY:
        return "the GPU is older than Ada (compute capability 8.9), and has no FP8"
    return None


def _cannot_compile() -> str | None:
    """Returns what Triton lacks to compile the launcher of a kernel."""
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        return "Triton finds no C compiler (gcc, clang, or what CC names)"
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").is_file():
        return "Triton finds no headers of Python (Debian: python3-dev)"
    return None


def _fused_pair(
    draft: Path,
    target: Path,
    options: PairOptions,
    detokenizer: DetokenizerFactory,
    guides: Guides | None = None,
) -> EnginePair:
    from specpipe.runtimes.torch.fused.load import load_engine

    engines = load_engine(draft), load_engine(target)
    for engine, folder in zip(engines, (draft, target), strict=True):
        check_limits(folder, engine, options)
    return fused_pair_of(*engines, options, detokenizer, guides=guides)


def fused_pair_of(
    draft: FusedEngine,
    target: FusedEngine,
    options: PairOptions,
    detokenizer: DetokenizerFactory,
    *,
    guides: Guides | None = None,
) -> EnginePair:
    """Pairs engines on the fused kernels; what they launch is recorded before any request comes."""
    from specpipe.runtimes.torch.fused.graphs import prepare
    from specpipe.runtimes.torch.fused.host import reserve_pinned
    from specpipe.runtimes.torch.fused.lateness import Lateness, preparing
    from specpipe.runtimes.torch.fused.rounds import FusedRounds

    with preparing():
        recordings = [r for e in (draft, target) for r in e.recordings(options.max_num_tokens)]
        if (beyond := beyond_rounds(options.num_draft_tokens)) is not None:
            _LOGGER.warning("%s", beyond)
        rounds = FusedRounds(
            draft,
            target,
            num_draft_tokens=min(options.num_draft_tokens, MAX_DRAFT_TOKENS),
            vocab_size=min(draft.vocab_size, target.vocab_size),
            unused=options.unused_token_ids,
            copies=options.prompt_lookup,
            mask_token_id=None if options.parallel is None else options.parallel.mask_token_id,
        )
        prepare([*recordings, *rounds.recordings()])
        reserve_pinned(max(_TOKEN_BYTES * target.capacity, _LEAST_PINNED), target.spec.device)
        rounds.measure()
        late_work = Lateness()
        return pair_of(
            draft, target, options, detokenizer, rounds=rounds, guides=guides, late_work=late_work
        )


def pair_of(
    draft: Engine,
    target: Engine,
    options: PairOptions,
    detokenizer: DetokenizerFactory,
    *,
    rounds: Rounds | None = None,
    guides: Guides | None = None,
    late_work: Callable[[], LateWork] = LateWork,
    on_close: Callable[[], None] = lambda: None,
) -> EnginePair:
    """Pairs engines whose logits are torch's, wherever they were computed."""
    costs = None
    if options.adaptive and options.num_draft_tokens > 0:
        costs = measure_costs(
            draft,
            target,
            max_batch_size=options.max_batch_size,
            num_draft_tokens=options.num_draft_tokens,
            is_parallel=options.parallel is not None,
            # Most requests are in rounds then, whose costs were timed.
            **({} if rounds is None else {"budget_s": _BRIEF_S}),
        )
    sampler = TorchSampler.of(draft, target, options)
    return EnginePair(
        draft,
        target,
        sampler,
        options,
        detokenizer,
        costs=costs,
        rounds=rounds,
        guides=guides,
        late_work=late_work,
        on_close=on_close,
    )
