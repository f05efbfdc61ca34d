"""The small pair of benchmarks.gpu as it is: fused engines and rounds against plain ones."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import torch

from benchmarks.gpu.models import FusedModel, Source, plain_engine
from benchmarks.gpu.pair import ONE_K, LoadedPair, Settings
from benchmarks.gpu.timing import answer, compare, request
from specpipe.runtimes.torch.engine import TorchEngine
from specpipe.runtimes.torch.fused.engine import FusedEngine
from specpipe.text.tokenizer import Tokenizer

_NUM_TOKENS = 64


def small(
    sources: dict[str, Source], settings: Settings, tokenizer: Tokenizer, prompts: list[list[int]]
) -> dict[str, Any]:
    """Compares fused with plain engines along the texts of the plain ones, and rounds with both."""
    num_tokens = min(_NUM_TOKENS, settings.max_tokens)
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
            texts = [_greedy(plain, prompt, num_tokens) for prompt in prompts]
            limits = {"max_seq_len": settings.longest_text, "max_draft_len": 0}
            fused = models[role].engine(**limits)
            logits = [
                torch.cat([_along(engine, p, t) for p, t in zip(prompts, texts, strict=True)])
                for engine in (fused, plain)
            ]
            of_dtype[role] = asdict(compare(*logits))
        k = min(ONE_K, settings.most_draft_tokens)
        few = replace(settings, num_draft_tokens=[k])
        pair = LoadedPair(models["draft"], models["target"], few, tokenizer).fixed
        answers = [answer(pair, request(p, num_tokens, k)).token_ids for p in prompts]
        of_dtype["rounds"] = {
            "num_draft_tokens": k,
            "num_answers": len(answers),
            "num_different": sum(list(a) != t for a, t in zip(answers, texts, strict=True)),
        }
    return found


def _greedy(engine: TorchEngine, prompt: list[int], num_tokens: int) -> list[int]:
    """The best token after a prompt, and after each of those."""
    sequence = engine.allocate(prompt_length=len(prompt), max_tokens=len(prompt) + num_tokens)
    token_ids: list[int] = []
    tokens = prompt
    for _ in range(num_tokens):
        tokens = [int(engine.forward([(sequence, tokens)], [1]).argmax())]
        token_ids += tokens
    engine.free(sequence)
    return token_ids


def _along(engine: TorchEngine | FusedEngine, prompt: list[int], text: list[int]) -> torch.Tensor:
    """The logits [N, V] from which each token of a text would be chosen."""
    tokens = [*prompt, *text[:-1]]
    sequence = engine.allocate(prompt_length=len(prompt), max_tokens=len(tokens))
    logits = engine.forward([(sequence, tokens)], [len(text)])
    engine.free(sequence)
    return logits
