"""The quickstart pair, both models quantized: what comes out is the quantized target's own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations

import pytest
import torch

from specpipe.build.stages.quantize import quantize
from specpipe.checkpoints.formats import FORMATS
from specpipe.runtimes.pair.pair import Pair, PairOptions
from specpipe.runtimes.runtime import load_runtime
from specpipe.runtimes.torch.build import BuildTorchEngine
from specpipe.runtimes.torch.engine import TorchEngine
from specpipe.speculative.request import GREEDY, Request
from specpipe.text.tokenizer import Tokenizer
from tests.quantization.checkpoints import scheme, write_scales
from tests.runtimes.torch.test_engine import run
from tests.test_lossless import PROMPTS, ROOT

PAIRS = {  # formats of the draft and the target, and of the target's cache
    "fp8": ("int4_wo", "fp8_pc_pt", None),
    "AWQ": ("int8_wo", "int4_awq", None),
    "NVFP4": ("fp8_pc_pt", "nvfp4", "fp8"),
}
MAX_TOKENS = 16


@dataclass(frozen=True)
class Built:
    """A pair, its target's engine by itself, and what the target alone answers."""

    pair: Pair
    target: TorchEngine
    rounds_activations: bool
    alone: list[list[int]]


@pytest.fixture(scope="module", params=PAIRS)
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Built:
    work = tmp_path_factory.mktemp("pair")
    draft, target, kv_cache = PAIRS[request.param]
    for role, settings in (("draft", scheme(draft)), ("target", scheme(target, kv_cache=kv_cache))):
        hf, folder = ROOT / "models" / "python-code" / role, work / role
        for name in ("checkpoint", "engine"):
            (folder / name).mkdir(parents=True)
        scales = write_scales(folder / "scales", hf, settings)
        quantize(hf, scales, folder / "checkpoint", settings)
        BuildTorchEngine(
            role=role,  # type: ignore[arg-type]
            checkpoint=folder / "checkpoint",
            max_batch_size=3,
            max_seq_len=512,
            max_draft_len=4,
            max_num_tokens=256,
            device="cpu",
        ).run(folder / "engine")
    pair = load_runtime("torch").load_pair(
        work / "draft" / "engine",
        work / "target" / "engine",
        PairOptions(num_draft_tokens=4, adaptive=False, max_batch_size=3, num_threads=1),
        tokenizer().detokenizer,
    )
    alone, _ = answers(pair, num_draft_tokens=0, at_once=1)
    engine = TorchEngine.load(work / "target" / "engine")
    return Built(pair, engine, FORMATS[target].activations is not None, alone)


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.load(ROOT / "models" / "python-code" / "target")


@cache
def prompts() -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(tokenizer().encode(prompt)) for prompt in PROMPTS[:6])


def answers(pair: Pair, *, num_draft_tokens: int, at_once: int) -> tuple[list[list[int]], int]:
    """Returns the tokens of every answer, and how many draft tokens were accepted."""
    output: list[list[int]] = [[] for _ in prompts()]
    num_accepted = 0
    for first in range(0, len(output), at_once):
        for index in range(first, min(first + at_once, len(output))):
            pair.submit(
                Request(
                    request_id=str(index),
                    prompt_token_ids=prompts()[index],
                    max_tokens=MAX_TOKENS,
                    num_draft_tokens=num_draft_tokens,
                    sampling=GREEDY,
                    end_token_ids=tokenizer().end_token_ids,
                )
            )
        while pair.has_work():
            for chunk in pair.step():
                output[int(chunk.request_id)] += chunk.token_ids
                if chunk.statistics is not None:
                    num_accepted += chunk.statistics.total_accepted_draft_tokens
    return output, num_accepted


def first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int | None:
    pairs = enumerate(zip(ours, theirs, strict=True))
    return next((n for n, (a, b) in pairs if a != b), None)


def tie(target: TorchEngine, text: list[int], tokens: tuple[int, int]) -> tuple[float, float]:
    """Returns by how much the target prefers one token after a text, and how sure it is of that.

    That is, by how much its own logits there differ with the shape of the forward.
    """
    ends = torch.stack([run(target, [text], [[size]])[0][-1] for size in (len(text), 5, 2, 1)])
    differences = torch.stack([(a - b).abs() for a, b in combinations(ends, 2)])
    margin = (ends[0][tokens[0]] - ends[0][tokens[1]]).abs()
    return margin.item(), torch.quantile(differences.flatten(), 0.999).item()


@pytest.mark.parametrize("at_once", [1, 3])
@pytest.mark.parametrize("num_draft_tokens", [1, 4])
def test_greedy_output_is_that_of_the_target_alone(
    built: Built, num_draft_tokens: int, at_once: int
) -> None:
    """Rounded activations make more ties.

    The last bit of a sum, which depends on the shape of a forward, may be worth a step of FP8.
    """
    output, num_accepted = answers(built.pair, num_draft_tokens=num_draft_tokens, at_once=at_once)
    assert num_accepted > 0
    for ours, theirs, prompt in zip(output, built.alone, prompts(), strict=True):
        position = first_difference(ours, theirs)
        if position is not None:
            assert built.rounds_activations
            text = [*prompt, *theirs[:position]]
            margin, noise = tie(built.target, text, (ours[position], theirs[position]))
            assert margin <= noise
