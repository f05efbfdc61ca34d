"""What benchmarks.gpu measures on one inflated pair, part by part."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

import torch

from benchmarks.gpu.goals import kv_bytes, steps_speedup
from benchmarks.gpu.models import FusedModel, Source
from benchmarks.gpu.timing import (
    Answer,
    Clock,
    answer,
    busy,
    fill_cache,
    request,
    round_seconds,
    step_seconds,
)
from specpipe.runtimes.pair.engine_pair import EnginePair
from specpipe.runtimes.pair.pair import PairOptions
from specpipe.runtimes.torch.fused.engine import FusedEngine
from specpipe.runtimes.torch.fused.graphs import prepare
from specpipe.runtimes.torch.fused.rounds import FusedRounds
from specpipe.runtimes.torch.pair import pair_of
from specpipe.speculative.request import GREEDY, Sampling
from specpipe.text.tokenizer import Tokenizer

ONE_K = 4
"""Draft tokens where one number is enough."""

_BUSY_ROUNDS = 50
_SAMPLING = Sampling(temperature=0.8, top_p=0.95, seed=11)


@dataclass(frozen=True)
class Settings:
    """What is measured, and how often."""

    contexts: list[int]
    rows: list[int]
    num_draft_tokens: list[int]
    max_tokens: int
    prompt_tokens: int
    num_prompts: int
    runs: int
    times: int

    @property
    def most_draft_tokens(self) -> int:
        return max(*self.num_draft_tokens, 1)

    @property
    def longest_text(self) -> int:
        """Of a request: an answer, or rounds that are watched and may all accept everything."""
        num_rounds = 10 + max(_BUSY_ROUNDS, self.times)
        watched = num_rounds * (self.most_draft_tokens + 1)
        return self.prompt_tokens + self.max_tokens + watched


def free_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


class LoadedPair:
    """Two engines and what runs requests on them; `fixed` drafts what a request asks for."""

    def __init__(
        self, draft: FusedModel, target: FusedModel, settings: Settings, tokenizer: Tokenizer
    ) -> None:
        limits = {
            "max_seq_len": settings.longest_text,
            "max_draft_len": settings.most_draft_tokens,
        }
        self.draft: FusedEngine = draft.engine(**limits)
        self.target: FusedEngine = target.engine(**limits)
        self.rounds = FusedRounds(
            self.draft,
            self.target,
            num_draft_tokens=settings.most_draft_tokens,
            vocab_size=min(self.draft.vocab_size, self.target.vocab_size),
            unused=(),
            copies=True,
        )
        if draft.device.type == "cuda":
            engines = (self.draft, self.target)
            recordings = [r for e in engines for r in e.recordings(settings.prompt_tokens)]
            prepare([*recordings, *self.rounds.recordings()])
            self.rounds.measure()
        self._options = PairOptions(
            num_draft_tokens=settings.most_draft_tokens,
            adaptive=False,
            max_batch_size=1,
            max_seq_len=settings.longest_text,
        )
        self._tokenizer = tokenizer
        self.fixed = self._pair(self._options, self.rounds)

    @cached_property
    def adaptive(self) -> EnginePair:
        return self._pair(replace(self._options, adaptive=True), self.rounds)

    @cached_property
    def lookup(self) -> EnginePair:
        """An adaptive one that may copy draft tokens from the text."""
        options = replace(self._options, adaptive=True, prompt_lookup=True)
        return self._pair(options, self.rounds)

    @cached_property
    def step_by_step(self) -> EnginePair:
        """As many requests at once are run: the host asks for logits and chooses."""
        return self._pair(self._options, None)

    def _pair(self, options: PairOptions, rounds: FusedRounds | None) -> EnginePair:
        make = self._tokenizer.detokenizer
        return pair_of(self.draft, self.target, options, make, rounds=rounds)


class PairBenchmark:
    """The parts that are measured on one inflated pair, by their names."""

    def __init__(
        self,
        draft: Source,
        target: Source,
        settings: Settings,
        *,
        tokenizer: Tokenizer,
        prompts: list[list[int]],
        bandwidth: float,
    ) -> None:
        self._clock = Clock(target.device)
        self._settings = settings
        self._target_source = target
        self._tokenizer, self._prompts, self._bandwidth = tokenizer, prompts, bandwidth
        self.num_parameters = {"target": target.num_parameters, "draft": draft.num_parameters}
        self._models: dict[str, FusedModel] = {
            "target": FusedModel.make(target),
            "draft": FusedModel.make(draft),
        }
        self._loaded: LoadedPair | None = None
        self._best_k = min(ONE_K, settings.most_draft_tokens)

    def steps(self) -> list[dict[str, Any]]:
        found = []
        for name, model in self._models.items():
            longest = max(self._settings.contexts) + max(self._settings.rows)
            engine = model.engine(max_seq_len=longest, max_draft_len=0)
            fill_cache(engine)
            for context in self._settings.contexts:
                for num_rows in self._settings.rows:
                    seconds = self._step(engine, context, num_rows)
                    num_bytes = model.weight_bytes + kv_bytes(
                        model.config.windows,
                        num_kv_heads=model.config.num_kv_heads,
                        head_size=model.config.head_size,
                        num_positions=context + num_rows,
                        element_bytes=model.dtype.itemsize,
                    )
                    found.append(
                        {
                            "model": name,
                            "context": context,
                            "rows": num_rows,
                            "seconds": seconds,
                            "bytes": num_bytes,
                            "floor_seconds": num_bytes / self._bandwidth,
                        }
                    )
            del engine
            free_memory()
        return found

    def rounds(self) -> list[dict[str, Any]]:
        settings, loaded = self._settings, self._pair()
        context = settings.prompt_tokens + settings.max_tokens // 2
        draft_step = self._step(loaded.draft, context, 1)
        plain_step = self._step(loaded.target, context, 1)
        alone: tuple[float, float, list[Answer]] | None = None  # the line of K = 0
        found: list[dict[str, Any]] = []
        for k in sorted({0, *settings.num_draft_tokens}):
            seconds = round_seconds(
                self._clock,
                loaded.rounds,
                loaded.draft,
                loaded.target,
                context=context,
                num_draft_tokens=k,
                times=settings.times,
            )
            rate, answers = self._answers(loaded.fixed, k)
            if alone is None:
                alone = rate, seconds, answers
            length = acceptance_length(answers)
            speedup = rate / alone[0]
            verification = self._step(loaded.target, context, k + 1)
            predicted = steps_speedup(length, draft_step, verification, plain_step, k)
            margins = self._margins(loaded.target, alone[2], answers)
            found.append(
                {
                    "num_draft_tokens": k,
                    "round_seconds": seconds,
                    "draft_step_seconds": draft_step,
                    "verification_seconds": verification,
                    "tokens_per_second": rate,
                    "acceptance_length": length,
                    "speedup": speedup,
                    "of_rounds": speedup / (length * alone[1] / seconds),
                    "of_steps": speedup / predicted,
                    "num_answers": len(answers),
                    "num_different": len(margins),
                    "margins": margins,
                }
            )
        speculative = [line for line in found if line["num_draft_tokens"]]
        if speculative:
            best = max(speculative, key=lambda line: line["speedup"])
            self._best_k = best["num_draft_tokens"]
        return found

    def sampled(self) -> list[dict[str, Any]]:
        """Sampled answers, with the K that was best for greedy ones."""
        loaded, k = self._pair(), self._best_k
        found = []
        for is_seeded in (True, False):
            sampling = replace(_SAMPLING, is_seeded=is_seeded)
            alone_rate, alone = self._answers(loaded.fixed, 0, sampling, runs=1)
            rate, answers = self._answers(loaded.fixed, k, sampling, runs=1)
            step_rate, by_steps = self._answers(loaded.step_by_step, k, sampling, runs=1)
            found.append(
                {
                    "is_seeded": is_seeded,
                    "num_draft_tokens": k,
                    "tokens_per_second": rate,
                    "alone_tokens_per_second": alone_rate,
                    "step_by_step_tokens_per_second": step_rate,
                    "acceptance_length": acceptance_length(answers),
                    "num_answers": len(answers),
                    "num_different": _num_different(answers, by_steps),
                    # Without a seed only the distribution is the target's.
                    "num_different_from_alone": _num_different(answers, alone)
                    if is_seeded
                    else None,
                }
            )
        return found

    def adaptive(self) -> dict[str, Any]:
        return self._beside_alone(self._pair().adaptive)

    def lookup(self) -> dict[str, Any]:
        return self._beside_alone(self._pair().lookup)

    def _beside_alone(self, pair: EnginePair) -> dict[str, Any]:
        """Answers of a pair that chooses its drafts, and of the target alone right before."""
        loaded = self._pair()
        alone_rate, alone = self._answers(loaded.fixed, 0)
        rate, answers = self._answers(pair, None)
        margins = self._margins(loaded.target, alone, answers)
        return {
            "tokens_per_second": rate,
            "alone_tokens_per_second": alone_rate,
            "acceptance_length": acceptance_length(answers),
            "first_token_seconds": first_token_seconds(answers),
            "alone_first_token_seconds": first_token_seconds(alone),
            "num_answers": len(answers),
            "num_different": len(margins),
            "margins": margins,
        }

    def busy(self) -> dict[str, Any]:
        k = min(ONE_K, self._settings.most_draft_tokens)
        max_tokens = (_BUSY_ROUNDS + 10) * (k + 1)
        asked = request(self._prompts[0], max_tokens, k)
        found = busy(self._clock, self._pair().fixed, asked, num_rounds=_BUSY_ROUNDS)
        if found is None:
            return {"not_run": "there is no GPU"}
        return {"num_draft_tokens": k, **asdict(found)}

    def hopeless(self) -> dict[str, Any]:
        self._models["draft"].spoil()
        return self.adaptive()

    def own(self) -> dict[str, Any]:
        self._unload()
        k = ONE_K
        settings = replace(self._settings, num_draft_tokens=[k])
        target = self._models["target"]
        pair = LoadedPair(target, target, settings, self._tokenizer).fixed
        # Whole rounds, so that the last one is not cut.
        asked = [request(p, settings.max_tokens // (k + 1) * (k + 1), k) for p in self._prompts]
        answers = [answer(pair, one) for one in asked]
        accepted = sum(a.statistics.total_accepted_draft_tokens for a in answers)
        return {
            "num_draft_tokens": k,
            "acceptance_rate": accepted / sum(a.statistics.total_draft_tokens for a in answers),
            "tokens_per_second": statistics.median(a.rate for a in answers),
        }

    def fp8(self) -> dict[str, Any]:
        """The last part: the models make room."""
        reason = self._target_source.why_not_fp8()
        if reason is not None:
            return {"not_run": f"the fused kernels do not run {reason}"}
        context = min(self._settings.contexts)
        plain = self._target_step(self._models["target"], context)
        self.close()
        seconds = self._target_step(FusedModel.make(self._target_source, "fp8"), context)
        return {"context": context, "plain_seconds": plain, "seconds": seconds}

    def close(self) -> None:
        """Frees all memory."""
        self._unload()
        self._models.clear()
        free_memory()

    def _pair(self) -> LoadedPair:
        if self._loaded is None:
            models, settings = self._models, self._settings
            self._loaded = LoadedPair(models["draft"], models["target"], settings, self._tokenizer)
        return self._loaded

    def _unload(self) -> None:
        self._loaded = None
        free_memory()

    def _step(self, engine: FusedEngine, context: int, num_rows: int) -> float:
        times = self._settings.times
        return step_seconds(self._clock, engine, context=context, num_rows=num_rows, times=times)

    def _target_step(self, model: FusedModel, context: int) -> float:
        engine = model.engine(max_seq_len=context + 1, max_draft_len=0)
        fill_cache(engine)
        return self._step(engine, context, 1)

    def _answers(
        self,
        pair: EnginePair,
        num_draft_tokens: int | None,
        sampling: Sampling = GREEDY,
        *,
        runs: int | None = None,
    ) -> tuple[float, list[Answer]]:
        """Tokens per second, the median of all prompts one after the other, and the answers."""
        settings = self._settings
        asked = [request(p, settings.max_tokens, num_draft_tokens, sampling) for p in self._prompts]
        # Greedy rounds are recorded already, others when a text first has their length.
        num_warm_up = min(16, settings.max_tokens) if sampling.is_greedy else settings.max_tokens
        answer(pair, replace(asked[0], max_tokens=num_warm_up))
        rates = []
        for _ in range(runs or settings.runs):
            answers = [answer(pair, one) for one in asked]
            rates.append(settings.max_tokens * len(answers) / sum(a.seconds for a in answers))
        return statistics.median(rates), answers

    def _margins(
        self, target: FusedEngine, alone: Sequence[Answer], answers: Sequence[Answer]
    ) -> list[float]:
        """For each answer that parts from the target's own, how far apart the two tokens are."""
        margins = []
        for prompt, wanted, found in zip(self._prompts, alone, answers, strict=True):
            both = zip(wanted.token_ids, found.token_ids, strict=True)
            place = next((i for i, (a, b) in enumerate(both) if a != b), None)
            if place is not None:
                text = [*prompt, *wanted.token_ids[:place]]
                sequence = target.allocate(prompt_length=len(text), max_tokens=len(text))
                logits = target.forward([(sequence, text)], [1])[0]
                target.free(sequence)
                margin = logits[wanted.token_ids[place]] - logits[found.token_ids[place]]
                margins.append(float(margin))
        return margins


def acceptance_length(answers: Sequence[Answer]) -> float:
    accepted = sum(a.statistics.total_accepted_draft_tokens for a in answers)
    return 1.0 + accepted / sum(a.statistics.num_steps for a in answers)


def first_token_seconds(answers: Sequence[Answer]) -> float:
    return statistics.median(a.first_seconds for a in answers)


def _num_different(answers: Sequence[Answer], others: Sequence[Answer]) -> int:
    return sum(a.token_ids != b.token_ids for a, b in zip(answers, others, strict=True))
