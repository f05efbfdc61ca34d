"""How fast runtime torch is on one GPU, for one greedy stream: every figure in one run.

    python -m benchmarks.gpu --pairs 7b+0.4b 32b+0.5b --out gpu.json --plot gpu.png

A small trained pair is inflated in the GPU's memory to each size (inflate.py): its acceptance is
that of the small pair, its time and memory that of the large one. Every floor is bytes read over
the bandwidth that a large copy had in the same run. Parts, all unless --parts names some:

small     the small pair in float32 and bfloat16: fused kernels against the plain engine
steps     one step of target and of draft, by context and by rows
rounds    draft-verify rounds by K: their time, answers to real prompts, what was predicted, and
          whether every answer is that of the target alone
adaptive  K as it is chosen where nobody sets it, against the target alone
busy      how much of the time kernels cover in steady decode
hopeless  adaptive with a draft whose weights are noise, against the target alone
own       the target as its own draft: every draft token should be accepted
fp8       a step of the target with its linears in FP8, against bfloat16

Answers go through the pair that Triton serves, and their times have the prefill in them. Prompts
are sources of the standard library; --prompts-out writes them for peers.py, whose lines --peers
takes in. A part that fails is told and does not stop the others; the exit status is 1 then. Tables
go to stdout, progress to stderr, all figures to --out after each part.
"""

from __future__ import annotations

import argparse
import gc
import inspect
import json
import os
import platform
import shutil
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import triton

from benchmarks.gpu_models import FusedModel, Source, plain_engine
from benchmarks.gpu_report import draw, kv_bytes, markdown, steps_speedup
from benchmarks.gpu_timing import (
    Answer,
    Clock,
    answer,
    busy,
    bytes_per_second,
    compare,
    fill_cache,
    request,
    round_seconds,
    step_seconds,
)
from benchmarks.inflate import size_of
from specpipe.runtimes.base import PairOptions
from specpipe.runtimes.engine_pair import EnginePair
from specpipe.runtimes.torch.engine import TorchEngine
from specpipe.runtimes.torch.fused.engine import FusedEngine
from specpipe.runtimes.torch.fused.rounds import FusedRounds
from specpipe.runtimes.torch.pair import pair_of
from specpipe.text import Tokenizer

_MODELS = Path(__file__).parents[1] / "models" / "python-code"
_PARTS = ("small", "steps", "rounds", "adaptive", "busy", "hopeless", "own", "fp8")
_PROMPT_STRIDE = 97
_DRAFT_TOKENS = 4  # where one K is enough
_BUSY_ROUNDS = 50
_SMALL_TOKENS = 64


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


_DEFAULTS = Settings([1_000, 8_000, 32_000], [*range(1, 10)], [*range(9)], 192, 128, 5, 3, 20)
_QUICK = replace(_DEFAULTS, rows=[1, 2, 5, 9], num_prompts=2, runs=1, times=10)


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
        )
        if draft.device.type == "cuda":
            self.rounds.prepare()
        self._options = PairOptions(
            num_draft_tokens=settings.most_draft_tokens,
            adaptive=False,
            max_batch_size=1,
            max_seq_len=settings.longest_text,
        )
        self._tokenizer = tokenizer
        self.fixed = self._pair(self._options)

    @cached_property
    def adaptive(self) -> EnginePair:
        return self._pair(replace(self._options, adaptive=True))

    def _pair(self, options: PairOptions) -> EnginePair:
        make = self._tokenizer.detokenizer
        return pair_of(self.draft, self.target, options, make, rounds=self.rounds)


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
        found = []
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
        return found

    def adaptive(self) -> dict[str, Any]:
        loaded = self._pair()
        alone, _ = self._answers(loaded.fixed, 0)
        rate, answers = self._answers(loaded.adaptive, None)
        return {
            "tokens_per_second": rate,
            "alone_tokens_per_second": alone,
            "acceptance_length": acceptance_length(answers),
        }

    def busy(self) -> dict[str, Any]:
        k = min(_DRAFT_TOKENS, self._settings.most_draft_tokens)
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
        k = _DRAFT_TOKENS
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
        reason = self._target_source.why_not(fp8=True)
        if reason is not None:
            return {"not_run": f"the fused kernels do not run {reason}"}
        context = min(self._settings.contexts)
        plain = self._target_step(self._models["target"], context)
        self.close()
        seconds = self._target_step(FusedModel.make(self._target_source, fp8=True), context)
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
        self, pair: EnginePair, num_draft_tokens: int | None
    ) -> tuple[float, list[Answer]]:
        """Tokens per second, the median of all prompts one after the other, and the answers."""
        settings = self._settings
        asked = [request(p, settings.max_tokens, num_draft_tokens) for p in self._prompts]
        answer(pair, replace(asked[0], max_tokens=min(16, settings.max_tokens)))  # warms up
        rates = []
        for _ in range(settings.runs):
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


def small(
    sources: dict[str, Source], settings: Settings, tokenizer: Tokenizer, prompts: list[list[int]]
) -> dict[str, Any]:
    """Compares fused with plain engines along the texts of the plain ones, and rounds with both."""
    num_tokens = min(_SMALL_TOKENS, settings.max_tokens)
    device = sources["target"].device
    # Triton's interpreter multiplies no bfloat16.
    dtypes = (torch.float32, torch.bfloat16) if device.type == "cuda" else (torch.float32,)
    found: dict[str, Any] = {}
    for dtype in dtypes:
        typed = {role: replace(source, dtype=dtype) for role, source in sources.items()}
        models = {role: FusedModel.make(source) for role, source in typed.items()}
        of_dtype = found[str(dtype).removeprefix("torch.")] = {}
        for role, source in typed.items():
            plain = plain_engine(source, max_seq_len=settings.longest_text)
            texts = [greedy(plain, prompt, num_tokens) for prompt in prompts]
            limits = {"max_seq_len": settings.longest_text, "max_draft_len": 0}
            fused = models[role].engine(**limits)
            logits = [
                torch.cat([along(engine, p, t) for p, t in zip(prompts, texts, strict=True)])
                for engine in (fused, plain)
            ]
            of_dtype[role] = asdict(compare(*logits))
        k = min(_DRAFT_TOKENS, settings.most_draft_tokens)
        few = replace(settings, num_draft_tokens=[k])
        pair = LoadedPair(models["draft"], models["target"], few, tokenizer).fixed
        answers = [answer(pair, request(p, num_tokens, k)).token_ids for p in prompts]
        of_dtype["rounds"] = {
            "num_draft_tokens": k,
            "num_answers": len(answers),
            "num_different": sum(list(a) != t for a, t in zip(answers, texts, strict=True)),
        }
    return found


def greedy(engine: TorchEngine, prompt: list[int], num_tokens: int) -> list[int]:
    """The best token after a prompt, and after each of those."""
    sequence = engine.allocate(prompt_length=len(prompt), max_tokens=len(prompt) + num_tokens)
    token_ids: list[int] = []
    tokens = prompt
    for _ in range(num_tokens):
        tokens = [int(engine.forward([(sequence, tokens)], [1]).argmax())]
        token_ids += tokens
    engine.free(sequence)
    return token_ids


def along(engine: TorchEngine | FusedEngine, prompt: list[int], text: list[int]) -> torch.Tensor:
    """The logits [N, V] from which each token of a text would be chosen."""
    tokens = [*prompt, *text[:-1]]
    sequence = engine.allocate(prompt_length=len(prompt), max_tokens=len(tokens))
    logits = engine.forward([(sequence, tokens)], [len(text)])
    engine.free(sequence)
    return logits


def standard_library_prompts(tokenizer: Tokenizer, number: int, length: int) -> list[list[int]]:
    """Pieces of three modules' sources, each a little further on."""
    files = (inspect.getsourcefile(module) for module in (json, os, shutil))
    text = "".join(Path(file).read_text(encoding="utf-8") for file in files if file is not None)
    token_ids = tokenizer.encode(text)
    starts = range(0, number * _PROMPT_STRIDE, _PROMPT_STRIDE)
    return [token_ids[start : start + length] for start in starts]


def free_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


class Recorder:
    """Runs parts one after the other; what they found is on disk as soon as it is known."""

    def __init__(self, path: Path | None, parts: Sequence[str], run: dict[str, Any]) -> None:
        self.run = run
        self.has_failed = False
        self._path, self._parts = path, parts
        self._start = time.perf_counter()

    def tell(self, what: str) -> None:
        print(f"{time.perf_counter() - self._start:6.1f} s  {what}", file=sys.stderr, flush=True)

    def part(self, name: str, into: dict[str, Any], measure: Callable[[], Any]) -> None:
        if name not in self._parts:
            return
        self.tell(name)
        try:
            into[name] = measure()
        except Exception as exc:  # the others still tell something, and the GPU is there now
            traceback.print_exc()
            into[name] = {"error": f"{type(exc).__name__}: {exc}"}
            self.has_failed = True
        self.save()

    def save(self) -> None:
        if self._path is not None:
            self._path.write_text(json.dumps(self.run, indent=1) + "\n", encoding="utf-8")


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    def numbers(text: str) -> list[int]:
        return [int(number) for number in text.split(",")]

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--draft", type=Path, default=_MODELS / "draft", help="the small one")
    parser.add_argument("--target", type=Path, default=_MODELS / "target", help="the small one")
    parser.add_argument(
        "--pairs",
        nargs="*",
        default=["7b+0.4b"],
        metavar="TARGET+DRAFT",
        help="sizes as inflate.py has them; default: 7b+0.4b",
    )
    parser.add_argument("--parts", type=lambda text: text.split(","), default=list(_PARTS))
    parser.add_argument("--quick", action="store_true", help="fewer rows, prompts and repetitions")
    parser.add_argument("--contexts", type=numbers)
    parser.add_argument("--rows", type=numbers)
    parser.add_argument("--num-draft-tokens", type=numbers)
    parser.add_argument("--max-tokens", type=int)
    parser.add_argument("--prompt-tokens", type=int)
    parser.add_argument("--num-prompts", type=int)
    parser.add_argument("--runs", type=int, help="of all prompts, for each K")
    parser.add_argument("--times", type=int, help="that a step or a round is timed")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--out", type=Path, help="a JSON file for all figures")
    parser.add_argument("--plot", type=Path, help="a PNG file for a drawing of the steps")
    parser.add_argument("--prompts-out", type=Path, help="a JSON file for peers.py")
    parser.add_argument("--peers", type=Path, help="what peers.py printed")
    arguments = parser.parse_args(argv)
    if unknown := set(arguments.parts) - set(_PARTS):
        parser.error(f"--parts: unknown {', '.join(sorted(unknown))}; there are {list(_PARTS)}")
    return arguments


def settings_of(arguments: argparse.Namespace) -> Settings:
    """The defaults, but for what the command line has."""
    given = {name: getattr(arguments, name) for name in asdict(_DEFAULTS)}
    given = {name: value for name, value in given.items() if value is not None}
    return replace(_QUICK if arguments.quick else _DEFAULTS, **given)


def main(argv: list[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    settings = settings_of(arguments)
    device = torch.device(arguments.device)
    dtype = getattr(torch, arguments.dtype)
    tokenizer = Tokenizer.load(arguments.target)
    prompts = standard_library_prompts(tokenizer, settings.num_prompts, settings.prompt_tokens)
    if arguments.prompts_out is not None:
        arguments.prompts_out.write_text(json.dumps(prompts), encoding="utf-8")
    run: dict[str, Any] = {
        "machine": {
            "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else "a CPU",
            "torch": torch.__version__,
            "triton": triton.__version__,
            "cuda": torch.version.cuda,
            "python": platform.python_version(),
            "dtype": arguments.dtype,
        },
        "settings": asdict(settings),
        "bytes_per_second": bytes_per_second(Clock(device)),
        "pairs": {},
    }
    if arguments.peers is not None:
        lines = arguments.peers.read_text(encoding="utf-8").splitlines()
        run["peers"] = [json.loads(line) for line in lines]
    free_memory()
    recorder = Recorder(arguments.out, arguments.parts, run)
    folders = {"draft": arguments.draft, "target": arguments.target}
    sources = {role: Source(folder, None, device, dtype) for role, folder in folders.items()}
    recorder.part("small", run, lambda: small(sources, settings, tokenizer, prompts))
    free_memory()
    for name in arguments.pairs:
        target_size, _, draft_size = name.partition("+")
        recorder.tell(f"{name}: making the weights")
        benchmark = PairBenchmark(
            replace(sources["draft"], size=size_of(draft_size)),
            replace(sources["target"], size=size_of(target_size)),
            settings,
            tokenizer=tokenizer,
            prompts=prompts,
            bandwidth=run["bytes_per_second"],
        )
        found = run["pairs"][name] = {"num_parameters": benchmark.num_parameters}
        for part in _PARTS[1:]:
            recorder.part(part, found, getattr(benchmark, part))
        benchmark.close()
    recorder.save()
    recorder.tell("done")
    print(markdown(run))
    if arguments.plot is not None:
        draw(run, arguments.plot)
    return int(recorder.has_failed)


if __name__ == "__main__":
    sys.exit(main())
